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
    rollouts_in_part: int | None = None
    """Others that lost a row for this reason: they stay, or are counted under another."""
    groups_in_part: int | None = None
    """The same of groups."""

    @property
    def in_part(self) -> str:
        """``parts of 3 rollouts and 2 groups``, or nothing where only whole ones left."""
        named = {"rollout": self.rollouts_in_part, "group": self.groups_in_part}
        words = [f"{count:,} {name}{'s'[: count != 1]}" for name, count in named.items() if count]
        return f"parts of {' and '.join(words)}" if words else ""


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

    def units(key: str) -> tuple[int | None, int | None]:
        if key not in columns:
            return None, None
        ids = columns[key]
        gone, first = np.unique(ids[left], return_index=True)
        wholly = ~np.isin(gone, ids[after])
        # One whose rows left for two reasons is counted under the reason of its first row.
        whole = int((wholly & with_code[left][first]).sum())
        return whole, len(np.unique(ids[with_code])) - whole

    (rollouts, some_rollouts), (groups, some_groups) = units("rollout_id"), units("group_id")
    return Left(
        reason=names[code].rpartition("/")[2],
        action=actions[code],
        rows=int(with_code.sum()),
        rollouts=rollouts,
        groups=groups,
        tokens=_tokens(columns, with_code),
        rollouts_in_part=some_rollouts,
        groups_in_part=some_groups,
    )


def left_numbers(levels: Sequence[Level], names: Sequence[str]) -> dict[str, float]:
    """Rollouts and groups that left, by reason: ``rollouts/out/<stage>/<reason>``, as ``out/…`` has rows.

    Args:
        levels: of :func:`funnel`.
        names: ``stage/reason`` by code; code 0 is trained.

    Example:
        >>> gone = Left("failed", "dropped", rows=2, rollouts=1, groups=0, tokens=None)
        >>> left_numbers([Level("gate", 4, 3, 2, None, [gone])], ["trained", "gate/failed"])
        {'rollouts/out/gate/failed': 1.0, 'groups/out/gate/failed': 0.0}
    """
    known = {f"{level.name}/{left.reason}": left for level in levels for left in level.out}
    numbers = {}
    for unit in ("rollouts", "groups"):
        if levels and getattr(levels[0], unit) is not None:
            for name in names[1:]:
                count = getattr(known[name], unit) if name in known else 0
                numbers[f"{unit}/out/{name}"] = float(count)
    return numbers


def _tokens(columns: Columns, rows: np.ndarray) -> int | None:
    return int(columns["tokens"][rows].sum()) if "tokens" in columns else None
