"""Every row is in exactly one minibatch or left over, with its unit. A seed fixes the order."""

from __future__ import annotations

import re
from itertools import pairwise, product
from random import Random

import pytest
import torch
from rank_threads import on_ranks
from tensordict import TensorDict

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    ShuffleSplit,
    shuffle_split,
    split_microbatches,
    split_minibatches,
)
from headrace.transforms.table.schema import PADDING, ROW


def counts_by_hand(units, number, by_size, remainder):
    """The number of units of each minibatch."""
    each, rest = divmod(units, number)
    if remainder not in ("uneven", "pad"):
        return [number] * each if by_size else [each] * number * (each > 0)
    if by_size:
        return [number] * each + [rest] * (rest > 0)
    return [each + (minibatch < rest) for minibatch in range(min(number, units))]


@pytest.mark.parametrize("remainder", ["raise", "drop", "carry", "uneven", "pad"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_minibatches_hold_whole_units_in_order_and_the_last_units_are_left_over(remainder, shuffle):
    """The rows of a unit keep their order. Without a shuffle, units are in the order of their first rows."""
    for seed, number in product(range(12), (1, 2, 3, 5, 8)):
        random, by_size = Random(seed), seed % 2 == 1
        ids = [random.randint(0, 5 + 20 * (seed % 3)) for _ in range(random.randint(1, 14))]
        units = [*dict.fromkeys(ids)] if seed % 4 else [*range(len(ids))]
        of = ids if seed % 4 else units  # without ids, each row is a unit
        counts = counts_by_hand(len(units), number, by_size, remainder)
        cut = {"minibatch_size" if by_size else "minibatches": number, "remainder": remainder}
        cut |= {"shuffle": shuffle, "generator": torch.Generator().manual_seed(seed)}
        if (remainder == "raise" and sum(counts) < len(units)) or (remainder == "drop" and not counts):
            with pytest.raises(BatchError, match=f"^{len(units)} units "):
                shuffle_split(len(ids), ids if seed % 4 else None, **cut)
            continue
        found = shuffle_split(len(ids), ids if seed % 4 else None, **cut)
        order = [*found.order.tolist(), *found.left.tolist()]
        drawn = [*dict.fromkeys(of[row] for row in order)]
        assert sorted(drawn) == sorted(units)
        assert shuffle or drawn == units
        assert order == [row for unit in drawn for row, own in enumerate(of) if own == unit]
        ends = [sum(counts[:end]) for end in range(len(counts) + 1)]
        assert found.sizes == [sum(of.count(unit) for unit in drawn[a:b]) for a, b in pairwise(ends)]
        assert len(found.order) == sum(found.sizes)


def test_a_batch_without_rows_has_no_minibatch():
    found = shuffle_split(0, minibatches=3)
    assert (found.order.tolist(), found.sizes, found.left.tolist()) == ([], [], [])


def test_orders_differ_between_calls_and_from_the_input(make_batch):
    batch = make_batch([0.0] * 40, [0] * 40)
    stage = ShuffleSplit(minibatches=2, seed=3)
    orders = {tuple(stage(batch)["rollout_id"].tolist()) for _ in range(5)}
    assert len(orders) == 5
    assert tuple(range(40)) not in orders
    assert (
        len({tuple(ShuffleSplit(minibatches=2, seed=s)(batch)["rollout_id"].tolist()) for s in range(5)}) == 5
    )


LEFT_OVER = (
    " left over. Set remainder='uneven' to train them in minibatches of different sizes, 'drop', or 'carry' "
    "to keep them for the next batch, which must have other ids"
)
NO_STEP = (
    ", and remainder='drop' would drop all of them: no optimiser step is left. Give the split more units, "
    "make minibatches smaller, or set remainder='uneven', or 'carry' if ids are unique over batches"
)
ONE_OF = "give exactly one of minibatches and minibatch_size; got "
MASKED_IN = "padding rows are masked in ('masks', 'all_assistant_mask') (loss_mask_key)"
NO_COLUMN = ", and the batch has no such column; it has [('masks', 'all_attention_mask'), 'rollout_id']"
REORDERED = (
    " needs the rows in the order of ShuffleSplit, and they were reordered since. Take the minibatches "
    "before a sampler reorders the rows, or remove the split and cut the sampled rows yourself"
)


def rows_of(lengths) -> TensorDict:
    """Rows of these lengths, each a rollout."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    columns = {"rollout_id": torch.arange(len(lengths)), ("masks", "all_attention_mask"): mask}
    return TensorDict(columns, batch_size=[len(lengths)])


def cut_rows(lengths=(2, 2), **options):
    return ShuffleSplit(**{"minibatches": 1} | options)(rows_of(lengths))


def cut_again(split, order=slice(None)):
    return split(cut_rows([2] * 8, minibatches=4)[order])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shuffle_split(3), f"{ONE_OF}minibatches=None and minibatch_size=None"),
        (
            lambda: shuffle_split(3, minibatches=1, minibatch_size=2),
            f"{ONE_OF}minibatches=1 and minibatch_size=2",
        ),
        (lambda: shuffle_split(3, minibatches=0), "minibatches must be an integer ≥ 1; got 0"),
        (lambda: shuffle_split(3, minibatch_size=0), "minibatch_size must be an integer ≥ 1; got 0"),
        (lambda: shuffle_split(3, [0, 1], minibatches=1), "every row needs a unit_id; got 2 for 3 rows"),
        (
            lambda: shuffle_split(5, minibatches=3),
            f"5 units cannot be cut into 3 equal minibatches: 2{LEFT_OVER}",
        ),
        (
            lambda: shuffle_split(6, [0, 0, 1, 1, 4, 3], minibatch_size=3),
            f"4 units cannot be cut into minibatches of 3 units: 1{LEFT_OVER}",
        ),
        (
            lambda: shuffle_split(2, minibatches=3, remainder="drop"),
            f"2 units are too few for 3 minibatches{NO_STEP}",
        ),
        (
            lambda: shuffle_split(2, minibatch_size=5, remainder="drop"),
            f"2 units are too few for a minibatch of 5 units{NO_STEP}",
        ),
        (
            lambda: cut_rows(ranks=3),
            "minibatch 0 has 2 rows for 3 ranks × 1 micro-batch, and no micro-batch may be empty: set "
            "remainder='pad', or make minibatches larger",
        ),
        (
            lambda: cut_rows([4] * 3, max_tokens=4, ranks=4, remainder="drop"),
            "every minibatch has fewer rows than micro-batches, so remainder='drop' would drop all 3 rows: "
            "raise max_tokens, or set remainder='pad'",
        ),
        (
            lambda: cut_rows(microbatches=3, remainder="pad"),
            f"{MASKED_IN} or ('log_probs', 'full') (log_prob_key){NO_COLUMN}",
        ),
        (
            lambda: cut_rows(microbatches=3, remainder="pad", log_prob_key=None),
            f"{MASKED_IN}{NO_COLUMN}",
        ),
        (
            lambda: cut_again(split_microbatches),
            "split_microbatches needs one minibatch, and this batch holds 4: take one after the other with "
            "split_minibatches(batch)",
        ),
        (lambda: cut_again(split_microbatches, [3, 0]), f"split_microbatches{REORDERED}"),
        (lambda: cut_again(split_minibatches, [0, 4, 1]), f"split_minibatches{REORDERED}"),
        (
            lambda: split_minibatches(rows_of([2])),
            "split_minibatches needs the column ('headrace', 'minibatch'), written by ShuffleSplit: put "
            "ShuffleSplit before it",
        ),
    ],
)
def test_a_batch_or_option_that_makes_no_minibatches_is_refused_with_advice(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


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


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        (
            [[0, 1], [2, 3, 4]],
            {"minibatches": 2},
            f"3 units cannot be cut into 2 equal minibatches: 1{LEFT_OVER} (These are the rows of rank 1.)",
        ),
        (
            [[0, 1], [2]],
            {"minibatches": 1, "microbatches": 2},
            "minibatch 0 has 1 row for 1 rank × 2 micro-batches, and no micro-batch may be empty: set "
            "remainder='pad', or make minibatches larger (These are the rows of rank 1.)",
        ),
        (
            [[], [0, 1, 2, 3], [4, 5], [6, 7]],
            {"minibatch_size": 2},
            "all ranks must take the same number of optimiser steps; they have [0, 2, 1, 1] minibatches, by "
            "rank: give all ranks the same number of units, or set minibatches=K instead of minibatch_size",
        ),
    ],
)
def test_ranks_whose_rows_make_no_equal_steps_are_refused_with_the_rank(make_batch, parts, options, message):
    for said in on_ranks(steps_of_rank, len(parts), make_batch, parts, "same", {"unit": "sample"} | options):
        assert said.endswith(f"): {message}")


def test_the_metrics_of_ranks_are_those_of_all_ranks():
    """In the first minibatch the two ranks have 5 + 1 and 1 + 1 tokens, and in the second 2 + 2 and 7."""
    lengths = [[5, 1, 2, 2], [1, 1, 7]]

    def run(group):
        split = ShuffleSplit(minibatches=2, microbatches=2, remainder="pad", balance="tokens", shuffle=False)
        batch = rows_of(lengths[group.rank])
        batch["masks", "all_assistant_mask"] = batch["masks", "all_attention_mask"].clone()
        return Pipeline({"split": split}, process_group=group, shared_ids="different").run(batch).metrics

    for measured in on_ranks(run, 2):
        of_split = {name: value for name, value in measured.items() if name.startswith("split/")}
        assert of_split == {
            "split/minibatches": 2.0,
            "split/microbatches": 4.0,
            "split/padded": 1.0,
            "split/rank_imbalance": 6 / 4 - 1,  # the ranks of the first step have 6 and 2 tokens
            "split/max_tokens": 7.0,
            "split/left": 0.0,
        }
