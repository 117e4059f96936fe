"""How long groups are waited for, and what happens then."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey
from torch import Tensor

from headrace.transforms.checks import Rule, enforce
from headrace.transforms.errors import NUMBER_WORKERS, IncompleteGroupsError

from .arriving import Arriving
from .changes import DUPLICATE, FAILED, LATE, REASONS, TIMEOUT, Fates, Stream, apply_fates, judge
from .settled import Selector, Tally, describe_open_group, tally
from .stalled import StalledError, stalled

LEAST_IDLE = 100  # puts without a whole group that are no stall, however small the batch


class Limits(NamedTuple):
    """The options by which an assembler decides, under their names there."""

    groups: int | None
    group_size: int | None
    segment_key: NestedKey | None
    on_failure: str
    on_timeout: str
    timeout: int | None
    timeout_seconds: float | None
    min_rollouts: int | None
    min_fraction: float | None
    max_refills: int
    max_pending_groups: int | None
    on_full: str
    max_idle: int | None
    on_surplus: str | Selector
    on_duplicate: str
    on_late: str

    def tally(self, state: Stream) -> Tally:
        """How far rollouts and groups are."""
        return tally(state.rows, state.groups, has_segments=self.segment_key is not None)


def check_limits(limits: Limits, refill: Any) -> None:
    """Check options that need one another.

    Raises:
        ValueError: one has a wrong value, or lacks what it needs.
    """
    actions = (limits.on_failure, limits.on_timeout)
    given = limits.min_rollouts is not None or limits.min_fraction is not None
    if ("keep" in actions) != given:
        raise ValueError(
            "on_failure='keep' or on_timeout='keep', and only they, need min_rollouts or min_fraction"
        )
    if limits.min_fraction is not None and not 0 < limits.min_fraction <= 1:
        raise ValueError(f"min_fraction must be in (0, 1]; got {limits.min_fraction}")
    if ("refill" in actions) != callable(refill):
        raise ValueError("on_failure='refill' or on_timeout='refill', and only they, need a callable refill")
    if limits.on_surplus != "drop" and not callable(limits.on_surplus):
        raise ValueError(f"on_surplus must be 'drop' or a callable; got {limits.on_surplus!r}")
    if limits.timeout_seconds is not None and not 0 < limits.timeout_seconds < math.inf:
        raise ValueError(f"timeout_seconds must be finite and > 0; got {limits.timeout_seconds}")
    if limits.on_full != "drop" and limits.max_pending_groups is None:
        raise ValueError(f"on_full={limits.on_full!r} needs max_pending_groups")
    if limits.on_timeout != "drop" and limits.timeout is None and limits.timeout_seconds is None:
        raise ValueError(f"on_timeout={limits.on_timeout!r} needs timeout or timeout_seconds")


def settle(state: Stream, limits: Limits, now: float) -> tuple[Stream, list[tuple[int, int]]]:
    """Groups become whole, or are given up.

    Returns:
        The state after it, and the groups to be refilled, each with the number of rollouts that it lacks.

    Raises:
        IncompleteGroupsError: under ``raise``.
    """
    groups, count = state.groups, limits.tally(state)
    too_old = torch.zeros_like(groups.ready)
    if limits.timeout is not None:
        too_old |= state.puts - groups.born_put >= limits.timeout
    if limits.timeout_seconds is not None:
        too_old |= now - groups.born_time >= limits.timeout_seconds
    enough = count.have >= (limits.min_rollouts or 1)
    enough &= count.have.double() / groups.dispatched >= (limits.min_fraction or 0)
    size = groups.expected if limits.group_size is None else torch.full_like(groups.group, limits.group_size)
    fates = judge(
        state,
        count,
        size=size,
        too_old=too_old,
        enough=enough,
        may_refill=groups.refills < limits.max_refills,
        actions={FAILED: limits.on_failure, TIMEOUT: limits.on_timeout},
        most=limits.max_pending_groups,
        selector=None if isinstance(limits.on_surplus, str) else limits.on_surplus,
    )
    _refuse_short(state, limits, count, fates)
    number = fates.refilled.nonzero().flatten()
    asked = list(zip(groups.group[number].tolist(), fates.refilled[number].tolist(), strict=True))
    return apply_fates(state, count, fates, now), asked


def repeat_rules(new: Arriving, leaves: Tensor, limits: Limits) -> list[Rule]:
    """Rows that come again, or too late, where they are to raise; `leaves` as in :class:`Admission`."""

    def describe(row: int) -> str:
        segment = "" if limits.segment_key is None else f"segment {int(new.rows.segment[row])} of "
        return f"{segment}rollout {int(new.rows.rollout[row])} of group {int(new.dispatch.group[row])}"

    rules = []
    if limits.on_duplicate == "raise":
        message = (
            "a rollout ends once, and a segment of it comes once; found again {found}. Do two workers "
            f"number alike, or were rows sent twice? {NUMBER_WORKERS}. Name the segment_key if rows come in "
            "another order, or set on_duplicate='drop', and the first stays"
        )
        rules.append(Rule(leaves == DUPLICATE, describe, message))
    if limits.on_late == "raise":
        message = "rollouts come before their group is closed; found too late {found}: on_late='drop'"
        rules.append(Rule(leaves == LATE, describe, message))
    return rules


def _refuse_short(state: Stream, limits: Limits, count: Tally, fates: Fates) -> None:
    def describe(slot: int) -> str:
        return describe_open_group(slot, state.rows, state.groups, count, state.puts)

    failed = (
        "{count} group{s} cannot become whole, since rollouts failed: {found}. Set on_failure='drop', "
        "'keep' with min_rollouts, or 'refill'"
    )
    old = (
        "{count} group{s} did not become whole in time: {found}. Raise timeout, or set on_timeout='drop', "
        "'keep' with min_rollouts, or 'refill'"
    )
    rules = []
    if limits.on_failure == "raise":
        rules.append(Rule(fates.settled, describe, failed, IncompleteGroupsError))
    if limits.on_timeout == "raise":
        rules.append(Rule(fates.old, describe, old, IncompleteGroupsError))
    if limits.on_full == "raise":
        full = (
            f"{limits.max_pending_groups} groups may wait (max_pending_groups); {{count}} more group{{s}}: "
            "{found}. Announce no more than room(), or set on_full='drop'"
        )
        rules.append(Rule(fates.evicted, describe, full, IncompleteGroupsError))
    enforce(rules)


def count_idle(state: Stream, whole_before: int, limits: Limits) -> Stream:
    """Count puts in a row in which no group became whole.

    Raises:
        StalledError: they are too many.
    """
    if state.whole > whole_before:
        return state._replace(idle=0)
    state, groups, most = state._replace(idle=state.idle + 1), state.groups, limits.max_idle
    if most is None:
        expected = int(groups.expected.max()) if len(groups.group) else 1
        batch = int(groups.dispatched.sum()) if limits.groups is None else limits.groups * expected
        most = max(LEAST_IDLE, 8 * batch)
    if state.idle >= most:
        raise describe_stall(f"{state.idle} puts in a row have made no group whole", state, limits)
    return state


def describe_stall(why: str, state: Stream, limits: Limits) -> StalledError:
    """The error that says which groups wait longest, and what became of all rows."""
    count, waiting = limits.tally(state), (~state.groups.ready).nonzero().flatten().tolist()
    words = [describe_open_group(slot, state.rows, state.groups, count, state.puts) for slot in waiting[:8]]
    words += [""] * (len(waiting) - len(words))  # which are counted, and not said
    left = dict(zip(REASONS, state.counts, strict=True))
    return stalled(why, words, {"came": state.received, "held": len(state.rows.slot), **left})
