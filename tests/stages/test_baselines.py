"""Laws of the numbers of a group and of the order of its sums, for groups of equal or different sizes."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.transforms.stages.advantage import Grouped
from headrace.transforms.table import Ids

SIZES = st.one_of(
    st.tuples(st.integers(1, 12), st.integers(1, 9)).map(lambda each: [each[0]] * each[1]),
    st.lists(st.integers(1, 12), min_size=1, max_size=9),
)
REWARDS = {
    "exact": st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0]),  # their sums and squares need no rounding
    "float32": st.floats(-(2.0**60), 2.0**60, width=32),
    "float64": st.floats(-1e150, 1e150),
    "thirds": st.integers(-9, 9).map(lambda number: number / 3),
    # Neighbours in float32, whose bits differ in the last place, and in float64, which are equal in float32.
    "neighbours": st.sampled_from(
        [sign * (1 + step) for sign in (-1.0, 1.0) for step in (0.0, 2**-23, 2**-22, 2**-52, 2**-51)]
    ),
}


@pytest.mark.parametrize("kind", REWARDS)
@given(st.data())
def test_numbers_of_a_group_equal_their_definitions_bit_for_bit(kind, data):
    sizes = data.draw(SIZES)
    labels = [group for group, size in enumerate(sizes) for _ in range(size)]
    if data.draw(st.booleans()):
        labels = data.draw(st.permutations(labels))
    rewards = data.draw(st.lists(REWARDS[kind], min_size=len(labels), max_size=len(labels)))
    reward = torch.tensor(rewards, dtype=torch.float64)
    g = Grouped(reward, Ids(torch.tensor(labels)), value=reward)
    ordered = sorted(zip(labels, rewards, strict=True))
    assert list(zip(g.of.tolist(), g.reward.tolist(), strict=True)) == ordered
    assert g.unsorted(g.reward).tolist() == g.unsorted(g.value).tolist() == rewards
    assert g.even == (len(set(sizes)) == 1)
    each = [[reward for label, reward in ordered if label == group] for group in range(len(sizes))]
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
    of_groups = {
        "count": sizes,
        "start": starts,
        "end": [start + size for start, size in zip(starts, sizes, strict=True)],
        "smallest": [min(own) for own in each],
        "largest": [max(own) for own in each],
        "equal": [len(set(own)) == 1 for own in each],
        "median": [own[(len(own) - 1) // 2] / 2 + own[len(own) // 2] / 2 for own in each],
    }
    of_rollouts = {
        "place": [place for own in each for place in range(len(own))],
        "alone": [len(own) == 1 for own in each for _ in own],
        "best_other": [max(own[:k] + own[k + 1 :] or own) for own in each for k in range(len(own))],
        "worst_other": [min(own[:k] + own[k + 1 :] or own) for own in each for k in range(len(own))],
        "above": [reward - min(own) for own in each for reward in own],
    }
    assert {name: getattr(g, name).tolist() for name in of_groups} == of_groups
    assert {name: getattr(g, name).tolist() for name in of_rollouts} == of_rollouts
    # One after the other, as float64 rounds.
    assert g.sum(g.reward).tolist() == [list(accumulate(own))[-1] for own in each]
    assert g.running(g.reward).tolist() == [total for own in each for total in accumulate(own)]


def test_equal_rewards_deviate_by_exactly_0_from_the_mean_of_their_batch():
    """A mean that is rounded would differ from the rewards. The std of one reward is 0, not NaN."""
    for count, equal in ((3, 0.1), (7, 1e6 + 0.7), (1, 5.0)):
        g = Grouped(torch.full((count,), equal, dtype=torch.float64), Ids(torch.arange(count)))
        assert not g.batch_deviation.any()
        assert [float(g.batch_std(ddof)) for ddof in (0, 1)] == [0.0, 0.0]
