"""A conversation as text: lines of ``role: content``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.transforms.rows import listed


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
