"""Numbers that can be checked by hand, each with its source."""

from __future__ import annotations

import pytest
import torch

from headrace.transforms import (
    FanOutCollapse,
    GroupRelativeAdvantage,
    group_relative_advantage,
)

# group means 2 (1 and 3: the second rollout votes once though it has two rows) and 8
FAN_OUT = ([1.0, 3, 3, 5, 11], [0, 0, 0, 1, 1], [0, 1, 1, 2, 3], [-1.0, 1, 1, -3, 3])
# group means 1/2 (0 and 1) and 3 (2 and 4)
DEEP_FAN_OUT = (
    [0.0, 1, 1, 1, 2, 2, 4],
    [0, 0, 0, 0, 1, 1, 1],
    [10, 11, 11, 11, 20, 20, 21],
    [-0.5, 0.5, 0.5, 0.5, -1, -1, 1],
)
PER_BATCH = {"chunks": None, "rigid_or_global": 2}  # groups


@pytest.mark.parametrize(("reward", "groups", "rollouts", "expected"), [FAN_OUT, DEEP_FAN_OUT])
def test_two_stages_give_the_numbers_of_the_function(reward, groups, rollouts, expected, make_batch):
    batch = GroupRelativeAdvantage(scale="none")(FanOutCollapse()(make_batch(reward, groups, rollouts)))
    assert batch["advantage"].shape == (len(reward), 1, 1)
    assert batch["advantage"].flatten().tolist() == expected


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


def test_the_example_of_slime_from_rewards_to_loss(make_batch):
    """Rewards 1, 3 | 5, two groups: the third rollout is alone in its group and has advantage 0.

    The clipped policy loss is −min(ρA, clip(ρ, 1 ± 0.2)A) with ρ = exp(−kl). A = −0.7071 with ρ = 1 gives
    0.7071; A = 0.7071 with ρ = exp(−0.3) = 0.7408 gives −0.5238; A = 0 gives 0: mean 0.0610897. Whitening all
    three together, what uneven groups collapse into where groups are guessed, gives −1, 0, 1 and −0.0666667.
    """
    batch = make_batch([1.0, 3.0, 5.0], [0, 0, 1])
    advantage = GroupRelativeAdvantage()(FanOutCollapse()(batch))["advantage"].flatten().double()

    def clipped_loss(credit: torch.Tensor) -> float:
        ratio = torch.exp(-torch.tensor([0.0, 0.3, -0.2], dtype=torch.float64))
        return float(-torch.minimum(ratio * credit, ratio.clamp(0.8, 1.2) * credit).mean())

    assert clipped_loss(advantage) == pytest.approx(0.0610897, abs=1e-7)
    whitened = group_relative_advantage([1.0, 3.0, 5.0], [0, 0, 0], eps=0.0).double()
    assert clipped_loss(whitened) == pytest.approx(-0.0666666, abs=1e-6)
