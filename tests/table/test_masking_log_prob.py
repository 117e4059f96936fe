"""Under ``masked_log_prob=keep``, a loss that is written as documented is finite."""

from __future__ import annotations

import math

import pytest
import torch
from any_rank import collected
from batches import batch_of
from composed import composed
from hypothesis import given
from hypothesis import strategies as st
from recipes import CHAINS, of, pipeline_of
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import Pipeline, load_pipeline
from headrace.transforms import (
    BatchError,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LossWeight,
    RewardWithin,
    SampleFilter,
    ShuffleSplit,
    TokenFilter,
    split_microbatches,
)

MASK, LOG_PROBS = ("masks", "all_assistant_mask"), ("log_probs", "full")


def high_entropy(batch: TensorDict) -> torch.Tensor:
    return batch["entropy", "full"] > 0.4


def seven_rows(seed: int) -> TensorDict:
    """Rows for two filters: one removes a row, and the other some tokens.

    Some tokens out of the loss have NaN or −inf. One token in the mask has NaN.
    """
    batch = batch_of([1.0, 3.0, 9.0, 2.0, 4.0, 4.5, 0.0], [0, 0, 0, 1, 1, 1, 1], tokens=5)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(7, 5, generator=generator) < 0.6
    mask[:, 1] = True
    batch[MASK] = mask
    batch["entropy", "full"] = torch.rand(7, 5, generator=generator).index_fill(1, torch.tensor([1]), 0.9)
    log_probs = -torch.rand(7, 5, generator=generator) - 0.1
    nothing = torch.where(torch.rand(7, 5, generator=generator) < 0.5, torch.nan, -torch.inf)
    batch[LOG_PROBS] = torch.where(mask | (torch.rand(7, 5, generator=generator) < 0.5), log_probs, nothing)
    batch[LOG_PROBS][3, 1] = torch.nan
    batch["ref_log_probs", "full"] = torch.where(mask, log_probs, torch.nan)
    return batch.exclude("prompt_text")


def stages(way: str) -> dict:
    return {
        "collapse": FanOutCollapse(),
        "filter": None
        if way == "tokens"
        else SampleFilter(criterion=RewardWithin(high=5.0), action="exclude"),
        "advantage": GroupRelativeAdvantage(scale="none"),
        "tokens": None if way == "rows" else TokenFilter(criterion=high_entropy),
    }


def trains(batch: TensorDict, way: str, row: int, token: int) -> bool:
    rows = way == "tokens" or float(batch["next", "reward"][row]) <= 5.0
    tokens = way == "rows" or float(batch["entropy", "full"][row, token]) > 0.4
    said = math.isfinite(float(batch[LOG_PROBS][row, token]))
    return rows and tokens and said and bool(batch[MASK][row, token])


def policy_loss(theta, token, log_prob, ref_log_prob, advantage):
    """The clipped loss of a token with a KL term, in plain PyTorch, for numbers or columns."""
    new = theta.log_softmax(0)[token]
    ratio = (new - log_prob).exp()
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return 0.1 * ((ref_log_prob - new).exp() - (ref_log_prob - new) - 1) - clipped


def gradient_by_loops(batch: TensorDict, way: str) -> torch.Tensor:
    """The gradient of the mean loss over the tokens that train, computed token by token."""
    theta = torch.linspace(-1, 1, 9, dtype=torch.float64, requires_grad=True)
    rewards, groups = batch["next", "reward"].flatten().tolist(), batch["group_id"].tolist()
    losses = []
    for row in range(len(batch)):
        mates = [
            reward
            for reward, group in zip(rewards, groups, strict=True)
            if group == groups[row] and (way == "tokens" or reward <= 5.0)
        ]
        advantage = rewards[row] - sum(mates) / len(mates)
        for token in range(5):
            if trains(batch, way, row, token):
                numbers = [float(batch[key][row, token]) for key in (LOG_PROBS, ("ref_log_probs", "full"))]
                losses.append(policy_loss(theta, batch["tokens", "full"][row, token], *numbers, advantage))
    (sum(losses) / len(losses)).backward()
    return theta.grad


@pytest.mark.slow
@given(
    choose=st.sampled_from(["product", "where"]),
    way=st.sampled_from(["rows", "tokens", "both"]),
    seed=st.integers(0, 99),
    ragged=st.booleans(),
    shuffle=st.booleans(),
    cut=st.sampled_from(
        [{}, {"microbatches": 3, "remainder": "pad"}, {"max_tokens": 11, "remainder": "pad"}]
    ),
    halves=st.booleans(),
)
def test_under_keep_the_documented_loss_is_finite_and_correct_in_plain_pytorch(
    choose, way, seed, ragged, shuffle, cut, halves
):
    batch = seven_rows(seed)
    expected = gradient_by_loops(batch, way)
    rows = lazy_stack(list(batch.unbind(0))) if ragged else batch
    split = ShuffleSplit(minibatches=1, seed=seed, shuffle=shuffle, **cut)
    named = stages(way) | {"split": split, "weight": LossWeight()}
    pipeline = Pipeline(named, masked_log_prob="keep")
    before = rows.clone()
    if halves:
        first, pipeline = pipeline.halves()
        rows = first(rows)
    theta = torch.linspace(-1, 1, 9, dtype=torch.float64, requires_grad=True)
    for minibatch in pipeline.minibatches(rows):
        for part in split_microbatches(minibatch):
            mask, weight = part[MASK], part["loss_weight"].unsqueeze(-1)
            columns = part["tokens", "full"], part[LOG_PROBS], part["ref_log_probs", "full"]
            loss = policy_loss(theta, *columns, part["advantage"].reshape(-1, 1))
            loss = mask * loss if choose == "product" else torch.where(mask, loss, 0.0)
            (weight * loss).sum().backward()
    torch.testing.assert_close(theta.grad, expected, rtol=1e-5, atol=1e-6)
    if not halves:
        assert all(
            torch.equal(rows[key].nan_to_num(7.0), before[key].nan_to_num(7.0)) for key in (LOG_PROBS, MASK)
        ), "the rows of the caller stay as they were"


PER_TOKEN = [
    (name, "full") for name in ("log_probs", "old_log_probs", "ref_log_probs", "teacher_log_probs", "entropy")
]


@pytest.mark.slow
def test_under_keep_every_recipe_leaves_only_finite_numbers():
    """Each column that a loss may read is finite after it is multiplied by the loss mask, in all rows."""
    for number, recipe in enumerate(CHAINS):
        batch = collected(("uniform", "uneven")[number % 2], recipe)
        mask = batch[MASK]
        for key in PER_TOKEN:
            batch[key] = torch.where(mask, batch[key], torch.nan)
        cut = {"microbatches": 3, "remainder": "pad"}
        pipeline = Pipeline(dict(pipeline_of(recipe, split=cut).stages.items()), masked_log_prob="keep")
        with of(recipe):
            (minibatch,) = pipeline.minibatches(batch)
            mask = minibatch[MASK]
            padding = minibatch.get(("headrace", "padding"), torch.zeros(len(mask), dtype=torch.bool))
            assert not mask[padding].any()
            for key in [*PER_TOKEN, "importance_weight", "advantage", "loss_weight"]:
                column = minibatch.get(key, None)
                if column is not None:
                    wide = column.reshape(len(column), -1)
                    assert (wide * mask[:, :1] if wide.shape[1] == 1 else wide * mask).isfinite().all(), key


def test_under_keep_a_loss_mask_is_required():
    batch = seven_rows(1).exclude(MASK)
    out = SampleFilter(criterion=RewardWithin(high=5.0))
    assert Pipeline({"collapse": FanOutCollapse(), "filter": out})(batch)[LOG_PROBS][2].isnan().all()
    with pytest.raises(
        BatchError, match=r"1 row must be masked out of the loss, but .* under masked_log_prob='keep'"
    ):
        Pipeline({"collapse": FanOutCollapse(), "filter": out}, masked_log_prob="keep")(batch)
    split = ShuffleSplit(minibatches=1, microbatches=2, remainder="pad")
    with pytest.raises(BatchError, match=r"in \('masks', 'all_assistant_mask'\) \(loss_mask_key\), and the"):
        Pipeline({"split": split}, masked_log_prob="keep")(batch)


@pytest.mark.slow
def test_every_recipe_has_the_option_masked_log_prob():
    assert composed("pipeline=dapo").masked_log_prob == "nan"
    assert load_pipeline("as/verl", masked_log_prob="keep").halves()[1].masked_log_prob == "keep"
    with pytest.raises(Exception, match="masked_log_prob must be one of 'nan', 'keep'; got 'zero'"):
        load_pipeline("grpo", masked_log_prob="zero")
