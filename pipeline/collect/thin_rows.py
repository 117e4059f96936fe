"""Rows without their tokens: the few columns by which assembler and pipeline decide, as bytes and as rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from headrace.transforms import GroupAssembler
from headrace.transforms.assembler.pieces import narrowed
from headrace.transforms.schema import EXPECTED_SEGMENTS, INIT, ORIGIN, STATUS_KEYS
from headrace.transforms.table import AHEAD, TokenCount
from headrace.transforms.tensordicts import number_column, write_column

ASSEMBLED = (INIT, EXPECTED_SEGMENTS, ORIGIN, *STATUS_KEYS)
"""Columns that an assembler reads if they are there, under names that nobody changes."""


class ColumnsRead(NamedTuple):
    """What is read of rows before anything is decided."""

    keys: list[NestedKey]
    """Columns of a few numbers a row, as far as they are there."""
    counts: list[TokenCount]
    """Of tokens."""
    ids: list[NestedKey]
    """Columns of ids."""

    @classmethod
    def of(cls, who: Iterable[Any]) -> ColumnsRead:
        """What assemblers and pipelines read.

        Raises:
            TypeError: it is neither.
        """
        keys: list[Any] = []
        counts: list[TokenCount] = []
        ids: list[Any] = []
        for each in who:
            if isinstance(each, GroupAssembler):
                keys += [key for name, key in each._options.items() if name.endswith("_key")]
                keys += ASSEMBLED
                ids += [each.group_key, each.rollout_key]
            elif hasattr(each, "asked"):
                keys += [*each.asked.columns, each._keys.weight]
                counts += each.asked.counts
                ids += each.asked.ids
            else:
                raise TypeError(f"assemblers and pipelines decide; got {type(each).__name__}")
        keys, ids = ([key for key in dict.fromkeys(some) if key is not None] for some in (keys, ids))
        return cls(keys, list(dict.fromkeys(counts)), ids)

    def thin(self, rows: TensorDictBase) -> TensorDict:
        """These columns of rows, in a dense TensorDict ``[N]``.

        Args:
            rows: TensorDict ``[N]``, dense or a lazy stack. Columns of more than a few numbers a row, and of
                text, are left out.
        """
        thin = TensorDict({}, batch_size=[len(rows)])
        for key in self.keys:
            column = number_column(rows, key, raw=True)
            if isinstance(column, Tensor) and column.numel() <= AHEAD * len(rows):
                write_column(thin, key, column.detach().cpu())
        for count in self.counts:
            inside = count.of(rows)
            if inside[0] is not None:
                write_column(thin, count.key, torch.stack(inside, 1).cpu())
        return thin


def pack_thin(rows: TensorDictBase) -> list[list[Any]]:
    """Columns of numbers as names and bytes, integers with as few bits as hold them.

    Args:
        rows: TensorDict ``[N]``, N ≥ 1, dense.

    Example:
        >>> rows = TensorDict({"group_id": torch.tensor([4, 4]), "x": torch.ones(2, 1)}, batch_size=[2])
        >>> packed = pack_thin(rows)
        >>> sum(len(column[-1]) for column in packed), unpack_thin(packed)["group_id"].tolist()
        (10, [4, 4])
    """
    packed = []
    for key in rows.keys(include_nested=True, leaves_only=True):
        column = rows.get(key)
        kind, array = str(column.dtype).removeprefix("torch."), column.detach().cpu().contiguous()
        if array.dtype in (torch.float16, torch.bfloat16):
            array = array.float()
        elif not array.is_floating_point() and array.dtype is not torch.bool and array.numel():
            array = narrowed(array)
        letters = array.numpy()
        path = [key] if isinstance(key, str) else list(key)
        packed.append([path, kind, list(column.shape), letters.dtype.char, letters.tobytes()])
    return packed


def unpack_thin(packed: Iterable[Any]) -> TensorDict:
    """The rows of :func:`pack_thin`."""
    columns: Mapping[Any, Tensor] = {
        tuple(path): torch.from_numpy(np.frombuffer(bytearray(letters), char))
        .to(getattr(torch, kind))
        .view(shape)
        for path, kind, shape, char, letters in packed
    }
    rows = TensorDict({}, batch_size=[len(next(iter(columns.values())))])
    for path, column in columns.items():
        write_column(rows, path if len(path) > 1 else path[0], column)
    return rows
