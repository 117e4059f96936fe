"""The words that are probably meant by a misspelt one, or by one of another library."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = ["OPTIONS", "closest", "suggest"]

# Options as other libraries call them.
OPTIONS = {
    "per": "unit",
    **dict.fromkeys(["buffer", "overlong_buffer", "overlong_cache"], "cache"),
    **dict.fromkeys(["norm", "normalize", "norm_adv_by_std_in_grpo", "scale_rewards"], "scale"),
    **dict.fromkeys(["num_generations", "expected_rollouts"], "group_size"),
}
SYNONYMS = {  # these, and values
    **OPTIONS,
    "loo": "leave_one_out",
    "std": "group",
    "sequence": "sample",
    "seq-mean-token-mean": "sample",
    "token-mean": "token",
    **dict.fromkeys(["average", "avg"], "mean"),
    "False": "none",
    **dict.fromkeys(["tokens", "token_ids", "completion_ids"], "length"),
    # Reasons for which vLLM, SGLang, OpenAI, Anthropic and transformers stop.
    **dict.fromkeys(["stop", "eos", "eos_token", "stop_sequence", "end_turn"], "completed"),
    **dict.fromkeys(["tool_calls", "tool_use", "finished", "done"], "completed"),
    **dict.fromkeys(["length", "max_tokens", "max_length"], "truncated"),
    **dict.fromkeys(["abort", "cancelled"], "aborted"),
    "error": "failed",
}


def closest(word: str, words: Iterable[str], most: int = 2, least: float = 0.6) -> list[str]:
    """The words that are probably meant, best first; the arguments are those of :func:`suggest`.

    Case, dashes and underscores make no difference: ``Dr-GRPO`` is ``dr_grpo``, and nothing else. A plus is
    a p: ``REINFORCE++`` is ``reinforce_pp``. A part of a longer word is that word: ``FanOut`` is
    ``FanOutCollapse``.
    """
    known = sorted(words, key=lambda each: each[:1].isupper() == word[:1].isupper())  # a class for a class
    folded = {_folded(each): each for each in known}
    for same in (SYNONYMS.get(word), folded.get(_folded(word))):
        if same in known and same is not None:
            return [same]
    short = _folded(word)
    close = sorted((folded[each] for each in folded if short in each and len(short) > 3), key=len)
    close = close or difflib.get_close_matches(word, known, n=9, cutoff=least)
    if not close:
        close = [folded[each] for each in difflib.get_close_matches(short, folded, n=9, cutoff=least)]
    # Swapped letters first, then the beginning of a longer word, such as eps of epsilon.
    return sorted(close, key=lambda each: (sorted(each) != sorted(word), not word.startswith(each)))[:most]


def _folded(word: str) -> str:
    return re.sub(r"[-_ .]", "", word).replace("+", "p").lower()


def suggest(word: str, words: Iterable[str], most: int = 2, least: float = 0.6) -> str:
    """Return close matches as the end of a sentence; an empty string if there are none.

    Args:
        word: as it was typed.
        words: the known words.
        most: largest number of matches.
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
