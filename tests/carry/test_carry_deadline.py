"""Rows that a split carries train before they are too old, or are refused."""

import re

import pytest
import torch
from tensordict import TensorDict

from headrace.pipeline import Pipeline
from headrace.transforms import BatchError, GroupAssembler, ShuffleSplit

K, GROUPS = 3, 5  # the largest staleness; groups per batch, with minibatches of four


def put(assembler: GroupAssembler, first: int, version: int) -> None:
    """Announce five groups of one rollout, and put their rows."""
    ids = torch.arange(first, first + GROUPS)
    rows = TensorDict({"group_id": ids, "rollout_id": ids}, batch_size=[GROUPS])
    assembler.announce(rows)
    rows["next", "done"] = torch.ones(GROUPS, dtype=torch.bool)
    rows["next", "reward"] = torch.rand(GROUPS, 1)
    rows["next", "policy_version"] = torch.full((GROUPS,), version)
    assembler.put(rows)


def trained_ages(old: int, steps: int = 12) -> tuple[list[int], str]:
    """The ages in steps at which rows train, and the errors.

    Args:
        old: the age of each group when it is taken.
        steps: number of steps.
    """
    assembler = GroupAssembler(groups=GROUPS, group_size=1, max_staleness=K, steps_ahead=old)
    split = ShuffleSplit(minibatch_size=4, unit="group", remainder="carry")
    pipeline, ages = Pipeline({"split": split}), []
    for number in range(old):
        put(assembler, GROUPS * number, 0)
    for step in range(steps):
        put(assembler, GROUPS * (old + step), step)
        try:
            minibatches = list(pipeline.minibatches(assembler.take()))
        except BatchError as error:
            return ages, str(error)
        ages += [age for part in minibatches for age in (step - part["next", "policy_version"]).tolist()]
        assembler.version = step + 1
    return ages, ""


@pytest.mark.filterwarnings("ignore:no group may take longer")
@pytest.mark.parametrize("old", range(K + 1))
def test_no_carried_row_trains_after_its_deadline(old):
    """A row of age a may be carried K − a times. If it must wait longer, the batch is refused with ids."""
    ages, refused = trained_ages(old)
    assert max(ages, default=0) <= K
    if old < K:
        assert max(ages) > old  # some rows were carried
    if old == K:
        assert re.search(r"rows of groups \d+ would wait .*remainder=uneven", refused)
