"""Ids are made from several columns. Rows with equal tuples are compared with each other."""

from __future__ import annotations

import re

import pytest
import torch
from batches import batch_of
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    CombineIds,
    FanOutCollapse,
    GroupRelativeAdvantage,
    RewardsVary,
    SampleFilter,
    combine_ids,
)

# Two episodes of a prompt, each with a proposer and two solvers. Each role has a rollout of its own.
PROMPT, EPISODE = [3] * 6, [0, 0, 0, 1, 1, 1]


ROLES = ["proposer", "solver", "solver"] * 2


SCORES = [1.0, 4, 6, 3, 0, 8]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["group_id", "role"], [-1, -0.5, 1.5, 1, -4.5, 3.5]),  # proposers have the mean 2, solvers 4.5
        (["episode_id", "role"], [0, -1, 1, 0, -4, 4]),  # solvers: 5 and 4; proposers are alone
        (
            ["peer", "role"],
            [-1, -1, 1, 1, -4, 4],
        ),  # proposers of all episodes, solvers of one, as in prime-rl
    ],
)
def test_roles_are_compared_within_or_across_episodes(keys, expected):
    batch = batch_of(SCORES, PROMPT, episode_id=EPISODE, peer=[9, 0, 0, 9, 1, 1])
    batch["role"] = ROLES
    stages = {
        "collapse": FanOutCollapse(),
        "peers": CombineIds(keys=keys),
        "filter": SampleFilter(criterion=RewardsVary(group_key="peer_id"), group_key="peer_id"),
        "advantage": GroupRelativeAdvantage(scale="none", group_key="peer_id"),
    }
    assert Pipeline(stages)(batch)["advantage"].flatten().tolist() == expected


WIDTH = 2**64


def split_mix(number: int) -> int:
    """The finaliser of SplitMix64 after the golden gamma is added, in integers of any size."""
    number = (number + 0x9E3779B97F4A7C15) % WIDTH
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % WIDTH
    number = (number ^ number >> 27) * 0x94D049BB133111EB % WIDTH
    return number ^ number >> 31


def mixed(ids) -> int:
    number = 0
    for each in ids:
        number = split_mix(number + each)
    return number


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 2**62), st.integers(0, 2)), min_size=1, max_size=20)
)
def test_an_id_is_62_bits_of_split_mix_of_the_tuple_or_minus_1(tuples):
    """The numbers are fixed, so equal tuples get equal ids in every batch, process and version."""
    assert mixed([0]) == 0xE220A8397B1DCDAF  # the first number of SplitMix64 from the state 0
    columns = [torch.tensor(column) for column in zip(*tuples, strict=True)]
    expected = [-1 if min(each) < 0 else (mixed(each) >> 1) % 2**62 for each in tuples]
    assert combine_ids(*columns).tolist() == expected


def test_two_tuples_with_one_hash_are_named():
    """The second number undoes the difference of the first ones: 5 + mixed(first) is the same."""
    pairs = [(first, (5 + mixed([0]) - mixed([first])) % WIDTH) for first in range(99)]
    pairs = [pair for pair in pairs if pair[1] < 2**63][:2]
    assert mixed(pairs[0]) == mixed(pairs[1])
    batch = batch_of([1.0, 2, 3], [0, 0, 0])
    batch["a"], batch["b"] = torch.tensor([pairs[0], (1, 1), pairs[1]]).unbind(1)
    message = f"two tuples of ids have the same 62-bit hash; change an id of {pairs[1]} at row 2"
    with pytest.raises(BatchError, match=re.escape(message)):
        CombineIds(keys=["a", "b"])(batch)


def test_an_unset_id_is_refused():
    batch = batch_of([1.0, 2], [0, 0], role=[1, -1])
    with pytest.raises(BatchError, match="needs a role ≥ 0; found -1 at row 1"):
        CombineIds(keys=["group_id", "role"])(batch)
    with pytest.raises(ValueError, match=r"a list .*; got 'role'"):
        CombineIds(keys="role")
    with pytest.raises(ValueError, match=r"keys must be at least two columns; got \['role'\]"):
        CombineIds(keys=["role"])
