"""The task ``plan``: estimate the share of uninformative groups at other group sizes."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text
from tensordict import TensorDictBase

from headrace.pipeline.load import ConfigError, build_pipeline
from headrace.pipeline.tools.dumps import (
    DumpSteps,
    TaskResult,
    open_configured,
    print_files,
    sizes_of_groups,
    write_files,
)
from headrace.pipeline.tools.report import (
    FittedColumn,
    FittedTable,
    SharedTokens,
    StepReport,
    compared_values,
    count_shared_tokens,
    has_reward,
    json_text,
    make_report,
    said_of_trees,
)
from headrace.transforms.table.schema import has_key

from .chances import chance_of_equal, chances_of_sizes, choosing_half, different_values, pools_of

RATES = ((0.0, 0.0), (0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0), (1.0, 1.0))
BOUND = "≤: an upper bound, because a prompt has fewer than G rollouts."
NO_HALVES = "There are no lines by the {}: half of a prompt's rollouts are too few for all of these sizes."
PARTS = 0.1  # least share of rollouts on each side of `solved`; below it, solve rates are not shown
HALVES = (
    "One half of a prompt's rollouts, drawn at random, chooses its line, and the numbers of the line count "
    "the other half. –: the other half has fewer than G rollouts. The line `all` counts all rollouts."
)


class GroupsSeen(NamedTuple):
    """The groups of a dump that have at least two rollouts with rewards, as a recipe compares them.

    `equal` groups are those of TRL's ``frac_reward_zero_std``: all compared rewards of the group are equal.
    """

    equal: np.ndarray
    """(P,) bool, True if all compared rewards are equal."""
    prompt: np.ndarray
    """(P,) a number for each prompt with its ground truth; -1: the dump has no texts."""
    step: np.ndarray
    """(P,) the step of each group."""
    group: np.ndarray
    """(R,) the group of each rollout, from 0 to P − 1."""
    rewards: np.ndarray
    """(R,) the reward of each rollout."""
    values: np.ndarray
    """(R, K) compared rewards, NaN for missing ones."""
    compared: np.ndarray
    """(steps,) the number of groups with at least two rollouts, which may lack rewards."""


def groups_seen(report: StepReport) -> GroupsSeen:
    """Return the groups of a step from its report.

    Raises:
        ConfigError: the batch has no groups.
    """
    of_peers = "peers" in report.columns  # parts of groups, such as roles, are compared
    texts = [report.texts[name] for name in ("prompt", "ground_truth") if name in report.texts]
    report = report.as_compared
    groups, each = report.groups, report.rollouts
    if not groups:
        raise ConfigError("a plan needs a column of group ids; the dump has none. Set source.group_by")
    scored = np.flatnonzero(has_reward(each))
    ids, index, number = np.unique(each["group"][scored], return_inverse=True, return_counts=True)
    several = number > 1
    rows = scored[several[index]]
    by_id = np.argsort(groups["id"])
    at = by_id[np.searchsorted(groups["id"][by_id], ids[several])]
    prompt = np.full(len(at), -1)
    if not of_peers and "prompt" in report.texts:
        for k, row in enumerate(groups["row"][at].tolist()):
            said = "\0".join(text[row] for text in texts).encode("utf-8", "surrogatepass")
            prompt[k] = int.from_bytes(blake2b(said, digest_size=7).digest(), "big")  # ≥ 0 in int64
    return GroupsSeen(
        equal=groups["zero_variance"][at],
        prompt=prompt,
        step=np.full(len(at), report.step),
        group=(np.cumsum(several) - 1)[index[several[index]]],
        rewards=each["reward"][rows],
        values=compared_values(report.columns, each, each_reward=report.each_reward)[rows],
        compared=np.array([(groups["rollouts"] > 1).sum()]),
    )


def tabulate_group_sizes(config: DictConfig, output: Path, console: Console | None = None) -> TaskResult:
    """Print the share of uninformative groups by group size, from the rewards of a dump under a recipe.

    The recipe runs as in ``task=replay``. Rewards are compared after its shaping and weights, even in groups
    that the recipe leaves out. If the dump has tokens, the cost of its rows as prefix trees is printed, too.

    Args:
        config: the configuration, composed with ``task=plan``.
        output: folder for ``config.yaml`` and ``plan.json``.
        console: where to print; None: standard output.

    Returns:
        The share of uninformative groups in the dump, like ``frac_reward_zero_std`` of a replay, and the
        numbers of ``plan.json``.

    Raises:
        ConfigError: ``source.path`` is missing, a group size is not an integer ≥ 1, or no group has two
            rollouts with rewards.
        SourceError: a file cannot be read.
        BatchError: a stage refused the first steps.
        StepsFailed: some steps failed, and ``source.skip_bad`` does not allow it. All files are written by
            then.
    """
    console = console or Console()
    sizes = sorted({*sizes_of_groups(config, "plan.group_sizes")})
    tokens, pipeline = SharedTokens({}, {}), build_pipeline(config.pipeline)
    read = DumpSteps(open_configured(config), console)

    def seen_in(step: int, batch: TensorDictBase) -> tuple[GroupsSeen, SharedTokens]:
        found = groups_seen(make_report(pipeline.run(batch), step=step, solved=config.report.solved))
        ids = [name for name in ("group_id", "rollout_id") if has_key(batch, name)]
        return found, count_shared_tokens(batch, {name: batch.get(name).flatten().numpy() for name in ids})

    steps = []
    for found_here, counted in read.results(seen_in):
        steps.append(found_here)
        tokens += counted
    start = np.cumsum([0, *(len(one.equal) for one in steps)])
    group = np.concatenate([one.group + first for one, first in zip(steps, start[:-1], strict=True)])
    seen = GroupsSeen(*(np.concatenate(column) for column in zip(*steps, strict=True)))._replace(group=group)
    if not len(seen.equal):
        raise ConfigError(
            "a plan needs groups with at least two rollouts with rewards; found none in the dump"
        )
    found = show_group_sizes(seen, sizes, config.report.solved, console)
    numbers = tokens.numbers()
    if words := said_of_trees(numbers):
        console.print(words, highlight=False)
    failed = [each._asdict() for each in read.failed]
    found |= {"tokens": numbers, "failed_steps": failed}
    write_files(config, output, {"plan.json": json_text(found, indent=1)})
    read.show()
    print_files(console, output, "all numbers: plan.json. A plan has no page")
    read.end()
    return TaskResult(found["uninformative"], found, read.counted)


def show_group_sizes(
    seen: GroupsSeen, sizes: Sequence[int], solved: float, console: Console
) -> dict[str, Any]:
    """Print a table with a line for each range of solve rates or of spreads, and a column for each size.

    Half of the rollouts of a prompt decide in which line the prompt is (:func:`choosing_half`). The numbers
    of the line are from the other half, so they are unbiased estimates. The line ``all`` has all rollouts.

    Args:
        seen: the groups.
        sizes: group sizes, ascending.
        solved: least reward of a solved rollout.
        console: where to print.

    Returns:
        All numbers, in the form of ``plan.json``.
    """
    pool, width = pools_of(seen.prompt, seen.step, seen.rewards, seen.group)
    rollouts = np.bincount(seen.group)
    chances, known = chances_of_sizes(seen.values, seen.group, pool, sizes)
    choose = choosing_half(pool[seen.group], seen.rewards)
    name, lines = lines_of(seen, pool, solved, choose)
    owner, count = different_values(seen.values[~choose], pool[seen.group][~choose])
    others = np.stack([chance_of_equal(count, owner, size)[pool] for size in sizes])
    enough = np.stack([(np.bincount(owner, count) >= size)[pool] for size in sizes])
    if not (enough.any(1) & (np.array(sizes) > 1)).any():
        lines = []
    columns = [
        FittedColumn(f"G={size}" + "*" * bool((rollouts < size).any()), right=True, leaves=size)
        for size in sizes
    ]
    head = [FittedColumn(name, gives="wrap"), FittedColumn("groups", right=True)]
    table = FittedTable(
        [*head, *columns], "the chance that all rewards of a group are equal, by group size G"
    )
    by_line = []
    for label, inside in lines:
        if inside.any():
            found = {
                str(size): {"at_most": float(others[k, inside].mean()), "estimated": True}
                for k, size in enumerate(sizes)
                if enough[k, inside].all()
            }
            cells = [f"{found[each]['at_most']:.0%}" if each in found else "–" for each in map(str, sizes)]
            table.add(label, f"{inside.sum():,}", *cells)
            by_line.append({"range": label, "groups": int(inside.sum()), "chance_of_equal": found})
    # Estimates from a group and from its pool differ by chance, so without this a chance could rise with G.
    mean = np.minimum.accumulate(chances.mean(1)).tolist()
    bound = ["≤" * (not each) for each in known.all(1)]
    cells = [f"{mark}{chance:.0%}" for mark, chance in zip(bound, mean, strict=True)]
    table.add("all", f"{len(pool):,}", *cells, style="bold")
    found = {
        str(size): {"at_most": chance, "estimated": not mark}
        for size, chance, mark in zip(sizes, mean, bound, strict=True)
    }
    by_line.append({"range": "all", "groups": len(pool), "chance_of_equal": found})
    needed = rollouts_needed(sizes, mean)
    digits = digits_apart(needed)
    cells = [
        f"{mark}{count:,.{digits}f}" if count < inf else "∞"
        for mark, count in zip(bound, needed, strict=True)
    ]
    table.add("rollouts per informative group", "", *cells)
    console.print(table)
    console.print(Text(HALVES if lines else NO_HALVES.format(name.partition(",")[0])))
    share, span = float(seen.equal.sum() / seen.compared.sum()), len(np.unique(seen.step))
    pooled = len(np.unique(pool)) < len(pool)
    if (rollouts < sizes[-1]).any():
        console.print(Text(_said_of_pools(span, width, pooled)))
    least, most = rollouts.min(), rollouts.max()
    each = least if least == most else f"{least} to {most}"
    text = f"{share:.0%} of the groups in the dump are uninformative under this recipe. "
    console.print(Text(f"{text}Groups have {each} rollouts each."))
    console.print(Text(advised(sizes, mean, bound)))
    return {
        "groups": len(seen.equal),
        "uninformative": share,
        "steps": span,
        "pooled_steps": width if pooled else 1,
        "prompts": len(np.unique(pool)),
        "rollouts_per_informative_group": [each if each < inf else None for each in needed],
        "quantity": name,
        "ranges": by_line,
    }


def advised(sizes: Sequence[int], chances: Sequence[float], bound: Sequence[str]) -> str:
    """Say what to do. If several sizes need equally many rollouts, the greatest one is named.

    Args:
        sizes: group sizes, ascending.
        chances: the chance for each size that all rewards of a group are equal. They never rise.
        bound: ``≤`` for each size whose chance is an upper bound, else empty.

    Example:
        >>> advised([2, 4, 8, 16], [0.65, 0.37, 0.19, 0.19], ["", "", "", "≤"])  # doctest: +ELLIPSIS
        'What to do: set the group size from 2 to 8. Groups of 2 need ... (5.7). Groups of 8 have ... (81%).'
    """
    if min(chances) == 1:
        return (
            "What to do: no group size helps, since the rewards of each prompt are equal. Use other prompts."
        )
    needed = rollouts_needed(sizes, chances)
    digits = digits_apart(needed)
    needed = [round(number, digits) for number in needed]  # as the table shows them
    few = max(at for at, number in enumerate(needed) if number == min(needed))
    number = f"{'at most ' * bool(bound[few])}{needed[few]:,.{digits}f}"
    words = f"Groups of {sizes[few]} need the fewest rollouts for each informative group ({number})."
    most = list(chances).index(min(chances))
    if sizes[most] <= sizes[few]:
        return f"What to do: set the group size to {sizes[few]}. {words}"
    share = f"{'at least ' * bool(bound[most])}{1 - chances[most]:.0%}"
    return (
        f"What to do: set the group size from {sizes[few]} to {sizes[most]}. {words} Groups of {sizes[most]} "
        f"have the greatest share of rollouts in informative groups ({share})."
    )


def rollouts_needed(sizes: Sequence[int], chances: Sequence[float]) -> list[float]:
    """The rollouts for each informative group: G / (1 − p), with the chance p that a group is uninformative.

    Example:
        >>> rollouts_needed([2, 4], [0.75, 1.0])
        [8.0, inf]
    """
    return [size / (1 - chance) if chance < 1 else inf for size, chance in zip(sizes, chances, strict=True)]


def digits_apart(needed: Sequence[float]) -> int:
    """The number of decimals, 0 or 1, that the least two numbers need to look different.

    Example:
        >>> digits_apart([5.7, 6.3, 9.9]), digits_apart([5.7, 9.9]), digits_apart([8.0, 8.0])
        (1, 0, 0)
    """
    least, next_ = [*sorted(each for each in needed if each < inf), inf, inf][:2]
    return int(next_ < inf and round(least) == round(next_) and round(least, 1) != round(next_, 1))


def _said_of_pools(steps: int, width: int, pooled: bool) -> str:
    """Explain the columns with a star."""
    if not pooled:
        return "* upper bounds: a prompt has too few rollouts for an estimate."
    if width == 1:
        return f"* counts all rollouts of a prompt in one step. {BOUND}"
    window = f"the {steps:,} steps" if width == steps else f"{width:,} consecutive steps"
    return (
        f"* counts all rollouts of a prompt in {window}, as if of one policy, since its rewards do not "
        f"change there by more than chance. {BOUND}"
    )


def lines_of(
    seen: GroupsSeen, pool: np.ndarray, solved: float, choose: np.ndarray
) -> tuple[str, list[tuple[str, np.ndarray]]]:
    """Return the quantity that sorts groups into lines of the table; and for each line a label and (P,) bool.

    The quantity is the solve rate of the prompt if rewards have two values, where the greater one is solved,
    or if at least a tenth of the rollouts are on each side of `solved`. Otherwise it is the standard
    deviation of the prompt's rewards. Then there are no lines if a prompt has fewer than two rollouts to
    choose its line.

    Args:
        seen: the groups.
        pool: (P,) the pool of each group. A prompt has the rollouts of its pool.
        solved: least reward of a solved rollout.
        choose: (R,) bool, True for the rollouts that decide in which line their prompt is.
    """
    values = np.unique(seen.rewards)
    if len(values) == 2:
        solved = values[1]
    by_rate = len(values) == 2 or PARTS <= (seen.rewards >= solved).mean() <= 1 - PARTS
    rewards, of = seen.rewards[choose], pool[seen.group][choose]
    number = np.bincount(of)
    rate = (np.bincount(of, rewards >= solved) / number)[pool]
    if by_rate:
        lines = [
            (f"{low:g}", rate == low)
            if low == high
            else (f"{low:g} to {high:g}", (rate > low) & (rate <= high) & (rate < 1))
            for low, high in RATES
        ]
        return f"solve rate, at {solved:g}", lines
    if number.min() < 2:
        return "std of the rewards", []
    mean = (np.bincount(of, rewards) / number)[of]
    apart = np.bincount(of, rewards != rewards[np.unique(of, return_index=True)[1]][of]) > 0
    squares = np.bincount(of, (rewards - mean) ** 2)
    spread = np.where(apart, np.sqrt(squares / (number - 1)), 0.0)[pool]
    positive = spread[spread > 0]
    ends = np.unique([0.0, *(np.quantile(positive, (0.25, 0.5, 0.75, 1)) if len(positive) else ())])
    lines = [(f"{a:.3g} to {b:.3g}", (spread > a) & (spread <= b)) for a, b in pairwise(ends)]
    return "std of the rewards", [("0", spread == 0), *lines]
