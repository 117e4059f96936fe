"""Sums and extremes of an id are over its counted rows, for any other rows and any order."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.transforms.table import Ids, first_row, stable_order

LABELS = st.one_of(
    st.lists(st.integers(0, 5), min_size=1, max_size=30),
    st.lists(st.integers(0, 5), min_size=1, max_size=30).map(sorted),
    st.lists(st.sampled_from([-1, 0, 3, 2**40, 2**62]), min_size=1, max_size=30),
    st.integers(1, 30).map(lambda rows: list(range(rows))),
)
NUMBERS = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([0.0, 0.1, 1 / 3, 1e-30, 1e300, -1e300, 5e-324]))


SMALL = st.integers(-50, 50)


@st.composite
def rows(draw, values=SMALL):
    """Draw labels, a mask of counted rows (or None), and a value for each row."""
    labels = draw(LABELS)
    of_each = {"min_size": len(labels), "max_size": len(labels)}
    counts = draw(st.one_of(st.none(), st.lists(st.booleans(), **of_each)))
    return labels, counts, draw(st.lists(values, **of_each))


def ids_of(labels, counts=None):
    return Ids(torch.tensor(labels), None if counts is None else torch.tensor(counts))


@given(rows())
def test_sums_extremes_and_counts_are_over_the_counted_rows_of_an_id(drawn):
    labels, counts, values = drawn
    ids, column = ids_of(labels, counts), torch.tensor(values)
    counted = [True] * len(labels) if counts is None else counts
    voices = {
        label: [row for row, other in enumerate(labels) if other == label and counted[row]]
        for label in sorted(set(labels))
    }
    of = {label: [values[row] for row in some] for label, some in voices.items()}
    assert ids.n == len(of)
    assert ids.spread(torch.tensor(list(of))).tolist() == labels
    assert ids.sum(column).tolist() == [sum(each) for each in of.values()]
    assert ids.sum(column.double()).tolist() == [sum(each) for each in of.values()]
    assert ids.count.tolist() == [len(each) for each in of.values()]
    assert ids.first.tolist() == [some[0] if some else len(labels) - 1 for some in voices.values()]
    assert ids.is_first.nonzero().flatten().tolist() == sorted(some[0] for some in voices.values() if some)
    lowest, highest = math.inf, -math.inf
    assert ids.max(column.double()).tolist() == [max(each, default=highest) for each in of.values()]
    assert ids.min(column.double()).tolist() == [min(each, default=lowest) for each in of.values()]
    assert ids.any(column > 0).tolist() == [any(value > 0 for value in each) for each in of.values()]
    assert ids.all(column > 0).tolist() == [all(value > 0 for value in each) for each in of.values()]


@given(LABELS)
def test_first_row_is_the_first_with_the_id(labels):
    assert first_row(torch.tensor(labels)).tolist() == [labels.index(label) for label in labels]


@given(rows(NUMBERS), st.randoms())
def test_a_sum_does_not_depend_on_order_or_on_other_rows(drawn, random):
    labels, counts, values = drawn
    column = torch.tensor(values, dtype=torch.float64)
    sums = dict(zip(sorted(set(labels)), ids_of(labels, counts).sum(column).tolist(), strict=True))
    order = list(range(len(labels)))
    random.shuffle(order)
    shuffled = [labels[row] for row in order]
    some = None if counts is None else [counts[row] for row in order]
    assert ids_of(shuffled, some).sum(column[order]).tolist() == list(sums.values())
    for label, total in sums.items():
        own = [row for row in order if labels[row] == label and (counts is None or counts[row])]
        alone = ids_of([label] * len(own)).sum(column[own]).tolist() if own else [0.0]
        assert alone == [total]


@given(rows())
def test_pairs_have_one_number_if_and_only_if_both_ids_are_equal(drawn):
    labels, counts, values = drawn
    both = ids_of(labels, counts).paired_with(ids_of(values))
    pairs = list(zip(labels, values, strict=True))
    numbers = both.of.tolist()
    assert [[a == b for b in pairs] for a in pairs] == [[a == b for b in numbers] for a in numbers]
    assert both.counts is None if counts is None else both.counts.tolist() == counts


@given(rows(), st.booleans())
def test_rows_of_an_id_have_positions_from_0(drawn, by_value):
    labels, _, values = drawn
    places = ids_of(labels).positions(torch.tensor(values) if by_value else None).tolist()
    for label in set(labels):
        own = [row for row, other in enumerate(labels) if other == label]
        ordered = sorted(own, key=lambda row: values[row]) if by_value else own
        assert [places[row] for row in ordered] == list(range(len(own)))


def test_equal_values_keep_the_order_of_many_rows():
    """torch sorts up to 16 numbers in a stable way in any case."""
    two, equal = torch.arange(400) % 2, torch.zeros(400)
    for by in (None, equal, equal.long()):
        assert Ids(two).positions(by).tolist() == [row // 2 for row in range(400)]


@pytest.mark.parametrize("counts", [None, torch.empty(0, dtype=torch.bool)])
def test_an_empty_batch_has_no_ids(counts):
    ids = Ids(torch.empty(0, dtype=torch.int64), counts)
    nothing = torch.empty(0)
    assert (ids.n, ids.lowest, ids.ascending) == (0, 0, True)
    for values in (ids.sum(nothing), ids.count, ids.first, ids.is_first, ids.spread(nothing)):
        assert values.shape == (0,)
    assert ids.positions().shape == ids.max(nothing).shape == (0,)


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3) | st.sampled_from([2**16, 2**40])))
def test_stable_order_is_that_of_python(numbers):
    assert stable_order(torch.tensor(numbers, dtype=torch.int64)).tolist() == sorted(
        range(len(numbers)), key=numbers.__getitem__
    )
