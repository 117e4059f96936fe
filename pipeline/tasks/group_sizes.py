"""The task ``plan``: what share of groups would be uninformative at other group sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from rich.console import Console
from tensordict import TensorDictBase

from headrace.pipeline.load import ConfigError, build_pipeline
from headrace.pipeline.report import SharedTokens, count_shared_tokens, tree_words
from headrace.pipeline.report.fitted_table import FittedColumn, FittedTable
from headrace.pipeline.report.groups import rollouts_of
from headrace.pipeline.report.shared_tokens import linear_of
from headrace.pipeline.row_table import weights_of_stages
from headrace.transforms.rewards import weighted_reward
from headrace.transforms.schema import has_key

from .source import at_step, each_step, open_configured

BINS = ((0.0, 0.0), (0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0), (1.0, 1.0))


def uninformative(rate: np.ndarray, group_size: int) -> np.ndarray:
    """The probability that all rollouts of a group are solved, or none is::

        P = p^G + (1 − p)^G

    Args:
        rate: (·,) the prompt's solve rate p, in [0, 1].
        group_size: G ≥ 1.

    Returns:
        (·,) float, in [0, 1].

    Example:
        >>> uninformative(np.array([0.5, 1.0]), 2).tolist()
        [0.5, 1.0]
    """
    return rate**group_size + (1 - rate) ** group_size


def tabulate_group_sizes(config: DictConfig, output: Path, console: Console | None = None) -> float:
    """Print the share of uninformative groups by solve rate and group size, given the solve rates of a dump.

    Where the dump has tokens, also what its rows would cost as trees.

    Args:
        config: as ``task=plan`` composes it.
        output: not written to.
        console: where to print; None: standard output.

    Returns:
        The share of groups in the dump that are uninformative.

    Raises:
        ConfigError: no path, a group size that is no integer ≥ 1, or no rollout with a reward.
        SourceError: a file that cannot be read.
        BatchError: the recipe's weights are not those of as many rewards as the dump has.
    """
    console = console or Console()
    sizes = list(config.plan.group_sizes)
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise ConfigError(f"plan.group_sizes must be integers ≥ 1; got {sizes}")
    rates, counts, tokens = [], [], SharedTokens({}, {})
    stages = build_pipeline(config.pipeline).stages.values()
    weights = weights_of_stages(stages)
    for step, batch in each_step(open_configured(config), console):
        with at_step(step):
            rate, count = solve_rates(batch, config.report.solved, weights)
        tokens = tokens + count_shared_tokens(batch, row_ids(batch))
        rates.append(rate)
        counts.append(count)
    rate, count = (np.concatenate([np.empty(0), *arrays]) for arrays in (rates, counts))
    if len(rate) == 0:
        raise ConfigError(
            "a rollout with a reward is required, to know a solve rate; found none in any group of the dump"
        )
    show_group_sizes(rate, count, sizes, config.report.solved, console)
    if words := tree_words(tokens.numbers(linear=linear_of(stages))):
        console.print(words, highlight=False)
    return float(((rate == 0) | (rate == 1)).mean())


def solve_rates(
    batch: TensorDictBase, solved: float, weights: Sequence[float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The solve rate of each group, over its rollouts that have a reward and neither failed nor were aborted.

    Args:
        batch: TensorDict ``[N]``.
        solved: least reward of a solved rollout; of several rewards, their weighted sum.
        weights: of several rewards; None: all 1.

    Returns:
        (G,) float, the share of its rollouts that are solved, and (G,) their number; groups without such
        rollouts are omitted.
    """
    columns = {"reason": np.zeros(len(batch), int)} | row_ids(batch)
    if has_key(batch, "status"):
        columns["status"] = batch.get("status").reshape(-1).numpy()
    rewards = batch.get(("next", "reward")).reshape(len(batch), -1).double()
    columns["reward"] = weighted_reward(rewards, weights).numpy()
    each = rollouts_of(columns)
    scored = np.isfinite(each["reward"]) & ~each["lost"]
    _, group = np.unique(each["group"], return_inverse=True)
    count = np.bincount(group.reshape(-1), scored)
    solved_count = np.bincount(group.reshape(-1), scored & (each["reward"] >= solved))
    return (solved_count / np.maximum(count, 1))[count > 0], count[count > 0]


def row_ids(batch: TensorDictBase) -> dict[str, np.ndarray]:
    """(N,) integers by name, the ids that a batch has."""
    names = [name for name in ("group_id", "rollout_id") if has_key(batch, name)]
    return {name: batch.get(name).reshape(-1).numpy() for name in names}


def show_group_sizes(
    rate: np.ndarray, count: np.ndarray, sizes: Sequence[int], solved: float, console: Console
) -> None:
    """Print a table with a line per range of solve rates and a column per group size.

    Args:
        rate: (G,) solve rates.
        count: (G,) rollouts of each group.
        sizes: group sizes.
        solved: least reward of a solved rollout, for the title.
        console: where to print.
    """
    title = f"P(uninformative) = p^G + (1 − p)^G, a rollout being solved at a reward ≥ {solved:g}"
    columns = [FittedColumn(f"G={size}", right=True) for size in sizes]
    head = [FittedColumn("solve rate p", gives="wrap"), FittedColumn("groups", right=True)]
    table = FittedTable([*head, *columns], title)
    for low, high in BINS:
        inside = (rate == low) if low == high else (rate > low) & (rate < 1 if high == 1.0 else rate <= high)
        inside &= (rate < 1) | (low == 1.0)
        if inside.any():
            label = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            cells = [f"{uninformative(rate[inside], size).mean():.0%}" for size in sizes]
            table.add(label, f"{inside.sum():,}", *cells)
    shares = [float(uninformative(rate, size).mean()) for size in sizes]
    table.add("all", f"{len(rate):,}", *(f"{share:.0%}" for share in shares), style="bold")
    needed = [
        f"{size / (1 - share):,.0f}" if share < 1 else "∞" for size, share in zip(sizes, shares, strict=True)
    ]
    table.add("rollouts per informative group", "", *needed)
    console.print(table)
    seen = float(((rate == 0) | (rate == 1)).mean())
    console.print(
        f"{seen:.0%} of the groups in the dump are uninformative, with {count.mean():.1f} rollouts each. "
        "A rate of so few rollouts is an estimate: a prompt with a rate of 0 or 1 may be solved sometimes.",
        highlight=False,
    )
