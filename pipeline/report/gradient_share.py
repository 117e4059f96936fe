"""How much of a step's gradient each row makes, as far as its columns tell."""

from __future__ import annotations

import numpy as np

from .funnel import Columns


def gradient_share(columns: Columns) -> np.ndarray:
    """(N,) each row's share of the step's gradient, if the gradients of all tokens were equally long.

    |advantage| · loss weight · tokens over the sum of it over all rows; 0 of a row that is not trained, and
    of all rows where nothing is. A weight or a number of tokens that is not known is 1.

    Args:
        columns: (N,) by name, with `reason`.

    Example:
        >>> columns = {"reason": np.array([0, 0, 1]), "advantage": np.array([3.0, -1.0, 5.0])}
        >>> gradient_share(columns).tolist()
        [0.75, 0.25, 0.0]
    """
    rows = len(columns["reason"])
    advantage, weight = (columns.get(name, np.full(rows, np.nan)) for name in ("advantage", "loss_weight"))
    tokens = columns.get("tokens", np.ones(rows))
    size = np.abs(np.nan_to_num(advantage)) * np.where(np.isfinite(weight), weight, 1.0) * tokens
    size = np.where(columns["reason"] == 0, size, 0.0)
    return size / (size.sum() or 1.0)
