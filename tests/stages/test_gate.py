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


def batch_with(rows) -> TensorDict:
    """Rows as (group, rollout), and then a status, an end and the expected number, where they are given."""
    keys = ("group_id", "rollout_id", "status", ("next", "done"), "expected_rollouts")
    columns = {key: torch.tensor(own) for key, own in zip(keys, zip(*rows, strict=True), strict=False)}
    return TensorDict(columns, batch_size=[len(rows)])


def of_sizes(*sizes) -> list[tuple[int, int]]:
    """Rows of groups 0, 1, … with these numbers of rollouts."""
    return [(group, 100 * group + number) for group, size in enumerate(sizes) for number in range(size)]


ADVICE = "Set on_incomplete='drop', or 'keep' with min_rollouts, or wait for the missing rollouts"
UNEVEN = ". If groups have different sizes, give the column 'expected_rollouts' (expected_key) instead of "
UNEVEN += "group_size"
ENDS = [(7, 1, DONE, True), (7, 2, CUT, True), *((7, number, DONE, False) for number in range(29, 20, -1))]
ENDS += [(8, 3, FAILED, True), (8, 4, ABORTED, False), (8, 5, CUT, True)]
SHORT = ", ".join(f"group {group} has 1 of {{}} (1 completed)" for group in range(8))
REFUSALS = {
    "one group": (
        {"group_size": 3},
        [(7, 1), (7, 2)],
        f"1 incomplete group: group 7 has 2 of 3 (2 completed). {ADVICE}",
    ),
    "how rollouts ended": (
        {"group_size": 12},
        ENDS,
        "2 incomplete groups: group 7 has 2 of 12 (1 completed, 1 truncated, 9 unfinished: [21, 22, 23, 24, "
        "25, 26, 27, 28] and 1 more), group 8 has 1 of 12 (1 aborted, 1 failed, 1 truncated). "
        f"{ADVICE}{UNEVEN}",
    ),
    "the order of first rows, and groups without rows": (
        {"group_size": 2, "expected_groups": [6, 9, 4, 8, 5]},
        [(9, 0), (4, 1), (8, 2), (8, 3)],
        "4 incomplete groups: group 9 has 1 of 2 (1 completed), group 4 has 1 of 2 (1 completed), group 6 "
        "has 0 of 2 (no rows), group 5 has 0 of 2 (no rows). Is group_size=2 wrong? 2 of 3 groups have 1 "
        f"rollout. {ADVICE}{UNEVEN}",
    ),
    "all groups are short, and one has no rows": (
        {"group_size": 2, "expected_groups": [0, 1, 2]},
        of_sizes(1, 1),
        "3 incomplete groups: group 0 has 1 of 2 (1 completed), group 1 has 1 of 2 (1 completed), group 2 "
        f"has 0 of 2 (no rows). Is group_size=2 wrong? 2 of 2 groups have 1 rollout. {ADVICE}",
    ),
    "a group without rows of unknown size": (
        {"expected_groups": [7, 8]},
        [(7, 1, DONE, True, 1)],
        f"1 incomplete group: group 8 has 0 of all (no rows). {ADVICE}",
    ),
    "no doubt about half of the groups": (
        {"group_size": 4},
        of_sizes(2, 2, 4, 4),
        "2 incomplete groups: group 0 has 2 of 4 (2 completed), group 1 has 2 of 4 (2 completed). "
        f"{ADVICE}{UNEVEN}",
    ),
    "a doubt about more": (
        {"group_size": 4},
        of_sizes(2, 2, 4),
        "2 incomplete groups: group 0 has 2 of 4 (2 completed), group 1 has 2 of 4 (2 completed). Is "
        f"group_size=4 wrong? 2 of 3 groups have 2 rollouts. {ADVICE}{UNEVEN}",
    ),
    "no doubt about a single group": (
        {"group_size": 4},
        [*of_sizes(2), (1, 100, FAILED)][:2],
        f"1 incomplete group: group 0 has 2 of 4 (2 completed). {ADVICE}",
    ),
    "no doubt if incomplete groups differ in size": (
        {"group_size": 3},
        of_sizes(1, 2),
        "2 incomplete groups: group 0 has 1 of 3 (1 completed), group 1 has 2 of 3 (2 completed). "
        f"{ADVICE}{UNEVEN}",
    ),
    "a repeated id": (
        {"group_size": 2},
        [(4, 8), (5, 1), (4, 8), (5, 2)],
        "1 incomplete group: group 4 has 1 of 2 (1 completed). Are rollout ids repeated? Group 4 has 2 rows, "
        f"but 1 rollout id: rows [0, 2] have the id 8. {ADVICE}{UNEVEN}",
    ),
    "repeated ids": (
        {"group_size": 4},
        [(5, 1), (5, 2), (4, 8), (5, 3), (4, 9), (4, 9), (5, 4), (4, 8)],
        "1 incomplete group: group 4 has 2 of 4 (2 completed). Are rollout ids repeated? Group 4 has 4 rows, "
        f"but 2 rollout ids: rows [2, 7] have the id 8. {ADVICE}{UNEVEN}",
    ),
    "a failed rollout has an id": (
        {"group_size": 2},
        [(4, 8, FAILED), (4, 8, FAILED), (4, 9, DONE)],
        f"1 incomplete group: group 4 has 1 of 2 (1 completed, 1 failed). {ADVICE}",
    ),
    "segments, not repeated ids": (
        {"group_size": 3},
        [(4, 8), (4, 9)],
        f"1 incomplete group: group 4 has 2 of 3 (2 completed). {ADVICE}",
    ),
    "all groups are short": (
        {"group_size": 5},
        of_sizes(1, 1, 1, 1, 1, 1, 1, 1, 1),
        f"9 incomplete groups: {SHORT.format(*[5] * 8)} and 1 more. All 9 groups have the size 1. If so many "
        "were dispatched, set group_size=1, else wait for the missing rollouts",
    ),
    "all groups are shorter than the column says": (
        {},
        [(group, group, DONE, True, 2 + group) for group in range(8)],
        f"8 incomplete groups: {SHORT.format(*range(2, 10))}. All 8 groups have the size 1. If so many were "
        "dispatched, correct the column 'expected_rollouts' (expected_key), else wait for the missing "
        "rollouts",
    ),
    "a short group with a failed rollout": (
        {"group_size": 3},
        [(0, 0, DONE), (0, 1, DONE), (1, 2, DONE), (1, 3, DONE), (1, 4, FAILED)],
        "2 incomplete groups: group 0 has 2 of 3 (2 completed), group 1 has 2 of 3 (2 completed, 1 failed). "
        f"Is group_size=3 wrong? 2 of 2 groups have 2 rollouts. {ADVICE}",
    ),
}


@pytest.mark.parametrize(("options", "rows", "said"), REFUSALS.values(), ids=REFUSALS)
def test_the_error_says_what_is_missing_and_what_to_do(options, rows, said):
    with pytest.raises(IncompleteGroupsError) as refused:
        CompletenessGate(**options)(batch_with(rows))
    assert str(refused.value) == said


INVALID = {
    "a rollout in two groups": (
        {"group_size": 2},
        [(0, 5), (1, 5)],
        "a rollout belongs to one group; found rollout 5 in groups [0, 1] (rows [0, 1]). Are group ids and "
        "rollout ids swapped? Are ids reused? Workers need their own ids: set StampIds(worker=…) or "
        "RepeatSampler(rank=…)",
    ),
    "statuses": (
        {"group_size": 2},
        [(2, 2, 7), (2, 3, -2)],
        "status must be one of 0 COMPLETED, 1 TRUNCATED, 2 ABORTED, 3 FAILED, or -1 where it is not known; "
        "found 7 at row 0, -2 at row 1",
    ),
    "a text as status": (
        {"group_size": 2},
        [(2, 2, 0), (2, 3, 1 << 40)],
        "status must be one of 0 COMPLETED, 1 TRUNCATED, 2 ABORTED, 3 FAILED, or -1 where it is not known; "
        "found a text at row 1",
    ),
    "several numbers of rollouts": (
        {},
        [*((2, number, DONE, True, (3, 1, 2, 5)[number]) for number in range(4)), (1, 9, DONE, True, 0)],
        "expected_rollouts must be one number ≥ 1 per group; found group 2: [1, 2, 3], group 1: [0]",
    ),
    "too many rollouts": (
        {"group_size": 1},
        of_sizes(1, 2, 3),
        "a group cannot have more rollouts than were dispatched; found group 1 has 2 of 1, group 2 has 3 of "
        "1. If groups have different sizes, give the column 'expected_rollouts' (expected_key) instead of "
        "group_size. If not, are group ids reused between steps?",
    ),
    "more rollouts than the column says": (
        {},
        [(0, 0, DONE, True, 1), (0, 1, DONE, True, 1)],
        "a group cannot have more rollouts than were dispatched; found group 0 has 2 of 1. Correct the "
        "column 'expected_rollouts' (expected_key). Or are group ids reused between steps?",
    ),
}


@pytest.mark.parametrize(("options", "rows", "said"), INVALID.values(), ids=INVALID)
def test_the_error_for_invalid_rows_names_their_values(options, rows, said):
    with pytest.raises(BatchError) as refused:
        CompletenessGate(on_incomplete="drop", **options)(batch_with(rows))
    assert str(refused.value) == said


def test_truncated_rollouts_count_and_failed_or_aborted_do_not(make_batch):
    batch = make_batch([0.0] * 6, [0, 0, 1, 1, 2, 2], status=[DONE, CUT, DONE, FAILED, ABORTED, DONE])
    outcome = said_by(CompletenessGate(group_size=2, on_incomplete="drop"), batch)
    assert outcome.batch["group_id"].tolist() == [0, 0]
    assert outcome.reasons == ["trained", "trained", "incomplete", "failed", "failed", "incomplete"]
    assert outcome.metrics == {"missing_groups": 0, "incomplete_rows": 4}


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
    outcome = said_by(CompletenessGate(group_size=4, on_incomplete="keep", **options), batch)
    assert outcome.batch["group_id"].tolist() == kept
    assert outcome.metrics == {"missing_groups": 0, "incomplete_rows": 3}


def test_the_number_of_dispatched_rollouts_is_required(make_batch):
    with pytest.raises(MissingKeyError, match=r"'expected_rollouts' \(expected_key\)"):
        CompletenessGate()(make_batch([0.0], [0]))
    with pytest.raises(BatchError, match="not known: give group_size or expected_rollouts"):
        incomplete_groups([0], [0])


def test_a_group_without_rows_is_counted(make_batch):
    batch = make_batch([0.0, 1], [3, 3])
    gate = CompletenessGate(group_size=2, expected_groups=lambda: [3, 8, 9], on_incomplete="drop")
    outcome = said_by(gate, batch)
    assert len(outcome.batch) == 2
    assert outcome.metrics["missing_groups"] == 2
    with pytest.raises(BatchError, match=r"not dispatched: 3\. Does the batch mix rows of two steps"):
        CompletenessGate(group_size=2, expected_groups=[8])(batch)


def test_a_batch_without_rows_lacks_every_group(make_batch):
    empty = no_rows(make_batch([0.0], [3]))
    for groups, s in (([3], ""), ([8, 3], "s")):
        found = ", ".join(f"group {group} has 0 of 2 (no rows)" for group in groups)
        with pytest.raises(IncompleteGroupsError) as refused:
            CompletenessGate(group_size=2, expected_groups=groups)(empty)
        assert str(refused.value) == f"{len(groups)} incomplete group{s}: {found}. {ADVICE}"
    assert CompletenessGate(group_size=2)(empty) is empty


def test_gate_and_assembler_keep_a_group_at_exactly_min_fraction(make_batch):
    """With one rollout fewer, the group leaves. Fractions such as 7/13 are rounded in floating point."""
    for expected in (3, 10, 13):
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


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 3)), max_size=12))
def test_the_function_counts_the_ids_of_rollouts_that_did_not_fail(rollouts):
    rows = [(g, i, s) for i, (g, s, segments) in enumerate(rollouts) for _ in range(segments)]
    groups, ids, states = ([row[k] for row in rows] for k in range(3))
    found = incomplete_groups(groups, ids, group_size=20, status=states, expected_groups=[0, 1, 2, 3])
    have = {g: sum(1 for h, s, _ in rollouts if h == g and s < ABORTED) for g in range(4)}
    assert dict(zip(found.group_id.tolist(), found.have.tolist(), strict=True)) == have
    assert set(found.expected.tolist()) == {20}


def test_the_function_lists_groups_by_their_first_rows_and_then_groups_without_rows():
    """The number of rollouts of a group without rows is known only from `group_size`."""
    groups, rollouts, sizes = [5, 5, 2, 3, 5], [0, 0, 1, 2, 9], [3, 3, 2, 1, 3]
    found = incomplete_groups(groups, rollouts, expected_rollouts=sizes, expected_groups=[3, 5, 8, 2, 7])
    assert [each.tolist() for each in found] == [[5, 2, 8, 7], [2, 1, 0, 0], [3, 2, -1, -1]]
    found = incomplete_groups(groups, rollouts, group_size=2, expected_groups=[7, 5, 3, 2])
    assert [each.tolist() for each in found] == [[2, 3, 7], [1, 1, 0], [2, 2, 2]]


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
