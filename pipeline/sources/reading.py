"""One pass over the files of a source: its options, what it skipped, and how far it has come."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .malformed import Skipped, SourceError, quote
from .record import Record
from .sample import Label, Sample


@dataclass(slots=True)
class Reading:
    """The options and the state of one pass over a source. Readers write `position`.

    Args:
        reward_keys: the names of the rewards to read; empty: the format's own.
        group_by: ``prompt`` makes equal prompts of a step one group, in formats without a group's id.
        group_size: rollouts that each group was dispatched with.
        skipped: counts malformed records, or raises for them.
        file: number of the file that is being read, from 0.
        done_bytes: size of the files that have been read.
        position: bytes read of this file.
    """

    reward_keys: tuple[str, ...] = ()
    group_by: str | None = None
    group_size: int | None = None
    skipped: Skipped = field(default_factory=lambda: Skipped(allowed=False))
    file: int = 0
    done_bytes: int = 0
    position: int = 0

    @property
    def reward_key(self) -> str | None:
        """The one reward's name, where the format reads one; None: the format's own."""
        return self.reward_keys[0] if self.reward_keys else None

    def restarted(self) -> Reading:
        """A new pass with the same options."""
        return Reading(
            reward_keys=self.reward_keys,
            group_by=self.group_by,
            group_size=self.group_size,
            skipped=Skipped(allowed=self.skipped.allowed),
        )

    def group_of_prompt(self, prompt: Any, where: str) -> Label:
        """A group's label made of its prompt, for formats without a group's id. Equal prompts, equal labels.

        Args:
            prompt: as the dump has it: text, token ids or messages. Those are not compared by their text, in
                which two messages may look like one.
            where: ``file:line``.

        Raises:
            SourceError: `group_by` is not ``prompt``.
        """
        if self.group_by != "prompt":
            raise SourceError(
                f"{where}: a sample needs a group; found none, and the same prompt drawn twice would look "
                "like one group. If each prompt was drawn once a step, set group_by='prompt', best with "
                "group_size, which is then checked"
            )
        text = json.dumps(prompt, sort_keys=True, default=repr)
        return "prompt", hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def parse_records(
    records: Iterator[Record], reading: Reading, parse: Callable[[Record, Reading], list[Sample]]
) -> Iterator[Sample]:
    """Turn records into samples; skip malformed records where that is allowed.

    A record is there once in a step: one with the label of another is no second segment of its rollout.

    Args:
        records: of one file.
        reading: the pass that the file belongs to.
        parse: makes samples of a record.

    Raises:
        SourceError: a record is malformed or there twice, and none may be skipped.
    """
    step: int | None = None
    places: dict[Label, str] = {}
    for record in records:
        try:
            samples = [sample.check() for sample in parse(record, reading)]
            if samples and samples[0].step != step:
                step, places = samples[0].step, {}
            _enter(samples, places)
        except SourceError as err:
            reading.skipped.note(err)
        else:
            yield from samples


def _enter(samples: list[Sample], places: dict[Label, str]) -> None:
    """Put the place of a record's samples under its label."""
    for sample in samples[:1]:
        if sample.record is None:
            continue
        if sample.record in places:
            raise SourceError(
                f"{sample.where}: a record is there once in a step; found {quote(sample.record)}, which is "
                f"already at {places[sample.record]}"
            )
        places[sample.record] = sample.where


def first_record(records: Iterator[Record]) -> dict[Any, Any]:
    """The data of the first record, whose keys identify the format; empty if there is none."""
    return next((record.data for record in records), {})
