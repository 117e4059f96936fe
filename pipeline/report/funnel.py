"""How many rows, rollouts, groups and tokens are in the loss after each stage, and how many left it why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Columns = Mapping[str, np.ndarray]
UNITS = ("rows", "rollouts", "groups", "tokens")


class Left(NamedTuple):
    """What left the loss at a stage for one reason; a rollout or group leaves with its last row."""

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

    At every level and in every unit, what is in the loss and what left add up::

        level[k].rows + Σ left.rows = level[k − 1].rows

    Args:
        columns: (N,) `reason`, and `rollout_id`, `group_id` and `tokens` where there are any.
        stages: names, in order; rows that leave at none of them leave at the end.
        names: ``stage/reason`` by code; code 0 is trained.
        actions: by code, what happens to the rows.

    Example:
        >>> columns = {"reason": np.array([0, 1]), "rollout_id": np.array([3, 3])}
        >>> levels = funnel(columns, ["filter"], ["trained", "filter/aborted"], ["trained", "dropped"])
        >>> [(level.name, level.rows, level.rollouts) for level in levels]
        [('collected', 2, 1), ('filter', 1, 1)]
    """
    reason = columns["reason"]
    stage_of = {code: name.rpartition("/")[0] for code, name in enumerate(names) if code}
    inside = np.ones(len(reason), dtype=bool)
    levels = [_level("collected", columns, inside, [])]
    for stage in [*stages, *dict.fromkeys(name for name in stage_of.values() if name not in stages)]:
        codes = [code for code, name in stage_of.items() if name == stage]
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
    """What left with one code, of the rows that were in the loss before a stage and are not after it."""
    left = before & ~after
    with_code = columns["reason"] == code

    def units(key: str) -> int | None:
        if key not in columns:
            return None
        ids = columns[key]
        gone, first = np.unique(ids[left], return_index=True)
        wholly = ~np.isin(gone, ids[after])
        # One whose rows left for two reasons is counted under the reason of its first row.
        return int((wholly & with_code[left][first]).sum())

    return Left(
        reason=names[code].rpartition("/")[2],
        action=actions[code],
        rows=int(with_code.sum()),
        rollouts=units("rollout_id"),
        groups=units("group_id"),
        tokens=_tokens(columns, with_code),
    )


def _tokens(columns: Columns, rows: np.ndarray) -> int | None:
    return int(columns["tokens"][rows].sum()) if "tokens" in columns else None
