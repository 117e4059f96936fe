"""Read training data that NeMo RL logs: one ``train_data_step<N>.jsonl`` per step.

Schema: NVIDIA-NeMo/RL, ``nemo_rl/algorithms/grpo.py`` (``grpo_train``), and ``log_batched_dict_as_jsonl``
in ``nemo_rl/utils/logger.py``. The schema is from forks of the main branch of late 2026, because the wheel on
PyPI is empty. Each line is one sample, a slice of the batch. Every value except ``idx`` is a list of one.
The reader uses ``token_ids``, ``input_lengths``, ``token_loss_mask``, ``sample_loss_mask``, ``advantages``,
``generation_logprobs``, ``content``, and ``filtered_rewards``, which dynamic sampling writes, or else
``rewards``. Releases that do not log the masks cannot be read. A ``content`` that is not a string is ignored.

- Rows are padded on the right. ``input_lengths`` is the length without padding.
- The response begins at the first token that trains.
- Advantages are logged per token. If they differ within a sample, its advantage is NaN.
- ``idx`` is the number of the sample in the batch. Two samples with the same number are an error.
- Groups are not logged: set ``group_by="prompt"``, which compares the tokens before the response. ``idx`` is
  the order of arrival, in which the rollouts of one draw are next to one another.
- Statuses are not logged, so failed and truncated rollouts are not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from .batch import Sample, common_advantage
from .file_kinds import Format, Reading, read_jsonl
from .record import Record, SourceError, as_text


def read_nemo_rl(path: Path, reading: Reading) -> Iterator[Sample]:
    """Read the samples of one file, which is one step.

    Raises:
        SourceError: the file's name has no step, a record is not as documented, or there is no
            `group_by`.
    """
    named = re.search(r"step(\d{1,18})\.jsonl(\.gz)?$", path.name)
    if named is None:
        raise SourceError(
            f"{path}: the step is in the file's name, train_data_step<N>.jsonl; found {path.name}"
        )
    return read_jsonl(path, reading, partial(parse_row, step=int(named[1])))


def parse_row(record: Record, reading: Reading, *, step: int) -> list[Sample]:
    """Read the sample of one line of the dump.

    Raises:
        SourceError: the line is not as documented, or there is no `group_by`.
    """
    row = Record({key: _only(record, key) for key in record.data}, record.where, record.line)
    tokens, length, trains = row.wholes("token_ids"), row.whole("input_lengths"), row.bits("token_loss_mask")
    log_probs = row.numbers("generation_logprobs", optional=True)
    advantages = row.numbers("advantages", optional=True)
    for name, values in (("token_loss_mask", trains), ("generation_logprobs", log_probs)):
        if values is not None and len(values) != len(tokens):
            raise row.fail(f"{name!r} must be as long as token_ids ({len(tokens)})", len(values))
    if advantages is not None and len(advantages) not in (1, len(tokens)):
        raise row.fail(f"'advantages' has one, or one for each token ({len(tokens)})", len(advantages))
    if length > len(tokens):
        raise row.fail(f"'input_lengths' is at most the length of token_ids ({len(tokens)})", length)
    mask = trains[:length]
    begin = mask.index(1) if 1 in mask else length
    reward = "filtered_rewards" if "filtered_rewards" in row.data else "rewards"
    return [
        Sample(
            group=reading.group_of_prompt(tokens[:begin], record.where),
            rollout=row.whole("idx"),
            reward=row.number(reward),
            status=None,
            response=as_text(row.data.get("content")),
            tokens=tokens[:length],
            loss_mask=mask[begin:],
            response_length=length - begin,
            log_probs=None if log_probs is None else log_probs[begin:length],
            step=step,
            advantage=None if advantages is None else _logged(advantages, trains),
            in_loss=record.bits("sample_loss_mask") == [1],
            record=row.whole("idx"),
            place=row.whole("idx"),
        )
    ]


def _only(record: Record, key: Any) -> Any:
    """The value in a list of one."""
    value = record.data[key]
    if key == "idx":
        return value
    if not isinstance(value, list) or len(value) != 1:
        raise record.fail(f"{key!r} must be a list of one, the sample's slice of the batch", value)
    return value[0]


def _logged(advantages: list[float], trains: list[int]) -> float:
    """The advantage of a row, which may be logged once or for each token."""
    return advantages[0] if len(advantages) == 1 else common_advantage(advantages, trains)


FORMAT = Format(
    read_nemo_rl,
    files=("train_data_step*.jsonl",),
    keys=frozenset({"token_ids", "token_loss_mask", "sample_loss_mask", "rewards"}),
    options=("group_by", "group_size"),
    unsaid=("rollouts",),
)
