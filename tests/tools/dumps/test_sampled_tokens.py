"""A token is in the loss if and only if the policy sampled it, in whatever field it is stored."""

from __future__ import annotations

import html
import json

import pytest
from command import told
from composed import composed, configure
from dumps import (
    COLUMNS,
    assert_refused,
    episode,
    gym_row,
    hosted_row,
    in_order,
    node,
    own_row,
    read_one,
    trained,
    trained_text,
    trl_dump,
    verifiers_row,
    verl_row,
    write_lines,
)

from headrace.pipeline import make_report
from headrace.pipeline.tools.dumps.readers import open_dump, regrade
from headrace.pipeline.tools.replay import replay_dump
from headrace.pipeline.tools.report import write_dump

pytestmark = pytest.mark.slow

MASK = ("masks", "all_assistant_mask")


# -- the structures of messages --------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
NESTED = {"function": {"name": "find", "arguments": {"where": {"city": ["Köln"]}, "most": 3}}}
ARGUMENTS = '{"where": {"city": ["Köln"]}, "most": 3}'
IMAGE = {"type": "image_url", "image_url": {"url": "data:..."}}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
MISTRAL = (
    f'[TOOL_CALLS][{{"name": "add", "arguments": {{"a": 2}}}}, {{"name": "find", "arguments": {ARGUMENTS}}}]'
)
TAGS = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
# Messages of an assistant, each with the texts that the policy sampled, in order.
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
    "reasoning before the end of a thought": (
        {"content": "Two.\n</think>\n\nfour", "reasoning_content": "\nTwo.\n"},
        "Two.\n</think>\n\nfour",
    ),
    "a thought that is cut off": (
        {"content": "<think>\nTwo", "reasoning": "Two"},
        "<think>\nTwo",
    ),
    "two thoughts in the text": (
        {"content": "[THINK]a[/THINK]so[THINK]b[/THINK]four", "reasoning": "a\nb"},
        "[THINK]a[/THINK]so[THINK]b[/THINK]four",
    ),
    "reasoning that the answer repeats": (
        {"content": "Two.</think>four", "reasoning": "four"},
        "fourTwo.</think>four",
    ),
    "reasoning that is a part of a thought": (
        {"content": "Two.</think>four", "reasoning": "wo"},
        "woTwo.</think>four",
    ),
    "a call": ({"content": None, "tool_calls": [CALL]}, 'add{"a": 2}'),
    "several calls": ({"content": "Let", "tool_calls": [CALL, CALL]}, 'Letadd{"a": 2}add{"a": 2}'),
    "nested arguments": ({"tool_calls": [NESTED]}, f"find{ARGUMENTS}"),
    "calls as JSON": ({"content": "", "tool_calls": [json.dumps(CALL)]}, 'add{"a": 2}'),
    "flat call": ({"content": "", "tool_calls": [CALL["function"]]}, 'add{"a": 2}'),
    "no arguments": ({"content": "", "tool_calls": [{"function": {"name": "now"}}]}, "now"),
    "one old call": ({"content": None, "function_call": {"name": "add", "arguments": "{}"}}, "add{}"),
    "a call in the text, too": ({"content": f"so{HERMES}", "tool_calls": [CALL]}, f"so{HERMES}"),
    "a call in the text, spelled otherwise": (
        {"content": '<tool_call>{"arguments":{"a":2.0},"name":"add"}', "tool_calls": [CALL]},
        '<tool_call>{"arguments":{"a":2.0},"name":"add"}',
    ),
    "two equal calls, one of them in the text": (
        {"content": HERMES, "tool_calls": [CALL, CALL]},
        f'{HERMES}add{{"a": 2}}',
    ),
    "two calls in the text": ({"content": MISTRAL, "tool_calls": [CALL, NESTED]}, MISTRAL.replace("ö", "?")),
    "each call with its name before it": (
        {"content": '[TOOL_CALLS]add[ARGS]{"a": 2}[TOOL_CALLS]add{"a": 2}', "tool_calls": [CALL, CALL]},
        '[TOOL_CALLS]add[ARGS]{"a": 2}[TOOL_CALLS]add{"a": 2}',
    ),
    "a call of tags": ({"content": f"so{TAGS}", "tool_calls": [CALL]}, f"so{TAGS}"),
    "a content that is a call": (
        {"content": '{"name": "add", "parameters": {"a": 2}}', "tool_calls": [CALL]},
        '{"name": "add", "parameters": {"a": 2}}',
    ),
    "a content that is calls in Python": ({"content": "[add(a=2)]", "tool_calls": [CALL]}, "[add(a=2)]"),
    "another call than that in the text": (
        {"content": HERMES, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 22}'}}]},
        f'{HERMES}add{{"a": 22}}',
    ),
    "another call than that of tags": (
        {"content": TAGS, "tool_calls": [{"function": {"name": "add", "arguments": '{"b": 2}'}}]},
        f'{TAGS}add{{"b": 2}}',
    ),
    "a call in the text with a longer value": (
        {"content": TAGS.replace("2", "22"), "tool_calls": [CALL]},
        f'{TAGS.replace("2", "22")}add{{"a": 2}}',
    ),
    "another tool than that in the text": (
        {"content": HERMES, "tool_calls": [{"function": {"name": "sub", "arguments": '{"a": 2}'}}]},
        f'{HERMES}sub{{"a": 2}}',
    ),
    "an escaped value in the text": (
        {
            "content": r'[TOOL_CALLS]say{"it": "a \"b\""}',
            "tool_calls": [{"name": "say", "input": {"it": 'a "b"'}}],
        },
        r'[TOOL_CALLS]say{"it": "a \"b\""}',
    ),
    "a value with escapes in the text": (
        {
            "content": r'[TOOL_CALLS]say{"it": "K\u00f6ln"}',
            "tool_calls": [{"name": "say", "input": {"it": "Köln"}}],
        },
        r'[TOOL_CALLS]say{"it": "K\u00f6ln"}',
    ),
    "a value that is null": (
        {"content": HERMES, "tool_calls": [{"name": "add", "input": {"a": 2, "b": None}}]},
        HERMES,
    ),
    "a part that is a call in the text, too": (
        {
            "content": [
                {"type": "text", "text": HERMES},
                {"type": "tool_use", "name": "add", "input": {"a": 2}},
            ]
        },
        HERMES,
    ),
    "an empty thought in the text": (
        {"content": "<think>\n\n</think>four", "reasoning": "\n\n"},
        "<think>\n\n</think>four",
    ),
    "reasoning of white space": ({"content": "four", "reasoning": "\n"}, "\nfour"),
    "words of a call that are no call": (
        {"content": "I add a and 2", "tool_calls": [CALL]},
        'I add a and 2add{"a": 2}',
    ),
    "a call in two fields": (
        {"content": [{"type": "tool_use", "name": "add", "input": {"a": 2}}], "tool_calls": [CALL, CALL]},
        'add{"a": 2}add{"a": 2}',
    ),
    "all in the text, too": (
        {"content": f"Two.</think>{HERMES}", "reasoning": "Two.", "tool_calls": [CALL]},
        f"Two.</think>{HERMES}",
    ),
    "all": (
        {"content": "so", "reasoning_content": "Two.", "tool_calls": [CALL, NESTED]},
        f'Two.soadd{{"a": 2}}find{ARGUMENTS}',
    ),
}
TOOL = {"role": "tool", "content": "tool says", "tool_call_id": "c1"}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_exactly_the_sampled_texts_of_an_assistant_are_in_the_loss(structure, letters, tmp_path):
    """Every reader of messages finds the same texts in the same order."""
    message, expected = STRUCTURES[structure]
    completion = [{"role": "assistant", **message}, TOOL, {"role": "user", "content": "and?"}]
    text = expected.encode("ascii", "replace").decode()  # the tokenizer encodes unknown letters as `?`
    rows = {
        "verifiers": verifiers_row(0, 1.0, completion=completion),
        "prime_hosted": hosted_row(0, 0, 1.0, completion=json.dumps(completion)),
        "table": own_row(0, 1.0, output=completion),
    }
    for name, row in rows.items():
        options = {"columns": COLUMNS} if name == "table" else {}
        path = write_lines(tmp_path / f"{name}.jsonl", [row])
        batch = read_one(path, name, tokenizer=letters, **options)
        assert trained_text(batch, 0) == text, name
        shown = batch["response_text"][0]
        assert all(part in shown for part in ("tool says", "user: and?")), name
        if structure not in ("null", "empty"):
            assert all(each in shown for each in ("find", ARGUMENTS) if each in expected), name
            assert read_one(path, name, **options)["response_text"][0] == shown
    nodes = [
        node(None, "user", [], [], message={"role": "user", "content": "2+2?"}),
        node(0, "assistant", [], [], message=completion[0], sampled=True),
        node(1, "tool", [], [], message=TOOL),
    ]
    lines = [episode("g", "a", {"r": {"score": 1.0}}, trace={"nodes": nodes})]
    batch = read_one(write_lines(tmp_path / "traces.jsonl", lines), tokenizer=letters)
    assert trained_text(batch, 0) == text


def test_calls_of_a_trl_table_are_read_without_the_nulls_of_arrow(letters, tmp_path):
    """Arrow adds the keys of all other calls to the arguments of each call, with the value null."""
    calls = [
        {"function": {"name": "f", "arguments": {"a": 1}}},
        {"function": {"name": "g", "arguments": {"b": 2}}},
    ]
    completions = [
        [{"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}, TOOL]
        for call in calls
    ]
    path = trl_dump(tmp_path / "c.parquet", completion=completions)
    batch = read_one(path, group_by="prompt", tokenizer=letters)
    assert [trained_text(batch, row) for row in range(2)] == ['hmf{"a": 1}', 'hmg{"b": 2}']


def test_an_unknown_part_of_an_assistants_message_is_refused(tmp_path):
    for message, why in (
        ({"content": [{"type": "strange", "data": "x"}]}, "must have a known type; found 'strange'"),
        ({"content": 3}, "must be a string or a list of parts; found int"),
        ({"tool_calls": [{"id": "c"}]}, "must have the 'name' of its tool"),
        ({"tool_calls": ["add(1)"]}, "a string in 'tool_calls' must be JSON"),
        ({"reasoning": 3}, "'reasoning' must be a text or a list of parts"),
        ({"parts": [{"text": "four"}]}, "an assistant's text must be in 'content'; found it in 'parts'"),
        ({"role": "model", "content": "four"}, "must have the role 'assistant'; found 'model'"),
        ({"role": "Assistant", "content": "four"}, "must have the role 'assistant'; found 'Assistant'"),
    ):
        rows = [verifiers_row(0, 1.0, completion=[{"role": "assistant", **message}])]
        assert_refused(
            rf"results.jsonl:1, completion: .*{why}", write_lines(tmp_path / "results.jsonl", rows)
        )
    user = [{"role": "user", "content": [{"type": "strange", "data": "x"}]}]
    batch = read_one(write_lines(tmp_path / "results.jsonl", [verifiers_row(0, 1.0, prompt=user)]))
    assert batch["prompt_text"][0] == "user: [strange]"


def test_a_grader_and_a_dump_of_headrace_get_all_parts_of_a_message(letters, tmp_path):
    """With a tokenizer, the dump of headrace has the loss tokens of the dump that it was made from."""
    rows = []
    for at, (message, _) in enumerate(STRUCTURES.values()):
        rows.append(verifiers_row(0, float(at), completion=[{"role": "assistant", **message}, TOOL]))
    path = write_lines(tmp_path / "results.jsonl", rows)
    batch, seen = read_one(path), []
    regrade(batch, lambda prompts, responses: [seen.append(responses) or 0.0 for _ in prompts])
    # Ten structures have this call outside of their text. Six have the thought outside of it, and one within.
    assert sum('<tool_call>\nadd({"a": 2})\n</tool_call>' in text for text in seen[0]) == 10
    assert sum("<think>\nTwo.\n</think>" in text for text in seen[0]) == 7
    report = make_report(composed("pipeline=grpo", f"pipeline.stages.gate.group_size={len(rows)}").run(batch))
    expected = [len(text) for _, text in STRUCTURES.values()]
    assert trained(read_one(path, tokenizer=letters)) == expected
    for kind in ("parquet", "jsonl"):
        write_dump(report, tmp_path / kind, format=kind)
        again = read_one(tmp_path / kind, tokenizer=letters)
        assert trained(again) == expected
        assert list(again["response_text"]) == list(batch["response_text"])


# -- a chat template that marks the assistant's tokens -----------------------------------------------------

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


def test_the_tokens_that_a_chat_template_marks_train_and_a_notice_says_so(letters, tmp_path):
    made, folder = chat_folder(letters, tmp_path / "model", TEMPLATE)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    rows = [verifiers_row(0, float(at), prompt=asked, completion=each) for at, each in enumerate(CHATS)]
    path = write_lines(tmp_path / "results.jsonl", rows)
    source = open_dump(path, tokenizer=folder)
    ((_, batch),) = source
    how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    for row, completion in enumerate(CHATS):
        own = made.apply_chat_template(asked + completion, **how)
        length = len(own["input_ids"])
        assert batch["tokens", "full"][row][-length:].tolist() == own["input_ids"]
        assert batch[MASK][row][-length:].int().tolist() == own["assistant_masks"]
        assert not batch[MASK][row][:-length].any()
    assert trained(batch) == [5, 13 + 2, 7]  # of "four;", of '@add{"a": 2};' and "4;", and of "Two.so;"
    assert source.notices == [
        "The tokens in the loss of 3 rows were marked by the tokenizer's chat template."
    ]
    source = open_dump(path, tokenizer=letters)
    ((_, batch),) = source
    assert trained(batch) == [4, 11 + 1, 6]
    assert source.notices[0].startswith(
        "The tokens in the loss of 3 rows were encoded text by text: contents, "
    )
    unmarked = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    _, plain = chat_folder(letters, tmp_path / "plain", unmarked)
    assert trained(read_one(path, tokenizer=plain)) == [4, 11 + 1, 6]


def test_a_prompt_that_is_a_text_is_one_message_of_the_user(letters, tmp_path):
    _, folder = chat_folder(letters, tmp_path / "model", TEMPLATE)
    row, other = gym_row(0, 0, 1.0), gym_row(0, 1, 1.0)
    row["responses_create_params"]["input"] = "2+2?"
    batch = read_one(write_lines(tmp_path / "rollouts.jsonl", [row, other]), tokenizer=folder)
    assert batch["tokens", "full"].unique(dim=0).shape[0] == 1
    assert batch[MASK].unique(dim=0).shape[0] == 1


def test_a_chat_template_writes_no_text_twice(letters, tmp_path):
    """Reasoning and calls are left out of the template if the content already has them as text."""
    _, folder = chat_folder(letters, tmp_path / "model", TEMPLATE)
    thought = {"reasoning": "Two.", "reasoning_content": "Two."}
    for message, expected in (
        ({"content": f"Two.</think>{HERMES}", **thought, "tool_calls": [CALL]}, f"Two.</think>{HERMES};"),
        ({"content": HERMES, "tool_calls": [CALL, CALL]}, f'{HERMES}@add{{"a": 2}};'),
        ({"content": HERMES, **thought, "tool_calls": [CALL]}, f"Two.{HERMES};"),
        ({"content": "<tool_call>now", "function_call": {"name": "now"}}, "<tool_call>now;"),
    ):
        rows = [verifiers_row(0, 1.0, completion=[{"role": "assistant", **message}])]
        batch = read_one(write_lines(tmp_path / "results.jsonl", rows), tokenizer=folder)
        assert trained_text(batch, 0) == expected


def test_an_assistants_message_in_the_prompt_is_not_in_the_loss(letters, tmp_path):
    """The chat template also marks messages in the prompt: examples, or turns that an earlier row trains."""
    _, folder = chat_folder(letters, tmp_path / "model", TEMPLATE)
    shot = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two"}]
    rows = [verifiers_row(0, 1.0, prompt=[*shot, {"role": "user", "content": "?"}], completion=CHATS[1])]
    batch = read_one(write_lines(tmp_path / "results.jsonl", rows), tokenizer=folder)
    assert trained_text(batch, 0) == '@add{"a": 2};4;'
    _, folder = chat_folder(
        letters, tmp_path / "bad", "{% generation %}{{ raise_exception('no tools') }}{% endgeneration %}"
    )
    assert_refused(
        "chat template must take the messages; found no tools", tmp_path / "results.jsonl", tokenizer=folder
    )


# -- branches of prime-rl ----------------------------------------------------------------------------------


def test_tokens_that_branches_share_train_once(tmp_path):
    """The rollout forks after a turn of four tokens, so 4 + 2 + 1 tokens train."""
    fork = [
        node(None, "user", [1], [False]),
        node(0, "assistant", [2, 3, 4, 5], [True] * 4),
        node(1, "tool", [6], [False]),
        node(2, "assistant", [7, 8], [True] * 2),
        node(1, "tool", [9], [False]),
        node(4, "assistant", [10], [True]),
        node(1, "tool", [11], [False]),  # a branch without its own tokens is not a sample
    ]
    rows = [episode("g", name, {"r": {"score": 1.0}}, trace={"nodes": fork}) for name in "ab"]
    batch = read_one(write_lines(tmp_path / "traces.jsonl", rows))
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
        json.loads(each) for each in read_one(write_lines(tmp_path / "traces.jsonl", rows))["response_parts"]
    ]
    assert found[0] == [[True, "text 1"], [False, "text 2"], [True, "text 3"]]
    assert found[1] == [[False, "text 1"], [False, "text 4"], [True, "text 5"]]


def test_with_a_chat_template_a_shared_turn_trains_in_its_first_branch(letters, tmp_path):
    _, folder = chat_folder(letters, tmp_path / "model", TEMPLATE)
    said = [("user", "?"), ("assistant", "one"), ("assistant", "two"), ("assistant", "three")]
    fork = [
        node(parent, role, [], [], sampled=role == "assistant", message={"role": role, "content": text})
        for parent, (role, text) in zip((None, 0, 1, 1), said, strict=True)
    ]
    rows = [episode("g", "a", {"r": {"score": 1.0}}, trace={"nodes": fork})]
    batch = read_one(write_lines(tmp_path / "traces.jsonl", rows), tokenizer=folder)
    assert [trained_text(batch, row) for row in range(2)] == ["one;two;", "three;"]


def test_a_branch_out_of_the_loss_takes_no_tokens_from_others(tmp_path):
    """The branch's compaction was given up, so the next branch trains the turn that both share."""
    attempt = [{"node": 1, "type": "compaction_attempt"}]
    nodes = [
        node(None, "user", [1], [False]),
        node(0, "assistant", [2, 3], [True] * 2),
        node(1, "assistant", [4], [True], semantic_parents=attempt),
        node(1, "tool", [5], [False]),
        node(3, "assistant", [6], [True]),
    ]
    rows = [episode("g", "a", {"r": {"score": 1.0}}, trace={"nodes": nodes})]
    assert trained(read_one(write_lines(tmp_path / "traces.jsonl", rows))) == [0, 3]


# -- groups by the order of rows ---------------------------------------------------------------------------


def test_groups_by_order_are_consecutive_rows(tmp_path):
    """The prompts have equal texts, because the dump lacks their images."""
    rows = [verl_row(None, float(at % 3), prompt="What is this?") for at in range(12)]
    path = write_lines(tmp_path / "7.jsonl", rows)
    source = open_dump(path, group_by="order", group_size=4)
    ((_, batch),) = source
    assert in_order(batch["group_id"]) == [at // 4 for at in range(12)]
    assert list(batch["group_label"])[4] == "What is this? #2"
    assert source.notices[0].startswith("Groups come from the order of the rows: each 4 rollouts next to one")
    assert_refused("a sample needs a group", path)
    for options, why in (
        ({"group_by": "order"}, "so group_size is required"),
        ({"group_by": "order", "group_size": 4, "skip_bad": True}, "needs every record"),
    ):
        with pytest.raises(ValueError, match=why):
            open_dump(path, **options)


def test_the_terminal_and_the_page_say_where_groups_and_tokens_come_from(letters, tmp_path):
    rows = [verl_row(None, float(at % 3), prompt="What is this?") for at in range(8)]
    path = write_lines(tmp_path / "7.jsonl", rows)
    words = (
        f"source.path={path}",
        "source.group_by=order",
        "source.group_size=4",
        f"source.tokenizer={letters}",
    )
    config = configure("config", "task=replay", *words)
    numbers, text = told(replay_dump, config, tmp_path / "out")
    assert numbers == 8
    page = html.unescape((tmp_path / "out" / "report.html").read_text())
    for said in (" ".join(text.split()), page):
        assert (
            "Groups come from the order of the rows: each 4 rollouts next to one another are a group" in said
        )
        assert "The tokens in the loss of 8 rows were encoded text by text" in said
