"""Each limit of a stream is exact, and its message says what happened, where, and what to do."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from inspect import getsourcelines
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from assembly import Line, batch_of_lines
from tensordict import TensorDict

from headrace.transforms import BatchError, GroupAssembler, IncompleteGroupsError, StalledError, StreamWarning
from headrace.transforms.table.schema import ORIGIN

FAILED, ABORTED = 3, 2
NOTHING = TensorDict({}, batch_size=[0])


def put(assembler: GroupAssembler, *lines: Line, **columns: Any) -> None:
    """Put these rows, or nothing."""
    batch = batch_of_lines(lines)
    for key, values in columns.items():
        batch[key] = torch.tensor(values)
    assembler.put(batch if lines else NOTHING)


def error_of(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# -- groups with too few rollouts -------------------------------------------------------------------------


def test_a_group_is_kept_refilled_or_dropped_as_a_loop_over_its_rollouts_says():
    """A group of 4 has e ended and 4 − e failed rollouts. `group_size` is 3, or all that were dispatched."""
    cases = itertools.product(
        range(5), (None, 3), ("drop", "keep", "refill"), (None, 2), (None, 0.5, 0.75), (False, True)
    )
    for ended, size, action, least, share, refills in cases:
        limited = least is not None or share is not None
        if limited == (action == "drop") or (action == "keep" and not limited):
            continue  # these options need one another
        if refills != (action == "refill") and (refills or action != "keep"):
            continue
        asked: list[tuple[int, int]] = []
        options: dict[str, Any] = {"group_size": size, "min_rollouts": least, "min_fraction": share}
        if refills:
            options["refill"] = lambda *what, asked=asked: asked.append(what)
        assembler = GroupAssembler(on_failure=action, **options)
        put(assembler, *(Line(7, r, 0, True, FAILED * (r >= ended), expected=4) for r in range(4)))
        need, enough = size or 4, ended >= (least or 1) and ended / 4 >= (share or 0)
        if ended >= need or (action == "keep" and enough):
            expected = (1, [])
        else:
            expected = (0, [(7, need - ended)] * refills)
        case = (ended, size, action, least, share, refills)
        assert (assembler.ready, asked) == expected, case
        assert assembler.pending == len(asked), case


def test_a_refused_group_is_described_with_its_rollouts_and_its_age():
    one, two = ([Line(g, 10 * g + r, 0, True, FAILED * (r == 1)) for r in (0, 1)] for g in (1, 2))
    raises = GroupAssembler(on_failure="raise")
    remedy = "Set on_failure='drop', 'keep' with min_rollouts, or 'refill'"
    assert error_of(lambda: put(raises, *one), IncompleteGroupsError) == (
        "1 group cannot become whole because rollouts failed: group 1 has 1 of 2 (1 completed, 1 failed), 0 "
        f"puts old. {remedy}"
    )
    put(raises, one[0])
    assert error_of(lambda: put(raises, *two, one[1]), IncompleteGroupsError) == (
        "2 groups cannot become whole because rollouts failed: group 1 has 1 of 2 (1 completed, 1 failed), 1 "
        f"put old, group 2 has 1 of 2 (1 completed, 1 failed), 0 puts old. {remedy}"
    )


def test_groups_that_are_too_many_or_too_old_are_listed_from_the_oldest(monkeypatch):
    full = GroupAssembler(max_pending_groups=1, on_full="raise")
    message = (
        "at most max_pending_groups=1 groups may wait, and there are {}: {}. Announce at most capacity() "
        "groups, or set on_full='drop'"
    )
    lines = [Line(g, 10 * g, 0, False) for g in (4, 2, 9)]
    has = [f"group {g} has 0 of 2 (1 unfinished), 0 puts old" for g in (4, 2)]
    for many in (1, 2):
        found = error_of(lambda many=many: put(full, *lines[: many + 1]), IncompleteGroupsError)
        assert found == message.format(f"{many} more", ", ".join(has[:many]))
    put(full, lines[0])
    assert full.pending == 1
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    old = GroupAssembler(timeout_seconds=9, on_timeout="raise", partition_key="partition")
    put(old, Line(7, 70, 0, True))
    put(old, Line(3, 30, 0, False, partition=5, expected=3))
    clock[0] += 9
    assert error_of(
        lambda: put(old, Line(3, 30, 1, True, partition=5, expected=3)), IncompleteGroupsError
    ) == (
        "2 groups did not become whole in time: group 7 has 1 of 2 (1 completed), 2 puts old, group 3 of "
        "partition 5 has 1 of 3 (1 completed), 1 put old. Raise timeout or timeout_seconds, or set "
        "on_timeout='drop', 'keep' with min_rollouts, or 'refill'"
    )


# -- nothing becomes whole --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "whole", "waiting", "limit"),
    [
        ({"groups": 5}, 0, [4, 2], 160),  # 8 batches of 5 groups like the oldest, of 4
        ({"groups": 2}, 0, [4], 100),  # at least 100
        ({}, 2, [6, 2, 2], 240),  # 8 times all 5 groups
        ({}, 13, [], 104),  # no group waits
        ({"max_idle": 1}, 0, [2], 1),
        ({"max_idle": 7}, 0, [2], 7),
    ],
)
def test_a_stall_is_an_error_after_so_many_puts_and_not_before(options, whole, waiting, limit):
    assembler = GroupAssembler(**options)
    lines = [Line(g, 100 * g, 0, True, expected=1) for g in range(whole)]
    lines += [Line(50 + g, 9000 + g, 0, False, expected=size) for g, size in enumerate(waiting)]
    if limit > 1:
        put(assembler, *lines)  # it counts, unless it makes a group whole
    for _ in range(limit - 1 if whole else limit - 2):
        put(assembler)
    found = error_of(lambda: put(assembler, *(lines if limit == 1 else ())), StalledError)
    assert found.startswith(f"the last {limit} puts have made no group whole. Waiting: ")
    put(assembler, Line(40, 4000, 0, True, expected=1))  # this put makes a group whole


def test_a_stall_lists_the_awaited_groups_first_and_counts_all_rows():
    """Group 0 was dispatched before the groups 3 and 1, and was announced after them. It is due now."""
    assembler = GroupAssembler(groups=1, max_staleness=1, steps_ahead=0, group_size=2, on_duplicate="drop")
    for group in (3, 1):
        assembler.announce(batch_of_lines([Line(group, 2 * group + r, 0, False) for r in (0, 1)]))
    assembler.version = 1
    assembler.announce(batch_of_lines([Line(0, r, 0, False) for r in (0, 1)]))
    row = batch_of_lines([Line(0, 0, 0, False, version=1), Line(1, 2, 0, True), Line(1, 2, 0, True)])
    row[ORIGIN] = torch.tensor([[0, 0, 3, 0, 9], [0, 1, 3, 0, 9], [1, 1, 3, 0, 9]], dtype=torch.int32)
    assembler.put(row)
    groups = {
        0: "group 0 has 0 of 2 (1 unfinished), 1 put old, of worker 0, announced at step -1; this is step 0",
        3: "group 3 has 0 of 2 (no rows), 1 put old, of worker 0, announced at step 0; this is step 0",
        1: "group 1 has 1 of 2 (1 completed), 1 put old, of worker 1, announced at step 0; this is step 0",
    }
    rows = (
        "Rows: 3 arrived, 2 held, 1 duplicate. Check that all rollouts of a group are put into this "
        "assembler, with done=True on their last rows. To continue without missing rollouts, set timeout or "
        "max_pending_groups"
    )
    assert str(assembler.stalled("It waits.")) == f"It waits. Waiting: {', '.join(groups.values())}. {rows}"
    assert str(assembler.stalled("It waits", worker=(0, 3))) == (
        f"It waits. Waiting: {groups[0]}, {groups[3]}. {rows}"
    )
    assert str(assembler.stalled("It waits", worker=(2, 3))) == (
        "It waits. Waiting: no group. Rows: 3 arrived, 2 held, 1 duplicate."
    )


def test_a_stall_without_rows_or_without_waiting_groups_says_so():
    assembler = GroupAssembler()
    assert str(assembler.stalled("It waits..")) == (
        "It waits. Waiting: no group. Rows: none arrived. No prompt was announced and no row was put: check "
        "that draws() is called, that the workers have started, and that they put their rows into this "
        "assembler"
    )
    put(assembler, Line(0, 0, 0, True, expected=1))
    assert str(assembler.stalled("It waits")) == "It waits. Waiting: no group. Rows: 1 arrived, 1 held."


def test_refused_puts_are_counted_in_a_stall_with_the_last_error():
    assembler = GroupAssembler()
    for times, found in (
        (1, "It waits. The stream refused 1 put"),
        (2, "It waits. The stream refused 2 puts"),
    ):
        with pytest.raises(BatchError):
            assembler.put(batch_of_lines([Line(0, -times, 0, True)]))
        said = str(assembler.stalled("It waits."))
        assert said.startswith(f"{found}, the last by BatchError: "), said
        assert f"found -{times} at row 0" in said
        assert ".. Waiting" not in said


def test_a_group_that_waits_too_long_for_its_version_is_named():
    """It became whole at put 2, so put 5 is the third that it waits."""
    assembler = GroupAssembler(max_staleness=1, on_stale="drop", on_newer="wait", max_idle=3)
    put(assembler, Line(8, 80, 0, True, version=4))
    put(assembler, Line(8, 81, 0, True, version=9))
    for group in (1, 2):
        put(assembler, Line(group, 10 * group, 0, True, expected=1))
    found = error_of(lambda: put(assembler, Line(3, 30, 0, True, expected=1)), StalledError)
    assert found.startswith(
        "group 8 has waited 3 puts for policy version 9, and assembler.version is 0: set it where the policy "
        "is updated. Waiting: no group. Rows: 5 arrived, 5 held"
    )


# -- rollouts that do not end -----------------------------------------------------------------------------


@pytest.mark.parametrize(("ended", "took", "warned"), [(9, 1, None), (10, 1, 21), (10, 5, 21), (10, 6, 25)])
def test_a_rollout_without_an_end_is_reported_once_it_is_four_times_as_old_as_any(ended, took, warned):
    """The others took at most `took` puts, which count as at least 5. Rollout 40 began a put later."""
    assembler = GroupAssembler(max_idle=10**6)
    put(assembler, Line(6, 60, 0, False), Line(6, 60, 1, False))
    put(assembler, *(Line(9, 90 + r, 0, False, expected=99) for r in range(ended)), Line(4, 40, 0, False))
    for _ in range(took - 1):
        put(assembler)
    put(assembler, *(Line(9, 90 + r, 1, True, expected=99) for r in range(ended)))
    found = {}
    for age in range(took + 1, 60):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", StreamWarning)
            put(assembler)
        found.update((age + 1, str(each.message)) for each in caught)
    assert [*found] == ([] if warned is None else [warned, warned + 1])
    if warned is not None:
        assert found[warned] == (
            f"rollouts do not end: rollout 60 of group 6 (2 rows, {warned} puts old); the 10 that ended took "
            f"at most {took} put{'s' * (took > 1)}. The groups of the others wait in memory. Check whether "
            "the environment hangs or never sets done. Set timeout or timeout_seconds, and on_timeout, to "
            "continue without them"
        )


# -- where a warning comes from ---------------------------------------------------------------------------


def lost_rows() -> None:
    batch = batch_of_lines([Line(0, 0, 0, True, expected=1)])
    GroupAssembler().put(batch.set(ORIGIN, torch.tensor([[1, 0, 1, 0, 1]])))


def endless() -> None:
    assembler = GroupAssembler()
    assembler.put(
        batch_of_lines([Line(0, 0, 0, False), *(Line(9, r, 0, True, expected=99) for r in range(1, 11))])
    )
    for _ in range(21):
        assembler.put(NOTHING)


def waiting() -> None:
    assembler = GroupAssembler(groups=1)
    with pytest.MonkeyPatch.context() as patch:
        for seconds in (0.0, 61.0):
            patch.setattr("time.monotonic", lambda seconds=seconds: seconds)
            assembler.take()


def no_slack() -> None:
    GroupAssembler(groups=1, max_staleness=1).announce(batch_of_lines([Line(0, 0, 0, False)]))


def cut_off() -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        GroupAssembler(journal=path).put(batch_of_lines([Line(0, 0, 0, False)]))
        path.write_bytes(path.read_bytes()[:-1])
        GroupAssembler(journal=path)


@pytest.mark.parametrize(
    "call", [lost_rows, endless, waiting, no_slack, cut_off], ids=lambda call: call.__name__
)
def test_a_warning_names_the_line_of_the_program_that_called(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StreamWarning)
        call()
    lines, first = getsourcelines(call)
    ((file, line),) = ((each.filename, each.lineno) for each in caught)
    assert file == __file__
    assert first < line < first + len(lines)


# -- options that depend on one another -------------------------------------------------------------------

ACTIONS = "on_failure='drop' and on_timeout='drop'"
REFUSED: dict[str, dict[str, Any]] = {
    "'keep' needs min_rollouts or min_fraction; got neither, with on_failure='keep' and on_timeout='drop'": {
        "on_failure": "keep"
    },
    "'keep' needs min_rollouts or min_fraction; got neither, with on_failure='drop' and on_timeout='keep'": {
        "on_timeout": "keep",
        "timeout": 3,
    },
    f"min_rollouts and min_fraction have an effect only with 'keep' or 'refill'; got {ACTIONS}": {
        "min_rollouts": 1
    },
    "min_fraction must be in (0, 1]; got 1.01": {"min_fraction": 1.01, "on_failure": "keep"},
    "min_fraction must be in (0, 1]; got 0": {"min_fraction": 0, "on_failure": "keep"},
    "timeout_seconds must be finite and > 0; got 0": {"timeout_seconds": 0},
    "'refill' needs a callable refill; got None, with on_failure='drop' and on_timeout='refill', "
    "on_stale=None": {"on_timeout": "refill", "timeout": 1},
    f"refill has an effect only with 'refill' or 'keep'; got {ACTIONS}, on_stale=None": {"refill": print},
    "steps_ahead must be at most max_staleness=2, or groups become too old before they are trained; got 3": {
        "groups": 1,
        "max_staleness": 2,
        "steps_ahead": 3,
    },
    "on_stale='wait' needs groups (how many groups a step trains) and partition_key=None, because a step "
    "trains groups of one partition; got groups=None and partition_key=None. Or set on_stale='drop', 'mask' "
    "or 'refill'": {"on_stale": "wait", "max_staleness": 2},
    "max_concurrent_rollouts must be at least group_size (4); got 3": {
        "group_size": 4,
        "max_concurrent_rollouts": 3,
    },
    "on_full='raise' needs max_pending_groups": {"on_full": "raise"},
    "on_timeout='raise' needs timeout or timeout_seconds": {"on_timeout": "raise"},
    "group_size must be an integer ≥ 1; got 0": {"group_size": 0},
    "groups must be an integer ≥ 1; got 0": {"groups": 0},
    "timeout must be an integer ≥ 1; got 0": {"timeout": 0},
    "min_rollouts must be an integer ≥ 1; got 0": {"min_rollouts": 0, "on_failure": "keep"},
    "max_refills must be an integer ≥ 1; got 0": {"max_refills": 0, "refill": print, "on_failure": "refill"},
    "max_staleness must be an integer ≥ 0; got -1": {"max_staleness": -1},
    "max_pending_groups must be an integer ≥ 1; got 0": {"max_pending_groups": 0},
    "max_idle must be an integer ≥ 1; got 0": {"max_idle": 0},
    "steps_ahead must be an integer ≥ 0; got -1": {"steps_ahead": -1, "groups": 1},
    "max_concurrent_rollouts must be an integer ≥ 1; got 0": {"max_concurrent_rollouts": 0},
}
ALLOWED: list[dict[str, Any]] = [
    {"min_fraction": 1.0, "on_failure": "keep"},
    {"min_rollouts": 1, "on_timeout": "keep", "timeout": 1},
    {"min_rollouts": 1, "on_failure": "refill", "refill": print, "max_refills": 1},
    {"refill": print, "on_failure": "keep", "min_rollouts": 1},
    {"refill": print, "on_stale": "refill", "max_staleness": 0},
    {"groups": 1, "group_size": 1, "max_staleness": 2, "steps_ahead": 2, "max_idle": 1},
    {"groups": 1, "steps_ahead": 0, "max_staleness": 0, "on_stale": "wait"},
    {"group_size": 4, "max_concurrent_rollouts": 4},
    {"max_concurrent_rollouts": 1},
    {"on_full": "raise", "max_pending_groups": 1},
    {"on_timeout": "raise", "timeout_seconds": 0.1},
]


@pytest.mark.parametrize("message", REFUSED)
def test_an_option_out_of_its_range_or_without_another_is_refused(message):
    assert error_of(lambda: GroupAssembler(**REFUSED[message]), ValueError) == message


def test_options_at_the_end_of_their_range_are_allowed():
    for options in ALLOWED:
        GroupAssembler(**options)
