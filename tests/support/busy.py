"""A recipe and a batch on which every stage of the recipe has an effect."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from headrace.pipeline import Pipeline, make_report
from headrace.transforms import (
    CompletenessGate,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LossWeight,
    RewardsVary,
    SampleFilter,
    ShuffleSplit,
)

MASK = ("masks", "all_assistant_mask")


def stages(**changes):
    """The stages of the default recipe, with options by which each stage changes the batch."""
    return {
        "gate": CompletenessGate(group_size=3, on_incomplete="drop"),
        "collapse": FanOutCollapse(),
        "filter": SampleFilter(criterion=RewardsVary(), unit="group"),
        "advantage": GroupRelativeAdvantage(scale="none"),
        "split": ShuffleSplit(minibatches=2, unit="rollout", remainder="drop"),
    } | changes


def busy_batch(make_batch):
    """Group 0 varies and fans out, group 1 is incomplete, group 2 has equal rewards. Row 1 does not train."""
    batch = make_batch(
        [1.0, 3, 3, 5, 1, 2, 4, 4, 4], [0, 0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 2, 3, 4, 5, 6, 7]
    )
    batch[MASK][1] = False
    return batch


def keep_positive(batch: TensorDict) -> TensorDict:
    return batch[batch["next", "reward"].flatten() > 0]


def reported(make_batch, step=0, **changes):
    """The busy batch, with more columns, and the report of its pipeline."""
    batch = busy_batch(make_batch)
    batch["status"] = torch.tensor([0, 0, 0, 1, 0, 0, 0, 0, 0])
    batch["next", "policy_version"] = torch.arange(9)
    pipeline = Pipeline(stages(weight=LossWeight(), **changes))
    pipeline(batch)
    return batch, make_report(pipeline, step=step)
