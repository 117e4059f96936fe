"""Cut rows into parts, pack them for Ray's object store, and join them again."""

from __future__ import annotations

import pickle
from collections import ChainMap
from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms import GroupAssembler
from headrace.transforms.carry import from_plain, to_plain
from headrace.transforms.streams import RowPiece
from headrace.transforms.table.tensordicts import take_rows

MOST_PARTS = 16  # largest number of parts of one put
LEAST_BYTES = 2**18  # smallest size of a part; a smaller part costs the same
STORED = ("headrace", "stored")  # (N, 2) int64: the index of a row's part, and of the row in its part


def cut_by_group(rows: TensorDictBase, group: Tensor) -> tuple[list[TensorDictBase], Tensor]:
    """Cut rows into parts of whole groups: one group per part, or several if groups are many or small.

    Args:
        rows: TensorDict ``[N]``, N ≥ 1.
        group: (N,) int64, the group of each row.

    Returns:
        - At most `MOST_PARTS` parts, of about `LEAST_BYTES` or more.
        - (N, 2) int64: the index of each row's part, and of the row in its part.

    Example:
        >>> from tensordict import TensorDict
        >>> rows = TensorDict({"x": torch.arange(3 * LEAST_BYTES).view(3, -1)}, batch_size=[3])
        >>> parts, places = cut_by_group(rows, torch.tensor([5, 9, 5]))
        >>> [len(part) for part in parts], places.tolist()
        ([2, 1], [[0, 0], [1, 0], [0, 1]])
    """
    names, own = group.unique(return_inverse=True)
    count = max(1, min(len(names), MOST_PARTS, rows.bytes() // LEAST_BYTES))
    part = own * count // len(names)
    places, parts = torch.stack([part, part], 1), []
    for number in range(count):
        members = (part == number).nonzero().flatten()
        places[members, 1] = torch.arange(len(members))
        parts.append(take_rows(rows, members, on_cpu=members, shared=True))  # copies dense rows
    return parts, places


def pack_rows(rows: TensorDictBase) -> np.ndarray:
    """Pack rows into bytes, (B,) uint8, which processes pass on unchanged.

    Otherwise Ray would pickle each tensor again in each process, which takes longer than everything else.

    Example:
        >>> from tensordict import TensorDict
        >>> rows = TensorDict({"x": torch.ones(2), "name": ["a", "b"]}, batch_size=[2])
        >>> unpack_rows(pack_rows(rows))["x"].tolist()
        [1.0, 1.0]
    """
    file = BytesIO()
    _pickler()(file, protocol=5).dump(to_plain(rows))
    return np.frombuffer(file.getbuffer(), np.uint8)


def unpack_rows(packed: np.ndarray) -> Any:
    """Restore the rows of :func:`pack_rows`, in memory of their own."""
    return from_plain(pickle.loads(packed))


@cache
def _pickler() -> Any:
    from ray.cloudpickle import CloudPickler

    known = ChainMap({Tensor: _reduced}, CloudPickler.dispatch_table)
    return type("RowPickler", (CloudPickler,), {"dispatch_table": known})


def _reduced(tensor: Tensor) -> Any:
    """Pickle a tensor as bytes, if it is not empty."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.__reduce_ex__(5)
    flat = tensor.detach().cpu().reshape(-1).contiguous().resolve_conj().resolve_neg()
    return _restored, (flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))


def _restored(flat: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(flat).view(dtype).view(shape)


class StoredGroups(NamedTuple):
    """Whole groups whose M rows are in Ray's object store."""

    references: list[Any]
    """References to parts, from :func:`pack_rows`."""
    part: Tensor
    """(M,) int, the index of the part of each row."""
    row: Tensor
    """(M,) int, the index of each row in its part."""
    numbers: Mapping[NestedKey, Tensor]
    """Further columns, (M,) int each."""
    stale: Tensor | None
    """(M,) bool, True at rows to mask."""

    def join(self, parts: Sequence[Any], options: GroupAssembler) -> TensorDictBase:
        """Join the rows into a batch.

        Args:
            parts: the part that is stored under each reference.
            options: an assembler, which masks stale rows.
        """
        stored = map(unpack_rows, parts)
        pieces = [RowPiece(rows, range(len(rows))) for rows in stored]
        rows = zip(self.part.tolist(), self.row.tolist(), strict=True)
        numbers = {key: column.tolist() for key, column in self.numbers.items()}
        stale = None if self.stale is None else self.stale.tolist()
        return options._joined([(pieces[part], row) for part, row in rows], numbers, stale)
