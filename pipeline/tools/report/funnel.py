"""Count the rows, rollouts, groups and tokens in the loss after each stage, and those that left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.pipeline.wording import shown_count, shown_loss, shown_reason

from .tables import FittedColumn, FittedTable

Columns = Mapping[str, np.ndarray]
UNITS = ("rows", "rollouts", "groups", "tokens")


class Left(NamedTuple):
    """Counts of what left the loss at a stage for one reason. A rollout or group leaves with its last row."""

    reason: str
    action: str
    """``masked``, ``excluded``, ``dropped`` or ``carried``."""
    rows: int
    rollouts: int | None
    groups: int | None
    tokens: int | None
    rollouts_in_part: int | None = None
    """Number of other rollouts that lost a row for this reason. They stay, or count under another reason."""
    groups_in_part: int | None = None
    """Number of other groups that lost a row for this reason."""

    @property
    def in_part(self) -> str:
        """``parts of 3 rollouts and 2 groups``; empty if only whole rollouts and groups left."""
        named = {"rollout": self.rollouts_in_part, "group": self.groups_in_part}
        words = [f"{count:,} {name}{'s'[: count != 1]}" for name, count in named.items() if count]
        return f"parts of {' and '.join(words)}" if words else ""


class Level(NamedTuple):
    """The counts in the loss after a stage. A count is None if the batch has no such ids or tokens."""

    name: str
    rows: int
    rollouts: int | None
    groups: int | None
    tokens: int | None
    out: list[Left]


def funnel(
    columns: Columns, stages: Sequence[str], names: Sequence[str], actions: Sequence[str]
) -> list[Level]:
    """Return a level for the collected rows, and a level for each stage.

    At every level and for every unit, the counts in the loss and of what left add up::

        level[k].rows + Σ left.rows = level[k − 1].rows

    Args:
        columns: (N,) `reason` and, if they exist, `rollout_id`, `group_id` and `tokens`.
        stages: names of the stages, in order. Rows that leave anywhere else are counted at the end.
        names: ``stage/reason`` by code; code 0 is trained.
        actions: what happens to the rows, by code.

    Example:
        >>> columns = {"reason": np.array([0, 1]), "rollout_id": np.array([3, 3])}
        >>> levels = funnel(columns, ["filter"], ["trained", "filter/aborted"], ["trained", "dropped"])
        >>> [(level.name, level.rows, level.rollouts) for level in levels]
        [('collected', 2, 1), ('filter', 1, 1)]
    """
    reason, tokens = columns["reason"], columns.get("tokens")
    stage_of = {code: name.rpartition("/")[0] for code, name in enumerate(names) if code}
    units = {"rollouts": columns.get("rollout_id"), "groups": columns.get("group_id")}

    def counted(rows: np.ndarray) -> dict[str, Any]:
        found = {unit: None if ids is None else len(np.unique(ids[rows])) for unit, ids in units.items()}
        return {
            "rows": int(rows.sum()),
            **found,
            "tokens": None if tokens is None else int(tokens[rows].sum()),
        }

    inside = np.ones(len(reason), dtype=bool)
    levels = [Level("collected", **counted(inside), out=[])]
    for stage in [*stages, *dict.fromkeys(name for name in stage_of.values() if name not in stages)]:
        codes = [code for code, name in stage_of.items() if name == stage]
        left, out = inside & np.isin(reason, codes), []
        inside = inside & ~left
        for code in codes:
            with_code = reason == code
            numbers = counted(with_code)
            if not numbers["rows"]:
                continue
            for unit, ids in units.items():
                if ids is not None:
                    gone, first = np.unique(ids[left], return_index=True)
                    # If rows of a unit left for two reasons, the unit counts under the reason of its first
                    # row.
                    whole = int((~np.isin(gone, ids[inside]) & with_code[left][first]).sum())
                    numbers |= {unit: whole, f"{unit}_in_part": numbers[unit] - whole}
            out.append(Left(names[code].rpartition("/")[2], actions[code], **numbers))
        levels.append(Level(stage, **counted(inside), out=out))
    return levels


def funnel_table(head: str, levels: Sequence[Level], *, title: str = "") -> FittedTable:
    """Make a table of collected rows, of rows that left at each stage by reason, and of trained rows."""
    units = [unit for unit in UNITS if getattr(levels[0], unit) is not None]
    columns = [FittedColumn(head, gives="wrap"), *(FittedColumn(unit, right=True) for unit in units)]
    table = FittedTable(columns, title)

    def counts(of: Level | Left, words: Callable[[float | None], str]) -> list[str]:
        return [words(getattr(of, unit)) for unit in units]

    table.add("collected", *counts(levels[0], shown_count))
    for level in levels[1:]:
        for left in level.out:
            name = f"{shown_reason(level.name, left.reason)}, {left.action}"
            table.add(name, *counts(left, shown_loss), style="dim", indent=2)
            if left.in_part:
                table.add(left.in_part, *("" for _ in units), style="dim", indent=4)
    table.add("trained", *counts(levels[-1], shown_count), style="bold")
    return table


def left_numbers(levels: Sequence[Level], names: Sequence[str]) -> dict[str, float]:
    """Count rollouts and groups that left, by reason: ``rollouts/out/<stage>/<reason>`` and so on.

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
