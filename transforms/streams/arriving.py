"""Read the ids and flags of new rows, decide which rows are taken in, and refuse invalid batches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.table import BatchError, as_ids, listing
from headrace.transforms.table.schema import (
    EXPECTED_SEGMENTS,
    INIT,
    NEWEST_VERSION,
    ORIGIN,
    STATUS_KEYS,
    Origin,
    Status,
    has_key,
)
from headrace.transforms.table.tensordicts import column_of, count_in_loss, flat_rows, read_packed

from .draws import Draw
from .lost import follow, lose, lose_behind
from .open_groups import Key, Rollout, Row
from .pieces import READER, UNSAMPLED, WIDTHS, RowPiece
from .stream import DUPLICATE, LATE, LOST, StreamPlan

GROUP_NAMES = ("partition", "group", "expected")
NAMES = (*GROUP_NAMES, "rollout", "segment", "done", "status", "version", "reward")
OPTIONS = (*(f"{name}_key" for name in NAMES), "loss_mask_key", "group_size", "in_order")
"""The options that decide how rows are read. A state can only be loaded with the same options."""
DEFAULTS: dict[str, float] = dict.fromkeys(
    ("partition", "rollout", "segment", "status", "version", "newest", "reward"), 0
)
DEFAULTS |= {"done": 1, "begins": -1, "ends": 1}
"""Values for missing columns."""

STATUSES = ", ".join(f"{status.value} {status.name}" for status in Status)
RULES = {
    "partition": "every row needs a partition ≥ 0; found {found}: groups of different partitions would be "
    "mixed up",
    "group": "every row needs a group_id ≥ 0; found {found}: rows without an id would be compared with one "
    "another{stamped}",
    "rollout": "every row needs a rollout_id ≥ 0; found {found}: rows without an id would be treated as one "
    "rollout{stamped}",
    "segment": "every row needs a segment number ≥ 0; found {found}: a rollout has segments 0, 1, …",
    "status": f"status must be one of {STATUSES}; found {{found}}",
    "newer": "no row may be newer than assembler.version={version}; found {found}. Set assembler.version "
    "when you update the policy, before the workers get the weights, or set on_newer='wait'",
    "ends": "expected_segments must be one number ≥ 1 per rollout; found {found}",
    "expected": "expected_rollouts must be one number ≥ {least} per group; found {found}. Check that all "
    "workers send the same number",
    "home": "a rollout belongs to one group; found {found}. Are ids reused? {workers}",
    "last": "a rollout must end with its last segment; found {found}. Are ids reused? {workers}",
    "begins": "a rollout must begin only once (is_init); found a second beginning before the end of {found}. "
    "The rewards of two rollouts would be added up. {workers}",
    DUPLICATE: "a rollout must end only once, and a segment must arrive only once; found again {found}. Do "
    "two workers use the same numbers, or were rows sent twice? {workers}. Set segment_key if rows "
    "may arrive in another order. Set on_duplicate='drop' to keep the first of each",
    LATE: "rollouts must arrive before their group is closed; too late: {found}. Set on_late='drop' to drop "
    "them",
    "announced": "a group must be announced only once, before its first row; found {found}. Are ids reused?",
}
"""The message for each rule, in the order in which the rules are checked."""


def find_columns(
    piece: RowPiece, options: Mapping[str, Any], *, groups_only: bool = False
) -> dict[str, NestedKey]:
    """Find the columns with ids and flags. They are the same for all batches of the same kinds.

    Args:
        piece: N ≥ 1 rows.
        options: the values of `OPTIONS`.
        groups_only: find only the columns of groups.

    Returns:
        The key of each column, by the name of a field of :class:`Row`, or ``origin``.

    Raises:
        MissingKeyError: a column is missing.
        BatchError: a column has a wrong dtype, or several values per row.
    """

    def existing(*keys: NestedKey) -> NestedKey | None:
        return next((key for key in keys if has_key(piece.batch, key)), None)

    keys = {name: options[f"{name}_key"] for name in (GROUP_NAMES if groups_only else NAMES)}
    if options["group_size"] is not None:
        keys["expected"] = existing(keys["expected"])
    if groups_only:
        version = options["version_key"]
        keys["version"] = None if version is None else existing(version)
    else:
        keys["status"] = keys["status"] or existing(*STATUS_KEYS)
        if keys["version"] is not None:
            keys["newest"] = existing(NEWEST_VERSION)
        if keys["done"] is not None:
            keys |= {"begins": existing(INIT), "ends": existing(EXPECTED_SEGMENTS)}
            keys["origin"] = existing(ORIGIN) if options["in_order"] else None
    found = {name: key for name, key in keys.items() if key is not None}
    for name, key in found.items():
        if name == "version" and piece.versions(key, options["loss_mask_key"]) is not None:
            continue
        dtype = piece.numbers(key, name).dtype
        if name in ("done", "begins"):
            if dtype is not torch.bool:
                message = f"{READER} needs one bool per row in {{column}}; found {dtype}"
                raise BatchError(message, key=key, option=f"{name}_key")
        elif name != "reward":
            as_ids(torch.empty(1, dtype=dtype), str(key))
    return found


def columns_to_send(rows: TensorDictBase, options: Mapping[str, Any]) -> dict[NestedKey, Tensor]:
    """The columns that :func:`arriving_rows` reads of N ≥ 1 rows, (N, K) each, for another process.

    Raises:
        MissingKeyError, BatchError: as :func:`find_columns`.
    """
    piece = RowPiece(rows, range(len(rows)))
    found = find_columns(piece, options)
    keys = {**found, "newest": NEWEST_VERSION}
    columns = _numbers_of(piece, found, options)
    return {keys[name]: column.reshape(len(rows), -1) for name, column in columns.items()}


def _numbers_of(
    piece: RowPiece, found: Mapping[str, NestedKey], options: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The numbers of the rows, by name: of versions per token, the oldest, and the newest as `newest`."""
    versions = None
    if "version" in found:
        versions = piece.versions(found["version"], options["loss_mask_key"])
    columns = {}
    for name, key in found.items():
        if name != "version" or versions is None:
            columns[name] = piece.numbers(key, name)
        else:
            columns["version"], columns["newest"] = versions.unbind(1)
    return columns


def measures(rows: TensorDictBase, loss_mask_key: NestedKey, reward_key: NestedKey) -> dict[str, Tensor]:
    """Read what :class:`.survival.Survivors` counts: the lengths and rewards, if the rows have them.

    Args:
        rows: N ≥ 1 rows.
        loss_mask_key: key of the loss mask.
        reward_key: key of the reward.

    Returns:
        ``lengths``, (N,) int64: the tokens in the loss mask. ``rewards``, (N,) float64: the sum, if a row has
        several. Both are on the device of the rows.

    Raises:
        BatchError: the loss mask is not bool, or only some rows have a column.
    """
    found: dict[str, Tensor] = {}
    length, _ = count_in_loss(rows, loss_mask_key, None)
    if length is not None:
        found["lengths"] = length
    reward = column_of(rows, reward_key)
    if isinstance(reward, Tensor) and not reward.is_complex():
        found["rewards"] = flat_rows(reward.detach().double()).sum(-1)
    return found


def arriving_rows(
    piece: RowPiece,
    found: Mapping[str, NestedKey],
    options: Mapping[str, Any],
    version: int,
    measured: Mapping[str, Tensor] | None = None,
) -> tuple[Iterator[tuple[Any, ...]], dict[int, Origin]]:
    """Read the ids and flags of rows, with one device read.

    Args:
        piece: N ≥ 1 rows.
        found: the output of :func:`find_columns`.
        options: the values of `OPTIONS`.
        version: the trainer's policy version. If versions are per token, rows without a sampled token get it.
        measured: the output of :func:`measures`, which is read at the same time.

    Returns:
        The values of each :class:`Row`, and the origins of rows by arrival.

    Raises:
        BatchError: an id or a segment number is missing, or a status or number of segments is invalid.
    """
    named, measured = _numbers_of(piece, found, options), measured or {}
    columns = [*named.values(), *measured.values()]
    if any(column.device.type != "cpu" for column in columns):
        columns = read_packed(columns)
    lists = [column.tolist() for column in columns]
    read: dict[str, Any] = dict(zip(named, lists, strict=False))
    for name, numbers in zip(measured, lists[len(named) :], strict=True):
        setattr(piece, name, numbers)
    if "newest" in read:
        for name in ("version", "newest"):
            read[name] = [version if each == UNSAMPLED else each for each in read[name]]
    elif "version" in read:
        read["newest"] = read["version"]
    for name in ("partition", "group", "rollout", "segment", "status", "ends"):
        values, low, high = read.get(name, ()), int(name == "ends"), 3 if name == "status" else 2**63
        if values and (min(values) < low or max(values) > high):
            odd = [f"{value} at row {row}" for row, value in enumerate(values) if not low <= value <= high]
            raise BatchError(RULES[name], found=listing(odd), ids="rollout_id")
    numbers = iter(read.pop("origin", ()))
    piece.columns, piece.defaults = read, DEFAULTS | {"expected": options["group_size"]}
    every = {**read, "arrival": list(piece.place), "piece": repeat(piece)}
    rows = zip(*(every.get(name) or repeat(piece.defaults[name]) for name in Row._fields))  # noqa: B905
    origins = map(Origin._make, zip(*[numbers] * WIDTHS["origin"]))  # noqa: B905
    return rows, dict(zip(piece.place, origins))  # noqa: B905


def admit(plan: StreamPlan, rows: Iterable[tuple[Any, ...]], options: Any) -> set[int]:
    """Plan to take in the rows of open groups, without duplicates. Other rows leave under a reason.

    Args:
        plan: is changed.
        rows: the values of each new :class:`Row`.
        options: the GroupAssembler.

    Returns:
        The arrivals of the rows that leave.

    Raises:
        BatchError: a rule of `RULES` is broken.
    """
    stream, by_segment, least = plan.stream, options.segment_key is not None, options.group_size or 1
    raises = {DUPLICATE: options.on_duplicate, LATE: options.on_late}
    sizes: dict[Key, int] = {}
    broken: dict[str, list[str]] = defaultdict(list)
    bound = math.inf if options.on_newer == "wait" else options.version
    left, here, aborted, stamped = set(), None, int(Status.ABORTED), bool(plan.origins)
    for values in rows:
        segment, arrival, done, begins, ends, status, _, newest, _, partition, of, number, expected, _ = (
            values
        )
        key = partition, of
        group = plan.groups.get(key) or plan.find(key, expected)  # None: closed
        if partition != here:
            here, closed_rollouts = partition, stream.closed_rollouts[partition]
            singles, homes, known = plan.singles[partition], plan.homes[partition], stream.homes[partition]
        is_new = not (number in singles or number in homes or number in known or number in closed_rollouts)
        if is_new and group is not None and group.order < 0 and not stamped:
            is_whole = done and ends == 1 and begins and not segment and status < aborted
            if is_whole and newest <= bound and least <= expected == group.expected:
                # A new rollout of one row that has ended: it breaks no rule below, and is held as a number.
                group.members[number], singles[number] = arrival, of
                group.have += 1
                continue
        row, own, rule, reason = Row._make(values), (partition, number), "", ""
        gone = plan.gone.get(own) or stream.gone.get(own)
        rollout = gone or (None if group is None else group.rollout(number))
        closed = rollout is None and number in closed_rollouts
        rollout = rollout or Rollout(ends, by_segment)
        home = homes.setdefault(number, singles.get(number, known.get(number, of)))
        expected = sizes.setdefault(key, row.expected if group is None else group.expected)
        origin = plan.origins.get(row.arrival)
        behind = origin is not None and follow(plan, row, origin)
        if newest > options.version and options.on_newer == "raise":
            rule, words = "newer", f"{newest} in group {row.group}"
        elif not least <= row.expected == expected:
            rule, words = "expected", f"group {row.group}: {sorted({row.expected, expected})}"
        elif behind and closed and group is not None and not group.is_ready:
            reason = LOST
        elif home != of or (closed and group is not None and not (group.is_ready or group.refills)):
            rule, words = "home", f"rollout {row.rollout} in groups {sorted({home, row.group})}"
            words += " and in a closed group" if home == of else ""
        elif rollout.ends != row.ends:
            rule, words = "ends", f"rollout {row.rollout} ({[rollout.ends, row.ends]})"
        elif closed or rollout.has(row) or (origin is not None and origin.number < len(rollout.rows)):
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
            group.add(row, plan.came[key], by_segment=by_segment)
            if origin is not None and origin.number >= len(group.rollouts[row.rollout].rows):
                lose(plan, group, row.rollout, over=False)
            continue
        left.add(arrival)
        if rule:
            broken[rule].append(words)
    _refuse(broken, least, options.version)
    lose_behind(plan)
    return left


def announce(
    plan: StreamPlan, rows: Iterable[tuple[Any, ...]], draws: Mapping[Key, Draw], options: Any
) -> None:
    """Plan to open announced groups, and keep their draws.

    Raises:
        BatchError: a group was announced before, has rows or is closed; or its expected rollouts differ.
    """
    least, broken = options.group_size or 1, defaultdict(list)
    for row in map(Row._make, rows):
        group = plan.find((row.partition, row.group), row.expected)
        if group is None or group.is_ready or group.key in plan.stream.waiting:
            broken["announced"].append(str(row.group))
        elif not least <= row.expected == group.expected:
            broken["expected"].append(f"group {row.group}: {sorted({row.expected, group.expected})}")
        else:
            steps, dated = plan.stream.steps, "version" in row.piece.columns
            group.born = min(steps.over, steps.of(row.version)) if dated else steps.over
            group.draw = draws[group.key]
    _refuse(broken, least, options.version)


def _refuse(broken: Mapping[str, list[str]], least: int, version: int) -> None:
    for rule, message in RULES.items():
        if rule in broken:
            found = listing(dict.fromkeys(broken[rule]))
            raise BatchError(message, found=found, least=least, version=version)
