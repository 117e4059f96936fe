"""The criterion by which rows or tokens are rejected that the two policies see too differently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.checks import Rule, set_rule
from headrace.transforms.distributed import population_of
from headrace.transforms.ids import as_ids, first_row
from headrace.transforms.options import describe_options, nested_key, one_of
from headrace.transforms.schema import read_column
from headrace.transforms.tokens import read_advantage

from .diagnostics import distance, sums_of_rows
from .divergence import Estimator, Over, check_divergence, of_tokens, over_rows, row_part
from .importance import check_bounds, outside
from .policies import Policies, read_policies
from .ratios import Ratios, Span, over_units

Judged = Literal["all", "negative"]


class Diverged:
    """Rows, or tokens, whose :func:`divergence` is within bounds. Reason: ``diverged``.

    ::

        k1      log low ≤ D ≤ log high    low and high bound μ / π_old, the inverse of an importance weight
        k2, k3  D ≤ high

    Bounds are inclusive. Of k1, `high` alone means low = 1 / high; low = 0 is open below, and high = null
    above. Rows without a token in the loss stay. ``token`` is for TokenFilter, the other levels for
    SampleFilter, where it stands before the advantage: a rejected row's reward is out of its group's baseline
    under ``exclude`` and ``drop``, and stays in it under ``mask``. A pipeline refuses it after the advantage,
    where it would stay in any case. What remains is the denominator of the loss; TokenFilter
    (``denominator="all"``) keeps that of all tokens.

    Geometric-mean rejection is ``Diverged(estimator="k1", level="mean", ...)`` (https://richardli.xyz/rl-collapse);
    with `judges` ``negative`` it is the off-policy sequence mask of DeepSeek-V3.2 (arXiv:2512.02556), which
    needs the advantage's sign: it stands after the advantage. Over ranks a rollout's tokens are those of all.
    The stage measures KL and χ² of all rows, before it rejects any. No device read.

    Args:
        estimator: k1, k2, k3.
        level: the divergence of each ``token``, or its ``sum``, ``mean`` or ``max`` over a row.
        low: of k1, the least μ / π_old that stays, ≥ 0; null: 1 / high.
        high: greatest that stays: μ / π_old of k1, the divergence of k2 and k3; null: open, for k1 with low.
        unit: over what: a row (``sample``) or all rows of a ``rollout``, which then stay or go as one.
        judges: ``all``, or those whose advantage is ``negative``.
        old_log_prob_key: (N, T) float, of the trainer's policy.
        sampler_log_prob_key: (N, T) float, of the policy that sampled.
        loss_mask_key: (N, T) bool.
        advantage_key: (N, 1, 1) or (N, T, 1) float, read where only the negative are judged.
        rollout_key: (N,) or (N, 1) int, read where `unit` is ``rollout``.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: a log-probability in the mask is not finite; shapes differ.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> td = TensorDict({("old_log_probs", "full"): torch.tensor([[-1.0], [-1.0]])}, batch_size=[2])
        >>> td["log_probs", "full"] = torch.tensor([[-1.1], [-3.0]])
        >>> td["masks", "all_assistant_mask"] = torch.ones(2, 1, dtype=torch.bool)
        >>> Diverged(estimator="k1", level="mean", high=2.0)(td).tolist()
        [True, False]
    """

    reason = "diverged"
    asks_in_loss = True
    spans_ranks = True
    within_groups = True

    def __init__(
        self,
        *,
        estimator: Estimator = "k3",
        level: Over = "mean",
        low: float | None = None,
        high: float | None,
        unit: Span = "sample",
        judges: Judged = "all",
        old_log_prob_key: NestedKey = ("old_log_probs", "full"),
        sampler_log_prob_key: NestedKey = ("log_probs", "full"),
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        advantage_key: NestedKey = "advantage",
        rollout_key: NestedKey = "rollout_id",
    ):
        check_divergence(estimator, level)
        self.unit = one_of("unit", unit, get_args(Span))
        self.judges = one_of("judges", judges, get_args(Judged))
        self.estimator, self.level, self.low, self.high = estimator, level, low, high
        self._low, self._high = _bounds(estimator, low, high)
        if level == "token" and unit == "rollout":
            raise ValueError("a token's divergence is its own: leave unit='rollout' to sum, mean and max")
        self.old_log_prob_key = nested_key(old_log_prob_key)
        self.sampler_log_prob_key = nested_key(sampler_log_prob_key)
        self.loss_mask_key, self.rollout_key = nested_key(loss_mask_key), nested_key(rollout_key)
        self.advantage_key = nested_key(advantage_key)
        self.in_keys: tuple[NestedKey, ...] = (
            self.old_log_prob_key,
            self.sampler_log_prob_key,
            self.loss_mask_key,
            *([self.advantage_key] if judges == "negative" else []),
            *([self.rollout_key] if unit == "rollout" else []),
        )
        self.before_baseline = judges == "all"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"

    def rules(self, batch: TensorDictBase) -> Sequence[Rule]:
        """Both policies are known of every token in the loss, and every row has a rollout."""
        policies = self._read(batch)
        rules = [policies.rule(policies.each_row(lambda ratio: {"wrong": ratio.wrong.any(-1)})["wrong"])]
        if self.unit == "rollout":
            why = "rows without an id would be one sequence"
            rules.append(set_rule(self._rollouts(batch), "rollout_id", why))
        return rules

    def measured(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """How far the two policies are apart before anything is rejected: kl_k1, kl_k3 and chi2, by token and
        by sequence (:func:`~headrace.transforms.correction.diagnostics.distance`).
        """
        rows = self._read(batch).each_row(sums_of_rows)
        ids = {"rollouts": self._rollouts(batch)} if self.unit == "rollout" else {}
        everyone = population_of(batch, every=True).take(rows, ids)
        return distance(everyone, first_row(everyone["rollouts"]) if ids else None)

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """(N,) bool, True where the row stays; (N, T), of its tokens, where they are judged one by one."""
        policies = self._read(batch)
        if self.level == "token":
            out = policies.each_row(self._of_tokens)["out"]
        else:
            there, found = self._of_rows(batch, policies)
            out = (there & outside(found.to(policies.dtype), self._low, self._high)).unsqueeze(-1)
        if self.judges == "negative":
            width = policies.mask.shape[-1]
            credit = read_advantage(batch, self.advantage_key, width, reader=type(self).__name__)
            out = out & (credit < 0)
        return ~(out if self.level == "token" or out.shape[-1] > 1 else out[:, 0])

    def _of_tokens(self, ratio: Ratios) -> dict[str, Tensor]:
        """(N, T) bool, tokens that are out of bounds."""
        found = of_tokens(ratio, self.estimator).to(ratio.dtype)
        return {"out": ratio.mask & outside(found, self._low, self._high)}

    def _of_rows(self, batch: TensorDictBase, policies: Policies) -> tuple[Tensor, Tensor]:
        """(N,) bool, whether the row, or its rollout on all ranks, has tokens; (N,) float64, over them."""

        def of_some(ratio: Ratios) -> dict[str, Tensor]:
            return {
                "part": row_part(of_tokens(ratio, self.estimator), ratio, self.level),
                "tokens": ratio.tokens,
            }

        rows = policies.each_row(of_some)
        if self.unit == "sample":
            return rows["tokens"] > 0, over_rows(rows["part"], rows["tokens"], None, self.level)
        people = population_of(batch, every=True)
        everyone = people.take(rows, {"rollouts": self._rollouts(batch)})
        first = first_row(everyone["rollouts"])
        tokens = over_units(everyone["tokens"], first)
        found = over_rows(everyone["part"], tokens, first, self.level)
        return people.put_back(tokens > 0), people.put_back(found)

    def _rollouts(self, batch: TensorDictBase) -> Tensor:
        column = read_column(batch, self.rollout_key, reader=type(self).__name__, option="rollout_key")
        return as_ids(column, "rollout_id")

    def _read(self, batch: TensorDictBase) -> Policies:
        keys = self.old_log_prob_key, self.sampler_log_prob_key, self.loss_mask_key
        return read_policies(batch, *keys, reader=type(self).__name__)


def _bounds(estimator: str, low: float | None, high: float | None) -> tuple[float | None, float | None]:
    """Bounds of the divergence itself.

    Raises:
        ValueError: there is none, or they are none of this estimator.
    """
    if estimator == "k1":
        check_bounds(low, high)
        if low is None and high is None:
            raise ValueError("k1 needs low or high, bounds of μ / π_old")
        if low is None and high is not None and high < 1:
            raise ValueError(f"k1 with high alone bounds μ / π_old by 1 / high and high ≥ 1; got {high!r}")
        least = 1 / high if low is None and high is not None else low
        return -math.inf if not least else math.log(least), None if high is None else math.log(high)
    if low is not None or high is None or not high > 0:
        raise ValueError(f"{estimator} is bounded above alone: high > 0 and no low; got {low!r} and {high!r}")
    return None, high
