"""Rows and optimiser steps through a queue of this process: each row once, in order, and each limit exact."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import pytest
import torch
from assembly import Line, batch_of_lines, same_rows
from clocks import Clock
from queue_here import QueueHere
from saving import as_saved
from tensordict import TensorDict, TensorDictBase, lazy_stack

from headrace.pipeline import RolloutQueue, StepQueue, assembled
from headrace.pipeline.queues import queues
from headrace.transforms import BatchError, GroupAssembler, MissingKeyError, StalledError

RANK, ELSEWHERE = ("headrace", "rank"), ("headrace", "elsewhere")
MASK, IN_LOSS, PADDING = ("masks", "all_assistant_mask"), ("headrace", "in_loss"), ("headrace", "padding")


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(autouse=True)
def here(monkeypatch) -> QueueHere:
    made = QueueHere()
    monkeypatch.setattr(queues, "tq", lambda: made)
    return made


def rows_of(*numbers: int) -> TensorDict:
    """A finished rollout for each number, two in each group. Rollout n has n + 1 sampled tokens of 9."""
    rows = batch_of_lines([Line(n // 2, n, 0, True) for n in numbers])
    rows["number"], rows["text"] = torch.tensor(numbers), [f"row {number}" for number in numbers]
    rows["next", "reward"] = torch.tensor(numbers).float()
    rows[MASK] = torch.arange(9) <= rows["number"].unsqueeze(1)
    rows["tokens", "full"] = torch.arange(9) * rows["number"].unsqueeze(1)
    return rows


def named(queue: RolloutQueue, name: int) -> RolloutQueue:
    """The queue with the name of its producer, to compare keys."""
    queue._name = f"{name:x}"
    return queue


def numbers(batches: Iterable[TensorDictBase | None]) -> list[list[int] | None]:
    return [None if batch is None else batch["number"].tolist() for batch in batches]


# -- rollouts ---------------------------------------------------------------------------------------------


def test_each_row_is_read_once_in_the_order_of_its_producer_until_all_have_ended(clock, here):
    """Producer 2 ends five seconds after producer 1. In between the reader yields None, 20 times a second."""
    first, second = (named(RolloutQueue("r"), name) for name in (1, 2))
    reader = RolloutQueue("r", producers=2)
    first.put(rows_of(0, 1))
    first.put(rows_of(2))
    second.put(rows_of(10))
    first.end()
    clock.after[5.0] = lambda: (second.put(rows_of(11, 12)), second.end())
    found = numbers(reader)
    assert [each for each in found if each] == [[0, 1, 2, 10], [11, 12]]
    assert found[1:-1] == [None] * 100
    assert clock.now == 5
    assert here.kv_list() == {"r": {}, "r/pieces": {}}


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, [[0, 1], [2], [3, 4, 5], [6]]), (2, [[0, 1], [2, 3, 4, 5], [6]]), (3, [[0, 1, 2], [3, 4, 5], [6]])],
)
def test_a_read_ends_with_the_put_that_reaches_its_limit(most, expected, clock):
    reader, producer = RolloutQueue("r", producers=1, max_rows=most), RolloutQueue("r")
    for put in ((0, 1), (2,), (3, 4, 5), (6,)):
        producer.put(rows_of(*put))
    producer.end()
    assert numbers(reader) == expected


@pytest.mark.parametrize("options", [{}, {"decided_by": [GroupAssembler()]}])
def test_a_put_without_rows_sends_nothing(options, here):
    producer = RolloutQueue("r", **options)
    for nothing in (None, rows_of(0)[:0], rows_of(0, 1).reshape(2, 1)[:, :0]):
        producer.put(nothing)
    assert here.kv_list() == {}
    producer.put(rows_of(0))
    producer.end()
    assert [batch["rollout_id"].tolist() for batch in RolloutQueue("r", producers=1, **options)] == [[0]]


def test_a_handle_that_was_sent_to_another_process_is_another_producer(clock):
    """Both copies count their rows from 0, so with one name the second would replace rows of the first."""
    original = RolloutQueue("r")
    original.put(rows_of(0, 1))
    twin = copy.deepcopy(original)
    twin.put(rows_of(2))
    original.put(rows_of(3))
    reader = RolloutQueue("r", producers=2)
    for producer in (original, twin):
        producer.end()
    assert sorted(chain.from_iterable(numbers(reader))) == [0, 1, 2, 3]


def test_a_saved_reader_deletes_what_two_states_have_counted(clock, here):
    """The states have read 2, 3 and 3 rows. A row is deleted at the second state that counts it."""
    reader = RolloutQueue("r", producers=1, clear="saved", max_rows=1)
    producer = named(RolloutQueue("r"), 7)
    for put in ((0, 1), (2,), (3,)):
        producer.put(rows_of(*put))
    producer.end()
    read, left = iter(reader), []
    for _ in range(2):
        next(read)
        assert reader.state_dict() == {"read": {"7": 2 + len(left)}}
        left.append([*here.kv_list("r")["r"]])
    reader.state_dict()
    left.append([*here.kv_list("r")["r"]])
    assert left == [["7/0", "7/1", "7/2", "7/3"], ["7/2", "7/3"], ["7/3"]]
    again = RolloutQueue("r", producers=1, clear="saved", max_rows=1)
    again.load_state_dict({"read": {"7": 3}})
    assert numbers(again) == [[3]]
    for _ in range(2):
        again.state_dict()
    assert here.kv_list() == {"r": {}, "r/pieces": {}}


@pytest.mark.parametrize(
    ("at", "after", "groups"),  # `after`: number of states that were saved after the loaded one
    [(1, 0, 1), (2, 1, 1), (1, 1, 4)],  # with four groups per batch the source ends before the last batch
)
def test_a_reader_resumes_from_its_last_state_or_the_one_before(at, after, groups, here):
    def read(state: dict[str, Any] | None = None) -> Any:
        source = RolloutQueue("r", producers=1, clear="saved", max_rows=5)
        stream = assembled(source, GroupAssembler(groups=groups))
        if state is not None:
            stream.load_state_dict(state)
        return stream

    rows = batch_of_lines([Line(g, 2 * g + r, s, s == 1) for g in range(6) for s in (0, 1) for r in (0, 1)])
    expected = numbers(assembled(rows.split(5), GroupAssembler(groups=groups)))
    at = min(at, len(expected) - 1)
    producer = RolloutQueue("r")
    for some in rows.split(7):
        producer.put(some)
    producer.end()
    stream, states = read(), []
    batches, begun = iter(stream), []
    for _ in range(at + 1):  # a state is saved after each batch; a batch after the last state comes again
        begun += numbers([next(batches)])
        if len(states) < at + after:
            states.append(as_saved(stream.state_dict()))
    assert begun == expected[: at + 1]
    again = read(states[at - 1])
    assert numbers(again) == expected[at:]
    for _ in range(2):
        again.state_dict()
    assert here.kv_list() == {"r": {}, "r/pieces": {}}


def mixed() -> list[TensorDictBase]:
    """Puts with other columns, with ragged rows and with dense rows. Each can be read alone."""
    ragged = [row.clone() for row in rows_of(4, 5).unbind(0)]
    for row in ragged:
        row["tokens", "full"] = row["tokens", "full"][: int(row["number"])]
    return [rows_of(0, 1), rows_of(2, 3).exclude("text"), lazy_stack(ragged), rows_of(6, 7)]


def test_rows_come_out_as_they_were_put(clock):
    """Puts that do not have the same columns, or are ragged, are batches of their own."""
    producer, reader = RolloutQueue("r"), RolloutQueue("r", producers=1)
    for put in (*mixed(), mixed()[0].reshape(2, 1)):
        producer.put(put)
    producer.end()
    found = list(reader)
    assert [type(batch) for batch in found] == [type(batch) for batch in mixed()]
    for batch, put in zip(found, [*mixed()[:3], torch.cat([mixed()[3], mixed()[0]])], strict=True):
        same_rows(batch, put)


def test_rows_without_tokens_fetch_theirs_in_any_order_and_number(clock):
    """The reader gets all puts in one batch. Rows of ragged and of dense puts are fetched together."""
    decides = {"decided_by": [GroupAssembler()]}
    producer, reader = RolloutQueue("r", **decides), RolloutQueue("r", producers=1, **decides)
    for put in (rows_of(0, 1), rows_of(2, 3), rows_of(6, 7)):
        producer.put(put)
    producer.end()
    (thin,) = reader
    assert MASK not in thin.keys(True)
    for order in ([0, 1, 2, 3, 4, 5], [5, 0, 3], [2, 2, 1, 2], [4]):
        same_rows(reader.fetch(thin[order]), rows_of(*[(0, 1, 2, 3, 6, 7)[at] for at in order]))
    # Columns that stages wrote come too, and token counts are left out.
    thin["headrace", "reward"], thin["advantage"] = torch.arange(6), torch.arange(6) + 0.5
    thin["headrace", "number_of", "masks"] = torch.zeros(6)
    whole = reader.fetch(thin)
    assert whole["headrace", "reward"].tolist() == [0, 1, 2, 3, 4, 5]
    assert whole["advantage"].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert set(whole["headrace"].keys()) == {"reward"}


# -- optimiser steps --------------------------------------------------------------------------------------


def step_of(ranks: Iterable[int], first: int = 0) -> TensorDict:
    """A row for each rank in the list, numbered from `first`."""
    rows = rows_of(*range(first, first + len(list(ranks))))
    rows[RANK] = torch.tensor([*ranks], dtype=torch.int64)
    return rows


def test_each_rank_takes_its_rows_of_each_step_and_nothing_stays(clock, here):
    queue = StepQueue("s", ranks=3)
    assert queue.under_way().shape == (0, 3)  # nobody has put rows
    assert queue.put([step_of([0, 2, 0]), step_of([2], 3)]) == 2
    assert queue.put(iter([step_of([1, 0], 4)])) == 1
    queue.end()
    expected = {0: [[0, 2], [], [5]], 1: [[], [], [4]], 2: [[1], [3], []]}
    for rank, steps in expected.items():
        found = list(queue.minibatches(rank, patience=1.0))
        assert [part["number"].tolist() if len(part) else [] for part in found] == steps
        same_rows(
            torch.cat([part for part in found if len(part)]), rows_at(rank, *chain.from_iterable(steps))
        )
    assert here.kv_list() == {"s/0": {}, "s/1": {}, "s/2": {}}
    assert clock.now == 0


def rows_at(rank: int, *numbers: int) -> TensorDict:
    rows = rows_of(*numbers)
    return rows.set(RANK, torch.full((len(rows),), rank))


def test_a_rank_that_restarts_goes_on_after_the_steps_that_it_has_trained(clock):
    queue = StepQueue("s", ranks=1)
    queue.put([rows_of(at) for at in range(4)])
    queue.end()
    taken = queue.minibatches(0)
    assert numbers([next(taken), next(taken)]) == [[0], [1]]
    assert numbers(queue.minibatches(0, first=2)) == [[2], [3]]


def test_a_full_rank_is_named_with_the_step_that_it_must_take_first(clock):
    """Two steps may wait for a rank. After 11 steps, steps 9 and 10 wait for rank 1."""
    queue = StepQueue("s", ranks=2, max_steps=2)
    ranks = [queue.minibatches(rank) for rank in (0, 1)]
    for step in range(11):
        queue.put([step_of([0, 1])], patience=1.0)
        next(ranks[0])
        if step < 9:
            next(ranks[1])
    assert clock.now == 0
    with pytest.raises(StalledError, match=r"^rank 1 has not taken optimiser step 9 for 0\.5 s$"):
        queue.put([step_of([0, 1])], patience=0.5)
    assert clock.now == 0.5
    assert queue.steps == 11  # no rank got the step
    clock.after[clock.now + 3.0] = lambda: next(ranks[1])
    assert queue.put([step_of([0, 1])], patience=60.0) == 1
    assert clock.now == 3.5


def test_the_patience_of_a_rank_is_for_each_step(clock):
    queue = StepQueue("s", ranks=1)
    clock.after |= {when: lambda: queue.put([rows_of(0)]) for when in (0.9, 1.8, 2.7)}
    steps = queue.minibatches(0, patience=1.0)
    assert [len(next(steps)) for _ in range(3)] == [1, 1, 1]
    with pytest.raises(StalledError, match=r"^rank 0 has waited 1 s for optimiser step 3$"):
        next(steps)
    assert clock.now == 3.7


# -- what is refused --------------------------------------------------------------------------------------

DECIDES = {"decided_by": [GroupAssembler()]}


def loses_rows(here: QueueHere, name: str) -> None:
    """From now on the queue loses the first of the rows that are requested from this partition."""
    get = here.kv_batch_get
    here.kv_batch_get = lambda keys, partition: get(keys[partition == name :], partition)


def loses_columns(here: QueueHere, *names: str) -> None:
    get = here.kv_batch_get
    here.kv_batch_get = lambda keys, partition: get(keys, partition).exclude(*names)


def put(*batches: TensorDictBase, name: int = 0xA, **options: Any) -> RolloutQueue:
    """A reader of these batches, which have the names of a producer."""
    producer = named(RolloutQueue("r", **options), name)
    for batch in batches:
        producer.put(batch)
    return RolloutQueue("r", **options)


def narrow() -> TensorDict:
    rows = rows_of(2)
    return rows.set(MASK, rows[MASK][:, :8])


def keys_with_dots(here: QueueHere) -> None:
    put(TensorDict({("next", "a.b"): torch.zeros(2), "c.d": torch.zeros(2)}, [2]))


def producers_without_decided_by(here: QueueHere) -> None:
    put(rows_of(0), **DECIDES)
    for name in (0xB, 0xC):
        put(rows_of(2), name=name)
    next(iter(RolloutQueue("r", **DECIDES)))


def lost_tables(here: QueueHere) -> None:
    loses_rows(here, "r/pieces")
    next(iter(put(rows_of(0, 1), rows_of(2), **DECIDES)))


def lost_rows(here: QueueHere) -> None:
    loses_rows(here, "r")
    next(iter(put(rows_of(0, 1, 2))))


def lost_columns(here: QueueHere) -> None:
    loses_columns(here, "group_id", "number", "masks.all_assistant_mask", "text")
    next(iter(put(rows_of(0))))


def other_widths(here: QueueHere) -> None:
    next(iter(put(rows_of(0, 1), narrow())))


def rows_with_tokens(here: QueueHere) -> None:
    put(**DECIDES).fetch(TensorDict({"x": torch.zeros(2)}, [2]))


def a_step_queue_without_rollouts(here: QueueHere) -> None:
    StepQueue("s", ranks=1).put([next(iter(put(rows_of(0), **DECIDES)))])


def a_rank_too_large(here: QueueHere) -> None:
    try:
        StepQueue("s", ranks=2).put([step_of([0, 2, 3])])
    finally:
        assert here.kv_list() == {}


def nothing_to_mask(here: QueueHere) -> None:
    reader = put(rows_of(0, 1, 2), **DECIDES)
    thin = next(iter(reader))
    thin[IN_LOSS], thin[PADDING] = torch.tensor([True, False, True]), torch.tensor([False, False, True])
    reader.reads = reader.reads._replace(masked=["mask", None, "mask", ("log_probs", "full")])
    reader.fetch(thin)


def other_options(here: QueueHere) -> None:
    RolloutQueue("r", decided_by=[GroupAssembler(), {}])


ERRORS: dict[str, tuple[Callable[[QueueHere], Any], type[Exception]]] = {
    "TransferQueue needs keys without dots; found c.d, ('next', 'a.b'): rename these columns": (
        keys_with_dots,
        BatchError,
    ),
    "all producers of partition 'r' must use decided_by; puts b/0, c/0 did not: create the producers' "
    "RolloutQueue with the decided_by of the reader": (producers_without_decided_by, BatchError),
    "TransferQueue must return all tables that were put into partition 'r/pieces'; some of these are "
    "missing: a/0, a/2": (lost_tables, BatchError),
    "TransferQueue must return all rows that were put into partition 'r'; it returned 2 of 3: a/0, a/1, "
    "a/2": (
        lost_rows,
        BatchError,
    ),
    "TransferQueue must return all columns that were put; it returned only ['expected_rollouts', "
    "'next.done', 'next.policy_version', 'next.reward', 'next.status', 'partition', 'rollout_id', "
    "'segment', 'tokens.full']": (lost_columns, BatchError),
    "dense rows must have one width; 'masks.all_assistant_mask' has [(8,), (9,)]: pad all rows to one "
    "width, or keep ragged rows in a lazy stack": (other_widths, BatchError),
    "RolloutQueue needs the key ('headrace', 'elsewhere'); the batch has ['x']. Read the rows by a queue "
    "with decided_by": (rows_with_tokens, MissingKeyError),
    "the tokens of these rows are stored elsewhere: set StepQueue(rollouts=…) to the partition of their "
    "RolloutQueue, or call RolloutQueue.fetch before the pipeline": (
        a_step_queue_without_rollouts,
        BatchError,
    ),
    "rows must be for ranks 0 to 1; found rank 3: set StepQueue(ranks=…) to pipeline.stages.split.ranks": (
        a_rank_too_large,
        BatchError,
    ),
    "the batch has 2 rows out of the loss, to be masked in one of ['mask', ('log_probs', 'full')]; it "
    "has only [('masks', 'all_assistant_mask'), ('next', 'done'), ('next', 'policy_version'), ('next', "
    "'reward'), ('next', 'status'), ('tokens', 'full'), 'expected_rollouts', 'group_id', 'number', "
    "'partition', 'rollout_id', 'segment']": (nothing_to_mask, BatchError),
    "decided_by takes GroupAssemblers and pipelines; got dict": (other_options, TypeError),
}


@pytest.mark.parametrize("message", ERRORS, ids=[call.__name__ for call, _ in ERRORS.values()])
def test_an_error_of_a_queue_says_what_is_wrong_where_and_what_to_do(message, clock, here):
    call, kind = ERRORS[message]
    with pytest.raises(kind) as caught:
        call(here)
    assert str(caught.value) == message


WRONG: dict[str, tuple[type, dict[str, Any]]] = {
    "producers must be an integer ≥ 1; got 0": (RolloutQueue, {"producers": 0}),
    "max_rows must be an integer ≥ 1; got 0": (RolloutQueue, {"max_rows": 0}),
    "clear must be one of 'read', 'saved'; got 'never'": (RolloutQueue, {"clear": "never"}),
    "ranks must be an integer ≥ 1; got 0": (StepQueue, {"ranks": 0}),
    "max_steps must be an integer ≥ 1; got 0": (StepQueue, {"ranks": 1, "max_steps": 0}),
    "rollouts must be a string or None; got 5": (StepQueue, {"ranks": 1, "rollouts": 5}),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_invalid_option_of_a_queue_is_refused(message):
    kind, options = WRONG[message]
    with pytest.raises(ValueError, match="must") as caught:
        kind("q", **options)
    assert str(caught.value) == message
    if message.endswith(" 0"):
        kind("q", **options | {message.split()[0]: 1})
