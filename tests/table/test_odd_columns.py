"""Columns of unusual dtypes are read correctly, or refused with their names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from headrace import decide
from headrace.pipeline import load_pipeline
from headrace.transforms import BatchError, group_relative_advantage

REWARD = ("next", "reward")


def batch(**columns) -> TensorDict:
    every = {
        "group_id": torch.tensor([0, 0, 1, 1]),
        "rollout_id": torch.arange(4),
        REWARD: torch.tensor([1.0, 0.0, 1.0, 0.0]),
        ("masks", "all_assistant_mask"): torch.ones(4, 2, dtype=torch.bool),
        ("log_probs", "full"): torch.zeros(4, 2),
    }
    if "reward" in columns:
        every[REWARD] = columns.pop("reward")
    return TensorDict(every | columns, batch_size=[4])


def advantages(rows: TensorDict) -> torch.Tensor:
    return load_pipeline("grpo", group_size=2, shuffle=False).run(rows).batch["advantage"].flatten()


def decided(**columns) -> torch.Tensor:
    every = {"group_id": [0, 0, 1, 1], "rollout_id": [0, 1, 2, 3], "tokens": [2] * 4, "reward": [1, 0, 1, 0]}
    return decide(every | columns, "grpo", group_size=2).advantage


INTEGERS = [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_of_any_dtype_are_ids_and_rewards(dtype):
    expected = advantages(batch())
    ids = {"group_id": torch.tensor([0, 0, 1, 1]).to(dtype), "rollout_id": torch.arange(4).to(dtype)}
    assert torch.equal(advantages(batch(**ids)), expected)
    assert torch.equal(advantages(batch(reward=torch.tensor([1, 0, 1, 0]).to(dtype))), expected)
    arrays = {name: column.numpy() for name, column in ids.items()}
    assert torch.equal(decided(**arrays), decided())


LARGE = np.array([2**63 + 1, 2**63 + 1, 2**63 + 2, 2**63 + 2], dtype=np.uint64)
REFUSED = {
    "ids of 64 bits": (lambda: decided(group_id=LARGE), "group_id .* 63 bits; found 9223372036854775809"),
    "ids of 64 bits in a batch": (
        lambda: advantages(batch(group_id=torch.from_numpy(LARGE))),
        "63 bits; 'group_id' has 9223372036854775809",
    ),
    "complex rewards": (lambda: decided(reward=np.array([1j, 0, 1, 0])), "reward .* found complex128"),
    "complex rewards in a list": (lambda: decided(reward=[1j, 0, 1, 0]), "reward .* found complex128"),
    "complex rewards in a batch": (
        lambda: advantages(batch(reward=torch.tensor([1j, 0, 1, 0]))),
        "real numbers; .*reward.* has torch.complex64",
    ),
    "complex rewards of a function": (
        lambda: group_relative_advantage(torch.tensor([1j, 0]), torch.tensor([0, 0])),
        "real number; found torch.complex64",
    ),
    "dates": (
        lambda: decided(reward=np.array(["2020-01-01"] * 4, dtype="datetime64[D]")),
        "reward .* found datetime64",
    ),
    "times": (
        lambda: decided(reward=np.array([1, 2, 3, 4], dtype="timedelta64[s]")),
        "reward .* found timedelta64",
    ),
    "masked ids": (
        lambda: decided(group_id=np.ma.array([0, 0, 1, 1], mask=[0, 1, 0, 0])),
        "group_id .* masked ones at rows 1",
    ),
    "masked numbers of tokens": (
        lambda: decided(tokens=np.ma.array([2, 2, 1, 1], mask=[0, 0, 1, 1])),
        "tokens .* masked ones at rows 2, 3",
    ),
    "a masked reward": (
        lambda: decided(reward=np.ma.array([1.0, 999.0, 1, 0], mask=[0, 1, 0, 0])),
        "finite; found nan at row 1",
    ),
}
for kind, values in {
    "an array": np.array([2**53 + 1, 2**53, 1, 0]),
    "a list": [2**53 + 1, 2**53, 1, 0],
}.items():
    REFUSED[f"inexact rewards in {kind}"] = (lambda values=values: decided(reward=values), r"at most 2\^53")
REFUSED["inexact rewards of a function"] = (
    lambda: group_relative_advantage(torch.tensor([2**53 + 1, 0]), torch.tensor([0, 0])),
    r"at most 2\^53.*found 9007199254740993",
)
REFUSED["inexact rewards in a batch"] = (
    lambda: advantages(batch(reward=torch.tensor([-(2**63), 2**53, 1, 0]))),
    r"at most 2\^53.*found \[-9223372036854775808\] at row 0",
)


@pytest.mark.parametrize("name", REFUSED)
def test_a_column_that_cannot_be_read_correctly_is_refused_by_name(name):
    work, words = REFUSED[name]
    with pytest.raises(BatchError, match=words):
        work()


def test_a_masked_reward_is_a_missing_reward():
    """The values of masked entries of an array are not read."""
    columns = {"group_id": [0, 0, 0, 1], "rollout_id": [0, 1, 2, 3], "tokens": [2] * 4}
    options = {"missing": "mask", "stages": {"gate": None}}
    masked = np.ma.array([1.0, 999.0, 0.0, 1.0], mask=[0, 1, 0, 0])
    missing = [1.0, float("nan"), 0.0, 1.0]
    found, expected = (decide({**columns, "reward": each}, "grpo", **options) for each in (masked, missing))
    assert torch.equal(found.advantage, expected.advantage)
    assert found.in_loss.tolist() == expected.in_loss.tolist()
    assert not found.in_loss[1]


def test_a_series_of_any_index_is_read_by_row():
    pandas = pytest.importorskip("pandas")
    index = [9, 8, 7, 6]
    numbers = pandas.Series([1.0, 0, 1, 0], index=index)
    texts = pandas.Series(["a", "a", "b", "b"], index=index)
    assert torch.equal(decided(reward=numbers, group_id=texts), decided(reward=[1.0, 0, 1, 0]))


@pytest.mark.parametrize("recipe", ["grpo", "dr_grpo", "rloo"])
def test_an_advantage_is_at_least_float32(recipe):
    """In bfloat16, the mean 0.3333 of the first group would be 0.334."""
    rewards = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 2.0])
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        found = []
        for given in (dtype, torch.float64):
            rows = TensorDict(
                {
                    "group_id": ids,
                    "rollout_id": torch.arange(6),
                    REWARD: rewards.to(given),
                    ("masks", "all_assistant_mask"): torch.ones(6, 2, dtype=torch.bool),
                    ("log_probs", "full"): torch.zeros(6, 2),
                },
                batch_size=[6],
            )
            pipeline = load_pipeline(recipe, group_size=3, shuffle=False)
            found.append(pipeline.run(rows).batch["advantage"].flatten())
        assert found[0].dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
        assert torch.equal(found[0], found[1].to(found[0].dtype))
        assert group_relative_advantage(rewards.to(dtype), ids).dtype == found[0].dtype
