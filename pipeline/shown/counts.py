"""Counts of rows, rollouts or groups, and why some left, as tables show them."""

from __future__ import annotations


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
