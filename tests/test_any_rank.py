"""Ranks with rows of their own have the bits of one process that has them all."""

from __future__ import annotations

import pytest
from any_rank import RECIPES, compare_with_one_process, results_of


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_recipe_has_the_bits_of_one_process_however_rows_are_spread(world, tmp_path):
    results = results_of(compare_with_one_process, world, tmp_path)
    assert sum(compared for compared, _ in results) > 4 * 20 * 4 * len(RECIPES)
    assert [differs for _, differs in results] == [[]] * world
