"""A call that does not fit the signature is answered with the call that is meant."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, Literal

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
from headrace.transforms.table.calls import accepts, call_meant


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


NO_OPTIONS = {  # arguments by name, which are data; and results, which are not made by hand
    *("log_report", "merge_turns", "pack", "take_rows", "token_weights", "total_loss", "tree_mask"),
    *("turns_to_go", "weighted_loss"),
    *("Decision", "Ids", "Rows", "Run", "Status", "StepReport", "TaskResult", "XRay"),
}


def test_no_public_name_with_options_answers_an_unknown_one_in_the_words_of_python():
    modules = (headrace.pipeline, headrace.transforms)
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    asked = 0
    for name in sorted(public.keys() - NO_OPTIONS):
        thing = public[name]
        if not callable(thing) or (isinstance(thing, type) and issubclass(thing, Exception)):
            continue
        parameters = inspect.signature(thing).parameters.values()
        options = [each for each in parameters if each.default is not each.empty]
        if options and inspect.Parameter.VAR_KEYWORD not in {each.kind for each in parameters}:
            asked += 1
            places = [each for each in parameters if each.kind < each.VAR_POSITIONAL]
            with pytest.raises((TypeError, ValueError)) as caught:
                thing(*[None for each in places if each.default is each.empty], nothing=1)
            assert "unexpected keyword" not in str(caught.value), name
    assert asked > 70


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


class Low:
    """A part."""

    def __repr__(self):
        return "Low()"


def of_any(one: int, *, thing: Any = None) -> None:
    """A function with an option of any type."""


class Many(BatchTransform):
    """A stage with a parameter by place, options of several types, and keywords of any name."""

    def __init__(self, name: str, *, size: int = 1, sort: Literal["up", "down"] = "up", **parts: Any):
        super().__init__()


def by_name(table: Mapping[str, int], *, size: int = 1) -> None:
    """A function of a mapping."""


def of_two(one: int, two: int, *, size: int) -> None:
    """A function of two parameters and a needed option."""


class WithHint:
    """A base class that says what to write in place of a call."""

    _to_write = "write class Mine(WithHint)"

    def __init__(self, size: int):
        """It takes one argument."""


@pytest.mark.parametrize(
    ("thing", "args", "kwargs", "meant"),
    [
        (of_two, (1, 2), {"size": 3}, None),
        (of_two, (1,), {}, "of_two needs two and size: of_two(one, two, size=…)"),
        (of_two, (), {"two": 1, "size": 2}, "of_two needs one: of_two(one, two, size=…)"),
        (of_two, (1, 2, 3), {}, "of_two takes its options by name: of_two(size=3)"),
        (of_two, (1, 2, "a"), {}, "of_two takes its options by name: size"),
        (
            of_two,
            (1, 2),
            {"sise": 3},
            "of_two has no option 'sise' (did you mean 'size'?); its options are one, two, size",
        ),
        (by_name, (), {"a": 1, "b": 2}, "by_name needs table: by_name({'a': …, 'b': …})"),
        (by_name, ({}, 2), {}, "by_name takes its options by name: by_name(size=2)"),
        (Many, ("a", 5), {}, "Many takes its options by name: Many(size=5)"),
        (Many, ("a", "up"), {}, "Many takes its options by name: Many(sort='up')"),
        (Many, ("a", "upp"), {}, "Many takes its options by name: Many(sort='upp') (did you mean 'up'?)"),
        (Many, ("a", 5), {"size": 1}, "Many takes its options by name: sort"),
        (Many, ("a", "upp", 5), {}, "Many takes its options by name: Many(sort='upp') (did you mean 'up'?)"),
        (Many, ("a", Low()), {}, "Many takes its parts by name: Many(low=…)"),
        (of_any, (1, Low()), {}, "of_any takes its options by name: of_any(thing=Low())"),
        (Many, (), {}, "Many needs name: Many(name)"),
        (WithHint.__init__, (WithHint.__new__(WithHint), 1, 2), {}, "write class Mine(WithHint)"),
        (of_two, (1, 2, "x" * 99), {"size": 3}, "of_two takes 2 arguments without a name: one, two"),
    ],
)
def test_a_call_is_compared_with_the_signature(thing, args, kwargs, meant):
    assert call_meant(thing, args, kwargs) == meant


def test_a_callable_takes_arguments_by_place_or_does_not():
    assert [accepts(len, 1), accepts(of_two, 1), accepts(by_name, {}), accepts(by_name)] == [
        True,
        False,
        True,
        False,
    ]
    assert accepts(max, 1, 2, 3)  # a function in C without a signature
