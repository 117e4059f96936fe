"""The two halves of a pipeline: one for the way into a replay buffer, one for what is sampled from it."""

from __future__ import annotations

from typing import Any, Literal

from tensordict import TensorDictBase

from headrace.transforms.errors import BatchError, ProcessedTwiceError
from headrace.transforms.schema import PROCESSED, has_key

from .order import place_of_cut

Half = Literal["first", "second"]

ON_THE_WAY_IN = (
    "a pipeline runs on whole batches as they were collected, and not on what a replay buffer samples: "
    "append_transform(pipeline, invert=True). Where weights are to be those of a sample, append the first of "
    "pipeline.halves() so, and give the second what was sampled"
)


def cut_in_two(pipeline: Any) -> tuple[Any, Any]:
    """Pipelines of the stages before the one that cuts, and of the others.

    Raises:
        ValueError: no stage cuts the batch.
    """
    at = place_of_cut(pipeline.stages)
    if at is None or pipeline._half is not None:
        raise ValueError(
            f"a whole pipeline is halved where it cuts the batch, by ShuffleSplit; got {pipeline!r}"
        )
    first = part_of(pipeline, pipeline.order[:at], "first")
    return first, part_of(pipeline, pipeline.order[at:], "second")


def part_of(pipeline: Any, names: list[str], half: Half | None) -> Any:
    """A pipeline of some of the stages, with the other options of the whole."""
    part = type(pipeline)(
        {name: pipeline.stages[name] for name in names},
        loss_mask_key=pipeline.loss_mask_key,
        log_prob_key=pipeline.log_prob_key,
        group_key=pipeline.group_key,
        rollout_key=pipeline.rollout_key,
        report_keys=pipeline.report_keys,
        process_group=pipeline.rank_options.process_group,
        shared_ids=pipeline.rank_options.shared_ids,
        patience=pipeline.rank_options.patience,
        decide_on=pipeline.rank_options.decide_on,
        masked_log_prob=pipeline.masked_log_prob,
        empty=pipeline.empty,
    )
    part._keys, part._half = pipeline._keys, half  # a report of either half has the keys of both
    return part


def check_half(batch: TensorDictBase, half: Half | None) -> TensorDictBase:
    """Rows for a pipeline: of a second half those that the first has been over, and nobody else.

    Raises:
        BatchError: they have not been.
        ProcessedTwiceError: they have been over the second, too.
    """
    if half != "second" or not isinstance(batch, TensorDictBase) or not batch.shape.numel():
        return batch
    if not has_key(batch, PROCESSED):
        raise BatchError(
            f"the second half of a pipeline takes rows that the first has been over; got {len(batch)} others"
        )
    if bool(batch.get(PROCESSED).any()):
        raise ProcessedTwiceError(
            f"got {int(batch.get(PROCESSED).sum())} rows that were cut and weighed already"
        )
    return batch.exclude(PROCESSED)


def check_place(batch: TensorDictBase, half: Half | None) -> TensorDictBase:
    """What a replay buffer hands to a transform's inverse: what comes in, if the transform is for samples.

    Raises:
        TypeError: the pipeline is where it does not belong.
    """
    if not isinstance(batch, TensorDictBase) or not batch.shape.numel():
        return batch
    stamped = has_key(batch, PROCESSED)
    if half != "second" and not stamped:
        raise TypeError(ON_THE_WAY_IN)
    if half == "second" and stamped and bool(batch.get(PROCESSED).any()):
        raise TypeError(
            "the second half of a pipeline runs on what is sampled, which its weights are of: "
            "append_transform(second), or second.minibatches(buffer.sample())"
        )
    return batch
