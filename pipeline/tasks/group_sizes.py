"""The task ``plan``: the share of groups that would be uninformative at other group sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from headrace.pipeline.load import ConfigError, build_pipeline
from headrace.pipeline.report import SharedTokens, StepReport, count_shared_tokens, tree_words
from headrace.pipeline.report.dump import write_whole
from headrace.pipeline.report.groups import compared_values, differs, has_reward
from headrace.pipeline.report.shared_tokens import linear_of
from headrace.pipeline.tables import FittedColumn, FittedTable
from headrace.pipeline.valid_json import json_text
from headrace.pipeline.wording import printable
from headrace.transforms.schema import has_key

from .source import each_step, open_configured, report_of, sizes_of_groups

RATES = ((0.0, 0.0), (0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0), (1.0, 1.0))
PARTS = 0.1  # least share of rollouts on each side of `solved`; below it, solve rates are not shown


def chance_of_equal(count: np.ndarray, group: np.ndarray, group_size: int) -> np.ndarray:
    """Estimate the probability that G rollouts of a prompt have equal rewards, from a group of n.

    With n_v rollouts that have the reward v::

        G ≤ n   Σ_v C(n_v, G) / C(n, G)      unbiased: G of the n rollouts without replacement
        G > n   Σ_v (n_v / n)^G              biased upwards, since n rollouts may miss rewards

    Args:
        count: (C,) n_v ≥ 1, one entry for each reward of each group.
        group: (C,) the group of each entry, from 0.
        group_size: G ≥ 1.

    Returns:
        (groups,) float, in [0, 1]; exactly 1 for G = 1.

    Example:
        >>> three_solved_of_four = np.array([3, 1]), np.array([0, 0])
        >>> chance_of_equal(*three_solved_of_four, 2), chance_of_equal(*three_solved_of_four, 8).round(3)
        (array([0.5]), array([0.1]))
    """
    if group_size == 1:  # a rounded sum of shares may not be exactly 1
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
    """The groups of a dump that have at least two rollouts with rewards, as a recipe compares them.

    `equal` groups are those of TRL's ``frac_reward_zero_std``: all compared rewards of the group are equal.
    """

    mean: np.ndarray
    """(G,) mean reward."""
    spread: np.ndarray
    """(G,) std of the rewards, with divisor n − 1."""
    low: np.ndarray
    """(G,) least reward."""
    high: np.ndarray
    """(G,) greatest reward."""
    solved: np.ndarray
    """(G,) share of rollouts with a reward of at least `solved`."""
    equal: np.ndarray
    """(G,) bool, all compared rewards are equal."""
    count: np.ndarray
    """(C,) number of rollouts, for each distinct reward of each group."""
    group: np.ndarray
    """(C,) the group of each entry, from 0 to G − 1."""
    rewards: np.ndarray
    """(R,) rewards of all rollouts."""
    compared: np.ndarray
    """(steps,) number of groups with at least two rollouts, with or without rewards."""


def groups_seen(report: StepReport) -> GroupsSeen:
    """Return the groups of a step from its report.

    Raises:
        ConfigError: the batch has no groups.
    """
    report = report.as_compared
    groups, each = report.groups, report.rollouts
    if not groups:
        raise ConfigError("task=plan needs a column of group ids; the dump has none. Set source.group_by")
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
    """Count the distinct rows of values in each group.

    A column that is constant within a group does not distinguish its rollouts, even if some values are
    missing.

    Args:
        values: (R, K), NaN for missing values.
        group: (R,) group of each row, from 0.

    Returns:
        (C,) groups, and (C,) numbers of rollouts with equal values.

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
    """Print the share of uninformative groups by group size, from the rewards of a dump under a recipe.

    It runs the recipe as ``task=replay`` does, and compares rewards after its gate, shaping and weights. If
    the dump has tokens, it also prints the cost of its rows as prefix trees.

    Args:
        config: composed with ``task=plan``.
        output: folder for ``config.yaml`` and ``plan.json``.
        console: where to print; None: standard output.

    Returns:
        The share of uninformative groups in the dump, as ``frac_reward_zero_std`` of a replay.

    Raises:
        ConfigError: ``source.path`` is missing, a group size is not an integer ≥ 1, or no group has two
            rollouts with rewards.
        SourceError: a file cannot be read.
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
            "task=plan needs groups with at least two rollouts with rewards; found none in the dump"
        )
    show_group_sizes(seen, sizes, config.report.solved, console)
    share = float(seen.equal.sum() / seen.compared.sum())
    if words := tree_words(tokens.numbers(linear=linear_of(pipeline.stages.values()))):
        console.print(words, highlight=False)
    chances = {str(size): float(chance_of_equal(seen.count, seen.group, size).mean()) for size in sizes}
    found = {"groups": len(seen.equal), "uninformative": share, "chance_of_equal": chances}
    output.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, output / "config.yaml", resolve=True)
    write_whole(output / "plan.json", lambda file: file.write_text(json_text(found, indent=1)))
    console.print(Text(printable(f"written to {output}")), soft_wrap=True)
    return share


def show_group_sizes(seen: GroupsSeen, sizes: Sequence[int], solved: float, console: Console) -> None:
    """Print a table with a line for each range of solve rates or of spreads, and a column for each size.

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
    title = "the chance that all rewards of a group are equal, by group size G"
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
        words = "* estimated from the shares of the rewards seen, for groups with fewer than G rollouts"
        console.print(
            f"{words}. The estimate is too high: few rollouts may miss some rewards.", highlight=False
        )
    console.print(
        f"{seen.equal.sum() / seen.compared.sum():.0%} of the groups in the dump are uninformative under "
        f"this recipe, with {rollouts.mean():.1f} rollouts each.",
        highlight=False,
    )


def lines_of(seen: GroupsSeen, solved: float) -> tuple[str, list[tuple[str, np.ndarray]]]:
    """Return the name of the quantity in the table's first column, and for each line a label and (G,) bool.

    The quantity is the solve rate if rewards have two values, where the greater one is solved, or if at least
    a tenth of the rollouts are on each side of `solved`. Else it is the rewards' standard deviation.
    """
    values, rate = np.unique(seen.rewards), seen.solved
    if len(values) == 2:
        solved, rollouts = values[1], np.bincount(seen.group, seen.count)
        # The mean is rounded: recover the exact number of solved rollouts.
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
