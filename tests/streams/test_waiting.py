"""Every wait is named, and timeouts continue while the trainer waits and nothing is put."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict

from headrace.transforms import GroupAssembler, StreamWarning
from headrace.transforms.table.schema import ORIGIN


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch):
        self.seconds = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.seconds)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def rows(*rollouts: int, workers: int = 0) -> TensorDict:
    """The last row of each of these rollouts, in groups of two."""
    ids = {"group_id": [each // 2 for each in rollouts], "rollout_id": list(rollouts)}
    batch = TensorDict(ids | {("next", "done"): [True] * len(rollouts)}, batch_size=[len(rollouts)])
    if workers:
        origins = [[0, each // 2 % workers, workers, 0, 1] for each in rollouts]
        batch[ORIGIN] = torch.tensor(origins, dtype=torch.int32)
    return batch


def asked(assembler: GroupAssembler) -> list[str]:
    """The warnings when a batch is requested."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StreamWarning)
        assembler.take()
    return [str(each.message) for each in caught]


def test_a_long_wait_is_a_warning_that_names_the_groups_and_comes_again(clock):
    assembler = GroupAssembler(groups=1, group_size=2)
    assembler.put(rows(0, 1))
    assert asked(assembler) == []
    assembler.put(rows(2))
    found = []
    for second in range(60):
        found += [(second, said) for said in asked(assembler)]
        clock.seconds += 1
    assert [second for second, _ in found] == [10, 20, 40]
    assert "has waited 10 s for a batch; before at most 0 s. It waits for group 1 has 1 of 2" in found[0][1]
    assembler.put(rows(3))
    assert asked(assembler) == []
    found = []
    for second in range(250):  # four times the wait of 60 seconds
        found += [second for _ in asked(assembler)]
        clock.seconds += 1
    assert found == [240]


def test_before_the_first_batch_the_trainer_may_wait_a_minute(clock):
    assembler, found = GroupAssembler(groups=1, group_size=2), {}
    for second in range(130):
        found.update((second, said) for said in asked(assembler))
        clock.seconds += 1
    assert [*found] == [60, 120]
    advice = (
        "Check whether their workers hang. Set timeout or timeout_seconds, and on_timeout, to go on without "
        "them"
    )
    assert found[60] == (
        "the trainer has waited 60 s for a batch; before at most 0 s. It waits for no group: nothing is "
        f"dispatched. {advice}"
    )
    assembler.put(rows(2))
    assembler.put(rows(4))
    clock.seconds += 110
    assert asked(assembler) == [
        "the trainer has waited 240 s for a batch; before at most 0 s. It waits for group 1 has 1 of 2 (1 "
        f"completed), 1 put old. {advice}"
    ]


@pytest.mark.filterwarnings("ignore:the trainer has waited")
def test_a_timeout_in_puts_goes_on_while_the_trainer_waits(clock):
    """Puts came every second. Then no put comes, because nothing is dispatched before the next step."""
    assembler = GroupAssembler(groups=1, group_size=2, timeout=30)
    for rollout in range(2, 12):
        clock.seconds += 1
        assembler.put(rows(rollout))
    assembler.put(rows(0))
    for _ in range(5):
        assert assembler.take() is not None
    assert assembler.take() is None
    clock.seconds += 20
    assert assembler.take() is None
    assert assembler.pending == 1
    clock.seconds += 15
    assert assembler.take() is None
    assert (assembler.pending, assembler.counts["timeout"]) == (0, 1)


def test_a_timeout_in_puts_stands_still_while_the_trainer_trains(clock):
    assembler = GroupAssembler(groups=1, group_size=2, timeout=30)
    for rollout in range(2, 12):
        clock.seconds += 1
        assembler.put(rows(rollout))
    assembler.put(rows(0))
    for _ in range(5):
        clock.seconds += 100  # a step
        assert assembler.take() is not None
    assert assembler.pending == 1


@pytest.mark.filterwarnings("ignore:the trainer has waited")
def test_the_time_of_a_wait_counts_once_for_each_group(clock):
    """Group 0 is too old after 10 seconds of waiting. Group 10 came 20 puts later: it has 20 seconds more."""
    assembler = GroupAssembler(groups=20, group_size=2, timeout=30)
    for rollout in range(0, 42, 2):
        clock.seconds += 1
        assembler.put(rows(rollout))
    expired = {}
    for second in range(40):
        assembler.take()
        expired.setdefault(assembler.counts["timeout"], second)
        clock.seconds += 1
    assert expired == {0: 0} | {groups: 9 + groups for groups in range(1, 22)}


@pytest.mark.parametrize("groups", [1, 8, 9, 20])
def test_an_error_lists_the_eight_oldest_waiting_groups_and_counts_the_others(groups):
    """Each group has one of its two rollouts."""
    assembler = GroupAssembler(group_size=2)
    for group in range(groups):
        assembler.put(rows(2 * group))
    said = str(assembler.stalled("It stands still"))
    assert [f"group {group} has 1 of 2" in said for group in range(groups)] == [
        at < 8 for at in range(groups)
    ]
    assert (f" and {groups - 8} more. Rows: {groups} arrived" in said) == (groups > 8)
