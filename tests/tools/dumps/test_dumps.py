"""A dump is read back as it was written, or refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from busy import reported, stages
from dumps import assert_refused, whole, write_lines

from headrace.pipeline import Pipeline, make_report, write_dump
from headrace.pipeline.tools.dumps.readers import open_dump
from headrace.pipeline.tools.report import Comparison
from headrace.transforms import (
    BatchError,
    CompletenessGate,
    Finite,
    GroupRelativeAdvantage,
    LossWeight,
    SampleFilter,
    ShuffleSplit,
    Status,
)

pytestmark = pytest.mark.slow


def test_columns_of_numbers_have_statistics_and_columns_of_texts_have_none(make_batch, tmp_path):
    """Readers use statistics to skip row groups. The statistics of a text column would repeat long texts."""
    file = pq.ParquetFile(write_dump(reported(make_batch, step=12)[1], tmp_path))
    columns = [file.metadata.row_group(0).column(k) for k in range(file.metadata.num_columns)]
    found = {each.path_in_schema: each.is_stats_set for each in columns}
    texts = {field.name for field in file.schema_arrow if pa.types.is_string(field.type)}
    assert texts
    assert not any(found[name] for name in texts)
    assert found["row"]
    assert found["group_id"]


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_dump_replays_to_the_same_report(format, make_batch, tmp_path):
    batch, first = reported(make_batch, step=12)
    path = write_dump(first, tmp_path, format=format)
    assert path.name == f"step_00000012.{format}"
    ((step, again),) = open_dump(tmp_path)
    assert step == 12
    for key in ("rollout_id", "group_id", "status", ("next", "policy_version")):
        assert torch.equal(again[key], batch[key]), key
    assert torch.equal(again["next", "reward"], batch["next", "reward"])
    tokens = batch["masks", "all_assistant_mask"].sum(-1)
    assert torch.equal(again["masks", "all_assistant_mask"].sum(-1), tokens)
    assert list(again["prompt_text"]) == list(batch["prompt_text"])
    pipeline = Pipeline(stages(weight=LossWeight()))
    pipeline(again)
    second = make_report(pipeline, step=12)
    assert second.funnel == first.funnel
    for name in ("reason", "advantage", "loss_weight", "minibatch"):
        assert second.columns[name] == pytest.approx(first.columns[name], nan_ok=True), name


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_columns_are_read_back_in_either_format(format, make_batch, tmp_path):
    """The columns have two rewards, a text that is not UTF-8, an excluded reward, and the expected sizes."""

    def again(batch, pipeline, name):
        write_dump(make_report(pipeline.run(batch)), tmp_path / name, format=format)
        return next(iter(open_dump(tmp_path / name)))[1]

    batch = make_batch([0.0] * 4, [0, 0, 1, 1])
    batch["next", "reward"] = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, float("nan")], [5.0, 5.0]])
    batch["prompt_text"] = ["\ud800 half", *["whole"] * 3]
    read = again(batch, Pipeline({}), "several")
    assert torch.equal(read["next", "reward"].nan_to_num(-1), batch["next", "reward"].nan_to_num(-1))
    assert list(read["prompt_text"]) == ["? half", *["whole"] * 3]
    finite = Pipeline({"finite": SampleFilter(criterion=Finite(), action="exclude")})
    read = again(make_batch([0.0, float("inf"), 1.0], [0, 0, 0]), finite, "filtered")
    assert read["next", "reward"].isnan().flatten().tolist() == [False, True, False]
    gated = Pipeline({"gate": CompletenessGate(group_size=2, on_incomplete="drop")})
    assert again(make_batch([0.0, 1, 2], [0, 0, 1]), gated, "gated")["expected_rollouts"].tolist() == [2] * 3


def test_a_dump_records_its_origin(make_batch, tmp_path):
    _, report = reported(make_batch)
    metadata = pq.read_schema(write_dump(report, tmp_path, config="seed: 0\n")).metadata
    assert metadata[b"headrace.schema"] == b"1"
    assert metadata[b"headrace.config"] == b"seed: 0\n"
    assert json.loads(metadata[b"headrace.recipe"])[0][0] == "gate"


def test_a_failed_write_keeps_the_previous_file(make_batch, tmp_path, monkeypatch):
    _, report = reported(make_batch)
    path = write_dump(report, tmp_path)
    before = path.read_bytes()

    def half(table, file, **_):
        file.write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(pq, "write_table", half)
    with pytest.raises(OSError, match="full"):
        write_dump(report, tmp_path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_step_without_rows_is_written_and_skipped_on_reading(make_batch, tmp_path):
    batch, report = reported(make_batch, step=1)
    pipeline = Pipeline(stages())
    pipeline(batch[:0])
    write_dump(make_report(pipeline, step=0), tmp_path)
    write_dump(report, tmp_path)
    assert [step for step, _ in open_dump(tmp_path)] == [1]


def test_steps_with_carried_rows_replay(make_batch, tmp_path):
    def make_pipeline():
        return Pipeline({"split": ShuffleSplit(minibatch_size=2, remainder="carry")})

    first = make_pipeline()
    reports = []
    for step in range(3):
        first(make_batch([1.0, 2, 3], [step] * 3, [3 * step + i for i in range(3)]))
        reports.append(make_report(first, step=step))
        write_dump(reports[-1], tmp_path)
    second = make_pipeline()
    for step, batch in open_dump(tmp_path):
        second(batch)
        again = make_report(second, step=step)
        assert again.columns["rollout_id"].tolist() == reports[step].columns["rollout_id"].tolist()
        assert again.funnel == reports[step].funnel
        assert again.texts["prompt"] == reports[step].texts["prompt"]


def test_the_minibatches_of_a_step_with_carried_rows_are_unknown(tmp_path):
    """Carried rows are not read again, so the weights of these minibatches cannot be checked."""
    columns = {"step": [3] * 3, "row": [0, 1, 2], "group_id": [0] * 3, "rollout_id": [0, 1, 2]}
    columns |= {"reward": [1.0, 0.0, 0.0], "minibatch": [0, None, 1]}
    for carried, minibatches in (([0, 0, 0], [0, -1, 1]), ([0, 0, 1], [-1, -1])):
        rows = pa.table({**columns, "carried_in": carried}).replace_schema_metadata({"headrace.schema": "1"})
        pq.write_table(rows, tmp_path / "step_00000003.parquet")
        ((_, batch),) = open_dump(tmp_path)
        assert batch["logged_minibatch"].tolist() == minibatches


STATED = {  # a step in which the row 3 was carried in
    "step": [7] * 5,
    "row": [0, 1, 2, 3, 4],
    "group_id": [4, 4, 4, 9, 6],
    "rollout_id": [8, 8, 2, 1, 3],
    "reward": [1.0, None, None, 5.0, 0.1],
    "status": ["completed", None, "failed", None, "truncated"],
    "reason": ["trained", "gate/unfinished", "filter/length", "trained", None],
    "policy_version": [3, 2, 1, 9, 0],
    "trainer_version": [5] * 5,
    "expected_rollouts": [2, 2, 2, 9, 1],
    "tokens": [2, 0, 3, 9, 1],
    "advantage": [0.5, None, None, 9.0, -0.25],
    "loss_weight": [0.125, None, None, 9.0, 0.25],
    "minibatch": [0, None, None, 1, 1],
    "carried_in": [0, None, 0, 1, 0],
    "prompt": ["p", "", "q", "x", "p"],
    "response": ["a", "b", None, "x", "c"],
    "ground_truth": ["g"] * 5,
}


def stated(path, schema="1", **changes):
    """Write the step of `STATED` with other columns. A column that is None is left out."""
    columns = {name: values for name, values in (STATED | changes).items() if values is not None}
    pq.write_table(
        pa.table(columns).replace_schema_metadata({"headrace.schema": schema} if schema else {}), path
    )
    return path


def pairs(*rows):
    """A column of two numbers on each row, of which the last one is repeated to five rows."""
    return pa.array([*rows, *[rows[-1]] * (5 - len(rows))], pa.list_(pa.float64(), 2))


def test_all_columns_of_a_file_are_read(tmp_path):
    """A text that is null on a row is not read. A row was carried in, so the minibatches are not known."""
    expected = {
        "group_id": [4, 4, 4, 6],
        "rollout_id": [8, 8, 2, 3],
        "next.reward": [[1.0], [None], [None], [0.1]],
        "status": [Status.COMPLETED, Status.ABORTED, Status.FAILED, Status.TRUNCATED],
        "next.policy_version": [3, 2, 1, 0],
        "headrace.trainer_version": [5] * 4,
        "expected_rollouts": [2, 2, 2, 1],
        "masks.all_assistant_mask": [[0, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 1]],
        "logged_advantage": [0.5, None, None, -0.25],
        "logged_weight": [0.125, None, None, 0.25],
        "logged_minibatch": [-1] * 4,
        "prompt_text": ["p", "", "q", "p"],
        "ground_truth": ["g"] * 4,
    }
    path = tmp_path / "step_00000007.parquet"
    ((step, batch),) = open_dump(stated(path))
    assert (step, whole(batch), batch["next", "reward"].dtype) == (7, expected, torch.float64)
    ((_, batch),) = open_dump(stated(path, carried_in=None, reward=[1.0, None, None, 5.0, 0.25]))
    assert batch["next", "reward"].dtype == torch.float32  # it has all digits of these rewards
    assert batch["logged_minibatch"].tolist() == [0, -1, -1, 1, 1]
    ((_, batch),) = open_dump(stated(path, tokens=None, response=None, policy_version=[None] * 5))
    assert whole(batch)["headrace.no_lengths"] == [True] * 4
    assert ("next", "policy_version") not in batch.keys(True)
    ((_, batch),) = open_dump(
        stated(path, status=[None] * 5, reason=None, reward=[1.0] * 5, row=[4, 3, 2, 1, 0])
    )
    assert "status" not in batch.keys()


NONE = "a rollout that did not fail needs a finite 'reward'; row {} has none: {}"
MALFORMED = [
    (
        {"row": [0, 1, 4, 6, 7]},
        "a step has all its rows, from 0 to the last; 3 are missing, the first of them 2. Was the file "
        "cut? To leave rows out, use a filter",
    ),
    (
        {"row": [1, 2, 3, 4, 5]},
        "a step has all its rows, from 0 to the last; 1 are missing, the first of them 0",
    ),
    ({"row": [0, 1, 1, 2, 2]}, "a row's number must occur once; found twice: 1, 2"),
    ({"step": [7, 7, 7, 8, 8]}, "a file is one step, a number ≥ 0; found 7, 8"),
    ({"step": [-1] * 5}, "a file is one step, a number ≥ 0; found -1"),
    (
        {"step": None, "row": None},
        "the columns ['step', 'row'] are required; found 'group_id', 'rollout_id', 'rewar",
    ),
    ({"group_id": [4, 4, 4, 9, -2]}, "'group_id' must be ≥ 0; found -2 at row 3"),  # without the carried row
    (
        {"group_id": [4, 4, 4, 9, None]},
        "'group_id' must be an integer on every row; found int64 with 1 nulls",
    ),
    ({"reward": [1.0, None, None, 5.0, None]}, NONE.format(3, "nan")),
    ({"reward": [1.0, None, float("inf"), 5.0, 0.0]}, NONE.format(2, "inf")),
    (
        {"status": ["completed", "", "y", None, None]},
        "'status' must be one of completed, truncated, aborted, failed, or null; found ''",
    ),
    ({"advantage": ["high"] * 5}, "'advantage' must be a number; found string"),
    ({"prompt": [1] * 5}, "'prompt' must be text; found int64"),
    (
        {"tokens": None, "response_parts": ["[[1, 2]]"] * 5},
        "'response_parts' must be pairs of a boolean and a text",
    ),
    ({"tokens": None, "response_parts": ["["] * 5}, "columns must be as documented; found Expecting value"),
    (
        {"rewards": [[1.0]] * 5},
        "'rewards' must be a list of two or more numbers, as many on every row; found list<element: double>",
    ),
    ({"rewards": pairs([1.0, 2.0], [float("inf"), 1.0])}, NONE.format(1, "inf, 1.0")),
    ({"rewards": pairs([1.0, 2.0], [1.0, None], [None, None])}, NONE.format(3, "nan, nan")),
    (
        {"rewards": pa.array([["1", "2"]] * 5, pa.list_(pa.string(), 2))},
        "'rewards' must be a list of two or more numbers, as many on every row; found fixed_size_list<"
        "element: string>[2] with 0 nulls",
    ),
    ({"group_id": [0.5] * 5}, "'group_id' must be an integer on every row; found double with 0 nulls"),
    ({"reward": ["x"] * 5}, "'reward' must be a number; found string"),
    ({"tokens": [1, 2, 3, 9, None]}, "'tokens' must be an integer on every row; found int64 with 1 nulls"),
    ({"prompt": pa.array([b"\xff"] * 5).view(pa.string())}, "columns must be as documented; found "),
    ({"schema": "7"}, "headrace.schema must be 1, the only known version; found '7'"),
    ({"schema": ""}, "headrace.schema must be 1, the only known version; found ''"),
    (
        {"tokens": [2, 0, 2**24 + 1, 0, 1]},
        "a row has at most 16777216 tokens, and a step 2147483648 with padding; found 16777217 tokens in "
        "one of 4 rows",
    ),
]


@pytest.mark.parametrize(("changes", "said"), MALFORMED)
def test_a_malformed_file_is_refused_with_the_row(changes, said, tmp_path):
    path = stated(tmp_path / "step_00000007.parquet", **changes)
    assert_refused(f"^(step 7: )?{re.escape(f'{path}: {said}')}", path, "headrace")


def test_a_file_has_tokens_up_to_the_limits(tmp_path, monkeypatch):
    """In a step of four rows, the longest row may have four tokens, or three of all cells are too many."""
    reader = "headrace.pipeline.tools.dumps.readers.headrace_dump"
    monkeypatch.setattr(f"{reader}.MAX_TOKENS", 4)
    path = stated(tmp_path / "step_00000007.parquet", tokens=[4, 0, 0, 9, 0])
    for cells in (16, 15):
        monkeypatch.setattr(f"{reader}.MAX_CELLS", cells)
        if cells == 16:
            ((_, batch),) = open_dump(path)
            assert batch["masks", "all_assistant_mask"].sum(1).tolist() == [4, 0, 0, 0]
        else:
            assert_refused("found 4 tokens in one of 4 rows", path)
    monkeypatch.setattr(f"{reader}.MAX_CELLS", 100)
    assert_refused("found 5 tokens in one of 4 rows", stated(path, tokens=[5, 0, 0, 9, 0]))
    lines = [{name: values[at] for name, values in STATED.items()} for at in range(5)]
    path = write_lines(tmp_path / "lines" / "step_00000007.jsonl", lines)
    monkeypatch.setattr(f"{reader}.MAX_ROWS", 5)
    ((step, batch),) = open_dump(path)
    assert (step, len(batch)) == (7, 4)
    monkeypatch.setattr(f"{reader}.MAX_ROWS", 4)
    assert_refused("a step has at most 4 rows; found more", path)


def test_an_invalid_file_is_skipped_if_allowed(make_batch, tmp_path):
    for step in (0, 1):
        write_dump(reported(make_batch, step=step)[1], tmp_path)
    (tmp_path / "step_00000001.parquet").write_bytes(b"PAR1")
    source = open_dump(tmp_path, skip_bad=True)
    assert [step for step, _ in source] == [0]
    assert source.skipped == 1


# -- comparisons ------------------------------------------------------------------------------------


def flipped(report):
    return -report.columns["advantage"]


def test_a_comparison_finds_the_rows_that_differ(make_batch):
    """The advantages are ±1 in the groups 0 and 1, and 0 in group 2.

    The second recipe clips advantages above ½, and filters group 2. A row has four tokens in group 0, else
    two. All tokens have one weight, so the shares follow |advantage| · tokens. They are (4 + 3 · 4) / 20 and
    (4 + 3 · 2) / 13 in group 0, and (2 + 2) / 20 and (2 + 1) / 13 in group 1.
    """
    batch = make_batch([1.0, 3, 3, 3, 2, 4, 5, 5], [0, 0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 2, 3, 4, 5])
    batch["masks", "all_assistant_mask"] = torch.tensor([[True] * 4] * 4 + [[False, True] * 2] * 4)
    reports = []
    for drop, clip in ((None, None), ("group", [None, 0.5])):
        changes = {"gate": None, "advantage": GroupRelativeAdvantage(scale="none", clip=clip), "split": None}
        pipeline = Pipeline(
            stages(**changes, filter=None if drop is None else stages()["filter"], weight=LossWeight())
        )
        pipeline(batch.clone())
        reports.append(make_report(pipeline))
    found = Comparison(("a", "b"))
    found.add(*reports)
    numbers = found.numbers
    assert numbers["rows"] == 8
    assert numbers["trained_by_both"] == 6
    assert numbers["trained_only_by_first"] == 2
    assert numbers["trained_only_by_second"] == 0
    assert numbers["differ"] == 4  # three rows of one clipped rollout, and one row of another
    assert numbers["sign_flips"] == 0
    assert 0 < numbers["correlation"] < 1
    assert numbers["gradient_moved"] == pytest.approx(16 / 20 - 10 / 13)
    shares = found.shares["segments"]
    assert shares["1"].tolist() == pytest.approx([8 / 20, 7 / 13, 5])  # rollouts of one segment
    assert shares["3"].tolist() == pytest.approx([12 / 20, 6 / 13, 3])
    nothing = replace(
        reports[0], columns=reports[0].columns | {"advantage": 0 * reports[0].columns["advantage"]}
    )
    found.add(nothing, reports[1])  # a step without a gradient is not in the mean
    assert found.averaged == {"gradient_moved": 2, "gradient_cosine": 1}
    means = found.mean_shares()
    for table in means.values():
        assert [sum(line[k] for line in table.values()) for k in (0, 1)] == pytest.approx([1, 1])
    found = Comparison(("a", "b"))
    found.add(*reports)
    found.add(*reversed(reports))
    assert found.numbers["gradient_moved"] == pytest.approx(16 / 20 - 10 / 13), "a mean over steps"
    assert found.numbers["trained_only_by_second"] == 2
    found.add(
        reports[0], replace(reports[0], columns={**reports[0].columns, "advantage": flipped(reports[0])})
    )
    assert found.numbers["sign_flips"] == 6  # all rows whose advantage is not 0
    assert found.numbers["differ"] == 4 + 4 + 6
    with pytest.raises(BatchError, match="row by row, over the same batch"):
        found.add(reports[0], reported(make_batch)[1])
