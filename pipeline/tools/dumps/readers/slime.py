"""Read debug rollouts of slime and miles: one ``.pt`` file per training step.

Schema: THUDM/slime at 4c4adbb, ``slime/observability/rollout_data_utils.py`` (``save_debug_rollout_data``),
and ``Sample.to_dict`` in ``slime/utils/types.py`` at 0d234f3. radixark/miles at 002ce70,
``miles/utils/types.py``, has the same fields. ``--save-debug-rollout-data data_{rollout_id}.pt`` writes::

    {"rollout_id": training step,
     "samples": [{"group_index", "index", "rollout_id", "tokens", "response_length", "loss_mask", "reward",
                  "status", "weight_versions", "rollout_log_probs", "remove_sample", ...}]}

Two things are called ``rollout_id``. In the file, it is the step. In a sample, it is the rollout, and all
segments of the rollout have it. If a sample has no ``rollout_id``, its ``index`` is the rollout (slime's
customization guide). If other samples have one, the label of such a rollout is ``index/7``. A sample that
occurs twice looks like two equal segments, so duplicates are not detected. In a folder, evaluations are
ignored: files with ``eval_<n>`` in the name.

The file is written before advantages are computed. ``--dump-details DIR`` writes it to
``DIR/rollout_data/``, and the trained data to ``DIR/train_data/``, under the same name
(``slime/observability/train_data_utils.py`` at 624b824, ``format_version`` 2)::

    {"format_version": 2, "samples": [{"rollout_position", "advantages", "loss_masks", ...}]}

``rollout_position`` is the index of a sample in the first file. If the second file exists, the advantage of a
sample is the common value of ``advantages`` on its tokens in the loss.

Files are loaded with ``weights_only=True``, so no code in them is run. This refuses dumps with NumPy arrays
(routed experts of a mixture model) or bytes. A small file must not become a large batch. So three things are
refused: compressed files, which ``torch.save`` never writes; expanded tensors; and thousands of samples that
share their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.transforms import Status

from .batch import Sample, common_advantage
from .file_kinds import Format, Reading, load_plain, parse_records
from .record import Record, SourceError, as_number, as_whole, quote, read_json, read_text

SHARED = 2**22  # items that the lists of any file may have; larger files may have an item for each byte
# A pending rollout has not ended. If slime uses partial rollouts, it continues in a later step.
STATUSES = {status.name.lower(): status for status in Status} | {"pending": Status.ABORTED}


def read_slime(path: Path, reading: Reading) -> Iterator[Sample]:
    """Read the samples of one dump file, which is one step.

    Raises:
        SourceError: the file cannot be loaded without running code, or a record is not as documented.
    """
    dump = load_plain(path)
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
    records = (Record(data, f"{path}, sample {i}", i + 1) for i, data in enumerate(samples))
    named = any(data.get("rollout_id") is not None for data in samples)
    items, most = 0, max(SHARED, path.stat().st_size)
    trained = trained_advantages(path, len(samples))

    def parse(record: Record, reading: Reading) -> list[Sample]:
        nonlocal items
        samples = parse_row(record, reading, step=step, named=named)
        if trained is not None:
            samples[0].advantage = trained.get(record.line - 1, math.nan)
        items += sum(len(v or ()) for s in samples for v in (s.tokens, s.loss_mask, s.log_probs))
        if items > most:  # many lists of a pickle may be one shared list, and many tensors one tensor
            raise record.fail(f"the lists in a file of this size have at most {most} items", items)
        return samples

    return parse_records(records, reading, parse)


def trained_advantages(path: Path, samples: int) -> dict[int, float] | None:
    """Read the advantages, by index of the sample, from the file of trained data; None without such a file.

    Raises:
        SourceError: the file has another format, or an index of a sample is unknown or occurs twice.
    """
    beside = path.parent.parent / "train_data" / path.name
    if path.parent.name != "rollout_data" or not beside.is_file():
        return None
    dump = load_plain(beside)
    rows = dump.get("samples") if isinstance(dump, dict) and dump.get("format_version") == 2 else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SourceError(
            f"{beside}: trained data must have format_version 2 and a list of samples; found "
            f"{quote(dump)}. To read the rollouts without their advantages, move train_data away"
        )
    found: dict[int, float] = {}
    items, most = 0, max(SHARED, beside.stat().st_size)
    for number, row in enumerate(rows):
        record = Record(row, f"{beside}, sample {number}", number + 1)
        place, advantages, mask = (
            record.whole("rollout_position"),
            record.numbers("advantages"),
            record.bits("loss_masks"),
        )
        items += len(advantages) + len(mask)
        if place in found or place >= samples or len(mask) != len(advantages) or items > most:
            raise record.fail(
                f"rollout_position must be below {samples} and occur once, and advantages and loss_masks "
                "must have equal lengths",
                [place, len(advantages), len(mask)],
            )
        found[place] = common_advantage(advantages, mask)
    return found


def parse_row(record: Record, reading: Reading, *, step: int, named: bool) -> list[Sample]:
    """Read the sample of one dict of ``samples``; `named`: whether some dicts have a ``rollout_id``.

    Raises:
        SourceError: the dict is not as documented.
    """
    status = record.choice("status", STATUSES)
    rollout = record.label("rollout_id", optional=True)
    if rollout is None:
        rollout = ("index", record.label("index")) if named else record.label("index")
    reward, rewards = _rewards(record, reading.reward_key)
    return [
        Sample(
            group=record.label("group_index"),
            rollout=rollout,
            reward=reward,
            rewards=rewards,
            status=status,
            prompt=read_text(record, "prompt", optional=True),
            response=record.text("response", optional=True),
            ground_truth=read_json(record, "label"),
            tokens=record.wholes("tokens"),
            loss_mask=record.bits("loss_mask", optional=True),
            response_length=record.whole("response_length"),
            log_probs=record.numbers("rollout_log_probs", optional=True),
            policy_version=_oldest_version(record),
            step=step,
            in_loss=not record.flag("remove_sample", default=False),
        )
    ]


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


def _oldest_version(record: Record) -> int | None:
    """The oldest version of the weights that wrote the response; None if a server did not know it."""
    versions = record.get("weight_versions", optional=True)
    if versions is None:
        return None
    if not isinstance(versions, list):
        raise record.fail("'weight_versions' must be a list", versions)
    numbers = []
    for version in versions:
        if type(version) is str:
            if not version.isdecimal() or len(version) > 18:
                return None
            version = int(version)
        if as_whole(version) is None:
            raise record.fail("'weight_versions' must hold version numbers", versions)
        numbers.append(version)
    return min(numbers, default=None)


FORMAT = Format(
    read_slime,
    files=("*.pt", "rollout_data/*.pt"),
    options=("group_size", "reward_key"),
    ignored=r"(^|.*[^a-zA-Z])eval_\d+\.pt",
)
