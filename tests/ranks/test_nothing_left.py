"""A batch that loses all its rows gives an empty run, in every recipe and on every rank."""

from __future__ import annotations

import pytest
from any_rank import results_of
from composed import composed
from nothing_left import run_to_nothing
from recipes import CHAINS


@pytest.mark.slow
def test_every_recipe_gives_an_empty_run_if_all_rows_leave():
    pipelines = [(recipe, composed(f"pipeline={recipe}")) for recipe in CHAINS]
    tried, wrong = run_to_nothing(0, 1, pipelines)
    assert tried > 5 * len(CHAINS)
    assert not wrong


@pytest.mark.slow
def test_two_ranks_give_empty_runs_even_if_one_rank_has_no_rows(tmp_path):
    pipelines = [(recipe, composed(f"pipeline={recipe}")) for recipe in CHAINS[::3]]
    results = results_of(run_to_nothing, 2, tmp_path, pipelines)
    assert all(tried > 5 * len(pipelines) for tried, _ in results)
    assert [wrong for _, wrong in results] == [[], []]
