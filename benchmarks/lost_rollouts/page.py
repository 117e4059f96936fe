"""Make the page from the results and page.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lost_rollouts import peers
from lost_rollouts.restarts import KILLS
from lost_rollouts.stalls import CASES, HANGS
from lost_rollouts.systems import OURS, OWN_LINES, RESTARTS
from lost_rollouts.world import BETWEEN, LEAST, MEAN, MEDIAN, MOST, TOKENS_PER_SECOND

TEMPLATE = Path(__file__).with_name("page.md")
COLUMNS = "system | slowest tenth | speed | age | over | trained | too old | failed | open"
FATES = ("trained", "stale", "failed", "open")
Row = Mapping[str, Any]


def page(results: Mapping[str, Any]) -> str:
    """The text of docs/lost-rollouts.md."""
    worlds, runs = results["worlds"], KILLS * (RESTARTS.prompts or 1)
    tables = [
        f"### {name}\n\n| {COLUMNS} |\n|{'---|' * 9}\n"
        + _lines((row, _numbers(found)) for row, found in rows.items())
        for name, rows in worlds.items()
    ]
    restarts = {
        name: " | ".join(f"{100 * row[each] / runs:.0f}" for each in ("skipped", "twice", "stale"))
        for name, row in results["restarts"].items()
    }
    stalls = {name: f"{_stalled(row)} | {CASES[name].how}" for name, row in results["stalls"].items()}
    versions = {source.project: source.version[:12] for source in peers.SOURCES}
    code = {
        project: f"{versions.get(project, version)} | {own} | {harness}"
        for project, (version, own, harness) in OWN_LINES.items()
    }
    return TEMPLATE.read_text().format(
        tables="\n\n".join(tables),
        restarts=_lines(restarts.items()),
        stalls=_lines(stalls.items()),
        code=_lines(code.items()),
        prompts=RESTARTS.prompts,
        kills=KILLS,
        hangs=HANGS,
        least=LEAST,
        mean=MEAN,
        most=MOST,
        rate=TOKENS_PER_SECOND,
        median=MEDIAN,
        between=100 * BETWEEN,
        **_found(results),
    )


def _found(results: Mapping[str, Any]) -> dict[str, str]:
    """The numbers of the summary."""
    worlds = results["worlds"]
    dropping = [
        row for row in worlds["Lognormal"].values() if row["tokens"].get("stale") and row["bound"] == 2
    ]
    shares = [_shares(row)[1] for row in dropping]
    wasted = [100 * row["tokens"]["stale"] / sum(row["tokens"].values()) for row in dropping]
    verl = [row for rows in worlds.values() for name, row in rows.items() if name.startswith("verl, `wait`")]
    ages = [
        int(age)
        for rows in worlds.values()
        for row in rows.values()
        if row["bound"] is None
        for age in row["ages"]
    ]
    told = next(row["after"] for name, row in results["stalls"].items() if name.startswith("headrace"))
    return {
        "dropped": f"{min(shares):.0f} to {max(shares):.0f}",
        "tight": f"{_speed(worlds['Lognormal'][OURS[0]]):.2f}",
        "loose": f"{_speed(worlds['Lognormal'][OURS[2]]):.2f}",
        "quick": f"{min(map(_speed, dropping)):.2f} to {max(map(_speed, dropping)):.2f}",
        "wasted": f"{min(wasted):.0f} to {max(wasted):.0f}",
        "exceeds": f"{max(_over(row) or 0.0 for row in verl):.1f} %",
        "oldest": str(max(ages)),
        "told": _hours(told),
    }


def _lines(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"| {name} | {cells} |" for name, cells in rows)


def _numbers(row: Row) -> str:
    if row["ended"]:
        return f"{row['ended']} |" + " |" * 6
    sent, trained = _shares(row)
    ages = {int(age): number for age, number in row["ages"].items()}
    mean = sum(age * number for age, number in ages.items()) / sum(ages.values())
    over = _over(row)
    tokens = sum(row["tokens"].values())
    shares = [
        f"{100 * row['tokens'].get(fate, 0) / tokens:.0f}" for fate in ("trained", "stale", "failed", "open")
    ]
    cells = [
        f"{sent:.1f} → {trained:.1f}",
        f"{_speed(row):.2f}",
        f"{mean:.1f}, {max(ages)}",
    ]
    return " | ".join([*cells, "–" if over is None else f"{over:.1f}" if over else "0", *shares])


def _speed(row: Row) -> float:
    return row["steps"] / row["most_steps"]


def _shares(row: Row) -> tuple[float, float]:
    """The share of the slowest tenth among the dispatched and among the trained groups, in %."""
    return 100 * row["sent_slow"] / row["sent"], 100 * row["trained_slow"] / max(1, row["trained"])


def _over(row: Row) -> float | None:
    """The share of trained groups that are older than the bound, in %."""
    if row["bound"] is None or not row["ages"]:
        return None
    old = sum(number for age, number in row["ages"].items() if int(age) > row["bound"])
    return 100 * old / sum(row["ages"].values())


def _stalled(row: Row) -> str:
    told = "never" if row["after"] is None else _hours(row["after"])
    names = "yes" if row["names"] else "no" if row["after"] is not None else "–"
    return f"{row['steps']} of {row['healthy']} | {told} | {names} | {row['false']}"


def _hours(seconds: int) -> str:
    return f"{seconds / 3600:.1f} h"
