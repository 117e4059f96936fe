"""Numbers that can be checked by hand, each with its source."""

from __future__ import annotations

import pytest

from headrace.transforms import (
    FanOutCollapse,
    GroupRelativeAdvantage,
)

PER_BATCH = {"chunks": None, "rigid_or_global": 2}  # groups


@pytest.mark.parametrize("mode", ["chunks", "rigid_or_global"])
@pytest.mark.parametrize("ids", ["absent", "all unset"])
def test_groups_by_position_with_a_matching_count(mode, ids, make_batch):
    stage = GroupRelativeAdvantage(
        scale="none", without_ids=mode, group_size=2, groups_per_batch=PER_BATCH[mode], rollout_key=None
    )
    batch = make_batch([0.0, 2, 10, 14], [-1] * 4)
    batch = batch.exclude("group_id") if ids == "absent" else batch
    assert stage(batch)["advantage"].flatten().tolist() == [-1, 1, -2, 2]


@pytest.mark.parametrize(("mode", "expected"), [("chunks", [-1, 1, 0]), ("rigid_or_global", [-2, 0, 2])])
def test_groups_by_position_without_a_matching_count(mode, expected, make_batch):
    # chunks: (0, 2) and a lone 4; one global group has the mean 2
    stage = GroupRelativeAdvantage(
        scale="none", without_ids=mode, group_size=2, groups_per_batch=PER_BATCH[mode], rollout_key=None
    )
    batch = make_batch([0.0, 2, 4], [0, 0, 0]).exclude("group_id")
    assert stage(batch)["advantage"].flatten().tolist() == expected


def test_chunks_count_rollouts_not_rows(make_batch):
    # rollouts 5 (two rows), 6 | 7, 8: means 1 and 3
    batch = make_batch([0.0, 0, 2, 2, 4], [0] * 5, [5, 5, 6, 7, 8]).exclude("group_id")
    collapsed = FanOutCollapse(group_key=None)(batch)
    stage = GroupRelativeAdvantage(scale="none", without_ids="chunks", group_size=2)
    assert stage(collapsed)["advantage"].flatten().tolist() == [-1, -1, 1, -1, 1]
    assert stage(collapsed)["group_id"].tolist() == [0, 0, 0, 1, 1]
