"""A rollout that votes only is in the statistics, but in no loss and no minibatch."""

from __future__ import annotations

import copy

import pytest
import torch
import voting
from any_rank import results_of
from composed import composed
from tensordict import TensorDict

import headrace
from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    CompletenessGate,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LossWeight,
    RewardsVary,
    SampleFilter,
    ShuffleSplit,
)

MASK = ("masks", "all_assistant_mask")


def rows_of(rewards, votes, rollouts=None, **columns):
    """One group, with two tokens per row."""
    count = len(rewards)
    given = {
        "group_id": torch.zeros(count, dtype=torch.int64),
        "rollout_id": torch.tensor(rollouts or list(range(count))),
        ("next", "reward"): torch.tensor(rewards, dtype=torch.float64),
        "votes_only": torch.tensor(votes),
        MASK: torch.ones(count, 2, dtype=torch.bool),
    }
    return TensorDict(given | columns, batch_size=[count])


def stages(**advantage):
    return {
        "gate": CompletenessGate(group_size=3),
        "collapse": FanOutCollapse(),
        "filter": SampleFilter(criterion=RewardsVary(), action="drop"),
        "advantage": GroupRelativeAdvantage(scale="none", **advantage),
        "split": ShuffleSplit(minibatches=1, shuffle=False),
        "weight": LossWeight(),
    }


def close(found, expected):
    assert found.keys() == expected.keys()
    for each, value in expected.items():
        assert found[each] == pytest.approx(value, rel=1e-12, abs=1e-12)


def test_random_batches_equal_those_of_a_loop():
    """The batches have fan-out, exclusions, several or missing rewards, and every kind of baseline."""
    voted = 0
    for seed in range(72):  # twice each combination of advantage, filter and mean
        batch = voting.drawn(seed)
        run = voting.pipeline_of(seed).run(batch)
        advantage, weight, steps = voting.found_in(run)
        expected, reasons = voting.by_loops(batch, seed)
        for row, code in enumerate(run.ledger.reason.tolist()):
            reason = run.ledger.names[code]
            without_token = "trained" if batch[MASK][row].any() else "pipeline/no_loss_tokens"
            assert reason == reasons.get(int(batch["rollout_id"][row]), without_token), (seed, row)
        close({row: advantage[row] for row in expected}, expected)
        for step in steps:
            assert not batch["votes_only"][step].any()
            trains = [row for row in step if row in expected]
            close(
                {row: weight[row] for row in step},
                dict.fromkeys(step, 0.0) | voting.weights_by_loops(batch, trains, voting.options_of(seed)[2]),
            )
        # Rollouts that vote only do not make the minibatches less even.
        units = [len({int(batch["rollout_id"][row]) for row in step}) for step in steps]
        assert not units or max(units) - min(units) <= 1
        voted += sum(reason == "pipeline/votes_only" for reason in reasons.values())
    assert voted > 72


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_share_a_batch_count_the_votes_of_all_ranks(world, tmp_path):
    seeds = range(world % 2, 72, 2)  # both halves have each advantage, filter and mean
    of_ranks = results_of(voting.vote_on_ranks, world, tmp_path, seeds)
    for at, seed in enumerate(seeds):
        batch = voting.drawn(seed)
        expected, _ = voting.by_loops(batch, seed)
        advantage, weight, ledger = {}, {}, {}
        for found in of_ranks:
            for every, own in zip((advantage, weight, ledger), found[at], strict=True):
                every |= own
        close({row: advantage[row] for row in expected}, expected)
        weights = voting.weights_by_loops(batch, list(expected), voting.options_of(seed)[2])
        close(weight, dict.fromkeys(weight, 0.0) | weights)
        voted = {row for row, reason in ledger.items() if reason == "pipeline/votes_only"}
        assert voted == set(batch["votes_only"].nonzero().flatten().tolist())


def test_a_votes_only_rollout_counts_for_the_gate_the_filter_and_the_baseline():
    """The rewards are 1, 1 and 4, and the rollout with 4 votes only. The mean of the group is 2."""
    run = Pipeline(stages()).run(rows_of([1.0, 1.0, 4.0], [False, False, True]))
    assert run.batch["advantage"].flatten().tolist() == [-1.0, -1.0]
    assert run.batch["loss_weight"].tolist() == [0.25, 0.25]  # four tokens are in the loss
    assert run.ledger.counts()["pipeline/votes_only"] == 1
    assert dict(zip(run.ledger.names, run.ledger.actions, strict=True))["pipeline/votes_only"] == "dropped"


def test_a_votes_only_rollout_has_its_own_reason_even_if_its_group_leaves():
    run = Pipeline(stages()).run(rows_of([1.0, 1.0, 1.0], [False, False, True]))
    assert run.ledger.rows("pipeline/votes_only") == [{"row": 2, "rollout": 2, "group": 0}]
    assert run.ledger.counts()["filter/zero_variance"] == 2


def test_a_votes_only_rollout_needs_no_token_in_the_loss():
    batch = rows_of([1.0, 1.0, 4.0], [False, False, True])
    batch[MASK][2] = False
    assert Pipeline(stages()).run(batch).batch["advantage"].flatten().tolist() == [-1.0, -1.0]


def test_without_the_column_the_bits_are_the_same_and_the_reason_is_missing():
    batch = rows_of([1.0, 0.0, 4.0], [False] * 3)
    with_column, without = (Pipeline(stages()).run(each) for each in (batch, batch.exclude("votes_only")))
    assert "pipeline/votes_only" in with_column.ledger.names
    assert "pipeline/votes_only" not in without.ledger.names
    for key in ("advantage", "loss_weight"):
        assert torch.equal(with_column.batch[key], without.batch[key])


def test_rows_of_a_rollout_that_disagree_on_votes_only_are_refused():
    batch = rows_of([1.0, 1.0, 4.0, 4.0], [False, False, True, False], [0, 1, 9, 9])
    told = r"all rows of a rollout vote only, or none does.*rollout 9 \(rows \[2, 3\]: \[True, False\]\)"
    for run in (Pipeline(stages()), GroupRelativeAdvantage(), ShuffleSplit(minibatches=1)):
        with pytest.raises(BatchError, match=told):
            run(batch)
    unset = rows_of([1.0, 1.0, 4.0, 4.0], [False, False, True, False], [0, 1, -1, -1])
    with pytest.raises(BatchError, match=r"rollout_id ≥ 0"):  # the disagreement is not named
        Pipeline(stages())(unset)
    with pytest.raises(BatchError, match=r"one bool per row in 'votes_only'.*int64"):
        Pipeline(stages())(batch.set("votes_only", torch.tensor([0, 0, 1, 1])))


def test_stages_that_run_one_by_one_decide_like_the_pipeline():
    batch = rows_of([1.0, 1.0, 4.0], [False, False, True])
    batch["log_probs", "full"] = torch.full((3, 2), -1.0)
    batch[MASK][2, 1] = False
    chain = stages(baseline="length_weighted")  # (2 · 1 + 2 · 1 + 1 · 4) / 5 tokens
    whole, one_by_one = Pipeline(chain).run(batch).batch, batch
    assert whole["advantage"].flatten().tolist() == pytest.approx([-0.6, -0.6])
    for stage in chain.values():
        one_by_one = stage(one_by_one)
        assert one_by_one[MASK].any(1).tolist() == [True, True, False][: len(one_by_one)]  # row 2 may leave
    for key in ("advantage", "loss_weight", "rollout_id", MASK):
        assert torch.equal(one_by_one[key], whole[key]), key
    assert LossWeight()(batch)["loss_weight"].tolist() == [0.25, 0.25, 0.0]  # also without a split


def test_the_half_before_a_buffer_keeps_no_row_that_votes_only():
    batch = rows_of([1.0, 1.0, 4.0], [False, False, True])
    first, second = Pipeline(stages()).halves()
    written = first(batch)
    assert written["rollout_id"].tolist() == [0, 1]
    assert second(written)["loss_weight"].tolist() == [0.25, 0.25]
    without_split = {name: stage for name, stage in stages().items() if name != "split"}
    assert Pipeline(without_split)(batch)["loss_weight"].tolist() == [0.25, 0.25]


def test_the_column_may_have_another_name():
    batch = rows_of([1.0, 1.0, 4.0], [False, False, True]).rename_key_("votes_only", "greedy")
    pipeline = headrace.load_pipeline("grpo", group_size=3, scale="none", columns={"votes_only": "greedy"})
    assert sorted(pipeline.run(batch).batch["rollout_id"].tolist()) == [0, 1]
    own = Pipeline(stages(), votes_only_key="greedy")
    assert own.run(batch).batch["advantage"].flatten().tolist() == [-1.0, -1.0]
    assert own.halves()[0](batch)["rollout_id"].tolist() == [0, 1]


def test_decide_on_plain_columns_says_which_rows_vote_only():
    columns = {
        "group_id": ["a"] * 3,
        "rollout_id": [0, 1, 2],
        "reward": [1.0, 3.0, 2.5],
        "votes_only": [False, False, True],
        "tokens": [2, 2, 2],
    }
    found = headrace.decide(columns, "remax", group_size=3)
    assert found.advantage.tolist() == [-1.5, 0.5, 0.0]
    assert found.baseline.tolist() == [2.5, 2.5, 2.5]
    assert found.compared.tolist() == [2, 2, 1]  # the row itself, and the row that votes only
    assert found.loss_weight.tolist() == [0.5, 0.5, 0.0]
    assert found.reason == ["", "", "pipeline/votes_only"]
    assert sorted(found.steps[0].tolist()) == [0, 1]


def test_rows_that_wait_for_the_next_batch_train_there():
    """Three of four rows of a batch train, and two rows are an optimiser step, so one row waits."""
    split = ShuffleSplit(minibatch_size=2, remainder="carry", shuffle=False)
    pipeline = Pipeline({"advantage": GroupRelativeAdvantage(), "split": split, "weight": LossWeight()})
    votes, trained = [False, False, True, False], []
    for number in range(2):
        ids = {key: torch.arange(4) + 4 * number for key in ("rollout_id", "number")}
        batch = rows_of([1.0, 2.0, 3.0, 4.0], votes, **ids, group_id=torch.full((4,), number))
        trained += pipeline.run(batch).batch["number"].tolist()
    assert sorted(trained) == [0, 1, 3, 4, 5, 7]


@pytest.mark.parametrize("recipe", ["remax", "a_star_po"])
def test_a_recipe_with_votes_only_rollouts_refuses_a_group_without_them(recipe):
    pipeline = copy.copy(composed(f"pipeline={recipe}"))
    batch = rows_of([1.0, 1.0], [False, False], expected_rollouts=torch.tensor([2, 2]))
    with pytest.raises(BatchError, match=r"needs a rollout that votes only in each group.*group 0"):
        pipeline.run(batch)
    with pytest.raises(BatchError, match=r"needs 'votes_only'|votes_only"):
        pipeline.run(batch.exclude("votes_only"))
