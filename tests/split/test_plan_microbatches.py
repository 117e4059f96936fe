"""ShuffleSplit keeps the promises of its docstring about minibatches, ranks and micro-batches."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import torch
from cutting import cut_alone
from hypothesis import assume, given
from hypothesis import strategies as st
from tensordict import TensorDict

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    BatchTransform,
    LengthWithin,
    LossWeight,
    SampleFilter,
    ShuffleSplit,
    assign_rows,
    split_microbatches,
)
from headrace.transforms.split.bins import balance_evenly, balance_within
from headrace.transforms.table.schema import IN_LOSS, MICROBATCH, MINIBATCH, PADDING, RANK, ROW

ATTENTION, LOSS = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")


def batch_of(lengths, rollouts=None, first_id: int = 0) -> TensorDict:
    """Rows of these lengths, with all tokens in the loss."""
    rows, width = len(lengths), max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    ids = torch.tensor(range(rows) if rollouts is None else rollouts) + first_id
    return TensorDict(
        {
            "name": torch.arange(rows) + 1000 * first_id,
            "rollout_id": ids,
            "group_id": ids // 2,
            ATTENTION: mask,
            LOSS: mask.clone(),
            ("log_probs", "full"): -torch.rand(rows, width),
        },
        batch_size=[rows],
    )


LENGTHS = st.lists(st.integers(1, 12), min_size=4, max_size=24)
CUT = st.one_of(
    st.just({}),
    st.integers(1, 4).map(lambda m: {"microbatches": m}),
    st.tuples(st.integers(4, 30), st.sampled_from(["pad", "drop"])).map(
        lambda cut: {"max_tokens": cut[0], "remainder": cut[1]}
    ),
)
OPTIONS = st.fixed_dictionaries(
    {
        "minibatches": st.integers(1, 3),
        "balance": st.sampled_from(["none", "tokens", "attention"]),
        "ranks": st.sampled_from([1, 2, 3]),
        "remainder": st.sampled_from(["pad", "uneven", "drop"]),
        "unit": st.sampled_from(["sample", "rollout", "group"]),
        "seed": st.integers(0, 99),
    }
)


@given(LENGTHS, st.integers(1, 3), OPTIONS, CUT)
def test_the_split_keeps_its_documented_promises(lengths, fan_out, options, cut):
    options = options | cut
    batch = batch_of(lengths, [i // fan_out for i in range(len(lengths))])
    split = ShuffleSplit(**options)
    try:
        out, verdict, measured, *_ = cut_alone(split, batch)
    except BatchError as err:  # too few rows for the ranks without padding, or too few units
        assume(
            not any(
                why in str(err) for why in ("no micro-batch may", "no optimiser step is", "would drop all")
            )
        )
        raise
    padding = out.get(PADDING, torch.zeros(len(out), dtype=torch.bool))
    assert options["remainder"] == "pad" or not padding.any()

    # Each row is in exactly one micro-batch of one minibatch, or left over.
    left = batch["name"][verdict.bool()].tolist()
    assert sorted(out["name"][~padding].tolist() + left) == batch["name"].tolist()

    # All rows of a unit are in one minibatch.
    if options["unit"] != "sample":
        homes: dict[int, set[int]] = {}
        for unit, minibatch in zip(
            out[f"{options['unit']}_id"].tolist(), out[MINIBATCH].tolist(), strict=True
        ):
            homes.setdefault(unit, set()).add(minibatch)
        assert all(len(home) == 1 for home in homes.values())

    # All ranks have equal numbers of micro-batches, and none is empty.
    ranks = out.get(RANK, torch.zeros(len(out), dtype=torch.int64))
    place = torch.stack([out[MINIBATCH], ranks, out[MICROBATCH]], 1)
    assert place.tolist() == sorted(place.tolist())
    for minibatch in out[MINIBATCH].unique():
        counts = {
            rank: out[MICROBATCH][(out[MINIBATCH] == minibatch) & (ranks == rank)].unique().tolist()
            for rank in range(options["ranks"])
        }
        assert len({tuple(numbers) for numbers in counts.values()}) == 1
        assert counts[0] == list(range(len(counts[0]))) != []

    # Micro-batches keep the budget of tokens, their size and their number.
    parts = [out[(place == p).all(1)] for p in place.unique(dim=0)]
    real = [part[~part.get(PADDING, torch.zeros(len(part), dtype=torch.bool))] for part in parts]
    tokens = [int(part[ATTENTION].sum()) for part in real]
    if "max_tokens" in cut:
        assert all(t <= cut["max_tokens"] or len(part) == 1 for t, part in zip(tokens, real, strict=True))
    full = max([1, *map(len, real)]) if options["remainder"] == "pad" and "max_tokens" not in cut else 1
    assert [len(part) for part in parts] == [max(len(own), full) for own in real]
    if "microbatches" in cut and options["remainder"] == "pad":
        assert len(parts) == len(out[MINIBATCH].unique()) * options["ranks"] * cut["microbatches"]

    # Padding trains nothing.
    assert not out[LOSS][padding].any()
    assert out["log_probs", "full"][padding].isnan().all()

    # The metrics are those of the output.
    load = dict(zip(map(tuple, place.unique(dim=0).tolist()), tokens, strict=True))
    steps = sorted({minibatch for minibatch, _, _ in load})
    assert measured["minibatches"] == len(steps)
    assert measured["microbatches"] == len(load) / options["ranks"]
    assert (measured["padded"], measured["left"]) == (int(padding.sum()), len(left))
    if "max_tokens" in cut or options["balance"] != "none":
        of_ranks = [
            [
                sum(n for (k, r, _), n in load.items() if (k, r) == (step, rank))
                for rank in range(options["ranks"])
            ]
            for step in steps
        ]
        apart = max(max(own) / (sum(own) / len(own)) for own in of_ranks) - 1
        assert measured["max_tokens"] == max(tokens)
        assert measured["rank_imbalance"] == pytest.approx(apart)


@pytest.mark.parametrize("balance", ["none", "tokens"])
@pytest.mark.parametrize("seed", [0, 7])
def test_a_seed_gives_the_same_minibatches_for_any_number_of_ranks(seed, balance):
    batch, found = batch_of([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]), []
    for ranks in (1, 2, 3):
        split = ShuffleSplit(
            minibatches=2, seed=seed, ranks=ranks, microbatches=2, balance=balance, remainder="pad"
        )
        out = split(batch)
        real = out[~out.get(PADDING, torch.zeros(len(out), dtype=torch.bool))]
        found.append([sorted(real["name"][real[MINIBATCH] == k].tolist()) for k in (0, 1)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("minibatches", "ranks", "cut"),
    [
        (1, 1, {"remainder": "uneven"}),
        (3, 1, {"remainder": "pad", "microbatches": 3}),
        (1, 3, {"remainder": "pad", "microbatches": 2, "balance": "tokens"}),
        (3, 2, {"remainder": "uneven"}),
        (2, 3, {"remainder": "pad"}),
    ],
)
def test_minibatches_one_by_one_equal_those_of_the_ordered_batch(minibatches, ranks, cut):
    """A rank yields its own rows. Ranks together have the whole batch."""
    batch, options = (
        batch_of([3, 1, 4, 1, 5, 9, 2, 6]),
        {"minibatches": minibatches, "ranks": ranks, "seed": 4},
    )
    parts = {}
    for rank in (None, *range(ranks)):
        whole = ShuffleSplit(rank=rank, **options, **cut)(batch)
        pipeline = Pipeline({"split": ShuffleSplit(rank=rank, **options, **cut)})
        parts[rank] = list(pipeline.minibatches(batch))
        assert [part[MINIBATCH].unique().tolist() for part in parts[rank]] == [
            [k] for k in range(minibatches)
        ]
        for key in ("name", MICROBATCH, LOSS):
            assert torch.equal(torch.cat([part[key] for part in parts[rank]]), whole[key])
        if ranks > 1:
            held = list(range(ranks)) if rank is None else [rank]
            assert [part[RANK].unique().tolist() for part in parts[rank]] == [held] * minibatches
    for number, part in enumerate(parts[None]):
        of_ranks = [parts[rank][number]["name"] for rank in range(ranks)]
        assert part["name"].tolist() == torch.cat(of_ranks).tolist()


@pytest.mark.parametrize(("rows", "ranks", "each"), [(5, 2, 2), (4, 2, 2), (7, 3, 2), (3, 1, 3), (9, 2, 4)])
def test_too_few_rows_make_fewer_micro_batches_on_every_rank(rows, ranks, each):
    split = ShuffleSplit(minibatches=1, ranks=ranks, microbatches=4, unit="sample", remainder="uneven")
    outcome = cut_alone(split, batch_of([2] * rows))
    assert len(outcome.batch) == rows
    assert outcome.measured["microbatches"] == each
    held = outcome.batch.get(RANK, torch.zeros(rows, dtype=torch.int64))
    for rank in range(ranks):
        assert outcome.batch[MICROBATCH][held == rank].unique().tolist() == list(range(each))


def assigned_by_loops(rows, ranks, microbatches, max_tokens, balance):
    """The rows by rank and micro-batch. A row is a tree, its tokens, and how many another row computes."""

    def cost(tokens):
        return tokens**2 + 24576 * tokens if balance == "attention" else tokens

    trees = [*dict.fromkeys(tree for tree, *_ in rows)]
    tokens = [sum(own - shared for tree, own, shared in rows if tree == each) for each in trees]
    costs = [sum(cost(own) - cost(shared) for tree, own, shared in rows if tree == each) for each in trees]
    tokens, prices, count = (
        torch.tensor(tokens).long(),
        torch.tensor(costs).long(),
        ranks * (microbatches or 1),
    )
    if max_tokens is not None:
        bin_of = balance_within(tokens, max_tokens, multiple_of=ranks, costs=prices).tolist()
        count = max(-(-(max(bin_of, default=0) + 1) // ranks), 1) * ranks
    elif balance != "none":
        bin_of = balance_evenly(prices, count).tolist()
    else:  # in the order given; the first micro-batches have one tree more
        bin_of = torch.arange(len(trees)).tensor_split(count)
        bin_of = [number for number, part in enumerate(bin_of) for _ in part]
    load = [
        sum(price for price, at in zip(costs, bin_of, strict=True) if at == each) for each in range(count)
    ]
    of_ranks, by_load = [[] for _ in range(ranks)], sorted(range(count), key=lambda each: -load[each])
    for start in range(0, count, ranks):  # the heaviest goes to the rank with the least cost so far
        free = sorted(of_ranks, key=lambda bins: sum(load[each] for each in bins))
        for bins, number in zip(free, by_load[start : start + ranks], strict=True):
            bins.append(number)
    if max_tokens is None and balance == "none":
        of_ranks = torch.arange(count).view(ranks, -1).tolist()
    home = dict(zip(trees, bin_of, strict=True))
    return [
        [[row for row, (tree, *_) in enumerate(rows) if home[tree] == number] for number in bins]
        for bins in of_ranks
    ]


@pytest.mark.parametrize("balance", ["none", "tokens", "attention"])
@pytest.mark.parametrize(
    ("microbatches", "max_tokens"), [(None, None), (1, None), (3, None), (None, 9), (None, 40)]
)
def test_rows_and_trees_are_assigned_as_by_loops(balance, microbatches, max_tokens):
    for seed, ranks in product(range(4), (1, 2, 3)):
        random = Random(seed)
        rows = [
            (row, random.randint(1, 10**4 if seed % 2 else 12), 0) for row in range(random.randint(0, 20))
        ]
        options = {"microbatches": microbatches, "max_tokens": max_tokens, "balance": balance}
        own = torch.tensor([tokens for _, tokens, _ in rows]).long()
        found = assign_rows(own, ranks=ranks, **options)
        assert [[part.tolist() for part in parts] for parts in found] == assigned_by_loops(
            rows, ranks, **options
        )
        trees = [(random.randint(0, 6), tokens, random.randint(0, tokens)) for _, tokens, _ in rows]
        for shares in (False, True):
            rows = [(tree, tokens, shares * shared) for tree, tokens, shared in trees]
            tree, _, shared = torch.tensor(rows).long().view(-1, 3).unbind(1)
            found = assign_rows(own, ranks=ranks, tree=tree, shared=shared if shares else None, **options)
            expected = assigned_by_loops(rows, ranks, **options)
            assert [[part.tolist() for part in parts] for parts in found] == expected


def test_each_epoch_of_each_batch_has_its_own_order():
    pipeline = Pipeline({"split": ShuffleSplit(minibatches=1, seed=2)})
    orders = [
        tuple(part["name"].tolist())
        for epochs in (2, 1, 3)
        for part in pipeline.minibatches(batch_of([2] * 12), epochs=epochs)
    ]
    assert len(set(orders)) == len(orders) == 6
    assert pipeline.stages["split"].state.calls == 6


@pytest.mark.parametrize("epochs", [1, 2, 4])
def test_a_row_is_left_over_if_no_epoch_trains_it(epochs):
    pipeline = Pipeline({"split": ShuffleSplit(minibatch_size=4, unit="sample", remainder="drop")})
    run = pipeline.run(batch_of([2] * 7), epochs=epochs)
    trained = {name for part in run.minibatches() for name in part["name"].tolist()}
    assert {row["row"] for row in run.ledger.rows("split/remainder")} == {*range(7)} - trained
    assert run.metrics["split/left"] == 7 - len(trained)


def test_tokens_are_counted_only_if_an_option_needs_lengths():
    for option in ({}, {"microbatches": 2}, {"max_tokens": 9}, {"balance": "tokens"}, {"tree": "group"}):
        counted = ShuffleSplit(minibatches=1, length_key="mine", **option).tokens_counted
        assert counted == ([] if option.keys() <= {"microbatches"} else [("mine", None)])


def test_minibatches_without_tokens_are_balanced():
    batch = batch_of([1, 1])
    batch[ATTENTION] = torch.zeros(2, 1, dtype=torch.bool)
    measured = cut_alone(ShuffleSplit(minibatches=1, ranks=2, balance="tokens"), batch).measured
    assert (measured["rank_imbalance"], measured["max_tokens"]) == (0.0, 0.0)


def test_a_row_as_long_as_the_budget_is_not_above_it():
    batch = batch_of([9, 9, 3])
    assert cut_alone(ShuffleSplit(minibatches=1, max_tokens=9), batch).measured["oversized"] == 0
    assert cut_alone(ShuffleSplit(minibatches=1, max_tokens=8), batch).measured["oversized"] == 2
    shorter = SampleFilter(criterion=LengthWithin(high=8), action="drop")
    pipeline = Pipeline({"filter": shorter, "split": ShuffleSplit(minibatches=1, max_tokens=2)})
    assert pipeline.run(batch).metrics["split/oversized"] == 1  # rows that left before do not count


# -- carried rows -----------------------------------------------------------------------------------


def test_each_epoch_has_the_same_rows_if_others_are_carried():
    pipeline = Pipeline({"split": ShuffleSplit(minibatch_size=2, remainder="carry")})
    batch = batch_of([2] * 5)
    parts = [part["name"] for part in pipeline.minibatches(batch, epochs=2)]
    first, second = torch.cat(parts[:2]), torch.cat(parts[2:])
    assert torch.equal(first.sort().values, second.sort().values)
    assert not torch.equal(first, second)


def test_a_stage_after_the_split_must_not_move_rows():
    class Late(BatchTransform):
        """Drops the first rows."""

        def __init__(self):
            super().__init__(in_keys=[MINIBATCH])

        def apply(self, batch):
            return batch[2:]

    with pytest.raises(BatchError, match=r"'late', .* after the split must keep all 8 rows"):
        Pipeline({"split": ShuffleSplit(minibatches=2), "late": Late()})(batch_of([2] * 8))


def test_a_row_without_a_token_in_the_loss_is_recorded_as_empty():
    batch = batch_of([2] * 4)
    batch["log_probs", "full"][1] = float("nan")  # GRPOLoss leaves these tokens out
    pipeline = Pipeline({"split": ShuffleSplit(minibatches=2), "weight": LossWeight()})
    pipeline(batch)
    assert [row["row"] for row in pipeline.ledger.rows("pipeline/empty")] == [1]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("inference", [False, True])
def test_a_copied_minibatch_has_the_same_micro_batches(ranks, inference):
    batch = batch_of([1 + i % 5 for i in range(24)])
    split = ShuffleSplit(minibatches=3, microbatches=3, ranks=ranks, remainder="pad")
    with torch.inference_mode(inference):
        for minibatch in Pipeline({"split": split}).minibatches(batch):
            known, read = (
                [part["rollout_id"].tolist() for part in split_microbatches(rows)]
                for rows in (minibatch, minibatch.clone())
            )
            assert known == read
            assert len(known) == 3 * ranks
            minibatch[MICROBATCH].copy_(minibatch[MICROBATCH].flip(0))  # as another function might
            with pytest.raises(BatchError, match="reordered since"):
                split_microbatches(minibatch)


def some_rows(make_batch, n: int = 8) -> TensorDict:
    return make_batch([float(i) for i in range(n)], [0] * n)


def test_padding_that_would_train_is_refused_before_state_changes(make_batch):
    pipeline = Pipeline({"split": ShuffleSplit(minibatches=2, microbatches=2, remainder="pad")})
    batch = some_rows(make_batch, 5).exclude("masks", "log_probs")
    with pytest.raises(BatchError, match=r"^stage 'split'.*padding rows are masked in"):
        pipeline.run(batch)
    assert pipeline.stages["split"].state.calls == 0
    assert pipeline.ledger is None


def test_padding_has_no_row_number_and_is_not_in_the_loss():
    """The columns may be in the batch, or in the table of a pipeline."""
    batch = batch_of([2, 2, 2])
    batch[IN_LOSS], batch["loss_weight"] = torch.tensor([True, False, True]), torch.ones(3)
    split = {"minibatches": 1, "microbatches": 2, "remainder": "pad", "shuffle": False}
    alone = ShuffleSplit(**split)(batch.clone().set(ROW, torch.arange(3)))
    second = SampleFilter(criterion=lambda rows: torch.arange(len(rows)) != 1)
    piped = Pipeline({"filter": second, "split": ShuffleSplit(**split), "weight": LossWeight()})(batch)
    for out in (alone, piped):
        assert out[PADDING].tolist() == [False, False, False, True]
        assert out[ROW].tolist() == [0, 1, 2, -1]
        assert out[IN_LOSS].tolist() == [True, False, True, False]
        assert (out["loss_weight"] > 0).tolist()[3:] == [False]


def test_a_second_split_removes_the_ranks_and_padding_of_the_first():
    first = ShuffleSplit(minibatches=1, ranks=2, remainder="pad")(batch_of([2, 2, 2]))
    again = ShuffleSplit(minibatches=1)(first[~first[PADDING]])
    assert RANK not in again.keys(True)
    assert PADDING not in again.keys(True)
