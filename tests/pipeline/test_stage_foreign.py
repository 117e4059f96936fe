"""Any callable is a stage (`run_callable`). Rows that it drops are recorded. Wrong output is refused."""

from __future__ import annotations

import pytest
from busy import keep_positive
from torch import nn

from headrace.pipeline import Pipeline, StageError
from headrace.transforms import (
    BatchError,
    BatchTransform,
    FanOutCollapse,
    GroupRelativeAdvantage,
    RewardWithin,
    SampleFilter,
)

MASK = ("masks", "all_assistant_mask")


def test_any_callable_is_a_stage_and_its_dropped_rows_are_recorded(make_batch):
    pipeline = Pipeline({"positive": keep_positive, "advantage": GroupRelativeAdvantage(scale="none")})
    out = pipeline(make_batch([0.0, 1, 3], [0, 0, 0]))
    assert out["advantage"].flatten().tolist() == [-1, 1]
    assert pipeline.ledger.counts()["positive/gone"] == 1
    assert "keep_positive" in repr(pipeline)


class Quiet(BatchTransform):
    """A stage that drops a row without a reason."""

    def apply(self, batch):
        return batch[1:]


@pytest.mark.torchrl
def test_rows_masked_in_a_compose_are_not_reported_as_trained(make_batch):
    from torchrl.envs.transforms import Compose

    batch = make_batch([1.0, 9], [0, 0]).exclude(MASK)
    pipeline = Pipeline({"inner": Compose(SampleFilter(criterion=RewardWithin(high=5.0)))})
    pipeline(batch)
    assert pipeline.ledger.counts()["pipeline/no_loss_tokens"] == 1
    assert pipeline.metrics["rows/trained"] == 1


def test_rows_dropped_by_any_transform_are_recorded(make_batch):
    pipeline = Pipeline({"quiet": Quiet()})
    pipeline(make_batch([1.0, 2, 3], [0, 0, 0]))
    assert pipeline.ledger.names[int(pipeline.ledger.reason[0])] == "quiet/gone"
    assert pipeline.metrics["rows/trained"] == 2


def test_a_stage_that_repeats_rows_is_refused(make_batch):
    with pytest.raises(BatchError, match=r"stage 'twice'.*not repeat them; it repeated rows 0"):
        Pipeline({"twice": lambda batch: batch[[0, 0, 1]]})(make_batch([1.0, 2, 3], [0, 0, 0]))


def test_a_stage_that_raises_is_named(make_batch):
    with pytest.raises(StageError, match="stage 'bug', <lambda>: division by zero") as info:
        Pipeline({"bug": lambda batch: 1 / 0})(make_batch([1.0], [0]))
    assert not isinstance(info.value, BatchError)


@pytest.mark.torchrl
def test_torchrl_transforms_are_stages(make_batch):
    from torchrl.envs.transforms import RewardScaling

    scaling = RewardScaling(loc=0.0, scale=10.0, in_keys=[("next", "reward")])
    pipeline = Pipeline({"scale": scaling, "advantage": GroupRelativeAdvantage(scale="none")})
    assert pipeline(make_batch([1.0, 3], [0, 0]))["advantage"].flatten().tolist() == [-10, 10]


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        (lambda batch: None, r"returned nothing \(None\): return the batch"),
        (
            lambda batch: batch.exclude("headrace"),
            "with the column.*returned TensorDict without that column$",
        ),
        (lambda batch: batch["next", "reward"], "returned Tensor .*subclass headrace.RewardShaping$"),
    ],
)
def test_a_stage_that_loses_row_ids_is_refused(stage, said, make_batch):
    with pytest.raises(BatchError, match=rf"stage 'odd'.*{said}"):
        Pipeline({"odd": stage})(make_batch([1.0], [0]))


def test_a_pipelines_state_includes_its_modules():
    assert "stages.linear.weight" in Pipeline({"linear": nn.Linear(2, 2)}).state_dict()


class Noisy(FanOutCollapse):
    """A transform with its own `forward`."""

    def forward(self, batch):
        return super().forward(batch)


def test_hooks_that_a_pipeline_would_skip_are_refused():
    with pytest.raises(ValueError, match=r"never its `forward`"):
        Pipeline({"noisy": Noisy()})
    hooked = FanOutCollapse()
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="or of its hooks"):
        Pipeline({"hooked": hooked})
