"""Write reports to disk: one Parquet or JSONL file per step, with a row for each row of the batch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.transforms.carry import write_whole
from headrace.transforms.table.options import takes_options

from .page_schema import PageLevel, shown_as
from .step import StepReport
from .valid_json import json_text

SCHEMA_VERSION = 1
ROW_GROUP = 256  # rows of a row group; a search for texts has one row group in memory at a time
FLOATS = ("reward", "rollout_reward", "advantage", "loss_weight", "advantage_by_row", "logged_advantage")
# A replay needs the row's collected reward; the report's `reward` is the reward of its rollout.
REPORT_COLUMNS = {"reward": "collected_reward", "rollout_reward": "reward"}


def report_table(report: StepReport, *, config: str | None = None) -> pa.Table:
    """Make a table with a row for each row of the batch, carried rows included.

    ======================================================= =========== =====================================
    column                                                   type        meaning
    ======================================================= =========== =====================================
    ``step``, ``row``                                        int64       step number, index in the batch
    ``group_id``, ``rollout_id``                             int64       the ids of the batch
    ``reward``                                               float64     as collected, null: none; or the
                                                                         weighted sum of several rewards
    ``rewards``                                              list        as collected, where there are several
    ``rollout_reward``                                       float64     of the rollout, as compared
    ``advantage``, ``loss_weight``                           float64
    ``advantage_by_row``                                     float64     the advantage if rows were rollouts
    ``logged_advantage``                                     float64     from the dump that was replayed
    ``status``, ``reason``, ``action``                       string      a reason is ``trained``, or
                                                                         ``stage/reason``
    ``tokens``                                               int64       in the loss, as collected
    ``policy_version``, ``expected_rollouts``                int64
    ``trainer_version``                                      int64       the trainer's, when it took the row
    ``minibatch``, ``microbatch``, ``rank``                  int64       where it was trained
    ``carried_in``                                           int64       1: carried from an earlier step
    ``prompt``, ``response``, ``ground_truth``               string      decoded text, if there is any
    ``response_parts``                                       string      of a response without tokens: a JSON
                                                                         list of pairs, whether the policy
                                                                         sampled a text, and the text
    ``other_columns``                                        string      further columns of the replayed dump,
                                                                         as a JSON object; empty: none
    ``group_label``, ``rollout_label``                       string      the ids as text, if they were text
    ======================================================= =========== =====================================

    The schema's metadata has ``headrace.schema`` (the version of this table), ``headrace.recipe`` (the
    stages, as JSON), ``headrace.step`` (the funnel and the numbers of the step, as JSON: those of the page)
    and ``headrace.config`` (the resolved configuration, as YAML, if it was given).

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.pipeline import Pipeline, make_report
        >>> pipeline = Pipeline({})
        >>> _ = pipeline(TensorDict({"rollout_id": [4, 5]}, batch_size=[2]))
        >>> report_table(make_report(pipeline))["rollout_id"].to_pylist()
        [4, 5]
    """
    columns: dict[str, Any] = {"step": pa.array(np.full(len(report), report.step))}
    found = dict(report.columns)
    if report.group_size is not None and "group_id" in found:  # so that a replay need not ask for the size
        found.setdefault("expected_rollouts", np.full(len(report), report.group_size))
    order = ("row", "group_id", "rollout_id", *FLOATS, "tokens", "policy_version", "trainer_version")
    for name in (*order, "expected_rollouts", "minibatch", "microbatch", "rank", "carried_in"):
        if (source := REPORT_COLUMNS.get(name, name)) in found:
            values = found[source]
            columns[name] = pa.array(values, mask=~np.isfinite(values) if name in FLOATS else values < 0)
    if "rewards" in report.columns:
        rewards = report.columns["rewards"]
        rewards = np.where(np.isfinite(rewards), rewards, np.nan)
        columns["rewards"] = pa.FixedSizeListArray.from_arrays(rewards.reshape(-1), rewards.shape[1])
    if report.statuses is not None:
        columns["status"] = report.statuses
    codes = pa.array(report.columns["reason"], pa.int32())
    for name, words in (("reason", report.names), ("action", report.actions)):
        columns[name] = pa.DictionaryArray.from_arrays(codes, pa.array(words, pa.string())).cast(pa.string())
    for name, texts in report.texts.items():  # half of a surrogate pair, which a tokenizer cut, becomes `?`
        encodable = [text.encode("utf-8", "replace").decode() for text in texts]
        columns[name] = pa.array(encodable, pa.string())
    funnel = [shown_as(PageLevel, level) for level in report.funnel]
    metadata = {
        "headrace.schema": str(SCHEMA_VERSION),
        "headrace.recipe": json_text(report.recipe),
        "headrace.step": json_text({"funnel": funnel, "numbers": report.numbers}),
    }
    if config is not None:
        metadata["headrace.config"] = config
    return pa.table(columns).replace_schema_metadata(metadata)


@takes_options
def write_dump(
    report: StepReport,
    folder: str | os.PathLike[str],
    *,
    format: Literal["parquet", "jsonl"] = "parquet",
    config: str | None = None,
) -> Path:
    """Write the file of a step to a folder, completely or not at all. ``open_dump`` reads it.

    Args:
        report: the report of the step, whose number is in the file's name. An existing file of the step is
            replaced.
        folder: the folder. It is made if it does not exist.
        format: ``parquet``, or ``jsonl``, which people and other tools can read.
        config: the resolved configuration, as YAML.

    Returns:
        The file's path.

    Raises:
        ValueError: `format` is neither of the two.

    Example:
        >>> import tempfile
        >>> from tensordict import TensorDict
        >>> from headrace.pipeline import Pipeline, make_report
        >>> pipeline = Pipeline({})
        >>> _ = pipeline(TensorDict({"rollout_id": [4, 5]}, batch_size=[2]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_dump(make_report(pipeline, step=7), folder).name
        'step_00000007.parquet'
    """
    table = report_table(report, config=config)
    path = Path(folder) / f"step_{report.step:08d}.{format}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "parquet":
        how: dict[str, Any] = {"compression": "zstd", "row_group_size": ROW_GROUP}
        numeric = [field.name for field in table.schema if not pa.types.is_string(field.type)]
        write_whole(path, lambda file: pq.write_table(table, file, write_statistics=numeric, **how))
    else:
        write_whole(path, lambda file: file.write_text("".join(_lines(table)), encoding="utf-8"))
    return path


def _lines(table: pa.Table) -> Iterator[str]:
    """Yield a line of JSON for each row, with the values that are known."""
    shown = ("reward", "rollout_reward")  # also written if null, so that a missing key shows damage
    for batch in table.to_batches(max_chunksize=10_000):
        for row in batch.to_pylist():
            known = {name: value for name, value in row.items() if value is not None or name in shown}
            if "rewards" in known:
                known["rewards"] = [value if math.isfinite(value) else None for value in known["rewards"]]
            line = {"schema": SCHEMA_VERSION, **known}
            yield json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
