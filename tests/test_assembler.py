"""The group assembler is what its docstring says: compared with a slow one, over streams with every fault."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass, field

import pytest
import torch
from assembly import Line, SlowAssembler, batch_of_lines
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import RepeatSampler, load_pipeline
from headrace.transforms import (
    BatchError,
    CompletenessGate,
    GroupAssembler,
    IncompleteGroupsError,
    MissingKeyError,
    StalledError,
)
from headrace.transforms.schema import DISPATCHED

OPTIONS = {
    "plain": {},
    "small": {"group_size": 2, "groups": 2},
    "keep": {"on_failure": "keep", "on_timeout": "keep", "timeout": 3, "min_rollouts": 1},
    "timeout": {"timeout": 2},
    "evict": {"max_pending_groups": 2, "groups": 1},
    "stale": {"max_staleness": 1, "groups": 2},
}


@dataclass
class Faults:
    """A stream of rows, in pieces, with faults of all kinds."""

    seed: int
    by_segment: bool
    pieces: list[list[Line]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        rows: list[Line] = []
        for group in range(rng.randint(1, 7)):
            expected, partition = rng.randint(2, 4), rng.randint(0, 1)
            for number in range(expected):
                rows += self.rollout(rng, group, 10 * group + number, partition, expected)
        if (
            rng.random() < 0.7
        ):  # reordered: anywhere where rows have numbers, else with each rollout's in order
            places = [rng.random() * len(rows) if self.by_segment else 0.0 for _ in rows]
            shift = {line.rollout: rng.random() * len(rows) for line in rows}
            near = [shift[line.rollout] + 0.5 * index for index, line in enumerate(rows)]
            keys = [a + b for a, b in zip(places, near, strict=True)]
            rows = [line for _, line in sorted(zip(keys, rows, strict=True), key=lambda pair: pair[0])]
        while rows:
            size = rng.randint(0, 5)
            self.pieces.append(rows[:size])
            rows = rows[size:]

    def rollout(self, rng, group: int, number: int, partition: int, expected: int) -> list[Line]:
        segments, fault = (
            rng.randint(1, 3),
            rng.choice(["", "", "", "lost", "torn", "failed", "twice", "more"]),
        )
        version = rng.randint(0, 3)
        lines = [
            Line(group, number, s, s == segments - 1, 0, partition, version, expected)
            for s in range(segments)
        ]
        if fault == "lost":
            return []
        if fault == "torn":
            return lines[:-1]
        if fault == "failed":
            lines[-1] = lines[-1]._replace(status=rng.choice([2, 3]), done=rng.random() < 0.5)
        if fault == "twice":
            lines += lines[rng.randint(0, segments - 1) :]
        if fault == "more":
            lines += [line._replace(rollout=number + 5) for line in lines]
        return lines


def make(by_segment: bool, **options) -> GroupAssembler:
    return GroupAssembler(
        on_duplicate="drop",
        partition_key="partition",
        segment_key="segment" if by_segment else None,
        **options,
    )


def saved(assembler: GroupAssembler, by_segment: bool, **options) -> GroupAssembler:
    """Another one, that goes on from the state as a file has it."""
    file = io.BytesIO()
    torch.save(assembler.state_dict(), file)
    file.seek(0)
    twin = make(by_segment, **options)
    twin.load_state_dict(torch.load(file, weights_only=True))
    return twin


@pytest.mark.parametrize("name", OPTIONS)
@given(seed=st.integers(0, 10**9), by_segment=st.booleans(), resume=st.booleans())
def test_it_does_what_the_slow_one_does_with_any_stream_and_wherever_it_is_resumed(
    name, seed, by_segment, resume
):
    options = OPTIONS[name]
    slow_options = {key: value for key, value in options.items() if key != "groups"}
    fast, slow = make(by_segment, **options), SlowAssembler(by_segment=by_segment, **slow_options)
    rng, came, went = random.Random(seed), 0, 0
    for piece in Faults(seed, by_segment).pieces:
        piece = [line._replace(expected=max(line.expected, 2)) for line in piece]
        fast.put(batch_of_lines(piece, came))
        slow.put(piece)
        came += len(piece)
        if resume:
            fast = saved(fast, by_segment, **options)
        fast.version = slow.version = fast.version + (rng.random() < 0.3)
        while rng.random() < 0.6:
            out, numbers = fast.take(), slow.take(options.get("groups"))
            assert (None if out is None else out["number"].tolist()) == numbers
            if out is None:
                break
            went += len(out)
            assert CompletenessGate(segment_key="segment" if by_segment else None)(out) is not None
            assert list(out["text"]) == [f"row {number}" for number in numbers]
        assert {reason: rows for reason, rows in fast.counts.items() if rows} == slow.counts
        assert (fast.held, fast.ready) == (slow.held, len(slow.whole))
        assert came == went + sum(fast.counts.values()) + fast.held
