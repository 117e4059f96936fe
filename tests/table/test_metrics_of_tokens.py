"""Metrics of tokens are computed when their stage decides. Later changes do not affect them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import MASK, OLD, SAMPLER, alone, two_policies
from tensordict import TensorDict

from headrace.pipeline import Pipeline, optimise, total_loss
from headrace.transforms import (
    Diverged,
    LogRatio,
    RolloutCorrection,
    SampleFilter,
    ShuffleSplit,
    TokenAdvantage,
    TokenFilter,
)

KEYS = {"numerator_key": OLD, "denominator_key": SAMPLER}


def pipeline() -> Pipeline:
    stages = {
        "rows": SampleFilter(criterion=Diverged(high=1e9)),
        "term": TokenAdvantage(term=LogRatio(**KEYS), factor=0.5),
        "tokens": TokenFilter(criterion=Diverged(estimator="k1", level="token", high=1e9)),
        "weigh": RolloutCorrection(),
        "split": ShuffleSplit(unit="sample", minibatches=2),
    }
    return Pipeline(stages)


def numbers(run) -> dict[str, float]:
    return {name: value for name, value in run.metrics.items() if not name.startswith("time/")}


@pytest.fixture(autouse=True)
def frozen() -> None:
    """Leave older objects out of garbage collection. With them, it would take a second in each test."""
    gc.freeze()


@pytest.fixture
def expected() -> dict[str, float]:
    found = numbers(pipeline().run(two_policies(8, 6)))
    assert {"rows/chi2_token", "term/abs_mean", "tokens/kl_k1_sequence", "weigh/ess_token"} < found.keys()
    return found


def test_the_last_run_holds_no_columns(expected):
    batch, one = two_policies(8, 6), pipeline()
    columns = [weakref.ref(batch[key].untyped_storage()) for key in (OLD, SAMPLER, MASK)]
    one(batch)
    del batch
    gc.collect()
    assert not any(column() for column in columns)
    assert numbers(one) == expected


def test_columns_changed_in_place_change_no_metric(expected):
    batch = two_policies(8, 6)
    run = pipeline().run(batch)
    batch[OLD].zero_()
    assert numbers(run) == expected


@pytest.mark.slow
def test_a_loop_holds_the_columns_of_one_batch():
    columns, alive = [], []

    def count(batch):
        gc.collect()
        alive.append(sum(column() is not None for column in columns))
        return batch

    one = Pipeline({"count": count} | dict(pipeline().stages.items()))
    for seed in range(4):
        batch = two_policies(8, 6, seed)
        columns.append(weakref.ref(batch[OLD].untyped_storage()))
        for rows in one.minibatches(batch):
            count(rows)
            del rows
        del batch
    assert alive == [1] * 12  # 4 batches: before the stages, and in two minibatches


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))], ids=["copied", "saved"]
)
def test_a_copied_or_saved_run_has_the_metrics(copied, expected):
    one = pipeline()
    twins = [copied(one.run(two_policies(8, 6))), copied(one.last_run)]
    assert [numbers(twin) for twin in twins] == [expected, expected]


class LinearLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, rows):
        return TensorDict({"loss_objective": (self.scale * rows["advantage"]).mean()}, [])


def test_an_optimiser_step_changes_no_metric(expected):
    run, loss = pipeline().run(two_policies(8, 6)), LinearLoss()
    optimizer = torch.optim.SGD(loss.parameters(), lr=1.0)
    assert optimise(run.minibatches(), loss, optimizer, reduce=total_loss) == 2
    assert float(loss.scale.detach()) != 1.0
    assert numbers(run) == expected


def test_inference_mode_changes_no_metric(expected):
    with torch.inference_mode():
        run = pipeline().run(two_policies(8, 6))
    assert numbers(run) == expected


def test_rows_masked_later_change_no_metric():
    """A metric covers the rows that are in the loss when its stage decides. Row 5 is masked before."""
    batch = two_policies(8, 6, spread=3.0)
    batch["headrace", "in_loss"] = torch.arange(8) != 5
    before = Pipeline({"weigh": RolloutCorrection()}).run(batch).metrics
    stages = {"weigh": RolloutCorrection(), "rows": SampleFilter(criterion=Diverged(high=0.1))}
    run = Pipeline(stages).run(batch)
    assert run.metrics["rows/kept"] < 7
    names = [name for name in before if name.startswith("weigh/")]
    assert [run.metrics[name] for name in names] == [before[name] for name in names]
    shared = [name for name in names if name.startswith(("weigh/kl", "weigh/chi2"))]
    assert [run.metrics[f"rows/{name[6:]}"] for name in shared] == [before[name] for name in shared]


@pytest.mark.slow
@settings(max_examples=15)
@given(st.data())
def test_row_order_changes_no_bit_of_metrics_and_padding_only_rounding(data):
    rows, tokens = data.draw(st.integers(4, 9)), data.draw(st.integers(1, 12))
    batch = two_policies(rows, tokens, data.draw(st.integers(0, 99)))
    left, right = data.draw(st.integers(0, 70)), data.draw(st.integers(0, 70))
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    padded = batch.clone()
    for key in (OLD, SAMPLER, MASK):
        padded[key] = torch.nn.functional.pad(batch[key], (left, right))
    level = data.draw(st.sampled_from(["token", "sequence", "mean"]))
    unit = data.draw(st.sampled_from(["sample", "rollout"]))
    for stage in (
        RolloutCorrection(level=level, unit=unit),
        SampleFilter(criterion=Diverged(high=0.1, unit=unit)),
        TokenFilter(criterion=Diverged(high=0.1, level="token")),
        TokenAdvantage(term=LogRatio(numerator_key=OLD, denominator_key=SAMPLER)),
    ):
        here, there, elsewhere = (alone(stage, each) for each in (batch, batch[order], padded[order]))
        assert here.metrics == there.metrics
        assert elsewhere.metrics == pytest.approx(here.metrics, rel=1e-12, abs=1e-12)
        for key in ("advantage", "importance_weight", MASK):  # no bit of these changes
            if here.batch.get(key) is not None:
                trained = elsewhere.batch[key]
                trained = trained[:, left : left + tokens] if trained.shape[1] > 1 else trained
                assert torch.equal(trained, here.batch[key][order].expand_as(trained))
