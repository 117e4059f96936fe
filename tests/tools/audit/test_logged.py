"""The logged advantages of a dump are compared with those of the recipes."""

from __future__ import annotations

import re
import statistics

import numpy as np
import pytest
from command import told
from composed import configure
from dumps import trl_dump

from headrace.pipeline.composing.compose import recipes
from headrace.pipeline.tools.audit import logged
from headrace.pipeline.tools.audit.logged import LoggedRows
from headrace.pipeline.tools.dumps.readers import open_dump
from headrace.pipeline.tools.replay import replay_dump

pytestmark = pytest.mark.slow

REWARDS = {3: [1.0, 0, 0.5, 1], 5: [0.0, 0, 0, 2], 8: [3.0, 1, 4, 1.5], 9: [0.25, 0.5, 0.125, 1]}
TOKENS = [1, 5, 2, 7, 3, 3, 1, 4, 9, 2, 6, 1, 2, 8, 1, 5]


def rows(theirs, ours=None, rewards=REWARDS):
    """Groups of four with the advantages of two formulas, computed group by group in plain Python."""
    flat = [reward for group in rewards.values() for reward in group]
    groups = [group for group, members in rewards.items() for _ in members]
    their = [each for members in rewards.values() for each in theirs(members)]
    our = [each for members in rewards.values() for each in (ours or theirs)(members)]
    reward, number = np.array(flat), np.arange(len(flat))
    return LoggedRows(
        np.array(their, dtype=np.float32).astype(float),
        np.array(our),
        reward,
        reward,
        np.array(groups),
        number,
        np.array(TOKENS[: len(flat)]),
    )


def centred(group):
    return [reward - statistics.mean(group) for reward in group]


def scaled(eps, deviation=statistics.stdev):
    return lambda group: [each / (deviation(group) + eps) for each in centred(group)]


def against_others(group):
    return [reward - statistics.mean(group[:i] + group[i + 1 :]) for i, reward in enumerate(group)]


def nemo(group):
    def one(i, reward):
        others = group[:i] + group[i + 1 :]
        spread = statistics.stdev(others)
        return (reward - statistics.mean(others)) / (spread + 1e-6 if spread > 0 else 1)

    return [one(i, reward) for i, reward in enumerate(group)]


FRAMEWORKS = {
    "verl": scaled(1e-6),
    "trl": scaled(1e-4),
    "open_instruct": scaled(1e-8, statistics.pstdev),
    "rllm": scaled(1e-6, statistics.pstdev),
    "prime_rl": centred,
    "tinker": centred,
    "nemo_rl": nemo,
    "slime": scaled(1e-6),
    "miles": scaled(1e-6),
    "skyrl": scaled(1e-6),
    "openrlhf": scaled(1e-9),
    "torchrl": scaled(0.0),
}


@pytest.fixture(autouse=True)
def composed_once(monkeypatch):
    """Compose each recipe only once, because composing takes longer than all other parts of these tests."""
    from composed import composed

    monkeypatch.setattr(logged, "load_pipeline", composed)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_framework_is_recognised_by_its_convention(name):
    said = logged.explain_logged([rows(FRAMEWORKS[name], ours=against_others)], of=1)
    assert said.startswith("they are those of "), said
    near = logged.distance_from_recipe([rows(FRAMEWORKS[name])], f"as/{name}")
    assert near < 1e-5
    others = [each for each in FRAMEWORKS if FRAMEWORKS[each] is FRAMEWORKS[name] and each < name]
    assert f"as/{name}" in said or others or " more" in said, said


def test_advantages_that_are_whitened_over_the_tokens_of_a_step_are_those_of_areal():
    step = rows(scaled(1e-5))
    mean = sum(a * t for a, t in zip(step.logged, TOKENS, strict=True)) / sum(TOKENS)
    squares = sum(t * (a - mean) ** 2 for a, t in zip(step.logged, TOKENS, strict=True))
    white = (step.logged - mean) / ((squares / (sum(TOKENS) - 1)) ** 0.5 + 1e-5)
    said = logged.explain_logged([step._replace(logged=white)], of=1)
    assert said.startswith("they are those of as/areal, within "), said


@pytest.mark.parametrize("unit", [1e-6, 1e-4, 1, 1e5])
def test_the_recognised_recipe_does_not_depend_on_the_unit_of_the_reward(unit):
    """An absolute tolerance of 1e-4 would accept any advantages of 1e-5."""
    rewards = {group: [unit * reward for reward in members] for group, members in REWARDS.items()}
    said = logged.explain_logged([rows(centred, scaled(0), rewards)], of=1)
    assert said.startswith("they are those of dr_grpo, as/prime_rl"), said


def test_a_comparison_of_some_steps_says_how_many_it_compared(monkeypatch):
    monkeypatch.setattr(logged, "MOST", 16)
    seen = logged.LoggedAdvantages()
    for each in (rows(centred, against_others), rows(against_others, against_others)):
        monkeypatch.setattr(logged, "logged_rows", lambda _, each=each: each)
        seen.add(None)
    assert "; they are those of dr_grpo, as/prime_rl" in seen.said
    apart = [
        abs(one - other)
        for members in REWARDS.values()
        for one, other in zip(centred(members), against_others(members), strict=True)
    ]
    agree = sum(each <= 1e-4 for each in apart) + 16  # all 16 rows of the second step agree
    assert seen.said.startswith(
        f"logged advantages: 32 rows have one, {agree / 32:.0%} agree with yours within 0.0001; the greatest "
        f"difference is {max(apart):.2g}, the mean {sum(apart) / 32:.2g};"
    )
    assert seen.said.endswith(" (compared: the first 16 rows, 1 of 2 steps).")


def test_steps_are_compared_until_they_have_16384_rows(monkeypatch):
    half = rows(centred)._replace(logged=np.zeros(2**13), ours=np.zeros(2**13))
    monkeypatch.setattr(logged, "logged_rows", lambda _: half)
    seen = logged.LoggedAdvantages()
    for kept in (1, 2, 2):
        seen.add(None)
        assert len(seen.steps) == kept


ALL = ["grpo", "dr_grpo", "rloo", *(name for name in recipes() if name.startswith("as/"))]


@pytest.mark.parametrize(
    ("scale", "distances", "steps", "said"),
    [
        (1, {"as/verl": 1e-7}, 1, "they are those of as/verl, within 1e-07"),
        (1, {"as/verl": 1e-4}, 1, "they are those of as/verl, within 0.0001"),
        (
            1,
            {"as/verl": 1.5e-4},
            1,
            f"they match none of {len(ALL)} recipes; the nearest, as/verl, differs by 0.00015",
        ),
        (30, {"as/verl": 3e-3}, 1, "they are those of as/verl, within 0.003"),
        (1, dict.fromkeys(ALL[3:7], 1e-7), 1, f"they are those of {', '.join(ALL[3:7])}, within 1e-07"),
        (
            1,
            dict.fromkeys(ALL[:5], 1e-7),
            1,
            f"they are those of {', '.join(ALL[:4])} and 1 more, within 1e-07",
        ),
        (1, {"grpo": 0.0, "rloo": 1e-6, "as/trl": 1.1e-6}, 1, "they are those of grpo, rloo, within 0"),
        (
            1,
            {"grpo": 0.25, "rloo": 0.5, "as/trl": 0.51},
            1,
            "match none of * recipes; the nearest, grpo, rloo, differs",
        ),
        (
            1,
            {"rloo": 1e-7},
            3,
            "they are those of rloo, within 1e-07 (compared: the first 16 rows, 1 of 3 steps)",
        ),
    ],
)
def test_recipes_as_near_as_the_nearest_are_named_the_plainest_first(
    scale, distances, steps, said, monkeypatch
):
    """Up to 1e-4 of the greatest advantage is a match. Recipes up to twice as far are as near."""
    monkeypatch.setattr(logged, "distance_from_recipe", lambda _, name: distances.get(name, 7.0))
    flat = rows(lambda group: [scale, -scale, 0, 0])
    found = logged.explain_logged([flat], of=steps)
    assert found == said or (
        said.startswith("match") and re.match(f"they {said.replace('*', str(len(ALL)))}", found)
    )


def test_rows_without_an_advantage_or_a_reward_are_not_compared():
    class Report:
        columns = {  # noqa: RUF012
            "logged_advantage": np.array([1.0, np.nan, 2.0, 3.0]),
            "reward": np.array([0.5, 1.0, np.nan, 1.0]),
            "collected_reward": np.array([5.0, 5.0, 5.0, np.nan]),
            "group_id": np.array([7, 8, 9, 9]),
        }

        def __len__(self):
            return 4

    found = logged.logged_rows(Report())
    assert [column.tolist() for column in (found.logged, found.reward, found.collected)] == [
        [1.0],
        [0.5],
        [5.0],
    ]
    assert (found.group.tolist(), found.rollout.tolist(), found.tokens) == ([7], [0], None)
    assert np.isnan(found.ours).all()


# -- from dumps --------------------------------------------------------------------------------------


def replayed(path, folder, *words):
    shared = (f"source.path={path}", "report.html=false", "pipeline.stages.gate.group_size=4")
    _, text = told(replay_dump, configure("config", "task=replay", *shared, *words), folder / "out")
    return " ".join(text.split())


def test_a_replay_of_a_trl_dump_names_the_recipe_of_its_advantages(tmp_path):
    flat = [reward for group in REWARDS.values() for reward in group]
    columns = {
        "step": [4] * 16,
        "prompt": [f"prompt {i // 4}" for i in range(16)],
        "completion": [str(i) for i in range(16)],
        "accuracy": flat,
        "advantage": [each for group in REWARDS.values() for each in scaled(1e-4)(group)],
    }
    path = trl_dump(tmp_path / "completions.parquet", **columns)
    text = replayed(path, tmp_path, "source.group_by=prompt", "pipeline=rloo")
    assert "logged advantages: 16 rows have one, " in text
    assert re.search(r"they are those of (\w+, )*as/trl, within ", text)
    ((_, batch),) = open_dump(tmp_path / "out" / "rollouts")
    assert "logged_advantage" in batch.keys()
    text = replayed(path, tmp_path / "again", "source.group_by=prompt", "pipeline=as/trl")
    assert "100% agree with yours within 0.0001" in text
    assert "they are those of" not in text
