"""Checks of ids, rewards and turns that several stages share. Like `require`, they skip excluded rows."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from .ids import Ids
from .rows import Rows, few


def require_identity(rows: Rows) -> None:
    """Require that all ids are set and that each rollout belongs to one group.

    Raises:
        BatchError: an id is missing, or a rollout is in several groups; the message lists the ids.
    """
    rollouts = rows.rollouts
    if rows.key("group") is None:
        return
    groups = rows.groups.labels
    if rollouts.n == len(groups):
        return

    def describe(row: int) -> str:
        segments = rollouts.of == rollouts.of[row]
        found, numbers = few(groups[segments].unique()), few(_on_arrival(rows, segments.nonzero().flatten()))
        return f"rollout {rows.name('rollout', row)} in groups {found} (rows {numbers})"

    fewer = rollouts.n < rows.groups.n
    rows.require(
        rollouts.spread(rollouts.min(groups)) == groups,
        "a rollout belongs to one group; found {found}. "
        + "Are group ids and rollout ids swapped? " * fewer
        + "Are ids reused? {workers}",
        describe,
        unit=rollouts,
    )


def require_rewards(rows: Rows, reward: Tensor, *, siblings_agree: bool) -> None:
    """Require finite rewards (M,) and, with `siblings_agree`, one reward on all segments of a rollout.

    Raises:
        BatchError: a reward is not finite, or the segments of a rollout differ; the message lists the rows.
    """
    if not isfinite(reward.sum().item()):  # else each reward is finite
        rows.require(
            torch.isfinite(reward),
            "every reward must be finite; found {found}. Score those rollouts, or mask them: for NaN "
            "{collapse/missing=mask}{infinite}",
            lambda row: f"{float(reward[row])} at row {rows.at(row)} (rollout {rows.name('rollout', row)})",
        )
    if siblings_agree and rows.rollouts.n < len(reward):
        rows.require(
            rows.rollouts.spread(reward[rows.rollouts.first]) == reward,
            "all segments of a rollout must have the same reward; found {found}. If each segment has its "
            "own reward, set how they are reduced: {collapse/reward=sum}, 'last', …",
            lambda row: describe_rollout(rows, row, reward),
            unit=rows.rollouts,
        )


def require_turns(rows: Rows, turn: Tensor) -> None:
    """Require that no two segments of a rollout have the same turn (M,).

    Raises:
        BatchError: two segments have the same turn; the message lists the rows.
    """
    rows.require(
        rows.rollouts.paired_with(Ids(turn)).is_first,
        "the segments of a rollout must have different turns; found {found}",
        lambda row: describe_rollout(rows, row, turn),
        unit=rows.rollouts,
    )


def describe_rollout(rows: Rows, row: int, values: Tensor) -> str:
    """Describe the rollout of row i: the numbers and the (M,) `values` of all its rows in this view."""
    of = rows.rollouts.of
    segments = (of == of[row]).nonzero().flatten()
    numbers = few(_on_arrival(rows, segments))
    return f"rollout {rows.name('rollout', row)} (rows {numbers}: {few(values[segments])})"


def _on_arrival(rows: Rows, some: Tensor) -> Tensor:
    """The numbers that some rows of this view had in the batch on arrival."""
    return some if rows.index is None else rows.index[some]
