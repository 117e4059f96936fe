"""TransferQueue without processes: its functions on dicts of this process.

Laws of queues can then be tried on thousands of calls per second. `tests/queues/test_queues.py` checks that
TransferQueue itself gives the same answers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor


class QueueHere:
    """TransferQueue's functions for keys."""

    KVBatchMeta = SimpleNamespace

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, dict[str, Any]]] = {}
        """The tag of each row, by partition and key."""
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}
        """The columns of each row, by partition and key."""

    def kv_batch_put(
        self,
        keys: list[str],
        partition_id: str,
        fields: TensorDictBase | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> None:
        known = self.tags.setdefault(partition_id, {})
        for key, tag in zip(keys, tags or [{}] * len(keys), strict=True):
            known.setdefault(key, {}).update(tag)
        for name, column in () if fields is None else fields.items():
            values = column.unbind() if isinstance(column, Tensor) else column.tolist()
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault((partition_id, key), {})[name] = value

    def kv_batch_get(
        self, keys: list[str], partition_id: str, select_fields: list[str] | None = None
    ) -> TensorDict:
        """The rows with these keys, without unknown keys, and only the columns that all of them have."""
        rows = [self.rows[partition_id, key] for key in keys if (partition_id, key) in self.rows]
        names = [name for name in rows[0] if all(name in row for row in rows)]
        names = [name for name in names if select_fields is None or name in select_fields]
        columns = {name: _column([row[name] for row in rows]) for name in names}
        return TensorDict(columns, batch_size=[len(rows)])

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        every = self.tags if partition_id is None else {partition_id: self.tags.get(partition_id, {})}
        return {name: {key: dict(tag) for key, tag in tags.items()} for name, tags in every.items()}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            del self.tags[partition_id][key]
            self.rows.pop((partition_id, key), None)


def _column(values: list[Any]) -> Any:
    """TransferQueue returns texts as a stack, and tensors as nested tensors, even if all have one width."""
    if not isinstance(values[0], Tensor):
        return NonTensorStack(*values)
    if values[0].dim() == 0:
        return torch.stack(values)
    try:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)
    except RuntimeError:  # rows that differ in more than the first dimension
        return torch.nested.as_nested_tensor(values, layout=torch.strided)
