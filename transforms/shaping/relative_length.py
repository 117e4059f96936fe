"""Rewards shaped by how long a rollout is among those of its group, where it succeeded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.checks import Rule, set_rule
from headrace.transforms.distributed import population_of
from headrace.transforms.ids import first_row, first_row_of_pairs, is_first, reduce_by, sum_by
from headrace.transforms.options import nested_key, one_of, within
from headrace.transforms.schema import COUNTED, REWARD

from .length import LengthShaping

Form = Literal["bonus", "rescale"]


def relative_length(
    reward: Tensor,
    length: Tensor,
    group_id: Tensor,
    rollout_id: Tensor | None = None,
    *,
    form: Form = "bonus",
    coefficient: float = 1.0,
    success: float | None = None,
) -> Tensor:
    """A factor for each reward, by the rollout's length among those of its group.

    With L the lengths, and R the rewards, of a group::

        bonus    1 + c · min(max(1 − L_i/mean(L of successes), 0), 1) for a success, 1 for any other
        rescale  1 / (1 + c · L_i/mean(L))                  (GR³, arXiv:2603.10535)

    ``bonus`` is the shaping of prime-rl (``orchestrator/algo/advantage.py``): of those that succeed, the
    shorter ones get up to 1 + c times their reward, and nobody gets less than before. ``rescale`` takes
    from whoever is long, in proportion to its reward: where that is 0 nothing is to be had by being short.

    Lengths are added up as integers; a rollout counts once. NaN is a reward that is missing, and in no
    statistic. No device read.

    Args:
        reward: (N,) float, the rollout's, on each of its rows.
        length: (N,) int64, tokens of the row's rollout.
        group_id: (N,) int64.
        rollout_id: (N,) int64; None: each row is one.
        form: which factor.
        coefficient: c ≥ 0.
        success: least reward of a success, for ``bonus``; None: the best of the group, if it is above 0.

    Returns:
        (N,) float64 > 0.

    Example:
        >>> reward, length = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2, 6, 1])
        >>> relative_length(reward, length, torch.zeros(3, dtype=torch.int64)).tolist()
        [1.5, 1.0, 1.0]
    """
    groups, present = first_row(group_id), ~reward.isnan()
    row = torch.arange(len(reward), device=reward.device) if rollout_id is None else rollout_id
    votes = present & is_first(first_row_of_pairs(groups, row))
    if form == "rescale":
        among = present
    else:
        best = reduce_by(groups, torch.where(present, reward, float("-inf")), "amax")
        among = present & ((reward == best) & (best > 0) if success is None else reward >= success)
    counted = votes & among
    number, total = sum_by(groups, counted.long()), sum_by(groups, torch.where(counted, length, 0))
    share = length.double() * number / total.clamp_min(1)  # L_i over the mean
    if form == "rescale":
        return 1 / (1 + coefficient * share)
    return 1 + coefficient * torch.where(among & (total > 0), (1 - share).clamp(0, 1), 0.0)


class RelativeLength(LengthShaping):
    """Multiply the reward by :func:`relative_length` of the rollout's tokens in its group.

    Rows that are out of the statistics keep their reward. Reads `loss_mask_key`, ``("headrace", "length")``
    if there, `rollout_key`, `group_key`; reads and writes ``("headrace", "reward")``. One device read where
    rows are out of the statistics.

    Args:
        form: ``bonus``, ``rescale``.
        coefficient: c ≥ 0.
        success: least reward of a success, for ``bonus``; None: the best of the group, if it is above 0.
        loss_mask_key: (N, T) bool.
        group_key: (N,) or (N, 1) int ≥ 0.
        rollout_key: (N,) or (N, 1) int ≥ 0; None: each row is a rollout.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: a negative reward under ``rescale``, which being long would make larger.

    Example:
        >>> RelativeLength(form="rescale", coefficient=0.33)
        RelativeLength(form='rescale', coefficient=0.33)
    """

    among_others = True
    within_groups = True

    def __init__(
        self,
        *,
        form: Form = "bonus",
        coefficient: float = 1.0,
        success: float | None = None,
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey | None = "rollout_id",
    ):
        self.group_key = nested_key(group_key)
        super().__init__(loss_mask_key, rollout_key, self.group_key)
        self.form = one_of("form", form, get_args(Form))
        self.coefficient = within("coefficient", coefficient, 0, float("inf"))
        if success is not None and form != "bonus":
            raise ValueError(f"success is for form='bonus'; got {success} for {form!r}")
        self.success = None if success is None else within("success", success, float("-inf"), float("inf"))

    def shape(self, batch: TensorDictBase, reward: Tensor) -> Tensor:
        """(N,)."""
        people = population_of(batch)
        columns = {"reward": reward, "length": self.rollout_lengths(batch)}
        ids = {"group": self.ids(batch, "group"), "rollout": self.ids(batch, "rollout")}
        everyone = people.take(columns, {f"{unit}s": column for unit, column in ids.items()})
        factor = relative_length(
            everyone["reward"],
            everyone["length"],
            everyone["groups"],
            everyone["rollouts"],
            form=self.form,
            coefficient=self.coefficient,
            success=self.success,
        )
        # Who is out of the statistics comes back with a factor of 0, and keeps what it had.
        factor = people.put_back(factor)
        return torch.where(factor > 0, reward.double() * factor, reward.double())

    def rules(self, batch: TensorDictBase) -> Sequence[Rule]:
        """Rows have a rollout; those in the statistics a group, and no negative reward to rescale."""
        why = "rows without an id would be compared with one another"
        rules = [set_rule(self.ids(batch, "group"), "group_id", why)]
        if self.form == "rescale":
            rules.append(_negative_rule(batch.get(REWARD)))
        if (counted := batch.get(COUNTED, None)) is not None:
            rules = [rule._replace(bad=rule.bad & counted) for rule in rules]
        return [*super().rules(batch), *rules]


def _negative_rule(reward: Tensor) -> Rule:
    return Rule(
        reward < 0,
        lambda row: f"{float(reward[row])} at row {row}",
        "form='rescale' needs rewards ≥ 0, since a negative one is less bad where a rollout is long; found "
        "{found}. Put RewardScale with a bias before it, or use form='bonus'",
    )
