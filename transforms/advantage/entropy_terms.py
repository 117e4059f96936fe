"""Terms of tokens by the entropy with which they were sampled: the largest alone, or each by its share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.checks import Rule, set_rule
from headrace.transforms.distributed import Population, present_ranks
from headrace.transforms.ids import as_ids, first_row, first_row_of_pairs, sum_by
from headrace.transforms.options import above_zero, nested_key
from headrace.transforms.schema import read_column
from headrace.transforms.sums import sum_by_in_any_order

from .token_terms import TokenTerm


def top_share(values: Tensor, trains: Tensor, share: float) -> Tensor:
    """The tokens in the loss with the largest values, a share of them all.

    Their number is the nearest whole one, at least 1; tokens that equal the last of them are taken too.

    Args:
        values: (N, T) float.
        trains: (N, T) bool.
        share: in (0, 1].

    Returns:
        (N, T) bool.

    Example:
        >>> values = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.2, 9.0]])
        >>> top_share(values, torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(), 0.4).int().tolist()
        [[0, 1, 0], [1, 0, 0]]
    """
    known = torch.where(trains, values.double(), float("-inf")).reshape(-1)
    everyone = Population(None, present_ranks()).take({"values": known})["values"]
    if everyone.numel() == 0:
        return trains
    number = ((everyone > float("-inf")).sum().double() * share).round().long().clamp_min(1)
    least = everyone.sort(descending=True).values.index_select(0, number.view(1) - 1)
    return trains & (values.double() >= least)


def share_at_place(
    values: Tensor, trains: Tensor, group_id: Tensor, direction: Tensor, *, floor: float = 1e-6
) -> Tensor:
    """How a token's entropy compares with those of the group's rows at the same place that pull the same way.

    GTPO (arXiv:2508.04349), with t the token's place among those of its row in the loss, and k over the n
    rows of the group that have a t-th token and the same direction::

        n H_t / Σ_k H_k,t                where the direction is positive
        n (1 / H_t) / Σ_k (1 / H_k,t)    where it is negative
        1                                where it is 0

    Their mean is 1: what is given to one is taken from others.

    Args:
        values: (N, T) H, ≥ 0.
        trains: (N, T) bool.
        group_id: (N,) int64.
        direction: (N, T), of which the sign counts, such as the advantage.
        floor: least H, > 0, so that it can be divided by.

    Returns:
        (N, T) float64.

    Example:
        >>> values, ones = torch.tensor([[1.0, 2.0], [3.0, 2.0]]), torch.ones(2, 2)
        >>> group = torch.tensor([5, 5])
        >>> share_at_place(values, ones.bool(), group, ones).tolist()
        [[0.5, 1.0], [1.5, 1.0]]
        >>> share_at_place(values, ones.bool(), group, -ones).tolist()
        [[1.5, 1.0], [0.5, 1.0]]
    """
    way = torch.where(trains, direction.sign().long(), 2)  # 2: out of the loss
    known = values.double().clamp_min(floor)
    known = torch.where(way > 0, known, known.reciprocal()).masked_fill(~trains | (way == 0), 1.0)
    columns = {"known": known, "place": trains.cumsum(1), "way": way}
    people = Population(None, present_ranks())
    flat = {name: column.reshape(-1) for name, column in columns.items()}
    everyone = people.take(flat, {"groups": group_id[:, None].expand(trains.shape).reshape(-1)})
    if everyone["known"].numel() == 0:
        return known
    first = first_row_of_pairs(first_row(everyone["groups"]), everyone["place"])
    first = first_row_of_pairs(first, everyone["way"])
    rows = sum_by(first, torch.ones_like(first))
    total = sum_by_in_any_order(first, everyone["known"])
    return people.put_back(rows * everyone["known"] / total).view(trains.shape)


class TopShare(TokenTerm):
    """1 for the tokens of the batch with the largest values, such as entropies, else 0 (:func:`top_share`).

    Multiplied with the advantage, the others teach nothing and stay in the loss's denominator.

    Args:
        share: of the tokens in the loss, in (0, 1].
        value_key: (N, T) float, such as the entropy of the policy that sampled.
    """

    def __init__(self, *, share: float = 0.2, value_key: NestedKey = ("entropy", "full")):
        self.share, self.value_key = above_zero("share", share, 1), nested_key(value_key)
        self.in_keys = (self.value_key,)

    def __call__(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T), 0 or 1."""
        return top_share(self._tokens(batch, trains, "value_key"), trains, self.share).float()


class EntropyShare(TokenTerm):
    """What a token's entropy is beside those of its group at the same place (:func:`share_at_place`).

    Multiplied with the advantage, hesitation that ended well is credited more, and confidence that did not is
    charged more. A rollout is one row: places in several segments say nothing of one another.

    Args:
        floor: least entropy, > 0, so that it can be divided by.
        value_key: (N, T) float ≥ 0, the entropy of the policy that sampled.
        advantage_key: (N, 1, 1) or (N, T, 1) float, of whose sign the direction is.
        group_key: (N,) or (N, 1) int ≥ 0.
    """

    within_groups = True

    def __init__(
        self,
        *,
        floor: float = 1e-6,
        value_key: NestedKey = ("entropy", "full"),
        advantage_key: NestedKey = "advantage",
        group_key: NestedKey = "group_id",
    ):
        self.floor, self.value_key = above_zero("floor", floor), nested_key(value_key)
        self.advantage_key, self.group_key = nested_key(advantage_key), nested_key(group_key)
        self.in_keys = (self.value_key, self.advantage_key, self.group_key)

    def rules(self, batch: TensorDictBase, trains: Tensor) -> Sequence[Rule]:
        """Groups are set, and no entropy is negative."""
        low = (trains & (self._tokens(batch, trains, "value_key") < 0)).any(1)
        negative = Rule(
            low, lambda row: f"row {row}", "no entropy is negative; found negative ones in {found}"
        )
        why = "rows without an id would be compared with one another"
        return [set_rule(self._groups(batch), "group_id", why), negative]

    def __call__(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) > 0."""
        credit = self._tokens(batch, trains, "advantage_key")
        values = self._tokens(batch, trains, "value_key")
        return share_at_place(values, trains, self._groups(batch), credit, floor=self.floor)

    def _groups(self, batch: TensorDictBase) -> Tensor:
        column = read_column(batch, self.group_key, reader=type(self).__name__, option="group_key")
        return as_ids(column, "group_id")
