"""Define a setting of a trainer, with the documented weight and the measured weight of each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headrace.pipeline.pipeline import Pipeline

from .means import SUM, WHOLE, known_means
from .measure import Measured, Step, XRay, xray

TOKENS_OF_STEP = f"mean over the tokens of {WHOLE}"
TOKENS_OF_PART = "mean over the tokens of each micro-batch"
ROWS_OF_STEP = f"mean over rows of the mean over their tokens of {WHOLE}"
ROWS_OF_PART = "mean over rows of the mean over their tokens of each micro-batch"
SUM_OF_STEP = f"{SUM} of {WHOLE}"
RECIPE = "the recipe's weights"
# Rows of very different lengths, so that a dependence on micro-batches shows; and the ratios of the curve.
LENGTHS = (2, 12, 3, 4, 2, 16, 2, 5, 3, 9, 2, 4)
LONGEST = max(LENGTHS)
RATIOS = (0.05, 0.2, 0.4, 0.6, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.29, 1.6, 2.5, 3.5, 4.9, 5.1, 20.0)


@dataclass(frozen=True)
class Setting:
    """A training step, and what its project documents about it.

    Attributes:
        name: the setting as users write it.
        step: the step for :func:`xray`.
        documented: the documented mean over tokens, by its name in ``XRay``. Empty: weights are compared with
            the mean that is found.
        constant: the documented factor of those weights.
        pipeline: the pipeline whose weights are expected, instead of a mean.
        note: what the project says about unexpected results.
        curve: whether the clipping curve is measured.
        dtype: dtype of the table.
    """

    name: str
    step: Step
    documented: str
    constant: float = 1.0
    pipeline: Pipeline | None = None
    note: str = ""
    curve: bool = False
    dtype: torch.dtype = torch.float64

    def measure(self, cuts: Sequence[int], *, curve: bool = True) -> MeasuredSetting:
        """Measure the step for each number of micro-batches, and its curve if the setting has one."""
        options: dict[str, Any] = {"lengths": LENGTHS, "dtype": self.dtype}
        found = xray(self.step, self.pipeline, cuts=cuts, **options)
        docs: dict[str, Any] = {"documented": self.documented, "constant": self.constant, "note": self.note}
        if curve and self.curve:
            shifts = [-math.log(ratio) for ratio in RATIOS]
            shifted = xray(self.step, self.pipeline, cuts=cuts[:1], shifts=shifts, **options)
            docs["curve"] = shifted.curve()
        return MeasuredSetting(self.name, found, **docs)


@dataclass(frozen=True)
class MeasuredSetting:
    """The measurements of a setting.

    Attributes:
        name: see :class:`Setting`.
        xray: the runs with each number of micro-batches.
        documented: see :class:`Setting`.
        constant: see :class:`Setting`.
        note: see :class:`Setting`.
        curve: the result of :meth:`XRay.curve`; empty: not measured.
    """

    name: str
    xray: XRay
    documented: str = ""
    constant: float = 1.0
    note: str = ""
    curve: dict[float, tuple[float, float]] = field(default_factory=dict)

    def share(self, run: Measured, *, of_step: bool = False) -> Tensor:
        """(N, T) the coefficient of each token, divided by the documented one; NaN if the divisor is 0.

        Args:
            run: one of the runs.
            of_step: whether the mean over the whole step replaces a documented mean over each micro-batch.
        """
        expected = run.expected
        if expected is None and not self.documented:
            weight = torch.zeros(run.coefficient.shape, dtype=torch.float64)
            found = self.xray.mean.weight[self.xray.runs[0].tokens.inside]
            weight[run.tokens.inside] = found  # wherever the padding is
            expected = weight * self.xray.factor * run.advantage
        if expected is None:
            means = {str(mean): mean.weight for mean in known_means(run.tokens)}
            documented = self.documented
            if of_step or documented not in means:  # one micro-batch is the step
                documented = documented.replace("each micro-batch", WHOLE)
            expected = means[documented] * self.constant * run.advantage
        known = run.tokens.inside & (expected != 0)
        return torch.where(known, run.coefficient / torch.where(known, expected, 1.0), torch.nan)

    def over_documented(self) -> tuple[float, float]:
        """The least and greatest ratio of measured to documented weights, over all runs."""
        every = torch.cat([share[share.isfinite()] for share in map(self.share, self.xray.runs)])
        return float(every.min()), float(every.max())

    def over_one_cut(self) -> dict[int, tuple[float, float]]:
        """By number of micro-batches, the least and greatest weight of a token relative to the first run."""
        first = self.xray.runs[0]
        found = {}
        for run in self.xray.runs:
            ratio = run.in_order / first.in_order
            ratio = ratio[ratio.isfinite()]
            found[run.cut] = float(ratio.min()), float(ratio.max())
        return found

    def plain(self) -> dict[str, Any]:
        """Return the data for JSON, rounded to five decimals."""
        low, high = map(rounded, self.over_documented())
        return {
            "setting": self.name,
            "documented": self.documented,
            "constant": rounded(self.constant),
            "over_documented": [low, high],
            "over_one_micro_batch": {
                str(cut): [rounded(low), rounded(high)] for cut, (low, high) in self.over_one_cut().items()
            },
            "verdict": self.xray.verdict,
            "note": self.note,
            "curve": {
                f"{ratio:.4g}": [rounded(up), rounded(down)] for ratio, (up, down) in self.curve.items()
            },
        }


def table_log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    """(N, T − 1) the log-probability of each token except the first, given the previous token."""
    shown: Tensor = model(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
    return shown.squeeze(-1)


def rounded(value: float) -> float:
    """Round to five decimals, and −0 to 0."""
    return round(value, 5) + 0.0
