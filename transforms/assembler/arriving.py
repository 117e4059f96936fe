"""What the rows of a batch say of themselves, which of them are taken in, and which batches are refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any

import torch
from tensordict import NestedKey

from headrace.transforms.errors import NUMBER_WORKERS, BatchError, listing, who_stamps
from headrace.transforms.ids import as_ids
from headrace.transforms.schema import (
    EXPECTED_SEGMENTS,
    INIT,
    ORIGIN,
    STATUS_KEYS,
    Origin,
    Status,
    has_key,
)
from headrace.transforms.tensordicts import read_packed

from .lost import follow, lose, lose_behind
from .open_groups import Key, Rollout, Row
from .pieces import READER, RowPiece
from .stream import DUPLICATE, LATE, LOST, StreamPlan

GROUP_NAMES = ("partition", "group", "expected")
NAMES = (*GROUP_NAMES, "rollout", "segment", "done", "status", "version", "reward")
OPTIONS = (*(f"{name}_key" for name in NAMES), "group_size", "in_order")
"""The options by which rows are read: a state goes on under the same ones alone."""
UNSAID: dict[str, float] = dict.fromkeys(
    ("partition", "rollout", "segment", "status", "version", "reward"), 0
)
UNSAID |= {"done": 1, "begins": -1, "ends": 1}
"""What is taken of rows that do not say it."""

STATUSES = ", ".join(f"{status.value} {status.name}" for status in Status)
STAMPED = who_stamps("rollout_id")
RULES = {
    "partition": "every row needs a partition ≥ 0; found {found}: its groups could not be told from others",
    "group": "every row needs a group_id ≥ 0; found {found}: rows without an id would be compared with one "
    f"another{STAMPED}",
    "rollout": "every row needs a rollout_id ≥ 0; found {found}: rows without an id would be taken for one "
    f"rollout{STAMPED}",
    "segment": "every row needs a segment number ≥ 0; found {found}: a rollout has segments 0, 1, …",
    "status": f"status must be one of {STATUSES}; found {{found}}",
    "newer": "no row is newer than the policy version that trains, {version}; found {found}. Nobody counts "
    "it up: set assembler.version where the policy is updated, before workers get it, or on_newer='wait'",
    "ends": "expected_segments must be one number ≥ 1 per rollout; found {found}",
    "expected": "expected_rollouts is one number ≥ {least} per group; found {found}. Do workers disagree?",
    "home": f"a rollout belongs to one group; found {{found}}. Are ids reused? {NUMBER_WORKERS}",
    "last": f"a rollout ends with its last segment; found {{found}}. Are ids reused? {NUMBER_WORKERS}",
    "begins": "a rollout begins once (is_init); begun again before it ended: {found}. Its rewards would be "
    f"added up. {NUMBER_WORKERS}",
    DUPLICATE: "a rollout ends once, and a segment of it comes once; found again {found}. Do two workers "
    f"number alike, or were rows sent twice? {NUMBER_WORKERS}. Name the segment_key if rows come in another "
    "order, or set on_duplicate='drop', and the first stays",
    LATE: "rollouts come before their group is closed; found too late {found}: on_late='drop'",
    "announced": "groups are announced once, before their first row; found {found}. Are ids reused?",
}
"""What must hold of rows, in the order in which it is said."""


def find_columns(
    piece: RowPiece, options: Mapping[str, Any], *, groups_only: bool = False
) -> dict[str, NestedKey]:
    """Under which keys rows say what they are, the same ones in all batches with columns of the same kinds.

    Args:
        piece: N ≥ 1 of them.
        options: those of `OPTIONS`.
        groups_only: find nothing but the groups of rows.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: it holds no integers or flags, or more than one a row.
    """

    def there(*keys: NestedKey) -> NestedKey | None:
        return next((key for key in keys if has_key(piece.batch, key)), None)

    keys = {name: options[f"{name}_key"] for name in (GROUP_NAMES if groups_only else NAMES)}
    if options["group_size"] is not None:
        keys["expected"] = there(keys["expected"])
    if not groups_only:
        keys["status"] = keys["status"] or there(*STATUS_KEYS)
        if keys["done"] is not None:
            keys |= {"begins": there(INIT), "ends": there(EXPECTED_SEGMENTS)}
            keys["origin"] = there(ORIGIN) if options["in_order"] else None
    found = {name: key for name, key in keys.items() if key is not None}
    for name, key in found.items():
        dtype = piece.numbers(key, name, _width(name))[0].dtype
        if name in ("done", "begins"):
            if dtype is not torch.bool:
                raise BatchError(f"{READER} needs a bool a row in {key!r} ({name}_key); found {dtype}")
        elif name != "reward":
            as_ids(torch.empty(1, dtype=dtype), str(key))
    return found


def arriving_rows(
    piece: RowPiece, found: Mapping[str, NestedKey], group_size: int | None
) -> tuple[Iterator[Row], dict[int, Origin]]:
    """What rows say of themselves, and where they come from, by their arrival. One device read.

    Args:
        piece: N ≥ 1 of them.
        found: by :func:`find_columns`.
        group_size: rollouts of a group that does not say how many it was dispatched with.

    Raises:
        BatchError: an id is not set; a status is unknown.
    """
    columns = [
        torch.cat([e.reshape(-1) for e in piece.numbers(key, name, _width(name))])
        for name, key in found.items()
    ]
    said: dict[str, Any] = {
        name: column.tolist() for name, column in zip(found, read_packed(columns), strict=True)
    }
    for name in ("partition", "group", "rollout", "segment", "status", "ends"):
        values, low, high = said.get(name, ()), int(name == "ends"), 3 if name == "status" else 2**63
        if values and (min(values) < low or max(values) > high):
            odd = [f"{value} at row {row}" for row, value in enumerate(values) if not low <= value <= high]
            raise BatchError(RULES[name].format(found=listing(odd)))
    said |= {"arrival": piece.place, "piece": repeat(piece)}
    unsaid = UNSAID | {"expected": group_size}
    rows = zip(*(said.get(name) or repeat(unsaid[name]) for name in Row._fields))  # noqa: B905
    numbers = iter(said.get("origin", ()))
    return map(Row._make, rows), dict(zip(piece.place, map(Origin._make, zip(*[numbers] * _width("origin")))))  # noqa: B905


def _width(name: str) -> int:
    """How many numbers a row has of what it says."""
    return len(Origin._fields) if name == "origin" else 1


def admit(plan: StreamPlan, rows: Iterable[Row], options: Any) -> list[int]:
    """Plan to take in rows: those of groups that are open, unless they come again.

    Args:
        plan: to which they are added.
        rows: that come.
        options: the GroupAssembler: what is to raise, and how many rollouts a group has.

    Returns:
        The arrivals of those that are taken in.

    Raises:
        BatchError: one of `RULES` is broken.
    """
    stream, by_segment, least = plan.stream, options.segment_key is not None, options.group_size or 1
    raises = {DUPLICATE: options.on_duplicate, LATE: options.on_late}
    sizes: dict[Key, int] = {}
    broken: dict[str, list[str]] = defaultdict(list)
    admitted = []
    for row in rows:
        key, own, rule, reason = (row.partition, row.group), (row.partition, row.rollout), "", ""
        group = plan.find(key, row.expected)  # None: it is closed
        gone = plan.gone.get(own) or stream.gone.get(own)
        rollout = gone or (None if group is None else group.rollouts.get(row.rollout))
        over = rollout is None and row.rollout in stream.closed_rollouts[row.partition]
        rollout = rollout or Rollout(row.ends, by_segment)
        home = plan.homes.setdefault(own, stream.homes.get(own, key))
        expected = sizes.setdefault(key, row.expected if group is None else group.expected)
        origin = plan.origins.get(row.arrival)
        behind = origin is not None and follow(plan, row, origin)
        if row.version > options.version and options.on_newer == "raise":
            rule, words = "newer", f"{row.version} in group {row.group}"
        elif not least <= row.expected == expected:
            rule, words = "expected", f"group {row.group}: {sorted({row.expected, expected})}"
        elif behind and over and group is not None and not group.is_ready:
            reason = LOST
        elif home != key or (over and group is not None and not (group.is_ready or group.refills)):
            rule, words = "home", f"rollout {row.rollout} in groups {sorted({home[1], row.group})}"
            words += " and in one that is closed" if home == key else ""
        elif rollout.ends != row.ends:
            rule, words = "ends", f"rollout {row.rollout} ({[rollout.ends, row.ends]})"
        elif over or rollout.has(row) or (origin is not None and origin.number < len(rollout.rows)):
            reason = DUPLICATE
        elif beyond := rollout.beyond(row):
            rule, words = "last", f"segment {beyond[0]} of rollout {row.rollout}, which ends with {beyond[1]}"
        elif rollout.begins_again(row):
            rule, words = "begins", f"rollout {row.rollout}"
        elif group is None:
            enough = gone is not None or row.group not in stream.late_groups[row.partition]
            reason = plan.leave(row, rollout, enough=enough)
        elif group.is_ready or gone is not None:
            reason = plan.leave(row, rollout, enough=gone is not None or group.enough)
        elif behind:
            reason = LOST
        if reason:
            plan.left[reason] += 1
            if raises.get(reason) == "raise":
                segment = f"segment {row.segment} of " if by_segment else ""
                rule, words = reason, f"{segment}rollout {row.rollout} of group {row.group}"
        elif group is not None and not rule:
            group.add(row, by_segment=by_segment)
            admitted.append(row.arrival)
            if origin is not None and origin.number >= len(group.rollouts[row.rollout].rows):
                lose(plan, group, row.rollout, over=False)
        if rule:
            broken[rule].append(words)
    _refuse(broken, least, options.version)
    lose_behind(plan)
    return admitted


def announce(plan: StreamPlan, rows: Iterable[Row], options: Any) -> None:
    """Plan that the groups of rows wait from now on.

    Raises:
        BatchError: numbers of expected rollouts differ; a group has been announced, has rows or is closed.
    """
    least, broken = options.group_size or 1, defaultdict(list)
    for row in rows:
        group = plan.find((row.partition, row.group), row.expected)
        if group is None or group.is_ready or group.key in plan.stream.waiting:
            broken["announced"].append(str(row.group))
        elif not least <= row.expected == group.expected:
            broken["expected"].append(f"group {row.group}: {sorted({row.expected, group.expected})}")
    _refuse(broken, least, options.version)


def _refuse(broken: Mapping[str, list[str]], least: int, version: int) -> None:
    for rule, message in RULES.items():
        if rule in broken:
            found = listing(dict.fromkeys(broken[rule]))
            raise BatchError(message.format(found=found, least=least, version=version))
