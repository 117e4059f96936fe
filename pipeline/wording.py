"""What is said to people: text that may be shown, the words nearest to another, and counts."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable


def printable(text: str, *, keep: str = "") -> str:
    r"""The text with escapes such as ``\x1b`` for characters that are not printed but obeyed.

    Those are control characters, which move the cursor or ring a bell; marks of direction, which turn what
    follows around; ends of lines; and halves of surrogate pairs, which no encoding can hold.

    Args:
        text: of whatever origin.
        keep: characters that stay as they are.

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


def suggest(word: str, words: Iterable[str]) -> str:
    """Close matches, as the end of a sentence; nothing if there are none.

    Example:
        >>> suggest("gprpo", ["grpo", "dapo"])
        " (did you mean 'grpo'?)"
    """
    close = difflib.get_close_matches(word, list(words), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def count_words(count: float | None) -> str:
    """A count; nothing where it is not known.

    Example:
        >>> count_words(1234), count_words(None)
        ('1,234', '')
    """
    return "" if count is None else f"{count:,.0f}"


def minus_words(count: float | None) -> str:
    """A count of what left; a plain 0 where nothing did.

    Example:
        >>> minus_words(1234), minus_words(0)
        ('−1,234', '0')
    """
    return f"−{count_words(count)}" if count else count_words(count)


def reason_words(stage: str, reason: str) -> str:
    """Where and why something left.

    Example:
        >>> reason_words("filter", "zero_variance")
        'filter: zero variance'
    """
    return f"{stage}: {reason.replace('_', ' ')}"
