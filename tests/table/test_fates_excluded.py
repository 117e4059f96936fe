"""Excluded rows change no other row's advantage, and the report shows the advantages that train."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from batches import batch_of
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pipeline import Pipeline, make_report, write_dump
from headrace.pipeline.tools.dumps.readers import open_dump
from headrace.transforms import (
    BatchError,
    BatchWhitening,
    BestOf,
    FanOutCollapse,
    Finite,
    GroupRelativeAdvantage,
    LengthPenalty,
    NotTruncated,
    RewardsToGo,
    RewardsVary,
    SampleFilter,
    StateAdvantage,
)

NAN = float("nan")


def below(limit):
    def criterion(batch):
        return batch["next", "reward"].reshape(-1) < limit

    return criterion


@pytest.mark.parametrize("value", [100.0, 1000.0, float("inf")])
def test_an_excluded_reward_changes_no_other_row(make_batch, value):
    batch = make_batch([1.0, value, 3.0, 5.0], [0] * 4, [0, 0, 1, 2])
    batch["state_id"] = torch.zeros(4, dtype=torch.int64)
    stages = {
        "filter": SampleFilter(criterion=below(50.0), action="exclude"),
        "collapse": FanOutCollapse(reward="sum"),
        "returns": RewardsToGo(),
        "advantage": GroupRelativeAdvantage(scale="none"),
        "states": StateAdvantage(weight=1.0),
    }
    # Two advantages are added: of the rewards 1, 3, 5 and of the equal returns, each against the mean 3.
    assert Pipeline(stages)(batch)["advantage"].flatten().tolist() == [-4.0, 0.0, 0.0, 4.0]


def test_the_report_excludes_rows_from_group_statistics(make_batch):
    batch = make_batch([NAN, 1.0, 1.0, 3.0, 5.0, 7.0], [0, 0, 0, 1, 1, 1])
    stages = {
        "filter": SampleFilter(criterion=Finite(), action="exclude"),
        "collapse": FanOutCollapse(),
        "advantage": GroupRelativeAdvantage(scale="none"),
    }
    report = make_report(Pipeline(stages).run(batch))
    assert report.groups["reward_mean"].tolist() == [1.0, 5.0]
    assert report.groups["zero_variance"].tolist() == [True, False]
    assert report.numbers["reward/all/mean"] == pytest.approx(3.4)  # of 1, 1, 3, 5 and 7
    assert report.numbers["reward/all/min"] == 1.0


@pytest.mark.parametrize("action", ["exclude", "drop"])
def test_the_report_shows_the_advantage_with_which_a_rollout_trains(make_batch, action):
    batch = make_batch([9.0, 1.0, 3.0, 5.0], [0] * 4, [0, 0, 1, 2])
    stages = {
        "filter": SampleFilter(criterion=below(8.0), action=action),
        "collapse": FanOutCollapse(reward="sum"),
        "advantage": GroupRelativeAdvantage(scale="none"),
    }
    report = make_report(Pipeline(stages).run(batch))
    assert report.rollouts["reward"].tolist() == [1.0, 3.0, 5.0]
    assert report.rollouts["advantage"].tolist() == [-2.0, 0.0, 2.0]
    assert report.numbers["reward/effective/mean"] == 3.0


ABOUT = ("reward", "frac_reward_zero_std", "solve_", "groups/informative", "groups/equal")
CRITERIA = {
    "rewards_vary": RewardsVary,
    "not_truncated": NotTruncated,
    "best_of": partial(BestOf, k=1),
    "finite": Finite,
}


@pytest.mark.slow
@settings(max_examples=40)
@given(st.sampled_from(list(CRITERIA)), st.data())
def test_no_number_about_the_rewards_of_groups_depends_on_the_action_of_a_filter(criterion, data):
    size = data.draw(st.integers(2, 8))
    several = st.sampled_from([0.0, 1.0, NAN] if criterion == "finite" else [0.0, 1.0])
    rollouts = sorted(data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)))
    rewards = [data.draw(several) for _ in range(6)]
    batch = batch_of([rewards[r] for r in rollouts], [r // 3 for r in rollouts], rollouts)
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    batch["masks", "all_assistant_mask"] = torch.arange(4) < lengths.unsqueeze(1)
    batch["status"] = torch.tensor([data.draw(st.integers(0, 1)) for _ in rollouts])
    found = []
    for action in ("mask", "exclude", "drop"):
        stages = {
            "collapse": FanOutCollapse(missing="skip"),
            "length": LengthPenalty(coefficient=0.25),
            "filter": SampleFilter(criterion=CRITERIA[criterion](), action=action),
            "advantage": GroupRelativeAdvantage(scale="none", missing="skip"),
        }
        report = make_report(Pipeline(stages).run(batch), solved=0.5)
        groups = {k: v.tolist() for k, v in report.groups.items() if k.startswith(("reward", "zero"))}
        numbers = {k: v for k, v in report.numbers.items() if k.startswith(ABOUT) and "effective" not in k}
        found.append((groups, numbers))
    np.testing.assert_equal(found[1], found[0])
    np.testing.assert_equal(found[2], found[0])


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_reward_weights_are_applied_once_in_a_dump(make_batch, tmp_path, format):
    stages = {"collapse": FanOutCollapse(weights=[0.5]), "advantage": GroupRelativeAdvantage(scale="none")}
    report = make_report(Pipeline(stages).run(make_batch([1.0, 2.0, 3.0], [0, 0, 0])))
    write_dump(report, tmp_path, format=format)
    [(_, again)] = open_dump(tmp_path)
    assert Pipeline(stages)(again)["advantage"].flatten().tolist() == report.columns["advantage"].tolist()


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_missing_reward_is_read_back_as_missing(make_batch, tmp_path, format):
    stages = {
        "collapse": FanOutCollapse(missing="skip"),
        "advantage": GroupRelativeAdvantage(scale="none", missing="skip"),
    }
    report = make_report(Pipeline(stages).run(make_batch([NAN, 2.0, 3.0], [0, 0, 0])))
    write_dump(report, tmp_path, format=format)
    [(_, again)] = open_dump(tmp_path)
    np.testing.assert_array_equal(again["next", "reward"].flatten().numpy(), [NAN, 2.0, 3.0])
    assert Pipeline(stages)(again)["advantage"].flatten().tolist() == [0.0, -0.5, 0.5]


def test_whitening_refuses_a_nan_advantage(make_batch):
    batch = make_batch([0.0] * 3, [0] * 3)
    batch["advantage"] = torch.tensor([1.0, NAN, 2.0]).view(3, 1, 1)
    with pytest.raises(BatchError, match=r"needs finite advantages .* found nan at row 1$"):
        BatchWhitening(per="sample")(batch)
