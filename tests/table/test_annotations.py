"""A value that does not fit the annotation of its option is answered with the one that is meant."""

from __future__ import annotations

import pytest

from headrace.transforms import GroupRelativeAdvantage, SampleFilter


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: GroupRelativeAdvantage(scale="std"), "'group'"),
        (lambda: GroupRelativeAdvantage(baseline="loo"), "'leave_one_out'"),
        (lambda: SampleFilter(criterion="rewards_vary"), r"RewardsVary\(\)"),
        (lambda: SampleFilter("rewards_vary"), r"RewardsVary\(\)"),
    ],
)
def test_a_wrong_value_is_answered_with_the_nearest_one(call, meant):
    with pytest.raises((ValueError, TypeError), match=rf" \(did you mean {meant}\?\)"):
        call()


def test_a_value_that_is_near_no_other_gets_no_guess():
    with pytest.raises(ValueError, match=r"criterion must be a callable; got 'qqq'$"):
        SampleFilter(criterion="qqq")
