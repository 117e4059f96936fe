"""Statistics over the rows that count in them."""

from __future__ import annotations

from collections.abc import Callable

from tensordict import TensorDictBase
from torch import Tensor

from .columns import COUNTED


def over_counted(batch: TensorDictBase, function: Callable[..., Tensor], **columns: Tensor) -> Tensor:
    """Run `function` on the rows that are in the statistics; the others get zeros.

    To a statistic an excluded row does not exist: its ids and rewards are neither used nor checked. Costs
    one device read where the batch has excluded rows, none where it has not.

    Args:
        batch: TensorDict ``[N]``, which may have the column ``("headrace", "counted")``.
        function: takes the columns by name, (M, ...) each, and returns (M, ...).
        columns: (N, ...) tensors.
    """
    counted = batch.get(COUNTED, None)
    if counted is None:
        return function(**columns)
    rows = counted.nonzero().squeeze(-1)
    result = function(**{name: column.index_select(0, rows) for name, column in columns.items()})
    return result.new_zeros(len(counted), *result.shape[1:]).index_copy_(0, rows, result)
