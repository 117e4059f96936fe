"""Dynamic sampling as a loop: prompts are requested until enough groups are informative."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saving import as_saved
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import informative, load_pipeline
from headrace.pipeline.collect.informing import Informative
from headrace.transforms import BatchError, GroupAssembler, IncompleteGroupsError, StalledError

pytestmark = pytest.mark.slow


def batch_of(rewards: dict[int, list[float]]) -> TensorDict:
    """A batch of whole groups, one row per rollout. `rewards` has the rewards by group id."""
    rows = [(g, 10 * g + r, len(rs), reward) for g, rs in rewards.items() for r, reward in enumerate(rs)]
    group, rollout, expected, reward = (torch.tensor(column) for column in zip(*rows, strict=True))
    columns = {"group_id": group, "rollout_id": rollout, "expected_rollouts": expected}
    columns["masks", "all_assistant_mask"] = torch.ones(len(rows), 3, dtype=torch.bool)
    return TensorDict({**columns, ("next", "reward"): reward.float().unsqueeze(-1)}, batch_size=[len(rows)])


@given(st.data(), st.integers(1, 4), st.booleans())
def test_each_batch_has_the_number_of_informative_groups_and_accounts_for_every_row(data, wanted, lazy):
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=6))
    rewards = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=3)
    batches, number = [], 0
    for size in sizes:
        batches.append({number + i: data.draw(rewards) for i in range(size)})
        number += size
    informs = [(g, rs) for batch in batches for g, rs in batch.items() if len(set(rs)) > 1]
    source = [batch_of(batch) for batch in batches]
    stream = informative(
        [lazy_stack(list(batch.unbind(0))) for batch in source] if lazy else source,
        groups=wanted,
        max_batches=100,
    )
    out = list(stream)
    expected = [informs[i : i + wanted] for i in range(0, len(informs), wanted)]
    assert [b["rollout_id"].tolist() for b in out] == [
        [10 * g + r for g, rs in some for r in range(len(rs))] for some in expected
    ]
    assert [b["next", "reward"].flatten().tolist() for b in out] == [
        [reward for _, rs in some for reward in rs] for some in expected
    ]
    assert sum(map(len, source)) == sum(map(len, out)) + stream.counts["uninformative"] + stream.held
    assert (stream.seen, stream.found, stream.held) == (number, len(informs), 0)


FLAT, VARIED = {0: [1.0, 1.0]}, {0: [0.0, 1.0]}


def many(kinds: str) -> list[TensorDict]:
    """A batch of one group for each letter. The rewards of a group v differ, those of a group f are equal."""
    return [batch_of({i: (VARIED if kind == "v" else FLAT)[0]}) for i, kind in enumerate(kinds)]


def test_groups_are_requested_up_to_a_limit():
    asked = []

    def source():
        for batch in many("fvff" * 3):
            asked.append(batch)
            yield batch

    stream = iter(informative(source(), groups=2, max_batches=4))
    with pytest.raises(StalledError) as caught:
        next(stream)
    assert str(caught.value) == (
        "4 batches had 4 groups, 1 of them informative; a batch needs 2, and 1 wait. Are the prompts too "
        "easy or too hard? Raise max_batches, or set on_short='yield'"
    )
    assert len(asked) == 4
    short = informative(many("fvfffvff"), groups=2, max_batches=3, on_short="yield")
    assert [batch["group_id"].tolist() for batch in short] == [[1, 1], [5, 5]]
    with pytest.raises(StalledError, match="and 0 wait"):  # no group for a short batch
        next(iter(informative(many("ffff"), groups=2, max_batches=3, on_short="yield")))
    with pytest.raises(StalledError, match=r"^16 batches had 16 groups"):  # the default
        next(iter(informative(many("f" * 20), groups=1)))


@pytest.mark.parametrize("lazy", [False, True])
def test_a_source_may_write_each_batch_into_the_memory_of_the_last(lazy):
    """Some collectors reuse memory. Rows that wait for the next batch keep the values that were read."""
    batches = [batch_of({g: [0.0, 1.0], g + 1: [0.5, 0.25 * g]}) for g in range(0, 8, 2)]

    def reusing():
        memory = batches[0].clone()
        memory = lazy_stack([row.clone() for row in memory.unbind(0)]) if lazy else memory
        for batch in batches:
            for row, own in zip(memory.unbind(0), batch.unbind(0), strict=True):
                for key in own.keys(include_nested=True, leaves_only=True):
                    row[key].copy_(own[key])
            yield memory

    expected = list(informative(batches, groups=3))
    assert len(expected) == 3
    for found, own in zip(informative(reusing(), groups=3), expected, strict=True):
        for key in own.keys(include_nested=True, leaves_only=True):
            assert torch.equal(found[key], own[key]), key


@pytest.mark.parametrize("assembler", [None, GroupAssembler()])
def test_a_source_without_a_batch_is_asked_up_to_a_limit(assembler):
    """A source that does not wait for rows yields None if it has no batch."""
    asked = []

    def nothing_yet():
        while len(asked) < 100:
            yield asked.append(None)

    with pytest.raises(StalledError, match=r"3 batches had 0 groups"):
        next(iter(informative(nothing_yet(), groups=2, max_batches=3, assembler=assembler)))
    assert len(asked) == 3


def test_leftover_groups_wait_for_the_next_batch_even_over_a_restart():
    varied, flat = {g: [0.0, 1.0] for g in range(5)}, {9: [1.0, 1.0]}
    stream = informative([batch_of(varied), batch_of(flat)], groups=2)
    batches = iter(stream)
    assert next(batches)["group_id"].tolist() == [0, 0, 1, 1]
    again = informative([], groups=2)
    again.load_state_dict(as_saved(stream.state_dict()))
    assert (again.ready, again.held, again.found) == (3, 6, 5)
    assert [batch["group_id"].tolist() for batch in again] == [[2, 2, 3, 3], [4, 4]]
    assert [batch["group_id"].tolist() for batch in batches] == [[2, 2, 3, 3], [4, 4]]


def assembled_of(kinds: str) -> tuple[GroupAssembler, Informative]:
    """An assembler with whole groups, and a stream of batches of two groups. `kinds` is as in `many`."""
    assembler = GroupAssembler(groups=2, group_size=2)
    for rows in many(kinds):
        rows["next", "done"] = torch.ones(len(rows), 1, dtype=torch.bool)
        assembler.put(rows)
    return assembler, informative((), groups=2, max_batches=3, assembler=assembler)


def test_the_limit_on_requested_groups_holds_for_each_batch():
    """The limit holds for each batch."""
    assembler, stream = assembled_of("fffvfv" * 3)
    for first in (0, 6, 12):
        found = stream.take_from(assembler, last=False)["group_id"].tolist()
        assert found == [first + 3, first + 3, first + 5, first + 5]
    for kinds in ("ffffff", "fffffffvv"):
        assembler, stream = assembled_of(kinds)
        with pytest.raises(
            StalledError, match=r"^3 batches had 6 groups, 0 of them informative; .* and 0 wait"
        ):
            stream.take_from(assembler, last=False)
        assert assembler.ready == len(kinds) - 6


@pytest.mark.parametrize(("kinds", "expected"), [("fv", [1, 1]), ("v", [0, 0]), ("ff", None), ("f", None)])
def test_the_last_groups_of_an_assembler_are_a_batch_only_if_no_more_can_come(kinds, expected):
    assembler, stream = assembled_of(kinds)
    assert stream.take_from(assembler, last=False) is None
    found = stream.take_from(assembler, last=True)
    assert (None if found is None else found["group_id"].tolist()) == expected


def test_a_group_that_comes_again_after_a_restart_is_refused():
    stream = informative([batch_of({0: [0.0, 1.0], 1: [1.0, 1.0]})], groups=1)
    next(iter(stream))
    for group in (0, 1):
        again = informative([batch_of({group: [0.0, 1.0]})], groups=1)
        again.load_state_dict(as_saved(stream.state_dict()))
        assert (again.seen, again.found, again.counts) == (2, 1, {"uninformative": 2})
        with pytest.raises(BatchError, match=rf"in two batches: {group}\."):
            next(iter(again))


def test_the_recipe_decides_whether_its_filter_masks_or_drops():
    source = [batch_of({0: [1.0, 1.0], 1: [0.0, 1.0], 2: [0.0, 0.0]})]
    for recipe in ("grpo", "dapo"):
        stages = load_pipeline(f"pipeline={recipe}").stages
        decide = [stages[name] for name in ("gate", "collapse", "filter")]
        assert [b["group_id"].tolist() for b in informative(source, groups=1, stages=decide)] == [[1, 1]]


def test_split_or_incomplete_groups_are_refused():
    whole = batch_of({0: [0.0, 1.0], 1: [1.0, 0.0]})
    with pytest.raises(IncompleteGroupsError):
        list(informative([whole[:3]], groups=1))
    whole["expected_rollouts"] = torch.ones(4, dtype=torch.int64)
    cut = [whole[[0, 1, 2]], whole[[3]]]
    stages = load_pipeline("pipeline=grpo", "~pipeline.stages.gate").stages
    keep_all = [stages["collapse"]]
    with pytest.raises(BatchError) as caught:
        list(informative([whole, cut[1], cut[0]], groups=3, stages=keep_all))
    assert str(caught.value) == (
        "informative() needs batches of whole groups; these group_ids are in two batches: 1. Put assembled() "
        "between it and the collector"
    )
    with pytest.raises(BatchError, match=r"in two batches: 0, 1\. Put"):
        list(informative([whole, whole], groups=3, stages=keep_all))
    with pytest.raises(BatchError, match=r"in two batches: 1\."):  # although the loop has ended
        list(informative(cut, groups=1, stages=keep_all))
    with pytest.raises(ValueError, match="groups must be an integer; got None"):
        informative([], groups=None)
