"""Run a stage without a pipeline, and return all its results."""

from __future__ import annotations

from typing import NamedTuple

from tensordict import TensorDictBase

from headrace.transforms import BatchTransform, Rows


class Said(NamedTuple):
    """The results of a stage for a batch."""

    batch: TensorDictBase
    """The rows that are left."""
    metrics: dict[str, float]
    reasons: list[str]
    """The reason of each input row, or ``trained`` if the row stays."""


def said_by(stage: BatchTransform, batch: TensorDictBase) -> Said:
    """Run a stage as a call does. Return the batch, the metrics, and the reason of each row."""
    rows = Rows.read(stage.enter(batch), keys=stage.in_keys, tokens=stage.tokens_counted)
    stage.work_on(rows.seen_by(stage))
    fates = rows.table.fates
    return Said(rows.write(), rows.table.metrics, [fates.names[reason] for reason in fates.reason.tolist()])
