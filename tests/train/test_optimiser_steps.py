"""An optimiser step takes all rows of one step once, and warns if the gradients of ranks have another sum."""

from __future__ import annotations

import re
import warnings
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from any_rank import group_of_one
from tensordict import TensorDict
from torch import nn

from headrace.pipeline import OptimiserRecord, optimise, total_loss
from headrace.pipeline.train.optimiser_steps import Averaging, check_gradients, noting
from headrace.transforms import BatchError
from headrace.transforms.table.schema import RANK, ROW, STEP_WEIGHT

pytestmark = pytest.mark.slow

MASK = ("masks", "all_assistant_mask")
TOKENS = [3, 1, 2]


class Linear(nn.Module):
    """A loss w · x per token in the mask. One parameter is not read, and one is fixed."""

    def __init__(self):
        super().__init__()
        self.w, self.unread = (nn.Parameter(torch.zeros(())) for _ in range(2))
        self.fixed = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, rows):
        return TensorDict({"loss_objective": (self.w * rows["x"] * rows[MASK]).unsqueeze(-1)})


def step(rows=(0, 1, 2)) -> TensorDict:
    """Rows of a step of three rows with 6 tokens, whose loss is the mean over tokens."""
    of_row = {"x": torch.tensor([[1.0], [2.0], [4.0]]), MASK: torch.arange(3) < torch.tensor(TOKENS)[:, None]}
    of_row |= {"loss_weight": torch.full((3,), 1 / 6), "num_tokens": torch.full((3,), 6)}
    of_row |= {STEP_WEIGHT: torch.ones(3), ROW: torch.arange(3)}
    return TensorDict(of_row, batch_size=[3])[torch.tensor(rows)]


def padded() -> TensorDict:
    rows = step([0, 1, 2, 0, 0])
    rows[ROW][3:], rows[MASK][3:] = -1, False
    return rows


WHOLE = "6 tokens (num_tokens) with weights that sum to 1; found "


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (step(), None),
        (step([2, 0, 1]), None),
        (padded(), None),
        (step([0, 1]), "4 tokens in the loss with weights that sum to 0.6667, and 0 duplicate rows"),
        (step([0, 0]), "6 tokens in the loss with weights that sum to 1, and 1 duplicate rows"),
        (step([0, 1, 2, 1]), "7 tokens in the loss with weights that sum to 1.167, and 1 duplicate rows"),
        (step().set("loss_weight", torch.full((3,), 1.0005 / 6)), None),
        (step().set("loss_weight", torch.full((3,), 1.002 / 6)), "6 tokens in the loss with weights"),
        (step().set("num_tokens", torch.tensor([6, 5, 6])), "6 tokens in the loss with weights that"),
        (step([0, 1]).set(RANK, torch.zeros(2).long()), None),  # other ranks have the other rows
        (step([0, 1, 2, 2]).exclude(ROW).set(RANK, torch.zeros(4).long()), "8 tokens in the loss with"),
        (step([0, 1]).exclude(STEP_WEIGHT), "4 tokens in the loss with weights that sum to 0, and 0 dupl"),
        (step([0, 1]).exclude(STEP_WEIGHT, "num_tokens"), None),  # nothing says how many tokens there are
    ],
)  # fmt: skip
def test_the_rows_of_a_step_are_all_its_rows_once(rows, found):
    loss, weights = Linear(), rows["loss_weight"].clone()
    optimizer = torch.optim.SGD(loss.parameters(), lr=1.0)
    if found is None:
        assert optimise([rows], loss, optimizer, log_prob_key=None) == 1
        expected = sum(
            float(w * x * n) for w, x, n in zip(weights, rows["x"], rows[MASK].sum(1), strict=True)
        )
        assert -float(loss.w.detach()) == pytest.approx(expected)
        return
    said = WHOLE if STEP_WEIGHT in rows.keys(True) else WHOLE.replace("sum to 1", "sum to -inf")
    with pytest.raises(BatchError, match=re.escape(said + found)):
        optimise([rows], loss, optimizer, log_prob_key=None)
    assert float(loss.w.detach()) == 0.0


def test_a_group_sums_the_gradients_of_all_parameters_that_train():
    """Another rank may have a gradient where this one has none. Without a group, none is made."""
    alone, shared = Linear(), Linear()
    options = {"log_prob_key": None}
    assert optimise([step()], alone, torch.optim.SGD(alone.parameters(), lr=1.0), **options) == 1
    assert (alone.unread.grad, alone.fixed.grad) == (None, None)
    with group_of_one():
        optimizer = torch.optim.SGD(shared.parameters(), lr=1.0)
        assert optimise([step()], shared, optimizer, process_group="world", **options) == 1
        assert (float(shared.unread.grad), shared.fixed.grad) == (0.0, None)
        with pytest.raises(BatchError, match="found 4 tokens"):  # the group has no other rows
            optimise([step([0, 1])], shared, optimizer, process_group="world", **options)
        assert optimise([step([0, 1])], shared, optimizer, **options) == 1  # other ranks may have them
    # The mean over tokens is (3 · 1 + 2 + 2 · 4) / 6. Two of the rows have (3 · 1 + 2) / 6 of it.
    assert -float(alone.w.detach()) == pytest.approx(13 / 6)
    assert -float(shared.w.detach()) == pytest.approx(13 / 6 + 5 / 6)


def test_a_record_has_the_numbers_of_the_steps_and_their_time(monkeypatch):
    """The clock goes on by a quarter of a second each time that it is read. The loss is 0 where w is 0."""
    clock = SimpleNamespace(perf_counter=count(100, 0.25).__next__)
    monkeypatch.setattr("headrace.pipeline.train.optimiser_steps.time", clock)
    loss, record = Linear(), OptimiserRecord()
    groups = [{"params": [loss.w], "lr": 0.5}, {"params": [loss.unread], "lr": 2.0}]
    optimise([step()], loss, torch.optim.SGD(groups), log_prob_key=None, record=record, max_grad_norm=2.0)
    numbers = {name: pytest.approx(value) for name, value in record.numbers.items()}
    assert numbers == {
        **{"optimiser/steps": 1.0, "optimiser/lr": 2.0, "optimiser/loss": 0.0, "optimiser/grad_norm": 13 / 6},
        **{"optimiser/clipped": 1.0, "seconds/optimise": 0.25, "optimiser/tokens_per_second": 24.0},
    }


class DistributedDataParallel(nn.Linear):
    """A class with the name of torch's. Its subclasses average gradients, too."""


class Wrapped(DistributedDataParallel):
    pass


def test_modules_that_average_gradients_are_noted_while_they_run():
    found, x = set[Averaging](), torch.zeros(1)
    with noting(found):
        Wrapped(1, 1)(x)  # there is no group, so nothing is averaged
    assert not found
    with group_of_one():
        with noting(found):
            nn.Linear(1, 1)(x)
            assert not found
            nn.Sequential(Wrapped(1, 1))(x)
        assert found == {("DistributedDataParallel", 1)}
        found.clear()
        Wrapped(1, 1)(x)
    assert not found


DDP, FSDP, GROUP = Averaging("DistributedDataParallel", 4), Averaging("FSDPModule", 2), object()
AVERAGED, SUMMED = "averaged, by DistributedDataParallel", "summed, by optimise(process_group=...)"


@pytest.mark.parametrize(
    ("weights", "averaging", "group", "said"),
    [
        (1.0, {DDP}, None, (AVERAGED, "1", "0.25", "mean")),
        (1.0, {FSDP, DDP}, None, (AVERAGED, "1", "0.25", "mean")),
        (4.0, set(), GROUP, (SUMMED, "4", "4", "sum")),
        (4.0, {DDP}, GROUP, (SUMMED, "4", "4", "sum")),
        (4.0, {DDP}, None, None),
        (1.0, set(), GROUP, None),
        (2.0, {DDP}, None, None),  # weights that are not normalised
        (1.0, set(), None, None),
        (1.0, {DDP._replace(ranks=1)}, None, None),
    ],
)
def test_weights_that_do_not_fit_the_sum_over_ranks_are_a_warning(
    weights, averaging, group, said, monkeypatch
):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_gradients(weights, averaging, group)
    meant = (
        "the gradients of 4 ranks are {}, and the loss weights of a step sum to {}, so the gradient is {} "
        "times that of the mean: set pipeline.stages.weight.gradients={}"
    )
    assert [str(each.message) for each in caught] == ([meant.format(*said)] if said else [])


def test_a_total_loss_is_the_sum_of_all_scalar_losses():
    terms = TensorDict(
        {"loss_a": torch.tensor(2.0), "loss_b": torch.tensor([[0.5]]), "kl": torch.tensor(7.0)}
    )
    assert float(total_loss(terms)) == 2.5
    with pytest.raises(
        BatchError, match=r"^a loss must have entries named loss_\*; found \['kl', 'lossy'\]$"
    ):
        total_loss(TensorDict({"lossy": torch.tensor(2.0), "kl": torch.tensor(1.0)}))
    wide = {**terms, "loss_c": torch.ones(1, 2), "loss_d": torch.ones(3)}
    with pytest.raises(BatchError, match=r"found 'loss_c' \(1, 2\), 'loss_d' \(3,\)\. Set aggregation="):
        total_loss(TensorDict(wide))
