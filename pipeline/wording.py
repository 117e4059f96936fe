"""Format text for people: printable text and counts."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = [
    "beginning",
    "for_python",
    "printable",
    "said_in_python",
    "shown_count",
    "shown_loss",
    "shown_range",
    "shown_reason",
]


_in_python = ContextVar("in_python", default="")


@contextmanager
def said_in_python(of: str = "tasks") -> Iterator[None]:
    """Let errors about options use the words of Python, instead of those of YAML and the command.

    Functions that take options as keywords of Python enter this context. The code that they call is shared
    with the command.

    Args:
        of: ``tasks``, which take the options of a dump in ``source={…}``, or ``open_dump``.
    """
    token = _in_python.set(of)
    try:
        yield
    finally:
        _in_python.reset(token)


def for_python() -> str:
    """The argument `of` of :func:`said_in_python` inside of that context; else an empty string."""
    return _in_python.get()


def printable(text: str, *, keep: str = "") -> str:
    r"""Return the text with escapes such as ``\x1b`` instead of characters that a terminal would act on.

    These characters are control characters, marks that change the direction of writing, line ends, and
    unpaired surrogates, which cannot be encoded.

    Args:
        text: text from any source.
        keep: characters that are not escaped.

    Example:
        >>> print(printable("\x1b[31mred, \u202eturned"))
        \x1b[31mred, \u202eturned
    """
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter.isprintable() or letter in keep or unicodedata.category(letter) == "Zs"
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


def beginning(text: str, most: int) -> str:
    """Cut a text to at most `most` characters. If it is cut, the last character is ….

    Example:
        >>> beginning("What is 15 times 4?", 8)
        'What is…'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def shown_count(count: float | None) -> str:
    """Format a count; an empty string for None.

    Example:
        >>> shown_count(1234), shown_count(None)
        ('1,234', '')
    """
    return "" if count is None else f"{count:,.0f}"


def shown_loss(count: float | None) -> str:
    """Format a number of rows or groups that left, as a negative number or as 0.

    Example:
        >>> shown_loss(1234), shown_loss(0)
        ('−1,234', '0')
    """
    return f"−{shown_count(count)}" if count else shown_count(count)


def shown_reason(stage: str, reason: str) -> str:
    """Format a stage and a reason of its ledger entries.

    Example:
        >>> shown_reason("filter", "zero_variance")
        'filter: zero variance'
    """
    return f"{stage}: {reason.replace('_', ' ')}"


def shown_range(bounds: Sequence[float]) -> str:
    """Format the two ends of a range. If they are equal, format one number.

    Example:
        >>> shown_range((0.9999999, 1.0000001)), shown_range((0.64, 2.2857))
        ('1', '0.64 to 2.29')
    """
    low, high = (f"{round(bound, 4):.3g}" for bound in bounds)
    return low if low == high else f"{low} to {high}"
