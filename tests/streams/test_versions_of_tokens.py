"""A row with tokens of several policies is as old as its oldest token, and as new as its newest token."""

from __future__ import annotations

from random import Random

import pytest
import torch
from assembly import Line, batch_of_lines
from saving import as_saved
from tensordict import TensorDict
from tries import LOSS
from versions import LAYOUTS, VERSION, sampled_by, with_versions

from headrace.transforms import BatchError, GroupAssembler, MissingKeyError
from headrace.transforms.streams import columns_to_send
from headrace.transforms.table.schema import IN_LOSS, NEWEST_VERSION, STEPS_LEFT, TRAINER_VERSION

OPTIONS = {"group_size": 2, "max_staleness": 2, "on_stale": "drop"}


def stale_by_loop(batch, version: int) -> set[int]:
    """The groups with a sampled token that is more than two versions old."""
    pairs = zip(batch["group_id"].tolist(), sampled_by(batch), strict=True)
    return {group for group, versions in pairs if any(own < version - 2 for own in versions)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_is_as_old_as_the_oldest_sampled_token_of_its_rows(layout):
    found = set()
    for seed in range(25):
        batch = with_versions(seed, layout)
        assembler = GroupAssembler(**OPTIONS)
        assembler.version = 8
        assembler.put(batch)
        taken, stale = assembler.take(), stale_by_loop(batch, 8)
        left = set() if taken is None else set(taken["group_id"].flatten().tolist())
        assert (left, assembler.counts["stale"]) == (set(range(4)) - stale, 2 * len(stale)), seed
        found |= {len(stale)}
    assert len(found) > 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_waits_for_the_version_of_its_newest_sampled_token(layout):
    """A group that waits at a restart goes on waiting for this version."""
    for seed in range(10):
        batch = with_versions(seed, layout)
        for version in range(3, 9):
            options = {**OPTIONS, "max_staleness": 9, "on_newer": "wait"}
            assembler = GroupAssembler(**options)
            assembler.version = version
            assembler.put(batch)
            twin = GroupAssembler(**options)
            twin.load_state_dict(as_saved(assembler.state_dict()))
            own = [each or [version] for each in sampled_by(batch)]
            ready = {g for g in range(4) if max(map(max, own[2 * g : 2 * g + 2])) <= version}
            for each in (assembler, twin):
                taken = each.take()
                assert (set() if taken is None else set(taken["group_id"].flatten().tolist())) == ready, (
                    seed,
                    version,
                )


def test_old_rows_are_masked_by_their_oldest_sampled_token():
    batch = with_versions(1)
    assembler = GroupAssembler(group_size=2, max_staleness=2, on_stale="mask")
    assembler.version = 8
    assembler.put(batch)
    taken = assembler.take()
    expected = [min(own, default=8) >= 6 for own in sampled_by(batch)]
    assert taken[IN_LOSS].tolist() == expected
    assert len(set(expected)) == 2


@pytest.mark.parametrize("on_stale", ["mask", "wait"])
def test_each_row_has_its_own_age_in_groups_of_rollouts_of_several_lengths(on_stale):
    """Each step has one version. Rows may be two steps old, and older rows are masked."""
    for seed in range(8):
        dice = Random(seed)
        lines = [
            Line(group, 10 * group + rollout, segment, segment == last, version=dice.randint(0, 3))
            for group in range(4)
            for rollout in dice.sample(range(9), 2)
            for last in [dice.choice([0, 0, 2])]
            for segment in range(last + 1)
        ]
        dice.shuffle(lines)
        options = {"groups": 1, "max_staleness": 2, "steps_ahead": 1, "segment_key": "segment"}
        assembler = GroupAssembler(on_stale=on_stale, **options)
        for version in range(3):
            assembler.put(batch_of_lines([Line(50 + version, 500 + version, 0, True, 0, 0, version, 1)]))
            assert assembler.take()[TRAINER_VERSION].tolist() == [version]
            assembler.version += 1
        assembler.announce(batch_of_lines([Line(g, 10 * g, 0, False, version=3) for g in range(4)]))
        for start in range(0, len(lines), 3):
            assembler.put(batch_of_lines(lines[start : start + 3], start))
        batch = assembler.take(4)
        order = [batch[key].tolist() for key in ("rollout_id", "segment")]
        assert sorted(zip(*order, strict=True)) == sorted((line.rollout, line.segment) for line in lines)
        versions = {(line.rollout, line.segment): line.version for line in lines}
        own = [versions[place] for place in zip(*order, strict=True)]
        assert batch[TRAINER_VERSION].tolist() == [3] * len(lines)
        if on_stale == "mask":
            assert batch[IN_LOSS].tolist() == [version >= 1 for version in own]
        else:
            assert batch[STEPS_LEFT].tolist() == [2 - (3 - version) for version in own]


def test_a_token_newer_than_the_trainer_is_refused():
    batch = with_versions(0)
    assembler = GroupAssembler(group_size=2, max_staleness=9)
    assembler.version = 7
    with pytest.raises(BatchError, match=r"newer than assembler.version=7; found 8 in group"):
        assembler.put(batch)
    assert assembler.held == 0


def test_a_group_with_a_token_of_lost_weights_is_undone():
    """The weights of version 5 are loaded. Group 0 has a token of version 7, after one of version 3."""
    batch = with_versions(3, rows=4)
    batch[VERSION] = torch.where(batch[LOSS], 3, 99)
    last = int(batch[LOSS][0].nonzero()[-1])
    batch[VERSION][0, last] = 7
    assembler = GroupAssembler(group_size=2, max_staleness=9, on_newer="wait")
    assembler.version = 8
    assembler.put(batch)
    twin = GroupAssembler(group_size=2, max_staleness=9, on_newer="wait")
    twin.load_state_dict(as_saved(assembler.state_dict()))
    twin._stream.begin(5)
    assert twin.counts["undone"] == 2
    assert twin.take()["group_id"].tolist() == [1, 1]


def test_another_process_gets_the_oldest_and_the_newest_version():
    """With these two versions, it decides like the process that has the tokens."""
    batch = with_versions(2)
    assembler = GroupAssembler(**OPTIONS)
    sent = columns_to_send(batch, assembler._options)
    versions = sampled_by(batch)
    assert [own for own in sent[VERSION].flatten().tolist() if own >= 0] == [min(v) for v in versions if v]
    assert [own for own in sent[NEWEST_VERSION].flatten().tolist() if own >= 0] == [
        max(v) for v in versions if v
    ]
    for rows in (batch, TensorDict(sent, batch_size=[len(batch)])):
        each = GroupAssembler(**OPTIONS)
        each.version = 8
        each.put(rows)
        taken, stale = each.take(), stale_by_loop(batch, 8)
        assert (set() if taken is None else set(taken["group_id"].flatten().tolist())) == set(
            range(4)
        ) - stale


def test_rows_from_another_process_with_a_token_newer_than_the_trainer_are_refused():
    batch = with_versions(0)
    versions = [own for own in sampled_by(batch) if own]
    newest = max(map(max, versions))
    assert max(map(min, versions)) < newest  # the oldest versions alone would pass
    sent = columns_to_send(batch, GroupAssembler(**OPTIONS)._options)
    assembler = GroupAssembler(group_size=2, max_staleness=9)
    assembler.version = newest - 1
    with pytest.raises(BatchError, match=rf"newer than assembler.version={newest - 1}; found {newest} in"):
        assembler.put(TensorDict(sent, batch_size=[len(batch)]))


def test_versions_per_token_require_a_mask_of_the_sampled_tokens():
    batch = with_versions(0).exclude(LOSS)
    with pytest.raises(MissingKeyError, match="all_assistant_mask"):
        GroupAssembler(**OPTIONS).put(batch)
    batch = with_versions(0)
    batch[VERSION] = torch.cat([batch[VERSION], batch[VERSION]], 1)
    with pytest.raises(BatchError, match=r"version_key and loss_mask_key.*found 60 and 30 tokens"):
        GroupAssembler(**OPTIONS).put(batch)
