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
    for seed, kills in enumerate((1, 1, 3)):
        once_each(world, seed, kills, tmp_path / str(seed))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
def test_no_group_is_skipped_or_repeated_after_many_kills(world, tmp_path):
    for seed in range(75):
        once_each(world, 100 + seed, 1 if seed < 50 else 3, tmp_path / str(seed))


def test_weights_unknown_to_the_journal_are_refused(tmp_path):
    options = {"group_size": 1, "groups": 1, "journal": tmp_path / "journal"}
    assembler = GroupAssembler(**options)
    ids = {"group_id": [0, 1, 2], "rollout_id": [0, 1, 2], ("next", "done"): [True] * 3}
    assembler.put(TensorDict(ids, batch_size=[3]))
    assembler.take()
    assembler.commit(5)
    assembler.take()
    again = GroupAssembler(**options)
    assert again.committed == 5
    for emitted in (0, 3):  # weights older than the commit, and weights of another run
        with pytest.raises(
            ValueError,
            match=r"has 1 that were committed and 1 after them\. Load the weights of step 5, or begin a new",
        ):
            again.commit(6, emitted=emitted)
    again.commit(6, emitted=2)
    assert again.take()["group_id"].tolist() == [2]


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
