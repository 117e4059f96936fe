"""Whitening gives mean 0 and standard deviation 1, and exactly 0 for equal values."""

from __future__ import annotations

import math
import random
import re
import statistics
from itertools import product

import pytest
import torch
from batches import batch_of
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from headrace.transforms import BatchError, BatchWhitening, whiten
from headrace.transforms.table.schema import COUNTED, REWARD

NUMBERS = st.integers(-1000, 1000).map(lambda x: x / 10)
MODES = ["variance", "add", "clamp"]


@given(
    st.lists(st.tuples(NUMBERS, st.integers(0, 4)), min_size=1, max_size=12),
    st.sampled_from([0.0, 1e-8, 0.5]),
    st.sampled_from(MODES),
)
def test_whitening_equals_its_definition(rows, eps, eps_mode):
    """In the reference, each value is repeated as often as its weight says."""
    values, weights = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    each = [x for x, w in rows for _ in range(w)]
    found = whiten(values, weights, eps=eps, eps_mode=eps_mode)
    if len(set(each)) < 2:
        assert (found == 0).all()
        return
    mean = statistics.fmean(each)
    variance = sum((x - mean) ** 2 for x in each) / (len(each) - 1)
    by = {"variance": (variance + eps) ** 0.5, "add": variance**0.5 + eps, "clamp": max(variance**0.5, eps)}
    expected = [(x - mean) / by[eps_mode] if w else 0.0 for x, w in rows]
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_equal_values_become_exactly_0_although_their_mean_is_rounded():
    """A row with weight 0 changes nothing, and also gets 0."""
    for value, eps, eps_mode in product((0.1, -0.7, 1e-30, 3e20), (0.0, 1e-8), MODES):
        values = torch.tensor([value, value, value, value + 1], dtype=torch.float64)
        for some, weights in ((values[:3], torch.ones(3)), (values, torch.tensor([1, 1, 1, 0]))):
            assert (whiten(some, weights, eps=eps, eps_mode=eps_mode) == 0).all(), (value, eps, eps_mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_float64_and_the_result_has_the_dtype_of_the_values(dtype):
    values = torch.tensor([4096.0, 4097, 4098, 4099] if dtype is torch.float32 else [1.0, 2, 3, 4]).to(dtype)
    found = whiten(values, torch.ones(4), eps=0.0)
    assert found.dtype is dtype
    expected = [x / (5 / 3) ** 0.5 for x in (-1.5, -0.5, 0.5, 1.5)]
    assert found.tolist() == pytest.approx(expected, rel=1e-6 if dtype is torch.float32 else 1e-2)


def test_excluded_and_masked_rows_get_0(make_batch):
    batch = make_batch([0.0] * 4, [0] * 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    batch["masks", "all_assistant_mask"] = mask
    batch["advantage"] = torch.tensor([1.0, 4, 50, 900]).view(4, 1, 1)
    batch[COUNTED] = torch.tensor([True, True, True, False])
    # Each token counts: four times 1 and twice 4, with mean 2 and variance (4 · 1 + 2 · 4) / 5.
    found = BatchWhitening(eps=0.0)(batch)["advantage"]
    assert found.shape == (4, 1, 1)
    assert found.flatten().tolist() == pytest.approx([-1 / 2.4**0.5, 2 / 2.4**0.5, 0, 0])
    # Each sample counts: 1, 4 and 50.
    found = BatchWhitening(per="sample", eps=0.0)(batch)["advantage"].flatten().tolist()
    mean, spread = statistics.fmean([1, 4, 50]), statistics.stdev([1, 4, 50])
    assert found == pytest.approx([(x - mean) / spread for x in (1, 4, 50)] + [0])


def test_a_rollout_counts_once_for_any_number_of_rows():
    """Some rollouts are excluded, and some lack a reward."""
    for seed in range(40):
        chance = random.Random(seed)
        credits = {9 * number + 4: chance.choice([-1.0, 0.25, chance.uniform(-5, 5)]) for number in range(6)}
        excluded, unscored = (set(chance.sample(list(credits), chance.randint(0, 2))) for _ in range(2))
        ids = [rollout for rollout in credits for _ in range(chance.randint(1, 4))]
        chance.shuffle(ids)
        batch = batch_of([0.0] * len(ids), [0] * len(ids), ids)
        batch["advantage"] = torch.tensor([credits[each] for each in ids], dtype=torch.float64).view(-1, 1, 1)
        if excluded:
            batch[COUNTED] = torch.tensor([each not in excluded for each in ids])
        batch[REWARD] = torch.tensor([float("nan") if each in unscored else 0.0 for each in ids])
        known = [x for each, x in credits.items() if each not in excluded | unscored]
        flat = len(set(known)) < 2
        mean, spread = (0.0, 1.0) if flat else (statistics.fmean(known), statistics.stdev(known))
        out = {each: 0.0 if flat else (x - mean) / spread for each, x in credits.items()}
        expected = [0.0 if each in excluded | unscored else out[each] for each in ids]
        found = BatchWhitening(per="rollout", eps=0.0)(batch)["advantage"]
        assert found.shape == (len(ids), 1, 1)
        assert found.flatten().tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def drawn_tokens(seed: int) -> tuple[TensorDict, torch.Tensor, dict]:
    """A batch with an advantage per token, the tokens that count, and options."""
    chance, size = random.Random(seed), (seed % 4 + 1, seed % 5 + 1)

    def drawn(draw):
        return torch.tensor([[draw() for _ in range(size[1])] for _ in range(size[0])])

    kinds = [lambda: chance.uniform(-5, 5), lambda: chance.choice([-1.0, 0.25]), lambda: 0.1]
    credit, mask = drawn(kinds[seed % 3]).double(), drawn(lambda: chance.random() < 0.6)
    counts, scored = (drawn(lambda: chance.random() < 0.8)[:, 0] for _ in range(2))
    batch = batch_of([0.0] * size[0], [0] * size[0], tokens=size[1])
    batch["advantage"], batch["masks", "all_assistant_mask"] = credit.unsqueeze(-1), mask
    batch[COUNTED], batch[REWARD] = counts, torch.where(scored, 0.0, torch.nan)
    options = {"eps": chance.choice([0.0, 1e-8, 0.5]), "eps_mode": chance.choice(MODES)}
    return batch, mask & (counts & scored).unsqueeze(1), options


def test_an_advantage_per_token_is_whitened_over_the_tokens_in_the_loss():
    """All tokens in the loss are whitened as one list. Excluded rows and rows without a reward get 0."""
    for seed in range(40):
        batch, inside, options = drawn_tokens(seed)
        credit = batch["advantage"].squeeze(-1)
        expected = torch.zeros_like(credit)
        expected[inside] = whiten(credit[inside], torch.ones(int(inside.sum())), **options)
        for rows in (batch, lazy_stack(list(batch.unbind(0)))):
            found = torch.stack([row["advantage"] for row in BatchWhitening(**options)(rows).unbind(0)])
            torch.testing.assert_close(found.squeeze(-1), expected, rtol=1e-12, atol=1e-12, msg=str(seed))


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (
            [math.inf, 0.0],
            {},
            "the advantage must be finite for every token in the loss; found inf at row 0, token 0",
        ),
        ([1e200, -1e200], {}, "whitening needs advantages with a finite sum of squares; scale the rewards"),
        ([1.0, 2.0], {"per": "sample"}, "per='sample' needs one per row. Set per='token'"),
        ([1.0, 2.0], {"per": "rollout"}, "per='rollout' needs one per row. Set per='token'"),
    ],
)
def test_advantages_per_token_that_cannot_be_whitened_are_refused(values, options, message):
    batch = batch_of([0.0], [0], tokens=2)
    batch["advantage"] = torch.tensor(values, dtype=torch.float64).view(1, 2, 1)
    batch["masks", "all_assistant_mask"] = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(BatchError, match=re.escape(message)):
        BatchWhitening(**options)(batch)


@pytest.mark.parametrize("wrong", [math.inf, math.nan, 1e200])  # 1e200 squared is infinite
def test_advantages_per_row_that_cannot_be_whitened_are_refused(wrong):
    batch = batch_of([0.0] * 3, [0] * 3)
    batch["advantage"] = torch.tensor([1.0, wrong, 2.0], dtype=torch.float64).view(3, 1, 1)
    with pytest.raises(
        BatchError, match=r"needs finite advantages with a finite sum of squares; found .* at row 1"
    ):
        BatchWhitening(per="sample")(batch)


def test_rows_of_a_rollout_with_different_advantages_are_named():
    """Excluded rows are not compared. A NaN on one of two rows is a difference."""
    batch = batch_of([0.0] * 4, [0] * 4, [5, 7, 7, 5])
    for other in (2.0, float("nan")):
        batch["advantage"] = torch.tensor([1.0, 1, other, 1]).view(4, 1, 1)
        with pytest.raises(BatchError, match=r"rollout 7 \(rows \[1, 2\]: \[1.0, (2|n).* per='sample'"):
            BatchWhitening(per="rollout")(batch)
    batch[COUNTED] = torch.tensor([True, True, False, True])
    batch["advantage"] = torch.tensor([1.0, 3, 2, 1]).view(4, 1, 1)
    found = BatchWhitening(per="rollout", eps=0.0)(batch)["advantage"].flatten().tolist()
    assert found == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0, -(0.5**0.5)])
