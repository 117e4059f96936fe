"""The saved weights have trained every group once, wherever the process is killed."""

from __future__ import annotations

import pytest
import torch
from lives import WORLDS, once_each
from tensordict import TensorDict

from headrace.pipeline import RepeatSampler, paced
from headrace.transforms import GroupAssembler


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_no_group_is_skipped_or_repeated_after_kills(world, tmp_path):
    for seed, kills in enumerate((1, 3)):
        once_each(world, seed, kills, tmp_path / str(seed))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
def test_no_group_is_skipped_or_repeated_after_many_kills(world, tmp_path):
    for seed in range(75):
        once_each(world, 100 + seed, 1 if seed < 50 else 3, tmp_path / str(seed))


@pytest.mark.parametrize("text", [False, True])
def test_a_partial_rollout_gets_a_new_id_and_its_rows_are_surplus(text):
    ids = ["a", "b"] if text else [8, 9]
    draws = TensorDict({"group_id": ["g"] * 2 if text else [4, 4], "rollout_id": ids, "prompt": [7, 7]}, [2])
    assembler = GroupAssembler(group_size=2)
    assembler.announce(draws)
    row = draws[:1].clone()
    row["next", "done"] = torch.tensor([False])
    assembler.put(row.exclude("prompt"))
    again = GroupAssembler(group_size=2)
    again.load_state_dict(assembler.state_dict())
    (lost,) = again.unfinished()
    assert lost["prompt"].tolist() == [7, 7]
    assert list(lost["group_id"]) == list(draws["group_id"])
    same, fresh = lost["rollout_id"]
    assert same == ids[1]
    assert fresh not in ids
    assert again.counts["surplus"] == 1
    assert again.unfinished() == []
    row["next", "done"] = torch.tensor([True])
    again.put(row.exclude("prompt"))  # a late row of the old rollout
    assert again.counts["surplus"] == 2
    ends = lost.exclude("prompt")
    ends["next", "done"] = torch.tensor([True, True])
    again.put(ends)
    assert len(again.take()) == 2


@pytest.mark.parametrize("kind", ["numbers", "texts", "no ids"])
def test_each_owed_rollout_comes_once_in_its_announcement_and_with_a_new_id_only_if_it_had_rows(kind):
    """Groups 0 and 1 were announced together, then group 2. Each has three rollouts.

    Rollout 0 has ended, and the rollouts 1 and 4 have a row. A new rollout repeats the first prompt of its
    group.
    """

    def announced(*rollouts: int) -> TensorDict:
        ids = [f"r{each}" for each in rollouts] if kind == "texts" else list(rollouts)
        columns = {"group_id": [each // 3 for each in rollouts], "rollout_id": ids, "prompt": [*rollouts]}
        draws = TensorDict(columns, [len(rollouts)])
        return draws.exclude("rollout_id") if kind == "no ids" else draws

    def put(assembler: GroupAssembler, ids: list, done: list[bool]) -> None:
        rows = {"group_id": [int(str(each).strip("r")[0]) // 3 for each in ids], "rollout_id": ids}
        rows["next", "done"] = done
        assembler.put(TensorDict(rows, [len(ids)]))

    def owed(assembler: GroupAssembler) -> tuple[GroupAssembler, list]:
        again = GroupAssembler(group_size=3)
        again.load_state_dict(assembler.state_dict())
        found = []
        for draws in again.unfinished():
            names = ["group_id", "prompt", *(["rollout_id"] * ("rollout_id" in draws.keys()))]
            found.append(list(zip(*(list(draws[name]) for name in names), strict=True)))
        return again, [[tuple(map(plain, row)) for row in rows] for rows in found]

    def plain(value):
        return value if isinstance(value, str) else int(value)

    name = (lambda number: f"r{number}") if kind == "texts" else (lambda number: number)

    def new(row: int, number: int):
        return f"r{row}~{number}" if kind == "texts" else 2**62 + number

    first = GroupAssembler(group_size=3)
    first.announce(announced(0, 1, 2, 3, 4, 5))
    first.announce(announced(6, 7, 8))
    put(first, [name(0), name(1), name(4)], [True, False, False])
    again, found = owed(first)
    if kind == "no ids":  # the dispatcher gives ids, and unknown rollouts of a group are alike
        assert found == [[(0, 0), (0, 1), (1, 3), (1, 4), (1, 5)], [(2, 6), (2, 7), (2, 8)]]
        return
    expected = [
        [
            (0, 2, name(2)),
            (0, 0, new(0, 0)),
            (1, 3, name(3)),
            (1, 5, name(5)),
            (1, 3, new(3, 1)),
        ],
        [(2, each, name(each)) for each in (6, 7, 8)],
    ]
    assert found == expected
    assert again.counts["surplus"] == 2
    assert again.unfinished() == []
    put(again, [name(2)], [False])  # this process dies, too
    _, found = owed(again)
    assert found[0] == [
        (0, 0, new(0, 2)),
        (0, 1, new(1, 3)),
        (1, 3, name(3)),
        (1, 5, name(5)),
        (1, 3, new(3, 4)),
    ]


def test_only_groups_that_are_unknown_are_drawn_again():
    """Group 0 was announced, 1 has a row, 2 was taken and 3 was discarded. Groups 4 and 5 are unknown."""
    assembler = GroupAssembler(group_size=2)
    for group in (3, 2, 1):
        assembler.put(ended(2 * group, *([5] if group == 2 else [])))
        if group == 3:
            assembler.discard_batch()
    assert assembler.take()["group_id"].tolist() == [2, 2]
    assembler.announce(drawn(0, 1))
    left = assembler.never_announced(drawn(0, 1, 8, 2, 4, 9, 6, 7, 10))
    assert left["rollout_id"].tolist() == [8, 9, 10]
    assert assembler.never_announced(drawn(10))["rollout_id"].tolist() == [10]
    assert len(assembler.never_announced(drawn(0, 1))) == 0


def test_after_a_restart_with_older_weights_nothing_is_too_old(tmp_path):
    """Groups that were announced after the step of these weights are drawn again once there is capacity."""
    options = {"groups": 1, "group_size": 1, "max_staleness": 1, "steps_ahead": 0, "version_key": "version"}

    def rows(draw, version):
        draw["version"] = torch.full((len(draw),), version)
        draw["next", "done"] = torch.ones(len(draw), dtype=torch.bool)
        return draw

    first = GroupAssembler(**options, journal=tmp_path / "journal")
    draws = paced(RepeatSampler(9, group_size=1), first)
    for _ in range(5):
        first.put(rows(next(draws), first.version))
        assert first.take() is not None
        first.version += 1
    again = GroupAssembler(**options, journal=tmp_path / "journal")  # no weights were saved
    draws, trained = paced(RepeatSampler(9, group_size=1), again), []
    assert (again.version, again.capacity(), again.ready) == (0, 0, 1)
    for _ in range(9):
        if not again.ready:
            again.put(rows(next(draws), again.version))
        trained += again.take()["group_id"].tolist()
        again.version += 1
    assert trained == list(range(9))
    assert max(again.ages) == 0
    assert again.counts["undone"] == 4


def test_lost_groups_without_a_row_are_counted():
    assembler = GroupAssembler(groups=1, group_size=1, timeout=2, max_pending_groups=3)
    ids = lambda *numbers: TensorDict({"group_id": [*numbers], "rollout_id": [*numbers]}, [len(numbers)])  # noqa: E731
    assembler.announce(ids(0))
    for number in range(1, 4):
        row = ids(number)
        row["next", "done"] = torch.tensor([True])
        assembler.put(row)
    assembler.announce(ids(5, 6, 7, 8))
    assembler.discard_batch()
    assert assembler.lost_groups == {"timeout": 1, "evicted": 1, "unfinished": 6}


def drawn(*rollouts: int) -> TensorDict:
    """The draws of these rollouts, in groups of two."""
    ids = {"group_id": [each // 2 for each in rollouts], "rollout_id": [*rollouts]}
    return TensorDict(ids, [len(rollouts)])


def ended(*rollouts: int, version: int = 0) -> TensorDict:
    """The last row of each of these rollouts."""
    rows = drawn(*rollouts)
    rows["next", "done"] = torch.ones(len(rows), dtype=torch.bool)
    rows["version"] = torch.full((len(rows),), version)
    return rows


@pytest.mark.filterwarnings("ignore:no group may take longer")
@pytest.mark.parametrize("newer", [1, 3])
def test_a_group_waits_for_its_undone_rollouts(newer, tmp_path):
    """The weights that made one rollout of the group are gone. The group may have been complete before."""
    options = {"groups": 2, "group_size": 2, "max_staleness": 2, "version_key": "version"}
    path = tmp_path / "journal"
    first = GroupAssembler(**options, journal=path)
    first.announce(drawn(0, 1, 2, 3))
    first.put(ended(0))
    first.version = 1
    first.put(ended(newer, version=1))
    again = GroupAssembler(**options, journal=path)
    assert again.version == 0
    lost = [draw for draw in again.unfinished() for draw in draw.unbind(0)]
    assert again.counts["undone"] == 1
    for draw in lost:
        assert again.take() is None
        again.put(ended(0).update({name: draw[name][None] for name in ("group_id", "rollout_id")}))
    assert sorted(again.take()["group_id"].tolist()) == [0, 0, 1, 1]
    assert len(lost) == 3


def test_a_process_that_dies_before_any_event_changes_nothing(tmp_path):
    """The process had only opened the journal. The next process still knows the groups that were taken."""
    options = {"groups": 1, "group_size": 2, "journal": tmp_path / "journal"}
    first = GroupAssembler(**options)
    first.put(ended(0, 1, 2, 3, 4, 5))
    first.take(), first.take()
    for _ in range(3):
        assert GroupAssembler(**options).ready == 3
    last = GroupAssembler(**options)
    last.commit(1, emitted=2)
    assert last.take()["group_id"].tolist() == [2, 2]


def test_a_step_with_rejected_groups_is_one_step_after_a_restart(tmp_path):
    """Three groups were taken and one was rejected, so one step of two groups has ended."""
    options = {"groups": 2, "group_size": 2, "steps_ahead": 0}
    path = tmp_path / "journal"
    first = GroupAssembler(**options, journal=path)
    first.put(ended(0, 1, 2, 3, 4, 5))
    first.take(2)
    first.reject(1)
    first.take(1)
    again = GroupAssembler(**options, journal=path)
    again.commit(1, emitted=3)
    assert again.capacity() == 0
    again.version = 1
    assert again.capacity() == 2


@pytest.mark.parametrize("ids", [[[8, 9], [3, 4]], [["h", "i"], ["c", "d"]]], ids=["numbers", "texts"])
def test_announced_rollouts_of_each_prompt_in_a_row_of_its_own_come_back_as_rows(ids, tmp_path):
    """Draws may have the shape (prompts, rollouts)."""
    draws = TensorDict({"group_id": [[4, 4], [7, 7]], "prompt": [[1, 1], [2, 2]]}, batch_size=[2, 2])
    draws["rollout_id"] = ids if isinstance(ids[0][0], str) else torch.tensor(ids)
    for journal in (None, tmp_path / "journal"):
        first = GroupAssembler(group_size=2, journal=journal)
        first.announce(draws)
        assert first.pending == 2
        state = first.state_dict() if journal is None else None
        del first
        again = GroupAssembler(group_size=2, journal=journal)
        if journal is None:
            again.load_state_dict(state)
        (lost,) = again.unfinished()
        assert lost.batch_size == (4,)
        assert [lost[key].tolist() for key in ("group_id", "prompt")] == [[4, 4, 7, 7], [1, 1, 2, 2]]
        found = lost["rollout_id"]
        assert (found if isinstance(found, list) else found.tolist()) == [*ids[0], *ids[1]]
