"""For every recipe, permuting the rows of a batch permutes its advantages bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import with_old
from recipes import ADVANTAGES, BY_TURN, pipeline_of

from headrace.transforms import BatchError

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
    batch["tokens", "full"] %= 2  # so that rollouts share tokens
    with_old(batch, 0.0005)
    return batch, torch.tensor(draw(st.permutations(range(len(rows)))))


def credit_of(recipe, batch):
    """(N, T) advantages in the input's row order, and metrics of stages before the split. None if refused."""
    pipeline = pipeline_of(recipe, **BY_TURN.get(recipe, {}))
    try:
        run = pipeline.run(batch)
        out = run.batch
    except BatchError as err:
        if "at least two rollouts" in str(err):
            return None
        raise
    credit = torch.full((len(batch), 4), float("nan"))
    if len(out):
        credit[out["headrace", "row"]] = out["advantage"].squeeze(-1).expand(-1, 4)
    before = pipeline.order[: pipeline.order.index("split")]
    return credit, {name: each for name, each in run.metrics.items() if name.split("/")[0] in before}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [recipe for recipe in ADVANTAGES if recipe not in RESHAPED])
def test_permuting_rows_permutes_the_bits_of_each_recipe(make_batch, recipe):
    @settings(max_examples=3)
    @given(collected(make_batch, recipe))
    def law(drawn):
        batch, order = drawn
        before, after = credit_of(recipe, batch), credit_of(recipe, batch[order])
        assert (before is None) == (after is None)
        if before is not None:
            (credit, measured), (moved, again) = before, after
            assert torch.equal(moved.nan_to_num(nan=9e9), credit[order].nan_to_num(nan=9e9))
            assert len(measured) >= 4
            assert again == measured

    law()
