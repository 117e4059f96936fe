"""Text for people: printable text, suggestions for a misspelled word, and formatted counts."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable
from typing import Any

from headrace.transforms.errors import BatchError, ErrorNames


def printable(text: str, *, keep: str = "") -> str:
    r"""Return the text with escapes such as ``\x1b`` for characters that a terminal would act on.

    These are control characters, marks that change the direction of writing, line ends, and unpaired
    surrogates, which cannot be encoded.

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
    """At most this many characters of a text; if there are more, the last one is ….

    Example:
        >>> beginning("What is 15 times 4?", 8)
        'What is…'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def suggest(word: str, words: Iterable[str], most: int = 2, least: float = 0.5) -> str:
    """Return close matches as the end of a sentence; an empty string if there are none.

    Args:
        word: as it was typed.
        words: those that there are.
        most: matches at most.
        least: similarity of a match, from 0 to 1.

    Example:
        >>> suggest("gprpo", ["grpo", "dapo"])
        " (did you mean 'grpo'?)"
    """
    close = difflib.get_close_matches(word, list(words), n=most, cutoff=least)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def count_words(count: float | None) -> str:
    """Format a count; an empty string for None.

    Example:
        >>> count_words(1234), count_words(None)
        ('1,234', '')
    """
    return "" if count is None else f"{count:,.0f}"


def minus_words(count: float | None) -> str:
    """Format a count of what left as a negative number, or as 0.

    Example:
        >>> minus_words(1234), minus_words(0)
        ('−1,234', '0')
    """
    return f"−{count_words(count)}" if count else count_words(count)


def reason_words(stage: str, reason: str) -> str:
    """Format a stage and a reason of its ledger entries.

    Example:
        >>> reason_words("filter", "zero_variance")
        'filter: zero variance'
    """
    return f"{stage}: {reason.replace('_', ' ')}"


class CommandNames(ErrorNames):
    """The names of options in errors, for who types a command: ``pipeline.stages.gate.group_size``."""

    def option(self, stage: str, name: str, value: str, *, other: bool) -> str:
        """The words to type."""
        if not stage:
            return super().option(stage, name, value, other=other)
        return f"pipeline.stages.{stage}.{name}{f'={value}' * bool(value)}"

    def say_infinite(self, **_: Any) -> str:
        """Nothing: no word adds a stage before the collapse."""
        return ""


def in_words_to_type(err: Exception) -> str:
    """The text of an error, with the options to set as words to type.

    Example:
        >>> error = BatchError("group {group} has 3 of 8: set {on_incomplete=drop}", group=7)
        >>> error.stage, error.made_by = "gate", "CompletenessGate()"
        >>> in_words_to_type(error)
        "stage 'gate', CompletenessGate(): group 7 has 3 of 8: set pipeline.stages.gate.on_incomplete=drop"
    """
    return err.said(CommandNames()) if isinstance(err, BatchError) else str(err)


def word_to_set(err: Exception) -> str | None:
    """The first word that an error of a stage says to type; None: it names none.

    Example:
        >>> word_to_set(BatchError("found {found}: set {collapse/missing=mask}, or {columns=2}", found=3))
        'pipeline.stages.collapse.missing=mask'
    """
    options = err.options if isinstance(err, BatchError) else []
    words = (f"pipeline.stages.{stage}.{name}={value}" for stage, name, value in options if stage and value)
    return next(words, None)
