"""Tokens are counted by eight bytes at a time, whatever lies where."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.transforms.tokens import count_true


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
