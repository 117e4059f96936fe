"""Ranks that share a batch refuse it together, and hear of it in time."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from any_rank import PATIENCE, refuse_together, results_of

from headrace.transforms import BatchError
from headrace.transforms.distributed.ranks import sharing

pytestmark = pytest.mark.slow

REFUSED = {
    "gate": r"stage 'gate', .*1 incomplete group: group \d+ has 3 of 4",
    "rule": r"stage 'collapse', .*every reward must be finite; found nan at row \d+",
    "column": r"ranks must have the same columns, of one dtype and shape; rank 1 lacks group_id",
    "stage": r"stage 'own', fails: the reward model is gone",
    "last rule": r"stage 'filter', .*every row needs a group_id ≥ 0; found -1 at row \d+",
    "criterion": r"stage 'filter', .*the reward model is gone",
    "hung": rf"rank 1 did not come to a batch within {PATIENCE:g} s .*All ranks give this batch up",
    "hung again": rf"rank 1 did not come to a batch within {PATIENCE:g} s",
    "skipped": r"rank 1 did not come to a batch within",
    "options": r"ranks must do the same with a batch: rank \d has advantage: .*, rank \d has advantage: ",
    "epochs": r"ranks must do the same with a batch: rank \d has epochs=\d, rank \d has epochs=\d",
    "ids": r"group_id .* on more than one rank: say shared_ids='same'",
    "torn": r"groups .* have rows on more than one rank, and each rank draws its own minibatches",
}


@pytest.fixture(scope="module", params=[2, 4])
def told(request, tmp_path_factory):
    """By rank, what each batch came to and after how long; and how many draws the split remembers."""
    results = results_of(refuse_together, request.param, tmp_path_factory.mktemp("ranks"))
    return [({name: (found, seconds) for name, found, seconds in steps}, draws) for steps, draws in results]


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_rank_refuses_all_refuse_in_its_words_and_in_time(told, name):
    for by_name, _ in told:
        found, seconds = by_name[name]
        assert isinstance(found, str)
        assert re.search(REFUSED[name], found.replace("\n", " ")), found
        assert seconds < 2 * PATIENCE


def test_after_a_refusal_ranks_are_at_the_same_batch_and_remember_none_that_was_refused(told):
    world = len(told)
    for rank, (by_name, draws) in enumerate(told):
        well = [name for name in by_name if name.startswith(("well", "after"))]
        assert [by_name[name][0] for name in well] == [len(torch.arange(20).tensor_split(world)[rank])] * 8
        assert by_name["no rows at all"][0] == 0
        assert by_name["no rows"][0] == by_name["no rows to score"][0] == (20 if rank == 0 else 0)
        assert by_name["all dropped"][0] == (16 if rank == 0 else 0)
        assert by_name["resumed"][0] == (20 if rank == 0 else 0)
        assert draws == 8


def test_who_cannot_tell_the_others_raises_what_it_refuses():
    """Rank 0 may have heard of a refusal and ended, and the store with it."""

    class Alone:
        rank, refused, group = 1, False, object()

        def meet(self, error=None):
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(BatchError, match="group 7"), sharing(Alone()):
        raise BatchError("group 7")
