"""A token is in the loss if and only if the policy sampled it, in whatever field it is stored."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from composed import composed
from dumps import (
    COLUMNS,
    assert_refused,
    atropos_group,
    episode,
    gym_row,
    hosted_row,
    in_order,
    node,
    own_row,
    trl_dump,
    verifiers_row,
    verl_row,
    write_lines,
)

from headrace.pipeline import make_report
from headrace.pipeline.tools.dumps.readers import SourceError, open_source, regrade
from headrace.pipeline.tools.report import write_dump
from headrace.transforms import Status

pytestmark = pytest.mark.slow

MASK = ("masks", "all_assistant_mask")
IN_LOSS = ("headrace", "in_loss")


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A tokenizer of which each character is one token."""
    package = pytest.importorskip("tokenizers")
    vocabulary = {"?": 0} | {chr(code): code for code in range(1, 127) if chr(code) != "?"}
    tokenizer = package.Tokenizer(package.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = package.pre_tokenizers.Split(package.Regex(r"[\s\S]"), "isolated")
    path = tmp_path_factory.mktemp("letters") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def only(*arguments, **options):
    ((_, batch),) = open_source(*arguments, **options)
    return batch


def trained(batch):
    """Tokens in the loss of each row."""
    return batch[MASK].sum(1).tolist()


def trained_text(batch, row):
    return "".join(
        chr(token or ord("?")) for token in batch["tokens", "full"][row][batch[MASK][row]].tolist()
    )


# -- the structures of messages --------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
NESTED = {"function": {"name": "find", "arguments": {"where": {"city": ["Köln"]}, "most": 3}}}
ARGUMENTS = '{"where": {"city": ["Köln"]}, "most": 3}'
IMAGE = {"type": "image_url", "image_url": {"url": "data:..."}}
# An assistant's message, and the texts that the policy sampled, in order.
STRUCTURES = {
    "text": ({"content": "four"}, "four"),
    "null": ({"content": None}, ""),
    "empty": ({"content": ""}, ""),
    "typed parts": (
        {"content": [{"type": "text", "text": "fo"}, IMAGE, {"type": "text", "text": "ur"}]},
        "four",
    ),
    "thinking part": (
        {"content": [{"type": "thinking", "thinking": "Two."}, {"type": "text", "text": "four"}]},
        "Two.four",
    ),
    "tool use part": (
        {"content": [{"type": "tool_use", "id": "x", "name": "add", "input": {"a": 2}}]},
        'add{"a": 2}',
    ),
    "result inside": (
        {"content": [{"type": "text", "text": "so"}, {"type": "web_search_tool_result", "content": "found"}]},
        "so",
    ),
    "refusal": ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
    "reasoning_content": ({"content": None, "reasoning_content": "Two."}, "Two."),
    "reasoning": ({"content": "four", "reasoning": "Two."}, "Two.four"),
    "reasoning in two fields": (
        {"content": "four", "reasoning": "Two.", "reasoning_content": "Two."},
        "Two.four",
    ),
    "reasoning in both": (
        {"content": [{"type": "thinking", "thinking": "Two."}], "reasoning_content": "Two."},
        "Two.",
    ),
    "reasoning in the text": (
        {"content": "<think>\nTwo.\n</think>\nfour", "reasoning_content": "Two."},
        "<think>\nTwo.\n</think>\nfour",
    ),
    "a call": ({"content": None, "tool_calls": [CALL]}, 'add{"a": 2}'),
    "several calls": ({"content": "Let", "tool_calls": [CALL, CALL]}, 'Letadd{"a": 2}add{"a": 2}'),
    "nested arguments": ({"tool_calls": [NESTED]}, f"find{ARGUMENTS}"),
    "calls as JSON": ({"content": "", "tool_calls": [json.dumps(CALL)]}, 'add{"a": 2}'),
    "flat call": ({"content": "", "tool_calls": [CALL["function"]]}, 'add{"a": 2}'),
    "no arguments": ({"content": "", "tool_calls": [{"function": {"name": "now"}}]}, "now"),
    "one old call": ({"content": None, "function_call": {"name": "add", "arguments": "{}"}}, "add{}"),
    "all": (
        {"content": "so", "reasoning_content": "Two.", "tool_calls": [CALL, NESTED]},
        f'Two.soadd{{"a": 2}}find{ARGUMENTS}',
    ),
}
TOOL = {"role": "tool", "content": "tool says", "tool_call_id": "c1"}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_an_assistant_sampled_is_in_the_loss_and_nothing_else_is(structure, letters, tmp_path):
    """In every reader of messages: the same texts, in the same order."""
    message, expected = STRUCTURES[structure]
    completion = [{"role": "assistant", **message}, TOOL, {"role": "user", "content": "and?"}]
    text = expected.encode("ascii", "replace").decode()  # the tokenizer's unknown letter
    rows = {
        "verifiers": verifiers_row(0, 1.0, completion=completion),
        "prime_hosted": hosted_row(0, 0, 1.0, completion=json.dumps(completion)),
        "table": own_row(0, 1.0, output=completion),
    }
    for name, row in rows.items():
        options = {"columns": COLUMNS} if name == "table" else {}
        path = write_lines(tmp_path / f"{name}.jsonl", [row])
        batch = only(path, name, tokenizer=letters, **options)
        assert trained_text(batch, 0) == text, name
        shown = batch["response_text"][0]
        assert all(part in shown for part in ("tool says", "user: and?")), name
        if structure not in ("null", "empty"):
            assert all(each in shown for each in ("find", ARGUMENTS) if each in expected), name
            assert only(path, name, **options)["response_text"][0] == shown
    nodes = [
        node(None, "user", [], [], message={"role": "user", "content": "2+2?"}),
        node(0, "assistant", [], [], message=completion[0], sampled=True),
        node(1, "tool", [], [], message=TOOL),
    ]
    lines = [episode("g", "a", {"r": {"score": 1.0}}, trace={"nodes": nodes})]
    batch = only(write_lines(tmp_path / "traces.jsonl", lines), tokenizer=letters)
    assert trained_text(batch, 0) == text


def test_calls_and_reasoning_of_a_table_of_trl_are_read_without_the_nulls_of_arrow(letters, tmp_path):
    """Arrow gives the arguments of each call the keys of all others, as null."""
    calls = [
        {"function": {"name": "f", "arguments": {"a": 1}}},
        {"function": {"name": "g", "arguments": {"b": 2}}},
    ]
    completions = [
        [{"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}, TOOL]
        for call in calls
    ]
    path = trl_dump(tmp_path / "c.parquet", completion=completions)
    batch = only(path, group_by="prompt", tokenizer=letters)
    assert [trained_text(batch, row) for row in range(2)] == ['hmf{"a": 1}', 'hmg{"b": 2}']


def test_a_part_of_an_assistant_that_is_not_known_is_refused(tmp_path):
    for message, why in (
        ({"content": [{"type": "strange", "data": "x"}]}, "has a known type; found 'strange'"),
        ({"content": 3}, "must be a string or a list of parts; found int"),
        ({"tool_calls": [{"id": "c"}]}, "must have the 'name' of its tool"),
        ({"tool_calls": ["add(1)"]}, "a string in 'tool_calls' must be JSON"),
        ({"reasoning": 3}, "'reasoning' must be a text or a list of parts"),
    ):
        rows = [verifiers_row(0, 1.0, completion=[{"role": "assistant", **message}])]
        assert_refused(
            rf"results.jsonl:1, completion: .*{why}", write_lines(tmp_path / "results.jsonl", rows)
        )
    user = [{"role": "user", "content": [{"type": "strange", "data": "x"}]}]
    batch = only(write_lines(tmp_path / "results.jsonl", [verifiers_row(0, 1.0, prompt=user)]))
    assert batch["prompt_text"][0] == "user: [strange]"


def test_the_grader_and_the_dump_of_headrace_keep_all_parts(letters, tmp_path):
    """A dump of headrace that has no lengths counts as the dump it was made from."""
    rows = []
    for at, (message, _) in enumerate(STRUCTURES.values()):
        rows.append(verifiers_row(0, float(at), completion=[{"role": "assistant", **message}, TOOL]))
    path = write_lines(tmp_path / "results.jsonl", rows)
    batch, seen = only(path), []
    regrade(batch, lambda prompts, responses: [seen.append(responses) or 0.0 for _ in prompts])
    assert sum('<tool_call>\nadd({"a": 2})\n</tool_call>' in text for text in seen[0]) == 6
    assert sum("<think>\nTwo.\n</think>" in text for text in seen[0]) == 7
    report = make_report(composed("pipeline=grpo", f"pipeline.stages.gate.group_size={len(rows)}").run(batch))
    expected = [len(text) for _, text in STRUCTURES.values()]
    assert trained(only(path, tokenizer=letters)) == expected
    for kind in ("parquet", "jsonl"):
        write_dump(report, tmp_path / kind, format=kind)
        again = only(tmp_path / kind, tokenizer=letters)
        assert trained(again) == expected
        assert list(again["response_text"]) == list(batch["response_text"])


# -- a tokenizer whose chat template marks what the assistant says -----------------------------------------

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.reasoning_content or '' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}@{{ c.function.name }}{{ c.function.arguments }}{% endfor %};"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def chat_folder(letters, folder, template):
    transformers = pytest.importorskip("transformers")
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(letters), unk_token="?")
    made.chat_template = template
    made.save_pretrained(folder)
    return made, folder


CHATS = [
    [{"role": "assistant", "content": "four"}],
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        TOOL,
        {"role": "assistant", "content": "4"},
    ],
    [
        {"role": "assistant", "content": "so", "reasoning_content": "Two."},
        TOOL,
        {"role": "user", "content": "?"},
    ],
]


def test_the_mask_of_a_chat_template_decides_and_the_page_says_so(letters, tmp_path):
    made, folder = chat_folder(letters, tmp_path / "model", TEMPLATE)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    rows = [verifiers_row(0, float(at), prompt=asked, completion=each) for at, each in enumerate(CHATS)]
    path = write_lines(tmp_path / "results.jsonl", rows)
    source = open_source(path, tokenizer=folder)
    ((_, batch),) = source
    how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    for row, completion in enumerate(CHATS):
        own = made.apply_chat_template(asked + completion, **how)
        length = len(own["input_ids"])
        assert batch["tokens", "full"][row][-length:].tolist() == own["input_ids"]
        assert batch[MASK][row][-length:].int().tolist() == own["assistant_masks"]
        assert not batch[MASK][row][:-length].any()
    assert trained(batch) == [5, 13 + 2, 7]  # four; @add{"a": 2}; 4; Two.so;
    assert source.notices == [
        "The tokens in the loss of 3 rows are those that the tokenizer's chat template marks."
    ]
    source = open_source(path, tokenizer=letters)
    ((_, batch),) = source
    assert trained(batch) == [4, 11 + 1, 6]
    assert source.notices[0].startswith(
        "The tokens in the loss of 3 rows were counted text by text: contents, "
    )
    unmarked = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    _, plain = chat_folder(letters, tmp_path / "plain", unmarked)
    assert trained(only(path, tokenizer=plain)) == [4, 11 + 1, 6]


def test_the_assistant_of_the_prompt_is_in_no_loss(letters, tmp_path):
    """The chat template marks it, too: an example in the prompt, or a turn that an earlier row trains."""
    _, folder = chat_folder(letters, tmp_path / "model", TEMPLATE)
    shot = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two"}]
    rows = [verifiers_row(0, 1.0, prompt=[*shot, {"role": "user", "content": "?"}], completion=CHATS[1])]
    batch = only(write_lines(tmp_path / "results.jsonl", rows), tokenizer=folder)
    assert trained_text(batch, 0) == '@add{"a": 2};4;'
    _, folder = chat_folder(
        letters,
        tmp_path / "two",
        TEMPLATE.replace("{{ m.content or '' }}", "x{% endgeneration %}|{% generation %}"),
    )
    assert_refused("found . runs", tmp_path / "results.jsonl", tokenizer=folder)
    _, folder = chat_folder(
        letters, tmp_path / "bad", "{% generation %}{{ raise_exception('no tools') }}{% endgeneration %}"
    )
    assert_refused(
        "chat template must take the messages; found no tools", tmp_path / "results.jsonl", tokenizer=folder
    )


# -- branches of prime-rl ----------------------------------------------------------------------------------


def test_tokens_that_branches_share_train_once(tmp_path):
    """A turn of four tokens, after which the rollout forks: 4 + 2 + 1 tokens train, not 4 + 2 + 4 + 1."""
    fork = [
        node(None, "user", [1], [False]),
        node(0, "assistant", [2, 3, 4, 5], [True] * 4),
        node(1, "tool", [6], [False]),
        node(2, "assistant", [7, 8], [True] * 2),
        node(1, "tool", [9], [False]),
        node(4, "assistant", [10], [True]),
        node(1, "tool", [11], [False]),  # a branch without tokens of its own is no sample
    ]
    rows = [episode("g", name, {"r": {"score": 1.0}}, trace={"nodes": fork}) for name in "ab"]
    batch = only(write_lines(tmp_path / "traces.jsonl", rows))
    assert trained(batch) == [4 + 2, 1] * 2
    assert in_order(batch["rollout_id"]) == [0, 0, 1, 1]
    assert batch["tokens", "full"][1].tolist() == [0, 1, 2, 3, 4, 5, 9, 10]
    assert batch["log_probs", "full"][1].isfinite().int().tolist() == [0, 0, 1, 1, 1, 1, 0, 1]
    for at, each in enumerate(fork):
        each |= {
            "token_ids": [],
            "mask": [],
            "logprobs": [],
            "message": {"role": "user", "content": f"text {at}"},
        }
    rows = [episode("g", "a", {"r": {"score": 1.0}}, trace={"nodes": fork})]
    found = [
        json.loads(each) for each in only(write_lines(tmp_path / "traces.jsonl", rows))["response_parts"]
    ]
    assert found[0] == [[True, "text 1"], [False, "text 2"], [True, "text 3"]]
    assert found[1] == [[False, "text 1"], [False, "text 4"], [True, "text 5"]]


# -- each format, by hand ----------------------------------------------------------------------------------


def test_verifiers_results_may_name_the_example_id(tmp_path):
    rows = [{**verifiers_row(at // 2, float(at % 2)), "id": at // 2} for at in range(4)]
    for row in rows:
        del row["example_id"]
    source = open_source(write_lines(tmp_path / "results.jsonl", rows))
    ((step, batch),) = source
    assert (source.format, step) == ("verifiers", 0)
    assert list(batch["group_label"]) == ["math/0", "math/0", "math/1", "math/1"]


def test_nemo_gym_rows_are_grouped_by_task_and_their_items_are_messages(letters, tmp_path):
    rows = [gym_row(1, 0, 0.5), gym_row(0, 1, 1.0), gym_row(1, 1, 0.0), gym_row(0, 0, 0.0)]
    rows[1]["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
    rows[2]["response"] = {"error": {"code": "server_error"}, "output": None}
    source = open_source(write_lines(tmp_path / "rollouts.jsonl", rows), tokenizer=letters)
    ((_, batch),) = source
    assert source.format == "nemo_gym"
    assert list(batch["group_label"]) == ["1", "0", "1", "0"]
    assert list(batch["rollout_label"]) == ["1/0", "0/1", "1/1", "0/0"]
    ends = [Status.COMPLETED, Status.TRUNCATED, Status.FAILED, Status.COMPLETED]
    assert batch["status"].tolist() == ends
    assert trained_text(batch, 0) == 'Add.add{"a": 2}4'
    assert trained(batch)[2] == 0
    call = '<tool_call>\nadd({"a": 2})\n</tool_call>'
    said = f"assistant: <think>\nAdd.\n</think>\n{call}\ntool: four\nassistant: 4"
    assert batch["response_text"][0] == said
    again = write_lines(tmp_path / "rollouts.jsonl", [gym_row(0, 0, 1.0)] * 2)
    assert_refused("a record is there once in a step", again)
    strange = gym_row(0, 0, 1.0)
    strange["response"]["output"].append({"type": "strange"})
    assert_refused("a known type; found 'strange'", write_lines(tmp_path / "rollouts.jsonl", [strange]))


def test_nemo_gym_items_with_tokens_are_read_as_tokens(tmp_path):
    """Two calls that continue one another, and one whose prompt does not: it is another segment."""
    row = gym_row(0, 0, 1.0)
    given = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 9], [7, 8])]
    row["response"]["output"] = [
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "x"}],
            "prompt_token_ids": prompt,
            "generation_token_ids": sampled,
            "generation_log_probs": [-0.5] * len(sampled),
        }
        for prompt, sampled in given
    ]
    batch = only(write_lines(tmp_path / "rollouts.jsonl", [row]))
    assert batch["tokens", "full"].tolist() == [[1, 2, 3, 4, 5, 6], [0, 0, 1, 9, 7, 8]]
    assert batch[MASK].int().tolist() == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1]]
    assert in_order(batch["rollout_id"]) == [0, 0]
    assert batch["log_probs", "full"].isfinite().equal(batch[MASK])


def test_samples_of_hosted_training_are_read_of_parquet_and_lines(letters, tmp_path):
    rows = [hosted_row(at // 2, at, float(at % 2), advantage=at / 8, is_truncated=at == 3) for at in range(4)]
    for row in rows:
        row["error"] = None
    rows[2] |= {"error": "Timeout", "reward": None, "completion": None, "advantage": None}
    write_lines(tmp_path / "lines" / "samples.jsonl", rows)
    (tmp_path / "table").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "table" / "samples.parquet")
    for folder in ("lines", "table"):
        source = open_source(tmp_path / folder, tokenizer=letters)
        ((step, batch),) = source
        assert (source.format, step) == ("prime_hosted", 3)
        assert list(batch["group_label"]) == ["math/0", "math/0", "math/1", "math/1"]
        ends = [Status.COMPLETED, Status.COMPLETED, Status.FAILED, Status.TRUNCATED]
        assert batch["status"].tolist() == ends
        assert batch["logged_advantage"].nan_to_num(nan=-1).tolist() == [0.0, 0.125, -1.0, 0.375]
        assert trained(batch) == [1, 1, 0, 1]
        assert batch["prompt_text"][0] == "user: 2+2?"


def test_a_group_of_atropos_is_a_line(tmp_path):
    messages = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": str(at)}] for at in range(2)
    ]
    rows = [
        atropos_group([1.0, 0.0], messages=messages, advantages=[[0.0, 0.0, 0.5, 0.5], [0.25] * 4]),
        atropos_group([0.5, 0.5], messages=messages, advantages=[[1, 1, 0.5, 0.75], [2.0] * 4]),
    ]
    rows[1]["masks"] = [[0, 1, 0, 1], [0, 0, 0, 0]]
    rows[0]["overrides"] = [{"set_advantage_to_zero": False}, {"set_advantage_to_zero": True}]
    source = open_source(write_lines(tmp_path / "groups.jsonl", rows))
    ((_, batch),) = source
    assert source.format == "atropos"
    assert in_order(batch["group_id"]) == [0, 0, 1, 1]
    assert batch["next", "reward"].flatten().tolist() == [1.0, 0.0, 0.5, 0.5]
    assert batch[MASK].int().tolist() == [[0, 0, 1, 1], [0] * 4, [0, 1, 0, 1], [0] * 4]
    found = batch["logged_advantage"]
    assert found[:2].tolist() == [0.5, 0.25]
    assert found[2:].isnan().all()
    assert batch["response_text"][1] == "assistant: 1"
    for change, why in (
        ({"scores": [1.0]}, "'tokens' must have one entry for each score"),
        ({"masks": [[-100, -100, 3, 9], [-100, 7, 4, 9]]}, "'mask' must have the token itself or -100"),
        ({"masks": [[1], [1, 1, 1, 1]]}, "'mask' must be a list as long as the tokens"),
    ):
        path = write_lines(tmp_path / "groups.jsonl", [{**atropos_group([1.0, 0.0]), **change}])
        assert_refused(why, path)


# -- a file of one's own -----------------------------------------------------------------------------------


def test_a_table_is_read_in_each_shape(tmp_path):
    """A line is a rollout, has a list of rollouts, or has lists of values; numbers may be nested."""
    rewards, texts = [[1.0, 0.0], [0.5, 0.25]], [["4", "5"], ["6", "7"]]
    flat = [
        {"problem_id": group, "metrics": {"score": rewards[group][at]}, "output": texts[group][at], "k": at}
        for group in range(2)
        for at in range(2)
    ]
    nested = [
        {
            "prompt": f"{g}?",
            "samples": [{"score": r, "output": t} for r, t in zip(rewards[g], texts[g], strict=True)],
        }
        for g in range(2)
    ]
    lists = [{"prompt": f"{g}?", "scores": rewards[g], "outputs": texts[g]} for g in range(2)]
    shapes = (
        (flat, {**COLUMNS, "rollout": "k"}),
        (nested, {"rollouts": "samples", "prompt": "prompt", "reward": "score", "response": "output"}),
        (lists, {"prompt": "prompt", "reward": "scores", "response": "outputs"}),
    )
    for number, (rows, columns) in enumerate(shapes):
        for suffix in ("jsonl", "parquet"):
            path = tmp_path / f"{number}.{suffix}"
            if suffix == "jsonl":
                write_lines(path, rows)
            else:
                pq.write_table(pa.Table.from_pylist(rows), path)
            batch = only(path, columns=columns)
            assert in_order(batch["group_id"]) == [0, 0, 1, 1]
            assert batch["next", "reward"].flatten().tolist() == [1.0, 0.0, 0.5, 0.25]
            assert list(batch["response_text"]) == ["4", "5", "6", "7"]
            if number:
                assert list(batch["prompt_text"]) == ["0?", "0?", "1?", "1?"]
    plain = {"prompt": "prompt", "reward": "correct", "response": "output"}
    rows = [{"prompt": "?", "correct": at == 0, "output": str(at)} for at in range(2)]
    batch = only(write_lines(tmp_path / "b.jsonl", rows), columns=plain, group_by="prompt")
    assert batch["next", "reward"].flatten().tolist() == [1.0, 0.0]


def test_a_table_has_ends_steps_advantages_and_lengths(tmp_path):
    columns = {
        **COLUMNS,
        "status": "why",
        "step": "it",
        "advantage": "adv",
        "length": "n",
        "ground_truth": "gold",
    }
    ends = {"stop": 0, "length": Status.TRUNCATED, "error": Status.FAILED, "abort": Status.ABORTED}
    rows = [
        own_row("p", 1.0, why=why, it=step, adv=0.5, n=2 + step, gold=["4"], tag="x")
        for step in range(2)
        for why in ends
    ]
    for (step, batch), at in zip(
        open_source(write_lines(tmp_path / "a.jsonl", rows), columns=columns), range(2), strict=True
    ):
        assert step == at
        assert batch["status"].tolist() == list(ends.values())
        assert batch["logged_advantage"].tolist() == [0.5] * 4
        assert trained(batch) == [2 + at] * 4
        assert list(batch["ground_truth"]) == ['["4"]'] * 4
        assert list(batch["other_columns"]) == ['{"tag": "x"}'] * 4
    rows = [own_row("p", 1.0, cut=at == 1) for at in range(2)]
    batch = only(write_lines(tmp_path / "a.jsonl", rows), columns={**COLUMNS, "truncated": "cut"})
    assert batch["status"].tolist() == [Status.COMPLETED, Status.TRUNCATED]


def test_a_conversation_in_one_column_is_split_at_the_first_of_the_assistant(letters, tmp_path):
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}, TOOL]
    for value in (messages, json.dumps(messages)):
        path = write_lines(tmp_path / "a.jsonl", [own_row(0, 1.0, output=value)])
        batch = only(path, columns=COLUMNS, tokenizer=letters)
        assert (batch["prompt_text"][0], trained_text(batch, 0)) == ("user: 2+2?", "4")


@pytest.mark.parametrize(
    ("columns", "change", "message"),
    [
        ({"reward": "r"}, {}, r"the format table needs columns.response, such as source\.columns="),
        ({**COLUMNS, "rewards": "r"}, {}, "columns has no 'rewards'"),
        ({**COLUMNS, "step": 3}, {}, "columns.step must be the name of a column; got 3"),
        (
            {**COLUMNS, "reward": "metrics.nope"},
            {},
            r"'metrics.nope' \(source.columns.reward\) is required, a finite",
        ),
        (
            COLUMNS,
            {"metrics": {"score": "high"}},
            r"'metrics.score' \(source.columns.reward\) must be a finite",
        ),
        (COLUMNS, {"problem_id": None}, r"'problem_id' \(source.columns.group\) is required"),
        (COLUMNS, {"output": None}, r"'output' \(source.columns.response\) is required"),
        (
            {**COLUMNS, "rollouts": "output"},
            {},
            r"'output' \(source.columns.rollouts\) must be a list of objects",
        ),
        ({**COLUMNS, "status": "s"}, {"s": "odd"}, "'status' must be one of completed"),
        (COLUMNS, {"metrics": {"score": [1, 2]}, "output": ["4"]}, "a list as long as that of the rewards"),
        ({**COLUMNS, "rollout": "k"}, {"k": 1}, "a record is there once in a step"),
        ({"reward": "metrics.score", "response": "output"}, {}, "a sample needs a group"),
    ],
)
def test_a_table_that_does_not_fit_its_columns_is_refused(columns, change, message, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [own_row(0, 1.0, **change)] * 2)
    with pytest.raises((ValueError, SourceError), match=message):
        list(open_source(path, columns=columns))


# -- groups by the order of rows ---------------------------------------------------------------------------


def test_groups_by_order_are_runs_of_rows(tmp_path):
    """Prompts of equal text, because images are not dumped. It is no default, and divides each step."""
    rows = [verl_row(None, float(at % 3), prompt="What is this?") for at in range(12)]
    path = write_lines(tmp_path / "7.jsonl", rows)
    source = open_source(path, group_by="order", group_size=4)
    ((_, batch),) = source
    assert in_order(batch["group_id"]) == [at // 4 for at in range(12)]
    assert list(batch["group_label"])[4] == "What is this? #2"
    assert source.notices[0].startswith("Groups come from the order of the rows: each 4 rollouts next to one")
    assert_refused(
        "divides the rollouts of each step; found 12 .*group_size=5", path, group_by="order", group_size=5
    )
    assert_refused("a sample needs a group", path)
    rows[5]["input"] = "another"
    write_lines(path, rows)
    assert_refused(
        "7.jsonl:6: .* have one prompt; found another prompt", path, group_by="order", group_size=4
    )
    for options, why in (
        ({"group_by": "order"}, "so group_size is required"),
        ({"group_by": "order", "group_size": 4, "skip_bad": True}, "needs every record"),
    ):
        with pytest.raises(ValueError, match=why):
            open_source(path, **options)
    named = write_lines(tmp_path / "8.jsonl", [verl_row("a_0_0", 1.0)])
    assert_refused("order is for rows without a group; found", named, group_by="order", group_size=1)


def test_a_step_that_is_one_huge_group_of_one_text_is_suspicious(tmp_path):
    rows = [verl_row(None, float(at % 3), prompt="What is this?") for at in range(1024)]
    path = write_lines(tmp_path / "7.jsonl", rows)
    for how in ("prompt", "order"):
        source = open_source(path, group_by=how, group_size=1024)
        list(source)
        assert (
            "all 1,024 rollouts have one prompt text, and are one group. This is suspicious"
            in source.notices[-1]
        )
    source = open_source(path, group_by="order", group_size=8)
    list(source)
    assert len(source.notices) == 1
