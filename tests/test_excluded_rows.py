"""Excluded rows change no other row's advantage, and the report shows the advantages that train."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.pipeline import Pipeline, make_report, write_dump
from headrace.pipeline.sources import open_source
from headrace.transforms import (
    BatchError,
    BatchWhitening,
    FanOutCollapse,
    Finite,
    GroupRelativeAdvantage,
    RewardsToGo,
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
        "states": StateAdvantage(),
    }
    # By hand: rewards and returns 1, 3, 5, each compared twice with their mean.
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
    assert report.numbers["reward/all/mean"] == pytest.approx(3.4)
    assert report.numbers["reward/all/min"] == 1.0


@pytest.mark.parametrize("action", ["exclude", "drop"])
def test_a_rollout_is_reported_by_its_trained_advantage(make_batch, action):
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


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_reward_weights_are_applied_once_in_a_dump(make_batch, tmp_path, format):
    stages = {"collapse": FanOutCollapse(weights=[0.5]), "advantage": GroupRelativeAdvantage(scale="none")}
    report = make_report(Pipeline(stages).run(make_batch([1.0, 2.0, 3.0], [0, 0, 0])))
    write_dump(report, tmp_path, format=format)
    [(_, again)] = open_source(tmp_path)
    assert Pipeline(stages)(again)["advantage"].flatten().tolist() == report.columns["advantage"].tolist()


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_missing_reward_is_read_back_as_missing(make_batch, tmp_path, format):
    stages = {
        "collapse": FanOutCollapse(missing="skip"),
        "advantage": GroupRelativeAdvantage(scale="none", missing="skip"),
    }
    report = make_report(Pipeline(stages).run(make_batch([NAN, 2.0, 3.0], [0, 0, 0])))
    write_dump(report, tmp_path, format=format)
    [(_, again)] = open_source(tmp_path)
    np.testing.assert_array_equal(again["next", "reward"].flatten().numpy(), [NAN, 2.0, 3.0])
    assert Pipeline(stages)(again)["advantage"].flatten().tolist() == [0.0, -0.5, 0.5]


def test_a_nan_advantage_is_not_whitened(make_batch):
    batch = make_batch([0.0] * 3, [0] * 3)
    batch["advantage"] = torch.tensor([1.0, NAN, 2.0]).view(3, 1, 1)
    with pytest.raises(BatchError, match=r"needs finite advantages .* found nan at row 1$"):
        BatchWhitening(per="sample")(batch)
