"""Logged advantages explained: which framework's recipe they are of, and how they follow from ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from headrace.pipeline.composing import recipes
from headrace.pipeline.load import load_pipeline
from headrace.pipeline.pipeline import Pipeline
from headrace.pipeline.report import StepReport
from headrace.pipeline.report.logged_advantage import (
    AGREE,
    LoggedRows,
    difference,
    logged_rows,
    nearest,
    nearest_convention,
    relation,
    tolerance,
)
from headrace.transforms.schema import MINIBATCH

MOST = 2**14  # rows that are looked at, of whole steps from the first on
SHOWN = 4  # recipes that agree


class LoggedAdvantages:
    """The logged advantages of a dump beside ours, step by step; :meth:`words` says what they are.

    Example:
        >>> LoggedAdvantages().words()
        ''
    """

    def __init__(self) -> None:
        self.steps: list[LoggedRows] = []
        self.apart: list[np.ndarray] = []
        self.taken = 0

    def add(self, report: StepReport) -> None:
        """Take the report of the next step."""
        rows = logged_rows(report)
        if rows is None:
            return
        self.taken += 1
        apart = np.abs(rows.logged - rows.ours)
        self.apart.append(apart[np.isfinite(apart)])
        if sum(len(step.logged) for step in self.steps) < MOST:
            self.steps.append(rows)

    def words(self) -> str:
        """A paragraph; empty where no row has both advantages."""
        apart = np.concatenate([np.empty(0), *self.apart])
        if not len(apart):
            return ""
        agree = float((apart <= AGREE).mean())
        head = (
            f"logged advantages: {len(apart):,} rows have one, {agree:.0%} agree with yours within "
            f"{AGREE:g}; they differ by {apart.max():.2g} at most, {apart.mean():.2g} in the mean"
        )
        if agree == 1:
            return f"{head}."
        seen = len(self.steps)
        steps = f"at the first {seen:,} of {self.taken:,} steps " if seen < self.taken else ""
        return f"{head}; {steps}{'; '.join(explain_logged(self.steps))}."


def explain_logged(steps: Sequence[LoggedRows]) -> list[str]:
    """What the logged advantages are, in clauses: whose recipe or which convention, and how from ours."""
    logged = np.concatenate([step.logged for step in steps])
    close = tolerance(logged)
    names, least = nearest(
        {name: distance_from_recipe(steps, name) for name in recipes() if name.startswith("as/")},
        close / AGREE,
    )
    if least <= close:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        found = [f"they are those of {', '.join(names[:SHOWN])}{more} to {least:.1g}"]
    else:
        convention, apart = nearest_convention(steps)
        told = "are those of" if apart <= close else f"come nearest, to {apart:.2g}, to those of"
        found = [f"they are of no framework's recipe ({names[0]} is off by {least:.2g})"]
        found.append(f"they {told} {convention}")
    return [*found, *filter(None, [relation(steps)])]


def distance_from_recipe(steps: Sequence[LoggedRows], name: str) -> float:
    """How far logged advantages are at most from those of a recipe, of rewards as collected or as shaped."""
    advantage = advantage_as(name)
    return min(
        difference(steps, advantage),
        difference(steps, lambda rows: advantage(rows._replace(collected=rows.reward))),
    )


def advantage_as(name: str) -> Callable[[LoggedRows], np.ndarray]:
    """A function from rows to the advantage that a recipe gives them, all of which it compares.

    Only stages that compute it are run: who is in a group is seen from the dump.

    Args:
        name: of the recipe.

    Example:
        >>> one = np.array([0.0, 1.0])
        >>> rows = LoggedRows(one, one, one, one, np.array([0, 0]), np.array([0, 1]), np.array([1, 1]))
        >>> advantage_as("as/prime_rl")(rows).tolist()
        [-0.5, 0.5]
    """
    stages = load_pipeline(f"pipeline={name}").stages.items()
    pipeline = Pipeline({key: stage for key, stage in stages if _only_computes(stage)})

    def advantage(rows: LoggedRows) -> np.ndarray:
        width = max(int(rows.tokens.max()), 1)
        mask = torch.arange(width) < torch.from_numpy(rows.tokens).unsqueeze(1)
        columns = {"group_id": rows.group, "rollout_id": rows.rollout, ("next", "reward"): rows.collected}
        batch = TensorDict(
            {key: torch.from_numpy(column) for key, column in columns.items()}, batch_size=[len(mask)]
        )
        batch["masks", "all_assistant_mask"] = mask
        return pipeline.run(batch).batch["advantage"].reshape(-1).double().numpy()

    return advantage


def _only_computes(stage: Any) -> bool:
    moves = getattr(stage, "reasons", ()) or getattr(stage, "cuts", False)
    return not moves and MINIBATCH not in getattr(stage, "in_keys", ())
