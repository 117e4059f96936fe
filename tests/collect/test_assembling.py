"""Batches of complete groups from a source: the source ends, is silent (`reading`), or resumes."""

from __future__ import annotations

import time
from queue import Queue
from threading import Event
from types import SimpleNamespace

import pytest
from assembly import Line, batch_of_lines

from headrace.pipeline import assembled
from headrace.transforms import GroupAssembler, StalledError


def rows(groups: int, torn: int = 0) -> list:
    """Batches of one row: groups of two rollouts of two segments, and `torn` groups with half a rollout."""
    lines = [Line(g, 2 * g + r, s, s == 1) for g in range(groups) for s in (0, 1) for r in (0, 1)]
    lines += [Line(100 + g, 200 + g, 0, False) for g in range(torn)]
    return [batch_of_lines([line], number) for number, line in enumerate(lines)]


def numbers(batches) -> list[list[int]]:
    return [batch["number"].tolist() for batch in batches]


def test_complete_groups_come_out_and_incomplete_ones_are_counted():
    assembler = GroupAssembler(groups=2)
    batches = numbers(assembled(rows(5, torn=3), assembler))
    assert [len(batch) for batch in batches] == [8, 8, 4]
    assert batches[0] == [0, 2, 1, 3, 4, 6, 5, 7]
    assert (assembler.counts["unfinished"], assembler.held) == (3, 0)


def test_leftovers_are_dropped_and_only_refused_if_there_are_some():
    assembler = GroupAssembler(groups=2)
    assert len(list(assembled(rows(5), assembler, leftovers="drop"))) == 2
    assert assembler.counts["unfinished"] == 4
    assert len(list(assembled(rows(4), GroupAssembler(groups=2), leftovers="raise"))) == 2


def test_a_source_without_a_complete_group_raises_with_its_rows():
    with pytest.raises(StalledError, match=r"ended, and no group became whole.*group 100 has 0 of 2.*2 held"):
        list(assembled(rows(0, torn=2), GroupAssembler()))


def test_a_source_that_only_yields_none_raises():
    def source():
        yield from rows(1)
        while True:
            yield None

    with pytest.raises(StalledError, match="the last 7 puts have made no group whole"):
        list(assembled(source(), GroupAssembler(max_idle=7)))


def test_with_patience_none_counts_as_silence():
    def source(silent: int):
        for row in rows(2):
            yield from [None] * 150  # more puts than `max_idle` allows
            yield row
        for _ in range(silent):
            time.sleep(0.01)
            yield None
        assert not silent, "it was asked on"

    assembler = GroupAssembler(timeout=20)
    assert len(list(assembled(source(0), assembler, patience=60))) == 2
    assert sum(assembler.counts.values()) == 0
    with pytest.raises(StalledError, match=r"silent for 0.2 s"):
        list(assembled(source(300), GroupAssembler(), patience=0.2))


def test_timeouts_apply_while_the_source_yields_none():
    def source():
        yield rows(1)[0]
        yield rows(1)[2]
        while True:
            time.sleep(0.01)
            yield None

    assembler = GroupAssembler(timeout_seconds=0.05, on_timeout="keep", min_rollouts=1)
    assert numbers([next(iter(assembled(source(), assembler, patience=60)))]) == [[0, 2]]


def test_a_silent_source_raises_in_bounded_time():
    never = Event()

    def source():
        yield from rows(1, torn=1)
        never.wait()

    stream = iter(assembled(source(), GroupAssembler(), patience=0.2))
    assert len(next(stream)) == 4
    with pytest.raises(StalledError, match=r"silent for 0.2 s.*group 100 has 0 of 2 \(1 unfinished\)"):
        next(stream)
    never.set()


class InStep:
    """A source whose batches have rows of both its workers, which hang after the batches in `sent`."""

    procs, num_workers = (), 2

    def __init__(self, never: Event, *sent: int):
        self.never, self.queue_out = never, Queue()
        for worker in sent:
            self.queue_out.put(((None, worker), 0))

    def __iter__(self):
        while not self.queue_out.queue.empty():
            self.queue_out.get()
        self.never.wait()
        yield None


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"worker_patience": 0.06}, "0.06"),
        ({"patience": 0.06}, "0.06"),
        ({"patience": 9.0, "worker_patience": 0.06}, "0.06"),
        ({"patience": 0.06, "worker_patience": 9.0}, "0.06"),
    ],
)
@pytest.mark.parametrize(("sent", "lacks"), [((1, 0, 1), "worker 0"), ((), "worker 0, worker 1")])
def test_a_source_of_rows_of_all_workers_has_the_lower_of_both_limits(options, seconds, sent, lacks):
    never = Event()
    with pytest.raises(StalledError) as caught:
        list(assembled(InStep(never, *sent), GroupAssembler(), **options))
    never.set()
    assert str(caught.value).startswith(
        f"The source has been silent for {seconds} s: no rows of {lacks}. The errors of its workers are on "
        "stderr, above. Waiting: no group. Rows: none arrived. No prompt"
    )


def test_patience_changes_no_batch_and_passes_errors_on():
    read = []

    def source():
        for number, row in enumerate(rows(4)):
            read.append(number)
            yield row
        raise RuntimeError("a worker died")

    stream = iter(assembled(source(), GroupAssembler(groups=2), patience=60))
    first = next(stream)
    assert read == list(range(8))
    second = next(stream)
    with pytest.raises(RuntimeError, match="a worker died"):
        next(stream)
    assert numbers([first, second]) == numbers(assembled(rows(4), GroupAssembler(groups=2)))


def test_late_rows_survive_the_stall_error():
    may_go_on = Event()

    def source():
        for number, row in enumerate(rows(2)):
            if number == 5:
                may_go_on.wait()
            yield row

    stream, got = assembled(source(), GroupAssembler(), patience=0.2), []
    with pytest.raises(StalledError, match=r"silent for 0.2 s"):
        got += list(stream)
    may_go_on.set()
    got += list(stream)
    assert sorted(number for batch in got for number in batch["number"].tolist()) == list(range(4, 8))
    assert sum(stream.assembler.counts.values()) == 0


class Resettable:
    """A source with a state, and an environment with transforms. It counts its resets."""

    def __init__(self, *transforms):
        self.env, self.resets = SimpleNamespace(transform=SimpleNamespace(transforms=transforms)), 0

    def __iter__(self):
        return iter(())

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def reset(self):
        self.resets += 1


@pytest.mark.parametrize("needs", [[], [{}], [{}, {"needs_reset": False}], [{"needs_reset": True}, {}]])
def test_a_source_is_reset_with_a_state_if_a_transform_of_its_environment_needs_it(needs):
    source = Resettable(*(SimpleNamespace(**each) for each in needs))
    stream = assembled(source, GroupAssembler())
    stream.load_state_dict(stream.state_dict())
    assert source.resets == ({"needs_reset": True} in needs)
