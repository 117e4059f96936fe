"""The numbers of a step, of its groups and of a run equal those of loops."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from typing import Any

import numpy as np
import pytest

from headrace.pipeline.tools.report import percent
from headrace.pipeline.tools.report.funnel import Left
from headrace.pipeline.tools.report.groups import groups_of, reading_order, rollouts_of, staleness_of
from headrace.pipeline.tools.report.numbers import logged_numbers, numbers_of
from headrace.pipeline.tools.report.over_steps import quarter_means
from headrace.transforms import Status

SOLVED = 0.5


def drawn(seed: int) -> list[dict[str, Any]]:
    """Rollouts of one to three rows, in up to four groups, in any order. Any value may be unknown."""
    rng, rows = random.Random(seed), []
    dispatched = [rng.choice([-1, 1, 2, 3]) for _ in range(4)]
    ends, trainer = rng.choice([[*range(-1, 4)], [*range(4)]]), rng.choice([-1, 0, 6])
    for rollout in range(rng.randint(1, 9)):
        group, reward = rng.randrange(4), rng.choice([math.nan, 0.0, SOLVED, 1.0])
        empty = rng.random() < 0.2
        rows += [
            {
                "group_id": 9 - group,
                "rollout_id": 30 - rollout,
                "expected_rollouts": dispatched[group],
                "reason": rng.choice([0, 0, 1, 2]),
                "reward": rng.choice([reward, reward, math.nan]),
                "collected_reward": rng.choice([reward, math.nan]),
                "advantage": rng.choice([math.nan, 0.0, -1.0, 0.5]),
                "status": rng.choice(ends),
                "empty": int(empty),
                "tokens": rng.choice([-1, 0, 0, 3, 5]),
                "policy_version": rng.choice([-1, 0, 4] if trainer else [-1, 0]),
                "trainer_version": trainer,
            }
            for _ in range(rng.randint(1, 3))
        ]
    rng.shuffle(rows)
    return rows


def first_known(rows: list[dict[str, Any]], key: str) -> float:
    """The value of the first row that has one, of a trained row if possible."""
    ordered = sorted(rows, key=lambda row: row["reason"] != 0)
    return next((row[key] for row in ordered if math.isfinite(row[key])), math.nan)


def by_loops(rows: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}

    def put(name: str, values: list[float], which: str) -> None:
        ways = {"mean": statistics.fmean, "min": min, "max": max, "std": statistics.stdev}
        for way in which.split() if values else ():
            if way != "std" or len(values) > 1:
                found[f"{name}/{way}"] = ways[way](values)

    trainer = rows[0]["trainer_version"]
    newest = max(row["policy_version"] for row in rows) if trainer < 0 else trainer
    by_id: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_id.setdefault(row["rollout_id"], []).append(row)
    rollouts = [
        {
            "group": own[0]["group_id"],
            "reward": first_known(own, "reward"),
            "advantage": first_known(own, "advantage"),
            "trained": any(row["reason"] == 0 for row in own),
            "failed": any(row["status"] in (Status.ABORTED, Status.FAILED) for row in own),
            "truncated": any(row["status"] == Status.TRUNCATED for row in own),
            "arrived": any(math.isfinite(row["collected_reward"]) for row in own),
            "empty": own[0]["empty"],
            "tokens": sum(max(row["tokens"], 0) for row in own),
            "age": max(newest - row["policy_version"] if row["policy_version"] >= 0 else -1 for row in own),
            "rows": len(own),
        }
        for own in by_id.values()
    ]
    for name, key in (("reward", "reward"), ("advantages", "advantage")):
        known = [each for each in rollouts if math.isfinite(each[key])]
        put(f"{name}/all", [each[key] for each in known], "mean min max std")
        trained = [each[key] for each in known if each["trained"]]
        put(f"{name}/effective", trained, "mean min max std")
    if trained:
        found["advantages/fraction_zero"] = trained.count(0.0) / len(trained)

    several, differ, equal, sizes, incomplete, best, worst = 0, 0, 0, [], [], [], []
    for group in {each["group"] for each in rollouts}:
        counted = [each for each in rollouts if each["group"] == group and not each["failed"]]
        rewards = [each["reward"] for each in counted if not each["empty"] and math.isfinite(each["reward"])]
        sizes.append(len(counted))
        if len(counted) > 1:
            several += 1
            differ += len({*rewards}) > 1
            equal += len(rewards) > 1 and len({*rewards}) == 1
        expected = next(row["expected_rollouts"] for row in rows if row["group_id"] == group)
        incomplete += [len(counted) < expected] if expected >= 0 else []
        best += [max(rewards)] if rewards else []
        worst += [min(rewards)] if rewards else []
    if several:
        found |= {"frac_reward_zero_std": equal / several, "groups/informative": differ / several}
    put("group_size", sizes, "mean min max")
    if incomplete:
        found["groups/incomplete"] = statistics.fmean(incomplete)
    if best:
        none, every = sum(each < SOLVED for each in best), sum(each >= SOLVED for each in worst)
        found |= {"solve_none": none / len(best), "solve_all": every / len(best)}
        found["solve_partial"] = 1 - (none + every) / len(best)

    sums: dict[int, float] = {}
    for row in rows:
        if row["reason"] == 0 and math.isfinite(row["advantage"]):
            size = abs(row["advantage"]) * max(row["tokens"], 0)
            sums[row["group_id"]] = sums.get(row["group_id"], 0.0) + size
    if any(sums.values()):
        found["groups/largest_gradient_share"] = max(sums.values()) / sum(sums.values())
    found["rollouts/unrewarded"] = statistics.fmean(not each["arrived"] for each in rollouts)
    found["rollouts/no_reward"] = sum(each["trained"] and math.isnan(each["reward"]) for each in rollouts)
    if all(row["status"] >= 0 for row in rows):
        found["rollouts/truncated"] = statistics.fmean(each["truncated"] for each in rollouts)
    found["rollouts/failed"] = statistics.fmean(each["failed"] for each in rollouts)
    found["rollouts/empty"] = statistics.fmean(each["tokens"] == 0 for each in rollouts)
    put("response_length", [each["tokens"] for each in rollouts], "mean max")
    ages = [each["age"] for each in rollouts if each["age"] >= 0]
    put("behind_newest" if trainer < 0 else "staleness", ages, "mean max")
    put("fan_out", [each["rows"] for each in rollouts], "mean max")
    put("tokens", [row["tokens"] for row in rows], "mean max")
    return found


def test_the_numbers_of_any_rows_equal_those_of_loops():
    for seed in range(40):
        rows = drawn(seed)
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        columns["row"] = np.arange(len(rows))
        found = numbers_of(columns, rollouts_of(columns), groups_of(columns, None), SOLVED)
        assert found == pytest.approx(by_loops(rows)), seed


def test_the_compared_rollouts_and_the_baseline_of_a_group_equal_those_of_loops():
    for seed in range(40):
        rows, rng = drawn(seed), random.Random(seed)
        for row in rows:
            row["compared"], row["baseline"] = rng.choice([-1, 0, 2]), rng.choice([math.nan, 0.5, 0.5, 1.0])
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        groups = groups_of(columns, None)
        for at, group in enumerate(groups["id"].tolist()):
            own = [row for row in rows if row["group_id"] == group]
            rollouts = [[row for row in own if row["rollout_id"] == each["rollout_id"]] for each in own]
            compared = {
                each[0]["rollout_id"]: first_known(each, "baseline")
                for each in rollouts
                if max(row["compared"] for row in each) > 0
            }
            known = {each for each in compared.values() if math.isfinite(each)}
            assert groups["compared"][at] == len(compared)
            expected = known.pop() if len(known) == 1 else math.nan
            assert groups["baseline"][at] == pytest.approx(expected, nan_ok=True), (seed, group)


@pytest.mark.parametrize(
    ("low", "high", "one"),
    [(0.0, 9e-10, True), (0.0, 1.1e-9, False), (1000.0, 1000 + 9e-7, True), (1000.0, 1000 + 1.1e-6, False)],
)
def test_baselines_of_a_group_are_one_up_to_rounding(low, high, one):
    columns = {"reason": np.zeros(2, int), "row": np.arange(2), "group_id": np.zeros(2, int)}
    columns |= {"compared": np.array([2, 2]), "baseline": np.array([low, high])}
    baseline = groups_of(columns, None)["baseline"]
    assert baseline == pytest.approx([low if one else math.nan], rel=1e-12, nan_ok=True)


def test_a_row_is_behind_the_trainer_if_all_rows_know_its_version():
    columns = {"reason": np.zeros(3, int), "policy_version": np.array([3, 5, -1])}
    for trainer, ages in (([6, 7, 6], [3, 2, -1]), ([6, -1, 6], [2, 0, -1]), (None, [2, 0, -1])):
        known = columns if trainer is None else columns | {"trainer_version": np.array(trainer)}
        assert staleness_of(known).tolist() == ages
    assert staleness_of({"reason": np.zeros(2, int)}).tolist() == [-1, -1]


def test_logged_advantages_are_compared_where_both_are_known():
    """They agree up to 10⁻⁴."""
    nan = math.nan
    columns = {"logged_advantage": np.array([0.0, 1.0, 2.0, nan]), "advantage": np.array([1e-4, 1.5, nan, 0])}
    names = {"rows": 2, "max_difference": 0.5, "mean_difference": 0.25005, "agree": 0.5}
    assert logged_numbers(columns) == pytest.approx({f"logged_advantage/{k}": v for k, v in names.items()})
    columns["advantage"] = np.array([1.01e-4, 1.5, nan, 0])
    assert logged_numbers(columns)["logged_advantage/agree"] == 0
    assert logged_numbers(columns | {"advantage": np.full(4, nan)}) == {}
    assert logged_numbers({"advantage": np.zeros(1)}) == {}


def test_a_share_has_a_decimal_if_it_is_near_0_or_1():
    """A half is rounded up."""
    shown = {
        0: "0",
        0.0045: "0.5",
        0.0099: "1.0",
        0.01: "1",
        0.125: "13",
        0.99: "99",
        0.9901: "99.0",
        1: "100",
    }
    assert {share: percent(share) for share in shown} == {share: f"{text} %" for share, text in shown.items()}


@pytest.mark.parametrize(
    ("rollouts", "groups", "said"),
    [
        (1, 2, "parts of 1 rollout and 2 groups"),
        (None, 1, "parts of 1 group"),
        (1200, 0, "parts of 1,200 rollouts"),
        (0, 0, ""),
        (None, None, ""),
    ],
)
def test_a_reason_names_the_rollouts_and_groups_that_lost_a_part(rollouts, groups, said):
    assert Left("failed", "dropped", 5, 1, 0, None, rollouts, groups).in_part == said


def test_groups_whose_rewards_differ_and_groups_whose_rewards_are_equal_alternate():
    for seed in range(40):
        rng = random.Random(seed)
        ids, size = rng.sample(range(90), 7), range(7)
        std, mean = ([rng.choice([math.nan, 0.0, 0.25, 0.5]) for _ in size] for _ in "ab")
        groups = {"id": np.array(ids), "reward_std": np.array(std), "reward_mean": np.array(mean)}
        order = reading_order(groups | {"zero_variance": groups["reward_std"] == 0}).tolist()
        differ = sorted((at for at in size if std[at] > 0), key=lambda at: (-std[at], ids[at]))
        equal = sorted(
            (at for at in size if not std[at] > 0),
            key=lambda at: (math.isnan(mean[at]), 0.0 if math.isnan(mean[at]) else mean[at], ids[at]),
        )
        turns = itertools.zip_longest(differ, equal)
        assert order == [at for turn in turns for at in turn if at is not None]


@pytest.mark.parametrize(
    ("steps", "parts"),
    [(16, [(0, 4), (8, 12), (12, 16)]), (11, [(0, 1), (9, 10), (10, 11)]), (1, [(0, 1)] * 3)],
)
def test_a_long_run_is_compared_by_its_quarters_and_a_short_run_by_its_steps(steps, parts):
    """They are the first, the one before the last, and the last."""
    points = [(number, float(number**2)) for number in range(steps)]
    found = quarter_means(points)
    assert [each.steps for each in found] == [tuple(range(*part)) for part in parts]
    assert [each.value for each in found] == [
        statistics.fmean(number**2 for number in range(*part)) for part in parts
    ]
