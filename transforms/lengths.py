"""How long a rollout is: the tokens in the loss of all its segments."""

from __future__ import annotations

from tensordict import TensorDictBase
from torch import Tensor

from .criteria import count_tokens
from .ids import sum_by


def rollout_lengths(batch: TensorDictBase, mask_key, first: Tensor, *, reader: str) -> Tensor:
    """(N,) int64, per row, the tokens in the loss over all rows of its rollout.

    Args:
        batch: TensorDict ``[N]``.
        mask_key: (N, T) bool, dense or ragged.
        first: (N,) int64, the first row of each row's rollout.
        reader: who asks, for the message where the mask is missing.
    """
    return sum_by(first, count_tokens(batch, mask_key, reader=reader))
