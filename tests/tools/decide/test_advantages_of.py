"""`advantages_of` gives the rows of another trainer the advantages of a pipeline, in the same order."""

from __future__ import annotations

import random

import pytest
import torch
from composed import composed
from tensordict import TensorDict

from headrace.pipeline import Pipeline, advantages_of
from headrace.transforms import BatchError, MergeTurns, SampleFilter

pytestmark = pytest.mark.slow

MASK = ("masks", "all_assistant_mask")


def of_four(recipe: str, *words: str) -> Pipeline:
    return composed(f"pipeline={recipe}", "pipeline.stages.gate.group_size=4", *words)


def rows(seed: int, groups: int = 5, size: int = 4) -> TensorDict:
    rng = random.Random(seed)
    order = rng.sample(range(groups * size), groups * size)
    batch = TensorDict({"group_id": [row // size for row in order], "rollout_id": order}, [len(order)])
    batch["next", "reward"] = torch.tensor([float(rng.randint(0, 1)) for _ in order])
    batch[MASK] = torch.tensor([[position <= rng.randint(0, 4) for position in range(5)] for _ in order])
    return batch


def test_each_row_has_the_advantage_of_a_loop_over_its_group():
    pipeline = of_four("rloo")
    for batch in map(rows, range(4)):
        credit = advantages_of(pipeline, batch)
        groups, rewards = batch["group_id"].tolist(), batch["next", "reward"].tolist()
        for row, (group, reward) in enumerate(zip(groups, rewards, strict=True)):
            peers = [rewards[other] for other in range(len(batch)) if groups[other] == group]
            varies = len(set(peers)) > 1
            others = (sum(peers) - reward) / (len(peers) - 1)
            trains = varies and bool(batch[MASK][row].any())
            assert credit.advantage[row].tolist() == pytest.approx([reward - others if trains else 0.0])
            assert credit.in_loss[row].tolist() == (batch[MASK][row] & varies).tolist()


@pytest.mark.parametrize("action", ["mask", "exclude", "drop"])
def test_a_dropped_row_keeps_its_index_and_has_advantage_0(action):
    batch = rows(seed=1)
    whole = torch.tensor([False, True]).repeat(10)
    stages = dict(composed("pipeline=dr_grpo", "~pipeline.stages.gate").stages.items())
    stages["filter"] = SampleFilter(criterion=lambda batch: batch["rollout_id"] % 2 == 1, action=action)
    batch["rollout_id"] = torch.arange(20)
    credit = advantages_of(Pipeline(stages), batch)
    assert credit.in_loss.any(1).tolist() == (whole & batch[MASK].any(1)).tolist()
    assert not credit.advantage[~whole].any()
    assert credit.advantage.shape == (20, 1)
    assert (credit.run.ledger.reason[~whole] > 0).all()


def test_a_recipe_with_token_terms_gives_each_token_an_advantage():
    batch = rows(seed=3)
    batch["entropy", "full"] = torch.rand(20, 5)
    credit = advantages_of(of_four("high_entropy"), batch)
    assert credit.advantage.shape == credit.in_loss.shape == (20, 5)
    assert credit.advantage.count_nonzero(1).max() > 0
    assert not credit.advantage[~credit.in_loss].any()


def test_without_a_loss_mask_kept_rows_are_in_the_loss():
    batch = rows(seed=5).exclude("masks")
    credit = advantages_of(of_four("dr_grpo", "pipeline.stages.filter.action=drop"), batch)
    rewards = batch["next", "reward"].new_zeros(5).index_add_(0, batch["group_id"], batch["next", "reward"])
    varies = ((rewards > 0) & (rewards < 4))[batch["group_id"]]
    assert 0 < varies.sum() < 20
    assert credit.in_loss.flatten().tolist() == varies.tolist()


def test_all_advantages_are_0_if_no_row_is_kept():
    pipeline = of_four("grpo", "pipeline.stages.gate.on_incomplete=drop")
    for number in (0, 1):
        credit = advantages_of(pipeline, rows(seed=6)[:number])
        assert credit.advantage.tolist() == [[0.0]] * number
        assert credit.in_loss.tolist() == [[False] * 5] * number  # the mask is as wide as if rows were kept


def test_merged_turns_are_refused():
    """The trainer keeps its rows of single turns. One of them would get the advantage of all merged turns."""
    batch = TensorDict({"group_id": [0, 0, 0], "rollout_id": [0, 0, 1]}, [3])
    batch["tokens", "full"] = torch.tensor([[5, 6, 0], [5, 6, 7], [5, 8, 0]])
    batch["masks", "all_attention_mask"] = batch["tokens", "full"] > 0
    batch[MASK] = torch.tensor([[False, True, False], [False, False, True], [False, True, False]])
    batch["next", "reward"] = torch.tensor([1.0, 1.0, 0.0])
    recipe = composed("pipeline=dr_grpo", "~pipeline.stages.gate", "~pipeline.stages.filter")
    stages = {"merge": MergeTurns(), **dict(recipe.stages.items())}
    order = ["collapse", "advantage", "merge", "split", "weight"]
    with pytest.raises(BatchError, match=r"into the loss at rows 1\. Remove"):
        advantages_of(Pipeline(stages, order=order), batch)


def test_a_pipeline_without_an_advantage_is_refused():
    with pytest.raises(BatchError, match="no stage writes an advantage; the stages are filter"):
        advantages_of(Pipeline({"filter": SampleFilter(criterion=lambda b: b["group_id"] >= 0)}), rows(8))


def test_a_batch_of_two_dimensions_is_refused():
    batch = rows(9).reshape(5, 4)
    with pytest.raises(BatchError, match=r"a batch of shape \[N\] is required; got \[5, 4\]"):
        advantages_of(of_four("grpo"), batch)


def test_wrong_arguments_are_answered_with_the_call():
    pipeline, batch = Pipeline({}), rows(8)
    said = r"^advantages_of needs batch: advantages_of\(pipeline, batch\)$"
    with pytest.raises(TypeError, match=said):
        advantages_of(pipeline)
    with pytest.raises(TypeError, match=r"^advantages_of takes 2 arguments without a name: pipeline, batch$"):
        advantages_of(pipeline, batch, 3)
    with pytest.raises(
        ValueError, match=r"pipeline must be a Pipeline; got a TensorDict: .*advantages_of\(load_"
    ):
        advantages_of(batch, pipeline)
