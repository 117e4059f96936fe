"""The optimiser's numbers are recorded per step, and unmeasured ones are absent."""

from __future__ import annotations

import math
import re

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from headrace.pipeline import OptimiserRecord, Pipeline, make_report, optimise
from headrace.transforms import LossWeight, ShuffleSplit

pytestmark = pytest.mark.slow

MASK = ("masks", "all_assistant_mask")


class Scaled(nn.Module):
    """A loss w · x per token, which also returns two numbers."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, rows):
        terms = self.w * rows["x"].expand(rows[MASK].shape).unsqueeze(-1)
        return TensorDict({"loss_objective": terms, "entropy": rows["x"].mean(), "per_token": terms})


def batch_of(x):
    rows = len(x)
    columns = {
        "x": torch.tensor(x, dtype=torch.float64)[:, None],
        MASK: torch.ones(rows, 3, dtype=torch.bool),
    }
    return TensorDict(columns | {"rollout_id": torch.arange(rows)}, batch_size=[rows])


def trained(x, *, microbatches=1, minibatches=1, lr=0.1, **options):
    loss, record = Scaled(), OptimiserRecord()
    optimizer = torch.optim.SGD(loss.parameters(), lr=lr)
    split = ShuffleSplit(minibatches=minibatches, microbatches=microbatches, unit="sample")
    run = Pipeline({"split": split, "weight": LossWeight()}).run(batch_of(x))
    steps = optimise(run.minibatches(), loss, optimizer, log_prob_key=None, record=record, **options)
    return steps, record, loss, run


@pytest.mark.parametrize("microbatches", [1, 4])
def test_numbers_by_hand_for_any_micro_batches(microbatches):
    """The loss is the mean of w · x over tokens, 2 · 2.5. Its gradient is the mean of x, 2.5."""
    steps, record, loss, _ = trained([1.0, 2.0, 3.0, 4.0], microbatches=microbatches, max_grad_norm=2.0)
    numbers = record.numbers
    assert steps == numbers["optimiser/steps"] == 1
    assert numbers["optimiser/lr"] == 0.1
    assert numbers["optimiser/loss"] == pytest.approx(5.0)
    assert numbers["optimiser/grad_norm"] == pytest.approx(2.5)
    assert numbers["optimiser/clipped"] == 1.0
    assert numbers["optimiser/entropy"] == pytest.approx(2.5)
    assert "optimiser/per_token" not in numbers
    assert numbers["optimiser/tokens_per_second"] == pytest.approx(12 / numbers["seconds/optimise"])
    assert loss.w.item() == pytest.approx(2.0 - 0.1 * 2.0, rel=1e-5)


def test_losses_of_several_steps_are_averaged_and_recording_changes_no_step():
    """The gradient is 4, so w goes from 2 to 1."""
    steps, record, recorded, run = trained([4.0, 4.0, 4.0, 4.0], minibatches=2, lr=0.25)
    assert steps == 2
    assert record.numbers["optimiser/loss"] == pytest.approx((4.0 * 2.0 + 4.0 * 1.0) / 2)
    plain = Scaled()
    optimise(run.minibatches(), plain, torch.optim.SGD(plain.parameters(), lr=0.25), log_prob_key=None)
    assert plain.w.item() == recorded.w.item()


def test_unmeasured_numbers_are_absent_and_never_zero():
    _, record, _, run = trained([1.0, 2.0])
    report = make_report(run, numbers=record.numbers)
    assert report.numbers["optimiser/loss"] == record.numbers["optimiser/loss"]
    assert not [name for name in make_report(run).numbers if name.startswith(("optimiser/", "seconds/"))]
    assert all(math.isfinite(value) for value in record.numbers.values())


@pytest.mark.parametrize(
    ("x", "lr", "found"),
    [([1.0, 2.0], 0.0, ["learning-rate-zero"]), ([0.0, 0.0], 0.1, ["gradient-zero"]), ([1.0, 2.0], 0.1, [])],
)
def test_a_learning_rate_or_gradient_of_zero_is_an_advisory(x, lr, found):
    _, record, loss, run = trained(x, lr=lr)
    assert [each.name for each in make_report(run, numbers=record.numbers).advisories] == found
    assert (loss.w.item() == 2.0) == bool(found)


def test_a_number_the_report_already_has_is_refused():
    _, _, _, run = trained([1.0])
    for name in make_report(run).numbers:
        with pytest.raises(ValueError, match=f"names that the report does not have; found {re.escape(name)}"):
            make_report(run, numbers={name: 1.0})
    with pytest.raises(
        ValueError, match="numbers must have a number under each name; got optimiser/lr=tensor"
    ):
        make_report(run, numbers={"optimiser/lr": torch.ones(2)})


def test_a_number_may_be_a_tensor_and_its_name_may_be_in_either_spelling():
    _, _, _, run = trained([1.0])
    report = make_report(run, numbers={"optimizer/lr": torch.tensor(0.0)})
    assert [each.name for each in report.advisories] == ["learning-rate-zero"]


def test_the_command_records_each_step_and_reports_a_zero_rate(tmp_path):
    from command import headrace_here

    words = ("train.steps=2", "optimizer.lr=0", "sampler.prompts_per_batch=4", f"hydra.run.dir={tmp_path}")
    done = headrace_here(tmp_path, *words)
    said = " ".join(done.stdout.split())  # the terminal breaks lines
    assert "learning-rate-zero: The learning rate is 0: the weights do not change (steps 0 to 1)." in said
    head = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    for stage in ("collect", "reward", "headrace", "optimise"):
        assert f"seconds/{stage}" in head
    assert {"optimiser/lr", "optimiser/loss", "optimiser/grad_norm", "optimiser/clip_fraction"} <= set(head)


def test_the_numbers_of_two_steps_by_hand():
    """A norm that equals the bound is not clipped. A mean over a micro-batch without tokens may be NaN."""
    record = OptimiserRecord()
    for entropy, tokens in ((2.0, [3, 1]), (math.nan, [0, 0]), (5.0, [1])):
        terms = {"entropy": torch.tensor(entropy), "loss_objective": torch.tensor(1.0), "each": torch.ones(2)}
        record.add_terms(TensorDict(terms), torch.tensor(tokens))
    record.add_terms(TensorDict({"kl_approx": torch.tensor(1.0)}), torch.tensor([0]))
    record.add_terms(TensorDict({"ESS": torch.tensor([[0.25]])}), torch.tensor([3]))
    record.add_step(torch.tensor(1.0), lr=0.1, norm=3.0, tokens=10.0, clips=2.0)
    record.add_step(torch.tensor(2.0), lr=0.3, norm=2.0, tokens=6.0, clips=2.0)
    for what, seconds in (("optimise", 3.0), ("collect", 1.5), ("optimise", 1.0)):
        record.add_seconds(what, seconds)
    assert record.numbers == {
        "optimiser/steps": 2.0,
        "optimiser/lr": 0.3,
        "optimiser/loss": 1.5,
        "optimiser/grad_norm": 2.5,
        "optimiser/clipped": 0.5,
        "optimiser/entropy": (2.0 * 4 + 5.0 * 1) / 5,
        "optimiser/ESS": 0.25,
        "optimiser/tokens_per_second": 4.0,
        "seconds/optimise": 4.0,
        "seconds/collect": 1.5,
    }
