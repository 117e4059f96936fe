"""What a reader is told, and what it tells: options, skipped records, and how far it has come."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .malformed import Skipped, SourceError
from .record import Record
from .sample import Sample


@dataclass(slots=True)
class Reading:
    """The state of one pass over a source.

    Args:
        reward_key: which reward, or which of several, where a format has them by name.
        group_by: ``prompt`` lets equal prompts of a step be one group, in formats without a group's id.
        group_size: rollouts that each group was dispatched with.
        skipped: what to do with malformed records.
        file: number of the file that is being read, from 0.
        done_bytes: of the files before.
        position: bytes read of this file.
    """

    reward_key: tuple[str, ...] | None = None
    group_by: str | None = None
    group_size: int | None = None
    skipped: Skipped = field(default_factory=lambda: Skipped(allowed=False))
    file: int = 0
    done_bytes: int = 0
    position: int = 0

    def one_reward_key(self) -> str | None:
        """The reward's name, where a format takes one only.

        Raises:
            ValueError: there are several.
        """
        if self.reward_key is not None and len(self.reward_key) > 1:
            raise ValueError(f"this format takes one reward_key; got {list(self.reward_key)}")
        return self.reward_key[0] if self.reward_key else None

    def group_of_prompt(self, prompt: str | Sequence[int], where: str) -> str:
        """A label of a prompt, for formats that keep no group's id. Equal prompts have equal labels.

        Raises:
            SourceError: nobody has said that equal prompts are one group.
        """
        if self.group_by != "prompt":
            raise SourceError(
                f"{where}: a sample needs a group; found none, and the same prompt drawn twice would look "
                "like one group. If each prompt was drawn once a step, set group_by='prompt', best with "
                "group_size, which is then checked"
            )
        text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
        return "prompt-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def parse_records(
    records: Iterator[Record], reading: Reading, parse: Callable[[Record, Reading], list[Sample]]
) -> Iterator[Sample]:
    """Turn records into samples, and skip those that are malformed where that is allowed.

    Raises:
        SourceError: a record that is malformed, where it is not.
    """
    for record in records:
        try:
            samples = [sample.check() for sample in parse(record, reading)]
        except SourceError as err:
            reading.skipped.note(err)
        else:
            yield from samples


def first_record(records: Iterator[Record]) -> dict[Any, Any]:
    """The first record's data, to tell formats apart; empty if there is none."""
    return next((record.data for record in records), {})
