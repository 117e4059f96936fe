"""Select the columns without tokens that assemblers and pipelines need to decide, and pack them."""

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
from headrace.transforms.streams import narrowed
from headrace.transforms.table import AHEAD, TokenCount
from headrace.transforms.table.schema import EXPECTED_SEGMENTS, INIT, ORIGIN, STATUS_KEYS
from headrace.transforms.table.tensordicts import count_in_loss, number_column, number_of, write_column

ASSEMBLED = (INIT, EXPECTED_SEGMENTS, ORIGIN, *STATUS_KEYS)
"""Columns with fixed names that an assembler reads if they exist."""


class ColumnsRead(NamedTuple):
    """The columns that assemblers and pipelines read before they decide."""

    keys: list[NestedKey]
    """Columns with a few numbers per row; missing ones are skipped."""
    counts: list[TokenCount]
    """The token counts."""
    ids: list[NestedKey]
    """Columns of ids."""
    masked: list[NestedKey]
    """Token columns in which an assembler masks stale rows."""

    @classmethod
    def of(cls, deciders: Iterable[Any]) -> ColumnsRead:
        """Collect the columns that assemblers and pipelines read.

        Raises:
            TypeError: an object is neither an assembler nor a pipeline.
        """
        keys: list[Any] = []
        counts: list[TokenCount] = []
        ids: list[Any] = []
        masked: list[Any] = []
        for decider in deciders:
            if isinstance(decider, GroupAssembler):
                keys += [key for name, key in decider._options.items() if name.endswith("_key")]
                keys += ASSEMBLED
                ids += [decider.group_key, decider.rollout_key]
                masked += [decider.loss_mask_key, decider.log_prob_key]
            elif hasattr(decider, "asked"):
                keys += [*decider.asked.columns, decider._keys.weight]
                counts += decider.asked.counts
                ids += decider.asked.ids
            else:
                raise TypeError(
                    f"decided_by takes GroupAssemblers and pipelines; got {type(decider).__name__}"
                )
        keys, ids, masked = (
            [key for key in dict.fromkeys(found) if key is not None] for found in (keys, ids, masked)
        )
        return cls(keys, list(dict.fromkeys(counts)), ids, masked)

    def thin(self, rows: TensorDictBase) -> TensorDict:
        """Select these columns of rows, as a dense TensorDict ``[N]`` on the CPU.

        Args:
            rows: TensorDict ``[N]``, dense or a lazy stack. Text, and columns with more than AHEAD numbers
                per row, are left out.
        """
        thin = TensorDict({}, batch_size=[len(rows)])
        for key in self.keys:
            column = number_column(rows, key, raw=True)
            if isinstance(column, Tensor) and column.numel() <= AHEAD * len(rows):
                write_column(thin, key, column.detach().cpu())
        for mask in dict.fromkeys(count.mask for count in self.counts):
            log_probs = {count.log_prob for count in self.counts if count.mask == mask} - {None}
            if len(log_probs) > 1:
                continue  # stages count tokens by different log-probabilities: keep the tokens
            inside, finite = count_in_loss(rows, mask, next(iter(log_probs), None))
            if inside is not None and finite is not None:
                write_column(thin, number_of(mask), torch.stack([inside, finite], 1).cpu())
        return thin


def pack_thin(rows: TensorDictBase) -> Tensor:
    """Pack columns of numbers into (B,) uint8, compressed. Integers get the smallest dtype that holds them.

    Args:
        rows: TensorDict ``[N]``, N ≥ 1, dense.

    Example:
        >>> rows = TensorDict({"group_id": torch.tensor([4, 4]), "x": torch.ones(2, 1)}, batch_size=[2])
        >>> unpack_thin(pack_thin(rows))["group_id"].tolist()
        [4, 4]
    """
    header, data = [], []
    for key in rows.keys(include_nested=True, leaves_only=True):
        column = rows.get(key).detach().cpu()
        narrow = column
        if column.dtype in (torch.float16, torch.bfloat16):
            narrow = column.float()
        elif column.numel() and not column.is_floating_point() and column.dtype is not torch.bool:
            narrow = narrowed(column)
        array = narrow.reshape(len(rows), -1).T.numpy()  # by column, which compresses better
        dtype, path = str(column.dtype).removeprefix("torch."), [key] if isinstance(key, str) else list(key)
        header.append([path, dtype, list(column.shape[1:]), array.dtype.char, array.size])
        data.append(array.tobytes())
    head = json.dumps([len(rows), header], allow_nan=False).encode()
    packed = zlib.compress(b"".join([len(head).to_bytes(4, "big"), head, *data]), 1)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def unpack_thin(packed: Tensor) -> TensorDict:
    """Restore the rows of :func:`pack_thin`."""
    data = zlib.decompress(packed.numpy().tobytes())
    at = 4 + int.from_bytes(data[:4], "big")
    size, header = json.loads(data[4:at])
    rows = TensorDict({}, batch_size=[size])
    for path, dtype, shape, char, count in header:
        array = np.frombuffer(data, char, count, at).reshape(-1, size).T
        at += array.nbytes
        column = torch.from_numpy(array.copy()).to(getattr(torch, dtype)).view(size, *shape)
        write_column(rows, path[0] if len(path) == 1 else tuple(path), column)
    return rows
