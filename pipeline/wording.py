"""Text for people: printable text, suggestions for a misspelled word, and formatted counts."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Sequence

__all__ = [
    "beginning",
    "closest",
    "printable",
    "shown_count",
    "shown_loss",
    "shown_range",
    "shown_reason",
    "suggest",
]


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
    # Reasons for which vLLM, SGLang, OpenAI, Anthropic and transformers stop.
    **dict.fromkeys(["stop", "eos", "eos_token", "stop_sequence", "end_turn"], "completed"),
    **dict.fromkeys(["tool_calls", "tool_use", "finished", "done"], "completed"),
    **dict.fromkeys(["length", "max_tokens", "max_length"], "truncated"),
    **dict.fromkeys(["abort", "cancelled"], "aborted"),
    "error": "failed",
}


def closest(word: str, words: Iterable[str], most: int = 2, least: float = 0.5) -> list[str]:
    """The words that are probably meant, best first; the arguments are those of :func:`suggest`.

    Case, dashes and underscores make no difference: ``Dr-GRPO`` is ``dr_grpo``, and nothing else. A plus is
    a p: ``REINFORCE++`` is ``reinforce_pp``.
    """
    known = list(words)
    folded = {_folded(each): each for each in known}
    for same in (SYNONYMS.get(word), folded.get(_folded(word))):
        if same in known and same is not None:
            return [same]
    close = difflib.get_close_matches(word, known, n=9, cutoff=least)
    if not close:
        close = [folded[each] for each in difflib.get_close_matches(_folded(word), folded, n=9, cutoff=least)]
    return sorted(close, key=lambda each: sorted(each) != sorted(word))[:most]  # swapped letters first


def _folded(word: str) -> str:
    return re.sub(r"[-_ .]", "", word).replace("+", "p").lower()


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
        >>> suggest("gpro", ["mgpo", "gtpo", "grpo"], most=1)
        " (did you mean 'grpo'?)"
        >>> suggest("Dr-GRPO", ["grpo", "dr_grpo"])
        " (did you mean 'dr_grpo'?)"
        >>> suggest("loo", ["mean", "leave_one_out"])
        " (did you mean 'leave_one_out'?)"
    """
    close = closest(word, words, most, least)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def shown_count(count: float | None) -> str:
    """Format a count; an empty string for None.

    Example:
        >>> shown_count(1234), shown_count(None)
        ('1,234', '')
    """
    return "" if count is None else f"{count:,.0f}"


def shown_loss(count: float | None) -> str:
    """Format a count of what left as a negative number, or as 0.

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
    """Format the two ends of a range; as one number if its ends are equal.

    Example:
        >>> shown_range((0.9999999, 1.0000001)), shown_range((0.64, 2.2857))
        ('1', '0.64 to 2.29')
    """
    low, high = (f"{round(bound, 4):.3g}" for bound in bounds)
    return low if low == high else f"{low} to {high}"
