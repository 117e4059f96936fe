"""The reshape formula of the advantage in a low dtype, for groups of one size that are contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.transforms.table import Ids

from .baselines import Formula, largest_to_square, with_eps


def reshaped(reward: Tensor, groups: Ids, formula: Formula, dtype: torch.dtype) -> Tensor | None:
    """Compute the advantage in a smaller dtype than float64, with the same bits as the reshape formula.

    ::

        x = r.view(P, G);  x -= x.mean(-1);  x / (x.std(-1) + eps)

    The std is computed from the centred rewards. From the uncentred rewards, it would differ in the last bit.
    Equal rewards get exactly 0; rounding errors would give up to 0.9 after the division. slime and miles
    use float32.

    Args:
        reward: (V,) float64, one per rollout, in the order of their rows.
        groups: group ids of the rollouts.
        formula: baseline ``mean`` with scale ``group`` or ``none``.
        dtype: dtype of the computation.

    Returns:
        (V,) float64. None if the formula is another one, if groups are not contiguous, differ in size or have
        one rollout, or if squares of the rewards do not fit into `dtype`.

    Example:
        >>> ids = Ids(torch.tensor([5, 5, 2, 2]))
        >>> reshaped(torch.tensor([1.0, 3.0, 0.0, 8.0]).double(), ids, Formula(scale="none"), torch.float32)
        tensor([-1.,  1., -4.,  4.], dtype=torch.float64)
    """
    known = formula.baseline == "mean" and formula.scale in ("group", "none") and not formula.shift
    known = known and formula.baseline_of == "group"
    size = int(groups.count[0]) if groups.n else 0
    together = known and size > 1 and bool((groups.count == size).all())
    together = together and int((groups.of[1:] != groups.of[:-1]).sum()) == groups.n - 1
    if not together or float(reward.abs().max()) >= largest_to_square(len(reward), dtype):
        return None
    x = reward.to(dtype).view(-1, size)
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    credit = (x - x.mean(-1, keepdim=True)).masked_fill_(low == high, 0.0)
    if formula.scale == "group":
        scale = credit.std(-1, keepdim=True, correction=formula.ddof)
        credit = credit / with_eps(scale, formula.eps, formula.eps_mode).masked_fill(scale == 0, float("inf"))
    if formula.clip is not None:
        credit = credit.clamp(*formula.clip)
    return credit.flatten().double()
