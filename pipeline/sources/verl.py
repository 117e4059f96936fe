"""Rollouts of verl, ``trainer.rollout_data_dir``: one ``<step>.jsonl`` a step.

Schema: verl 0.9.1, ``_write_generations`` in ``verl/trainer/ppo/ray_trainer.py`` and
``verl/trainer/ppo/v1/trainer_base.py``; each line has ``input``, ``output``, ``gts``, ``score``, ``step``
and what the reward function added. The trainer of ``v1`` adds ``uid``, a key ``{uid}_{session}_{index}``
(``v1/replay_buffer.py``): prompt, rollout, segment. It is taken apart from the right, since a uid may have
underscores. The other trainer writes no uid: give ``group_by="prompt"``. A uid of your own that is the
group's, on each of its rows, is read with ``group_by="uid"``: each row is then a rollout.

A score that is no number, written as ``NaN``, is an error. Statuses and tokens are not dumped: all
completed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .jsonl import read_jsonl
from .reading import Reading
from .record import Record
from .sample import Sample


def read_verl(path: Path, reading: Reading) -> Iterator[Sample]:
    """Samples of one file, which is one step.

    Raises:
        SourceError: a record is not as documented, or has no uid and grouping by prompt was not asked for.
    """
    reading.one_reward_key()
    seen: set[str] = set()

    def parse(record: Record, reading: Reading) -> list[Sample]:
        sample = parse_row(record, reading)
        uid = record.data.get("uid") if reading.group_by != "uid" else None
        if uid is not None and uid in seen:
            raise record.fail("a uid names one row", uid)
        if uid is not None:
            seen.add(uid)
        return [sample]

    return read_jsonl(path, reading, parse)


def parse_row(record: Record, reading: Reading) -> Sample:
    """One line of the dump."""
    prompt, uid = record.text("input"), record.text("uid", optional=True)
    group: str | None
    rollout: str | int
    if reading.group_by == "uid":
        group, rollout = record.text("uid"), record.line
    else:
        group, rollout = split_key(record, uid) if uid is not None else (None, record.line)
    key = reading.one_reward_key() or "score"
    return Sample(
        group=reading.group_of_prompt(prompt, record.where) if group is None else group,
        rollout=rollout,
        reward=record.number(key),
        prompt=prompt,
        response=record.text("output"),
        step=record.whole("step"),
        expected=reading.group_size,
        where=record.where,
    )


def split_key(record: Record, key: str) -> tuple[str, str]:
    """The uid, and the uid with its session, of ``{uid}_{session}_{index}``.

    Raises:
        SourceError: the key has another form.

    Example:
        >>> split_key(Record({}, "1.jsonl:1"), "math_42_3_0")
        ('math_42', 'math_42_3')
    """
    parts = key.rsplit("_", 2)
    if len(parts) != 3 or not parts[0] or not all(p.isascii() and p.isdecimal() for p in parts[1:]):
        raise record.fail(
            "'uid' must be a key {uid}_{session}_{index} with two numbers at its end; if it is the group's "
            "own, on each of its rows, set group_by='uid'",
            key,
        )
    return parts[0], f"{parts[0]}_{parts[1]}"
