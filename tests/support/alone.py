"""A stage by itself, and all that it says of a batch."""

from __future__ import annotations

from typing import NamedTuple

from tensordict import TensorDictBase

from headrace.transforms import BatchTransform, Rows


class Said(NamedTuple):
    """What a stage made of a batch."""

    batch: TensorDictBase
    """The rows that are left."""
    metrics: dict[str, float]
    reasons: list[str]
    """Of each row that came in; ``trained`` where it stays."""


def said_by(stage: BatchTransform, batch: TensorDictBase) -> Said:
    """What a stage does when it is called, with what it measured and why rows left."""
    rows = Rows.read(stage.enter(batch), keys=stage.in_keys, tokens=stage.tokens_counted)
    stage.work_on(rows.seen_by(stage))
    fates = rows.table.fates
    return Said(rows.write(), rows.table.metrics, [fates.names[reason] for reason in fates.reason.tolist()])
