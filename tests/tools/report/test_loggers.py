"""Trackers get every number and, with ``table=True``, the tables of groups and of rollouts."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
from busy import reported

from headrace.pipeline import Pipeline, log_report, make_report
from headrace.pipeline.tools.report.loggers import COLUMNS, group_rows, rollout_rows

pytestmark = pytest.mark.slow


def test_tensorboard_gets_every_number(make_batch, tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard"
    )
    from torchrl.record.loggers.tensorboard import TensorboardLogger

    logger = TensorboardLogger(exp_name="run", log_dir=str(tmp_path))
    _, report = reported(make_batch, step=4)
    log_report(logger, report, table=True)
    logger.experiment.flush()
    found = accumulator.EventAccumulator(str(tmp_path / "run")).Reload()
    assert set(found.Tags()["scalars"]) == set(report.numbers)
    assert [(e.step, e.value) for e in found.Scalars("rows/in")] == [(4, 9.0)]


def test_wandb_gets_both_tables(make_batch, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="no wandb")
    from torchrl.record.loggers.wandb import WandbLogger

    # A disabled run starts no process.
    logger = WandbLogger(exp_name="run", save_dir=str(tmp_path), mode="disabled", log_env_packages=False)
    seen, steps = {}, []
    _, report = reported(make_batch, step=4)

    def log(data, step=None, **_):
        seen.update(data)
        steps.append(step)

    monkeypatch.setattr(logger.experiment, "log", log)
    log_report(logger, report, table=True)
    logger.experiment.finish()
    assert steps[-1] is None, "wandb drops numbers of a step before its current one"
    assert seen["groups"].columns[:2] == ["group", "prompt"]
    assert len(seen["groups"].data) == 3
    assert seen["rollouts"].columns == COLUMNS
    assert len(seen["rollouts"].data) == 8
    assert set(report.numbers) <= set(seen)


def test_the_tables_equal_those_by_hand(make_batch):
    """Row 1 has no token in the loss. Groups with different and equal rewards alternate, as on the page."""
    report = reported(make_batch)[1]
    std = pytest.approx(0.5**0.5)
    nothing = pytest.approx(float("nan"), nan_ok=True)
    lines = {
        "group": [0, 1, 2],
        "prompt": ["prompt 0", "prompt 1", "prompt 2"],
        "segments": [4, 2, 3],
        "rollouts": [3, 2, 3],
        "expected": [3, 3, 3],
        "complete": [True, False, True],
        "trained": [3, 0, 0],
        "compared": [3, 0, 3],
        "baseline": [3.0, nothing, 4.0],
        "reward_mean": [3.0, 1.5, 4.0],
        "reward_std": [2.0, std, 0.0],
        "reward_min": [1.0, 1.0, 4.0],
        "reward_max": [5.0, 2.0, 4.0],
        "zero_variance": [False, False, True],
        "staleness": [8, 4, 2],
    }
    names, rows = group_rows(report)
    assert dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)) == lines
    assert [*lines] == names
    lost, equal = "gate/incomplete", "filter/zero_variance"
    assert rollout_rows(report) == (
        COLUMNS,
        [
            [0, 0, "prompt 0", None, 1.0, -2.0, 3, "completed", "trained"],
            [0, 2, "prompt 0", None, 5.0, 2.0, 3, "truncated", "trained"],
            [0, 1, "prompt 0", None, 3.0, 0.0, 2, "completed", "trained"],
            [2, 5, "prompt 2", None, 4.0, 0.0, 3, "completed", equal],
            [2, 6, "prompt 2", None, 4.0, 0.0, 4, "completed", equal],
            [2, 7, "prompt 2", None, 4.0, 0.0, 3, "completed", equal],
            [1, 3, "prompt 1", None, 1.0, None, 3, "completed", lost],
            [1, 4, "prompt 1", None, 2.0, None, 4, "completed", lost],
        ],
    )
    assert json.dumps(rollout_rows(report))


def test_a_batch_of_rows_alone_has_a_table_of_rows(make_batch):
    batch = make_batch([1.0, 2.0], [0, 0]).select(("next", "reward"))
    report = make_report(Pipeline({}).run(batch))
    assert group_rows(report) == (["group"], [])
    assert rollout_rows(report)[1] == [
        [-1, row, None, None, row + 1.0, None, None, None, "trained"] for row in range(2)
    ]


class Recorder:
    """A tracker that keeps what it is given."""

    def __init__(self):
        self.experiment, self.logged = self, []

    def log_scalar(self, name, value, step):
        pass

    def log(self, data, step=None):
        self.logged.append((data, step))


def test_trackio_and_mlflow_get_both_tables(make_batch, monkeypatch):
    """Neither tracker is installed for the tests. Stand-ins have the functions that are documented."""
    pytest.importorskip("pandas", reason="no pandas")
    _, report = reported(make_batch, step=4)
    names, rows = rollout_rows(report)
    trackio, mlflow, tables = ModuleType("trackio"), ModuleType("mlflow"), {}
    trackio.Table = lambda dataframe: dataframe
    mlflow.log_table = lambda data, file: tables.update({file: data})
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    logger = type("TrackioLogger", (Recorder,), {})()
    log_report(logger, report, prefix="a/", table=True)
    assert [(list(data), step) for data, step in logger.logged] == [(["a/groups"], 4), (["a/rollouts"], 4)]
    assert logger.logged[1][0]["a/rollouts"].to_dict("list")["rollout"] == [row[1] for row in rows]
    log_report(type("MLFlowLogger", (Recorder,), {})(), report, prefix="a/", table=True)
    assert list(tables) == ["a/groups_4.json", "a/rollouts_4.json"]
    assert tables["a/rollouts_4.json"] == dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
