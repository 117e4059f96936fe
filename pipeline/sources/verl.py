"""Rollouts of verl, ``trainer.rollout_data_dir``: one ``<step>.jsonl`` a step.

Schema: verl 0.9.1, ``_write_generations`` in ``verl/trainer/ppo/ray_trainer.py`` and
``verl/trainer/ppo/v1/trainer_base.py``; each line has ``input``, ``output``, ``gts``, ``score``, ``step``
and what the reward function added. The trainer of ``v1`` adds ``uid``, a key ``{uid}_{session}_{index}``
(``v1/replay_buffer.py``): prompt, rollout, segment. It is split from the right, since a uid may have
underscores. The other trainer writes no uid: set ``group_by="prompt"``. Where ``uid`` is the group's id,
the same on each of its rows, set ``group_by="uid"``: each row is then a rollout.

A key names one row: there twice, it is an error. Without keys a row that is there twice looks like two
rollouts that are alike, which ``group_size`` may find out.

``v1`` and a trainer without ``trainer.balance_batch`` write the rollouts of one draw next to one another;
under ``balance_batch`` rows are permuted before they are dumped. So a prompt that was drawn twice, under
``group_by="prompt"``, is split where its rows lie in runs of ``group_size``, and else left out.

A score of ``NaN`` is an error. Neither statuses nor tokens are dumped: no rollout is known to have failed, or
to have been cut off, and how long a response is needs a tokenizer.
"""

from __future__ import annotations

from functools import partial

from .batch import Label, Sample
from .file_kinds import Format, Reading, read_jsonl
from .record import Record, read_json


def parse_row(record: Record, reading: Reading) -> list[Sample]:
    """The sample of one line of the dump.

    Raises:
        SourceError: it is not as documented, or has no uid and `group_by` is not ``prompt``.
    """
    prompt, uid = record.text("input"), record.text("uid", optional=reading.group_by != "uid")
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
            expected_rollouts=reading.group_size,
            record=None if reading.group_by == "uid" else uid,
            place=record.line,
            where=record.where,
        )
    ]


def split_key(record: Record, key: str) -> tuple[str, str]:
    """The uid, and the uid with its session, of ``{uid}_{session}_{index}``.

    Raises:
        SourceError: the key has another form.

    Example:
        >>> split_key(Record({}, "1.jsonl:1"), "math_42_3_0")
        ('math_42', 'math_42_3')
    """
    uid, *numbers = key.rsplit("_", 2)
    if len(numbers) != 2 or not uid or not all(n.isascii() and n.isdecimal() for n in numbers):
        raise record.fail(
            "'uid' must be a key {uid}_{session}_{index} with two numbers at its end; if it is the group's "
            "own, on each of its rows, set source.group_by=uid",
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
