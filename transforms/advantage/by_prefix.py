"""The tree that rollouts of a group make by what they share, and the advantage of each branch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.columns import ColumnNames
from headrace.transforms.errors import BatchError
from headrace.transforms.ids import Ids
from headrace.transforms.options import one_of
from headrace.transforms.places import places_on_arrival
from headrace.transforms.prefixes import (
    END,
    PrefixBranch,
    branches,
    left_aligned,
    prefix_order,
    repeated,
    ways,
)
from headrace.transforms.required import require_identity, require_rewards
from headrace.transforms.rewards import Missing, as_rewards, credit_dtype
from headrace.transforms.rows import Rows
from headrace.transforms.schema import COUNTED, REWARD, SEGMENTS, has_key
from headrace.transforms.stage import BatchTransform
from headrace.transforms.tensordicts import count_true, number_column, read_packed
from headrace.transforms.tokens import (
    describe_row,
    in_loss_there,
    read_loss_mask,
    read_tokens,
    same_width,
    tokens_of_all_ranks,
    whole_numbers,
    write_tokens,
)

from .baselines import Grouped
from .by_turn import Alone, dtype_of_reward
from .group_relative import require_fit

TreeBaseline = Literal["mean", "leave_one_out"]
Forks = Literal["prefix", "parent"]


def tree_advantage(
    reward: Tensor,
    tokens: Tensor,
    group_id: Tensor,
    mask: Tensor | None = None,
    *,
    baseline: TreeBaseline = "mean",
    alone: Alone = "zero",
) -> Tensor:
    """Measure each branch against the node that it forks from.

    Rollouts of a group whose first tokens are equal share a node of a tree, up to where they differ; with V
    the mean reward of the rollouts that go through a node, each token of a node gets (the local advantage of
    a tree search, as Tree-GRPO samples one, arXiv:2509.21240)::

        mean             A(node) = V(node) − V(parent)
        leave_one_out    A(node) = V(node) − V(parent without the node)

    The root is where the rollouts of a group are the same, its prompt. Without a shared token behind it A is
    Dr. GRPO's R − mean(group), or RLOO's. leave_one_out is unbiased where the branches of a node were drawn
    separately, and how many was decided before: what it subtracts does not follow from the branch. Branches
    that begin with equal tokens by chance are one node here, which is a bias; mean has one of (m − 1)/m with
    m branches of one size. Statistics are float64, by sums that do not depend on the order of the rows, and
    rounded once.

    Args:
        reward: (N,) floats, one a rollout; each row is one.
        tokens: (N, T) integers: token ids, or any other labels of the nodes that tokens are of.
        group_id: (N,) integers ≥ 0: which rollouts make one tree.
        mask: (N, T) bool, tokens that are not padding; None: all.
        baseline: what a branch is measured from.
        alone: what the tokens get that all rollouts of a group share: ``zero``, which is a bias where they
            were drawn once and then forked; or the node's mean reward, its ``return``.

    Returns:
        (N, T) in the dtype of `reward`, 0 where `mask` is False.

    Raises:
        BatchError: a negative id; a reward that is not finite.

    Example:
        >>> tokens = torch.tensor([[5, 1, 1], [5, 1, 2], [5, 2, 2]])
        >>> tree_advantage(torch.tensor([1.0, 3.0, 8.0]), tokens, torch.tensor([0, 0, 0])).tolist()
        [[0.0, -2.0, -1.0], [0.0, -2.0, 1.0], [0.0, 4.0, 4.0]]
    """
    one_of("baseline", baseline, get_args(TreeBaseline))
    one_of("alone", alone, get_args(Alone))
    rows, dtype = Rows.of(reward=as_rewards(reward), group=group_id), credit_dtype(reward)
    present = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    if len(tokens) != len(rows) or present.shape != tokens.shape:
        shapes = f"{tuple(tokens.shape)} and {tuple(present.shape)}"
        raise BatchError(f"tokens and mask are (N, T), for {len(rows)} rewards; found {shapes}")
    groups = rows.groups
    require_rewards(rows, rows["reward"], siblings_agree=False)
    labels = left_aligned(tokens.long(), present)
    credit = credit_of_branches(rows["reward"], labels, groups, baseline, alone)
    require_fit(rows, credit.largest(len(rows)), dtype)
    return credit.at_tokens(present, dtype)


class BranchAdvantage(NamedTuple):
    """The advantages of the branches of a tree, along each row. On the CPU."""

    row: Tensor
    """(S,) int64, from the first row on; of each the branches that it goes along."""
    tokens: Tensor
    """(S,) int64, how many of the row's tokens are of the branch."""
    advantage: Tensor
    """(S,) float64."""
    behind: Tensor
    """(N,) float64, for what a row alone goes on with behind its tokens."""

    def largest(self, rows: int) -> Tensor:
        """(N,) float64: the largest |A| of each row, NaN where one is."""
        return self.advantage.new_zeros(rows).scatter_reduce_(0, self.row, self.advantage.abs(), "amax")

    def at_tokens(self, present: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, T) of a dtype: that of each token of B rows, where it is; 0 elsewhere.

        Args:
            present: (B, T) bool, as many in each row as it has `tokens`.
            dtype: rounded to once.
        """
        values = repeated(self.advantage.to(dtype).double(), self.tokens).to(present.device, dtype)
        return values.new_zeros(present.shape).masked_scatter_(present, values)


def credit_of_branches(
    reward: Tensor, labels: Tensor, groups: Ids, baseline: TreeBaseline, alone: Alone
) -> BranchAdvantage:
    """:func:`tree_advantage` of rollouts, a row each.

    Args:
        reward: (N,) float64, on the CPU.
        labels: (N, T) int64, by :func:`~headrace.transforms.prefixes.left_aligned`, on any device.
        groups: of the rollouts.
        baseline: as the function has it.
        alone: as the function has it.
    """
    # 1. The tree of each group: its rows by what they begin with, and where they part.
    labels, g = labels.cpu(), Grouped(reward, groups)
    order, shared = prefix_order(labels, groups.of)
    home, length = groups.of.index_select(0, order), count_true(labels != END)
    shared[1:].masked_fill_(home[1:] != home[:-1], -1)
    tree = branches(shared.tolist(), length.index_select(0, order).tolist())
    # 2. The advantage of each branch: V(node) − V(parent), of deviations, exactly 0 where rewards are equal.
    deviation = g.unsorted(g.deviation).index_select(0, order).tolist()
    lone = g.spread(g.sum(g.reward) / g.count) if alone == "return" else torch.zeros_like(reward)
    lone = g.unsorted(lone).index_select(0, order).tolist()
    known: dict[tuple[int, int], float] = {}

    def value(first: int, last: int) -> float:
        """V of the rows from one place to another."""
        if (first, last) not in known:
            known[first, last] = exact_mean(deviation[first:last])
        return known[first, last]

    advantage = []
    for first, last, _, _, from_first, from_last in tree:
        if from_first == from_last:
            advantage.append(lone[first])
        elif baseline == "mean":
            advantage.append(value(first, last) - value(from_first, from_last))
        else:
            others = deviation[from_first:first] + deviation[last:from_last]
            advantage.append(value(first, last) - exact_mean(others))
    # 3. Each token has that of its branch.
    rows = torch.tensor(tree, dtype=torch.int64).view(-1, len(PrefixBranch._fields))
    row, branch = ways(rows, order)
    advantages = torch.tensor(advantage, dtype=torch.float64)
    leaf = rows[:, 1] - rows[:, 0] == 1
    behind = torch.zeros_like(reward).index_copy_(0, order.index_select(0, rows[leaf, 0]), advantages[leaf])
    tokens = (rows[:, 3] - rows[:, 2]).index_select(0, branch)
    return BranchAdvantage(row, tokens, advantages.index_select(0, branch), behind)


def exact_mean(values: Sequence[float]) -> float:
    """The mean by the exact sum, rounded once, whatever order they have; NaN where that is no number."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # too large, or of infinite ones
        return math.nan


def _shared(labels: Tensor, rows: Tensor) -> Tensor:
    """(N,) int64: how many of each row's first labels are those of another row, by its (N,) number."""
    if labels.shape[1] == 0:
        return labels.new_zeros(len(labels))
    differs = labels != labels.index_select(0, rows)
    at = differs.view(torch.uint8).argmax(1)  # the first of the largest
    return torch.where(differs.any(1), at, labels.shape[1])


def origin_of(labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The row in which each token was first generated, where rollouts go on from one another.

    Args:
        labels: (N, T) int64, by :func:`~headrace.transforms.prefixes.left_aligned`.
        rows: (N,) int64, the row that each was forked from; itself where it was not.

    Returns:
        (N, T) int64, equal where rows share a token.

    Example:
        >>> labels = torch.tensor([[5, 6, 7], [5, 6, 8], [5, 6, 7]])
        >>> origin_of(labels, torch.tensor([0, 0, 2])).tolist()
        [[0, 0, 0], [0, 0, 1], [2, 2, 2]]
    """
    row = torch.arange(len(labels), device=labels.device)
    inherited = torch.arange(labels.shape[1], device=labels.device) < _shared(labels, rows)[:, None]
    origin = torch.where(inherited, rows[:, None], row[:, None])
    for _ in range(len(labels).bit_length()):  # each time twice as far back
        origin = origin.gather(0, origin)
    return origin.masked_fill(labels == END, END)


class TreeAdvantage(
    BatchTransform,
    columns=("tokens", "attention", "parent", "turn", "reward", "group", "rollout", "loss_mask", "advantage"),
    optional=("attention",),
):
    """Write each branch's advantage over the node that it forks from (:func:`tree_advantage`).

    Rollouts are the leaves of their group's tree. Of a rollout with several rows the first is in the tree,
    the others are a branch of its own behind it. Rows that are out of the statistics get 0. Ranks that share
    the batch exchange their tokens.

    Reads ``("headrace", "reward")`` if there, else `reward_key`; `tokens_key`, `attention_key`, `group_key`,
    `rollout_key`, `parent_key` by `forks`, `turn_key` where it is given, `loss_mask_key` if there.
    Writes `advantage_key`, (N, T, 1).

    Args:
        baseline: V(parent), a ``mean`` over all of its rollouts; or ``leave_one_out``: without those of the
            node itself, which is unbiased where branches are drawn separately.
        alone: what the tokens get that all rollouts of a group share: ``zero``, which under leave_one_out is
            a bias where they were drawn once and then forked; or their mean reward, its ``return``.
        forks: rollouts share tokens where they have the same ``prefix``; or only with their ``parent``, so
            that equal tokens of rollouts that were drawn separately are two nodes. Where a rollout goes on
            with its parent's own next tokens by chance, they are one all the same, which is a bias; labels
            of nodes in `tokens_key` have none.
        missing: what a reward of NaN does: ``raise``, or ``skip``: its rollout is in no mean. Those that go
            on from it, or from one that is out of the statistics, share its tokens all the same.
        names: other names of columns, such as `tokens_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is not there.
        BatchError: as the function; a parent that is not in the group, or that follows from its child; a
            token in the loss that is no real one.

    Example:
        >>> from tensordict import TensorDict
        >>> ids = {"group_id": [0, 0, 0], "rollout_id": [0, 1, 2], ("next", "reward"): [1.0, 3.0, 8.0]}
        >>> td = TensorDict(ids, batch_size=[3])
        >>> td["tokens", "full"] = torch.tensor([[5, 1, 1], [5, 1, 2], [5, 2, 2]])
        >>> TreeAdvantage(attention_key=None)(td)["advantage"].squeeze(-1).tolist()
        [[0.0, -2.0, -1.0], [0.0, -2.0, 1.0], [0.0, 4.0, 4.0]]
    """

    of_whole_rollouts = "places"
    within_groups = True

    def __init__(
        self,
        *,
        baseline: TreeBaseline = "mean",
        alone: Alone = "zero",
        forks: Forks = "prefix",
        missing: Missing = "raise",
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.forks = one_of("forks", forks, get_args(Forks))
        self.missing = one_of("missing", missing, get_args(Missing))
        parents = self.parent_key if forks == "parent" else None
        reads = [self.reward_key, REWARD, self.tokens_key, self.attention_key, parents, self.turn_key]
        super().__init__([*reads, self.group_key, self.rollout_key, SEGMENTS, COUNTED], [self.advantage_key])
        self.final_keys = tuple(self.in_keys)
        self.baseline = one_of("baseline", baseline, get_args(TreeBaseline))
        self.alone = one_of("alone", alone, get_args(Alone))

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Add the advantage."""
        labels, present = self._tokens(batch)
        # 1. The rollouts of all ranks that are in the statistics, and the row of each that is in its tree.
        reward, dtype = rows.reward, dtype_of_reward(rows)
        chosen = torch.ones(len(rows), dtype=torch.bool) if rows.counted is None else rows.counted
        if self.missing == "skip":
            chosen = chosen & ~reward.isnan()
        some, place = rows.where(chosen), rows.from_arrival(places_on_arrival(rows)[1])
        require_identity(some)
        require_rewards(some, reward[chosen], siblings_agree=True)
        rollouts, begins = some.rollouts, place[chosen] == 0
        heads = rollouts.max(torch.where(begins, torch.arange(len(some)), -1))
        some.require(
            rollouts.spread(heads) >= 0,
            "the first row of a rollout is in the tree, and the others are behind it; found first rows out "
            "of the statistics, and others in, of {found}. Take whole rollouts out: unit='rollout'",
            lambda row: f"rollout {some.name('rollout', row)}",
        )
        # 2. The tokens of all rows, or which rollout each was first generated for. One copy from the device.
        outside = present.new_zeros(len(present))
        if labels.shape[1] and has_key(batch, self.loss_mask_key):
            mask = read_loss_mask(batch, self.loss_mask_key, in_loss_there(rows), reader=rows.reader)
            same_width(labels, mask, "tokens_key and loss_mask_key")
            outside = (mask & ~present).any(1)
        (tokens,) = tokens_of_all_ranks(rows, labels, fill=END)
        number, head = chosen.nonzero().flatten(), rollouts.spread(heads)
        if self.forks == "parent":  # also through parents that are out of the statistics
            tokens = origin_of(tokens, self._sources(rows, batch, chosen, place == 0).to(tokens.device))
        tokens, outside = read_packed([tokens, outside])
        rows.require(
            rows.measured(outside=outside)["outside"] == 0,
            "a token in the loss is a real one, with a place in the tree; the loss mask is True where the "
            "attention mask is False in {found}. Correct the mask that is wrong",
            describe_row(rows),
        )
        # 3. The advantage of each token, and behind the tokens of a rollout's first row, of all its others.
        home = some.groups.n + torch.arange(len(rows))  # rows that are in no tree
        home[number[begins]] = some.groups.of[begins]
        counted = torch.where(chosen, reward, 0.0)
        credit = credit_of_branches(counted, tokens, Ids(home), self.baseline, self.alone)
        behind = torch.zeros_like(counted)
        behind[number] = credit.behind.index_select(0, number.index_select(0, head))
        in_tree = torch.zeros_like(chosen)
        in_tree[number[begins]] = True
        advantage = torch.where(in_tree[credit.row], credit.advantage, behind[credit.row])
        credit = credit._replace(advantage=advantage)
        require_fit(rows, credit.largest(len(rows)), dtype)
        # 4. Those of this rank.
        own = torch.zeros_like(chosen).index_fill_(0, rows.of_rank(torch.arange(len(rows))), True)[credit.row]
        credit = BranchAdvantage(credit.row[own], credit.tokens[own], credit.advantage[own], credit.behind)
        at_token = credit.at_tokens(present, dtype).unsqueeze(-1)
        write_tokens(batch, self.advantage_key, at_token, self.tokens_key)
        return batch

    def _tokens(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """(B, T): the tokens, from the left on, and where in the rows they are."""
        name = type(self).__name__
        tokens = read_tokens(batch, self.tokens_key, fill=END, reader=name, option="tokens_key")
        tokens = whole_numbers(tokens, self.tokens_key, "tokens_key")
        present = tokens != END
        if self.attention_key is not None:
            mask = read_tokens(batch, self.attention_key, fill=0, reader=name, option="attention_key")
            same_width(tokens, mask, "tokens_key and attention_key")
            present = present & (mask != 0)
        return left_aligned(tokens, present), present

    def _sources(self, rows: Rows, batch: TensorDictBase, chosen: Tensor, begins: Tensor) -> Tensor:
        """(M,) int64: the row of the rollout that each first row's went on from; itself where it began anew.

        Args:
            rows: all that are here, since a parent shares its tokens with its children whether it is in the
                statistics or not.
            batch: those of this rank.
            chosen: (M,) bool, rows in the tree; of the others only their parents are looked at.
            begins: (M,) bool, the first row of its rollout.

        Raises:
            BatchError: a parent is in no group of its child or not there, or follows from its child.
        """
        parent, row = rows.integers("parent", "parent_id"), torch.arange(len(rows))
        rollouts = rows.ids("rollout", checked=False).everyone
        head = rollouts.spread(rollouts.max(torch.where(begins, row, -1)))
        own, home = rollouts.labels, torch.zeros_like(row)
        ranks = rows.table.ranks
        if ranks is not None and ranks.shared_ids == "different" and self.rollout_key is not None:
            # A parent's id is as its rank numbers rollouts.
            numbers = number_column(batch, self.rollout_key)
            both = torch.stack([numbers, torch.full_like(numbers, ranks.rank)], 1)
            own, home = rows.of_all_ranks(both).unbind(1)
        owner = Ids(torch.cat([home, home])).paired_with(Ids(torch.cat([own, parent])))
        first = owner.spread(owner.first)[len(row) :]
        is_root, found = parent < 0, first < len(row)
        source = torch.where(is_root | ~found, row, head[first.clamp_max(max(len(row) - 1, 0))])
        found = found & (source >= 0)  # the first row of a parent may have been dropped
        source = torch.where((head == row) & found, source, row)
        oldest, needed, before = source, chosen, None
        while before is None or not torch.equal(needed, before):  # with those that they went on from
            before, needed = needed, needed.index_fill(0, source[needed], True)
        for _ in range(len(row).bit_length()):  # each time twice as far back
            oldest = oldest[oldest]

        def describe(at: int) -> str:
            return f"parent {int(parent[at])} of rollout {int(own[at])} (row {rows.at(at)})"

        groups = rows.ids("group", checked=False).labels
        rows.require(
            ~needed | is_root | (found & (groups[source] == groups)),
            "a rollout goes on from one of its group that is in the batch; found {found}. Let whole groups "
            "through a gate before, or set parent_id to -1 where a rollout begins anew",
            describe,
        )
        rows.require(
            ~needed | (source == row)[oldest] & (is_root | (parent != own)),
            "a rollout goes on from an earlier one; in a circle are {found}",
            describe,
        )
        return source
