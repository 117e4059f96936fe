"""For every recipe, permuting rows permutes the bits, and advantages are bounded."""

from __future__ import annotations

import pytest
import torch
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import with_old
from recipes import ADVANTAGES, BY_TURN, pipeline_of

from headrace.transforms import BatchError, TokenAdvantage

RESHAPED = ("as/slime",)  # has the bits of the reshape formula, which depend on the order
REWARDS = st.one_of(
    st.sampled_from([0.0, 1.0]), st.floats(0, 1, width=32), st.sampled_from([1e4, 1e4 + 2**-9, 1e-20])
)


@st.composite
def collected(draw, make_batch, recipe):
    """Groups of 2 to 5 rollouts of 1 or 2 segments, and an order of the rows."""
    sizes = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    if draw(st.booleans()):
        sizes = [sizes[0]] * len(sizes)
    several = 2 if recipe == "gdpo" else 1
    rows = []
    for group, size in enumerate(sizes):
        for number in range(size):
            likely = st.floats(0, 1, width=32) if recipe == "mgpo" else REWARDS
            reward = [draw(likely) for _ in range(several)]
            rows += [(group, 10 * group + number, reward, k) for k in range(draw(st.integers(1, 2)))]
    groups, rollouts, rewards, segments = (list(column) for column in zip(*rows, strict=True))
    batch = make_batch([r[0] for r in rewards], groups, rollouts, tokens=4)
    if several > 1:
        batch["next", "reward"] = torch.tensor(rewards)
    batch["expected_rollouts"] = torch.tensor([sizes[g] for g in groups])
    batch["state_id"] = torch.arange(len(rows)) % 2
    batch["turn"] = torch.arange(len(rows))
    batch["turn_index"] = torch.tensor([[2 * k, 2 * k, -1, 2 * k + 1] for k in segments])
    batch["masks", "all_assistant_mask"][:, 2] = False
    batch["turn_reward"] = torch.zeros(len(rows), 4).scatter_(1, batch["turn_index"][:, [0, 3]], 0.3)
    batch["turn_reward"] *= batch["next", "reward"].sum(-1, keepdim=True)
    batch["tokens", "full"] %= 2  # so that rollouts share some
    with_old(batch, 0.0005)
    return batch, torch.tensor(draw(st.permutations(range(len(rows)))))


def credit_of(recipe, batch):
    """(N, T) the advantage of each row in the order in which it came in, or None where it is refused."""
    try:
        out = pipeline_of(recipe, **BY_TURN.get(recipe, {}))(batch)
    except BatchError as err:
        if "at least two rollouts" in str(err):
            return None
        raise
    credit = torch.full((len(batch), 4), float("nan"))
    if len(out):
        credit[out["headrace", "row"]] = out["advantage"].squeeze(-1).expand(-1, 4)
    return credit


def bound_of(pipeline, batch, largest_group):
    """What no advantage exceeds, from the options of the recipe's stages."""
    rows = len(batch)
    if "turns" in pipeline.order:  # twice a return, of up to four turns and an outcome
        return 2 * float(4 * batch["turn_reward"].abs().max() + batch["next", "reward"].abs().max())
    stage = pipeline.stages["tree" if "tree" in pipeline.order else "advantage"]
    reward = batch["next", "reward"].reshape(rows, -1)
    worth = reward
    if "states" in pipeline.order:  # where a rollout is worth what its segments are together
        whose = batch["rollout_id"].flatten().unique(return_inverse=True)[1]
        worth = torch.cat([reward, torch.zeros_like(reward).index_add_(0, whose, reward)[whose]])
    spread = float(worth.max() - worth.min())
    if "relative_length" in pipeline.order:  # which may double a reward
        spread += float(reward.abs().max())
    absolute = float(reward.abs().max()) if stage.baseline == "none" else 0.0
    found = {
        # No member of n is further from their mean than (n - 1)/√n of their std, nor from another member
        # than √(2 (n - 1)).
        "group": 2 * (2 * largest_group) ** 0.5,
        "leave_one_out": 2 * max(spread, spread / max(getattr(stage, "eps", 1.0), 1e-9)),
        "mad": spread + spread / max(getattr(stage, "eps", 1.0), 1e-9),
        "batch": (2 * rows) ** 0.5,
        "mean": float(largest_group),
        "nonzero": spread * rows,
        "none": spread * largest_group / (largest_group - 1) + absolute + abs(getattr(stage, "shift", 0.0)),
    }[getattr(stage, "scale", "none")]
    if "whitening" in pipeline.order:
        return 2 * float(batch["masks", "all_assistant_mask"].sum()) ** 0.5
    found *= 1.01 if "correction" in pipeline.order else 1.0  # no token is further from the sampler
    for name in pipeline.order:  # what a term adds is at most as large as a log-probability, and its mean
        if isinstance(term := pipeline.stages[name], TokenAdvantage):
            found = found * 2 if term.how == "multiply" else found + 2 * abs(term.factor)
    # Each step is compared once more, by its return.
    return found + (spread if "states" in pipeline.order else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ADVANTAGES)
def test_row_order_permutes_the_bits_and_advantages_are_bounded(make_batch, recipe):
    @settings(max_examples=5)
    @given(collected(make_batch, recipe))
    def law(drawn):
        batch, order = drawn
        before, after = credit_of(recipe, batch), credit_of(recipe, batch[order])
        assert (before is None) == (after is None)
        if before is None:
            return
        if recipe not in RESHAPED:
            assert torch.equal(after.nan_to_num(nan=9e9), before[order].nan_to_num(nan=9e9))
        bound = bound_of(composed(f"pipeline={recipe}"), batch, int(batch["expected_rollouts"].max()))
        assert float(before.nan_to_num().abs().max()) <= bound * (1 + 1e-5)

    law()
