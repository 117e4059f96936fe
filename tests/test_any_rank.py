"""Ranks with rows of their own have the bits of one process that has them all."""

from __future__ import annotations

import pytest
from any_rank import CASES, compare_with_one_process, pipelines_of, results_of
from recipes import ADVANTAGES, FEW


@pytest.mark.slow
@pytest.mark.parametrize(("world", "recipes"), [(2, ADVANTAGES), (4, FEW)])
def test_every_recipe_has_the_bits_of_one_process_however_rows_are_spread(world, recipes, tmp_path):
    pipelines = pipelines_of(recipes)
    results = results_of(compare_with_one_process, world, tmp_path, pipelines)
    assert sum(compared for compared, _ in results) > 20 * len(CASES) * len(pipelines)
    assert [differs for _, differs in results] == [[]] * world
