"""The task ``plan``: the share of groups that would be uninformative at other group sizes."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from math import ceil, inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text
from tensordict import TensorDictBase

from headrace.pipeline.load import ConfigError, build_pipeline
from headrace.pipeline.report import SharedTokens, StepReport, count_shared_tokens, make_report, said_of_trees
from headrace.pipeline.report.groups import compared_values, has_reward
from headrace.pipeline.report.shared_tokens import linear_of
from headrace.pipeline.tables import FittedColumn, FittedTable
from headrace.pipeline.user_turn import prompt_label
from headrace.pipeline.valid_json import json_text
from headrace.transforms.schema import has_key

from .chances import chances_of_sizes, pools_of
from .dump_steps import DumpSteps
from .source import open_configured, print_files, sizes_of_groups, write_files

RATES = ((0.0, 0.0), (0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0), (1.0, 1.0))
LISTED = 500  # prompts of a list in plan.json
PARTS = 0.1  # least share of rollouts on each side of `solved`; below it, solve rates are not shown


class GroupsSeen(NamedTuple):
    """The groups of a dump that have at least two rollouts with rewards, as a recipe compares them.

    `equal` groups are those of TRL's ``frac_reward_zero_std``: all compared rewards of the group are equal.
    """

    equal: np.ndarray
    """(P,) bool, all compared rewards are equal."""
    prompt: np.ndarray
    """(P,) a number of the prompt and its ground truth; -1: the dump has no texts."""
    label: np.ndarray
    """(P,) what the prompt is listed by, as ``headrace view`` lists it."""
    step: np.ndarray
    """(P,) the step."""
    group: np.ndarray
    """(R,) the group of each rollout, from 0 to P − 1."""
    rewards: np.ndarray
    """(R,) rewards of all rollouts."""
    values: np.ndarray
    """(R, K) compared rewards, NaN for missing ones."""
    compared: np.ndarray
    """(steps,) number of groups with at least two rollouts, with or without rewards."""


def groups_seen(report: StepReport) -> GroupsSeen:
    """Return the groups of a step from its report.

    Raises:
        ConfigError: the batch has no groups.
    """
    of_peers = "peers" in report.columns  # groups are parts of a prompt's group, such as roles
    texts = [report.texts[name] for name in ("prompt", "ground_truth") if name in report.texts]
    report = report.as_compared
    groups, each = report.groups, report.rollouts
    if not groups:
        raise ConfigError("task=plan needs a column of group ids; the dump has none. Set source.group_by")
    scored = np.flatnonzero(has_reward(each))
    ids, index, number = np.unique(each["group"][scored], return_inverse=True, return_counts=True)
    several, index = number > 1, index.reshape(-1)
    rows = scored[several[index]]
    by_id = np.argsort(groups["id"])
    at = by_id[np.searchsorted(groups["id"][by_id], ids[several])]
    prompt, label = np.full(len(at), -1), np.full(len(at), "", dtype=object)
    if not of_peers and "prompt" in report.texts:
        for k, row in enumerate(groups["row"][at].tolist()):
            said = "\0".join(text[row] for text in texts).encode("utf-8", "surrogatepass")
            prompt[k] = int.from_bytes(blake2b(said, digest_size=8).digest(), "big") >> 1
            label[k] = prompt_label(report.texts["prompt"][row])
    return GroupsSeen(
        equal=groups["zero_variance"][at],
        prompt=prompt,
        label=label,
        step=np.full(len(at), report.step),
        group=(np.cumsum(several) - 1)[index[several[index]]],
        rewards=each["reward"][rows],
        values=compared_values(report.columns, each, each_reward=report.each_reward)[rows],
        compared=np.array([(groups["rollouts"] > 1).sum()]),
    )


def tabulate_group_sizes(config: DictConfig, output: Path, console: Console | None = None) -> float:
    """Print the share of uninformative groups by group size, from the rewards of a dump under a recipe.

    It runs the recipe as ``task=replay`` does, and compares rewards after its shaping and weights, also those
    of groups that it leaves out. If
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
        BatchError: a stage refused the first steps.
        StepsFailed: some steps failed, and ``source.skip_bad`` does not allow it. All is written by then.
    """
    console = console or Console()
    sizes = sizes_of_groups(config, "plan.group_sizes")
    tokens, pipeline = SharedTokens({}, {}), build_pipeline(config.pipeline)
    read = DumpSteps(open_configured(config), console)

    def seen_in(step: int, batch: TensorDictBase) -> tuple[GroupsSeen, SharedTokens]:
        found = groups_seen(make_report(pipeline.run(batch), step=step, solved=config.report.solved))
        ids = [name for name in ("group_id", "rollout_id") if has_key(batch, name)]
        return found, count_shared_tokens(batch, {name: batch.get(name).reshape(-1).numpy() for name in ids})

    steps = []
    for found_here, counted in read.results(seen_in):
        steps.append(found_here)
        tokens += counted
    start = np.cumsum([0, *(len(one.equal) for one in steps)])
    group = np.concatenate([one.group + first for one, first in zip(steps, start[:-1], strict=True)])
    seen = GroupsSeen(*(np.concatenate(column) for column in zip(*steps, strict=True)))._replace(group=group)
    if not len(seen.equal):
        raise ConfigError(
            "task=plan needs groups with at least two rollouts with rewards; found none in the dump"
        )
    found = show_group_sizes(seen, sizes, config.report.solved, console)
    numbers = tokens.numbers(linear=linear_of(pipeline.stages.values()))
    if words := said_of_trees(numbers):
        console.print(words, highlight=False)
    failed = [each._asdict() for each in read.failed]
    written = json_text(found | {"tokens": numbers, "failed_steps": failed}, indent=1)
    write_files(config, output, {"plan.json": written})
    read.show()
    print_files(console, output)
    read.end()
    return float(found["uninformative"])


def show_group_sizes(
    seen: GroupsSeen, sizes: Sequence[int], solved: float, console: Console
) -> dict[str, Any]:
    """Print a table with a line for each range of solve rates or of spreads, and a column for each size.

    Args:
        seen: the groups.
        sizes: group sizes.
        solved: least reward of a solved rollout.
        console: where to print.

    Returns:
        All numbers, as ``plan.json`` has them.
    """
    # 1. The chances at each size and at the usual size of the dump.
    pool, width = pools_of(seen.prompt, seen.step, seen.rewards, seen.group)
    rollouts = np.bincount(seen.group)
    usual = int(np.bincount(rollouts).argmax())
    tried = sorted({*sizes, usual})
    chances = chances_of_sizes(seen.values, seen.group, pool, np.array(tried))
    wanted = max(round(float(seen.compared.mean())), 1)
    share = float(seen.equal.sum() / seen.compared.sum())
    prompts = [
        [_prompts(wanted, bound) for bound in pair] for pair in zip(chances.lower, chances.upper, strict=True)
    ]
    of = {size: k for k, size in enumerate(tried)}

    # 2. The table.
    name, lines = lines_of(seen, pool, solved)
    columns = [
        FittedColumn(
            f"G={size}" + "*" * bool((rollouts < size).any()), right=True, leaves=tried.index(size) + 1
        )
        for size in sizes
    ]
    head = [FittedColumn(name, gives="wrap"), FittedColumn("groups", right=True)]
    table = FittedTable(
        [*head, *columns], "the chance that all rewards of a group are equal, by group size G"
    )
    by_line = []
    for label, inside in lines:
        if inside.any():
            line = np.minimum.accumulate(chances.each[:, inside].mean(1))
            exact = chances.known[:, inside].all(1)
            cells = [f"{'' if exact[of[size]] else '≤'}{line[of[size]]:.0%}" for size in sizes]
            table.add(label, f"{inside.sum():,}", *cells)
            each = {str(size): {"at_most": line[k], "estimated": bool(exact[k])} for size, k in of.items()}
            by_line.append({"range": label, "groups": int(inside.sum()), "chance_of_equal": each})
    shares = [_range(f"{chances.lower[k]:.0%}", f"{chances.upper[k]:.0%}") for k in range(len(tried))]
    needed = [_range(*(f"{count:,.0f}" for count in pair)) for pair in prompts]
    cost = [
        _range(*(f"{count * size:,.0f}" for count in pair)) for size, pair in zip(tried, prompts, strict=True)
    ]
    table.add("all", f"{len(rollouts):,}", *(shares[of[size]] for size in sizes), style="bold")
    enough = [_at_most(*pair) for pair in prompts]
    spent = [_at_most(*(count * size for count in pair)) for size, pair in zip(tried, prompts, strict=True)]
    table.add(f"prompts for {wanted:,} informative groups", "", *(enough[of[size]] for size in sizes))
    table.add("their rollouts", "", *(spent[of[size]] for size in sizes))
    console.print(table)

    # 3. What the estimates are made of, and the conclusion.
    span, pooled = len(np.unique(seen.step)), len(np.unique(pool)) < len(pool)
    if (rollouts < max(sizes)).any():
        console.print(Text(_said_of_pools(span, width, pooled, bool(chances.known.all()))))
    console.print(
        f"{share:.0%} of the groups in the dump are uninformative under "
        f"this recipe, with {rollouts.mean():.1f} rollouts each.",
        highlight=False,
    )
    by_prompt = listed_prompts(seen)
    always, vary = (by_prompt[kind]["prompts"] for kind in ("always_equal", "vary"))
    if always:
        console.print(
            f"{always:,} of {always + vary:,} prompts have equal rewards in each of their groups; plan.json "
            "lists them.",
            highlight=False,
        )
    larger, smaller = [size for size in tried if size > usual], [size for size in tried if size < usual]
    if other := min(larger, default=max(smaller, default=None)):
        k, now = of[other], of[usual]
        least = prompts[now][0]
        console.print(
            Text(
                f"At {other} rollouts per prompt, {shares[k]} of the groups are uninformative instead of "
                f"{shares[now]}: for {wanted:,} informative groups per step, take {needed[k]} prompts "
                f"({cost[k]} rollouts) instead of {needed[now]} ({cost[now]})."
                f"{_price(*(count * other / (least * usual) for count in prompts[k]))}",
                "bold",
            )
        )
    return {
        "groups": len(seen.equal),
        "uninformative": share,
        "group_size": usual,
        "informative_groups": wanted,
        "steps": span,
        "pooled_steps": width if pooled else 1,
        "prompts": len(np.unique(pool)),
        "sizes": {
            str(size): {
                "chance_of_equal": [chances.lower[k], chances.upper[k]],
                "standard_error": chances.error[k],
                "groups_estimated": int(chances.known[k].sum()),
                "prompts": [None if count == inf else int(count) for count in prompts[k]],
                "rollouts": [None if count == inf else int(count) * size for count in prompts[k]],
            }
            for size, k in of.items()
        },
        "quantity": name,
        "ranges": by_line,
        "by_prompt": by_prompt,
    }


def listed_prompts(seen: GroupsSeen) -> dict[str, Any]:
    """The prompts whose groups always have equal rewards, and those of which some vary: how many, and a list.

    A list has at most :data:`LISTED` prompts, the lowest mean reward first.
    """
    here = seen.prompt >= 0
    _, first, of = np.unique(seen.prompt[here], return_index=True, return_inverse=True)
    of_group = np.full(len(here), -1)
    of_group[here] = of.reshape(-1)
    mine = of_group[seen.group]
    known = mine >= 0
    rollouts = np.bincount(mine[known], minlength=len(first))
    reward = np.bincount(mine[known], seen.rewards[known], minlength=len(first)) / rollouts
    groups = np.bincount(of_group[here], minlength=len(first))
    equal = np.bincount(of_group[here], seen.equal[here], minlength=len(first))
    steps = np.bincount(
        np.unique(np.stack([of_group[here], seen.step[here]]), axis=1)[0], minlength=len(first)
    )
    label = seen.label[here][first]
    found = {}
    for name, chosen in (("always_equal", equal == groups), ("vary", equal < groups)):
        at = sorted(chosen.nonzero()[0].tolist(), key=lambda k: (reward[k], label[k]))
        listed = [
            {
                "label": label[k],
                "steps": int(steps[k]),
                "groups": int(groups[k]),
                "equal_groups": int(equal[k]),
                "rollouts": int(rollouts[k]),
                "reward": float(reward[k]),
            }
            for k in at[:LISTED]
        ]
        found[name] = {"prompts": len(at), "listed": listed}
    return found


def _prompts(wanted: int, share: float) -> float:
    """Prompts of which `wanted` have informative groups, on average, if a share is uninformative."""
    return ceil(wanted / (1 - share) - 1e-9) if share < 1 else inf


def _at_most(low: float, high: float) -> str:
    """The greater of two counts as text, marked as a bound if they differ.

    >>> _at_most(24, 24), _at_most(2200, 3300), _at_most(9, inf)
    ('24', '≤3,300', '∞')
    """
    return "∞" if high == inf else f"{'≤' * (low < high)}{high:,.0f}"


def _price(least: float, most: float) -> str:
    """What an informative group costs at another group size, as a multiple of what it costs now.

    >>> _price(1.45, 1.45)
    ' Each informative group then costs 45% more rollouts. Choose prompts that are solved sometimes instead.'
    >>> _price(0.5, 0.8), _price(0.9, 1.2), _price(0, 0)
    (' Each informative group then costs 20–50% fewer rollouts.', '', '')
    """
    if least > 1:
        more = _range(f"{least - 1:.0%}", "inf" if most == inf else f"{most - 1:.0%}")
        said = f" Each informative group then costs {more} more rollouts."
        return f"{said} Choose prompts that are solved sometimes instead."
    if 0 < most < 1:
        fewer = _range(f"{1 - most:.0%}", f"{1 - least:.0%}")
        return f" Each informative group then costs {fewer} fewer rollouts."
    return ""


def _range(low: str, high: str) -> str:
    """Two bounds as text; one if they read alike.

    >>> _range("27%", "51%"), _range("24", "24"), _range("9", "inf"), _range("inf", "inf")
    ('27–51%', '24', '≥9', '∞')
    """
    if low == high:
        return low.replace("inf", "∞")
    return f"≥{low}" if high == "inf" else f"{low.removesuffix('%')}–{high}"


def _said_of_pools(steps: int, width: int, pooled: bool, known: bool) -> str:
    """What the columns with a star are made of."""
    if not pooled:
        said = "* bounds: a prompt has too few rollouts for an estimate."
    elif width == 1:
        said = "* from all rollouts of a prompt in one step."
    elif width == steps:
        said = (
            f"* from all rollouts of a prompt in the {steps:,} steps, as if of one policy: its rewards do "
            "not differ more between steps than by chance."
        )
    else:
        said = (
            f"* from all rollouts of a prompt in {width:,} consecutive steps, as if of one policy. Over more "
            "steps, its rewards change by more than chance."
        )
    return said if known or not pooled else f"{said} Bounds where these are fewer than G."


def lines_of(seen: GroupsSeen, pool: np.ndarray, solved: float) -> tuple[str, list[tuple[str, np.ndarray]]]:
    """Return the name of the quantity in the table's first column, and for each line a label and (P,) bool.

    The quantity is the solve rate of the prompt if rewards have two values, where the greater one is solved,
    or if at least a tenth of the rollouts are on each side of `solved`. Else it is the standard deviation of
    its rewards. A prompt has the rollouts of its pool.
    """
    values, of = np.unique(seen.rewards), pool[seen.group]
    number = np.bincount(of)
    if len(values) == 2:
        solved = values[1]
    reached = seen.rewards >= solved
    rate = (np.bincount(of, reached) / number)[pool]
    if len(values) == 2 or PARTS <= reached.mean() <= 1 - PARTS:
        lines = [
            (f"{low:g}", rate == low)
            if low == high
            else (f"{low:g} to {high:g}", (rate > low) & (rate <= high) & (rate < 1))
            for low, high in RATES
        ]
        return f"solve rate, at {solved:g}", lines
    mean = (np.bincount(of, seen.rewards) / number)[of]
    apart = np.bincount(of, seen.rewards != seen.rewards[np.unique(of, return_index=True)[1]][of]) > 0
    squares = np.bincount(of, (seen.rewards - mean) ** 2)
    spread = np.where(apart, np.sqrt(squares / np.maximum(number - 1, 1)), 0.0)[pool]
    positive = spread[spread > 0]
    ends = np.unique([0.0, *(np.quantile(positive, (0.25, 0.5, 0.75, 1)) if len(positive) else ())])
    lines = [(f"{a:.3g} to {b:.3g}", (spread > a) & (spread <= b)) for a, b in pairwise(ends)]
    return "std of the rewards", [("0", spread == 0), *lines]
