"""The share of a row in the gradient equals that of a loop over its tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import lazy_stack

from headrace.pipeline import Pipeline, make_report
from headrace.pipeline.tools.report import gradient_cosine, gradient_share
from headrace.transforms import GroupRelativeAdvantage, LossWeight, ShuffleSplit, TokenFilter

pytestmark = pytest.mark.slow

ROW = st.tuples(st.sampled_from([0, 0, 1]), st.floats(-4, 4), st.floats(0, 2), st.integers(0, 9))


@given(st.lists(ROW, max_size=12))
def test_a_share_is_a_sum_over_the_tokens_of_a_trained_row(rows):
    size = [
        sum(abs(advantage) * weight for _ in range(tokens)) if code == 0 else 0.0
        for code, advantage, weight, tokens in rows
    ]
    names = ("reason", "advantage", "loss_weight", "tokens")
    columns = {name: np.array([row[k] for row in rows]) for k, name in enumerate(names)}
    share = gradient_share(columns)
    assert share == pytest.approx([each / (sum(size) or 1.0) for each in size])
    assert not len(rows) or share.sum() == pytest.approx(1.0 if sum(size) else 0.0)


def test_rows_without_an_advantage_have_no_share():
    columns = {"reason": np.zeros(3, int), "advantage": np.array([1.0, np.nan, -1.0])}
    assert gradient_share(columns).tolist() == [0.5, 0, 0.5]
    assert gradient_share({"reason": np.zeros(2, int)}).tolist() == [0, 0]


def credit_by_token(batch):
    """The advantages of tokens alternate between 1 and −1. Their mean is 0 over two tokens, ⅓ over three."""
    mask = batch["masks", "all_assistant_mask"]
    signs = 1.0 - 2.0 * (torch.arange(mask.shape[1]) % 2)
    return batch.set("advantage", signs.expand(mask.shape).unsqueeze(-1).clone())


@pytest.mark.parametrize("ragged", [False, True])
def test_a_share_uses_the_sizes_of_token_advantages(make_batch, ragged):
    batch = make_batch([1.0, 2.0], [0, 0])
    batch["masks", "all_assistant_mask"] = torch.tensor([[True, True, False], [True, True, True]])
    batch["log_probs", "full"] = torch.zeros(2, 3)
    batch["tokens", "full"] = torch.zeros(2, 3, dtype=torch.int64)
    rows = lazy_stack([row.clone() for row in batch.unbind(0)]) if ragged else batch

    def credit(rows):
        done = [credit_by_token(row[None])[0] for row in rows.unbind(0)]
        return lazy_stack(done) if ragged else torch.stack(done)

    columns = make_report(Pipeline({"credit": credit, "weight": LossWeight(unit="token")}).run(rows)).columns
    assert columns["advantage"] == pytest.approx([0, 1 / 3])
    assert gradient_share(columns) == pytest.approx([2 / 5, 3 / 5])


def test_the_cosine_uses_signed_weights():
    columns = {"reason": np.zeros(3, int), "tokens": np.array([1, 2, 3])}
    one = columns | {"advantage": np.array([1.0, -1.0, 0.5])}
    other = columns | {"advantage": np.array([1.0, 1.0, 0.5]), "loss_weight": np.array([1.0, 0.5, 2.0])}
    a, b = np.array([1, -2, 1.5]), np.array([1, 1, 3.0])
    assert gradient_cosine(one, other) == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)))
    assert gradient_cosine(one, one) == pytest.approx(1)
    assert np.isnan(gradient_cosine(one, one | {"reason": np.ones(3, int)}))
    tiny = one | {"advantage": 1e-200 * one["advantage"]}
    assert gradient_cosine(tiny, tiny) == pytest.approx(1)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("fold", ["none", "sum", "token_mean"])
def test_shares_use_the_tokens_and_weights_in_the_loss(make_batch, fold, cut):
    """A TokenFilter masks some tokens. With `fold`, the advantage includes the loss weight."""
    batch = make_batch([1.0, 0, 3, 2.5], [0, 0, 1, 1])
    mask = batch["masks", "all_assistant_mask"]
    mask[:, :4] = torch.arange(4) < torch.tensor([[1], [4], [2], [3]])
    batch["even"] = torch.tensor([[1], [0], [1], [0]]).expand(mask.shape).clone()
    tokens = TokenFilter(criterion=lambda rows: torch.arange(mask.shape[1]) % 2 + rows["even"] > 0)
    stages = {"advantage": GroupRelativeAdvantage(scale="none"), "tokens": tokens}
    if cut:
        stages["split"] = ShuffleSplit(minibatches=1, shuffle=False)
    stages["weight"] = LossWeight(unit="sample", fold=fold)
    run = Pipeline(stages).run(batch)
    trained, size = run.batch, []
    for row in range(4):
        weight = trained["loss_weight"][row] if fold == "none" else 1.0
        tokens = int(trained["masks", "all_assistant_mask"][row].sum())
        size.append(float(sum(abs(trained["advantage"][row].sum()) * weight for _ in range(tokens))))
    columns = make_report(run).columns
    assert gradient_share(columns) == pytest.approx([each / sum(size) for each in size])
    plain = np.sign(columns["advantage"]) * size
    factors = np.array([1, 2, 0, -1])
    other, changed = columns | {"advantage": columns["advantage"] * factors}, plain * factors
    expected = plain @ changed / np.sqrt((plain @ plain) * (changed @ changed))
    assert gradient_cosine(columns, other) == pytest.approx(expected)
