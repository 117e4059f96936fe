"""Few records are logged, and logging reads no device."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from batches import batch_of
from command import QUICK, headrace
from composed import composed
from fake_device import FakeDevice

from headrace.pipeline import load_pipeline
from headrace.transforms import BatchError

pytestmark = pytest.mark.slow

GROUPS_OF_TWO = (
    "pipeline=grpo",
    "pipeline.stages.gate.group_size=2",
    "pipeline.stages.gate.on_incomplete=drop",
)


def messages(caplog) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_batch_logs_how_many_rows_trained_and_why_others_left(caplog):
    caplog.set_level(logging.DEBUG, "headrace.pipeline")
    pipeline = composed(*GROUPS_OF_TWO)
    pipeline.run(batch_of([1.0, 3, 5, 5, 2], [0, 0, 7, 7, 9]))
    (found,) = [text for name, _, text in caplog.record_tuples if name == "headrace.pipeline"]
    assert found == (
        "a batch: 2 of 5 rows, 2 of 5 rollouts, 1 of 3 groups trained; "
        "out: gate/incomplete 1 row, filter/zero_variance 2 rows"
    )


def test_a_refused_batch_logs_the_reason(caplog):
    caplog.set_level(logging.INFO, "headrace")
    pipeline = load_pipeline("grpo", group_size=2)
    pipeline.run(batch_of([1.0, 3], [0, 0]))
    assert caplog.records == []
    with pytest.raises(BatchError) as refused:
        pipeline.run(batch_of([1.0, float("nan")], [0, 0]))
    assert messages(caplog) == [("INFO", f"a batch was refused: {refused.value}")]


def test_logging_reads_no_device(caplog):
    reads = {}
    for level in ("WARNING", "INFO", "DEBUG"):
        caplog.set_level(level, "headrace")
        with FakeDevice() as fake:
            there = fake.put(batch_of([1.0, 3, 5, 5], [0, 0, 7, 7]))
            pipeline = composed(*GROUPS_OF_TWO)
            fake.forget()
            pipeline.run(there)
            reads[level] = len(fake.reads)
    assert reads["WARNING"] == reads["INFO"] == reads["DEBUG"]


def test_the_library_prints_nothing_by_itself():
    code = (
        "import logging, headrace\n"
        "logging.getLogger('headrace.transforms').warning('not seen')\n"
        "logging.basicConfig()\n"
        "logging.getLogger('headrace.transforms').warning('seen')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "WARNING:headrace.transforms:seen\n")


def test_the_command_prints_logs_only_if_asked(tmp_path):
    words = [*QUICK, "train.steps=1", "report.html=false", "report.dump=null"]
    quiet = headrace(tmp_path, *words, "hydra.run.dir=quiet").stdout
    loud = headrace(tmp_path, *words, "hydra.run.dir=loud", "hydra.verbose=headrace").stdout
    assert "[headrace" not in quiet
    assert "[headrace.pipeline][DEBUG] - a batch: " in loud
    assert "a batch: " in (tmp_path / "loud" / "headrace.log").read_text()
