"""The stage that weighs tokens by how likely the trainer's policy makes what another one sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import Rule, set_rule
from headrace.transforms.distributed import Population, population_of
from headrace.transforms.errors import BatchError
from headrace.transforms.ids import first_row, is_first, reduce_by
from headrace.transforms.options import nested_key, one_of, within
from headrace.transforms.schema import has_key
from headrace.transforms.tokens import in_blocks, write_tokens

from .diagnostics import diagnose, sums_of_rows, sums_of_weights
from .importance import (
    Bound,
    Level,
    Normalise,
    check_weights,
    mean_of,
    normalised,
    ratio_of_rows,
    share_of_mean,
    weigh,
    weight_of_rows,
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
    writes π_old. `log_prob_key` of the pipeline is the one that the loss reads.

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
    def corrects(self) -> tuple[NestedKey, NestedKey]:
        """From which policy to which its weights are: a second stage of the same would count them twice."""
        return self.sampler_log_prob_key, self.old_log_prob_key

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
        keys = self.old_log_prob_key, self.sampler_log_prob_key, self.loss_mask_key
        policies, people = read_policies(batch, *keys, reader=name), population_of(batch, every=True)
        made = policies.each_row(self._of_tokens if self.level == "token" else sums_of_rows)
        rollouts = self.ids(batch, "rollout") if self.unit == "rollout" else None
        total, tokens, rules = self._of_units(made, rollouts, people)
        if (of_rows := ratio_of_rows(self.level, total, tokens, policies.dtype)) is not None:
            made |= policies.each_row(self._weigh, of_rows)
        weight = made.pop("weights")
        if self.normalise == "batch":
            weight = normalised(weight, mean_of(**self._share(weight, made["tokens"], rollouts, people)))
            made |= in_blocks(sums_of_weights, weight)
        write_tokens(batch, self.importance_key, weight, self.loss_mask_key)
        columns = weight, policies.mask
        fits = change_advantage(batch, self.advantage_key, self.loss_mask_key, _weigh, *columns, reader=name)
        wrong = policies.rule(made.pop("wrong"))
        return Outcome(batch, measured=self._measure(made, rollouts, people), rules=[wrong, *rules, fits])

    def _of_tokens(self, ratio: Ratios) -> dict[str, Tensor]:
        """Where each token has its own weight, all that is known of some rows."""
        return {**sums_of_rows(ratio), **self._weigh(ratio, None)}

    def _weigh(self, ratio: Ratios, of_rows: Tensor | None) -> dict[str, Tensor]:
        made = weigh(ratio, of_rows, bound=self.bound, low=self.low, high=self.high)
        return {"weights": made["weight"], "outside": made["outside"]} | sums_of_weights(made["weight"])

    def _of_units(
        self, rows: Mapping[str, Tensor], rollouts: Tensor | None, people: Population
    ) -> tuple[Tensor, Tensor, list[Rule]]:
        """log ρ added up over each row, or its rollout on all ranks, and over how many tokens."""
        columns = {"total": rows["total"], "tokens": rows["tokens"]}
        if rollouts is None or self.level == "token":
            return *columns.values(), []
        everyone = people.take(columns, {"rollouts": rollouts})
        first = first_row(everyone["rollouts"])
        total, tokens = (people.put_back(over_units(everyone[key], first)) for key in columns)
        rule = set_rule(everyone["rollouts"], "rollout_id", "rows without an id would be one sequence")
        return total, tokens, people.rules([rule])

    def _share(
        self, weight: Tensor, tokens: Tensor, rollouts: Tensor | None, people: Population
    ) -> dict[str, Tensor]:
        """What rows have in the mean weight of all ranks that share the batch; a rollout counts once."""
        if rollouts is None or self.level == "token":
            return people.take(share_of_mean(self.level, weight, tokens))
        everyone = people.take({"weight": weight_of_rows(weight), "tokens": tokens}, {"rollouts": rollouts})
        first = first_row(everyone["rollouts"])
        once = is_first(first) & (over_units(everyone["tokens"], first) > 0)
        weight = reduce_by(first, everyone["weight"], "amax")  # of the rows that have a token
        return {"weight": weight * once, "count": once.long()}

    def _measure(
        self, rows: Mapping[str, Tensor], rollouts: Tensor | None, people: Population
    ) -> dict[str, Tensor | float]:
        everyone = people.take(rows, {} if rollouts is None else {"rollouts": rollouts})
        first = None if rollouts is None else first_row(everyone["rollouts"])
        bound = {} if self.least_ess is None else {"least_ess": self.least_ess}
        return {**diagnose(everyone, first), **bound}


def _weigh(credit: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, credit * weight, 0.0)
