"""Detect rollouts that were lost between a worker and the assembler, by the stamped origin of rows.

The column ``("headrace", "origin")`` holds for each row: its number within its rollout, its worker, the
number of workers, its environment within the worker, and the number of environments. An environment runs one
rollout after the other, and its rows are put in the order in which it sent them. Then rows are missing if one
of these holds:

1. The number of a row, counted from 0, is higher than the number of rows before it that arrived. The rows
   between are lost.
2. An environment sends a row of its next rollout before the previous one has ended. The end is lost.
3. No row of a rollout arrived, and all environments of its worker are past it. The whole rollout is lost.
   :class:`headrace.pipeline.StampIds` defines the order: worker w of W runs the groups w, w + W, w + 2 W, …,
   each with `expected_rollouts` rollouts.
"""

from __future__ import annotations

import warnings

from headrace.transforms.table import StreamWarning, count_of, listing
from headrace.transforms.table.schema import Origin

from .open_groups import Group, Row
from .stream import StreamPlan


def follow(plan: StreamPlan, row: Row, origin: Origin) -> bool:
    """Note that an environment has sent a row of this rollout.

    Returns:
        True if an earlier put had a row of a later rollout of this environment.
    """
    if row.group != row.rollout // row.expected or row.group % origin.workers != origin.worker:
        return False  # not the numbering of StampIds, in which later rollouts have higher ids
    plan.workers = origin.workers
    lane = row.partition, origin.worker, origin.environment
    before = plan.stream.lanes.get(lane, -1)
    plan.rollouts.setdefault(lane, {before})
    plan.rollouts[lane].add(row.rollout)
    if row.rollout > plan.lanes.get(lane, before):
        plan.lanes[lane] = row.rollout
        plan.moved[row.partition, origin.worker] = row, origin
    return row.rollout < before


def lose_behind(plan: StreamPlan) -> None:
    """Plan the loss of rollouts that their environment has left unfinished (rule 2) or skipped (rule 3)."""
    stream = plan.stream
    for lane, now in plan.lanes.items():
        for rollout in plan.rollouts[lane] - {now, -1}:
            _end(plan, lane[0], rollout)
    for (partition, worker), (row, origin) in plan.moved.items():
        lanes = ((partition, worker, number) for number in range(origin.environments))
        rollouts = [plan.lanes.get(lane, stream.lanes.get(lane)) for lane in lanes]
        if None in rollouts:
            continue
        # Indices in the order of dispatch of this worker: group by group, each with `size` rollouts.
        size, workers = row.expected, origin.workers
        earliest = min(rollouts)  # type: ignore[type-var]  # none is None
        until = earliest // size // workers * size + earliest % size  # type: ignore[operator]
        start = stream.passed.get((partition, worker))
        if start is None:  # the first check of this worker: start at its oldest waiting group
            groups = [group for of, group in (*stream.waiting, *plan.groups) if of == partition]
            indices = [group // workers * size for group in groups if group % workers == worker]
            start = min(indices, default=until)
        plan.passed[partition, worker] = max(start, until)
        for index in range(start, until):
            number = worker + index // size * workers
            rollout, key = number * size + index % size, (partition, number)
            waits = plan.groups.get(key) or stream.waiting.get(key)
            known = (partition, rollout) in plan.gone or (partition, rollout) in stream.gone
            known = known or rollout in stream.closed_rollouts[partition]
            if waits is not None and waits.waits and rollout not in waits.rollouts and not known:
                lose(plan, plan.find(key, waits.expected), rollout)  # type: ignore[arg-type]  # it waits


def lose(plan: StreamPlan, group: Group, number: int, *, over: bool = True) -> None:
    """Plan that a rollout leaves its group as lost. The group no longer waits for it.

    Args:
        plan: is changed.
        group: a group of the plan.
        number: the id of the rollout.
        over: no further row of the rollout can arrive.
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
    """Warn of rollouts that were lost in this put, whenever the total passes a power of two."""
    now = plan.stream.lost
    if now.bit_length() > (now - len(plan.lost)).bit_length():
        warnings.warn(
            f"{count_of(now, 'rollout')} got lost between their worker and the assembler, the last: "
            f"{listing(plan.lost)}. They are counted as 'lost' and not trained. A MultiAsyncCollector drops "
            "rows that are not read within a second: read it with assembled(collector, …), or let its "
            "workers write into a buffer and read that with drained(). If you put rows in another order than "
            "they were collected, set in_order=False",
            StreamWarning,
            stacklevel=4,  # the caller of put()
        )


def _end(plan: StreamPlan, partition: int, number: int) -> None:
    """Plan that no further row of a rollout arrives: an unfinished rollout is lost."""
    stream, own = plan.stream, (partition, number)
    gone = plan.gone.get(own) or stream.gone.get(own)
    home = plan.homes[partition].get(number, stream.homes[partition].get(number))
    if gone is not None:
        rollout = plan.gone[own] = gone.copy()
        rollout.complete = True
    elif home is not None and (group := plan.find((partition, home), 0)) is not None and not group.is_ready:
        rollout = group.rollouts.get(number)  # type: ignore[assignment]
        if rollout is not None and not rollout.complete and not rollout.failed:
            lose(plan, group, number)
