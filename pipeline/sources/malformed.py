"""Errors in a dump: the exception, the count of skipped records, and values shortened for messages."""

from __future__ import annotations

import reprlib
from typing import Any

MESSAGES_KEPT = 8

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_short.maxlevel = 2
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 4


class SourceError(ValueError):
    """A dump that does not follow its format. The message begins with the file and the place in it."""


class Skipped:
    """Counts records that were malformed, and keeps the first few messages.

    Args:
        allowed: True skips a malformed record, False raises for it.

    Example:
        >>> skipped = Skipped(allowed=True)
        >>> skipped.note(SourceError("a.jsonl:3: no reward"))
        >>> skipped.count, skipped.messages
        (1, ['a.jsonl:3: no reward'])
    """

    def __init__(self, *, allowed: bool):
        self.allowed = allowed
        self.count = 0
        self.messages: list[str] = []

    def note(self, error: SourceError) -> None:
        """Count an error, or raise it.

        Raises:
            SourceError: nothing may be skipped.
        """
        if not self.allowed:
            raise error
        self.count += 1
        if len(self.messages) < MESSAGES_KEPT:
            self.messages.append(str(error))


def quote(value: Any) -> str:
    """A value in at most 200 characters, of whatever type and size it is: dumps may hold huge values.

    >>> quote(list(range(1000)))
    '[0, 1, 2, 3, ...]'
    """
    try:
        return _short.repr(value)[:200]
    except Exception:  # an integer of thousands of digits, or an object whose repr fails
        return f"a {type(value).__name__} that cannot be printed"


def first_line(error: Exception) -> str:
    """The first line of an error's message, in at most 200 characters; without a message, its type.

    >>> first_line(ValueError("no footer\\nat byte 12")), first_line(KeyError())
    ('no footer', 'KeyError')
    """
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
