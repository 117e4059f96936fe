"""The page's JavaScript reads the keys of its schema, and its modules import what they call."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import is_typeddict

import pages
import pytest
import torch
from busy import MASK, busy_batch, stages
from tensordict import TensorDict

from headrace.pipeline import Pipeline, ReportFolder, load_pipeline, make_report, page_data
from headrace.pipeline.tools.report import html, page_schema
from headrace.pipeline.tools.view.stored_run import StoredRun
from headrace.transforms import LossWeight, ShuffleSplit

pytestmark = pytest.mark.slow

MODULES = html.read_modules()
SCHEMAS = {
    name: set(schema.__annotations__)
    for name, schema in vars(page_schema).items()
    if is_typeddict(schema) and name != "PageDataRequired"
}
# The names that the modules give to an object of the data, and the fields that model.js adds to it.
WORDS = {
    "page": ("PageData",),
    "step": ("Step",),
    "shown": ("Shown",),
    "level": ("PageLevel",),
    "stage": ("PageLevel", "RecipeStage"),
    "out": ("PageLeft",),
    "group": ("Groups",),
    "row": ("ShownRows",),
    "excerpt": ("PageText",),
    "strand": ("PageTokens",),
    "certificate": ("PageCertificate",),
    "judgement": ("PageJudgement",),
    "advisory": ("PageAdvisory",),
    "symptom": ("PageSymptom",),
    "tenths": ("PageTable",),
    "remedy": ("PageRemedy",),
    "run": ("PageRun",),
    "failed": ("PageFailed",),
}
ADDED = {"group": {"members", "spread"}}


def listed_units() -> set[str]:
    """The names in the constant UNITS of metrics.js. The modules look up fields by these names."""
    return set(
        re.findall(r'"(\w+)"', re.search(r"^export const UNITS = \[(.*)\];$", MODULES["metrics.js"], re.M)[1])
    )


def accesses(word: str) -> set[str]:
    """The names that follow `word.` anywhere in the modules."""
    return {name for text in MODULES.values() for name in re.findall(rf"(?<![\w.]){word}\.(\w+)", text)}


def test_modules_read_exactly_the_fields_of_the_schema():
    """No module reads an unknown field, and each field is read by some module."""
    read = {word: accesses(word) for word in WORDS}
    for word, kinds in WORDS.items():
        assert read[word] <= set().union(*(SCHEMAS[kind] for kind in kinds), ADDED.get(word, ())), word
    for kind, fields in SCHEMAS.items():
        units = listed_units() if kind in ("PageLevel", "PageLeft") else set()
        assert units <= fields
        assert fields <= units.union(*(read[word] for word, kinds in WORDS.items() if kind in kinds)), kind


def test_each_called_function_of_another_module_is_imported():
    """A call without an import fails only when the page reaches the call."""
    exports = {*re.findall(r"^export (?:function|const) (\w+)", "\n".join(MODULES.values()), re.M)}
    for name, text in MODULES.items():
        called = exports & {*re.findall(r"(?<![\w.])(\w+)\(", text)}
        imported = re.findall(r"\w+", " ".join(re.findall(r"^import \{([^}]*)\}", text, re.M)))
        declared = re.findall(r"\b(?:function|const|let) (\w+)", text)
        assert called - {*imported} - {*declared} == set(), name


@pytest.fixture
def node(tmp_path):
    """Runs a module that may import the page's, and reads the JSON that it prints."""
    if not shutil.which("node"):
        pytest.skip("needs node")
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def run(text: str):
        (tmp_path / "test.js").write_text(text, encoding="utf-8")
        done = subprocess.run(
            ["node", "test.js"], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_numbers_have_four_digits_ticks_are_round_and_units_are_shown(node):
    shown = node("""
        import { count, extent, number, scale, ticks } from "./numbers.js";
        import { measured, measuredRange } from "./metrics.js";
        console.log(JSON.stringify([[
          [0.123456, -0.5, 1234567, 1.5e-7, null].map(number), count(-0),
          extent([3, null, NaN, -1]), extent([null]), ticks([0, 1], 4), scale([0, 10], [100, 200])(2.5),
        ], [
          measured("rows/trained", 1), measured("out/gate/failed", 1234), measured("rollouts/out/x/y", 2),
          measured("solve_all", 0.125), measured("time/gate", 0.00125), measured("time/gate", 2.5),
          measured("reward/all/mean", 0.5), measured("mine", 3), measured("staleness/max", null),
          measuredRange("rows/in", 1, 7), measuredRange("time/x", 0.05, 2), measuredRange("mine", -1, 0.5),
          measuredRange("frac_reward_zero_std", 0, 1), measured("optimiser/tokens_per_second", 1),
        ]]));
    """)
    numbers = ["0.1235", "−0.5", "1,234,567", "1.50e−7", "–"]
    assert shown[0] == [numbers, "0", [-1, 3], None, [0, 0.5, 1], 125]
    assert shown[1] == [
        *("1 row", "1,234 rows", "2 rollouts", "12.5 %", "1.25 ms", "2.5 s", "0.5", "3", "–"),
        *("1 to 7 rows", "50 ms to 2 s", "−1 to 0.5", "0 to 100 %", "1 tokens/s"),
    ]


def test_every_metric_has_its_own_title_and_a_description(node, make_batch):
    """A new metric of headrace must be listed. The title of a user's metric is the name of the metric."""
    batch = busy_batch(make_batch)
    batch["next", "policy_version"] = torch.arange(9)
    split = ShuffleSplit(minibatches=2, ranks=2, microbatches=2, balance="tokens", remainder="pad")
    run = Pipeline(stages(split=split, weight=LossWeight())).run(batch)
    names = {*make_report(run, batch=batch, parameters=1e9).numbers}
    stream = ("trained", "lost/stale", "early", "outstanding")
    stream += tuple(
        f"{value}/{which}"
        for value in ("latency", "turns", "length")
        for which in ("z", "slow", "slow_trained", "others_trained")
    )
    optimiser = ("steps", "lr", "loss", "grad_norm", "clipped", "entropy", "kl_approx", "ESS", "mine")
    correction = ("ess_token", "kl_k1_token", "kl_k3_sequence", "chi2_token", "weight_max_token", "least_ess")
    logged = ("rows", "agree", "mean_difference", "max_difference")
    for group, some in {
        "survivors": stream,
        "optimiser": optimiser,
        "correction": correction,
        "logged_advantage": logged,
        "split": ("shared_tokens", "oversized", "carried_in"),
        "advantage/code": ("abs_mean", "zero", "term_mean", "changed"),
        "token_filter": ("kept", "fraction_kept"),
    }.items():
        names |= {f"{group}/{name}" for name in some}
    shown = node(f"""
        import {{ described }} from "./metrics.js";
        console.log(JSON.stringify({json.dumps([*sorted(names), "mine"])}.map(described)));
    """)
    *known, mine = shown
    place = {name: each["place"] for name, each in zip(sorted(names), known, strict=True)}
    times = {name for name in names if name.startswith("time/")}
    assert max(place[name] for name in names - times) < mine.pop("place") < min(place[name] for name in times)
    assert mine == {"unit": "", "title": "mine", "tells": ""}
    titles = [each["title"] for each in known]
    assert len({*titles}) == len(titles)
    for name, each in zip(sorted(names), known, strict=True):
        assert each["title"] != name
        assert each["tells"][-1:] == "."
        assert len(each["title"]) <= 60, name
        assert len(each["tells"]) <= 90, name
        assert not re.search(r"[_$]|undefined", each["title"] + each["tells"] + each["unit"]), name


def test_bins_have_round_bounds_and_hold_each_rollout_once(node):
    values = [0, 1, 99, 100, 101, 2399, 2400]
    data = json.dumps([{"value": value, "kind": "kept"} for value in values])
    bins = node(f"""
        import {{ binsOf }} from "./histogram.js";
        console.log(JSON.stringify([binsOf({data}), binsOf([{{ value: 7, kind: "kept" }}])]));
    """)
    wide, single = bins
    assert len(wide) <= 25
    assert {each["to"] - each["from"] + 1 for each in wide} == {200}
    assert all(each["from"] % 200 == 0 for each in wide)
    assert [each["from"] for each in wide] == list(range(0, 2600, 200))
    assert {each["from"]: each["counts"]["kept"] for each in wide if each["counts"]} == {
        0: 5,
        2200: 1,
        2400: 1,
    }
    assert single == [{"from": 7, "to": 7, "counts": {"kept": 1}}]


def test_groups_are_sorted_by_spread(node):
    """The greatest range of rewards comes first. Equal ranges are sorted by id."""
    spread = {7: 0.5, 2**60: 0.25, 3: 0.0, 2**60 + 1: 0.25, 9: 0.5}
    rows = [row for group, above in spread.items() for row in pages.rollouts_of(group, [0.5, 0.5 + above])]
    data = json.dumps(html.plain(pages.run_of(pages.step_of(rows))))
    shown = node(f"""
        import {{ chosen, modelOf }} from "./model.js";
        const lines = chosen(modelOf({data}.steps[0]), {{ sort: "std", filter: "all" }});
        console.log(JSON.stringify(lines.map(({{ group }}) => String(group.id))));
    """)
    assert shown == [str(group) for group in (7, 9, 2**60, 2**60 + 1, 3)]


def test_the_page_and_the_viewer_show_groups_that_teach_in_one_order(node, tmp_path):
    """Rollouts have several rows, fail, are truncated, have no token or no reward, or leave at a filter."""
    random, folder, steps = torch.Generator().manual_seed(0), tmp_path / "run", []

    def draw(most: int, size: int) -> torch.Tensor:
        return torch.randint(most, (size,), generator=random)

    pipeline = load_pipeline(
        *(
            "pipeline=grpo",
            "~pipeline.stages.split",
            "~pipeline.stages.weight",
            "pipeline.masked_log_prob=keep",
        ),
        group_size=3,
        on_incomplete="keep",
        min_rollouts=2,
        missing="mask",
        reward="sum",
        stages={"filter": {"also": "not_truncated"}, "gate": {"status_key": "status"}},
    )
    with ReportFolder(folder, every=None) as run:
        for number in range(6):
            rollouts = 60
            rows = torch.arange(rollouts).repeat_interleave(1 + draw(2, rollouts))
            reward = draw(4, len(rows)) / 10 + draw(2, rollouts)[rows] / 3
            reward[draw(20, rollouts)[rows] == 0] = torch.nan
            batch = TensorDict(
                {
                    "group_id": 1000 - (rows // 3) * 7,
                    "rollout_id": rows,
                    ("next", "reward"): reward,
                    "status": torch.tensor([0, 0, 0, 0, 1, 2, 3])[draw(7, rollouts)[rows]],
                    MASK: draw(9, rollouts)[rows, None] > torch.zeros(4),
                },
                batch_size=[len(rows)],
            )
            run.add(report := make_report(pipeline.run(batch), step=number, batch=batch))
            steps.append(page_data([report], title="")["steps"][0])
    (tmp_path / "steps.json").write_text(json.dumps(steps))
    page = node("""
        import { readFileSync } from "node:fs";
        import { chosen, modelOf } from "./model.js";
        const order = (step) => chosen(modelOf(step), { sort: "std", filter: "all" });
        const steps = JSON.parse(readFileSync("steps.json"));
        console.log(JSON.stringify(steps.map((step) => order(step).map(({ group }) => group.id))));
    """)
    stored = StoredRun(folder)
    for number, order in enumerate(page):
        shown = stored.rows(number, count=200)
        place = [name for name, _ in shown["columns"]].index("group_id") + 1
        assert order == [int(each) for each in dict.fromkeys(row[place] for row in shown["rows"])]
        assert order != sorted(order)
