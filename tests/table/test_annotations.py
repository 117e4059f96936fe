"""A value that does not fit the annotation of its option is answered with the one that is meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypedDict

import pytest
import torch
from tensordict import TensorDict

from headrace.pipeline import Pipeline, advantages_of, load_pipeline, optimise
from headrace.transforms import GroupRelativeAdvantage, SampleFilter
from headrace.transforms.table.annotations import fits

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
