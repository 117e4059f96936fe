"""Make tables of the rollouts of a batch, and of the groups in which they are compared."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headrace.transforms import Status
from headrace.transforms.table import Ids, first_row

from .funnel import Columns


def rollouts_of(columns: Columns) -> dict[str, np.ndarray]:
    """Make columns with one entry per rollout, in the order of their first rows.

    Args:
        columns: (N,) columns by name, at least `reason` and `row`.

    Returns:
        (R,) `group`, `rollout`, `row` (the first one), `segments` (number of rows), `reward` (of the first
        row that has one; NaN if the rollout left before its rows got one common reward), `advantage` (of the
        first row that has one), `baseline` (likewise), `empty` (arrived without a token in the loss, and is
        in no statistic for this reason), `compared` (rollouts that the advantage compared with it, itself
        included; −1 if unknown), `trained` (whether one of its rows is trained), `failed` (failed or
        aborted), `truncated` (whether one of its rows is truncated), `tokens` (in the loss, over all its
        rows, as collected; 0 if unknown), `reason` (the code of its first row; 0 if one of its rows is
        trained), `staleness` (:func:`staleness_of`).

    Example:
        >>> columns = {"reason": np.array([0, 0, 1]), "rollout_id": np.array([7, 7, 4])}
        >>> rollouts = rollouts_of(columns)
        >>> rollouts["rollout"].tolist(), rollouts["segments"].tolist(), rollouts["trained"].tolist()
        ([7, 4], [2, 1], [True, False])
    """
    of = {name: torch.from_numpy(column) for name, column in columns.items()}
    rows = torch.arange(len(of["reason"]))
    ids = Ids(first_row(of.get("rollout_id", rows)))  # numbered in the order of their first rows
    trains = of["reason"] == 0
    trained, status = ids.any(trains), of.get("status", torch.full_like(rows, -1))

    def known(name: str) -> Tensor:
        """(R,) the value of a rollout: of its first row with a value, if possible of a row that trains."""
        values = of.get(name, torch.full((len(rows),), torch.nan, dtype=torch.float64))
        last = len(rows) - 1
        best = ids.max(torch.where(values.isfinite(), trains * len(rows) + last - rows, -1))
        return torch.where(best < 0, torch.nan, values[last - best % max(len(rows), 1)])

    reward = known("reward")
    if "reward" in of:  # if the rows of a rollout differ, none of their rewards is the rollout's
        reward = torch.where(differs(ids.labels, of["reward"], rows >= 0) & ~trained, torch.nan, reward)
    found = {
        "group": of["group_id"][ids.first] if "group_id" in of else torch.full_like(ids.first, -1),
        "rollout": of.get("rollout_id", rows)[ids.first],
        "row": ids.first,
        "segments": ids.count,
        "reward": reward,
        "advantage": known("advantage"),
        "baseline": known("baseline"),
        "empty": ids.any(of.get("empty", torch.zeros_like(rows)) != 0),
        "compared": ids.max(of.get("compared", torch.full_like(rows, -1))),
        "trained": trained,
        "failed": ids.any((status == Status.ABORTED) | (status == Status.FAILED)),
        "truncated": ids.any(status == Status.TRUNCATED),
        "tokens": ids.sum(of.get("tokens", torch.zeros_like(rows)).clamp_min(0)),
        "reason": of["reason"][ids.first].masked_fill(trained, 0),
        "staleness": ids.max(torch.from_numpy(staleness_of(columns))),
    }
    return {name: column.numpy() for name, column in found.items()}


def groups_of(columns: Columns, group_size: int | None, *, each_reward: bool = True) -> dict[str, np.ndarray]:
    """Make columns with one entry per group, in the order of their first rows; empty without groups.

    Args:
        columns: (N,) by name.
        group_size: number of rollouts that were dispatched for each group, for rows without
            `expected_rollouts`.
        each_reward: if there are several rewards, True compares each of them, False compares their weighted
            sum.

    Returns:
        (G,) `id`, `row` (the first one), `segments` (number of rows), `rollouts` (neither failed nor
        aborted), `expected` (rollouts; -1 if unknown), `complete`, `trained` (rollouts), `compared` (rollouts
        that the advantage compared; −1 if unknown), `baseline` (of these rollouts; NaN if unknown, or if
        their baselines differ), `staleness` (the greatest). Over the rollouts of :func:`has_reward`, even if
        a filter removed them: `reward_mean`, `reward_std` (ddof 1; NaN for one rollout), `reward_min`,
        `reward_max`, `zero_variance` (whether there are at least two and their compared rewards are equal).
    """
    if "group_id" not in columns or len(columns["group_id"]) == 0:
        return {}
    each = rollouts_of(columns)
    ids = Ids(first_row(torch.from_numpy(columns["group_id"])))  # numbered in the order of their first rows

    def at_heads(values: np.ndarray) -> Tensor:
        """(N,) the values of R rollouts, each at the first row of its rollout; 0 elsewhere."""
        rows = np.zeros(len(ids.labels), values.dtype)
        rows[each["row"]] = values
        return torch.from_numpy(rows)

    reward, with_reward = at_heads(each["reward"]), at_heads(has_reward(each))
    scored = Ids(ids.labels, with_reward)
    counted, number = ids.sum(at_heads(~each["failed"])), scored.count
    mean = scored.sum(reward) / number
    squares = scored.sum((reward - ids.spread(mean)) ** 2)
    expected = torch.full_like(ids.first, -1)
    if "expected_rollouts" in columns:
        expected = torch.from_numpy(columns["expected_rollouts"])[ids.first]
    if group_size is not None:
        expected = expected.masked_fill(expected < 0, group_size)
    compared, baseline = at_heads(each["compared"]), at_heads(each["baseline"])
    among = Ids(ids.labels, (compared > 0) & baseline.isfinite())
    low, high = among.min(baseline), among.max(baseline)
    one = (among.count > 0) & (high - low <= 1e-9 * high.abs().clamp_min(1))
    rewards = compared_values(columns, each, each_reward=each_reward)
    equal = ~torch.stack([differs(ids.labels, at_heads(one), with_reward) for one in rewards.T]).any(0)
    found = {
        "id": torch.from_numpy(columns["group_id"])[ids.first],
        "row": ids.first,
        "segments": ids.count,
        "rollouts": counted,
        "expected": expected,
        "complete": (expected < 0) | (counted >= expected),
        "trained": ids.sum(at_heads(each["trained"])),
        "compared": ids.sum((compared > 0).long()) if "compared" in columns else torch.full_like(counted, -1),
        "baseline": torch.where(one, low, torch.nan),
        "reward_mean": mean,
        "reward_std": (squares / (number - 1).clamp_min(0)).sqrt(),  # 0 / 0 is NaN
        "reward_min": torch.where(number > 0, scored.min(reward), torch.nan),
        "reward_max": torch.where(number > 0, scored.max(reward), torch.nan),
        "zero_variance": (number > 1) & equal,
        "staleness": ids.max(torch.from_numpy(staleness_of(columns))),
    }
    return {name: column.numpy() for name, column in found.items()}


def differs(labels: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    """(n,) bool: for each id in (N,) `labels`, whether its `values` in `rows` differ. NaN is ignored."""
    known = Ids(labels, rows & values.isfinite())
    return known.min(values) < known.max(values)


def compared_ids(columns: Columns) -> np.ndarray:
    """(N,) an id for each row: its `peers` if set, else its group. Rewards with equal ids are compared.

    Args:
        columns: (N,) `group_id`, and `peers` if the advantage does not compare within groups. Peers are −1
            for rows that left before the advantage.

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
    """(R,) bool: rollouts that have a reward, did not arrive empty, and neither failed nor were aborted."""
    return ~rollouts["failed"] & ~rollouts["empty"] & np.isfinite(rollouts["reward"])


def compared_values(columns: Columns, rollouts: Columns, *, each_reward: bool = True) -> np.ndarray:
    """(R, K) the compared rewards of each rollout: one, or each of several. NaN if it has none."""
    if each_reward and "rewards" in columns:
        return columns["rewards"][rollouts["row"]]
    return rollouts["reward"][:, None]


def reading_order(groups: Mapping[str, np.ndarray]) -> np.ndarray:
    """(G,) indices of groups in the order in which to read them.

    Groups whose rewards differ alternate with groups whose rewards are equal. The first k groups contain at
    least ⌊k / 2⌋ of each kind, or all groups of a kind that has fewer. Groups with different rewards are
    sorted by std, the greatest first. Groups with equal rewards are sorted by mean, the lowest first. Among
    ties the smaller id comes first.

    Args:
        groups: the result of :func:`groups_of`.

    Example:
        >>> groups = {"id": np.array([7, 8, 9, 5]), "reward_mean": np.array([1.0, 0.0, 0.5, 0.5])}
        >>> groups["reward_std"] = np.array([0.0, np.nan, 0.5, 0.1])
        >>> reading_order(groups | {"zero_variance": groups["reward_std"] == 0}).tolist()
        [2, 1, 3, 0]
    """
    spread, mean = np.nan_to_num(groups["reward_std"]), np.nan_to_num(groups["reward_mean"], nan=np.inf)
    differ = np.isfinite(groups["reward_std"]) & ~groups["zero_variance"]
    order = np.lexsort((groups["id"], np.where(differ, -spread, mean)))
    turn = np.empty(len(order), dtype=np.int64)
    for kind in (differ[order], ~differ[order]):
        turn[kind] = np.arange(kind.sum())
    return order[np.lexsort((~differ[order], turn))]


def staleness_of(columns: Columns) -> np.ndarray:
    """(N,) versions behind the trainer or, if its version is unknown, behind the newest row; -1 if unknown.

    If versions are per token, the oldest sampled token of a row counts.
    """
    version = columns.get("policy_version")
    if version is None or len(version) == 0:
        return np.full(len(columns["reason"]), -1)
    return np.where(version < 0, -1, newest_version(columns) - version)


def newest_version(columns: Columns) -> np.ndarray:
    """(N,) the trainer's version when it took each row; if unknown, () the newest version of the rows."""
    trainer = columns.get("trainer_version", np.full(1, -1))
    return columns.get("newest_version", columns["policy_version"]).max() if trainer.min() < 0 else trainer
