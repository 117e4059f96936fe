"""Explain logged advantages: which framework's recipe computes them, and how they differ from ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from headrace.pipeline.composing import recipes
from headrace.pipeline.load import load_pipeline
from headrace.pipeline.pipeline import Pipeline
from headrace.pipeline.report import StepReport
from headrace.pipeline.report.numbers import AGREE
from headrace.transforms import BatchError, group_relative_advantage, whiten
from headrace.transforms.schema import MINIBATCH, NO_LENGTHS

MOST = 2**14  # rows that are compared: those of whole steps, from the first one on
SHOWN = 4  # matching recipes that are named
CLOSE = 1e-6  # recipes within this distance match equally well, for advantages of about 1
EPSILONS = (1e-6, 1e-4, 1e-5, 1e-8, 1e-9)


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
        seen = len(self.steps)
        steps = f"at the first {seen:,} of {self.taken:,} steps " if seen < self.taken else ""
        return f"{head}; {steps}{'; '.join(explain_logged(self.steps))}."


def explain_logged(steps: Sequence[LoggedRows]) -> list[str]:
    """Describe logged advantages in clauses: the matching recipes or convention, and the relation to ours."""
    logged = np.concatenate([step.logged for step in steps])
    close = tolerance(logged)
    names, least = nearest(
        {name: distance_from_recipe(steps, name) for name in recipes() if name.startswith("as/")},
        close / AGREE,
    )
    if least <= close:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        found = [f"they are those of {', '.join(names[:SHOWN])}{more}, within {least:.1g}"]
    else:
        convention, apart = nearest_convention(steps)
        told = "are those of" if apart <= close else f"are nearest, within {apart:.2g}, to those of"
        found = [f"they match no framework's recipe ({names[0]} differs by {least:.2g})"]
        found.append(f"they {told} {convention}")
    return [*found, *filter(None, [relation(steps)])]


def distance_from_recipe(steps: Sequence[LoggedRows], name: str) -> float:
    """The greatest difference from a recipe's advantages, of the collected or the shaped rewards."""
    advantage = advantage_as(name)
    return min(
        difference(steps, advantage),
        difference(steps, lambda rows: advantage(rows._replace(collected=rows.reward))),
    )


@cache  # composing a recipe takes a tenth of a second
def advantage_as(name: str) -> Callable[[LoggedRows], np.ndarray]:
    """Return a function from rows to a recipe's advantages.

    It runs only the stages that compute the advantage, on all rows: the groups are those of the dump.

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
    """(N,) int64, number of tokens in the loss; None where the dump has no lengths."""


class Convention(NamedTuple):
    """A way to compute advantages, in the options of GroupRelativeAdvantage and BatchWhitening."""

    baseline: Literal["mean", "leave_one_out", "batch"] = "mean"
    scale: Literal["group", "batch", "none"] = "group"
    ddof: int = 1
    votes: Literal["rollouts", "rows"] = "rollouts"
    whitened: Literal["", "token", "sample"] = ""
    rewards: Literal["shaped", "collected"] = "shaped"
    eps: float = 1e-6

    def advantage(self, rows: LoggedRows) -> np.ndarray:
        """Compute the (N,) advantages by this convention.

        Raises:
            BatchError: segments of a rollout have different rewards; lengths are needed and not known.
        """
        reward = torch.from_numpy(rows.reward if self.rewards == "shaped" else rows.collected)
        group, rollout = torch.from_numpy(rows.group), torch.from_numpy(rows.rollout)
        voters = rollout if self.votes == "rollouts" else None
        how = {"baseline": self.baseline, "scale": self.scale, "ddof": self.ddof, "eps": self.eps}
        credit = group_relative_advantage(reward, group, voters, **how)  # type: ignore[arg-type]
        if self.whitened == "token" and rows.tokens is None:
            raise BatchError("advantages that are whitened by token need the lengths of responses")
        if self.whitened:
            each = torch.ones_like(credit)
            if self.whitened == "token" and rows.tokens is not None:
                each = torch.from_numpy(rows.tokens)
            credit = whiten(credit, each)
        return credit.numpy()

    def __str__(self) -> str:
        words = [f"baseline={self.baseline}", f"scale={self.scale}"]
        words += [f"ddof={self.ddof}", f"eps={self.eps:g}"] if self.scale != "none" else []
        words += [f"whitened by {self.whitened}"] if self.whitened else []
        words += ["each row counts"] if self.votes == "rows" else []
        return ", ".join(words + (["of the rewards as collected"] if self.rewards == "collected" else []))


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
    """The greatest difference of logged advantages from a function's; infinite if it refuses the rows."""
    try:
        return max(float(np.abs(rows.logged - advantage(rows)).max()) for rows in steps)
    except BatchError:
        return float("inf")


def tolerance(logged: np.ndarray) -> float:
    """The difference up to which advantages count as equal.

    It is 1e-4 relative to the greatest one, with a floor of 1e-4; for advantages below 0.1, which may be
    rounded, 1e-3 relative.

    Example:
        >>> tolerance(np.array([2.0, -50.0])), tolerance(np.array([0.5])), tolerance(np.array([2**-14]))
        (0.005, 0.0001, 6.103515625e-08)
    """
    size = float(np.abs(logged).max(initial=0.0))
    return min(AGREE * max(1.0, size), 10 * AGREE * size)


def nearest(differences: Mapping[str, float], size: float = 1.0) -> tuple[list[str], float]:
    """Return the names with the least differences, and the least difference.

    Args:
        differences: by name.
        size: of the advantages; it scales the tolerance for equal differences.

    Example:
        >>> nearest({"as/verl": 2e-7, "as/trl": 0.1, "as/skyrl": 2e-7})
        (['as/verl', 'as/skyrl'], 2e-07)
    """
    best = min(differences.values())
    return [name for name, value in differences.items() if value <= max(2 * best, CLOSE * size)], best


def nearest_convention(steps: Sequence[LoggedRows]) -> tuple[Convention, float]:
    """Find the convention whose advantages are nearest to the logged ones.

    Args:
        steps: rows by step. Batch statistics are those of a step.

    Returns:
        The convention, and the greatest remaining difference.

    Example:
        >>> reward, group = np.array([0.0, 1.0, 2.0, 5.0]), np.array([0, 0, 1, 1])
        >>> rows = LoggedRows(np.array([-1.0, 1, -3, 3]), reward, reward, reward, group, np.arange(4), group)
        >>> str(nearest_convention([rows])[0])
        'baseline=leave_one_out, scale=none'
    """
    fanned = any(len(np.unique(rows.rollout)) < len(rows.rollout) for rows in steps)
    shaped = any(not np.array_equal(rows.reward, rows.collected) for rows in steps)
    votes = ("rollouts", "rows") if fanned else ("rollouts",)
    rewards = ("shaped", "collected") if shaped else ("shaped",)
    scales = (("group", 1), ("group", 0), ("none", 1), ("batch", 1), ("batch", 0))
    best, least = Convention(), float("inf")
    for reward, vote, white, base, (scale, ddof) in product(
        rewards, votes, ("", "token", "sample"), ("mean", "leave_one_out", "batch"), scales
    ):
        tried = Convention(base, scale, ddof, vote, white, reward)  # type: ignore[arg-type]
        if (apart := difference(steps, tried.advantage)) < least - 1e-12:
            best, least = tried, apart
    for eps in EPSILONS:
        if best.scale != "none" and (apart := difference(steps, best._replace(eps=eps).advantage)) < least:
            best, least = best._replace(eps=eps), apart
    return best, least


# -- the relation of logged advantages to ours -------------------------------------------------------------


def relation(steps: Sequence[LoggedRows]) -> str:
    """Describe how the logged advantages follow from ours; empty if no relation is found.

    It tries one factor; a factor for each group; an offset for each group; and one factor and offset for all
    rows of a step, as whitening gives. If a factor belongs to a known convention, that is named. If the
    groups are so similar that several conventions have this factor, all of them are named.

    Example:
        >>> reward, group = np.array([0.0, 1.0, 2.0, 5.0]), np.array([0, 0, 1, 1])
        >>> ours = np.array([-0.5, 0.5, -1.5, 1.5])
        >>> relation([LoggedRows(2 * ours, ours, reward, reward, group, np.arange(4), group)])
        'they are yours × 2 = n/(n − 1): their baseline leaves the rollout out'
    """
    both = []  # rows with both advantages
    for rows in steps:
        known = np.isfinite(rows.ours)
        both += [LoggedRows(*(None if each is None else each[known] for each in rows))] if known.any() else []
    if not both:
        return ""
    groups = [_by_group(rows) for rows in both]
    if all(_fits(rows, at.factor[at.index] * rows.ours) for rows, at in zip(both, groups, strict=True)):
        return _named_factor(groups)
    if all(_fits(rows, rows.ours + at.offset[at.index]) for rows, at in zip(both, groups, strict=True)):
        return "they are yours plus an offset for each group: another baseline"
    lines = []  # least-squares line from ours to the logged ones
    for rows in both:
        about = rows.ours - rows.ours.mean()
        slope = (about * rows.logged).sum() / max(float((about**2).sum()), np.finfo(float).tiny)
        lines.append(rows.logged.mean() + slope * about)
    several = all(len(np.unique(rows.ours)) > 2 for rows in both)  # any two points are on a line
    if several and all(_fits(rows, line) for rows, line in zip(both, lines, strict=True)):
        return (
            "they are yours × a factor + an offset, the same for a whole step: as if whitened over the batch"
        )
    return ""


class _InGroups(NamedTuple):
    """The groups of a step."""

    index: np.ndarray  # (N,) the group of each row
    factor: np.ndarray  # (G,) least-squares factor from ours; NaN if ours are all 0
    offset: np.ndarray  # (G,) mean difference from ours
    size: np.ndarray  # (G,) rollouts
    std: np.ndarray  # (G,) of their rewards, with divisor n


def _by_group(rows: LoggedRows) -> _InGroups:
    _, index = np.unique(rows.group, return_inverse=True)
    index = index.reshape(-1)
    rollouts = np.unique(rows.rollout, return_index=True)[1]
    size = np.bincount(index[rollouts])
    mean = np.bincount(index[rollouts], rows.reward[rollouts]) / size
    squares = np.bincount(index[rollouts], (rows.reward[rollouts] - mean[index[rollouts]]) ** 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = np.bincount(index, rows.logged * rows.ours) / np.bincount(index, rows.ours**2)
    offset = np.bincount(index, rows.logged - rows.ours) / np.bincount(index)
    return _InGroups(index, factor, offset, size, np.sqrt(squares / size))


def _fits(rows: LoggedRows, found: np.ndarray) -> bool:
    bound = np.minimum(AGREE * np.maximum(1, np.abs(rows.logged)), tolerance(rows.logged))
    return bool((np.abs(rows.logged - np.nan_to_num(found)) <= bound).all())


def _named_factor(groups: Sequence[_InGroups]) -> str:
    factor, size, std = (
        np.concatenate([getattr(each, name) for each in groups]) for name in ("factor", "size", "std")
    )
    known = np.isfinite(factor) & (size > 1)
    factor, size, std = factor[known], size[known], std[known]
    if not len(factor) or np.allclose(factor, 1, rtol=AGREE):
        return ""
    one = np.allclose(factor, factor[0], rtol=AGREE)
    value = f"{factor[0]:.4g}" if one else "a factor for each group"
    fitting = [
        (parts, f"{name}: {words}")
        for parts, name, words, expected in _factors(size, std)
        if np.allclose(factor, expected, rtol=10 * AGREE)
    ]
    if not fitting:
        return f"they are yours × {value}" + ("" if one else ", of no known convention")
    named = [words for parts, words in fitting if parts == fitting[0][0]]
    if len(fitting) == 1:
        return f"they are yours × {value} = {named[0]}"
    return (
        f"they are yours × {value}, which may be {'; or '.join(named)}; or another convention: these groups "
        "are too similar to tell"
    )


def _factors(size: np.ndarray, std: np.ndarray) -> Iterator[tuple[int, str, str, np.ndarray]]:
    """Factors between conventions: the number of parts, a name, its meaning, and (G,) values."""
    n = size.astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        baselines = [
            ("", "", np.ones(len(n))),
            ("n/(n − 1)", "their baseline leaves the rollout out", n / (n - 1)),
            ("(n − 1)/n", "your baseline leaves the rollout out", (n - 1) / n),
        ]
        unbiased = std * np.sqrt(n / (n - 1))
        scales = [
            ("", "", np.ones(len(n))),
            ("√(n/(n − 1))", "their std has ddof 0, yours ddof 1", np.sqrt(n / (n - 1))),
            ("√((n − 1)/n)", "their std has ddof 1, yours ddof 0", np.sqrt((n - 1) / n)),
            ("std", "yours are divided by the group's std (ddof 1), theirs are not", unbiased),
            ("std", "yours are divided by the group's std (ddof 0), theirs are not", std),
            ("1/std", "theirs are divided by the group's std (ddof 1), yours are not", 1 / unbiased),
            ("1/std", "theirs are divided by the group's std (ddof 0), yours are not", 1 / std),
        ]
    pairs = sorted(product(baselines, scales), key=lambda pair: bool(pair[0][0]) + bool(pair[1][0]))
    for (name, words, factor), (more, meaning, other) in pairs[1:]:
        if name and more.startswith("√") and more != f"√({name})":
            continue  # n/(n − 1) · √((n − 1)/n) is √(n/(n − 1)), and likewise for the inverses
        yield (
            bool(name) + bool(more),
            " × ".join(filter(None, (name, more))),
            "; ".join(filter(None, (words, meaning))),
            factor * other,
        )
