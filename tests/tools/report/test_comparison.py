"""A comparison of two recipes sums up what loops over the rows find, and says it in words."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest

from headrace.pipeline.tools.report import Comparison, StepReport
from headrace.transforms import BatchError

ROUNDED = 1e-5
NAMES = ("one", "two")


def drawn(rng: random.Random) -> list[dict[str, Any]]:
    """Rows of up to eleven groups, each with a reason, an advantage and a weight under two recipes."""
    rows, kind = [], rng.choice(["factor", "factors", "any"])
    everywhere, weight = rng.choice([1.0, 3.0]), rng.choice([1.0, 2.0])
    for group in range(rng.randint(1, 11)):
        factor = everywhere if kind == "factor" else rng.choice([-1.0, 1.0, 2.0])
        for rollout in range(rng.randint(1, 3)):
            for _ in range(rng.randint(1, 3)):
                first = rng.choice([-1.0, 0.0, 0.5, 2.0, math.nan])
                second = rng.choice([-1.0, 0.0, 2.0, math.nan]) if kind == "any" else factor * first
                tokens = rng.choice([-1, 0, 1, 2, 3, 4, 5, 8, 9])  # −1: not known
                rows.append(
                    {
                        "group": 40 - group,
                        "rollout": 9 * group + rollout,
                        "tokens": tokens,
                        "reason": (rng.choice([0, 0, 0, 1]), rng.choice([0, 0, 0, 2])),
                        "advantage": (first, second),
                        "weight": (1.0, rng.choice([weight, 0.0, 1.0, 1.0 / max(tokens, 1)])),
                    }
                )
    return rows


def reports_of(rows: list[dict[str, Any]], step: int) -> list[StepReport]:
    found = []
    for k in (0, 1):
        columns = {f"{unit}_id": np.array([row[unit] for row in rows]) for unit in ("group", "rollout")}
        columns |= {"tokens": np.array([row["tokens"] for row in rows])}
        for name, key in (("reason", "reason"), ("advantage", "advantage"), ("loss_weight", "weight")):
            columns[name] = np.array([row[key][k] for row in rows])
        columns["row"] = np.arange(len(rows))
        texts = {"prompt": [f"user: {row['group']}?" for row in rows]}
        texts["group_label"] = [f"g{row['group']}" for row in rows]
        names = ("trained", "filter/a", "filter/b")
        found.append(StepReport(step, (), columns, names, names, texts))
    return found


def differing(pairs: list[tuple[float, float]]) -> list[bool]:
    """Whether the numbers of each pair differ by more than the rounding of numbers and of their sums."""
    whole = min(max((abs(pair[k]) for pair in pairs), default=0.0) for k in (0, 1))
    return [abs(a - b) > ROUNDED * (max(abs(a), abs(b)) + whole) for a, b in pairs]


def why_by_loops(rows: list[dict[str, Any]]) -> tuple[Counter[str], float]:
    """The causes of a step, and the correlation of weights with lengths times the number of rows."""
    both = [row for row in rows if row["reason"] == (0, 0) and all(map(math.isfinite, row["advantage"]))]
    factor, causes, by_length = {}, Counter[str](), 0.0
    for group in {row["group"] for row in both}:
        own = [row["advantage"] for row in both if row["group"] == group]
        if squares := sum(a * a for a, _ in own):
            factor[group] = sum(a * b for a, b in own) / squares
    scaled = [(factor.get(row["group"], 0.0) * row["advantage"][0], row["advantage"][1]) for row in both]
    off, unlike = differing(scaled), differing([row["advantage"] for row in both])
    apart = {
        row["group"]
        for row, no_multiple, other in zip(both, off, unlike, strict=True)
        if no_multiple or (factor.get(row["group"], 0.0) <= 0 and other)
    }
    causes["otherwise"] = sum(row["group"] in apart for row in both)
    one_factor = len(factor) > 1 and max(factor.values()) - min(factor.values()) < ROUNDED
    causes["all" if one_factor else "group"] = sum(
        row["group"] not in apart and row["advantage"][0] != 0 and factor[row["group"]] != 1 for row in both
    )
    known = [row for row in both if row["weight"][1] > 0]
    ratios = [math.log(row["weight"][1] / row["weight"][0]) for row in known]
    if len({*ratios}) > 1:
        causes["weights"] = len(known)
        lengths = [math.log(max(row["tokens"], 1)) for row in known]
        if len({*lengths}) > 1:
            by_length = len(known) * statistics.correlation(ratios, lengths)
    return causes, by_length


def test_a_comparison_of_several_steps_equals_that_of_loops():
    for seed in range(40):
        rng = random.Random(seed)
        steps = [drawn(rng) for _ in range(rng.randint(1, 3))]
        found, causes = Comparison(NAMES), Counter[str]()
        numbers, pairs, lengths, moved, cosines = Counter[str](), [], 0.0, 0.0, []
        gradients, movers = [0, 0], []
        shares = {"segments": defaultdict(lambda: [0.0] * 3), "tokens": defaultdict(lambda: [0.0] * 3)}
        for step, rows in enumerate(steps):
            of_step = found.add(*reports_of(rows, step))
            known = [row["advantage"] for row in rows if all(map(math.isfinite, row["advantage"]))]
            differ = differing(known)
            numbers["differ"] += sum(differ)
            numbers["flips"] += sum(a * b < 0 for (a, b), each in zip(known, differ, strict=True) if each)
            pairs += known
            sizes = []
            for row in rows:
                size = []
                for k in (0, 1):
                    counts = row["reason"][k] == 0 and math.isfinite(row["advantage"][k])
                    tokens = max(row["tokens"], 0)
                    size.append(row["advantage"][k] * row["weight"][k] * tokens if counts else 0.0)
                    trains_alone = row["reason"][k] == 0 and row["reason"][1 - k] != 0
                    numbers[f"only {k}"] += trains_alone
                    numbers[f"kept {k}"] += trains_alone and counts and row["advantage"][k] != 0
                numbers["both"] += row["reason"] == (0, 0)
                sizes.append(tuple(size))
            numbers["changed"] += sum(differing(sizes))
            whole = [sum(abs(size[k]) for size in sizes) for k in (0, 1)]
            of_rows = [[abs(size[k]) / (whole[k] or 1.0) for k in (0, 1)] for size in sizes]
            groups: dict[int, list[float]] = {}
            for row, share in zip(rows, of_rows, strict=True):
                line = groups.setdefault(row["group"], [0.0, 0.0])
                line[0], line[1] = line[0] + share[0], line[1] + share[1]
                segments = sum(row["rollout"] == each["rollout"] for each in rows)
                power = next(2**n for n in range(9) if row["tokens"] <= 2**n)
                for table, label in (("segments", segments), ("tokens", power)):
                    into = shares[table][str(label)]
                    into[0], into[1], into[2] = into[0] + share[0], into[1] + share[1], into[2] + 1
            here = sum(abs(a - b) for a, b in groups.values()) / 2
            movers += [
                (step, group, *line) for group, line in groups.items() if abs(line[0] - line[1]) > 1e-9
            ]
            moved += here
            assert of_step["gradient_moved"] == pytest.approx(here, abs=1e-9), seed
            gradients = [n + (each > 0) for n, each in zip(gradients, whole, strict=True)]
            assert ("gradient_cosine" in of_step) == all(whole)
            if all(whole):
                dot = sum(a * b for a, b in sizes)
                norms = [math.sqrt(sum(size[k] ** 2 for size in sizes)) for k in (0, 1)]
                cosines.append(dot / norms[0] / norms[1])
                assert of_step["gradient_cosine"] == pytest.approx(cosines[-1], abs=1e-9)
            more, related = why_by_loops(rows)
            causes, lengths = causes + more, lengths + related
        told = found.numbers
        assert told["rows"] == found.rows == sum(map(len, steps))
        assert (found.steps, found.changed) == (len(steps), numbers["changed"]), seed
        assert [told[f"trained_{which}"] for which in ("by_both", "only_by_first", "only_by_second")] == [
            numbers[name] for name in ("both", "only 0", "only 1")
        ]
        assert (told["differ"], told["sign_flips"]) == (numbers["differ"], numbers["flips"])
        if all(len({pair[k] for pair in pairs}) > 1 for k in (0, 1)):
            expected = statistics.correlation(*map(list, zip(*pairs, strict=True)))
            assert told["correlation"] == pytest.approx(expected, abs=1e-9)
        assert told["gradient_moved"] == pytest.approx(moved / len(steps), abs=1e-9)
        mean = statistics.fmean(cosines) if cosines else math.nan
        assert told["gradient_cosine"] == pytest.approx(mean, abs=1e-9, nan_ok=True)
        assert found.averaged == {"gradient_moved": len(steps), "gradient_cosine": len(cosines)}
        assert (found.trains, found.kept) == (gradients, [numbers["kept 0"], numbers["kept 1"]])
        assert +found.causes == causes, seed
        assert found.by_length == pytest.approx(lengths, abs=1e-6)
        means = {
            table: {
                label: [a / max(gradients[0], 1), b / max(gradients[1], 1), rows]
                for label, (a, b, rows) in lines.items()
            }
            for table, lines in shares.items()
        }
        assert {table: {*lines} for table, lines in found.mean_shares().items()} == {
            table: {*lines} for table, lines in means.items()
        }
        for table, lines in means.items():
            for label, line in lines.items():
                assert found.mean_shares()[table][label] == pytest.approx(line, abs=1e-9)
        apart = sorted((abs(first - second) for _, _, first, second in movers), reverse=True)[:8]
        assert [abs(each.first - each.second) for each in found.movers] == pytest.approx(apart)
        by_group = {(step, f"g{group}"): line for step, group, *line in movers}
        for each in found.movers:
            assert by_group[each.step, each.group] == pytest.approx([each.first, each.second])
            assert f"g{each.prompt}" == f"{each.group}?"


@pytest.mark.parametrize(("apart", "differs"), [(1.9e-5, False), (2.1e-5, True)])
def test_numbers_differ_beyond_the_rounding_of_float32_and_of_sums(apart, differs):
    """Of the largest number, 2 · 10⁻⁵ may be rounding; of a number near 0, 10⁻⁵ of the largest one."""
    for second in ([1 + apart, 0.0], [1.0, apart / 2]):
        rows = [
            {"group": k, "rollout": k, "tokens": 1, "reason": (0, 0), "weight": (1.0, 1.0)} for k in range(2)
        ]
        for row, pair in zip(rows, zip([1.0, 0.0], second, strict=True), strict=True):
            row["advantage"] = pair
        found = Comparison(NAMES)
        found.add(*reports_of(rows, 0))
        assert (found.differ, found.changed) == (differs, differs)


def test_without_lengths_only_the_advantages_of_rows_in_the_loss_are_compared():
    rows = [
        {"group": 0, "rollout": k, "tokens": 1, "weight": (1.0, 1.0), "reason": reason, "advantage": pair}
        for k, (reason, pair) in enumerate(
            [((0, 0), (1.0, 1.0)), ((0, 0), (1.0, 2.0)), ((1, 0), (2.0, 2.0)), ((1, 1), (1.0, 2.0))]
        )
    ]
    pair = reports_of(rows, 0)
    for report in pair:
        report.columns["no_lengths"] = np.ones(4, int)  # type: ignore[index]
    found = Comparison(NAMES)
    assert found.add(*pair) == {}
    assert (found.changed, found.shares, found.movers) == (2, {}, [])
    assert math.isnan(found.numbers["gradient_moved"])


def test_reports_of_different_rows_are_refused():
    rows = drawn(random.Random(0))
    others = [row | {"rollout": row["rollout"] + 1} for row in rows]
    for one, two, name in ((rows, others, "rollout"), (rows, rows[1:], "group"), (rows[1:], rows, "group")):
        with pytest.raises(BatchError) as raised:
            Comparison(NAMES).add(reports_of(one, 0)[0], reports_of(two, 0)[1])
        assert str(raised.value) == (
            f"two recipes are compared row by row, over the same batch; one has {len(one)} rows and the "
            f"other {len(two)}, or their {name}_ids differ"
        )


def test_a_comparison_of_no_step_has_no_numbers():
    found = Comparison(NAMES)
    numbers = {name: value for name, value in found.numbers.items() if value}
    assert numbers == {"correlation": pytest.approx(math.nan, nan_ok=True)} | {
        "gradient_cosine": pytest.approx(math.nan, nan_ok=True)
    }
    assert found.mean_shares() == {}


def test_without_ids_all_rows_are_one_group():
    rows = [
        {"group": k, "rollout": k, "tokens": 1, "reason": (0, 0), "weight": (1.0, 1.0), "advantage": pair}
        for k, pair in enumerate([(1.0, 2.0), (-1.0, -2.0)])
    ]
    pair = reports_of(rows, 0)
    for report in pair:
        del report.columns["group_id"], report.columns["rollout_id"]  # type: ignore[attr-defined]
    found = Comparison(NAMES)
    assert found.add(*pair) == {"gradient_moved": 0.0, "gradient_cosine": pytest.approx(1.0)}
    assert (found.causes, found.movers, [*found.shares]) == ({"otherwise": 0, "group": 2}, [], ["tokens"])


PRODUCT = "advantage × loss weight × tokens"
DIFFER = f"one and two give different gradients: {PRODUCT} differs in 3 of 8 rows."


@pytest.mark.parametrize(
    ("has", "said"),
    [
        ({}, f"one and two give the same gradient: {PRODUCT} is equal in all 8 rows."),
        (
            {"steps": 2, "rows": 1234},
            f"one and two give the same gradient: {PRODUCT} is equal in all 1,234 rows of 2 steps.",
        ),
        (
            {"by_token": True},
            "one and two give the same gradient, up to the weights of single tokens: "
            f"{PRODUCT} is equal in all 8 rows.",
        ),
        ({"moved": math.nan}, "one and two give the same advantage: it is equal in all 8 rows."),
        (
            {"moved": math.nan, "changed": 3},
            "one and two give different advantages: they differ in 3 of 8 rows.",
        ),
        ({"changed": 3, "moved": 0.25}, f"{DIFFER} 25.0% of the gradient moves to other groups."),
        (
            {"changed": 3, "cosines": [1 - 1e-10], "trains": [1, 1]},
            f"{DIFFER} The two gradients of each step have the same direction.",
        ),
        (
            {"changed": 3, "cosines": [1.0, 1 - 1e-8], "trains": [2, 2], "steps": 2, "moved": 0.25},
            f"{DIFFER[:-1]} of 2 steps. 12.5% of the gradient moves to other groups.",
        ),
        (
            {"changed": 3, "cosines": [1.0], "trains": [1, 2], "moved": 0.5},
            f"{DIFFER} 50.0% of the gradient moves to other groups.",
        ),
        (
            {"changed": 3, "causes": Counter(all=3)},
            f"{DIFFER} 0.0% of the gradient moves to other groups. "
            "They differ in the scale of all advantages, by one factor.",
        ),
    ],
)
def test_a_comparison_says_in_full_whether_the_gradients_are_the_same(has, said):
    assert Comparison(NAMES, **{"steps": 1, "rows": 8} | has).said == said


@pytest.mark.parametrize(
    ("has", "why"),
    [
        ({}, ""),
        (
            {"causes": Counter(otherwise=1, group=2, all=3)},
            "They differ in the advantages of a group, by more than a factor.",
        ),
        (
            {"causes": Counter(group=2, all=3)},
            "They differ in the scale of each group alone: its advantages differ by a factor.",
        ),
        ({"causes": Counter(weights=8), "by_length": 4.0}, "They differ in the weights of rows."),
        (
            {"causes": Counter(weights=8), "by_length": 4.1},
            "They differ in the weights of long rows, which are greater in two.",
        ),
        (
            {"causes": Counter(weights=8), "by_length": -4.1},
            "They differ in the weights of long rows, which are greater in one.",
        ),
        (
            {"causes": Counter(group=2, weights=8), "kept": [1, 1200]},
            "They differ in the scale of each group, and in the weights of rows, and in 1 row that only one "
            "trains, and in 1,200 rows that only two trains.",
        ),
    ],
)
def test_a_comparison_says_in_full_in_which_respects_recipes_differ(has, why):
    assert Comparison(NAMES, **has).why == why
