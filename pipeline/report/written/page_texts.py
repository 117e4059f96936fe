"""The texts on a page: of which rows, and how much of each, so that the page stays small."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from headrace.pipeline.printable import printable
from headrace.pipeline.report.responses import TokenValues
from headrace.pipeline.report.step import StepReport

from .html import embed
from .page_schema import PageText, PageTokens

PAGE_TEXTS = 3_000_000  # bytes of all prompts and responses of a page, which its steps share evenly
CHARACTERS = 4000  # of a prompt or response; of a longer one three quarters of that are its beginning
TOKENS = 500  # of a response token by token, likewise
LABEL = 80  # characters of the last user turn by which a group is called


class PageTexts(NamedTuple):
    """What fits: by a group's first row its question and its prompt, by row its response and its tokens."""

    asked: dict[int, PageText]
    prompts: dict[int, PageText]
    responses: dict[int, PageText]
    tokens: dict[int, PageTokens]


def fitting_texts(report: StepReport, rows: Iterable[int], room: int) -> PageTexts:
    """The prompts and responses of rows, one after the other until the room is used up.

    Args:
        report: of a step.
        rows: in the order in which they are worth reading.
        room: bytes that texts may take on the page.
    """
    found = PageTexts({}, {}, {}, {})
    for row in rows:
        new = _texts_of(report, row, found)
        room -= sum(len(embed({"": text})) for texts in new for text in texts.values())
        if room < 0:
            break
        found.asked.update(new.asked)
        found.prompts.update(new.prompts)
        found.responses.update(new.responses)
        found.tokens.update(new.tokens)
    return found


def _texts_of(report: StepReport, row: int, found: PageTexts) -> PageTexts:
    """Those of a row, and of its group, where that has none yet."""
    new = PageTexts({}, {}, {}, {})
    prompts, responses = (report.texts.get(name) for name in ("prompt", "response"))
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
    return new


def cut_text(text: str, most: int = CHARACTERS) -> PageText:
    """A text that the page can show: whole, or its beginning, how many characters are left out, and its end.

    Example:
        >>> cut_text("abcdefghij", 4)
        {'start': 'abc', 'missing': 6, 'end': 'j'}
    """
    start, end = _ends(text, most)
    missing = len(text) - len(start) - len(end)
    return {"start": printable(start, keep="\n\t"), "missing": missing, "end": printable(end, keep="\n\t")}


def shortened(text: str, most: int = CHARACTERS) -> str:
    """The same as one text, with a mark where something is left out.

    Example:
        >>> shortened("abcdefghij", 4)
        'abc [… 6 characters left out …] j'
    """
    start, missing, end = cut_text(text, most).values()
    return f"{start} [… {missing:,} characters left out …] {end}" if missing else str(start)


def cut_tokens(tokens: TokenValues, most: int = TOKENS) -> PageTokens:
    """Tokens that the page can show, likewise; numbers with four digits.

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
    """All, and nothing; of more than so many, three quarters of those from the start, and the last."""
    if len(values) <= most:
        return values, values[:0]
    start = most * 3 // 4
    return values[:start], values[len(values) - (most - start) :]


def _joined(values: Sequence[Any], most: int) -> list[Any]:
    start, end = _ends(values, most)
    return [*start, *end]
