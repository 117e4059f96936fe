"""Estimate from a dump the chance that all rewards of a group are equal, at other group sizes.

As long as the policy does not change, the rollouts of a prompt are independent, and each has the reward v
with the chance p_v. The rewards of G rollouts are equal with the chance Σ_v p_v^G, which never rises with G.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from headrace.pipeline.tools.report import differs

CHANCE = 2.0  # standard errors; if groups of a prompt differ by more, its rewards have changed


def chance_of_equal(count: np.ndarray, group: np.ndarray, group_size: int) -> np.ndarray:
    """Estimate the probability that G rollouts of a prompt have equal rewards, from n of its rollouts.

    With n_v rollouts that have the reward v::

        G ≤ n   Σ_v C(n_v, G) / C(n, G)      unbiased: draw G of the n rollouts without replacement
        G > n   the value of G = n           an upper bound, since the probability never rises with G

    Args:
        count: (C,) n_v ≥ 1, one entry for each reward of each group.
        group: (C,) the group of each entry, from 0.
        group_size: G ≥ 1.

    Returns:
        (P,) float, in [0, 1], for P groups; exactly 1 for G = 1.

    Example:
        >>> three_solved_of_four = np.array([3, 1]), np.array([0, 0])
        >>> [chance_of_equal(*three_solved_of_four, size).tolist() for size in (1, 2, 3, 8)]
        [[1.0], [0.5], [0.25], [0.0]]
    """
    rollouts = np.bincount(group, count)[group]
    product = np.ones(len(count))
    for taken in range(min(group_size, int(rollouts.max(initial=0)))):
        drawn = taken < rollouts
        product[drawn] *= np.maximum(count[drawn] - taken, 0) / (rollouts[drawn] - taken)
    if group_size == 1:  # a rounded sum of shares may not be exactly 1
        return np.ones(len(np.bincount(group)))
    return np.minimum(np.bincount(group, product), 1.0)


def chances_of_sizes(
    values: np.ndarray, group: np.ndarray, pool: np.ndarray, sizes: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Estimate or bound the chance that a group has equal rewards, for each group and group size.

    ====================================== ==========================================================
    G ≤ rollouts of the group              exact for the group: the mean over its subsets of G rollouts
    G ≤ rollouts of its pool               unbiased if the chances are constant in the pool
    larger G                               an upper bound: the value at all rollouts of the pool
    ====================================== ==========================================================

    Args:
        values: (R, K) compared rewards of each rollout, NaN for missing ones.
        group: (R,) the group of each rollout, from 0 to P − 1.
        pool: (P,) the pool of each group, from 0. A pool has groups of one prompt.
        sizes: S group sizes.

    Returns:
        (S, P) the chances, and (S, P) bool: True for an estimate, False for a bound.

    Example:
        >>> solved = np.array([[1.0], [0.0], [1.0], [1.0]])  # two groups of two, of one prompt
        >>> group, pool = np.array([0, 0, 1, 1]), np.array([0, 0])
        >>> chances_of_sizes(solved, group, pool, [2, 3, 4])[0].mean(1).tolist()
        [0.5, 0.25, 0.0]
    """
    owner, count = different_values(values, group)
    pool_owner, pool_count = different_values(values, pool[group])
    own, pooled = np.bincount(owner, count), np.bincount(pool_owner, pool_count)[pool]
    each = [
        np.where(
            own >= size,
            chance_of_equal(count, owner, size),
            chance_of_equal(pool_count, pool_owner, size)[pool],
        )
        for size in sizes
    ]
    return np.stack(each), np.stack([np.maximum(own, pooled) >= size for size in sizes])


def choosing_half(pool: np.ndarray, reward: np.ndarray) -> np.ndarray:
    """Choose half of the rollouts of each pool at random, rounded down. The same dump gives the same choice.

    If the same rollouts select prompts and give the estimates, the estimates are biased: a prompt that is
    solved half of the time looks hard if few of its rollouts happen to be solved. An estimate from the other
    rollouts is unbiased, because they are independent of the selection, given the prompt (cross-fitting,
    arXiv 1608.00060).

    Args:
        pool: (R,) the pool of each rollout, from 0.
        reward: (R,) of each rollout.

    Returns:
        (R,) bool, True for the rollouts that select. The others are for estimates.

    Example:
        >>> pool = np.array([0, 1, 0, 1, 1])
        >>> np.bincount(pool, choosing_half(pool, np.ones(5))).tolist()
        [1.0, 1.0]
    """
    # A dump may be sorted by reward, so fixed positions would not be a random choice.
    seed = int.from_bytes(blake2b(reward.tobytes(), digest_size=8).digest(), "big")
    order = np.lexsort((np.random.default_rng(seed).random(len(pool)), pool))
    number = np.bincount(pool)
    place = np.empty(len(pool), int)
    place[order] = np.arange(len(pool)) - np.repeat(np.cumsum(number) - number, number)
    return place < number[pool] // 2


def pools_of(
    prompt: np.ndarray, step: np.ndarray, reward: np.ndarray, group: np.ndarray
) -> tuple[np.ndarray, int]:
    """Pool the groups that have one prompt and are within one window of steps.

    The window has all steps if the rewards of a prompt differ between its groups only by chance. Otherwise it
    is halved until this is so, or until it has one step.

    Args:
        prompt: (P,) integers, equal for equal prompts; -1: unknown, never pooled.
        step: (P,) step of each group.
        reward: (R,) of each rollout.
        group: (R,) the group of each rollout, from 0 to P − 1.

    Returns:
        (P,) the pool of each group, from 0, and the number of steps of a window.

    Example:
        >>> pools_of(np.array([7, 8, 7]), np.array([0, 0, 1]), np.ones(3), np.arange(3))[0].tolist()
        [0, 1, 0]
    """
    steps, place = np.unique(step, return_inverse=True)
    alone = np.arange(len(prompt))  # for unknown prompts, a pool each
    width = len(steps)
    while True:
        window = np.where(prompt == -1, alone, place // width)
        _, pool = np.unique(np.stack([window, prompt], 1), axis=0, return_inverse=True)
        pool = pool.ravel()  # numpy 2.0 has it as (P, 1)
        if width == 1 or excess_between(reward, group, pool) <= CHANCE:
            return pool, width
        width = (width + 1) // 2


def excess_between(reward: np.ndarray, group: np.ndarray, pool: np.ndarray) -> float:
    """Return by how many standard errors the mean rewards of a pool's groups differ, beyond chance.

    With the sums of squares B between the k groups of a pool and S over its N rollouts, the mean of
    E = B − (k − 1) S / (N − 1) is 0 if all rollouts of the pool have the same distribution. The result is
    Σ E / √(Σ E²) over all pools.

    Args:
        reward: (R,) of each rollout.
        group: (R,) the group of each rollout, from 0 to P − 1.
        pool: (P,) the pool of each group, from 0.

    Example:
        >>> changed = np.array([0.0, 0, 1, 1] * 9)  # nine prompts, with a group of each reward
        >>> round(excess_between(changed, np.arange(36) // 2, np.arange(18) // 2), 6)
        3.0
    """
    number, of = np.bincount(group), pool[group]
    rollouts, groups = np.bincount(of), np.bincount(pool)
    mean = np.bincount(of, reward) / rollouts
    between = np.bincount(pool, number * (np.bincount(group, reward) / number - mean[pool]) ** 2)
    whole = np.bincount(of, (reward - mean[of]) ** 2)
    excess = between - (groups - 1) * whole / np.maximum(rollouts - 1, 1)
    excess = np.where(groups > 1, excess, 0.0)
    size = float(np.sqrt((excess**2).sum()))
    return float(excess.sum()) / size if size else 0.0


def different_values(values: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count the distinct rows of values in each group.

    A column that is constant within a group does not distinguish its rollouts, even if some values are
    missing.

    Args:
        values: (R, K), NaN for missing values.
        group: (R,) group of each row, from 0.

    Returns:
        (C,) the group of each distinct row, and (C,) its number of rollouts.

    Example:
        >>> different_values(np.array([[1.0], [0.0], [1.0]]), np.array([0, 0, 0]))
        (array([0, 0]), array([1, 2]))
    """
    parts, numbers = [group.astype(float)[:, None]], torch.from_numpy(group)
    for column, there in zip(values.T, np.isfinite(values).T, strict=True):
        apart = differs(numbers, torch.from_numpy(column), torch.from_numpy(there)).numpy()[group]
        parts.append(np.stack([np.where(there & apart, column, 0.0), there & apart], 1))
    rows, count = np.unique(np.concatenate(parts, 1), axis=0, return_counts=True)
    return rows[:, 0].astype(int), count
