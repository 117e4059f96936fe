"""The names of the columns that stages write for each other, and functions that read columns.

====================================== ================= ===============================================
column                                  shape, dtype      meaning
====================================== ================= ===============================================
``("headrace", "reward")``              (N,) float        the rollout's reward, on each of its rows; NaN: the
                                                          rollout has no reward
``("headrace", "rewards")``             (N, K) float      the K rewards whose weighted sum is ``reward``;
                                                          absent: there is only one
``("headrace", "is_first_segment")``    (N,) bool         True on the first row of each rollout
``("headrace", "return")``              (N,) float        the return from this segment on
``("headrace", "finished")``            (N,) bool         True: the gate has seen the rollout's end
``("headrace", "counted")``             (N,) bool         False: excluded from the statistics; absent: no row
                                                          is
``("headrace", "in_loss")``             (N,) bool         False: masked out of the loss; absent: no row is
``("headrace", "length")``              (N,) int64        tokens that the row had in the loss mask before it
                                                          was masked; −1: no filter masked the row
``("headrace", "reason")``              N texts           in a carried row, its first reason in the ledger,
                                                          or ``trained``
``("headrace", "segments")``            (N,) int64        rows of the rollout before a standalone stage
                                                          dropped some of them; absent: no rollout lost a row
``("headrace", "minibatch")``           (N,) int64        index of the optimiser step in the batch, from 0;
                                                          −1: none
``("headrace", "microbatch")``          (N,) int64        index of the forward and backward pass in the
                                                          optimiser step, from 0
``("headrace", "rank")``                (N,) int64        data-parallel rank that trains the row; absent:
                                                          there is one rank
``("headrace", "step_weight")``         (N,) float64      sum of weight × tokens over the row's optimiser step
``("headrace", "token_weight")``        (N, T) float      factor of the row's weight at each token in the
                                                          loss, with mean 1; absent: 1
``("headrace", "step_weights", name)``  (N,) float64      sum of a component's weights over the row's step;
                                                          absent: the loss has no components
``("headrace", "folded_weight")``       (N,) float        the row's weight, if the advantage is already
                                                          multiplied by it
``("headrace", "padding")``             (N,) bool         True: a copy of a row that does not train; absent:
                                                          no row is a copy
``("headrace", "row")``                 (N,) int64        row number in the batch that the pipeline received
``("headrace", "processed")``           (N,) bool         a pipeline has processed this row
``("headrace", "elsewhere")``           (N,) int64, or    the row's number in the store that holds its tokens;
                                        (N, 3)            in TransferQueue the producer, number and kind;
                                                          absent: the batch holds the tokens
``("headrace", "dispatched")``          (N,) int64        rollouts that were dispatched in the row's group
``("headrace", "trainer_version")``     (N,) int64        policy version of the trainer when it took the row
``("headrace", "newest_version")``      (N,) int64        newest policy version of the row's tokens, where
                                                          the table of another process has the oldest
``("headrace", "steps_left")``          (N,) int64        for how many further steps the row may wait
``("headrace", "origin")``              (N, 5) int32      number of the row in its rollout, its worker, number
                                                          of workers, its environment in the worker, number of
                                                          environments
``("headrace", "no_lengths")``          (N,) bool         True: the dump has neither tokens nor their number,
                                                          and a stage that reads lengths raises
``("headrace", "masks")``               no tensor         token columns, stored elsewhere, in which rows out
                                                          of the loss must be masked
====================================== ================= ===============================================

Example:
    >>> from headrace.transforms.split import ShuffleSplit
    >>> from headrace.transforms.table import schema
    >>> from tensordict import TensorDict
    >>> batch = ShuffleSplit(minibatches=2, unit="sample")(TensorDict({"x": [1, 2, 3, 4]}, batch_size=[4]))
    >>> batch[schema.MINIBATCH].tolist()
    [0, 0, 1, 1]
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Literal, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from .errors import BatchError, MissingKeyError, count_of
from .options import takes_options
from .tensordicts import any_row_has, entries_of

__all__ = [
    "COMPARED",
    "COUNTED",
    "DISPATCHED",
    "DONE",
    "EXPECTED_SEGMENTS",
    "FINISHED",
    "FLOAT",
    "FOLDED_WEIGHT",
    "INIT",
    "INTO",
    "IN_LOSS",
    "IS_FIRST_SEGMENT",
    "LENGTH",
    "LOSS_WEIGHTS",
    "MASKS",
    "MICROBATCH",
    "MINIBATCH",
    "NEWEST_VERSION",
    "NO_LENGTHS",
    "ORIGIN",
    "PADDING",
    "PLACES",
    "PROCESSED",
    "RANK",
    "REASON",
    "RETURN",
    "REWARD",
    "REWARDS",
    "ROW",
    "SEGMENTS",
    "STATUS_KEYS",
    "STEPS_LEFT",
    "STEP_WEIGHT",
    "STEP_WEIGHTS",
    "TOKEN_WEIGHT",
    "TRAINER_VERSION",
    "Origin",
    "Status",
    "Unit",
    "component_names",
    "facts_of",
    "has_key",
    "key_names",
    "read_column",
    "read_written",
    "require",
    "unit_keys",
]

REWARD = ("headrace", "reward")
REWARDS = ("headrace", "rewards")
IS_FIRST_SEGMENT = ("headrace", "is_first_segment")
RETURN = ("headrace", "return")
FINISHED = ("headrace", "finished")
COUNTED = ("headrace", "counted")
COMPARED = "compared"
"""A note of the table for a report: a function of the number N of rows that the table then has. It returns
(N, 2) float64: how many rollouts the advantage compared with the row's, itself included; and the baseline,
or NaN.
"""
INTO = "merged into"
"""Column of the table: (N,) int64, table index of the row into which this row was merged; −1: not merged."""
IN_LOSS = ("headrace", "in_loss")
SEGMENTS = ("headrace", "segments")
LENGTH = ("headrace", "length")
REASON = ("headrace", "reason")
MINIBATCH = ("headrace", "minibatch")
MICROBATCH = ("headrace", "microbatch")
RANK = ("headrace", "rank")
PLACES = (MINIBATCH, MICROBATCH, RANK)  # where the split puts a row
STEP_WEIGHT = ("headrace", "step_weight")
STEP_WEIGHTS = ("headrace", "step_weights")  # holds a column for each component
LOSS_WEIGHTS = "loss_weights"  # holds (N, T) float for each component, for users
TOKEN_WEIGHT = ("headrace", "token_weight")
FOLDED_WEIGHT = ("headrace", "folded_weight")
PADDING = ("headrace", "padding")
ROW = ("headrace", "row")
PROCESSED = ("headrace", "processed")
DISPATCHED = ("headrace", "dispatched")
TRAINER_VERSION = ("headrace", "trainer_version")
NEWEST_VERSION = ("headrace", "newest_version")
STEPS_LEFT = ("headrace", "steps_left")
ORIGIN = ("headrace", "origin")
MASKS = ("headrace", "masks")
NO_LENGTHS = ("headrace", "no_lengths")
OF_LENGTHS = ("loss_mask_key", "tokens_key", "length_key")  # name the columns that lengths are read from

STATUS_KEYS = (("next", "status"), "status")  # keys of the status; the first that is found is read
DONE = ("next", "done")  # True on the last row of a rollout; TorchRL's collectors write it
COLLECTED = ("collector", "mask")  # False on rows with which TorchRL's collectors pad a batch
INIT = "is_init"  # True on the first row of a rollout; TorchRL's InitTracker writes it
EXPECTED_SEGMENTS = "expected_segments"  # number of segments of the row's rollout, each with an end

# dtype of a new column of floats: torch's global default dtype must not change a number.
FLOAT = torch.float32


class Origin(NamedTuple):
    """Which worker and environment made a row: the columns of :data:`ORIGIN`, in their order."""

    number: int
    """Index of the row in its rollout, from 0."""
    worker: int
    workers: int
    environment: int
    environments: int


Unit = Literal["sample", "rollout", "group"]


class Status(IntEnum):
    """How a rollout ended: the values of the ``status`` column, (N,) int.

    A truncated rollout has a reward and counts as present. A failed or aborted rollout has no valid reward
    and does not count.
    """

    COMPLETED = 0
    TRUNCATED = 1
    ABORTED = 2
    FAILED = 3


# -- reading columns --------------------------------------------------------------------------------


def has_key(batch: TensorDictBase, key: NestedKey | None) -> bool:
    """Whether the batch has this column, dense or ragged. False for None.

    Raises:
        BatchError: only some rows of a lazy stack have the column.
    """
    if key is None:
        return False
    if isinstance(batch, LazyStackedTensorDict):
        return entries_of(batch, key) is not None
    return any_row_has(batch, key)


def component_names(batch: TensorDictBase) -> list[str]:
    """The names of the components of a loss whose weights a batch has, dense or ragged."""
    row = batch.tensordicts[0] if isinstance(batch, LazyStackedTensorDict) else batch
    return list(row.get(LOSS_WEIGHTS).keys()) if has_key(row, LOSS_WEIGHTS) else []


def key_names(batch: TensorDictBase | None) -> list[NestedKey]:
    """The sorted leaf keys of a batch, without the ``headrace`` columns that stages write for each other."""
    keys = () if batch is None else batch.keys(include_nested=True, leaves_only=True)
    return sorted((k for k in keys if not (isinstance(k, tuple) and k[0] == "headrace")), key=str)


def facts_of(batch: TensorDictBase | None, key: Any, option: str, reader: str = "") -> dict[str, Any]:
    """What errors say of a column: ``{column}``, ``{missing}`` and ``{present}``.

    Args:
        batch: the batch that the column is, or should be, in.
        key: key of the column.
        option: name of the option that holds the key; empty: there is none.
        reader: class name of the stage.
    """
    return {"key": key, "option": option, "batch": key_names(batch), "reader": reader}


def require(batch: TensorDictBase, key: NestedKey, *, reader: str, option: str) -> Any:
    """Get a column of the batch.

    Args:
        reader: class name of the stage, for the message.
        option: name of the option that holds the key, for the message.

    Raises:
        MissingKeyError: the batch has no such column. The message lists the keys of the batch.
    """
    value = batch.get(key, None) if has_key(batch, key) else None
    if value is None and option in OF_LENGTHS and has_key(batch, NO_LENGTHS):
        raise no_lengths(reader)
    if value is None:
        raise MissingKeyError("{reader} {missing}", **facts_of(batch, key, option, reader))
    return value


def not_written(reader: str, key: NestedKey, writer: str) -> MissingKeyError:
    """Make the error for a missing column that an earlier stage must write."""
    return MissingKeyError(f"{reader} needs the column {key!r}, written by {writer}: put {writer} before it")


def no_lengths(reader: str, stage: str = "") -> MissingKeyError:
    """Make the error for a stage that needs tokens or their number, if the dump has only texts.

    Args:
        reader: class name of the stage, or name of the function.
        stage: name of the stage in the pipeline; empty: not known.
    """
    leave_out = f"; or leave the stage out: ~pipeline.stages.{stage}" if stage else ""
    return MissingKeyError(
        f"{reader} needs the tokens of each response, or their number, and this dump has neither. Set "
        "source.tokenizer=PATH, a tokenizer.json or a folder of transformers (in Python "
        f"open_dump(..., tokenizer=PATH)){leave_out}"
    )


def read_column(batch: TensorDictBase, key: NestedKey, *, reader: str, option: str) -> Tensor:
    """Read a column of one number per row. A column of shape (N, 1) or (N, 1, 1) is returned as (N,).

    Raises:
        MissingKeyError: the column is missing.
        BatchError: the column has several numbers per row, or is not a tensor.
    """
    value = require(batch, key, reader=reader, option=option)
    if not isinstance(value, Tensor) or value.numel() != len(batch):
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        labels = "" if isinstance(value, Tensor) else ". headrace.transforms.number_labels makes them numbers"
        if labels and option == "status_key":
            labels = ". Write the numbers of headrace.transforms.Status, such as Status.FAILED"
        facts = facts_of(batch, key, option, reader)
        needed = f"one number per row in {{column}}, for {count_of(len(batch), 'row')}"
        raise BatchError(f"{{reader}} needs {needed}; found {found}{labels}", **facts)
    return value.reshape(-1)


def read_written(batch: TensorDictBase, key: NestedKey, *, reader: str, writer: str) -> Tensor:
    """Read a column (N,) that an earlier stage must have written.

    Raises:
        MissingKeyError: the column is missing; the message names the stage that writes it.
        BatchError: the column has several numbers per row.
    """
    if not has_key(batch, key):
        raise not_written(reader, key, writer)
    return read_column(batch, key, reader=reader, option=f"written by {writer}")


@takes_options
def unit_keys(
    unit: Unit, rollout_key: NestedKey | None, group_key: NestedKey | None
) -> list[NestedKey | None]:
    """The id columns that define a unit: rows with the same id are one unit.

    For ``sample`` there is none, because each row is a unit. If the key is None, each row is a unit, too.

    Raises:
        ValueError: `unit` is not sample, rollout or group.
    """
    keys = {"sample": [], "rollout": [rollout_key], "group": [group_key]}
    return keys[unit]
