"""The stage that multiplies the advantage by importance weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import BatchError, BatchTransform, ColumnNames, Ids, Rows
from headrace.transforms.table.ids import add_up
from headrace.transforms.table.options import within
from headrace.transforms.table.schema import has_key
from headrace.transforms.table.tokens import in_loss_there, read_advantage, write_tokens, zero_outside

from .importance import Bound, Level, WeightFormula, largest
from .ratios import Policies, Ratios, Span, distance, over_units

METRIC = "metric "  # prefix of the names of numbers that only metrics need


class RolloutCorrection(
    BatchTransform,
    columns=("old_log_prob", "sampler_log_prob", "loss_mask", "advantage", "importance", "rollout"),
):
    """Multiply the advantage by importance weights per token or per sequence (:func:`importance_weight`).

    A weight w ≥ 0 that does not depend on the policy in the loss commutes with clipping,
    ``min(r·wA, clip(r)·wA) = w·min(r·A, clip(r)·A)``, so the loss needs no change. Put this stage
    after the advantage and all stages that add to it, and before the split. The weights and the advantage are
    computed when rows are gathered.

    The ratio in the loss must be relative to π_old. Otherwise the correction is applied twice. Set
    ``loss.set_keys(sample_log_prob=("old_log_probs", "full"))`` on TorchRL's GRPOLoss, whose default is μ;
    :func:`headrace.pipeline.optimise` refuses the default. ``ScoreRows(log_prob_key=("old_log_probs",
    "full"))`` writes π_old. Set `log_prob_key` of the pipeline to the column that the loss reads.

    Tokens with weight 0 stay in the loss mask and in the denominator of the loss. Use TokenFilter to take
    them out.

    Reads `old_log_prob_key`, `sampler_log_prob_key`, `loss_mask_key`, ``("headrace", "in_loss")`` if it
    exists, and `rollout_key` with ``unit="rollout"``. Writes `importance_key` (N, T), and `advantage_key` as
    (N, T, 1), 0 out of the mask. Measures the mean and largest weight, the effective sample size, the
    fraction out of bounds, KL and χ², per token and per sequence (``ess_token``, ``ess_sequence``, …).

    Args:
        level: from which ratio the weight is computed: that of a ``token``, the product over a ``sequence``,
            or the geometric ``mean`` over a sequence.
        bound: what happens to weights out of bounds: ``truncate``, ``zero``, ``none``.
        low: lower bound of the ratio π_old / μ, ≥ 0; null: none.
        high: upper bound of the ratio, > 0; null: none.
        unit: a sequence is a row (``sample``) or all rows of a ``rollout``.
        least_ess: the report warns if the effective sample size is below this fraction; null: never.
        names: other names of columns, such as `old_log_prob_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: a log-probability in the mask is not finite, the rows already have weights, or shapes
            differ.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({("old_log_probs", "full"): torch.tensor([[-1.0, -1.0]])}, batch_size=[1])
        >>> td["log_probs", "full"] = torch.tensor([[-1.0, -3.0]])
        >>> td["masks", "all_assistant_mask"] = torch.ones(1, 2, dtype=torch.bool)
        >>> td["advantage"] = torch.full((1, 1, 1), -0.5)
        >>> RolloutCorrection(high=2.0)(td)["advantage"].flatten().tolist()
        [-0.5, -1.0]
    """

    within_groups = True

    def __init__(
        self,
        *,
        level: Level = "token",
        bound: Bound = "truncate",
        low: float | None = None,
        high: float | None = 2.0,
        unit: Span = "sample",
        least_ess: float | None = 0.5,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.formula = WeightFormula(level, bound, low, high)
        reads = [self.old_log_prob_key, self.sampler_log_prob_key, self.loss_mask_key, self.advantage_key]
        reads += [self.rollout_key] if unit == "rollout" else []
        super().__init__(reads, [self.advantage_key, self.importance_key])
        self.weighed_keys, self.final_keys = (self.advantage_key,), (self.importance_key,)
        self.level, self.bound, self.low, self.high = level, bound, low, high
        self.unit = unit
        self.least_ess = within("least_ess", least_ess, 0, 1)

    @property
    def corrects(self) -> tuple[NestedKey, NestedKey]:
        """The two policies of the ratio. A second stage with these policies would apply the weights twice."""
        return self.sampler_log_prob_key, self.old_log_prob_key

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Measure the weights. The weights and the new advantage are computed when rows are gathered."""
        if has_key(batch, self.importance_key):
            raise BatchError(
                f"these rows already have {self.importance_key!r} (importance_key): a second correction "
                "would apply weights twice. Remove one RolloutCorrection, or the column"
            )
        policies, credit = self._read(batch, in_loss_there(rows), rows)
        rollouts, formula = rows.with_excluded.rollouts if self.unit == "rollout" else None, self.formula
        counted = policies.counted()
        # The largest absolute advantage of each row's tokens.
        if credit.shape[1] == 1:
            peak = credit.squeeze(1).abs()
        else:
            peak = policies.each_row(lambda ratio, own: {"peak": peak_of(own, ratio.mask)}, credit)["peak"]
        made = policies.each_row(lambda ratio: formula.of_rows(ratio) | _of_metrics(formula.measured(ratio)))
        found = rows.measured(peak=peak, **counted, **made)
        policies.require_known(rows, found)
        weighed = formula.weigh_rows(found, rollouts, policies.dtype)
        largest = formula.most if weighed.of_row is None else weighed.of_row
        fits = ~found["tokens"].bool() | (found["peak"] * largest <= torch.finfo(credit.dtype).max)
        if weighed.of_row is None and not bool(fits.all()):  # the bound is too large: check each product
            fits = self._fits(rows, policies, credit)
        rows.require(fits, f"an advantage must be finite in {credit.dtype}; found others in {{found}}")
        sums = {
            name.removeprefix(METRIC): values for name, values in found.items() if name.startswith(METRIC)
        }
        sums["tokens"] = found["tokens"]
        metrics = weights_measured(formula.sums(sums, weighed), sums["tokens"], rollouts)
        for name, value in (metrics | distance(sums, rollouts)).items():
            rows.metric(name, value)
        if self.least_ess is not None:
            rows.metric("least_ess", self.least_ess)
        numbers = {"in_loss": rows.in_loss} | ({} if weighed.of_row is None else {"of_row": weighed.of_row})
        writes = [self.advantage_key, self.importance_key]
        rows.when_gathered(self._weigh, writes, **numbers)
        return batch

    def _fits(self, rows: Rows, policies: Policies, credit: Tensor) -> Tensor:
        """(M,) bool: the products of weight and advantage of all tokens of a row fit into the dtype."""

        def of_some(ratio: Ratios, credit: Tensor) -> dict[str, Tensor]:
            weight = self.formula.weight(ratio, None)
            return {"peak": peak_of(credit.double() * weight.double(), ratio.mask)}

        found = rows.measured(**policies.each_row(of_some, credit))
        return found["peak"] <= torch.finfo(credit.dtype).max

    def _weigh(self, batch: TensorDictBase, numbers: dict[str, Tensor]) -> None:
        """Write the weights of gathered rows, and multiply their advantage by them."""
        policies, credit = self._read(batch, numbers["in_loss"])
        product = torch.empty(policies.mask.shape, dtype=credit.dtype, device=credit.device)

        def weighed(
            ratio: Ratios, product: Tensor, credit: Tensor, of_row: Tensor | None
        ) -> dict[str, Tensor]:
            weight = self.formula.weight(ratio, of_row)
            torch.mul(weight, credit.to(torch.promote_types(credit.dtype, torch.float32)), out=product)
            if not finite:  # NaN or infinity times the weight 0 of a token out of the mask is NaN
                zero_outside(product, ratio.mask)
            return {"weight": weight}

        of_rows_here = credit.device.type == "cpu" and credit.shape[1] == 1
        finite = of_rows_here and bool(credit.isfinite().all())
        weight = policies.each_row(weighed, product, credit, numbers.get("of_row"))["weight"]
        write_tokens(batch, self.importance_key, weight, self.loss_mask_key)
        write_tokens(batch, self.advantage_key, product.unsqueeze(-1), self.loss_mask_key)

    def _read(
        self, batch: TensorDictBase, in_loss: Tensor | None, rows: Rows | None = None
    ) -> tuple[Policies, Tensor]:
        policies, reader = Policies.read(batch, self, in_loss), type(self).__name__
        mask, like = policies.mask, self.loss_mask_key
        return policies, read_advantage(batch, self.advantage_key, mask, like, reader=reader, rows=rows)


def _of_metrics(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {METRIC + name: values for name, values in sums.items()}


def peak_of(credit: Tensor, mask: Tensor) -> Tensor:
    """(B,) the largest absolute value of (B, T) numbers in the mask; NaN if one of them is NaN."""
    return largest(zero_outside(credit.clone(), mask).abs())


def weights_measured(sums: Mapping[str, Tensor], tokens: Tensor, rollouts: Ids | None) -> dict[str, Tensor]:
    """Compute metrics of the weights of a batch, per token and per sequence.

    w are the weights of the n tokens, or the mean weight of each of the n sequences::

        weight_mean    Σ w / n              weight_max  the largest w
        ess            (Σ w)² / (n Σ w²)    effective sample size, a fraction; 0 if all weights are 0
        out_of_bounds  fraction of tokens out of bounds; for sequences the mean of their fractions

    Sequences without a token in the loss are left out. The order of the rows changes no bit of the results.
    Padding may change the rounding of a sum over tokens.

    Args:
        sums: by name, (M,), from :meth:`.importance.WeightFormula.sums`.
        tokens: (M,) tokens in the loss of each row.
        rollouts: the rows of a rollout are one sequence; None: each row is a sequence.
    """
    length = over_units(tokens, rollouts)
    mean = over_units(sums["weight"], rollouts) / length.clamp_min(1)
    parts = {
        "token": (sums["weight"], sums["squares"], sums["largest"], sums["outside"], tokens.sum()),
        "sequence": (
            mean,
            mean.square(),
            mean,
            over_units(sums["outside"], rollouts) / length.clamp_min(1),
            (length > 0).sum(),
        ),
    }
    found: dict[str, Tensor] = {}
    for by, (weight, squares, most, outside, number) in parts.items():
        total, square, number = add_up(weight), add_up(squares), number.clamp_min(1)
        found |= {
            f"weight_mean_{by}": total / number,
            f"weight_max_{by}": most.max() if len(most) else total,
            f"ess_{by}": torch.where(square > 0, total.square() / (number * square), 0.0),
            f"out_of_bounds_{by}": add_up(outside) / number,
        }
    return found
