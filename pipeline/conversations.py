"""Columns of text: prompts, responses, labels of ids, and conversations as ``role: content`` lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.transforms.table.tensordicts import listed

__all__ = ["labels_of_ids", "message_lines", "strings"]


def message_lines(messages: Any) -> str | None:
    r"""Return the text of a conversation; None if the value is not a conversation.

    A single message of the assistant is returned as its content alone.

    Args:
        messages: a list of messages with ``role`` and ``content``, or TorchRL's ``History`` of one row.

    Example:
        >>> message_lines([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
        'user: 2+2?\nassistant: 4'
    """
    if isinstance(messages, list | tuple):
        if not messages or not all(isinstance(each, Mapping) and "role" in each for each in messages):
            return None
        pairs = [(each["role"], each.get("content")) for each in messages]
    elif getattr(messages, "batch_dims", None) == 1 and hasattr(messages, "role"):  # a History
        pairs = list(zip(listed(messages.role), listed(messages.content), strict=True))
    else:
        return None
    if [role for role, _ in pairs] == ["assistant"]:
        return _content(pairs[0][1])
    return "\n".join(f"{role}: {_content(content)}" for role, content in pairs)


def _content(content: Any) -> str:
    """The text of a message, or the joined texts of its parts; empty for a message without text."""
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def strings(texts: Any, rows: int) -> Sequence[str] | None:
    """Return a column of texts or conversations as strings; None if it is not one."""
    values = [texts[row] for row in range(len(texts))] if hasattr(texts, "role") else listed(texts)
    flat = [_string(value) for value in values]
    return flat if len(flat) == rows and None not in flat else None  # type: ignore[return-value]


def _string(value: Any) -> str | None:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    return value if isinstance(value, str) else message_lines(value)


def labels_of_ids(texts: Any, ids: Sequence[int]) -> Sequence[str] | None:
    """Return N labels of N ids; None if they are no texts, equal the ids, or are not one for each id.

    Example:
        >>> labels_of_ids(["a", "b", "a"], [5, 7, 5]), labels_of_ids(["5", "7"], [5, 7])
        (['a', 'b', 'a'], None)
    """
    labels = strings(texts, len(ids))
    pairs = set(zip(ids, labels or (), strict=False))
    one_each = len({number for number, _ in pairs}) == len(pairs) == len({label for _, label in pairs})
    return labels if one_each and any(str(number) != label for number, label in pairs) else None
