"""Which rows of a step the gradient comes from."""

from __future__ import annotations

import numpy as np

from .funnel import Columns


def gradient_share(columns: Columns) -> np.ndarray:
    """Each row's share of the step's gradient, as if the gradients of all tokens were equally long.

    The size of a row is what its tokens in the loss weigh, and its share that of the sum over the step::

        size_i = Σₜ |advantage_it| · loss weight_i,   share_i = size_i / Σ size

    Where all tokens of a row have one advantage, that is |advantage| · loss weight · tokens. A row that is
    not trained has none. Gradients also differ in length and may point against one another, which nobody
    knows before the backward pass: a share says where the gradient comes from, not how much of it remains.

    Args:
        columns: (N,) of a :class:`StepReport`, with `reason`, and where they are known `advantage`,
            `advantage_size` (the sum of |advantage| over the row's tokens, where it is per token),
            `trained_tokens` (in the loss of the step), else `tokens`, and `loss_weight`. Without tokens each
            row has one, without weights each weighs 1.

    Returns:
        (N,) float64 that sums to 1, or to 0 where no row trains or every advantage is 0.

    Example:
        >>> columns = {"reason": np.array([0, 0, 1]), "advantage": np.array([-1.0, 0.5, 9.0])}
        >>> gradient_share(columns | {"tokens": np.array([10, 60, 5])}).tolist()
        [0.25, 0.75, 0.0]
    """
    rows = len(columns["reason"])
    size = np.abs(row_weight(columns))
    if "advantage_size" in columns:
        of_tokens = columns["advantage_size"] * _loss_weight(columns, rows)
        size = np.where((columns["reason"] == 0) & np.isfinite(of_tokens), of_tokens, size)
    return size / (size.sum() or 1.0)


def row_weight(columns: Columns) -> np.ndarray:
    """What each row's tokens weigh in the gradient, with its sign: advantage · loss weight · tokens.

    Args:
        columns: as for :func:`gradient_share`; an `advantage` per token is its mean.

    Returns:
        (N,) float64, 0 where a row is not trained.
    """
    rows = len(columns["reason"])
    tokens = np.maximum(columns.get("trained_tokens", columns.get("tokens", np.ones(rows))), 0)
    weight = columns.get("advantage", np.zeros(rows)) * _loss_weight(columns, rows) * tokens
    return np.where((columns["reason"] == 0) & np.isfinite(weight), weight, 0.0)


def gradient_cosine(first: Columns, second: Columns) -> float:
    """The cosine between what two recipes make the same rows weigh (:func:`row_weight`).

    1: both pull at the same rows, in the same proportion; −1: in the other direction. As for the shares, the
    gradients of tokens count as equally long, and as independent of one another.

    Args:
        first: (N,) columns of a report.
        second: those of another, of the same rows.

    Returns:
        In [−1, 1]; NaN where a recipe trains nothing.

    Example:
        >>> one = {"reason": np.array([0, 0]), "advantage": np.array([1.0, -1.0])}
        >>> gradient_cosine(one, one | {"advantage": np.array([2.0, 0.0])}).__round__(4)
        0.7071
    """
    a, b = row_weight(first), row_weight(second)
    with np.errstate(invalid="ignore", divide="ignore"):
        a, b = a / np.abs(a).max(initial=0.0), b / np.abs(b).max(initial=0.0)  # so that no square is lost
        return float(np.dot(a, b) / np.sqrt(np.dot(a, a) * np.dot(b, b)))


def _loss_weight(columns: Columns, rows: int) -> np.ndarray:
    return np.nan_to_num(columns.get("loss_weight", np.ones(rows)), nan=1.0)
