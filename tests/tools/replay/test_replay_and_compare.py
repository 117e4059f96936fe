"""``task=replay`` and ``task=compare`` print and write the numbers of dumps."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from busy import busy_batch, stages
from command import QUICK, headrace_here, told
from composed import configure
from dumps import open_instruct_row, write_lines
from pages import data_of
from rich.console import Console

from headrace.pipeline import ConfigError, Pipeline, make_report, write_dump
from headrace.pipeline.tools.replay import compare_recipes, replay_dump
from headrace.pipeline.tools.replay.compare_task import show_comparison
from headrace.pipeline.tools.report import Comparison
from headrace.pipeline.tools.report.comparison import Mover
from headrace.transforms import BatchError, GroupRelativeAdvantage, LossWeight, MissingKeyError

pytestmark = pytest.mark.slow

BASELINES = ("mean", "leave_one_out")
COUNTED = ("pipeline.stages.gate.group_size=3", "pipeline.stages.gate.on_incomplete=drop")


@pytest.fixture
def dump(make_batch, tmp_path):
    folder = tmp_path / "dump"
    for step in range(3):
        pipeline = Pipeline(stages(weight=LossWeight()))
        pipeline(busy_batch(make_batch))
        write_dump(make_report(pipeline, step=step), folder)
    return folder


def configured(task, dump, *words):
    return configure("config", f"task={task}", f"source.path={dump}", *words)


STAGES = """\
Pipeline
  1. gate:      CompletenessGate(group_size=2)
  2. collapse:  FanOutCollapse()
  3. filter:    SampleFilter(criterion=RewardsVary())
  4. advantage: GroupRelativeAdvantage(scale='none')
  5. split:     ShuffleSplit(minibatches=1)
  6. weight:    LossWeight(unit='constant', length=30)
"""
SEVERAL = f"""\
{STAGES}where the rows of 2 steps went
                         rows  rollouts  groups
───────────────────────────────────────────────
collected                  12        12       6
  filter: zero variance    −4        −4      −2
trained                     8         8       4
67 % of the rows were trained, all 2 steps
The mean reward went from 0.833 (step 3) to 0.833 (step 4): 2 steps are too few to say whether it learns.
not checked, for lack of data: learning-rate-zero, gradient-zero and 10 more
written to FOLDER/out
the page: file://FOLDER/out/report.html
all rows of all steps: headrace view FOLDER/out
"""
AGREE = """\
logged advantages: 12 rows have one, 100% agree with yours within 0.0001; the greatest difference is 0, the
mean 0.
"""
SINGLE = f"""\
{STAGES}step 3                           rows  rollouts  groups  tokens
───────────────────────────────────────────────────────────────
collected                           6         6       3      18
  filter: zero variance, masked    −2        −2      −1      −6
trained                             4         4       2      12

group  prompt    rollouts  rows  rewards  advantages     left
─────────────────────────────────────────────────────────────────────────────────
    1  prompt 1    2 of 2     2  1×2      +0.00 … +0.00  filter: zero variance ×2
    0  prompt 0    2 of 2     2  0 1      -0.50 … +0.50
    2  prompt 2    2 of 2     2  0 2      -1.00 … +1.00
written to FOLDER/one
the page: file://FOLDER/one/report.html
all rows of all steps: headrace view FOLDER/one
"""


def test_one_step_is_printed_as_its_report_and_several_as_a_table_of_steps(make_batch, tmp_path):
    for step in (3, 4):
        batch = make_batch([0.0, 1, 1, 1, 0, 2], [0, 0, 1, 1, 2, 2], status=[0, 0, 1, 0, 0, 0])
        write_dump(make_report(Pipeline({}).run(batch), step=step), tmp_path / "my dump")
    words = ("pipeline=dr_grpo", "pipeline.stages.gate.group_size=2", "pipeline.stages.weight.length=30")
    one = "my dump/step_00000003.parquet"
    head, tail = SEVERAL.replace("/out", "/again").split("written")
    again = f"{head}{AGREE}written{tail}"
    for name, path, text, steps, rows in (
        ("out", "my dump", SEVERAL, 2, 12),
        ("one", one, SINGLE, 1, 6),
        ("again", "out/rollouts", again, 2, 12),
    ):
        console = Console(width=110, file=io.StringIO())
        result = replay_dump(configured("replay", tmp_path / path, *words), tmp_path / name, console)
        lines = console.file.getvalue().replace(str(tmp_path), "FOLDER").splitlines()
        assert [line.rstrip() for line in lines if line.strip()] == [
            line for line in text.splitlines() if line
        ]
        assert [each["rows/trained"] for each in result["steps"]] == [4.0] * steps
        assert (float(result), result["notices"], result["failed_steps"]) == (4 * steps, [], [])
        assert result["verdict"].startswith("The mean reward ")
        said = f"{4 * steps} rows train, of {rows} rows in {steps} step{'s' * (steps > 1)}; not checked"
        assert said in repr(result)
        page = data_of(tmp_path / name / "report.html")
        assert page["title"].endswith(f", replay of {path.rpartition('/')[2]}")
        files = sorted(each.name for each in (tmp_path / name).iterdir())
        assert files == ["config.yaml", "report.html", "rollouts"]


NO_LENGTHS = (
    "Lengths in tokens are not in this dump. No number here depends on them: loss weights and shares of the "
    "gradient are left out. Set `source.tokenizer=PATH`, a tokenizer.json or a folder of transformers, to "
    "count them."
)
HOLES = (
    "This dump lacks 1 group of the ids 0 to 4, lost or left out before the dump was written. It is not "
    "known whether their rollouts are long: the dump has no {}."
)
TREES = "tokens of prompts and responses: 70 row by row; 50 as trees of groups, 1.4 times fewer, all {} steps"


@pytest.mark.parametrize(
    ("has_tokens", "option", "trees", "notices"),
    [
        (True, "pipeline.stages.gate.on_incomplete=drop", 3, [HOLES.format("texts of prompts")]),
        (True, "source.skip_bad=true", 2, []),  # the ids of a step that failed are no holes
        (
            False,
            "pipeline.stages.gate.on_incomplete=drop",
            0,
            [NO_LENGTHS, HOLES.format("lengths in tokens")],
        ),
    ],
)
def test_a_replay_says_what_its_dump_lacks(has_tokens, option, trees, notices, tmp_path):
    """Group 2 is missing, and one of the two rollouts of group 4, so no row of the second step is trained.

    Groups have prompts of 4 tokens and responses of 3. All together have 5 · 2 · 7 tokens in rows, and
    5 · (4 + 2 · 3) in trees.
    """
    for step, groups in enumerate(([0, 1, 3], [4], [5, 6])):
        rows = []
        for rollout in [2 * group + at for group in groups for at in (0, 1) if (group, at) != (4, 1)]:
            group, reward = rollout // 2, rollout % 2
            tokens = {
                "prompt_tokens": [group] * 4,
                "response_tokens": [9 + reward] * 3,
                "advantage": reward - 0.5,
            }
            row = {"row": len(rows), "group_id": group, "rollout_id": rollout, "reward": reward, "step": step}
            rows.append(open_instruct_row(rollout, group, reward, step=step, **tokens) if has_tokens else row)
        name = f"a_rollouts_{step}.jsonl" if has_tokens else f"step_{step:08d}.jsonl"
        write_lines(tmp_path / "dump" / name, rows)
    words = ("pipeline=dr_grpo", "pipeline.stages.gate.group_size=2", "pipeline.stages.weight.length=30")
    console = Console(width=1000, file=io.StringIO())
    result = replay_dump(configured("replay", tmp_path / "dump", *words, option), tmp_path / "out", console)
    lines = console.file.getvalue().splitlines()
    said = [line for line in lines if "his dump" in line or line.startswith("tokens of")]
    assert said == [TREES.format(trees)] * bool(trees) + notices
    assert result["notices"] == notices == data_of(tmp_path / "out" / "report.html")["notices"]
    assert len(result["failed_steps"]) == (option == "source.skip_bad=true")


def test_two_recipes_are_compared_on_the_same_rollouts(dump, tmp_path):
    config = configured("compare", dump, "pipelines=[grpo,dr_grpo]")
    correlation, text = told(compare_recipes, config, tmp_path / "out", COUNTED)
    assert 0 < correlation <= 1
    assert "the same direction" in text  # only one group trains
    assert "groups whose" not in text
    written = (tmp_path / "out" / "compare.json").read_text()
    found = json.loads(written)
    assert written == json.dumps(found, indent=1)
    assert found["numbers"]["rows"] == 27
    assert found["numbers"]["trained_by_both"] == 9
    assert found["numbers"]["gradient_cosine"] == pytest.approx(1)  # only one group trains
    page = (tmp_path / "out" / "report.html").read_text()
    assert '"versus":["grpo","dr_grpo"]' in page
    assert '"difference":"grpo and dr_grpo give different gradients' in page
    assert '"verdict":""' in page  # a verdict is about a single recipe
    assert f"the page: {(tmp_path / 'out' / 'report.html').as_uri()}" in " ".join(text.split())
    for names in ("grpo", "grpo,grpo", "grpo,rloo,dapo"):
        with pytest.raises(ConfigError, match=r"must name two different recipes.*; got \['grpo'"):
            told(compare_recipes, configured("compare", dump, f"pipelines=[{names}]"), tmp_path / "out")


@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e6])
def test_the_unit_of_the_reward_changes_no_comparison(unit, make_batch):
    batch = make_batch([0.0, 2, 0, 6, 1, 5], [5, 5, 9, 9, 9, 9])
    batch["next", "reward"] = batch["next", "reward"].double() * unit
    stages = [{"advantage": GroupRelativeAdvantage(scale="none", baseline=name)} for name in BASELINES]
    comparison = Comparison(BASELINES)
    comparison.add(*(make_report(Pipeline(each).run(batch)) for each in stages))
    assert comparison.numbers["differ"] == 6
    assert "differs in 6 of 6 rows. " in comparison.said
    comparison = Comparison(("one", "same"))
    comparison.add(*(make_report(Pipeline(each).run(batch)) for each in (stages[0], stages[0])))
    assert comparison.numbers["differ"] == 0
    assert comparison.said.startswith("one and same give the same gradient: ")
    assert comparison.movers == []


def test_the_shares_of_groups_in_both_gradients_equal_those_by_hand(make_batch, tmp_path):
    """With a std, the gradients of the groups are as 1 : 1, else as 1 : 3. The cosine is 4/√20 = 2/√5."""
    batch = make_batch([0.0, 2, 0, 6], [5, 5, 9, 9])
    batch["masks", "all_assistant_mask"][:] = True
    write_dump(make_report(Pipeline({}).run(batch)), tmp_path / "dump")
    config = configured("compare", tmp_path / "dump", "pipelines=[grpo,dr_grpo]")
    words = ("pipeline.stages.gate.group_size=2",)
    correlation, text = told(compare_recipes, config, tmp_path / "out", words)
    found = json.loads((tmp_path / "out" / "compare.json").read_text())
    movers = sorted(found["movers"], key=lambda each: each["group"])
    assert [(each["group"], each["step"]) for each in movers] == [(5, 0), (9, 0)]
    shares = [[each["first"], each["second"]] for each in movers]
    assert np.array(shares) == pytest.approx(np.array([[0.5, 0.25], [0.5, 0.75]]), abs=1e-6)
    assert correlation == pytest.approx(2 / 5**0.5)  # also of the advantages ±1/√2 and ±1, ±3
    numbers = {name: found["numbers"][name] for name in ("gradient_moved", "gradient_cosine")}
    assert list(numbers.values()) == pytest.approx([0.25, 2 / 5**0.5])
    assert re.search(r"0 +prompt 5 +50\.0% +25\.0%", text)
    page = data_of(tmp_path / "out" / "report.html")
    assert (page["title"], page["versus"]) == ("grpo and dr_grpo", ["grpo", "dr_grpo"])
    step = page["steps"][-1]
    for name, column in {
        "advantage": [-(0.5**0.5), 0.5**0.5] * 2,
        "advantage_by_row": [-1, 1, -3, 3],
        "share": [0.25] * 4,
        "other_share": [1 / 8, 1 / 8, 3 / 8, 3 / 8],
    }.items():
        assert step["rows"][name] == pytest.approx(column, abs=1e-6)
    found = {name: step["numbers"][f"versus/{name}"] for name in numbers}
    found["second"] = step["numbers"]["second/advantage/abs_mean"]
    assert found == pytest.approx({**numbers, "second": 2.0})


SHOWN = """\
one and two give different gradients: advantage × loss weight × tokens differs in 5 of 1,234 rows of 2 steps.
25.0% of the gradient moves to other groups. They differ in the scale of each group alone: its advantages
differ by a factor.

groups whose share of their step's gradient differs most
 step  prompt                                      one    two
─────────────────────────────────────────────────────────────
1,000  222222222222222222222222222222222222222…  50.0%  25.0%
    2  prompt/bcfa1ad6…                          12.5%  25.0%

rows                                                                                            1,234
trained by both                                                                                 1,200
trained only by one                                                                                 3
trained only by two                                                                                 4
correlation of advantages                                                                      0.5000
advantages that differ                                                                              6
advantages with opposite signs                                                                      1
share of the gradient that moves to other groups, mean over all 2 steps                         25.0%
cosine of the rows' gradient shares, mean over the 1 of 2 steps at which both have a gradient  0.5000

shares by segments
segments of the rollout    one    two  rows
───────────────────────────────────────────
1                        50.0%  75.0%     6
2                        50.0%  25.0%     2

shares by tokens
tokens of the row, at most    one    two   rows
───────────────────────────────────────────────
4                           17.0%  20.0%  1,002
8                           16.0%  20.0%  1,003
16                          15.0%  20.0%  1,004
32                          14.0%  20.0%  1,005
64                          10.0%  20.0%  1,006
128                         12.0%  20.0%  1,007
256                         11.0%  20.0%  1,008
512                         10.0%  20.0%  1,009

A row's share of a step's gradient is |advantage| × loss weight × tokens in the loss, over the sum of all
rows. Tables have means over the steps at which the recipe has a gradient.
"""
SHOWN_OF_ONE_STEP = """\
one and two give different gradients: advantage × loss weight × tokens differs in 5 of 1,234 rows. 50.0% of
the gradient moves to other groups. They differ in the scale of each group alone: its advantages differ by a
factor.

groups whose share of their step's gradient differs most
step                group    one    two
───────────────────────────────────────
   2     prompt/bcfa1ad6…  12.5%  25.0%
   2  4611686018427387904  12.5%  25.0%

rows                                               1,234
trained by both                                    1,200
trained only by one                                    3
trained only by two                                    4
correlation of advantages                         0.5000
advantages that differ                                 6
advantages with opposite signs                         1
share of the gradient that moves to other groups   50.0%
cosine of the rows' gradient shares               0.5000

shares by tokens
tokens of the row, at most     one    two  rows
───────────────────────────────────────────────
4                           100.0%  50.0%     3
8                             0.0%  50.0%     4

A row's share of a step's gradient is |advantage| × loss weight × tokens in the loss, over the sum of all
rows. Tables have means over the steps at which the recipe has a gradient.
"""
NO_SHARES = """\
Shares of the gradient are not known: the dump has no tokens. Set source.tokenizer=PATH to make tokens from
its texts.
"""
UNKNOWN = f"""\
one and two give different advantages: they differ in 2 of 8 rows.
{NO_SHARES}
rows                            8
trained by both                 0
trained only by one             0
trained only by two             0
advantages that differ          0
advantages with opposite signs  0
"""
SAME = "one and two give the same advantage: it is equal in all 8 rows.\n"


def test_a_comparison_is_printed_as_by_hand():
    """A table has the eight lines that differ most. A line that shows equal shares is left out."""
    tokens = {str(2**k): np.array([0.2 + 0.02 * (9 - k) * (k != 6), 0.2, 1000.0 + k]) for k in range(10)}
    segments = {"1": np.array([1.0, 0.75, 6]), "2": np.array([1.0, 0.25, 2]), "3": np.array([0.0, 0.0, 1])}
    two_steps = {
        "steps": 2,
        "rows": 1234,
        "both": 1200,
        "only": [3, 4],
        "changed": 5,
        "differ": 6,
        "flips": 1,
        "moments": np.array([4.0, 4, 4, 8, 8, 6]),  # (4 · 6 − 4 · 4) / (4 · 8 − 4 · 4)
        "moved": 0.5,
        "cosines": [0.5],
        "trains": [2, 1],
        "movers": [
            Mover(1000, 7, 0.5, 0.25, "user: " + "2" * 41),
            Mover(2, "prompt/bcfa1ad6295", 0.125, 0.25),
        ],
        "causes": Counter(group=6),
        "shares": {"segments": segments, "tokens": tokens},
    }
    movers = [Mover(2, "prompt/bcfa1ad6295", 0.125, 0.25), Mover(2, 2**62, 0.125, 0.25)]
    few = {"segments": {"1": np.array([1.0, 1.0, 6])}}
    few["tokens"] = {"8": np.array([0.0, 0.5, 4]), "4": np.array([1.0, 0.5, 3])}
    one_step = two_steps | {"steps": 1, "movers": movers, "shares": few, "trains": [1, 1]}
    unknown = {"steps": 1, "rows": 8, "moved": math.nan}
    for has, text in (
        (two_steps, SHOWN),
        (one_step, SHOWN_OF_ONE_STEP),
        (unknown | {"changed": 2}, UNKNOWN),
        (unknown, SAME + NO_SHARES),
    ):
        out = io.StringIO()
        show_comparison(Comparison(("one", "two"), **has), Console(file=out, width=110))
        assert [line.rstrip() for line in out.getvalue().splitlines()] == text.splitlines()


ALONE = "They differ in the scale of each group alone: its advantages differ by a factor."
WHY = {  # for each difference: the advantage and the loss weight of the second recipe, and the sentence
    "scale": ({"scale": "none"}, {}, ALONE),
    "one factor": ({"clip": None}, {}, "They differ in the scale of all advantages, by one factor."),
    "baseline": (
        {"baseline": "median"},
        {},
        "They differ in the advantages of a group, by more than a factor.",
    ),
    "long rows": ({}, {"unit": "token"}, "in the weights of long rows, which are greater in two."),
    "both": (
        {"scale": "none"},
        {"unit": "token"},
        "They differ in the scale of each group, and in the weights of long rows, which are greater in two.",
    ),
}


@pytest.mark.parametrize("cause", WHY)
def test_a_comparison_says_in_one_sentence_why_two_recipes_differ(cause, make_batch):
    """The groups have the rewards 0, 2, 4 and 0, 6, 9. Their rows have one to four tokens."""
    batch = make_batch([0.0, 2, 4, 0, 6, 9], [5, 5, 5, 9, 9, 9])
    batch["masks", "all_assistant_mask"] = torch.arange(4) >= 3 - torch.arange(6)[:, None] % 4
    advantage, weight, said = WHY[cause]
    one = {"advantage": GroupRelativeAdvantage(), "weight": LossWeight(unit="sample")}
    two = {
        "advantage": GroupRelativeAdvantage(**advantage),
        "weight": LossWeight(**({"unit": "sample"} | weight)),
    }
    reports = [make_report(Pipeline(each).run(batch)) for each in (one, two)]
    if cause == "one factor":
        columns = reports[0].columns
        reports[1] = replace(reports[0], columns={**columns, "advantage": 3 * columns["advantage"]})
    comparison = Comparison(("one", "two"))
    comparison.add(*reports)
    assert comparison.said.endswith(said)
    comparison = Comparison(("one", "two"))
    comparison.add(reports[0], reports[0])
    assert "They differ" not in comparison.said


def test_a_comparison_says_that_weights_of_single_tokens_are_not_compared(make_batch):
    batch = make_batch([0.0, 1], [5, 5])
    report = make_report(Pipeline({"advantage": GroupRelativeAdvantage()}).run(batch))
    by_token = {1: SimpleNamespace(values={"importance_weight": [0.5, 1.5]})}
    comparison = Comparison(("plain", "corrected"))
    comparison.add(report, replace(report, by_token=by_token))
    assert "the same gradient, up to the weights of single tokens" in comparison.said


def dump_of_lines(folder, *steps):
    """Write a dump with these rewards for each step, in groups of two."""
    for step, rewards in enumerate(steps):
        rows = [
            {
                "step": step,
                "row": i,
                "group_id": 9 * step + i // 2,
                "rollout_id": 9 * step + i,
                "reward": reward,
            }
            for i, reward in enumerate(rewards)
        ]
        write_lines(folder / f"step_{step:08d}.jsonl", rows)
    return folder


def test_overrides_of_a_stage_apply_to_the_recipes_that_have_it(tmp_path):
    dump_of_lines(tmp_path / "dump", [0.0, 1.0] * 3)
    words = ["task=compare", "source.path=dump", "pipelines=[dapo,as/verl]", "~pipeline.stages.overlong"]
    words += ["pipeline.stages.gate.group_size=2", "pipeline.stages.filter.action=mask"]
    done = headrace_here(tmp_path, *words, "~pipeline.stages.weight.unit")
    for stage in ("overlong", "filter"):
        assert f"overrides of the stage '{stage}' do not apply to as/verl" in " ".join(done.stdout.split())


def test_a_missing_column_is_the_error_even_after_a_malformed_step(tmp_path):
    folder = dump_of_lines(tmp_path / "dump", ["no number", 1.0], [0.0, 1.0], [0.0, 1.0])
    words = ["pipeline=high_entropy", "pipeline.stages.gate.group_size=2"]
    with pytest.raises(MissingKeyError, match=r"step 1: stage 'forks'.*needs the tokens"):
        told(replay_dump, configured("replay", folder, *words), tmp_path / "out")


def test_a_step_whose_rows_differ_between_two_recipes_is_left_out(tmp_path):
    """One recipe carries two of the six rollouts of the first step. So its second step has eight rollouts."""
    folder = dump_of_lines(tmp_path / "dump", *[[0.0, 1.0] * 3] * 3)
    mine = tmp_path / "mine" / "pipeline" / "carries.yaml"
    mine.parent.mkdir(parents=True)
    split = "{minibatches: null, minibatch_size: 4, remainder: carry}"
    mine.write_text(f"defaults: [grpo]\nstages: {{split: {split}}}\n")
    words = ["pipeline.stages.gate.group_size=2", f"hydra.searchpath=[file://{tmp_path}/mine]"]
    with pytest.raises(RuntimeError, match="2 of 3 steps failed"):
        told(
            compare_recipes,
            configured("compare", folder, "pipelines=[carries,grpo]"),
            tmp_path / "out",
            words,
        )
    found = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert found["numbers"]["rows"] == 6
    assert [each["step"] for each in found["failed_steps"]] == [1, 2]
    assert "one has 8 rows and the other 6" in found["failed_steps"][0]["why"]


def test_the_command_trains_dumps_and_replays_with_the_options_that_its_error_names(tmp_path):
    """Some rollouts of the demo fail, and each row has a reward."""
    headrace_here(tmp_path, *QUICK, "sampler.prompts_per_batch=16", "hydra.run.dir=run")
    step = data_of(tmp_path / "run" / "report.html")["steps"][-1]
    assert all(label.endswith(" backwards?") for label in step["groups"]["label"])
    assert any(text["start"] for text in step["rows"]["response"])
    with pytest.raises(BatchError, match="incomplete group") as raised:
        replay_dump(configured("replay", tmp_path / "run"), tmp_path / "out")
    words = str(raised.value).rpartition("The run that wrote it set ")[2].split()
    assert words == ["pipeline.stages.gate.on_incomplete=drop", "pipeline.stages.collapse.reward=sum"]
    shown = headrace_here(tmp_path, "task=replay", "source.path=run/rollouts", *words, "hydra.run.dir=again")
    assert "where the rows of 2 steps went" in shown.stdout
    again = data_of(tmp_path / "again" / "report.html")["steps"][-1]
    assert again["rows"]["response"] == step["rows"]["response"]


def test_a_replay_with_a_flat_reward_says_how_to_estimate_larger_groups(tmp_path):
    """The page names the recipe, and an advisory says that responses became three times as long."""
    (tmp_path / "my dump").mkdir()
    for step in range(12):
        text = {"gts": "2", "step": step, "output": "3" * (1 + 2 * (step > 5))}
        scores = {"1+1?": (0.0, 0.0), "2+2?": (0.0, 0.0), "3+3?": (0.0, 1.0)}
        rows = [text | {"input": asked, "score": score} for asked, two in scores.items() for score in two]
        write_lines(tmp_path / "my dump" / f"{step}.jsonl", rows)
    words = ["source.path=my dump", "source.group_by=prompt", "source.group_size=2"]
    said = " ".join(headrace_here(tmp_path, "task=replay", *words, "pipeline=rloo").stdout.split())
    assert said.count("would help: task=plan source.path=FOLDER") == 1
    assert "lengths-explode: Responses grew from 1 (steps 0 to 2) to 3 (steps 9 to 11) characters" in said
    (page,) = tmp_path.glob("outputs/*/*/report.html")
    assert '"title":"rloo, replay of my dump"' in page.read_text()
