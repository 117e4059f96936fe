"""Report the rows of a step that a stage refused, so that users can look at them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tensordict import TensorDictBase

from headrace.pipeline.pipeline import Pipeline
from headrace.pipeline.tools.report import StepReport, make_report
from headrace.transforms import BatchError


def refused_report(batch: TensorDictBase, step: int, err: BatchError) -> StepReport | None:
    """Make the report of a batch that a stage refused. In it, all rows left at that stage. It has no numbers.

    Args:
        batch: the batch that the stage refused.
        step: number of the step.
        err: the error of the stage.

    Returns:
        The report; None if the rows themselves cannot be read.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"rollout_id": [4, 5]}, batch_size=[2])
        >>> refused_report(batch, 7, BatchError("columns differ in length")).names
        ('trained', 'pipeline/refused_step')
    """
    try:
        report = make_report(Pipeline({}).run(batch), step=step)
    except BatchError:
        return None
    names = ("trained", f"{err.stage or 'pipeline'}/refused_step")
    reason = np.ones(len(report), dtype=np.int64)
    columns = {**report.columns, "reason": reason}
    found = replace(report, columns=columns, names=names, actions=("trained", "dropped"))
    found.__dict__["numbers"] = {}  # no number includes the step
    return found
