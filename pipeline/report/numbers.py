"""The numbers that trackers show, under the names that the field uses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from .funnel import Columns
from .gradient import gradient_share

AGREE = 1e-4  # advantages no further apart are the same: they are logged in float32, or rounded


def numbers_of(
    columns: Columns,
    rollouts: Mapping[str, np.ndarray],
    groups: Mapping[str, np.ndarray],
    solved: float,
    *,
    compared: Mapping[str, np.ndarray] | None = None,
) -> dict[str, float]:
    """Statistics of a step; a statistic over no values is left out.

    ======================================= =================================================================
    ``frac_reward_zero_std``                share of groups of two or more whose rewards are all equal (TRL)
    ``groups/informative``                  share of groups of two or more whose rewards differ
    ``groups/incomplete``                   share of groups with fewer counted rollouts than were dispatched,
                                            of those of which that is known
    ``groups/largest_gradient_share``       greatest share of a group of the step's gradient
                                            (:func:`gradient_share`)
    ``group_size/mean``, ``min``, ``max``   counted rollouts per group
    ``solve_none``, ``solve_all``           share of groups none, or all, of whose rollouts reach `solved`
    ``solve_partial``                       share of the others (prime-rl, SkyRL's pass statistics)
    ``reward/all/…``, ``reward/effective/`` ``mean``, ``std``, ``min``, ``max`` over rollouts: all that have a
                                            reward, and those that are trained
    ``advantages/all/…``, ``effective/``    the same of the advantage
    ``advantages/fraction_zero``            share of trained rollouts with an advantage of exactly 0
    ``staleness/mean``, ``staleness/max``   versions behind the newest, over rollouts
    ``fan_out/mean``, ``fan_out/max``       rows per rollout
    ``rollouts/truncated``, ``lost``        share of rollouts that were cut off; that failed or were aborted
    ``response_length/mean``, ``max``       tokens in the loss per rollout, of all its rows, as collected
    ``tokens/mean``, ``tokens/max``         tokens in the loss per row, as collected
    ``logged_advantage/…``                  how far a dump's advantages are from ours (:func:`logged_numbers`)
    ======================================= =================================================================

    Args:
        columns: (N,) by name.
        rollouts: (R,) by name, of :func:`rollouts_of`.
        groups: (G,) by name, of :func:`groups_of`.
        solved: least reward of a solved rollout.
        compared: the same of those within which rewards are compared; None: of groups.

    Example:
        >>> from .groups import groups_of, rollouts_of
        >>> columns = {"reward": np.array([1.0, 0.0]), "group_id": np.array([3, 3])}
        >>> columns["reason"] = np.array([0, 0])  # trained
        >>> numbers = numbers_of(columns, rollouts_of(columns), groups_of(columns, None), solved=1.0)
        >>> numbers["reward/all/mean"], numbers["solve_partial"]
        (0.5, 1.0)
    """
    numbers: dict[str, float] = {}
    for name, key in (("reward", "reward"), ("advantages", "advantage")):
        known = np.isfinite(rollouts[key])
        for which, rows in (("all", known), ("effective", known & rollouts["trained"])):
            numbers |= _statistics(f"{name}/{which}", rollouts[key][rows], ("mean", "min", "max", "std"))
    effective = rollouts["advantage"][np.isfinite(rollouts["advantage"]) & rollouts["trained"]]
    if len(effective):
        numbers["advantages/fraction_zero"] = float((effective == 0).mean())
    if groups:
        numbers |= _compared_numbers(groups if compared is None else compared)
        numbers |= _group_numbers(groups, solved) | _largest_share(columns)
    if "status" in columns and len(rollouts["lost"]):
        numbers |= {f"rollouts/{name}": float(rollouts[name].mean()) for name in ("truncated", "lost")}
    if "tokens" in columns:
        numbers |= _statistics("response_length", rollouts["tokens"], ("mean", "max"))
    stale = rollouts["staleness"][rollouts["staleness"] >= 0]
    numbers |= _statistics("staleness", stale, ("mean", "max"))
    numbers |= _statistics("fan_out", rollouts["segments"], ("mean", "max"))
    numbers |= _statistics("tokens", columns.get("tokens", np.empty(0)), ("mean", "max"))
    return numbers | logged_numbers(columns)


def logged_numbers(columns: Columns) -> dict[str, float]:
    """How far logged advantages are from ours; nothing where no row has both.

    Args:
        columns: (N,) by name, ``logged_advantage`` and ``advantage``.

    Returns:
        ``logged_advantage/rows`` that have both, ``max_difference``, ``mean_difference`` (absolute), and
        ``agree``, the share within 1e-4.

    Example:
        >>> columns = {"logged_advantage": np.array([1.0, -1.0]), "advantage": np.array([1.0, -0.5])}
        >>> logged_numbers(columns)["logged_advantage/max_difference"]
        0.5
    """
    if not {"logged_advantage", "advantage"} <= set(columns):
        return {}
    apart = np.abs(columns["logged_advantage"] - columns["advantage"])
    apart = apart[np.isfinite(apart)]
    if not len(apart):
        return {}
    found = {"rows": len(apart), "max_difference": apart.max(), "mean_difference": apart.mean()}
    found["agree"] = (apart <= AGREE).mean()
    return {f"logged_advantage/{name}": float(value) for name, value in found.items()}


def _compared_numbers(groups: Mapping[str, np.ndarray]) -> dict[str, float]:
    several = groups["rollouts"] > 1
    if not several.any():
        return {}
    differ = np.isfinite(groups["reward_std"]) & ~groups["zero_variance"]
    equal = float(groups["zero_variance"][several].mean())
    return {"frac_reward_zero_std": equal, "groups/informative": float(differ[several].mean())}


def _group_numbers(groups: Mapping[str, np.ndarray], solved: float) -> dict[str, float]:
    numbers = _statistics("group_size", groups["rollouts"], ("mean", "min", "max"))
    if (dispatched := groups["expected"] >= 0).any():
        numbers["groups/incomplete"] = float((~groups["complete"])[dispatched].mean())
    scored = np.isfinite(groups["reward_max"])
    if scored.any():
        none, every = groups["reward_max"][scored] < solved, groups["reward_min"][scored] >= solved
        numbers |= {"solve_none": float(none.mean()), "solve_all": float(every.mean())}
        numbers["solve_partial"] = float((~none & ~every).mean())
    return numbers


def _largest_share(columns: Columns) -> dict[str, float]:
    share = gradient_share(columns)
    if not share.any():
        return {}
    _, group = np.unique(columns["group_id"], return_inverse=True)
    return {"groups/largest_gradient_share": float(np.bincount(group.reshape(-1), share).max())}


def _statistics(name: str, values: np.ndarray, which: tuple[str, ...]) -> dict[str, float]:
    """``<name>/<statistic>``: `std` (ddof 1) of two values or more, the others of one or more."""
    if len(values) == 0:
        return {}
    functions = {"mean": np.mean, "min": np.min, "max": np.max, "std": partial(np.std, ddof=1)}
    defined = [key for key in which if key != "std" or len(values) > 1]
    return {f"{name}/{key}": float(functions[key](values)) for key in defined}
