"""Packed rows lose only their padding."""

from __future__ import annotations

import re

import pytest
import torch
from batches import cut_rows, no_rows
from fake_device import waits_of
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from headrace.transforms import BatchError, MissingKeyError, pack, unpack, unpack_tokens

ATTENTION, LOSS, FULL = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask"), ("tokens", "full")
OF_TOKENS = (FULL, ATTENTION, LOSS, ("log_probs", "full"))


def batch_of(lengths, width=None, side="left") -> TensorDict:
    rows, width = len(lengths), width or max(lengths)
    place = torch.arange(width).expand(rows, width)
    count = torch.tensor(lengths).unsqueeze(1)
    there = place >= width - count if side == "left" else place < count
    tokens = torch.where(there, torch.arange(1, rows * width + 1).view(rows, width), 0)
    return TensorDict(
        {
            FULL: tokens,
            ATTENTION: there,
            LOSS: there & (tokens % 2 == 0) & (there.cumsum(-1) > 1),
            ("log_probs", "full"): torch.where(there, -tokens / 10.0, 0.0),
            "advantage": torch.arange(rows).view(rows, 1, 1) * 1.0,
            "loss_weight": torch.arange(rows) / 10.0,
            "rollout_id": torch.arange(rows),
            "prompt_text": [f"prompt {i}" for i in range(rows)],
        },
        batch_size=[rows],
    )


def ragged(dense, lengths) -> TensorDict:
    """The rows, each cut to its length."""
    return cut_rows(dense, map(slice, lengths), OF_TOKENS)


def packed_by_hand(rows, width) -> dict[str, list]:
    """The packed batch, made token by token."""
    keys = ("input_ids", "position_ids", "segment_ids", "packed_at", "loss_weight", "advantage")
    found = {key: [] for key in keys} | {"cu_seqlens": [0]}
    for number, row in enumerate(rows):
        places = [place for place, there in enumerate(row[ATTENTION].tolist()) if there]
        found["input_ids"] += [int(row[FULL][place]) for place in places]
        found["position_ids"] += range(len(places))
        found["segment_ids"] += [number] * len(places)
        found["packed_at"] += [number * width + place for place in places]
        found["loss_weight"] += [float(row["loss_weight"])] * len(places)
        found["advantage"] += [row["advantage"].flatten().tolist()] * len(places)
        found["cu_seqlens"].append(len(found["input_ids"]))
    return found


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=6),
    st.sampled_from(["left", "right", "ragged"]),
)
def test_packed_rows_equal_those_of_a_loop_for_any_padding(lengths, layout):
    """Ragged rows may have padding too, for example from a collector that pads each env step separately."""
    batch = batch_of([length for length, _ in lengths], width=9, side="left" if layout == "left" else "right")
    batch = ragged(batch, [length + more for length, more in lengths]) if layout == "ragged" else batch
    packed, rows = pack(batch), batch.unbind(0)
    width = max(len(row[FULL]) for row in rows)
    for key, values in packed_by_hand(rows, width).items():
        assert packed[key][0].tolist() == values, key
    assert packed["cu_seqlens"].dtype is torch.int32  # which kernels of attention need
    assert packed["packed_from"] == (len(rows), width)
    back = unpack(packed)
    for number, row in enumerate(rows):
        for key in OF_TOKENS:
            assert back[key][number].tolist() == row[key].tolist() + [0] * (width - len(row[key])), key
    assert back["rollout_id"].tolist() == [*range(len(rows))]
    assert list(back["prompt_text"]) == [f"prompt {number}" for number in range(len(rows))]


@pytest.mark.parametrize("stacked", [False, True])
def test_device_reads_do_not_grow_with_the_rows(stacked):
    for rows in (1, 4, 64):
        lengths = [1 + row % 5 for row in range(rows)]
        batch = batch_of(lengths, side="right")
        batch = ragged(batch, lengths) if stacked else batch
        assert waits_of(pack, batch) == (2, int(stacked and rows > 1))  # ragged rows also copy lengths
        assert waits_of(unpack, pack(batch)) == (0, 0)


def test_an_advantage_per_token_is_packed_per_token():
    batch = batch_of([2, 3], side="right")
    batch["advantage"] = batch[FULL].float().unsqueeze(-1)
    for rows in (batch, cut_rows(batch, map(slice, [2, 3]), (*OF_TOKENS, "advantage"))):
        assert pack(rows)["advantage"].flatten().tolist() == [1.0, 2.0, 4.0, 5.0, 6.0]


def test_columns_of_a_corrected_loss_are_packed():
    """A corrected loss reads the log-probabilities of the trainer's policy at the start of the step."""
    batch = batch_of([2, 3])
    batch["old_log_probs", "full"], batch["importance_weight"] = torch.rand(2, 3), torch.rand(2, 3)
    packed = pack(batch)
    for key in (("old_log_probs", "full"), "importance_weight"):
        assert torch.equal(packed[key], batch[key][batch[ATTENTION]].unsqueeze(0))


def test_gradients_flow_back_through_unpacking():
    packed = pack(batch_of([2, 3]))
    values = torch.ones(1, 5, requires_grad=True)
    (unpack_tokens(values, packed) * torch.tensor([[1.0], [10.0]])).sum().backward()
    assert values.grad.tolist() == [[1.0, 1.0, 10.0, 10.0, 10.0]]


@pytest.mark.slow
def test_a_transformers_model_scores_packed_rows_like_single_rows():
    transformers = pytest.importorskip("transformers", reason="the extra `llm` is not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=64, pad_token_id=0, **sizes)
    ).double()
    batch = batch_of([3, 5, 2])
    packed = pack(batch)
    there = batch[ATTENTION]
    place = (there.long().cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        padded = model(input_ids=batch[FULL], attention_mask=there, position_ids=place).logits
        end_to_end = model(
            input_ids=packed["input_ids"], position_ids=packed["position_ids"], use_cache=False
        ).logits
    torch.testing.assert_close(
        unpack_tokens(end_to_end, packed)[there], padded[there], rtol=1e-10, atol=1e-12
    )


def test_rows_that_cannot_be_packed_are_refused_with_the_reason():
    batch = batch_of([2, 3])
    with pytest.raises(MissingKeyError, match="attention_key"):
        pack(batch.exclude(ATTENTION))
    for rows in (batch, ragged(batch, [3, 3])):
        with pytest.raises(MissingKeyError, match="set tokens_key"):
            pack(rows.exclude(FULL))
    with pytest.raises(BatchError, match=r"every row needs a token; rows \[0\] have none"):
        pack(batch_of([0, 3]))
    with pytest.raises(BatchError, match=r"rows \[1, 3\] have none"):  # the last row
        pack(batch_of([3, 0, 1, 0]))
    first = batch.clone()
    first[LOSS] = first[ATTENTION].clone()
    with pytest.raises(BatchError, match=r"first token of a row has no context.*rows \[0, 1\]"):
        pack(first)
    with pytest.raises(
        BatchError, match=r"\(2, 3, ...\), as wide as the attention mask; 'rollout_id' is \(2,\)"
    ):
        pack(batch, token_keys=["rollout_id"])
    outside = batch.clone()
    outside[LOSS][0, 0] = True
    with pytest.raises(BatchError, match=r"tokens in the loss must be real; in rows \[0\]"):
        pack(outside)
    with pytest.raises(BatchError, match="a loss mask is bool"):
        pack(batch.clone().set(LOSS, batch[LOSS].float()))
    for key, options in (
        ("segment_ids", {"token_keys": ["segment_ids"]}),
        ("tree_end", {"token_keys": ["tree_end"]}),
        ("input_ids", {"input_keys": ["input_ids"], "tree": True}),
    ):
        with pytest.raises(BatchError, match=rf"pack writes the columns \['{key}'\]: rename"):
            pack(batch.clone().set(key, batch[FULL]), **options)
    with pytest.raises(BatchError, match="at least one row"):
        pack(no_rows(batch))
    with pytest.raises(MissingKeyError, match="written by pack"):
        unpack(batch)


def test_an_error_of_packing_lists_at_most_ten_rows():
    batch = batch_of([2] * 24)
    empty, first, outside = batch.clone(), batch.clone(), batch_of([2] * 24, width=3)
    empty[ATTENTION][1:12] = False
    first[LOSS][12:] = True
    outside[LOSS][2:13, 0] = True
    outside = outside.set(ATTENTION, outside[ATTENTION] & (torch.arange(3) > 0))
    for wrong, rows in ((empty, range(1, 11)), (first, range(12, 22)), (outside, range(2, 12))):
        with pytest.raises(BatchError, match=re.escape(f"rows {[*rows]}")):
            pack(wrong)


def test_values_of_another_number_than_the_tokens_or_nodes_are_refused():
    batch = batch_of([2, 3])
    batch[FULL] = torch.tensor([[0, 5, 6], [5, 6, 7]])
    for tree, size, what in ((False, 5, "tokens"), (True, 3, "nodes of a tree")):
        packed = pack(batch, tree=tree)
        for shape in ((1, size + 1), (size,), (2, size)):
            with pytest.raises(BatchError) as refused:
                unpack_tokens(torch.zeros(shape), packed)
            assert str(refused.value) == (
                f"values must be (1, {size}, ...), for the {size} {what} that the model sees; got {shape}. "
                "To restore the packed columns use unpack"
            )
        values = torch.arange(2.0 * size).view(1, size, 2)
        nodes = {5: [[0, 1], [2, 3, 4]], 3: [[0, 1], [0, 1, 2]]}[size]
        expected = [[[0, 0]] * (3 - len(row)) + [[2 * node, 2 * node + 1] for node in row] for row in nodes]
        assert unpack_tokens(values, packed).tolist() == expected


def with_row(number, key, value) -> TensorDict:
    """Ragged rows. One of them has a wrong value."""
    rows = ragged(batch_of([2, 3, 2], side="right"), [2, 3, 2])
    rows.tensordicts[number][key] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (with_row(2, ATTENTION, torch.zeros(2, dtype=torch.bool)), r"rows \[2\] have none"),
        (with_row(1, LOSS, torch.tensor([True, False, False])), r"in the loss in rows \[1\]: remove it"),
        (with_row(1, ATTENTION, torch.tensor([True, False, False])), r"must be real; in rows \[1\]"),
        (with_row(0, LOSS, torch.zeros(3, dtype=torch.bool)), r"in rows \[0\] the loss mask has another"),
        (with_row(1, FULL, torch.zeros(2, dtype=torch.int64)), r"\(3, 3, ...\).*is \(3, 2\) at row 1"),
        (with_row(1, FULL, torch.zeros(3, dtype=torch.int32)), "one dtype; found torch.int32, torch.int64"),
    ],
)
def test_ragged_rows_that_cannot_be_packed_are_named(rows, message):
    with pytest.raises(BatchError, match=message):
        pack(rows)
