"""Make the advisory about groups that a stream lost, and tables by latency, turns, length and reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .over_steps import Numbers, percent
from .page_schema import PageTable
from .tables import FittedColumn, FittedTable

if TYPE_CHECKING:
    from headrace.transforms.streams import Survivors, Tenth

BIASED = -4.0  # if losses do not depend on a value, z is below this with a chance of at most 1 in 2,980
SMALL = 2**-10  # smaller values are in the bin of 0
SAID = {
    "latency": "took at least {:.3g} s",
    "length": "have a rollout of at least {:,} tokens",
    "turns": "have at least {:,} turns",
}
HEADS = {"latency": "latency, s", "length": "length, tokens"}
OPTIONS = {
    "stale": "on_stale='wait' with a RolloutStream or paced, or a greater max_staleness",
    "timeout": "a greater timeout or timeout_seconds, or on_timeout='refill'",
    "failed": "on_failure='refill'",
    "evicted": "a greater max_pending_groups, or dispatch only capacity() groups",
    "lost": "in_order=False if rows are put out of order; else read the collector with assembled(…)",
}
"""The options to set, by the reason for which most groups were lost."""
WORDS = {"timeout": "too late for the timeout", "lost": "lost on the way"}


class LostGroups(NamedTuple):
    """The text and the number of an advisory about lost groups."""

    text: str
    number: str


def lost_groups(numbers: Numbers) -> LostGroups | None:
    """Say whether groups that take long, are long or have many turns are trained less often (z < −4).

    Args:
        numbers: the numbers of a step, including those of :meth:`Survivors.numbers`.

    Example:
        >>> numbers = {"lost/stale": 40.0, "latency/z": -9.0, "latency/slow": 64.0}
        >>> numbers |= {"latency/slow_trained": 0.1, "latency/others_trained": 0.99}
        >>> print(lost_groups({f"survivors/{name}": value for name, value in numbers.items()}).text)
        Of the groups that took at least 64 s, 10 % were trained, and of the others 99 % (z = -9.0). Most of \
the lost were stale. Set on_stale='wait' with a RolloutStream or paced, or a greater max_staleness.
    """
    lost = {name: groups for name, groups in numbers.items() if name.startswith("survivors/lost/")}
    for value, words in SAID.items():
        start = f"survivors/{value}/"
        if (z := numbers.get(f"{start}z", 0.0)) < BIASED:
            slow, others = (percent(numbers[f"{start}{name}_trained"]) for name in ("slow", "others"))
            least = numbers[f"{start}slow"]
            which = words.format(least if value == "latency" else math.ceil(least))
            text = (
                f"Of the groups that {which}, {slow} were trained, and of the others {others} (z = {z:.1f})."
            )
            reason = max(lost, key=lambda name: lost[name]).rpartition("/")[2]
            text += f" Most of the lost were {WORDS.get(reason, reason)}."
            return LostGroups(text + (f" Set {OPTIONS[reason]}." if reason in OPTIONS else ""), f"{start}z")
    return None


def survivors_tables(survivors: Survivors | None) -> dict[str, FittedTable]:
    """Make tables of trained and lost groups by latency, turns, length and reward, if these differ."""
    found: dict[str, FittedTable] = {}
    if survivors is None:
        return found
    for value in survivors.fates:
        tenths = survivors.tenths(value)
        if len(tenths) > 1:
            found[value] = tenths_table(tenths, value)
            said = [f"{_groups(survivors.outstanding)} outstanding"] if survivors.outstanding else []
            if lacking := survivors.lacking(value):
                said.append(f"{_groups(lacking)} left out, because they have no {value}")
            found[value].caption = "; ".join(said)
    return found


def _groups(number: int) -> str:
    return f"{number:,} groups are" if number > 1 else "1 group is"


def tenths_table(tenths: Sequence[Tenth], value: str) -> FittedTable:
    """Make a table of trained and lost groups by a value, such as ``latency``.

    Args:
        tenths: two tenths or more.
        value: the name of the first column.
    """
    reasons = list(dict.fromkeys(reason for tenth in tenths for reason in tenth.lost))
    names = ["dispatched", "trained", *reasons, *(["early"] if any(tenth.early for tenth in tenths) else [])]
    columns = [FittedColumn(name, right=True, leaves=at) for at, name in enumerate(names)]
    table = FittedTable([FittedColumn(HEADS.get(value, value)), *columns])
    for tenth in tenths:
        counts = {"dispatched": tenth.left, "trained": tenth.trained, "early": tenth.early, **tenth.lost}
        ends = [f"{end if abs(end) > SMALL else 0:.3g}" for end in (tenth.least, tenth.below)]
        if value == "turns" or value.startswith("length"):  # whole numbers
            first = math.ceil(tenth.least) if tenth.least > SMALL else 0
            ends = [f"{first:,}", f"{math.ceil(tenth.below) - 1:,}"]
        table.add(" to ".join(dict.fromkeys(ends)), *(f"{counts.get(name, 0):,}" for name in names))
    return table


def page_tables(tables: Mapping[str, FittedTable]) -> list[PageTable]:
    """Convert tables for the page."""
    return [
        {
            "name": value,
            "head": [column.name for column in table.columns],
            "lines": [[cell.plain for cell in cells] for cells, _, _ in table.rows],
            "note": table.caption,
        }
        for value, table in tables.items()
    ]
