"""Make the data of the page from reports: tables, curves, and as much text as a page can hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from headrace.pipeline.wording import printable
from headrace.transforms.table import count_of
from headrace.transforms.table.options import takes_options

from .advice import Advice, History, Setup, advice_at, symptoms
from .groups import reading_order
from .html import embed
from .numbers import gradient_share
from .over_steps import Numbers, totals_over
from .page_schema import (
    Groups,
    PageAdvisory,
    PageData,
    PageLevel,
    PageSymptom,
    PageText,
    PageTokens,
    ShownRows,
    Step,
    shown_as,
)
from .step import StepReport, rows_to_read
from .survivors import page_tables, survivors_tables
from .texts import TokenValues
from .user_turn import asked_line

GROUPS, ROWS = 200, 5000  # a page shows at most this many of a step, because a browser would become slow
PAGE_TEXTS = 3_000_000  # all texts of a page have at most this many bytes, divided evenly over its steps
CHARACTERS = 4000  # a text has at most this many characters; three quarters are from its beginning
TOKENS = 500  # a response by token has at most this many tokens; three quarters are from its beginning
BESIDE = 300  # a column beside a response has at most this many characters


@takes_options
def page_data(
    reports: Sequence[StepReport],
    *,
    title: str,
    history: History | None = None,
    advice: Sequence[Advice] | None = None,
    totals: Numbers | None = None,
    recorded: int | None = None,
    setup: Setup | None = None,
    earlier: Sequence[Step] = (),
) -> PageData:
    """Make the input of :func:`render_page`: steps with funnel, groups and rows, and curves over steps.

    If a step has more than 200 groups, or 5000 rows, the page shows some of its groups
    (:func:`reading_order`). The funnel and the numbers cover all rows. All prompts and responses take at most
    3 MB, which the steps share evenly. The worst and the best rollout of each group come first
    (:func:`rows_to_read`), so that groups with equal rewards have a response, too. A text with more than
    4,000 characters, or a response by token with more than 500 tokens, is cut: the page shows its beginning
    and end, and how much is left out.

    Args:
        reports: the reports of the steps that can be chosen on the page.
        title: title of the page.
        history: (step, numbers) of all steps, for the curves; None: the steps of the reports.
        advice: verdict and advisories for each report; None: computed from the history up to its step.
        totals: sums over all steps of the run (:func:`totals_over`); None: sums over the history.
        recorded: number of steps of the run; None: the number of steps of the history.
        setup: how the command was set up, so that remedies are options of the run (:meth:`Remedy.under`).
        earlier: steps of a page that was written before, which come first (:func:`.html.read_steps`).

    Example:
        >>> page_data([], title="GRPO")["steps"]
        []
    """
    points = [(report.step, report.numbers) for report in reports] if history is None else history
    names = dict.fromkeys(name for _, numbers in points for name in numbers)
    if advice is None:
        advice = [
            advice_at(report.numbers, [point for point in points if point[0] <= report.step])
            for report in reports
        ]
    room = PAGE_TEXTS // max(len(earlier) + len(reports), 1)
    steps = [cut_step(step, room) for step in earlier]
    steps += [_step(report, room, said) for report, said in zip(reports, advice, strict=True)]
    fired = dict.fromkeys(each["name"] for step in steps for each in step["advisories"])
    known = [symptoms()[name] for name in fired if name in symptoms()]
    return {
        "title": printable(title),
        "recipe": [{"name": name, "text": text} for name, text in (reports[0].recipe if reports else ())],
        "steps": steps,
        "curve_steps": [step for step, _ in points],
        "curves": {name: [numbers.get(name) for _, numbers in points] for name in names},
        "recorded": len(points) if recorded is None else recorded,
        "totals": dict(totals_over(numbers for _, numbers in points) if totals is None else totals),
        "symptoms": [
            shown_as(PageSymptom, each._replace(remedies=tuple(filter(None, remedies))))
            for each in known
            for remedies in [[remedy.under(setup) for remedy in each.remedies]]
        ],
    }


def _step(report: StepReport, room: int, said: Advice) -> Step:
    groups = report.groups
    total = len(groups["id"]) if groups else 0
    rows = rows_to_read(report)
    shown = np.empty(0, np.int64)
    if groups:
        order = reading_order(groups)[:GROUPS]
        fits = np.cumsum(groups["segments"][order]) <= ROWS
        fits[:1] = True
        shown = np.sort(order[fits])
        rows = rows[np.isin(report.columns["group_id"][rows], groups["id"][shown])]
    rows = rows if groups else rows[:ROWS]
    texts = fitting_texts(report, rows.tolist(), room)
    return {
        "step": report.step,
        "funnel": [shown_as(PageLevel, level) for level in report.funnel],
        "shown": {"groups": len(shown), "of": total},
        "groups": _groups(report, shown, texts),
        "rows": _rows(report, np.sort(rows), texts),
        "numbers": report.numbers,
        "survivors": page_tables(survivors_tables(report.survivors)),
        "verdict": printable(said.verdict),
        "advisories": [
            shown_as(PageAdvisory, each._replace(text=printable(each.text))) for each in said.advisories
        ],
        "unchecked": [f"{symptoms()[name].title}: needs {symptoms()[name].needs}" for name in said.unchecked],
    }


def _groups(report: StepReport, shown: np.ndarray, texts: PageTexts) -> Groups:
    def column(name: str) -> np.ndarray:
        return report.groups[name][shown] if report.groups else shown  # without groups, nothing is shown

    rows, prompts = column("row"), report.texts.get("prompt")
    found: dict[str, list] = {
        "id": _ids(report, "group", rows),
        "label": [None if prompts is None else printable(asked_line(prompts[row])) for row in rows.tolist()],
        "asked": [texts.asked.get(row) for row in rows.tolist()],
        "prompt": [texts.prompts.get(row) for row in rows.tolist()],
    }
    others = [name for name in Groups.__annotations__ if name not in found]
    return cast(Groups, found | {name: or_none(column(name)) for name in others})


def _rows(report: StepReport, rows: np.ndarray, texts: PageTexts) -> ShownRows:
    known = {"staleness": report.staleness, **report.columns, "share": gradient_share(report.columns)}
    known |= {"weight": known["loss_weight"]} if "loss_weight" in known else {}
    statuses: Sequence[str | None] = report.statuses or [None] * len(report)
    codes = report.columns["reason"][rows].tolist()
    unknown: list = [None] * len(rows)
    found: dict[str, list] = {
        "row": rows.tolist(),
        "group": _ids(report, "group", rows) if "group_id" in known else [0] * len(rows),
        "rollout": _ids(report, "rollout", rows) if "rollout_id" in known else rows.tolist(),
        "rewards": [or_none(each) for each in known["rewards"][rows]] if "rewards" in known else unknown,
        "status": [statuses[row] for row in rows.tolist()],
        "reason": ["" if code == 0 else report.names[code] for code in codes],
        "response": [texts.responses.get(row) for row in rows.tolist()],
        "by_token": [texts.tokens.get(row) for row in rows.tolist()],
        "beside": [texts.beside.get(row) for row in rows.tolist()],
    }
    for name in ShownRows.__annotations__:
        if name not in found:
            found[name] = or_none(known[name][rows]) if name in known else unknown
    return cast(ShownRows, {name: found[name] for name in ShownRows.__annotations__})


def _ids(report: StepReport, unit: Literal["group", "rollout"], rows: np.ndarray) -> list[int | str]:
    """The ids that users know: labels as printable text, else numbers."""
    if len(rows) == 0:
        return []
    return [printable(each) if isinstance(each, str) else each for each in report.ids(unit, rows)]


def or_none(values: np.ndarray) -> list:
    """Convert to Python numbers, with None for unknown values: NaN, or negative integers."""
    unknown = ~np.isfinite(values) if values.dtype.kind == "f" else values < 0
    return [None if none else value for value, none in zip(values.tolist(), unknown.tolist(), strict=True)]


# -- texts: which rows have them, and how much of each, so that the page stays small ------------------------


class PageTexts(NamedTuple):
    """The texts that fit: question and prompt by the group's first row, and other texts by row."""

    asked: dict[int, PageText]
    prompts: dict[int, PageText]
    responses: dict[int, PageText]
    tokens: dict[int, PageTokens]
    beside: dict[int, dict[str, Any]]


def fitting_texts(report: StepReport, rows: Iterable[int], room: int) -> PageTexts:
    """Take the texts of rows, one row after the other, until `room` bytes of the page are full."""
    found = PageTexts({}, {}, {}, {}, {})
    prompts, responses = (report.texts.get(name) for name in ("prompt", "response"))
    for row in rows:
        new = PageTexts({}, {}, {}, {}, {})  # texts of the row, and of its group if the group has none yet
        first = report.first_of_group(row)
        if prompts is not None and first is not None and first not in found.asked:
            asked = str(report.asked(first))
            new.asked[first] = cut_text(asked)
            if asked != prompts[first]:
                new.prompts[first] = cut_text(prompts[first])
        values = report.by_token.get(row)
        if values is not None:
            new.tokens[row] = cut_tokens(values)
        if responses is not None and (values is None or values.texts is None):
            new.responses[row] = cut_text(responses[row])
        if columns := columns_beside(report, row):
            new.beside[row] = columns
        room -= sum(len(embed({"": text})) for texts in new for text in texts.values())
        if room < 0:
            break
        for name, texts in new._asdict().items():
            getattr(found, name).update(texts)
    return found


def cut_step(step: Step, room: int) -> Step:
    """A step of an earlier page, with as many of its texts as fit into `room` bytes of the page."""
    found: dict[str, Any] = {**step, "groups": {**step["groups"]}, "rows": {**step["rows"]}}
    texts = {"groups": ("asked", "prompt"), "rows": ("response", "by_token", "beside")}
    for table, name in ((table, name) for table, names in texts.items() for name in names):
        for at, text in enumerate(found[table][name]):
            room -= 0 if text is None else len(embed({"": text}))
            if room < 0:
                found[table][name] = found[table][name][:at] + [None] * (len(found[table][name]) - at)
                break
    return cast(Step, found)


def columns_beside(report: StepReport, row: int) -> dict[str, Any]:
    """The ground truth of a row and the other columns of its dump, by name: texts, numbers, booleans."""
    truth, others = (report.texts.get(name) for name in ("ground_truth", "other_columns"))
    found: dict[str, Any] = {"ground truth": truth[row]} if truth is not None and truth[row] else {}
    if others is not None and others[row]:
        try:
            more = json.loads(others[row])
        except (ValueError, RecursionError):  # a dump may hold anything
            more = None
        found |= more if isinstance(more, dict) else {"other columns": others[row]}
    plain = {name: value for name, value in found.items() if isinstance(value, str | float | int | None)}
    found |= {name: str(value) for name, value in found.items() if name not in plain}
    return {
        printable(name): shortened(value, BESIDE) if isinstance(value, str) else value
        for name, value in found.items()
    }


def cut_text(text: str, most: int = CHARACTERS) -> PageText:
    """Cut a long text for the page into its beginning, the number of missing characters, and its end.

    Example:
        >>> cut_text("abcdefghij", 4)
        {'start': 'abc', 'missing': 6, 'end': 'j'}
    """
    start, end = _ends(text, most)
    missing = len(text) - len(start) - len(end)
    return {"start": printable(start, keep="\n\t"), "missing": missing, "end": printable(end, keep="\n\t")}


def shortened(text: str, most: int = CHARACTERS) -> str:
    """Cut a text like :func:`cut_text`, and return one text with a mark where characters are left out.

    Example:
        >>> shortened("abcdefghij", 4)
        'abc [… 6 characters left out …] j'
    """
    cut = cut_text(text, most)
    if not cut["missing"]:
        return cut["start"]
    return f"{cut['start']} [… {count_of(cut['missing'], 'character')} left out …] {cut['end']}"


def cut_tokens(tokens: TokenValues, most: int = TOKENS) -> PageTokens:
    """Cut tokens for the page like a text. Numbers get four digits.

    Example:
        >>> cut_tokens(TokenValues(["a", "b", "c", "d", "e"], {"advantage": [1.0, 2, 3, 4, float("nan")]}), 4)
        {'texts': ['a', 'b', 'c', 'e'], 'values': {'advantage': [1.0, 2.0, 3.0, nan]}, 'at': 3, 'missing': 1}
    """
    size = len(next(iter(tokens.values.values())))
    start, _ = _ends(range(size), most)
    texts = None if tokens.texts is None else _joined(tokens.texts, most)
    return {
        "texts": None if texts is None else [printable(text, keep="\n\t") for text in texts],
        "values": {
            name: [float(f"{value:.4g}") for value in _joined(values, most)]
            for name, values in tokens.values.items()
        },
        "at": len(start),
        "missing": max(size - most, 0),
    }


def _ends(values: Any, most: int) -> tuple[Any, Any]:
    """The beginning and the end of values: all and nothing, or three quarters and one quarter of `most`."""
    if len(values) <= most:
        return values, values[:0]
    start = most * 3 // 4
    return values[:start], values[len(values) - (most - start) :]


def _joined(values: Sequence[Any], most: int) -> list[Any]:
    start, end = _ends(values, most)
    return [*start, *end]
