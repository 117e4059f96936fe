"""The text of a prompt or a response, which frameworks write as a string or as chat messages."""

from __future__ import annotations

import json
from typing import Any

from .record import Record, as_text


def read_text(record: Record, key: str, *, optional: bool = False) -> str | None:
    """A string as it is; messages as lines of ``role: content``.

    Raises:
        SourceError: the value is neither.

    Example:
        >>> read_text(Record({"prompt": [{"role": "user", "content": "2+2?"}]}, "a:1"), "prompt")
        'user: 2+2?'
    """
    value = record.get(key, optional=optional)
    if value is None:
        return None
    if isinstance(value, str):
        return record.text(key)
    return "\n".join(f"{m.text('role')}: {_content(m)}" for m in record.records(key))


def read_json(record: Record, key: str) -> str | None:
    """A string as it is, any other value as JSON; None where there is none.

    Raises:
        SourceError: a string that is no valid Unicode, or a value that JSON cannot hold.

    Example:
        >>> read_json(Record({"gts": ["4"]}, "a:1"), "gts"), read_json(Record({"gts": "4"}, "a:1"), "gts")
        ('["4"]', '4')
    """
    value = record.get(key, optional=True)
    if value is None or isinstance(value, str):
        return record.text(key, optional=True)
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise record.fail(f"{key!r} must be text, or what JSON can hold", value) from None


def _content(message: Record) -> str:
    value: Any = message.get("content", optional=True)
    if value is None:  # a message that only calls a tool
        return ""
    if isinstance(value, list):
        parts = message.records("content")
        return "".join(part.text("text", optional=True) or "" for part in parts)
    content = as_text(value)
    if content is None:
        raise message.fail("'content' must be a string or a list of parts", value)
    return content
