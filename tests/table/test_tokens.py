"""Tokens are counted and summed exactly for any width, padding and order."""

from __future__ import annotations

import math
import re
from functools import partial
from unittest.mock import patch

import pytest
import torch
from fake_device import FakeDevice
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import Pipeline, optimise, total_loss
from headrace.transforms import BatchError, LossWeight, MissingKeyError
from headrace.transforms.table import Rows
from headrace.transforms.table.tensordicts import FEW, count_true
from headrace.transforms.table.tokens import (
    advantage_dtype,
    change_advantage,
    check_lengths,
    finite_inside,
    first_token,
    has_versions_of_tokens,
    in_blocks,
    mask_tokens,
    nan_inside,
    padded,
    plain_sum,
    read_advantage,
    read_loss_mask,
    read_tokens,
    sum_of_tokens,
    unless_all,
    version_range,
    versions_of_rows,
    versions_of_tokens,
    write_tokens,
    zero_outside,
)


def loss_tokens(batch: TensorDict, mask, log_prob) -> torch.Tensor:
    """The number of tokens in the loss of each row, as the table counts them."""
    rows = Rows.read(batch).seen_by(LossWeight(loss_mask_key=mask, log_prob_key=log_prob))
    return rows.count("loss_mask", finite=True)


@given(st.integers(0, 40), st.integers(1, 4), st.integers(0, 9), st.booleans(), st.sampled_from([0, FEW]))
def test_tokens_are_counted_for_any_width(width, rows, seed, odd, few):
    with patch("headrace.transforms.table.tensordicts.FEW", few):
        count_of_any_width(width, rows, seed, odd)


def count_of_any_width(width, rows, seed, odd):
    mask = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < 0.6
    shown = (mask.view(torch.uint8) * 255).view(torch.bool) if odd else mask  # a True may be any byte but 0
    assert count_true(shown).tolist() == [sum(row) for row in mask.tolist()]
    wide = torch.ones(rows, 8 * 300 + width, dtype=torch.bool)
    assert count_true(wide).tolist() == [8 * 300 + width] * rows
    for row in range(rows):  # views may begin anywhere in memory
        assert count_true(mask[row:]).tolist() == [sum(each) for each in mask[row:].tolist()]
        assert count_true(wide[row : row + 1]).tolist() == [8 * 300 + width]
        assert count_true(wide[row:, 3:]).tolist() == [8 * 300 + width - 3] * (rows - row)
    assert count_true(wide.t()).tolist() == [rows] * (8 * 300 + width)


@given(st.integers(1, 9), st.sampled_from([0, 1, 7, 300]), st.integers(0, 9), st.integers(0, 9))
def test_padding_changes_no_bit_of_a_sum_of_tokens(rows, width, left, right):
    values = torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(left))
    padded = torch.nn.functional.pad(values, (left, right))
    assert torch.equal(sum_of_tokens(padded), sum_of_tokens(values))
    assert torch.equal(sum_of_tokens(padded[-1:]), sum_of_tokens(values)[-1:])
    for row, total in zip(values.tolist(), sum_of_tokens(values).tolist(), strict=True):
        assert abs(total - math.fsum(row)) <= 1e-13 * math.fsum(map(abs, row))


@given(
    st.integers(1, 9),
    st.sampled_from([0, 1, 7, 300, 2**15 + 7]),
    st.integers(0, 9),
    st.sampled_from([1, 2]),
)
def test_a_plain_sum_is_correct_up_to_rounding_and_depends_only_on_its_row(rows, width, seed, threads):
    values = torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, alone = plain_sum(values), torch.cat([plain_sum(row) for row in values.split(1)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, alone)
    for row, total in zip(values.tolist(), found.tolist(), strict=True):
        assert abs(total - math.fsum(row)) <= 1e-14 * math.fsum(map(abs, row))


@given(
    st.lists(st.floats(width=16), min_size=1, max_size=9),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.data(),
)
def test_values_outside_a_mask_are_not_read(values, dtype, data):
    inside = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    column, mask = torch.tensor([values], dtype=dtype), torch.tensor([inside])
    odd = (mask.view(torch.uint8) * 255).view(torch.bool)  # a True may be any byte but 0
    for each in (mask, odd):
        assert torch.equal(
            zero_outside(column.clone(), each).nan_to_num(7.0), torch.where(mask, column, 0.0).nan_to_num(7.0)
        )
        assert torch.equal(nan_inside(column, each).isnan(), mask | column.isnan())
    inside_is_finite = bool((column.isfinite() | ~mask).all())
    with FakeDevice() as fake:
        there = bool(fake.get(finite_inside(fake.put(column), fake.put(mask))))
    for said in (bool(finite_inside(column, mask)), there):
        assert inside_is_finite or not said
        assert said or not inside_is_finite or not math.isfinite(float(column[mask].abs().sum()))


def test_a_batch_may_reuse_the_memory_of_the_last_batch():
    """Writes by NumPy or by another process do not change the version of a tensor."""
    memory = torch.ones(4, 6, dtype=torch.bool)
    batch = TensorDict({"mask": memory}, batch_size=[4])
    pipeline = Pipeline(
        {"weight": LossWeight(loss_mask_key="mask", log_prob_key=None)},
        loss_mask_key="mask",
        log_prob_key=None,
    )
    assert pipeline(batch)["num_tokens"].tolist() == [24] * 4
    memory.numpy()[:, 2:] = False
    assert pipeline(batch)["num_tokens"].tolist() == [8] * 4


PROMPT, RESPONSE, ATTENTION = ("tokens", "prompt"), ("tokens", "response"), ("masks", "all_attention_mask")
LOG_PROB, MASK = ("log_probs", "full"), ("masks", "all_assistant_mask")


def row_of(prompt: int, response: int) -> TensorDict:
    row = {PROMPT: torch.zeros(prompt), RESPONSE: torch.zeros(response)}
    row[ATTENTION] = torch.ones(prompt + response, dtype=torch.bool)
    return TensorDict({**row, LOG_PROB: torch.zeros(prompt + response)})


def scored(form: str) -> TensorDict:
    """Prompts of 1 and 3 tokens and responses of 2 and 1, as TorchRL's wrappers write them."""
    if form == "ragged":
        return lazy_stack([row_of(1, 2), row_of(3, 1)])
    attention = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()  # padding before and after
    columns = {PROMPT: torch.zeros(2, 3), RESPONSE: torch.zeros(2, 2), ATTENTION: attention}
    return TensorDict({**columns, LOG_PROB: torch.zeros(2, 5)}, batch_size=[2])


forms = pytest.mark.parametrize("form", ["dense", "ragged"])


@forms
def test_without_a_mask_only_the_response_trains(form):
    batch = scored(form)
    assert loss_tokens(batch, "absent", LOG_PROB).tolist() == [2, 1]
    assert loss_tokens(batch, "absent", None).tolist() == [2, 1]
    batch[0].get(LOG_PROB)[-1] = float("nan")
    assert loss_tokens(batch, "absent", LOG_PROB).tolist() == [1, 1]


@forms
@pytest.mark.parametrize("lacking", [PROMPT, RESPONSE, ATTENTION])
def test_finite_log_probabilities_are_not_a_mask(form, lacking):
    with pytest.raises(MissingKeyError, match=r"mask 'absent' \(loss_mask_key\).*Write the mask into"):
        loss_tokens(scored(form).exclude(lacking), "absent", LOG_PROB)


def test_prompt_and_response_must_cover_the_whole_width():
    batch = scored("dense")
    batch[RESPONSE] = torch.zeros(2, 1)
    with pytest.raises(MissingKeyError, match="together as wide as"):
        loss_tokens(batch, "absent", LOG_PROB)


def test_an_optimiser_step_needs_a_token_in_the_loss():
    parameter = torch.nn.Parameter(torch.zeros(()))

    def steps(batch):
        loss = lambda batch: TensorDict({"loss_objective": parameter * 2})  # noqa: E731
        return optimise([batch], loss, torch.optim.SGD([parameter], lr=0.1), reduce=total_loss)

    assert steps(scored("dense")) == 1
    silent = scored("dense")
    silent[LOG_PROB][:, 3:] = float("nan")
    assert steps(silent) == 0
    with pytest.raises(MissingKeyError, match="Write the mask"):
        steps(scored("dense").exclude(PROMPT))


@forms
@pytest.mark.parametrize("masked", [False, True])
def test_weights_report_and_ledger_count_the_same_tokens(form, masked):
    """The first row has a token whose log-probability is not finite. The second row has only such tokens."""
    batch = scored(form)
    batch[0].get(LOG_PROB)[-1] = float("nan")
    batch[1].get(LOG_PROB)[3] = float("nan")
    if masked:
        if form == "dense":
            batch[MASK] = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 1, 0]]).bool()
        else:
            batch.tensordicts[0][MASK] = torch.tensor([0, 1, 1]).bool()
            batch.tensordicts[1][MASK] = torch.tensor([0, 0, 0, 1]).bool()
    for stages in ({"weight": LossWeight()}, {}):
        run = Pipeline(stages).run(batch)
        report = run.report(step=0)
        assert report.columns["tokens"].tolist() == [1, 0]
        assert report.columns["reason"].tolist() == [0, 1]
        assert run.metrics.get("weight/tokens", 1) == 1
        assert not stages or run.batch["num_tokens"].tolist() == [1, 1]


# -- helpers of stages that read tokens ---------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8])
def test_blocks_of_rows_give_the_numbers_of_all_rows(count):
    """A block has at most as many tokens as asked for, and at least one row."""
    values, more = torch.arange(3.0 * count).view(count, 3), torch.arange(count)
    seen = []

    def function(some, number, nothing):
        seen.append(len(some))
        assert nothing is None
        return {"sum": some.sum(-1), "wide": some * number[:, None]}

    for at_once, size in ((1, 1), (6, 2), (8, 2), (9, 3), (3 * count, count), (2**17, count)):
        seen.clear()
        found = in_blocks(function, values, more, None, at_once=at_once)
        assert torch.equal(found["sum"], values.sum(-1))
        assert torch.equal(found["wide"], values * more[:, None])
        blocks = [size] * (count // max(size, 1)) + [count % max(size, 1)] * (count % max(size, 1) > 0)
        assert seen == (blocks or [0])
    assert in_blocks(lambda some: {"n": some.sum(-1)}, torch.ones(count, 0))["n"].tolist() == [0.0] * count
    seen.clear()
    in_blocks(function, torch.ones(5, 1).expand(5, 2**16), torch.ones(5), None)  # 1 MiB of float64 is a block
    assert seen == [2, 2, 1]


CHOSEN = st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4)


@given(CHOSEN)
def test_the_first_chosen_token_of_each_row_is_that_of_a_loop(rows):
    chosen, values = torch.tensor(rows), torch.arange(3.0 * len(rows)).view(-1, 3)
    first = [row.index(True) if True in row else -1 for row in rows]
    place, number, of_row = first_token(chosen, values, values[:, :1])
    assert place.tolist() == first
    there = [row for row, token in enumerate(first) if token >= 0]
    assert number[there].tolist() == [float(values[row, first[row]]) for row in there]
    assert of_row.tolist() == values[:, 0].tolist()
    assert [each.tolist() for each in first_token(chosen[:, :0], values[:, :0])] == [[-1] * len(rows)] * 2
    versions = values.long() % 5 - 1
    ranged = [
        [each for each, use in zip(*pair, strict=True) if use]
        for pair in zip(versions.tolist(), rows, strict=True)
    ]
    for nothing in (-1, 7):
        expected = [[min(each, default=nothing), max(each, default=nothing)] for each in ranged]
        assert version_range(versions, chosen, nothing).tolist() == expected
        assert version_range(versions[:, :0], chosen[:, :0], nothing).tolist() == [[nothing] * 2] * len(rows)


def of_widths(*widths: int, key: str = "x", dtype=torch.float32, **others) -> TensorDict:
    """Ragged rows with as many tokens; `others` have one value or one width for each row."""
    rows = [TensorDict({key: torch.arange(1, width + 1).to(dtype)}) for width in widths]
    for name, sizes in others.items():
        for row, size in zip(rows, sizes, strict=True):
            row[name] = torch.ones(()) if size is None else torch.ones(size)
    return lazy_stack(rows)


def test_ragged_rows_are_padded_on_either_side():
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    whole = [row.long() for row in rows]
    nan = float("nan")
    for some, options, expected in (
        (rows, {}, [[1.0, 2.0], [3.0, 0.0]]),
        (rows, {"fill": 9}, [[1.0, 2.0], [3.0, 9.0]]),
        (rows, {"fill": None}, [[1.0, 2.0], [3.0, nan]]),
        (rows, {"fill": None, "side": "left"}, [[1.0, 2.0], [nan, 3.0]]),
        (whole, {"fill": None}, [[1, 2], [3, 0]]),
    ):
        assert str(padded(some, "x", **options).tolist()) == str(expected)
    for odd, found in (
        ([rows[0], whole[0]], "(torch.float32, torch.Size([]))', \"(torch.int64, torch.Size([]))"),
        ([rows[0], torch.ones(2, 2)], "(torch.float32, torch.Size([2]))"),
        (["a", "b"], "<class 'str'>"),
    ):
        with pytest.raises(
            BatchError, match=r"^rows of 'x' must be tensors of one dtype and width; found \["
        ) as info:
            padded(odd, "x")
        assert found.replace("', \"", "', '") in str(info.value).replace('"', "'")


def test_one_number_per_token_is_read_as_a_matrix():
    read = partial(read_tokens, reader="Mine", option="x_key")
    batch = TensorDict({"x": torch.arange(6.0).view(2, 3, 1), "y": torch.ones(2, 3, requires_grad=True)}, [2])
    assert read(batch, "x").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert not read(batch, "y").requires_grad
    assert read(of_widths(1, 2), "x", fill=7, side="left").tolist() == [[7.0, 1.0], [1.0, 2.0]]
    for column, found in (
        (torch.ones(2), "(2,)"),
        (torch.ones(2, 3, 2), "(2, 3, 2)"),
        (["a", "b"], "NonTensorStack"),
    ):
        said = f"Mine needs one number per token, (N, T), in 'x' (x_key); found {found}"
        with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
            read(TensorDict({"x": column}, [2]), "x")
    with pytest.raises(MissingKeyError, match=r"^Mine needs the key 'x' \(x_key\); the batch has \['y'\]"):
        read(batch.exclude("x"), "x")


def test_ragged_columns_must_be_as_long_as_the_tokens():
    batch = of_widths(1, 3, 2, same=(1, 3, 2), numbers=(None, None, None), ones=(1, 1, 1), cut=(1, 2, 1))
    check = partial(check_lengths, batch, like="x", reader="Mine")
    check(["same", "numbers", "ones"])
    check(["cut"], like="cut")
    check_lengths(torch.stack([*of_widths(2, 2).unbind(0)]), ["absent"], "x", reader="Mine")
    for key, wrong, options in (
        ("cut", "row 1 has 2 for 3 tokens, row 2 has 1 for 2 tokens", {}),
        ("ones", "row 1 has 1 for 3 tokens, row 2 has 1 for 2 tokens", {"or_of_rows": False}),
        (
            "numbers",
            "row 0 has 0 for 1 tokens, row 1 has 0 for 3 tokens, row 2 has 0 for 2 tokens",
            {"or_of_rows": False},
        ),
    ):
        said = (
            f"Mine needs one entry per token in '{key}', as many as 'x' has; {wrong}. Were tokens cut off "
            f"after "
            f"'{key}' was written? If it has one entry per row, remove it with batch.exclude"
        )
        with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
            check(["same", key], **options)


def test_written_tokens_are_as_wide_as_the_tokens_of_their_row():
    batch = of_widths(1, 3)
    write_tokens(batch, ("a", "b"), torch.arange(8).view(2, 4), "x")
    assert [row["a", "b"].tolist() for row in batch.unbind(0)] == [[0], [4, 5, 6]]
    dense = TensorDict({"x": torch.ones(2, 3)}, [2])
    write_tokens(dense, "y", torch.arange(8).view(2, 4), "x")
    assert dense["y"].shape == (2, 4)


def test_a_batch_has_a_version_per_row_or_per_token():
    def of(column):
        return TensorDict({"v": column}, [2])

    for column, tokens in (
        (torch.ones(2), False),
        (torch.ones(2, 1), False),
        (torch.ones(2, 2), True),
        (["a", "b"], False),
    ):
        assert has_versions_of_tokens(of(column), "v") == tokens
    assert not has_versions_of_tokens(of_widths(1, 1), "x")
    assert not has_versions_of_tokens(
        lazy_stack([TensorDict({"x": torch.ones(size)}) for size in ((), 1)]), "x"
    )
    assert has_versions_of_tokens(of_widths(1, 2), "x")
    assert has_versions_of_tokens(of_widths(2, 1), "x")
    mask = torch.tensor([[True, False, True], [False, False, False]])
    batch = TensorDict({"v": torch.tensor([[4, 9, 2], [7, 7, 7]]), "mask": mask}, [2])
    rows = Rows.read(batch)
    assert versions_of_rows(rows, "v", "mask").tolist() == [[2, 4, 6, 2], [-1, -1, 0, 0]]
    rows.table.columns["v"] = torch.ones(2)
    assert versions_of_rows(rows, "v", "mask") is None
    for column, said in (
        (torch.ones(2, 3), "'v' (version_key) must hold integers; found torch.float32"),
        (mask, "'v' (version_key) must hold integers; found torch.bool"),
        (
            torch.ones(2, 4).long(),
            "version_key and loss_mask_key must have one number for each token of a row; found 4 and 3 "
            "tokens",
        ),
    ):
        with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
            versions_of_tokens(batch.set("v", column), "v", "mask", reader="Mine")


def test_ragged_versions_are_one_per_token():
    batch = of_widths(1, 3, key="mask", dtype=torch.bool, v=(1, 1))
    with pytest.raises(
        BatchError, match=r"^Mine needs one entry per token in 'v', .*; row 1 has 1 for 3 tokens\. "
    ):
        versions_of_tokens(batch, "v", "mask", reader="Mine")
    batch = of_widths(1, 3, key="v", dtype=torch.int64)
    for row in batch.tensordicts:
        row["mask"] = row["v"] != 2
    versions, sampled = versions_of_tokens(batch, "v", "mask", reader="Mine")
    assert versions.tolist() == [[1, 0, 0], [1, 2, 3]]
    assert sampled.tolist() == [[True, False, False], [True, False, True]]


ADVANTAGES = {
    "per row": (torch.tensor([[[0.5]], [[2.0]], [[-1.0]]]), torch.float32),
    "per token": (torch.tensor([[0.5, 1.0], [2.0, 4.0], [-1.0, 0.0]]).unsqueeze(-1), torch.float32),
    "per token in bfloat16": (torch.tensor([[0.5, 1.0], [2.0, 4.0], [-1.0, 0.0]]).bfloat16(), torch.bfloat16),
}


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("at_least", [None, torch.float64])
def test_an_advantage_is_changed_element_by_element(kind, ragged, at_least):
    column, dtype = ADVANTAGES[kind]
    batch = TensorDict({"advantage": column}, [3])
    rows = Rows.read(lazy_stack([*batch.unbind(0)]) if ragged else batch, keys=["advantage"])
    rows.leave(torch.tensor([False, True, False]), "gone", "dropped")
    seen = rows.seen_by(object())
    assert advantage_dtype(seen) is dtype
    change_advantage(
        seen, lambda advantage, by: advantage * by, at_least=at_least, by=torch.tensor([2.0, 3.0])
    )
    assert advantage_dtype(seen) is (at_least or dtype)
    out = seen.write()
    assert out["advantage"].dtype is (at_least or dtype)
    assert torch.equal(
        out["advantage"].float(),
        column[[0, 2]].float() * torch.tensor([2.0, 3.0]).view(-1, *[1] * (column.ndim - 1)),
    )
    assert torch.equal(batch["advantage"], column)


def test_an_advantage_that_is_missing_or_no_float_is_not_changed():
    said = "a stage needs the key 'advantage' (advantage_key); the batch has ['x']. If it goes by another "
    with pytest.raises(MissingKeyError, match=f"^{re.escape(said)}name, set advantage_key$"):
        change_advantage(Rows.read(TensorDict({"x": [1]}, [1])), len)
    rows = Rows.read(TensorDict({"advantage": [1]}, [1]), keys=["advantage"])
    with pytest.raises(BatchError, match=r"^the advantage must be floating-point; found torch\.int64$"):
        change_advantage(rows, len)


def test_an_advantage_is_read_per_row_or_per_token():
    mask = torch.ones(2, 3, dtype=torch.bool)
    read = partial(read_advantage, mask=mask, mask_key="mask", reader="Mine")
    for column, expected in (
        (torch.tensor([1.0, 2.0]), [[1.0], [2.0]]),
        (torch.tensor([1.0, 2.0]).view(2, 1, 1), [[1.0], [2.0]]),
        (torch.arange(6.0).view(2, 3, 1), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
    ):
        assert read(TensorDict({"a": column}, [2]), "a").tolist() == expected
    nothing = read_advantage(TensorDict({"a": torch.ones(0, 3)}, [0]), "a", mask[:0], "mask", reader="Mine")
    assert nothing.shape == (0, 3)
    for column, found in (
        (torch.ones(2, 2), "torch.float32 (2, 2)"),
        (torch.ones(2).long(), "torch.int64 (2,)"),
    ):
        said = (
            "the advantage must be floating-point, per row, (N, 1, 1), or per token, (N, 3, 1); Mine found "
            "'a' "
            f"(advantage_key) {found}"
        )
        with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
            read(TensorDict({"a": column}, [2]), "a")
    rows = Rows.read(TensorDict({"x": [1, 2]}, [2]))
    rows["advantage"] = torch.tensor([0.1, 0.2], dtype=torch.float64)
    written = read(rows.table.batch, "advantage", rows=rows)
    assert torch.equal(written, torch.tensor([[0.1], [0.2]]))  # as it will be rounded


def test_tokens_that_leave_the_loss_keep_the_length_of_their_row():
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    batch = TensorDict({MASK: mask, LOG_PROB: torch.zeros(3, 3)}, [3])
    out = torch.tensor([[True, False, False], [False, False, False], [False, True, False]])
    for keeps in (False, True):
        rows = Rows.read(batch)
        if keeps:
            rows.table.masking.kept_finite = ()
        given = rows.tokens()
        mask_tokens(rows, given, out, tokens=mask.sum(1), taken=(out & mask).sum(1))
        assert torch.equal(given[MASK], mask & ~out)
        assert torch.equal(given[LOG_PROB].isnan(), out & (not keeps))
        assert rows["headrace", "length"].tolist() == [2, -1, -1]
        mask_tokens(rows, given, mask, tokens=torch.tensor([1, 3, 1]), taken=torch.tensor([1, 3, 1]))
        assert rows["headrace", "length"].tolist() == [2, 3, 1]
    assert torch.equal(batch[MASK], mask)
    in_loss = torch.tensor([True, False, True])
    assert read_loss_mask(batch, MASK, None, reader="Mine").tolist() == mask.tolist()
    assert (
        read_loss_mask(batch=batch, key=MASK, in_loss=in_loss, reader="Mine").tolist()
        == (mask & in_loss[:, None]).tolist()
    )
    assert unless_all(torch.ones(2).bool()) is None
    assert unless_all(in_loss) is in_loss
