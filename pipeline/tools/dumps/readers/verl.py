"""Read rollouts of verl (``trainer.rollout_data_dir``): one ``<step>.jsonl`` per step.

Schema: verl 0.9.1, ``_write_generations`` in ``verl/trainer/ppo/ray_trainer.py`` and
``verl/trainer/ppo/v1/trainer_base.py``. Each line has ``input``, ``output``, ``gts``, ``score``, ``step``
and the keys that the reward function added.

- The trainer of ``v1`` adds ``uid``, a key ``{uid}_{session}_{index}`` (``v1/replay_buffer.py``). It names
  prompt, rollout and segment. The key is split from the right, because a uid may have underscores. Two rows
  with the same key are an error. The trainer fills its batch with rows of the uid ``pad`` + 32 hexadecimal
  digits. These rows are not rollouts, and are left out.
- The other trainer writes no uid: set ``group_by="prompt"``. Without keys, a row that occurs twice looks like
  two equal rollouts. ``group_size`` may detect this.
- If ``uid`` is the id of the group, set ``group_by="uid"``. Then each row is a rollout.
- ``v1``, and a trainer without ``trainer.balance_batch``, write the rollouts of one draw next to one another.
  Under ``balance_batch`` rows are permuted before they are dumped. So with ``group_by="prompt"`` a prompt
  that was drawn twice is split into its draws if its rows are in runs of ``group_size``. Otherwise its rows
  are left out.
- A score of ``NaN`` is an error. Statuses and tokens are not dumped. So failed and truncated rollouts are not
  known, and the length of a response needs a tokenizer.
"""

from __future__ import annotations

import re
from functools import partial

from .batch import Label, Sample
from .file_kinds import Format, Reading, read_jsonl
from .record import Record, read_json

# Rows that the v1 trainer adds to fill its batch, trainer/ppo/padding_utils.py; they are not rollouts.
PADDING = re.compile(r"pad[0-9a-f]{32}(_\d+_0)?")


def parse_row(record: Record, reading: Reading) -> list[Sample]:
    """Read the sample of one line of the dump; none if the row only fills verl's batch.

    Raises:
        SourceError: the line is not as documented, or has no uid and there is no `group_by`.
    """
    prompt, uid = record.text("input"), record.text("uid", optional=reading.group_by != "uid")
    if uid is not None and PADDING.fullmatch(uid):
        return []
    rollout: str | int = record.line
    group: Label
    if reading.group_by == "uid":
        group = uid
    elif uid is not None:
        group, rollout = split_key(record, uid)
    else:
        group = reading.group_of_prompt(prompt, record.where)
    return [
        Sample(
            group=group,
            rollout=rollout,
            reward=record.number(reading.reward_key or "score"),
            status=None,
            prompt=prompt,
            response=record.text("output"),
            ground_truth=read_json(record, "gts"),
            step=record.whole("step"),
            record=None if reading.group_by == "uid" else uid,
            place=record.line,
        )
    ]


def split_key(record: Record, key: str) -> tuple[str, str]:
    """Split ``{uid}_{session}_{index}`` into the uid, and the uid with its session.

    Raises:
        SourceError: the key has another form.

    Example:
        >>> split_key(Record({}, "1.jsonl:1"), "math_42_3_0")
        ('math_42', 'math_42_3')
    """
    uid, *numbers = key.rsplit("_", 2)
    if len(numbers) != 2 or not uid or not all(n.isascii() and n.isdecimal() for n in numbers):
        raise record.fail(
            "'uid' must be a key {uid}_{session}_{index} with two numbers at its end; if it is the id of the "
            "group, set source.group_by=uid",
            key,
        )
    return uid, f"{uid}_{numbers[0]}"


FORMAT = Format(
    partial(read_jsonl, parse=parse_row),
    files=("*.jsonl",),
    keys=frozenset({"input", "output", "score", "step"}),
    options=("group_by", "group_size", "reward_key", "tokenizer"),
    unsaid=("masks", "tokens"),
)
