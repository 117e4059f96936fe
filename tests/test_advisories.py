"""A report shows an advisory beyond its bound and not at it."""

from __future__ import annotations

import re
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
from tensordict import TensorDict

from headrace import decide, load_pipeline
from headrace.pipeline import Pipeline, build_pipeline, make_report
from headrace.pipeline.composing import compose_config
from headrace.pipeline.report import (
    Advice,
    Advisory,
    advise,
    page_data,
    show_advisories,
    symptoms,
    unchecked,
    verdict,
)
from headrace.pipeline.report.advice import Setup
from headrace.pipeline.report.folder import Thinned
from headrace.pipeline.tasks.group_sizes import groups_seen
from headrace.transforms import CombineIds, GroupRelativeAdvantage, LossWeight, Status

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
RANGE = {"reward/all/min": 0.0, "reward/all/max": 1.0}
QUIET = {"rows/in": 32.0, "rows/trained": 32.0, "groups/in": 4.0}
BEYOND = 1e-9


def names(numbers, history=()):
    return [advisory.name for advisory in advise(numbers, history)]


def steps_of(key, values, **more):
    return [(step, QUIET | {key: value} | more) for step, value in enumerate(values)]


# -- one rule, one bound ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "number", "bound"),
    [
        ("advantage-all-zero", "frac_reward_zero_std", 0.5),
        ("rollouts-truncated", "rollouts/truncated", 0.25),
        ("rollouts-failed", "rollouts/failed", 0.1),
        ("rollouts-empty", "rollouts/empty", 0.1),
        ("groups-incomplete", "groups/incomplete", 0.1),
        ("gradient-spikes", "groups/largest_gradient_share", 0.5),
        ("trained-without-reward", "rollouts/no_reward", 0.0),
        ("stale", "staleness/mean", 2.0),
    ],
)
def test_each_rule_fires_beyond_its_bound_and_not_at_it(name, number, bound):
    """Of fewer than four groups, one may carry the gradient."""
    assert names(QUIET | {number: bound}) == []
    assert names(QUIET | {"groups/in": 3.0, "groups/largest_gradient_share": 0.9}) == []
    assert names(QUIET | {number: bound + BEYOND}) == [name]
    above = 2 * bound or 1.0
    (found,) = advise(QUIET | {number: above}, steps_of(number, [0.0, 0.0, above, above, above]))
    assert found.number == number
    assert found.steps == (2, 3, 4)
    assert "at step" in found.text
    assert symptoms()[name].title


def test_an_advisory_uses_the_last_five_steps():
    for old, new in ((1.0, 0.0), (0.0, 1.0)):
        history = steps_of("rollouts/truncated", [old] * 7 + [new] * 5)
        assert names(history[-1][1], history) == (["rollouts-truncated"] if new else [])
    history = steps_of("rollouts/truncated", [0.0, 0.0, 0.0, 0.0, 1.0])
    assert names(history[-1][1], history) == []  # one of five is a mean of 0.2


@pytest.mark.parametrize(
    ("name", "number"), [("learning-rate-zero", "optimiser/lr"), ("gradient-zero", "optimiser/grad_norm")]
)
def test_unchanged_weights_are_reported_only_if_measured(name, number):
    """The number must be exactly 0 at each of the last five steps; an unknown number gives no advisory."""
    assert names(QUIET | {number: 1e-300}) == names(QUIET) == []
    history = steps_of(number, [0.1] * 7 + [0.0] * 5)
    (found,) = advise(history[-1][1], history)
    assert (found.name, found.steps) == (name, (7, 8, 9, 10, 11))
    assert "the weights do not change (steps 7 to 11)" in found.text
    history = steps_of(number, [0.0] * 11 + [0.1])
    assert names(history[-1][1], history) == []


def test_a_symptom_is_checked_or_names_its_missing_data():
    """With all numbers every symptom is checked; without one, the symptoms that need it are unchecked."""
    full = QUIET | RANGE | {"reward/all/mean": 0.5, "response_length/mean": 9.0, "tis/least_ess": 0.1}
    full |= {"response_length/max": 9.0}
    text = (ROOT / "pipeline/report/symptoms.yaml").read_text()
    bounds = {name: each["bound"] for name, each in yaml.safe_load(text).items() if "bound" in each}
    judged_by = {name: bound["number"] for name, bound in bounds.items()}
    full |= dict.fromkeys(judged_by.values(), 0.01)
    judged_by |= {"reward-flat": "reward/all/mean", "stalled": "reward/all/mean"}
    judged_by |= {"lengths-explode": "response_length/mean", "off-policy": "tis/least_ess"}
    judged_by |= {"nothing-trains": "rows/trained", "penalty-unused": "response_length/max"}
    judged_by |= {"divisor-unused": "response_length/max"}
    assert set(judged_by) == set(symptoms())
    assert unchecked([(step, full) for step in range(12)]) == []
    assert unchecked([(step, full) for step in range(11)]) == ["reward-flat", "stalled", "lengths-explode"]
    for number in set(judged_by.values()):
        history = [(step, {k: v for k, v in full.items() if k != number}) for step in range(12)]
        assert unchecked(history) == [name for name in symptoms() if judged_by[name] == number]


def test_every_step_without_training_is_named():
    trained = [4.0, 0.0, 4.0, 0.0, 4.0]
    history = steps_of("rows/trained", trained)
    (found,) = advise(history[-1][1], history)
    assert (found.name, found.steps) == ("nothing-trains", (1, 3))
    assert found.text == "Nothing was trained at steps 1 and 3."
    numbers = {"rows/trained": 0.0, "out/filter/zero_variance": 3.0, "out/gate/incomplete": 1.0}
    assert advise(numbers)[0].text == "Nothing was trained: most rows were in groups with equal rewards."
    assert names(*history[0][1:]) == []


@pytest.mark.parametrize(("value", "fires"), [(0.5, False), (0.5 - BEYOND, True)])
def test_each_stage_has_its_own_warning_bound(value, fires):
    numbers = QUIET | {"mine/reach_mean": value, "mine/least_reach": 0.5, "other/reach_mean": 0.0}
    found = advise(numbers)
    assert [each.number for each in found] == (["mine/reach_mean"] if fires else [])


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


# -- whether it learns -----------------------------------------------------------------------------------


def of_rewards(*quarters):
    """Four steps of each reward, of rollouts between 0 and 1."""
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
        ((0.1, 0.1, 0.1, 0.0799), ["reward-flat"], "fell from 0.1 (steps 0 to 3) to 0.0799 (steps 12 to"),
        ((0.1, 0.3, 0.5, 0.5199), ["stalled"], "rose from 0.1 (steps 0 to 3) to 0.52 (steps 12 to 15) and"),
        ((0.1, 0.3, 0.5, 0.5201), [], "rose from 0.1 (steps 0 to 3) to 0.52 (steps 12 to 15)."),
        ((0.1, 0.5, 0.9, 0.9), [], "rose from 0.1 (steps 0 to 3) to 0.9 (steps 12 to 15)."),  # at its top
        ((0.95, 0.95, 0.95, 0.95), [], "stays near the greatest seen: 0.95 in steps 0 to 3, 0.95 in steps"),
    ],
)
def test_flat_stalled_and_falling_follow_their_rules(quarters, found, said):
    fired, words = of_rewards(*quarters)
    assert fired == found
    assert words.startswith(f"The mean reward {said}")


@pytest.mark.parametrize(("spread", "said"), [(0.06, "is flat"), (0.03, "fell")])
def test_a_reward_falls_only_beyond_two_standard_errors(spread, said):
    """Of quarters of 8 steps, alternating: s² = 8/7 · spread², so 2 · √(2 s²/8) = 1.07 · spread."""
    values = [mean + spread * (-1) ** step for mean in (0.4, 0.4, 0.4, 0.35) for step in range(8)]
    history = steps_of("reward/all/mean", values, **RANGE)
    assert verdict(history[-1][1], history).startswith(f"The mean reward {said}")
    assert ("two standard errors, 0.064" in verdict(history[-1][1], history)) == (said == "is flat")
    rising = steps_of("reward/all/mean", values[::-1], **RANGE)
    assert verdict(rising[-1][1], rising).startswith("The mean reward " + said.replace("fell", "rose"))


@pytest.mark.parametrize("reward", [0.1, -0.7, 1e12])
def test_rounding_of_a_mean_reward_is_no_movement(reward):
    """The mean of eight values 0.1 differs from that of seven by rounding."""
    up, down = (float(np.nextafter(reward, end)) for end in (np.inf, -np.inf))
    for means in ([reward] * 8 + [up] * 8, [reward] * 8 + [down] * 8):
        history = steps_of("reward/all/mean", means)
        for _, numbers in history:
            numbers |= {"reward/all/min": reward, "reward/all/max": reward}
        assert verdict(history[-1][1], history).startswith("The mean reward is flat: ")


def test_a_flat_reward_has_its_reason():
    history = steps_of("reward/all/mean", [0.1] * 16, **RANGE, frac_reward_zero_std=0.92)
    assert verdict(history[-1][1], history) == (
        "The mean reward is flat: 0.1 in steps 0 to 3, 0.1 in steps 12 to 15. 92 % of the groups have equal "
        "rewards, and teach nothing (mean of steps 11 to 15, and over all 16 steps)."
    )


def test_eleven_steps_give_no_trend():
    history = steps_of("reward/all/mean", [0.1] * 11, **RANGE)
    assert verdict(history[-1][1], history).endswith(": 11 steps are too few to say whether it learns.")
    assert verdict(QUIET, steps_of("rows/in", [4.0] * 20)) == "No reward was recorded."
    history = steps_of("reward/all/mean", [float("nan")] * 13)
    assert verdict(history[-1][1], history) == "No reward was recorded."


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0.01, 100), st.floats(-50, 50))
def test_the_unit_of_the_reward_changes_no_verdict(values, factor, shift):
    """Rewards are multiplied and shifted; the verdict is the same."""

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


def test_the_numbers_behind_the_rules_by_hand(make_batch):
    """Rollout 1 has two rows, one truncated; rollout 2 failed. Tokens by rollout: 2, 4, 2 and 2."""
    batch = make_batch([1.0, 3, 3, 5, 1], [0, 0, 0, 1, 1], [0, 1, 1, 2, 3])
    batch["status"] = torch.tensor(
        [int(Status[name]) for name in ("COMPLETED", "COMPLETED", "TRUNCATED", "FAILED", "COMPLETED")]
    )
    batch["masks", "all_assistant_mask"] = torch.tensor([[True, False, True, False]] * 5)
    numbers = make_report(Pipeline({}).run(batch)).numbers
    assert numbers["rollouts/truncated"] == 0.25
    assert numbers["rollouts/failed"] == 0.25
    assert numbers["response_length/mean"] == 2.5
    assert numbers["response_length/max"] == 4


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
def test_rewards_compared_by_role_are_equal_within_a_role(rollouts):
    """A solver's 1 and a verifier's 0 are not compared."""
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


def test_a_group_of_large_advantages_carries_the_gradient(make_batch):
    """Advantages ±1 in four groups and ±9 in one, of one token each: 18 of 26."""
    rewards = [value for size in (1, 1, 1, 1, 9) for value in (size, -size)]
    pipeline = Pipeline({"advantage": GroupRelativeAdvantage(scale="none")})
    batch = make_batch([float(value) for value in rewards], [i // 2 for i in range(10)])
    batch["masks", "all_assistant_mask"] = torch.tensor([[True, False, False, False]] * 10)
    pipeline(batch)
    report = make_report(pipeline)
    assert report.numbers["groups/largest_gradient_share"] == pytest.approx(18 / 26)
    (found,) = report.advisories
    assert found.text == "One group makes up 69 % of the gradient of its step."


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
    """Those of train, or of a stage that the recipe does not have, are said in words, or left out."""
    for task, recipe in (("replay", "as/verl"), ("audit", "gfpo"), ("replay", "as/nemo_rl")):
        typed = [f"task={task}", f"pipeline={recipe}"]
        config = compose_config("config", *typed)
        shown = [(remedy, remedy.under(Setup(config))) for _, remedy in FIRED]
        words = [now.overrides.split() for _, now in shown if now is not None and now.overrides]
        assert all(now.text.endswith(before.elsewhere) for before, now in shown if now and not now.overrides)
        assert not any(
            word.startswith(("train.", "optimizer.", "group_size=")) for line in words for word in line
        )
        here = [line for line in words if not any(word.startswith(("task=", "pipeline=")) for word in line)]
        assert here
        filters = bool(config.pipeline.stages.get("filter"))
        assert (["pipeline.stages.filter.action=drop"] in words) == filters
        assert any("fresh" in word for line in words for word in line) == filters  # of whatever criterion
        compose_config("config", *typed, *sorted({word for line in here for word in line}))


ROWS = {"group_id": [0, 0, 1, 1], "rollout_id": [0, 1, 2, 3], "reward": [1.0] * 4, "tokens": [2] * 4}


def test_the_options_on_a_page_of_python_are_arguments_that_change_the_run():
    """What the run has already is not shown: it masks missing rewards, and drops or has no groups alike."""
    options = {"group_size": 2, "missing": "mask", "minibatches": 1}
    options |= {"stages": {"filter": {"action": "drop"}}}
    before = make_report(decide(ROWS, "grpo", **options))
    found = [Advisory(name, "It is so.", "", ()) for name in symptoms()]
    advice = [Advice("", found, [])]
    shown = page_data([before], title="", advice=advice)["symptoms"]
    words = [one["overrides"] for symptom in shown for one in symptom["remedies"] if one["overrides"]]
    assert len(words) > 9
    had = repr(load_pipeline("grpo", **options))
    for each in words:
        if not each.startswith("headrace "):
            whole = each if each.startswith("load_pipeline(recipe, ") else f"load_pipeline({each})"
            after = eval(whole, {"load_pipeline": load_pipeline, "recipe": "grpo"})
            assert repr(after) != had, each
    assert not any("missing" in each or '"action": "drop"' in each for each in words)


@pytest.mark.parametrize(
    ("changes", "options", "cause", "remedy"),
    [
        ({}, {"group_size": 3, "on_incomplete": "drop"}, "incomplete", "min_rollouts"),
        ({}, {"group_size": 2}, "equal_rewards", "Sample prompts"),
        ({"tokens": [0] * 4}, {"group_size": 2}, "no_tokens", ""),
    ],
)
def test_the_remedy_for_nothing_trained_is_against_what_took_most_rows(changes, options, cause, remedy):
    report = make_report(decide(ROWS | changes, "grpo", minibatches=1, **options))
    found = report.advisories[0]
    assert (found.name, found.cause) == ("nothing-trains", cause)
    later = [(0, report.numbers), (1, {"rows/trained": 1.0})]
    assert advise(later[1][1], later)[0].cause == cause
    (line,) = show_advisories([found._replace(text="It is so.")])
    assert remedy in line.plain.replace("pipeline.loss_mask_key", "")


@pytest.mark.parametrize(
    ("solved", "cause", "remedy"),
    [("solve_none", "too hard.", "easier"), ("solve_all", "too easy.", "leave out those")],
)
def test_groups_of_equal_rewards_say_whether_prompts_are_too_hard_or_too_easy(solved, cause, remedy):
    numbers = QUIET | {"frac_reward_zero_std": 0.9, "solve_none": 0.1, "solve_all": 0.1, solved: 0.8}
    (found,) = advise(numbers)
    assert found.cause == solved
    assert found.text.endswith(f"many prompts are probably {cause}")
    said = [each.text for each in symptoms()[found.name].remedies if each.when == found.cause]
    assert any(remedy in text for text in said)
    (found,) = advise(numbers | {solved: 0.1})  # neither: rewards of few values, or a constant
    assert found.cause == ""


def test_what_five_steps_say_is_no_cause_if_all_steps_say_another():
    """Of 20 steps the last five are of groups that none solves, and the others of groups that all solve."""
    equal = [(step, QUIET | {"frac_reward_zero_std": 0.6}) for step in range(20)]
    for step, numbers in equal:
        numbers |= {"solve_none": 0.6 * (step >= 15), "solve_all": 0.6 * (step < 15)}
    (found,) = advise(equal[-1][1], equal)
    assert found.cause == ""
    assert "Of all groups, 0 % (over all 20 steps 45 %) are solved by every rollout and 60 %" in found.text
    assert "probably" not in found.text


# -- some of many ----------------------------------------------------------------------------------------


@given(st.integers(2, 9), st.integers(1, 200))
def test_thinning_keeps_both_ends_and_even_spacing(most, number):
    some = Thinned(most)
    for item in range(number):
        some.add(item)
        kept = some.all()
        assert (kept[0], kept[-1]) == (0, item)
        assert len(kept) <= most
        gaps = {b - a for a, b in pairwise(kept[:-1])}
        assert len(gaps) <= 1


# -- in the terminal -----------------------------------------------------------------------------------------


def test_an_advisory_in_the_terminal_has_a_remedy_that_the_task_takes():
    """`group_size` is an option of train alone, and a remedy in Python is none of a command."""
    config = compose_config("config", "task=replay")
    found = [Advisory("advantage-all-zero", "Most advantages are 0.", "", (), cause) for cause in CAUSES]
    said = [
        show_advisories([each], setup=Setup(config))[0].plain.partition("→ ")[2].partition(": ")
        for each in found
    ]
    assert {words for _, _, words in said} == {"headrace task=plan source.path=FOLDER"}
    for name, symptom in symptoms().items():
        for text in show_advisories([Advisory(name, "", "", ())], setup=Setup(config)):
            assert "In Python" not in text.plain
            assert not re.search(r"\w\(.*\)", text.plain), name
        assert not re.search(r"\w\(.*\)", symptom.needs), name


CAUSES = ("solve_none", "solve_all", "")
OF_RECIPES = {name for _, remedy in FIRED for name in re.findall(r"\bpipeline=(\w+)", remedy.overrides)}


@pytest.mark.parametrize("recipe", sorted(OF_RECIPES))
def test_no_recipe_is_advised_to_who_has_it(recipe):
    """Nor where its numbers are tuned; and none is in plain grpo."""
    tuned = {"maxrl": ["pipeline.stages.advantage.eps=1e-6"], "dr_grpo": ["pipeline.stages.weight.length=99"]}
    config = compose_config("config", "task=replay", f"pipeline={recipe}", *tuned.get(recipe, ()))
    remedy = FIRED[0][1]._replace(overrides=f"pipeline={recipe}")
    assert remedy.under(Setup(config)) is None
    assert remedy.under(Setup(compose_config("config", "task=replay"))) == remedy


def test_a_recipe_is_advised_to_who_has_its_options_but_another_criterion():
    remedy = FIRED[0][1]._replace(overrides="pipeline=gfpo")
    words = ("pipeline.stages.filter.action=exclude", "+pipeline.stages.filter.criterion.by=efficiency")
    assert remedy.under(Setup(compose_config("config", "task=replay", *words))) == remedy


def test_no_remedy_is_given_twice():
    """None of two symptoms, and none beside its cause."""
    config = compose_config("config", "task=replay")
    found = [Advisory(name, "It is so.", "", ()) for name in ("rewards-missing", "trained-without-reward")]
    found += [Advisory("reward-flat", "It is so.", "", (), because="advantage-all-zero")]
    lines = [text.plain for text in show_advisories(found, setup=Setup(config))]
    assert ["pipeline.stages.collapse.missing=mask" in line for line in lines] == [True, False, False]
    assert lines[2] == "reward-flat: It is so. Probably, in part, because of advantage-all-zero."


def test_more_rollouts_are_no_remedy_for_prompts_that_none_solves():
    remedies = symptoms()["advantage-all-zero"].remedies
    fitting = {cause: [each.overrides for each in remedies if each.fits(cause)] for cause in CAUSES}
    assert ["group_size=16" in words for words in fitting.values()] == [False, True, True]


def test_the_terminal_has_few_lines_of_advice():
    """The first three advisories; what the verdict says, once; what nobody can tell, in one line."""
    said = [Advisory(name, f"It is {name}.", "", ()) for name in list(symptoms())[:5]]
    verdict = "The mean reward is flat. It is nothing-trains."
    lines = [text.plain for text in show_advisories(said, verdict, list(symptoms()))]
    assert lines[0] == "The mean reward is flat."
    assert [line.partition(":")[0] for line in lines[1:4]] == [
        "first, nothing-trains",
        *list(symptoms())[1:3],
    ]
    assert lines[4] == "and 2 more, on the page"
    assert lines[5].startswith("not checked, for lack of data: nothing-trains, rewards-missing and ")
    assert len(lines) == 6
    assert len(lines[5]) < 80


# -- causes --------------------------------------------------------------------------------------------------


def test_a_cause_comes_before_what_it_causes():
    """Groups that are equal since their rollouts were cut off; else truncation is another matter."""
    both = QUIET | {"frac_reward_zero_std": 0.8, "rollouts/truncated": 0.6}
    for cut, because in ((0.5, "rollouts-truncated"), (0.3, "")):
        found = advise(both | {"groups/equal_and_truncated": cut})
        assert [each.because for each in found if each.name == "advantage-all-zero"] == [because]
        order = [each.name for each in found]
        assert order.index("rollouts-truncated") == (0 if because else 1)
    history = steps_of("optimiser/lr", [0.0] * 16, **RANGE, **{"reward/all/mean": 0.1})
    assert [(each.name, each.reason) for each in advise(history[-1][1], history)] == [
        ("learning-rate-zero", ""),
        ("reward-flat", "Because of learning-rate-zero."),
    ]
    assert "The learning rate is 0: the weights do not change" in verdict(history[-1][1], history)
    history[0][1]["optimiser/lr"] = 0.1  # once it was not 0: something else is a cause, too
    assert advise(history[-1][1], history)[1].reason == "Probably, in part, because of learning-rate-zero."


def test_what_concerns_more_rollouts_or_groups_comes_first():
    """After what stops all training, and before what is not about some of them."""
    shares = {"rollouts/truncated": 0.6, "rollouts/empty": 0.3, "groups/incomplete": 0.5}
    others = {"rollouts/in": 32.0, "rollouts/no_reward": 16.0, "staleness/mean": 3.0, "optimiser/lr": 0.0}
    named = "learning-rate-zero", "rollouts-truncated", "trained-without-reward", "rollouts-empty", "stale"
    assert names(QUIET | shares | {"groups/incomplete": 0.0} | others) == [*named]
    found = advise(QUIET | shares)
    assert [each.name for each in found] == ["rollouts-truncated", "rollouts-empty", "groups-incomplete"]
    assert [each.share for each in found] == [0.6, 0.3, 0.5]  # the last is caused by the one before it


@pytest.mark.parametrize(
    ("early", "said"), [(0.75, ", and over all 16 steps)"), (0.7, "; over all 16 steps 71 %)")]
)
def test_the_mean_over_all_steps_is_said_once(early, said):
    history = steps_of("frac_reward_zero_std", [early] * 12 + [0.75] * 4, solve_none=0.25, solve_all=0.25)
    text = advise(history[-1][1], history)[0].text
    assert said in text
    assert text.count("25 %") == 2


def test_groups_that_are_equal_since_they_were_cut_off_are_counted(make_batch):
    """Group 5: equal and both truncated. Group 7: equal, one of three. Group 9: truncated, and not equal."""
    batch = make_batch([0.0, 0, 1, 1, 1, 0, 1], [5, 5, 7, 7, 7, 9, 9])
    batch["status"] = torch.tensor([1, 1, 1, 0, 0, 1, 1])
    assert (Status.COMPLETED, Status.TRUNCATED) == (0, 1)
    numbers = make_report(Pipeline(stages(gate=None)).run(batch)).numbers
    assert numbers["groups/equal_and_truncated"] == pytest.approx(1 / 3)
    assert numbers["frac_reward_zero_std"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([50.0] * 8 + [150.0] * 4, "jump at step 8, from 50 to 150."),
        ([10.0 * (1 + step) for step in range(12)], "rise most around step 6."),
    ],
)
def test_exploding_lengths_name_the_step_of_the_jump(lengths, said):
    history = steps_of("response_length/mean", lengths)
    (found,) = advise(history[-1][1], history)
    assert found.text.endswith(said)


def test_each_step_without_rewards_is_named_however_long_ago():
    values = [0.0, 0.5, *[0.0] * 20]
    history = steps_of("rollouts/unrewarded", values)
    (found,) = advise(history[-1][1], history)
    assert (found.name, found.steps) == ("rewards-missing", (1,))
    assert found.text == "50 % of the rollouts have no reward at step 1."
    history = steps_of("rollouts/unrewarded", [0.0, 0.15, 0.23, 0.15])  # no two steps have 23 %
    (found,) = advise(history[-1][1], history)
    assert found.text == (
        "Up to 23 % of the rollouts have no reward (step 2). It is above 10 % at steps 1, 2 and 3."
    )
    assert names(history[-1][1], steps_of("rollouts/unrewarded", [0.1] * 20)) == []


def test_rollouts_without_a_reward_are_counted(make_batch):
    """Of three rollouts the one of two rows has a reward on neither."""
    batch = make_batch([0.0, 1, float("nan"), float("nan")], [5, 5, 5, 5], [0, 1, 2, 2])
    numbers = make_report(Pipeline({}).run(batch)).numbers
    assert numbers["rollouts/unrewarded"] == pytest.approx(1 / 3)


def test_a_penalty_that_no_response_reaches_is_said():
    columns = {"group_id": [0] * 4, "rollout_id": range(4), "reward": [0.0, 1.0, 1.0, 0.0]}
    for longest, max_length, said in ((6, 20480, True), (6, 14, True), (6, 12, False), (9, 12, False)):
        options = {"overlong": {"max_length": max_length, "cache": 2 if max_length < 99 else 4096}}
        tokens = {"tokens": [longest, 2, 3, 4]}
        decision = decide(columns | tokens, "dapo", group_size=4, minibatches=1, stages=options)
        found = [each for each in make_report(decision).advisories if each.name == "penalty-unused"]
        assert bool(found) == said, (longest, max_length)
        if max_length == 20480:
            words = "overlong changed 0 rewards: the longest response has 6 tokens"
            assert found[0].text == f"{words}, and it punishes those above 16,384."


def test_a_divisor_that_no_response_reaches_is_said():
    columns = {"group_id": [0] * 2, "rollout_id": range(2), "reward": [0.0, 1.0], "tokens": [5, 2]}
    words = "weight divides the loss of a rollout by 3,000 tokens, and the longest response has 5."
    for length, said in ((3000, [words]), (50, [])):
        decision = decide(columns, "dr_grpo", group_size=2, stages={"weight": {"length": length}})
        advisories = make_report(decision).advisories
        assert [each.text for each in advisories if each.name == "divisor-unused"] == said


def test_a_verdict_has_the_graded_reward_beside_the_one_after_a_penalty():
    """By hand: of 12 tokens above 10, a rollout loses 1; of (1 + 0 + 1 + 0) / 4 a quarter."""
    columns = {"group_id": [0] * 4, "rollout_id": range(4), "reward": [0.0, 1.0, 1.0, 0.0]}
    stages = {"overlong": {"max_length": 12, "cache": 2}}
    verdicts = [
        verdict(make_report(decision).numbers)
        for tokens in ([12, 2, 2, 2], [2, 2, 2, 2])
        for decision in [
            decide(columns | {"tokens": tokens}, "dapo", group_size=4, minibatches=1, stages=stages)
        ]
    ]
    assert (
        verdicts[0] == "The mean reward is 0.25. At this step it is 0.25 after overlong, and 0.5 as graded."
    )
    assert verdicts[1] == "The mean reward is 0.5."


def test_a_stage_that_changes_only_the_advantage_is_not_in_the_verdict():
    mask = torch.ones(4, 2, dtype=torch.bool)
    columns = {"group_id": torch.zeros(4, dtype=torch.int64), "rollout_id": torch.arange(4)}
    columns |= {("next", "reward"): torch.tensor([0.0, 1.0, 1.0, 0.0]), ("masks", "all_assistant_mask"): mask}
    entropy = {("entropy", "full"): torch.tensor([[0.0, 1.0]] * 4)}
    pipeline = load_pipeline("high_entropy", group_size=4, minibatches=1)
    numbers = pipeline.run(TensorDict(columns | entropy, batch_size=[4])).report().numbers
    assert numbers["forks/changed"] == 0.5  # the tokens of less entropy have the advantage 0
    assert verdict(numbers) == "The mean reward is 0.5."


def test_steps_that_a_rule_does_not_judge_are_in_no_number_of_it():
    """Of twenty steps, ten have the four groups that the rule needs: nine of them of 0.75, and one of 0."""
    key = "groups/largest_gradient_share"
    history = [
        (step, QUIET | {key: 0.75 * (step != 1), "groups/in": 4.0 if step % 2 else 1.0}) for step in range(20)
    ]
    (found,) = advise(history[-1][1], history)
    assert "over all 10 steps 68 %" in found.text
    assert "at 9 of 10 steps, first at 3 and last at 19" in found.text
    assert found.steps == tuple(range(3, 20, 2))
