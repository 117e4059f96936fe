"""Loss weights with which a sum over any cut of the batch is a named mean of the whole."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from headrace.transforms.ids import any_by, first_row, first_row_of_pairs, is_first, sum_by
from headrace.transforms.options import at_least, one_of

Mean = Literal["token", "sample", "turn", "rollout", "group", "constant"]


class Weighed(NamedTuple):
    """What each row weighs, and what its optimiser step holds. All (N,)."""

    weight: Tensor
    """float: of each of the row's tokens in the loss; 0 for a row that has none."""
    tokens: Tensor
    """int64: tokens in the loss of the row's step."""
    samples: Tensor
    """int64: rows of the step with a token in the loss."""
    rollouts: Tensor | None
    """int64: rollouts of the step with a token in the loss; None without `rollout_id`."""
    groups: Tensor | None
    """int64: groups of the step with a token in the loss; None without `group_id`."""
    total: Tensor
    """float64: what weight × tokens adds up to over the step; 1, but for a mean with a constant length."""


def loss_weight(
    tokens: Tensor,
    unit: Mean = "token",
    *,
    rollout_id: Tensor | None = None,
    group_id: Tensor | None = None,
    turn: Tensor | None = None,
    minibatch: Tensor | None = None,
    length: int | None = None,
    dtype: torch.dtype | None = None,
) -> Weighed:
    """Weigh rows so that Σ_i w_i Σ_t m_it ℓ_it, over any cut of a step, is a mean of the whole step.

    With t_i tokens in the loss of row i, T_u those of its turn, rollout or group u in the step, and only
    rows, turns, rollouts and groups counted that have a token in the loss::

        token     w_i = 1 / Σ_j t_j              all tokens weigh the same (DAPO, arXiv:2503.14476)
        sample    w_i = 1 / (samples · t_i)      mean of samples' token means (GRPO, arXiv:2402.03300)
        turn      w_i = 1 / (turns · T_u)        each turn of a rollout weighs one
        rollout   w_i = 1 / (rollouts · T_u)     each rollout weighs one, whatever its number of samples
        group     w_i = 1 / (groups · T_u)       each group weighs one
        constant  w_i = 1 / (rollouts · length)  no length bias (Dr. GRPO, arXiv:2503.20783)

    Without fan-out ``rollout`` is ``sample``. No device read, but in the CPU's own way to group ids.

    Args:
        tokens: (N,) int64, t.
        unit: which mean.
        rollout_id: (N,) int64, for ``turn``, ``rollout`` and ``constant``.
        group_id: (N,) int64, for ``group``.
        turn: (N,) int64, for ``turn``: rows of one rollout and one number are one.
        minibatch: (N,) int64, which optimiser step a row is in; below 0 it is in none and weighs 0. None:
            all are in one.
        length: tokens, > 0, for ``constant``: the longest response that is sampled, say.
        dtype: of the weight, floating point; None: torch's default.

    Raises:
        ValueError: an option that is none; `unit` needs ids or a length that are not given.

    Example:
        >>> weighed = loss_weight(torch.tensor([2, 3, 4]), "rollout", rollout_id=torch.tensor([7, 7, 9]))
        >>> (1 / weighed.weight).tolist()  # two rollouts, of 5 and 4 tokens
        [10.0, 10.0, 8.0]
    """
    check_mean(unit, length)
    inside = torch.ones_like(tokens, dtype=torch.bool) if minibatch is None else minibatch >= 0
    tokens = torch.where(inside, tokens, 0)
    steps = torch.zeros_like(tokens) if minibatch is None else first_row(minibatch)
    in_loss = tokens > 0
    total, samples = sum_by(steps, tokens), sum_by(steps, in_loss.long())

    def count(units: Tensor) -> Tensor:
        return sum_by(steps, (any_by(units, in_loss) & is_first(units)).long())

    # A rollout in two steps is two.
    rollout_of = None if rollout_id is None else first_row_of_pairs(steps, rollout_id)
    group_of = None if group_id is None else first_row_of_pairs(steps, group_id)
    rollouts = None if rollout_of is None else count(rollout_of)
    groups = None if group_of is None else count(group_of)
    if unit == "token":
        share = total
    elif unit == "sample":
        share = samples * tokens
    else:
        turn_of = None if rollout_of is None or turn is None else first_row_of_pairs(rollout_of, turn)
        of = {"group": group_of, "turn": turn_of}.get(unit, rollout_of)
        if of is None:
            needed = {"group": "group_id", "turn": "rollout_id and turn"}.get(unit, "rollout_id")
            raise ValueError(f"unit={unit!r} needs {needed}")
        units = {"group": groups, "rollout": rollouts, "constant": rollouts}.get(unit)
        units = count(of) if units is None else units
        share = units * (sum_by(of, tokens) if length is None else length)
    floating = dtype or torch.get_default_dtype()
    # In float64 first: past 2^24 a float32 cannot hold the denominator.
    weight = torch.where(in_loss, share.double().reciprocal(), 0.0)
    whole = (total > 0).double() if length is None else total / share.double().clamp_min(1)
    return Weighed(weight.to(floating), total, samples, rollouts, groups, whole)


def check_mean(unit: str, length: int | None) -> None:
    """Check the options of a mean.

    Raises:
        ValueError: there is no such mean, or its length is missing, no integer ≥ 1, or of no use.
    """
    one_of("unit", unit, get_args(Mean))
    at_least("length", length, 1)
    if (unit == "constant") != (length is not None):
        raise ValueError(
            f"unit='constant' divides by a length, and no other mean does; got {unit=} and {length=}"
        )
