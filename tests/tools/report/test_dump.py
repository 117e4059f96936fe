"""The rows of a step are written with all their columns."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reports_by_hand import NAN, TEXTS, report_by_hand

from headrace.pipeline import write_dump
from headrace.pipeline.tools.report import StepReport, report_table

WHOLE, NUMBER, TEXT = pa.int64(), pa.float64(), pa.string()
COLUMNS = {
    "step": (WHOLE, [7, 7, 7, 7]),
    "row": (WHOLE, [0, 1, 2, 3]),
    "group_id": (WHOLE, [5, 5, 3, 3]),
    "rollout_id": (WHOLE, [10, 11, 12, 12]),
    "reward": (NUMBER, [1.0, None, None, 0.5]),  # as collected
    "rollout_reward": (NUMBER, [1.0, 0.0, None, None]),
    "advantage": (NUMBER, [0.5, -0.5, None, None]),
    "loss_weight": (NUMBER, [0.5, 0.25, None, None]),
    "advantage_by_row": (NUMBER, [0.25, -0.25, None, None]),
    "logged_advantage": (NUMBER, [None, 0.125, None, None]),
    "tokens": (WHOLE, [3, 4, 2, None]),
    "policy_version": (WHOLE, [4, None, 7, 6]),
    "trainer_version": (WHOLE, [8, 8, None, 8]),
    "expected_rollouts": (WHOLE, [3, 3, None, None]),
    "minibatch": (WHOLE, [1, None, 0, None]),
    "microbatch": (WHOLE, [0, None, 2, None]),
    "rank": (WHOLE, [3, None, 0, None]),
    "carried_in": (WHOLE, [0, 0, 1, 1]),
    "rewards": (pa.list_(NUMBER, 2), [[1.0, 0.0], [0.0, 0.0], [NAN, 1.0], [NAN, NAN]]),
    "status": (TEXT, ["completed", "truncated", None, "failed"]),
    "reason": (TEXT, ["trained", "filter/low", "trained", "gate/failed"]),
    "action": (TEXT, ["trained", "masked", "trained", "dropped"]),
    "prompt": (TEXT, ["user: One\nand one?", "user: One\nand one?", "Two?", "Two?"]),
    "response": (TEXT, ["Eins", "Zwei", "Drei\x1b", "?"]),  # half of a surrogate pair
    "ground_truth": (TEXT, ["2", "", "4", ""]),
    "other_columns": (TEXT, ["", '{"acc": true, "n": null, "in": [1]}', "no JSON", "[1]"]),
    "group_label": (TEXT, ["five", "five", "three", "three"]),
    "rollout_label": (TEXT, ["a", "b", "c", "c"]),
}
MORE = {
    "collected_reward": [1.0, NAN, NAN, 0.5],
    "logged_advantage": [NAN, 0.125, NAN, math.inf],
    "trainer_version": [8, 8, -1, 8],
    "carried_in": [0, 0, 1, 1],
}


@pytest.fixture
def report():
    return report_by_hand(TEXTS | {"response": [*TEXTS["response"][:3], "\ud800"]}, **MORE)


def test_the_columns_of_a_dump_equal_those_by_hand(report):
    table = report_table(report, config="seed: 0\n")
    assert {field.name: field.type for field in table.schema} == {
        name: kind for name, (kind, _) in COLUMNS.items()
    }
    for name, (_, values) in COLUMNS.items():
        assert str(table[name].to_pylist()) == str(values), name
    assert table.column_names == [*COLUMNS]
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    step = json.loads(metadata.pop("headrace.step"))
    assert metadata == {
        "headrace.schema": "1",
        "headrace.recipe": '[["gate", "Gate()"], ["filter", "Filter()"]]',
        "headrace.config": "seed: 0\n",
    }
    assert step["numbers"] == report.numbers
    assert [[level["name"], level["rows"], len(level["out"])] for level in step["funnel"]] == [
        ["collected", 4, 0],
        ["gate", 3, 1],
        ["filter", 2, 1],
    ]
    assert b"headrace.config" not in report_table(report).schema.metadata


def test_a_line_of_a_dump_has_the_values_that_are_known(report, tmp_path):
    """Rewards are written even if they are null. JSON has no NaN."""
    path = write_dump(report, tmp_path / "made", format="jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row, line in enumerate(lines):
        known = {name: values[row] for name, (_, values) in COLUMNS.items()}
        kept = ("reward", "rollout_reward")
        known = {name: value for name, value in known.items() if value is not None or name in kept}
        known["rewards"] = [None if math.isnan(each) else each for each in known["rewards"]]
        assert line == {"schema": 1} | known
    with pytest.raises(ValueError, match=r"format must be .*'csv'"):
        write_dump(report, tmp_path, format="csv")


def test_a_row_group_of_a_file_has_at_most_256_rows(tmp_path):
    columns = {"row": np.arange(257), "reason": np.zeros(257, int)}
    path = write_dump(StepReport(3, (), columns, ("trained",), ("trained",)), tmp_path)
    file = pq.ParquetFile(path).metadata
    assert [file.row_group(at).num_rows for at in range(file.num_row_groups)] == [256, 1]


def test_the_size_of_the_groups_is_written_unless_rows_have_one():
    report = replace(report_by_hand(), group_size=4)
    assert report_table(report)["expected_rollouts"].to_pylist() == [3, 3, None, None]
    columns = {name: column for name, column in report.columns.items() if name != "expected_rollouts"}
    assert report_table(replace(report, columns=columns))["expected_rollouts"].to_pylist() == [4] * 4
    del columns["group_id"]
    assert "expected_rollouts" not in report_table(replace(report, columns=columns)).column_names
