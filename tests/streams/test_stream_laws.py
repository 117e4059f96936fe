"""Laws of streams: any order of arrival, and a loop that continues under any limit."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from assembly import Line, batch_of_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from headrace.pipeline import RepeatSampler, assembled, informative, paced
from headrace.transforms import BatchError, GroupAssembler, StalledError
from headrace.transforms.streams import Intervals

FAILED = 3


# -- closed ids -----------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("+-u"), st.lists(st.integers(-3, 12), min_size=1, max_size=5))))
def test_intervals_are_a_set_of_integers(events):
    """The reference is a Python set. Neighbouring ids are always in one interval."""
    found, expected = Intervals(), set[int]()
    for kind, numbers in events:
        if kind == "u":
            found.update(numbers)
            expected |= {*numbers}
        elif kind == "+":
            found.add(numbers[0])
            expected.add(numbers[0])
        else:
            found.remove(numbers[0])
            expected.discard(numbers[0])
        pairs = found.to_tensor().tolist()
        assert [number for first, last in pairs for number in range(first, last + 1)] == sorted(expected)
        assert all(last + 1 < first for (_, last), (first, _) in itertools.pairwise(pairs))
        found = Intervals(found.to_tensor())
        assert {number for number in range(-5, 15) if number in found} == expected
    found.update([])
    assert found.to_tensor().tolist() == Intervals(found.to_tensor()).to_tensor().tolist()


# -- any order of arrival -------------------------------------------------------------------------------


def lines_of(rng: random.Random, groups: int, repeated: bool) -> list[Line]:
    """Groups of two to four rollouts of one to three segments. Some rollouts fail at a segment."""
    lines = []
    for group in range(groups):
        size = rng.randint(2, 4)
        for number in range(size):
            segments, fails = rng.randint(1, 3), rng.random() < 0.3
            rollout = [
                Line(group, 9 * group + number, s, s == segments - 1, expected=size) for s in range(segments)
            ]
            if fails:
                at = rng.randrange(segments)
                rollout[at] = rollout[at]._replace(status=FAILED)
            lines += rollout
            if repeated and rng.random() < 0.3:
                lines.append(rng.choice(rollout))
    return lines


def arrive(
    lines: list[Line], rng: random.Random, takes: bool, resumes: bool = False, **options
) -> tuple[dict[int, list[tuple[int, int]]], Counter]:
    """Put the rows in pieces and take groups. Return the groups and the counts of the assembler."""
    options = {"segment_key": "segment", "on_duplicate": "drop", "max_idle": 10**6, **options}
    assembler, groups, left = GroupAssembler(**options), {}, list(lines)
    while left or assembler.ready:
        if left:
            size = rng.randint(1, 4)
            assembler.put(batch_of_lines(left[:size]))
            left = left[size:]
        if resumes:
            state, assembler = assembler.state_dict(), GroupAssembler(**options)
            assembler.load_state_dict(state)
        if takes or not left:
            while (batch := assembler.take()) is not None:
                for row in batch.unbind(0):
                    place = (int(row["rollout_id"]), int(row["segment"]))
                    groups.setdefault(int(row["group_id"]), []).append(place)
    return groups, Counter({reason: number for reason, number in assembler.counts.items() if number})


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**9),
    on_failure=st.sampled_from(["drop", "keep"]),
    timeout=st.sampled_from([None, 10**6]),
    takes=st.booleans(),
    rows=st.sampled_from(["numbered", "numbered and repeated", "in order"]),
    surplus=st.sampled_from([None, "drop", lambda rewards, k: torch.arange(k)]),
    late=st.sampled_from(["drop", "raise"]),
)
def test_row_order_changes_no_group_and_no_count(seed, on_failure, timeout, takes, rows, surplus, late):
    """Rows without segment numbers keep their order within the rollout."""
    rng = random.Random(seed)
    lines = lines_of(rng, rng.randint(1, 3), repeated="repeated" in rows and not surplus)
    options = {"on_failure": on_failure, "timeout": timeout, "on_late": late}
    options |= {"min_rollouts": 2} if on_failure == "keep" else {}
    options |= {"segment_key": None} if rows == "in order" else {}
    options |= {"group_size": 2, "on_surplus": surplus} if surplus else {}
    found = []
    for order in range(3):
        rng.shuffle(lines)
        if rows == "in order":
            places = [line.rollout for line in lines]
            left = {line.rollout: [] for line in lines}
            for line in sorted(lines, key=lambda line: line.segment):
                left[line.rollout].append(line)
            lines = [left[rollout].pop(0) for rollout in places]
        groups, counts = arrive(lines, rng, takes, order == seed % 3, **options)
        if surplus == "drop":  # the order decides whose rows are surplus
            groups, counts = sorted(groups), counts["failed"]
        found.append((groups, counts))
    assert found[0] == found[1] == found[2]


def test_a_repeated_row_is_refused_in_every_order_even_after_its_group():
    lines = [Line(0, 0, 0, True), Line(0, 1, 0, False), Line(0, 1, 0, False), Line(0, 1, 1, False, FAILED)]
    for order in itertools.permutations(lines):
        with pytest.raises(BatchError, match=r"found again segment 0 of rollout 1"):
            arrive(list(order), random.Random(0), True, on_duplicate="raise")


def put_all(assembler: GroupAssembler, pieces: list[TensorDict]) -> None:
    for piece in pieces:
        assembler.put(piece)


def test_segments_with_their_own_end_may_come_in_any_order():
    """A rollout has two parts, of two rows and of one row."""
    lines = [
        Line(0, 0, 0, False, expected=1),
        Line(0, 0, 1, True, expected=1),
        Line(0, 0, 2, True, expected=1),
    ]
    for order in itertools.permutations(lines):
        assembler = GroupAssembler(segment_key="segment")
        for line in order:
            assert assembler.take() is None
            assembler.put(batch_of_lines([line]).set("expected_segments", torch.tensor([2])))
        assert assembler.take()["segment"].tolist() == [0, 1, 2]
    behind = [*lines[1:], Line(0, 0, 3, False, expected=1)]
    for order in itertools.permutations(behind):
        assembler = GroupAssembler(segment_key="segment")
        pieces = [batch_of_lines([line]).set("expected_segments", torch.tensor([2])) for line in order]
        with pytest.raises(BatchError, match=r"segment 3 of rollout 0, which ends with 2"):
            put_all(assembler, pieces)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**9), least=st.integers(1, 4), fallback=st.sampled_from(["drop", "refill", "keep"])
)
def test_refills_do_not_depend_on_order_and_a_minimum_is_kept_if_they_fail(seed, least, fallback):
    """The reference is a loop that requests rollouts while too few are left, up to a limit."""
    rng = random.Random(seed)
    fails = [[rng.random() < 0.5 for _ in range(4)] for _ in range(3)]  # by round and rollout
    good, asked, rounds = fails[0].count(False), [], 0
    floor = {"drop": 4, "refill": 4, "keep": least}[fallback]
    while good < floor and rounds < 2:
        rounds += 1
        asked.append(4 - good)
        good += fails[rounds][: asked[-1]].count(False)
    kept = good if good >= (4 if fallback == "drop" else least) else 0
    for _ in range(2):
        found, jobs = [], []
        ids = itertools.count()

        def dispatch(group, number, ids=ids, jobs=jobs, found=found):
            if group is not None:
                found.append(number)
            for failed in fails[len(found)][:number]:
                rollout = next(ids)
                jobs.append(Line(0, rollout, 0, False, FAILED if failed else 0, expected=4))
                jobs.append(Line(0, rollout, 1, True, expected=4))

        options = {} if fallback == "drop" else {"min_rollouts": least}
        assembler = GroupAssembler(
            segment_key="segment",
            on_failure="keep" if fallback == "keep" else "refill",
            refill=dispatch,
            max_refills=2,
            **options,
        )
        dispatch(None, 4)
        while jobs:
            assembler.put(batch_of_lines([jobs.pop(rng.randrange(len(jobs)))]))
        batch = assembler.take()
        assert (found, 0 if batch is None else len(batch) // 2) == (asked, kept)
        assert assembler.counts["failed"] == 2 * (4 + sum(asked) - kept)
        assert (assembler.held, assembler.pending) == (0, 0)


# -- dispatched again ------------------------------------------------------------------------------------


def test_the_version_never_gets_smaller_except_right_after_a_restart(tmp_path):
    """A version that goes back by mistake would make good rows stale, or rows of the policy "newer"."""
    assembler = GroupAssembler(group_size=2, max_staleness=1, journal=tmp_path / "rows")
    assembler.version = np.int64(3)
    assembler.version = 3
    for wrong in (2, 0, 3.5, "4", None):
        said = f"it is 3, and got {wrong!r}. To go on with older weights, load the state that was saved"
        with pytest.raises(ValueError, match=re.escape(said)):
            assembler.version = wrong
    assembler.put(batch_of_lines([Line(0, r, 0, True, version=3) for r in (0, 1)]))
    assert assembler.take()["rollout_id"].tolist() == [0, 1]
    assembler.commit(4)
    assembler.version = 5
    assembler.put(batch_of_lines([Line(1, r, 0, True, version=5) for r in (2, 3)]))
    del assembler
    again = GroupAssembler(group_size=2, max_staleness=1, journal=tmp_path / "rows")
    again.version = 2  # the weights are older than the journal
    again.version = 3
    again.commit(4, emitted=1)
    assert again.take() is None  # its rows were of version 5, which is lost
    with pytest.raises(ValueError, match="it is 3, and got 2"):
        again.version = 2


def test_a_stale_group_is_dispatched_again_and_its_old_rows_stay_stale():
    asked = []
    options = {"max_staleness": 0, "on_stale": "refill", "refill": lambda *what: asked.append(what)}
    assembler = GroupAssembler(**options)

    def send(*rollouts: int, version: int) -> None:
        assembler.put(batch_of_lines([Line(0, r, 0, True, version=version) for r in rollouts]))

    send(0, 1, version=0)
    assembler.version = 1
    assert assembler.take() is None
    assert (asked, assembler.counts["stale"], assembler.pending, assembler.held) == ([(0, 2)], 2, 1, 0)
    assert "Waiting: group 0 has 0 of 4" in str(assembler.stalled("It waits"))
    with pytest.raises(BatchError, match="found again rollout 1"):
        send(1, version=1)
    state, assembler = assembler.state_dict(), GroupAssembler(**options)
    assembler.load_state_dict(state)
    send(2, version=1)
    assert assembler.take() is None
    send(3, version=1)
    assert assembler.take()["rollout_id"].tolist() == [2, 3]
    again = GroupAssembler(**options)
    for version in (0, 1):
        again.version = version
        again.put(batch_of_lines([Line(5, 2 * version + r, 0, True, version=version) for r in (0, 1)]))
        again.version = version + 1
        assert again.take() is None
    assert (asked[1:], again.counts["stale"], again.pending) == ([(5, 2)], 4, 0)


def test_surplus_rollouts_stay_surplus_if_their_group_is_dispatched_again():
    """Rollout 2 is surplus. Its three rows come before, while and after its group waits again."""
    options = {
        "max_staleness": 0,
        "on_stale": "refill",
        "refill": lambda *what: None,
        "segment_key": "segment",
    }
    for failed in (None, 0, 1, 2):
        rows = [Line(0, 2, s, s == 2, FAILED * (s == failed), expected=3) for s in range(3)]
        assembler = GroupAssembler(group_size=2, **options)
        assembler.put(batch_of_lines([*(Line(0, r, 0, True, expected=3) for r in (0, 1)), rows[0]]))
        assembler.version = 1
        assert assembler.take() is None
        assembler.put(batch_of_lines([rows[1]]))
        assembler.put(batch_of_lines([Line(0, r, 0, True, version=1, expected=3) for r in (5, 6)]))
        assert assembler.take()["rollout_id"].tolist() == [5, 6]
        assembler.put(batch_of_lines([rows[2]]))
        counts = {reason: number for reason, number in assembler.counts.items() if number}
        assert counts == {"stale": 2, "surplus" if failed is None else "failed": 3}


def test_all_groups_are_refilled_though_one_request_raises():
    asked = []

    def refill(group, missing):
        asked.append(group)
        raise OSError(f"no worker for {group}")

    assembler = GroupAssembler(on_failure="refill", refill=refill)
    with pytest.raises(OSError, match="no worker for 0"):
        assembler.put(batch_of_lines([Line(g, 2 * g + r, 0, True, FAILED) for g in (0, 1) for r in (0, 1)]))
    assert (asked, assembler.pending) == ([0, 1], 2)


# -- paced and informative ---------------------------------------------------------------------------------


class Workers:
    """A source of rollouts that run concurrently and end in any order. Rows have the dispatch's version."""

    def __init__(
        self, assembler: GroupAssembler, draw_size: int, share: float, seed: int, fails: float = 0.0
    ):
        self.assembler, self.share, self.fails, self.rng = assembler, share, fails, random.Random(seed)
        self.draw_size = draw_size
        sampler = RepeatSampler(9600, group_size=2, prompts_per_batch=draw_size)
        self.draws = paced(sampler.draws(), assembler, patience=0.2)
        self.running: list[TensorDict] = []
        self.most = 0

    def __iter__(self):
        while True:
            # If nothing is running there must be room, or the loop would stop.
            if not self.running or (self.rng.random() < 0.5 and self.assembler.capacity(2) >= self.draw_size):
                self.dispatch(next(self.draws))
            yield self.running.pop(self.rng.randrange(len(self.running)))

    def dispatch(self, draw: TensorDict) -> None:
        rows = len(draw)
        self.most = max(self.most, len(self.running) + rows)
        flat = {group: self.rng.random() < self.share for group in draw["group_id"].unique().tolist()}
        rewards = [
            0.0 if flat[g] else float(r % 2)
            for g, r in zip(draw["group_id"].tolist(), draw["rollout_id"].tolist(), strict=True)
        ]
        draw = draw.clone()
        draw["next", "done"] = torch.ones(rows, dtype=torch.bool)
        draw["next", "reward"] = torch.tensor(rewards)
        draw["next", "status"] = torch.tensor(
            [FAILED * (self.rng.random() < self.fails) for _ in range(rows)]
        )
        draw["next", "policy_version"] = torch.full((rows,), self.assembler.version)
        self.running += draw.split(1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no group may take longer")
@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**9),
    share=st.sampled_from([0.0, 0.5, 0.8]),
    max_staleness=st.integers(0, 2),
    groups=st.integers(1, 4),
    draw_size=st.integers(1, 5),
    concurrent=st.sampled_from([None, 2, 5]),
    fails=st.sampled_from([0.0, 0.2]),
)
def test_paced_and_informative_continue_for_any_share_and_limit(
    seed, share, max_staleness, groups, draw_size, concurrent, fails
):
    """No batch is too stale. A group that ends after later groups may be dropped and counted."""
    assembler = GroupAssembler(
        groups=groups, max_staleness=max_staleness, max_concurrent_rollouts=concurrent, max_idle=10**6
    )
    workers = Workers(assembler, draw_size, share, seed, fails)
    stream = informative(assembled(workers, assembler), groups=groups, max_batches=1000)
    for step, batch in zip(range(4), stream, strict=False):
        versions = batch["next", "policy_version"]
        assert len(batch["group_id"].unique()) == groups
        assert step - max_staleness <= int(versions.min())
        assert int(versions.max()) <= step
        for group in batch["group_id"].unique():
            assert len(batch["next", "reward"][batch["group_id"] == group].unique()) == 2
        state = stream.state_dict()  # the state includes the rejected groups
        room = assembler.capacity(2)
        stream.load_state_dict(state)
        assert assembler.capacity(2) == room
        assembler.version += 1
    else:
        assert assembler.version == 4
    assert workers.most <= (concurrent or 10**6)


def test_an_assembler_behind_another_generator_and_another_group_count_are_refused():
    assembler = GroupAssembler(groups=2, max_staleness=0)
    through = (batch for batch in assembled(Workers(assembler, 3, 0.5, 1), assembler))
    for _, batch in zip(range(4), informative(through, groups=2, assembler=assembler), strict=False):
        assert len(batch) == 4
        assembler.version += 1
    assert assembler.version == 4
    with pytest.raises(
        ValueError, match=r"the same number of groups.*got groups=3 and GroupAssembler\(groups=2\)"
    ):
        informative(assembled([], assembler), groups=3)


@pytest.mark.slow
def test_a_dispatch_waits_for_capacity_and_raises_in_time_without_any():
    assembler = GroupAssembler(groups=1, max_staleness=0)
    draws = paced(RepeatSampler(4, group_size=2).draws(), assembler, patience=60)
    rows = next(draws)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, draws)
        version = torch.zeros(2, dtype=torch.int64)
        rows = rows.set(("next", "done"), version == 0).set(("next", "policy_version"), version)
        assembler.put(rows)
        assert len(assembler.take()) == 2
        assembler.version += 1
        assert waiting.result(60)["group_id"].tolist() == [1, 1]
    assembler = GroupAssembler(groups=1, max_staleness=0)
    draws = paced(RepeatSampler(4, group_size=2).draws(), assembler, patience=0.1)
    next(draws)
    with pytest.raises(StalledError, match=r"No capacity to dispatch 1 group for 0.1 s.*group 0 has 0 of 2"):
        next(draws)
    with pytest.raises(ValueError, match="finite and > 0"):
        paced([], assembler, patience=-1)


def test_a_dispatch_without_rows_is_passed_on():
    draw = next(iter(RepeatSampler(9, group_size=2, prompts_per_batch=3).draws()))
    parts = list(paced([draw[:0], draw], GroupAssembler(groups=3, max_staleness=0), patience=1))
    assert [len(part) for part in parts] == [0, 6]


def test_capacity_is_the_least_of_all_limits():
    assembler = GroupAssembler(max_concurrent_rollouts=7, max_pending_groups=3)
    assert (assembler.capacity(), assembler.capacity(2), assembler.capacity(3)) == (3, 3, 2)
    draw = next(iter(RepeatSampler(9, group_size=3).draws()))[:3]
    assembler.announce(draw)
    assert assembler.capacity(3) == 1
    assembler.put(draw[:2].set(("next", "done"), torch.ones(2, dtype=torch.bool)))
    assert (assembler.capacity(2), assembler.capacity(3), assembler.pending) == (2, 2, 1)
    with pytest.raises(ValueError, match=r"at least the rollouts of a group \(8\); got 7"):
        assembler.capacity(8)


# -- versions are not counted ------------------------------------------------------------------------------


@pytest.mark.parametrize("on_stale", ["drop", "mask"])
def test_rows_of_a_later_version_are_refused_or_wait_for_it(on_stale):
    rows = batch_of_lines([Line(g, 2 * g + r, 0, True, version=50 * g) for g in (0, 1) for r in (0, 1)])
    refusing = GroupAssembler(max_staleness=1, on_stale=on_stale)
    with pytest.raises(BatchError, match=r"newer than assembler.version=0; found 50 in group 1\..*set"):
        refusing.put(rows)
    assert refusing.held == 0
    GroupAssembler().put(rows)  # without a limit, versions are not read
    waiting = GroupAssembler(max_staleness=1, on_stale=on_stale, on_newer="wait", max_idle=5)
    waiting.put(rows)
    assert waiting.take()["group_id"].tolist() == [0, 0]
    assert (waiting.take(), waiting.ready) == (None, 1)
    state, again = waiting.state_dict(), GroupAssembler(max_staleness=1, on_stale=on_stale, on_newer="wait")
    again.load_state_dict(state)
    again.version = 50
    assert again.take()["group_id"].tolist() == [1, 1]
    ending = assembled(rows.split(4), GroupAssembler(max_staleness=0, on_newer="wait"))
    with pytest.raises(
        StalledError, match=r"1 whole group of policy versions newer than assembler.version=0"
    ):
        list(ending)


@pytest.mark.torchrl
def test_rows_later_than_a_samplers_version_are_refused_under_a_limit():
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.data.replay_buffers.samplers import StalenessAwareSampler

    from headrace.pipeline import GroupUnit

    for limit, refused in ((-1, False), (1, True)):
        sampler = StalenessAwareSampler(max_staleness=limit, version_key="version")
        options = {"sampler": sampler, "sample_unit": GroupUnit(), "batch_size": 2}
        buffer = ReplayBuffer(storage=LazyTensorStorage(9), **options)
        rows = batch_of_lines([Line(0, r, 0, True) for r in (0, 1)]).exclude("text")
        buffer.extend(rows.set("version", torch.tensor([50, 50])))
        with (
            pytest.raises(BatchError, match=r"consumer_version=0; found 50\. Call")
            if refused
            else nullcontext()
        ):
            buffer.sample()
        sampler.consumer_version = 50
        assert len(buffer.sample()) == 2
