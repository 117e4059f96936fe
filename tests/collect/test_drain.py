"""Rows written to a replay buffer come out once, for any writers, or are reported lost."""

from __future__ import annotations

import time

import pytest
import torch
from assembly import Line, batch_of_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import process_context
from tensordict import TensorDict, lazy_stack
from torchrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from writers import processes, shared_buffer, told_writers, write_all

from headrace.pipeline import DrainWriter, assembled, drained
from headrace.transforms import BatchError, GroupAssembler, StalledError

pytestmark = pytest.mark.torchrl

STORAGES = {
    "tensor": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
    "list": ListStorage,
    "lazy": LazyStackStorage,
}


def numbered(first: int, count: int) -> TensorDict:
    return TensorDict({"n": torch.arange(first, first + count)}, batch_size=[count])


def read(drain) -> list[int]:
    rows = next(iter(drain))
    return [] if rows is None else rows["n"].tolist()


@pytest.mark.parametrize("kind", STORAGES)
@settings(max_examples=25)
@given(size=st.integers(1, 6), writes=st.lists(st.one_of(st.none(), st.integers(1, 6)), max_size=20))
def test_each_row_comes_out_once_in_order_or_is_reported_lost(kind, size, writes):
    """An integer in `writes` is a write of so many rows, and None is a read."""
    buffer_class = TensorDictReplayBuffer if kind == "tensor" else ReplayBuffer
    buffer = buffer_class(storage=STORAGES[kind](size))
    drain, written, seen = drained(buffer, wait=1e-6), 0, []
    for count in [*writes, None]:
        if count is not None:
            count = min(count, size)
            buffer.extend(numbered(written, count))
            written += count
        elif written - len(seen) > size:
            message = f"{len(seen)} rows of the buffer were read, and {written} were written.*holds {size}"
            with pytest.raises(BatchError, match=message):
                read(drain)
            return
        else:
            seen += read(drain)
            assert seen == list(range(written))
            assert read(drain) == []


def test_a_state_resumes_behind_the_rows_read_and_refuses_another_buffer():
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    first = drained(buffer)
    buffer.extend(numbered(0, 3))
    assert read(first) == [0, 1, 2]
    buffer.extend(numbered(3, 2))
    second = drained(buffer)
    second.load_state_dict(first.state_dict())
    assert read(second) == [3, 4]
    other = drained(ReplayBuffer(storage=LazyTensorStorage(5)))
    other.load_state_dict(first.state_dict())
    with pytest.raises(BatchError, match="3 rows of the buffer were read, and 0 were written"):
        read(other)
    buffer.empty()
    with pytest.raises(BatchError, match="If it was emptied or is new"):
        read(second)


def test_the_state_of_a_drain_belongs_to_that_of_the_buffer():
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    first = drained(buffer)
    for number in range(4):
        buffer.extend(numbered(number, 1))
        if number == 2:
            assert read(first) == [0, 1, 2]
    again = ReplayBuffer(storage=LazyTensorStorage(3))
    again.load_state_dict(buffer.state_dict())
    second = drained(again)
    second.load_state_dict(first.state_dict())
    assert read(second) == [3]


def test_more_than_2_32_rows_can_be_read():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(numbered(0, 1))
    drain = drained(buffer)
    drain.position = buffer.writer._write_count = 2**31 - 2
    for number in range(3):
        buffer.extend(numbered(2 * number, 2))
        assert read(drain) == [2 * number, 2 * number + 1]
    assert buffer.write_count < 0
    assert drain.position == 2**31 + 4


def test_a_drain_reads_the_rows_written_before_close_and_ends():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    drain = drained(buffer)
    looks = iter(drain)
    assert next(looks) is None
    buffer.extend(numbered(0, 2))
    drain.close()
    assert next(looks)["n"].tolist() == [0, 1]
    assert list(looks) == []


def shared(size: int) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(size), writer=DrainWriter(), shared=True)


def test_strings_in_a_shared_buffer_are_refused():
    rows = numbered(0, 2).set("text", ["a", "b"]).set(("next", "text"), ["c", "d"])
    buffer = shared(4)
    buffer.extend(rows)
    with pytest.raises(BatchError, match=r"no tensors: \('next', 'text'\), text\. Their values"):
        read(drained(buffer))
    own = ReplayBuffer(storage=LazyTensorStorage(4))
    own.extend(rows)
    assert list(next(iter(drained(own)))["text"]) == ["a", "b"]


@pytest.mark.parametrize("one", [False, True], ids=["extend", "add"])
def test_a_failed_write_is_detected_and_never_read_as_rows(one):
    buffer = shared(6)
    rows = numbered(0, 2).set("tokens", torch.zeros(2, 3))
    buffer.extend(rows)
    drain = drained(buffer)
    assert read(drain) == [0, 1]
    for wrong, why in (
        (
            rows.clone().set("tokens", torch.zeros(2, 1)),
            "have another width in tokens",
        ),  # the storage would repeat the one column
        (rows.clone().set("tokens", torch.zeros(2, 4)), "have another width in tokens"),
        (rows.exclude("tokens"), "lack tokens"),
        (rows.clone().set("status", torch.ones(2)), "also have status"),  # unknown elsewhere
    ):
        with pytest.raises(BatchError, match=f"the columns and widths of the storage; these rows {why}"):
            buffer.add(wrong[0]) if one else buffer.extend(wrong)
    with pytest.raises(BatchError, match="4 writes to the buffer failed, and those rows are lost"):
        read(drain)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_buffer_of_two_dimensions_is_read_along_its_first(kind):
    buffer = kind(storage=LazyTensorStorage(8, ndim=2), writer=DrainWriter())
    drain, seen = drained(buffer), []
    for start in range(0, 12, 3):  # three writes of two environments
        time_of = torch.arange(start, start + 3)
        rows = TensorDict({"n": torch.stack([time_of, 100 + time_of])}, batch_size=[2, 3])
        buffer.extend(rows)
        seen += next(iter(drain))["n"].tolist()
    assert seen == [[n, 100 + n] for n in range(12)]


def test_lazy_stacks_come_out_as_lazy_stacks():
    buffer = ReplayBuffer(storage=LazyStackStorage(4))
    ragged = [TensorDict({"n": torch.tensor(n), "tokens": torch.arange(n)}, []) for n in (1, 3)]
    buffer.extend(lazy_stack(ragged))
    rows = next(iter(drained(buffer)))
    assert [row["tokens"].tolist() for row in rows.unbind(0)] == [[0], [0, 1, 2]]


def test_a_locked_buffer_raises_in_bounded_time():
    buffer = shared_buffer(4, numbered(0, 1))
    drain = drained(buffer, patience=0.2)
    with buffer._write_lock:
        begun = time.monotonic()
        with pytest.raises(StalledError, match=r"kept the buffer locked for 0.2 s. If it was killed"):
            read(drain)
        assert time.monotonic() - begun < 10
    buffer.extend(numbered(0, 1))
    assert read(drain) == [0]


# -- processes that write -------------------------------------------------------------------------------


def rows_of(worker: int, workers: int, groups: int) -> TensorDict:
    """The rows of a worker, which has one rollout of two segments in each group. They have no strings."""
    lines = [
        Line(g, workers * g + worker, s, s == 1, expected=workers) for g in range(groups) for s in (0, 1)
    ]
    return batch_of_lines(lines, start=1000 * worker).exclude("text")


@pytest.mark.slow
def test_two_writing_processes_lose_no_row_in_a_buffer_that_wraps():
    groups, size = 20, 16
    sent = [rows_of(worker, 2, groups) for worker in (0, 1)]
    buffer, room = shared_buffer(size, sent[0]), process_context().Semaphore(size)
    drain = drained(buffer, wait=0.005)

    def looks():
        for rows in drain:
            if drain.position == 4 * groups:
                drain.close()
            yield rows
            for _ in range(0 if rows is None else len(rows)):
                room.release()

    assembler = GroupAssembler()
    with processes(write_all, (buffer, sent[0], 3, room), (buffer, sent[1], 2, room)):
        batches = list(assembled(looks(), assembler, patience=30))
    out = torch.cat(batches)
    every = torch.cat(sent)
    every = every[every["rollout_id"].argsort(stable=True)]
    assert (assembler.held, sum(assembler.counts.values())) == (0, 0)
    out = out[out["rollout_id"].argsort(stable=True)]
    for key in ("number", "group_id", ("next", "reward"), ("tokens", "full")):
        assert torch.equal(out[key], every[key]), key


@pytest.mark.slow
def test_a_writer_killed_while_writing_raises_in_bounded_time():
    rows = rows_of(0, 2, 3)
    buffer = shared_buffer(20, rows)
    with told_writers(buffer, 2) as writers:
        writers.tell(1, rows[:2])
        drain = drained(buffer, patience=1)
        assert len(next(iter(drain))) == 2
        writers.tell(0, "lock")
        writers.kill(0)
        with pytest.raises(StalledError, match=r"locked for 1 s. If it was killed during a write"):
            next(iter(assembled(drain, GroupAssembler(), patience=30)))
