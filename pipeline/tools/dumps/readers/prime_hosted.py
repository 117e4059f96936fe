"""Read samples of Prime Intellect's hosted training: a Parquet or JSON Lines file of rollouts.

Schema: prime-rl, ``SAMPLE_SCHEMA`` in ``monitors/prime.py`` (the monitor): ``run_id``, ``step``, ``tag``,
``problem_id``, ``sample_id``, ``prompt``, ``completion``, ``trajectory``, ``answer``, ``env_name``, ``task``,
``info``, ``reward``, ``advantage``, ``metrics``, ``timing``, ``num_input_tokens``, ``num_output_tokens`` and
``created_at``, in some releases also ``is_truncated`` and ``error``.

- Prompts and completions are messages, even if they are written as JSON.
- A group is a problem of an environment in a step. Two samples of a step with the same ``sample_id`` are an
  error.
- A sample with an ``error`` failed. A sample with ``is_truncated`` was truncated. In releases without these
  columns, statuses are not known.
- The monitor uploads the samples of some steps, and perhaps only a part of a step. ``group_size`` detects
  this.
- Tokens are not saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.transforms import Status

from .batch import Sample
from .file_kinds import Format, Reading, parse_records, read_lines, read_rows
from .record import Record, read_json, read_texts, with_decoded_messages


def read_prime_hosted(path: Path, reading: Reading) -> Iterator[Sample]:
    """Read the samples of one file, which has one or more steps.

    Raises:
        SourceError: the file is damaged, or a record is not as documented.
    """
    read = read_rows if path.suffix == ".parquet" else read_lines
    return parse_records(read(path, reading), reading, parse_row)


def parse_row(record: Record, reading: Reading) -> list[Sample]:
    """Read the sample of one row.

    Raises:
        SourceError: the row is not as documented.
    """
    record = with_decoded_messages(record, "prompt", "completion")
    failed = record.says("error")
    status: Status | None = Status.FAILED if failed else None
    if not failed and record.get("is_truncated", optional=True) is not None:
        status = Status.TRUNCATED if record.flag("is_truncated") else Status.COMPLETED
    environment = record.text("env_name", optional=True) or record.text("task", optional=True)
    problem, sample = record.label("problem_id"), record.label("sample_id")
    return [
        Sample(
            group=problem if not environment else (environment, problem),
            rollout=sample,
            reward=record.number(reading.reward_key or "reward", optional=failed),
            status=status,
            **read_texts(record, "prompt", "completion", optional=failed),
            ground_truth=read_json(record, "answer"),
            step=record.whole("step"),
            advantage=record.number("advantage", optional=True),
            record=sample,
        )
    ]


FORMAT = Format(
    read_prime_hosted,
    files=("*.jsonl", "*.parquet"),
    keys=frozenset({"problem_id", "sample_id", "step", "reward", "advantage", "prompt", "completion"}),
    options=("group_size", "reward_key", "tokenizer"),
    unsaid=("masks", "tokens"),
)
