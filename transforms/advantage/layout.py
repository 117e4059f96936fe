"""Where a batch's groups lie, and the checks that can be read off on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.transforms.checks import Rule, broken
from headrace.transforms.ids import everywhere, is_first, lowest, number_of, sum_by
from headrace.transforms.sums import largest

from .grouping import largest_to_square


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


def largest_that_fits(rollouts: int, dtype: torch.dtype) -> float:
    """The largest reward that leaves room for differences in its dtype, and for squares in float64."""
    return min(torch.finfo(dtype).max / 2, largest_to_square(rollouts, torch.float64))


def fit_rule(credit: Tensor, dtype: torch.dtype) -> Rule:
    """An advantage fits into the dtype that it is rounded to."""
    message = (
        f"an advantage must fit into {dtype}; found {{found}}. Scale the rewards, set clip, or give rewards "
        "of a larger dtype"
    )
    wrong = ~(credit.abs() <= torch.finfo(dtype).max)
    return Rule(wrong, lambda row: f"{float(credit[row]):g} at row {row}", message)


class Found(NamedTuple):
    """A sound batch on the CPU: M rollouts in P groups."""

    heads: Tensor | None
    """(M,) int64, one row of each rollout; None: each row is one."""
    number: Tensor | None
    """(N,) int64, which of the M the row's rollout is; None: each row is one."""
    label: Tensor
    """(M,) int64, that of the rollout's group."""
    labels: int
    """More than any label."""
    size: int
    """Rollouts of every group, where they are contiguous and that is one number above 1; else 0."""


def find_groups(reward: Tensor, groups: Tensor, rollouts: Tensor | None, *, in_order: bool) -> Found | None:
    """Who is compared with whom, found by looking: CPU only, a few passes over the ids.

    Args:
        reward: (N,) float, N ≥ 1.
        groups: (N,) int64.
        rollouts: (N,) int64; None: each row is one.
        in_order: whether rollouts must stand in the order of their rows, and their rows together.

    Returns:
        None where a rule is broken, or the order is another: the general route finds out what it is.
    """
    fits = largest(reward) <= largest_that_fits(len(reward), reward.dtype)  # NaN does not
    if not fits or lowest(groups) < 0:
        return None
    heads = number = None
    if rollouts is not None and not everywhere(ascends := rollouts[1:] > rollouts[:-1]):
        together = everywhere(ascends | (rollouts[1:] == rollouts[:-1]))
        if in_order and not together:
            return None
        heads, number = _runs(rollouts) if together else _speakers(rollouts)
    if heads is not None and number is not None:
        row = heads.index_select(0, number)
        if not all(torch.equal(column.index_select(0, row), column) for column in (reward, groups)):
            return None
        groups = groups.index_select(0, heads)
    if rollouts is not None and lowest(rollouts) < 0:
        return None
    return Found(heads, number, *_label(groups, in_order=in_order))


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The first row of each run of equal ids, and for each row the number of its run."""
    _, number, counts = torch.unique_consecutive(ids, return_inverse=True, return_counts=True)
    return counts.cumsum(0) - counts, number


def _speakers(ids: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Some row of each id, and for each row the number of that; None twice where each row has its own."""
    rows = torch.arange(len(ids), dtype=torch.int32)
    slot, slots = _slots(ids, most=8 * len(ids))
    speaker = rows.new_empty(slots).scatter_(0, slot, rows).index_select(0, slot)  # of many writes one stays
    if torch.equal(speaker, rows):
        return None, None
    heads = (speaker == rows).nonzero().flatten()
    number = torch.empty_like(ids).index_copy_(0, heads, torch.arange(len(heads)))
    return heads, number.index_select(0, speaker)


def _slots(ids: Tensor, *, most: int) -> tuple[Tensor, int]:
    """A number for each id, less than the second that is returned."""
    low, high = (int(end) for end in torch.aminmax(ids))
    if high - low < most:
        return ids - low if low else ids, high - low + 1
    found, slot = torch.unique(ids, return_inverse=True)
    return slot, len(found)


def _label(groups: Tensor, *, in_order: bool) -> tuple[Tensor, int, int]:
    """Labels of groups, how many, and the size of all if they are contiguous and of one, if somebody asks."""
    if not in_order and not everywhere(groups[1:] >= groups[:-1]):
        return *_slots(groups, most=2 * len(groups) + 64), 0
    runs, label, sizes = torch.unique_consecutive(groups, return_inverse=True, return_counts=True)
    apart = everywhere(runs[1:] > runs[:-1])
    if not apart and len(runs) <= len(groups) // 2:
        slot, slots = _slots(runs, most=2 * len(runs))
        apart = len(runs) == int((torch.bincount(slot, minlength=slots) > 0).sum())
        if not apart:
            return slot.index_select(0, label), slots, 0
    if not apart:
        return *_slots(groups, most=2 * len(groups) + 64), 0
    size = int(sizes[0])
    return label, len(runs), size if size > 1 and bool((sizes == size).all()) else 0
