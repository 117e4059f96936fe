"""Reports have prompts and responses as texts or token by token, up to a bounded size."""

from __future__ import annotations

import math
import re
import sys

import pytest
import torch
from batches import cut_rows
from busy import reported, stages
from fake_device import FakeDevice
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import Pipeline, make_report
from headrace.pipeline.conversations import (
    as_messages,
    labels_of_ids,
    message_lines,
    message_parts,
    message_text,
    sampled_once,
)
from headrace.pipeline.report_notes import texts_with_carried
from headrace.pipeline.tools.report import decoder_of, last_user_turn
from headrace.pipeline.tools.report.loggers import rollout_rows
from headrace.pipeline.tools.report.page_contents import cut_text, cut_tokens
from headrace.pipeline.tools.report.texts import TokenValues, values_by_token
from headrace.transforms import CompletenessGate, GroupRelativeAdvantage
from headrace.transforms.table.tensordicts import as_texts

pytestmark = pytest.mark.slow

MASK = ("masks", "all_assistant_mask")
FULL = ("tokens", "full")
PAGE_DATA, STEP = (
    sys.modules[f"headrace.pipeline.tools.report.{name}"] for name in ("page_contents", "step")
)

# -- conversations -------------------------------------------------------------------------------------------


def test_messages_are_lines_and_other_values_are_none():
    parts = [{"type": "image"}, {"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert message_lines(messages) == "system: Be brief.\nuser: [image]What is this?"
    assert last_user_turn(message_lines(messages)) == "[image]What is this?"
    assert message_lines([{"role": "assistant", "content": "A cat."}]) == "A cat."
    assert message_lines([{"role": "assistant", "content": None, "tool_calls": []}]) == ""
    for other in ([], [1, 2], ["a"], {"role": "user"}, 3, None):
        assert message_lines(other) is None


ADD = {"type": "function_call", "name": "add", "arguments": "{}"}
SAID = {"type": "message", "role": "assistant", "content": "Let me"}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Two."}], "content": None}
ADDED = {"type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([], []),
        ([ADD, ADD], [{"role": "assistant", "content": [], "tool_calls": [ADDED, ADDED]}]),
        (
            [THOUGHT, SAID, THOUGHT | {"content": [{"text": "Three."}]}, SAID | {"content": ["add"]}, ADD],
            [
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "Let me"}, "add"],
                    "reasoning_content": "Two.Three.",
                    "tool_calls": [ADDED],
                }
            ],
        ),
        (  # the output of a tool, and a message with a role alone, end the assistant's message
            [
                ADD,
                {"type": "function_call_output", "output": "4"},
                SAID,
                {"role": "user", "content": "?"},
                ADD,
            ],
            [
                {"role": "assistant", "content": [], "tool_calls": [ADDED]},
                {"role": "tool", "content": "4"},
                {"role": "assistant", "content": [{"type": "text", "text": "Let me"}]},
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": [], "tool_calls": [ADDED]},
            ],
        ),
        (  # a message of a chat is not changed by the items behind it
            [{"role": "assistant", "content": "so"}, SAID | {"content": None}],
            [{"role": "assistant", "content": "so"}, {"role": "assistant", "content": []}],
        ),
        (
            [{"type": "message", "role": "user", "content": "?"}],
            [{"type": "message", "role": "user", "content": "?"}],
        ),
    ],
)
def test_items_of_an_assistant_in_a_row_are_one_message(items, messages):
    assert as_messages(items) == messages


@pytest.mark.parametrize("item", [{"type": "strange"}, {"type": "strange", "role": 3}])
def test_an_item_of_an_unknown_type_without_a_role_is_refused(item):
    with pytest.raises(ValueError, match=r"^a message must have a 'role', or a known type; found 'strange'$"):
        as_messages([SAID, item])


def test_the_text_of_a_message_has_each_part_between_its_marks():
    """The parts of one content follow each other directly. A line end separates all other parts."""
    image, call = {"type": "input_image"}, {"function": {"name": "add", "arguments": {"a": [2]}}}
    content = [
        {"type": "text", "text": "so"},
        image,
        "and",
        {"type": "tool_result", "content": {"b": 1}},
        image,
    ]
    message = {"role": "assistant", "reasoning": "Two.", "content": content, "tool_calls": [call, call]}
    called = '<tool_call>\nadd({"a": [2]})\n</tool_call>'
    assert message_text(message) == (
        f'<think>\nTwo.\n</think>\nso[input_image]and{{"b": 1}}[input_image]\n{called}\n{called}'
    )
    within = [{"type": "thinking", "thinking": "Two."}, "so", {"type": "thinking"}, "4"]
    assert message_text({"role": "assistant", "content": within}) == "<think>\nTwo.\n</think>\nso[thinking]4"
    shown = {
        "role": "assistant",
        "content": [{"type": "strange"}],
    }  # refused in a dump, and shown in a report
    assert (
        message_lines([{"role": "user", "content": "?"}, shown]) == f"user: ?\nassistant: {shown['content']}"
    )
    assert message_lines([{"role": "model"}]) == "model: {'role': 'model'}"


def called(arguments, name="say"):
    """A call as a server copies it from the text."""
    return {"name": name, "input": arguments}


@pytest.mark.parametrize(
    ("content", "call", "is_copy"),
    [
        ('[TOOL_CALLS]say{"it": "ö \\"b\\""}', called({"it": 'ö "b"'}), True),
        ("<tool_call>say it a", called({"it": "a"}), True),
        ("<tool_call>ay it a", called({"it": "a"}), False),
        ("<tool_call>says it a", called({"it": "a"}), False),
        ("<tool_call>say it aa", called({"it": "a"}), False),
        ("<tool_call>say it", called({"it": "a"}), False),
        ("<tool_call>say it", called({"it": ["", {}]}), True),
        ("<tool_call>say it a", called({"it": ["a", {"b": None}]}), True),  # servers add keys with null
        ("<tool_call>say it a", called({"it": ["a", {"b": ""}]}), False),
        ("<tool_call>say it a", called({"it": ["a", None]}), False),
        ("<tool_call>say it a c 1", called({"it": ["a", {"c": 1.0}]}), True),
        ("<tool_call>say it c 2", called({"it": [{"c": 1.0}]}), False),
        ("<tool_call>say now", called("now"), True),  # arguments that are no JSON
        ("<tool_call>say now", called("then"), False),
        ("<tool_call>say", called(""), True),
        ('<tool_call>{"name": "say", "args": {"n": [1.0, true, null]}}', called('{"n": [1, true]}'), False),
        ('<tool_call>{"name": "say", "arguments": {"n": [1.0, true]}}', called('{"n": [1, true]}'), True),
        ('<tool_call>{"name": "say", "arguments": {"n": 1.5}}', called({"n": 1}), False),
        ("I say it a", called({"it": "a"}), False),  # nothing marks a call
        ("[say(it='a')]", called({"it": "a"}), True),
        ("so [say(it='a')]", called({"it": "a"}), False),
    ],
)  # fmt: skip
def test_a_call_is_a_copy_of_the_text_if_the_text_has_its_name_its_keys_and_its_values(
    content, call, is_copy
):
    message = {"role": "assistant", "content": content, "tool_calls": [call]}
    kinds = [part.kind for part in message_parts(message)]
    assert kinds == ["text"] if is_copy else ["text", "call"]
    assert ("tool_calls" in sampled_once(message)) == (not is_copy)


def test_each_call_of_the_text_has_one_copy():
    """The third call is not in the text, and stays. An old call is a single one."""
    calls = [called({"a": at}) for at in (1, 2, 2)]
    message = {"role": "assistant", "content": "<tool_call>say a 2<tool_call>say a 1", "tool_calls": calls}
    assert [str(part) for part in message_parts(message)][1:] == ['<tool_call>\nsay({"a": 2})\n</tool_call>']
    assert sampled_once(message) == message | {"tool_calls": calls[2:]}
    old = {"role": "assistant", "content": "<tool_call>say a 1", "function_call": calls[0]}
    assert sampled_once(old) == {"role": "assistant", "content": "<tool_call>say a 1"}
    assert sampled_once(old | {"content": "so"}) == old | {"content": "so"}
    typed = [{"type": "tool_use", **calls[0]}, {"type": "text", "text": "so"}]
    both = {"role": "assistant", "content": typed, "tool_calls": calls[:2]}
    assert [part.texts for part in message_parts(both)] == [("say", '{"a": 1}'), ("so",), ("say", '{"a": 2}')]
    assert sampled_once(both) == both


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (
            {"role": "GPT", "content": "4"},
            "what the policy sampled must have the role 'assistant'; found 'GPT'",
        ),
        ({"output": "", "text": "4"}, "an assistant's text must be in 'content'; found it in 'text'"),
        ({"content": 3}, "'content' must be a string or a list of parts; found int"),
        ({"content": [3]}, "a part of 'content' must be an object or a text; found int"),
        ({"content": [{"text": 3}]}, "'text' of a part must be a string; found int"),
        (
            {"content": [{"type": "odd"}]},
            "a part of an assistant's 'content' must have a known type; found 'odd'",
        ),
        ({"reasoning": 3}, "'reasoning' must be a text or a list of parts; found int"),
        ({"tool_calls": {"name": "add"}}, "'tool_calls' must be a list; found dict"),
        ({"tool_calls": "[add]"}, "a string in 'tool_calls' must be JSON"),
        ({"tool_calls": [3]}, "a tool call must be an object; found int"),
        (
            {"tool_calls": [{"id": 1, "at": 2}]},
            "a tool call must have the 'name' of its tool; found the keys ['at', 'id']",
        ),
        (
            {"tool_calls": [{"name": "add", "args": {"a": {1}}}]},
            "a value must be one that JSON can hold; found dict",
        ),
        (
            {"tool_calls": [{"name": "add", "args": math.nan}]},
            "a value must be one that JSON can hold; found float",
        ),
        ({"content": "so", "text": "4"}, None),
        ({"role": "user", "text": "4"}, None),
        ({"role": "user", "content": [{"type": "odd"}]}, None),
    ],
)
def test_a_message_whose_sampled_texts_are_not_known_is_refused(message, why):
    if why is None:
        message_parts({"role": "assistant", **message})
        return
    with pytest.raises(ValueError, match=f"^{re.escape(why)}$"):
        message_parts({"role": "assistant", **message})


@pytest.mark.parametrize(
    ("texts", "ids", "labels"),
    [
        (["a", "b", "a"], [5, 7, 5], ["a", "b", "a"]),
        (["5", "x"], [5, 7], ["5", "x"]),
        (["5", "7"], [5, 7], None),  # equal to the ids
        (["a", "a"], [5, 7], None),  # one label of two ids
        (["a", "b"], [5, 5], None),  # two labels of one id
        (["a"], [5, 7], None),
        ([1, 2], [5, 7], None),
        ([], [], None),
        ([["a"], ["b"]], [5, 7], ["a", "b"]),
        ([["a", "b"], ["c"]], [5, 7], None),
        (["a", [{"role": "user", "content": "?"}]], [5, 7], ["a", "user: ?"]),
    ],
)
def test_labels_are_texts_that_name_each_id_and_are_not_the_ids(texts, ids, labels):
    assert labels_of_ids(texts, ids) == labels


def test_messages_of_a_batch_are_in_its_report():
    batch = TensorDict({"rollout_id": [4, 5]}, batch_size=[2])
    conversations = [[{"role": "user", "content": f"{k}?"}] * (1 + k) for k in range(2)]
    batch["prompt_text"] = as_texts(conversations)  # type: ignore[arg-type]
    report = make_report(Pipeline({}).run(batch))
    assert report.texts["prompt"] == ["user: 0?", "user: 1?\nuser: 1?"]
    assert [report.asked(row) for row in range(2)] == ["0?", "1?"]


def test_texts_of_carried_rows_follow_those_of_new_rows():
    """A column that only one of both has, or that is no text, is left out."""
    keys = Pipeline({}).run(TensorDict({"rollout_id": [4, 5]}, batch_size=[2])).keys
    carried = TensorDict({"rollout_id": [7]}, batch_size=[1])
    carried["prompt_text"], carried["ground_truth"] = as_texts(["c"]), as_texts(["d"])
    texts = {"prompt": ["a", "b"], "response": ["e", "f"], "ground_truth": [1, 2]}
    assert texts_with_carried(texts, carried, keys) == {"prompt": ["a", "b", "c"]}
    assert texts_with_carried(texts, None, keys) == {"prompt": ["a", "b"], "response": ["e", "f"]}


def test_a_torchrl_history_is_used_if_there_is_no_other_text():
    history = pytest.importorskip("torchrl.data.llm").History
    rows = []
    for k in range(2):
        turns = [{"role": "user", "content": f"{k}?"}, {"role": "assistant", "content": str(k)}] * (1 + k)
        chats = {
            "prompt": history.from_chats([turns[:-1]])[0],
            "response": history.from_chats([turns[-1:]])[0],
        }
        rows.append(TensorDict({"rollout_id": torch.tensor(k), "history": TensorDict(chats)}))
    report = make_report(Pipeline({}).run(lazy_stack(rows)))
    assert report.texts["prompt"] == ["user: 0?", "user: 1?\nassistant: 1\nuser: 1?"]
    assert report.texts["response"] == ["0", "1"]


def test_the_history_of_several_rows_is_not_shown_as_one_conversation():
    history = pytest.importorskip("torchrl.data.llm").History
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rows = history.from_chats([turns, turns])
    assert message_lines(rows) is None
    assert message_lines(rows[0]) == "user: 1+1?\nassistant: 2"


# -- texts out of tokens -----------------------------------------------------------------------------------


def letters(ids: list[int]) -> list[str]:
    return [chr(96 + token) for token in ids]


def tokens_batch(groups: int = 3, size: int = 2, width: int = 6) -> TensorDict:
    """Rows of a padding token, two prompt tokens and a response. Group g has the rewards 0 and g + 1."""
    rows = groups * size
    tokens = 1 + torch.arange(rows)[:, None] % 20 + torch.arange(width)
    mask = torch.zeros(rows, width, dtype=torch.bool)
    mask[:, 3:] = True
    tokens[:, 0] = 0
    ids = torch.arange(rows)
    rewards = (ids % size) * (ids // size + 1.0)
    columns = {"group_id": ids // size, "rollout_id": ids, ("next", "reward"): rewards[:, None], MASK: mask}
    columns |= {FULL: tokens, ("masks", "all_attention_mask"): tokens > 0}
    return TensorDict(columns, batch_size=[rows])


def ragged(batch: TensorDict) -> TensorDict:
    """The same rows without their padding. The first row lacks its last token."""
    keys = [key for key in batch.keys(True, True) if batch[key].ndim > 1 and batch[key].shape[1] > 1]
    return cut_rows(batch, [slice(1, None if row else -1) for row in range(len(batch))], keys)


def with_terms(batch: TensorDict) -> TensorDict:
    """The batch with a different advantage for each token."""
    return batch.set("advantage", batch[FULL].unsqueeze(-1) / 10)


def test_without_texts_prompts_and_responses_are_decoded():
    batch = tokens_batch()
    for rows in (batch, ragged(batch)):
        report = make_report(Pipeline({}).run(rows), batch=rows, decode=letters)
        assert report.texts["prompt"] == ["bc", "cd", "de", "ef", "fg", "gh"]
        assert report.texts["response"][1:] == ["efg", "fgh", "ghi", "hij", "ijk"]
    assert report.texts["response"][0] == "de"
    assert make_report(Pipeline({}).run(batch), batch=batch).texts == {}
    batch["response_text"] = as_texts(["as it was"] * 6)
    texts = make_report(Pipeline({}).run(batch), batch=batch, decode=letters).texts
    assert texts["response"] == ["as it was"] * 6
    assert texts["prompt"][0] == "bc"


def test_dropped_rows_have_texts_only_with_the_batch():
    """Group 1 lacks a rollout. A run keeps only the rows that stay."""
    batch = torch.cat([tokens_batch()[:3], tokens_batch()[4:]])
    run = Pipeline({"gate": CompletenessGate(group_size=2, on_incomplete="drop")}).run(batch)
    assert make_report(run, batch=batch, decode=letters).texts["response"][2] == "fgh"
    texts = make_report(run, decode=letters).texts["response"]
    assert texts == ["def", "efg", "", "hij", "ijk"]


def test_a_pipeline_that_keeps_no_batch_has_no_texts():
    pipeline = Pipeline({})
    pipeline(tokens_batch())
    assert make_report(pipeline, decode=letters).texts == {}


def test_without_a_mask_the_response_is_at_the_end():
    batch = tokens_batch()
    batch["tokens", "response"] = batch[FULL][:, 3:]
    batch = batch.exclude(MASK)
    assert make_report(Pipeline({}).run(batch), decode=letters).texts["response"][0] == "def"
    batch = batch.exclude(("tokens", "response"))
    texts = make_report(Pipeline({}).run(batch), decode=letters).texts
    assert texts == {"prompt": [""] * 6, "response": [""] * 6}


def test_a_decoder_must_return_a_string_per_token():
    batch = tokens_batch()
    with pytest.raises(ValueError, match=r"each token; for 2 tokens of row 0 it returned \['all at once'\]"):
        make_report(Pipeline({}).run(batch), batch=batch, decode=lambda ids: ["all at once"])
    with pytest.raises(ValueError, match=r"2 tokens of row 0 it returned \[None, None\]"):
        make_report(Pipeline({}).run(batch), batch=batch, decode=lambda ids: [None for _ in ids])


def test_the_decoder_is_the_environments_or_else_that_of_a_tokenizer():
    class Named:
        def token_texts(self, ids):
            return ["named"] * len(ids)

    class Tokenizer:
        def batch_decode(self, rows):
            return [f"<{row}>" for row in rows]

    class Wrapper:
        tokenizer = Tokenizer()

    assert decoder_of(object(), Wrapper())([3, 4]) == ["<[3]>", "<[4]>"]
    assert decoder_of(Named(), Wrapper())([3]) == ["named"]
    assert decoder_of(object(), None) is None


# -- token by token ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lay", [lambda batch: batch, ragged], ids=["dense", "ragged"])
@pytest.mark.parametrize("decode", [None, letters], ids=["cells", "texts"])
def test_a_report_has_each_token_of_a_row_with_its_number(lay, decode):
    """The tokens and numbers equal those of a loop. A masked token within a response has no number."""
    batch = with_terms(tokens_batch())
    batch[MASK][2, 4] = False
    rows = lay(batch)
    report = make_report(Pipeline({}).run(rows), batch=rows, decode=decode)
    assert sorted(report.by_token) == list(range(6))
    for number, row in enumerate(rows.unbind(0)):
        places = row[MASK].nonzero().flatten()
        expected = [
            row[FULL][at].item() / 10 if row[MASK][at] else math.nan
            for at in range(int(places[0]), int(places[-1]) + 1)
        ]
        found = report.by_token[number]
        assert found.values["advantage"] == pytest.approx(expected, nan_ok=True)
        ids = row[FULL][int(places[0]) : int(places[-1]) + 1].tolist()
        assert found.texts == (None if decode is None else letters(ids))


@pytest.mark.parametrize("lay", [lambda batch: batch, ragged], ids=["dense", "ragged"])
def test_rows_that_have_left_have_no_token_numbers(lay):
    batch = lay(with_terms(tokens_batch()))
    keys = {"advantage": "advantage"}
    assert values_by_token(batch, keys, [6, 9], MASK) == {}
    assert [*values_by_token(batch, keys, [9, 5, 0], MASK)] == [5, 0]


def test_a_row_without_a_token_in_the_loss_has_no_texts_and_no_numbers():
    batch = with_terms(tokens_batch())
    batch[MASK][2] = False
    report = make_report(Pipeline({}).run(batch), batch=batch, decode=letters)
    assert report.texts["prompt"] == ["bc", "cd", "", "ef", "fg", "gh"]
    assert report.texts["response"] == ["def", "efg", "", "ghi", "hij", "ijk"]
    assert sorted(report.by_token) == [0, 1, 3, 4, 5]


def test_a_number_per_row_is_not_a_number_per_token():
    batch = tokens_batch()
    run = Pipeline({"advantage": GroupRelativeAdvantage()}).run(batch)
    assert make_report(run, batch=batch, decode=letters).by_token == {}
    one = TensorDict({**batch.to_dict(), "advantage": torch.ones(6, 1, 1)}, batch_size=[6])
    one[MASK], one[FULL] = one[MASK][:, 3:4], one[FULL][:, 3:4]
    one["masks", "all_attention_mask"] = one["masks", "all_attention_mask"][:, 3:4]
    assert make_report(Pipeline({}).run(one)).by_token == {}


@pytest.mark.parametrize(("tokens", "read"), [(25_000, [0, 1]), (25_001, [0])])
def test_a_report_has_numbers_of_50_000_tokens_at_most(tokens, read):
    """Each of two rows has this many tokens in the loss, behind a padding token and a prompt of two."""
    report = make_report(Pipeline({}).run(with_terms(tokens_batch(1, 2, 3 + tokens))))
    assert sorted(report.by_token) == read


def test_device_reads_of_token_numbers_do_not_grow_with_the_rows():
    def reads(groups: int) -> int:
        batch = with_terms(tokens_batch(groups))
        with FakeDevice() as fake:
            run = Pipeline({}).run(fake.put(batch))
            fake.forget()
            assert make_report(run, decode=letters).by_token
        return len(fake.reads)

    assert reads(40) == reads(2)


# -- texts on a page -----------------------------------------------------------------------------------------


@given(st.text(st.characters(categories=["L", "N", "P", "S"])), st.integers(1, 50))
def test_a_cut_text_has_both_ends_and_the_number_of_missing_characters(text, most):
    excerpt = cut_text(text, most)
    assert text.startswith(excerpt["start"])
    assert text.endswith(excerpt["end"])
    assert len(excerpt["start"]) + excerpt["missing"] + len(excerpt["end"]) == len(text)
    assert len(excerpt["start"]) + len(excerpt["end"]) == min(most, len(text))


@given(st.lists(st.floats(-9, 9) | st.just(math.nan), min_size=1, max_size=30), st.integers(1, 20))
def test_cut_tokens_keep_their_indices(values, most):
    strand = cut_tokens(TokenValues([str(k) for k in range(len(values))], {"advantage": values}), most)
    places = [i if i < strand["at"] else i + strand["missing"] for i in range(len(strand["texts"]))]
    assert [str(place) for place in places] == strand["texts"]
    assert len(strand["texts"]) + strand["missing"] == len(values)
    expected = [values[place] for place in places]
    assert strand["values"]["advantage"] == pytest.approx(expected, rel=1e-3, nan_ok=True)


# -- in trackers ---------------------------------------------------------------------------------------------


def test_the_table_of_rollouts_has_the_texts(make_batch):
    batch, _ = reported(make_batch)
    batch["response_text"] = as_texts([f"response {row}" for row in range(9)])
    report = make_report(Pipeline(stages()).run(batch))
    _, rows = rollout_rows(report)
    texts = {rollout: f"response {rollout + 1}" for rollout in (2, 3, 4, 5, 6, 7)}
    texts |= {0: "response 0", 1: "response 1\n\nresponse 2"}  # a rollout of two rows
    assert {row[1]: row[3] for row in rows} == texts


def test_the_table_of_rollouts_has_as_many_rows_and_characters_as_the_page():
    batch = tokens_batch(150)
    batch["response_text"] = as_texts([f"{row}: {'x' * 5000}" for row in range(len(batch))])
    _, rows = rollout_rows(make_report(Pipeline({}).run(batch)))
    assert len(rows) == 200
    assert {row[0] for row in rows} == set(range(50, 150))
    assert rows[0][3].endswith("x")
    assert "[… 1,005 characters left out …]" in rows[0][3]  # "298: " and 5,000 letters
