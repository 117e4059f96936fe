"""The findings of each check of an audit equal those of plain loops, or those by hand."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch
from composed import composed
from tensordict import TensorDict

from headrace.pipeline.tools.audit.audit_checks import CHECKS, AuditedStep, DeclaredRecipe, drawn_again
from headrace.transforms import Status
from headrace.transforms.table.tensordicts import as_texts

RECIPE = (
    "pipeline=as/prime_rl",
    "pipeline.empty=exclude",
)  # the advantage is the reward less the group's mean


@pytest.fixture(scope="module")
def declared():
    return DeclaredRecipe(composed(*RECIPE))


def step_of(declared, rows, **how):
    """The step 3, whose rows have the keys of `COLUMNS` or a part of them."""
    batch = TensorDict({}, batch_size=[len(rows)])
    for name, key in COLUMNS.items():
        if name in rows[0]:
            values = [row[name] for row in rows]
            batch[key] = as_texts(values) if name == "prompt" else torch.tensor(values)
    if "tokens" in rows[0]:
        tokens = torch.tensor([row["tokens"] for row in rows])
        batch["masks", "all_assistant_mask"] = torch.arange(int(tokens.max()) + 1) < tokens[:, None]
    return AuditedStep(3, batch, declared, **how)


COLUMNS = {
    "group": "group_id",
    "rollout": "rollout_id",
    "reward": ("next", "reward"),
    "status": "status",
    "prompt": "prompt_text",
    "logged": "logged_advantage",
    "weight": "logged_weight",
    "minibatch": "logged_minibatch",
    "expected": "expected_rollouts",
}


def findings(step, check):
    """The findings of a check as (group, rollouts, rows, expected, found, text)."""
    return [tuple(each[1:7]) for each in CHECKS[check][1](step).findings]


def random_rows(dice):
    """Rows of some groups, shuffled, and the advantages of the recipe by a loop; NaN for rows without one."""
    rows = []
    for group in range(dice.randint(1, 3)):
        for rollout in range(dice.randint(1, 5)):
            reward, lost = dice.random(), dice.random() < 0.15
            for _ in range(dice.randint(1, 2)):
                row = {"group": group, "rollout": 10 * group + rollout, "reward": reward}
                row |= {
                    "tokens": dice.choice([0, 1, 1, 2, 5]),
                    "prompt": dice.choice(["p", "p", "p", "q", "r"]),
                }
                row["status"] = int(Status.ABORTED if lost and dice.random() < 0.7 else Status.COMPLETED)
                rows.append(row | {"expected": 2 + group})
    dice.shuffle(rows)
    for row in rows:
        own = [each for each in rows if each["rollout"] == row["rollout"]]
        row["lost"] = any(each["status"] == Status.ABORTED for each in own)
        row["votes"] = not row["lost"] and any(each["tokens"] for each in own)
        row["trains"] = not row["lost"] and row["tokens"] > 0
    for row in rows:
        voters = {
            each["rollout"]: each["reward"]
            for each in rows
            if each["group"] == row["group"] and each["votes"]
        }
        row["ours"] = row["reward"] - statistics.mean(voters.values()) if row["votes"] else math.nan
        row["logged"] = row["ours"] * dice.choice([1, 1, 1, -1])
    return rows


def several(texts, most=3):
    """The first texts, and the number of others."""
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def names_of(rows, at):
    return list(dict.fromkeys(str(rows[each]["rollout"]) for each in at))


@pytest.mark.parametrize("seed", range(40))
def test_findings_equal_those_of_a_loop(seed, declared):
    """Some rollouts are lost, some rows have no token in the loss, and groups differ in expected size."""
    rows = random_rows(random.Random(seed))
    step = step_of(declared, rows)
    expected = {"mixed": [], "incomplete": [], "oversized": [], "signs": []}
    for group in dict.fromkeys(row["group"] for row in rows):
        at = [place for place, row in enumerate(rows) if row["group"] == group]
        label, size = str(group), 2 + group
        present = {rows[each]["rollout"] for each in at if not rows[each]["lost"]}
        every = {rows[each]["rollout"] for each in at}
        trains = any(rows[each]["trains"] for each in at)
        on_all = [
            prompt
            for prompt in "pqr"
            if all(any(r["prompt"] == prompt for r in rows if r["rollout"] == rollout) for rollout in present)
        ]
        if present and not on_all:
            here = [each for each in at if not rows[each]["lost"]]
            prompts = list(dict.fromkeys(rows[each]["prompt"] for each in here))
            text = f"group {label} has {len(prompts)} prompts: {several([repr(each) for each in prompts])}"
            expected["mixed"].append((label, names_of(rows, here), here, [1], [len(prompts)], text))
        if len(present) < size and trains:
            gone = names_of(rows, [each for each in at if rows[each]["lost"]])
            text = f"group {label} has {len(present)} of {size} rollouts"
            text += f"; failed or aborted: {several(gone, 8)}" if gone else ""
            expected["incomplete"].append((label, names_of(rows, at), at, [size], [len(present)], text))
        if len(every) > size and trains:
            text = f"group {label} has {len(every)} rollouts, but was dispatched with {size}"
            expected["oversized"].append((label, names_of(rows, at), at, [size], [len(every)], text))
        wrong = [
            each for each in at if rows[each]["trains"] and rows[each]["logged"] * rows[each]["ours"] < -1e-8
        ]
        if wrong:
            first = [
                f"row {each} (rollout {rows[each]['rollout']}) {rows[each]['logged']:.4g}, by the recipe "
                f"{rows[each]['ours']:.4g}"
                for each in wrong
            ]
            values = [
                pytest.approx([rows[each][name] for each in wrong], abs=1e-6) for name in ("ours", "logged")
            ]
            text = f"group {label}: wrong signs: {several(first)}"
            expected["signs"].append((label, names_of(rows, wrong), wrong, *values, text))
    for check, found in expected.items():
        assert findings(step, check) == sorted(found, key=lambda each: each[2]), check


def test_the_share_of_a_finding_is_that_of_its_rows_in_the_gradient(declared):
    """It is |weight × advantage × tokens|. A dump without weights or advantages gets those of the recipe."""
    for seed in range(10):
        rows = random_rows(random.Random(seed))
        for more in ({}, {"weight": 0.25}):
            each = [
                row | {name: value + place % 3 for name, value in more.items()}
                for place, row in enumerate(rows)
            ]
            size = [
                abs(row["ours"] * row["tokens"] * row.get("weight", 1.0)) if row["trains"] else 0.0
                for row in each
            ]
            for row in each:
                row["logged"] = -row["ours"]
            shares = [part / sum(size) for part in size] if sum(size) else None
            for step in (
                step_of(declared, each),
                step_of(declared, [without(row, "logged") for row in each]),
            ):
                found = None if step.gradient is None else pytest.approx(step.gradient.tolist(), abs=1e-6)
                assert found == shares
            assert step_of(declared, [without(row, "tokens") for row in each]).gradient is None


def without(row, name):
    return {key: value for key, value in row.items() if key != name}


def test_without_advantages_there_is_no_share_if_the_recipe_has_a_state():
    rows = [{"group": 0, "rollout": at, "reward": float(at), "tokens": 1} for at in range(2)]
    remembers = DeclaredRecipe(composed("pipeline=spo"))
    assert step_of(remembers, rows, group_size=3).gradient is None
    ((*_, text, share),) = (
        tuple(each) for each in CHECKS["incomplete"][1](step_of(remembers, rows, group_size=3))[0]
    )
    assert (text, share) == ("group 0 has 2 of 3 rollouts", None)


# -- other ways to count -----------------------------------------------------------------------------------


def counted(*groups):
    """Rows of groups: each has (reward, tokens, advantage) of its rows. Equal rewards are of one rollout."""
    return [
        {"group": group, "rollout": 10 * group + round(8 * reward), "reward": reward, "tokens": tokens}
        | {"logged": advantage}
        for group, rows in enumerate(groups)
        for reward, tokens, advantage in rows
    ]


FAIR = [(1.0, 1, 0.5), (1.0, 1, 0.5), (0.0, 1, -0.5)]
ODD = [(1.0, 1, 0.5), (1.0, 1, 0.7), (0.0, 1, -0.5)]
MASKED = [(1.0, 1, 0.5), (0.5, 1, 0.0), (0.0, 0, 9.0)]  # the mean of the two rollouts in the loss is 0.75


def test_groups_that_fit_no_way_to_count_are_named_as_not_checked(declared):
    step = step_of(declared, counted(FAIR, ODD, MASKED, ODD, FAIR))
    unknown = "the advantages of groups {} of step 3 fit neither convention"
    assert CHECKS["counted_twice"][1](step) == ([], unknown.format("1, 3"))
    outcome = CHECKS["masked"][1](step)
    assert ([each.group for each in outcome.findings], outcome.lacking) == (["2"], "")
    assert CHECKS["counted_twice"][1](step_of(declared, counted(FAIR, MASKED))) == ([], "")


def test_a_group_is_named_with_the_way_in_which_it_was_counted(declared):
    rows = counted(FAIR, [(1.0, 1, 0.25), (1.0, 1, 0.25), (1.0, 1, 0.25), (0.0, 1, -0.75)], MASKED)
    step = step_of(declared, rows)
    first = ", ".join(f"row {row} (rollout 18) 0.25, by the recipe 0.5" for row in (3, 4, 5))
    twice = f"group 1: rollouts that count once for each of their rows: 18; {first} and 1 more"
    assert findings(step, "counted_twice") == [
        ("1", ["18"], [3, 4, 5, 6], [0.5] * 3 + [-0.5], [0.25] * 3 + [-0.75], twice)
    ]
    masked = "group 2: rollouts that are out of the loss but count in the baseline: 20; "
    masked += "row 7 (rollout 28) 0.5, by the recipe 0.25, row 8 (rollout 24) 0, by the recipe -0.25"
    ((group, rollouts, at, *_, text),) = findings(step, "masked")
    assert (group, rollouts, at, text) == ("2", ["20"], [7, 8, 9], masked)
    assert findings(step, "advantages") == findings(step, "signs") == []


@pytest.mark.parametrize(
    ("size", "second", "off"), [(2, 4, [1]), (4, 4, [0, 1, 2]), (1, 1, [0, 1, 2]), (2, 0, [1])]
)
def test_groups_may_be_cut_by_position_with_any_dispatched_size(size, second, off, declared):
    """The second group was dispatched with the size `second`, and the others with 2. No group is cut by 0."""
    rewards, group = [0.5, 1.0, 0.0, 0.25, 1.0, 0.0, 0.75, 0.5], [0, 0, 1, 1, 1, 1, 2, 2]
    rows = [
        {"group": unit, "rollout": at, "reward": reward, "expected": second if unit == 1 else 2, "tokens": 1}
        | {"logged": reward - statistics.mean(rewards[at // size * size :][:size])}
        for at, (unit, reward) in enumerate(zip(group, rewards, strict=True))
    ]
    step = step_of(declared, rows)
    how = f"as if groups are cut by position, {size} rows each: "
    assert [(each[0], how in each[-1]) for each in findings(step, "mixed")] == [(str(at), True) for at in off]
    assert findings(step, "advantages") == []


def test_a_convention_that_the_recipe_refuses_is_not_tried(declared):
    """A failed rollout has an infinite reward, so it can be in no baseline."""
    rows = counted([(1.0, 1, 0.25)] * 3 + [(0.0, 1, -0.75)])
    rows = [row | {"status": int(Status.COMPLETED)} for row in rows]
    rows.append({**rows[0], "rollout": 99, "reward": math.inf, "status": int(Status.FAILED)})
    step = step_of(declared, rows)
    assert {*step.by_convention} == {"each row counts as a rollout"}
    assert [each[2] for each in findings(step, "counted_twice")] == [[0, 1, 2, 3, 4]]


def test_other_advantages_are_counted_over_the_step(declared):
    """The baseline of the first group is ⅓. It is ½ if a second row or the masked rollout counts."""
    two_ways = [
        {"group": 0, "rollout": at, "reward": reward, "tokens": tokens, "logged": reward - 0.5}
        for at, reward, tokens in ((0, 1.0, 1), (0, 1.0, 1), (1, 1.0, 0), (2, 0.0, 1), (3, 0.0, 1))
    ]
    rows = two_ways + [{**row, "group": 1, "rollout": 9 + row["rollout"]} for row in counted(ODD)]
    text = (
        "5 of 7 advantages are not those of the recipe: row 0 (rollout 0) 0.5, by the recipe 0.6667, row 1 "
        "(rollout 0) "
        "0.5, by the recipe 0.6667, row 3 (rollout 2) -0.5, by the recipe -0.3333 and 2 more; those of "
        "group 0 are as "
        "if each row counts as a rollout as well as if rollouts out of the loss count"
    )
    thirds = [
        pytest.approx(each) for each in ([2 / 3, 2 / 3, -1 / 3, -1 / 3, 0.5], [0.5, 0.5, -0.5, -0.5, 0.7])
    ]
    found = findings(step_of(declared, rows), "advantages")
    assert found == [(None, ["0", "2", "3", "17"], [0, 1, 3, 4, 6], *thirds, text)]


# -- several draws of one prompt ---------------------------------------------------------------------------


def drawn(declared, draws, factors, *, change=None):
    """What is said of one group with the advantages factor × (reward − mean of the draw)."""
    rows = []
    for draw, factor in zip(draws, factors, strict=True):
        mean = statistics.mean(draw)
        for reward in draw:
            row = {
                "group": 7,
                "rollout": len(rows),
                "reward": reward,
                "logged": factor * (reward - mean),
                "tokens": 1,
            }
            rows += [row, {**row, "logged": 9.0}] if len(rows) == 0 and change == "two rows" else [row]
    if change == "one is wrong":
        rows[0]["logged"] = 3.0
    if change == "no advantage":
        rows[1]["logged"] = math.nan
    if change == "out of the loss":
        rows.append({"group": 7, "rollout": 99, "reward": 0.0, "logged": 5.0, "tokens": 0})
    if change == "another group":
        rows.insert(0, {"group": 3, "rollout": 99, "reward": 0.0, "logged": 5.0, "tokens": 1})
    step = step_of(declared, rows)
    return drawn_again(step, int(step.groups.of[-1]))


PAIRS = [[1.0, 0.0], [0.5, 0.25], [0.75, 0.0], [0.0, 0.25], [1.0, 0.5]]
SAID = (
    "{} of its {} rollouts is off by a constant{} ({}), as if its prompt was drawn {} times: if it was, set "
)


@pytest.mark.parametrize(
    ("draws", "factors", "parts", "shown"),
    [
        (PAIRS[:2], [1, 1], "each half", 4),
        (PAIRS[:3], [1, 1, 1], "each of 3 equal parts", 4),
        (PAIRS, [1, 1, 1, 1, 1], "each of 5 equal parts", 4),
        ([[0.0, 1.0, 0.5], [0.25, 1.0, 1.0]], [2, 0.5], "each half", 4),
        ([[0.0, 1.0, 0.0], [0.1, 0.1, 0.1]], [1, 1], "each half", 4),  # a draw with equal rewards
        ([[0.0, 1.0, 0.5, 0.0], [0.25, 1.0, 1.0, 0.0]], [1, 1], "each half", 4),
    ],
)
@pytest.mark.parametrize("change", [None, "two rows", "out of the loss", "another group"])
def test_a_group_of_several_draws_is_said_with_the_shift_of_each(
    draws, factors, parts, shown, change, declared
):
    """The shift of a draw is factor × (mean of all rollouts − mean of the draw).

    A rollout counts once, by its first row.
    """
    every = [reward for draw in draws for reward in draw]
    shifts = [
        f"{factor * (statistics.mean(every) - statistics.mean(draw)):+.4g}"
        for draw, factor in zip(draws, factors, strict=True)
    ]
    scaled = "" if {*factors} == {1} else " and a factor"
    said = SAID.format(parts, len(every), scaled, several(shifts, shown), len(draws))
    assert drawn(declared, draws, factors, change=change) == f"{said}source.group_size={len(draws[0])}"


@pytest.mark.parametrize(
    ("draws", "factors", "change"),
    [
        (PAIRS[:2], [1, -1], None),
        (PAIRS[:2], [1, 0], None),  # logged zeros alone show no draw
        ([[1.0, 0.0, 0.0, 0.0]], [0], None),
        ([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]], [0], None),
        (PAIRS[:2], [1, 1], "no advantage"),
        (PAIRS[:2], [1, 1], "one is wrong"),
        ([[1.0, 0.0, 0.25, 0.5, 0.0]], [1.25], None),  # five rollouts have no equal parts
        ([[1.0], [0.0], [0.5]], [1, 1, 1], None),
    ],
)
def test_other_advantages_are_not_said_to_be_several_draws(draws, factors, change, declared):
    assert drawn(declared, draws, factors, change=change) == ""


def test_several_draws_are_said_of_their_group(declared):
    fair, twice = [(1.0, 1, 0.5), (0.0, 1, -0.5)], [(0.5, 1, 0.125), (0.25, 1, -0.125)]
    ((*_, text),) = findings(step_of(declared, counted(fair, fair + twice)), "advantages")
    said = SAID.format("each half", 4, "", "-0.0625, +0.0625", 2)
    assert text.endswith(f"; group 1: {said}source.group_size=2")


# -- the weights of minibatches ----------------------------------------------------------------------------


def test_wrong_weights_are_found_for_each_minibatch():
    """The recipe's mean is over the rollouts of a minibatch. In minibatch 2, two of three weights are wrong.

    Rows that did not train have no weight, and their minibatch is −1.
    """
    declared = DeclaredRecipe(composed("pipeline=grpo", "pipeline.stages.weight.unit=rollout"))
    tokens, minibatch = [1, 2, 4, 5, 3, 2, 2], [0, 2, 0, 2, 2, -1, 5]
    ours = [1 / 2, 1 / 6, 1 / 8, 1 / 15, 1 / 9, math.nan, 1 / 2]
    factors = [1, 3, 1, 1, 0.25, 1, 1.5]
    rows = [
        {"group": at // 4, "rollout": at, "reward": at / 7, "tokens": count, "minibatch": number}
        | {"weight": factor * weight}
        for at, (count, number, factor, weight) in enumerate(
            zip(tokens, minibatch, factors, ours, strict=True)
        )
    ]
    found = findings(step_of(declared, rows), "weights")
    said = "minibatch {}: {} rows have {} times the weight of the declared mean; Σ weight × tokens is {}"
    assert found == [
        (
            None,
            ["1", "4"],
            [1, 4],
            pytest.approx([1 / 6, 1 / 9]),
            pytest.approx([0.5, 0.25 / 9]),
            said.format(2, "2 of 3", "0.25 to 3", f"{1 + 1 / 3 + 0.25 / 3:.4g}"),
        ),
        (
            None,
            ["6"],
            [6],
            pytest.approx([0.5]),
            pytest.approx([0.75]),
            said.format(5, "1 of 1", "1.5 to 1.5", "1.5"),
        ),
    ]


@pytest.mark.parametrize(
    ("change", "words", "why"),
    [
        ({"weight": None}, (), "the dump has no loss weights"),
        ({"minibatch": None}, (), "the dump does not have all rows of each minibatch"),
        ({"minibatch": -1}, (), "the dump does not have all rows of each minibatch"),
        ({"minibatch": 0}, (), ""),
        (
            {"tokens": None},
            (),
            "the dump has no tokens: set source.tokenizer=PATH to make them from its texts",
        ),
        ({}, ("~pipeline.stages.weight",), "the recipe's mean is not over rows, rollouts, groups or tokens"),
    ],
)
def test_weights_are_checked_only_if_all_that_they_need_is_there(change, words, why):
    row = {"group": 0, "rollout": 0, "reward": 1.0, "tokens": 1, "minibatch": 3, "weight": 1.0}
    row = {name: value for name, value in (row | change).items() if value is not None}
    outcome = CHECKS["weights"][1](step_of(DeclaredRecipe(composed("pipeline=grpo", *words)), [row]))
    assert outcome == ([], why)
