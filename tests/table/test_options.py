"""Numeric options refuse NaN, bool and infinity, and options without effect are refused."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
import re
import types
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from public import public
from recipes import of

import headrace
import headrace.pipeline
import headrace.transforms
from headrace.pipeline import ConfigError, RepeatSampler, StampIds, load_pipeline
from headrace.transforms import (
    BatchTransform,
    CompletenessGate,
    Diverged,
    GroupAssembler,
    GroupRelativeAdvantage,
    LossWeight,
    RolloutCorrection,
    ScoreRows,
    ShuffleSplit,
    TurnAdvantage,
    group_relative_advantage,
    importance_weight,
)
from headrace.transforms.table import options as table_options
from headrace.transforms.table.annotations import annotations_of
from headrace.transforms.table.options import describe_options

# Objects that functions return and no user constructs, and functions that pass their options to stages.
RESULTS = {"Run", "StepReport", "load_pipeline", "decide", "Decider", "replay", "audit", "compare", "plan"}


def takers():
    """The public classes and functions that are called with options, by name."""
    for package in (headrace.transforms, headrace.pipeline):
        for name, thing in public(package):
            kind = thing if inspect.isclass(thing) else object
            made = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields") or issubclass(kind, Exception)
            if callable(thing) and not made and name not in RESULTS:
                yield name, thing


def numeric_options():
    """The numeric options of each taker, without arguments that are data."""
    for name, thing in takers():
        for option, parameter in inspect.signature(thing).parameters.items():
            words = str(parameter.annotation)
            data = "Tensor" in words or words.startswith("Iterable")
            if re.search(r"\b(int|float|Clip|LowerBound|UpperBound)\b", words) and not data:
                yield name, thing, option, words


def call(thing, **given):
    """Call a function or class with placeholders for its other arguments. Numbers must be checked first."""
    first, needed = [], {}
    for name, parameter in inspect.signature(thing).parameters.items():
        named = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if named and parameter.default is parameter.empty:
            words = str(parameter.annotation)
            by_type = {"int": 1, "float": 1, "Sequence": [], "str": "x", "Iterable": [], "Literal": "drop"}
            value = next((by_type[kind] for kind in by_type if words.startswith(kind)), repr)
            if parameter.kind is parameter.POSITIONAL_ONLY:
                first.append(value)
            else:
                needed[name] = value
    return thing(*first, **needed | given)


@pytest.mark.slow
def test_a_numeric_option_refuses_nan_bool_and_infinity_by_default():
    """An annotation that cannot be resolved leaves its option unchecked, so known options must be found."""
    wrong = [math.nan, True, False, math.inf, -math.inf, torch.tensor(math.nan), torch.tensor(True)]
    seen = []
    for name, thing, option, words in numeric_options():
        seen.append(option)
        may_be = {"LowerBound": -math.inf, "UpperBound": math.inf}.get(words)
        for value in wrong:
            if not isinstance(value, torch.Tensor) and value == may_be:
                continue
            given = [0.5, value] if "Sequence" in words or words.startswith("Clip") else value
            refusal = pytest.raises(ValueError, match=rf"\b{option} must be .*; got ")
            with of(f"{name}.{option}={value}"), refusal as refused:
                call(thing, **{option: given})
            assert str(value) in str(refused.value).lower() or str(value) in str(refused.value)
    assert {"eps", "clip", "weights", "high", "factor", "patience", "group_size", "seed", "k"} <= set(seen)
    assert len(seen) > 90
    assert headrace.RewardScale(low=-math.inf, high=math.inf).high == math.inf  # these bounds may be infinite


def test_an_option_with_listed_values_refuses_others_and_lists_them():
    seen = 0
    for name, thing in takers():
        for option, hint in annotations_of(thing).items():
            parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
            words = [repr(word) for part in parts if get_origin(part) is Literal for word in get_args(part)]
            if torch.Tensor in parts or str in parts or not words:
                continue
            for value in ("nothing of this name", ["a list"]):
                with pytest.raises(ValueError, match=rf"\b{option} must be .*; got ") as refused:
                    call(thing, **{option: value})
                assert all(word in str(refused.value) for word in words), name
            seen += 1
    assert seen > 70


@pytest.mark.parametrize("value", [math.nan, True, math.inf])
def test_invalid_pipeline_options_are_named_in_full(value):
    for words in ({"patience": value}, {"stages": {"advantage": {"eps": value}}}):
        option = "pipeline.patience" if "patience" in words else "pipeline.stages.advantage.eps"
        with pytest.raises(ConfigError, match=f"^{option} must be a finite number; got"):
            load_pipeline("grpo", **words)


def test_options_of_a_user_stage_are_checked():
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
    with pytest.raises(TypeError, match=r"^ClipReward needs high: ClipReward\(high=…\)$"):
        ClipReward()


# Options that need others: a value, options with which the value has no effect, and options with which it has
# an effect. The default is always accepted.
ONLY_WITH = {
    (RolloutCorrection, "bound"): ("zero", {"high": None}, {"high": None, "low": 0.5}),
    (GroupRelativeAdvantage, "k"): (2, {}, {"baseline": "best_of_k"}),
    (LossWeight, "length"): (8, {}, {"unit": "constant"}),
    (LossWeight, "power"): (1.0, {}, {"unit": "inverse_length"}),
    (CompletenessGate, "min_rollouts"): (2, {}, {"on_incomplete": "keep"}),
    (CompletenessGate, "min_fraction"): (0.5, {}, {"on_incomplete": "keep"}),
    (TurnAdvantage, "turn_rewards"): ("turn", {"turn_index_key": None}, {}),
    (GroupAssembler, "min_rollouts"): (2, {}, {"on_failure": "keep"}),
    (GroupAssembler, "min_fraction"): (0.5, {}, {"on_timeout": "keep", "timeout": 9}),
    (GroupAssembler, "refill"): (print, {}, {"on_failure": "refill"}),
    (GroupAssembler, "max_refills"): (3, {}, {"on_failure": "refill", "refill": print}),
    (GroupAssembler, "on_stale"): ("mask", {}, {"max_staleness": 1}),
    (GroupAssembler, "on_newer"): ("wait", {}, {"max_staleness": 1}),
    (GroupAssembler, "steps_ahead"): (1, {}, {"groups": 1}),
    (GroupAssembler, "on_full"): ("raise", {}, {"max_pending_groups": 8}),
    (GroupAssembler, "on_timeout"): ("raise", {}, {"timeout": 9}),
}

NEEDED: dict[Any, dict[str, Any]] = {
    ShuffleSplit: {"minibatches": 1},
    RepeatSampler: {"prompts": 4, "group_size": 2},
    StampIds: {"repeats": 2},
    group_relative_advantage: {"reward": [1.0, 2.0], "group_id": [0, 0]},
}
REFILL = {"on_stale": "refill", "max_staleness": 1, "refill": print}
FOUR, INSIDE = {"prompts_per_batch": 4}, {"unit": "turn", "turn_index_key": "turn"}
# Values that are out of range, or contradict other options.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("group_relative_advantage", {"eps": -1e-6}, "eps must be finite and ≥ 0"),
    ("group_relative_advantage", {"scale": "leave_one_out"}, "needs eps_mode='skip'; got eps_mode='add'"),
    ("group_relative_advantage", {"scale": "leave_one_out", "eps_mode": "clamp"}, "got eps_mode='clamp'"),
    ("group_relative_advantage", {"baseline": "best_of_k"}, "baseline='best_of_k' needs k"),
    ("group_relative_advantage", {"baseline": "best_of_k", "k": 1}, "k must be an integer ≥ 2; got 1"),
    ("group_relative_advantage", {"scale": "mad"}, "scale='mad' needs eps_mode='skip'"),
    (
        "GroupAssembler",
        {"on_failure": "keep"},
        "'keep' needs min_rollouts or min_fraction; got neither, with on_failure='keep'",
    ),
    ("GroupAssembler", {"on_failure": "keep", "min_fraction": 1.5}, r"in \(0, 1\]"),
    ("GroupAssembler", {"on_failure": "refill"}, "'refill' needs a callable refill; got None"),
    ("GroupAssembler", {"timeout_seconds": 0}, "finite and > 0"),
    ("GroupAssembler", {"on_surplus": "keep"}, "on_surplus must be 'drop' or a callable"),
    ("GroupAssembler", {"groups": 0}, "groups must be an integer ≥ 1"),
    (
        "GroupAssembler",
        {"on_stale": "refill", "max_staleness": 1},
        "'refill' needs a callable refill; got None",
    ),
    ("GroupAssembler", {"steps_ahead": 3, "max_staleness": 2}, "steps_ahead must be at most max_staleness=2"),
    ("GroupAssembler", {"on_stale": "wait", "max_staleness": 2}, "on_stale='wait' needs groups"),
    ("GroupAssembler", {"max_concurrent_rollouts": 0}, "max_concurrent_rollouts must be"),
    ("GroupAssembler", REFILL | {"min_fraction": 0.5}, "an effect only with"),
    ("CompletenessGate", {"on_incomplete": "keep"}, "needs min_rollouts or min_fraction; got neither"),
    ("CompletenessGate", {"on_incomplete": "keep", "min_rollouts": 0}, "min_rollouts must be an integer ≥ 1"),
    ("CompletenessGate", {"on_incomplete": "keep", "min_fraction": 1.5}, r"min_fraction must be in \(0, 1\]"),
    ("CompletenessGate", {"group_size": 0}, "group_size must be an integer ≥ 1; got 0"),
    ("CompletenessGate", {"group_size": "8"}, "group_size must be an integer or None; got '8'"),
    ("RolloutCorrection", {"low": 3.0}, "low must be ≤ high; got 3.0 and 2.0"),
    ("RolloutCorrection", {"low": -1.0}, "low ≥ 0 and high > 0"),
    ("RolloutCorrection", {"high": 0.0}, "low ≥ 0 and high > 0"),
    ("RolloutCorrection", {"least_ess": 2.0}, r"least_ess must be in \[0, 1\]"),
    ("Diverged", {"estimator": "k1", "high": None}, "k1 needs low or high"),
    ("Diverged", {"estimator": "k1", "high": 0.9}, "so high must be ≥ 1; got 0.9"),
    ("RewardWithin", {"low": 2.0, "high": 1.0}, "low must be ≤ high"),
    ("LengthWithin", {"low": 2, "high": 1}, "low must be ≤ high"),
    ("Fresh", {"current": 0, "max_staleness": -1}, "max_staleness must be an integer ≥ 0"),
    ("Fresh", {"current": None}, "current must be an integer or a callable; got None"),
    ("Fresh", {"current": "newest"}, "current must be an integer or a callable; got 'newest'"),
    ("SampleFilter", {"criterion": None}, "criterion must be a callable"),
    ("LossWeight", {"unit": "constant"}, "needs length, and no other unit reads it"),
    ("LossWeight", {"unit": "constant", "length": 0}, "length must be an integer ≥ 1"),
    ("LossWeight", {"unit": "inverse_length"}, "needs power, and no other unit reads it"),
    ("LossWeight", {"unit": "inverse_length", "power": -1.0}, "power must be"),
    ("LossWeight", {"ranks": 0}, "ranks must be an integer ≥ 1"),
    ("LossWeight", {"ranks": 2, "process_group": "world"}, "give ranks if each rank"),
    ("LossWeight", {"unit": "turn"}, "unit='turn' needs either turn_key .* or turn_index_key"),
    ("LossWeight", {"unit": "turn", "turn_key": "a", "turn_index_key": "b"}, "got unit='turn'"),
    ("LossWeight", {"unit": "token", "turn_index_key": "turn_index"}, "got unit='token'"),
    ("LossWeight", INSIDE | {"fold": "sum"}, "cannot put it into the advantage of a row: set fold"),
    ("LossWeight", INSIDE | {"fold": "token_mean"}, "sum the loss with weighted_loss"),
    ("ShuffleSplit", {"microbatches": 2, "max_tokens": 9}, "give at most one of microbatches"),
    ("ShuffleSplit", {"microbatches": 0}, "microbatches must be an integer ≥ 1"),
    ("ShuffleSplit", {"max_tokens": 0}, "max_tokens must be an integer ≥ 1"),
    ("ShuffleSplit", {"ranks": 2, "rank": 2}, "rank must be below ranks"),
    ("ShuffleSplit", {"rank": -1}, "rank must be an integer ≥ 0"),
    ("ShuffleSplit", {"ranks": 2, "process_group": "world"}, "give ranks if each rank"),
    ("ShuffleSplit", {"ranks": 2, "max_tokens": 9}, "set remainder='pad' or 'carry' to fill it up"),
    (
        "ShuffleSplit",
        {"process_group": "world", "max_tokens": 9, "remainder": "uneven"},
        "got remainder='uneven'",
    ),
    ("RunningBaseline", {"decay": 1.5}, "decay must be in"),
    ("RunningBaseline", {"decay": 1.0}, "needs start_weight"),
    ("RunningBaseline", {"start_weight": 0.0}, "start_weight must be finite and > 0"),
    ("RepeatSampler", {"prompts": 0}, "prompts must be an integer ≥ 1; got 0"),
    ("RepeatSampler", {"group_size": 0}, "group_size must be an integer ≥ 1; got 0"),
    ("RepeatSampler", {"rank": 2, "ranks": 2}, "rank must be from 0 to ranks - 1; got rank=2, ranks=2"),
    ("RepeatSampler", {"ranks": 2}, "prompts_per_batch must be a multiple of ranks.*got 1"),
    ("RepeatSampler", FOUR | {"prompts": 5, "ranks": 2, "remainder": "uneven"}, "got 4, and 1 in the last"),
    ("RepeatSampler", FOUR | {"prompts": 2, "remainder": "drop"}, "at least prompts_per_batch=4 prompts"),
    ("TokenAdvantage", {"term": 3}, "term must be a callable"),
    ("DirectedWeight", {"clip": 1.5}, r"clip must be in \[0, 1\]"),
    ("TopShare", {"share": 0}, r"share must be in \(0, 1\]"),
    ("StalenessWeight", {"current": 1, "decay": 0}, r"decay must be in \(0, 1\]"),
    ("StalenessWeight", {"current": None, "decay": 0.5}, "current must be an integer"),
    ("TurnAdvantage", {"turn_key": "turn"}, "turn_key is only read if rows are turns"),
    ("TurnAdvantage", {"turn_index_key": None, "turn_rewards": "turn"}, "each has its own reward"),
    ("TurnAdvantage", {"discount": 2.0}, "discount must be in"),
    ("StampIds", {"repeats": 0}, "repeats must be ≥ 1 and worker from 0 to workers - 1"),
    ("StampIds", {"worker": 2, "workers": 2}, "worker from 0 to workers - 1"),
    ("StampIds", {"worker": -1}, "worker from 0 to workers - 1"),
    ("ShuffleSplit", {"minibatches": None}, "minibatch"),
    ("ShuffleSplit", {"minibatch_size": 2}, "minibatch"),
    ("ShuffleSplit", {"minibatches": 0}, "minibatches must be"),
    ("ShuffleSplit", {"minibatches": None, "minibatch_size": -1}, "minibatch_size must be"),
    ("ShuffleSplit", {"tree": "group", "max_tokens": 9, "remainder": "drop"}, "assigns whole trees"),
    ("GroupRelativeAdvantage", {"clip": [math.nan, None]}, r"clip must be (\[low, high\]|a list)"),
    ("GroupRelativeAdvantage", {"without_ids": [4]}, r"without_ids must be \[P, G\]"),
    ("GroupRelativeAdvantage", {"without_ids": [4, 0]}, r"both ≥ 1; got \[4, 0\]"),
    ("GroupRelativeAdvantage", {"clip": [2.0, 1.0]}, r"clip must be (\[low, high\]|a list)"),
    ("GroupUnit", {"max_uses": 0}, "max_uses must be an integer"),
]


def test_an_option_without_effect_is_refused_unless_it_has_its_default():
    for (stage, option), (value, without, beside) in ONLY_WITH.items():
        needed, default = NEEDED.get(stage, {}), inspect.signature(stage).parameters[option].default
        with of(f"{stage.__name__}.{option}"):
            with pytest.raises(ValueError, match=rf"\b{option}\b"):
                stage(**needed, **without, **{option: value})
            assert getattr(stage(**needed, **beside, **{option: value}), option) == value
            assert getattr(stage(**needed, **without, **{option: default}), option) == default


def test_options_out_of_range_or_in_contradiction_are_refused():
    found = dict(public(headrace.transforms) + public(headrace.pipeline))
    assert len(found.keys() & {name for name, *_ in REFUSED}) > 15
    for name, options, message in REFUSED:
        if (thing := found.get(name)) is None:
            continue
        with of(f"{name}, {options}"), pytest.raises(ValueError, match=message):
            thing(**NEEDED.get(thing, {}) | options)


def test_a_function_refuses_a_bound_without_effect():
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="bound must be left out without low or high"):
        importance_weight(one, one, one == 0, bound="zero", high=None)


@pytest.mark.slow
def test_each_of_these_overrides_composes_alone():
    for recipe, word in (
        ("as/trl", "advantage.scale=none"),
        ("as/open_instruct", "advantage.scale=none"),
        ("mc_grpo", "advantage.scale=none"),
        ("icepop", "correction.bound=none"),
        ("mlperf", "correction.bound=truncate"),
        ("tis", "correction.high=null"),
        ("gigpo", "states.scale=group"),
        ("grpo", "split.shuffle=false"),
        ("length_bonus", "relative_length.form=rescale"),
    ):
        with of(recipe):
            assert load_pipeline(recipe, f"pipeline.stages.{word}").stages


def test_an_option_is_fixed_at_construction(make_batch):
    """Values that are computed from options, such as the columns to read, are computed only once."""
    batch = make_batch([1.0, 2.0], [0, 0], [0, 1])
    stage, criterion = GroupRelativeAdvantage(eps=1e-4), Diverged(high=2.0)
    pipeline = load_pipeline("grpo")
    for fixed, option, value in (
        (stage, "eps", 0.5),
        (stage, "group_key", "uid"),
        (criterion, "high", 3.0),
        (pipeline, "masked_log_prob", "keep"),
        (ShuffleSplit(minibatches=1), "seed", 3),
    ):
        before = getattr(fixed, option)
        with pytest.raises(
            AttributeError, match=rf"{option} of \w+ is fixed at construction: construct a new"
        ):
            setattr(fixed, option, value)
        assert getattr(fixed, option) == before
    for copied in (copy.deepcopy(stage), pickle.loads(pickle.dumps(stage))):
        with pytest.raises(AttributeError, match="eps of GroupRelativeAdvantage is fixed"):
            copied.eps = 0.5
        assert torch.equal(copied(batch)["advantage"], stage(batch)["advantage"])
    stage.note = 1  # this is not an option


def test_the_options_that_pages_set_later_may_be_set_again():
    for stage, option in ((CompletenessGate(), "expected_groups"), (ScoreRows(), "actor")):
        for value in ([3], [4]):
            setattr(stage, option, value)
            assert getattr(stage, option) == value


def test_only_options_that_differ_from_their_defaults_are_shown():
    stage = ShuffleSplit(minibatches=2, seed=3, unit="sample")
    assert describe_options(stage) == "minibatches=2, unit='sample', seed=3"
    assert describe_options(stage, leave_out=("seed", "unit")) == "minibatches=2"
    assert {"minibatches", "seed", "rollout_key"} <= {*table_options.options_of(ShuffleSplit)}


class Compares:
    """A value that cannot be compared."""

    def __ne__(self, other):
        raise TypeError

    def __repr__(self):
        return "Compares()"


def test_a_value_that_cannot_be_compared_with_the_default_is_shown():
    class Holder:
        def __init__(self, a=1, b=1, c=1, d=1):
            self.a, self.b, self.c, self.d = a, b, c, d

    shown = describe_options(Holder(np.ones(2), torch.ones(2), Compares()))
    assert shown == "a=array([1., 1.]), b=tensor([1., 1.]), c=Compares()"


@pytest.mark.parametrize(
    ("default", "value", "same"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        ("a", "a", True),
        (None, None, True),
        ([1], [1], False),
    ],
)
def test_a_value_is_the_default_if_type_and_value_are_equal(default, value, same):
    parameter = inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY, default=default)
    assert table_options.is_default(parameter, value) == same


def test_an_option_without_effect_is_named_with_the_option_that_it_needs():
    def owner(*, k: int | None = 4):
        """A function with an option."""

    table_options.has_effect(owner, "k", 4, False, "x")
    table_options.has_effect(owner, "k", 5, True, "x")
    with pytest.raises(ValueError, match=r"^k must be left out without x, since it has no effect; got k=5$"):
        table_options.has_effect(owner, "k", 5, False, "x")


def test_a_key_of_yaml_is_a_name_or_a_tuple():
    keys = [None, "a", ["a"], ["a", "b"], ("a", "b"), ("a",)]
    assert [table_options.nested_key(key) for key in keys] == [None, "a", "a", ("a", "b"), ("a", "b"), "a"]


def test_options_of_a_method_and_of_a_function_are_checked_by_place_and_by_name():
    class Owner:
        @table_options.takes_options
        def scaled(self, by: int, *, low: float = 0.0) -> float:
            return by + low

    @table_options.takes_options
    def scaled(by: int, low: float = 0.0) -> float:
        return by + low

    for call in (Owner().scaled, scaled):
        assert (call(2), call(2, low=1), call(by=3)) == (2, 3, 3)
        for args, given, said in (
            ([2.5], {}, "by must be an integer; got 2.5"),
            ([], {"by": "2"}, "by must be an integer; got '2'"),
            ([2], {"low": math.nan}, "low must be a finite number; got nan"),
        ):
            with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
                call(*args, **given)
    assert scaled(1, 2) == 3
    with pytest.raises(ValueError, match=r"^low must be a finite number; got 'x'$"):
        scaled(1, "x")
