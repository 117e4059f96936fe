"""Tokens are counted by eight bytes at a time, whatever lies where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from headrace.transforms.tokens import count_true, loss_tokens


@given(st.integers(0, 40), st.integers(1, 4), st.integers(0, 9), st.booleans())
def test_tokens_are_counted_whatever_the_width(width, rows, seed, odd):
    mask = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < 0.6
    shown = (mask.view(torch.uint8) * 255).view(torch.bool) if odd else mask  # a True may be any byte but 0
    assert count_true(shown).tolist() == [sum(row) for row in mask.tolist()]
    wide = torch.ones(rows, 8 * 300 + width, dtype=torch.bool)
    assert count_true(wide).tolist() == [8 * 300 + width] * rows
    for row in range(rows):  # views begin anywhere in memory
        assert count_true(mask[row:]).tolist() == [sum(each) for each in mask[row:].tolist()]
        assert count_true(wide[row : row + 1]).tolist() == [8 * 300 + width]
        assert count_true(wide[row:, 3:]).tolist() == [8 * 300 + width - 3] * (rows - row)
    assert count_true(wide.t()).tolist() == [rows] * (8 * 300 + width)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_token_whose_log_probability_is_not_finite_is_out_of_the_loss(value):
    """GRPOLoss leaves it out, so that no mean may count it."""
    mask, log_prob = torch.tensor([[True, True, False], [True, True, True]]), torch.zeros(2, 3)
    log_prob[1, 2] = value
    batch = TensorDict({"mask": mask, "log_prob": log_prob}, batch_size=[2])
    assert loss_tokens(batch, "mask", "log_prob").tolist() == [2, 2]
    assert loss_tokens(batch, "mask", None).tolist() == [2, 3]
    assert loss_tokens(batch, "absent", "log_prob").tolist() == [3, 2]
