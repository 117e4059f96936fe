"""The numbers of a run are written to a CSV file."""

from __future__ import annotations

import csv

from headrace.pipeline.tools.report.display import write_csv


def test_a_step_is_appended_unless_it_has_new_columns(tmp_path):
    """If the file were written anew at each step, a long run would write all its steps again and again."""
    path, history = tmp_path / "metrics.csv", []
    for step, numbers in enumerate([{"a": 0.0}, {"a": 1.0}, {"a": 2.0, "b": 5.0}, {"b": 6.0}]):
        if step in (1, 3):
            path.write_text(path.read_text().replace("0.0", "kept"))
        history.append(numbers)
        write_csv(path, history)
        assert ("kept" in path.read_text()) == (step in (1, 3))
    found = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["a"], row["b"]) for row in found] == [("kept", ""), ("1.0", ""), ("2.0", "5.0"), ("", "6.0")]
