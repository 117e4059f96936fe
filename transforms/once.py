"""Within one run of a pipeline, the same question about the same columns is answered once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_answers: ContextVar[dict[Any, Any] | None] = ContextVar("headrace_answers", default=None)


@contextmanager
def asking_once() -> Iterator[None]:
    """Inside, :func:`once` remembers: while the library's own stages run, nobody else writes to columns.

    Between two batches somebody may, and no version tells: another process, or NumPy, in the same memory.
    """
    token = _answers.set({})
    try:
        yield
    finally:
        _answers.reset(token)


def once(answer: Callable[..., Tensor], *columns: Tensor) -> Tensor:
    """What a function makes of columns; in a run the last answer, if they are unchanged.

    Stages ask for the tokens or the first rows of the same columns several times, and to count tokens costs a
    good part of what it costs to gather them. Columns are not kept alive, and an answer that somebody has
    written to is none.

    Example:
        >>> asked = []
        >>> def double(column):
        ...     asked.append(column)
        ...     return 2 * column
        >>> column = torch.ones(2)
        >>> with asking_once():
        ...     answers = [once(double, column), once(double, column), once(double, column.add_(1))]
        >>> len(asked), answers[2].tolist()
        (2, [4.0, 4.0])
    """
    answers = None if torch.compiler.is_compiling() else _answers.get()
    if answers is None or torch.is_inference_mode_enabled() or any(c.is_inference() for c in columns):
        return answer(*columns)  # inference keeps no versions
    question = (answer.__name__, *map(id, columns))
    versions = [column._version for column in columns]
    if (known := answers.get(question)) is not None:
        seen, then, result = known
        same = all(there() is column for there, column in zip(seen, columns, strict=True))
        if same and then == [*versions, result._version]:
            return result
    result = answer(*columns)
    answers[question] = [weakref.ref(column) for column in columns], [*versions, result._version], result
    return result


def forget() -> None:
    """Answer anew: somebody had the columns who may write past their versions, by NumPy or ``.data``."""
    if (answers := _answers.get()) is not None:
        answers.clear()
