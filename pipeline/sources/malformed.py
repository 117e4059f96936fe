"""Errors in a dump: the exception, the count of skipped records, and values shortened for messages."""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Collection
from typing import Any

import torch

from headrace.pipeline.wording import printable

MESSAGES_KEPT = 8
MAX_MESSAGE = 2000  # characters, of four bytes at most


class SourceError(ValueError):
    r"""A dump that does not follow its format. The message begins with the file and the place in it.

    Names, keys and values in it come from files: what a terminal would obey is escaped, and of a long message
    the middle is omitted. So a trace does not show the decoder's error either, for which this one is raised.

    Example:
        >>> print(SourceError("a.jsonl:3: found \x1b[2J"))
        a.jsonl:3: found \x1b[2J
    """

    def __init__(self, message: str):
        super().__init__(_cut(printable(_cut(message))))
        self.__suppress_context__ = True


def _cut(text: str) -> str:
    if len(text) <= MAX_MESSAGE:
        return text
    half = MAX_MESSAGE // 2 - 2
    return f"{text[:half]} … {text[-half:]}"


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


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a storage of its own with a number for each item, in the memory of the CPU."""
    here = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return here and not tensor.is_nested and not tensor.is_quantized


class _Short(reprlib.Repr):
    """Reprs of a few characters, made without writing out the whole value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxstring = self.maxother = self.maxlong = 60
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 4

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, torch.Tensor):
            if not is_plain(x):
                return "a tensor that is nested, sparse, quantized or not on the CPU"
            return f"a tensor {tuple(x.shape)} of {x.dtype} in {x.untyped_storage().nbytes()} bytes"
        if isinstance(x, dict):  # an OrderedDict in an OrderedDict, say
            return self.repr_dict(x, level)
        return super().repr_instance(x, level)


_short = _Short()


def quote(value: Any) -> str:
    """A value in at most 200 characters, of whatever type and size it is: dumps may hold huge values.

    >>> quote(list(range(1000)))
    '[0, 1, 2, 3, ...]'
    """
    try:
        return _short.repr(value)[:200]
    except Exception:  # an integer of thousands of digits, or an object whose repr fails
        return f"a {type(value).__name__} that cannot be printed"


def quote_some(values: Collection[Any], most: int = 8) -> str:
    """The first of many values, quoted, and how many more there are.

    >>> quote_some({"reward": 1, "step": 2}), quote_some(range(300_000), most=2)
    ("'reward', 'step'", '0, 1 and 299998 more')
    """
    more = len(values) - most
    shown = ", ".join(map(quote, itertools.islice(values, most)))
    return f"{shown} and {more} more" if more > 0 else shown


def first_line(error: Exception) -> str:
    """The first line of an error's message, in at most 200 characters; without a message, its type.

    >>> first_line(ValueError("no footer\\nat byte 12")), first_line(KeyError())
    ('no footer', 'KeyError')
    """
    lines = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip().splitlines()  # torch writes in bold
    return lines[0][:200] if lines else type(error).__name__
