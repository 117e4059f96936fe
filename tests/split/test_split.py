"""Every row is in exactly one minibatch or left over, with its unit. A seed fixes the order."""

from __future__ import annotations

import pytest
import torch
from cutting import cut_alone
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import on_ranks
from tensordict import TensorDict

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    MissingKeyError,
    Rows,
    ShuffleSplit,
    shuffle_split,
    split_minibatches,
)
from headrace.transforms.table.schema import MINIBATCH, PADDING, ROW

UNITS = st.one_of(st.none(), st.lists(st.integers(0, 6), min_size=1, max_size=25))


@given(
    UNITS,
    st.integers(1, 25),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from(["drop", "uneven"]),
    st.booleans(),
)
def test_each_row_and_each_unit_is_in_one_minibatch(units, rows, number, by_size, remainder, shuffle):
    rows = rows if units is None else len(units)
    cut = {"minibatch_size": number} if by_size else {"minibatches": number}
    ids, total = None if units is None else torch.tensor(units), rows if units is None else len(set(units))
    if remainder == "drop" and total < number:
        with pytest.raises(
            BatchError, match=rf"{total} units are too few for .*{number}.* no optimiser step"
        ):
            shuffle_split(rows, ids, remainder=remainder, shuffle=shuffle, **cut)
        return
    plan = shuffle_split(rows, ids, remainder=remainder, shuffle=shuffle, **cut)
    assert sorted([*plan.order.tolist(), *plan.left.tolist()]) == list(range(rows))
    assert sum(plan.sizes) == len(plan.order)
    assert 0 not in plan.sizes
    of = list(range(rows)) if units is None else units
    parts = [[of[i] for i in part.tolist()] for part in plan.order.split(plan.sizes)] if plan.sizes else []
    parts.append([of[i] for i in plan.left.tolist()])
    homes = [set(part) for part in parts]
    assert sum(len(home) for home in homes) == len(set(of)), "a unit is in two places"

    counts = [len(home) for home in homes[:-1]]
    if by_size:
        assert (
            counts
            == [number] * (total // number)
            + ([total % number] if remainder == "uneven" else [])[: bool(total % number)]
        )
    elif remainder == "uneven":
        assert len(counts) == min(number, total)
        assert max(counts) - min(counts) <= 1
    else:
        assert counts == [total // number] * number
    assert not plan.left.numel() or remainder == "drop"


def test_rows_of_a_unit_keep_their_order():
    units = torch.tensor([4, 2, 4, 2, 4])
    order = shuffle_split(5, units, minibatches=1).order.tolist()
    assert [i for i in order if units[i] == 4] == [0, 2, 4]
    assert [i for i in order if units[i] == 2] == [1, 3]


def test_orders_differ_between_calls_and_from_the_input(make_batch):
    batch = make_batch([0.0] * 40, [0] * 40)
    stage = ShuffleSplit(minibatches=2, seed=3)
    orders = {tuple(stage(batch)["rollout_id"].tolist()) for _ in range(5)}
    assert len(orders) == 5
    assert tuple(range(40)) not in orders
    assert (
        len({tuple(ShuffleSplit(minibatches=2, seed=s)(batch)["rollout_id"].tolist()) for s in range(5)}) == 5
    )


def test_views_of_an_ordered_batch_equal_gathered_minibatches(make_batch):
    batch = make_batch([float(i) for i in range(7)], [0] * 7)
    one, two = (ShuffleSplit(minibatches=3, remainder="uneven", seed=1) for _ in "ab")
    views = list(split_minibatches(one(batch)))
    rows = Rows.read(batch)
    drawn = two.permute(rows.seen_by(two))
    gathered = list(drawn.steps([(rows.table.written_columns(), (), rows.table.batch)]))
    assert [len(view) for view in views] == [3, 2, 2]
    for number, (view, part) in enumerate(zip(views, gathered, strict=True)):
        assert view[MINIBATCH].tolist() == part[MINIBATCH].tolist() == [number] * len(view)
        assert torch.equal(view["tokens", "full"], part["tokens", "full"])
        assert list(view["prompt_text"]) == list(part["prompt_text"])


def test_a_remainder_is_refused_by_default(make_batch):
    batch = make_batch([0.0] * 5, [0, 0, 1, 1, 1], [0, 0, 1, 2, 3])
    with pytest.raises(
        BatchError, match=r"5 units cannot be cut into 2 equal minibatches: 1 left over.*'uneven'.*'drop'"
    ):
        ShuffleSplit(minibatches=2, unit="sample")(batch)
    with pytest.raises(BatchError, match="4 units cannot be cut into minibatches of 3 units: 1 left over"):
        ShuffleSplit(minibatch_size=3, unit="rollout")(batch)
    batch["row"] = torch.arange(5)
    stage = ShuffleSplit(minibatch_size=2, unit="sample", remainder="drop")
    outcome = cut_alone(stage, batch)
    assert outcome.measured["left"] == 1
    left = outcome.verdict.nonzero().flatten().tolist()
    assert sorted(outcome.batch["row"].tolist() + left) == [0, 1, 2, 3, 4]


def test_fewer_units_than_minibatches_make_no_empty_minibatch(make_batch):
    batch = make_batch([0.0] * 2, [0, 1])
    assert [len(p) for p in split_minibatches(ShuffleSplit(minibatches=5, remainder="uneven")(batch))] == [
        1,
        1,
    ]
    outcome = cut_alone(ShuffleSplit(minibatches=5, remainder="carry"), batch)
    assert outcome.batch.shape == (0,)
    assert outcome.measured["left"] == 2


def test_an_unsplit_batch_is_refused(make_batch):
    with pytest.raises(MissingKeyError, match="written by ShuffleSplit"):
        next(split_minibatches(make_batch([0.0], [0])))


def steps_of_rank(group, make_batch, parts, shared_ids, options):
    """The minibatches of a rank, or its error. A part has the groups of the rows of a rank."""
    groups = parts[group.rank]
    first = sum(map(len, parts[: group.rank]))
    batch = make_batch(
        [float(first + k) for k in range(len(groups))], groups, range(first, first + len(groups))
    )
    batch = batch if groups else TensorDict({}, batch_size=[0])
    how = {"process_group": group, "shared_ids": shared_ids, "patience": 9.0}
    pipeline = Pipeline({"split": ShuffleSplit(shuffle=False, **options)}, **how)
    try:
        return list(pipeline.minibatches(batch))
    except BatchError as err:
        return str(err)


def test_a_unit_with_rows_on_two_ranks_is_in_one_minibatch_or_refused(make_batch):
    parts, cut = [[0, 0, 5], [5, 1, 7], [7, 9, 9]], {"unit": "group", "remainder": "uneven"}
    for said in on_ranks(steps_of_rank, 3, make_batch, parts, "same", cut | {"minibatches": 2}):
        assert said.endswith(
            "groups 5, 7 have rows on more than one rank. Each rank cuts its own minibatches, so these rows "
            "would be in several optimiser steps. Keep the rows of a group on one rank, or set minibatches=1"
        )
    for shared_ids, minibatches in (("same", 1), ("different", 2)):
        found = on_ranks(steps_of_rank, 3, make_batch, parts, shared_ids, cut | {"minibatches": minibatches})
        for rank, steps in enumerate(found):
            assert len(steps) == minibatches
            rows = [row for step in steps for row in step[ROW].tolist()]
            assert sorted(rows) == [0, 1, 2]
            trained = sorted(reward for step in steps for reward in step["next", "reward"].flatten().tolist())
            assert trained == [3 * rank, 3 * rank + 1, 3 * rank + 2]


@pytest.mark.parametrize("parts", [[[], [4, 5, 6], []], [[1], [], [2, 3]]])
def test_a_rank_without_rows_pads_with_the_first_row_of_the_first_rank_that_has_rows(make_batch, parts):
    cut = {"minibatches": 1, "microbatches": 2, "remainder": "pad", "unit": "sample"}
    found = on_ranks(steps_of_rank, 3, make_batch, parts, "same", cut)
    lender = next(rank for rank, groups in enumerate(parts) if groups)
    lent = make_batch([float(k) for k in range(len(parts[lender]))], parts[lender])
    for rank, (step,) in enumerate(found):
        assert len(step) >= 2
        if parts[rank]:
            assert sorted(set(step[ROW].tolist()) - {-1}) == list(range(len(parts[rank])))
            continue
        assert step[PADDING].all()
        assert set(step[ROW].tolist()) == {-1}
        assert not step["masks", "all_assistant_mask"].any()
        for key in (("tokens", "full"), "group_id", ("stranger", "deep")):
            assert all(row.equal(lent[key][0]) for row in step[key]), key
