"""Only groups with all their rollouts pass."""

from __future__ import annotations

import pytest
import torch
from alone import said_by
from batches import no_rows
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from headrace.transforms import (
    BatchError,
    CompletenessGate,
    GroupAssembler,
    IncompleteGroupsError,
    MissingKeyError,
    Status,
    incomplete_groups,
)

DONE, CUT, ABORTED, FAILED = Status.COMPLETED, Status.TRUNCATED, Status.ABORTED, Status.FAILED


def test_rollouts_are_counted_not_rows(make_batch):
    # group 0 has two rows of one rollout: one rollout is missing
    batch = make_batch([1.0, 1, 2, 3], [0, 0, 1, 1], [0, 0, 1, 2])
    with pytest.raises(
        IncompleteGroupsError, match=r"1 incomplete group: group 0 has 1 of 2 \(1 completed\)"
    ):
        CompletenessGate(group_size=2)(batch)
    fanned = make_batch([1.0, 1, 2, 3, 3], [0, 0, 0, 1, 1], [0, 0, 5, 1, 2])
    assert len(CompletenessGate(group_size=2)(fanned)) == 5


def test_the_error_doubts_a_group_size_that_most_groups_do_not_have(make_batch):
    """Dropping the incomplete groups, the usual advice, would drop most groups."""
    batch = make_batch([0.0] * 8, [0, 0, 1, 1, 2, 2, 2, 2], range(8))
    with pytest.raises(
        IncompleteGroupsError, match=r"Is group_size=4 wrong\? 2 of 3 groups have 2 rollouts\. S"
    ):
        CompletenessGate(group_size=4)(batch)
    # The error has no doubt if only one group is incomplete, or if incomplete groups differ in size.
    for groups in ([0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [0, 0, 1, 1, 1, 2, 2, 2, 2]):
        with pytest.raises(IncompleteGroupsError, match=r"completed\)\. Set "):
            CompletenessGate(group_size=4)(make_batch([0.0] * len(groups), groups, range(len(groups))))


@pytest.mark.parametrize(
    ("option", "more", "todo"),
    [
        ({"group_size": 5}, {}, "set group_size=2"),
        ({}, {"expected_rollouts": [5] * 6}, r"correct the column 'expected_rollouts' \(expected_key\)"),
    ],
)
def test_the_error_names_the_size_of_all_groups_if_none_has_the_given_size(make_batch, option, more, todo):
    """Dropping the incomplete groups would drop every row."""
    batch = make_batch([0.0] * 6, [0, 0, 1, 1, 2, 2], range(6))
    for name, values in more.items():
        batch[name] = torch.tensor(values)
    said = rf"All 3 groups have the size 2\. If so many were dispatched, {todo}, else wait for the missing"
    with pytest.raises(IncompleteGroupsError, match=said) as refused:
        CompletenessGate(**option)(batch)
    assert "drop" not in str(refused.value)
    status = torch.tensor([DONE, FAILED] * 3)  # a failed rollout was dispatched
    with pytest.raises(IncompleteGroupsError, match="on_incomplete='drop'"):
        CompletenessGate(**option)(batch.clone().set("status", status))


def test_rows_with_a_repeated_rollout_id_are_named_in_an_incomplete_group(make_batch):
    """Waiting, the usual advice, would not help, because no other id comes. Failed rollouts have ids, too."""
    ids = r"Are rollout ids repeated\? Group 4 has 3 rows, but 2 rollout ids: rows \[2, 4\] have the id 9\. S"
    with pytest.raises(IncompleteGroupsError, match=ids):
        CompletenessGate(group_size=3)(make_batch([0.0] * 6, [4, 0, 4, 0, 4, 0], [8, 1, 9, 2, 9, 3]))
    for size, rollouts, status in ((3, [8, 9], [DONE] * 2), (2, [8, 8, 9], [FAILED, FAILED, DONE])):
        batch = make_batch([0.0] * len(rollouts), [4] * len(rollouts), rollouts, status=status)
        with pytest.raises(IncompleteGroupsError, match=r"\)\. Set "):
            CompletenessGate(group_size=size)(batch)


def test_truncated_rollouts_count_and_failed_or_aborted_do_not(make_batch):
    batch = make_batch([0.0] * 6, [0, 0, 1, 1, 2, 2], status=[DONE, CUT, DONE, FAILED, ABORTED, DONE])
    with pytest.raises(
        IncompleteGroupsError,
        match=r"2 incomplete groups: group 1 has 1 of 2 \(1 completed, 1 failed\), "
        r"group 2 has 1 of 2 \(1 aborted, 1 completed\)",
    ):
        CompletenessGate(group_size=2)(batch)
    outcome = said_by(CompletenessGate(group_size=2, on_incomplete="drop"), batch)
    assert outcome.batch["group_id"].tolist() == [0, 0]
    assert outcome.reasons == ["trained", "trained", "incomplete", "failed", "failed", "incomplete"]


@pytest.mark.parametrize("states", [[CUT, FAILED, DONE], [FAILED, DONE, CUT], [DONE, CUT, FAILED]])
def test_a_rollout_has_the_status_of_its_worst_segment(make_batch, states):
    batch = make_batch([0.0] * 4, [0] * 4, [0, 1, 1, 1], status=[CUT, *states])
    with pytest.raises(IncompleteGroupsError, match=r"group 0 has 1 of 2 \(1 failed, 1 truncated\)"):
        CompletenessGate(group_size=2)(batch)


def test_a_failed_rollout_never_passes_even_with_a_retry(make_batch):
    batch = make_batch([0.0] * 3, [0, 0, 0], status=[DONE, FAILED, DONE])
    outcome = said_by(CompletenessGate(group_size=2), batch)
    assert outcome.batch["rollout_id"].tolist() == [0, 2]
    assert outcome.reasons == ["trained", "failed", "trained"]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"min_rollouts": 1}, [0, 1, 1, 2, 2, 2, 2]),
        ({"min_rollouts": 2}, [1, 1, 2, 2, 2, 2]),
        ({"min_fraction": 0.5}, [1, 1, 2, 2, 2, 2]),
        ({"min_fraction": 0.51}, [2, 2, 2, 2]),
        ({"min_rollouts": 3, "min_fraction": 0.1}, [2, 2, 2, 2]),
    ],
)
def test_on_incomplete_keep_requires_enough_rollouts(make_batch, options, kept):
    batch = make_batch([0.0] * 7, [0, 1, 1, 2, 2, 2, 2])
    assert CompletenessGate(group_size=4, on_incomplete="keep", **options)(batch)["group_id"].tolist() == kept


def test_a_column_has_the_number_of_dispatched_rollouts(make_batch):
    batch = make_batch([0.0] * 4, [0, 1, 1, 1], expected_rollouts=[1, 3, 3, 3])
    assert len(CompletenessGate()(batch)) == 4
    batch["expected_rollouts"] = torch.tensor([2, 3, 3, 3])
    with pytest.raises(IncompleteGroupsError, match="group 0 has 1 of 2"):
        CompletenessGate()(batch)
    batch["expected_rollouts"] = torch.tensor([1, 3, 2, 3])
    with pytest.raises(BatchError, match=r"one number ≥ 1 per group; found group 1: \[2, 3\]"):
        CompletenessGate()(batch)
    with pytest.raises(MissingKeyError, match=r"'expected_rollouts' \(expected_key\)"):
        CompletenessGate()(batch.exclude("expected_rollouts"))


def test_an_absent_group_is_detected(make_batch):
    batch = make_batch([0.0, 1], [3, 3])
    with pytest.raises(IncompleteGroupsError, match=r"group 8 has 0 of 2 \(no rows\)"):
        CompletenessGate(group_size=2, expected_groups=[3, 8])(batch)
    gate = CompletenessGate(group_size=2, expected_groups=lambda: [3, 8, 9], on_incomplete="drop")
    outcome = said_by(gate, batch)
    assert len(outcome.batch) == 2
    assert outcome.metrics["missing_groups"] == 2
    with pytest.raises(BatchError, match="not dispatched: 3"):
        CompletenessGate(group_size=2, expected_groups=[8])(batch)


def test_a_batch_without_rows_lacks_every_group(make_batch):
    empty = no_rows(make_batch([0.0], [3]))
    with pytest.raises(IncompleteGroupsError, match="2 incomplete groups: group 3 has 0 of 2"):
        CompletenessGate(group_size=2, expected_groups=[3, 8])(empty)
    assert CompletenessGate(group_size=2)(empty) is empty


def test_gate_and_assembler_keep_a_group_at_exactly_min_fraction(make_batch):
    """With one rollout fewer, the group leaves. Fractions such as 7/13 are rounded in floating point."""
    for expected in range(2, 14):
        for have in range(1, expected):
            rows = make_batch([0.0] * expected, [0] * expected, list(range(expected)))
            rows["status"] = torch.tensor([DONE] * have + [FAILED] * (expected - have))
            rows["expected_rollouts"] = torch.full((expected,), expected)
            rows["next", "done"] = torch.ones(expected, dtype=torch.bool)
            for least, kept in ((have / expected, have), ((have + 1) / expected, 0)):
                gate = CompletenessGate(on_incomplete="keep", min_fraction=least)
                assembler = GroupAssembler(on_failure="keep", min_fraction=least)
                assembler.put(rows)
                found = assembler.take()
                assert len(gate(rows)) == (0 if found is None else len(found)) == kept, (have, expected)


def test_the_status_after_the_step_counts(make_batch):
    batch = make_batch([0.0, 1], [0, 0], status=[DONE, DONE])
    batch["next", "status"] = torch.tensor([[DONE], [FAILED]])
    with pytest.raises(IncompleteGroupsError, match="group 0 has 1 of 2"):
        CompletenessGate(group_size=2)(batch)


def test_a_column_on_some_rows_is_refused(make_batch):
    rows = list(make_batch([0.0, 1], [0, 0]).unbind(0))
    rows[1]["status"] = torch.tensor(3)
    with pytest.raises(BatchError, match="'status' is on 1 of 2 rows: 1"):
        CompletenessGate(group_size=2)(lazy_stack(rows))


def test_a_renamed_status_column_is_required(make_batch):
    with pytest.raises(MissingKeyError, match=r"'stauts' \(status_key\)"):
        CompletenessGate(group_size=1, status_key="stauts")(make_batch([0.0], [0], status=[FAILED]))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"status": [0, 9]}, r"status must be one of .*; found 9 at row 1"),
        ({"rollout_id": [5, 5], "group_id": [0, 1]}, r"rollout 5 in groups \[0, 1\]"),
    ],
)
def test_invalid_data_are_refused_with_row_ids(make_batch, columns, message):
    batch = make_batch([0.0, 1], [0, 0], status=[0, 0])
    for name, values in columns.items():
        batch[name] = torch.tensor(values)
    with pytest.raises(BatchError, match=message):
        CompletenessGate(group_size=2, on_incomplete="drop")(batch)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 3)), max_size=12))
def test_the_function_counts_the_ids_of_rollouts_that_did_not_fail(rollouts):
    rows = [(g, i, s) for i, (g, s, segments) in enumerate(rollouts) for _ in range(segments)]
    groups, ids, states = ([row[k] for row in rows] for k in range(3))
    found = incomplete_groups(groups, ids, group_size=20, status=states, expected_groups=[0, 1, 2, 3])
    have = {g: sum(1 for h, s, _ in rollouts if h == g and s < ABORTED) for g in range(4)}
    assert dict(zip(found.group_id.tolist(), found.have.tolist(), strict=True)) == have
    assert set(found.expected.tolist()) == {20}


def test_the_function_requires_the_number_of_dispatched_rollouts():
    with pytest.raises(BatchError, match="give group_size"):
        incomplete_groups([0], [0])


def passing_by_loop(groups, rollouts, size, said):
    """The groups that lack rollouts, or the expected error, by a loop."""
    wrong = []
    for group in dict.fromkeys(groups):
        own = {number for number, home in zip(said, groups, strict=True) if home == group}
        if len(own) > 1 or min(own) < 1:
            return "one number ≥ 1 per group"
        if size is not None and own != {size}:
            wrong.append(f"group {group} expects {own.pop()}")
    if wrong:
        return wrong
    short = []
    for group in dict.fromkeys(groups):
        there = {rollout for rollout, home in zip(rollouts, groups, strict=True) if home == group}
        expected = next(number for number, home in zip(said, groups, strict=True) if home == group)
        if len(there) > expected:
            return f"more rollouts than were dispatched; found .*group {group} has {len(there)} of {expected}"
        if len(there) < expected:
            short.append((group, len(there), expected))
    return short


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=8),
    st.sampled_from([None, 1, 2, 3]),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.booleans(),
)
def test_complete_groups_pass_and_wrong_sizes_are_refused_as_by_a_loop(rows, size, of_group, agree):
    groups = [group for group, _ in rows]
    rollouts = [group * 10 + number for group, number in rows]
    said = [size if agree and size else of_group[group] for group in groups]
    expected = passing_by_loop(groups, rollouts, size, said)
    batch = TensorDict(
        {"group_id": groups, "rollout_id": rollouts, "expected_rollouts": said}, batch_size=[len(rows)]
    )
    gate = CompletenessGate(group_size=size, on_incomplete="drop")
    counts = {"group_size": size, "expected_rollouts": said}
    if isinstance(expected, str) or (expected and isinstance(expected[0], str)):
        message = expected if isinstance(expected, str) else ", ".join(expected)
        for judge in (lambda: gate(batch), lambda: incomplete_groups(groups, rollouts, **counts)):
            with pytest.raises(BatchError, match=message) as caught:
                judge()
            assert not isinstance(caught.value, IncompleteGroupsError)
        return
    short = incomplete_groups(groups, rollouts, **counts)
    assert sorted(zip(*(column.tolist() for column in short), strict=True)) == sorted(expected)
    lacking = {group for group, *_ in expected}
    assert gate(batch)["group_id"].tolist() == [group for group in groups if group not in lacking]


def test_the_error_for_two_group_sizes_has_both_sizes_and_advice():
    batch = TensorDict(
        {"group_id": [7] * 4, "rollout_id": [0, 1, 2, 3], "expected_rollouts": [5] * 4}, batch_size=[4]
    )
    said = (
        r"group_size and the column 'expected_rollouts' \(expected_key\) must give the same number of "
        r"rollouts per group: group_size=4, but group 7 expects 5\. Leave group_size out, or correct"
    )
    for how in ({}, {"on_incomplete": "drop"}, {"on_incomplete": "keep", "min_rollouts": 1}):
        with pytest.raises(BatchError, match=said):
            CompletenessGate(group_size=4, **how)(batch)
    renamed = batch.rename_key_("expected_rollouts", "size")
    with pytest.raises(BatchError, match=r"the column 'size' \(expected_key\)"):
        CompletenessGate(group_size=4, expected_key="size")(renamed)
    with pytest.raises(BatchError, match=r"and the column 'expected_rollouts' must give"):  # an argument
        incomplete_groups([7] * 4, [0, 1, 2, 3], group_size=4, expected_rollouts=[5] * 4)
    assert len(CompletenessGate(group_size=5, on_incomplete="drop")(torch.cat([renamed, renamed[:0]]))) == 0
