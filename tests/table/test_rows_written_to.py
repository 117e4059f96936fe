"""Stages read what user code wrote into columns. Writes into minibatches and results change nothing else."""

from __future__ import annotations

import pytest
import torch
from batches import batch_of
from tensordict import TensorDict

from headrace.pipeline import Pipeline
from headrace.transforms import (
    CompletenessGate,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LengthWithin,
    LossWeight,
    RewardsVary,
    SampleFilter,
    ShuffleSplit,
)
from headrace.transforms.table.tensordicts import as_texts

MASK, REWARD = ("masks", "all_assistant_mask"), ("next", "reward")


def sixteen() -> TensorDict:
    rewards = [float(row % 5) for row in range(16)]
    return batch_of(rewards, [row // 4 for row in range(16)], tokens=6).exclude("prompt_text")


def pair_up(batch, write):
    write(batch, "rollout_id", torch.arange(16) // 2)
    return batch


def cut_short(batch, write):
    mask = batch[MASK].clone()
    mask[:, 3:] = False
    write(batch, MASK, mask)
    return batch


def by_set(batch, key, value):
    batch.set(key, value)


def past_versions(batch, key, value):
    batch.get(key).numpy()[:] = value.numpy()


def as_stage(change, write):
    return lambda batch: change(batch, write)


def as_criterion(change, write):
    def judge(batch):
        change(batch, write)
        return torch.ones(len(batch), dtype=torch.bool)

    return SampleFilter(criterion=judge, unit="sample")


@pytest.mark.parametrize("change", [pair_up, cut_short])
@pytest.mark.parametrize("wrap", [as_stage, as_criterion])
def test_later_stages_read_what_user_code_wrote(change, wrap):
    def trained(write):
        stages = {
            "gate": CompletenessGate(group_size=4),
            "length": SampleFilter(criterion=LengthWithin(low=1)),
            "theirs": wrap(change, write),
            "collapse": FanOutCollapse(reward="sum"),
            "advantage": GroupRelativeAdvantage(scale="none"),
            "split": ShuffleSplit(minibatches=1, shuffle=False),
            "weight": LossWeight(unit="rollout"),
        }
        return Pipeline(stages)(sixteen())

    expected, found = trained(by_set), trained(past_versions)
    for key in (("headrace", "reward"), "advantage", "loss_weight", "num_tokens"):
        assert torch.equal(found[key], expected[key]), key


def test_writing_to_minibatches_changes_no_ledger():
    batch = sixteen()
    batch[REWARD][4:8] = 1.0
    stages = {
        "collapse": FanOutCollapse(),
        "filter": SampleFilter(criterion=RewardsVary()),
        "split": ShuffleSplit(minibatches=2, shuffle=False),
    }
    run = Pipeline(stages).run(batch)
    for minibatch in run.minibatches():
        minibatch.zero_()
    assert run.ledger.counts()["filter/zero_variance"] == 4
    whole = Pipeline({"collapse": stages["collapse"], "filter": stages["filter"]}).run(
        batch_with_equal_group()
    )
    whole.batch.zero_()
    assert whole.ledger.counts()["filter/zero_variance"] == 4


def batch_with_equal_group() -> TensorDict:
    batch = sixteen()
    batch[REWARD][4:8] = 1.0
    return batch


def test_minibatches_of_a_new_pass_are_unaffected_by_writes():
    stages = {
        "split": ShuffleSplit(minibatches=3, microbatches=2, unit="sample", remainder="pad", seed=3),
        "weight": LossWeight(),
    }
    run = Pipeline(stages).run(sixteen()[:4])

    def content():
        return [part.to_dict() for part in (each.clone() for each in run.minibatches())]

    before = content()
    for minibatch in run.minibatches():
        minibatch.zero_()
    assert str(content()) == str(before)


def test_writing_the_text_of_one_row_changes_no_other_row():
    rows = TensorDict({"text": as_texts(["a", "a", "b"])}, batch_size=[3])
    rows.set_at_("text", "z", 0)
    assert list(rows["text"]) == ["z", "a", "b"]
