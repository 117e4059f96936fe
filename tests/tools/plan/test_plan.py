"""``task=plan`` gives the share of uninformative groups, and estimates this share for other group sizes."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections import Counter, defaultdict
from functools import partial

import numpy as np
import pytest
import torch
from command import told
from composed import configure
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.pipeline import ConfigError, Pipeline, build_pipeline, make_report, write_dump
from headrace.pipeline.tools.dumps.readers import open_dump
from headrace.pipeline.tools.plan import tabulate_group_sizes
from headrace.pipeline.tools.plan.chances import (
    chance_of_equal,
    chances_of_sizes,
    choosing_half,
    different_values,
    excess_between,
    pools_of,
)
from headrace.pipeline.tools.plan.group_sizes import (
    GroupsSeen,
    _said_of_pools,
    advised,
    digits_apart,
    groups_seen,
    lines_of,
    show_group_sizes,
)
from headrace.pipeline.tools.report import StepReport
from headrace.transforms import BatchError

pytestmark = pytest.mark.slow


planned = partial(told, tabulate_group_sizes)


def configured(dump, *words):
    gate = ("pipeline.stages.gate.group_size=2", "pipeline.stages.gate.on_incomplete=drop")
    return configure("config", "task=plan", f"source.path={dump}", *gate, *words)


# -- chances -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=1, max_size=7), st.integers(1, 9))
def test_the_chance_of_equal_rewards_equals_their_share_of_all_subsets(rewards, size):
    counts = Counter(rewards)
    [chance] = chance_of_equal(np.array([*counts.values()]), np.zeros(len(counts), int), size)
    draws = list(itertools.combinations(rewards, min(size, len(rewards))))
    if size == 1:
        assert chance == 1
    assert chance == pytest.approx(np.mean([len(set(draw)) == 1 for draw in draws]))


def test_the_chance_of_each_group_depends_on_its_own_rewards_only():
    count, group = np.array([2, 2, 1, 3]), np.array([0, 1, 1, 2])
    assert chance_of_equal(count, group, 3).tolist() == pytest.approx([1.0, 0.0, 1.0])
    assert chance_of_equal(count, group, 2).tolist() == pytest.approx([1.0, 1 / 3, 1.0])


def test_a_constant_reward_with_missing_values_distinguishes_no_rollouts():
    values = np.array([[1.0, np.nan], [1.0, 0.0], [1.0, 2.0], [1.0, np.nan]])
    group, count = different_values(values, np.array([0, 0, 1, 1]))
    assert (group.tolist(), count.tolist()) == ([0, 1], [2, 2])
    group, count = different_values(values, np.zeros(4, int))
    assert sorted(count.tolist()) == [1, 1, 2]


# -- pooled over steps -------------------------------------------------------------------------------

SIZES = [2, 4, 8, 16, 32, 64]


def simulated(rates, draws, size, seed):
    """(R, 1) rewards of 0 or 1, the group of each rollout, and the prompt and step of each group.

    Args:
        rates: (steps, prompts) solve rates.
        draws: number of draws of each prompt: prompt i is drawn in the first `draws[i]` steps.
        size: number of rollouts of a group.
        seed: seed of the rewards.
    """
    rng = np.random.default_rng(seed)
    pairs = [(step, prompt) for prompt, n in enumerate(draws) for step in range(n)]
    step, prompt = np.array(pairs).T
    group = np.repeat(np.arange(len(step)), size)
    rate = np.asarray(rates)[step, prompt]
    return (rng.random(len(group)) < rate[group]).astype(float)[:, None], group, prompt, step


def truth(rate, size):
    """The chance that all rewards of a group are equal, in the mean over the solve rates."""
    return float(np.mean(rate**size + (1 - rate) ** size))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(2, 4), st.integers(0, 9))
def test_no_chance_rises_with_the_group_size(draws, size, seed):
    rates = np.random.default_rng(seed).random((max(draws), len(draws)))
    values, group, prompt, step = simulated(rates, draws, size, seed)
    pool, _ = pools_of(prompt, step, values[:, 0], group)
    found, known = chances_of_sizes(values, group, pool, range(1, 20))
    own, pooled = found[:size], found[size:]
    assert all((np.diff(each, axis=0) <= 1e-12).all() for each in (own, pooled))  # for each group
    assert ((found >= 0) & (found <= 1)).all()
    assert known[:size].all()


def test_a_group_is_not_pooled_for_sizes_up_to_its_own():
    values, group, prompt, _ = simulated(np.full((3, 4), 0.4), [3] * 4, 5, 1)
    alone, _ = chances_of_sizes(values, group, np.arange(12), range(1, 6))
    pooled, _ = chances_of_sizes(values, group, prompt, range(1, 6))
    assert (alone == pooled).all()
    draws = values.reshape(12, 5)
    for size, found in zip(range(1, 6), alone, strict=True):
        subsets = [[len(set(one)) == 1 for one in itertools.combinations(row, size)] for row in draws]
        assert found == pytest.approx(np.mean(subsets, 1))


RATES = np.random.default_rng(5).beta(0.2, 0.3, 400)  # most prompts are nearly always or nearly never solved


def test_the_pooled_chance_equals_the_share_in_a_simulation():
    values, group, prompt, step = simulated(np.tile(RATES, (8, 1)), [8] * 400, 8, 2)
    pool, width = pools_of(prompt, step, values[:, 0], group)
    assert width == 8
    found, known = chances_of_sizes(values, group, pool, SIZES)
    assert known.all()
    drawn = np.random.default_rng(3).random((200, 400, 64)) < RATES[:, None]
    for k, size in enumerate(SIZES):
        solved = drawn[..., :size].sum(2)
        simulation = ((solved == 0) | (solved == size)).mean()
        assert simulation == pytest.approx(truth(RATES, size), abs=0.01)
        assert found[k].mean() == pytest.approx(simulation, abs=0.02)


def test_an_upper_bound_is_not_below_the_truth():
    """The mean over 400 groups may be below the truth by 3 standard errors of std / √400."""
    for seed, rate in itertools.product(range(3), (RATES, np.full(400, 0.02), np.linspace(0, 1, 400))):
        values, group, _, _ = simulated(rate[None], [1] * 400, 8, seed)
        found, known = chances_of_sizes(values, group, np.arange(400), SIZES)
        assert known.all(1).tolist() == [True] * 3 + [False] * 3
        for k, size in enumerate(SIZES):
            assert truth(rate, size) <= found[k].mean() + 3 * found[k].std() / 20, (seed, rate)


# -- compared with a replay --------------------------------------------------------------------------

RECIPES = {
    "grpo": (),
    "dapo": (
        "pipeline.stages.overlong.max_length=4",
        "pipeline.stages.overlong.cache=3",
        "pipeline.stages.filter.action=drop",
    ),
    "gdpo": ("pipeline.stages.collapse.columns=2",),
    "grpo weighted": ("pipeline.stages.collapse.columns=2", "pipeline.stages.collapse.weights=[1,0.5]"),
    "grpo missing": ("pipeline.stages.collapse.missing=skip",),
}


def dumped(make_batch, folder, several):
    """Write two steps of groups with equal or different rewards, with fan-out, and with a failed rollout."""
    reward = torch.tensor([1.0, 1, 0, 1, 1, 0, 0, 0.25, 0.75, 0.5, 0.5, 3])
    batch = make_batch(reward.tolist(), [0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5], [0, 1, 2, 3, 3, *range(4, 11)])
    batch["status"] = torch.tensor([0] * 10 + [3, 0])
    mask = batch["masks", "all_assistant_mask"]
    mask[5, :2] = False
    if several:
        other = torch.tensor([0.0, 1, 2, 0, 0, 1, 1, 1, 0, 0, 0, 0])
        batch["next", "reward"] = torch.stack([reward, other], 1)
    for step in range(2):
        write_dump(make_report(Pipeline({}).run(batch[: 12 - 5 * step]), step=step), folder)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_share_equals_frac_reward_zero_std_of_a_replay(recipe, make_batch, tmp_path):
    words = (f"pipeline={recipe.split()[0]}", *RECIPES[recipe])
    dumped(make_batch, tmp_path, several="columns=2" in str(words))
    config = configured(tmp_path, *words)
    share, text = planned(config, tmp_path)
    reports = [make_report(build_pipeline(config.pipeline).run(batch)) for _, batch in open_dump(tmp_path)]
    compared = np.array([(report.groups["rollouts"] > 1).sum() for report in reports])
    zero = np.array([report.numbers["frac_reward_zero_std"] for report in reports])
    assert share == pytest.approx((zero * compared).sum() / compared.sum())
    assert f"{share:.0%} of the groups in the dump are uninformative" in text
    assert 0 < share < 1


# -- lines of the table for prompts with known solve rates ---------------------------------------------

KNOWN = {
    "hard": np.full(60, 0.05),
    "two kinds": np.repeat([0.02, 0.7], 30),
    "uniform": np.linspace(0.01, 0.99, 60),
    "nearly decided": np.random.default_rng(6).beta(0.2, 0.3, 60),
}


def printed(rate, steps, size, seed):
    """For each line of the table, its chances and the solve rates of its groups."""
    values, group, prompt, step = simulated(np.tile(rate, (steps, 1)), [steps] * len(rate), size, seed)
    values = values[np.lexsort((values[:, 0], group))]  # some dumps sort their rows by reward
    equal = np.array([len(set(values[group == each, 0].tolist())) == 1 for each in range(group[-1] + 1)])
    seen = GroupsSeen(equal, prompt, step, group, values[:, 0], values, np.array([len(equal)]))
    found = show_group_sizes(seen, [2, 4, 8], 1.0, Console(file=io.StringIO()))
    pool, _ = pools_of(prompt, step, values[:, 0], group)
    _, lines = lines_of(seen, pool, 1.0, choosing_half(pool[group], values[:, 0]))
    inside = {label: rate[prompt[groups]] for label, groups in lines} | {"all": rate[prompt]}
    return {each["range"]: (each["chance_of_equal"], inside[each["range"]]) for each in found["ranges"]}


# A run compares 142 numbers. By chance, one of them is off by over 3 standard errors in a third of all runs,
# and by over 4 in 1 % of all runs.
@pytest.mark.parametrize(("runs", "within"), [(80, 4), pytest.param(1000, 3, marks=pytest.mark.long)])
@pytest.mark.parametrize(("steps", "size"), [(1, 8), (2, 8), (1, 5)])
@pytest.mark.parametrize("name", KNOWN)
def test_each_printed_chance_is_right_in_the_mean_over_runs(name, steps, size, runs, within):
    """The mean error of an estimate is within some standard errors of 0. That of a bound may be greater.

    The true chance of a line is the mean of p_i^G + (1 − p_i)^G over its prompts i.
    """
    errors = defaultdict(list)
    for seed in range(runs):
        for label, (chances, rate) in printed(KNOWN[name], steps, size, seed).items():
            for each, chance in chances.items():
                error = chance["at_most"] - truth(rate, int(each))
                errors[label, int(each), chance["estimated"]].append(error)
    assert {label for label, _, _ in errors} >= {"0", "all"}
    for (label, each, estimated), found in errors.items():
        if len(found) < runs / 10:  # few runs have this line, so its error is not normal
            continue
        error = np.std(found, ddof=1) / len(found) ** 0.5 + 1e-12
        assert np.mean(found) > -within * error, (label, each, np.mean(found) / error)
        if estimated:
            assert np.mean(found) < within * error, (label, each, np.mean(found) / error)


def test_a_line_has_numbers_only_for_sizes_that_all_its_prompts_allow():
    """Estimates use half of the rollouts. The second prompt has four rollouts, so it allows no group of 4."""
    group = np.repeat([0, 1, 2], [8, 4, 8])
    values = np.repeat([0.0, 0.0, 1.0], [8, 4, 8])[:, None]
    three, step = np.arange(3), np.zeros(3, int)
    seen = GroupsSeen(three >= 0, three, step, group, values[:, 0], values, np.array([3]))
    found = show_group_sizes(seen, [2, 4, 8], 1.0, Console(file=io.StringIO()))
    sizes = {each["range"]: (each["groups"], [*each["chance_of_equal"]]) for each in found["ranges"]}
    assert sizes == {"0": (2, ["2"]), "1": (1, ["2", "4"]), "all": (3, ["2", "4", "8"])}


# -- the table ---------------------------------------------------------------------------------------


def seen_of(rewards, prompt, step, compared=None):
    """The groups with these lists of rewards."""
    sizes, flat = [len(each) for each in rewards], np.concatenate([np.array(each, float) for each in rewards])
    equal = np.array([len({*each}) == 1 for each in rewards])
    group = np.repeat(np.arange(len(rewards)), sizes)
    number = np.array([compared or len(rewards)])
    return GroupsSeen(equal, np.array(prompt), np.array(step), group, flat, flat[:, None], number)


TITLE = "the chance that all rewards of a group are equal, by group size G\n"
HALF = """\
One half of a prompt's rollouts, drawn at random, chooses its line, and the numbers of the line count the
other half. –: the other half has fewer than G rollouts. The line `all` counts all rollouts.
"""
POOLED = f"""\
{TITLE}solve rate, at 1                groups   G=2   G=4  G=8*  G=16*
───────────────────────────────────────────────────────────────
0.5 to 0.75                          2   50%    0%     –      –
1                                    2  100%  100%     –      –
all                                  4   67%   50%   50%   ≤50%
rollouts per informative group             6     8    16    ≤32
{HALF}\
* counts all rollouts of a prompt in the 2 steps, as if of one policy, since its rewards do not change there
by more than chance. ≤: an upper bound, because a prompt has fewer than G rollouts.
50% of the groups in the dump are uninformative under this recipe. Groups have 4 rollouts each.
What to do: set the group size from 2 to 4. Groups of 2 need the fewest rollouts for each informative group
(6). Groups of 4 have the greatest share of rollouts in informative groups (50%).
"""
SPREAD = f"""\
{TITLE}std of the rewards              groups  G=2  G=3
────────────────────────────────────────────────
0                                    2  50%    –
0 to 0.243                           1  33%   0%
0.552 to 0.707                       1   0%    –
all                                  4  45%  34%
rollouts per informative group            4    5
{HALF}\
20% of the groups in the dump are uninformative under this recipe. Groups have 4 to 5 rollouts each.
What to do: set the group size from 2 to 3. Groups of 2 need the fewest rollouts for each informative group
(4). Groups of 3 have the greatest share of rollouts in informative groups (66%).
"""
FEW = f"""\
{TITLE}solve rate, at 1                groups  G=2  G=4*
─────────────────────────────────────────────────
0                                    1    –     –
1                                    1   0%     –
all                                  2  67%  ≤50%
rollouts per informative group            6    ≤8
{HALF}\
* upper bounds: a prompt has too few rollouts for an estimate.
50% of the groups in the dump are uninformative under this recipe. Groups have 2 to 3 rollouts each.
What to do: set the group size from 2 to 4. Groups of 2 need the fewest rollouts for each informative group
(6). Groups of 4 have the greatest share of rollouts in informative groups (at least 50%).
"""
EQUAL = f"""\
{TITLE}solve rate, at 1                groups   G=2
────────────────────────────────────────────
all                                  2  100%
rollouts per informative group             ∞
There are no lines by the solve rate: half of a prompt's rollouts are too few for all of these sizes.
100% of the groups in the dump are uninformative under this recipe. Groups have 2 rollouts each.
What to do: no group size helps, since the rewards of each prompt are equal. Use other prompts.
"""
SOLVED, HALF_SOLVED = [1] * 4, [0, 0, 1, 1]
DIFFERENT = [[0.1] * 4, [0, 0.25, 0.5, 1], [0, 0.5, 0.5, 0.5], [0, 0, 0, 0.125, 0.25]]


@pytest.mark.parametrize(
    ("seen", "sizes", "solved", "text", "found"),
    [
        (
            # Of the second prompt, one of the rollouts that count is solved and three are not: 3 of 6 pairs.
            seen_of([SOLVED, HALF_SOLVED] * 2, [7, 8] * 2, [0, 0, 1, 1]),
            [2, 4, 8, 16],
            1.0,
            POOLED,
            {
                "groups": 4,
                "uninformative": 0.5,
                "steps": 2,
                "pooled_steps": 2,
                "prompts": 2,
                "rollouts_per_informative_group": pytest.approx([6, 8, 16, 32]),
            },
        ),
        (
            # Pairs are equal with the chances 1, 0, 3 of 6 and 3 of 10; threes with 1, 0, 1 of 4, 1 of 10.
            seen_of(DIFFERENT, [1, 2, 3, 4], [0] * 4, 5),
            [2, 3],
            9.0,
            SPREAD,
            {
                "groups": 4,
                "uninformative": 0.2,
                "steps": 1,
                "pooled_steps": 1,
                "prompts": 4,
                "rollouts_per_informative_group": pytest.approx([2 / 0.55, 3 / 0.6625]),
            },
        ),
        (
            seen_of([[0, 0], [0, 1, 1]], [-1, -1], [0, 0]),
            [2, 4],
            1.0,
            FEW,
            {
                "groups": 2,
                "uninformative": 0.5,
                "steps": 1,
                "pooled_steps": 1,
                "prompts": 2,
                "rollouts_per_informative_group": pytest.approx([6, 8]),
            },
        ),
        (
            seen_of([[0, 0], [1, 1]], [-1, -1], [3, 4]),
            [2],
            1.0,
            EQUAL,
            {
                "groups": 2,
                "uninformative": 1.0,
                "steps": 2,
                "pooled_steps": 1,
                "prompts": 2,
                "rollouts_per_informative_group": [None],
            },
        ),
    ],
)
def test_a_plan_is_printed_as_by_hand(seen, sizes, solved, text, found):
    out = io.StringIO()
    numbers = show_group_sizes(seen, sizes, solved, Console(file=out, width=110))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == text.splitlines()
    assert {name: numbers[name] for name in found} == found
    line = next(line for line in text.splitlines() if line.startswith("all "))
    shown = {
        size: f"{each['at_most']:.0%}" for size, each in numbers["ranges"][-1]["chance_of_equal"].items()
    }
    assert [*shown.values()] == [cell.removeprefix("≤") for cell in line.split()[2:]]
    assert [*shown] == [str(size) for size in sizes]
    assert numbers["quantity"] == text.splitlines()[1].partition("  ")[0]


def test_the_greatest_sizes_leave_a_narrow_table_first():
    seen, found = seen_of([SOLVED, HALF_SOLVED], [7, 8], [0, 0]), []
    for width in range(70, 20, -1):
        out = io.StringIO()
        show_group_sizes(seen, [2, 4, 8], 1.0, Console(file=out, width=width))
        found.append(tuple(re.findall(r"G=\d", out.getvalue().partition("─")[0])))
    assert [*dict.fromkeys(found)] == [("G=2", "G=4", "G=8"), ("G=2", "G=4"), ("G=2",), ()]


@pytest.mark.parametrize(
    ("steps", "width", "pooled", "said"),
    [
        (8, 8, False, "* upper bounds: a prompt has too few rollouts for an estimate."),
        (
            8,
            1,
            True,
            "* counts all rollouts of a prompt in one step. ≤: an upper bound, because a prompt has fewer "
            "than G rollouts.",
        ),
        (
            1200,
            1100,
            True,
            "* counts all rollouts of a prompt in 1,100 consecutive steps, as if of one policy, since its "
            "rewards do not change there by more than chance. ≤: an upper bound, because a prompt has fewer "
            "than G rollouts.",
        ),
    ],
)
def test_a_plan_says_in_which_steps_rollouts_are_pooled(steps, width, pooled, said):
    assert _said_of_pools(steps, width, pooled) == said


def test_the_excess_between_groups_equals_that_of_loops():
    """For each pool, B − (k − 1) S / (N − 1), summed and divided by the root of the sum of squares."""
    for seed in range(30):
        dice = np.random.default_rng(seed)
        sizes = dice.integers(1, 5, 7)
        group, pool = np.repeat(np.arange(7), sizes), dice.permutation([0, 0, 0, 1, 1, 2, 3])
        reward, excess = dice.integers(0, 3, len(group)) / 2, []
        for one in range(4):
            mine = [reward[group == each] for each in range(7) if pool[each] == one]
            every = np.concatenate(mine)
            if len(mine) > 1:
                between = sum(len(each) * (each.mean() - every.mean()) ** 2 for each in mine)
                whole = sum((value - every.mean()) ** 2 for value in every)
                excess.append(between - (len(mine) - 1) * whole / (len(every) - 1))
        size = sum(each**2 for each in excess) ** 0.5
        expected = sum(excess) / size if size else 0.0
        assert excess_between(reward, group, pool) == pytest.approx(expected, abs=1e-9), seed


def test_a_window_is_halved_until_rewards_change_only_by_chance():
    """The rewards of nine prompts are 0 in the first steps, and 1 in the others. Six steps become three."""
    step, prompt = np.repeat(np.arange(6) * 10, 9), np.tile(np.arange(9), 6)
    for learns_at, expected in ((3, 3), (6, 6), (1, 1)):
        reward = np.repeat((step >= 10 * learns_at).astype(float), 2)
        pool, width = pools_of(prompt, step, reward, np.arange(54).repeat(2))
        assert width == expected
        names = {}
        for at in range(54):
            names.setdefault((step[at] // 10 // width, prompt[at]), set()).add(pool[at])
        assert all(len(each) == 1 for each in names.values())
        assert len({*pool.tolist()}) == len(names) == 9 * (6 // width)


@pytest.mark.parametrize(("prompts", "width"), [(3, 2), (4, 2), (5, 1)])
def test_prompts_are_pooled_up_to_two_standard_errors(prompts, width):
    """If each prompt changes in the same way, the excess of n prompts is √n standard errors."""
    step, prompt = np.repeat([0, 1], prompts), np.tile(np.arange(prompts), 2)
    group = np.arange(2 * prompts).repeat(2)
    assert pools_of(prompt, step, (step[group] == 1).astype(float), group)[1] == width


def test_the_lines_of_a_plan_equal_those_of_loops():
    """The rollouts that choose have rates of 0, ¼, ⅓, ½, ¾ and 1, and a range includes its upper end."""
    chosen = [[0, 0], [0, 0, 0, 1], [0, 0, 1], [0, 1], [0, 1, 1, 1], [1, 1]]
    seen = seen_of([[*each, 1] for each in chosen], range(6), [0] * 6)
    choose = np.concatenate([[True] * len(each) + [False] for each in chosen])
    name, lines = lines_of(seen, np.arange(6), 0.5, choose)
    assert name == "solve rate, at 1"
    assert [(label, np.flatnonzero(inside).tolist()) for label, inside in lines] == [
        ("0", [0]),
        ("0 to 0.25", [1]),
        ("0.25 to 0.5", [2, 3]),
        ("0.5 to 0.75", [4]),
        ("0.75 to 1", []),
        ("1", [5]),
    ]


@pytest.mark.parametrize(
    ("rewards", "quantity"),
    [
        ([0.0, 0.5, *[1.0] * 18], "solve rate, at 1"),  # a tenth is not solved
        ([0.0, 0.5, *[1.0] * 19], "std of the rewards"),
        ([1.0, 1.5, *[0.0] * 9, *[0.5] * 9], "solve rate, at 1"),
        ([1.0, 1.5, *[0.0] * 9, *[0.5] * 10], "std of the rewards"),
        ([7.0] * 9 + [8.0], "solve rate, at 8"),  # two values: the greater one is solved
        ([7.0] * 10, "std of the rewards"),
    ],
)
def test_solve_rates_are_shown_if_a_tenth_of_the_rollouts_are_on_each_side(rewards, quantity):
    seen = seen_of([rewards], [0], [0])
    assert lines_of(seen, np.array([0]), 1.0, np.ones(len(rewards), bool))[0] == quantity


def test_a_prompt_needs_two_rollouts_to_choose_a_line_of_spreads():
    seen = seen_of([[0, 1, 2], [3, 4, 5]], [0, 1], [0, 0])
    for choose, lines in (([1, 1, 0, 1, 1, 0], 2), ([1, 1, 0, 1, 0, 0], 0)):
        found = lines_of(seen, np.arange(2), 9.0, np.array(choose, bool))
        assert (found[0], len(found[1])) == ("std of the rewards", lines)


def test_the_groups_of_a_step_equal_those_by_hand():
    """Group 8 has one reward, and group 4 has one rollout. The ids are not in the order of the rows."""
    nan = math.nan
    lines = [
        (9, 0, 1.0, "a", "x"), (9, 1, 1.0, "a", "x"), (8, 2, nan, "a", "x"), (8, 3, 1.0, "a", "x"),
        (2, 4, 0.0, "a", "y"), (4, 5, 1.0, "b", "y"), (2, 6, 0.5, "a", "y"), (2, 7, nan, "a", "y"),
        (7, 8, 0.0, "a", "x"), (7, 9, 1.0, "a", "x"),
    ]  # fmt: skip
    ids, rollouts, rewards, prompts, truths = (list(column) for column in zip(*lines, strict=True))
    columns = {"group_id": np.array(ids), "rollout_id": np.array(rollouts), "reward": np.array(rewards)}
    columns |= {"reason": np.zeros(10, int), "row": np.arange(10)}
    texts = {"prompt": prompts, "ground_truth": truths}
    seen = groups_seen(StepReport(3, (), columns, ("trained",), ("trained",), texts))
    assert seen.equal.tolist() == [False, False, True]  # 2, 7 and 9
    assert seen.step.tolist() == [3, 3, 3]
    assert seen.prompt[1] == seen.prompt[2] != seen.prompt[0]  # another ground truth is another prompt
    assert (seen.prompt >= 0).all()
    found = sorted(zip(seen.group.tolist(), seen.rewards.tolist(), seen.values[:, 0].tolist(), strict=True))
    assert found == [(0, 0, 0), (0, 0.5, 0.5), (1, 0, 0), (1, 1, 1), (2, 1, 1), (2, 1, 1)]
    assert seen.compared.tolist() == [4]  # group 8 has two rollouts, though not two rewards
    peers = columns | {"peers": np.array([9, 9, 8, 8, 2, 4, 2, 2, 7, 7])}
    apart = groups_seen(StepReport(3, (), peers, ("trained",), ("trained",), texts))
    assert apart.prompt.tolist() == [-1, -1, -1]
    bare = groups_seen(StepReport(3, (), columns, ("trained",), ("trained",)))
    assert bare.prompt.tolist() == [-1, -1, -1]
    no_groups = {name: column for name, column in columns.items() if name != "group_id"}
    with pytest.raises(ConfigError, match=r"needs a column of group ids; the dump has none\. Set source"):
        groups_seen(StepReport(3, (), no_groups, ("trained",), ("trained",)))


def test_advised_sizes_need_the_fewest_rollouts_or_have_the_greatest_informative_share():
    """By hand: groups of G need G / (1 − chance) rollouts for each informative group."""

    def said(*chances, bound=("", "", "")):
        words = advised([2, 4, 8], chances, bound)
        return re.findall(r"(?<=of )\d+|(?<=\()[^)]*", words)

    assert said(2 / 3, 0.6, 0.5) == ["2", "6", "8", "50%"]
    assert said(0.75, 0.5, 0.5) == ["4", "8"]  # 2 / 0.25 = 4 / 0.5
    assert said(0.7, 0.44, 0.44) == ["2", "6.7", "4", "56%"]  # 2 / 0.3 = 6.7, 4 / 0.56 = 7.1
    assert said(2 / 3, 0.5, 0.4, bound=("", "", "≤")) == ["2", "6", "8", "at least 60%"]
    assert said(1.0, 1.0, 0.2, bound=("", "≤", "≤")) == ["8", "at most 10"]
    assert advised([2, 4, 8], [2 / 3, 0.6, 0.5], [""] * 3).startswith(
        "What to do: set the group size from 2 to 8. "
    )
    assert "no group size helps" in advised([2, 4], [1.0, 1.0], ["", "≤"])


@pytest.mark.parametrize(
    ("needed", "digits"),
    [
        ([5.7, 6.3, 5.9], 1),
        ([5.71, 5.74], 0),
        ([5.74, 5.66], 0),
        ([5.4, 5.6], 0),
        ([5.7, math.inf], 0),
        ([math.inf, math.inf], 0),
        ([2.0], 0),
        ([6.3, 9.0, 5.7], 1),
    ],
)
def test_numbers_have_a_decimal_if_the_least_two_would_look_equal_without_it(needed, digits):
    assert digits_apart(needed) == digits


def test_a_prompt_of_several_steps_is_one_prompt(tmp_path):
    """Both rollouts of step 1 solve a prompt, and none of step 2. Another ground truth is another prompt."""
    for step, rewards in enumerate(([1, 1], [0, 0]), start=1):
        rows = [
            {"input": "1+1", "output": "2", "gts": truth, "score": float(reward), "step": step}
            for truth in ("2", "two")
            for reward in (rewards if truth == "2" else [1, 0])
        ]
        rows = [row | {"uid": f"{step}{row['gts']}_{k}_0"} for k, row in enumerate(rows)]
        (tmp_path / f"{step}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _, text = planned(
        configured(tmp_path, "source.group_by=null", "plan.group_sizes=[2,4]"), tmp_path / "out"
    )
    written = (tmp_path / "out" / "plan.json").read_text()
    found = json.loads(written)
    assert written.strip() == json.dumps(found, indent=1)
    assert (found["groups"], found["prompts"], found["pooled_steps"]) == (4, 2, 2)
    of_all = found["ranges"][-1]["chance_of_equal"]
    assert [of_all[size]["at_most"] for size in ("2", "4")] == [0.5, 0]
    assert "all rollouts of a prompt in the 2 steps" in " ".join(text.split())
    assert text.endswith("all numbers: plan.json. A plan has no page\n")
    assert "tokens" in found


def test_rollouts_that_are_compared_apart_are_not_pooled_by_their_prompt(make_batch, tmp_path):
    """A prompt has two roles. In the first step only role 0 solves it, and in the second only role 1."""
    for step, rewards in enumerate(([1.0, 1, 0, 0], [0.0, 0, 1, 1])):
        batch = make_batch(rewards, [0] * 4)
        batch["next", "policy_version"] = torch.tensor([0, 0, 1, 1])  # stands for the role
        write_dump(make_report(Pipeline({}).run(batch), step=step), tmp_path)
    keys = "pipeline.stages.peers.keys=[group_id,[next,policy_version]]"
    gate = "pipeline.stages.gate.group_size=4"
    config = configured(tmp_path, "pipeline=roles", keys, gate, "plan.group_sizes=[2]")
    share, _ = planned(config, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert (share, found["groups"], found["prompts"]) == (1, 4, 4)
    assert found["ranges"][-1]["chance_of_equal"]["2"]["at_most"] == 1


def test_rounding_of_a_mean_moves_no_group_across_a_bound():
    """In floats, the mean of three rewards of 0.1 is above 0.1. A group of such rewards is in the line 0."""
    seen = seen_of([[0.1] * 3, [0.7] * 3, [0.1, 0.1, 0.2]], [0, 1, 2], [0] * 3)
    _, lines = lines_of(seen, np.arange(3), 9.0, np.ones(9, bool))
    assert [(label, np.flatnonzero(inside).tolist()) for label, inside in lines] == [
        ("0", [0, 1]),
        ("0 to 0.0577", [2]),  # 0.1 / √3
    ]


def test_a_reward_of_at_least_report_solved_is_solved(make_batch, tmp_path):
    batch = make_batch([0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9], [0] * 4 + [1] * 4)
    write_dump(make_report(Pipeline({}).run(batch)), tmp_path)
    words = ("report.solved=0.5", "pipeline.stages.gate.group_size=4")
    _, text = planned(configured(tmp_path, *words), tmp_path)
    assert "solve rate, at 0.5" in text
    assert re.search(r"\n *0 +1 +0% .*\n *1 +1 +0% ", text)


def test_a_plan_of_an_unsuitable_dump_is_refused(make_batch, tmp_path):
    write_dump(make_report(Pipeline({}).run(make_batch([0.0, 1.0], [0, 1]))), tmp_path)
    with pytest.raises(ConfigError, match="needs groups with at least two rollouts with rewards"):
        planned(configured(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="group_sizes must be integers ≥ 1"):
        planned(configured(tmp_path, "plan.group_sizes=[0]"), tmp_path)
    wrong = configured(tmp_path, "pipeline.stages.gate.on_incomplete=raise")
    with pytest.raises(BatchError, match="step 0: stage 'gate'"):
        planned(wrong, tmp_path)


def test_a_step_that_fails_without_a_skipped_record_is_left_out_with_a_notice(tmp_path):
    dump = tmp_path / "dump"
    dump.mkdir()
    for step in (1, 2):
        rows = [
            json.dumps({"input": "a", "output": "b", "score": k % 2, "step": step, "uid": f"{k // 2}_{k}_0"})
            for k in range(4)
        ]
        rows[3] = rows[3][:9] if step == 2 else rows[3]
        (dump / f"{step}.jsonl").write_text("\n".join(rows))
    words = ("pipeline.stages.gate.on_incomplete=raise", "source.skip_bad=true")
    _, text = planned(configured(dump, *words), tmp_path)
    assert "step 2: stage 'gate'" in text
    assert json.loads((tmp_path / "plan.json").read_text())["groups"] == 2
