"""Rollouts that were lost between a worker and the assembler, by the origin that is stamped on their rows.

``("headrace", "origin")`` says the number of a row in its rollout, its worker, how many workers there are,
its environment in the worker, and how many of these there are. An environment runs one rollout after the
other, and what it sends later is put later. So three things show that rows are missing:

1. a row has a higher number than the rows of its rollout that have come: those between are lost;
2. a row of an environment's next rollout comes, and the last one has not ended: its end is lost;
3. all environments of a worker are at later rollouts than one of which no row has come: all of it is lost.
   The rollouts of worker w of W are numbered as :class:`headrace.pipeline.StampIds` does: those of groups w,
   w + W, w + 2 W, …, each with `expected_rollouts` in a row.
"""

from __future__ import annotations

import warnings

from headrace.transforms.errors import StreamWarning, listing
from headrace.transforms.schema import Origin

from .open_groups import Group, Row
from .stream import StreamPlan


def follow(plan: StreamPlan, row: Row, origin: Origin) -> bool:
    """Note of which rollouts rows come from an environment.

    Returns:
        Whether a row of a later one came in a put before.
    """
    if not _numbers_follow(row, origin):
        return False
    lane = row.partition, origin.worker, origin.environment
    before = plan.stream.lanes.get(lane, -1)
    plan.rollouts.setdefault(lane, {before})
    plan.rollouts[lane].add(row.rollout)
    if row.rollout > plan.lanes.get(lane, before):
        plan.lanes[lane] = row.rollout
        plan.moved[row.partition, origin.worker] = row, origin
    return row.rollout < before


def lose_behind(plan: StreamPlan) -> None:
    """Lose what has not ended before an environment went on (rule 2), and what never came (rule 3)."""
    stream = plan.stream
    for lane, now in plan.lanes.items():
        for rollout in plan.rollouts[lane] - {now, -1}:
            _end(plan, lane[0], rollout)
    for (partition, worker), (row, origin) in plan.moved.items():
        lanes = ((partition, worker, number) for number in range(origin.environments))
        rollouts = [plan.lanes.get(lane, stream.lanes.get(lane)) for lane in lanes]
        if None in rollouts:
            continue
        # The order of dispatch within the worker: group by group, each with `size` rollouts.
        size, workers = row.expected, origin.workers
        earliest = min(rollouts)  # type: ignore[type-var]  # none is None
        until = earliest // size // workers * size + earliest % size  # type: ignore[operator]
        start = stream.passed.get((partition, worker))
        if start is None:  # the first time: behind are those of which no row has come, of groups that wait
            groups = [group for place, group in (*stream.waiting, *plan.groups) if place == partition]
            places = [group // workers * size for group in groups if group % workers == worker]
            start = min(places, default=until)
        plan.passed[partition, worker] = max(start, until)
        for place in range(start, until):
            number = worker + place // size * workers
            rollout, key = number * size + place % size, (partition, number)
            waits = plan.groups.get(key) or stream.waiting.get(key)
            known = (partition, rollout) in plan.gone or (partition, rollout) in stream.gone
            known = known or rollout in stream.closed_rollouts[partition]
            if waits is not None and waits.waits and rollout not in waits.rollouts and not known:
                lose(plan, plan.find(key, waits.expected), rollout)  # type: ignore[arg-type]  # it waits


def lose(plan: StreamPlan, group: Group, number: int, *, over: bool = True) -> None:
    """Plan that a rollout leaves its group as lost, and its group waits for it no longer.

    Args:
        plan: of which the group is.
        group: to which rows may have been added.
        number: the rollout's.
        over: none of its rows can come any more.
    """
    plan.lost.append(f"rollout {number} of group {group.group}")
    group.left, group.lost = group.left + 1, group.lost + 1
    if number in group.rollouts:
        rollout = group.rollouts.pop(number).copy()
        group.have, group.lost = group.have - rollout.ended, group.lost - rollout.failed
        plan.leave_as_lost(rollout.rows.values())
        rollout.lost, rollout.complete = True, over or rollout.complete
        plan.gone[group.partition, number] = rollout.without_rows()


def warn_of_lost(plan: StreamPlan) -> None:
    """Say which rollouts were lost in a put, when there are twice as many as when it was last said."""
    now = plan.stream.lost
    if now.bit_length() > (now - len(plan.lost)).bit_length():
        warnings.warn(
            f"{now} rollouts lost between their worker and here, the last: {listing(plan.lost)}. They are "
            "counted as 'lost' and not trained. A MultiAsyncCollector throws rows away where nobody takes "
            "them within a second: read it by assembled(collector, …), which does, or let its workers write "
            "into a buffer that is drained(). If you put rows in another order than that in which they were "
            "collected, set in_order=False",
            StreamWarning,
            stacklevel=3,
        )


def _numbers_follow(row: Row, origin: Origin) -> bool:
    """Whether rollouts are numbered as StampIds does, so that a later one has a higher number."""
    return row.group == row.rollout // row.expected and row.group % origin.workers == origin.worker


def _end(plan: StreamPlan, partition: int, number: int) -> None:
    """No further row of a rollout comes."""
    stream, own = plan.stream, (partition, number)
    gone = plan.gone.get(own) or stream.gone.get(own)
    key = plan.homes.get(own) or stream.homes.get(own)
    if gone is not None:
        rollout = plan.gone[own] = gone.copy()
        rollout.complete = True
    elif key is not None and (group := plan.find(key, 0)) is not None and not group.is_ready:
        rollout = group.rollouts.get(number)  # type: ignore[assignment]
        if rollout is not None and not rollout.complete and not rollout.failed:
            lose(plan, group, number)
