"""The rollouts of a batch, and the groups in which they are compared."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.transforms import Status

from .funnel import Columns

LOST = (Status.ABORTED, Status.FAILED)


def rollouts_of(columns: Columns) -> dict[str, np.ndarray]:
    """One entry per rollout, in the order of their first rows.

    Args:
        columns: (N,) by name, with `reason` and at least `row`.

    Returns:
        (R,) `group`, `rollout`, `row` (its first), `segments`, `reward` (of its first row with one; NaN
        where it left before its rows had one reward together), `advantage` (likewise), `trained` (whether a
        row of it is), `lost` (failed or aborted), `truncated` (whether a row of it is), `tokens` (in the
        loss, of all its rows, as collected; 0 unknown), `reason` (the code of its first row, 0 if any is
        trained), `staleness` (versions behind the newest, -1 unknown).

    Example:
        >>> columns = {"reason": np.array([0, 0, 1]), "rollout_id": np.array([7, 7, 4])}
        >>> rollouts = rollouts_of(columns)
        >>> rollouts["rollout"].tolist(), rollouts["segments"].tolist(), rollouts["trained"].tolist()
        ([7, 4], [2, 1], [True, False])
    """
    ids = columns.get("rollout_id", np.arange(len(columns["reason"])))
    first, rollout = _first_rows(ids)
    trained = _any(rollout, columns["reason"] == 0, len(first))
    counted = columns.get("counted", np.ones(len(ids))) != 0
    stays = 2 * (columns["reason"] == 0) + counted  # a rollout is what is trained of it, else what counts
    status = columns.get("status")
    status = np.full(len(ids), -1) if status is None else status
    tokens = np.maximum(columns.get("tokens", np.zeros(len(ids), int)), 0)
    reward = _first_known(rollout, columns.get("reward"), stays, len(first))
    apart = _apart(rollout, columns.get("reward"), counted, len(first))
    return {
        "group": columns["group_id"][first] if "group_id" in columns else np.full(len(first), -1),
        "rollout": ids[first],
        "row": first,
        "segments": np.bincount(rollout, minlength=len(first)),
        "reward": np.where(apart & ~trained, np.nan, reward),  # that of a draft is not the rollout's
        "advantage": _first_known(rollout, columns.get("advantage"), stays, len(first)),
        "counted": _any(rollout, counted, len(first)),
        "trained": trained,
        "lost": _any(rollout, np.isin(status, LOST), len(first)),
        "truncated": _any(rollout, status == Status.TRUNCATED, len(first)),
        "tokens": np.bincount(rollout, tokens, len(first)).astype(int),
        "reason": np.where(trained, 0, columns["reason"][first]),
        "staleness": _greatest(rollout, staleness_of(columns), len(first)),
    }


def groups_of(columns: Columns, group_size: int | None, *, each_reward: bool = True) -> dict[str, np.ndarray]:
    """One entry per group, in the order of their first rows; empty where there are no groups.

    Args:
        columns: (N,) by name.
        group_size: rollouts that each group was dispatched with, for rows without `expected_rollouts`.
        each_reward: whether of several rewards each is compared, and not the one that they add up to.

    Returns:
        (G,) `id`, `row` (its first), `segments` (rows), `rollouts` (counted: neither failed nor aborted),
        `expected` (-1 unknown), `complete`, `trained` (rollouts), `reward_mean`, `reward_std` (ddof 1; NaN
        for one), `reward_min`, `reward_max` over its counted rollouts with a reward, `zero_variance` (whether
        they are two or more and what is compared of them is equal), `staleness` (greatest, -1 unknown).
    """
    if "group_id" not in columns or len(columns["group_id"]) == 0:
        return {}
    ids = columns["group_id"]
    first, group = _first_rows(ids)
    size = len(first)
    each = rollouts_of(columns)
    group_of = group[each["row"]]  # (R,) the group of each rollout
    present = ~each["lost"]
    counted = np.bincount(group_of, present, size).astype(int)
    scored = has_reward(each)
    reward = np.where(scored, each["reward"], 0.0)
    number = np.bincount(group_of, scored, size)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.bincount(group_of, reward, size) / number
        squares = np.bincount(group_of, np.where(scored, (each["reward"] - mean[group_of]) ** 2, 0.0), size)
        std = np.where(number > 1, np.sqrt(squares / np.maximum(number - 1, 1)), np.nan)
    low, high = _extremes(group_of[scored], each["reward"][scored], size)
    equal = _each_equal(compared_values(columns, each, each_reward=each_reward), scored, group_of, size)
    expected = columns["expected_rollouts"][first] if "expected_rollouts" in columns else np.full(size, -1)
    if group_size is not None:
        expected = np.where(expected < 0, group_size, expected)
    return {
        "id": ids[first],
        "row": first,
        "segments": np.bincount(group, minlength=size),
        "rollouts": counted,
        "expected": expected,
        "complete": (expected < 0) | (counted >= expected),
        "trained": np.bincount(group_of, each["trained"], size).astype(int),
        "reward_mean": mean,
        "reward_std": std,
        "reward_min": np.where(number > 0, low, np.nan),
        "reward_max": np.where(number > 0, high, np.nan),
        "zero_variance": (number > 1) & equal,
        "staleness": _greatest(group, staleness_of(columns), size),
    }


def compared_ids(columns: Columns) -> np.ndarray:
    """(N,) ids of those among whom a row's reward is compared: its group, or its `peers` where there are.

    Args:
        columns: (N,) `group_id`; `peers` where the advantage compares others, −1 for rows that left before.

    Example:
        >>> compared_ids({"group_id": np.array([3, 3, 3, 4]), "peers": np.array([8, 9, 8, -1])}).tolist()
        [0, 1, 0, 2]
    """
    group, peers = columns["group_id"], columns.get("peers")
    if peers is None:
        return group
    known = peers >= 0
    pairs = np.stack([~known, np.where(known, peers, group)], 1)
    return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)


def has_reward(rollouts: Columns) -> np.ndarray:
    """(R,) bool: rollouts in the statistics that have a reward and neither failed nor were aborted."""
    return ~rollouts["lost"] & rollouts["counted"] & np.isfinite(rollouts["reward"])


def compared_values(columns: Columns, rollouts: Columns, *, each_reward: bool = True) -> np.ndarray:
    """(R, K) what is compared of each rollout: its reward, or each of several; NaN: none."""
    if each_reward and "rewards" in columns:
        return columns["rewards"][rollouts["row"]]
    return rollouts["reward"][:, None]


def widest_first(groups: Mapping[str, np.ndarray]) -> np.ndarray:
    """(G,) indices of groups, those first of which most is to be learnt: by the spread of their rewards.

    Args:
        groups: of :func:`groups_of`. Groups of equal rewards come late, those of one reward last; of two that
            spread alike the smaller id comes first.

    Example:
        >>> groups = {"id": np.array([7, 8, 9]), "reward_std": np.array([0.0, np.nan, 0.5])}
        >>> widest_first(groups).tolist()
        [2, 0, 1]
    """
    spread = np.nan_to_num(groups["reward_std"], nan=-1.0)
    return np.lexsort((groups["id"], -spread))


def staleness_of(columns: Columns) -> np.ndarray:
    """(N,) versions behind the newest policy in the batch; -1 unknown.

    Args:
        columns: (N,) by name, with `reason`.
    """
    version = columns.get("policy_version")
    if version is None or len(version) == 0:
        return np.full(len(columns["reason"]), -1)
    return np.where(version < 0, -1, version.max() - version)


def _first_rows(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each id, ascending; and for each row, the index of its id in that order."""
    _, first, index = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[index.reshape(-1)]


def _greatest(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    greatest = np.full(size, -1)
    np.maximum.at(greatest, index, values)
    return greatest


def _extremes(index: np.ndarray, values: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, index, values)
    np.maximum.at(high, index, values)
    return low, high


def _each_equal(rewards: np.ndarray, scored: np.ndarray, group: np.ndarray, size: int) -> np.ndarray:
    """(G,) whether each of the rewards (R, K) is equal over the rollouts that have it."""
    equal = np.ones(size, bool)
    for column in rewards.T:
        known = scored & np.isfinite(column)
        low, high = _extremes(group[known], column[known], size)
        equal &= low >= high  # inf and -inf where nobody has it
    return equal


def _apart(index: np.ndarray, values: np.ndarray | None, rows: np.ndarray, size: int) -> np.ndarray:
    """(size,) whether some of `rows` have different values."""
    if values is None:
        return np.zeros(size, bool)
    known = rows & np.isfinite(values)
    low, high = _extremes(index[known], values[known], size)
    return low < high


def _any(index: np.ndarray, flags: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(index, flags, size) > 0


def _first_known(index: np.ndarray, values: np.ndarray | None, stays: np.ndarray, size: int) -> np.ndarray:
    """(size,) the first value of each that is known, of the rows that stay longest."""
    first = np.full(size, np.nan)
    if values is not None:
        known = np.flatnonzero(np.isfinite(values))[::-1]
        known = known[np.argsort(stays[known], kind="stable")]
        first[index[known]] = values[known]  # what is to be seen is written last
    return first
