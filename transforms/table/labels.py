"""Ids that are text become numbers. The text is kept in a label column, and errors show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NestedKey, NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from .errors import BatchError, listing
from .tensordicts import any_row_has, column_of, device_of, shallow_copy, texts_of, write_column


def number_labels(labels: Sequence[str]) -> Tensor:
    """Hash labels such as UUIDs to numbers. Equal labels get equal numbers in every batch, process and run.

    The number is the first 62 bits of BLAKE2b over the label in UTF-8. Each distinct label is hashed once.

    Args:
        labels: N strings, none of them empty.

    Returns:
        (N,) int64 ≥ 0.

    Raises:
        BatchError: a label is empty or not a string (the message lists the rows), or two labels have one
            hash.

    Example:
        >>> number_labels(["7f3a", "90cc", "7f3a"]).tolist()
        [433565767902309504, 4497001111266328251, 433565767902309504]
    """
    if odd_types := tuple(kind for kind in set(map(type, labels)) if not issubclass(kind, str)):
        odd = [
            f"{label!r:.60} at row {row}" for row, label in enumerate(labels) if isinstance(label, odd_types)
        ]
        raise BatchError(
            "labels must be one string per row; found {found}: write texts alone, or numbers alone",
            found=listing(odd),
        )
    distinct, of = _distinct(labels)
    if "" in distinct:
        empty = [str(row) for row, label in enumerate(labels) if not label]
        raise BatchError(f"every row needs a label; found empty ones at rows {listing(empty)}")
    numbers = [_hashed(label) for label in distinct]
    taken: dict[int, str] = {}
    for label, number in zip(distinct, numbers, strict=True):
        if taken.setdefault(number, label) != label:
            found = f"{taken[number]!r} and {label!r}"
            raise BatchError("the labels {found} have the same hash: rename one", found=found)
    return torch.tensor(numbers, dtype=torch.int64)[of]


def _distinct(labels: Sequence[str]) -> tuple[list[str], Tensor]:
    """The distinct labels in the order of their first rows, and (N,) int64, the index of each row's label."""
    number = {label: place for place, label in enumerate(dict.fromkeys(labels))}
    of = np.fromiter(map(number.__getitem__, labels), np.int64, len(labels))
    return list(number), torch.from_numpy(of)


def _hashed(label: str) -> int:
    digest = blake2b(label.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def as_ids(
    ids: Tensor | Sequence[int | str | None], name: str, *, device: torch.device | None = None
) -> Tensor:
    """Check ids and convert them to (N,) int64. Strings are hashed by :func:`number_labels`.

    Args:
        ids: (N,) or (N, 1) integers, as a tensor or a Python sequence; or a sequence of N strings.
        name: name of the ids in messages.
        device: device of the result for a Python sequence; a tensor stays on its device.

    Raises:
        BatchError: an id is None (the message lists the rows) or an empty string, the shape is wrong, or a
            number is not an integer of at most 63 bits.
    """
    if not isinstance(ids, Tensor):
        missing = [row for row, value in enumerate(ids) if value is None]
        if missing:
            found = f"{listing(map(str, missing))} of {len(ids)}"
            raise BatchError("every row needs a {ids}; None at rows {found}{stamped}", ids=name, found=found)
        if any(isinstance(value, str) for value in ids):
            try:
                return number_labels(ids).to(device)  # type: ignore[arg-type]  # number_labels checks the types
            except BatchError as err:
                raise BatchError("{ids}: {why}", ids=name, why=str(err)) from err
        try:
            ids = torch.tensor(ids, dtype=torch.int64 if len(ids) == 0 else None, device=device)
        except (TypeError, ValueError, RuntimeError) as err:
            message = "{ids} must be integers, at most 63 bits, or strings: {why}"
            raise BatchError(message, ids=name, why=str(err)) from err
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise BatchError(
            f"{name} must be integers, got {ids.dtype}. If these are whole numbers, convert them with "
            ".long(); ids may also be strings"
        )
    if ids.dtype is torch.uint64 and bool((ids.long() < 0).any()):
        raise BatchError(f"{name} must be integers of at most 63 bits; found {int(ids.long().min()) + 2**64}")
    if ids.ndim == 0 or ids.numel() != ids.shape[0]:
        raise BatchError(f"{name} must be one integer per row, (N,) or (N, 1); got shape {tuple(ids.shape)}")
    return ids.reshape(-1).to(torch.int64)


def number_ids(batch: TensorDictBase, keys: Sequence[NestedKey]) -> TensorDictBase:
    """Replace text ids by numbers (:func:`number_labels`), and keep the text in a label column.

    Args:
        batch: TensorDict ``[N]``, which is not modified.
        keys: keys of id columns. Columns that are numbers or missing stay as they are.

    Returns:
        The batch itself if no id is text. Else a copy with (N,) int64 under these keys, and the text under
        ``group_label`` for ``group_id``, unless the batch has that column already.

    Raises:
        BatchError: an id is neither a number nor a string, or is empty.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = number_ids(TensorDict({"group_id": ["a", "b", "a"]}, batch_size=[3]), ["group_id"])
        >>> batch["group_id"].unique().shape, list(batch["group_label"])
        (torch.Size([2]), ['a', 'b', 'a'])
    """
    numbered = batch
    for key in keys:
        if (labels := labels_of(batch, key)) is None:
            continue
        if numbered is batch:
            numbered = shallow_copy(batch)
        if not any_row_has(batch, label_key(key)):
            write_column(numbered, label_key(key), column_of(batch, key))
        write_column(numbered, key, as_ids(labels, last_of(key), device=device_of(batch)))
    return numbered


def label_key(key: NestedKey) -> NestedKey:
    """The key of the label column of an id column: ``group_label`` for ``group_id``."""
    name = f"{last_of(key).removesuffix('_id')}_label"
    return name if isinstance(key, str) else (*key[:-1], name)


def labels_in_errors(batch: TensorDictBase, keys: Sequence[NestedKey]) -> AbstractContextManager[None]:
    """In errors raised inside, replace the numbers of ids by the labels of the batch, if it has labels."""
    return labels_said(
        lambda: [labels_of(batch, key) or labels_of(batch, label_key(key)) or [] for key in keys]
    )


@contextmanager
def labels_said(known: Callable[[], Iterable[Sequence[Any]]]) -> Iterator[None]:
    """In errors raised inside, replace the numbers of ids by the `known` labels."""
    try:
        yield
    except BatchError as err:
        names: dict[str, str] = {}
        with suppress(BatchError):  # invalid labels are the error that is being raised
            for labels in known():
                numbers = as_ids(labels, "id").tolist()
                names |= {str(n): repr(label) for n, label in zip(numbers, labels, strict=True)}
        err.labels |= names
        raise


def labels_of(batch: TensorDictBase, key: NestedKey) -> list[Any] | None:
    """The labels of an id column, one per row; None if the column is a tensor or missing, or has no rows."""
    if not isinstance(batch, TensorDictBase) or not batch.shape.numel():
        return None
    if batch.batch_dims > 1:
        batch = batch.reshape(-1)
    first = batch.tensordicts[0] if isinstance(batch, LazyStackedTensorDict) else batch
    if not isinstance(column_of(first, key), NonTensorData | NonTensorStack):
        return None
    return texts_of(column_of(batch, key))


def last_of(key: NestedKey) -> str:
    """The last name of a key, which names its column in messages."""
    return key if isinstance(key, str) else str(key[-1])
