"""Columns of text: prompts, responses, labels of ids, and conversations as lines of ``role: content``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.transforms.tensordicts import listed


def message_lines(messages: Any) -> str | None:
    r"""The text of a conversation, of one message of the assistant its content; None where there is none.

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
    """A text, or the texts among the parts of a message; of one that only calls a tool, nothing."""
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def strings(texts: Any, rows: int) -> Sequence[str] | None:
    """A column of texts or conversations as strings (:func:`message_lines`), or None where it is none."""
    values = [texts[row] for row in range(len(texts))] if hasattr(texts, "role") else listed(texts)
    flat = [_string(value) for value in values]
    return flat if len(flat) == rows and None not in flat else None  # type: ignore[return-value]


def _string(value: Any) -> str | None:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    return value if isinstance(value, str) else message_lines(value)


def labels_of_ids(texts: Any, ids: Sequence[int]) -> Sequence[str] | None:
    """N labels of N ids; None where there are none, where they are the ids, or one is of two ids.

    Example:
        >>> labels_of_ids(["a", "b", "a"], [5, 7, 5]), labels_of_ids(["5", "7"], [5, 7])
        (['a', 'b', 'a'], None)
    """
    labels = strings(texts, len(ids))
    pairs = set(zip(ids, labels or (), strict=False))
    one_each = len({number for number, _ in pairs}) == len(pairs) == len({label for _, label in pairs})
    return labels if one_each and any(str(number) != label for number, label in pairs) else None
