"""Rows keep the ids of their dump in reports, ledgers, errors and the dump of a replay."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
import torch
from command import headrace_here, told
from composed import composed, configure
from dumps import (
    episode,
    in_order,
    nemo_row,
    slime_dump,
    slime_sample,
    tinker_row,
    trl_dump,
    verl_row,
    write_lines,
)
from pages import data_of
from rich.console import Console

from headrace.pipeline import make_report, page_data
from headrace.pipeline.tools.dumps.readers import Sample, SourceError, open_dump
from headrace.pipeline.tools.dumps.readers.batch import BY_ORDER, group_by_order, label_ids, label_text
from headrace.pipeline.tools.replay import replay_dump
from headrace.pipeline.tools.report import Comparison, show_report
from headrace.pipeline.tools.report.loggers import group_rows, rollout_rows
from headrace.transforms import BatchError

pytestmark = pytest.mark.slow

WORDS = ("pipeline=grpo", "pipeline.stages.split.remainder=uneven", "pipeline.stages.split.shuffle=false")


def slime(folder):
    samples = [slime_sample(40 + i // 2, 900 + 3 * i, float(i % 2)) for i in range(4)]
    return slime_dump(folder / "5.pt", 5, samples), [40, 40, 41, 41], [900, 903, 906, 909]


def verl(folder):
    uids = [f"7f3a_{i // 2}_{i % 2}_0" for i in range(4)]
    rows = [verl_row(uid, float(i % 2), prompt=uid[:6]) for i, uid in enumerate(uids)]
    path = write_lines(folder / "7.jsonl", rows)
    return path, ["7f3a_0", "7f3a_0", "7f3a_1", "7f3a_1"], ["7f3a_0_0", "7f3a_0_1", "7f3a_1_0", "7f3a_1_1"]


def tinker(folder):
    path = folder / "train_rollout_summaries.jsonl"
    write_lines(path, [tinker_row(3 + i // 2, i % 2, float(i % 2)) for i in range(4)])
    return path, [3, 3, 4, 4], ["3/0", "3/1", "4/0", "4/1"]


def reported(path):
    ((step, batch),) = open_dump(path)
    run = composed(*WORDS, "pipeline.stages.gate.group_size=2").run(batch)
    return run, make_report(run, step=step)


def test_a_comparison_has_the_ids_of_the_dump(tmp_path):
    path, groups, _ = slime(tmp_path)
    comparison = Comparison(("all", "none"))
    first, second = (reported(path)[1] for _ in range(2))
    second.columns["reason"][:2] = 1
    comparison.add(first, second)
    assert {mover.group for mover in comparison.movers} == set(groups)


@pytest.mark.parametrize("write", [slime, verl, tinker])
def test_report_ledger_and_page_have_the_ids_of_the_dump(write, tmp_path):
    path, groups, rollouts = write(tmp_path)
    run, report = reported(path)
    trained = run.ledger.rows("trained")
    assert [row["group"] for row in trained] == groups
    assert [row["rollout"] for row in trained] == rollouts
    data = page_data([report], title="ids")["steps"][0]
    assert data["rows"]["group"] == groups
    assert data["rows"]["rollout"] == rollouts
    assert data["groups"]["id"] == list(dict.fromkeys(groups))
    names, rows = group_rows(report)
    assert [row[names.index("group")] for row in rows] == list(dict.fromkeys(groups))
    names, rows = rollout_rows(report)
    seen = {(row[names.index("group")], row[names.index("rollout")]) for row in rows}
    assert seen == set(zip(groups, rollouts, strict=True))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(show_report(report))
    shown = console.export_text()
    assert all(re.search(rf"^ *{group} ", shown, re.M) for group in groups), shown


@pytest.mark.parametrize(("write", "format"), [(tinker, "parquet"), (verl, "jsonl")])
def test_a_replay_of_a_replay_keeps_the_ids(write, format, tmp_path):
    path, groups, rollouts = write(tmp_path)
    for name in ("one", "two"):
        words = (*WORDS, f"source.path={path}", f"report.dump={format}", "pipeline.stages.gate.group_size=2")
        config = configure("config", "task=replay", *words)
        told(replay_dump, config, tmp_path / name)
        path = tmp_path / name / "rollouts"
    trained = reported(path)[0].ledger.rows("trained")
    assert [row["group"] for row in trained] == groups
    assert [row["rollout"] for row in trained] == rollouts
    ((_, again),) = open_dump(path)
    ((_, first),) = open_dump(write(tmp_path)[0])
    for name in ("group_id", "rollout_id"):
        assert again[name].tolist() == first[name].tolist()


@pytest.mark.parametrize(("write", "named"), [(slime, "40"), (verl, "'7f3a_0'"), (tinker, "3")])
def test_an_error_has_the_ids_of_the_dump(write, named, tmp_path):
    path, *_ = write(tmp_path)
    ((_, batch),) = open_dump(path)
    with pytest.raises(BatchError, match=f"group {named} has 2 of 3"):
        composed(*WORDS, "pipeline.stages.gate.group_size=3").run(batch)


def test_text_ids_are_shown_without_a_dump(make_batch):
    batch = make_batch([0.0, 1.0], [0, 0])
    batch["group_id"] = ["left", "left"]
    run = composed(*WORDS, "pipeline.stages.gate.group_size=2").run(batch)
    assert [row["group"] for row in run.ledger.rows("trained")] == ["left", "left"]
    assert page_data([make_report(run)], title="ids")["steps"][0]["groups"]["id"] == ["left"]
    batch["group_id"] = [7, 7]
    batch["group_label"] = ["one", "two"]  # two labels of one id, so neither names the group
    run = composed(*WORDS, "pipeline.stages.gate.group_size=2").run(batch)
    assert [row["group"] for row in run.ledger.rows("trained")] == [7, 7]


def prompts_of_verl(folder, step, asked):
    rows = [verl_row(None, float(i % 2), step, prompt) for i, prompt in enumerate(asked)]
    write_lines(folder / f"{step}.jsonl", rows)


def prompts_of_trl(folder, step, asked):
    columns = {"step": [step] * len(asked), "accuracy": [float(i % 2) for i in range(len(asked))]}
    prompts = [[{"role": "user", "content": prompt}] for prompt in asked]
    said = [[{"role": "assistant", "content": "4"}]] * len(asked)
    both = {"prompt": prompts, "completion": said, "advantage": [0.5] * len(asked)}
    trl_dump(folder / f"completions_{step:05d}.parquet", **columns, **both)


def prompts_of_nemo_rl(folder, step, asked):
    rows = [nemo_row(i, float(i % 2), prompt=ord(prompt[8])) for i, prompt in enumerate(asked)]
    write_lines(folder / f"train_data_step{step}.jsonl", rows)


def prompts_of_prime_rl(folder, step, asked):
    made = {"group": None, "run": None}
    rows = [
        episode("", f"{step}-{i}", {"r": {"score": float(i % 2)}}) | made | {"task": {"key": prompt}}
        for i, prompt in enumerate(asked)
    ]
    write_lines(folder / f"step_{step}" / "train" / "effective" / "traces.jsonl", rows)


PAIRS = ["What is 2+2?", "What is 2+2?", "What is 3+3?", "What is 3+3?"]
FAULTY = [PAIRS, PAIRS[1:], [*PAIRS, *PAIRS[:2]], [PAIRS[0], *PAIRS, PAIRS[0]], PAIRS * 2]


@pytest.mark.parametrize("write", [prompts_of_verl, prompts_of_trl, prompts_of_nemo_rl, prompts_of_prime_rl])
def test_a_group_made_from_a_prompt_has_the_prompt_as_its_label(write, tmp_path):
    """Step 1 lacks a rollout. One prompt was drawn twice in each of the steps 2 and 3, and both in step 4."""
    for step, asked in enumerate(FAULTY):
        write(tmp_path / "dump", step, asked)
    words = ["source.path=dump", "source.group_by=prompt", "source.group_size=2", "report.dump=parquet"]
    done = headrace_here(tmp_path, "task=replay", *words, "hydra.run.dir=out", check=False)
    of_page = data_of(tmp_path / "out" / "report.html")
    notices = [*of_page["notices"], *of_page["failed"]["reasons"]]
    failed = (tmp_path / "out" / "rollouts" / "failed_steps.json").read_text()
    said = "\n".join([done.stdout, done.stderr, *notices, failed])
    named = r"(What is 2\+2\?|\[\d+, .*\]) #\w{16}"
    for step in (1, 2, 3, 4):
        assert re.search(rf"step {step}\b[^;]*{named}", " ".join(said.split())), said


def test_groups_by_order_compare_only_the_prompts_of_first_segments():
    rows = [("q", 0), ("q a", 0), ("q", 1), ("q b", 1), ("r", 2), ("r", 3)]
    samples = [Sample(BY_ORDER, rollout, 1.0, prompt=prompt, where=f"{rollout}") for prompt, rollout in rows]
    assert [row.group for row in group_by_order(samples, 2)] == [("q #1",)] * 4 + [("r #2",)] * 2
    assert [row.group for row in group_by_order(samples[:2], 1)] == [("q #1",)] * 2
    nameless = [replace(row, prompt=None) for row in samples]
    assert [row.group for row in group_by_order(nameless, 4)] == [("rollouts #1",)] * 6
    with pytest.raises(SourceError) as raised:
        group_by_order(samples[2:5], 2)  # the first rollout is missing
    assert str(raised.value) == (
        "2: with source.group_by=order, every 2 consecutive rollouts must have the same prompt; found "
        "another prompt "
        "than at 1. Is source.group_size wrong, or were rows permuted before they were dumped?"
    )
    with pytest.raises(SourceError) as raised:
        group_by_order(samples, 3)
    assert str(raised.value) == (
        "with source.group_by=order, source.group_size must divide the rollouts of each step; found 4 "
        "rollouts and "
        "source.group_size=3. Were rows left out of the dump?"
    )
    with pytest.raises(SourceError) as raised:
        group_by_order([samples[0], replace(samples[1], group=("a", 1))], 1)
    assert str(raised.value) == (
        "0: source.group_by=order is for rows without a group; found the group 'a/1'. Leave "
        "source.group_by out"
    )


@pytest.mark.parametrize(
    ("labels", "ids"),
    [
        ([12, 7, 12], [12, 7, 12]),
        ([0], [0]),
        (["7", 7, "7"], [0, 1, 0]),  # equal texts are numbered by first appearance
        (["a", "", "a"], [0, 1, 0]),
        ([("a", "b/c"), ("a/b", "c"), ("a", "b/c")], None),
        ([("a",), "b", 3], None),
    ],
)
def test_equal_labels_have_equal_ids_in_every_step(labels, ids):
    found = label_ids(labels)
    assert ids is None or found.tolist() == ids
    assert in_order(found) == [list(dict.fromkeys(labels)).index(each) for each in labels]
    assert found.dtype == torch.int64
    if ids is None:  # an id does not depend on the other labels
        again = label_ids(["first", *labels[::-1]]).tolist()
        assert again[:0:-1] == found.tolist()


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("a/b", "a/b"),
        (7, "7"),
        (("a/b",), "a/b"),
        (("a", 7), "a/7"),
        (("a/b", "c"), r"a\/b/c"),
        (("a", "b/c"), r"a/b\/c"),
        (("a\\", "b"), r"a\\/b"),
    ],
)
def test_the_parts_of_a_label_are_told_apart_in_its_text(label, text):
    assert label_text(label) == text
