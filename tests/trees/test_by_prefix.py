"""Tree advantages equal those of a loop."""

from __future__ import annotations

import math
import re
import types
from random import Random

import pytest
import torch
from any_rank import group_of_one
from hypothesis import example, given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import Pipeline
from headrace.transforms import BatchError, BatchTransform, TreeAdvantage, tree_advantage
from headrace.transforms.stages.sequences import END
from headrace.transforms.table.schema import COUNTED
from headrace.transforms.trees.by_prefix import origin_of

REAL = ("masks", "all_attention_mask")
WORDS = ("tokens", "full")

# -- against a loop ---------------------------------------------------------------------------------------


def stated(paths, groups, rewards, *, baseline):
    """For each token, the mean reward of the rollouts of its node minus that of the node before.

    A node is a prefix. The node of a token is the longest prefix that the same rollouts share. The node
    before ends where these rollouts fork from others.
    """

    def through(i, depth):
        """The rollouts of the group that share the first `depth` tokens."""
        return [
            j
            for j in range(len(paths))
            if groups[j] == groups[i] and len(paths[j]) >= depth and paths[j][:depth] == paths[i][:depth]
        ]

    def mean(rows):
        return math.fsum(rewards[j] for j in rows) / len(rows)

    found = []
    for i, path in enumerate(paths):
        credit = []
        for t in range(len(path)):
            node = through(i, t + 1)
            begin = next(
                (d for d in range(t, -1, -1) if len(through(i, d)) > len(node)), None
            )  # the fork before the node
            if begin is None:
                credit.append(0.0)
                continue
            parent = through(i, begin)
            if baseline == "leave_one_out":
                parent = [j for j in parent if j not in node]
            credit.append(mean(node) - mean(parent))
        found.append(credit)
    return found


@st.composite
def trees(draw):
    """Draw up to 8 rollouts in up to 3 groups, with up to 5 tokens of two kinds."""
    leaves = draw(
        st.lists(
            st.tuples(
                st.integers(0, 2),
                st.lists(st.integers(0, 1), min_size=1, max_size=5),
                st.floats(-4, 4, width=32),
            ),
            min_size=1,
            max_size=8,
        )
    )
    return [list(column) for column in zip(*leaves, strict=True)]


OPTIONS = st.fixed_dictionaries({"baseline": st.sampled_from(["mean", "leave_one_out"])})


def dense(paths, width, side):
    """The tokens, (N, T), and their mask, with padding on one side or anywhere."""
    tokens = torch.full((len(paths), width), 9)
    real = torch.zeros(len(paths), width, dtype=torch.bool)
    for row, path in enumerate(paths):
        start = 0 if side == "right" else width - len(path)
        places = torch.arange(start, start + len(path))
        if side == "anywhere":
            places = torch.linspace(0, width - 1, len(path)).long()
        tokens[row, places], real[row, places] = torch.tensor(path), True
    return tokens, real


@given(trees(), OPTIONS, st.sampled_from(["left", "right", "anywhere"]))
def test_advantage_equals_that_of_a_loop_for_any_padding(tree, options, side):
    groups, paths, rewards = tree
    tokens, real = dense(paths, 9, side)
    reward = torch.tensor(rewards, dtype=torch.float64)
    found = tree_advantage(reward, tokens, torch.tensor(groups), real, **options)
    expected = stated(paths, groups, rewards, **options)
    for row in range(len(paths)):
        assert found[row][real[row]].tolist() == pytest.approx(expected[row], rel=1e-12, abs=1e-12)
        assert not found[row][~real[row]].any()


def leaves(paths, groups, rewards, **columns):
    """The rollouts as ragged rows."""
    rows = []
    for row, path in enumerate(paths):
        one = {
            "group_id": torch.tensor(groups[row]),
            "rollout_id": torch.tensor(10 + row),
            ("next", "reward"): torch.tensor([rewards[row]], dtype=torch.float64),
            WORDS: torch.tensor(path),
            REAL: torch.ones(len(path), dtype=torch.bool),
        }
        one |= {name: torch.tensor(values[row]) for name, values in columns.items()}
        rows.append(TensorDict(one, batch_size=[]))
    return lazy_stack(rows)


def test_equal_rewards_have_an_advantage_of_exactly_0():
    paths = [[1, 2, 3], [1, 2, 4], [1, 5, 3], [6, 2, 3], [6, 2, 3], [7, 0, 0], [7, 0, 1]]
    for baseline in ("mean", "leave_one_out"):
        out = TreeAdvantage(baseline=baseline)(leaves(paths, [0] * 7, [0.7] * 7))
        assert not torch.cat(out.get("advantage", as_list=True)).any()


# -- parents ------------------------------------------------------------------------------------------------


@given(trees(), OPTIONS, st.data())
def test_forks_by_parents_equal_forks_by_labels_of_nodes(tree, options, data):
    """Each rollout continues an earlier rollout of its group after some tokens, or starts a new tree.

    A parent that is excluded or has no reward shares its tokens, and is in no mean.
    """
    groups, paths, rewards = tree
    parents, labels = [], []
    for row, group in enumerate(groups):
        earlier = [j for j in range(row) if groups[j] == group]
        parent = data.draw(st.sampled_from([-1, *earlier]))
        parents.append(parent + 10 if parent >= 0 else -1)
        kept = data.draw(st.integers(0, len(paths[parent]))) if parent >= 0 else 0
        new = [100 * row + t for t in range(len(paths[row]))]  # no token is equal by chance
        paths[row] = (paths[parent][:kept] if parent >= 0 else []) + new
        labels.append((labels[parent][:kept] if parent >= 0 else []) + [row] * len(new))
    fates = [data.draw(st.sampled_from(["in", "in", "missing", "excluded"])) for _ in paths]
    paid = [math.nan if fate == "missing" else reward for fate, reward in zip(fates, rewards, strict=True)]
    counted = [fate != "excluded" for fate in fates]
    batch = leaves(paths, groups, paid, parent_id=parents)
    for row, counts in zip(batch.tensordicts, counted, strict=True):
        row[COUNTED] = torch.tensor(counts)
    order = data.draw(st.permutations(range(len(paths))))
    options["missing"] = "skip"
    found = TreeAdvantage(forks="parent", **options)(lazy_stack([batch[i] for i in order]))
    chosen = [row for row, fate in enumerate(fates) if fate == "in"]
    del options["missing"]
    inside = stated(*([column[i] for i in chosen] for column in (paths, groups, rewards)), **options)
    expected = [[0.0] * len(path) for path in paths]
    for row, credit in zip(chosen, inside, strict=True):
        expected[row] = credit
    by_label = TreeAdvantage(tokens_key="node", attention_key=None, missing="skip", **options)(
        lazy_stack([row.set("node", torch.tensor(labels[i])) for i, row in enumerate(batch.unbind(0))])
    ).get("advantage", as_list=True)
    for place, credit in zip(order, found.get("advantage", as_list=True), strict=True):
        assert credit.flatten().tolist() == pytest.approx(expected[place], rel=1e-12, abs=1e-12)
        assert torch.allclose(credit, by_label[place], rtol=1e-12, atol=1e-12)


def origin_by_loops(paths, sources, row, place):
    """The row that first generated the token at `place` of a row: a parent, or the row itself."""
    parent = sources[row]
    shared = [own == other for own, other in zip(paths[row], paths[parent], strict=False)]
    if parent == row or not all(shared[: place + 1]) or place >= len(shared):
        return row
    return origin_by_loops(paths, sources, parent, place)


FORK = st.tuples(st.integers(0, 8), st.integers(0, 4), st.lists(st.integers(0, 1), max_size=4))


@example(1, [(0, 0, [1]), *((parent, 1, []) for parent in range(6))], Random(0))  # a chain of forks
@given(st.integers(0, 4), st.lists(FORK, max_size=9), st.randoms())
def test_each_token_has_the_row_in_which_it_was_first_generated(width, drawn, random):
    """A row is forked from a row before it, and begins with some of its tokens. Then rows are shuffled."""
    place = random.sample(range(len(drawn)), len(drawn))
    paths, sources = [[] for _ in drawn], [0] * len(drawn)
    for number, (parent, inherited, own) in enumerate(drawn):
        row, source = place[number], place[min(parent, number)]
        paths[row], sources[row] = [*paths[source][:inherited], *own][:width], source
    labels = torch.full((len(drawn), width), END)
    for row, path in enumerate(paths):
        labels[row, : len(path)] = torch.tensor(path, dtype=torch.int64)
    expected = [
        [origin_by_loops(paths, sources, row, at) if at < len(path) else END for at in range(width)]
        for row, path in enumerate(paths)
    ]
    assert origin_of(labels, torch.tensor(sources, dtype=torch.int64)).tolist() == expected


def test_the_parents_are_read_only_if_forks_are_given_by_them():
    by_prefix, by_parent = (TreeAdvantage(forks=forks).in_keys for forks in ("prefix", "parent"))
    assert {*by_parent} - {*by_prefix} == {"parent_id"}
    assert {*by_prefix} < {*by_parent}


def test_a_rollout_without_a_reward_needs_no_group_if_it_is_skipped():
    rewards = [1.0, 3.0, math.nan]
    batch = leaves([[5, 1, 1], [5, 1, 2], [5, 2, 2]], [0, 0, -1], rewards, parent_id=[-1, 10, -1])
    out = TreeAdvantage(forks="parent", missing="skip")(batch)["advantage"].squeeze(-1)
    assert out.tolist() == [[0, 0, -1], [0, 0, 1], [0, 0, 0]]


def test_parent_ids_may_be_text():
    """An empty text, or None, is no parent."""
    names, parents = ["a", "b", "c", "d"], ["", "a", "a", None]
    paths = [[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 2, 3]]
    numbers = [names.index(parent) if parent else -1 for parent in parents]
    batch = leaves(paths, [0] * 4, [1.0, 2.0, 4.0, 8.0], rollout_id=[0, 1, 2, 3], parent_id=numbers)
    expected = TreeAdvantage(forks="parent")(batch)["advantage"]
    batch["rollout_id"], batch["parent_id"] = names, parents
    assert torch.equal(TreeAdvantage(forks="parent")(batch)["advantage"], expected)
    batch["parent_id"] = ["", "a", "e", None]
    with pytest.raises(BatchError, match=r"of rollout 'c' \(row 2\)"):
        TreeAdvantage(forks="parent")(batch)


def test_parents_on_ranks_equal_those_of_one_process():
    paths, parents = [[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 2, 3]], [-1, 0, 1, -1]
    batch = leaves(paths, [0] * 4, [1.0, 2.0, 4.0, 8.0], rollout_id=[0, 1, 2, 3], parent_id=parents)
    stages = {"tree": TreeAdvantage(forks="parent")}
    expected = Pipeline(stages).run(batch).batch["advantage"]
    with group_of_one():
        for meaning in ("same", "different"):
            found = Pipeline(stages, process_group="world", shared_ids=meaning).run(batch).batch["advantage"]
            assert torch.equal(found, expected)


# -- rows ---------------------------------------------------------------------------------------------------


def test_later_rows_of_a_rollout_are_their_own_branch():
    """The first row of rollout 10 equals rollout 11. The second row branches after the first row."""
    batch = leaves([[1, 2], [1, 2], [1, 3], [8, 8]], [0] * 4, [1.0, 5.0, 3.0, 1.0])
    rows = list(batch.unbind(0))
    rows[3]["rollout_id"] = torch.tensor(10)
    for order in ([0, 1, 2, 3], [1, 0, 3, 2]):
        out = TreeAdvantage()(lazy_stack([rows[i] for i in order])).get("advantage", as_list=True)
        found = {i: credit.flatten().tolist() for i, credit in zip(order, out, strict=True)}
        # The mean of all is 3, and the mean of 10 and 11 is 3. Rollout 10 alone has 1, so −2.
        assert found == {0: [0, 0], 1: [0, 0], 2: [0, 0], 3: [-2, -2]}


def test_a_later_row_branches_where_another_rollout_continues():
    """Rollout 12 continues [1], which 10 and 11 share, so the second row of 10 branches from all three."""
    rows = list(leaves([[1], [1], [1, 9], [7, 7]], [0] * 4, [0.0, 0.5, 2.5, 0.0]).unbind(0))
    rows[3]["rollout_id"] = torch.tensor(10)
    out = TreeAdvantage()(lazy_stack(rows)).get("advantage", as_list=True)
    assert out[3].flatten().tolist() == [-1, -1]
    rows[1] = leaves([[1], [1, 8]], [0, 0], [0.0, 0.5])[1]
    out = TreeAdvantage()(lazy_stack(rows)).get("advantage", as_list=True)
    assert out[3].flatten().tolist() == [-1, -1]


def test_a_rollout_without_its_first_row_is_not_in_the_tree():
    """If it were, the second row of the rollout would start at the root."""
    rows = list(leaves([[5, 1], [9, 9], [5, 2]], [0] * 3, [1.0, 1.0, 3.0]).unbind(0))
    rows[1]["rollout_id"] = torch.tensor(10)
    for row, counts in zip(rows, (False, True, True), strict=True):
        row[COUNTED] = torch.tensor(counts)
    with pytest.raises(
        BatchError, match="found rollouts whose first row is excluded, and another row is not: rollout 10"
    ):
        TreeAdvantage()(lazy_stack(rows))
    rows[1][COUNTED] = torch.tensor(False)
    assert not TreeAdvantage()(lazy_stack(rows)).get("advantage", as_list=True)[2].any()


class DropsFirst(BatchTransform):
    """Drops the first row of the batch."""

    reasons = types.MappingProxyType({"first": "dropped"})

    def decide(self, rows) -> None:
        rows.leave(torch.arange(len(rows)) == 0, "first")


def test_a_rollout_that_continues_a_rollout_without_its_first_row_is_refused():
    """The shared tokens are in the row that has left. The second row is excluded."""
    batch = leaves([[1], [1, 2], [1, 3]], [0] * 3, [1.0, 1.0, 5.0], parent_id=[-1, -1, 10])
    batch["rollout_id"] = torch.tensor([10, 10, 11])
    batch[COUNTED] = torch.tensor([True, False, True])
    with pytest.raises(BatchError, match=r"in the same group; found parent 10 of rollout 11 \(row 2\)"):
        Pipeline({"drop": DropsFirst(), "tree": TreeAdvantage(forks="parent")})(batch)


@pytest.mark.parametrize(("rows", "mask"), [(2, (2, 3)), (4, None), (3, (3, 2)), (3, (3, 4)), (3, (2, 3))])
def test_tokens_and_masks_of_other_shapes_are_refused(rows, mask):
    reward, tokens = torch.zeros(3), torch.zeros(rows, 3).long()
    present = None if mask is None else torch.ones(mask, dtype=torch.bool)
    said = f"tokens and mask must be (N, T), for 3 rewards; found {(rows, 3)} and {mask or (rows, 3)}"
    with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
        tree_advantage(reward, tokens, torch.zeros(3).long(), present)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"parent_id": 11}, {"forks": "parent"}, "a cycle of parent 11 of rollout 11"),
        ({"reward": float("nan")}, {}, r"every reward must be finite; found nan at row 1 \(rollout 11\)"),
        ({"group_id": -1}, {}, "group_id ≥ 0; found -1 at row 1"),
        ({"rollout_id": -3}, {}, "rollout_id ≥ 0; found -3 at row 1"),
        ({"rollout_id": 10}, {}, "all segments of a rollout must have the same reward; found rollout 10"),
        ({"parent_id": 77}, {"forks": "parent"}, r"found parent 77 of rollout 11 \(row 1\)"),
        ({"parent_id": 12}, {"forks": "parent"}, r"in the same group.*parent 12 of rollout 11"),
        ({"parent_id": 10}, {"forks": "parent"}, "a cycle of parent 11 of rollout 10.*of rollout 11"),
        ({WORDS: [0.5, 1.0]}, {}, r"must hold integers; found torch.float32"),
        ({REAL: [True]}, {}, "tokens_key and attention_key must have one number for each token"),
    ],
)
def test_invalid_rows_are_refused_with_their_ids(change, options, message):
    batch = leaves([[1, 2], [1, 3], [1, 4]], [0, 0, 1], [1.0, 5.0, 2.0], parent_id=[11, -1, -1])
    (key, value), row = *change.items(), batch[1]
    if key == "reward":
        row["next", "reward"] = torch.tensor([value], dtype=torch.float64)
    else:
        row[key] = torch.tensor(value)
    rows = [batch[0], row, batch[2]]
    if isinstance(value, list):
        for other in rows:
            other[key] = torch.tensor(value)
    with pytest.raises(BatchError, match=message):
        TreeAdvantage(**options)(lazy_stack(rows))
