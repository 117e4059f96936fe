"""A column, an option and a name have one meaning wherever they are read."""

from __future__ import annotations

import pytest
import torch
from composed import composed
from rollouts import make_collector, make_env, make_policy

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    CompletenessGate,
    FanOutCollapse,
    MissingKeyError,
    NotTruncated,
    SampleFilter,
    Status,
    group_relative_advantage,
)

pytestmark = pytest.mark.slow

TRUNCATED = int(Status.TRUNCATED)


def test_all_stages_read_truncation_where_the_gate_reads_it():
    """An environment has the status before the step at the root; every truncated row is found."""
    batch = next(iter(make_collector(make_env(prompts=8), policy=make_policy(3)))).reshape(-1)
    after = batch["next", "status"].flatten()
    assert int((after == TRUNCATED).sum()) > 10
    assert torch.equal(NotTruncated()(batch), after != TRUNCATED)
    root = batch.exclude(("next", "status"))
    assert torch.equal(NotTruncated()(root), root["status"].flatten() != TRUNCATED)
    with pytest.raises(MissingKeyError, match=r"needs the key \('next', 'status'\) \(status_key\)"):
        NotTruncated()(root.exclude("status"))


def test_without_a_rollout_key_each_row_is_a_rollout_for_every_stage(make_batch):
    batch = make_batch([1.0, 3, 5, 11], [0, 0, 1, 1])
    words = (
        "pipeline.stages.gate.group_size=2",
        "pipeline.stages.split.shuffle=false",
        "pipeline.stages.weight.unit=rollout",
    )
    expected = composed(*words).run(batch)
    run = composed(*words, "pipeline.rollout_key=null").run(batch.exclude("rollout_id"))
    for key in ("advantage", "loss_weight", ("headrace", "minibatch")):
        assert torch.equal(run.batch[key], expected.batch[key])
    assert "rollouts/in" not in run.metrics
    assert run.metrics["groups/trained"] == 2


def test_one_override_removes_a_stage_also_from_an_order():
    for word in ("overlong", "split"):
        expected = composed("pipeline=dapo").order
        expected.remove(word)
        assert composed("pipeline=dapo", f"~pipeline.stages.{word}").order == expected


def test_a_stage_the_command_line_cannot_reach_is_refused():
    for name in ("a.b", "", "two words", "1st"):
        with pytest.raises(ValueError, match="a stage's name must consist of letters"):
            Pipeline({name: FanOutCollapse()})


@pytest.mark.parametrize(
    "refuse",
    [
        lambda ids, odd: FanOutCollapse()(odd),
        lambda ids, odd: CompletenessGate(group_size=2)(odd),
        lambda ids, odd: group_relative_advantage(torch.arange(len(ids)).float(), ids, ids),
        lambda ids, odd: SampleFilter(criterion=lambda b: b["group_id"] < 0, unit="group")(odd),
    ],
    ids=["siblings that disagree", "a rollout in many groups", "many rewards of one rollout", "an unset id"],
)
def test_an_error_is_short_for_any_number_of_rows(make_batch, refuse):
    rows = 50_000
    ids = torch.zeros(rows, dtype=torch.int64)
    odd = make_batch([0.0], [0]).exclude("prompt_text").expand(rows).clone()
    odd["next", "reward"] = torch.arange(rows).float()[:, None]
    odd["group_id"] = torch.arange(rows) - 1
    odd["rollout_id"] = ids
    with pytest.raises(BatchError) as info:
        refuse(ids, odd)
    assert len(str(info.value)) < 10_000
