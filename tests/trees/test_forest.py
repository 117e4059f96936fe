"""Rows with a shared prefix are in one micro-batch, and their shared tokens cost once."""

from __future__ import annotations

from itertools import combinations, pairwise, takewhile

import torch
from cutting import cut_alone
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tries import ATTENTION, FULL, Trie, dense

from headrace.transforms import ShuffleSplit, pack, split_microbatches, split_minibatches
from headrace.transforms.stages.sequences import END
from headrace.transforms.trees.forest import Forest
from headrace.transforms.trees.prefixes import prefix_order

# The first token decides the tree. Later tokens are shared by few rows.
ROW_OF = st.tuples(st.sampled_from([1, 2, 3]), st.lists(st.sampled_from([4, 5]), max_size=7)).map(
    lambda row: [row[0], *row[1]]
)
ROWS = st.lists(ROW_OF, min_size=1, max_size=14)


def batch_of(rows, groups, build=dense) -> TensorDict:
    batch = build(rows)
    for key, ids in (("group_id", groups), ("rollout_id", range(len(rows)))):
        batch[key] = torch.tensor(list(ids))
    batch["number"] = torch.arange(len(rows))
    return batch.exclude("loss_weight")


def cut_into(batch, **options) -> list[list[int]]:
    """The rows of each micro-batch."""
    split = ShuffleSplit(**{"minibatches": 1, "unit": "sample", "remainder": "uneven"} | options)
    return [
        microbatch["number"].flatten().tolist()
        for minibatch in split_minibatches(split(batch))
        for microbatch in split_microbatches(minibatch)
    ]


def nodes(rows, numbers, groups) -> int:
    """The number of nodes of these rows, with one tree per group."""
    return sum(
        len(Trie([rows[i] for i in numbers if groups[i] == group]).paths)
        for group in {groups[i] for i in numbers}
    )


@given(
    ROWS, st.integers(3, 30), st.sampled_from(["none", "tokens", "attention"]), st.integers(1, 3), st.data()
)
def test_micro_batches_of_trees_keep_the_budget_in_nodes(rows, budget, balance, minibatches, data):
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    batch = batch_of(rows, groups)
    options = {"max_tokens": budget, "balance": balance, "tree": "group", "minibatches": minibatches}
    passes = cut_into(batch, **options)
    assert sorted(number for each in passes for number in each) == list(range(len(rows)))
    for each in passes:
        found = nodes(rows, each, groups)
        assert found <= budget or len(each) == 1
        assert int(pack(batch[torch.tensor(each)], tree=True)["input_ids"].shape[1]) <= found


@given(
    ROWS,
    st.sampled_from([{"max_tokens": 999}, {"microbatches": 2}, {"microbatches": 3, "balance": "tokens"}]),
)
def test_the_rows_of_a_tree_are_in_one_micro_batch(rows, cut):
    passes = cut_into(batch_of(rows, [0] * len(rows)), tree="group", **cut)
    home = {number: place for place, each in enumerate(passes) for number in each}
    for a, b in combinations(range(len(rows)), 2):
        if rows[a][0] == rows[b][0]:
            assert home[a] == home[b]


NUMBERS = st.sampled_from([-(2**63) + 1, -256, -1, 0, 1, 255, 256, 2**40, 2**63 - 1])


@given(st.lists(st.tuples(st.integers(0, 1), st.lists(NUMBERS, max_size=4)), max_size=8))
def test_rows_are_sorted_like_lists_and_shared_tokens_are_those_of_a_loop(rows):
    """Numbers may be large or negative: each byte and the sign are compared, and nothing is hashed."""
    labels = torch.full((len(rows), 5), END)
    for number, (_, row) in enumerate(rows):
        labels[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
    found = prefix_order(labels, torch.tensor([home for home, _ in rows], dtype=torch.int64))
    order = sorted(range(len(rows)), key=rows.__getitem__)
    assert found.order.tolist() == order
    for (above, row), common in zip(pairwise(order), found.shared[1:].tolist(), strict=True):
        (home, one), (other_home, other) = rows[above], rows[row]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
        assert common == (len(list(same)) if home == other_home else 0)


def forest_of(rows) -> Forest:
    batch = dense(rows)
    labels = torch.where(batch[ATTENTION], batch[FULL], END)
    return Forest(*prefix_order(labels), torch.tensor([len(row) for row in rows]))


@given(ROWS, st.integers(2, 12), st.data())
def test_a_tree_above_the_budget_is_split_where_the_next_row_does_not_fit(rows, budget, data):
    chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, unique=True))
    pieces: list[list[int]] = []
    for number in sorted(chosen, key=lambda i: (rows[i], i)):  # row by row, with nodes counted by a loop
        same = bool(pieces) and rows[pieces[-1][0]][0] == rows[number][0]
        if same and len(Trie([rows[i] for i in [*pieces[-1], number]]).paths) <= budget:
            pieces[-1].append(number)
        else:
            pieces.append([number])
    tree, shared = forest_of(rows).pieces(torch.tensor(chosen), budget)
    home = {number: place for place, each in enumerate(pieces) for number in each}
    assert tree.tolist() == [home[number] for number in chosen]
    for place, each in enumerate(pieces):
        length = sum(len(rows[number]) for number in each)
        assert length - int(shared[tree == place].sum()) == len(Trie([rows[i] for i in each]).paths)


@given(st.integers(0, 2**32))
def test_shared_tokens_of_any_rows_equal_those_of_a_loop(seed):
    """A row may occur twice, like a row that pads a micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, (1 + i % 9,), generator=generator).tolist() for i in range(40)]
    chosen = torch.randint(40, (25,), generator=generator)
    part = torch.randint(3, (25,), generator=generator)
    shared = forest_of(rows).shared(chosen, part)
    for number in range(3):
        own = [rows[row] for row in chosen[part == number].tolist()]
        nodes = len(Trie(own).paths)
        assert sum(map(len, own)) - int(shared[part == number].sum()) == nodes
        assert all(0 <= same <= len(rows[row]) for row, same in zip(chosen, shared.tolist(), strict=True))


def test_fewer_trees_than_micro_batches_make_no_empty_micro_batch():
    rows = [[1, 2, 3], [1, 2, 4], [1, 2, 5], [2, 2]]
    passes = cut_into(batch_of(rows, [0] * 4), tree="group", microbatches=3, shuffle=False)
    assert sorted(passes) == [[0, 1, 2], [3]]


def test_padding_rows_cost_nothing():
    rows = [[1, 2, 3], [1, 2, 4], [1, 2, 5], [2, 2]]  # the first tree has 9 tokens and 5 nodes
    split = ShuffleSplit(minibatches=1, microbatches=2, tree="group", remainder="pad", balance="tokens")
    outcome = cut_alone(split, batch_of(rows, [0] * 4))
    assert outcome.measured["padded"] == 2
    assert outcome.measured["max_tokens"] == 5
    assert outcome.measured["shared_tokens"] == 4


def test_rows_share_tokens_only_within_their_rollout_or_group():
    batch = batch_of([[1, 2, 3], [1, 2, 4], [1, 2, 5]], [0, 0, 1])
    batch["rollout_id"] = torch.tensor([0, 1, 2])
    for tree, shared in (("none", None), ("rollout", 0.0), ("group", 2.0)):
        split = ShuffleSplit(minibatches=1, max_tokens=99, tree=tree)
        assert cut_alone(split, batch).measured.get("shared_tokens") == shared
