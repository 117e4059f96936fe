"""The numbers that trackers show, under the names that the field uses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .funnel import Columns


def numbers_of(
    columns: Columns, rollouts: Mapping[str, np.ndarray], groups: Mapping[str, np.ndarray], solved: float
) -> dict[str, float]:
    """Statistics of a step; those of nothing are left out.

    ======================================= =================================================================
    ``frac_reward_zero_std``                share of groups of two or more whose rewards are all equal (TRL)
    ``group_size/mean``, ``min``, ``max``   counted rollouts per group
    ``solve_none``, ``solve_all``           share of groups none, or all, of whose rollouts reach `solved`
    ``solve_partial``                       share of the others (prime-rl, SkyRL's pass statistics)
    ``reward/all/…``, ``reward/effective/`` ``mean``, ``std``, ``min``, ``max`` over rollouts: all that have a
                                            reward, and those that are trained
    ``advantages/all/…``, ``effective/``    the same of the advantage
    ``advantages/fraction_zero``            share of trained rollouts with an advantage of exactly 0
    ``staleness/mean``, ``staleness/max``   versions behind the newest, over rollouts
    ``fan_out/mean``, ``fan_out/max``       rows per rollout
    ``tokens/mean``, ``tokens/max``         tokens in the loss per row, as collected
    ======================================= =================================================================

    Args:
        columns: (N,) by name.
        rollouts: of :func:`rollouts_of`.
        groups: of :func:`groups_of`.
        solved: least reward of a solved rollout.
    """
    found: dict[str, float] = {}
    for name, key in (("reward", "reward"), ("advantages", "advantage")):
        known = np.isfinite(rollouts[key])
        for which, rows in (("all", known), ("effective", known & rollouts["trained"])):
            found |= _spread(f"{name}/{which}", rollouts[key][rows])
    effective = rollouts["advantage"][np.isfinite(rollouts["advantage"]) & rollouts["trained"]]
    if len(effective):
        found["advantages/fraction_zero"] = float((effective == 0).mean())
    if groups:
        found |= {f"group_size/{k}": v for k, v in _few("", groups["rollouts"]).items()}
        compared = groups["rollouts"] > 1
        if compared.any():
            found["frac_reward_zero_std"] = float(groups["zero_variance"][compared].mean())
        scored = np.isfinite(groups["reward_max"])
        if scored.any():
            none, every = groups["reward_max"][scored] < solved, groups["reward_min"][scored] >= solved
            found |= {"solve_none": float(none.mean()), "solve_all": float(every.mean())}
            found["solve_partial"] = float((~none & ~every).mean())
    stale = rollouts["staleness"][rollouts["staleness"] >= 0]
    if len(stale):
        found |= {"staleness/mean": float(stale.mean()), "staleness/max": float(stale.max())}
    if len(rollouts["segments"]):
        found["fan_out/mean"] = float(rollouts["segments"].mean())
        found["fan_out/max"] = float(rollouts["segments"].max())
    if len(columns.get("tokens", ())):
        found["tokens/mean"] = float(columns["tokens"].mean())
        found["tokens/max"] = float(columns["tokens"].max())
    return found


def _few(prefix: str, values: np.ndarray) -> dict[str, float]:
    if len(values) == 0:
        return {}
    return {
        f"{prefix}mean": float(values.mean()),
        f"{prefix}min": float(values.min()),
        f"{prefix}max": float(values.max()),
    }


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    found = _few(f"{name}/", values)
    if len(values) > 1:
        found[f"{name}/std"] = float(values.std(ddof=1))
    return found
