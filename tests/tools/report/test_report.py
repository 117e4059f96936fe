"""The numbers of a report equal those by hand, and sum up over the stages."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from busy import busy_batch, stages
from composed import composed
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console
from tensordict import lazy_stack
from versions import LAYOUTS, sampled_by, with_versions

from headrace.pipeline import Pipeline, make_report
from headrace.pipeline.tools.report import StepReport, print_report, show_report
from headrace.transforms import (
    BatchError,
    CompletenessGate,
    FanOutCollapse,
    Finite,
    GroupAssembler,
    GroupRelativeAdvantage,
    LossWeight,
    RewardWithin,
    SampleFilter,
    ShuffleSplit,
)

pytestmark = pytest.mark.slow


def printed(report, width: int = 80, **options) -> str:
    out = io.StringIO()
    Console(file=out, width=width, **options).print(show_report(report))
    return out.getvalue()


def report_of(batch, **stages):
    return make_report(Pipeline(stages).run(batch))


@pytest.fixture
def report(make_batch):
    return report_of(busy_batch(make_batch), **stages(weight=LossWeight(unit="rollout")))


def test_the_funnel_equals_one_by_hand(report):
    levels = {level.name: level for level in report.funnel}
    names = ["collected", "gate", "collapse", "filter", "advantage", "split", "weight", "pipeline"]
    assert [level.name for level in report.funnel] == names
    assert levels["collected"][1:4] == (9, 8, 3)
    gone = levels["gate"].out[0]
    assert gone[:5] == ("incomplete", "dropped", 2, 2, 1)
    assert not gone.in_part
    assert levels["filter"].out[0][:5] == ("zero_variance", "masked", 3, 3, 1)
    silent = levels["pipeline"].out[0]
    # The rollout of this row has another row in the loss, so the rollout has not left.
    assert silent[:5] == ("no_loss_tokens", "masked", 1, 0, 0)
    assert silent.in_part == "parts of 1 rollout and 1 group"
    assert report.numbers["rollouts/out/gate/incomplete"] == 2
    assert report.numbers["groups/out/pipeline/no_loss_tokens"] == 0
    assert levels["pipeline"][1:4] == (3, 3, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_staleness_per_token_equals_that_of_a_loop(layout):
    """Ages are relative to the trainer after an assembler, else to the newest token. Removed rows count."""
    for seed in range(8):
        batch = with_versions(seed, layout)
        assembler = GroupAssembler(groups=4, group_size=2, max_staleness=9)
        assembler.version = 9
        assembler.put(batch)
        versions = sampled_by(batch)
        every = [version for own in versions for version in own]
        words = ("pipeline=grpo", "pipeline.stages.filter.action=drop")
        for rows, name, newest in (
            (assembler.take(), "staleness", 9),
            (batch, "behind_newest", max(every)),
        ):
            report = make_report(composed(*words, "pipeline.stages.gate.group_size=2").run(rows))
            oldest = [newest - min(own) for own in versions if own]
            ages = [newest - version for version in every]
            assert report.numbers[f"{name}/max"] == max(oldest)
            assert report.numbers[f"{name}/mean"] == pytest.approx(sum(oldest) / len(oldest))
            assert report.numbers[f"{name}/token_mean"] == pytest.approx(sum(ages) / len(ages))
            known = [newest - min(own) if own else -1 for own in versions]
            assert report.staleness.tolist() == known


def test_carried_rows_keep_the_staleness_of_their_tokens():
    """Two rows wait for the next batch, and its report has the versions of their tokens."""
    pipeline = Pipeline({"split": ShuffleSplit(minibatch_size=6, unit="sample", remainder="carry")})
    first, second = with_versions(1), with_versions(2)
    second["rollout_id"], second["group_id"] = second["rollout_id"] + 100, second["group_id"] + 100
    waits = [row for row, reason in enumerate(pipeline.run(first).ledger.reason.tolist()) if reason]
    assert len(waits) == 2
    report = make_report(pipeline.run(second))
    found = report.columns["policy_version"].tolist()
    own = sampled_by(second) + [sampled_by(first)[row] for row in waits]
    assert sorted(found) == sorted(min(versions, default=-1) for versions in own)


ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 3), st.booleans()), min_size=1, max_size=30
)


@settings(max_examples=30)
@given(
    ROWS, st.sampled_from(["mask", "exclude", "drop"]), st.sampled_from(["uneven", "drop", "carry", "pad"])
)
def test_kept_and_removed_rows_sum_up_at_every_stage(rows, action, remainder):
    from batches import batch_of

    rollouts = [3 * group + rollout for group, rollout, _, _ in rows]
    reward = {r: float(value) for r, (_, _, value, _) in zip(rollouts, rows, strict=True)}
    batch = batch_of([reward[r] for r in rollouts], [group for group, *_ in rows], rollouts)
    batch["masks", "all_assistant_mask"] &= torch.tensor([trains for *_, trains in rows]).unsqueeze(1)
    pipeline = Pipeline(
        {
            "gate": CompletenessGate(group_size=2, on_incomplete="drop"),
            "collapse": FanOutCollapse(),
            "filter": SampleFilter(criterion=RewardWithin(high=2.0), action=action),
            "advantage": GroupRelativeAdvantage(scale="none"),
            "split": ShuffleSplit(minibatch_size=2, remainder=remainder),
            "weight": LossWeight(),
        }
    )
    try:
        pipeline(batch)
    except BatchError as err:
        assume("than were dispatched" not in str(err))  # a group has more than two rollouts
        assume("no optimiser step is left" not in str(err))
        raise
    report = make_report(pipeline)
    for before, after in zip(report.funnel, report.funnel[1:], strict=False):
        for unit in ("rows", "rollouts", "groups", "tokens"):
            left = sum(getattr(gone, unit) for gone in after.out)
            assert getattr(before, unit) == getattr(after, unit) + left, (after.name, unit)
        for gone in after.out:  # rollouts and groups that lost all or some rows for this reason
            touched = report.columns["reason"] == report.names.index(f"{after.name}/{gone.reason}")
            for unit, key in (("rollouts", "rollout_id"), ("groups", "group_id")):
                counted = getattr(gone, unit) + getattr(gone, f"{unit}_in_part")
                assert counted == len(set(report.columns[key][touched].tolist()))
    assert (
        report.funnel[-1].rows == int((report.columns["reason"] == 0).sum()) == report.numbers["rows/trained"]
    )
    assert report.funnel[-1].rollouts == report.numbers["rollouts/trained"]
    assert int(report.groups["segments"].sum()) == len(batch) == len(report)
    printed(report)


def test_a_group_removed_for_two_reasons_counts_once(make_batch):
    batch = make_batch([1.0, 2, 3, 4], [0, 0, 1, 1], status=[3, 0, 0, 0])
    levels = report_of(batch, gate=CompletenessGate(group_size=2, on_incomplete="drop")).funnel
    assert {left.reason: left.rows for left in levels[1].out} == {"incomplete": 1, "failed": 1}
    assert sum(left.groups for left in levels[1].out) == 1 == levels[0].groups - levels[1].groups


def test_advantages_of_rows_that_a_later_filter_drops_are_kept(make_batch):
    low = SampleFilter(criterion=RewardWithin(high=2.0), action="drop")
    credit = GroupRelativeAdvantage(scale="none")
    report = report_of(make_batch([1.0, 3.0], [0, 0]), advantage=credit, filter=low)
    assert report.columns["advantage"].tolist() == [-1.0, 1.0]
    assert report.numbers["advantages/all/max"] == 1
    assert report.numbers["advantages/effective/max"] == -1


def test_the_advantage_by_row_accepts_a_single_row():
    for singleton, lone in (("zero", 0.0), ("raw", 7.0), ("raise", 0.0)):
        stage = GroupRelativeAdvantage(scale="none", singleton=singleton)
        found = stage.advantage_by_row(torch.tensor([1.0, 3.0, 7.0]), torch.tensor([0, 0, 1]))
        assert found.tolist() == [-1, 1, lone]
        assert stage.advantage_by_row(torch.tensor([1.0, float("nan")]), torch.tensor([0, 0])) is None


def test_the_advantage_by_row_shows_the_double_count(make_batch):
    """One rollout has the reward 1, and one has 3 on three rows. So the mean is 2 by rollout, 2.5 by row."""
    batch = make_batch([1.0, 3, 3, 3], [0] * 4, [0, 1, 1, 1])
    credit = GroupRelativeAdvantage(scale="none")
    columns = report_of(batch, collapse=FanOutCollapse(), advantage=credit).columns
    assert columns["advantage"].tolist() == [-1, 1, 1, 1]
    assert columns["advantage_by_row"].tolist() == [-1.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(("reward", "criterion"), [(float("nan"), Finite()), (9.0, RewardWithin(high=5.0))])
def test_an_excluded_row_does_not_count_in_the_advantage_by_row(make_batch, reward, criterion):
    excluded = SampleFilter(criterion=criterion, action="exclude")
    credit = GroupRelativeAdvantage(scale="none")
    report = report_of(make_batch([1.0, reward, 3.0], [0, 0, 0]), filter=excluded, advantage=credit)
    by_row = report.columns["advantage_by_row"].tolist()
    assert by_row == pytest.approx([-1.0, float("nan"), 1.0], nan_ok=True)
    assert reward == 9.0 or report.groups["reward_mean"].tolist() == [2.0]


def test_a_folded_weight_does_not_hide_the_advantage(make_batch):
    credit, fold = GroupRelativeAdvantage(scale="none"), LossWeight(fold="token_mean")
    batch = make_batch([1.0, 3, 5], [0, 0, 0])
    report = report_of(batch, advantage=credit, split=ShuffleSplit(minibatches=1), weight=fold)
    assert report.columns["advantage"].tolist() == [-2, 0, 2]


def test_carried_rows_are_in_the_report_of_the_step_that_trains_them(make_batch):
    """`note_carried` keeps what `note_collected` noted of a row in the step that collected it."""
    pipeline = Pipeline({"split": ShuffleSplit(minibatch_size=2, remainder="carry", shuffle=False)})
    run = pipeline.run(make_batch([1.0, 2, 3], [0] * 3, [0, 1, 2], status=[0, 0, 1]))
    assert make_report(run).funnel[1].out[0][:3] == ("carried", "carried", 1)
    report = make_report(pipeline.run(make_batch([4.0], [1], [3], status=[0])))
    assert report.columns["rollout_id"].tolist() == [3, 2]
    assert report.columns["status"].tolist() == [0, 1]
    assert report.columns["carried_in"].tolist() == [0, 1]
    assert report.funnel[-1].rows == 2


def test_a_report_without_a_run_is_refused(make_batch):
    pipeline = Pipeline(stages(gate=CompletenessGate(group_size=3)))
    with pytest.raises(RuntimeError, match="run the pipeline on a batch"):
        make_report(pipeline)
    with pytest.raises(BatchError):
        pipeline(busy_batch(make_batch))
    with pytest.raises(RuntimeError, match="A refused batch has no report"):
        pipeline.report()


def test_keys_of_a_report_are_those_of_the_stages_or_of_report_keys(make_batch):
    batch = make_batch([9.0, 9], [0, 0])
    batch["score"], batch["question"] = torch.tensor([0.0, 1.0]), batch.pop("prompt_text")
    credit = GroupRelativeAdvantage(scale="none", reward_key="score", advantage_key="credit")
    columns = report_of(batch, collapse=FanOutCollapse(reward_key="score"), advantage=credit).columns
    assert columns["collected_reward"].tolist() == [0, 1]
    assert columns["advantage"].tolist() == [-0.5, 0.5]
    run = Pipeline({}, report_keys={"reward": "score", "prompt": "question"}).run(batch)
    report = make_report(run)
    assert report.columns["reward"].tolist() == [0, 1]
    assert report.texts["prompt"] == ["prompt 0", "prompt 0"]
    with pytest.raises(ValueError, match=r"report_keys must be among reward, .*; got prize"):
        Pipeline({}, report_keys={"prize": "score"})


def test_ragged_token_advantages_are_reported_by_their_mean_in_the_loss(make_batch):
    def credit(batch):
        rows = list(batch.unbind(0))
        for row in rows:
            row["advantage"] = row["masks", "all_assistant_mask"].double().unsqueeze(-1)
        return lazy_stack(rows)

    batch = make_batch([1.0, 2, 3], [0, 0, 0])
    ragged = [row.clone() for row in batch.unbind(0)]
    for n, row in enumerate(ragged):
        for key in (("masks", "all_assistant_mask"), ("log_probs", "full"), ("tokens", "full")):
            row[key] = row[key][: n + 1]
    for rows in (batch, lazy_stack(ragged)):
        assert report_of(rows, credit=credit).columns["advantage"].tolist() == [1.0, 1.0, 1.0]


def test_a_group_has_zero_variance_only_if_none_of_its_rewards_varies(make_batch):
    batch = make_batch([0.0] * 4, [0, 0, 1, 1])
    batch["next", "reward"] = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 3.0], [2.0, 3.0]])
    assert report_of(batch).groups["zero_variance"].tolist() == [False, True]


@pytest.mark.parametrize(("weights", "sums"), [([1.0, 0.5], [2.0, 2.0, 3.0]), (None, [3.0, 4.0, 3.0])])
def test_several_rewards_are_added_up_with_the_weights_of_the_recipe(make_batch, weights, sums):
    """Group 1 leaves before its rewards are added up, and its reward is added up all the same."""
    batch = make_batch([0.0] * 3, [0, 0, 1])
    batch["next", "reward"] = torch.tensor([[1.0, 2.0], [0.0, 4.0], [3.0, 0.0]])
    gate = CompletenessGate(group_size=2, on_incomplete="drop")
    collapse = FanOutCollapse(columns=2, weights=weights)
    advantage = GroupRelativeAdvantage(scale="none")
    report = report_of(batch, gate=gate, collapse=collapse, advantage=advantage)
    for name in ("collected_reward", "reward"):
        assert report.columns[name].tolist() == sums
    assert report.columns["rewards"].tolist() == batch["next", "reward"].tolist()
    assert report.columns["reason"].tolist()[:2] == [0, 0]


def test_a_drafts_reward_is_not_reported_for_a_rollout_dropped_before_the_collapse(make_batch):
    """One rollout has a draft with the reward 0 and a revision with 1, and the other has 1."""
    gate, collapse = CompletenessGate(group_size=3, on_incomplete="drop"), FanOutCollapse(reward="sum")
    report = report_of(make_batch([0.0, 1, 1], [0, 0, 0], [0, 0, 1]), gate=gate, collapse=collapse)
    assert str(report.rollouts["reward"].tolist()) == "[nan, 1.0]"
    assert report.numbers["reward/all/mean"] == 1.0
    whole = report_of(make_batch([0.0, 1, 0.5], [0, 0, 0], [0, 0, 1]), collapse=collapse)
    assert whole.rollouts["reward"].tolist() == [1.0, 0.5]


# -- in a terminal ----------------------------------------------------------------------------------


WIDE = """\
step 1234                           rows  rollouts  groups  tokens
──────────────────────────────────────────────────────────────────
collected                             18        17       4   1,231
  gate: failed, dropped               −3        −3      −1      −1
  gate: incomplete, dropped           −1         0       0      −1
    parts of 1 rollout and 1 group
  filter: not truncated, masked       −1        −1       0      −4
    parts of 1 group
trained                               13        13       3   1,225

group  prompt          rollouts  compared  rows  rewards      advantages     left
──────────────────────────────────────────────────────────────────────────────────────────
    5  What is 5 tim…    2 of 2         2     2  0 1          -0.50 … +0.50  filter: not
                                                                             truncated
    3  What is 3 tim…    3 of 3         0     4  0.25 none×2  –              gate: failed
                                                                             ×3
    7  What is 7 tim…        11        11    11  0.5×2 0 1 2  +0.00 … +1.00
                                                 3 4 5 6 …
"""
LEFT = "and 1 group more\n"
NARROW = """\
step 1234     rows  rollouts  groups  tokens
────────────────────────────────────────────
collected       18        17       4   1,231
  gate:         −3        −3      −1      −1
  failed,
  dropped
  gate:         −1         0       0      −1
  incomplete
  , dropped
    parts of
    1
    rollout
    and 1
    group
  filter:       −1        −1       0      −4
  not
  truncated,
  masked
    parts of
    1 group
trained         13        13       3   1,225

group  rollouts  rewards       left
────────────────────────────────────────────
    5    2 of 2  0 1           filter: not
                               truncated
    3    3 of 3  0.25 none×2   gate: failed
                               ×3
    7        11  0.5×2 0 1 2
                 3 4 5 6 …
    9         1  1e+06
"""


@pytest.fixture
def by_hand() -> StepReport:
    """Group 5 loses a rollout, and 3 all of them; one of these has two rows. Group 7 has eleven rewards."""
    nan = math.nan
    lines = [(5, 50, 0, 1.0, 0.5, 2, 3), (5, 51, 2, 0.0, -0.5, 2, 4)]
    rewards = [0.0, 0.5, 0.5, *map(float, range(1, 9))]
    lines += [(7, 70 + k, 0, reward, k / 10, 11, 2) for k, reward in enumerate(rewards)]
    lines += [(3, rollout, 1, nan, nan, -1, 0) for rollout in (30, 31)]
    lines += [(3, 32, code, 0.25, nan, -1, 1) for code in (1, 3)]
    lines += [(9, 90, 0, 1e6, nan, 1, 1200)]
    names = ("group_id", "rollout_id", "reason", "reward", "advantage", "compared", "tokens")
    columns = {name: np.array(column) for name, column in zip(names, zip(*lines, strict=True), strict=True)}
    columns["row"] = np.arange(len(lines))
    columns["expected_rollouts"] = np.array([{3: 3, 5: 2}.get(line[0], -1) for line in lines])
    reasons = ("trained", "gate/failed", "filter/not_truncated", "gate/incomplete")
    texts = {"prompt": [f"user: What is {line[0]} times the number of all the others?" for line in lines]}
    recipe = (("gate", "Gate()"), ("filter", "Filter()"))
    report = StepReport(1234, recipe, columns, reasons, ("trained", "dropped", "masked", "dropped"), texts)
    report.__dict__["advisories"] = []
    return report


def test_a_printed_report_equals_one_by_hand(by_hand):
    for width, groups, text in ((90, 3, WIDE + LEFT), (44, 4, NARROW), (44, 12, NARROW)):
        out = io.StringIO()
        Console(file=out, width=width).print(show_report(by_hand, groups=groups))
        assert [line.rstrip() for line in out.getvalue().splitlines()] == text.splitlines()
    out = io.StringIO()
    coloured = Console(file=out, width=90, force_terminal=True, color_system="standard")
    coloured.print(show_report(by_hand, groups=2))
    dim = [line.split()[1] for line in out.getvalue().splitlines() if line.startswith("\x1b[2m")]
    assert dim == ["gate:", "gate:", "parts", "filter:", "parts", "3", "×3", "2"]


def test_a_line_has_at_most_eight_rewards_and_forty_letters_of_a_prompt_and_a_table_twelve_groups():
    """Group g has g + 1 different rewards. A group that is trained in full keeps its place."""
    group, reward = np.array([(group, k) for group in range(13) for k in range(group + 1)]).T
    columns = {"group_id": group, "rollout_id": np.arange(91), "reward": reward.astype(float)}
    columns |= {"reason": np.zeros(91, int), "row": np.arange(91)}
    texts = {"prompt": ["x" * (34 + each) for each in group]}
    report = StepReport(0, (), columns, ("trained",), ("trained",), texts)
    report.__dict__["advisories"] = []
    *lines, last = printed(report, 130).splitlines()[-13:]
    for number, line in enumerate(lines):
        rewards = [str(each) for each in range(min(number + 1, 8))] + ["…"] * (number >= 8)
        prompt = "x" * (34 + number) if number <= 6 else "x" * 39 + "…"
        assert line.split() == [str(number), prompt, str(number + 1), str(number + 1), *rewards, "–"]
    assert last == "and 1 group more"


def test_a_report_without_ids_has_a_funnel_of_rows():
    columns = {"reason": np.array([0, 0]), "row": np.arange(2)}
    text = printed(StepReport(0, (), columns, ("trained",), ("trained",)), width=40)
    assert text.split() == ["step", "0", "rows", "─" * 15, "collected", "2", "trained", "2"]


def test_a_batch_without_rows_has_a_report(make_batch):
    report = report_of(busy_batch(make_batch)[:0], **stages())
    assert len(report) == 0
    assert "collected" in printed(report)


def test_a_report_is_printed_with_the_options_of_a_report(make_batch):
    """The batch gives the cost of its rows as trees, and the decoder gives their texts."""
    batch = make_batch([1.0, 2, 3, 3], [0, 0, 1, 1]).exclude("prompt_text")
    options = {"step": 9, "solved": 2.0, "batch": batch, "decode": lambda ids: [f"<{each}>" for each in ids]}
    run, console = Pipeline({}).run(batch), Console(width=80, file=io.StringIO())
    made, expected = print_report(run, console=console, **options), make_report(run, **options)
    assert (made.step, made.numbers, made.texts) == (9, expected.numbers, expected.texts)
    assert made.texts["response"]
    assert console.file.getvalue() == printed(expected)
    assert "step 9" in console.file.getvalue()
    assert "tokens of prompts and responses: 16 row by row" in console.file.getvalue()


def test_the_pipeline_prints_its_report(make_batch, capsys):
    pipeline = composed("pipeline.stages.gate.group_size=2", "pipeline.stages.split.remainder=uneven")
    pipeline(make_batch([1.0, 2, 3, 3], [0, 0, 1, 1]))
    assert repr(pipeline.report(step=9)) == "StepReport(step=9, 2 of 4 rows trained)"
    assert "zero variance" in capsys.readouterr().out
