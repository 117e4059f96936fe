"""Ranks that share a batch raise its errors together and in time."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from any_rank import PATIENCE, lose_a_rank, refuse_together, results_of

from headrace.transforms import BatchError
from headrace.transforms.ranks import Ranks

pytestmark = pytest.mark.slow

REFUSED = {
    "gate": r"stage 'gate', .*1 incomplete group: group \d+ has 3 of 4",
    "rule": r"stage 'collapse', .*every reward must be finite; found nan at row \d+",
    "column": r"ranks must have the same columns, with equal dtypes and shapes; rank 1 lacks group_id",
    "dtype": r"ranks must have the same columns, .*rank 1 has others in \('next', 'reward'\)",
    "stage": r"stage 'own', fails: the reward model is gone",
    "last rule": r"stage 'filter', .*every row needs a group_id ≥ 0; found -1 at row \d+",
    "criterion": r"stage 'filter', .*the reward model is gone",
    "hung": rf"rank 1 did not come to a batch within {PATIENCE:g} s .*All ranks discard this batch",
    "hung again": rf"rank 1 did not come to a batch within {PATIENCE:g} s",
    "skipped": r"rank 1 did not come to a batch within",
    "options": r"ranks must do the same with a batch: rank \d has advantage: .*, rank \d has advantage: ",
    "epochs": r"ranks must do the same with a batch: rank \d has epochs=\d, rank \d has epochs=\d",
    "ids": r"group_id .* on more than one rank: set pipeline.shared_ids=same",
    "torn": r"groups .* have rows on more than one rank. Each rank cuts its own minibatches",
    "carried": r"stage 'split', .*rows of groups \[\d+\] were carried over, and the batch has the same",
}


def test_an_error_on_one_rank_is_raised_on_all_with_its_text_in_time(tmp_path):
    """Afterwards all ranks are at the same batch, and no rank has kept the state of a refused batch."""
    world = 3
    for rank, (steps, draws) in enumerate(results_of(refuse_together, world, tmp_path)):
        found = {name: said for name, said, _ in steps}
        for name, _, seconds in steps:
            if name not in REFUSED:
                continue
            assert isinstance(found[name], str), name
            assert re.search(REFUSED[name], found[name].replace("\n", " ")), found[name]
            assert seconds < 2 * PATIENCE, name
        assert REFUSED.keys() <= found.keys()
        well = [name for name in found if name.startswith(("well", "after"))]
        assert [found[name] for name in well] == [len(torch.arange(20).tensor_split(world)[rank])] * 9
        assert found["no rows at all"] == 0
        assert found["no rows"] == found["no rows to score"] == (20 if rank == 0 else 0)
        assert found["all dropped"] == (16 if rank == 0 else 0)
        assert found["resumed"] == (20 if rank == 0 else 0)
        assert draws == 9


def test_the_other_ranks_name_a_rank_whose_process_ended(tmp_path):
    world = 3
    for said, seconds in results_of(lose_a_rank, world, tmp_path, tmp_path)[: world - 1]:
        assert re.search(rf"rank 2 did not come to .* within {PATIENCE:g} s", said)
        assert seconds < 3 * PATIENCE


def test_a_rank_that_cannot_reach_the_others_raises_its_own_error():
    """Rank 0 may already have ended, and the store with it."""

    class Alone:
        rank, refused, group = 1, False, object()

        def meet(self, error=None):
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(BatchError, match="group 7"), Ranks.block(Alone()):
        raise BatchError("group 7")
