"""The report shows the rewards that an advantage compares and the baseline that it subtracts."""

from __future__ import annotations

import random
from statistics import fmean
from typing import get_args, get_type_hints

import numpy as np
import pytest
from rich.console import Console

from headrace import Pipeline, decide, make_report
from headrace.pipeline.tools.report import page_data, show_report
from headrace.transforms import GroupRelativeAdvantage, ShuffleSplit

NAN = float("nan")
# Without truncated rollouts, group 0 has one rollout, and the mean of group 1 is 4/15.
CUT = {
    "group_id": [0] * 3 + [1] * 4,
    "rollout_id": [*range(7)],
    "reward": [0.0, 0.0, 0.167, 0.0, 0.6, 0.2, 0.0],
    "tokens": [5] * 7,
    "status": ["truncated", "completed", "truncated", "completed", "completed", "completed", "truncated"],
}


def cut(action: str, recipe: str = "grpo", columns: dict = CUT, **more: dict):
    stages = {"gate": None, "filter": {"also": "not_truncated", "action": action}, **more}
    return decide(columns, recipe, minibatches=1, stages=stages)


def drawn_columns(rng: random.Random) -> dict[str, list]:
    """Groups of 1 to 5 rollouts of 1 to 3 rows each. Some rollouts are truncated, and some have no reward."""
    rows, rollout = [], 0
    for group in range(rng.randint(1, 6)):
        for _ in range(rng.randint(1, 5)):
            rollout, reward = rollout + rng.randint(1, 9), rng.choice([0.0, 1.0, 0.5, rng.random(), NAN])
            status = rng.choice(["completed", "completed", "truncated"])
            rows += [(group, rollout, reward, 3, status)] * rng.choice([1, 1, 2, 3])
    rng.shuffle(rows)
    names = ("group_id", "rollout_id", "reward", "tokens", "status")
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


@pytest.mark.parametrize("action", ["mask", "exclude", "drop"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_compared_rewards_and_baselines_equal_those_of_a_loop(action, baseline, quick):
    for seed in range(10 if quick else 30):
        columns = drawn_columns(random.Random(seed))
        stages = {"gate": None, "filter": {"criterion": "not_truncated", "action": action}}
        more = {"baseline": baseline, "scale": "none", "missing": "mask", "minibatches": 1}
        found = decide(columns, "grpo", stages=stages, **more)
        of = dict(zip(columns["rollout_id"], columns["group_id"], strict=True))
        reward = dict(zip(columns["rollout_id"], columns["reward"], strict=True))
        ended = dict(zip(columns["rollout_id"], columns["status"], strict=True))
        there = {
            each
            for each in of
            if reward[each] == reward[each] and (action == "mask" or ended[each] == "completed")
        }
        for row, rollout in enumerate(columns["rollout_id"]):
            peers = [each for each in there if of[each] == of[rollout]] if rollout in there else []
            assert found.compared[row] == len(peers), seed
            others = [each for each in peers if each != rollout] if baseline == "leave_one_out" else peers
            level = fmean(reward[each] for each in others or peers) if peers else NAN
            assert found.baseline[row].item() == pytest.approx(level, nan_ok=True), seed


@pytest.mark.parametrize(("shift", "singleton"), [(0.0, "raw"), (0.25, "zero")])
@pytest.mark.parametrize("baseline", get_args(get_type_hints(GroupRelativeAdvantage.__init__)["baseline"]))
def test_an_advantage_without_a_scale_is_the_reward_minus_the_baseline(baseline, shift, singleton):
    k = 2 if baseline == "best_of_k" else None
    if k and singleton == "raw":
        singleton = "raise"  # best_of_k needs at least k rollouts
    option = {"baseline": baseline, "scale": "none", "shift": shift, "singleton": singleton, "k": k}
    action = "mask" if k else "drop"  # with drop, rollout 1 is alone
    given = {"baseline_value": [0.1 * number for number in range(7)]} if baseline == "column" else {}
    found = cut(action, columns=CUT | given, advantage=option)
    rows = found.keep.numpy()
    known = np.array(CUT["reward"]) - found.baseline.numpy()
    assert found.advantage.numpy()[rows] == pytest.approx(known[rows], abs=1e-12)
    assert found.baseline.isnan().tolist() == (found.compared == 0).tolist()


def test_a_carried_row_has_no_baseline_at_its_second_step(make_batch):
    pipeline = Pipeline(
        {
            "advantage": GroupRelativeAdvantage(scale="none"),
            "split": ShuffleSplit(minibatch_size=4, remainder="carry", shuffle=False),
        }
    )
    for first in (0, 6):
        rollouts = [*range(first, first + 6)]
        pipeline(make_batch([0.0, 1, 1, 0, 2, 4], [first] * 3 + [first + 1] * 3, rollouts))
    columns = make_report(pipeline).columns
    assert columns["rollout_id"].tolist() == [*range(6, 12), 4, 5]
    assert columns["compared"].tolist()[:6] == [3] * 6
    assert columns["baseline"].tolist() == pytest.approx([2 / 3] * 3 + [2] * 3 + [NAN] * 2, nan_ok=True)


@pytest.mark.parametrize(
    ("action", "compared", "baselines"),
    [("mask", [3, 4], [0.167 / 3, 0.2]), ("exclude", [1, 3], [0, 0.8 / 3]), ("drop", [1, 3], [0, 0.8 / 3])],
)
def test_a_report_has_the_baseline_that_was_used(action, compared, baselines):
    report = make_report(cut(action))
    assert report.groups["compared"].tolist() == compared
    assert report.groups["baseline"].tolist() == pytest.approx(baselines)
    assert page_data([report], title="")["steps"][0]["groups"]["baseline"] == pytest.approx(baselines)
    console = Console(width=100)
    with console.capture() as text:
        console.print(show_report(report))
    assert ("compared" in text.get()) == (action != "mask")


def test_a_group_has_no_baseline_if_its_rollouts_have_different_baselines():
    report = make_report(cut("drop", "rloo"))
    # A baseline is the mean of the two others. Rollout 1 of group 0 is alone.
    assert report.columns["baseline"][3:6].tolist() == pytest.approx([0.4, 0.1, 0.3])
    assert report.groups["baseline"].tolist() == pytest.approx([0.0, NAN], nan_ok=True)


def test_a_rollout_with_one_of_two_rewards_is_compared_without_a_baseline():
    known = {"missing": "skip"}
    stages = {"advantage": known | {"several": "decoupled"}, "collapse": known | {"columns": 2}}
    stages |= {"gate": None, "filter": {"also": "not_truncated", "action": "drop"}}
    for second in (0.0, NAN):  # the second reward of rollouts 1 and 5
        rewards = [[each, second if row in (1, 5) else 0.0] for row, each in enumerate(CUT["reward"])]
        for columns in (CUT | {"reward": rewards}, CUT | {"reward": [each[::-1] for each in rewards]}):
            found = decide(columns, "grpo", minibatches=1, stages=stages)
            assert found.baseline.isnan().all()
            assert found.compared.tolist() == [0, 1, 0, 3, 3, 3, 0]


def test_rows_that_were_never_compared_have_no_baseline():
    found = decide({"group_id": [], "rollout_id": [], "reward": [], "tokens": []}, "grpo", group_size=2)
    assert found.compared.tolist() == found.baseline.tolist() == []
    columns = {name: values[:3] for name, values in CUT.items() if name != "status"}
    found = decide(columns, "grpo", group_size=4, on_incomplete="drop", minibatches=1)
    assert found.compared.tolist() == [0, 0, 0]
    assert found.baseline.isnan().all()


@pytest.mark.browser
@pytest.mark.slow
def test_the_page_shows_the_baseline_that_was_used(look):
    page = look(page_data([make_report(cut("drop"))], title=""))
    # Rollout 1 of group 0 is alone, and the mean of group 1 is 0.8 / 3.
    assert page.texts("#tree .group .facts")[0].startswith(
        "3 of 4 compared · baseline 0.2667 · 1 not counted"
    )
    assert "1 of 3 compared · baseline 0 · 2 not counted (truncated)" in page.texts("#tree .group .facts")
    assert "advantage 0: alone in its comparison" in page.one("#strip .dot[data-rollout='1']").get_attribute(
        "aria-label"
    )
    at = {
        rollout: float(page.one(f"#strip .dot[data-rollout='{rollout}']").get_attribute("cx"))
        for rollout in (3, 4)
    }
    tick = float(page.one("#strip .line[data-group='1'] .mean").get_attribute("x1"))
    assert (tick - at[3]) / (at[4] - at[3]) == pytest.approx(0.8 / 3 / 0.6, abs=1e-3)
