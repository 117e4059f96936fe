"""Compute the grpo recipe in plain NumPy: the same decisions and the same gathers, without any other work.

Benchmarks compare the cost of the pipeline with this code, and `tests/house/test_yardstick.py` compares both
results. The N rows are the segments of U rollouts in P groups. V rollouts are in complete groups. The suffix
of a name is the index of the array. This code has no options, cannot be resumed, and its errors name no ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict

MASK, LOG_PROB = ("masks", "all_assistant_mask"), ("log_probs", "full")
NUMBERS = ("group_id", "rollout_id", "expected_rollouts", ("next", "reward"))
IN_LOSS = ("headrace", "in_loss")


class Rows(NamedTuple):
    """The table: a few numbers for each row, (N,) each."""

    group: np.ndarray
    rollout: np.ndarray
    expected: np.ndarray  # rollouts of the row's group
    reward: np.ndarray
    masked_in: np.ndarray  # tokens in the mask
    tokens: np.ndarray  # tokens in the mask with a finite log-probability


class Steps(NamedTuple):
    """The decisions."""

    order: np.ndarray  # (M,) row numbers in training order
    sizes: list[int]  # rows of each minibatch
    columns: dict[NestedKey, np.ndarray]  # (N, ...) each


def grpo(
    batch: TensorDict, minibatches: int, *, incomplete: Literal["raise", "drop"] = "raise", drawn: int = 0
) -> Iterator[TensorDict]:
    """Yield the minibatches of ``pipeline=grpo`` for rows without statuses and ends.

    Args:
        batch: TensorDict ``[N]``, dense.
        minibatches: number of minibatches, K.
        incomplete: what to do with incomplete groups: ``raise`` an error, or ``drop`` them.
        drawn: number of permutations that the pipeline has drawn before, one for each batch.
    """
    return gather(batch, decide(read(batch), minibatches, incomplete, drawn))


def read(batch: TensorDict) -> Rows:
    """Read a few numbers for each row."""
    mask, log_prob = batch[MASK].numpy(), batch[LOG_PROB].numpy()
    numbers = (batch[name].view(-1).numpy() for name in NUMBERS)
    return Rows(*numbers, np.count_nonzero(mask, 1), np.count_nonzero(mask & np.isfinite(log_prob), 1))


def decide(rows: Rows, minibatches: int, incomplete: str = "raise", drawn: int = 0) -> Steps:
    """Decide which rows train, and their order, step, advantage and weight."""
    count, reward_dtype = len(rows.group), rows.reward.dtype
    rollout_N, first_U = number(rows.rollout)
    group_U, first_P = number(rows.group[first_U])
    reward_U, expected_U = rows.reward[first_U].astype(np.float64), rows.expected[first_U]
    require(rows.group.min() >= 0 and rows.rollout.min() >= 0, "no id is negative")
    require((rows.group[first_U][rollout_N] == rows.group).all(), "a rollout is in one group")
    require(np.isfinite(rows.reward).all(), "rewards are finite")
    require((rows.reward[first_U][rollout_N] == rows.reward).all(), "the rows of a rollout share its reward")

    # gate: groups have all their rollouts
    size_P = np.bincount(group_U)
    require((size_P[group_U] <= expected_U).all(), "no group has more rollouts than were dispatched")
    whole_U = size_P[group_U] == expected_U
    whole_N = whole_U[rollout_N]
    require(incomplete == "drop" or whole_U.all(), "all groups are complete")

    # gate: a rollout without a token in the loss is in no statistic
    votes_U = np.bincount(rollout_N, rows.tokens) > 0
    votes_P = np.bincount(group_U, votes_U)
    votes_N = votes_U[rollout_N]
    if not votes_U.all():  # a group's reference reward is that of its first voting rollout
        voters = np.flatnonzero(votes_U)[::-1]
        first_P[group_U[voters]] = voters

    # filter: groups of equal rewards are out of the loss
    differs_U = votes_U & (reward_U != reward_U[first_P][group_U])
    differ_P = np.bincount(group_U, differs_U) > 0
    in_loss_N = (differ_P[group_U] & votes_U)[rollout_N]
    filtered_N = ((votes_P > 0) & ~differ_P)[group_U][rollout_N]

    # advantage: A = (R - mean) / (std + 1e-6), and exactly 0 if rewards are equal
    mean_P = np.bincount(group_U, reward_U * votes_U) / np.maximum(votes_P, 1)
    centred_U = (reward_U - mean_P[group_U]) * votes_U
    std_P = np.sqrt(np.bincount(group_U, centred_U**2) / np.maximum(votes_P - 1, 1))
    advantage_U = np.where(differ_P[group_U], centred_U / (std_P + 1e-6)[group_U], 0.0)

    # split: rollouts in the order of the random keys of their first rows, cut evenly
    digest = hashlib.blake2b(f"split/0/{drawn}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    key = torch.randperm(int(whole_N.sum()), generator=generator).numpy()
    by_key, present_U = np.full(len(key), -1), np.flatnonzero(whole_U)
    by_key[key[(np.cumsum(whole_N) - 1)[first_U[present_U]]]] = present_U
    order_V = by_key[by_key >= 0]  # rollouts in training order
    require(len(order_V) % minibatches == 0, "rollouts are a multiple of minibatches")
    place_U = np.full(len(first_U), len(order_V))
    place_U[order_V] = np.arange(len(order_V))
    step_U = place_U // max(len(order_V) // minibatches, 1)  # K for dropped rollouts
    step_N = step_U[rollout_N]
    fanned_out = len(first_U) < count
    order = np.argsort(place_U[rollout_N], kind="stable")[: len(key)] if fanned_out else first_U[order_V]
    sizes = np.bincount(step_N, minlength=minibatches)[:minibatches].tolist() if len(key) else []

    # weight: 1 / tokens of the step
    tokens_N = rows.tokens * in_loss_N
    trains_N = tokens_N > 0
    trains_U = np.bincount(rollout_N, trains_N) > 0
    total_K = np.bincount(step_N, tokens_N)
    weight_N = np.divide(1.0, total_K[step_N], out=np.zeros(count), where=trains_N)
    groups = np.zeros((len(total_K), len(size_P)), bool)
    groups[step_U[trains_U], group_U[trains_U]] = True

    first_N = np.zeros(count, bool)
    first_N[first_U] = True
    columns = {
        "advantage": advantage_U.astype(reward_dtype)[rollout_N].reshape(-1, 1, 1),
        "loss_weight": weight_N.astype(reward_dtype),
        "num_tokens": total_K.astype(np.int64)[step_N],
        "num_samples": np.bincount(step_N, trains_N).astype(np.int64)[step_N],
        "num_rollouts": np.bincount(step_U, trains_U).astype(np.int64)[step_N],
        "num_groups": groups.sum(1)[step_N],
        ("headrace", "reward"): rows.reward * votes_N,
        ("headrace", "is_first_segment"): first_N & votes_N,
        IN_LOSS: in_loss_N,
        ("headrace", "counted"): votes_N,
        ("headrace", "length"): np.where(filtered_N, rows.masked_in, -1),
        ("headrace", "minibatch"): step_N,
        ("headrace", "microbatch"): np.zeros(count, np.int64),
        ("headrace", "step_weight"): (total_K > 0).astype(np.float64)[step_N],
        ("headrace", "row"): np.arange(count),
        ("headrace", "processed"): np.ones(count, bool),
    }
    return Steps(order, sizes, columns)


def gather(batch: TensorDict, steps: Steps) -> Iterator[TensorDict]:
    """Gather one minibatch after the other, and mask the rows that are out of the loss."""
    columns = dict(batch.items(True, True))
    columns |= {name: torch.from_numpy(column) for name, column in steps.columns.items()}
    for rows in torch.from_numpy(steps.order).split(steps.sizes) if steps.sizes else ():
        taken = {name: column.index_select(0, rows) for name, column in columns.items()}
        masked = (~taken[IN_LOSS]).nonzero().squeeze(-1)
        taken[MASK].index_fill_(0, masked, False)
        taken[LOG_PROB].index_fill_(0, masked, float("nan"))
        yield TensorDict(taken, batch_size=[len(rows)])


def number(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the n ids from 0 to n - 1. Return the number of each row, and the first row of each id."""
    if (ids[1:] >= ids[:-1]).all():  # ascending ids need no sort
        begins = np.concatenate([[True], ids[1:] != ids[:-1]])
        return np.cumsum(begins) - 1, np.flatnonzero(begins)
    _, first, numbers = np.unique(ids, return_index=True, return_inverse=True)
    return numbers, first


def require(holds: bool | np.bool_, rule: str) -> None:
    """Refuse a batch that breaks a rule."""
    if not holds:
        raise ValueError(f"the yardstick needs a batch where {rule}")
