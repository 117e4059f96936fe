"""What was compared with what: one line per group, one per rollout."""

from __future__ import annotations

import numpy as np

from headrace.transforms import Status

from .funnel import Columns

LOST = (Status.ABORTED, Status.FAILED)


def rollouts_of(columns: Columns) -> dict[str, np.ndarray]:
    """One entry per rollout, by first appearance of its group and itself.

    Args:
        columns: (N,) by name, with `reason` and at least `row`.

    Returns:
        (R,) `group`, `rollout`, `row` (its first), `segments`, `reward`, `advantage` (of its first
        row with one), `trained` (whether a row of it is), `lost` (failed or aborted),
        `reason` (the code of its first row, 0 if any is trained), `staleness` (versions behind the
        newest, -1 unknown).
    """
    ids = columns.get("rollout_id", np.arange(len(columns["reason"])))
    first, of = _number(ids)
    trained = _any(of, columns["reason"] == 0, len(first))
    status = columns.get("status")
    lost = np.zeros(len(first), bool) if status is None else _any(of, np.isin(status, LOST), len(first))
    return {
        "group": columns["group_id"][first] if "group_id" in columns else np.full(len(first), -1),
        "rollout": ids[first],
        "row": first,
        "segments": np.bincount(of, minlength=len(first)),
        "reward": _first_known(of, columns.get("reward"), len(first)),
        "advantage": _first_known(of, columns.get("advantage"), len(first)),
        "trained": trained,
        "lost": lost,
        "reason": np.where(trained, 0, columns["reason"][first]),
        "staleness": _greatest(of, staleness_of(columns), len(first)),
    }


def groups_of(columns: Columns, group_size: int | None) -> dict[str, np.ndarray]:
    """One entry per group, by first appearance.

    Args:
        columns: (N,) by name.
        group_size: rollouts that each group was dispatched with, where no column says so.

    Returns:
        (G,) `id`, `row` (its first), `segments` (rows), `rollouts` (counted: neither failed nor aborted),
        `expected` (-1 unknown), `complete`, `trained` (rollouts), `reward_mean`, `reward_std` (ddof 1; NaN
        for one), `reward_min`, `reward_max` over its counted rollouts with a reward, `zero_variance`,
        `staleness` (greatest, -1 unknown).
    """
    if "group_id" not in columns or len(columns["group_id"]) == 0:
        return {}
    ids = columns["group_id"]
    first, of = _number(ids)
    size = len(first)
    each = rollouts_of(columns)
    home = of[each["row"]]
    present = ~each["lost"]
    counted = np.bincount(home, present, size).astype(int)
    scored = present & np.isfinite(each["reward"])
    reward = np.where(scored, each["reward"], 0.0)
    number = np.bincount(home, scored, size)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.bincount(home, reward, size) / number
        spread = np.bincount(home, np.where(scored, (each["reward"] - mean[home]) ** 2, 0.0), size)
        std = np.where(number > 1, np.sqrt(spread / np.maximum(number - 1, 1)), np.nan)
    low, high = _extremes(home[scored], each["reward"][scored], size)
    equal = low == high
    for column in columns["rewards"].T if "rewards" in columns else ():  # equal only if each of several is
        ends = _extremes(home[scored], column[each["row"]][scored], size)
        equal &= ends[0] == ends[1]
    expected = columns["expected_rollouts"][first] if "expected_rollouts" in columns else np.full(size, -1)
    if group_size is not None:
        expected = np.where(expected < 0, group_size, expected)
    return {
        "id": ids[first],
        "row": first,
        "segments": np.bincount(of, minlength=size),
        "rollouts": counted,
        "expected": expected,
        "complete": (expected < 0) | (counted >= expected),
        "trained": np.bincount(home, each["trained"], size).astype(int),
        "reward_mean": mean,
        "reward_std": std,
        "reward_min": np.where(number > 0, low, np.nan),
        "reward_max": np.where(number > 0, high, np.nan),
        "zero_variance": (number > 1) & equal,
        "staleness": _greatest(of, staleness_of(columns), size),
    }


def staleness_of(columns: Columns) -> np.ndarray:
    """(N,) versions behind the newest policy in the batch; -1 unknown."""
    version = columns.get("policy_version")
    if version is None or len(version) == 0:
        return np.full(len(columns["reason"]), -1)
    return np.where(version < 0, -1, version.max() - version)


def _number(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each id, in order, and for each row the number of its id in that order."""
    _, first, of = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[of.reshape(-1)]


def _greatest(of: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    found = np.full(size, -1)
    np.maximum.at(found, of, values)
    return found


def _extremes(of: np.ndarray, values: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, of, values)
    np.maximum.at(high, of, values)
    return low, high


def _any(of: np.ndarray, flags: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(of, flags, size) > 0


def _first_known(of: np.ndarray, values: np.ndarray | None, size: int) -> np.ndarray:
    found = np.full(size, np.nan)
    if values is not None:
        known = np.flatnonzero(np.isfinite(values))[::-1]
        found[of[known]] = values[known]  # the first of a rollout is written last
    return found
