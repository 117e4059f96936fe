"""Text for people: printable text, suggestions for a misspelled word, and formatted counts."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable


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


# Values as other libraries call them.
SYNONYMS = {
    "loo": "leave_one_out",
    "std": "group",
    "sequence": "sample",
    "seq-mean-token-mean": "sample",
    "token-mean": "token",
    "length": "truncated",
    "stop": "completed",
}


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
        >>> suggest("loo", ["mean", "leave_one_out"])
        " (did you mean 'leave_one_out'?)"
    """
    known = list(words)
    same = SYNONYMS.get(word)
    close = [same] if same in known else difflib.get_close_matches(word, known, n=most, cutoff=least)
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
