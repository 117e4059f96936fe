"""Rows without their tokens: the few columns by which assembler and pipeline decide, as bytes and as rows."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from headrace.transforms import GroupAssembler
from headrace.transforms.assembler.pieces import narrowed
from headrace.transforms.schema import EXPECTED_SEGMENTS, INIT, ORIGIN, STATUS_KEYS
from headrace.transforms.table import AHEAD, TokenCount
from headrace.transforms.tensordicts import count_in_loss, number_column, number_of, write_column

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
    masked: list[NestedKey]
    """Columns of tokens in which an assembler masks rows that are too old."""

    @classmethod
    def of(cls, who: Iterable[Any]) -> ColumnsRead:
        """What assemblers and pipelines read.

        Raises:
            TypeError: it is neither.
        """
        keys: list[Any] = []
        counts: list[TokenCount] = []
        ids: list[Any] = []
        masked: list[Any] = []
        for each in who:
            if isinstance(each, GroupAssembler):
                keys += [key for name, key in each._options.items() if name.endswith("_key")]
                keys += ASSEMBLED
                ids += [each.group_key, each.rollout_key]
                masked += [each.loss_mask_key, each.log_prob_key]
            elif hasattr(each, "asked"):
                keys += [*each.asked.columns, each._keys.weight]
                counts += each.asked.counts
                ids += each.asked.ids
            else:
                raise TypeError(f"assemblers and pipelines decide; got {type(each).__name__}")
        keys, ids, masked = (
            [key for key in dict.fromkeys(some) if key is not None] for some in (keys, ids, masked)
        )
        return cls(keys, list(dict.fromkeys(counts)), ids, masked)

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
        for mask in dict.fromkeys(count.mask for count in self.counts):
            log_probs = {count.log_prob for count in self.counts if count.mask == mask} - {None}
            if len(log_probs) > 1:
                continue  # stages count by several, of which the tokens are needed
            inside, finite = count_in_loss(rows, mask, next(iter(log_probs), None))
            if inside is not None and finite is not None:
                write_column(thin, number_of(mask), torch.stack([inside, finite], 1).cpu())
        return thin


def pack_thin(rows: TensorDictBase) -> Tensor:
    """Columns of numbers as (B,) uint8: integers with as few bits as hold them, numbers that repeat once.

    Args:
        rows: TensorDict ``[N]``, N ≥ 1, dense.

    Example:
        >>> rows = TensorDict({"group_id": torch.tensor([4, 4]), "x": torch.ones(2, 1)}, batch_size=[2])
        >>> unpack_thin(pack_thin(rows))["group_id"].tolist()
        [4, 4]
    """
    said, letters = [], []
    for key in rows.keys(include_nested=True, leaves_only=True):
        column = rows.get(key).detach().cpu()
        parts = [_packed(part) for part in column.reshape(len(rows), -1).unbind(1)]
        kind, path = str(column.dtype).removeprefix("torch."), [key] if isinstance(key, str) else list(key)
        said.append([path, kind, list(column.shape[1:]), [[a.dtype.char, len(a), len(b)] for a, b in parts]])
        letters += [array.tobytes() for part in parts for array in part]
    head = json.dumps([len(rows), said], allow_nan=False).encode()
    packed = zlib.compress(b"".join([len(head).to_bytes(4, "big"), head, *letters]), 1)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _packed(column: Tensor) -> tuple[Any, Any]:
    """The numbers of (N,), and where there are few, which of them each row has."""
    if column.dtype in (torch.float16, torch.bfloat16):
        column = column.float()
    elif not column.is_floating_point() and column.dtype is not torch.bool:
        column = narrowed(column)
    array = np.ascontiguousarray(column.numpy())
    bits = array.view(f"u{array.itemsize}")  # by which NaN is NaN, and −0 is not 0
    few, which = np.unique(bits, return_inverse=True)
    if len(few) == 1:
        return array[:1], np.empty(0, "u1")
    if len(few) <= 256 and len(few) * array.itemsize + len(array) < array.nbytes:
        return few.view(array.dtype), which.astype("u1")
    return array, np.empty(0, "u1")


def unpack_thin(packed: Tensor) -> TensorDict:
    """The rows of :func:`pack_thin`."""
    letters = zlib.decompress(packed.numpy().tobytes())
    at = 4 + int.from_bytes(letters[:4], "big")
    size, said = json.loads(letters[4:at])
    rows = TensorDict({}, batch_size=[size])
    for path, kind, shape, parts in said:
        columns = []
        for char, numbers, chosen in parts:
            values = np.frombuffer(letters, char, numbers, at)
            at += values.nbytes
            which = np.frombuffer(letters, "u1", chosen, at)
            at += chosen
            columns.append(values[which] if chosen else np.broadcast_to(values, size))
        column = np.stack(columns, 1) if columns else np.empty((size, 0), "f4")
        wide = torch.from_numpy(column).to(getattr(torch, kind)).view(size, *shape)
        write_column(rows, path[0] if len(path) == 1 else tuple(path), wide)
    return rows
