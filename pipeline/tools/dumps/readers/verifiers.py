"""Read evaluations that verifiers saves: ``results.jsonl`` with one rollout per line.

Schema: verifiers 0.1.8.post2, ``verifiers/utils/eval_utils.py`` (``make_dataset``), and 0.1.14,
``verifiers/utils/save_utils.py`` (``state_to_output``): ``example_id``, ``prompt``, ``completion`` (strings
or chat messages), ``reward``, ``task``, and from 0.1.9 on ``is_completed``, ``is_truncated``, ``error``. A
line also has the metrics. Later releases (0.4.0) save episodes in ``traces.jsonl``, which the format
``prime_rl`` reads. Earlier releases, and some environments, write ``id`` instead of ``example_id``.

- A group is an example of a task. An evaluation draws each example once.
- A rollout with an ``error`` failed. A rollout with ``is_truncated`` was truncated. In releases that do not
  write these keys, statuses are not known.
- Steps are not saved. Each file is one step, numbered in the order of the files. Tokens are not saved.
- Rollouts have no names, but their times are measured (``timing`` or ``generation_ms``). Two lines that are
  equal in everything, times included, are one rollout that was written twice. This is an error.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial

from headrace.transforms import Status

from .batch import Sample
from .file_kinds import Format, Reading, read_jsonl
from .record import Record, read_json, read_texts

MEASURED = frozenset({"timing", "generation_ms"})


def parse_row(record: Record, reading: Reading) -> list[Sample]:
    """Read the sample of one line of the results.

    Raises:
        SourceError: the line is not as documented.
    """
    named = "id" if "example_id" not in record.data and "id" in record.data else "example_id"
    example, task = record.label(named), record.text("task", optional=True)
    failed = record.says("error")
    status: Status | None = Status.FAILED if failed else None
    if not failed and record.get("is_truncated", optional=True) is not None:
        status = Status.TRUNCATED if record.flag("is_truncated") else Status.COMPLETED
    # Two lines with measured times are equal only if one line was written twice, never by chance.
    digest = None
    if MEASURED & record.data.keys():
        line = json.dumps(record.data, sort_keys=True).encode()
        digest = hashlib.blake2b(line, digest_size=16).hexdigest()
    reward = record.number(reading.reward_key or "reward", optional=True)
    return [
        Sample(
            group=example if task is None else (task, example),
            rollout=record.line,
            reward=reward,
            status=status,
            **read_texts(record, "prompt", "completion", optional=failed),
            ground_truth=read_json(record, "answer"),
            step=reading.file,
            record=digest,
        )
    ]


FORMAT = Format(
    partial(read_jsonl, parse=parse_row),
    files=("results.jsonl", "*/results.jsonl"),
    keys=frozenset({"example_id|id", "prompt", "completion", "reward"}),
    options=("group_size", "reward_key", "tokenizer"),
    unsaid=("rollouts", "masks", "tokens"),
)
