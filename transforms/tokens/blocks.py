"""Work on some rows of tokens at a time: what is computed on the way stays in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

AT_ONCE = 2**15  # tokens: 256 KiB of float64 a column


def in_blocks(
    function: Callable[..., Mapping[str, Tensor]], tokens: Tensor, *more: Tensor | None
) -> dict[str, Tensor]:
    """Run a function over some rows at a time, and join what it returns; on a device, over all at once.

    Args:
        function: of these columns → tensors by name, with as many rows, each of which follows from itself.
        tokens: (N, T).
        more: (N, ...) each; None is handed on.

    Example:
        >>> import torch
        >>> table = torch.arange(6.0).view(3, 2)
        >>> in_blocks(lambda some: {"sum": some.sum(-1)}, table)["sum"].tolist()
        [1.0, 5.0, 9.0]
    """
    columns = tokens, *more
    rows, some = len(tokens), max(AT_ONCE // max(tokens.shape[-1], 1), 1)
    if tokens.device.type != "cpu" or rows <= some:
        return dict(function(*columns))
    made: dict[str, Tensor] = {}
    for start in range(0, rows, some):
        here = slice(start, start + some)
        part = function(*(None if column is None else column[here] for column in columns))
        made = made or {name: value.new_empty(rows, *value.shape[1:]) for name, value in part.items()}
        for name, value in part.items():
            made[name][here] = value
    return made
