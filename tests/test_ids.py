"""Rows that share an id, found by every route."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.transforms.ids import (
    any_by,
    first_row,
    first_row_by_sorting,
    is_first,
    last_row,
    reduce_by,
    sum_by,
)

IDS = st.one_of(
    st.lists(st.integers(0, 5), min_size=1, max_size=30),
    st.lists(st.integers(0, 5), min_size=1, max_size=30).map(sorted),
    st.lists(st.sampled_from([0, 3, 2**40, 2**62]), min_size=1, max_size=30),
)


@given(IDS)
def test_first_row_is_the_first_with_the_id(ids):
    expected = [ids.index(i) for i in ids]
    assert first_row(torch.tensor(ids)).tolist() == expected
    assert first_row_by_sorting(torch.tensor(ids)).tolist() == expected


@given(IDS)
def test_last_row_is_the_last_with_the_id(ids):
    last = {i: row for row, i in enumerate(ids)}
    assert last_row(first_row(torch.tensor(ids))).tolist() == [last[i] for i in ids]


@given(IDS, st.randoms())
def test_sums_and_extremes_are_over_the_rows_of_the_id(ids, random):
    values = [random.randint(-50, 50) for _ in ids]
    first, column = first_row(torch.tensor(ids)), torch.tensor(values)
    of = {i: [v for v, j in zip(values, ids, strict=True) if j == i] for i in ids}
    assert sum_by(first, column).tolist() == [sum(of[i]) for i in ids]
    assert reduce_by(first, column, "amax").tolist() == [max(of[i]) for i in ids]
    assert reduce_by(first, column, "amin").tolist() == [min(of[i]) for i in ids]
    assert any_by(first, column > 0).tolist() == [max(of[i]) > 0 for i in ids]


@given(IDS)
def test_one_row_of_each_id_is_first(ids):
    first = is_first(first_row(torch.tensor(ids)))
    assert sorted(torch.tensor(ids)[first].tolist()) == sorted(set(ids))


def test_no_ids_have_no_rows():
    assert first_row(torch.empty(0, dtype=torch.int64)).shape == (0,)
