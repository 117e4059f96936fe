"""Rollouts that lost rows are never trained. They are counted as soon as a later row shows the loss."""

from __future__ import annotations

import itertools
import math
import random
import warnings

import pytest
import torch
from fleets import Fleet, Sent
from saving import as_saved
from tensordict import TensorDict

from headrace.transforms import BatchError, GroupAssembler, IncompleteGroupsError, Status, StreamWarning


def in_pieces(rows: list[Sent], rng: random.Random) -> list[list[Sent]]:
    pieces, rows = [], list(rows)
    while rows:
        size = rng.randint(1, 5)
        pieces.append(rows[:size])
        rows = rows[size:]
    return pieces


def resumed(assembler: GroupAssembler) -> GroupAssembler:
    again = GroupAssembler(max_idle=10**6)
    again.load_state_dict(as_saved(assembler.state_dict()))
    return again


@pytest.mark.filterwarnings("ignore::headrace.transforms.StreamWarning")
def test_groups_taken_and_dropped_equal_those_of_a_loop_over_all_rows():
    for seed in range(24):
        rng = random.Random(seed)
        fleet = Fleet(rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 6))
        streams = [list(fleet.rows(worker, rng)) for worker in range(fleet.workers)]
        came = [[p for p in in_pieces(rows, rng) if rng.random() > 0.2] for rows in streams]
        order = [worker for worker, pieces in enumerate(came) for _ in pieces]
        rng.shuffle(order)
        pieces = [came[worker].pop(0) for worker in order]
        assembler, out, stops = GroupAssembler(max_idle=10**6), [], rng.random() < 0.3
        for piece in pieces:
            assembler.put(fleet.batch(piece))
            assembler = resumed(assembler) if stops and rng.random() < 0.3 else assembler
            out += [] if (batch := assembler.take()) is None else batch["group_id"].tolist()

        every = [row for rows in streams for row in rows]
        sent = {row for piece in pieces for row in piece}
        lost = {row.rollout for row in every if row not in sent}
        whole = {row.group for row in every} - {rollout // fleet.group_size for rollout in lost}
        assert set(out) == whole, seed
        assert len(out) + assembler.held + sum(assembler.counts.values()) == len(sent), seed
        assert {reason for reason, rows in assembler.counts.items() if rows} <= {"lost"}, seed
        # A rollout waits no longer once a later row shows that it must have ended. A group waits no longer
        # if all its rollouts have ended.
        newest = {(row.worker, row.environment): -1 for row in every}
        for row in sent:
            lane = row.worker, row.environment
            newest[lane] = max(newest[lane], row.rollout)
        shown, places = set(), {row.rollout: (row.worker, row.environment) for row in every}
        for rollout in lost:
            numbers = sorted(row.number for row in sent if row.rollout == rollout)
            worker = places[rollout][0]
            behind_all = all(last > rollout for lane, last in newest.items() if lane[0] == worker)
            gap = numbers != list(range(len(numbers)))
            if gap or (numbers and newest[places[rollout]] > rollout) or behind_all:
                shown.add(rollout)
        over = {row.rollout for row in every} - lost | shown
        left = sum(
            row.rollout not in shown
            and any(
                n not in over for n in range(row.group * fleet.group_size, (row.group + 1) * fleet.group_size)
            )
            for row in sent
        )
        assert assembler.held == left, seed


ONE = Fleet(1, 1, 2, 9)


def rows_of(*rollouts: tuple[int, list[int], int]) -> TensorDict:
    """The rows with these numbers of each rollout (id, numbers, length)."""
    rows = [Sent(r // 2, r, n, n == length - 1, 0, 0) for r, numbers, length in rollouts for n in numbers]
    return ONE.batch(rows)


@pytest.mark.parametrize("each", [1, 2, 3])
def test_lost_rollouts_are_a_warning_whenever_their_number_passes_a_power_of_two(each):
    """Each put has the last rows of rollouts whose first rows are missing."""
    fleet, assembler, found, lost = Fleet(1, 9, 9, 99), GroupAssembler(max_idle=10**6), {}, 0
    for first in range(0, 30, each):
        numbers = range(first, first + each)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", StreamWarning)
            assembler.put(fleet.batch([Sent(n // 9, n, 1, True, 0, n % 9) for n in numbers]))
        lost += each
        found.update((lost, str(said.message)) for said in caught)
    passed = [n for n in range(each, lost + 1, each) if math.frexp(n)[1] > math.frexp(n - each)[1]]
    assert [*found] == passed
    last = passed[-1]
    names = ", ".join(f"rollout {n} of group {n // 9}" for n in range(last - each, last))
    assert found[last] == (
        f"{last} rollout{'s' * (last > 1)} got lost between their worker and the assembler, the last: "
        f"{names}. They are counted as 'lost' and not trained. A MultiAsyncCollector drops rows that are not "
        "read within a second: read it with assembled(collector, …), or let its workers write into a buffer "
        "and read that with drained(). If you put rows in another order than they were collected, set "
        "in_order=False"
    )


@pytest.mark.filterwarnings("ignore::headrace.transforms.StreamWarning")
def test_a_lost_rollout_ends_its_group_as_a_failed_rollout_does():
    rows, asked = rows_of((0, [1], 2), (1, [0], 1)), []
    with pytest.raises(
        IncompleteGroupsError, match="rollouts were lost before they arrived: group 0 has 1 of 2"
    ):
        GroupAssembler(on_failure="raise").put(rows)
    GroupAssembler(on_failure="refill", refill=lambda *what: asked.append(what)).put(rows)
    assert asked == [(0, 1)]
    kept = GroupAssembler(on_failure="keep", min_rollouts=1)
    kept.put(rows)
    assert kept.take()["rollout_id"].tolist() == [1]


@pytest.mark.filterwarnings("ignore::headrace.transforms.StreamWarning")
def test_a_rollout_that_fails_and_lacks_rows_is_missing_once():
    """Of four rollouts, two are complete, one failed and lacks rows, and one has no rows."""
    fleet = Fleet(1, 4, 4, 9)
    others = [Sent(0, number, 0, True, 0, number) for number in (1, 2)]
    own = [Sent(0, 0, number, number == 4, 0, 0) for number in (0, 2, 4)]  # rows 1 and 3 are missing
    for failed, apart, first in itertools.product(range(3), (False, True), (False, True)):
        asked: list[tuple[int, int]] = []
        assembler = GroupAssembler(on_failure="refill", refill=lambda *what, asked=asked: asked.append(what))
        rows = [*others, *own] if first else [*own, *others]
        batch = fleet.batch(rows)
        batch["status"] = torch.tensor([Status.FAILED * (row == own[failed]) for row in rows])
        for part in batch.split(1) if apart else (batch,):
            assembler.put(part)
        assert (assembler.ready, assembler.pending, asked) == (0, 1, []), (failed, apart, first)
        last = fleet.batch([Sent(0, 3, 0, True, 0, 3)])
        last["status"] = torch.zeros(1, dtype=torch.int64)
        assembler.put(last)
        assert asked == [(0, 1)], (failed, apart, first)


@pytest.mark.filterwarnings("ignore::headrace.transforms.StreamWarning")
def test_a_failed_and_a_lost_rollout_of_a_group_are_not_owed_with_its_undone_rollouts(tmp_path):
    """Rollout 0 failed, 1 lacks its first row, 2 is of weights that are gone, and 3 has no row."""
    options = {"max_staleness": 2, "groups": 1, "version_key": "version", "journal": tmp_path / "journal"}
    first = GroupAssembler(**options)
    ids = {"group_id": [0] * 4, "rollout_id": [*range(4)], "expected_rollouts": [4] * 4}
    first.announce(TensorDict(ids, [4]))
    rows = [Sent(0, 0, 0, True, 0, 0), Sent(0, 1, 1, True, 0, 1), Sent(0, 2, 0, True, 0, 2)]
    batch = Fleet(1, 4, 4, 9).batch(rows)
    batch["status"] = torch.tensor([Status.FAILED, 0, 0])
    batch["version"] = torch.tensor([0, 0, 1])
    first.version = 1
    first.put(batch)
    again = GroupAssembler(**options)
    assert [len(draws) for draws in again.unfinished()] == [2]
    assert (again.counts["undone"], again.counts["lost"]) == (1, 1)


@pytest.mark.filterwarnings("ignore::headrace.transforms.StreamWarning")
@pytest.mark.parametrize(
    ("numbers", "remembered"),
    [([0, 2], 2), ([0, 1], 0), ([0, 1, 3], 0)],
    ids=["a row and the end are missing", "the end is missing", "a row is missing"],
)
def test_a_lost_rollout_is_forgotten_once_no_row_of_it_can_come(numbers, remembered):
    """Its end has come, or its environment sends a row of the next rollout, which has one row."""
    assembler = GroupAssembler()
    for group in range(3):
        for rollout, some, length, rows in ((0, numbers, 4, remembered), (1, [0], 1, 0)):
            assembler.put(rows_of((2 * group + rollout, some, length)))
            assert len(assembler.state_dict()["state"]["gone"]) == rows
    assert assembler.counts["lost"] == 3 * len(numbers) + 3


@pytest.mark.filterwarnings("ignore::headrace.transforms.StreamWarning")
def test_a_late_row_of_a_lost_rollout_is_lost_too_while_its_group_waits():
    """The environment has gone on from rollout 0 to rollout 1, and the group waits for rollout 2."""
    fleet, assembler = Fleet(1, 1, 3, 9), GroupAssembler()
    for rollout, number in ((0, 0), (1, 0), (0, 1), (0, 2)):
        assembler.put(fleet.batch([Sent(0, rollout, number, number == 2, 0, 0)]))
    assert (assembler.counts["lost"], assembler.held, assembler.pending) == (3, 1, 1)


def test_a_repeated_row_is_a_duplicate():
    assembler = GroupAssembler()
    assembler.put(rows_of((0, [0, 1], 3)))
    with pytest.raises(BatchError, match="found again rollout 0 of group 0"):
        assembler.put(rows_of((0, [1], 3)))


def test_ids_without_worker_numbers_show_only_gaps():
    rows = rows_of((7, [0], 2), (3, [0, 1], 2))
    rows["group_id"] += 50
    assembler = GroupAssembler()
    assembler.put(rows)
    assert (assembler.counts["lost"], assembler.held) == (0, 3)


@pytest.mark.filterwarnings("ignore::headrace.transforms.StreamWarning")
def test_rollouts_in_another_order_are_not_lost_in_one_put_or_if_declared():
    rng, fleet, rollouts = random.Random(0), Fleet(1, 3, 2, 9), {}
    for row in fleet.rows(0, rng):
        rollouts.setdefault(row.rollout, []).append(row)
    pieces = rng.sample([*rollouts.values()], len(rollouts))
    together = [row for rows in pieces for row in rows]
    for in_order, puts, lost in ((True, pieces, True), (False, pieces, False), (True, [together], False)):
        assembler = GroupAssembler(in_order=in_order)
        for rows in puts:
            assembler.put(fleet.batch(rows))
        assert (assembler.counts["lost"] > 0, assembler.ready < 9) == (lost, lost)
