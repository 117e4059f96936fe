"""The tree that rollouts of a group make by what they share, and what its branches are worth."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from headrace.transforms.checks import (
    Rule,
    as_rewards,
    credit_dtype,
    enforce,
    identity_rules,
    reward_rules,
    same_length,
)
from headrace.transforms.ids import as_ids, first_row, number_of, places_by_turn
from headrace.transforms.options import one_of
from headrace.transforms.prefixes import END, left_aligned
from headrace.transforms.sums import sum_in_any_order

from .by_turn import Alone, fits_rule
from .grouping import ById

TreeBaseline = Literal["mean", "leave_one_out"]


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
    rounded once. Two device reads, for the size of the groups and the checks.

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
    dtype, rewards, groups = credit_dtype(reward), as_rewards(reward), as_ids(group_id, "group_id")
    same_length(reward=rewards, tokens=tokens, group_id=groups, mask=mask)
    present = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    labels = left_aligned(tokens.long(), present)
    rows = torch.arange(len(rewards), device=rewards.device)
    credit = TreeFormula(baseline, alone)(rewards, labels, first_row(groups))
    enforce([*tree_rules(rewards, rows, groups), fits_rule(credit.at_token, dtype, groups)])
    return at_places(credit.at_token, present).to(dtype)


def tree_rules(reward: Tensor, rollouts: Tensor, groups: Tensor) -> list[Rule]:
    """What must hold of (N,) rewards and ids."""
    first = first_row(rollouts)
    return [
        *identity_rules(rollouts, groups, first),
        *reward_rules(reward, rollouts, first, siblings_agree=True),
    ]


class BranchCredit(NamedTuple):
    """What the branches of a tree are worth, float64."""

    at_token: Tensor
    """(N, T), for the tokens of each row, which stand to the left."""
    behind: Tensor
    """(N,), for what the row's rollout alone goes on with behind them."""


class TreeFormula:
    """The options of :func:`tree_advantage`, checked, and its arithmetic."""

    def __init__(self, baseline: TreeBaseline, alone: Alone):
        self.baseline = one_of("baseline", baseline, get_args(TreeBaseline))
        self.alone = one_of("alone", alone, get_args(Alone))

    def __call__(self, reward: Tensor, labels: Tensor, group_first: Tensor) -> BranchCredit:
        """The credit of rollouts, a row each. One device read, for a shape.

        Args:
            reward: (N,) float.
            labels: (N, T) int64, by :func:`~headrace.transforms.prefixes.left_aligned`.
            group_first: (N,) int64, the first row of each row's group.
        """
        if len(reward) == 0:
            return BranchCredit(labels.double(), reward.double())
        reward = reward.double()
        grouping, tree = ById(reward, group_first, len(reward)), _Tree.of(labels, group_first)
        deviation = grouping.deviation[tree.member]  # of which equal rewards leave nothing
        lone = grouping.sum(reward) / grouping.count
        lone = grouping.spread(lone) if self.alone == "return" else torch.zeros_like(reward)
        worth = [self._worth(deviation, tree, tree.fork[:, place, None]) for place in range(tree.size)]
        last = tree.fork.masked_fill(~tree.other, -1).amax(1, keepdim=True)
        last = torch.minimum(
            last, (labels != END).sum(1, keepdim=True)
        )  # who ends alike parts from all there
        behind = torch.where(last[:, 0] < 0, lone, self._worth(deviation, tree, last, alone=True))
        fork, order = tree.fork.masked_fill(~tree.other, labels.shape[1] + 1).sort(1)
        steps = torch.cat([lone[:, None], torch.stack(worth, 1).gather(1, order)], 1)
        place = torch.arange(labels.shape[1], device=labels.device).expand(labels.shape).contiguous()
        passed = torch.searchsorted(fork, place, right=True)  # forks at this token or before
        return BranchCredit(steps.gather(1, passed), behind)

    def _worth(self, deviation: Tensor, tree: _Tree, depth: Tensor, *, alone: bool = False) -> Tensor:
        """(N,): what the branch is worth that a row takes at a fork before token `depth`, (N, 1)."""
        parent = tree.there & (tree.fork >= depth)
        node = tree.there & ~tree.other if alone else parent & (tree.fork > depth)
        from_ = parent & ~node if self.baseline == "leave_one_out" else parent
        return _mean(deviation, node) - _mean(deviation, from_)


class _Tree(NamedTuple):
    """Each row's group, (N, G), and where the others leave it."""

    member: Tensor
    """int64 row numbers; what is not `there` is some row."""
    there: Tensor
    """bool."""
    other: Tensor
    """bool: it is there, and not the row itself."""
    fork: Tensor
    """int64: how many of the row's first labels the member shares; the row itself one more than there are."""

    @property
    def size(self) -> int:
        """Rollouts of the largest group."""
        return self.member.shape[1]

    @classmethod
    def of(cls, labels: Tensor, group_first: Tensor) -> _Tree:
        """From (N, T) labels and the first row of each row's group. One device read."""
        place, number = places_by_turn(group_first).place, number_of(group_first)
        rows = torch.arange(len(labels), device=labels.device)
        table = torch.full((len(labels), int(place.amax()) + 1), -1, device=labels.device)
        table = table.index_put_((number, place), rows)
        member = table.index_select(0, number)
        there, other = member >= 0, (member >= 0) & (member != rows[:, None])
        member = member.clamp_min(0)
        fork = torch.stack([_shared(labels, column) for column in member.unbind(1)], 1)
        return cls(member, there, other, fork.masked_fill(there & ~other, labels.shape[1] + 1))


def _shared(labels: Tensor, rows: Tensor) -> Tensor:
    """(N,) int64: how many of each row's first labels are those of another row, by its (N,) number."""
    if labels.shape[1] == 0:
        return labels.new_zeros(len(labels))
    differs = labels != labels.index_select(0, rows)
    at = differs.view(torch.uint8).argmax(1)  # the first of the largest
    return torch.where(differs.any(1), at, labels.shape[1])


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """(N,): the mean over the (N, G) `values` that are chosen, whatever their order; 0 where none is."""
    number = chosen.sum(1).double()
    total = sum_in_any_order(
        torch.where(chosen, values, 0.0),
        lambda part: part.sum(1),
        peak=lambda: values.abs().amax(1, keepdim=True),
        terms=number[:, None],
    )
    return total / number.clamp_min(1)


def at_places(values: Tensor, present: Tensor) -> Tensor:
    """(N, T): what :func:`left_aligned` moved, where it was; 0 elsewhere."""
    place = (present.long().cumsum(1) - 1).clamp_min(0)
    return values.gather(1, place).masked_fill(~present, 0.0)


def origin_of(labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The row in which each token was first generated, where rollouts go on from one another.

    Args:
        labels: (N, T) int64, by :func:`~headrace.transforms.prefixes.left_aligned`.
        rows: (N,) int64, the row that each was forked from; itself where it was not.

    Returns:
        (N, T) int64, equal where rows share a token; and (N,) bool, the rows whose parents lead round in a
        circle. No device read.

    Example:
        >>> labels = torch.tensor([[5, 6, 7], [5, 6, 8], [5, 6, 7]])
        >>> origin_of(labels, torch.tensor([0, 0, 2]))[0].tolist()
        [[0, 0, 0], [0, 0, 1], [2, 2, 2]]
    """
    row = torch.arange(len(labels), device=labels.device)
    inherited = torch.arange(labels.shape[1], device=labels.device) < _shared(labels, rows)[:, None]
    origin, oldest = torch.where(inherited, rows[:, None], row[:, None]), rows
    for _ in range(len(labels).bit_length()):  # each time twice as far back
        origin, oldest = origin.gather(0, origin), oldest[oldest]
    return origin.masked_fill(labels == END, END), (rows != row)[oldest]
