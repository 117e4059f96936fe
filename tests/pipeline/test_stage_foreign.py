"""Any callable is a stage (`run_callable`). Rows that it drops are recorded. Wrong output is refused."""

from __future__ import annotations

import pytest
import torch
from busy import keep_positive
from tensordict import lazy_stack
from torch import nn

from headrace.pipeline import Pipeline, StageError
from headrace.pipeline.account_keys import OF_TOKENS
from headrace.transforms import (
    BatchError,
    BatchTransform,
    FanOutCollapse,
    GroupRelativeAdvantage,
    RewardWithin,
    SampleFilter,
)

MASK = ("masks", "all_assistant_mask")


class Quiet(BatchTransform):
    """A stage that drops a row without a reason."""

    def apply(self, batch):
        return batch[1:]


@pytest.mark.parametrize(
    ("stage", "shown"), [(keep_positive, "keep_positive"), (Quiet(), "Quiet(in_keys=[], out_keys=[])")]
)
def test_any_callable_is_a_stage_and_its_dropped_rows_are_recorded(stage, shown, make_batch):
    pipeline = Pipeline({"mine": stage, "advantage": GroupRelativeAdvantage(scale="none")})
    out = pipeline(make_batch([0.0, 1, 3], [0, 0, 0]))
    assert out["advantage"].flatten().tolist() == [-1, 1]
    assert [pipeline.ledger.names[code] for code in pipeline.ledger.reason] == ["mine/gone", *["trained"] * 2]
    assert repr(pipeline).splitlines()[:2] == ["Pipeline", f"  1. mine: {shown}"]


@pytest.mark.torchrl
def test_rows_masked_in_a_compose_are_not_reported_as_trained(make_batch):
    from torchrl.envs.transforms import Compose

    batch = make_batch([1.0, 9], [0, 0]).exclude(MASK)
    pipeline = Pipeline({"inner": Compose(SampleFilter(criterion=RewardWithin(high=5.0)))})
    pipeline(batch)
    assert pipeline.ledger.counts()["pipeline/no_loss_tokens"] == 1
    assert pipeline.metrics["rows/trained"] == 1


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([0, 0, 1, 2, 2], "may drop rows but not repeat them; it repeated rows 0, 2$"),
        ([1, 0, 2], "must keep the order of the rows: .* returned rows .*1, 0, 2"),
    ],
)
def test_a_stage_that_repeats_or_permutes_rows_is_refused(rows, said, make_batch):
    with pytest.raises(BatchError, match=f"stage 'odd'.*{said}"):
        Pipeline({"odd": lambda batch: batch[rows]})(make_batch([1.0, 2, 3], [0, 0, 0]))


NAN = float("nan")


@pytest.mark.parametrize(
    ("rewards", "is_change"),
    [([1.0, NAN, 3.0], False), ([1.0, NAN, 2.0], True), ([1.0, 0.0, 3.0], True), ([NAN, NAN, 3.0], True)],
)
def test_rewards_of_rows_are_final_when_rollouts_have_theirs(rewards, is_change, make_batch):
    """Before the collapse, each change counts. A missing reward that stays missing is no change."""

    def gives(batch):
        return batch.clone().set(("next", "reward"), torch.tensor(rewards).unsqueeze(1))

    collapse, batch = FanOutCollapse(missing="skip"), make_batch([1.0, NAN, 3.0], [0, 0, 0])
    found = Pipeline({"mine": gives, "collapse": collapse}).run(batch)
    assert found.rows.table.columns["headrace", "reward"].nan_to_num(7.0).tolist() == [
        7.0 if reward != reward else reward for reward in rewards
    ]
    late = Pipeline({"collapse": collapse, "mine": gives})
    if not is_change:
        assert len(late(batch)) == 3
        return
    with pytest.raises(
        BatchError, match=r"changes \('next', 'reward'\) after the rewards .* were made from it"
    ):
        late(batch)


def test_values_that_a_stage_leaves_alone_keep_the_precision_of_the_table(make_batch):
    """The table has float64, and a batch float32. The stage doubles the advantage of row 1.

    It also changes the type of one column, and the shape of another. Both were read before the advantage.
    """

    def doubles(batch):
        batch = batch.clone().set("status", batch["status"].int()).set("expected_rollouts", torch.ones(3, 2))
        batch["advantage"][1] *= 2
        return batch

    stages = {"advantage": GroupRelativeAdvantage(scale="none"), "doubles": doubles}
    rows = make_batch([1.0, 0, 0], [0, 0, 0], status=[0, 1, 0], expected_rollouts=[3] * 3)
    run = Pipeline(stages).run(rows)
    assert OF_TOKENS not in run.rows.table.columns, "it is the same for all tokens of a row"
    rounded = float(torch.tensor(-1 / 3, dtype=torch.float32))
    assert run.rows.table.columns["advantage"].tolist() == [1 - 1 / 3, 2 * rounded, -1 / 3]
    without = Pipeline(stages | {"doubles": lambda batch: batch.exclude("advantage")}).run(
        run.batch.exclude("headrace", "expected_rollouts")
    )
    assert "advantage" not in without.batch.keys()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_the_advantage_of_a_rows_tokens_is_measured_within_the_loss_mask(ragged, masked, make_batch):
    """By hand: the mean over tokens in the loss, 0 without any, and the sum of absolute values.

    Three rows occur six times, because a sixteenth of the rows is read at once. In ragged rows, the first has
    only its first two tokens.
    """
    tokens = torch.tensor([[1.0, -2, 4], [8, 8, 8], [0.5, 0.5, 16]] * 6).unsqueeze(-1)
    mask = torch.tensor([[True, True, False], [False] * 3, [True, True, True]] * 6)
    batch = make_batch([1.0, 2, 3] * 6, [0] * 18).select("group_id", "rollout_id", ("next", "reward"))
    rows, whole = list(batch.unbind(0)), slice(None)
    cuts = [slice(2) if ragged else whole, whole, whole] * 6
    for row, own, cut in zip(rows, mask, cuts, strict=True):
        row.update({MASK: own[cut]} if masked else {})
    pack = lazy_stack if ragged else torch.stack

    def gives(rows):
        each = zip(rows.unbind(0), tokens, cuts, strict=True)
        return pack([row.copy().set("advantage", own[cut]) for row, own, cut in each])

    first = [-0.5, 3.0] if masked or ragged else [1.0, 7.0]
    second = [0.0, 0.0] if masked else [8.0, 24.0]
    found = Pipeline({"mine": gives}).run(pack(rows)).rows.table.columns[OF_TOKENS]
    assert found.tolist() == [first, second, [17 / 3, 17.0]] * 6


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
