"""How long groups are waited for, and what happens then: by the `options` of a GroupAssembler."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from headrace.transforms.errors import BatchError, IncompleteGroupsError, StreamWarning, listing
from headrace.transforms.options import above_zero

from .open_groups import Group
from .stream import EVICTED, FAILED, LOST, REASONS, SURPLUS, TIMEOUT, StreamPlan

ENDLESS = 4  # times the greatest age of those that ended: a rollout that is older does not end
LEAST_AGE = 5  # puts that one takes at least, as far as this goes
LEAST_ENDED = 10  # rollouts that have ended before any is said not to end
LEAST_IDLE = 100  # puts without a whole group that are no stall, however small the batch
REFUSALS = {
    FAILED: "{count} group{s} cannot become whole, since rollouts failed: {found}. Set on_failure='drop', "
    "'keep' with min_rollouts, or 'refill'",
    LOST: "{count} group{s} cannot become whole, since rollouts were lost on their way: {found}. Set "
    "on_failure='drop', 'keep' with min_rollouts, or 'refill'",
    TIMEOUT: "{count} group{s} did not become whole in time: {found}. Raise timeout, or set "
    "on_timeout='drop', 'keep' with min_rollouts, or 'refill'",
    EVICTED: "{most} groups may wait (max_pending_groups); {count} more group{s}: {found}. Announce no more "
    "than capacity(), or set on_full='drop'",
}
Selector = Callable[[Tensor, int], "Tensor | Sequence[int]"]


class StalledError(RuntimeError):
    """Nothing comes out, and nothing says that it will: the groups that wait longest, and where rows went."""


def is_too_old(group: Group, plan: StreamPlan, options: Any) -> bool:
    """Whether a group has waited too long."""
    if options.timeout is not None and plan.puts - group.born_put >= options.timeout:
        return True
    return options.timeout_seconds is not None and plan.now - group.born_time >= options.timeout_seconds


def settle(plan: StreamPlan, options: Any) -> None:
    """Plan which groups become whole or are given up: of those to which rows came, and of the oldest.

    Raises:
        IncompleteGroupsError: under ``raise``.
        BatchError: a selector does not select as many as it should.
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
    refused.sort(key=lambda group: group.born_put)  # the oldest are said
    for reason, message in REFUSALS.items() if refused else ():
        if words := [group.describe(plan.puts) for group in refused if group.reason == reason]:
            s, most = "s" if len(words) > 1 else "", options.max_pending_groups
            found = message.format(count=len(words), s=s, found=listing(words), most=most)
            raise IncompleteGroupsError(found)
    for group in plan.groups.values():
        if not group.waits:
            for number, rollout in group.rollouts.items():
                if number not in group.stays:
                    reason = group.reason
                    if group.fate == "ready" and (rollout.failed or reason in (FAILED, LOST)):
                        reason = FAILED if rollout.failed else SURPLUS
                    plan.left[reason] += len(rollout.rows)


def _judge(group: Group, plan: StreamPlan, options: Any) -> None:
    """Say what becomes of a group that waits."""
    have, old = group.have, is_too_old(group, plan, options)
    size, over = options.group_size or group.expected, have + group.lost >= group.dispatched
    if have >= size:
        if over or old or not callable(options.on_surplus):
            group.fate, group.reason = "ready", SURPLUS
            group.stays = _choose(group, size, options.on_surplus)
    elif over or old:
        failed = any(rollout.failed for rollout in group.rollouts.values())
        action, group.reason = options.on_timeout, TIMEOUT
        if over:
            action, group.reason = options.on_failure, FAILED if failed else LOST
        has_least = options.min_rollouts is not None or options.min_fraction is not None
        share = have / group.expected
        enough = have >= (options.min_rollouts or 1) and share >= (options.min_fraction or 0)
        may_keep = action in ("keep", "refill") and has_least and enough
        again = action in ("keep", "refill") and may_refill(group, options)
        if may_keep and (action == "keep" or not again):
            group.fate, group.stays = "ready", _choose(group, size, options.on_surplus)
        elif again:
            group.fate, group.missing = "refilled", size - have
        else:
            group.fate = "refused" if action == "raise" else "closed"


def may_refill(group: Group, options: Any) -> bool:
    """Whether more rollouts may be asked for."""
    return options.refill is not None and group.refills < options.max_refills


def _choose(group: Group, size: int, on_surplus: Any) -> Collection[int]:
    """The rollouts that stay in a group: those that ended first, or those that the selector takes."""
    ended = {number: rollout for number, rollout in group.rollouts.items() if rollout.ended}
    if len(ended) <= size:
        return ended
    if not callable(on_surplus):
        return sorted(ended, key=lambda number: ended[number].last_arrival)[:size]
    numbers = sorted(ended)
    rewards = [max(ended[number].rows.values()).reward for number in numbers]  # of the last segment
    answer = torch.as_tensor(on_surplus(torch.tensor(rewards, dtype=torch.float64), size))
    indices = answer.nonzero().flatten() if answer.dtype is torch.bool else answer.long().unique()
    chosen = indices.tolist()
    if len(chosen) != size or min(chosen) < 0 or max(chosen) >= len(numbers):
        raise BatchError(
            f"on_surplus selects {size} of the {len(numbers)} rollouts of group {group.group}, as "
            f"indices or as a mask; it returned {answer.flatten().tolist()[:8]}"
        )
    return [numbers[place] for place in chosen]


def warn_of_endless(plan: StreamPlan) -> None:
    """Say once which rollouts have not ended at four times the greatest age at which one has."""
    stream, endless = plan.stream, []
    oldest = ENDLESS * max(LEAST_AGE, stream.longest) if stream.ended >= LEAST_ENDED else math.inf
    while stream.open and plan.puts - (born := next(iter(stream.open.values()))) > oldest:
        (partition, number), _ = stream.open.popitem(last=False)
        group = stream.waiting[stream.homes[partition, number]]
        rows = len(group.rollouts[number].rows)
        endless.append(f"rollout {number} of group {group.group} ({rows} rows, {plan.puts - born} puts old)")
    if endless:
        warnings.warn(
            f"rollouts do not end: {listing(endless)}; the {stream.ended} that ended took {stream.longest} "
            "puts at most. Their groups wait for them, and their rows are kept. Does the environment hang, "
            "or never set done? Set timeout or timeout_seconds, and on_timeout, to go on without them",
            StreamWarning,
            stacklevel=3,
        )


def check_idle(plan: StreamPlan, options: Any) -> None:
    """Count a put in which no group becomes whole, or one waits for a policy version that nobody counts.

    Raises:
        StalledError: they are too many.
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
        batch = options.groups * (oldest.expected if oldest else 1) if options.groups else stream.dispatched
        most = max(LEAST_IDLE, 8 * batch)
    if stream.idle + 1 >= most and all(group.fate != "ready" for group in plan.groups.values()):
        raise stalled(f"{stream.idle + 1} puts in a row have made no group whole", plan)
    if ahead is not None and waited >= most:
        why = (
            f"group {ahead.group} has waited {waited} puts for policy version {ahead.newest}, and version is"
        )
        raise stalled(f"{why} {options.version}: set assembler.version where the policy is updated", plan)


def stalled(why: str, plan: StreamPlan, worker: tuple[int, int] | None = None) -> StalledError:
    """The error that says which groups wait longest, all or a worker's, and what became of all rows."""
    stream, waiting = plan.stream, list(plan.waiting())
    if worker is not None:
        waiting = [group for group in waiting if group.group % worker[1] == worker[0]]
    words = [group.describe(plan.puts) for group in waiting[:8]]
    words += [""] * (len(waiting) - len(words))  # which are counted, and not said
    rows = {"came": stream.received + plan.came, "held": stream.held + plan.came - sum(plan.left.values())}
    rows |= {reason: stream.counts[reason] + plan.left[reason] for reason in REASONS}
    counts = ", ".join(f"{number} {name}" for name, number in rows.items() if number) or "none came"
    advice = (
        " Do all rollouts of a group come here, with done on their last rows? Set timeout or "
        "max_pending_groups to go on without those that do not"
    )
    return StalledError(
        f"{why.rstrip('.')}. Waiting: {listing(words) or 'no group'}. Rows: {counts}."
        f"{advice if words else ''}"
    )


def check_limits(options: Any) -> None:
    """Check options that need one another.

    Raises:
        ValueError: one has a wrong value, or lacks what it needs.
    """
    actions = (options.on_failure, options.on_timeout)
    given = options.min_rollouts is not None or options.min_fraction is not None
    if ("keep" in actions and not given) or (given and not {"keep", "refill"} & set(actions)):
        raise ValueError(
            "on_failure='keep' or on_timeout='keep' need min_rollouts or min_fraction, which have no effect "
            "but there and under 'refill'"
        )
    above_zero("min_fraction", options.min_fraction, 1)
    above_zero("timeout_seconds", options.timeout_seconds)
    refills = "refill" in (*actions, options.on_stale)
    if refills != callable(options.refill) and not ("keep" in actions and callable(options.refill)):
        raise ValueError(
            "on_failure='refill', on_timeout='refill' or on_stale='refill' need a callable refill, which has "
            "no effect but there and under 'keep'"
        )
    most, size = options.max_concurrent_rollouts, options.group_size
    if most is not None and most < (size or 1):
        raise ValueError(f"max_concurrent_rollouts must be at least group_size, {size}; got {most}")
    if options.on_surplus != "drop" and not callable(options.on_surplus):
        raise ValueError(f"on_surplus must be 'drop' or a callable; got {options.on_surplus!r}")
    if options.on_full != "drop" and options.max_pending_groups is None:
        raise ValueError(f"on_full={options.on_full!r} needs max_pending_groups")
    if options.on_timeout != "drop" and options.timeout is None and options.timeout_seconds is None:
        raise ValueError(f"on_timeout={options.on_timeout!r} needs timeout or timeout_seconds")
