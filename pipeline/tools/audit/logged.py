"""Explain logged advantages: find the framework whose recipe computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from headrace.pipeline.composing.compose import recipes
from headrace.pipeline.load import load_pipeline
from headrace.pipeline.pipeline import Pipeline
from headrace.pipeline.tools.report import AGREE, StepReport
from headrace.transforms import BatchError
from headrace.transforms.table.schema import MINIBATCH, NO_LENGTHS

MOST = 2**14  # the first steps are compared, until they have this many rows
SHOWN = 4  # matching recipes that are named
PLAIN = ("grpo", "dr_grpo", "rloo")  # compared before those of the frameworks
CLOSE = 1e-6  # recipes within this distance match equally well, for advantages of about 1


class LoggedAdvantages:
    """Compare the logged advantages of a dump with ours, step by step; :attr:`said` has the result.

    Example:
        >>> LoggedAdvantages().said
        ''
    """

    def __init__(self) -> None:
        self.steps: list[LoggedRows] = []
        self.apart: list[np.ndarray] = []
        self.taken = 0

    def add(self, report: StepReport) -> None:
        """Add the report of the next step."""
        rows = logged_rows(report)
        if rows is None:
            return
        self.taken += 1
        apart = np.abs(rows.logged - rows.ours)
        self.apart.append(apart[np.isfinite(apart)])
        if sum(len(step.logged) for step in self.steps) < MOST:
            self.steps.append(rows)

    @property
    def said(self) -> str:
        """The result as a paragraph; empty if no row has both advantages."""
        apart = np.concatenate([np.empty(0), *self.apart])
        if not len(apart):
            return ""
        agree = float((apart <= AGREE).mean())
        head = (
            f"logged advantages: {len(apart):,} rows have one, {agree:.0%} agree with yours within "
            f"{AGREE:g}; the greatest difference is {apart.max():.2g}, the mean {apart.mean():.2g}"
        )
        if agree == 1:
            return f"{head}."
        return f"{head}; {explain_logged(self.steps, of=self.taken)}."


def explain_logged(steps: Sequence[LoggedRows], *, of: int) -> str:
    """Name the recipes that compute these advantages, or the nearest recipe.

    Args:
        steps: the steps to compare.
        of: the number of steps with logged advantages.
    """
    logged = np.concatenate([step.logged for step in steps])
    close = tolerance(logged)
    tried = [*PLAIN, *(name for name in recipes() if name.startswith("as/"))]
    names, least = nearest({name: distance_from_recipe(steps, name) for name in tried}, close / AGREE)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    named = ", ".join(names[:SHOWN]) + more
    some = f" (compared: the first {len(logged):,} rows, {len(steps):,} of {of:,} steps)" * (len(steps) < of)
    if least <= close:
        return f"they are those of {named}, within {least:.1g}{some}"
    return f"they match none of {len(tried)} recipes; the nearest, {named}, differs by {least:.2g}{some}"


def distance_from_recipe(steps: Sequence[LoggedRows], name: str) -> float:
    """The greatest difference from a recipe's advantages, with collected or shaped rewards (the lower)."""
    advantage = advantage_as(name)
    return min(
        difference(steps, advantage),
        difference(steps, lambda rows: advantage(rows._replace(collected=rows.reward))),
    )


@cache  # composing a recipe takes a tenth of a second
def advantage_as(name: str) -> Callable[[LoggedRows], np.ndarray]:
    """Return a function that computes a recipe's advantages of rows.

    The function runs only the stages that compute the advantage, on all rows, with the groups of the dump.

    Args:
        name: name of the recipe.

    Example:
        >>> one = np.array([0.0, 1.0])
        >>> rows = LoggedRows(one, one, one, one, np.array([0, 0]), np.array([0, 1]), np.array([1, 1]))
        >>> advantage_as("as/prime_rl")(rows).tolist()
        [-0.5, 0.5]
    """
    stages = load_pipeline(f"pipeline={name}").stages.items()
    computing = {}
    for key, stage in stages:
        moves = getattr(stage, "reasons", ()) or MINIBATCH in getattr(stage, "out_keys", ())
        if not moves and MINIBATCH not in getattr(stage, "in_keys", ()):
            computing[key] = stage
    pipeline = Pipeline(computing)

    def advantage(rows: LoggedRows) -> np.ndarray:
        columns = {"group_id": rows.group, "rollout_id": rows.rollout, ("next", "reward"): rows.collected}
        batch = TensorDict(
            {key: torch.from_numpy(column) for key, column in columns.items()}, batch_size=[len(rows.group)]
        )
        if rows.tokens is None:
            batch[NO_LENGTHS] = torch.ones(len(batch), dtype=torch.bool)
        else:
            width = max(int(rows.tokens.max()), 1)
            batch["masks", "all_assistant_mask"] = (
                torch.arange(width) < torch.from_numpy(rows.tokens)[:, None]
            )
        return pipeline.run(batch).batch["advantage"].reshape(-1).double().numpy()

    return advantage


class LoggedRows(NamedTuple):
    """The rows of a step that have a logged advantage and a reward."""

    logged: np.ndarray
    """(N,) the dump's advantages."""
    ours: np.ndarray
    """(N,) advantages of our recipe; NaN for rows without one."""
    reward: np.ndarray
    """(N,) the rollout's reward, as our recipe compares it."""
    collected: np.ndarray
    """(N,) the dump's rewards."""
    group: np.ndarray
    """(N,) int64."""
    rollout: np.ndarray
    """(N,) int64."""
    tokens: np.ndarray | None
    """(N,) int64, number of tokens in the loss; None if the dump has no lengths."""


def logged_rows(report: StepReport) -> LoggedRows | None:
    """The rows of a report that have a logged advantage and a reward; None if there are none."""
    columns, unknown = report.columns, np.full(len(report), np.nan)
    if "logged_advantage" not in columns or "group_id" not in columns or "reward" not in columns:
        return None
    rows = np.isfinite(columns["logged_advantage"]) & np.isfinite(columns["reward"])
    rows &= np.isfinite(columns.get("collected_reward", columns["reward"]))
    if not rows.any():
        return None
    every = {"rollout_id": np.arange(len(report))} | dict(columns)
    names = ("reward", "collected_reward", "group_id", "rollout_id")
    ours, tokens = columns.get("advantage", unknown)[rows], columns.get("tokens")
    reward, collected, group, rollout = (every[name][rows] for name in names)
    known = None if tokens is None else tokens[rows]
    return LoggedRows(columns["logged_advantage"][rows], ours, reward, collected, group, rollout, known)


def difference(steps: Sequence[LoggedRows], advantage: Callable[[LoggedRows], np.ndarray]) -> float:
    """The greatest difference of logged from computed advantages; infinite if the function refuses rows."""
    try:
        return max(float(np.abs(rows.logged - advantage(rows)).max()) for rows in steps)
    except BatchError:
        return float("inf")


def tolerance(logged: np.ndarray) -> float:
    """The difference up to which advantages count as equal.

    It is 1e-4 times the greatest absolute advantage, but at least 1e-4. If the greatest one is below 0.1, it
    is 1e-3 times the greatest.

    Example:
        >>> tolerance(np.array([2.0, -50.0])), tolerance(np.array([0.5])), tolerance(np.array([2**-14]))
        (0.005, 0.0001, 6.103515625e-08)
    """
    size = float(np.abs(logged).max(initial=0.0))
    return min(AGREE * max(1.0, size), 10 * AGREE * size)


def nearest(differences: Mapping[str, float], size: float = 1.0) -> tuple[list[str], float]:
    """Return the names with the least difference, up to rounding or a factor of 2, and this difference.

    Args:
        differences: the difference for each name.
        size: the size of the advantages. It scales the tolerance within which differences count as equal.

    Example:
        >>> nearest({"as/verl": 2e-7, "as/trl": 0.1, "as/skyrl": 2e-7})
        (['as/verl', 'as/skyrl'], 2e-07)
    """
    best = min(differences.values())
    return [name for name, value in differences.items() if value <= max(2 * best, CLOSE * size)], best
