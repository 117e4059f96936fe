"""Checks of ids and rewards that every comparison of rollouts needs."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import NUMBER_WORKERS
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
    group_of_rollout = rollouts.everyone.spread(rollouts.everyone.min(groups))

    def describe(row: int) -> str:
        segments = rollouts.of == rollouts.of[row]
        numbers = few([rows.at(int(i)) for i in segments.nonzero().flatten()])
        return (
            f"rollout {rows.name('rollout', row)} in groups {few(groups[segments].unique())} (rows {numbers})"
        )

    rows.require(
        group_of_rollout == groups,
        "a rollout belongs to one group; found {found}. Are ids reused? " + NUMBER_WORKERS,
        describe,
    )


def require_rewards(rows: Rows, reward: Tensor, *, siblings_agree: bool) -> None:
    """Require finite rewards and, with `siblings_agree`, one reward on all segments of a rollout.

    Raises:
        BatchError: a reward is not finite, or the segments of a rollout differ; the message lists the rows.
    """
    rows.require(
        torch.isfinite(reward),
        "every reward must be finite; found {found}. Score those rollouts, or exclude them before: "
        "SampleFilter(criterion=Finite(), action='exclude'), or for NaN FanOutCollapse(missing='skip')",
        lambda row: f"{float(reward[row])} at row {rows.at(row)} (rollout {rows.name('rollout', row)})",
    )
    if siblings_agree and rows.rollouts.n < len(reward):
        rows.require(
            rows.rollouts.spread(reward[rows.rollouts.first]) == reward,
            "all segments of a rollout must have the same reward; found {found}. If each segment has its own "
            "reward, set how they are reduced: reward='sum', 'last', …",
            lambda row: rows.segments(row, reward),
        )


def require_turns(rows: Rows, turn: Tensor | None) -> None:
    """Require that no two segments of a rollout have the same turn.

    Raises:
        BatchError: two segments have the same turn; the message lists the rows.
    """
    if turn is not None:
        pairs = rows.rollouts.everyone.paired_with(Ids(turn))
        rows.require(
            pairs.is_first,
            "the segments of a rollout must have different turns; found {found}",
            lambda row: rows.segments(row, turn),
        )
