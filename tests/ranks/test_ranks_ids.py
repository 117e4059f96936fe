"""Equal ids on two ranks name two units, unless ranks share ids. One process plays all ranks."""

from __future__ import annotations

import pytest
import torch
from any_rank import compare_with_one_process, group_of_one
from composed import composed
from hypothesis import given
from hypothesis import strategies as st
from recipes import FEW

from headrace.transforms import BatchError
from headrace.transforms.ranks import tell_apart


@pytest.mark.parametrize("large", [10**17, 10**18 - 1, 2**62, 2**63 - 1])
def test_large_ids_of_many_ranks_become_different_ids(large):
    rank = torch.arange(12).repeat_interleave(2)
    ids = torch.tensor([large, 3]).repeat(12)
    apart = tell_apart(ids, rank, "different", "rollout_id")
    assert len(apart.unique()) == len(ids)
    assert bool((apart >= 0).all())


ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=20)


def columns(rows):
    return torch.tensor([i for i, _ in rows], dtype=torch.int64), torch.tensor([r for _, r in rows]).long()


@given(ROWS)
def test_equal_ids_are_one_unit_only_if_ids_are_shared(rows):
    ids, rank = columns(rows)
    apart = tell_apart(ids, rank, "different", "rollout_id").tolist()
    for i, one in enumerate(rows):
        for j, other in enumerate(rows):
            assert (apart[i] == apart[j]) == (one == other)
    assert tell_apart(ids, rank, "same", "rollout_id") is ids


@given(ROWS)
def test_ids_that_are_on_several_ranks_are_refused_by_name(rows):
    """Rows with the id −1 are of no unit."""
    ids, rank = columns([(i - 1, r) for i, r in rows])
    twice = sorted({i - 1 for i, r in rows for j, s in rows if i == j > 0 and r != s})
    if not twice:
        assert torch.equal(tell_apart(ids, rank, "raise", "group_id"), ids)
        return
    message = rf"^group_id {', '.join(map(str, twice))} on more than one rank: set pipeline.shared_ids=same"
    with pytest.raises(BatchError, match=message):
        tell_apart(ids, rank, "raise", "group_id")


@pytest.mark.slow
def test_a_pipeline_has_the_same_bits_with_a_process_group_of_one_rank():
    with group_of_one():
        for recipe in FEW:
            compared, differs = compare_with_one_process(0, 1, [(recipe, composed(f"pipeline={recipe}"))])
            assert (compared > 40, differs) == (True, []), recipe
