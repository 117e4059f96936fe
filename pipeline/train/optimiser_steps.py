"""Optimiser steps over minibatches, each with a forward pass per micro-batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, get_args

import torch
import torch.distributed as dist
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor, nn

from headrace.transforms import BatchError, pack, split_microbatches, weighted_loss
from headrace.transforms.distributed import resolve_group
from headrace.transforms.options import above_zero, nested_key, one_of, takes_options
from headrace.transforms.schema import MICROBATCH, RANK, ROW, STEP_WEIGHT, has_key
from headrace.transforms.tensordicts import device_of
from headrace.transforms.tokens import loss_tokens

from .optimiser_record import OptimiserRecord

SAMPLER, OLD, WEIGHTS = ("log_probs", "full"), ("old_log_probs", "full"), "importance_weight"
CLOSE = 1e-3  # of the weight of a step; float32 weights add up to 1e-6 of it
Packed = Literal["pack", "tree"]
Transform = Callable[[TensorDictBase], TensorDictBase]


@takes_options
def optimise(
    minibatches: Iterable[TensorDictBase],
    loss: Callable[[TensorDictBase], TensorDictBase],
    optimizer: torch.optim.Optimizer,
    *,
    reduce: Callable[[TensorDictBase, TensorDictBase], Tensor] = weighted_loss,
    transform: Transform | Packed | None = None,
    max_grad_norm: float | None = None,
    process_group: dist.ProcessGroup | str | None = None,
    loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
    log_prob_key: NestedKey | None = ("log_probs", "full"),
    weight_key: NestedKey = "loss_weight",
    record: OptimiserRecord | None = None,
) -> int:
    """Take one optimiser step per minibatch, whose micro-batches' gradients add up.

    ::

        gradient = Σ_ranks Σ_micro-batches ∇ reduce(loss(micro-batch), micro-batch)

    With the weights of :class:`LossWeight` this is the gradient of the mean that it names, over the whole
    minibatch. An optimiser step without a token in the loss, on any rank, is not taken.

    Args:
        minibatches: TensorDicts ``[n]``, as a run of the pipeline yields them.
        loss: makes of a micro-batch a TensorDict with entries named ``loss_*`` to minimise, such as TorchRL's
            ``GRPOLoss(aggregation="none")``.
        optimizer: of the loss's parameters.
        reduce: makes a scalar of the loss's terms and the micro-batch. :func:`total_loss` where the weights
            are folded into the advantage, or there are none.
        transform: applied to each micro-batch before the loss: a function, ``pack`` (:func:`pack`), or
            ``tree``, for which tokens that its rows share go through the model once.
        max_grad_norm: clips the gradient of an optimiser step; None: not clipped.
        process_group: of ranks whose gradients are summed; a process group, or ``world``. None: there is one
            rank, or the model sums or averages them itself, as DDP does.
        loss_mask_key: (n, T) bool, by which tokens in the loss are counted.
        log_prob_key: (n, T) float, as LossWeight reads it; None: not looked at.
        weight_key: (n,) float, by which the rows of a step are known to belong together.
        record: takes the learning rate, the loss, the gradient's norm and what else the loss measures, for
            ``make_report(run, numbers=record.numbers)``; None: nothing is recorded.

    Returns:
        The number of optimiser steps taken.

    Raises:
        TypeError: `minibatches` is one TensorDict.
        ValueError: `max_grad_norm` is not above 0; `transform` is another word.
        BatchError: a gradient that is not finite, before the step is taken; a batch of several minibatches
            in place of a minibatch; rows that were not weighed together, such as a sample of a replay buffer;
            rows that the loss would read wrongly (:func:`check_loss`).
        MissingKeyError: there are no weights (see `reduce`), or nothing says which tokens train.
    """
    above_zero("max_grad_norm", max_grad_norm)
    if isinstance(minibatches, TensorDictBase):
        raise TypeError(
            "optimise takes minibatches, not a batch, whose rows it would take for minibatches: give it "
            "pipeline.minibatches(collected), or split_minibatches(batch) of a batch that a pipeline has "
            "processed"
        )
    transform = transform_of(transform, loss_mask_key)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    group = resolve_group(process_group)
    keys = {"loss_mask_key": loss_mask_key, "log_prob_key": log_prob_key, "weight_key": weight_key}
    stream, steps, began = iter(minibatches), 0, time.perf_counter()
    while (minibatch := next(stream, None)) is not None:
        cut = has_key(minibatch, MICROBATCH)
        # A rank without rows takes part in the step with no forward pass.
        microbatches = list(split_microbatches(minibatch)) if cut else [minibatch][: len(minibatch)]
        tokens = count_step(minibatch, group=group, **keys)
        del minibatch  # else two of them would be in memory when the next one is gathered
        if not tokens:
            continue
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)  # the loss of the step
        while microbatches:
            microbatch = microbatches.pop(0)
            trains = None if record is None else loss_tokens(microbatch, loss_mask_key, log_prob_key)
            if transform is not None:
                microbatch = transform(microbatch)
            check_loss(loss, microbatch)
            terms = loss(microbatch)
            scalar = reduce(terms, microbatch)
            scalar.backward()
            total += scalar.detach()
            if record is not None and trains is not None:
                record.add_terms(terms, trains)
            del microbatch, terms, scalar, trains
        for parameter in parameters if group is not None else ():
            if parameter.requires_grad:
                if parameter.grad is None:  # it may have one on another rank
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)
        if group is not None:
            dist.all_reduce(total, group=group)
        norm = nn.utils.clip_grad_norm_(parameters, math.inf if max_grad_norm is None else max_grad_norm)
        if not bool(torch.isfinite(norm)):
            raise BatchError(
                f"the gradient of a step must be finite; that of step {steps} of this batch has the norm "
                f"{float(norm)}. Are advantages and behaviour log-probabilities finite? Nothing was changed"
            )
        if record is not None:
            rates = [float(one["lr"]) for one in optimizer.param_groups if "lr" in one]
            lr = max(rates, default=None)
            record.add_step(total, lr=lr, norm=float(norm), tokens=tokens, clips=max_grad_norm)
        optimizer.step()
        steps += 1
    if record is not None:
        record.add_seconds("optimise", time.perf_counter() - began)
    return steps


def transform_of(
    transform: Transform | str | None, loss_mask_key: NestedKey = ("masks", "all_assistant_mask")
) -> Transform | None:
    """What a word stands for; what is no word stays as it is.

    Raises:
        ValueError: there is no such word.
    """
    if not isinstance(transform, str):
        return transform
    tree = one_of("transform", transform, get_args(Packed)) == "tree"
    return partial(pack, tree=tree, loss_mask_key=loss_mask_key)


def total_loss(
    terms: TensorDictBase,
    batch: TensorDictBase | None = None,
    *,
    weight_key: NestedKey = "loss_weight",
) -> Tensor:
    """The sum of a loss module's ``loss_*`` entries, each a mean already.

    Args:
        terms: of the loss.
        batch: of which it is; None: not looked at.
        weight_key: a column that it must not have, since the sum would ignore the weights in it.

    Raises:
        BatchError: an entry is per token, or the batch carries weights.

    Example:
        >>> from tensordict import TensorDict
        >>> float(total_loss(TensorDict({"loss_objective": torch.tensor(2.0), "ESS": torch.tensor(1.0)})))
        2.0
    """
    if batch is not None and has_key(batch, weight_key):
        raise BatchError(
            f"the rows carry weights, {weight_key!r} (weight_key), which a sum of means ignores: add up by "
            "weighted_loss, set fold on LossWeight, or take the column out where it is not for the loss"
        )
    losses = {k: value for k, value in terms.items() if k.startswith("loss_") and isinstance(value, Tensor)}
    if not losses:
        raise BatchError(f"a loss has entries named loss_*; found {sorted(map(str, terms.keys()))}")
    if longer := [f"{key!r} {tuple(value.shape)}" for key, value in losses.items() if value.numel() != 1]:
        raise BatchError(
            f"without weights a loss is made of means; found {', '.join(longer)}: set "
            "aggregation='token_mean' on GRPOLoss, or weigh rows by LossWeight and add up by weighted_loss"
        )
    return torch.stack([value.squeeze() for value in losses.values()]).sum()


def check_loss(loss: Callable, rows: TensorDictBase) -> None:
    """Refuse rows that a loss would read wrongly.

    TorchRL's losses say in `tensor_keys` where they read, also within DDP and its like. Of other losses, and
    of columns that go by other names than the default, nothing is known here.

    Raises:
        BatchError: it corrects for the sampler a second time, or takes a token's advantage for another's.
    """
    while not hasattr(loss, "tensor_keys") and hasattr(loss, "module"):
        loss = loss.module
    keys = getattr(loss, "tensor_keys", None)
    # An advantage that was weighed by π_old / μ is for a ratio π / π_old; most losses measure from μ.
    from_sampler = nested_key(getattr(keys, "sample_log_prob", None)) == SAMPLER
    if from_sampler and has_key(rows, WEIGHTS) and has_key(rows, OLD):
        raise BatchError(
            f"the advantage is weighed by {WEIGHTS!r}, π_old / μ, and the loss measures its ratio from μ, "
            f"{SAMPLER!r}: the correction would count twice. Let it read π_old: "
            f"loss.set_keys(sample_log_prob={OLD!r})"
        )
    # GRPOLoss pads ragged log-probabilities on the left, and a ragged advantage on the right.
    key = nested_key(getattr(keys, "advantage", None))
    if key is None or not isinstance(rows, LazyStackedTensorDict) or not has_key(rows, key):
        return
    if len({row.get(key).shape for row in rows.tensordicts}) > 1:
        raise BatchError(
            f"an advantage by token, {key!r}, is of dense rows: of ragged ones {type(loss).__name__} pads it "
            "on the right and log-probabilities on the left, and each token would get another's. Put "
            "DenseRows in front (rows=llm), or optimise(..., transform=pack)"
        )


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
    device = device_of(minibatch)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # tokens; weight × tokens; rows there again
    ends = torch.full((2, 2), -torch.inf, dtype=torch.float64, device=device)  # greatest, and least × −1
    if len(minibatch):
        tokens = loss_tokens(minibatch, loss_mask_key, log_prob_key)
        sums[0] = tokens.sum()
        weighed = has_key(minibatch, weight_key)
        if weighed and has_key(minibatch, STEP_WEIGHT):
            sums[1] = (minibatch.get(weight_key).reshape(-1).double() * tokens).sum()
        if has_key(minibatch, ROW):  # copies that fill up a micro-batch have no number
            rows = minibatch.get(ROW).sort().values
            sums[2] = ((rows[1:] == rows[:-1]) & (rows[1:] >= 0)).sum()
        says = weighed and has_key(minibatch, "num_tokens")
        for place, key in enumerate(("num_tokens", STEP_WEIGHT if says else None)):
            if has_key(minibatch, key):
                column = minibatch.get(key).reshape(-1).double()
                ends[place] = torch.stack([column.amax(), -column.amin()])
    if group is not None:  # ranks take a step together: else gradients of different steps would add up
        dist.all_reduce(sums, group=group)
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    found, weighs, twice, most, least, heaviest, lightest = torch.cat([sums, ends.flatten()]).tolist()
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
