"""Complete groups through TransferQueue's own interface, compared with its own sampler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from assembly import Line, batch_of_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pipeline import group_sampler, group_tags
from headrace.transforms import BatchError, GroupAssembler

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
transfer_queue = pytest.importorskip("transfer_queue", reason="the extra `tq` is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.slow]


def partition_of(tags: dict[int, Any]) -> Any:
    """The arguments that TransferQueue's controller gives to a sampler."""
    return SimpleNamespace(partition_id="train", get_custom_meta=lambda rows: {r: tags[r] for r in rows})


def tags_of(lines: Sequence[Line], assembler: GroupAssembler) -> dict[int, Any]:
    return dict(enumerate(group_tags(batch_of_lines(lines), assembler)))


def test_the_sampler_equals_that_of_transfer_queue_on_consecutive_rows():
    assembler = GroupAssembler(group_size=4)
    tags = tags_of([Line(n // 4, n, 0, True, expected=4) for n in range(40)], assembler)
    ours, theirs = group_sampler(assembler), transfer_queue.GRPOGroupNSampler(n_samples_per_prompt=4)
    ready: list[int] = []
    for few in (range(4), range(8, 12), range(4, 8), range(12, 40)):
        ready = sorted([*ready, *few])
        for rows in (8, 4):
            found = ours(ready, rows, partition=partition_of(tags))
            expected = theirs(ready, rows)
            assert sorted(found[0]) == expected[0]
            assert found[0] == found[1]
            ready = [row for row in ready if row not in found[1]]


@settings(max_examples=8)
@given(st.integers(0, 2**32))
def test_groups_are_complete_for_any_size_and_row_order(seed):
    draw = random.Random(seed)
    lines = []
    for group in range(30):  # groups have 1 to 5 rollouts of 1 to 4 rows
        expected = draw.randint(1, 5)
        for rollout in range(expected):
            turns = draw.randint(1, 4)
            for turn in range(turns):
                lines.append(Line(group, 10 * group + rollout, turn, turn == turns - 1, expected=expected))
    draw.shuffle(lines)
    lost = {10 * group for group in range(0, 30, 7)}  # rollouts without a row
    assembler = GroupAssembler(segment_key="segment")
    tags, sampler = tags_of(lines, assembler), group_sampler(assembler)
    came = [row for row, line in enumerate(lines) if line.rollout not in lost]
    found: list[int] = []
    for start in range(0, len(came), 17):
        ready = [row for row in came[: start + 17] if row not in found]
        while some := sampler(ready, 9, partition=partition_of(tags))[0]:
            assert len(some) >= 9
            found += some
            ready = [row for row in ready if row not in some]
    while some := sampler([row for row in came if row not in found], 1, partition=partition_of(tags))[0]:
        found += some
    whole = [row for row, line in enumerate(lines) if line.group % 7]
    assert sorted(found) == whole
    groups = [lines[row].group for row in found]
    assert [group for at, group in enumerate(groups) if at == 0 or groups[at - 1] != group] == list(
        dict.fromkeys(groups)
    )


def test_late_rows_mix_groups_only_in_the_sampler_of_transfer_queue():
    assembler = GroupAssembler(group_size=4)
    tags = tags_of([Line(n // 4, n, 0, True, expected=4) for n in range(8)], assembler)
    ready = [0, 1, 3, 4, 5, 6, 7]
    assert transfer_queue.GRPOGroupNSampler(n_samples_per_prompt=4)(ready, 4)[0] == [3, 4, 5, 6]
    assert group_sampler(assembler)(ready, 4, partition=partition_of(tags))[0] == [4, 5, 6, 7]


def test_a_failed_group_is_dropped_or_kept_by_the_assembler_option():
    lines = [Line(0, 0, 0, True, 2), Line(0, 1, 0, True), Line(1, 2, 0, True), Line(1, 3, 0, True)]
    for options, expected in (({}, [2, 3]), ({"on_failure": "keep", "min_rollouts": 1}, [1, 2, 3])):
        assembler = GroupAssembler(**options)
        sampler, tags = group_sampler(assembler), tags_of(lines, assembler)
        assert sampler(range(4), len(expected), partition=partition_of(tags))[0] == expected


def test_the_sampler_resumes_and_a_rank_gets_the_same_rows_again():
    assembler = GroupAssembler()
    tags = tags_of([Line(n // 2, n, 0, True) for n in range(8)], assembler)
    sampler, again = group_sampler(assembler), group_sampler(assembler)
    calls: dict[str, Any] = {"partition": partition_of(tags), "partition_id": "train", "task_name": "train"}
    first = sampler([0, 1, 2], 2, **calls, dp_rank=0, batch_index=0)
    assert sampler([2, 3], 2, **calls, dp_rank=0, batch_index=0) == first == ([0, 1], [0, 1])
    assert sampler.has_cached_result("train", "train", {"dp_rank": 0, "batch_index": 0})
    again.load_checkpoint(sampler.save_checkpoint())
    assert again([2, 3], 2, **calls, dp_rank=0, batch_index=1)[0] == [2, 3]
    again.clear_cache("train")
    assert again([0, 1], 2, **calls)[0] == [0, 1]  # the queue gives the numbers 0 and 1 to new rows


def test_rows_without_ids_have_no_tags():
    rows = batch_of_lines([Line(0, 0, 0, True)])
    rows["rollout_id"][0] = -1
    with pytest.raises(BatchError, match="needs the key"):
        group_tags(rows.exclude("group_id"), GroupAssembler())
    sampler = group_sampler(GroupAssembler())
    tags = dict(enumerate(group_tags(rows, GroupAssembler())))
    with pytest.raises(BatchError, match="rollout_id"):
        sampler([0], 1, partition=partition_of(tags))


def test_limits_that_need_the_policy_version_are_refused():
    with pytest.raises(ValueError, match="max_staleness") as caught:
        group_sampler(GroupAssembler(groups=4, max_staleness=2, on_stale="wait"))
    assert str(caught.value) == (
        "max_staleness=2 needs the policy version, which TransferQueue does not tell its sampler. The "
        "sampler can neither wait for slow groups nor limit the dispatch. Read the queue with "
        "RolloutStream(sampler, source=RolloutQueue(...)), which does both, or leave max_staleness out"
    )


def test_the_sampler_takes_the_fewest_whole_groups_with_enough_rows():
    """Groups of 1, 3 and 2 rows. A second task reads all of them again, and other tags change nothing."""
    assembler = GroupAssembler()
    groups = [(0, 1), (1, 3), (1, 3), (1, 3), (2, 2), (2, 2)]
    lines = [Line(g, row, 0, True, expected=size) for row, (g, size) in enumerate(groups)]
    tags = {row: tag | {"mine": row} for row, tag in tags_of(lines, assembler).items()} | {9: {"mine": 0}}
    sampler = group_sampler(assembler)
    for task in ("train", "log_probs"):
        calls = {"partition": partition_of(tags), "task_name": task}
        assert sampler([0, 1, 2, 9], 2, **calls) == ([], [])  # group 1 lacks a row
        assert sampler([0, 1, 2, 3, 4, 5, 9], 3, **calls) == ([0, 1, 2, 3], [0, 1, 2, 3])
        assert sampler([4, 5, 9], 3, **calls) == ([], [])
        assert sampler([4, 5, 9], 2, **calls) == ([4, 5], [4, 5])
        assert sampler([9], 1, **calls) == ([], [])


def test_a_tag_has_the_columns_that_the_assembler_reads():
    rows = batch_of_lines([Line(4, 0, 2, False), Line(5, 1, 3, True, 2)])
    names = ("group_id", "expected_rollouts", "rollout_id", "segment", "next.done", "next.status")
    values = ((4, 2, 0, 2, False, 0), (5, 2, 1, 3, True, 2))
    assert group_tags(rows, GroupAssembler(segment_key="segment")) == [
        {"headrace": [list(pair) for pair in zip(names, each, strict=True)]} for each in values
    ]
    assert group_tags(rows[:0], GroupAssembler()) == []


# -- in TransferQueue itself ------------------------------------------------------------------------------


def test_the_queue_returns_complete_groups_of_two_producers(queue):
    expected = [2, 3, 1, 4]
    lines = [
        Line(g, 10 * g + r, s, s == 1, expected=size)
        for s in (0, 1)
        for g, size in enumerate(expected)
        for r in range(size)
    ]
    rows, name = batch_of_lines(lines), "sampled"
    for producer in (0, 1):
        some = rows[producer::2]
        keys = [f"{producer}/{row}" for row in range(len(some))]
        fields = some.select("number", ("tokens", "full")).flatten_keys(".").clone()
        transfer_queue.kv_batch_put(keys, name, fields=fields, tags=group_tags(some, queue))
        client = transfer_queue.get_client()
        while (meta := client.get_meta(["number"], 4, name, task_name="train")).size:
            found = client.get_data(meta)["number"]
            numbers = [int(number) for number in found.unbind()]
            groups = [lines[number].group for number in numbers]
            assert len(numbers) == sum(2 * expected[group] for group in set(groups))
            assert producer == 1
            for group in set(groups):
                expected[group] = 0
    assert expected in ([0, 0, 0, 0], [0, 0, 1, 0])
