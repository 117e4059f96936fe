"""Decide which groups are whole, kept, refilled or given up. `options` is a GroupAssembler."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from headrace.transforms.table import (
    LISTED,
    BatchError,
    IncompleteGroupsError,
    StreamWarning,
    count_of,
    listing,
)
from headrace.transforms.table.options import above_zero

from .open_groups import Group
from .stream import EVICTED, FAILED, LOST, REASONS, SURPLUS, TIMEOUT, StreamPlan

ENDLESS = 4  # warn of a rollout at this many times the greatest age of a rollout that ended
LEAST_AGE = 5  # smallest age, in puts, that is multiplied by ENDLESS
LEAST_ENDED = 10  # rollouts that must have ended before any such warning
LEAST_IDLE = 100  # smallest default of max_idle, for small batches
REFUSALS = {
    FAILED: "{count} group{s} cannot become whole because rollouts failed: {found}. Set on_failure='drop', "
    "'keep' with min_rollouts, or 'refill'",
    LOST: "{count} group{s} cannot become whole because rollouts were lost before they arrived: {found}. Set "
    "on_failure='drop', 'keep' with min_rollouts, or 'refill'",
    TIMEOUT: "{count} group{s} did not become whole in time: {found}. Raise timeout or "
    "timeout_seconds, or set on_timeout='drop', 'keep' with min_rollouts, or 'refill'",
    EVICTED: "at most max_pending_groups={most} groups may wait, and there are {count} more: {found}. "
    "Announce at most capacity() groups, or set on_full='drop'",
}
Selector = Callable[[Tensor, int], "Tensor | Sequence[int]"]


class StalledError(RuntimeError):
    """The stream makes no progress. The message lists waiting groups, and counts all rows."""


def is_too_old(group: Group, plan: StreamPlan, options: Any) -> bool:
    """Whether a group has reached `timeout` or `timeout_seconds`."""
    if options.timeout is not None and plan.puts - group.born_put >= options.timeout:
        return True
    return options.timeout_seconds is not None and plan.now - group.born_time >= options.timeout_seconds


def settle(plan: StreamPlan, options: Any) -> None:
    """Plan which groups become whole or are given up. Check the groups with new rows, and those too old.

    Raises:
        IncompleteGroupsError: a group is given up, and the option for its case, such as `on_timeout`, is
            ``raise``.
        BatchError: `on_surplus` selects a wrong number of rollouts.
    """
    stream = plan.stream
    for group in stream.waiting.values():
        if not is_too_old(group, plan, options):
            break
        plan.find(group.key, group.expected)
    for group in plan.groups.values():
        _judge(group, plan, options)
    if options.max_pending_groups is not None:
        over = sum(not group.waits for group in plan.groups.values()) + options.max_pending_groups
        excess = max(0, len(stream.waiting) + plan.opened - over)
        for oldest in list(islice(plan.waiting(), excess)):
            group = plan.groups.setdefault(oldest.key, oldest.copy())
            group.reason, group.fate = EVICTED, "closed" if options.on_full == "drop" else "refused"
    refused = [group for group in plan.groups.values() if group.fate == "refused"]
    refused.sort(key=lambda group: group.born_put)  # the message lists the oldest
    for reason, message in REFUSALS.items() if refused else ():
        if words := [group.describe(plan.puts) for group in refused if group.reason == reason]:
            s, most = "s" if len(words) > 1 else "", options.max_pending_groups
            raise IncompleteGroupsError(message, count=len(words), s=s, found=listing(words), most=most)
    for group in plan.groups.values():
        if not group.waits:
            for number in group.leaving if group.fate == "ready" else group.rollouts:
                rollout, reason = group.rollouts[number], group.reason
                if group.fate == "ready" and (rollout.failed or reason in (FAILED, LOST)):
                    reason = FAILED if rollout.failed else SURPLUS
                plan.left[reason] += len(rollout.rows)


def _judge(group: Group, plan: StreamPlan, options: Any) -> None:
    """Decide the fate of a waiting group."""
    have, old = group.have, is_too_old(group, plan, options)
    size, settled = options.group_size or group.expected, have + group.lost >= group.dispatched
    if have >= size:
        if settled or old or not callable(options.on_surplus):
            group.fate, group.reason = "ready", SURPLUS
            group.leaving = _surplus(group, size, options.on_surplus)
    elif settled or old:
        failed = any(rollout.failed for rollout in group.rollouts.values())
        action, group.reason = options.on_timeout, TIMEOUT
        if settled:
            action, group.reason = options.on_failure, FAILED if failed else LOST
        has_least = options.min_rollouts is not None or options.min_fraction is not None
        share = have / group.expected
        enough = have >= (options.min_rollouts or 1) and share >= (options.min_fraction or 0)
        can_keep = action in ("keep", "refill") and has_least and enough
        can_refill = action in ("keep", "refill") and may_refill(group, options)
        if can_keep and (action == "keep" or not can_refill):
            group.fate, group.leaving = "ready", _surplus(group, size, options.on_surplus)
        elif can_refill:
            group.fate, group.missing = "refilled", size - have
        else:
            group.fate = "refused" if action == "raise" else "closed"


def may_refill(group: Group, options: Any) -> bool:
    """Whether `refill` may be called for a group again."""
    return options.refill is not None and group.refills < options.max_refills


def _surplus(group: Group, size: int, on_surplus: Any) -> Collection[int]:
    """The rollouts that leave a group when it becomes ready."""
    if group.have == len(group.members) <= size:
        return ()
    stay = _choose(group, size, on_surplus)
    return [number for number in group.rollouts if number not in stay]


def _choose(group: Group, size: int, on_surplus: Any) -> Collection[int]:
    """The rollouts to keep in a group: those that ended first, or the selection of `on_surplus`."""
    ended = {number: rollout for number, rollout in group.rollouts.items() if rollout.ended}
    if len(ended) <= size:
        return ended
    if not callable(on_surplus):
        return sorted(ended, key=lambda number: ended[number].last_arrival)[:size]
    numbers = sorted(ended)
    rewards = [max(ended[number].rows.values()).reward for number in numbers]  # from the last segment
    answer = torch.as_tensor(on_surplus(torch.tensor(rewards, dtype=torch.float64), size))
    indices = answer.nonzero().flatten() if answer.dtype is torch.bool else answer.long().unique()
    chosen = indices.tolist()
    if len(chosen) != size or min(chosen) < 0 or max(chosen) >= len(numbers):
        raise BatchError(
            f"on_surplus must select {size} of the {len(numbers)} rollouts of group {group.group}, as "
            f"indices or as a mask; it returned {answer.flatten().tolist()[:8]}"
        )
    return [numbers[index] for index in chosen]


def warn_of_endless(plan: StreamPlan) -> None:
    """Warn once of each open rollout that is :data:`ENDLESS` times as old as any ended one became.

    There is no warning before :data:`LEAST_ENDED` rollouts have ended. The greatest age of an ended rollout
    counts as at least :data:`LEAST_AGE`.
    """
    stream, endless = plan.stream, []
    oldest = ENDLESS * max(LEAST_AGE, stream.longest) if stream.ended >= LEAST_ENDED else math.inf
    while stream.open and plan.puts - (born := next(iter(stream.open.values()))) > oldest:
        (partition, number), _ = stream.open.popitem(last=False)
        group = stream.waiting[partition, stream.homes[partition][number]]
        rows, age = count_of(len(group.rollouts[number].rows), "row"), count_of(plan.puts - born, "put")
        endless.append(f"rollout {number} of group {group.group} ({rows}, {age} old)")
    if endless:
        warnings.warn(
            f"rollouts do not end: {listing(endless)}; the {stream.ended} that ended took at most "
            f"{count_of(stream.longest, 'put')}. The groups of the others wait in memory. Check whether the "
            "environment hangs or never sets done. Set timeout or timeout_seconds, and on_timeout, to "
            "continue without them",
            StreamWarning,
            stacklevel=4,  # the caller of put()
        )


def waiting_for(groups: Iterable[Group], plan: StreamPlan) -> list[str]:
    """Describe groups, each with its worker if the rows name it."""
    stream, found = plan.stream, []
    for group in groups:
        words = group.describe(plan.puts)
        if stream.workers:  # rows are stamped: worker w of W runs the groups w, w + W, …
            words += f", of worker {group.group % stream.workers}"
        if group.announced:
            words += f", announced at step {group.born}; this is step {stream.steps.over}"
        found.append(words)
    return found


def check_idle(plan: StreamPlan, options: Any) -> None:
    """Check how many puts have made no group whole, and how long a group has waited for its policy version.

    Raises:
        StalledError: one of these has lasted `max_idle` puts.
    """
    stream, most = plan.stream, options.max_idle
    ahead = None
    if options.on_newer == "wait":
        ahead = next((group for group in stream.whole_groups() if group.newest > options.version), None)
    waited = 0 if ahead is None else plan.puts - ahead.born_put
    if max(stream.idle + 1, waited) < (most or LEAST_IDLE):
        return
    if most is None:
        oldest = next(iter(stream.waiting.values()), None)
        groups = options.groups or len(stream.waiting) + sum(map(len, stream.ready.values()))
        most = max(LEAST_IDLE, 8 * groups * (oldest.dispatched if oldest else 1))
    if stream.idle + 1 >= most and all(group.fate != "ready" for group in plan.groups.values()):
        raise stalled(f"the last {stream.idle + 1} puts have made no group whole", plan)
    if ahead is not None and waited >= most:
        raise stalled(
            f"group {ahead.group} has waited {waited} puts for policy version {ahead.newest}, and "
            f"assembler.version is {options.version}: set it where the policy is updated",
            plan,
        )


def stalled(
    why: str, plan: StreamPlan, awaited: Iterable[Group] = (), worker: tuple[int, int] | None = None
) -> StalledError:
    """Make an error that lists waiting groups, of all workers or one, and counts all rows.

    The groups that the next step waits for come first, then the oldest.
    """
    stream, first = plan.stream, {group.key: group for group in awaited}
    waiting = [*first.values(), *(group for group in plan.waiting() if group.key not in first)]
    if worker is not None:
        waiting = [group for group in waiting if group.group % worker[1] == worker[0]]
    words = listing(waiting_for(waiting[:LISTED], plan), of=len(waiting))
    rows = {"arrived": stream.received + plan.new}
    rows |= {"held": stream.held + plan.new - sum(plan.left.values())}
    rows |= {reason: stream.counts[reason] + plan.left[reason] for reason in REASONS}
    counts = ", ".join(f"{number} {name}" for name, number in rows.items() if number) or "none arrived"
    advice = (
        " Check that all rollouts of a group are put into this assembler, with done=True on their last rows. "
        "To continue without missing rollouts, set timeout or max_pending_groups"
    )
    if not words:
        advice = (
            " No prompt was announced and no row was put: check that draws() is called, that the workers "
            "have started, and that they put their rows into this assembler"
        ) * (not rows["arrived"])
    return StalledError(f"{why.rstrip('.')}. Waiting: {words or 'no group'}. Rows: {counts}.{advice}")


def check_limits(options: Any) -> None:
    """Check options that depend on one another.

    Raises:
        ValueError: an option has an invalid value, or lacks another option that it needs.
    """
    actions = (options.on_failure, options.on_timeout)
    given = options.min_rollouts is not None or options.min_fraction is not None
    found = f"on_failure={actions[0]!r} and on_timeout={actions[1]!r}"
    if "keep" in actions and not given:
        raise ValueError(f"'keep' needs min_rollouts or min_fraction; got neither, with {found}")
    if given and not {"keep", "refill"} & set(actions):
        raise ValueError(
            f"min_rollouts and min_fraction have an effect only with 'keep' or 'refill'; got {found}"
        )
    above_zero("min_fraction", options.min_fraction, 1)
    above_zero("timeout_seconds", options.timeout_seconds)
    refills, found = "refill" in (*actions, options.on_stale), f"{found}, on_stale={options.on_stale!r}"
    if refills and not callable(options.refill):
        raise ValueError(f"'refill' needs a callable refill; got {options.refill!r}, with {found}")
    if callable(options.refill) and not refills and "keep" not in actions:
        raise ValueError(f"refill has an effect only with 'refill' or 'keep'; got {found}")
    if options.max_staleness is not None and options.ahead > options.max_staleness:
        raise ValueError(
            f"steps_ahead must be at most max_staleness={options.max_staleness}, or groups become too old "
            f"before they are trained; got {options.steps_ahead}"
        )
    if options.waits and (options.groups is None or options.partition_key is not None):
        raise ValueError(
            "on_stale='wait' needs groups (how many groups a step trains) and partition_key=None, because a "
            f"step trains groups of one partition; got groups={options.groups} and "
            f"partition_key={options.partition_key!r}. Or set on_stale='drop', 'mask' or 'refill'"
        )
    most, size = options.max_concurrent_rollouts, options.group_size
    if most is not None and most < (size or 1):
        raise ValueError(f"max_concurrent_rollouts must be at least group_size ({size}); got {most}")
    if options.on_full != "drop" and options.max_pending_groups is None:
        raise ValueError(f"on_full={options.on_full!r} needs max_pending_groups")
    if options.on_timeout != "drop" and options.timeout is None and options.timeout_seconds is None:
        raise ValueError(f"on_timeout={options.on_timeout!r} needs timeout or timeout_seconds")
