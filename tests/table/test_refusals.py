"""Refusing a batch costs at most a few times as much as accepting a batch of the same size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.pipeline import Pipeline, load_pipeline
from headrace.transforms import BatchError, CompletenessGate, FanOutCollapse

MANY = 20_000
REWARD = ("next", "reward")


def batch(rows: int, columns: dict[Any, Any]) -> TensorDict:
    """Groups of eight rollouts of one row. `columns` replace the usual columns."""
    ids = torch.arange(rows)
    every = {
        "group_id": ids // 8,
        "rollout_id": ids,
        "expected_rollouts": torch.full((rows,), 8),
        REWARD: (ids % 3).float(),
        ("masks", "all_assistant_mask"): torch.ones(rows, 4, dtype=torch.bool),
        ("log_probs", "full"): torch.zeros(rows, 4),
        ("next", "done"): torch.ones(rows, dtype=torch.bool),
        "turn": ids % 2,
    }
    return TensorDict(every | columns, batch_size=[rows])


def grpo() -> Pipeline:
    return load_pipeline("grpo")


def ids(rows: int) -> torch.Tensor:
    return torch.arange(rows)


zeros, half = torch.zeros_like, lambda rows: ids(rows) // 2
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Any]]]] = {
    "one rollout id in all groups": (grpo, lambda n: {"rollout_id": zeros(ids(n))}),
    "one rollout of many rewards": (
        grpo,
        lambda n: {
            "rollout_id": zeros(ids(n)),
            "group_id": zeros(ids(n)),
            "expected_rollouts": ids(n) * 0 + 1,
        },
    ),
    "two rewards a rollout": (grpo, lambda n: {"rollout_id": half(n), "expected_rollouts": ids(n) * 0 + 4}),
    "no ids": (grpo, lambda n: {"rollout_id": ids(n) - n}),
    "sizes that differ in a group": (grpo, lambda n: {"expected_rollouts": ids(n) % 7 + 1}),
    "incomplete groups": (grpo, lambda n: {"expected_rollouts": ids(n) * 0 + 9}),
    "rewards that are not finite": (grpo, lambda n: {REWARD: torch.full((n,), torch.nan)}),
    "groups that are too large": (grpo, lambda n: {"expected_rollouts": ids(n) * 0 + 2}),
    "an unknown status": (grpo, lambda n: {("next", "status"): ids(n) * 0 + 99}),
    "ends that come twice": (
        lambda: Pipeline({"gate": CompletenessGate(done_key=("next", "done"))}),
        lambda n: {"rollout_id": half(n)},
    ),
    "one rollout that ends with each row": (
        lambda: Pipeline({"gate": CompletenessGate(done_key=("next", "done"))}),
        lambda n: {"rollout_id": zeros(ids(n)), "group_id": zeros(ids(n))},
    ),
    "turns that come twice": (
        lambda: Pipeline({"collapse": FanOutCollapse(reward="last", turn_key="turn")}),
        lambda n: {"rollout_id": ids(n) // 4, "group_id": ids(n) // 4},
    ),
}


class Numbers(TorchDispatchMode):
    """A mode that counts the numbers that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.count += sum(each.numel() for each in tree_leaves(found) if isinstance(each, torch.Tensor))
        return found


def work(make: Callable[[], Any], rows: TensorDict) -> tuple[int, int, str]:
    """For a batch: how many functions are called, how many numbers operators return, and the error."""
    stages, calls, said = make(), [0], ""

    def counts(_frame: Any, event: str, _arg: Any) -> None:
        calls[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counts)
    try:
        stages.run(rows)
    except BatchError as error:
        said = str(error)
    finally:
        sys.setprofile(before)
    with Numbers() as numbers, suppress(BatchError):
        make().run(rows)
    return calls[0], numbers.count, said


@pytest.fixture(scope="module")
def accepted() -> tuple[int, int]:
    """How many functions are called, and how many numbers operators return, for a batch that is accepted."""
    return work(grpo, batch(MANY, {}))[:2]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_costs_at_most_a_few_times_as_much_as_acceptance(name, accepted):
    make, columns = REFUSED[name]
    calls, numbers = accepted
    calls_of_refusal, numbers_of_refusal, said = work(make, batch(MANY, columns(MANY)))
    assert 0 < len(said) < 2_000
    assert calls_of_refusal <= 2 * calls
    assert numbers_of_refusal <= 3 * numbers
