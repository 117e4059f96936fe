"""A group of several draws of one prompt is split if its advantages or its order show the draws."""

from __future__ import annotations

import statistics

import pytest

from headrace.pipeline.tools.dumps.readers import Draws, Sample
from headrace.pipeline.tools.dumps.readers.batch import fits_advantages, separate_draws
from headrace.transforms import Status

NAN = float("nan")


def rollouts_of(rewards, advantages):
    """Rollouts with one row each. A reward of None: the rollout failed."""
    return [
        [Sample("q", at, reward, advantage=advantage, status=Status.FAILED if reward is None else None)]
        for at, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True))
    ]


@pytest.mark.parametrize(
    ("rewards", "advantages", "fits"),
    [
        ([1.0, 0.0], [0.5, -0.5], True),
        ([1.0, 0.0], [-3.0, 3.0], True),
        ([1.0, 0.0], [0.5, -0.4], False),
        ([1.0, 0.0], [0.0, 0.0], False),
        ([1.0, 0.0], [2e-6, -2e-6], True),
        ([1.0, 0.0], [1e-6, -1e-6], False),  # as small as an advantage of 0 after rounding
        ([1.0, 1.0], [1e-6, -1e-6], None),
        ([1.0, 1.0], [2e-6, -2e-6], False),
        ([1.0, 0.0], [None, None], None),
        ([1.0, 0.0], [NAN, None], None),
        ([], [], None),
        ([1.0, 0.0, 0.0], [2 / 3, -1 / 3, None], True),  # the mean of all
        ([1.0, 0.0, 0.0], [0.5, -0.5, NAN], True),  # the mean of those with an advantage
        ([1.0, 0.0, 0.0], [0.6, -0.5, NAN], False),
        ([1.0, 0.0, None], [0.5, -0.5, 7.0], True),  # a failed rollout does not count
        ([1.0, 0.0, NAN], [0.5, -0.5, None], False),
        ([3.0, 1.0, 2.0], [1.0, -1.0, 0.00009], True),  # up to 1e-4 of the greatest advantage
        ([3.0, 1.0, 2.0], [1.0, -1.0, 0.0003], False),
        ([300.0, 100.0, 200.0], [100.0, -100.0, 0.009], True),
    ],
)
def test_advantages_fit_rewards_if_they_are_a_factor_times_the_centred_rewards(rewards, advantages, fits):
    assert fits_advantages(rollouts_of(rewards, advantages)) is fits


def test_the_first_advantage_of_a_rollout_counts():
    rollouts = rollouts_of([1.0, 0.0], [None, -0.5])
    for later in (0.5, 9.0):
        rollouts[0] = [
            rollouts[0][0],
            Sample("q", 0, 1.0, advantage=0.5),
            Sample("q", 0, 1.0, advantage=later),
        ]
        assert fits_advantages(rollouts) is True


def test_advantages_are_not_confirmed_if_there_are_as_many_rewards_as_rollouts():
    """For any two advantages with the sum 0, some weights of two rewards give these advantages."""
    rows = [[Sample(0, i, rewards={"a": i, "b": 3.0 * i}, advantage=0.3 - 0.6 * i)] for i in range(2)]
    assert fits_advantages(rows) is False
    rows.append([Sample(0, 2, rewards={"a": 2, "b": 6.0}, advantage=-0.9)])
    rows[0][0].advantage, rows[1][0].advantage = 0.9, 0.0
    assert fits_advantages(rows) is True


def step_of(*draws, size=2, fault=None, **how):
    """The samples of a group "q", whose advantages are those of its draws, and of a group "p" with one draw.

    The first advantage of the draw `fault` is wrong.
    """
    rows = []
    for number, draw in enumerate(draws):
        for at, reward in enumerate(draw):
            own = reward - statistics.mean(draw) + (number == fault and at == 0)
            rows.append(Sample("q", len(rows), reward, advantage=own, expected_rollouts=size, **how))
    rows += [Sample("p", 100 + at, float(at), advantage=at - 0.5, expected_rollouts=2) for at in range(2)]
    return rows


def labels_of(*sizes):
    """The labels of consecutive draws, and those of the group "p"."""
    names = ["q", *(("q", number) for number in range(2, 2 + len(sizes)))]
    return [name for name, size in zip(names, sizes, strict=False) for _ in range(size)] + ["p"] * 2


@pytest.mark.parametrize(
    ("draws", "size", "fault", "sizes"),
    [
        ([[1.0, 0.0], [0.5, 0.25]], 2, None, (2, 2)),
        ([[1.0, 0.0], [0.5, 0.25]], 2, 1, (2, 2)),
        ([[1.0, 0.0], [0.5, 0.25], [1.0, 0.75]], 2, 0, (2, 2, 2)),
        ([[1.0, 0.0, 0.5], [0.5, 0.25, 0.0]], 3, None, (3, 3)),
        ([[1.0, 0.0, 0.5], [0.5, 0.25]], 3, None, (3, 2)),  # a rollout of the second draw is missing
        ([[0.5, 0.25], [1.0, 0.0, 0.5]], 3, None, (2, 3)),
        ([[1.0, 0.0, 0.5], [0.5, 0.25], [0.0, 1.0, 1.0]], 3, None, (3, 2, 3)),
        ([[1.0, 0.0, 0.5], [0.5, 0.25]], 3, 1, None),  # a wrong advantage, too
        ([[1.0, 1.0], [1.0, 1.0]], 2, None, (2, 2)),  # all advantages are 0, so every cut fits
        ([[1.0, 1.0], [1.0]], 2, None, None),
    ],
)
@pytest.mark.parametrize("by_prompt", [True, False])
def test_draws_are_split_by_the_advantages_that_were_computed_within_them(
    draws, size, fault, sizes, by_prompt
):
    rows = step_of(*draws, size=size, fault=fault)
    count = sum(map(len, draws))
    stay, found = separate_draws(rows, by_prompt=by_prompt)
    if sizes:
        assert [row.group for row in stay] == labels_of(*sizes)
        assert found == Draws(1, 0, 0, (("q", count),), 1)
    elif by_prompt:
        assert [row.group for row in stay] == ["p"] * 2
        assert found == Draws(0, 1, count, (("q", count),), 0)
    else:
        assert (stay, found) == (rows, Draws())


@pytest.mark.parametrize(
    ("places", "size", "labels"),
    [
        ([0, 1, 2, 3], 2, [1, 1, 2, 2]),
        ([7, 5, 6, 4], 2, [2, 1, 2, 1]),  # the dump is in another order than the rollouts arrived
        ([0, 1, 5, 6, 8, 9], 2, [1, 1, 2, 2, 3, 3]),
        ([0, 1, 5, 7], 2, None),
        ([0, 2, 3, 4], 2, None),
        ([0, 1, 2], 2, None),
        ([0, 1, 2, 3, 4, 5], 3, [1, 1, 1, 2, 2, 2]),
        ([0, 1, None, 3], 2, None),
        ([None] * 4, 2, None),
    ],
)
def test_draws_without_advantages_are_split_by_the_order_of_arrival(places, size, labels):
    rows = [Sample(("q",), at, 1.0, expected_rollouts=size, place=place) for at, place in enumerate(places)]
    other = Sample("p", 99, 1.0, expected_rollouts=size)
    drawn = (("q", len(rows)),)
    stay, found = separate_draws([other, *rows])
    if labels:
        assert [row.group for row in stay] == [
            "p",
            *(("q",) if each == 1 else ("q", each) for each in labels),
        ]
        assert found == Draws(1, 0, 0, drawn)
    else:
        assert (stay, found) == ([other], Draws(0, 1, len(rows), drawn))
        assert separate_draws([other, *rows], leave_out=False) == ([other, *rows], Draws(drawn=drawn))
    assert separate_draws([other, *rows], by_prompt=False) == ([other, *rows], Draws())
    assert separate_draws(rows) == (rows, Draws())  # all groups of the step are too large


def test_all_rows_of_a_rollout_are_in_its_draw():
    """The segments of a rollout have consecutive indices. Its first row shows its place among the others."""
    rows = [Sample("q", at // 2, 1.0, expected_rollouts=1, place=at) for at in (2, 3, 0, 1)]
    stay, found = separate_draws([*rows, Sample("p", 99, 1.0, expected_rollouts=1)])
    assert [row.group for row in stay] == [("q", 2), ("q", 2), "q", "q", "p"]
    assert found == Draws(1, 0, 0, (("q", 2),))
