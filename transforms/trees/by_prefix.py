"""The advantage of each branch of a tree. Rollouts of a group form a tree by their shared first tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.stages.advantage import Grouped, dtype_of_reward, require_fit
from headrace.transforms.stages.sequences import END, left_aligned, repeated
from headrace.transforms.table import (
    BatchError,
    BatchTransform,
    ColumnNames,
    Ids,
    Missing,
    Rows,
    as_rewards,
    credit_dtype,
    places_on_arrival,
    require_identity,
    require_rewards,
)
from headrace.transforms.table.options import takes_options
from headrace.transforms.table.schema import COUNTED, REWARD, SEGMENTS, has_key
from headrace.transforms.table.tensordicts import count_true, number_column, read_packed
from headrace.transforms.table.tokens import (
    describe_row,
    in_loss_there,
    read_loss_mask,
    read_tokens,
    same_width,
    tokens_of_all_ranks,
    whole_numbers,
    write_tokens,
)

from .prefixes import PrefixBranch, branches, prefix_order, ways

TreeBaseline = Literal["mean", "leave_one_out"]
Forks = Literal["prefix", "parent"]


@takes_options
def tree_advantage(
    reward: Tensor,
    tokens: Tensor,
    group_id: Tensor,
    mask: Tensor | None = None,
    *,
    baseline: TreeBaseline = "mean",
) -> Tensor:
    """Compare each branch of a tree of rollouts with the node that it forks from.

    Rollouts of a group with equal first tokens share a node of a tree, up to their first different token. V
    is the mean reward of the rollouts through a node. Each token gets the local advantage A of its node, as
    in the tree search of Tree-GRPO (arXiv:2509.21240)::

        mean             A(node) = V(node) − V(parent)
        leave_one_out    A(node) = V(node) − V(parent without the node)

    The root holds the tokens that all rollouts of a group share, such as the prompt, and gets 0. This is a
    bias if these tokens were sampled before a fork. If rollouts share no token after the root, A is R −
    mean(group), as in Dr. GRPO, or the advantage of RLOO. ``leave_one_out`` is unbiased if the branches of a
    node are sampled independently and their number is fixed before. Branches that begin with equal tokens by
    chance are one node here, which is a bias. ``mean`` has a bias factor of (m − 1)/m for m branches of one
    size. Statistics are float64 and rounded once. Sums do not depend on the row order.

    Args:
        reward: (N,) floats, one per rollout; each row is a rollout.
        tokens: (N, T) integers: token ids, or labels of the nodes of the tokens.
        group_id: (N,) integers ≥ 0; rollouts with the same id form one tree.
        mask: (N, T) bool, False at padding; None: no padding.
        baseline: ``mean`` or ``leave_one_out``.

    Returns:
        (N, T) in the dtype of `reward`, 0 where `mask` is False.

    Raises:
        BatchError: an id is negative, or a reward is not finite.

    Example:
        >>> tokens = torch.tensor([[5, 1, 1], [5, 1, 2], [5, 2, 2]])
        >>> tree_advantage(torch.tensor([1.0, 3.0, 8.0]), tokens, torch.tensor([0, 0, 0])).tolist()
        [[0.0, -2.0, -1.0], [0.0, -2.0, 1.0], [0.0, 4.0, 4.0]]
    """
    rows, dtype = Rows.of(reward=as_rewards(reward), group=group_id), credit_dtype(reward)
    present = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    if len(tokens) != len(rows) or present.shape != tokens.shape:
        shapes = f"{tuple(tokens.shape)} and {tuple(present.shape)}"
        raise BatchError(f"tokens and mask must be (N, T), for {len(rows)} rewards; found {shapes}")
    groups = rows.groups
    require_rewards(rows, rows["reward"], siblings_agree=False)
    labels = left_aligned(tokens.long(), present)
    credit = credit_of_branches(rows["reward"], labels, groups, baseline)
    require_fit(rows, credit.largest(len(rows)), dtype)
    return credit.at_tokens(present, dtype)


class BranchAdvantage(NamedTuple):
    """The advantages of the branches on the path of each row. On the CPU."""

    row: Tensor
    """(S,) int64, ascending: the row of each entry. A row has one entry per branch on its path."""
    tokens: Tensor
    """(S,) int64: number of the row's tokens in the branch."""
    advantage: Tensor
    """(S,) float64."""
    behind: Tensor
    """(N,) float64: advantage of the row's own last branch, for further rows of its rollout."""

    def largest(self, rows: int) -> Tensor:
        """(N,) float64: the largest |A| of each row; NaN if one is NaN."""
        return self.advantage.new_zeros(rows).scatter_reduce_(0, self.row, self.advantage.abs(), "amax")

    def at_tokens(self, present: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, T): the advantage of each token, rounded once; 0 where `present` is False.

        Args:
            present: (B, T) bool, with as many True entries per row as the row has `tokens`.
            dtype: dtype of the result.
        """
        values = repeated(self.advantage.to(dtype).double(), self.tokens).to(present.device, dtype)
        return values.new_zeros(present.shape).masked_scatter_(present, values)


def credit_of_branches(
    reward: Tensor, labels: Tensor, groups: Ids, baseline: TreeBaseline
) -> BranchAdvantage:
    """Compute :func:`tree_advantage` of rollouts with one row each.

    Args:
        reward: (N,) float64, on the CPU.
        labels: (N, T) int64, from :func:`~headrace.transforms.stages.sequences.left_aligned`, on any device.
        groups: group ids of the rollouts.
        baseline: ``mean`` or ``leave_one_out``.
    """
    # 1. The tree of each group: its rows in lexicographic order, and the lengths of shared prefixes.
    labels, g = labels.cpu(), Grouped(reward, groups)
    order, shared = prefix_order(labels, groups.of)
    group_of, length = groups.of.index_select(0, order), count_true(labels != END)
    shared[1:].masked_fill_(group_of[1:] != group_of[:-1], -1)  # another group is another tree
    tree = branches(shared.tolist(), length.index_select(0, order).tolist())
    # 2. The advantage of each branch, V(node) − V(parent), from deviations: exactly 0 if rewards are equal.
    deviation = g.unsorted(g.deviation).index_select(0, order).tolist()
    known: dict[tuple[int, int], float] = {}

    def value(first: int, last: int) -> float:
        """V of the sorted rows ``first`` to ``last − 1``."""
        if (first, last) not in known:
            known[first, last] = exact_mean(deviation[first:last])
        return known[first, last]

    advantage = []
    for first, last, _, _, from_first, from_last in tree:
        if from_first == from_last:
            advantage.append(0.0)
        elif baseline == "mean":
            advantage.append(value(first, last) - value(from_first, from_last))
        else:
            others = deviation[from_first:first] + deviation[last:from_last]
            advantage.append(value(first, last) - exact_mean(others))
    # 3. Each token gets the advantage of its branch.
    rows = torch.tensor(tree, dtype=torch.int64).view(-1, len(PrefixBranch._fields))
    row, branch = ways(rows, order)
    advantages = torch.tensor(advantage, dtype=torch.float64)
    leaf = rows[:, 1] - rows[:, 0] == 1  # each row has one branch of its own, which may be empty
    behind = torch.zeros_like(reward).index_copy_(0, order.index_select(0, rows[leaf, 0]), advantages[leaf])
    tokens = (rows[:, 3] - rows[:, 2]).index_select(0, branch)
    return BranchAdvantage(row, tokens, advantages.index_select(0, branch), behind)


def exact_mean(values: Sequence[float]) -> float:
    """The mean, from an exact sum that is rounded once; NaN if the sum is not finite."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # the sum is too large, or has infinite terms
        return math.nan


def _shared(labels: Tensor, rows: Tensor) -> Tensor:
    """(N,) int64: length of the prefix that each row shares with the row of index (N,) `rows`."""
    if labels.shape[1] == 0:
        return labels.new_zeros(len(labels))
    differs = labels != labels.index_select(0, rows)
    at = differs.view(torch.uint8).argmax(1)  # index of the first difference
    return torch.where(differs.any(1), at, labels.shape[1])


def origin_of(labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Find the row in which each token was first generated, if rollouts were forked from other rollouts.

    Args:
        labels: (N, T) int64, from :func:`~headrace.transforms.stages.sequences.left_aligned`.
        rows: (N,) int64, index of the row that each row was forked from; its own index if it was not forked.

    Returns:
        (N, T) int64 row indices; ``END`` at padding.

    Example:
        >>> labels = torch.tensor([[5, 6, 7], [5, 6, 8], [5, 6, 7]])
        >>> origin_of(labels, torch.tensor([0, 0, 2])).tolist()
        [[0, 0, 0], [0, 0, 1], [2, 2, 2]]
    """
    row = torch.arange(len(labels), device=labels.device)
    inherited = torch.arange(labels.shape[1], device=labels.device) < _shared(labels, rows)[:, None]
    origin = torch.where(inherited, rows[:, None], row[:, None])
    for _ in range(len(labels).bit_length()):  # each iteration follows twice as many forks
        origin = origin.gather(0, origin)
    return origin.masked_fill(labels == END, END)


class TreeAdvantage(
    BatchTransform,
    columns=("tokens", "attention", "parent", "turn", "reward", "group", "rollout", "loss_mask", "advantage"),
    optional=("attention",),
):
    """Write the advantage of each branch over the node that it forks from (:func:`tree_advantage`).

    Rollouts are the leaves of the tree of their group. If a rollout has several rows, the first row is in the
    tree, and the other rows get the advantage of its last branch. Excluded rows get 0. Ranks that share the
    batch exchange their tokens.

    Reads ``("headrace", "reward")`` if it exists, else `reward_key`. Reads `tokens_key`, `attention_key`,
    `group_key`, `rollout_key`, `parent_key` with ``forks="parent"``, `turn_key` if it is set, and
    `loss_mask_key` if it exists. Writes `advantage_key`, (N, T, 1).

    Args:
        baseline: V(parent) is the ``mean`` over all rollouts of the parent. ``leave_one_out`` leaves out the
            rollouts of the node, and is unbiased if branches are sampled independently.
        forks: rollouts share the tokens of a common ``prefix``; or only tokens of their ``parent``, so equal
            tokens of rollouts that were sampled independently are two nodes. If a fork samples the same next
            tokens as its parent by chance, they are one node, which is a bias. To avoid this bias, put labels
            of nodes into `tokens_key`.
        missing: what happens to a missing reward (NaN): ``raise`` an error, or ``skip``, which takes the
            rollout out of all means. Rollouts that were forked from such a rollout, or from an excluded
            rollout, still share its tokens. ``mask`` equals ``raise``; use it after
            ``FanOutCollapse(missing="mask")``, which masks the rollout.
        names: other names of columns, such as `tokens_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: as the function; also if a parent is not in the group or was forked from its own child, or
            if padding is in the loss mask.

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
        forks: Forks = "prefix",
        missing: Missing = "raise",
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.forks = forks
        self.missing = missing
        parents = self.parent_key if forks == "parent" else None
        reads = [self.reward_key, REWARD, self.tokens_key, self.attention_key, parents, self.turn_key]
        super().__init__([*reads, self.group_key, self.rollout_key, SEGMENTS, COUNTED], [self.advantage_key])
        self.final_keys = tuple(self.in_keys)
        self.baseline = baseline

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Write the advantage."""
        labels, present = self._tokens(batch)
        # 1. The rollouts of all ranks that are not excluded, and the first row of each, which is in the tree.
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
            "the first row of each rollout must be in the tree; found rollouts whose first row is excluded, "
            "and another row is not: {found}. Take whole rollouts out: unit='rollout'",
            lambda row: f"rollout {some.name('rollout', row)}",
        )
        # 2. The tokens of all rows, or the row that first generated each token. One device read.
        outside = present.new_zeros(len(present))
        if labels.shape[1] and has_key(batch, self.loss_mask_key):
            mask = read_loss_mask(batch, self.loss_mask_key, in_loss_there(rows), reader=rows.reader)
            same_width(labels, mask, "tokens_key and loss_mask_key")
            outside = (mask & ~present).any(1)
        (tokens,) = tokens_of_all_ranks(rows, labels, fill=END)
        number, head = chosen.nonzero().flatten(), rollouts.spread(heads)
        if self.forks == "parent":  # excluded parents also share their tokens
            tokens = origin_of(tokens, self._sources(rows, batch, chosen, place == 0).to(tokens.device))
        tokens, outside = read_packed([tokens, outside])
        rows.require(
            rows.measured(outside=outside)["outside"] == 0,
            "tokens in the loss must be real tokens; the loss mask is True where the attention mask is False "
            "in {found}. Correct the mask that is wrong",
            describe_row(rows),
        )
        # 3. The advantage of each token. Further rows of a rollout get the advantage of its last branch.
        tree_of = some.groups.n + torch.arange(len(rows))  # rows that are in no tree have their own number
        tree_of[number[begins]] = some.groups.of[begins]
        counted = torch.where(chosen, reward, 0.0)
        credit = credit_of_branches(counted, tokens, Ids(tree_of), self.baseline)
        behind = torch.zeros_like(counted)
        behind[number] = credit.behind.index_select(0, number.index_select(0, head))
        in_tree = torch.zeros_like(chosen)
        in_tree[number[begins]] = True
        advantage = torch.where(in_tree[credit.row], credit.advantage, behind[credit.row])
        credit = credit._replace(advantage=advantage)
        require_fit(rows, credit.largest(len(rows)), dtype)
        # 4. The rows of this rank.
        own = torch.zeros_like(chosen).index_fill_(0, rows.of_this_rank(torch.arange(len(rows))), True)[
            credit.row
        ]
        credit = BranchAdvantage(credit.row[own], credit.tokens[own], credit.advantage[own], credit.behind)
        at_token = credit.at_tokens(present, dtype).unsqueeze(-1)
        write_tokens(batch, self.advantage_key, at_token, self.tokens_key)
        return batch

    def _tokens(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """(B, T) int64: tokens aligned to the left; (B, T) bool: their positions in the rows."""
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
        """(M,) int64: index of the row that each first row was forked from; its own index if it was not.

        Args:
            rows: all rows that have not left. An excluded parent also shares its tokens with its children.
            batch: the rows of this rank.
            chosen: (M,) bool, rows of rollouts in the tree. Of other rows, only parents are read.
            begins: (M,) bool, first rows of their rollouts.

        Raises:
            BatchError: a parent is missing, is in another group than its child, or was forked from its child.
        """
        parent, row = rows.integers("parent", "parent_id"), torch.arange(len(rows))
        rollouts = rows.with_excluded.ids("rollout", checked=False)
        head = rollouts.spread(rollouts.max(torch.where(begins, row, -1)))
        own, home = rollouts.labels, torch.zeros_like(row)
        ranks = rows.table.ranks
        if ranks.shared_ids == "different" and self.rollout_key is not None:
            # Each rank has its own ids, so the parent of a row is on the same rank.
            numbers = number_column(batch, self.rollout_key)
            both = torch.stack([numbers, torch.full_like(numbers, ranks.rank)], 1)
            own, home = rows.from_batch(both).unbind(1)
        owner = Ids(torch.cat([home, home])).paired_with(Ids(torch.cat([own, parent])))
        first = owner.spread(owner.first)[len(row) :]
        is_root, found = parent < 0, first < len(row)
        source = torch.where(is_root | ~found, row, head[first.clamp_max(max(len(row) - 1, 0))])
        found = found & (source >= 0)  # the first row of a parent may have been dropped
        source = torch.where((head == row) & found, source, row)
        oldest, needed, before = source, chosen, None
        while before is None or not torch.equal(needed, before):  # add all ancestors
            before, needed = needed, needed.index_fill(0, source[needed], True)
        for _ in range(len(row).bit_length()):  # each iteration follows twice as many forks
            oldest = oldest[oldest]

        def describe(at: int) -> str:
            return f"parent {int(parent[at])} of rollout {int(own[at])} (row {rows.at(at)})"

        groups = rows.ids("group", checked=False).labels
        rows.require(
            ~needed | is_root | (found & (groups[source] == groups)),
            "the parent of a rollout must be in the batch and in the same group; found {found}. Put the gate "
            "before this stage, so that only complete groups pass, or set parent_id to -1 if a rollout was "
            "not forked",
            describe,
        )
        rows.require(
            ~needed | (source == row)[oldest] & (is_root | (parent != own)),
            "a rollout cannot be its own ancestor; found a cycle of {found}",
            describe,
        )
        return source
