"""Send the decisions of the first rank to the ranks that hold the rows."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.transforms.schema import ROW

# The attributes of a table that are sent, besides its metrics. Each rank has its batch already.
DECIDED = (
    *("columns", "written", "dtypes", "names", "effects", "reason", "here", "in_loss", "counted"),
    *("masks_rows", "masked_columns", "says_who_counts"),
)


def hand_out(table: Any, more: Any = None, of_ranks: Sequence[Any] | None = None) -> tuple[Any, Any]:
    """Send each rank the decisions about its rows, if the first rank decides: a barrier and two collectives.

    All ranks must call it. Columns that a rank has already are not sent again.

    Args:
        table: on the first rank, of the rows of all ranks; on the others, of their own, changed in place.
        more: on the first rank, a picklable object whose tensors are (N, ...) by row of the table.
        of_ranks: on the first rank, a further object for each rank.

    Returns:
        `more` with the rows of this rank, and the further object of this rank.
    """
    ranks, messages = table.ranks, None
    if ranks is None or not ranks.one_decides:
        return more, None
    ranks.place = "what rank 0 decides"
    if ranks.decides:
        decided = {name: getattr(table, name) for name in DECIDED}
        decided["compared"] = table.compared and partial(_known, table.compared(table.size))
        written = _Pickled(table.told | {ROW: table.columns[ROW]}, (decided, more))
        messages = []
        for rank, own in enumerate(of_ranks or [None] * ranks.size):
            columns = [table.part_of_rank(column, rank).numpy() for column in written.columns]
            messages.append(
                (written.text, columns, table.metrics | table.metrics_of_others.get(rank, {}), own)
            )
    text, columns, metrics, own = ranks.scatter_objects(messages)
    if ranks.decides:
        table.told = dict(table.columns)
        return more, own
    decided, more = _Read(text, table.columns, list(map(torch.from_numpy, columns))).load()
    for name, value in decided.items():
        setattr(table, name, value)
    table.metrics = metrics
    table.index = None if bool(table.here.all()) else table.here.nonzero().flatten()
    return more, own


def _known(column: Tensor, size: int) -> Tensor:
    return column


class _Pickled(pickle.Pickler):
    """Pickles an object without its tensors: known ones by key, others by their number in `columns`."""

    def __init__(self, known: Mapping[Any, Tensor], value: Any):
        file = io.BytesIO()
        super().__init__(file)
        self.columns: list[Tensor] = []
        self._known: dict[int, tuple[Any, int | None]]
        self._known = {id(column): (key, None) for key, column in known.items()}
        self.dump(value)
        self.text = file.getvalue()

    def persistent_id(self, value: Any) -> tuple[Any, int | None] | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._known:
            self._known[id(value)] = None, len(self.columns)
            self.columns.append(value)
        return self._known[id(value)]


class _Read(pickle.Unpickler):
    def __init__(self, text: bytes, known: Mapping[Any, Tensor], columns: Sequence[Tensor]):
        super().__init__(io.BytesIO(text))
        self._known, self._columns = known, columns

    def persistent_load(self, place: tuple[Any, int | None]) -> Tensor:
        key, number = place
        return self._known[key] if number is None else self._columns[number]
