"""Which rows the gradient comes from, against a loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.report import gradient_share

ROW = st.tuples(st.sampled_from([0, 0, 1]), st.floats(-4, 4), st.floats(0, 2), st.integers(0, 9))


@given(st.lists(ROW, max_size=12))
def test_shares_are_the_sum_over_tokens_of_trained_rows(rows):
    size = [
        sum(abs(advantage) * weight for _ in range(tokens)) if code == 0 else 0.0
        for code, advantage, weight, tokens in rows
    ]
    names = ("reason", "advantage", "loss_weight", "tokens")
    columns = {name: np.array([row[k] for row in rows]) for k, name in enumerate(names)}
    share = gradient_share(columns)
    assert share == pytest.approx([each / (sum(size) or 1.0) for each in size])
    assert not len(rows) or share.sum() == pytest.approx(1.0 if sum(size) else 0.0)


def test_what_is_not_known_has_no_share():
    columns = {"reason": np.zeros(3, int), "advantage": np.array([1.0, np.nan, -1.0])}
    assert gradient_share(columns).tolist() == [0.5, 0, 0.5]
    assert gradient_share({"reason": np.zeros(2, int)}).tolist() == [0, 0]
