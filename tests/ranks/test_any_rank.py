"""Ranks that hold a part of the rows compute the bits of one process that holds all rows."""

from __future__ import annotations

import pytest
from any_rank import (
    VARIED,
    carry_at_random,
    carry_masked,
    compare_with_one_process,
    factors_of_gradients,
    fold_stream,
    gradients_of_ddp,
    lack_groups,
    metrics_of_stages,
    results_of,
    take_as_many_steps,
)
from composed import composed
from rank_threads import results_in_threads
from recipes import ADVANTAGES, FEW
from test_contract import STAGES, rows


@pytest.mark.slow
@pytest.mark.parametrize(("world", "recipes", "varied"), [(2, ADVANTAGES, ()), (4, FEW, VARIED)])
def test_every_recipe_has_the_bits_of_one_process_for_any_spread_of_rows(world, recipes, varied, tmp_path):
    named = [*((recipe,) for recipe in recipes), *varied]
    pipelines = [(recipe, composed(f"pipeline={recipe}", *words)) for recipe, *words in named]
    results = results_of(compare_with_one_process, world, tmp_path, pipelines)
    assert sum(compared for compared, _ in results) > 40 * len(pipelines)
    assert [differs for _, differs in results] == [[]] * world


@pytest.mark.slow
def test_every_stage_records_the_metrics_of_one_process_on_each_rank():
    stages = {name: make() for name, make in STAGES.items() if name not in ("pipeline", "split-budget")}
    for recorded, wrong in results_in_threads(metrics_of_stages, 2, stages, rows()):
        assert recorded > 100
        assert not wrong


@pytest.mark.parametrize("shared_ids", ["same", "different"])
def test_groups_without_rows_are_counted_over_all_ranks(shared_ids):
    for said, raised in results_in_threads(lack_groups, 2, shared_ids):
        assert said == 1 + 2
        assert "3 incomplete groups" in raised


def test_carried_rows_are_weighted_on_their_rank_and_counted_by_all():
    """Under ``fold="token_mean"``, each row is multiplied by the number of tokens in its micro-batch."""
    for off, carried, counted in results_in_threads(fold_stream, 2):
        assert carried > 0
        assert off < 1e-6
        assert all(said == tokens for said, tokens in counted)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_carried_row_trains_once_and_the_oldest_first(world):
    """Each row trains once in each epoch, and no row is carried while a newer row trains."""
    found = results_in_threads(carry_at_random, world, 20 if world == 1 else 8)
    assert found == [[]] * world


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_takes_the_same_steps_and_micro_batches(world):
    """Under ``pad``, a rank may have no rows, or fewer units than optimiser steps."""
    for tried, wrong in results_in_threads(take_as_many_steps, world):
        assert tried > 50
        assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_without_rows_trains_with_ddp_and_with_optimise(world, tmp_path):
    """The gradient is that of one process with all rows, because padding is not in the loss."""
    for off in results_of(gradients_of_ddp, world, tmp_path):
        assert len(off) == 4
        assert max(off) < 1e-12


@pytest.mark.slow
def test_weights_for_another_way_to_combine_gradients_are_named_with_the_factor(tmp_path):
    """DDP averages gradients. `optimise` sums them, even after DDP, when they are equal on all ranks."""
    right = {"ddp": "mean", "optimise": "sum", "both": "sum"}
    for found in results_of(factors_of_gradients, 2, tmp_path):
        sizes = {(combined, gradients): size for combined, gradients, size, _ in found}
        for combined, gradients, size, said in found:
            factor = size / sizes["optimise", "sum"]
            assert factor == pytest.approx(
                1.0 if gradients == right[combined] else 2.0 if gradients == "mean" else 0.5
            )
            assert len(said) == (gradients != right[combined])
            assert all(f"is {factor:g} times that of the mean" in each for each in said)
            assert all(each.endswith(f"weight.gradients={right[combined]}") for each in said)


def test_carried_rows_of_ranks_keep_their_first_reason():
    masked, waits, gone = "filter/reward_bounds", "split/carried", "gate/incomplete"
    for rank, found in enumerate(results_in_threads(carry_masked, 2)):
        reasons = [["trained"] * 3 + [masked], [gone, masked], ["trained", "trained", masked]]
        if rank == 1:
            reasons = [["trained", "trained", masked, waits], [gone, waits], ["trained"] * 3]
        trained = [[row for row, why in enumerate(of_batch) if why == "trained"] for of_batch in reasons]
        assert found == list(zip(reasons, trained, strict=True))
