"""Find the mean that a training step takes over its tokens, from the weight of each token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WHOLE = "the whole step"
PADDED = (
    "mean over all positions, padding included,",
    "mean over all positions but one of each row, padding included,",  # with shifted logits
)
SUM = "sum over the tokens, over a constant,"
SAME = 1e-6


@dataclass(frozen=True)
class StepTokens:
    """The loss mask of a step, and the rollout, group, micro-batch and rank of each row.

    Attributes:
        inside: (N, T) bool, the loss mask.
        rollout: (N,) int, the rollout of each row.
        group: (N,) int, the group of each row.
        micro: (N,) int, the micro-batch of each row, counted over all ranks.
        rank: (N,) int, the rank of each row.
    """

    inside: Tensor
    rollout: Tensor
    group: Tensor
    micro: Tensor
    rank: Tensor


@dataclass(frozen=True)
class TokenMean:
    """A mean over tokens, with the weight that it gives to each token.

    Attributes:
        name: a description of what the mean is over.
        scope: the scope of each denominator: the whole step, a micro-batch or a rank.
        weight: (N, T) float64, 0 outside the mask.
    """

    name: str
    scope: str
    weight: Tensor

    def __str__(self) -> str:
        return f"{self.name} of {self.scope}"


def known_means(tokens: StepTokens) -> Iterator[TokenMean]:
    """Yield the means that trainers use, first of the whole step, then of each rank and each micro-batch."""
    inside = tokens.inside.double()
    of_row = inside.sum(1)
    scopes = {WHOLE: torch.zeros_like(tokens.micro), "each rank": tokens.rank}
    if len(tokens.micro.unique()) > len(tokens.rank.unique()):
        scopes["each micro-batch"] = tokens.micro
    if len(tokens.rank.unique()) == 1:
        del scopes["each rank"]
    for scope, part in scopes.items():
        part = part.unique(return_inverse=True)[1]
        parts = int(part.max()) + 1
        rows = _sum_by(part, torch.ones_like(of_row))
        yield TokenMean("mean over the tokens", scope, inside / (parts * _sum_by(part, of_row))[:, None])
        names = {"rows": torch.arange(len(part)), "rollouts": tokens.rollout, "groups": tokens.group}
        for name, ids in names.items():
            unit = torch.stack([part, ids], 1).unique(dim=0, return_inverse=True)[1]
            length = _sum_by(unit, of_row)
            first = torch.zeros_like(of_row).index_put_((unit,), torch.ones_like(of_row))
            units = _sum_by(part[_first_of(unit)], first[: int(unit.max()) + 1], len(part))
            yield TokenMean(
                f"mean over {name} of the mean over their tokens",
                scope,
                inside / (parts * units[part] * length)[:, None],
            )
        for name, width in zip(PADDED, (inside.shape[1], inside.shape[1] - 1), strict=True):
            yield TokenMean(name, scope, inside / (parts * rows * width)[:, None])
        yield TokenMean(SUM, scope, inside / (parts * rows)[:, None])


def _sum_by(ids: Tensor, values: Tensor, size: int | None = None) -> Tensor:
    """Sum values by id. The result has one entry for each row, or for each id if a size is given."""
    sums = torch.zeros(int(ids.max()) + 1 if size is None else size, dtype=values.dtype)
    sums.index_add_(0, ids, values)
    return sums[ids] if size is None else sums


def _first_of(ids: Tensor) -> Tensor:
    """The first row of each id."""
    first = torch.full((int(ids.max()) + 1,), len(ids))
    return first.scatter_reduce_(0, ids, torch.arange(len(ids)), "amin")


def nearest_mean(
    weight: Tensor, tokens: StepTokens, means: Sequence[TokenMean] | None = None
) -> tuple[TokenMean, float, float]:
    """Find the mean whose weights are nearest to the measured ones (N, T), up to one common factor.

    NaN is an unknown weight. Tokens to which a mean gives no weight are not compared with this mean. Without
    ``means``, the means are those of :func:`known_means`.

    Returns:
        The mean, the factor, and the greatest relative difference of a token's weight.
    """
    found = []
    for mean in known_means(tokens) if means is None else means:
        known = tokens.inside & weight.isfinite() & (mean.weight != 0)
        ratio = weight[known] / mean.weight[known]
        factor = float(ratio.median()) if len(ratio) else 0.0
        apart = float((ratio / factor - 1).abs().max()) if factor else math.inf
        # A sum over a constant may have any factor; a mean has the factor 1.
        scaled = mean.name == SUM or abs(factor - 1) < SAME
        found.append((mean, factor, apart, scaled))
    # Among means that are equally near, take a mean without a factor if there is one, or else the first.
    return min(found, key=lambda each: (round(each[2], 9), not each[3]))[:3]


def odd_part(
    weight: Tensor, tokens: StepTokens, means: Sequence[TokenMean] | None = None
) -> tuple[int, float] | None:
    """Find the single micro-batch whose factor differs from all others; None if there is none.

    Return the micro-batch, and its factor, divided by the factor of the others. `weight` (N, T) and ``means``
    are as in :func:`nearest_mean`.
    """
    for mean in known_means(tokens) if means is None else means:
        factors, known = [], tokens.inside & weight.isfinite() & (mean.weight != 0)
        for part in tokens.micro.unique().tolist():
            here = known & (tokens.micro == part)[:, None]
            ratio = weight[here] / mean.weight[here]
            if not len(ratio):  # no row of the micro-batch has an advantage
                continue
            if float(ratio.max() - ratio.min()) > SAME * float(ratio.abs().max()):
                break
            factors.append((float(ratio.median()), part))
        else:
            usual = float(torch.tensor([factor for factor, _ in factors]).median())
            odd = [(part, factor / usual) for factor, part in factors if abs(factor / usual - 1) > SAME]
            if len(odd) == 1 and len(factors) > 2:
                return odd[0]
    return None
