"""Rows without ids are grouped by position. The numbers can be checked by hand."""

from __future__ import annotations

import pytest

from headrace.pipeline import Pipeline, make_report
from headrace.transforms import (
    BatchError,
    FanOutCollapse,
    GroupRelativeAdvantage,
    RewardWithin,
    Rows,
    SampleFilter,
)


@pytest.mark.parametrize(
    ("ids", "rewards", "expected"),
    [
        ("absent", [0.0, 2, 10, 14], [-1, 1, -2, 2]),
        ("all unset", [0.0, 2, 10, 14], [-1, 1, -2, 2]),
        ("absent", [0.0, 2, 4], [-2, 0, 2]),  # one group, because these are not 2 · 2 rollouts
    ],
)
def test_rows_without_ids_are_grouped_by_position(ids, rewards, expected, make_batch):
    stage = GroupRelativeAdvantage(scale="none", without_ids=[2, 2], rollout_key=None)
    batch = make_batch(rewards, [-1] * len(rewards))
    batch = batch.exclude("group_id") if ids == "absent" else batch
    assert stage(batch)["advantage"].flatten().tolist() == expected


def test_groups_by_position_count_rollouts_not_rows(make_batch):
    # The first group has the rollouts 5 (two rows) and 6, the second 7 and 8. The means are 1 and 3.
    batch = make_batch([0.0, 0, 2, 2, 4], [0] * 5, [5, 5, 6, 7, 8]).exclude("group_id")
    collapsed = FanOutCollapse(group_key=None)(batch)
    stage = GroupRelativeAdvantage(scale="none", without_ids=[2, 2])
    assert stage(collapsed)["advantage"].flatten().tolist() == [-1, -1, 1, -1, 1]
    assert stage(collapsed)["group_id"].tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("unset", [[0, -1, -1, -1], [-1, -1, -1, 5]])
def test_rows_are_not_grouped_by_position_if_one_has_an_id(unset, make_batch):
    with pytest.raises(BatchError, match="group_id ≥ 0; found -1 at row"):
        GroupRelativeAdvantage(without_ids=[2, 2])(make_batch([0.0, 2, 10, 14], unset))


def test_rows_of_several_ranks_are_not_grouped_by_position(make_batch):
    stage = GroupRelativeAdvantage(without_ids=[2, 1])
    assert not stage.within_groups
    rows = Rows.read(make_batch([0.0, 2], [0, 0]).exclude("group_id"), keys=stage.in_keys).seen_by(stage)
    rows.table.ranks.size = 2
    with pytest.raises(
        BatchError, match=r"without_ids=\[2, 1\] makes groups from row positions, which are not"
    ):
        stage.decide(rows)


@pytest.mark.parametrize(
    ("action", "group", "alone"),
    [("drop", -1, 0.0), ("mask", 0, -4.5)],  # with the reward 9, the mean of its group is 4.5
)
def test_a_dropped_row_counts_in_the_positions_and_is_in_no_group(action, group, alone, make_batch):
    batch = make_batch([0.0, 9, 2, 2, 2, 6], [-1] * 6).exclude("group_id")
    stages = {
        "filter": SampleFilter(criterion=RewardWithin(high=8.0), action=action, unit="sample"),
        "advantage": GroupRelativeAdvantage(scale="none", without_ids=[3, 2]),
    }
    columns = make_report(Pipeline(stages).run(batch)).columns
    assert columns["group_id"].tolist() == [0, group, 1, 1, 2, 2]
    assert columns["advantage"][[0, 2, 3, 4, 5]].tolist() == [alone, 0, 0, -2, 2]
