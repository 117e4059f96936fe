"""Filters, dynamic sampling and the report agree that a group is informative if its advantage is not 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from any_rank import results_of
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from headrace.pipeline import Pipeline, informative, make_report
from headrace.transforms import BestOf, FanOutCollapse, GroupRelativeAdvantage, RewardsVary, SampleFilter

GROUPS, SIZE, COLUMNS = 12, 4, 3
ORDER = ["gate", "collapse", "filter", "advantage", "whitening", "split", "weight"]


def batch(seed: int, *, missing: bool) -> TensorDict:
    """Rollouts have one or two rows. Some groups have different rewards with equal sums."""
    dice = np.random.default_rng(seed)
    rewards = dice.integers(0, 2**20, (GROUPS * SIZE, COLUMNS)) / 2.0**20
    for group in range(0, GROUPS, 3):  # equal sums
        here = slice(SIZE * group, SIZE * group + SIZE)
        rewards[here, 2] = 2 - rewards[here, 0] - rewards[here, 1]
    for group in range(1, GROUPS, 4):  # all equal
        rewards[SIZE * group : SIZE * group + SIZE] = rewards[SIZE * group]
    if missing:
        rewards[dice.random(rewards.shape) < 0.1] = np.nan
    rollout = np.repeat(np.arange(GROUPS * SIZE), dice.integers(1, 3, GROUPS * SIZE))
    columns = {
        "group_id": torch.from_numpy(rollout // SIZE),
        "rollout_id": torch.from_numpy(rollout),
        "expected_rollouts": torch.full((len(rollout),), SIZE),
        ("next", "reward"): torch.from_numpy(rewards[rollout]),
        ("masks", "all_assistant_mask"): torch.ones(len(rollout), 2, dtype=torch.bool),
        ("log_probs", "full"): torch.zeros(len(rollout), 2),
    }
    return TensorDict(columns, batch_size=[len(rollout)])


def made(several: str, *, missing: bool, has_filter: bool) -> Pipeline:
    stages = {
        "collapse": {"columns": COLUMNS, "weights": None},
        "advantage": {"several": several, "weights": None},
        "whitening": None,
    }
    keywords = {"missing": "mask"} if missing else {}
    order = [name for name in ORDER if has_filter or name != "filter"]
    order.remove("whitening")
    filters = ["pipeline.stages.filter={action: drop}"] if has_filter else []
    return composed("gdpo", *filters, stages=stages, order=order, shuffle=False, **keywords)


@pytest.mark.parametrize("several", ["sum", "decoupled"])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), missing=st.booleans())
def test_a_filter_keeps_the_groups_whose_advantage_is_not_0(several, seed, missing):
    rows = batch(seed, missing=missing)
    plain = made(several, missing=missing, has_filter=False).run(rows).batch
    expected = set(plain["group_id"][plain["advantage"].reshape(-1).abs() > 1e-12].tolist())

    filtered = made(several, missing=missing, has_filter=True)
    run = filtered.run(rows)
    assert set(run.batch["group_id"].tolist()) == expected
    numbers = make_report(run).numbers
    assert numbers["groups/informative"] == pytest.approx(len(expected) / GROUPS)
    if expected and not missing:
        stages = [filtered.stages[name] for name in ("gate", "collapse", "filter")]
        (sampled,) = informative([rows], groups=GROUPS, stages=stages, on_short="yield")
        assert set(sampled["group_id"].tolist()) == expected


def groups_on_ranks(rank: int, world: int) -> list[tuple[int, str, set[int], set[int]]]:
    """For each batch, groups that stay and groups that should stay. A rank has every `world`-th rollout."""
    found = []
    for seed in range(12):
        for several in ("sum", "decoupled"):
            rows = batch(seed, missing=bool(seed % 2))
            mine = rows[(rows["rollout_id"] % world == rank).nonzero().flatten()]
            plain = made(several, missing=bool(seed % 2), has_filter=False).run(rows).batch
            expected = set(plain["group_id"][plain["advantage"].reshape(-1).abs() > 1e-12].tolist())
            filtered = made(several, missing=bool(seed % 2), has_filter=True)
            stages = {name: filtered.stages[name] for name in ("gate", "collapse", "filter", "advantage")}
            run = Pipeline(stages, process_group="world", shared_ids="same", patience=60.0).run(mine)
            kept = [set[int]()] * world
            dist.all_gather_object(kept, set(run.batch["group_id"].tolist()))
            found.append((seed, several, set().union(*kept), expected))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_keep_the_groups_that_one_process_keeps(world, tmp_path):
    for of_rank in results_of(groups_on_ranks, world, tmp_path):
        assert len(of_rank) == 24  # 12 seeds, 2 values of `several`
        assert [each for each in of_rank if each[2] != each[3]] == []
        assert any(0 < len(expected) < GROUPS for *_, expected in of_rank)


def test_a_filter_that_judges_another_reward_is_refused():
    collapse, advantage = FanOutCollapse(columns=2), GroupRelativeAdvantage(several="decoupled")
    for criterion, todo in (
        (RewardsVary(), r"Set RewardsVary\(several='decoupled'\)"),
        (BestOf(k=2, by="variance"), "another measure than the variance"),
    ):
        with pytest.raises(ValueError, match=todo):
            Pipeline(
                {"collapse": collapse, "filter": SampleFilter(criterion=criterion), "advantage": advantage}
            )
