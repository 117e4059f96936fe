"""Divide a pipeline in two halves: one for rows written to a replay buffer, one for rows sampled from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tensordict import TensorDictBase

from headrace.transforms.table import BatchError, ProcessedTwiceError
from headrace.transforms.table.empty import Empty
from headrace.transforms.table.schema import PROCESSED, has_key

from .order import index_of_split

__all__ = ["before_the_split", "part_of"]

Half = Literal["first", "second"]

ON_THE_WAY_IN = (
    "a pipeline must run on whole batches as they were collected, not on what a replay buffer samples. Use "
    "buffer.append_transform(pipeline, invert=True). To compute loss weights for each sample, append the "
    "first of pipeline.halves() with invert=True, and run the second on what is sampled"
)


def make_halves(pipeline: Any) -> tuple[Any, Any]:
    """Return a pipeline of the stages before the split, and a pipeline of the other stages.

    Raises:
        ValueError: the pipeline has no split, or is a half itself.
    """
    at = index_of_split(pipeline.stages)
    if at is None or pipeline._half is not None:
        raise ValueError(f"halves() needs a pipeline with a ShuffleSplit, and not a half; got {pipeline!r}")
    first = part_of(pipeline, pipeline.order[:at], "first")
    return first, part_of(pipeline, pipeline.order[at:], "second")


def before_the_split(pipeline: Any) -> Any:
    """Return the stages before the split, for a trainer that makes minibatches and loss weights itself."""
    return pipeline if index_of_split(pipeline.stages) is None else make_halves(pipeline)[0]


def part_of(
    pipeline: Any,
    names: list[str],
    half: Half | None,
    empty: Empty | None = None,
    more: Mapping[str, Any] | None = None,
) -> Any:
    """Return a pipeline of some stages and of `more`, with the options of `pipeline`, except `empty`."""
    part = type(pipeline)(
        {name: pipeline.stages[name] for name in names} | dict(more or {}),
        loss_mask_key=pipeline.loss_mask_key,
        log_prob_key=pipeline.log_prob_key,
        group_key=pipeline.group_key,
        rollout_key=pipeline.rollout_key,
        votes_only_key=pipeline.votes_only_key,
        report_keys=pipeline.report_keys,
        process_group=pipeline.rank_options.process_group,
        shared_ids=pipeline.rank_options.shared_ids,
        patience=pipeline.rank_options.patience,
        masked_log_prob=pipeline.masked_log_prob,
        empty=empty or pipeline.empty,
    )
    part._keys, part._half = pipeline._keys, half  # a half reports the columns of both halves
    return part


def check_half(batch: TensorDictBase, half: Half | None) -> TensorDictBase:
    """Check that rows for a second half are output of the first half, and prepare them.

    Raises:
        BatchError: the first half has not processed the rows.
        ProcessedTwiceError: the second half has already processed some of the rows.
    """
    if half != "second" or not isinstance(batch, TensorDictBase) or not batch.shape.numel():
        return batch
    if not has_key(batch, PROCESSED):
        raise BatchError(
            f"the second half of a pipeline needs rows that the first half has processed; got {len(batch)} "
            "rows without its mark"
        )
    if bool(batch.get(PROCESSED).any()):
        raise ProcessedTwiceError(
            f"the second half has already processed {int(batch.get(PROCESSED).sum())} of these rows"
        )
    return batch.exclude(PROCESSED)


def check_place(batch: TensorDictBase, half: Half | None) -> TensorDictBase:
    """Check that a replay buffer's transform is the right half for this direction.

    A buffer calls this for the rows that are written to it, unless the transform was appended with
    ``invert=True``.

    Raises:
        TypeError: the pipeline is at the wrong place of the buffer.
    """
    if not isinstance(batch, TensorDictBase) or not batch.shape.numel():
        return batch
    stamped = has_key(batch, PROCESSED)
    if half != "second" and not stamped:
        raise TypeError(ON_THE_WAY_IN)
    if half == "second" and stamped and bool(batch.get(PROCESSED).any()):
        raise TypeError(
            "the second half of a pipeline must run on what is sampled, because it computes loss weights for "
            "each sample. Use buffer.append_transform(second), or second.minibatches(buffer.sample())"
        )
    return batch
