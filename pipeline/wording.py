"""Text for people: printable text, suggestions for a misspelled word, and formatted counts."""

from __future__ import annotations

import difflib
import re
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


def in_words_to_type(text: str) -> str:
    """What a stage says to set, as the word to type.

    Example:
        >>> in_words_to_type("stage 'gate', CompletenessGate(): group 7 has 3 of 8: set on_incomplete='drop'")
        "stage 'gate', CompletenessGate(): group 7 has 3 of 8: set pipeline.stages.gate.on_incomplete=drop"
    """
    stage = re.search(r"stage '(\w+)', ", text)
    if stage is None:
        return text

    def word(found: re.Match[str]) -> str:
        value = "null" if found[3] == "None" else found[3]
        return f"{found[1]}pipeline.stages.{stage[1]}.{found[2]}={value}"

    text = re.sub(r" \(in Python [^)]*\)|, for infinity \w+\(.*?\) before the collapse", "", text)
    text = re.sub(r"\b([Ss]et (?:[a-z ]+: )?)(\w+)=['\"]?(\w+)['\"]?", word, text)
    return re.sub(r"\b([Ss]et) (group_size)\b", rf"\1 pipeline.stages.{stage[1]}.\2", text)


def word_to_set(text: str) -> str | None:
    """The first word that an error of a stage says to type; None: it names none.

    Example:
        >>> word_to_set("stage 'gate', CompletenessGate(): group 7 has 3 of 8: set on_incomplete='drop'")
        'pipeline.stages.gate.on_incomplete=drop'
        >>> mask = "mask them: for NaN pipeline.stages.collapse.missing=mask (in Python missing='mask')"
        >>> said = f"stage 'collapse', FanOutCollapse(): found nan at row 0. Score them, or {mask}"
        >>> word_to_set(said), in_words_to_type(said).endswith("=mask")
        ('pipeline.stages.collapse.missing=mask', True)
    """
    found = re.search(
        r"\b(?:[Ss]et (?:[a-z ]+: )?|for NaN )(pipeline\.stages\.[\w.]+=\w+)", in_words_to_type(text)
    )
    return found and found[1]
