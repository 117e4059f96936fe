"""The draws of announced groups: what must be dispatched again after a restart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase

from headrace.transforms.carry import from_plain, to_plain
from headrace.transforms.table import as_ids, labels_of
from headrace.transforms.table.schema import has_key
from headrace.transforms.table.tensordicts import (
    as_texts,
    device_of,
    shallow_copy,
    take_rows,
    write_column,
)

FRESH = 2**62  # the first new id of rollouts that are dispatched again; hashes of text ids are smaller


class Draw(NamedTuple):
    """The rollouts of a group, as they were announced."""

    rows: TensorDictBase
    """The rows of the whole announcement."""
    at: tuple[int, ...]
    """The indices of the group's rows in `rows`."""
    rollouts: tuple[int, ...]
    """The rollout ids of the group's rows; −1 where the dispatcher gives ids later."""


def numbers(rows: TensorDictBase, key: NestedKey | None, missing: int = 0) -> list[int]:
    """The ids of N ≥ 1 rows; `missing` if the rows do not have the column. Text ids are numbered."""
    if key is None or not has_key(rows, key):
        return [missing] * len(rows)
    return as_ids(labels_of(rows, key) or rows.get(key), str(key)).tolist()


def dispatched_again(
    draws: Iterable[tuple[Draw, Sequence[int], int]], key: NestedKey, first: int
) -> list[TensorDictBase]:
    """Return the rows to dispatch again, one TensorDict per announcement.

    Args:
        draws: for each group its draw, which of its rows are dispatched as they were, and how many rollouts
            get new ids.
        key: key of the rollout ids.
        first: number of new ids that were given before.
    """
    of: dict[int, tuple[TensorDictBase, list[int], list[bool]]] = {}
    for draw, same, fresh in draws:
        _, at, is_fresh = of.setdefault(id(draw.rows), (draw.rows, [], []))
        at += [*same, *(draw.at[number % len(draw.at)] for number in range(fresh))]
        is_fresh += [False] * len(same) + [True] * fresh
    found = []
    for rows, at, is_fresh in of.values():
        if at:
            places = torch.tensor(at)
            part = take_rows(rows, places.to(device_of(rows)), on_cpu=places)
            found.append(_renamed(shallow_copy(part), is_fresh, key, first))
            first += sum(is_fresh)
    return found


def _renamed(rows: TensorDictBase, fresh: Sequence[bool], key: NestedKey, first: int) -> TensorDictBase:
    """Give some of the rollouts new ids."""
    counter = iter(range(first, first + len(rows)))
    if not has_key(rows, key):  # the dispatcher gives ids
        return rows
    if (labels := labels_of(rows, key)) is not None:
        texts = [f"{text}~{next(counter)}" if new else text for text, new in zip(labels, fresh, strict=True)]
        rows.set(key, as_texts(texts))
    elif any(fresh):
        ids = rows.get(key).clone()
        new = torch.tensor([FRESH + next(counter) for each in fresh if each], device=ids.device)
        ids.reshape(-1)[torch.tensor(fresh, device=ids.device)] = new
        write_column(rows, key, ids)
    return rows


def plain_draws(draws: Iterable[Draw]) -> list[Any]:
    """The announced rows of these draws, for a state."""
    of: dict[int, tuple[TensorDictBase, list[int]]] = {}
    for draw in draws:
        of.setdefault(id(draw.rows), (draw.rows, []))[1].extend(draw.at)
    found = []
    for rows, at in of.values():
        places = torch.tensor(at)
        found.append(to_plain(take_rows(rows, places.to(device_of(rows)), on_cpu=places)))
    return found


def groups_of_rows(rows: TensorDictBase, keys: Mapping[str, Any]) -> list[tuple[int, int]]:
    """For each of N ≥ 1 rows, the partition and the id of its group, read with the assembler's options."""
    partitions = numbers(rows, keys["partition_key"])
    return list(zip(partitions, numbers(rows, keys["group_key"]), strict=True))


def draws_of(rows: TensorDictBase, keys: Mapping[str, Any]) -> dict[tuple[int, int], Draw]:
    """The draw of each group, by partition and id.

    Args:
        rows: N ≥ 1 rows of an announcement.
        keys: the options of the assembler.
    """
    at: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(groups_of_rows(rows, keys)):
        at.setdefault(key, []).append(row)
    ids = numbers(rows, keys["rollout_key"], -1)
    return {key: Draw(rows, tuple(here), tuple(ids[row] for row in here)) for key, here in at.items()}


def draws_from_plain(plain: Iterable[Any], keys: Mapping[str, Any]) -> dict[tuple[int, int], Draw]:
    """Restore the output of :func:`plain_draws`."""
    found: dict[tuple[int, int], Draw] = {}
    for each in plain:
        rows: Any = from_plain(each)
        found |= draws_of(rows, keys)
    return found
