"""What the rows of a batch say of themselves, which of them are taken in, and which batches are refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.errors import NUMBER_WORKERS, BatchError, listing, who_stamps
from headrace.transforms.ids import as_ids
from headrace.transforms.schema import (
    EXPECTED_SEGMENTS,
    INIT,
    STATUS_KEYS,
    Status,
    has_key,
    read_column,
    read_flags,
)

from .groups import Key, Row
from .limits import Limits
from .pieces import Piece, column_of
from .stream import DUPLICATE, LATE, SURPLUS, Plan

READER = "GroupAssembler"
READ = ("group_key", "rollout_key", "expected_key", "partition_key", "segment_key", "done_key", "status_key")
READ += ("version_key", "reward_key", "group_size")
"""The options by which rows are read; a state goes on under the same ones alone."""
UNSAID = {
    **{"segment": 0, "done": 1, "begins": -1, "ends": 1, "status": 0, "version": 0, "reward": 0.0},
    **{"partition": 0, "rollout": 0},
}
"""What is taken of rows that do not say it."""
IDS = {
    "partition": ("partition", "its groups could not be told from others"),
    "group": ("group_id", "rows without an id would be compared with one another"),
    "rollout": ("rollout_id", "rows without an id would be taken for one rollout"),
    "segment": ("segment number", "a rollout has segments 0, 1, …"),
}
"""What must be ≥ 0: how it is called, and why."""
RULES = {
    "expected": "expected_rollouts is one number ≥ {least} per group; found {found}. Do workers disagree?",
    "home": f"a rollout belongs to one group; found {{found}}. Are ids reused? {NUMBER_WORKERS}",
    "ends": "expected_segments must be one number ≥ 1 per rollout; found {found}",
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


def read_rows(
    batch: TensorDictBase, piece: Piece, keys: Mapping[str, Any], *, groups_only: bool = False
) -> Iterator[Row]:
    """What N ≥ 1 rows say of themselves. One device read.

    Args:
        batch: TensorDict ``[N]``.
        piece: the same.
        keys: the options of the assembler that name columns, and `group_size`.
        groups_only: read nothing but their groups.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: it holds other numbers, or more than one a row; an id is not set, a status unknown.
    """
    names = ["partition", "group", "expected"]
    names += [] if groups_only else ["rollout", "segment", "done", "status", "version", "reward"]
    wanted: dict[str, NestedKey | None] = {name: keys[f"{name}_key"] for name in names}
    if keys["group_size"] is not None and not has_key(batch, keys["expected_key"]):
        wanted["expected"] = None
    if not groups_only and wanted["status"] is None:
        wanted["status"] = next((key for key in STATUS_KEYS if has_key(batch, key)), None)
    if wanted.get("done") is not None:
        wanted["begins"] = INIT if has_key(batch, INIT) else None
        wanted["ends"] = EXPECTED_SEGMENTS if has_key(batch, EXPECTED_SEGMENTS) else None
    columns = {name: _integers(batch, piece, key, name) for name, key in wanted.items() if key is not None}
    said: dict[str, Any] = dict(zip(columns, torch.stack(list(columns.values())).tolist(), strict=True))
    for name, (called, why) in IDS.items():
        if name in said and min(said[name]) < 0:
            unset = [f"{number} at row {row}" for row, number in enumerate(said[name]) if number < 0]
            raise BatchError(
                f"every row needs a {called} ≥ 0; found {listing(unset)}: {why}{who_stamps(called)}"
            )
    statuses = said.get("status", [0])
    if min(statuses) < min(Status) or max(statuses) > max(Status):
        odd = [f"{status} at row {row}" for row, status in enumerate(statuses) if not 0 <= status <= 3]
        known = ", ".join(f"{status.value} {status.name}" for status in Status)
        raise BatchError(f"status must be one of {known}; found {listing(odd)}")
    if "reward" in said:
        said["reward"] = torch.tensor(said["reward"]).view(torch.float64).tolist()
    said |= {"arrival": piece.place, "piece": repeat(piece)}
    unsaid = UNSAID | {"expected": keys["group_size"]}
    return map(Row._make, zip(*(said.get(name) or repeat(unsaid[name]) for name in Row._fields)))  # noqa: B905


def _integers(batch: TensorDictBase, piece: Piece, key: NestedKey, name: str) -> Tensor:
    """A column (N,) as int64: flags are 0 and 1, rewards the bits of a float64."""
    column, option = column_of(piece.columns, key, len(batch)), f"{name}_key"
    if column is None:  # missing, or elsewhere, or odd in a way that is said here
        column = read_column(batch, key, reader=READER, option=option)
    if name == "reward":
        return column.double().view(torch.int64)
    if name not in ("done", "begins"):
        return as_ids(column, str(key))
    if column.dtype is not torch.bool:
        read_flags(batch, key, reader=READER, option=option)
    return column.long()


def admit(plan: Plan, rows: Iterable[Row], limits: Limits) -> list[int]:
    """Plan to take in rows: those of groups that are open, unless they come again.

    Args:
        plan: to which they are added.
        rows: that come.
        limits: what is to raise, and how many rollouts a group has.

    Returns:
        The arrivals of those that are taken in.

    Raises:
        BatchError: one of `RULES` is broken.
    """
    stream, by_segment, least = plan.stream, limits.segment_key is not None, limits.group_size or 1
    homes: dict[Key, Key] = {}
    sizes: dict[Key, int] = {}
    broken: dict[str, list[str]] = defaultdict(list)
    admitted = []
    for row in rows:
        key, own, rule, reason = (row.partition, row.group), (row.partition, row.rollout), "", ""
        change = plan.find(key, row.expected)  # None: it is closed
        home = homes.setdefault(own, stream.homes.get(own, key))
        rollout = None if change is None else change.rollout(row.rollout)
        over = rollout is None and row.rollout in stream.closed_rollouts[row.partition]
        expected = sizes.setdefault(key, row.expected if change is None else change.group.expected)
        words = f"rollout {row.rollout}"
        if not least <= row.expected == expected:
            rule, words = "expected", f"group {row.group}: {sorted({row.expected, expected})}"
        elif home != key or (over and change is not None):
            rule, words = "home", f"{words} in groups {sorted({home[1], row.group})}"
            words += " and in one that is closed" if home == key else ""
        elif change is None:
            reason = DUPLICATE if over else LATE
        elif rollout is None:
            reason = SURPLUS if change.group.is_ready else ""
        elif rollout.ends != row.ends:
            rule, words = "ends", f"{words} ({[rollout.ends, row.ends]})"
        elif change.group.is_ready or rollout.has(row):
            reason = DUPLICATE
        elif beyond := rollout.beyond(row):
            rule, words = "last", f"segment {beyond[0]} of {words}, which ends with {beyond[1]}"
        elif rollout.begins_again(row):
            rule = "begins"
        if reason:
            plan.left[reason] += 1
            if limits.raises(reason):
                rule = reason
                words = f"{f'segment {row.segment} of ' if by_segment else ''}{words} of group {row.group}"
        elif change is not None and not rule:
            change.add(row, by_segment=by_segment)
            admitted.append(row.arrival)
        if rule:
            broken[rule].append(words)
    _refuse(broken, least)
    return admitted


def announce(plan: Plan, rows: Iterable[Row], limits: Limits) -> None:
    """Plan that the groups of rows wait from now on.

    Raises:
        BatchError: numbers of expected rollouts differ; a group has been announced, has rows or is closed.
    """
    least, broken = limits.group_size or 1, defaultdict(list)
    for row in rows:
        key = row.partition, row.group
        if key not in plan.changes and plan.stream.knows(key):
            broken["announced"].append(str(row.group))
        elif (change := plan.find(key, row.expected)) and not least <= row.expected == change.group.expected:
            broken["expected"].append(f"group {row.group}: {sorted({row.expected, change.group.expected})}")
    _refuse(broken, least)


def _refuse(broken: Mapping[str, list[str]], least: int) -> None:
    for rule, message in RULES.items():
        if rule in broken:
            found = listing(dict.fromkeys(broken[rule]))
            raise BatchError(message.format(found=found, least=least))
