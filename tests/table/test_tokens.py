"""Tokens are counted and summed exactly for any width, padding and order."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import Pipeline, optimise, total_loss
from headrace.transforms import LossWeight, MissingKeyError
from headrace.transforms.table import Rows
from headrace.transforms.table.tensordicts import FEW, count_true
from headrace.transforms.table.tokens import finite_inside, nan_inside, plain_sum, sum_of_tokens, zero_outside


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
    if finite_inside(column, mask):
        assert bool((column.isfinite() | ~mask).all())


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_token_with_a_nan_log_probability_is_masked(value):
    """GRPOLoss masks such a token, so no mean may count it."""
    mask, log_prob = torch.tensor([[True, True, False], [True, True, True]]), torch.zeros(2, 3)
    log_prob[1, 2] = value
    batch = TensorDict({"mask": mask, "log_prob": log_prob}, batch_size=[2])
    assert loss_tokens(batch, "mask", "log_prob").tolist() == [2, 2]
    assert loss_tokens(batch, "mask", None).tolist() == [2, 3]


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
