"""Rows that break a rule are refused with the whole rule and all of them, and then nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from assembly import Line, batch_of_lines
from tensordict import TensorDict, TensorDictBase, lazy_stack

from headrace.transforms import BatchError, GroupAssembler, MissingKeyError

STAMPED = (
    "Ids are stamped where rollouts are dispatched: by headrace.pipeline.StampIds if the environment draws "
    "its own prompts, else by RepeatSampler.draws()"
)
WORKERS = "Workers need their own ids: set StampIds(worker=…) or RepeatSampler(rank=…)"
TWICE = (
    "a rollout must end only once, and a segment must arrive only once; found again {}. Do two workers use "
    f"the same numbers, or were rows sent twice? {WORKERS}. Set segment_key if rows may arrive in another "
    "order. Set on_duplicate='drop' to keep the first of each"
)


def rows_of(lines: list[Line], start: int = 0, **columns: Any) -> TensorDict:
    """These rows, with the columns of a rollout of one segment unless others are given."""
    rows = batch_of_lines(lines, start)
    columns = {"expected_segments": [1] * len(lines), "is_init": [False] * len(lines)} | columns
    for key, values in columns.items():
        rows[key] = torch.tensor(values)
    return rows


def begun(**options: Any) -> GroupAssembler:
    """Group 9 was taken with rollouts 90 and 91, and 8 was discarded. Group 0 has rollout 0 and half of 1."""
    assembler = GroupAssembler(**options)
    init = {"is_init": [True, True]}
    assembler.put(rows_of([Line(9, 90, 0, True), Line(9, 91, 0, True)], **init))
    assert assembler.take() is not None
    assembler.put(rows_of([Line(8, 80, 0, True)], is_init=[True]))
    assembler.discard_batch()
    assembler.put(rows_of([Line(0, 0, 0, True), Line(0, 1, 0, False)], **init))
    return assembler


def state_of(assembler: GroupAssembler) -> str:
    state = assembler.state_dict()
    state["state"]["groups"].pop("born_time")  # ages change with time
    return repr(state)


BROKEN: dict[str, tuple[list[Line], dict[str, Any], dict[str, Any]]] = {
    "every row needs a partition ≥ 0; found -2 at row 1: groups of different partitions would be mixed up": (
        [Line(1, 5, 0, True), Line(1, 6, 0, True, partition=-2)],
        {},
        {"partition_key": "partition"},
    ),
    "every row needs a group_id ≥ 0; found -1 at row 0, -4 at row 2: rows without an id would be compared "
    f"with one another. {STAMPED}": (
        [Line(-1, 5, 0, True), Line(2, 6, 0, True), Line(-4, 7, 0, True)],
        {},
        {},
    ),
    "every row needs a rollout_id ≥ 0; found -5 at row 0: rows without an id would be treated as one "
    f"rollout. {STAMPED}": ([Line(1, -5, 0, True)], {}, {}),
    "every row needs a segment number ≥ 0; found -1 at row 0: a rollout has segments 0, 1, …": (
        [Line(1, 5, -1, True)],
        {},
        {"segment_key": "segment"},
    ),
    "status must be one of 0 COMPLETED, 1 TRUNCATED, 2 ABORTED, 3 FAILED; found 4 at row 0, -1 at row 2": (
        [Line(1, 5, 0, True, 4), Line(1, 6, 0, True, 3), Line(1, 7, 0, True, -1)],
        {},
        {},
    ),
    "no row may be newer than assembler.version=0; found 3 in group 1, 4 in group 2. Set assembler.version "
    "when you update the policy, before the workers get the weights, or set on_newer='wait'": (
        [Line(1, 5, 0, True, version=3), Line(2, 7, 0, True, version=4), Line(1, 6, 0, True, version=3)],
        {},
        {"max_staleness": 2},
    ),
    "expected_segments must be one number ≥ 1 per rollout; found 0 at row 1": (
        [Line(1, 5, 0, True), Line(1, 6, 0, True)],
        {"expected_segments": [1, 0]},
        {},
    ),
    "expected_segments must be one number ≥ 1 per rollout; found rollout 5 ([2, 3]), rollout 1 ([1, 2])": (
        [Line(1, 5, 0, True), Line(1, 5, 1, True), Line(0, 1, 1, True)],
        {"expected_segments": [2, 3, 2]},
        {},
    ),
    "expected_rollouts must be one number ≥ 1 per group; found group 1: [2, 3], group 0: [2, 5]. Check that "
    "all workers send the same number": (
        [
            Line(1, 5, 0, True, expected=3),
            Line(1, 6, 0, True, expected=2),
            Line(0, 2, 0, True, expected=5),
        ],
        {},
        {},
    ),
    "expected_rollouts must be one number ≥ 2 per group; found group 1: [1]. Check that all workers send the "
    "same number": ([Line(1, 5, 0, True, expected=1)] * 2, {}, {"group_size": 2}),
    "a rollout belongs to one group; found rollout 1 in groups [0, 3], rollout 90 in groups [3] and in a "
    f"closed group. Are ids reused? {WORKERS}": ([Line(3, 1, 1, True), Line(3, 90, 0, True)], {}, {}),
    "a rollout must end with its last segment; found segment 2 of rollout 5, which ends with 0, segment 3 of "
    f"rollout 6, which ends with 1. Are ids reused? {WORKERS}": (
        [Line(1, 5, 0, True), Line(1, 5, 2, False), Line(1, 6, 1, True), Line(1, 6, 3, False)],
        {},
        {"segment_key": "segment"},
    ),
    "a rollout must begin only once (is_init); found a second beginning before the end of rollout 5, rollout "
    f"1. The rewards of two rollouts would be added up. {WORKERS}": (
        [Line(1, 5, 0, False), Line(1, 5, 0, False), Line(0, 1, 0, True)],
        {"is_init": [True, True, True]},
        {"on_duplicate": "drop"},
    ),
    TWICE.format("rollout 0 of group 0, rollout 90 of group 9"): (
        [Line(0, 0, 5, True), Line(9, 90, 5, True)],
        {},
        {},
    ),
    TWICE.format("rollout 5 of group 1"): ([Line(1, 5, 0, True)] * 3, {"is_init": [True] * 3}, {}),
    TWICE.format("segment 0 of rollout 0 of group 0, segment 1 of rollout 5 of group 1"): (
        [Line(0, 0, 0, True), Line(1, 5, 1, False), Line(1, 5, 1, False)],
        {},
        {"segment_key": "segment"},
    ),
    "rollouts must arrive before their group is closed; too late: rollout 85 of group 8, rollout 86 of group "
    "8. Set on_late='drop' to drop them": (
        [Line(8, 85, 0, True), Line(8, 86, 0, True)],
        {},
        {"on_late": "raise"},
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_refused_batch_changes_nothing(message):
    """A correct row before the others changes only the numbers of rows, and does not come in either."""
    lines, columns, options = BROKEN[message]
    assembler = begun(**options)
    before = state_of(assembler)
    with pytest.raises(BatchError) as caught:
        assembler.put(rows_of(lines, 50, **columns))
    assert str(caught.value) == message
    good = {key: [values[0] if key == "is_init" else 1, *values] for key, values in columns.items()}
    with pytest.raises(BatchError):
        assembler.put(rows_of([Line(4, 40, 0, True, expected=2), *lines], 50, **good))
    assert state_of(assembler) == before
    assembler.put(rows_of([Line(0, 1, 1, True)]))
    assert len(assembler.take()) == 3


def test_a_batch_that_breaks_several_rules_is_refused_by_the_first():
    """Each batch lacks the row that breaks the first rule of the batch before."""
    assembler = begun(max_staleness=1, on_stale="drop", on_late="raise")
    lines = [
        Line(8, 85, 0, True),
        Line(0, 0, 0, True),
        Line(3, 1, 0, True),
        Line(0, 7, 0, True, expected=9),
        Line(0, 6, 0, True, version=1),
    ]
    found = []
    while lines:
        with pytest.raises(BatchError) as caught:
            assembler.put(rows_of(lines))
        found.append(str(caught.value).split(";")[0].split(" (")[0])
        lines.pop()
    assert found == [
        "no row may be newer than assembler.version=0",
        "expected_rollouts must be one number ≥ 1 per group",
        "a rollout belongs to one group",
        "a rollout must end only once, and a segment must arrive only once",
        "rollouts must arrive before their group is closed",
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [Line(0, 2, 0, False), Line(9, 93, 0, False), Line(5, 50, 0, False), Line(8, 87, 0, False)],
            "a group must be announced only once, before its first row; found 0, 9, 8. Are ids reused?",
        ),
        (
            [Line(5, 50, 0, False), Line(5, 51, 0, False, expected=3)],
            "expected_rollouts must be one number ≥ 1 per group; found group 5: [2, 3]. Check that all "
            "workers send the same number",
        ),
    ],
)
def test_a_refused_announcement_changes_nothing(lines, message):
    assembler = begun()
    before = state_of(assembler)
    with pytest.raises(BatchError) as caught:
        assembler.announce(rows_of(lines))
    assert str(caught.value) == message
    assert state_of(assembler) == before


def wide(rows: TensorDict) -> TensorDict:
    return rows.set(("tokens", "full"), torch.zeros(1, 9, dtype=torch.int64))


BOTH = "the new rows and the held rows must"
CPU = "device(type='cpu')"
PAD = "pad all rows to one width, or keep ragged rows in a lazy stack"
CHANGED: dict[str, Callable[[TensorDict], TensorDictBase]] = {
    f"{BOTH} have the same columns, types and batch sizes; only some have ('tokens', 'full'), number, text": (
        lambda rows: rows.exclude("text", "number", ("tokens", "full"))
    ),
    f"{BOTH} have the same columns, types and batch sizes; only some have extra": (
        lambda rows: rows.set("extra", TensorDict({}, [1, 1]))
    ),
    f"{BOTH} all be lazy stacks or all be dense; found both": lambda rows: lazy_stack(list(rows.unbind(0))),
    f"{BOTH} have the same dtypes and widths; 'number' is (torch.int64, torch.Size([]), {CPU}) in held rows "
    f"and (torch.float32, torch.Size([]), {CPU}) in new rows: {PAD}": (
        lambda rows: rows.set("number", torch.zeros(1))
    ),
    f"{BOTH} have the same dtypes and widths; ('tokens', 'full') is (torch.int64, torch.Size([3]), {CPU}) in "
    f"held rows and (torch.int64, torch.Size([9]), {CPU}) in new rows: {PAD}": wide,
    "GroupAssembler needs one bool per row in ('next', 'done') (done_key); found torch.float32": (
        lambda rows: rows.set(("next", "done"), torch.ones(1))
    ),
    "rollout_id must be integers, got torch.float32. If these are whole numbers, convert them with .long(); "
    "ids may also be strings": lambda rows: rows.set("rollout_id", torch.ones(1)),
    "GroupAssembler needs one number per row in 'rollout_id' (rollout_key), for 1 row; found (1, 2)": (
        lambda rows: rows.set("rollout_id", torch.ones(1, 2, dtype=torch.int64))
    ),
}


@pytest.mark.parametrize("message", CHANGED)
def test_a_changed_column_is_named(message):
    held = not message.startswith(("GroupAssembler", "rollout_id"))
    assembler = begun() if held else GroupAssembler()
    before = state_of(assembler)
    with pytest.raises(BatchError) as caught:
        assembler.put(CHANGED[message](rows_of([Line(1, 5, 0, True)])))
    assert str(caught.value) == message
    assert state_of(assembler) == before


def test_a_missing_column_is_named():
    for key in ("group_id", "rollout_id", "expected_rollouts", ("next", "done")):
        with pytest.raises(MissingKeyError, match="needs the key") as info:
            GroupAssembler().put(batch_of_lines([Line(0, 0, 0, True)]).exclude(key))
        assert repr(key) in str(info.value)
    GroupAssembler(group_size=2).put(batch_of_lines([Line(0, 0, 0, True)]).exclude("expected_rollouts"))
    GroupAssembler(done_key=None).put(batch_of_lines([Line(0, 0, 0, True)]).exclude(("next", "done")))


def test_a_state_of_an_assembler_with_other_columns_is_refused():
    names = ("partition", "group", "expected", "rollout", "segment", "done", "status", "version", "reward")
    reads = dict.fromkeys(f"{name}_key" for name in names)
    reads |= {"group_key": "group_id", "rollout_key": "rollout_id", "expected_key": "expected_rollouts"}
    reads |= {"done_key": ("next", "done"), "loss_mask_key": None, "group_size": None, "in_order": True}
    mine = reads | {"segment_key": "segment", "in_order": False}
    with pytest.raises(ValueError, match="reads the same columns") as caught:
        GroupAssembler(segment_key="segment").load_state_dict(GroupAssembler().state_dict())
    assert str(caught.value) == (
        f"the state must be of an assembler that reads the same columns ({mine}); it is of one with {reads}"
    )
