"""Prompts are sampled in groups, and ids are assigned once."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline import Pipeline, RepeatSampler, stamp_ids
from headrace.transforms import CompletenessGate, IncompleteGroupsError

SHAPES = {
    "prompts": st.integers(1, 12),
    "group_size": st.integers(1, 4),
    "prompts_per_batch": st.integers(1, 5),
    "repeats": st.integers(1, 3),
    "shuffle": st.booleans(),
    "seed": st.integers(0, 2**31),
}


@given(**SHAPES)
def test_each_epoch_has_every_prompt_in_runs_of_group_size(
    prompts, group_size, prompts_per_batch, repeats, **options
):
    sampler = RepeatSampler(
        prompts,
        group_size=group_size,
        prompts_per_batch=prompts_per_batch,
        repeats=repeats,
        remainder="uneven",
        **options,
    )
    for _ in range(2):
        indices = list(sampler)
        assert len(indices) == len(sampler) == prompts * group_size * repeats
        assert {indices.count(p) for p in range(prompts)} == {group_size * repeats}
        runs = [indices[i : i + group_size] for i in range(0, len(indices), group_size)]
        assert all(len(set(run)) == 1 for run in runs)
        heads = [run[0] for run in runs]
        size = min(prompts_per_batch, prompts)
        for repeat in range(1, repeats):
            assert heads[repeat * size : (repeat + 1) * size] == heads[:size]


@given(taken=st.integers(0, 40), **SHAPES)
def test_a_restored_sampler_continues_where_it_was(taken, **options):
    make = lambda: RepeatSampler(remainder="uneven", **options)  # noqa: E731

    def stream(sampler):
        while True:
            yield from sampler

    one, two = make(), make()
    list(islice(stream(one), taken))
    two.load_state_dict(one.state_dict())
    assert list(islice(stream(one), 30)) == list(islice(stream(two), 30))


def test_a_sampler_that_has_drawn_refuses_another_state():
    """A collector draws when it is constructed, so its rollouts would repeat earlier ids."""
    saved = RepeatSampler(9, group_size=2)
    list(islice(saved, 6))
    other = RepeatSampler(9, group_size=2)
    next(other.draws())
    with pytest.raises(ValueError, match=r"before you construct the collector.* at epoch 0, position 2"):
        other.load_state_dict(saved.state_dict())
    other.load_state_dict(other.state_dict())


@given(**SHAPES)
def test_group_and_rollout_ids_never_repeat(**options):
    draws = torch.cat(list(islice(RepeatSampler(remainder="uneven", **options).draws(), 6)))
    size = options["group_size"]
    assert draws["rollout_id"].tolist() == list(range(len(draws)))
    assert draws["group_id"].tolist() == [i // size for i in range(len(draws))]
    assert set(draws["expected_rollouts"].tolist()) == {size}


@st.composite
def shared(draw) -> tuple[int, dict]:
    """Draw a number of ranks, and the options of their samplers."""
    options = draw(st.fixed_dictionaries(SHAPES)) | {"remainder": "uneven"}
    ranks = draw(st.integers(1, 3))
    options["prompts_per_batch"] *= ranks
    options["prompts"] = max(options["prompts"], ranks)
    over = options["prompts"] % options["prompts_per_batch"]
    options["prompts"] += ranks - over if 0 < over < ranks else 0
    return ranks, options


def of_ranks(ranks: int, options: dict) -> list[RepeatSampler]:
    return [RepeatSampler(**options, rank=rank, ranks=ranks) for rank in range(ranks)]


@given(shape=shared())
def test_ranks_together_sample_the_prompts_and_ids_of_one_process(shape):
    """The law holds batch by batch over epochs, and for samples that are indices without ids."""
    ranks, options = shape
    samplers, alone = of_ranks(ranks, options), RepeatSampler(**options)
    streams = [sampler.draws() for sampler in [alone, *samplers]]
    for whole, *shares in islice(zip(*streams, strict=True), 7):
        together = torch.cat(shares)
        assert all(len(share) for share in shares)
        order = together["rollout_id"].sort().indices
        for key in whole.keys():
            assert together[key][order].tolist() == whole[key].tolist()
    indices = [list(RepeatSampler(**options, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert sorted(index for found in indices for index in found) == sorted(RepeatSampler(**options))
    assert [len(found) for found in indices] == [len(sampler) for sampler in samplers]


@given(shape=shared(), data=st.data())
def test_ids_show_the_samples_of_a_rank_and_it_resumes_there(shape, data):
    ranks, options = shape
    rank, taken = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, 5))
    drawer, other = of_ranks(ranks, options)[rank], RepeatSampler(**options, ranks=ranks)
    batches = [draws["group_id"].unique().tolist() for draws in islice(drawer.draws(), 7)]
    seen = data.draw(st.lists(st.sampled_from([group for batch in batches for group in batch])))
    assert sorted(other.drawn_with(seen)) == [g for batch in batches if set(batch) & set(seen) for g in batch]
    first, restored = of_ranks(ranks, options)[rank], of_ranks(ranks, options)[rank]
    list(islice(first.draws(), taken))
    restored.load_state_dict(first.state_dict())
    assert next(restored.draws())["rollout_id"].tolist() == next(first.draws())["rollout_id"].tolist()


def test_a_prompt_without_rows_is_detected_by_its_neighbours():
    """The law holds over epochs, for samples taken ahead, and for a restored or new sampler."""
    options = {"group_size": 2, "prompts_per_batch": 3, "remainder": "uneven"}
    sampler = RepeatSampler(8, **options)
    batches = list(islice(sampler.draws(), 7))
    for knows in (sampler, RepeatSampler(8, **options)):
        gate = CompletenessGate(expected_groups=knows)
        for draws in batches:
            assert len(gate(draws)) == len(draws)
        assert len(gate(torch.cat([batches[4], batches[2]]))) == 10
        with pytest.raises(
            IncompleteGroupsError, match=r"1 incomplete group: group 4 has 0 of all \(no rows\)"
        ):
            gate(batches[1][batches[1]["group_id"] != 4])
        dropping = CompletenessGate(expected_groups=knows, on_incomplete="drop")
        run = Pipeline({"gate": dropping}).run(batches[1][batches[1]["group_id"] != 4])
        assert run.metrics["gate/missing_groups"] == 1
        assert len(gate(batches[0][:0])) == 0


@given(begun=st.integers(0, 30), **SHAPES)
def test_an_unfinished_batch_is_completed_first(begun, **options):
    sampler = RepeatSampler(remainder="uneven", **options)
    begun, within = begun - begun % options["group_size"], begun % options["group_size"]
    taken = list(islice(sampler, begun))
    draws = torch.cat(list(islice(sampler.draws(), 2)))
    assert draws["rollout_id"][0] == len(taken)
    whole = RepeatSampler(remainder="uneven", **options)
    stream = [index for _ in range(60) for index in whole]
    assert taken + draws["prompt"].tolist() == stream[: len(taken) + len(draws)]
    if within:
        list(islice(sampler, within))
        with pytest.raises(ValueError, match=rf"has yielded {within} of the {options['group_size']} indices"):
            next(sampler.draws())


@pytest.mark.parametrize(
    "change",
    [
        {"prompts": 4},
        {"group_size": 3},
        {"position": 20},
        {"epoch": -1},
        {"seed": 9},
        {"rank": 1, "ranks": 2},
    ],
    ids=str,
)
def test_the_state_of_another_sampler_is_refused(change):
    sampler = RepeatSampler(10, group_size=2)
    state = sampler.state_dict() | change
    with pytest.raises(ValueError) as refused:
        sampler.load_state_dict(state)
    own = {name: value for name, value in sampler.state_dict().items() if name not in ("epoch", "position")}
    assert str(refused.value) == f"the state must be of a sampler like this one ({own}); got {state}"


def test_epochs_and_seeds_have_different_orders():
    sampler = RepeatSampler(50, group_size=1, seed=1)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert first == list(RepeatSampler(50, group_size=1, seed=1))
    assert first != list(RepeatSampler(50, group_size=1, seed=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": 0}, "prompts must be an integer ≥ 1; got 0"),
        ({"group_size": 0}, "group_size must be an integer ≥ 1; got 0"),
        ({"prompts_per_batch": 0}, "prompts_per_batch must be an integer ≥ 1; got 0"),
        ({"repeats": 0}, "repeats must be an integer ≥ 1; got 0"),
        ({"prompts_per_batch": 13, "remainder": "drop"}, "at least prompts_per_batch=13 prompts; got 12$"),
        ({"prompts_per_batch": 5}, "a multiple of prompts_per_batch=5; got 12, with 2 left over. Set"),
        ({"remainder": "carry"}, "remainder must be one of 'raise', 'drop', 'uneven'; got 'carry'"),
        ({"rank": 2, "ranks": 2}, "rank must be from 0 to ranks - 1; got rank=2, ranks=2"),
        ({"rank": -1, "ranks": 2}, "rank must be from 0 to ranks - 1; got rank=-1, ranks=2"),
        ({"prompts_per_batch": 3, "ranks": 2}, "must have at least 2; got 3$"),
        (
            {"prompts_per_batch": 10, "ranks": 5, "remainder": "uneven"},
            "each of 5 ranks .* must have at least 5; got 10, and 2 in the last$",
        ),
    ],
)
def test_an_option_that_leaves_a_batch_or_a_rank_without_prompts_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RepeatSampler(**{"prompts": 12, "group_size": 2} | options)


def test_the_smallest_batches_that_are_allowed_have_a_prompt_for_each_rank():
    drops = {"group_size": 2, "prompts_per_batch": 10, "remainder": "drop", "shuffle": False}
    assert list(RepeatSampler([*"abcdefghijkl"], **drops)) == [prompt for prompt in range(10) for _ in "ab"]
    assert list(RepeatSampler(10, **drops)) == list(RepeatSampler(19, **drops))
    last = {"group_size": 1, "prompts_per_batch": 10, "remainder": "uneven", "shuffle": False, "ranks": 2}
    assert list(RepeatSampler(12, **last, rank=1)) == [1, 3, 5, 7, 9, 11]


@given(shape=shared(), data=st.data())
def test_a_sampler_goes_on_at_the_first_group_of_its_rank_that_is_not_known(shape, data):
    """The groups before some draw of this rank are known, however many there are."""
    ranks, options = shape
    rank = data.draw(st.integers(0, ranks - 1))
    one, other = (of_ranks(ranks, options)[rank] for _ in range(2))
    groups = [group for draws in islice(one.draws(), 5) for group in draws["group_id"].unique().tolist()]
    known = data.draw(st.integers(0, len(groups) - 1))
    other.go_on(lambda group: group in groups[:known])
    assert next(other.draws())["group_id"][0] == groups[known]


@pytest.mark.parametrize(
    ("prompts", "first", "found"),
    [
        ([1, 1, 2, 3], 0, "4 prompts and first_rollout=0, with another prompt at row 3"),
        ([1, 1, 2], 0, "3 prompts and first_rollout=0"),
        ([1, 1], 3, "2 prompts and first_rollout=3"),
        ([1, 2, 1, 2], 0, "4 prompts and first_rollout=0, with another prompt at row 1"),
    ],
)
def test_stamp_ids_refuses_prompts_that_are_not_in_groups(prompts, first, found):
    with pytest.raises(ValueError, match=f"got {found}$"):
        stamp_ids(prompts, group_size=2, first_rollout=first)


def test_concurrent_readers_get_each_prompt_once():
    sampler = RepeatSampler(6, group_size=2, prompts_per_batch=2, shuffle=False)
    indices = iter(sampler)
    drawn = [next(indices), next(indices)]
    drawn += next(sampler.draws())["prompt"].tolist()
    drawn += [next(indices), next(indices)]
    drawn += next(sampler.draws())["prompt"].tolist() + list(indices)
    assert drawn == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    indices = iter(sampler)
    assert [next(indices) for _ in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
