"""Ids are made from several columns. Rows with equal tuples are compared with each other."""

from __future__ import annotations

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


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**62), st.integers(0, 2)), min_size=1, max_size=20)
)
def test_equal_tuples_have_equal_ids_in_any_batch(tuples):
    columns = [torch.tensor(column) for column in zip(*tuples, strict=True)]
    ids = combine_ids(*columns)
    assert bool((ids >= 0).all())
    assert len(set(ids.tolist())) == len(set(tuples))
    assert torch.equal(combine_ids(*(column[:1] for column in columns)), ids[:1])


def test_an_unset_id_is_refused():
    batch = batch_of([1.0, 2], [0, 0], role=[1, -1])
    with pytest.raises(BatchError, match="needs a role ≥ 0; found -1 at row 1"):
        CombineIds(keys=["group_id", "role"])(batch)
    with pytest.raises(ValueError, match=r"a list .*; got 'role'"):
        CombineIds(keys="role")
