"""What the rows of a batch say of themselves, which of them are taken in, and which batches are refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from .pieces import Piece
from .stream import DUPLICATE, LATE, SURPLUS, Plan

READER = "GroupAssembler"
READ = ("group_key", "rollout_key", "expected_key", "partition_key", "segment_key", "done_key", "status_key")
READ += ("version_key", "reward_key", "group_size")
"""The options by which rows are read; a state goes on under the same ones alone."""
GROUP_NAMES, ROW_NAMES = (
    ("partition", "group", "expected"),
    ("rollout", "segment", "done", "status", "version", "reward"),
)
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


def find_columns(
    batch: TensorDictBase, piece: Piece, options: Mapping[str, Any], *, groups_only: bool = False
) -> dict[str, NestedKey]:
    """Under which keys rows say what they are: all batches with columns of the same kinds say it so.

    Args:
        batch: TensorDict ``[N]``, N ≥ 1.
        piece: the same.
        options: of the assembler, those of `READ`.
        groups_only: find nothing but the groups of rows.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: it holds no integers or flags, or more than one a row.
    """
    names = GROUP_NAMES if groups_only else GROUP_NAMES + ROW_NAMES
    found = {name: key for name in names if (key := options[f"{name}_key"]) is not None}
    if options["group_size"] is not None and not has_key(batch, found["expected"]):
        del found["expected"]
    optional: dict[str, Sequence[NestedKey]] = {}
    if not groups_only and "status" not in found:
        optional["status"] = STATUS_KEYS
    if "done" in found:
        optional |= {"begins": [INIT], "ends": [EXPECTED_SEGMENTS]}
    for name, keys in optional.items():
        found |= {name: key for key in reversed(keys) if has_key(batch, key)}
    for name, key in found.items():
        dtype = _entries(batch, piece, key, name)[0].dtype
        if name in ("done", "begins"):
            read_flags(batch, key, reader=READER, option=f"{name}_key")
        elif name != "reward":
            as_ids(torch.empty(1, dtype=dtype), str(key))
    return found


def read_rows(
    batch: TensorDictBase, piece: Piece, found: Mapping[str, NestedKey], group_size: int | None
) -> Iterator[Row]:
    """What rows say of themselves. One device read.

    Args:
        batch: TensorDict ``[N]``, N ≥ 1.
        piece: the same.
        found: by :func:`find_columns`.
        group_size: rollouts of a group that does not say how many it was dispatched with.

    Raises:
        BatchError: an id is not set; a status is unknown.
    """
    said = _numbers({name: _entries(batch, piece, key, name) for name, key in found.items()})
    for name, (called, why) in IDS.items():
        if name in said and min(said[name]) < 0:
            unset = [f"{number} at row {row}" for row, number in enumerate(said[name]) if number < 0]
            raise BatchError(
                f"every row needs a {called} ≥ 0; found {listing(unset)}: {why}{who_stamps(called)}"
            )
    odd = [
        f"{status} at row {row}" for row, status in enumerate(said.get("status", ())) if not 0 <= status <= 3
    ]
    if odd:
        known = ", ".join(f"{status.value} {status.name}" for status in Status)
        raise BatchError(f"status must be one of {known}; found {listing(odd)}")
    if min(said.get("ends", [1])) < 1:
        odd = [f"{ends} at row {row}" for row, ends in enumerate(said["ends"]) if ends < 1]
        raise BatchError(RULES["ends"].format(found=listing(odd)))
    said |= {"arrival": piece.place, "piece": repeat(piece)}
    unsaid = UNSAID | {"expected": group_size}
    return map(Row._make, zip(*(said.get(name) or repeat(unsaid[name]) for name in Row._fields)))  # noqa: B905


def _entries(batch: TensorDictBase, piece: Piece, key: NestedKey, name: str) -> list[Tensor]:
    """A column of one number a row, whole or by row."""
    found = piece.entries(key)
    if found is None:  # it is elsewhere, or it is said what it lacks
        found = [read_column(batch, key, reader=READER, option=f"{name}_key")]
    return found


def _numbers(columns: Mapping[str, list[Tensor]]) -> dict[str, Any]:
    """Columns as lists. One device read."""
    if next(iter(columns.values()))[0].device.type != "cpu":
        joined = {name: torch.cat([each.reshape(-1) for each in of]) for name, of in columns.items()}
        bits = [c.double().view(torch.int64) if c.is_floating_point() else c.long() for c in joined.values()]
        read = zip(joined, torch.stack(bits).cpu(), strict=True)
        columns = {name: [b.view(torch.float64) if name == "reward" else b] for name, b in read}
    return {
        name: _flat(of[0].tolist()) if len(of) == 1 else [each.item() for each in of]
        for name, of in columns.items()
    }


def _flat(numbers: Any) -> list[Any]:
    """Numbers out of their lists of one."""
    if not isinstance(numbers, list):
        return [numbers]
    while isinstance(numbers[0], list):
        numbers = [number for (number,) in numbers]
    return numbers


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
        words = ""
        if not least <= row.expected == expected:
            rule, words = "expected", f"group {row.group}: {sorted({row.expected, expected})}"
        elif home != key or (over and change is not None):
            rule, words = "home", f"rollout {row.rollout} in groups {sorted({home[1], row.group})}"
            words += " and in one that is closed" if home == key else ""
        elif change is None:
            reason = DUPLICATE if over else LATE
        elif rollout is None:
            reason = SURPLUS if change.group.is_ready else ""
        elif rollout.ends != row.ends:
            rule, words = "ends", f"rollout {row.rollout} ({[rollout.ends, row.ends]})"
        elif change.group.is_ready or rollout.has(row):
            reason = DUPLICATE
        elif beyond := rollout.beyond(row):
            words = f"segment {beyond[0]} of rollout {row.rollout}, which ends with {beyond[1]}"
            rule = "last"
        elif rollout.begins_again(row):
            rule, words = "begins", f"rollout {row.rollout}"
        if reason:
            plan.left[reason] += 1
            if limits.raises(reason):
                words = f"segment {row.segment} of " if by_segment else ""
                rule, words = reason, f"{words}rollout {row.rollout} of group {row.group}"
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
