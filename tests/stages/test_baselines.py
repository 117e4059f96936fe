"""Laws of the order in which the rewards of a group are added up, for groups of equal or different sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.transforms.stages.advantage import Grouped
from headrace.transforms.table import Ids

SIZES = {
    "even": st.tuples(st.integers(1, 12), st.integers(1, 9)).map(lambda each: [each[0]] * each[1]),
    "ragged": st.lists(st.integers(1, 12), min_size=1, max_size=9),
}
REWARDS = {
    "exact": st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0]),  # their sums and squares need no rounding
    "float32": st.floats(-(2.0**60), 2.0**60, width=32),
    "float64": st.floats(-1e150, 1e150),
    "thirds": st.integers(-9, 9).map(lambda number: number / 3),
}


@pytest.mark.parametrize("layout", SIZES)
@pytest.mark.parametrize("kind", REWARDS)
@given(st.data())
def test_a_group_is_sorted_and_added_up_in_this_order(kind, layout, data):
    labels = [group for group, size in enumerate(data.draw(SIZES[layout])) for _ in range(size)]
    if data.draw(st.booleans()):
        labels = data.draw(st.permutations(labels))
    rewards = data.draw(st.lists(REWARDS[kind], min_size=len(labels), max_size=len(labels)))
    g = Grouped(torch.tensor(rewards, dtype=torch.float64), Ids(torch.tensor(labels)))
    ordered = sorted(zip(labels, rewards, strict=True))
    assert list(zip(g.of.tolist(), g.reward.tolist(), strict=True)) == ordered
    assert g.unsorted(g.reward).tolist() == rewards
    totals = dict.fromkeys(sorted(labels), 0.0)
    for label, reward in ordered:  # one after the other, as float64 rounds
        totals[label] += reward
    assert g.sum(g.reward).tolist() == list(totals.values())


@pytest.mark.parametrize("layout", SIZES)
@pytest.mark.parametrize("kind", REWARDS)
@given(st.data())
def test_the_order_of_rows_changes_no_bit_of_a_group(kind, layout, data):
    labels = [group for group, size in enumerate(data.draw(SIZES[layout])) for _ in range(size)]
    reward = torch.tensor(
        data.draw(st.lists(REWARDS[kind], min_size=len(labels), max_size=len(labels))), dtype=torch.float64
    )
    order = torch.tensor(data.draw(st.permutations(range(len(labels)))))
    ids = torch.tensor(labels)
    before, after = Grouped(reward, Ids(ids)), Grouped(reward[order], Ids(ids[order]))
    assert torch.equal(before.unsorted(before.deviation)[order], after.unsorted(after.deviation))
    assert torch.equal(before.std(1), after.std(1))
