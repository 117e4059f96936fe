"""A value that does not fit the annotation of its option is answered with the one that is meant."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import pytest
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from headrace.pipeline import Pipeline, advantages_of, load_pipeline, optimise
from headrace.transforms import GroupRelativeAdvantage, SampleFilter, Status
from headrace.transforms.table.annotations import (
    annotations_of,
    closest_value,
    described,
    fits,
    in_one_line,
)
from headrace.transforms.table.options import LowerBound, UpperBound

ROWS = TensorDict({"group_id": [0, 0]}, batch_size=[2])


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: GroupRelativeAdvantage(scale="std"), "'group'"),
        (lambda: GroupRelativeAdvantage(baseline="loo"), "'leave_one_out'"),
        (lambda: SampleFilter(criterion="rewards_vary"), r"RewardsVary\(\)"),
        (lambda: SampleFilter("rewards_vary"), r"RewardsVary\(\)"),
    ],
)
def test_a_wrong_value_is_answered_with_the_nearest_one(call, meant):
    with pytest.raises((ValueError, TypeError), match=rf" \(did you mean {meant}\?\)"):
        call()


def test_a_value_that_is_near_no_known_value_gets_no_guess():
    with pytest.raises(ValueError, match=r"criterion must be a callable; got 'qqq'$"):
        SampleFilter(criterion="qqq")


class Point(TypedDict):
    """A TypedDict of this module, which stands for one of headrace's."""

    x: int


def test_a_dict_fits_a_typed_dict_of_headrace_and_no_other_class_of_it(monkeypatch):
    monkeypatch.setattr(Point, "__module__", "headrace.points")
    assert fits([{"x": 1}], Sequence[Point])
    assert not fits([{"x": 1}], Sequence[Pipeline])


INSTEAD = ": use headrace.decide(columns, recipe).advantage for plain columns; advantages_of("


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: advantages_of([1, 1], [0.0, 1.0]), f"pipeline must be a Pipeline; got [1, 1]{INSTEAD}"),
        (lambda: advantages_of([1, 1], [4, 5], [0.0, 1.0]), f"must be a Pipeline; got [1, 1]{INSTEAD}"),
        (lambda: advantages_of("rloo", ROWS), f"pipeline must be a Pipeline; got 'rloo'{INSTEAD}"),
        (lambda: advantages_of(ROWS, ROWS), f"pipeline must be a Pipeline; got a TensorDict{INSTEAD}"),
        (lambda: advantages_of(torch.ones(2), ROWS), "must be a Pipeline; got tensor([1., 1.])" + INSTEAD),
        (lambda: advantages_of(load_pipeline("rloo"), {}), "batch must be a TensorDict; got {}" + INSTEAD),
        (
            lambda: optimise(load_pipeline("rloo"), ROWS),
            "loss must be a callable; got a TensorDict: use optimise(pipeline.run(rows).minibatches(), loss,",
        ),
        (lambda: optimise([ROWS], len, 0.1), "optimizer must be an Optimizer; got 0.1"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line_with_what_to_use(call, said):
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        call()
    assert "\n" not in str(refused.value)


UNION = Literal["sum", "mean"] | None
ROWS_OR_NOT = [torch.ones(2), ROWS]
# Annotation: how a message describes it, values that fit, and values that do not.
ANNOTATED = [
    (
        int,
        "an integer",
        [1, -3, np.int64(3), torch.tensor(2)],
        [True, 1.5, "1", None, [1], torch.tensor(2.0)],
    ),
    (float, "a finite number", [1, -1.5, np.float32(2)], [math.inf, -math.inf, math.nan, True, "1", None]),
    (LowerBound, "a number or -inf", [0, -1.5, -math.inf], [math.inf, math.nan, True, "1", None]),
    (UpperBound, "a number or inf", [0, 1.5, math.inf], [-math.inf, math.nan, False, "1", None]),
    (bool, "True or False", [True, False, np.bool_(True)], [0, 1, "true", None]),
    (str, "a string", ["a", "", Path("a")], [1, None, ["a"], 2.0]),
    (type(None), "None", [None], [False, 0, ""]),
    (None, "", [None], [False, 0, ""]),
    (Literal["sum"], "'sum'", ["sum"], ["Sum", None, ["sum"]]),
    (Literal[1, 2], "one of 1, 2", [1, 2], [True, 1.0, "1", 3]),
    (UNION, "one of 'sum', 'mean' or None", ["sum", None], ["", "max", False]),
    (str | Literal["world"] | None, "a string or None", ["any", None], [1]),
    (int | float, "an integer or a finite number", [1, 1.5], [math.nan, "1"]),
    (
        Sequence[int],
        "a list (each an integer)",
        [[], [1, 2], (3,), np.array([4])],
        [[1.5], "12", {"a": 1}, 5, [True]],
    ),
    (Sequence[float | None], "a list (each a finite number or None)", [[None, 1]], [["1"], [math.inf]]),
    (list, "a list", [[], ["a", 1], (1,)], ["a", 1, {}]),
    (list[str], "a list (each a string)", [[], ["a"], ("a",)], [[1], "a"]),
    (Iterable[int], "a list (each an integer)", [[1], (2,)], [["a"], 1]),
    (
        tuple[int, str],
        "a list of 2 (each an integer)",
        [(1, "a"), [1, "a"]],
        [(1,), (1, "a", 2), ("a", 1), 1],
    ),
    (tuple[int, ...], "a list (each an integer)", [(), (1, 2, 3), [1]], [("a",), 1]),
    (Mapping[str, int], "a mapping, as {'name': value}", [{}, {"a": 1}], [[1], "a", 1]),
    (dict, "a mapping, as {'name': value}", [{}], [[]]),
    (Callable, "a callable", [len, print], ["len", None, 5, []]),
    (Callable[[int], int], "a callable", [len], ["len"]),
    (Callable | None, "a callable or None", [len, None], ["len"]),
    (
        NestedKey,
        "a column, as a name or a list of names",
        ["a", ("a", "b"), ["a"]],
        [[], ("a", 1), 5, None, {}],
    ),
    (torch.dtype, "a string", [torch.float32, "float32"], [5, [], {}, None]),
    (torch.device, "a string", [torch.device("cpu"), "cpu"], [5]),
    (TensorDictBase, "a TensorDict", [ROWS], [{}, [], "a", 5]),
    (Pipeline, "a Pipeline", [Pipeline({})], ["a", {}, *ROWS_OR_NOT]),
    (torch.optim.Optimizer, "an Optimizer", [object()], ["a", 5]),
    (torch.Tensor, "a Tensor", [torch.ones(2), [1, 2], None, 5], ["a"]),
    (torch.Tensor | None, "a Tensor or None", [torch.ones(2), [1], 5], ["a"]),
    (Status, "", [Status.FAILED, 1], []),
]


@pytest.mark.parametrize(
    ("hint", "said", "fit", "others"), ANNOTATED, ids=[str(each[0]) for each in ANNOTATED]
)
def test_a_value_fits_its_annotation_or_does_not(hint, said, fit, others):
    """A node with a ``_target_`` fits any annotation, and an object any but a number, a word or a bool."""
    assert [fits(value, hint) for value in fit] == [True] * len(fit)
    assert [fits(value, hint) for value in others] == [False] * len(others)
    assert fits({"_target_": "x"}, hint)
    assert not said or described(hint) == said


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (bool, "true or false"),
        (str, "a text"),
        (int | None, "an integer or null"),
        (torch.dtype, "a text"),
        (Callable, "a node with a _target_"),
        (Pipeline | None, "a node with a _target_ or null"),
        (Mapping[str, int], "names and values in braces"),
        (Sequence[bool], "a list (each true or false)"),
    ],
)
def test_an_annotation_is_described_in_the_words_of_a_configuration(hint, said):
    assert described(hint, {bool: "true or false", str: "a text", type(None): "null"}) == said


def takes_many(one: int, *more: str, option: NestedKey | None = None, odd: Unknown = 1, **others: int):  # noqa: F821
    """A function with parameters of every kind."""


def test_the_annotations_of_a_function_are_those_of_its_named_parameters():
    assert annotations_of(takes_many) == {"one": int, "option": NestedKey | None, "odd": Any}


@pytest.mark.parametrize(
    ("value", "hint", "meant"),
    [
        ("men", Literal["sum", "mean"], " (did you mean 'mean'?)"),
        ("grup", Literal["group"] | None, " (did you mean 'group'?)"),
        (True, Literal["True"], " (did you mean 'True'?)"),
        (["men"], Literal["sum", "mean"], ""),
        ("zzz", Literal["sum", "mean"], ""),
        (5, Sequence[float | None] | None, " (did you mean [-5, 5]?)"),
        (0.5, Sequence[float | None], " (did you mean [-0.5, 0.5]?)"),
        (0, Sequence[float | None], ""),
        (-1, Sequence[float | None], ""),
        (True, Sequence[float | None], ""),
        (5, Sequence[float], ""),
    ],
)
def test_the_value_that_is_probably_meant_is_suggested(value, hint, meant):
    assert closest_value(value, hint) == meant


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "5"),
        ("a" * 500, f"'{'a' * 199}"),
        (torch.ones(2), "tensor([1., 1.])"),
        (torch.ones(2, 2), "a Tensor"),
        (ROWS, "a TensorDict"),
    ],
)
def test_a_value_is_shown_in_one_line(value, said):
    assert in_one_line(value) == said
