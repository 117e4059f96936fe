"""The steps of a training are shown in the terminal and written to a CSV file."""

from __future__ import annotations

import csv
import io

from rich.console import Console
from rich.text import Text

from headrace.pipeline.tools.report import TrainingDisplay
from headrace.pipeline.tools.report.display import write_csv

CLOSED = """\
where the rows of two steps went
           rows  rollouts  groups
─────────────────────────────────
collected    16                 2
  a: b c     −2
  d: e       −4                −1
trained      10                 1
63 % of the rows were trained, all 2 steps
a line
written to FOLDER
the page: file://FOLDER/report.html
step 2/3 ━━━━━━━━━━━━━        reward nan  rows kept 4, out 4 0:00:00
"""


def test_a_training_shows_its_steps_and_at_the_end_a_table_and_its_files(tmp_path):
    """Only the second step counts groups. A reason without rows has no line. 10 of 16 rows are 62.5 %."""
    out = io.StringIO()
    console = Console(file=out, width=100)
    with TrainingDisplay(3, tmp_path / "metrics.csv", console) as display:
        display.close("no step, no table")
        display.step({"rows/in": 8.0, "rows/trained": 6.0, "reward/all/mean": 0.256, "out/a/b_c": 2.0})
        (task,) = display._progress.tasks
        assert (task.fields, task.completed) == ({"reward": "0.26", "kept": "6", "out": "2"}, 1)
        more = {"groups/in": 2.0, "groups/trained": 1.0, "groups/out/d/e": 1.0}
        display.step({"rows/in": 8.0, "rows/trained": 4.0, "out/d/e": 4.0, "out/never/used": 0.0} | more)
        page, title = tmp_path / "report.html", "where the rows of two steps went"
        display.close(title, page=page, lines=[Text("a line")])
    lines = [line.rstrip() for line in out.getvalue().replace(str(tmp_path), "FOLDER").splitlines() if line]
    assert lines == CLOSED.splitlines()


def test_a_training_of_one_step_has_no_number_of_steps(tmp_path):
    out = io.StringIO()
    with TrainingDisplay(1, tmp_path / "metrics.csv", Console(file=out, width=100)) as display:
        display.step({"rows/in": 4.0, "rows/trained": 4.0})
        display.close("one step")
    assert "100 % of the rows were trained" in map(str.strip, out.getvalue().splitlines())
    assert "the page" not in out.getvalue()
    display.step({})
    assert display._progress.tasks[0].fields == {"reward": "nan", "kept": "0", "out": "0"}


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
