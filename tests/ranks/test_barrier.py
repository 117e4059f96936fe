"""Ranks that share a batch raise its errors together and in time."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from any_rank import PATIENCE, lose_a_rank, refuse_together, results_of
from rank_threads import on_ranks

from headrace.transforms import BatchError
from headrace.transforms.ranks import Ranks, barrier
from headrace.transforms.ranks.barrier import Barrier, describe_difference
from headrace.transforms.table import OtherRankError

REFUSED = {
    "gate": r"stage 'gate', .*1 incomplete group: group \d+ has 3 of 4",
    "rule": r"stage 'collapse', .*every reward must be finite; found nan at row \d+",
    "column": r"ranks must have the same columns, with equal dtypes and shapes; rank 1 lacks group_id",
    "dtype": r"ranks must have the same columns, .*rank 1 has others in \('next', 'reward'\)",
    "stage": r"stage 'own', fails: the reward model is gone",
    "last rule": r"stage 'filter', .*every row needs a group_id ≥ 0; found -1 at row \d+",
    "criterion": r"stage 'filter', .*the reward model is gone",
    "hung": rf"rank 1 did not come to a batch within {PATIENCE:g} s .*All ranks discard this batch",
    "hung again": rf"rank 1 did not come to a batch within {PATIENCE:g} s",
    "skipped": r"rank 1 did not come to a batch within",
    "options": r"ranks must do the same with a batch: rank \d has advantage: .*, rank \d has advantage: ",
    "epochs": r"ranks must do the same with a batch: rank \d has epochs=\d, rank \d has epochs=\d",
    "ids": r"group_id .* on more than one rank: set pipeline.shared_ids=same",
    "torn": r"groups .* have rows on more than one rank. Each rank cuts its own minibatches",
    "carried": r"stage 'split', .*rows of groups \[\d+\] were carried over, and the batch has the same",
}


@pytest.mark.slow
def test_an_error_on_one_rank_is_raised_on_all_with_its_text_in_time(tmp_path):
    """Afterwards all ranks are at the same batch, and no rank has kept the state of a refused batch."""
    world = 3
    for rank, (steps, draws) in enumerate(results_of(refuse_together, world, tmp_path)):
        found = {name: said for name, said, _ in steps}
        for name, _, seconds in steps:
            if name not in REFUSED:
                continue
            assert isinstance(found[name], str), name
            assert re.search(REFUSED[name], found[name].replace("\n", " ")), found[name]
            assert seconds < 2 * PATIENCE, name
        assert REFUSED.keys() <= found.keys()
        well = [name for name in found if name.startswith(("well", "after"))]
        assert [found[name] for name in well] == [len(torch.arange(20).tensor_split(world)[rank])] * 9
        assert found["no rows at all"] == 0
        assert found["no rows"] == found["no rows to score"] == (20 if rank == 0 else 0)
        assert found["all dropped"] == (16 if rank == 0 else 0)
        assert found["resumed"] == (20 if rank == 0 else 0)
        assert draws == 9


@pytest.mark.slow
def test_the_other_ranks_name_a_rank_whose_process_ended(tmp_path):
    world = 3
    for said, seconds in results_of(lose_a_rank, world, tmp_path, tmp_path)[: world - 1]:
        assert re.search(rf"rank 2 did not come to .* within {PATIENCE:g} s", said)
        assert seconds < 3 * PATIENCE


def test_a_rank_that_cannot_reach_the_others_raises_its_own_error():
    """Rank 0 may already have ended, and the store with it."""

    class Alone:
        rank, refused, group = 1, False, object()

        def meet(self, error=None):
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(BatchError, match="group 7"), Ranks.block(Alone()):
        raise BatchError("group 7")


def said(meet, *words) -> str:
    """The error of a meeting; empty if all ranks continue."""
    try:
        meet(*words)
    except OtherRankError as err:
        return str(err)
    return ""


@pytest.mark.parametrize(
    ("theirs", "mine", "difference"),
    [
        ("a batch\nx", "the end\nx", "be at the same place: rank 0 is at a batch, rank 2 at the end"),
        (
            "a batch\n x=1\ny=1",
            "a batch\n x=2\ny=2",
            "do the same with a batch: rank 0 has x=1, rank 2 has x=2",
        ),
        (
            "a batch\nx=1\ny=1",
            "a batch\nx=1\n y=2",
            "do the same with a batch: rank 0 has y=1, rank 2 has y=2",
        ),
        ("a batch\nx\ny", "a batch\nx", "do the same with a batch: rank 0 has 3 lines, rank 2 has 2 lines"),
    ],
)
def test_the_first_difference_of_two_ranks_is_named(theirs, mine, difference):
    assert describe_difference("rank 0", theirs, "rank 2", mine) == f"ranks must {difference}"


def test_ranks_that_are_about_to_do_different_things_are_all_refused_and_then_go_on():
    def meet(group):
        own = Barrier(group, 9.0)
        return [said(own.meet, about) for about in (f"a batch\neps={group.rank % 2}", "a batch\nsame")]

    texts = {refused for refused, _ in on_ranks(meet, 3)}
    assert len(texts) == 1
    words = r"ranks must do the same with a batch: rank (\d) has eps=(\d), rank (\d) has eps=(\d)"
    first, one, other, two = map(int, re.fullmatch(words, texts.pop()).groups())
    assert (one, two) == (first % 2, other % 2)
    assert one != two
    assert [after for _, after in on_ranks(meet, 3)] == [""] * 3


class InStep:
    """Each rank's own clock. Before the first decision, a sleep ends when all of `count` ranks sleep."""

    def __init__(self, count: int):
        self._asleep, self._own = threading.Barrier(count), threading.local()
        self.is_decided: Callable[[], bool]

    def monotonic(self) -> float:
        return getattr(self._own, "now", 0.0)

    def sleep(self, seconds: float) -> None:
        self._own.now = self.monotonic() + seconds
        if self.is_decided():
            time.sleep(seconds)
        else:
            self._asleep.wait(20.0)


@pytest.mark.parametrize(("late", "absent"), [((2,), "rank 2"), ((0,), "rank 0"), ((1, 2), "rank 1, rank 2")])
def test_a_rank_that_comes_too_late_is_named_and_finds_the_decision(late, absent, caplog, monkeypatch):
    """The others leave after their patience, and no later. They log once that they wait."""
    clock, patience = InStep(3 - len(late)), 0.0
    while patience < 90:  # in the end, a time at which the others look at the clock
        patience += min(max(patience / 10, 1e-4), 0.1)
    monkeypatch.setattr(barrier, "time", clock)

    def meet(group):
        clock.is_decided = functools.partial(group.get_group_store().check, ["headrace/1/decision"])
        while group.rank in late and not clock.is_decided():
            time.sleep(0.001)
        own = Barrier(group, patience)
        text, waited = said(own.meet, "a batch\nx"), clock.monotonic()
        return text, waited, said(own.meet, "the next\nx")

    found = on_ranks(meet, 3)
    assert [text for text, *_ in found] == [
        f"{absent} did not come to a batch within {patience:g} s (pipeline.patience). Check for a rank that "
        "hangs or has fewer batches. All ranks discard this batch"
    ] * 3
    for rank, (_, seconds, after) in enumerate(found):
        assert seconds < barrier.LAST if rank in late else patience < seconds < patience + 0.2 + barrier.LAST
        assert not after
    waited = [
        f"rank {rank} has waited 30 s for {absent} to come to a batch; patience is {patience:g} s"
        for rank in range(3)
        if rank not in late
    ]
    assert sorted(caplog.messages) == waited
    assert {each.levelname for each in caplog.records} == {"WARNING"}


def test_the_error_of_one_rank_is_raised_on_all_and_is_no_longer_than_the_limit():
    def meet(group):
        return said(Barrier(group, 9.0).meet, "a batch", ValueError("x" * 9000) if group.rank == 1 else None)

    assert on_ranks(meet, 3) == ["rank 1: " + "x" * (barrier.LONGEST - 8)] * 3


def test_barriers_leave_no_more_keys_than_the_last_one_needs():
    def meet(group, times):
        own = Barrier(group, 9.0)
        for number in range(times):
            own.meet(f"batch {number}")
        return group.get_group_store()

    assert [on_ranks(meet, 2, times)[0].num_keys() for times in (1, 2, 9)] == [5, 5, 5]


def test_the_rank_with_an_error_raises_it_and_the_others_name_the_rank():
    """If an error was raised by a barrier, no rank waits for the others again."""

    def share(group, failing):
        ranks, found = Ranks(group, patience=9.0), []
        for number in range(3):
            ranks.refused = False
            try:
                with ranks.block():
                    ranks.place = f"batch {number}"
                    if number == 1:
                        ranks.meet(f"options of rank {group.rank}")
                    if number == 0 and group.rank in failing:
                        raise RuntimeError(f"no reward on {group.rank}")
            except (RuntimeError, OtherRankError) as err:
                found.append(f"{type(err).__name__}: {err}")
        return found

    for rank, (own, differs) in enumerate(on_ranks(share, 3, [1])):
        assert own == (
            "RuntimeError: no reward on 1" if rank == 1 else "OtherRankError: rank 1: no reward on 1"
        )
        assert differs.startswith("OtherRankError: ranks must do the same with batch 1: rank")
    several = [own for own, _ in on_ranks(share, 3, [0, 1, 2])]
    first = next(rank for rank, own in enumerate(several) if own.startswith("RuntimeError"))
    assert several == [
        f"RuntimeError: no reward on {rank}"
        if rank == first
        else f"OtherRankError: rank {first}: no reward on {first}"
        for rank in range(3)
    ]


class Leaving:
    """A store that calls a function before its rank leaves a refused barrier, and another one afterwards."""

    def __init__(self, group, before, after=bool):
        self.store, self.before, self.after = group.get_group_store(), before, after
        group.get_group_store = lambda: self

    def __getattr__(self, name):
        return getattr(self.store, name)

    def add(self, key, number):
        leaves = key.endswith("/left") and number
        if leaves:
            self.before()
        found = self.store.add(key, number)
        if leaves:
            self.after()
        return found


class Stopped:
    """A clock on which no time passes. It knows how long each thread sleeps, and may call a function then."""

    def __init__(self):
        self.slept, self.called = {}, {}

    def monotonic(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        own = threading.get_ident()
        self.slept.setdefault(own, []).append(seconds)
        self.called.get(own, functools.partial(time.sleep, 0.001))()


def test_rank_0_looks_every_hundredth_second_until_all_ranks_that_came_have_read_the_error(monkeypatch):
    """Its process may hold the store, which they read. Rank 1 leaves at its second look, 2 at the next."""
    turns, left, clock = {1: threading.Event(), 2: threading.Event()}, threading.Barrier(2), Stopped()
    monkeypatch.setattr(barrier, "time", clock)

    def look():
        rank = len(clock.slept[threading.get_ident()]) - 1
        if rank in turns:
            turns[rank].set()
            left.wait(20.0)

    def meet(group):
        store, own = group.get_group_store(), threading.get_ident()
        if group.rank:
            Leaving(group, lambda: turns[group.rank].wait(20.0), lambda: left.wait(20.0))
        else:
            clock.called[own] = look
            while not store.check(["headrace/1", "headrace/2"]):  # the others have come
                time.sleep(0.005)
        return said(Barrier(group, 9.0).meet, "a batch", None if group.rank else ValueError("mine")), own

    found = on_ranks(meet, 3)
    assert [text for text, _ in found] == ["rank 0: mine"] * 3
    assert clock.slept[found[0][1]] == [0.01] * 3


def test_the_other_ranks_leave_a_refused_barrier_at_once(monkeypatch):
    """Rank 0 leaves after rank 1, which does not wait for it."""
    gone, clock = threading.Event(), Stopped()
    monkeypatch.setattr(barrier, "time", clock)

    def meet(group):
        own = threading.get_ident()
        clock.called[own] = gone.set if group.rank else functools.partial(time.sleep, 0.001)
        if group.rank == 0:
            Leaving(group, lambda: gone.wait(20.0))
        text = said(Barrier(group, 9.0).meet, "a batch", ValueError("mine") if group.rank else None)
        if group.rank:
            gone.set()
        return text, own

    found = on_ranks(meet, 2)
    assert [text for text, _ in found] == ["rank 1: mine"] * 2
    assert found[1][1] not in clock.slept
