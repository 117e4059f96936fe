"""Rows of several batches in one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase, is_leaf_nontensor

from .errors import BatchError


def join_rows(batches: Sequence[TensorDictBase], what: str) -> TensorDictBase:
    """Put the rows of batches one after the other; lazy stacks make a lazy stack.

    Args:
        batches: TensorDicts ``[n_k]``, with the same columns.
        what: what the message calls them.

    Raises:
        BatchError: they differ in columns, or in the widths of dense ones.

    Example:
        >>> from tensordict import TensorDict
        >>> parts = [TensorDict({"x": torch.ones(n)}, batch_size=[n]) for n in (2, 1)]
        >>> join_rows(parts, "parts").shape
        torch.Size([3])
    """
    first, *others = (
        set(batch.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)) for batch in batches
    )
    for other in others:
        if odd := sorted(map(str, first ^ other)):
            raise BatchError(f"{what} must have the same columns; only some have {', '.join(odd)}")
    try:
        return torch.cat(list(batches), 0)
    except RuntimeError as err:
        raise BatchError(
            f"{what} must have columns of the same width; pad them to one, or keep ragged rows in a lazy "
            f"stack: {err}"
        ) from err
