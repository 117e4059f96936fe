"""The stage that weighs tokens by how likely the trainer's policy makes what another one sampled."""

from __future__ import annotations

from typing import get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import Rule, set_rule
from headrace.transforms.distributed import Population, population_of
from headrace.transforms.errors import BatchError
from headrace.transforms.ids import first_row, is_first
from headrace.transforms.options import nested_key, one_of, within
from headrace.transforms.schema import has_key
from headrace.transforms.tokens import write_tokens

from .diagnostics import diagnose, sums_of_rows
from .importance import (
    Bound,
    Level,
    Normalise,
    Share,
    bounded,
    check_weights,
    mean_of,
    ratio_of,
    share_of_mean,
)
from .policies import change_advantage, read_policies
from .ratios import Ratios, Span, over_units


class RolloutCorrection(BatchTransform):
    """Multiply the advantage by importance weights (:func:`importance_weight`), of each token or sequence.

    A weight w ≥ 0 that does not depend on the policy in the loss goes through clipping unchanged,
    ``min(r·wA, clip(r)·wA) = w·min(r·A, clip(r)·A)``, so that the loss needs to know nothing of it. It
    stands after the advantage and all that adds to it, and in front of the split.

    The loss must measure its ratio from π_old, or the correction counts twice:
    ``loss.set_keys(sample_log_prob=("old_log_probs", "full"))`` on TorchRL's GRPOLoss, whose default is μ;
    :func:`headrace.pipeline.optimise` refuses that. ``ScoreRows(log_prob_key=("old_log_probs", "full"))``
    writes π_old. `log_prob_key` of the filter, the split and LossWeight is the one that the loss reads.

    Zeroed tokens stay in the loss mask, and so in the denominator of the loss; TokenFilter takes them out.

    Reads `old_log_prob_key`, `sampler_log_prob_key`, `loss_mask_key`, ``("headrace", "in_loss")`` if there,
    and `rollout_key` where `unit` is ``rollout``; writes `importance_key` (N, T), and `advantage_key` as
    (N, T, 1), 0 out of the mask. Measures the mean and largest weight, the effective sample size, the share
    out of bounds, KL and χ², by token and by sequence (``ess_token``, ``ess_sequence``, …). No device read.

    Args:
        level: over what ratios are multiplied: a ``token``, a ``sequence``, or its geometric ``mean``.
        bound: what happens outside of the bounds: ``truncate``, ``zero``, ``none``.
        low: least ratio π_old / μ, ≥ 0; null: open.
        high: greatest ratio, > 0; null: open.
        normalise: ``none``, or by the mean weight of the ``batch``.
        unit: what a sequence is: a row (``sample``) or all rows of a ``rollout``.
        least_ess: the report warns of an effective sample size below this share; null: never.
        old_log_prob_key: (N, T) float.
        sampler_log_prob_key: (N, T) float.
        loss_mask_key: (N, T) bool.
        advantage_key: (N, 1, 1) or (N, T, 1) float.
        importance_key: (N, T) float, written.
        rollout_key: (N,) or (N, 1) int; None: each row is a rollout.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: a log-probability in the mask is not finite; the rows have weights already; shapes differ.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({("old_log_probs", "full"): torch.tensor([[-1.0, -1.0]])}, batch_size=[1])
        >>> td["log_probs", "full"] = torch.tensor([[-1.0, -3.0]])
        >>> td["masks", "all_assistant_mask"] = torch.ones(1, 2, dtype=torch.bool)
        >>> td["advantage"] = torch.full((1, 1, 1), -0.5)
        >>> RolloutCorrection(high=2.0)(td)["advantage"].flatten().tolist()
        [-0.5, -1.0]
    """

    keeps_rows = True
    asks_in_loss = True
    spans_ranks = True

    def __init__(
        self,
        *,
        level: Level = "token",
        bound: Bound = "truncate",
        low: float | None = None,
        high: float | None = 2.0,
        normalise: Normalise = "none",
        unit: Span = "sample",
        least_ess: float | None = 0.5,
        old_log_prob_key: NestedKey = ("old_log_probs", "full"),
        sampler_log_prob_key: NestedKey = ("log_probs", "full"),
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        advantage_key: NestedKey = "advantage",
        importance_key: NestedKey = "importance_weight",
        rollout_key: NestedKey | None = "rollout_id",
    ):
        check_weights(level, bound, low, high, normalise)
        one_of("unit", unit, get_args(Span))
        self.old_log_prob_key, self.advantage_key = nested_key(old_log_prob_key), nested_key(advantage_key)
        self.sampler_log_prob_key = nested_key(sampler_log_prob_key)
        self.loss_mask_key, self.rollout_key = nested_key(loss_mask_key), nested_key(rollout_key)
        self.importance_key = nested_key(importance_key)
        reads = [self.old_log_prob_key, self.sampler_log_prob_key, self.loss_mask_key, self.advantage_key]
        reads += [self.rollout_key] if unit == "rollout" else []
        super().__init__(reads, [self.advantage_key, self.importance_key])
        self.weighed_keys, self.final_keys = (self.advantage_key,), (self.importance_key,)
        self.level, self.bound, self.low, self.high = level, bound, low, high
        self.normalise, self.unit = normalise, unit
        self.least_ess = None if least_ess is None else within("least_ess", least_ess, 0, 1)

    @property
    def within_groups(self) -> bool:  # type: ignore[override]
        """Unless the weights have mean 1 over the batch."""
        return self.normalise == "none"

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Add the weights, and multiply the advantage by them."""
        name = type(self).__name__
        if has_key(batch, self.importance_key):
            raise BatchError(
                f"these rows have {self.importance_key!r} (importance_key) already: correcting twice would "
                "weigh them twice. Take one RolloutCorrection, or the column, out"
            )
        read = read_policies(
            batch, self.old_log_prob_key, self.sampler_log_prob_key, self.loss_mask_key, reader=name
        )
        ratio, people = read.ratio, population_of(batch, every=True)
        level_ratio, rules = self._at_level(batch, ratio, people)
        weight = bounded(level_ratio, self.bound, self.low, self.high)
        if self.normalise == "batch":
            weight = self._normalised(batch, weight, ratio)
        weight = torch.where(ratio.mask, weight, 0.0)
        write_tokens(batch, self.importance_key, weight, self.loss_mask_key)

        def weigh(credit: Tensor) -> Tensor:
            return torch.where(ratio.mask, credit * weight, 0.0)

        change_advantage(batch, self.advantage_key, self.loss_mask_key, weigh, reader=name)
        return Outcome(
            batch, measured=self._measure(batch, weight, level_ratio, ratio), rules=[read.rule, *rules]
        )

    def _at_level(
        self, batch: TensorDictBase, ratio: Ratios, people: Population
    ) -> tuple[Tensor, list[Rule]]:
        """The ratios before bounds, (N, T) or (N, 1); of rollouts over all ranks that have rows of them."""
        if self.level == "token" or self.unit == "sample":
            return ratio_of(ratio, self.level), []
        rollouts = self.ids(batch, "rollout")
        everyone = people.take({"total": ratio.total, "tokens": ratio.tokens}, {"rollouts": rollouts})
        first = first_row(everyone["rollouts"])
        total, tokens = (people.put_back(over_units(everyone[key], first)) for key in ("total", "tokens"))
        rule = set_rule(everyone["rollouts"], "rollout_id", "rows without an id would be one sequence")
        return ratio_of(ratio, self.level, total, tokens), people.rules([rule])

    def _normalised(self, batch: TensorDictBase, weight: Tensor, ratio: Ratios) -> Tensor:
        """Weights over their mean, of all ranks that share the batch."""
        people = population_of(batch, every=True)
        if self.level == "token" or self.unit == "sample":
            share = Share(*people.take(share_of_mean(weight, ratio, self.level)._asdict()).values())
        else:
            columns = {"weight": weight[:, 0].double(), "tokens": ratio.tokens}
            everyone = people.take(columns, {"rollouts": self.ids(batch, "rollout")})
            first = first_row(everyone["rollouts"])
            once = (over_units(everyone["tokens"], first) > 0) & is_first(first)
            share = Share(everyone["weight"] * once, once.long())
        return (weight.double() / mean_of(share)).to(weight.dtype)

    def _measure(
        self, batch: TensorDictBase, weight: Tensor, level_ratio: Tensor, ratio: Ratios
    ) -> dict[str, Tensor | float]:
        people = population_of(batch, every=True)
        rows = sums_of_rows(weight, level_ratio, ratio, self.low, self.high)
        ids = {"rollouts": self.ids(batch, "rollout")} if self.unit == "rollout" else {}
        everyone = people.take(rows, ids)
        first = first_row(everyone["rollouts"]) if ids else None
        bound = {} if self.least_ess is None else {"ess_least": self.least_ess}
        return {**diagnose(everyone, first), **bound}
