"""Where a batch's groups lie, and the checks that can be read off on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.transforms.checks import Rule, broken
from headrace.transforms.ids import is_first, number_of, sum_by

from .grouping import squares_fit


class Facts(NamedTuple):
    """What one device read says of a batch."""

    problem: bool
    """A rule is broken."""
    smallest_group: int
    largest_group: int
    contiguous: bool
    """The rollouts of each group follow one another, in the order of their first rows."""
    rollouts: int
    peak: float
    """The largest absolute reward."""


def facts_of(rules: Sequence[Rule], reward: Tensor, first: Tensor, group_first: Tensor) -> Tensor:
    """(6,) float64, what :class:`Facts` holds; shapes do not depend on the data and nothing is read.

    Args:
        rules: of the batch's rows.
        reward: (N,) float.
        first: (N,) int64, the first row of each row's rollout.
        group_first: (N,) int64, the first row of each row's group.
    """
    is_head = is_first(first)
    size = sum_by(group_first, is_head.long())
    number = number_of(first)
    inside = number - number.index_select(0, group_first) < size
    facts = [
        broken(rules),
        size.amin(),
        size.amax(),
        (inside | ~is_head).all(),
        is_head.sum(),
        reward.abs().amax(),
    ]
    return torch.stack([fact.double() for fact in facts])


def read_facts(rules: Sequence[Rule], reward: Tensor, first: Tensor, group_first: Tensor) -> Facts:
    """The one device read."""
    facts = facts_of(rules, reward, first, group_first).tolist()
    problem, small, large, contiguous, count, peak = facts
    return Facts(bool(problem), int(small), int(large), bool(contiguous), int(count), peak)


def gather_blocks(first: Tensor, facts: Facts, *columns: Tensor) -> tuple[Tensor, list[Tensor]]:
    """For each row the number of its rollout, and per-row columns as (P, G), one entry a rollout. No read."""
    number = number_of(first)
    # Later segments all write to one slot past the end, which is cut off.
    slot = torch.where(is_first(first), number, facts.rollouts)
    heads = torch.zeros(facts.rollouts + 1, dtype=torch.int64, device=first.device)
    heads.scatter_(0, slot, torch.arange(len(first), device=first.device))
    blocks = [column.index_select(0, heads[:-1]).view(-1, facts.largest_group) for column in columns]
    return number, blocks


def rewards_fit(peak: float, rollouts: int, dtype: torch.dtype) -> bool:
    """Whether rewards leave room for differences in their dtype, and for squares in float64; NaN does not."""
    return peak <= torch.finfo(dtype).max / 2 and squares_fit(peak, rollouts, torch.float64)


def fit_rule(credit: Tensor, dtype: torch.dtype) -> Rule:
    """An advantage fits into the dtype that it is rounded to."""
    message = (
        f"an advantage must fit into {dtype}; found {{found}}. Scale the rewards, set clip, or give rewards "
        "of a larger dtype"
    )
    wrong = ~(credit.abs() <= torch.finfo(dtype).max)
    return Rule(wrong, lambda row: f"{float(credit[row]):g} at row {row}", message)


def ascending_blocks(
    reward: Tensor, groups: Tensor, rollouts: Tensor | None, low: torch.dtype | None = None
) -> tuple[Tensor, Tensor] | None:
    """The layout that collectors write, found by looking: CPU only, a few passes over the ids.

    Rollout ids ascend from run to run, groups of one size follow one another, and all data are sound; their
    squares fit the dtype `low` too, where one is given. Anything else, wrong data included, is None: the
    general route finds out what it is.

    Returns:
        The (P, G) rewards and the segments of each rollout, (P·G,) int64 (empty: one each).
    """
    least, most = torch.aminmax(reward)
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
    peak = max(abs(float(least)), abs(float(most)))
    sound = rewards_fit(peak, len(reward), reward.dtype)
    sound = sound and (low is None or squares_fit(peak, len(reward), low))
    uniform = size > 1 and size * len(sizes) == len(groups) and bool((sizes == size).all())
    if not (sound and uniform and int(run_ids.amin()) >= 0):
        return None
    if not bool((run_ids[1:] > run_ids[:-1]).all()) and len(run_ids.unique()) < len(run_ids):
        return None
    return reward.view(-1, size), segments
