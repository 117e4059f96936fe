"""The prompts in an environment's rows, and where two of them differ."""

from __future__ import annotations

from typing import Any

from tensordict import NestedKey, TensorDictBase

PROMPTS: tuple[NestedKey, ...] = (
    "query",
    ("text", "prompt"),
    ("tokens", "prompt"),
    ("history", "prompt", "content"),
)
"""Where TorchRL's environments have the prompt, in the order of looking."""


def read_prompts(rows: TensorDictBase, key: NestedKey, places: list[int]) -> list[Any]:
    """The prompts of some rows, as what compares equal where they are: text, or lists of numbers or texts."""
    flat = rows.reshape(rows.shape.numel())
    found = [flat[place].get(key) for place in places]
    return [prompt.tolist() if hasattr(prompt, "tolist") else prompt for prompt in found]


def first_difference(prompt: Any, last: Any) -> str:
    """Two prompts from where they differ: they begin alike, with the system's words.

    >>> first_difference("You are kind. What is 5 + 3?", "You are kind. Who is it?")
    "'…ind. What is 5 + 3?' after '…ind. Who is it?'"
    """
    texts = [value if isinstance(value, str) else str(value) for value in (prompt, last)]
    differ = (place for place, pair in enumerate(zip(*texts, strict=False)) if len(set(pair)) > 1)
    start = max(0, next(differ, min(map(len, texts))) - 7)
    one, other = ("…" * bool(start) + text[start : start + 40] for text in texts)
    return f"{one!r} after {other!r}"
