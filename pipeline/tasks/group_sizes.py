"""The task ``plan``: what share of groups would be uninformative at other group sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig
from rich.console import Console

from headrace.pipeline.load import ConfigError, build_pipeline
from headrace.pipeline.report import SharedTokens, StepReport, count_shared_tokens, tree_words
from headrace.pipeline.report.groups import compared_values, differs, has_reward
from headrace.pipeline.report.shared_tokens import linear_of
from headrace.pipeline.tables import FittedColumn, FittedTable
from headrace.transforms.schema import has_key

from .source import each_step, open_configured, report_of, sizes_of_groups

RATES = ((0.0, 0.0), (0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0), (1.0, 1.0))
PARTS = 0.1  # of the rollouts must lie on either side of what counts as solved, for solve rates to say much


def chance_of_equal(count: np.ndarray, group: np.ndarray, group_size: int) -> np.ndarray:
    """The chance that all of G rollouts of a prompt have one reward, estimated from a group of n.

    With n_v rollouts that have the reward v::

        G ≤ n   Σ_v C(n_v, G) / C(n, G)      without bias: G of the n, drawn without replacement
        G > n   Σ_v (n_v / n)^G              by the shares seen; too high, since n may have missed rewards

    Args:
        count: (C,) n_v ≥ 1, an entry for each reward of each group.
        group: (C,) its group, from 0 to the last.
        group_size: G ≥ 1.

    Returns:
        (groups,) float, in [0, 1]; of a single rollout exactly 1.

    Example:
        >>> three_solved_of_four = np.array([3, 1]), np.array([0, 0])
        >>> chance_of_equal(*three_solved_of_four, 2), chance_of_equal(*three_solved_of_four, 8).round(3)
        (array([0.5]), array([0.1]))
    """
    if group_size == 1:  # whose sum of shares may miss 1 by a rounding
        return np.ones(len(np.bincount(group)))
    rollouts = np.bincount(group, count)[group]
    chance = (count / rollouts) ** group_size
    drawn = rollouts >= group_size
    left, among = count[drawn].astype(float), rollouts[drawn].astype(float)
    product = np.ones(len(left))
    for taken in range(group_size if len(left) else 0):
        product *= np.maximum(left - taken, 0) / (among - taken)
    chance[drawn] = product
    return np.bincount(group, chance)


class GroupsSeen(NamedTuple):
    """The groups of a dump as a recipe compares them, those of two rollouts or more with a reward.

    What is equal is what TRL's ``frac_reward_zero_std`` is of: nothing that is compared of them differs.
    """

    mean: np.ndarray
    """(G,) of the rewards."""
    spread: np.ndarray
    """(G,) their std, with divisor n − 1."""
    low: np.ndarray
    """(G,) the least of them."""
    high: np.ndarray
    """(G,) the greatest."""
    solved: np.ndarray
    """(G,) the share of rollouts at or above what counts as solved."""
    equal: np.ndarray
    """(G,) bool."""
    count: np.ndarray
    """(C,) rollouts, for each different reward of each group."""
    group: np.ndarray
    """(C,) its group, from 0 to G − 1."""
    rewards: np.ndarray
    """(R,) of their rollouts."""
    compared: np.ndarray
    """(steps,) groups of two rollouts or more, some of which may lack a reward."""


def groups_seen(report: StepReport) -> GroupsSeen:
    """The groups of a step, by its report.

    Raises:
        ConfigError: the batch has no groups.
    """
    report = report.as_compared
    groups, each = report.groups, report.rollouts
    if not groups:
        raise ConfigError("a column of groups is required, to know which are uninformative; found none")
    scored = np.flatnonzero(has_reward(each))
    ids, index, number = np.unique(each["group"][scored], return_inverse=True, return_counts=True)
    several, index = number > 1, index.reshape(-1)
    rows = scored[several[index]]
    group = (np.cumsum(several) - 1)[index[several[index]]]
    values = compared_values(report.columns, each, each_reward=report.each_reward)[rows]
    owner, count = different_values(values, group)
    reward = each["reward"][rows]
    by_id = np.argsort(groups["id"])
    at = by_id[np.searchsorted(groups["id"][by_id], ids[several])]
    return GroupsSeen(
        mean=groups["reward_mean"][at],
        spread=groups["reward_std"][at],
        low=groups["reward_min"][at],
        high=groups["reward_max"][at],
        solved=np.bincount(group, reward >= report.solved) / number[several],
        equal=groups["zero_variance"][at],
        count=count,
        group=owner,
        rewards=reward,
        compared=np.array([(groups["rollouts"] > 1).sum()]),
    )


def different_values(values: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How often each different row of values is in each group.

    A column in which a group does not differ tells none of its rollouts apart, also where some lack it.

    Args:
        values: (R, K), NaN where one is missing.
        group: (R,) from 0 to the last.

    Returns:
        (C,) groups, and (C,) rollouts with the same values.

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


def tabulate_group_sizes(config: DictConfig, output: Path, console: Console | None = None) -> float:
    """Print the share of uninformative groups by group size, given the rewards of a dump under a recipe.

    The recipe is what ``task=replay`` runs: its rewards are compared, after its gate, its shaping and its
    weights. Where the dump has tokens, also what its rows would cost as trees.

    Args:
        config: as ``task=plan`` composes it.
        output: not written to.
        console: where to print; None: standard output.

    Returns:
        The share of groups in the dump that are uninformative, ``frac_reward_zero_std`` of a replay.

    Raises:
        ConfigError: no path, a group size that is no integer ≥ 1, or no group of two rollouts with a reward.
        SourceError: a file that cannot be read.
        BatchError: a stage refused a step's batch.
    """
    console = console or Console()
    sizes = sizes_of_groups(config, "plan.group_sizes")
    steps, tokens, pipeline = [], SharedTokens({}, {}), build_pipeline(config.pipeline)
    for step, batch in each_step(open_configured(config), console):
        steps.append(groups_seen(report_of(pipeline, step, batch, config)))
        ids = [name for name in ("group_id", "rollout_id") if has_key(batch, name)]
        tokens += count_shared_tokens(batch, {name: batch.get(name).reshape(-1).numpy() for name in ids})
    start = np.cumsum([0, *(len(one.equal) for one in steps)])
    group = np.concatenate([one.group + first for one, first in zip(steps, start[:-1], strict=True)])
    seen = GroupsSeen(*(np.concatenate(column) for column in zip(*steps, strict=True)))._replace(group=group)
    if not len(seen.equal):
        raise ConfigError(
            "a group of two rollouts with a reward is required, to know how rewards differ; found none in "
            "the dump"
        )
    show_group_sizes(seen, sizes, config.report.solved, console)
    if words := tree_words(tokens.numbers(linear=linear_of(pipeline.stages.values()))):
        console.print(words, highlight=False)
    return float(seen.equal.sum() / seen.compared.sum())


def show_group_sizes(seen: GroupsSeen, sizes: Sequence[int], solved: float, console: Console) -> None:
    """Print a table with a line per range of solve rates, or of spreads, and a column per group size.

    Args:
        seen: the groups.
        sizes: group sizes.
        solved: least reward of a solved rollout.
        console: where to print.
    """
    rollouts = np.bincount(seen.group, seen.count)
    chances = {size: chance_of_equal(seen.count, seen.group, size) for size in sizes}
    name, lines = lines_of(seen, solved)
    columns = [
        FittedColumn(f"G={size}" + ("*" if (rollouts < size).any() else ""), right=True) for size in sizes
    ]
    head = [FittedColumn(name, gives="wrap"), FittedColumn("groups", right=True)]
    title = "the chance that all rewards of a group are equal, by its number of rollouts G"
    table = FittedTable([*head, *columns], title)
    for label, inside in lines:
        if inside.any():
            cells = [f"{chances[size][inside].mean():.0%}" for size in sizes]
            table.add(label, f"{inside.sum():,}", *cells)
    shares = [float(chances[size].mean()) for size in sizes]
    table.add("all", f"{len(rollouts):,}", *(f"{share:.0%}" for share in shares), style="bold")
    pairs = zip(sizes, shares, strict=True)
    needed = [f"{size / (1 - share):,.0f}" if share < 1 else "∞" for size, share in pairs]
    table.add("rollouts per informative group", "", *needed)
    console.print(table)
    if (rollouts < max(sizes)).any():
        words = "* for groups of fewer rollouts than G by the shares of the rewards seen, which is too high"
        console.print(
            f"{words}: a prompt may have rewards that its few rollouts have missed.", highlight=False
        )
    console.print(
        f"{seen.equal.sum() / seen.compared.sum():.0%} of the groups in the dump are uninformative under "
        f"this recipe, with {rollouts.mean():.1f} rollouts each.",
        highlight=False,
    )


def lines_of(seen: GroupsSeen, solved: float) -> tuple[str, list[tuple[str, np.ndarray]]]:
    """The lines of the table: what their ranges are of, and for each its label and (G,) bool.

    Ranges are of the solve rate where rewards have two values, of which the greater is solved, or where a
    tenth of the rollouts or more are on either side of `solved`; else of the rewards' spread.
    """
    values, rate = np.unique(seen.rewards), seen.solved
    if len(values) == 2:
        solved, rollouts = values[1], np.bincount(seen.group, seen.count)
        # A mean is rounded, and a number of rollouts is whole.
        rate = np.round((seen.mean - values[0]) / (solved - values[0]) * rollouts) / rollouts
    reached = float(np.mean(seen.rewards >= solved))
    if len(values) == 2 or PARTS <= reached <= 1 - PARTS:
        lines = [
            (f"{low:g}", rate == low)
            if low == high
            else (f"{low:g} to {high:g}", (rate > low) & (rate <= high) & (rate < 1))
            for low, high in RATES
        ]
        return f"solve rate, at {solved:g}", lines
    spread = np.where(seen.low == seen.high, 0.0, seen.spread)
    positive = spread[spread > 0]
    ends = np.unique([0.0, *(np.quantile(positive, (0.25, 0.5, 0.75, 1)) if len(positive) else ())])
    lines = [(f"{a:.3g} to {b:.3g}", (spread > a) & (spread <= b)) for a, b in pairwise(ends)]
    return "std of the rewards", [("0", spread == 0), *lines]
