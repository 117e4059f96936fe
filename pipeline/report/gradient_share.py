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
        columns: (N,) of a :class:`StepReport`, with `reason`; `advantage_size`, the sum of |advantage| over
            the row's tokens, else `advantage` and `tokens`; `loss_weight`. Without tokens each row has one,
            without weights each weighs 1.

    Returns:
        (N,) float64 that sums to 1, or to 0 where no row trains or every advantage is 0.

    Example:
        >>> columns = {"reason": np.array([0, 0, 1]), "advantage": np.array([-1.0, 0.5, 9.0])}
        >>> gradient_share(columns | {"tokens": np.array([10, 60, 5])}).tolist()
        [0.25, 0.75, 0.0]
    """
    rows = len(columns["reason"])
    size = columns.get("advantage_size")
    if size is None:
        advantage = columns.get("advantage", np.zeros(rows))
        size = np.abs(advantage) * np.maximum(columns.get("tokens", np.ones(rows)), 0)
    size = size * np.nan_to_num(columns.get("loss_weight", np.ones(rows)), nan=1.0)
    size = np.where((columns["reason"] == 0) & np.isfinite(size), size, 0.0)
    return size / (size.sum() or 1.0)
