"""Credit for the branches of a tree of rollouts."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import Rule, as_rewards, at_least_float32, credit_dtype, turn_rules
from headrace.transforms.distributed import present_ranks
from headrace.transforms.door import labels_of
from headrace.transforms.ids import any_by, as_ids, first_row, first_row_of_pairs, places_by_turn, sum_by
from headrace.transforms.options import nested_key, one_of
from headrace.transforms.prefixes import END, left_aligned
from headrace.transforms.rewards import Missing
from headrace.transforms.rows import device_of, shallow_copy
from headrace.transforms.schema import COUNTED, REWARD, has_key
from headrace.transforms.tokens import read_tokens, write_tokens

from .by_prefix import TreeBaseline, TreeFormula, at_places, origin_of, tree_rules
from .by_turn import Alone, fits_rule
from .token_columns import places_of_all, population_with_reward, same_width, whole_numbers, widened, widest

Forks = Literal["prefix", "parent"]


class TreeAdvantage(BatchTransform):
    """Write each branch's advantage over the node that it forks from (:func:`tree_advantage`).

    Rollouts are the leaves of their group's tree. Of a rollout with several rows the first is in the tree,
    the others are a branch of its own behind it. Rows that are out of the statistics get 0. Two device reads,
    for the size of the groups and the checks; one more where rows are excluded. Ranks that share the batch
    exchange their tokens.

    Reads ``("headrace", "reward")`` if there, else `reward_key`; `tokens_key`, `attention_key`, `group_key`,
    `rollout_key`, `parent_key` by `forks`, `turn_key` where it is given. Writes `advantage_key`, (N, T, 1).

    Args:
        baseline: V(parent), a ``mean`` over all of its rollouts; or ``leave_one_out``: without those of the
            node itself, which is unbiased where branches are drawn separately.
        alone: what the tokens get that all rollouts of a group share: ``zero``, which under leave_one_out is
            a bias where they were drawn once and then forked; or their mean reward, its ``return``.
        forks: rollouts share tokens where they have the same ``prefix``; or only with their ``parent``, so
            that equal tokens of rollouts that were drawn separately are two nodes. Where a rollout goes on
            with its parent's own next tokens by chance, they are one all the same, which is a bias; labels
            of nodes in `tokens_key` have none.
        missing: what a reward of NaN does: ``raise``, or ``skip``: its rollout is no part of the tree.
        tokens_key: (N, T) int, or any labels of the nodes that tokens are of.
        attention_key: (N, T) bool, tokens that are not padding; None: all are not.
        parent_key: (N,) or (N, 1) int, the rollout that the row's went on from, negative: none; or N
            strings, an empty one or None: none.
        turn_key: (N,) or (N, 1) int that orders a rollout's rows; None: the order of the rows.
        reward_key: (N,), (N, 1) or (N, 1, 1) float.
        group_key: (N,) or (N, 1) int ≥ 0.
        rollout_key: (N,) or (N, 1) int ≥ 0; None: each row is a rollout.
        advantage_key: where the result goes.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: as the function; a parent that is not in the group, or that follows from its child.

    Example:
        >>> from tensordict import TensorDict
        >>> ids = {"group_id": [0, 0, 0], "rollout_id": [0, 1, 2], ("next", "reward"): [1.0, 3.0, 8.0]}
        >>> td = TensorDict(ids, batch_size=[3])
        >>> td["tokens", "full"] = torch.tensor([[5, 1, 1], [5, 1, 2], [5, 2, 2]])
        >>> TreeAdvantage(attention_key=None)(td)["advantage"].squeeze(-1).tolist()
        [[0.0, -2.0, -1.0], [0.0, -2.0, 1.0], [0.0, 4.0, 4.0]]
    """

    keeps_rows = True
    asks_in_loss = True
    spans_ranks = True
    of_whole_rollouts = "places"
    within_groups = True

    def __init__(
        self,
        *,
        baseline: TreeBaseline = "mean",
        alone: Alone = "zero",
        forks: Forks = "prefix",
        missing: Missing = "raise",
        tokens_key: NestedKey = ("tokens", "full"),
        attention_key: NestedKey | None = ("masks", "all_attention_mask"),
        parent_key: NestedKey = "parent_id",
        turn_key: NestedKey | None = None,
        reward_key: NestedKey = ("next", "reward"),
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey | None = "rollout_id",
        advantage_key: NestedKey = "advantage",
    ):
        self.tokens_key, self.attention_key = nested_key(tokens_key), nested_key(attention_key)
        self.parent_key, self.turn_key = nested_key(parent_key), nested_key(turn_key)
        self.reward_key, self.advantage_key = nested_key(reward_key), nested_key(advantage_key)
        self.group_key, self.rollout_key = nested_key(group_key), nested_key(rollout_key)
        self.forks = one_of("forks", forks, get_args(Forks))
        self.missing = one_of("missing", missing, get_args(Missing))
        parents = self.parent_key if forks == "parent" else None
        reads = [self.reward_key, REWARD, self.tokens_key, self.attention_key, parents, self.turn_key]
        super().__init__([*reads, self.group_key, self.rollout_key, COUNTED], [self.advantage_key])
        self.final_keys = tuple(self.in_keys)
        self.formula = TreeFormula(baseline, alone)
        self.baseline, self.alone = baseline, alone

    def enter(self, batch: TensorDictBase) -> TensorDictBase:
        """As every transform; parents that are text have the numbers of the rollouts that they name."""
        flat = super().enter(batch)
        parents = labels_of(flat, self.parent_key) if self.forks == "parent" else None
        if parents is None:
            return flat
        there = [row for row, parent in enumerate(parents) if parent not in ("", None)]
        numbers = torch.full((len(flat),), -1)
        numbers[there] = as_ids([parents[row] for row in there], "parent_id")
        return shallow_copy(flat).set(self.parent_key, numbers.to(device_of(flat)))

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Add the advantage."""
        labels, present = self._tokens(batch)
        paid = self.column(batch, "reward_key") if not has_key(batch, REWARD) else batch.get(REWARD)
        reward, dtype = at_least_float32(as_rewards(paid)), credit_dtype(batch.get(self.reward_key, paid))
        people = population_with_reward(batch, reward, self.missing)
        columns = {"reward": reward, "labels": widened(labels, widest(labels.shape[1]), END)}
        columns |= self._order(batch)
        if has_key(batch, COUNTED):
            columns["place"] = places_of_all(batch, self.ids(batch, "rollout"), columns.get("turn"))
        ids = {"rollouts": self.ids(batch, "rollout"), "groups": self.ids(batch, "group")}
        everyone = people.take(columns, ids)
        credit, rules = self._credit(everyone)
        rules.append(fits_rule(credit, dtype, everyone["rollouts"]))
        own = people.put_back(credit)[:, : labels.shape[1]]
        write_tokens(
            batch, self.advantage_key, at_places(own, present).to(dtype).unsqueeze(-1), self.tokens_key
        )
        return Outcome(batch, rules=people.rules(rules))

    def _tokens(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """(N, T): the tokens, from the left on, and where in the rows they are."""
        name = type(self).__name__
        tokens = read_tokens(batch, self.tokens_key, fill=END, reader=name, option="tokens_key")
        tokens = whole_numbers(tokens, self.tokens_key, "tokens_key")
        present = tokens != END
        if self.attention_key is not None:
            mask = read_tokens(batch, self.attention_key, fill=0, reader=name, option="attention_key")
            same_width(tokens, mask, "tokens_key and attention_key")
            present = mask != 0
        return left_aligned(tokens, present), present

    def _order(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """What says where rollouts fork and in which order their rows are."""
        columns = {}
        if self.turn_key is not None:
            columns["turn"] = as_ids(self.column(batch, "turn_key"), "turn")
        if self.forks == "parent":
            ranks, own = present_ranks(), self.ids(batch, "rollout")
            apart = ranks is not None and ranks.shared_ids == "different"
            columns["parent"] = as_ids(self.column(batch, "parent_key"), "parent_id")
            columns["own"] = own  # as this rank numbers them, and so does the parent_id
            columns["home"] = torch.full_like(own, ranks.rank if ranks is not None and apart else 0)
        return columns

    def _credit(self, everyone: dict[str, Tensor]) -> tuple[Tensor, list[Rule]]:
        """(M, T) float64, by place from the left, and what must hold of the rows."""
        reward, labels = everyone["reward"], everyone["labels"]
        rollouts, groups, turn = everyone["rollouts"], everyone["groups"], everyone.get("turn")
        row, first = torch.arange(len(rollouts), device=rollouts.device), first_row(rollouts)
        begins = (everyone["place"] if "place" in everyone else places_by_turn(first, turn).place) == 0
        head = sum_by(first, torch.where(begins, row, 0))  # the row of a rollout that is in the tree
        rules = [*tree_rules(reward, rollouts, groups), *turn_rules(rollouts, first, turn)]
        rules.append(_headless(~any_by(first, begins), rollouts))
        group_first = first_row(groups)
        if "parent" in everyone:
            labels, more = _by_parent(everyone, labels, head, group_first)
            rules += more
        in_tree = torch.where(begins, group_first, len(row) + row)  # the others have no part in it
        credit = self.formula(reward, labels, first_row(in_tree))
        behind = credit.behind.index_select(0, head)
        return torch.where(begins[:, None], credit.at_token, behind[:, None]), rules


def _headless(bad: Tensor, rollouts: Tensor) -> Rule:
    return Rule(
        bad,
        lambda row: f"rollout {int(rollouts[row])}",
        "the first row of a rollout is in the tree, and the others are behind it; found first rows out of "
        "the statistics, and others in, of {found}. Take whole rollouts out: unit='rollout'",
    )


def _by_parent(
    everyone: dict[str, Tensor], labels: Tensor, head: Tensor, group_first: Tensor
) -> tuple[Tensor, list[Rule]]:
    """Labels that are equal where a rollout went on from another's tokens, and what must hold of parents."""
    parent, own, home = everyone["parent"], everyone["own"], everyone["home"]
    total, row = len(own), torch.arange(len(own), device=own.device)
    owner = first_row_of_pairs(first_row(torch.cat([home, home])), torch.cat([own, parent]))[total:]
    is_root, found = parent < 0, owner < total
    source = torch.where(is_root | ~found, row, head[owner.clamp_max(max(total - 1, 0))])
    source = torch.where(head == row, source, row)
    labels, circle = origin_of(labels, source)

    def describe(row: int) -> str:
        return f"parent {int(parent[row])} of rollout {int(own[row])} (row {row})"

    return labels, [
        Rule(
            ~is_root & (~found | (group_first[source] != group_first)),
            describe,
            "a rollout goes on from one of its group that is in the batch; found {found}. Let whole groups "
            "through a gate before, or set parent_id to -1 where a rollout begins anew",
        ),
        Rule(
            circle | (~is_root & (parent == own)),
            describe,
            "a rollout goes on from an earlier one; in a circle are {found}",
        ),
    ]
