"""The group assembler equals a slow reference over streams with every fault."""

from __future__ import annotations

import gc
import itertools
import random
import weakref

import pytest
import torch
from assembly import Line, SlowAssembler, batch_of_lines, faulty_stream
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st
from saving import as_saved
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from headrace.pipeline import RepeatSampler
from headrace.transforms import (
    BatchError,
    CompletenessGate,
    GroupAssembler,
    IncompleteGroupsError,
)
from headrace.transforms.streams import RowPiece, narrowed
from headrace.transforms.table.schema import DISPATCHED, IN_LOSS

OPTIONS = {
    "plain": {},
    "small": {"group_size": 2, "groups": 2},
    "keep": {"on_failure": "keep", "on_timeout": "keep", "timeout": 3, "min_rollouts": 1},
    "timeout": {"timeout": 2},
    "evict": {"max_pending_groups": 2, "groups": 1},
    "stale": {"max_staleness": 1, "groups": 2, "on_newer": "wait"},
}


def make(by_segment: bool, **options) -> GroupAssembler:
    return GroupAssembler(
        on_duplicate="drop",
        partition_key="partition",
        segment_key="segment" if by_segment else None,
        **options,
    )


def saved(assembler: GroupAssembler, by_segment: bool, **options) -> GroupAssembler:
    """Another assembler that continues from the saved state."""
    twin = make(by_segment, **options)
    twin.load_state_dict(as_saved(assembler.state_dict()))
    return twin


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=8)
@given(seed=st.integers(0, 10**9), by_segment=st.booleans())
def test_the_assembler_equals_a_slow_one_for_any_stream_and_resume(name, seed, by_segment):
    options = OPTIONS[name]
    slow_options = {key: value for key, value in options.items() if key != "groups"}
    fast, slow = make(by_segment, **options), SlowAssembler(by_segment=by_segment, **slow_options)
    rng, came, went = random.Random(seed), 0, 0
    for piece in faulty_stream(rng, 2, anywhere=by_segment):
        fast.put(batch_of_lines(piece, came))
        slow.put(piece)
        came += len(piece)
        if rng.random() < 0.2:
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
        counts = {reason: rows for reason, rows in slow.counts.items() if rows}
        assert {reason: rows for reason, rows in fast.counts.items() if rows} == counts
        assert (fast.held, fast.ready) == (slow.held, len(slow.whole))
        assert came == went + sum(fast.counts.values()) + fast.held


# -- laws of what goes out ------------------------------------------------------------------------------


def pieces(batch: TensorDict, size: int) -> list[TensorDict]:
    return [batch[start : start + size] for start in range(0, len(batch), size)]


@pytest.mark.parametrize("lazy", [False, True])
def test_rows_share_no_memory_with_the_collector_the_state_and_taken_rows(lazy):
    def put(*lines: Line) -> TensorDict:
        batch = batch_of_lines(lines)
        assembler.put(lazy_stack(list(batch.unbind(0))) if lazy else batch)
        return batch

    assembler = GroupAssembler()
    batch = put(Line(0, 0, 0, True), Line(0, 1, 0, True), Line(1, 2, 0, True), Line(2, 4, 0, True))
    batch["number"].fill_(-9)  # some collectors reuse the memory of a batch
    state, out = assembler.state_dict(), assembler.take()
    assert out["number"].tolist() == [0, 1]
    out["mine"] = torch.zeros(len(out))
    for row in out.unbind(0):
        row["tokens", "full"].fill_(-9)
    put(Line(1, 3, 0, True))  # taken rows may get a new column
    assert assembler.take()["tokens", "full"].tolist() == [[2] * 3, [0] * 3]
    assembler.load_state_dict(state)
    assert assembler.take()["tokens", "full"].tolist() == [[0] * 3, [1] * 3]


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        (-(2**7), 2**7 - 1, torch.int8),
        (0, 2**7, torch.int16),
        (-(2**7) - 1, 0, torch.int16),
        (-(2**15), 2**15 - 1, torch.int16),
        (0, 2**15, torch.int32),
        (-(2**15) - 1, 0, torch.int32),
        (-(2**31), 2**31 - 1, torch.int32),
        (0, 2**31, torch.int64),
        (-(2**31) - 1, 0, torch.int64),
    ],
)
def test_saved_integers_have_the_smallest_dtype_that_holds_them(low, high, dtype):
    found = narrowed(torch.tensor([0, high, low]))
    assert (found.dtype, found.tolist()) == (dtype, [0, high, low])


def test_a_batch_is_of_the_partition_that_had_enough_whole_groups_first():
    """Groups become whole in the order 0, 1, …, of the partitions 5, 3, 3, 5, 4, 5, 4."""
    assembler = GroupAssembler(groups=2, partition_key="partition")
    for group, partition in enumerate((5, 3, 3, 5, 4, 5, 4)):
        assembler.put(batch_of_lines([Line(group, group, 0, True, 0, partition, 0, 1)]))
    taken = [assembler.take()["group_id"].tolist() for _ in range(3)]
    assert (taken, assembler.take(), assembler.ready) == ([[1, 2], [0, 3], [4, 6]], None, 1)
    assert assembler.take_rest()["group_id"].tolist() == [5]
    assert assembler.take_rest() is None
    assembler.put(batch_of_lines([Line(g, g, 0, True, 0, g % 2, 0, 1) for g in range(10, 15)]))
    assembler.want(2)
    assert [assembler.take()["group_id"].tolist() for _ in range(2)] == [[10, 12], [11, 13]]
    assembler.want(1)
    assert assembler.take()["group_id"].tolist() == [14]


def test_a_selector_chooses_among_surplus_rollouts():
    asked = []

    def extremes(rewards, k):
        asked.append((rewards.tolist(), k))
        return torch.cat([rewards.argmin().view(1), rewards.argmax().view(1)])

    lines = [Line(0, r, s, s == 1, expected=4) for r in (3, 0, 2) for s in (0, 1)]
    assembler = GroupAssembler(group_size=2, on_surplus=extremes)
    batch = batch_of_lines(lines)
    batch["next", "reward"] = torch.tensor([9.0, 1, 9, 5, 9, 3]).unsqueeze(-1)
    for piece in pieces(batch, 1):
        assembler.put(piece)
        assert assembler.take() is None
    assembler.put(batch_of_lines([Line(0, 1, 0, False, 3, expected=4)], 6))
    out = assembler.take()
    assert asked == [([5.0, 3.0, 1.0], 2)]
    assert out["rollout_id"].tolist() == [0, 0, 3, 3]
    assert (out["expected_rollouts"].tolist(), out[DISPATCHED].tolist()) == ([2] * 4, [4] * 4)
    assert (assembler.counts["surplus"], assembler.counts["failed"]) == (2, 1)
    by_number = GroupAssembler(group_size=2, on_surplus=extremes, segment_key="segment", timeout=1)
    by_number.put(batch[[1, 0, 3, 2, 5, 4]])
    by_number.put(batch_of_lines([]))
    assert asked[1:] == asked[:1]
    every = GroupAssembler(group_size=2, on_surplus=lambda rewards, k: rewards > 0.0, timeout=1)
    every.put(batch)
    message = r"on_surplus must select 2 of the 3 rollouts of group 0.* returned \[True, True, True\]"
    with pytest.raises(BatchError, match=message):
        every.put(batch_of_lines([]))
    masked = GroupAssembler(group_size=2, on_surplus=lambda rewards, k: rewards < 5.0, timeout=1)
    masked.put(batch)
    masked.put(batch_of_lines([]))
    assert masked.take()["rollout_id"].tolist() == [2, 2, 3, 3]


# -- groups that do not become whole -----------------------------------------------------------------------


def test_missing_rollouts_are_requested_up_to_a_limit():
    asked = []
    assembler = GroupAssembler(
        on_failure="refill", refill=lambda group, missing: asked.append((group, missing)), max_refills=2
    )
    assembler.put(batch_of_lines([Line(4, 0, 0, True, 3, expected=3), Line(4, 1, 0, True, expected=3)]))
    assembler.put(batch_of_lines([Line(4, 2, 0, True, 3, expected=3)], 2))
    assert asked == [(4, 2)]
    assembler.put(batch_of_lines([Line(4, r, 0, True, s, expected=3) for r, s in ((7, 0), (8, 2))], 3))
    assert asked == [(4, 2), (4, 1)]
    whole = saved_plain(assembler, on_failure="refill", refill=print, max_refills=2)
    whole.put(batch_of_lines([Line(4, 9, 0, True, expected=3)], 5))
    out = whole.take()
    assert out["rollout_id"].tolist() == [1, 7, 9]
    assert (out["expected_rollouts"].tolist(), out[DISPATCHED].tolist()) == ([3] * 3, [6] * 3)
    assembler.put(batch_of_lines([Line(4, 9, 0, True, 3, expected=3)], 5))
    assert len(asked) == 2
    assert (assembler.pending, assembler.counts["failed"]) == (0, 6)


def saved_plain(assembler: GroupAssembler, **options) -> GroupAssembler:
    twin = GroupAssembler(**options)
    twin.load_state_dict(assembler.state_dict())
    return twin


def test_groups_that_wait_too_long_are_refilled_or_refused():
    def wait(**options) -> GroupAssembler:
        assembler = GroupAssembler(timeout=2, **options)
        assembler.put(batch_of_lines([Line(0, 0, 0, True), Line(0, 1, 0, False)]))
        assembler.put(batch_of_lines([Line(1, 2, 0, False)], 2))
        assert assembler.pending == 2
        assembler.put(batch_of_lines([Line(1, 2, 1, False)], 3))
        return assembler

    asked = []
    again = wait(on_timeout="refill", refill=lambda *what: asked.append(what))
    assert (asked, again.pending) == ([(0, 1)], 2)
    again.put(batch_of_lines([]))
    assert (asked, again.pending) == ([(0, 1), (1, 2)], 2)  # the timeout of group 0 has restarted
    again.put(batch_of_lines([]))
    assert (again.pending, again.counts["timeout"]) == (1, 2)
    with pytest.raises(
        IncompleteGroupsError, match=r"group 0 has 1 of 2 \(1 completed, 1 unfinished\), 2 puts"
    ):
        wait(on_timeout="raise")


def test_a_refilled_group_gets_the_full_timeout_again(monkeypatch):
    clock, asked = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    options = {"on_timeout": "refill", "refill": lambda *what: asked.append(what)}
    assembler = GroupAssembler(timeout_seconds=10, max_refills=2, **options)
    assembler.put(batch_of_lines([Line(0, 0, 0, True)]))
    for seconds, times in ((11, 1), (9, 1), (2, 2)):
        clock[0] += seconds
        assembler.put(batch_of_lines([]))
        assert len(asked) == times


def test_timeouts_count_during_silence_and_restarts(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    assembler = GroupAssembler(timeout_seconds=10, on_timeout="keep", min_rollouts=1)
    assembler.put(batch_of_lines([Line(0, 0, 0, True)]))
    clock[0] = 106.0
    assert assembler.take() is None
    state = assembler.state_dict()
    clock[0] = 3.0  # another process, another clock
    assembler = GroupAssembler(timeout_seconds=10, on_timeout="keep", min_rollouts=1)
    assembler.load_state_dict(state)
    assert assembler.take() is None
    clock[0] = 7.0
    assert assembler.take()["rollout_id"].tolist() == [0]
    assembler = GroupAssembler(timeout_seconds=10, on_timeout="keep", min_rollouts=1, max_idle=2)
    for group in range(5):  # groups that are kept after a timeout are not a stall
        assembler.put(batch_of_lines([Line(group, group, 0, True)]))
        clock[0] += 11
        assert assembler.take()["group_id"].tolist() == [group]


@pytest.mark.parametrize("lazy", [False, True], ids=["dense", "lazy"])
def test_stale_rows_are_masked_or_their_group_is_dropped(lazy):
    lines = [Line(g, 2 * g + r, s, s == 1, version=g + s) for g in (0, 1) for r in (0, 1) for s in (0, 1)]
    batch = batch_of_lines(lines)

    def take(**options) -> tuple[TensorDict | None, dict[str, int]]:
        assembler = GroupAssembler(max_staleness=1, on_newer="wait", **options)
        assembler.put(lazy_stack(list(batch.unbind(0))) if lazy else batch)
        assembler.version = 2
        return assembler.take(), assembler.counts

    dropped, counts = take()
    assert (dropped["group_id"].unique().tolist(), counts["stale"]) == ([1], 4)
    masked, counts = take(on_stale="mask")
    assert (len(masked), counts["stale"]) == (8, 0)
    assert masked[IN_LOSS].tolist() == [False, True, False, True, True, True, True, True]
    assert masked["masks", "all_assistant_mask"].any(-1).tolist() == masked[IN_LOSS].tolist()
    words = ("pipeline=grpo", "pipeline.stages.collapse.reward=sum", "pipeline.stages.split.minibatches=1")
    run = composed(*words).run(masked)
    assert run.ledger.counts()["pipeline/no_loss_tokens"] == 2


@pytest.mark.filterwarnings("ignore:no group may take longer")
def test_capacity_is_the_number_of_groups_that_can_be_trained_in_time():
    sampler = RepeatSampler(10, group_size=2, prompts_per_batch=3, remainder="drop")
    draws = sampler.draws()
    assembler = GroupAssembler(groups=2, max_staleness=1)
    assert assembler.capacity() == 4
    draw = next(draws)
    assembler.announce(draw)
    assert (assembler.capacity(), assembler.pending, assembler.held) == (1, 3, 0)
    with pytest.raises(BatchError, match=r"announced only once, before its first row; found 0, 1, 2"):
        assembler.announce(draw)
    for line in [Line(group, 2 * group + r, 0, True) for group in (0, 1) for r in (0, 1)]:
        assembler.put(batch_of_lines([line]))
    assert assembler.capacity() == 1
    assert assembler.take() is not None
    assert (assembler.capacity(), saved_plain(assembler, groups=2, max_staleness=1).capacity()) == (1, 1)
    assembler.version += 1
    assert assembler.capacity() == 3
    with pytest.raises(ValueError, match="needs max_staleness or steps_ahead, with groups"):
        GroupAssembler(groups=2).capacity()
    with pytest.raises(BatchError, match="announced only once, before its first row; found 0"):
        assembler.announce(draw[:2])


@pytest.mark.parametrize("on_duplicate", ["raise", "drop"])
def test_a_rollout_that_restarts_before_its_end_is_refused(on_duplicate):
    def piece(*rollouts: int) -> TensorDict:
        rows = batch_of_lines([Line(0, rollout, 0, False) for rollout in rollouts])
        return rows.set("is_init", torch.ones(len(rows), dtype=torch.bool))

    for pieces in ([piece(0, 0)], [piece(0, 1), piece(0)]):
        assembler = GroupAssembler(on_duplicate=on_duplicate)
        for rows in pieces[:-1]:
            assembler.put(rows)
        held = assembler.held
        with pytest.raises(BatchError, match=r"begin only once \(is_init\).*rollout 0\..*StampIds\(worker"):
            assembler.put(pieces[-1])
        assert assembler.held == held
    ends = piece(5).set(("next", "done"), torch.ones(1, 1, dtype=torch.bool))
    assembler = GroupAssembler(on_duplicate="drop")
    for _ in range(2):  # a row that is sent twice is another fault
        assembler.put(ends)
    assert assembler.counts["duplicate"] == 1


def test_text_ids_are_shown_in_errors():
    batch = batch_of_lines([Line(0, 0, 0, True), Line(0, 1, 0, True)]).exclude("group_id", "rollout_id")
    batch["group_id"], batch["rollout_id"] = ["prompt a"] * 2, ["one", "two"]
    assembler = GroupAssembler()
    assembler.put(batch[:1])
    with pytest.raises(BatchError, match="found again rollout 'one' of group 'prompt a'"):
        assembler.put(batch[:1])
    assembler.put(batch[1:])
    assert sorted(assembler.take()["rollout_label"]) == ["one", "two"]


def test_counts_of_groups_and_rollouts_are_integers():
    assembler = GroupAssembler(groups=2, max_staleness=1)
    calls = {"n": assembler.take, "rollouts": assembler.capacity, "groups": assembler.want}
    calls |= {"step": assembler.commit}
    for (name, call), wrong in itertools.product(calls.items(), (1.5, True, "2", float("nan"))):
        with pytest.raises(ValueError, match=f"{name} must be an integer"):
            call(wrong)


# -- a long stream ----------------------------------------------------------------------------------------


IDS = ("closed_groups", "late_groups", "closed_rollouts")


def held_bytes(assembler: GroupAssembler, ids: bool = False) -> int:
    """The bytes of an assembler's tensors and numbers without closed ids or, with `ids`, of closed ids."""
    storages, numbers = {}, 0
    state = assembler.state_dict()
    closed = [state["state"].pop(name) for name in IDS]

    def visit(value) -> None:
        nonlocal numbers
        numbers += isinstance(value, int | float)
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            visit(inner)

    visit(closed if ids else state)
    return sum(storages.values()) + 8 * numbers


def test_a_waiting_rollout_of_one_row_adds_no_object_to_the_garbage_collector():
    """The garbage collector visits objects repeatedly. With one object per row, puts took twice as long."""

    def put(assembler: GroupAssembler, rows: int) -> int:
        ids = torch.arange(rows)
        columns = {
            "group_id": ids % 4,
            "rollout_id": ids,
            ("next", "done"): torch.ones(rows, dtype=torch.bool),
        }
        assembler.put(TensorDict(columns, batch_size=[rows]))
        gc.collect()
        return len(gc.get_objects())

    few, many = (GroupAssembler(group_size=1000) for _ in range(2))
    before = put(few, 40)
    assert put(many, 400) - before < 100
    assert many.held == 400


def test_waiting_groups_and_rollouts_have_no_dict():
    assembler = GroupAssembler()
    assembler.put(batch_of_lines([Line(0, 0, 0, False)]))
    (group,) = assembler._stream.waiting.values()
    assert not any(hasattr(each, "__dict__") for each in (group, *group.rollouts.values()))


def test_a_refused_put_keeps_no_memory_of_its_batch():
    assembler = GroupAssembler(group_size=2)
    batch = batch_of_lines([Line(4, 0, 0, True), Line(9, 0, 0, True)])
    with pytest.raises(BatchError, match="a rollout belongs to one group"):
        assembler.put(batch)
    seen = weakref.ref(batch)
    del batch
    gc.collect()
    assert seen() is None


def test_taken_rows_are_not_kept():
    assembler = GroupAssembler(group_size=1)
    before = sum(isinstance(each, RowPiece) for each in gc.get_objects())
    for number in range(3):
        assembler.put(batch_of_lines([Line(number, number, 0, True)]))
        assembler.take()
    gc.collect()
    assert sum(isinstance(each, RowPiece) for each in gc.get_objects()) == before


def test_each_row_of_a_rollout_that_was_taken_is_a_duplicate():
    """Two such rows in one put are two duplicates."""
    row = {"group_id": [4], "rollout_id": [0], ("next", "done"): [True]}
    assembler = GroupAssembler(group_size=1, on_duplicate="drop")
    once = TensorDict(row, batch_size=[1])
    assembler.put(once)
    assembler.take()
    assembler.put(torch.cat([once, once]))
    assert assembler.counts["duplicate"] == 2


def test_waiting_rows_keep_at_most_twice_their_memory_and_are_copied_seldom():
    """128 groups of one put are taken one by one. The rest is copied when less than half is left."""
    assembler, sizes = GroupAssembler(groups=1), []
    assembler.put(batch_of_lines([Line(g, 2 * g + r, 0, True) for g in range(128) for r in (0, 1)]))
    while assembler.take() is not None:
        assert assembler.held == 256 - 2 * len(sizes) - 2
        sizes.append(sum(len(piece.batch) for piece in assembler._stream.pieces))
    assert sizes == [256] * 64 + [126] * 32 + [62] * 16 + [30] * 8 + [14] * 4 + [6] * 2 + [2] + [0]


@pytest.mark.slow
def test_a_long_faulty_stream_gives_each_good_group_once_and_leaks_nothing():
    """Groups have four rollouts of two segments.

    Of every hundred rows, about one is lost, one fails and one comes twice.
    """
    rng, size, groups = random.Random(3), 48, 400
    stream, clean = [], set()
    for group in range(groups):
        rollouts = range(4 * group, 4 * group + 4)
        lines = [Line(group, rollout, s, s == 1, expected=4) for s in (0, 1) for rollout in rollouts]
        draws = [rng.random() for _ in lines]
        clean |= {group} if min(draws) >= 0.02 else set()
        for line, draw in zip(lines, draws, strict=True):
            kept = [] if draw < 0.01 else [line._replace(status=3)] if draw < 0.02 else [line]
            stream += kept * (2 if 0.02 <= draw < 0.03 else 1)
    assembler = GroupAssembler(groups=8, timeout=12, on_duplicate="drop", segment_key="segment")
    out, held = [], []
    for start in range(0, len(stream), size):
        piece = stream[start : start + size]
        batch = batch_of_lines(piece).exclude("text")
        batch["number"] = torch.tensor([2 * line.rollout + line.segment for line in piece])
        assembler.put(batch)
        while (taken := assembler.take()) is not None:
            out += taken["number"].split(8)
        held.append(held_bytes(assembler))
    rest = assembler.take_rest()
    out += [] if rest is None else rest["number"].split(8)
    assert sorted(rows.tolist() for rows in out) == [[*range(8 * g, 8 * g + 8)] for g in sorted(clean)]
    assert 0.8 * groups < len(clean) < 0.9 * groups
    assert len(stream) == 8 * len(out) + sum(assembler.counts.values()) + assembler.held
    # Each group with a fault leaves two intervals of closed ids: its own id, and those of its rollouts.
    assert held_bytes(assembler, ids=True) <= 32 * (groups - len(clean)) + 200
    assert sum(held[-15:]) < 1.3 * sum(held[15:30])


def test_a_stream_may_have_a_billion_puts():
    """A row has the number of its put and its place in the put, as one number of 64 bits."""
    old, new = GroupAssembler(), GroupAssembler()
    old.put(batch_of_lines([Line(0, 0, 0, True)]))
    state = old.state_dict()
    state["state"]["puts"] = 2**30
    new.load_state_dict(state)
    new.put(batch_of_lines([Line(0, 1, 0, True)], 1))
    assert saved_plain(new).take()["number"].tolist() == [0, 1]


def test_an_evicted_group_is_not_requested_again():
    asked = []
    options = {"on_failure": "refill", "refill": lambda *what: asked.append(what), "max_pending_groups": 1}
    assembler = GroupAssembler(**options)
    assembler.put(batch_of_lines([Line(0, 0, 0, True, 3), Line(0, 1, 0, True, 3), Line(1, 2, 0, True)]))
    assert (asked, assembler.pending, assembler.counts["evicted"]) == ([], 1, 2)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_texts_numbers_and_non_tensors_come_out_unchanged(lazy, resumed):
    values = ["a", 1, 2.5, {"k": [1]}]
    assembler = GroupAssembler()
    for number, value in enumerate(values):
        batch = batch_of_lines([Line(0, number, 0, True, expected=4)])
        batch["answer"] = NonTensorStack(NonTensorData(value))
        if not lazy:  # a column may have one text for all rows
            batch["task"], batch["next", "source"] = "gsm8k", "web"
        assembler.put(lazy_stack(list(batch.unbind(0))) if lazy else batch)
        if resumed:
            assembler = saved_plain(assembler)
    out = assembler.take()
    found = [row["answer"] for row in out.unbind(0)]
    assert found == values
    assert [type(value) for value in found] == [str, int, float, dict]
    if not lazy:
        assert [row["task"] for row in out.unbind(0)] == ["gsm8k"] * 4
        assert [row["next", "source"] for row in out.unbind(0)] == ["web"] * 4


@pytest.mark.parametrize(
    ("columns", "trains"),
    [
        ({"done": [0, 0, 1], "is_init": [1, 0, 0]}, True),
        ({"done": [0, 0, 1], "is_init": [0, 1, 0]}, False),  # a row comes before the first row of the rollout
        (
            {"done": [0, 1, 1], "is_init": [1, 0, 0], "expected_segments": [2] * 3},
            False,
        ),  # a segment lacks its first rows
        ({"done": [0, 1, 1], "is_init": [1, 0, 1], "expected_segments": [2] * 3}, True),
    ],
)
def test_complete_groups_pass_a_strict_gate(columns, trains):
    batch = batch_of_lines([Line(0, 0, s, bool(done), expected=1) for s, done in enumerate(columns["done"])])
    batch["is_init"] = torch.tensor(columns["is_init"]).bool()
    if "expected_segments" in columns:
        batch["expected_segments"] = torch.tensor(columns["expected_segments"])
    assembler = GroupAssembler()
    assembler.put(batch)
    out = assembler.take()
    assert (out is not None) == trains
    assert out is None or len(CompletenessGate()(out)) == 3
