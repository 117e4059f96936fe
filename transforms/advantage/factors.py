"""Factors for an advantage that is there: by its sign, and by how difficult its group is."""

from __future__ import annotations

import math

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import Rule, at_least_float32, identity_rules
from headrace.transforms.distributed import population_of
from headrace.transforms.errors import BatchError
from headrace.transforms.ids import first_row, is_first
from headrace.transforms.options import nested_key, within
from headrace.transforms.schema import COUNTED, REWARD, read_written, require
from headrace.transforms.sums import divide

from .grouping import ById


def difficulty_weight(mean: Tensor, strength: float) -> Tensor:
    """How much a group weighs by its mean reward p: ``exp(−λ KL(p ‖ ½))``.

    With rewards of 0 and 1 p is the share that succeeds, and KL(p ‖ ½) = p ln 2p + (1 − p) ln 2(1 − p) says
    how far that is from a half, from which most is to be learnt: the weight is 1 there, and 2^−λ where all or
    none succeed (MGPO of VibeThinker, arXiv:2511.06221).

    Args:
        mean: (N,) float in [0, 1].
        strength: λ ≥ 0.

    Returns:
        (N,) float64 in (0, 1].

    Example:
        >>> difficulty_weight(torch.tensor([0.0, 0.5, 1.0]), 1.0).tolist()
        [0.5, 1.0, 0.5]
    """
    p = mean.double()
    divergence = torch.xlogy(p, 2 * p) + torch.xlogy(1 - p, 2 * (1 - p))
    return torch.exp(-strength * divergence.clamp_min(0))


class SignFactors(BatchTransform):
    """Multiply advantages above 0 by one factor, and those below by another: ``A ← λ₊ A⁺ + λ₋ A⁻``.

    W-REINFORCE (arXiv:2506.01347) has λ₊ = 0.1 and λ₋ = 1, with rewards of ±1 as they are for an advantage.
    Every number of an advantage by token is taken by itself. Half precision is multiplied in float32.

    Reads and writes `advantage_key`.

    Args:
        positive: λ₊ ≥ 0.
        negative: λ₋ ≥ 0.
        advantage_key: (N, ...) float, dense or ragged.

    Raises:
        MissingKeyError: a column is not there.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"advantage": torch.tensor([[-1.0], [2.0]])}, batch_size=[2])
        >>> SignFactors(positive=0.5)(td)["advantage"].flatten().tolist()
        [-1.0, 1.0]
    """

    keeps_rows = True
    within_groups = True
    asks_in_loss = True

    def __init__(
        self, *, positive: float = 1.0, negative: float = 1.0, advantage_key: NestedKey = "advantage"
    ):
        self.advantage_key = nested_key(advantage_key)
        super().__init__([self.advantage_key], [self.advantage_key])
        self.positive = within("positive", positive, 0, math.inf)
        self.negative = within("negative", negative, 0, math.inf)

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Rewrite the advantage."""
        for rows in _parts(batch, self):
            credit = rows.get(self.advantage_key)
            wide = at_least_float32(credit)
            scaled = torch.where(wide > 0, wide * self.positive, wide * self.negative)
            rows.set(self.advantage_key, scaled.to(credit.dtype))
        return Outcome(batch)


class DifficultyWeight(BatchTransform):
    """Multiply the advantage by :func:`difficulty_weight` of the group's mean reward.

    The mean is over the rollouts in the statistics that have a reward. One device read where rows are out of
    the statistics, whose advantage becomes 0.

    Reads ``("headrace", "reward")``, `group_key`, `rollout_key`; reads and writes `advantage_key`.

    Args:
        strength: λ ≥ 0.
        advantage_key: (N, ...) float, dense or ragged.
        group_key: (N,) or (N, 1) int ≥ 0.
        rollout_key: (N,) or (N, 1) int ≥ 0; None: each row is a rollout.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: a reward outside [0, 1], of which no mean is a share.

    Example:
        >>> DifficultyWeight(strength=4.0)
        DifficultyWeight(strength=4.0)
    """

    keeps_rows = True
    within_groups = True
    asks_in_loss = True
    spans_ranks = True

    def __init__(
        self,
        *,
        strength: float = 1.0,
        advantage_key: NestedKey = "advantage",
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey | None = "rollout_id",
    ):
        self.advantage_key, self.group_key = nested_key(advantage_key), nested_key(group_key)
        self.rollout_key = nested_key(rollout_key)
        built_on = [key for key in (REWARD, COUNTED, self.group_key, self.rollout_key) if key is not None]
        super().__init__([self.advantage_key, *built_on], [self.advantage_key])
        self.final_keys = tuple(built_on)
        self.strength = within("strength", strength, 0, math.inf)

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Rewrite the advantage."""
        reward = read_written(batch, REWARD, reader=type(self).__name__, writer="FanOutCollapse")
        people = population_of(batch)
        ids = {f"{unit}s": self.ids(batch, unit) for unit in ("group", "rollout")}
        every = people.take({"reward": reward.double()}, ids)
        reward, groups, rollouts = every["reward"], every["groups"], every["rollouts"]
        first, present = first_row(rollouts), ~reward.isnan()
        group_first = first_row(groups)
        means = ById(reward.nan_to_num(), group_first, len(reward), is_first(first) & present)
        mean = means.spread(divide(means.sums(means.reward), means.count.clamp_min(1)).high)
        factor = people.put_back(difficulty_weight(mean.clamp(0, 1), self.strength))
        parts = _parts(batch, self)
        shares = [factor] if len(parts) == 1 and parts[0] is batch else factor.unbind()
        for rows, own in zip(parts, shares, strict=True):
            credit = rows.get(self.advantage_key)
            own = own.view(-1, *[1] * (credit.ndim - 1)) if own.ndim else own
            rows.set(self.advantage_key, (credit.double() * own).to(credit.dtype))
        outside = Rule(
            present & ((reward < 0) | (reward > 1)),
            lambda row: f"{float(reward[row])} at row {row} (rollout {int(rollouts[row])})",
            "a group's difficulty is the share of its rewards, which must be in [0, 1]; found {found}. Put "
            "RewardScale behind FanOutCollapse, or leave this stage out",
        )
        rules = people.rules([*identity_rules(rollouts, groups, first), outside])
        return Outcome(batch, measured={"mean": factor.mean()}, rules=rules)


def _parts(batch: TensorDictBase, stage: SignFactors | DifficultyWeight) -> list[TensorDictBase]:
    """The batch, or its rows where they may be ragged; each with a floating-point advantage."""
    require(batch[:1], stage.advantage_key, reader=type(stage).__name__, option="advantage_key")
    parts = list(batch.tensordicts) if isinstance(batch, LazyStackedTensorDict) else [batch]
    if odd := {part.get(stage.advantage_key).dtype for part in parts if not _is_float(part, stage)}:
        raise BatchError(f"an advantage is a floating-point number; found {odd.pop()}")
    return parts


def _is_float(part: TensorDictBase, stage: SignFactors | DifficultyWeight) -> bool:
    return part.get(stage.advantage_key).is_floating_point()
