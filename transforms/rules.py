"""What must hold of every row: one mask serves the flag that is read and the message that names the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import BatchError, listing

LOOKED_AT = 100  # telling of a rollout costs a pass over the batch, and nobody reads more


class Rule(NamedTuple):
    """A rule, its offenders and how to tell of them."""

    bad: Tensor
    """(N,) bool: the rows that break it. Computed on the device, read by nobody while all is well."""
    tell: Callable[[int], str]
    """A bad row in words; equal words are told once."""
    message: str
    """What is required, ``{found}``, and what to do."""


def broken(rules: Sequence[Rule]) -> Tensor:
    """Scalar bool: whether any rule is broken. No device read."""
    return torch.stack([rule.bad.any() for rule in rules]).any()


def explain(rules: Sequence[Rule]) -> None:
    """Raise for the first broken rule, with its offenders. Reads what it needs: the run ends here.

    Raises:
        BatchError: a rule is broken.
    """
    for rule in rules:
        rows = rule.bad.nonzero().flatten().tolist()
        if rows:
            found = listing(dict.fromkeys(map(rule.tell, rows[:LOOKED_AT])))
            if len(rows) > LOOKED_AT:
                found += f" (the first {LOOKED_AT} of {len(rows)} rows)"
            raise BatchError(rule.message.format(found=found))


def identity_rules(rollouts: Tensor, groups: Tensor | None, first: Tensor) -> list[Rule]:
    """Ids are set, and a rollout belongs to one group.

    Args:
        rollouts: (N,) int64.
        groups: (N,) int64, or None where a batch has no groups.
        first: (N,) int64, the first row of each row's rollout.
    """
    rules = [
        set_rule(rollouts, "rollout_id", "an unset id would merge strangers into one rollout"),
    ]
    if groups is None:
        return rules

    def homes(row: int) -> str:
        mine = rollouts == rollouts[row]
        found = sorted(set(groups[mine].tolist()))
        return f"rollout {int(rollouts[row])} in groups {found} (rows {mine.nonzero().flatten().tolist()})"

    return [
        *rules,
        set_rule(groups, "group_id", "an unset id would compare strangers with one another"),
        Rule(
            groups.index_select(0, first) != groups,
            homes,
            "a rollout belongs to one group; found {found}. Are ids reused?",
        ),
    ]


def set_rule(ids: Tensor, name: str, why: str) -> Rule:
    """No id is negative."""
    message = f"every row needs a {name} ≥ 0; found {{found}}: {why}"
    return Rule(ids < 0, lambda row: f"{int(ids[row])} at row {row}", message)


def reward_rules(reward: Tensor, rollouts: Tensor, first: Tensor, *, siblings_agree: bool) -> list[Rule]:
    """Rewards are finite and, where asked, shared by the segments of a rollout.

    Args:
        reward: (N,) float.
        rollouts: (N,) int64.
        first: (N,) int64, the first row of each row's rollout.
        siblings_agree: whether the segments of a rollout must have one reward.
    """
    rules = [
        Rule(
            ~torch.isfinite(reward),
            lambda row: f"{float(reward[row])} at row {row} (rollout {int(rollouts[row])})",
            "every reward must be finite; found {found}. Score those rollouts, or take them out before this "
            "stage with SampleFilter(criterion=Finite(), action='exclude')",
        )
    ]
    if not siblings_agree:
        return rules

    def segments(row: int) -> str:
        mine = rollouts == rollouts[row]
        rows, values = mine.nonzero().flatten().tolist(), reward[mine].tolist()
        return f"rollout {int(rollouts[row])} (rows {rows}: {values})"

    return [
        *rules,
        Rule(
            reward.index_select(0, first) != reward,
            segments,
            "the segments of a rollout share its reward; found {found}. If segments carry rewards of their "
            "own, say how they add up: reward='sum', 'last', …",
        ),
    ]
