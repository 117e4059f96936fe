"""Known bugs of other projects: headrace is right or refuses, and the pages have the results."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "benchmarks" / "field_bugs"
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "field_bugs.json").read_text())
sys.path.append(str(SUITE))  # after tests/support, which has a pages.py

from cases import CASES, Case  # noqa: E402
from judge import DESIGN, SETTINGS, WRONG, judge, near  # noqa: E402

BY_NAME = {case.name: case for case in CASES}


@cache
def peers_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("field_bugs_peers", SUITE / "peers.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def of_headrace() -> dict[str, dict]:
    return dict(peers_module().answers("headrace"))


def test_headrace_is_right_or_refuses_in_every_case():
    found = of_headrace()
    assert found.keys() == BY_NAME.keys()
    verdicts = {name: judge("headrace", case, found[name])[0] for name, case in BY_NAME.items()}
    assert set(verdicts.values()) == {"right", "refused"}, verdicts
    kept = RESULTS["headrace"]["cases"]
    assert verdicts == {name: judge("headrace", case, kept[name])[0] for name, case in BY_NAME.items()}


def test_headrace_refuses_with_the_ids():
    for name, said in (
        ("uneven-groups", "group 'a' has 5 of 4"),
        ("lone-rollout", "group 'b' has 1 of 4"),
        ("lost-rollout", "group 'a' has 3 of 4"),
        ("reused-ids", "rollout '0' in groups ['a', 'b']"),
        ("nan-reward", "nan at row 1"),
    ):
        assert said in of_headrace()[name]["refused"]


def test_the_pages_have_the_results(tmp_path):
    subprocess.run([sys.executable, SUITE, "--render", "--docs", tmp_path], check=True)
    pages = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.md"))
    assert len(pages) == len(CASES) + 1
    for page in pages:
        assert (ROOT / "docs" / page).read_text() == (tmp_path / page).read_text(), (
            "python benchmarks/field_bugs --render"
        )
    assert {path.stem for path in (ROOT / "docs" / "field-bugs").iterdir()} == set(BY_NAME)


def test_projects_that_cannot_be_installed_are_listed(tmp_path):
    results = RESULTS | {"verl": {"not_run": "no matching distribution"}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    words = ["--render", "--docs", tmp_path, "--results", tmp_path / "results.json"]
    subprocess.run([sys.executable, SUITE, *words], check=True)
    page = (tmp_path / "field-bugs.md").read_text()
    assert "verl could not be installed, or did not run: no matching distribution." in page
    assert "| case | headrace | trl | torchrl | verl v1 |" in page


def test_each_result_has_a_case_and_each_reason_a_verdict():
    reached = set()
    for peer, result in RESULTS.items():
        assert result["cases"].keys() == BY_NAME.keys(), peer
        for name, case in BY_NAME.items():
            verdict, _ = judge(peer, case, result["cases"][name])
            reached |= {(verdict, peer, name)}
    assert {("right", *place) for place in SETTINGS} <= reached
    assert {("by design", *place) for place in DESIGN} | {("wrong", *place) for place in WRONG} <= reached


def test_a_case_is_small_and_links_its_issues():
    assert len(CASES) >= 15
    for case in CASES:
        assert len(case.rows["group"]) <= 12
        assert {len(column) for column in case.rows.values()} == {len(case.rows["group"])}
        assert all(len(answer) == len(case.rows["group"]) for answer in case.accepted)
        assert case.threads
        assert len(case.bug + case.why) > 100


def by_the_formula(case: Case) -> list[float | None]:
    """(R − mean) / std over those rollouts of the group that have a token in the loss and a reward."""
    rows = list(zip(*(case.rows[name] for name in ("group", "rollout", "reward", "tokens")), strict=True))
    rewards: dict[str, dict[str, float]] = {}
    for group, rollout, reward, tokens in rows:
        if tokens and not math.isnan(reward):
            rewards.setdefault(group, {})[rollout] = reward
    found: list[float | None] = []
    for group, rollout, reward, tokens in rows:
        votes = list(rewards[group].values())
        lonely = len(votes) < 2 or rollout not in rewards[group] or not tokens
        std = 0.0 if lonely else statistics.stdev(votes)
        found.append(None if lonely else (reward - statistics.fmean(votes)) / std if std else 0.0)
    return found


@pytest.mark.parametrize("case", [c for c in CASES if c.asks == "advantage" and c.name != "stale-group"])
def test_answers_by_hand_equal_the_formula(case):
    assert near(by_the_formula(case), case.accepted[0])


def test_a_quarter_of_the_tokens_of_the_step_trains():
    case = BY_NAME["threshold"]
    score, micro = case.rows["score"], case.rows["micro"]
    assert [value**2 for value in case.rows["deviation"]] == score
    pairs = list(zip(micro, case.rows["deviation"], strict=True))
    assert [sum(value for cut, value in pairs if cut == which) for which in (0, 1)] == [0, 0]
    largest = sorted(score)[-len(score) // 4 :]
    for answer, weight in zip(case.accepted, (1 / len(score), 1 / len(largest)), strict=True):
        assert answer == [weight if value in largest else 0.0 for value in score]
    wrong = [1 / 8, 0.0, 0.0, 0.0, 1 / 8, 0.0, 0.0, 0.0]  # trains the largest score of each micro-batch
    assert judge("x", case, {"found": wrong})[0] == "wrong"


def test_half_of_the_correct_weights_is_wrong():
    case = BY_NAME["sum-over-ranks"]
    rows, length = len(case.rows["group"]), 5
    assert [answer[0] for answer in case.accepted] == [1 / (rows * length), 1 / rows, 1 / length, 1.0]
    for answer in case.accepted:
        assert judge("x", case, {"found": answer})[0] == "right"
        assert judge("x", case, {"found": [weight / 2 for weight in answer]})[0] == "wrong"


def test_shared_tokens_of_branches_train_twice_without_the_stage():
    peers = peers_module()
    case = BY_NAME["shared-tokens"]
    branches = [([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 1, 1]), ([1, 2, 3, 4, 7, 8], [0, 0, 1, 1, 1, 1])]
    assert peers.times(case, branches) == [2.0, 1.0, 1.0]
    assert peers.times(case, branches[1:]) == [1.0, 0.0, 1.0]  # without the first branch
    assert of_headrace()["shared-tokens"]["found"] == [1.0, 1.0, 1.0]


def test_a_wrong_nan_or_missing_number_is_not_right():
    case = BY_NAME["masked-row"]
    right = case.accepted[0]
    assert judge("x", case, {"found": right})[0] == "right"
    for wrong in (
        [0.866, None, -0.866, -0.866],
        [float("nan")] * 4,
        [1.155, 0.5, -0.577, -0.577],
        [None] * 4,
    ):
        assert judge("x", case, {"found": wrong})[0] == "wrong"
    assert judge("trl", case, {"found": [0.866, None, -0.866, -0.866]})[0] == "by design"
    paths = BY_NAME["two-paths"]
    assert judge("x", paths, {"found": [1.0] * 12, "other": [1.0] * 12, "path": ""})[0] == "right"
    assert judge("x", paths, {"found": [1.0] * 12, "other": [0.9] * 12, "path": ""})[0] == "wrong"
