"""Groups that were made from prompts. Their label is a hash, so messages call them by the prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tensordict import TensorDictBase

from headrace.pipeline.conversations import strings
from headrace.pipeline.user_turn import asked_line
from headrace.transforms import BatchError

MADE = re.compile(r"prompt/[0-9a-f]{32}(?:/(\d+))?")  # as `Reading.group_of_prompt` makes it, and its draws


def group_called(label: str, prompt: str | None, place: str) -> str:
    """A group as sentences call it: by its label, or if this was made from a prompt, by the prompt.

    Args:
        label: of the group, as text.
        prompt: the text of the prompt; None or empty: it is not known.
        place: of a row of the group, for a prompt without a text.

    Example:
        >>> made = "prompt/bcfa1ad62952453f3229f6ebe9b0cba5"
        >>> group_called("7f3a", "2+2?", "row 4"), group_called(made, "2+2?", "row 4")
        ('7f3a', "of '2+2?'")
        >>> group_called(f"{made}/2", None, "row 4")
        'of the prompt at row 4, draw 2'
    """
    made = MADE.fullmatch(label)
    if made is None:
        return label
    asked = f"of {prompt_called(prompt, place)}"
    return f"{asked}, draw {made[1]}" if made[1] else asked


def prompt_called(prompt: str | None, place: str) -> str:
    """A prompt as sentences call it: by what the user asked last, or where it is if it has no text."""
    return repr(asked_line(prompt)) if prompt else f"the prompt at {place}"


@contextmanager
def prompts_in_errors(batch: TensorDictBase) -> Iterator[None]:
    """In errors raised inside, call the groups of a batch that were made from prompts by the prompts."""
    try:
        yield
    except BatchError as err:
        if "group_label" in batch.keys():
            size = len(batch)
            labels = strings(batch["group_label"], size) or []
            prompts = strings(batch["prompt_text"], size) if "prompt_text" in batch.keys() else None
            rows = {label: row for row, label in reversed([*enumerate(labels)])}
            texts = {label: text for label, text in zip(labels, prompts or [], strict=False) if text}
            for number, said in err.labels.items():
                label = said[1:-1]  # without its quotes
                if MADE.fullmatch(label) and label in rows:
                    err.labels[number] = group_called(label, texts.get(label), f"row {rows[label]}")
        raise
