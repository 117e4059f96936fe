"""What must hold of the rows: one mask serves the flag that is read and the message that names the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import NUMBER_WORKERS, BatchError, listing, who_stamps
from .ids import first_row_of_pairs, places_by_turn, sum_by

DESCRIBED = 100  # describing a rollout costs a pass over the batch, and nobody reads more

MORE_ENDS = (
    "found more ends (True) in {found}. Are ids reused by two workers, or rows repeated by a sampler? Their "
    f"rewards would be added up. {NUMBER_WORKERS}."
)


class Rule(NamedTuple):
    """A requirement, the rows that break it, and how to describe them."""

    bad: Tensor
    """(N,) bool: the rows that break it. Computed on the device; read only where rules are read."""
    describe: Callable[[int], str]
    """A bad row in words; equal words are said once."""
    message: str
    """What is required, ``{found}``, and what to do; ``{count}`` rows break it (``{s}``: a plural's s)."""
    error: type[BatchError] = BatchError
    """What is raised."""


def broken(rules: Sequence[Rule]) -> Tensor:
    """Scalar bool: whether any of these rules, of rows on one device, is broken. No device read."""
    bad = torch.cat([rule.bad for rule in rules])
    return bad.view(torch.uint8).amax() > 0 if bad.numel() else bad.any()  # a tenth of what `any` costs


def explain(rules: Iterable[Rule]) -> None:
    """Raise for the first broken rule, with the rows that break it. Reads once a rule.

    Raises:
        BatchError: a rule is broken; of the class that the rule names.
    """
    for rule in rules:
        rows = rule.bad.nonzero().flatten().tolist()
        if rows:
            found = listing(dict.fromkeys(map(rule.describe, rows[:DESCRIBED])))
            if len(rows) > DESCRIBED:
                found += f" (the first {DESCRIBED} of {len(rows)} rows)"
            plural = "" if len(rows) == 1 else "s"
            raise rule.error(rule.message.format(found=found, count=len(rows), s=plural))


def enforce(rules: Sequence[Rule]) -> None:
    """Read all rules at once, and explain the first that is broken. One device read, none without rules.

    Raises:
        BatchError: a rule is broken.

    Example:
        >>> outside = torch.tensor([False, True])
        >>> try:
        ...     enforce([Rule(outside, lambda row: f"row {row}", "{count} row{s} outside: {found}")])
        ... except BatchError as err:
        ...     print(err)
        1 row outside: row 1
    """
    for device in dict.fromkeys(rule.bad.device for rule in rules):  # mostly one
        if bool(broken([rule for rule in rules if rule.bad.device == device])):
            explain(rules)


ReadsColumns = Callable[[Sequence[Tensor | None]], list[Tensor | None]]
"""From (N,) int64 columns on one device to the same on the CPU; None stays None."""


def read_columns(columns: Sequence[Tensor | None], rules: Sequence[Rule] = ()) -> list[Tensor | None]:
    """Bring (N,) int64 columns to the CPU, and enforce rules on the way. One device read.

    Args:
        columns: on one device; None stays None, and those on the CPU come back themselves.
        rules: of rows there.

    Raises:
        BatchError: a rule is broken.

    Example:
        >>> read_columns([torch.tensor([4, 5]), None])
        [tensor([4, 5]), None]
    """
    there = [column for column in columns if column is not None]
    if not there or there[0].device.type == "cpu":
        enforce(rules)
        return list(columns)
    beside = [rule for rule in rules if rule.bad.device == there[0].device]
    enforce([rule for rule in rules if rule.bad.device != there[0].device])
    flags = [broken(beside).long().reshape(1)] if beside else []
    read = iter(torch.cat([*there, *flags]).cpu().split([len(part) for part in (*there, *flags)]))
    found = [None if column is None else next(read) for column in columns]
    if any(map(bool, read)):
        explain(rules)
    return found


def identity_rules(rollouts: Tensor, groups: Tensor | None, first: Tensor) -> list[Rule]:
    """Ids are set, and a rollout belongs to one group.

    Args:
        rollouts: (N,) int64.
        groups: (N,) int64, or None where a batch has no groups.
        first: (N,) int64, the first row of each row's rollout.
    """
    rules = [set_rule(rollouts, "rollout_id", "rows without an id would be taken for one rollout")]
    if groups is None:
        return rules

    def groups_of(row: int) -> str:
        segments = rollouts == rollouts[row]
        homes = few(groups[segments].unique())
        return f"rollout {int(rollouts[row])} in groups {homes} (rows {_numbers(segments)})"

    return [
        *rules,
        set_rule(groups, "group_id", "rows without an id would be compared with one another"),
        Rule(
            groups.index_select(0, first) != groups,
            groups_of,
            "a rollout belongs to one group; found {found}. Are ids reused? " + NUMBER_WORKERS,
        ),
    ]


def set_rule(ids: Tensor, name: str, why: str) -> Rule:
    """No id is negative."""
    message = f"every row needs a {name} ≥ 0; found {{found}}: {why}{who_stamps(name)}"
    return Rule(ids < 0, lambda row: f"{int(ids[row])} at row {row}", message)


def end_rules(
    rollouts: Tensor,
    first: Tensor,
    *,
    done: Tensor | None = None,
    segment: Tensor | None = None,
    expected: Tensor | None = None,
) -> list[Rule]:
    """A rollout ends once, but where its segments end each by themselves, and then each of them once.

    Args:
        rollouts: (N,) int64.
        first: (N,) int64, the first row of each row's rollout.
        done: (N,) bool, True where a rollout ends; None: nobody says.
        segment: (N,) int64, numbers of segments; those that differ may end each by themselves.
        expected: (N,) int64, how many segments of the row's rollout end; without `segment` each by one row.
    """
    if done is None:
        return []
    describe, rules = describe_segments(rollouts, done), []
    if expected is not None:
        rules.append(
            Rule(
                sum_by(first, done.long()) > expected,
                describe,
                f"a rollout ends as often as expected_segments says; {MORE_ENDS}",
            )
        )
    if expected is None or segment is not None:
        piece = first if segment is None else first_row_of_pairs(first, segment)
        rules.append(
            Rule(
                done & (sum_by(piece, done.long()) > 1),
                describe,
                f"a rollout ends once; {MORE_ENDS} Where segments end each by themselves, as sub-agents do, "
                "give the batch a column expected_segments, or name the gate's segment_key",
            )
        )
    return rules


def reward_rules(reward: Tensor, rollouts: Tensor, first: Tensor, *, siblings_agree: bool) -> list[Rule]:
    """Rewards are finite and, where asked, shared by the segments of a rollout.

    Args:
        reward: (N,) float.
        rollouts: (N,) int64.
        first: (N,) int64, the first row of each row's rollout.
        siblings_agree: whether the segments of a rollout must have one reward.
    """
    finite = Rule(
        ~torch.isfinite(reward),
        lambda row: f"{float(reward[row])} at row {row} (rollout {int(rollouts[row])})",
        "every reward must be finite; found {found}. Score those rollouts, or take them out before this "
        "stage with SampleFilter(criterion=Finite(), action='exclude')",
    )
    if not siblings_agree:
        return [finite]

    agree = Rule(
        reward.index_select(0, first) != reward,
        describe_segments(rollouts, reward),
        "the segments of a rollout share its reward; found {found}. If segments carry rewards of their own, "
        "say how they add up: reward='sum', 'last', …",
    )
    return [finite, agree]


def turn_rules(rollouts: Tensor, first: Tensor, turn: Tensor | None) -> list[Rule]:
    """The segments of a rollout have turns of their own."""
    if turn is None:
        return []
    message = "the segments of a rollout need turns of their own; found {found}"
    return [Rule(places_by_turn(first, turn).tied, describe_segments(rollouts, turn), message)]


def describe_segments(rollouts: Tensor, values: Tensor) -> Callable[[int], str]:
    """What describes a row by all segments of its rollout, with their values."""

    def describe(row: int) -> str:
        segments = rollouts == rollouts[row]
        return f"rollout {int(rollouts[row])} (rows {_numbers(segments)}: {few(values[segments])})"

    return describe


def as_rewards(reward: Tensor | Sequence[float]) -> Tensor:
    """Rewards as an (N,) floating-point tensor; float64, which keeps large integers apart, of anything else.

    Raises:
        BatchError: a None (the rows are named), or more than one number a row.
    """
    if not isinstance(reward, Tensor):
        missing = [row for row, value in enumerate(reward) if value is None]
        if missing:
            raise BatchError(f"every row needs a reward; None at rows {listing(map(str, missing))}")
        reward = torch.tensor(reward, dtype=torch.float64)
    if not reward.is_floating_point():
        reward = reward.double()
    if reward.ndim == 0 or reward.numel() != reward.shape[0]:
        raise BatchError(f"one reward a row is needed, (N,) or (N, 1, ...); got {tuple(reward.shape)}")
    return reward.detach().reshape(-1)


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision is for what came in and goes out: what is computed of it is not rounded on the way."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def credit_dtype(reward: Tensor | Sequence[float]) -> torch.dtype:
    """The dtype of what is measured of rewards: their own, or torch's default where they are no floats."""
    floats = isinstance(reward, Tensor) and reward.is_floating_point()
    return reward.dtype if floats else torch.get_default_dtype()  # type: ignore[union-attr]


def same_length(**columns: Tensor | None) -> None:
    """Check that all columns have the same number of rows, on the same device.

    Raises:
        BatchError: they have not.
    """
    given = {name: column for name, column in columns.items() if column is not None}
    if len({(len(c), c.device) for c in given.values()}) > 1:
        found = ", ".join(f"{name} {len(c)} on {c.device}" for name, c in given.items())
        raise BatchError(f"columns must have one length and one device; found {found}")


def few(values: Tensor, most: int = 8) -> str:
    """The first of many values, and how many more there are.

    Example:
        >>> few(torch.arange(10)), few(torch.tensor([1.5]))
        ('[0, 1, 2, 3, 4, 5, 6, 7] and 2 more', '[1.5]')
    """
    more = len(values) - most
    return f"{values[:most].tolist()}" + (f" and {more} more" if more > 0 else "")


def _numbers(rows: Tensor) -> str:
    return few(rows.nonzero().flatten())
