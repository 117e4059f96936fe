"""Ranks whose sources end or fail at different batches stay in step."""

from __future__ import annotations

import pytest
from any_rank import results_of, take_in_step

pytestmark = pytest.mark.slow


def test_every_rank_runs_the_batches_of_all_until_all_sources_have_ended(tmp_path):
    long, short, none = results_of(take_in_step, 3, tmp_path, (3, 1, 0), None)
    assert long == ([(2, 2)] * 3, "")
    assert short == ([(2, 2), (0, 0), (0, 0)], "")
    assert none == ([(0, 0)] * 3, "")


def test_the_error_of_one_source_is_raised_on_all_ranks(tmp_path):
    other, failed = results_of(take_in_step, 2, tmp_path, (5, 2), 1)
    assert failed == ([(2, 2)] * 2, "StalledError: writer 3 is lost")
    assert other == ([(2, 2)] * 2, "OtherRankError: rank 1: writer 3 is lost")
