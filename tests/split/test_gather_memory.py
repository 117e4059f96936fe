"""Only one minibatch is in memory at a time."""

from __future__ import annotations

import pytest
import torch
from batches import batch_of
from live_bytes import LiveBytes, bytes_of
from policies import with_old

from headrace.pipeline import Pipeline, load_pipeline
from headrace.transforms import FanOutCollapse, RewardsVary, SampleFilter, ShuffleSplit
from headrace.transforms.table.schema import MINIBATCH

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shuffle", [True, False])
def test_masked_groups_cost_no_copy_and_leave_the_callers_rows_unchanged(shuffle):
    rewards = [1.0 if i // 8 % 10 == 0 else float(i % 5) for i in range(640)]
    batch = batch_of(rewards, [i // 8 for i in range(640)], tokens=512).exclude("prompt_text")
    batch["expected_rollouts"] = torch.full((640,), 8)
    before = batch.clone()
    words = ["pipeline=grpo", "pipeline.stages.split.minibatches=8"]
    pipeline = load_pipeline(*words, f"pipeline.stages.split.shuffle={shuffle}")
    with LiveBytes() as memory:
        for minibatch in pipeline.minibatches(batch):
            del minibatch
    rows_out = trained = 0
    for minibatch in pipeline.minibatches(batch):
        masked = ~minibatch["headrace", "in_loss"]
        rows_out += int(masked.sum())
        trained += int(minibatch["masks", "all_assistant_mask"].any(1).sum())
        assert not minibatch["masks", "all_assistant_mask"][masked].any()
        assert minibatch["log_probs", "full"][masked].isnan().all()
        assert minibatch["log_probs", "full"][~masked].isfinite().all()
    assert (rows_out, trained) == (64, 576)  # 8 of 80 groups have equal rewards
    assert memory.peak / bytes_of(batch) <= 0.2
    assert (batch == before).all()


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("importance_weight", ("pipeline=tis",)),
        (
            ("headrace", "token_weight"),
            ("pipeline.stages.weight.unit=turn", "pipeline.stages.weight.turn_index_key=turn_index"),
        ),
    ],
    ids=["tokens", "turns"],
)
def test_weights_of_tokens_and_turns_exist_for_one_minibatch_at_a_time(column, words):
    """Importance weights and token advantages of all rows would take half as much memory as the batch."""
    batch = with_old(batch_of([float(i % 5) for i in range(256)], [i // 8 for i in range(256)], tokens=4096))
    batch["expected_rollouts"] = torch.full((256,), 8)
    batch["turn_index"] = (torch.arange(4096) // 100).repeat(256, 1)
    batch = batch.exclude("prompt_text", "teacher_log_probs", "ref_log_probs", "entropy")
    with LiveBytes() as memory:
        for minibatch in load_pipeline(*words, "pipeline.stages.split.minibatches=8").minibatches(batch):
            assert minibatch[column].shape == (32, 4096)
            del minibatch
    assert memory.peak / bytes_of(batch) <= 0.35


class Looks(torch.nn.Module):
    """A user's stage that counts the tokens in the loss mask, and the finite log-probabilities."""

    def forward(self, batch):
        self.tokens = int(batch["masks", "all_assistant_mask"].sum())
        self.finite = int(batch["log_probs", "full"].isfinite().sum())
        return batch


@pytest.mark.parametrize("place", ["before the cut", "after it"])
def test_a_user_stage_sees_masked_rows_as_masked(place):
    batch = batch_of([1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], tokens=4).exclude("prompt_text")
    looks, vary = Looks(), SampleFilter(criterion=RewardsVary())
    stages = {"collapse": FanOutCollapse(), "filter": vary, "split": ShuffleSplit(minibatches=2)}
    if place == "before the cut":
        stages = {"collapse": stages["collapse"], "filter": vary, "looks": looks, "split": stages["split"]}
    else:
        stages["looks"] = looks
    looks.keeps_rows, looks.in_keys = True, [MINIBATCH] if place == "after it" else []
    before = batch.clone()
    list(Pipeline(stages).minibatches(batch))
    trains = batch["masks", "all_assistant_mask"][2:]
    assert (looks.tokens, looks.finite) == (int(trains.sum()), trains.numel())
    assert (batch == before).all()
