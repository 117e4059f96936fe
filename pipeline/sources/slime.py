"""Debug rollouts of slime and miles: one ``.pt`` file a training step.

Schema: THUDM/slime at 4c4adbb, ``slime/observability/rollout_data_utils.py`` (``save_debug_rollout_data``),
and ``Sample.to_dict`` in ``slime/utils/types.py`` at 0d234f3; radixark/miles at 002ce70,
``miles/utils/types.py``, has the same fields. ``--save-debug-rollout-data data_{rollout_id}.pt`` writes::

    {"rollout_id": training step,
     "samples": [{"group_index", "index", "rollout_id", "tokens", "response_length", "loss_mask", "reward",
                  "status", "weight_versions", "rollout_log_probs", "remove_sample", ...}]}

Two things are called ``rollout_id``: that of the file is the step, that of a sample the execution. Siblings
of a fan-out share the latter; where it is not set, ``index`` is the execution (slime's customization
guide). Evaluations, ``eval_<n>`` in the file's name, are left aside in a folder.

The file is loaded with ``weights_only=True``: nothing in it is executed. Dumps with NumPy arrays in them
(routed experts of a mixture model) are refused by that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from headrace.transforms import Status

from .malformed import SourceError, quote
from .reading import Reading, parse_records
from .record import Record, as_number, as_whole
from .sample import Sample
from .text import read_text

# One that is pending has not ended; in a partial rollout it goes on in a later step.
STATUSES = {
    "completed": Status.COMPLETED,
    "truncated": Status.TRUNCATED,
    "aborted": Status.ABORTED,
    "failed": Status.FAILED,
    "pending": Status.ABORTED,
}


def read_slime(path: Path, reading: Reading) -> Iterator[Sample]:
    """Samples of one dump file, which is one step.

    Raises:
        SourceError: the file cannot be loaded without running code, or a record is not as documented.
    """
    reading.one_reward_key()
    try:
        step, records = _load(path)
    except SourceError as err:
        reading.skipped.note(err)
        return

    def parse(record: Record, reading: Reading) -> list[Sample]:
        sample = parse_sample(record, reading)
        sample.step = step
        return [sample]

    yield from parse_records(records, reading, parse)


def parse_sample(record: Record, reading: Reading) -> Sample:
    """One sample of the dump, without its step."""
    status = record.text("status")
    if status not in STATUSES:
        raise record.fail(f"'status' must be one of {', '.join(STATUSES)}", status)
    rollout = record.label("rollout_id", optional=True)
    reward, rewards = _rewards(record, reading.one_reward_key())
    return Sample(
        group=record.label("group_index"),
        rollout=record.label("index") if rollout is None else rollout,
        reward=reward,
        rewards=rewards,
        status=STATUSES[status],
        prompt=read_text(record, "prompt", optional=True),
        response=record.text("response", optional=True),
        tokens=record.wholes("tokens"),
        loss_mask=record.bits("loss_mask", optional=True),
        response_length=record.whole("response_length"),
        log_probs=record.numbers("rollout_log_probs", optional=True),
        policy_version=_oldest(record),
        in_loss=not record.flag("remove_sample", default=False),
        expected=reading.group_size,
        where=record.where,
    )


def _load(path: Path) -> tuple[int, Iterator[Record]]:
    try:
        dump = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as err:  # a damaged file makes the unpickler raise anything
        reason = str(err).strip().splitlines()[0][:200] if str(err).strip() else type(err).__name__
        raise SourceError(
            f"{path}: a dump must load as plain data and tensors, without running code; found {reason}"
        ) from err
    if not isinstance(dump, dict):
        raise SourceError(f"{path}: a dump is a dict with rollout_id and samples; found {quote(dump)}")
    step, samples = as_whole(dump.get("rollout_id")), dump.get("samples")
    if step is None:
        raise SourceError(
            f"{path}: rollout_id, the training step, must be an integer ≥ 0; "
            f"found {quote(dump.get('rollout_id'))}"
        )
    if not isinstance(samples, list) or not samples or not all(isinstance(s, dict) for s in samples):
        raise SourceError(f"{path}: samples must be a list of dicts, at least one; found {quote(samples)}")
    return step, (Record(data, f"{path}, sample {i}", i + 1) for i, data in enumerate(samples))


def _rewards(record: Record, key: str | None) -> tuple[float | None, dict[str, float] | None]:
    value: Any = record.get("reward", optional=True)
    if value is None:
        return None, None
    if isinstance(value, dict):
        named = record.record("reward")
        if key is not None:
            return named.number(key, optional=True), None
        if not value or not all(isinstance(k, str) and as_number(v) is not None for k, v in value.items()):
            raise record.fail("'reward' must be a number or a dict of numbers, else give reward_key", value)
        return None, {name: named.number(name) for name in value}
    if key is not None:
        raise record.fail(f"'reward' must be a dict where reward_key is given ({key!r})", value)
    return record.number("reward"), None


def _oldest(record: Record) -> int | None:
    """The oldest weights that wrote the response; servers that were not told a version have none."""
    versions = record.get("weight_versions", optional=True)
    if versions is None:
        return None
    if not isinstance(versions, list):
        raise record.fail("'weight_versions' must be a list", versions)
    numbers = []
    for version in versions:
        number = (
            int(version) if type(version) is str and version.isdecimal() and len(version) < 19 else version
        )
        if type(version) is str and as_whole(number) is None:
            return None
        if as_whole(number) is None:
            raise record.fail("'weight_versions' must hold version numbers", versions)
        numbers.append(number)
    return min(numbers, default=None)
