"""Whether the rows of an optimiser step are those that were weighed together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms import BatchError
from headrace.transforms.rows import device_of
from headrace.transforms.schema import RANK, ROW, STEP_WEIGHT, has_key
from headrace.transforms.tokens import loss_tokens

CLOSE = 1e-3  # of the weight of a step; float32 weights add up to 1e-6 of it


def count_step(
    minibatch: TensorDictBase,
    *,
    loss_mask_key: NestedKey,
    log_prob_key: NestedKey | None,
    weight_key: NestedKey,
    group: dist.ProcessGroup | None,
) -> float:
    """The tokens in the loss of an optimiser step, on all ranks of a group.

    Where rows say for which step they were weighed (``num_tokens``, ``("headrace", "step_weight")``), they
    must be the rows of that step: as many tokens, whose weights add up to as much, and no row twice. One
    device read, and with a group two collectives.

    Raises:
        BatchError: they are not, as a sample of a replay buffer is not.
        MissingKeyError: nothing says which tokens train.
    """
    sums, ends = torch.zeros(3, dtype=torch.float64), torch.full((4,), -torch.inf, dtype=torch.float64)
    if len(minibatch):
        tokens = loss_tokens(minibatch, loss_mask_key, log_prob_key)
        weight, repeated = _weight(minibatch, tokens, weight_key), _repeated(minibatch)
        sums = torch.stack([tokens.sum().double(), weight, repeated])
        says = has_key(minibatch, weight_key) and has_key(minibatch, "num_tokens")
        ends = torch.cat([_ends(minibatch, "num_tokens"), _ends(minibatch, STEP_WEIGHT if says else None)])
    if group is not None:  # ranks take a step together: else gradients of different steps would add up
        sums, ends = sums.to(device_of(minibatch)), ends.to(device_of(minibatch))
        dist.all_reduce(sums, group=group)
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    found, weighs, twice, most, least, heaviest, lightest = torch.cat([sums, ends]).tolist()
    # Rows may be spread over ranks of which nothing is known here.
    part = group is None and (dist.is_initialized() or has_key(minibatch, RANK))
    wrong = twice > 0 or _differs(found, most, -least, 0.0, part)
    if wrong or _differs(weighs, heaviest, -lightest, CLOSE, part):
        raise BatchError(
            f"the rows of a step are those that were weighed together; these have {found:g} tokens in the "
            f"loss and weigh {weighs:.4g}, {twice:g} of them are there twice, and they were weighed for a "
            f"step of {most:g} tokens (num_tokens) that weighs {heaviest:.4g}. Weigh what is trained: first, "
            "second = pipeline.halves(), the second for what a buffer samples"
        )
    return found


def _differs(found: float, most: float, least: float, share: float, part: bool) -> bool:
    """Whether a sum is not what all rows say that it is; less will do of a part of the rows."""
    if most == -torch.inf:
        return False  # nobody says
    slack = share * abs(most)
    return most - least > slack or found > most + slack or (found < most - slack and not part)


def _weight(minibatch: TensorDictBase, tokens: Tensor, weight_key: NestedKey) -> Tensor:
    """Scalar float64: weight × tokens over the rows."""
    if not has_key(minibatch, weight_key) or not has_key(minibatch, STEP_WEIGHT):
        return torch.zeros((), dtype=torch.float64, device=tokens.device)
    return (minibatch.get(weight_key).reshape(-1).double() * tokens).sum()


def _repeated(minibatch: TensorDictBase) -> Tensor:
    """Scalar float64: rows that are there again; copies that fill up a micro-batch have no number."""
    if not has_key(minibatch, ROW):
        return torch.zeros((), dtype=torch.float64, device=device_of(minibatch))
    rows = minibatch.get(ROW).sort().values
    return ((rows[1:] == rows[:-1]) & (rows[1:] >= 0)).sum().double()


def _ends(minibatch: TensorDictBase, key: NestedKey | None) -> Tensor:
    """(2,) float64: the largest of a column, and the smallest with its sign changed; −∞ where it is not."""
    if not has_key(minibatch, key):
        return torch.full((2,), -torch.inf, dtype=torch.float64, device=device_of(minibatch))
    column = minibatch.get(key).reshape(-1).double()
    return torch.stack([column.amax(), -column.amin()])
