"""A call that does not fit the signature is answered with the call that is meant."""

from __future__ import annotations

import re

import pytest
import torch
from tensordict import TensorDict

import headrace
from headrace.pipeline import Checkpoint, Pipeline, RepeatSampler, StampIds, load_pipeline
from headrace.transforms import (
    BatchTransform,
    CompletenessGate,
    FanOutCollapse,
    LossWeight,
    OverlongPunishment,
    SampleFilter,
    ShuffleSplit,
    weighted_loss,
)


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: ShuffleSplit(num_minibatches=2), "'minibatches'.*"),
        (lambda: CompletenessGate(expected_rollouts=2), "'group_size'"),
        (lambda: load_pipeline("grpo", normalize=False), "'scale'"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest_one(call, meant):
    with pytest.raises((ValueError, TypeError), match=rf" \(did you mean {meant}\?\)"):
        call()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: FanOutCollapse("sum"), "Collapse takes its options by name: FanOutCollapse(reward='sum')"),
        (lambda: FanOutCollapse("average"), "FanOutCollapse(reward='average') (did you mean 'mean'?)"),
        (lambda: FanOutCollapse("score"), "by name: FanOutCollapse(reward_key='score')"),
        (lambda: CompletenessGate(8), "by name: CompletenessGate(group_size=8)"),
        (lambda: CompletenessGate(8, group_size=4), "by name: CompletenessGate(min_rollouts=8)"),
        (lambda: ShuffleSplit(4), "by name: ShuffleSplit(minibatches=4)"),
        (lambda: OverlongPunishment(buffer=4), "has no option 'buffer' (did you mean 'cache'?); its options"),
        (lambda: OverlongPunishment(cache=4), "needs max_length: OverlongPunishment(max_length=…, cache=…)"),
        (lambda: SampleFilter(5), "SampleFilter takes its options by name: criterion, also, "),
        (lambda: SampleFilter(), "SampleFilter needs criterion: SampleFilter(criterion=…)"),
        (lambda: LossWeight(per="token"), "LossWeight has no option 'per' (did you mean 'unit'?); its"),
        (lambda: RepeatSampler(), "needs prompts and group_size: RepeatSampler(prompts, group_size=…)"),
        (lambda: StampIds(workr=2), "StampIds has no option 'workr' (did you mean 'worker' or 'workers'?)"),
        (lambda: headrace.compare("dump", "grpo"), "compare needs second: compare(path, first, second)"),
        (lambda: headrace.compare("dump", ["grpo"]), "first must be a string; got ['grpo']"),
        (lambda: Pipeline("grpo"), "(headrace.load_pipeline takes the name of a recipe); got 'grpo'"),
        (lambda: Pipeline(gate=len), "Pipeline needs stages: Pipeline({'gate': …})"),
        (lambda: Checkpoint("x", Pipeline({})), "takes its parts by name: Checkpoint(pipeline=…)"),
        (
            lambda: Checkpoint("x"),
            "Checkpoint(folder, policy=policy, optimizer=optimizer, pipeline=pipeline)",
        ),
        (
            lambda: weighted_loss({}, torch.ones(2)),
            "and then the minibatch, a TensorDict; got a Tensor as the",
        ),
        (lambda: weighted_loss(torch.ones(2), TRAINS), "weighted_loss({'loss_policy': loss}, minibatch)"),
        (lambda: Pipeline([repr]), "(headrace.load_pipeline takes the name of a recipe); got [<built-in"),
    ],
)
def test_the_error_for_a_wrong_call_shows_a_call_that_fits(call, said):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)) as refused:
        call()
    assert ("did you mean" in str(refused.value)) == ("did you mean" in said)


def test_a_function_in_c_without_a_signature_is_accepted_as_a_stage():
    assert Pipeline({"most": max, "size": len}).order == ["most", "size"]
    with pytest.raises(ValueError, match=r"stage 'same'.* takes one argument, the batch, .*takes \(obj, "):
        Pipeline({"same": isinstance})


TRAINS = TensorDict({"loss_weight": torch.ones(2)}, batch_size=[2])


def test_a_call_of_the_base_class_that_does_not_fit_names_the_base_class():
    class Sized(ShuffleSplit):
        def __init__(self):
            super().__init__(4)

    with pytest.raises(TypeError, match=r"^ShuffleSplit takes its options by name: ShuffleSplit\("):
        Sized()


def test_an_error_inside_of_a_call_that_fits_the_signature_is_unchanged():
    class Sums(BatchTransform):
        def __init__(self, *, low: float = 0.0):
            super().__init__()
            self.low = low + "1"

    with pytest.raises(TypeError, match="unsupported operand"):
        Sums(low=1.0)
