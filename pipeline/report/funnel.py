"""How many rows, rollouts, groups and tokens are left in the loss after each stage, and who left why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Columns = Mapping[str, np.ndarray]
UNITS = ("rows", "rollouts", "groups", "tokens")


class Left(NamedTuple):
    """Who left the loss at a stage for one reason; a rollout or group is counted when its last row goes."""

    reason: str
    action: str
    """``masked``, ``excluded``, ``dropped`` or ``carried``."""
    rows: int
    rollouts: int | None
    groups: int | None
    tokens: int | None


class Level(NamedTuple):
    """What is in the loss after a stage; None where the batch has no such ids or tokens."""

    name: str
    rows: int
    rollouts: int | None
    groups: int | None
    tokens: int | None
    out: list[Left]


def funnel(
    columns: Columns, stages: Sequence[str], names: Sequence[str], actions: Sequence[str]
) -> list[Level]:
    """One level for what was collected, and one for each stage.

    Kept and left add up, at every level and in every unit::

        level[k].rows + Σ left.rows = level[k − 1].rows

    Args:
        columns: (N,) `reason`, and `rollout_id`, `group_id` and `tokens` where there are any.
        stages: names, in order; rows that leave at none of them leave at the end.
        names: ``stage/reason`` by code; code 0 is trained.
        actions: by code.
    """
    reason = columns["reason"]
    at = {code: name.rpartition("/")[0] for code, name in enumerate(names) if code}
    inside = np.ones(len(reason), dtype=bool)
    levels = [_level("collected", columns, inside, [])]
    for stage in [*stages, *dict.fromkeys(place for place in at.values() if place not in stages)]:
        codes = [code for code, place in at.items() if place == stage]
        after = inside & ~np.isin(reason, codes)
        out = [left for code in codes if (left := _left(columns, inside, after, code, names, actions)).rows]
        levels.append(_level(stage, columns, after, out))
        inside = after
    return levels


def _level(name: str, columns: Columns, inside: np.ndarray, out: list[Left]) -> Level:
    rollouts, groups = (
        len(np.unique(columns[key][inside])) if key in columns else None for key in ("rollout_id", "group_id")
    )
    return Level(name, int(inside.sum()), rollouts, groups, _tokens(columns, inside), out)


def _left(
    columns: Columns,
    before: np.ndarray,
    after: np.ndarray,
    code: int,
    names: Sequence[str],
    actions: Sequence[str],
) -> Left:
    gone = before & ~after
    mine = columns["reason"] == code

    def units(key: str) -> int | None:
        if key not in columns:
            return None
        ids = columns[key]
        lost, first = np.unique(ids[gone], return_index=True)
        whole = ~np.isin(lost, ids[after])
        return int(
            (whole & mine[gone][first]).sum()
        )  # one that left for two reasons counts for its first row's

    return Left(
        names[code].rpartition("/")[2],
        actions[code],
        int(mine.sum()),
        units("rollout_id"),
        units("group_id"),
        _tokens(columns, mine),
    )


def _tokens(columns: Columns, rows: np.ndarray) -> int | None:
    return int(columns["tokens"][rows].sum()) if "tokens" in columns else None
