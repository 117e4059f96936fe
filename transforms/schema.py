"""The columns of a batch: what stages write for one another, and how columns are read.

====================================== ================= ===============================================
column                                  shape, dtype      meaning
====================================== ================= ===============================================
``("headrace", "reward")``              (N,) float        the rollout's one reward, on each of its rows;
                                                          NaN where it has none
``("headrace", "rewards")``             (N, K) float      what that was added up from, where there are several
``("headrace", "is_first_segment")``    (N,) bool         one row of each rollout, its first
``("headrace", "return")``              (N,) float        the return from this segment on
``("headrace", "finished")``            (N,) bool         True: the gate has seen the rollout's end
``("headrace", "counted")``             (N,) bool         False: out of the statistics; absent: all are in
``("headrace", "in_loss")``             (N,) bool         False: out of the loss; absent: all are in
``("headrace", "length")``              (N,) int64        tokens that a row had in the loss mask until it was
                                                          masked; −1: no filter masked it
``("headrace", "segments")``            (N,) int64        rows that the row's rollout had before a stage alone
                                                          dropped some of them; absent: none did
``("headrace", "minibatch")``           (N,) int64        which optimiser step of the batch, from 0; −1: none
``("headrace", "microbatch")``          (N,) int64        which forward and backward of the step, from 0
``("headrace", "rank")``                (N,) int64        which data-parallel rank trains it; absent: one
``("headrace", "step_weight")``         (N,) float64      what weight × tokens adds up to over the row's step
``("headrace", "token_weight")``        (N, T) float      by what the row's weight is multiplied at a token in
                                                          the loss, of mean 1; absent: 1
``("headrace", "folded_weight")``       (N,) float        the row's weight, where the advantage has it as a
                                                          factor already
``("headrace", "padding")``             (N,) bool         a copy that trains nothing; absent: no row is
``("headrace", "row")``                 (N,) int64        row number as the pipeline got it
``("headrace", "processed")``           (N,) bool         a pipeline has been over this row
``("headrace", "elsewhere")``           (N,) int64, or    the tokens of the batch are elsewhere, under this
                                        (N, 3)            number of the row; in TransferQueue under these, its
                                                          producer, number and kind; absent: they are here
``("headrace", "dispatched")``          (N,) int64        rollouts that were asked for in the row's group
``("headrace", "origin")``              (N, 5) int32      the row's number in its rollout; its worker, and how
                                                          many there are; its environment there, and how many
``("headrace", "masks")``               no tensor         columns of tokens elsewhere in which rows out of the
                                                          loss are masked
====================================== ================= ===============================================

Example:
    >>> from headrace.transforms import ShuffleSplit, schema
    >>> from tensordict import TensorDict
    >>> batch = ShuffleSplit(minibatches=2, unit="sample")(TensorDict({"x": [1, 2, 3, 4]}, batch_size=[4]))
    >>> batch[schema.MINIBATCH].tolist()
    [0, 0, 1, 1]
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Literal, NamedTuple, get_args

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from .errors import BatchError, MissingKeyError, who_stamps
from .options import one_of
from .tensordicts import any_row_has, entries_of

REWARD = ("headrace", "reward")
REWARDS = ("headrace", "rewards")
IS_FIRST_SEGMENT = ("headrace", "is_first_segment")
RETURN = ("headrace", "return")
FINISHED = ("headrace", "finished")
COUNTED = ("headrace", "counted")
IN_LOSS = ("headrace", "in_loss")
SEGMENTS = ("headrace", "segments")
LENGTH = ("headrace", "length")
MINIBATCH = ("headrace", "minibatch")
MICROBATCH = ("headrace", "microbatch")
RANK = ("headrace", "rank")
STEP_WEIGHT = ("headrace", "step_weight")
TOKEN_WEIGHT = ("headrace", "token_weight")
FOLDED_WEIGHT = ("headrace", "folded_weight")
PADDING = ("headrace", "padding")
ROW = ("headrace", "row")
PROCESSED = ("headrace", "processed")
DISPATCHED = ("headrace", "dispatched")
ORIGIN = ("headrace", "origin")
MASKS = ("headrace", "masks")

STATUS_KEYS = (("next", "status"), "status")  # where a status is, in the order of looking
DONE = ("next", "done")  # True where a rollout ends, as TorchRL's collectors write it
COLLECTED = ("collector", "mask")  # False where TorchRL's collectors filled up what they yield
INIT = "is_init"  # True where a rollout begins, as TorchRL's InitTracker writes it
EXPECTED_SEGMENTS = "expected_segments"  # how many segments of the row's rollout end, each by itself

FLOAT = torch.float32  # of a new column of floats: torch's global default changes no number


class Origin(NamedTuple):
    """Where a row comes from: the columns of :data:`ORIGIN`, in their order."""

    number: int
    """Of the row in its rollout, from 0."""
    worker: int
    workers: int
    environment: int
    environments: int


Unit = Literal["sample", "rollout", "group"]


class Status(IntEnum):
    """How a rollout ended: the values of the ``status`` column, (N,) int.

    A truncated rollout has a reward and counts as present. A failed or aborted one has no reward that means
    anything, and does not count.
    """

    COMPLETED = 0
    TRUNCATED = 1
    ABORTED = 2
    FAILED = 3


# -- reading columns --------------------------------------------------------------------------------


def has_key(batch: TensorDictBase, key: NestedKey | None) -> bool:
    """Whether the batch has this column, dense or ragged; None is no column.

    Raises:
        BatchError: some rows of a lazy stack have it and some have not.
    """
    if key is None:
        return False
    if isinstance(batch, LazyStackedTensorDict):
        return entries_of(batch, key) is not None
    return any_row_has(batch, key)


def key_names(batch: TensorDictBase) -> list[NestedKey]:
    """The leaves of a batch, in a stable order, without those that transforms wrote for one another."""
    keys = batch.keys(include_nested=True, leaves_only=True)
    return sorted((k for k in keys if not (isinstance(k, tuple) and k[0] == "headrace")), key=str)


def require(batch: TensorDictBase, key: NestedKey, *, reader: str, option: str) -> Any:
    """What is under a key.

    Raises:
        MissingKeyError: nothing; the message lists the keys that are there and the option that renames it.
    """
    value = batch.get(key, None) if has_key(batch, key) else None
    if value is None:
        raise MissingKeyError(
            f"{reader} needs the key {key!r} ({option}); the batch has {key_names(batch)}. "
            f"If it goes by another name, set {option}{who_stamps(option)}"
        )
    return value


def read_column(batch: TensorDictBase, key: NestedKey, *, reader: str, option: str) -> Tensor:
    """Read one number a row: (N,), (N, 1) or (N, 1, 1) comes back as (N,).

    Raises:
        MissingKeyError: the column is not there.
        BatchError: it holds more than one number a row.
    """
    value = require(batch, key, reader=reader, option=option)
    if not isinstance(value, Tensor) or value.numel() != len(batch):
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        labels = "" if isinstance(value, Tensor) else ". headrace.transforms.number_labels makes them numbers"
        raise BatchError(
            f"{reader} needs one number a row in {key!r} ({option}), for {len(batch)} rows; found "
            f"{found}{labels}"
        )
    return value if value.ndim == 1 else value.reshape(-1)


def read_written(batch: TensorDictBase, key: NestedKey, *, reader: str, writer: str) -> Tensor:
    """Read a column (N,) that an earlier stage writes.

    Raises:
        MissingKeyError: it did not.
        BatchError: it holds more than one number a row.
    """
    if not has_key(batch, key):
        raise MissingKeyError(
            f"{reader} needs the column {key!r}, written by {writer}: put {writer} before it"
        )
    return read_column(batch, key, reader=reader, option=f"written by {writer}")


def unit_keys(
    unit: str, rollout_key: NestedKey | None, group_key: NestedKey | None
) -> list[NestedKey | None]:
    """The columns that say which rows are one unit; None where each row is one.

    Raises:
        ValueError: `unit` is none.
    """
    keys = {"sample": [], "rollout": [rollout_key], "group": [group_key]}
    return keys[one_of("unit", unit, get_args(Unit))]
