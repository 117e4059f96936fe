"""A rollout that arrives without a token in the loss is in no statistic."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from any_rank import collected
from recipes import ADVANTAGES, pipeline_of
from tensordict import TensorDict

from headrace.pipeline import Pipeline, load_pipeline, make_report
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
from headrace.transforms.table.schema import COUNTED

MASK, LOG_PROBS = ("masks", "all_assistant_mask"), ("log_probs", "full")
NAN = float("nan")


def rows_of(rewards, tokens, rollouts=None, groups=None, *, unscored=()):
    """A batch. Row i has `tokens[i]` of 4 tokens in the mask. `unscored` rows have no log-probabilities."""
    count = len(rewards)
    mask = torch.arange(4) < torch.tensor(tokens)[:, None]
    log_probs = torch.full((count, 4), -1.0)
    log_probs[list(unscored)] = NAN
    columns = {
        "group_id": torch.tensor(groups or [0] * count),
        "rollout_id": torch.tensor(rollouts or list(range(count))),
        ("next", "reward"): torch.tensor(rewards, dtype=torch.float64),
        MASK: mask,
        LOG_PROBS: log_probs,
    }
    return TensorDict(columns, batch_size=[count])


def stages(**gate):
    return {
        "gate": CompletenessGate(group_size=4, **gate),
        "collapse": FanOutCollapse(),
        "advantage": GroupRelativeAdvantage(scale="none"),
    }


def advantages(pipeline, batch):
    return [round(each, 3) for each in pipeline(batch)["advantage"].flatten().tolist()]


def by_hand(batch):
    """R − the mean R of the group over rollouts with a token in the loss, and 0 for other rollouts."""
    rollouts, groups = batch["rollout_id"].tolist(), batch["group_id"].tolist()
    rewards = batch["next", "reward"].tolist()
    trains = (batch[MASK] & batch[LOG_PROBS].isfinite()).any(1).tolist()
    lives = {rollout for rollout, has_token in zip(rollouts, trains, strict=True) if has_token}
    found = []
    for rollout, group, reward in zip(rollouts, groups, rewards, strict=True):
        paid = {
            other: each
            for other, home, each in zip(rollouts, groups, rewards, strict=True)
            if home == group and other in lives
        }
        found.append(round(reward - sum(paid.values()) / len(paid), 3) if rollout in lives else 0.0)
    return found


def test_an_empty_rollout_of_four_leaves_a_mean_over_three():
    """NVIDIA-NeMo/RL #3467 asks for these numbers."""
    batch = rows_of([1.0, 1, 0, 0], [2, 0, 2, 2])
    assert advantages(Pipeline(stages()), batch) == [0.667, 0.0, -0.333, -0.333]
    assert advantages(Pipeline(stages(empty="count")), batch) == [0.5, 0.5, -0.5, -0.5]
    with pytest.raises(BatchError, match=r"each rollout needs at least one token in the loss.*rollout 1\b"):
        Pipeline(stages(empty="raise"))(batch)


def test_the_ledger_names_empty_rollouts_and_the_group_is_complete():
    pipeline = Pipeline(stages())
    pipeline(rows_of([1.0, 1, 0, 0], [2, 0, 2, 2]))
    assert pipeline.ledger.counts()["gate/empty"] == 1
    assert pipeline.ledger.rows("gate/empty") == [{"row": 1, "rollout": 1, "group": 0}]
    assert pipeline.metrics["gate/incomplete_rows"] == 0


def test_the_advantage_excludes_empty_rollouts_as_a_loop_does():
    """Some rollouts of these random groups are empty, and some rows have no log-probabilities."""
    generator = torch.Generator().manual_seed(0)

    def draw(high, count):
        return torch.randint(0, high, (count,), generator=generator).tolist()

    for _ in range(60):
        rollouts = [each for each, rows in enumerate(draw(3, 12)) for _ in range(rows + 1)]
        groups = [rollout // 4 for rollout in rollouts]
        paid = draw(4, 12)
        tokens = [each - 1 if each else 0 for each in draw(4, len(rollouts))]
        unscored = [row for row, each in enumerate(draw(6, len(rollouts))) if each == 0]
        batch = rows_of([float(paid[each]) for each in rollouts], tokens, rollouts, groups, unscored=unscored)
        assert advantages(Pipeline(stages()), batch) == by_hand(batch)
        # Without a gate, the option of the pipeline applies. The reward of an excluded rollout is not read.
        trains = (batch[MASK] & batch[LOG_PROBS].isfinite()).any(1)
        alive = {each for each, has_token in zip(rollouts, trains.tolist(), strict=True) if has_token}
        lost = torch.tensor([each not in alive for each in rollouts])
        reward = torch.where(lost, NAN, batch["next", "reward"])
        without = stages()
        del without["gate"]
        assert advantages(Pipeline(without), batch.clone().set(("next", "reward"), reward)) == by_hand(batch)


def test_a_group_is_judged_without_empty_rollouts():
    """The rewards are 9, 1, 1 and 1. If the first rollout is empty, the counted rewards are equal."""
    chain = stages() | {"filter": SampleFilter(criterion=RewardsVary(), action="drop")}
    order = ["gate", "collapse", "filter", "advantage"]
    assert len(Pipeline(chain, order=order)(rows_of([9.0, 1, 1, 1], [0, 2, 2, 2]))) == 0
    assert len(Pipeline(chain, order=order)(rows_of([9.0, 1, 1, 1], [1, 2, 2, 2]))) == 4


def test_rows_masked_by_a_stage_still_count():
    """Only a rollout that arrives without a token in the loss is empty."""

    def low(batch):
        return batch["next", "reward"].reshape(-1) > 0.5

    chain = {"filter": SampleFilter(criterion=low, action="mask")} | stages()
    assert advantages(Pipeline(chain), rows_of([1.0, 1, 0, 0], [2] * 4)) == [0.5, 0.5, -0.5, -0.5]
    apart = rows_of([1.0, 1, 0, 0], [2] * 4)
    for stage in chain.values():  # each stage alone reads what the stage before it has written
        apart = stage(apart)
    assert apart["advantage"].flatten().tolist() == [0.5, 0.5, -0.5, -0.5]


def test_single_stages_use_the_column_of_the_gate():
    batch = rows_of([1.0, 1, 0, 0], [2, 0, 2, 2])
    for stage in stages().values():
        batch = stage(batch)
    assert batch[COUNTED].tolist() == [True, False, True, True]
    assert [round(each, 3) for each in batch["advantage"].flatten().tolist()] == [0.667, 0.0, -0.333, -0.333]


def test_columns_do_not_depend_on_empty_rollouts():
    some, none = (Pipeline(stages())(rows_of([1.0, 1, 0, 0], tokens)) for tokens in ([2, 0, 2, 2], [2] * 4))
    assert set(some.keys(True, True)) == set(none.keys(True, True))


def test_carried_rows_are_counted_like_other_rows():
    chain = stages() | {"split": ShuffleSplit(minibatch_size=4, remainder="carry"), "weight": LossWeight()}
    pipeline = Pipeline(chain)
    first = rows_of([1.0, 1, 0, 0] * 3, [2, 0, 2, 2] * 3, groups=[0] * 4 + [1] * 4 + [2] * 4)
    pipeline(first)
    second = rows_of([1.0, 1, 0, 0], [2, 0, 2, 2], rollouts=[12, 13, 14, 15], groups=[3] * 4)
    out = pipeline(second)
    assert int(out[COUNTED].sum()) == 3 * len(out) // 4


@pytest.mark.slow
def test_the_reward_of_an_empty_rollout_changes_no_number():
    for recipe in ADVANTAGES:
        if recipe.startswith("as/") and recipe != "as/nemo_rl":
            continue  # these follow their frameworks
        found = []
        for more in (0.0, 3.0):
            batch = collected("uniform", recipe)
            empty = torch.isin(batch["rollout_id"], batch["rollout_id"].unique()[[1, 5]])
            batch[MASK][empty] = False
            batch["next", "reward"][empty] += more
            out = copy.deepcopy(pipeline_of(recipe))(batch)
            by_row = out["headrace", "row"].argsort()
            found.append(out["advantage"][by_row][~empty[out["headrace", "row"][by_row]]])
        assert torch.equal(*found), recipe
        assert found[0].any(), recipe


@pytest.mark.slow
def test_stages_alone_exclude_empty_rollouts_as_a_pipeline_does():
    """There is no gate. A filter masks all rows of another rollout, which still counts."""
    for recipe in ADVANTAGES:
        if recipe.startswith("as/"):
            continue  # these set `empty` for the whole pipeline
        batch = collected("uniform", recipe)
        rollouts = batch["rollout_id"].unique()
        batch[MASK][torch.isin(batch["rollout_id"], rollouts[[1, 5]])] = False
        chain = dict(pipeline_of(recipe).stages.items())
        chain = {name: stage for name, stage in chain.items() if name not in ("gate", "split", "weight")}
        truncated = partial(torch.ne, other=rollouts[2])
        late = {"truncated": SampleFilter(criterion=lambda rows, of=truncated: of(rows["rollout_id"]))}
        if "gae" not in chain:  # a single stage cannot see that tokens were masked
            chain = late | chain
        together, alone = Pipeline(copy.deepcopy(chain))(batch), batch
        for stage in copy.deepcopy(chain).values():
            alone = stage(alone)
        assert together["rollout_id"].tolist() == alone["rollout_id"].tolist(), recipe
        torch.testing.assert_close(together["advantage"], alone["advantage"], msg=recipe)
        assert not bool(together[COUNTED].all()), recipe


@pytest.mark.parametrize("empty", ["count", "exclude"])
def test_stages_alone_follow_the_option_empty_of_the_gate(empty):
    batch = rows_of([1.0, 1, 0, 0], [2, 0, 2, 2])
    together = Pipeline(stages(empty=empty))(batch)
    for stage in stages(empty=empty).values():
        batch = stage(batch)
    assert torch.equal(batch["advantage"], together["advantage"])


@pytest.mark.parametrize("recipe", ["trl", "verl", "skyrl", "prime_rl", "slime", "tinker"])
def test_these_conventions_count_empty_rollouts(recipe):
    """The reward of an empty rollout changes the advantages, as in these frameworks."""
    pipeline = pipeline_of(f"as/{recipe}", gate={"group_size": 4})
    found = []
    for reward in (0.0, 1.0):
        out = pipeline(rows_of([1.0, reward, 0, 0], [2, 0, 2, 2]))
        found.append(out["advantage"].flatten()[out["rollout_id"].argsort()].tolist())
    assert found[0] != found[1]


def test_a_report_has_the_number_of_empty_rollouts():
    run = Pipeline(stages()).run(rows_of([1.0, 1, 0, 0], [2, 0, 2, 2]))
    report = make_report(run)
    assert report.numbers["rollouts/empty"] == 0.25
    assert "rollouts-empty" in [each.name for each in report.advisories]


def test_without_a_gate_the_recipe_decides_about_empty_rollouts():
    """`as/verl` compares all rewards, and `grpo` the rewards of rollouts with tokens in the loss."""
    for recipe, counts in (("as/verl", True), ("grpo", False)):
        pipeline = load_pipeline(f"pipeline={recipe}", "~pipeline.stages.gate")
        found = [
            pipeline(rows_of([1.0, reward, 0, 0.5], [2, 0, 2, 2]))["advantage"].flatten().sort().values
            for reward in (0.0, 1.0)
        ]
        assert (not found[0].equal(found[1])) == counts
    with pytest.raises(BatchError, match="each rollout needs at least one token in the loss"):
        load_pipeline("grpo", "~pipeline.stages.gate", empty="raise")(rows_of([1.0, 0], [1, 0]))
