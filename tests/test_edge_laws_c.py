"""Options: no numeric one is NaN, a bool or infinite, and none without effect is accepted."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re

import pytest
import torch

import headrace.pipeline
import headrace.transforms
from headrace.pipeline import ConfigError, load_pipeline
from headrace.transforms import BatchTransform, RewardScale, TokenAdvantage

# What functions return, and nobody writes down; and load_pipeline, whose words go to the stages.
RESULTS = {"Run", "StepReport", "load_pipeline"}


def takers():
    """Every public class and function that is called with options, by name."""
    for package in (headrace.transforms, headrace.pipeline):
        for name in package.__all__:
            thing = getattr(package, name)
            kind = thing if inspect.isclass(thing) else object
            made = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields") or issubclass(kind, Exception)
            if callable(thing) and not made and name not in RESULTS:
                yield name, thing


def numeric_options():
    """Each taker with each of its options whose annotation has a number in it, data left out."""
    for name, thing in takers():
        for option, parameter in inspect.signature(thing).parameters.items():
            words = str(parameter.annotation)
            data = "Tensor" in words or words.startswith("Iterable")
            if re.search(r"\b(int|float|Clip|LowerBound|UpperBound)\b", words) and not data:
                yield pytest.param(thing, option, words, id=f"{name}.{option}")


def call(thing, **given):
    """With what it needs besides; of that no value is looked at before the numbers are."""
    needed = {}
    for name, parameter in inspect.signature(thing).parameters.items():
        named = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if named and parameter.default is parameter.empty:
            words = str(parameter.annotation)
            needed[name] = 1 if words.startswith(("int", "float")) else None
    return thing(**needed | given)


@pytest.mark.parametrize(("thing", "option", "words"), list(numeric_options()))
def test_no_numeric_option_is_nan_or_a_bool_or_infinite_where_it_does_not_say_so(thing, option, words):
    may_be = {"LowerBound": -math.inf, "UpperBound": math.inf}.get(words)
    wrong = [math.nan, True, False, math.inf, -math.inf, torch.tensor(math.nan), torch.tensor(True)]
    for value in wrong:
        if not isinstance(value, torch.Tensor) and value == may_be:
            continue
        given = value
        if "Sequence" in words or words.startswith("Clip"):
            given = [0.5, value]
        with pytest.raises(ValueError, match=rf"\b{option} must be .*; got ") as refused:
            call(thing, **{option: given})
        assert str(value) in str(refused.value).lower() or str(value) in str(refused.value)


def test_every_annotation_with_a_number_in_it_is_understood():
    """A name that is there for type checkers alone would leave its option unchecked."""
    seen = [parameter.values[1] for parameter in numeric_options()]
    assert {"eps", "clip", "weights", "high", "factor", "patience", "group_size", "seed", "k"} <= set(seen)
    assert len(seen) > 90


@pytest.mark.parametrize("value", [math.nan, True, math.inf])
def test_words_of_a_pipeline_are_refused_by_the_option_that_they_are(value):
    for words in ({"patience": value}, {"stages": {"advantage": {"eps": value}}}):
        option = "pipeline.patience" if "patience" in words else "pipeline.stages.advantage.eps"
        with pytest.raises(ConfigError, match=f"^{option} must be a finite number; got"):
            load_pipeline("grpo", **words)


def test_bounds_that_may_be_open_are_infinite_in_their_own_direction_alone():
    assert RewardScale(low=-math.inf, high=math.inf).high == math.inf
    for given in ({"low": math.inf}, {"high": -math.inf}):
        with pytest.raises(ValueError, match=r"must be a number or -?inf; got -?inf"):
            RewardScale(**given)


def test_a_stage_of_ones_own_is_checked_too():
    class ClipReward(BatchTransform, columns=("reward",)):
        def __init__(self, *, high: float, times: int | None = None, **names):
            self.name_columns(names)
            super().__init__(in_keys=[self.reward_key])
            self.high = high

    assert ClipReward(high=1, times=2).high == 1
    for given, words in (
        ({"high": math.nan}, "high must be a finite number; got nan"),
        ({"high": True}, "high must be a finite number; got True"),
        ({"high": 1.0, "times": 1.5}, "times must be an integer or None; got 1.5"),
    ):
        with pytest.raises(ValueError, match=words):
            ClipReward(**given)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'high'"):
        ClipReward()


def test_what_may_also_be_a_callable_is_a_number_or_that():
    assert TokenAdvantage(term=lambda batch, trains: trains, factor=lambda: 2.0).factor() == 2.0
    with pytest.raises(ValueError, match="factor must be a finite number or a callable; got nan"):
        TokenAdvantage(term=lambda batch, trains: trains, factor=math.nan)
