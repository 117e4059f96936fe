"""What every comparison of rollouts requires of ids and rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import NUMBER_WORKERS
from .ids import Ids
from .rows import Rows, few


def require_identity(rows: Rows) -> None:
    """Ids are set, and a rollout belongs to one group.

    Raises:
        BatchError: an id is not set, or a rollout is in several groups; with the ids.
    """
    rollouts = rows.rollouts
    if rows.key("group") is None:
        return
    groups = rows.groups.labels
    if rollouts.n == len(groups):
        return
    home = rollouts.everyone.spread(rollouts.everyone.min(groups))

    def describe(row: int) -> str:
        segments = rollouts.of == rollouts.of[row]
        numbers = few([rows.at(int(i)) for i in segments.nonzero().flatten()])
        return (
            f"rollout {rows.name('rollout', row)} in groups {few(groups[segments].unique())} (rows {numbers})"
        )

    rows.require(
        home == groups,
        "a rollout belongs to one group; found {found}. Are ids reused? " + NUMBER_WORKERS,
        describe,
    )


def require_rewards(rows: Rows, reward: Tensor, *, siblings_agree: bool) -> None:
    """Rewards are finite and, where asked, shared by the segments of a rollout.

    Raises:
        BatchError: one is not, with the rows.
    """
    rows.require(
        torch.isfinite(reward),
        "every reward must be finite; found {found}. Score those rollouts, or take them out before this "
        "stage with SampleFilter(criterion=Finite(), action='exclude')",
        lambda row: f"{float(reward[row])} at row {rows.at(row)} (rollout {rows.name('rollout', row)})",
    )
    if siblings_agree and rows.rollouts.n < len(reward):
        rows.require(
            rows.rollouts.spread(reward[rows.rollouts.first]) == reward,
            "the segments of a rollout share its reward; found {found}. If segments carry rewards of their "
            "own, say how they add up: reward='sum', 'last', …",
            lambda row: rows.segments(row, reward),
        )


def require_turns(rows: Rows, turn: Tensor | None) -> None:
    """The segments of a rollout have turns of their own.

    Raises:
        BatchError: two have one turn, with the rows.
    """
    if turn is not None:
        pairs = rows.rollouts.everyone.paired_with(Ids(turn))
        rows.require(
            pairs.is_first,
            "the segments of a rollout need turns of their own; found {found}",
            lambda row: rows.segments(row, turn),
        )
