"""A batch has one gradient, for any split, order, padding, packing and number of processes."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import pytest
import torch
from any_rank import results_of
from gradients import MEANS, distance, gradient, make_scene, run_rank, run_uneven

from headrace.transforms import pack

pytestmark = pytest.mark.torchrl

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
CUTS = {
    "in micro-batches": {"microbatches": 3},
    "row by row": {"microbatches": 99},
    "not shuffled": {"shuffle": False, "microbatches": 2},
    "shuffled otherwise": {"seed": 9, "unit": "sample"},
    "by tokens": {"max_tokens": 30, "balance": "attention"},
    "balanced": {"microbatches": 4, "balance": "tokens"},
    "padded": {"microbatches": 4, "remainder": "pad"},
    "packed": {"transform": pack},
    "packed in micro-batches": {"transform": pack, "microbatches": 3, "balance": "tokens"},
    "packed and padded": {"transform": pack, "microbatches": 4, "remainder": "pad"},
    "a tree": {"transform": partial(pack, tree=True)},
    "trees in micro-batches": {"transform": partial(pack, tree=True), "microbatches": 3, "tree": "rollout"},
    "trees by tokens": {"transform": partial(pack, tree=True), "max_tokens": 30, "tree": "group"},
    "trees, padded": {"transform": partial(pack, tree=True), "microbatches": 4, "remainder": "pad"},
}


@pytest.fixture(scope="module")
def scene():
    """A policy and a batch in float64. The tests with processes also use float32."""
    return torch.float64, *make_scene(torch.float64)


def widen(batch, by: int = 5):
    """The batch with more padding on the left."""
    wide = batch.clone()
    keys = [("tokens", "full"), ("log_probs", "full"), ("next", "ref_log_probs", "full")]
    for key in [*keys, ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")]:
        wide[key] = torch.nn.functional.pad(batch[key], (by, 0))
    return wide


def test_the_scene_has_fan_out_and_masked_rows(scene):
    _, _, batch = scene
    assert len(batch["rollout_id"].unique()) < len(batch)
    trained = batch["masks", "all_assistant_mask"].any(-1)
    assert 0 < int(trained.sum()) < len(batch)
    assert len(batch["masks", "all_assistant_mask"].sum(-1).unique()) > 2


@pytest.mark.parametrize("unit", MEANS)
def test_the_gradient_equals_that_of_the_whole_batch(scene, unit, quick):
    """In the quick run, each unit is tried with some of the splits."""
    dtype, policy, batch = scene
    whole = gradient(policy, batch, unit)
    assert whole.norm() > 1e-3
    some = slice(list(MEANS).index(unit), None, len(MEANS)) if quick else slice(None)
    for name, cut in list(CUTS.items())[some]:
        assert distance(gradient(policy, batch, unit, **cut), whole) < TOLERANCE[dtype], name
    assert distance(gradient(policy, widen(batch), unit), whole) < TOLERANCE[dtype]


def test_token_advantages_give_the_gradient_of_the_whole_batch(scene):
    """The advantage has the shape (N, T, 1), as turns and trees write it."""
    dtype, policy, batch = scene
    one_each = gradient(policy, batch, "constant")
    batch, width = batch.clone(), batch["masks", "all_assistant_mask"].shape[1]
    batch["advantage"] = batch["advantage"].expand(-1, width, 1).contiguous()
    assert distance(gradient(policy, batch, "constant"), one_each) < TOLERANCE[dtype]
    credit = torch.randn(len(batch), width, 1, generator=torch.Generator().manual_seed(3))
    batch["advantage"] = credit.to(dtype)
    whole = gradient(policy, batch, "constant")
    assert distance(whole, one_each) > 1e-3
    for name, cut in CUTS.items():
        assert distance(gradient(policy, batch, "constant", **cut), whole) < TOLERANCE[dtype], name


def test_units_give_different_gradients(scene):
    _, policy, batch = scene
    found = [gradient(policy, batch, unit) for unit in MEANS]
    assert all(distance(one, other) > 1e-3 for one, other in combinations(found, 2))


@pytest.mark.parametrize("unit", MEANS)
def test_a_folded_weight_has_the_same_gradient_for_any_cut(scene, unit):
    dtype, policy, batch = scene
    whole = gradient(policy, batch, unit, fold="token_mean")
    for cut in ({"microbatches": 3}, {"max_tokens": 30}, {"microbatches": 4, "remainder": "pad"}):
        assert distance(gradient(policy, batch, unit, fold="token_mean", **cut), whole) < TOLERANCE[dtype]


def test_folded_and_summed_weights_agree_on_the_policy_term(scene):
    from torchrl.objectives.llm import GRPOLoss

    from headrace.pipeline import optimise
    from headrace.transforms import LossWeight, ShuffleSplit

    dtype, policy, batch = scene
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False, aggregation="none")
    parts = [LossWeight(unit="rollout")(ShuffleSplit(minibatches=1, microbatches=2)(batch))]
    policy.zero_grad()
    optimise(parts, loss, torch.optim.SGD(policy.parameters(), lr=0.0))
    summed = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert distance(gradient(policy, batch, "rollout", fold="token_mean"), summed) < TOLERANCE[dtype]


@pytest.mark.slow
def test_processes_that_share_a_batch_or_have_own_rows_agree(tmp_path):
    for rank, found in enumerate(results_of(run_rank, 2, tmp_path)):
        assert len(found) == 2 * len(MEANS) * 5  # two dtypes, five ways
        for (dtype, unit, way), far in found.items():
            assert far < (1e-6 if "32" in dtype else 1e-12), (rank, dtype, unit, way)


@pytest.mark.slow
def test_an_error_in_one_process_is_raised_in_all_and_empty_ranks_take_each_step(tmp_path):
    """If only one process raised the error, the others would wait for ever."""
    first, second = results_of(run_uneven, 2, tmp_path)
    for how, all_steps in (("minibatches", 2), ("call", 1)):
        for told in (first, second):
            assert told["one is empty", how] == told["one has too few", how] == all_steps
            assert "every row in the loss needs a rollout_id" in told["one has wrong ids", how]
    assert first["all are empty", "minibatches"] == second["all are empty", "minibatches"] == 0
    assert first["steps"] == second["steps"] == 1
    assert first["scale"] == second["scale"] == pytest.approx(-1.0)
