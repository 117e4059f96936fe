"""With ``missing="mask"``, a rollout without a reward leaves the loss. Others train as if it were absent."""

from __future__ import annotations

import pytest
import torch
from batches import batch_of
from composed import composed
from recipes import of, pipeline_of
from tensordict import TensorDict
from test_recipes_of_the_field import NO_LONE, columns_for, ragged_batch

from headrace.pipeline import Pipeline, load_pipeline, make_report
from headrace.pipeline.tools.report import page_data, symptoms
from headrace.transforms import (
    BatchError,
    FanOutCollapse,
    Finite,
    GroupRelativeAdvantage,
    SampleFilter,
    TreeAdvantage,
    TurnAdvantage,
)
from headrace.transforms.table.schema import COUNTED

NAN = float("nan")
REASON = "collapse/no_reward"
MASK = ("masks", "all_assistant_mask")


# -- every recipe -----------------------------------------------------------------------------------------


def lacking(make_batch, name: str) -> TensorDict:
    """Groups of rollouts. A third of the rows is copied to rollouts of two rows without a reward."""
    batch = columns_for(name, ragged_batch(make_batch, "grid", 5, lone=name not in NO_LONE))
    batch["next", "reward"] = batch["next", "reward"].abs()
    more = torch.cat([batch[::3].clone()] * 2)
    more["rollout_id"] += 1000
    more["next", "reward"][:] = NAN
    both = torch.cat([batch, more])
    groups = both["group_id"]
    numbers = {int(g): len(both["rollout_id"][groups == g].unique()) for g in groups.unique()}
    both["expected_rollouts"] = torch.tensor([numbers[int(group)] for group in groups])
    return both


def test_a_rollout_without_a_reward_leaves_as_if_the_criterion_finite_excluded_it(make_batch, recipes):
    """Advantages, weights and masks of every recipe are compared bit by bit."""
    for name in recipes:
        batch = lacking(make_batch, name)
        plain = pipeline_of(name)
        masked = pipeline_of(name, collapse={"missing": "mask"})
        keys = {key: getattr(plain.stages["collapse"], key) for key in ("loss_mask_key", "log_prob_key")}
        finite = SampleFilter(criterion=Finite(), action="exclude", **keys)
        filtered = Pipeline({"finite": finite, **dict(plain.stages.items())})
        with of(name):
            one, other = masked.run(batch), filtered.run(batch)
            pairs = list(zip(one.minibatches(), other.minibatches(), strict=True))
            for mine, theirs in pairs:
                for key in theirs.keys(True, True):
                    if isinstance(theirs[key], torch.Tensor):
                        torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=0, equal_nan=True)
            reasons = [
                [run.ledger.names[code].replace("finite/non_finite", REASON) for code in run.ledger.reason]
                for run in (one, other)
            ]
            assert reasons[0] == reasons[1]
            assert REASON in reasons[0]


@pytest.mark.parametrize("recipe", ["grpo", "mt_grpo", "tree_grpo"])
def test_one_override_masks_rollouts_without_a_reward_in_all_stages(make_batch, recipe):
    """Without the override, NaN is refused by an error that names it."""
    batch = lacking(make_batch, recipe)
    run = composed(f"pipeline={recipe}", "pipeline.stages.collapse.missing=mask").run(batch)
    assert run.ledger.counts()[REASON] > 0
    with pytest.raises(BatchError, match=r"pipeline\.stages\.collapse\.missing=mask \(in Python missing='ma"):
        composed(f"pipeline={recipe}").run(batch)


def test_rows_that_are_turns_may_lack_a_reward(make_batch):
    stages = {"turns": {"turn_index_key": None, "turn_rewards": "none"}}
    batch = make_batch([1.0, 2.0, 5.0, NAN, NAN], [0] * 3 + [0] * 2, [0, 0, 1, 2, 2])
    batch["expected_rollouts"] = torch.full((5,), 3)
    pipeline = load_pipeline(
        "mt_grpo", reward="sum", missing="mask", minibatches=1, shuffle=False, stages=stages
    )
    # The returns are 3 and 2 in rollout 0, and 5 in rollout 1, which has no second turn.
    assert pipeline(batch)["advantage"].flatten().tolist() == [-2.0, 2.0, 2.0, 0.0, 0.0]


# -- several rewards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", ["sum", "decoupled"])
def test_only_a_rollout_that_lacks_all_its_rewards_is_masked(make_batch, several):
    """The sums are 1, 2 and 3. If rewards are compared separately, they are 1, 2, 3 and 0, 0."""
    batch = make_batch([0.0] * 4, [0] * 4)
    batch["next", "reward"] = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, NAN], [NAN, NAN]])
    collapse = FanOutCollapse(columns=2, missing="mask")
    advantage = GroupRelativeAdvantage(scale="none", several=several, missing="mask")
    run = Pipeline({"collapse": collapse, "advantage": advantage}).run(batch)
    assert run.batch["advantage"].flatten().tolist() == [-1.0, 0.0, 1.0, 0.0]
    assert str(run.ledger) == f"Ledger(trained: 3, {REASON}: 1)"
    assert run.batch[COUNTED].tolist() == [True] * 3 + [False]


# -- single stages and reports ----------------------------------------------------------------------------


def test_a_stage_by_itself_masks_tokens_and_log_probabilities(make_batch):
    batch = make_batch([1.0, NAN, 3.0], [0] * 3)
    out = FanOutCollapse(missing="mask")(batch)
    assert out[MASK][1].sum() == 0
    assert out["log_probs", "full"][1].isnan().all()
    assert torch.equal(out[MASK][[0, 2]], batch[MASK][[0, 2]])
    assert GroupRelativeAdvantage(scale="none")(out)["advantage"].flatten().tolist() == [-1.0, 0.0, 1.0]
    del batch["masks"], batch["log_probs"]
    with pytest.raises(BatchError, match="1 row must be masked"):
        FanOutCollapse(missing="mask")(batch)


@pytest.mark.parametrize("stage", [GroupRelativeAdvantage, TurnAdvantage, TreeAdvantage])
def test_an_advantage_refuses_a_rollout_that_no_collapse_has_masked(make_batch, stage):
    batch = make_batch([1.0, NAN], [0, 0])
    batch["turn_index"] = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(BatchError, match="every reward must be finite; found nan at row 1"):
        stage(missing="mask")(batch)


def test_a_reward_must_be_missing_on_all_rows_of_its_rollout(make_batch):
    batch = make_batch([1.0, NAN, 3.0], [0] * 3, [0, 0, 1])
    with pytest.raises(BatchError, match="must be missing on all segments"):
        FanOutCollapse(missing="mask", reward="sum")(batch)


def test_a_batch_without_any_reward_trains_nothing(make_batch):
    run = load_pipeline("grpo", group_size=2, missing="mask").run(make_batch([NAN, NAN], [0, 0]))
    assert sum(int(part[MASK].sum()) for part in run.minibatches()) == 0
    assert str(run.ledger) == f"Ledger({REASON}: 2)"


def test_the_report_shows_the_rollout_without_a_reward_and_its_reason(make_batch):
    run = load_pipeline("grpo", group_size=3, missing="mask", minibatches=1, shuffle=False).run(
        make_batch([1.0, 0, NAN], [0] * 3)
    )
    report = make_report(run)
    assert report.numbers["rollouts/no_reward"] == 0
    assert report.numbers["reward/all/mean"] == 0.5
    assert [advisory.name for advisory in report.advisories] == ["rewards-missing"]
    assert run.metrics[f"out/{REASON}"] == 1
    step = page_data([report], title="")["steps"][0]
    assert step["rows"]["reward"] == [1, 0, None]


def test_an_advisory_counts_the_rollouts_that_train_without_a_reward(make_batch):
    """Two rollouts without a reward have three rows."""
    batch = make_batch([1.0, 0, NAN, NAN, NAN], [0] * 5, [0, 1, 2, 2, 3])
    run = load_pipeline("grpo", group_size=4, missing="skip", minibatches=1).run(batch)
    (found,) = [each for each in make_report(run).advisories if each.name == "trained-without-reward"]
    assert found.text.startswith("2 rollouts per step have no reward and count in the denominator")
    assert any("missing=mask" in each.overrides for each in symptoms()[found.name].remedies)


def test_integer_rewards_above_2_24_stay_distinct():
    batch = batch_of([0.0, 0.0], [0, 0])
    batch["next", "reward"] = torch.tensor([[2**24], [2**24 + 1]])
    advantage = GroupRelativeAdvantage(missing="skip")
    for first in ({}, {"collapse": FanOutCollapse(missing="skip")}):
        found = Pipeline(first | {"advantage": advantage})(batch)["headrace", "reward"]
        assert found.dtype is torch.float64
        assert found.tolist() == [2**24, 2**24 + 1]
