"""Ragged rows of any lengths become one dense batch. Invalid rows are refused with their ids."""

from __future__ import annotations

import pytest
import torch
from fake_device import waits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.pipeline import Pipeline, load_pipeline
from headrace.transforms import (
    BatchError,
    CompletenessGate,
    DenseRows,
    LengthWithin,
    MissingKeyError,
    NotTruncated,
    SampleFilter,
)
from headrace.transforms.stages.sequences.dense import entries_behind, turn_right
from headrace.transforms.table import schema

PAD = 10
FULL, LOSS_MASK, ATTENTION = (
    ("tokens", "full"),
    ("masks", "all_assistant_mask"),
    ("masks", "all_attention_mask"),
)
PROMPT, RESPONSE, LOG_PROB = ("tokens", "prompt"), ("tokens", "response"), ("log_probs", "full")
token_lists = st.lists(st.integers(1, 9), max_size=5)
some_rows = st.lists(st.tuples(token_lists, token_lists), min_size=1, max_size=6).filter(
    lambda rows: all(prompt + response for prompt, response in rows) and any(response for _, response in rows)
)


def ragged(rows, columns=None) -> TensorDict:
    """Rows as TransformersWrapper writes them with pad_output=False, one per rollout."""
    parts = []
    for number, (prompt, response) in enumerate(rows):
        tokens = {"prompt": prompt, "response": response, "full": [*prompt, *response]}
        row = TensorDict(
            {"tokens": {key: torch.tensor(part, dtype=torch.int64) for key, part in tokens.items()}}
        )
        row[ATTENTION] = torch.ones(len(tokens["full"]), dtype=torch.bool)
        row["rollout_id"], row["text"] = torch.tensor(100 + number), f"text {number}"
        for key, values in (columns or {}).items():
            row[key] = values[number]
        parts.append(row)
    return lazy_stack(parts)


def as_written_padded(rows) -> TensorDict:
    """Rows as written with pad_output=True: prompts are padded on the left, responses on the right."""
    width_p, width_r = (max(len(row[part]) for row in rows) for part in (0, 1))
    prompts = [[PAD] * (width_p - len(prompt)) + prompt for prompt, _ in rows]
    responses = [response + [PAD] * (width_r - len(response)) for _, response in rows]
    there = [
        [0] * (width_p - len(prompt)) + [1] * (len(prompt) + len(response)) + [0] * (width_r - len(response))
        for prompt, response in rows
    ]
    prompt, response = (
        torch.tensor(part, dtype=torch.int64).view(len(rows), -1) for part in (prompts, responses)
    )
    batch = TensorDict({PROMPT: prompt, RESPONSE: response}, batch_size=[len(rows)])
    batch[FULL], batch[ATTENTION] = torch.cat([prompt, response], 1), torch.tensor(there).bool()
    batch["rollout_id"] = torch.arange(100, 100 + len(rows))
    return batch


def by_hand(rows, width) -> tuple[list, list, list]:
    """The tokens, attention mask and loss mask, computed row by row."""
    tokens, attention, loss = [], [], []
    for prompt, response in rows:
        gap = width - len(prompt) - len(response)
        tokens.append([PAD] * gap + prompt + response)
        attention.append([False] * gap + [True] * (width - gap))
        loss.append([False] * (width - len(response)) + [True] * len(response))
    return tokens, attention, loss


def read(dense) -> tuple[list, list, list]:
    return dense[FULL].tolist(), dense[ATTENTION].tolist(), dense[LOSS_MASK].tolist()


@given(some_rows)
def test_padded_rows_equal_those_of_a_loop(rows):
    dense = DenseRows(pad_id=PAD)(ragged(rows))
    assert read(dense) == by_hand(rows, max(len(prompt + response) for prompt, response in rows))
    assert dense["rollout_id"].tolist() == list(range(100, 100 + len(rows)))
    assert list(dense["text"]) == [f"text {number}" for number in range(len(rows))]


@given(some_rows, st.booleans())
def test_rows_padded_by_a_wrapper_become_padded_on_the_left(rows, has_prompts):
    written = as_written_padded(rows)
    written = written if has_prompts else written.exclude(PROMPT)
    dense = DenseRows(pad_id=PAD)(written)
    assert read(dense) == by_hand(rows, written[FULL].shape[1])
    assert set(dense["tokens"].keys()) == {"full"}


@settings(max_examples=20)
@given(some_rows, some_rows)
def test_rows_with_different_padding_become_one_batch(first, second):
    """LLMCollector stacks env steps, and pads each of them separately."""
    steps = [list(as_written_padded(rows).unbind(0)) for rows in (first, second)]
    both = lazy_stack(steps[0] + steps[1])
    dense = DenseRows(pad_id=PAD)(both)
    assert read(dense) == by_hand(first + second, dense[FULL].shape[1])


@given(some_rows)
def test_a_dense_batch_is_unchanged(rows):
    once = DenseRows(pad_id=PAD)(ragged(rows))
    twice = DenseRows(pad_id=PAD)(once)
    assert all(twice.get(key) is once.get(key) for key in (FULL, ATTENTION, LOSS_MASK))


ROWS = [([5, 6], [7]), ([5], [8, 9])]


def test_columns_per_token_are_padded_and_others_are_stacked():
    columns = {
        LOG_PROB: [-torch.ones(3)] * 2,
        ("next", "ref_log_probs", "full"): [torch.ones(3), torch.ones(3)],
        ("mine", "flags"): [torch.ones(3, 2, dtype=torch.bool), torch.ones(3, 2, dtype=torch.bool)],
        ("next", "reward"): [torch.tensor([1.0], dtype=torch.bfloat16)] * 2,
    }
    grids = torch.arange(12).view(2, 3, 2)  # 3 × 2 numbers for each token
    columns["mine", "grids"] = [torch.zeros(3, 3, 2).long(), torch.ones(3, 3, 2).long(), grids]
    columns = {key: [*values, values[0][:2]][:3] for key, values in columns.items()}
    rows = ragged([*ROWS, ([5], [6])], columns)
    dense = DenseRows(pad_id=PAD)(rows)
    assert dense[LOG_PROB][2].isnan().tolist() == [True, False, False]
    assert dense["next", "ref_log_probs", "full"].shape == (3, 3)
    assert dense["mine", "flags"][2].tolist() == [[False] * 2, [True] * 2, [True] * 2]
    assert dense["mine", "grids"][2].tolist() == [[[0, 0]] * 3, *grids.tolist()]
    assert dense["mine", "grids"][:2].flatten(1).unique(dim=1).tolist() == [[0], [1]]
    assert (dense["next", "reward"].dtype, dense["next", "reward"].shape) == (torch.bfloat16, (3, 1))


@given(
    st.integers(0, 5).flatmap(lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width)))
)
def test_rows_are_turned_until_a_real_token_is_last(attention):
    mask = torch.tensor(attention).bool().view(len(attention), -1 if any(attention) else 0)
    behind = entries_behind(mask).tolist()
    assert behind == [next((k for k, real in enumerate(row[::-1]) if real), 0) for row in attention]
    by = [own + number % 2 for number, own in enumerate(behind)]
    grid = torch.arange(2 * mask.numel()).view(*mask.shape, 2)
    turned = turn_right(grid, torch.tensor(by).long())
    assert all(own.equal(row.roll(n, 0)) for own, row, n in zip(turned, grid, by, strict=True))


def test_a_loss_mask_in_the_rows_is_kept():
    masks = [torch.tensor([False, True, True]), torch.tensor([False, False, True])]
    rows = ragged(ROWS)
    for row, mask in zip(rows.tensordicts, masks, strict=True):
        row[LOSS_MASK] = mask
    assert DenseRows(pad_id=PAD)(rows)[LOSS_MASK].tolist() == [mask.tolist() for mask in masks]
    assert DenseRows(pad_id=PAD)(rows.exclude(PROMPT, RESPONSE))[FULL].tolist() == [[5, 6, 7], [5, 8, 9]]


@pytest.mark.parametrize("key", [("log_probs", "response"), ("log_probs", "full")])
def test_log_probabilities_of_a_response_are_aligned_with_its_tokens(key):
    """Engines write log-probabilities for the response and none for the prompt."""
    dense = DenseRows(pad_id=PAD)(ragged(ROWS, {key: [torch.tensor([-1.0]), torch.tensor([-2.0, -3.0])]}))
    found = dense["log_probs", "full"]
    assert found[dense[LOSS_MASK]].tolist() == [-1, -2, -3]
    assert found[~dense[LOSS_MASK]].isnan().all()


def test_log_probabilities_of_transformers_wrapper_are_ignored():
    """TransformersWrapper writes 0 for first tokens. Their ratios would be close to 0."""
    zeros = [torch.tensor([0.0]), torch.tensor([0.0, -3.0])]
    dense = DenseRows(pad_id=PAD)(ragged(ROWS, {("log_probs", "response"): zeros}))
    assert ("log_probs", "full") not in dense.keys(True)
    zeros[0] -= 1  # if one first token has another value, the column is kept
    found = DenseRows(pad_id=PAD)(ragged(ROWS, {("log_probs", "response"): zeros}))["log_probs", "full"]
    assert sorted(found[found.isfinite()].tolist()) == [-3, -1, 0]
    zeros[0] += 1
    empty = {("log_probs", "response"): [*zeros, torch.zeros(0)]}
    dense = DenseRows(pad_id=PAD)(ragged([*ROWS, ([5], [])], empty))  # such a row has no first token
    assert ("log_probs", "full") not in dense.keys(True)
    zeros[1][0] = -2.0
    found = DenseRows(pad_id=PAD)(ragged(ROWS, {("log_probs", "response"): zeros}))["log_probs", "full"]
    assert sorted(found[found.isfinite()].tolist()) == [-3, -2, 0]


def test_log_probabilities_of_rows_without_a_prompt_keep_their_dtype():
    values = [torch.tensor([-1.0, -2.0]).double(), torch.tensor([-3.0]).double()]
    found = DenseRows(pad_id=PAD)(ragged([([], [5, 6]), ([], [7])], {LOG_PROB: values}))[LOG_PROB]
    assert found.dtype is torch.float64
    assert found[found.isfinite()].tolist() == [-1, -2, -3]


def test_columns_of_prompts_and_responses_are_removed():
    parts = {("log_probs", "prompt"): [torch.zeros(2), torch.zeros(1)]}
    dense = DenseRows(pad_id=PAD)(ragged(ROWS, parts))
    assert sorted(map(str, dense.keys(True, True))) == sorted(
        map(str, [FULL, ATTENTION, LOSS_MASK, "rollout_id"])
    )


def test_a_masked_row_stays_masked():
    rows = ragged(ROWS)
    for row, there in zip(rows.tensordicts, (True, False), strict=True):
        row[schema.IN_LOSS] = torch.tensor(there)
    assert DenseRows(pad_id=PAD)(rows)[LOSS_MASK].sum(1).tolist() == [1, 0]


def with_column(key, values):
    rows = ragged(ROWS)
    for row, value in zip(rows.tensordicts, values, strict=True):
        if value is not None:
            row[key] = value
    return rows


def cut(*keys) -> TensorDict:
    """Ragged rows. The second lacks its last token in these columns."""
    rows = ragged(ROWS)
    for key in keys:
        rows.tensordicts[1][key] = rows.tensordicts[1][key][:-1]
    return rows


def without_first(*keys) -> TensorDict:
    """Padded rows without the first entry of each row in these columns."""
    batch = as_written_padded(ROWS)
    return batch.update({key: batch[key][:, 1:] for key in keys})


def marked(*columns) -> TensorDict:
    """One dense row of tokens, with its attention mask and its loss mask."""
    tokens, attention, loss = (torch.tensor([column]) for column in columns)
    return TensorDict({FULL: tokens, ATTENTION: attention.bool(), LOSS_MASK: loss.bool()}, [1])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ragged([([5, 6], [7]), ([5, PAD], [8])]), r"pad_id=10 .* is a real token in row 1 \(roll"),
        (ragged([([5], [PAD, 6]), ([5], [8])]), r"its own padding token"),
        (with_column(FULL, [torch.tensor([5, 6, 4]), torch.tensor([5, 8, 9])]), "they are not in row 0"),
        (ragged([([5, 6], []), ([5], [])]), r"all are empty in row 0 \(rollout 100\), row 1"),
        (ragged([([], []), ([5], [8])]), r"every row needs a token; found none in row 0"),
        (with_column(LOG_PROB, [torch.zeros(3), torch.zeros(2)]), r"row 1 has 2 for 3 tokens. Were"),
        (with_column("importance_weight", [torch.zeros(2)] * 2), r"row 0 has 2 for 3 tokens"),
        (with_column("seen", [torch.zeros(2), torch.zeros(4)]), r"'seen', .*; row 0 has 2 for 3 tokens"),
        (with_column("seen", [torch.zeros(3, 1), torch.zeros(3, 2)]), r"'seen' must be tensors of one dtype"),
        (with_column(("tokens", "seen"), [None, torch.zeros(2)]), r"'seen'\) is on 1 of 2 rows: 1"),
        (with_column("seen", [torch.zeros(2), None]), r"on none; 'seen' is on 1 of 2 rows: 0"),
        (with_column(ATTENTION, [torch.tensor([True, False, True])] * 2), "after or between tokens in row 0"),
        (with_column(LOSS_MASK, [torch.zeros(3)] * 2), "a loss mask is bool"),
        (cut(FULL, ATTENTION), r"they are not in row 1 \(rollout 101\)\. Were tokens cut off, or is"),
        (without_first(PROMPT), r"they are not in row 0 \(rollout 100\)\. Were"),
        (without_first(FULL, ATTENTION), r"they are not in row 0 \(rollout 100\)\. Were"),
        (marked([0, 5, 0, 6], [0, 1, 0, 1], [0, 0, 0, 1]), r"after or between tokens in row 0\. Pad on"),
        (marked([5, 6, 0], [1, 1, 0], [0, 1, 0]), r"after or between tokens in row 0\. Pad on the left"),
        (marked([0, 5, 6], [0, 1, 1], [1, 0, 1]), "the loss mask is True on padding in row 0"),
    ],
)  # fmt: skip
def test_invalid_rows_are_refused_with_their_ids(rows, message):
    with pytest.raises(BatchError, match=message):
        DenseRows(pad_id=PAD)(rows)


def test_prompt_and_attention_mask_are_optional():
    assert read(DenseRows(pad_id=PAD)(ragged(ROWS).exclude(PROMPT, ATTENTION))) == by_hand(ROWS, 3)
    rows = with_column(RESPONSE, [torch.tensor([7]), torch.tensor([8, 4])]).exclude(PROMPT)
    with pytest.raises(BatchError, match=r"must be the full sequence; they are not in row 1"):
        DenseRows(pad_id=PAD)(rows)


def test_a_column_of_one_number_per_row_is_no_column_of_one_token():
    batch = as_written_padded([([], [5]), ([], [])])
    batch["next", "reward"] = torch.zeros(2, 1)
    with pytest.raises(BatchError, match="every row needs a token; found none in row 1"):
        DenseRows(pad_id=PAD)(batch)


def test_a_padding_token_inside_a_response_is_refused():
    """Only pad_output=True leaves the token in the row. Otherwise TransformersWrapper removes it."""
    batch = as_written_padded([([5], [6, 7, 8])])
    batch[FULL][0, 2] = batch[RESPONSE][0, 1] = PAD
    batch[ATTENTION] = batch[FULL] != PAD
    with pytest.raises(BatchError, match="treat a sampled padding token as padding"):
        DenseRows(pad_id=PAD)(batch)


def test_rows_without_a_response_or_loss_mask_are_refused():
    with pytest.raises(MissingKeyError, match=r"\(loss_mask_key\).*or the column \('tokens', 'response'\)"):
        DenseRows(pad_id=PAD)(ragged(ROWS).exclude(RESPONSE))
    with pytest.raises(MissingKeyError, match=r"\('tokens', 'full'\) \(tokens_key\)"):
        DenseRows(pad_id=PAD)(ragged(ROWS).exclude(FULL))
    for pad_id in (-1, None, 1.5):
        with pytest.raises(ValueError, match="pad_id must be an integer"):
            DenseRows(pad_id=pad_id)


@pytest.mark.slow
def test_a_filter_before_dense_rows_is_refused():
    dense = DenseRows(pad_id=PAD)
    Pipeline({"gate": CompletenessGate(group_size=1), "dense": dense})
    Pipeline({"dense": dense, "filter": SampleFilter(criterion=LengthWithin(high=2))})
    for criterion in (LengthWithin(high=2), NotTruncated()):
        with pytest.raises(ValueError, match="Put 'dense' before 'filter'"):
            Pipeline({"filter": SampleFilter(criterion=criterion), "dense": dense})
    narrower = DenseRows(pad_id=PAD)
    narrower.in_keys = [*narrower.in_keys, LOSS_MASK]  # a stage that reads the mask may come after the filter
    Pipeline({"filter": SampleFilter(criterion=NotTruncated()), "narrower": narrower})
    with pytest.raises(ValueError, match="Put 'dense' before 'filter'"):
        load_pipeline("grpo", stages={"dense": {"pad_id": 0}}, after={"dense": "filter"})


def test_ragged_rows_of_two_dtypes_are_refused():
    rows = ragged(ROWS)
    rows.tensordicts[1][FULL] = rows.tensordicts[1][FULL].to(torch.int32)
    with pytest.raises(BatchError, match=r"of one dtype and width; found .*torch.int32.*torch.int64"):
        DenseRows(pad_id=PAD)(rows)


@pytest.mark.parametrize("more", [(), (1,), (3,)])
def test_a_column_as_wide_as_moved_tokens_is_refused(more):
    for rows in ([([5], [6, 7, 8]), ([5], [6])], [([5], [6]), ([5], [])]):
        batch = as_written_padded(rows)
        batch["mine", "token_reward"] = torch.zeros(*batch[FULL].shape, *more)
        with pytest.raises(BatchError, match=r"moved to the end of the rows.*'token_reward'"):
            DenseRows(pad_id=PAD)(batch)


def test_no_operator_runs_per_ragged_row():
    class Operators(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.calls += 1
            return operator(*args, **(kwargs or {}))

    found = set()
    for number in (16, 128):
        lengths = [([5] * (1 + row % 3), [6] * (1 + row % 5)) for row in range(number)]
        rows = ragged(lengths, {LOG_PROB: [torch.zeros(len(a) + len(b)) for a, b in lengths]})
        with Operators() as operators:
            DenseRows(pad_id=PAD)(rows)
        found.add(operators.calls)
    assert len(found) == 1


@pytest.mark.parametrize("make", [ragged, as_written_padded])
def test_device_reads_do_not_grow_with_the_rows(make):
    waits = set()
    for number in (16, 128):
        rows = [([5] * (1 + row % 3), [6] * (1 + row % 5)) for row in range(number)]
        waits.add(waits_of(DenseRows(pad_id=PAD), make(rows)))
    (found,) = waits
    assert sum(found) <= 3
