"""Ranks that each hold some rows compute the bits of one process that holds all of them."""

from __future__ import annotations

import pytest
from any_rank import VARIED, compare_with_one_process, fold_stream, results_of
from composed import composed
from recipes import ADVANTAGES, FEW


@pytest.mark.slow
@pytest.mark.parametrize(("world", "recipes", "varied"), [(2, ADVANTAGES, ()), (4, FEW, VARIED)])
def test_every_recipe_has_the_bits_of_one_process_for_any_spread_of_rows(world, recipes, varied, tmp_path):
    named = [*((recipe,) for recipe in recipes), *varied]
    pipelines = [(recipe, composed(f"pipeline={recipe}", *words)) for recipe, *words in named]
    results = results_of(compare_with_one_process, world, tmp_path, pipelines)
    assert sum(compared for compared, _ in results) > 40 * len(pipelines)
    assert [differs for _, differs in results] == [[]] * world


@pytest.mark.slow
def test_carried_rows_are_weighted_and_counted_on_their_rank(tmp_path):
    """Under ``fold="token_mean"`` a row is multiplied by the tokens of its own micro-batch."""
    for off, carried, counted in results_of(fold_stream, 2, tmp_path):
        assert carried > 0
        assert off < 1e-6
        assert all(said == tokens for said, tokens in counted)
