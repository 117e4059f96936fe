"""Where a batch's groups lie, and the checks that can be read off on the way."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .collapse import fan_out_problems
from .grouping import Blocks, squares_fit
from .ids import is_first, sum_by


class Facts(NamedTuple):
    """What one device read tells of a batch."""

    problem: bool
    """An id is negative, a rollout torn, a reward not finite, or siblings disagree."""
    smallest_group: int
    largest_group: int
    contiguous: bool
    """The rollouts of each group follow one another, in the order of their first rows."""
    rollouts: int
    peak: float
    """The largest absolute reward."""


def facts_of(reward: Tensor, groups: Tensor, rollouts: Tensor, first: Tensor, group_first: Tensor) -> Tensor:
    """(6,) float64, what :class:`Facts` holds; shapes do not depend on the data and nothing is read.

    Args:
        reward: (N,) float, `groups` and `rollouts` (N,) int64 ids.
        groups: see above.
        rollouts: see above.
        first: (N,) int64, first row of each row's rollout.
        group_first: (N,) int64, first row of each row's group.
    """
    problems = fan_out_problems(reward, rollouts, first, groups, siblings_agree=True)
    speaks = is_first(first)
    size = sum_by(group_first, speaks.long())
    number = speaks.long().cumsum(0) - 1  # the how-manieth rollout of the batch
    inside = number - number.index_select(0, group_first) < size
    facts = [
        torch.stack(problems).any(),
        size.amin(),
        size.amax(),
        (inside | ~speaks).all(),
        speaks.sum(),
        reward.abs().amax(),
    ]
    return torch.stack([fact.double() for fact in facts])


def read_facts(reward: Tensor, groups: Tensor, rollouts: Tensor, first: Tensor, group_first: Tensor) -> Facts:
    """The one device read."""
    problem, small, large, contiguous, count, peak = facts_of(
        reward, groups, rollouts, first, group_first
    ).tolist()
    return Facts(bool(problem), int(small), int(large), bool(contiguous), int(count), peak)


def gather_blocks(reward: Tensor, first: Tensor, facts: Facts) -> tuple[Blocks, Tensor]:
    """The rollouts' rewards as (P, G), and for each row the number of its rollout. No device read."""
    speaks = is_first(first)
    number = speaks.long().cumsum(0) - 1
    # Rows that do not speak all write to one slot past the end, which is cut off.
    slot = torch.where(speaks, number, facts.rollouts)
    heads = torch.zeros(facts.rollouts + 1, dtype=torch.int64, device=reward.device)
    heads.scatter_(0, slot, torch.arange(len(reward), device=reward.device))
    blocks = Blocks(reward.index_select(0, heads[:-1]).view(-1, facts.largest_group))
    return blocks, number.index_select(0, first)


def ascending_blocks(reward: Tensor, groups: Tensor, rollouts: Tensor | None) -> tuple[Blocks, Tensor] | None:
    """The layout that collectors write, found by looking: CPU only, a few passes over the ids.

    Rollout ids ascend from run to run, groups of one size follow one another, and all data are sound.
    Anything else, wrong data included, is None: the general route finds out what it is.

    Returns:
        The (P, G) rewards and the segments of each rollout, (P·G,) int64 (empty: one each).
    """
    low, high = torch.aminmax(reward)
    segments = groups.new_empty(0)
    if rollouts is not None:
        if int(rollouts[0]) < 0:
            return None
        ascends = rollouts[1:] > rollouts[:-1]
        if not bool(ascends.all()):
            inside = rollouts[1:] == rollouts[:-1]
            torn = inside & ((reward[1:] != reward[:-1]) | (groups[1:] != groups[:-1]))
            if not bool((ascends | inside).all()) or bool(torn.any()):
                return None
            segments = torch.unique_consecutive(rollouts, return_counts=True)[1]
            heads = segments.cumsum(0) - segments
            reward, groups = reward.index_select(0, heads), groups.index_select(0, heads)
    run_ids, sizes = torch.unique_consecutive(groups, return_counts=True)
    size = int(sizes[0])
    sound = squares_fit(max(abs(float(low)), abs(float(high))), size, reward.dtype)  # False for NaN
    uniform = size > 1 and size * len(sizes) == len(groups) and bool((sizes == size).all())
    if not (sound and uniform and int(run_ids.amin()) >= 0):
        return None
    if not bool((run_ids[1:] > run_ids[:-1]).all()) and len(run_ids.unique()) < len(run_ids):
        return None
    return Blocks(reward.view(-1, size)), segments
