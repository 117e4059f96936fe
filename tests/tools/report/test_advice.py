"""A report shows an advisory beyond its bound and not at it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from busy import busy_batch, stages
from composed import composed
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import flag_override

from headrace import decide
from headrace.pipeline import Pipeline, build_pipeline, make_report
from headrace.pipeline.composing.compose import compose_config, for_hydra
from headrace.pipeline.tools.plan.group_sizes import groups_seen
from headrace.pipeline.tools.report import (
    Advisory,
    advise,
    said_of_unchecked,
    show_advisories,
    symptoms,
    unchecked,
    verdict,
)
from headrace.pipeline.tools.report.advice import Setup
from headrace.pipeline.tools.report.folder import Thinned
from headrace.transforms import CombineIds, Finite, GroupRelativeAdvantage, LossWeight

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
RANGE = {"reward/all/min": 0.0, "reward/all/max": 1.0}
QUIET = {"rows/in": 32.0, "rows/trained": 32.0, "groups/in": 4.0}
BEYOND = 1e-9


def names(numbers, history=()):
    return [advisory.name for advisory in advise(numbers, history)]


def steps_of(key, values, **more):
    return [(step, QUIET | {key: value} | more) for step, value in enumerate(values)]


# -- one rule, one bound ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "number", "bound", "says"),
    [
        (
            "advantage-all-zero",
            "frac_reward_zero_std",
            0.5,
            "60 % of the groups have equal rewards, and teach nothing",
        ),
        ("rollouts-truncated", "rollouts/truncated", 0.25, "30 % of the rollouts were truncated"),
        ("rollouts-failed", "rollouts/failed", 0.1, "12 % of the rollouts failed or were aborted"),
        ("rollouts-empty", "rollouts/empty", 0.1, "12 % of the rollouts have no token in the loss"),
        (
            "groups-incomplete",
            "groups/incomplete",
            0.1,
            "12 % of the groups lack rollouts that were dispatched",
        ),
        ("rewards-missing", "rollouts/unrewarded", 0.1, "12 % of the rollouts have no reward"),
        (
            "gradient-spikes",
            "groups/largest_gradient_share",
            0.5,
            "One group makes up 60 % of the gradient of its step",
        ),
        (
            "trained-without-reward",
            "rollouts/no_reward",
            0.0,
            "0.6 rollouts per step have no reward and count in the denominator of the loss",
        ),
        (
            "tokens-trained-again",
            "tokens/trained_again",
            0.0,
            "0.6 tokens per step train again in another row of their rollout",
        ),
        (
            "stale",
            "staleness/mean",
            2.0,
            "The rollouts are 2.4 policy versions behind the trainer, on average",
        ),
    ],
)
def test_each_rule_fires_beyond_its_bound_and_not_at_it(name, number, bound, says):
    """With fewer than four groups, a group may have any share of the gradient."""
    assert names(QUIET | {number: bound}) == []
    assert names(QUIET | {"groups/in": 3.0, "groups/largest_gradient_share": 0.9}) == []
    assert names(QUIET | {number: bound + BEYOND}) == [name]
    above = 2 * bound or 1.0
    (found,) = advise(QUIET | {number: above}, steps_of(number, [0.0, 0.0, above, above, above]))
    assert found == (name, f"{says} (mean of steps 0 to 4).", number, (2, 3, 4))
    (found,) = advise(QUIET | {number: above}, [(7, QUIET), (8, QUIET | {number: 0.6 * above})])
    assert found == (name, f"{says} (step 8).", number, (8,))
    assert symptoms()[name].title


@pytest.mark.parametrize(
    ("name", "number"), [("learning-rate-zero", "optimiser/lr"), ("gradient-zero", "optimiser/grad_norm")]
)
def test_unchanged_weights_are_reported_only_if_measured(name, number):
    """The number must be exactly 0 at each of the last five steps. An unknown number gives no advisory."""
    assert names(QUIET | {number: 1e-300}) == names(QUIET) == []
    history = steps_of(number, [0.1] * 7 + [0.0] * 5)
    (found,) = advise(history[-1][1], history)
    assert (found.name, found.steps) == (name, (7, 8, 9, 10, 11))
    assert "the weights do not change (steps 7 to 11)" in found.text
    history = steps_of(number, [0.0] * 11 + [0.1])
    assert names(history[-1][1], history) == []


def test_a_symptom_is_checked_or_names_its_missing_data():
    """With all numbers every symptom is checked. Without one, the symptoms that need it are unchecked."""
    full = QUIET | RANGE | {"reward/all/mean": 0.5, "response_length/mean": 9.0, "tis/least_ess": 0.1}
    text = (ROOT / "pipeline/tools/report/symptoms.yaml").read_text()
    bounds = {name: each["bound"] for name, each in yaml.safe_load(text).items() if "bound" in each}
    judged_by = {name: bound["number"] for name, bound in bounds.items()}
    full |= dict.fromkeys([*judged_by.values(), "response_length/max", "survivors/latency/z"], 0.01)
    judged_by |= {"reward-flat": "reward/all/mean", "stalled": "reward/all/mean"}
    judged_by |= {"lengths-explode": "response_length/mean", "off-policy": "tis/least_ess"}
    judged_by |= {"nothing-trains": "rows/trained", "penalty-unused": "response_length/max"}
    judged_by |= {"divisor-unused": "response_length/max", "slow-groups-lost": "survivors/latency/z"}
    cases = {name for bound in bounds.values() for name in bound.get("cases", {}).values()}
    assert set(judged_by) | cases == set(symptoms())
    assert unchecked([(step, full) for step in range(12)]) == []
    assert unchecked([(step, full) for step in range(11)]) == ["reward-flat", "stalled", "lengths-explode"]
    for number in set(judged_by.values()):
        history = [(step, {k: v for k, v in full.items() if k != number}) for step in range(12)]
        assert unchecked(history) == [name for name in symptoms() if judged_by.get(name) == number]


def test_a_symptom_is_unchecked_if_none_of_the_last_five_steps_has_its_number():
    for at, checked in ((0, False), (1, True), (5, True)):
        history = [(step, QUIET | ({"staleness/mean": 0.0} if step == at else {})) for step in range(6)]
        assert ("stale" not in unchecked(history)) == checked


def test_every_step_without_training_is_named():
    trained = [4.0, 0.0, 4.0, 0.0, 4.0]
    history = steps_of("rows/trained", trained)
    (found,) = advise(history[-1][1], history)
    assert (found.name, found.steps) == ("nothing-trains", (1, 3))
    assert found.text == "Nothing was trained at steps 1, 3."
    (found,) = advise(history[1][1], history[:2])
    assert found.text == "Nothing was trained at step 1."
    numbers = {"rows/trained": 0.0, "out/filter/zero_variance": 3.0, "out/gate/incomplete": 1.0}
    assert advise(numbers)[0].text == "Nothing was trained. Most rows left at filter: zero variance."
    assert names(*history[0][1:]) == []
    history = [(step, numbers) for step in (4, 5)]
    (found,) = advise(numbers, history)
    assert found.text == "Nothing was trained at steps 4, 5. Most rows left at filter: zero variance."
    assert advise({"rows/trained": 0.0, "out/gate/failed": 0.0})[0].text == "Nothing was trained."


@pytest.mark.parametrize(("value", "fires"), [(0.5, False), (0.5 - 2**-10, True)])
def test_each_stage_has_its_own_warning_bound(value, fires):
    numbers = QUIET | {"mine/reach_mean": value, "mine/least_reach": 0.5, "other/reach_mean": 0.0}
    numbers |= {"mine/reaching": 0.0, "mine/reach_token": 2.0}
    text = "mine: reach_mean is 0.499, below 0.5 (least_reach)."
    assert advise(numbers) == ([("off-policy", text, "mine/reach_mean", ())] if fires else [])


@pytest.mark.parametrize(
    ("number", "unit"), [("response_length/mean", "tokens"), ("response_characters/mean", "characters")]
)
def test_lengths_explode_above_twice_their_start(number, unit):
    for factor, fires in ((2.0, False), (2.001, True)):
        history = steps_of(number, [100.0] * 7 + [100.0 * factor] * 5)
        assert names(history[-1][1], history) == (["lengths-explode"] if fires else [])
        assert "lengths-explode" not in unchecked(history)
    assert f"{unit} on average" in advise(history[-1][1], history)[0].text
    history = steps_of(number, [1.0] * 6 + [100.0] * 5)
    assert names(history[-1][1], history) == []  # eleven steps are too few


# -- trends of the reward --------------------------------------------------------------------------------


def of_rewards(*quarters):
    """The advisories and the verdict after four steps of each reward, with rollouts between 0 and 1."""
    values = [value for value in quarters for _ in range(4)]
    history = steps_of("reward/all/mean", values, **RANGE)
    return names(history[-1][1], history), verdict(history[-1][1], history)


@pytest.mark.parametrize(
    ("quarters", "found", "said"),
    [
        ((0.1, 0.3, 0.5, 0.7), [], "rose from 0.1 (steps 0 to 3) to 0.7 (steps 12 to 15)."),
        ((0.1, 0.1, 0.1, 0.1201), [], "rose from 0.1 (steps 0 to 3) to 0.12 (steps 12 to 15)."),
        ((0.1, 0.1, 0.1, 0.1199), ["reward-flat"], "is flat: 0.1 in steps 0 to 3, 0.12 in steps 12 to 15."),
        ((0.1, 0.1, 0.1, 0.0801), ["reward-flat"], "is flat: 0.1 in steps 0 to 3, 0.0801 in steps 12 to 15."),
        (
            (0.1, 0.1, 0.1, 0.0799),
            ["reward-flat"],
            "fell from 0.1 (steps 0 to 3) to 0.0799 (steps 12 to 15).",
        ),
        (
            (0.1, 0.3, 0.5, 0.5199),
            ["stalled"],
            "rose from 0.1 (steps 0 to 3) to 0.52 (steps 12 to 15) and no longer rises: it was 0.5 in "
            "steps 8 to 11.",
        ),
        ((0.1, 0.3, 0.5, 0.5201), [], "rose from 0.1 (steps 0 to 3) to 0.52 (steps 12 to 15)."),
        ((0.1, 0.5, 0.9, 0.9), [], "rose from 0.1 (steps 0 to 3) to 0.9 (steps 12 to 15)."),  # the maximum
        (
            (0.95, 0.95, 0.95, 0.95),
            [],
            "stays near the greatest seen: 0.95 in steps 0 to 3, 0.95 in steps 12 to 15.",
        ),
    ],
)
def test_flat_stalled_and_falling_rewards_follow_their_rules(quarters, found, said):
    fired, words = of_rewards(*quarters)
    assert fired == found
    assert words == f"The mean reward {said}"


@pytest.mark.parametrize(("spread", "said"), [(0.06, "is flat"), (0.03, "fell")])
def test_a_reward_falls_only_beyond_two_standard_errors(spread, said):
    """For 8 alternating steps s² = 8/7 · spread². Two standard errors are 2√(2s²/8) = 1.07 · spread."""
    values = [mean + spread * (-1) ** step for mean in (0.4, 0.4, 0.4, 0.35) for step in range(8)]
    history = steps_of("reward/all/mean", values, **RANGE)
    assert verdict(history[-1][1], history).startswith(f"The mean reward {said}")
    assert ("two standard errors, 0.064" in verdict(history[-1][1], history)) == (said == "is flat")
    rising = steps_of("reward/all/mean", values[::-1], **RANGE)
    assert verdict(rising[-1][1], rising).startswith("The mean reward " + said.replace("fell", "rose"))


@pytest.mark.parametrize("reward", [0.1, -0.7, 1e12])
def test_rounding_of_a_mean_reward_is_not_a_movement(reward):
    """The mean of eight values 0.1 differs from that of seven by rounding."""
    up, down = (float(np.nextafter(reward, end)) for end in (np.inf, -np.inf))
    for means in ([reward] * 8 + [up] * 8, [reward] * 8 + [down] * 8):
        history = steps_of("reward/all/mean", means)
        for _, numbers in history:
            numbers |= {"reward/all/min": reward, "reward/all/max": reward}
        assert verdict(history[-1][1], history).startswith("The mean reward is flat: ")


def test_the_verdict_gives_the_reason_of_a_flat_reward():
    history = steps_of("reward/all/mean", [0.1] * 16, **RANGE, frac_reward_zero_std=0.92)
    assert verdict(history[-1][1], history) == (
        "The mean reward is flat: 0.1 in steps 0 to 3, 0.1 in steps 12 to 15. 92 % of the groups have equal "
        "rewards, and teach nothing (mean of steps 11 to 15)."
    )


def test_eleven_steps_give_no_trend():
    history = steps_of("reward/all/mean", [0.1] * 11, **RANGE)
    assert verdict(history[-1][1], history).endswith(": 11 steps are too few to say whether it learns.")
    assert verdict(QUIET, steps_of("rows/in", [4.0] * 20)) == "No reward was recorded."
    history = steps_of("reward/all/mean", [float("nan")] * 13)
    assert verdict(history[-1][1], history) == "No reward was recorded."


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0.01, 100), st.floats(-50, 50))
def test_the_unit_of_the_reward_changes_no_advisory(values, factor, shift):
    """If rewards are multiplied and shifted, the same rules fire."""

    def kinds(rewards, low, high):
        more = {"reward/all/min": low, "reward/all/max": high}
        history = steps_of("reward/all/mean", rewards, **more)
        return names(history[-1][1], history)

    def bounds_are_near(rewards):
        size = len(rewards) // 4
        if len(rewards) < 12:
            return False
        quarters = [np.mean(rewards[:size]), np.mean(rewards[-2 * size : -size]), np.mean(rewards[-size:])]
        gains = [quarters[2] - quarters[0], quarters[2] - quarters[1]]
        marks = [abs(abs(gain) - 0.02) for gain in gains] + [abs(1 - quarters[2] - 0.1)]
        return min(marks) < 1e-6

    if not bounds_are_near(values):
        moved = [factor * value + shift for value in values]
        assert kinds(values, 0.0, 1.0) == kinds(moved, shift, factor + shift)


# -- the numbers that rules read -------------------------------------------------------------------------


def test_permuted_rows_have_the_same_numbers(make_batch):
    batch = busy_batch(make_batch)
    batch["status"] = torch.tensor([0, 0, 0, 1, 0, 0, 0, 3, 0])
    found = []
    for order in (torch.arange(9), torch.randperm(9, generator=torch.Generator().manual_seed(3))):
        pipeline = Pipeline(stages(split=None, weight=LossWeight()))
        pipeline(batch[order])
        found.append(make_report(pipeline).numbers)
    keys = ("rollouts/truncated", "rollouts/failed", "response_length/mean", "groups/informative")
    for key in (*keys, "groups/incomplete", "groups/largest_gradient_share"):
        assert found[0][key] == pytest.approx(found[1][key], rel=1e-12), key


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.sampled_from([0.0, 1.0])), min_size=1))
def test_equal_rewards_are_counted_within_each_role(rollouts):
    """The 1 of a solver and the 0 of a verifier are not compared."""
    from batches import batch_of

    groups, roles, rewards = map(list, zip(*rollouts, strict=True))
    batch = batch_of(rewards, groups)
    batch["role"] = torch.tensor(roles)
    peers, by_role = CombineIds(keys=["group_id", "role"]), GroupRelativeAdvantage(group_key="peer_id")
    report = make_report(Pipeline({"peers": peers, "advantage": by_role}).run(batch))
    members = {}
    for group, role, reward in rollouts:
        members.setdefault((group, role), []).append(reward)
    several = [found for found in members.values() if len(found) > 1]
    equal = [len(set(found)) == 1 for found in several]
    seen = groups_seen(report)
    assert report.numbers.get("frac_reward_zero_std", 0) == pytest.approx(sum(equal) / max(len(equal), 1))
    assert report.numbers.get("groups/informative", 0) == pytest.approx(
        sum(not each for each in equal) / max(len(equal), 1)
    )
    assert (seen.equal.sum(), seen.compared.sum()) == (sum(equal), len(equal))
    assert report.groups["id"].tolist() == list(dict.fromkeys(groups))
    assert report.columns["advantage_by_row"] == pytest.approx(report.columns["advantage"], nan_ok=True)


# -- symptoms --------------------------------------------------------------------------------------------


def test_overrides_suggested_for_a_symptom_compose():
    words = {each.overrides for symptom in symptoms().values() for each in symptom.remedies if each.overrides}
    for line in sorted(words):
        if all(word.startswith(("pipeline", "+pipeline", "criterion@")) for word in line.split()):
            composed(*line.split())
        else:
            build_pipeline(compose_config("config", *line.split()).pipeline)


FIRED = [
    (name, remedy) for name, symptom in symptoms().items() for remedy in symptom.remedies if remedy.overrides
]


def test_the_options_that_a_report_shows_are_those_of_its_task_and_recipe():
    """Options of train, or of a stage that the recipe lacks, are described in words."""
    for task, recipe in (("replay", "as/verl"), ("audit", "gfpo"), ("replay", "as/nemo_rl")):
        typed = [f"task={task}", f"pipeline={recipe}"]
        config = compose_config("config", *typed)
        shown = [remedy.under(Setup(config, typed)) for _, remedy in FIRED]
        words = [remedy.overrides.split() for remedy in shown if remedy is not None]
        assert not any(
            word.startswith(("train.", "optimizer.", "group_size=")) for line in words for word in line
        )
        here = [line for line in words if not any(word.startswith(("task=", "pipeline=")) for word in line)]
        filters = bool(config.pipeline.stages.get("filter"))
        assert (["pipeline.stages.filter.action=drop"] in words) == filters
        assert any(here)
        own = {word for line in here for word in line if "@" not in word and ".also." not in word}
        compose_config("config", *typed, *sorted(own))


def test_an_advisory_on_the_terminal_ends_with_its_first_remedy_and_its_options():
    seen = 0
    for name, symptom in symptoms().items():
        (line,) = show_advisories([Advisory(name, "Said.", "", ())])
        first = next((each for each in symptom.remedies if each.under(None) is not None), None)
        said = f"{name}: Said."
        if first is not None:
            options = f": {first.under(None).overrides}" if first.under(None).overrides else ""
            said += f" → {first.under(None).text.removesuffix('.').replace('`', '')}{options}"
            seen += bool(options)
        assert line.plain == said
    assert seen > 3


def test_a_recipe_with_objects_of_python_gets_remedies():
    config = compose_config("config", "pipeline=grpo")
    with flag_override(config, "allow_objects", True):
        config.pipeline.stages.filter.criterion = Finite()
    added = "pipeline.stages.filter.also=not_truncated"
    remedy = next(each for _, each in FIRED if each.overrides == added)
    assert remedy.under(Setup(config)) == remedy


def is_advised(line: str, *typed: str) -> bool:
    """Whether a run with these overrides, of which it knows only the configuration, gets this advice."""
    setup = Setup(compose_config("config", *for_hydra(typed)))
    return next(each for _, each in FIRED if each.overrides == line).under(setup) is not None


@pytest.mark.parametrize(
    "line", sorted({each.overrides for _, each in FIRED} - {"task=plan source.path=FOLDER"})
)
def test_a_report_does_not_advise_what_the_run_already_has(line):
    assert not is_advised(line, *line.split())


@pytest.mark.parametrize(
    ("typed", "does", "lacks"),
    [
        (
            "pipeline.stages.second=filter pipeline.after.second=filter "
            "pipeline.stages.second.criterion=not_truncated",
            "pipeline.stages.filter.also=not_truncated",
            "pipeline=dapo",
        ),
        (
            "pipeline.stages.filter.criterion=not_truncated",
            "pipeline.stages.filter.also=not_truncated",
            "pipeline.stages.weight.unit=group",
        ),
        (
            "pipeline.stages.long=overlong pipeline.stages.long.max_length=9 pipeline.stages.long.cache=2 "
            "pipeline.after.long=collapse",
            "pipeline=dapo",
            "pipeline=gr3",
        ),
        (
            "pipeline=as/verl pipeline.stages.weight.unit=group",
            "pipeline.stages.weight.unit=group",
            "pipeline=tis",
        ),
        ("pipeline=tis", "pipeline=tis", "pipeline=icepop"),
    ],
)
def test_a_part_under_another_name_follows_the_advice(typed, does, lacks):
    assert not is_advised(does, *typed.split())
    assert is_advised(lacks, *typed.split())


# -- thinned steps ---------------------------------------------------------------------------------------


@given(st.integers(2, 9), st.integers(1, 200))
def test_thinning_keeps_both_ends_and_even_spacing(most, number):
    some = Thinned(most)
    for item in range(number):
        some.add(item)
        kept = some.all()
        assert (kept[0], kept[-1]) == (0, item)
        assert len(kept) <= most
        assert kept == sorted({*kept})
        gaps = {b - a for a, b in pairwise(kept[:-1])}
        assert len(gaps) <= 1


# -- in the terminal -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, ""), (1, "a"), (3, "a, b, c"), (4, "a, b and 2 more"), (5, "a, b and 3 more")],
)
def test_three_unchecked_symptoms_are_named_or_two_and_the_number_of_the_others(number, said):
    found = said_of_unchecked([*"abcde"][:number])
    assert found == (f"not checked, for lack of data: {said}" if number else "")


@pytest.mark.parametrize(
    ("number", "options", "lines"),
    [
        (3, (), ["first, a: It is a.", "b: It is b.", "c: It is c."]),
        (4, (), ["first, a: It is a.", "b: It is b.", "c: It is c.", "and 1 more, on the page"]),
        (1, ("It is a.", ["x"]), ["It is a.", "not checked, for lack of data: x"]),
        (1, ("So. It is a.",), ["So.", "a: It is a."]),  # no sentence of a verdict is shown twice
        (0, ("",), [""]),
    ],
)
def test_three_advisories_are_shown_and_the_number_of_the_others(number, options, lines):
    said = [Advisory(name, f"It is {name}.", "", ()) for name in "abcd"[:number]]
    assert [text.plain for text in show_advisories(said, *options)] == lines


def test_an_advisory_names_a_penalty_that_no_response_reaches():
    columns = {"group_id": [0] * 4, "rollout_id": range(4), "reward": [0.0, 1.0, 1.0, 0.0]}
    for longest, max_length, said in ((6, 20480, True), (6, 14, True), (6, 12, False), (9, 12, False)):
        options = {"overlong": {"max_length": max_length, "cache": 2 if max_length < 99 else 4096}}
        tokens = {"tokens": [longest, 2, 3, 4]}
        decision = decide(columns | tokens, "dapo", group_size=4, minibatches=1, stages=options)
        found = [each for each in make_report(decision).advisories if each.name == "penalty-unused"]
        assert bool(found) == said, (longest, max_length)
        if max_length == 20480:
            words = "overlong changed 0 rewards: the longest response has 6 tokens"
            assert found[0].text == f"{words}, and the stage punishes responses above 16,384."


def test_an_advisory_names_a_divisor_that_no_response_reaches():
    columns = {"group_id": [0] * 2, "rollout_id": range(2), "reward": [0.0, 1.0], "tokens": [5, 2]}
    words = "weight divides the loss of a rollout by 3,000 tokens, and the longest response has 5."
    for length, said in ((3000, [words]), (51, [words.replace("3,000", "51")]), (50, [])):
        decision = decide(columns, "dr_grpo", group_size=2, stages={"weight": {"length": length}})
        advisories = make_report(decision).advisories
        assert [each.text for each in advisories if each.name == "divisor-unused"] == said


def test_a_rule_ignores_the_steps_that_it_does_not_judge():
    """Ten of twenty steps have the four groups that the rule needs. The share is 0 in step 1, else 0.75."""
    key = "groups/largest_gradient_share"
    history = [
        (step, QUIET | {key: 0.75 * (step != 1), "groups/in": 4.0 if step % 2 else 1.0}) for step in range(20)
    ]
    (found,) = advise(history[-1][1], history)
    assert found.steps == tuple(range(3, 20, 2))


def test_the_first_remedy_depends_on_which_groups_have_equal_rewards():
    """90 % of the groups have equal rewards. If most of these are solved, more rollouts do not help."""
    told = {}
    for solved, unsolved in ((0.81, 0.09), (0.09, 0.81), (0.45, 0.45)):
        numbers = QUIET | {"frac_reward_zero_std": 0.9, "solve_all": solved, "solve_none": unsolved}
        (found,) = advise(numbers)
        among = "Of all groups, also those with different rewards"
        assert f"{among}, {solved * 100:.0f} % are solved by every rollout" in found.text
        told[solved, unsolved] = found.name, symptoms()[found.name].remedies[0].text
        assert str(show_advisories([found])[0]).count(told[solved, unsolved][1].split(".")[0]) == 1
    assert told[0.81, 0.09][0] == "groups-solved"
    assert told[0.81, 0.09][1].startswith("Sample harder prompts")
    assert all("more rollouts" not in each.text for each in symptoms()["groups-solved"].remedies)
    assert told[0.09, 0.81][0] == "groups-unsolved"
    assert told[0.45, 0.45][0] == "advantage-all-zero"
    (found,) = advise(QUIET | {"frac_reward_zero_std": 0.9})  # rewards of more than two values
    assert found.name == "advantage-all-zero"
