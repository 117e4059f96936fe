"""Optimiser steps over minibatches, with gradient accumulation over micro-batches."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from headrace.transforms import BatchError, pack, split_microbatches, weighted_loss
from headrace.transforms.table import BatchTransform, resolve_group
from headrace.transforms.table.options import above_zero, nested_key, takes_options
from headrace.transforms.table.schema import (
    LOSS_WEIGHTS,
    MICROBATCH,
    RANK,
    ROW,
    STEP_WEIGHT,
    STEP_WEIGHTS,
    has_key,
)
from headrace.transforms.table.tensordicts import device_of
from headrace.transforms.table.tokens import loss_tokens

from .optimiser_record import OptimiserRecord

SAMPLER, OLD, WEIGHTS = ("log_probs", "full"), ("old_log_probs", "full"), "importance_weight"
AVERAGE = {
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
}  # classes that average gradients
CLOSE = 1e-3  # relative tolerance of a step's sum of weights; float32 sums differ by about 1e-6
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
    """Take one optimiser step for each minibatch, and accumulate gradients over its micro-batches.

    ::

        gradient = Σ_ranks Σ_micro-batches ∇ reduce(loss(micro-batch), micro-batch)

    With the weights of :class:`LossWeight` this is the gradient of the mean that its `unit` names, over the
    whole minibatch of all ranks. A step in which no rank has a token in the loss, or in a component of the
    loss, is skipped. With DDP, if a rank may have no rows, all ranks need equally many micro-batches: set
    ``remainder="pad"``, or ``carry``.

    Args:
        minibatches: TensorDicts ``[n]``, such as those of a pipeline's run.
        loss: function from a micro-batch to a TensorDict with entries ``loss_*`` to minimise, such as
            TorchRL's ``GRPOLoss(aggregation="none")``.
        optimizer: optimiser of the loss's parameters.
        reduce: function from the loss's terms and the micro-batch to a scalar. Give :func:`total_loss` if the
            weights are folded into the advantage, or if there are none.
        transform: a transform of each micro-batch before the loss: a function, ``pack`` (:func:`pack`), or
            ``tree``, which runs tokens that rows share through the model once.
        max_grad_norm: bound to which the gradient norm of an optimiser step is clipped. None: no clipping.
        process_group: ranks over which gradients are summed; a process group, or ``world``. None: one rank,
            or the model reduces gradients itself, as DDP does.
        loss_mask_key: key of the loss mask, (n, T) bool. It says which tokens are counted.
        log_prob_key: key of (n, T) float. Tokens with non-finite values are out of the loss, as for
            LossWeight. None: not read.
        weight_key: key of the loss weights, (n,) float. They are used to check the rows of a step.
        record: gets the learning rate, the loss, the gradient norm and other numbers of the loss, for
            ``make_report(run, numbers=record.numbers)``. None: nothing is recorded.

    Returns:
        The number of optimiser steps taken.

    Warns:
        UserWarning: the weights are for gradients that are summed over the ranks, but DDP or FSDP averages
            them, or the reverse (`gradients` of LossWeight). Weights with ``unit="constant"`` and folded
            weights are not checked.

    Raises:
        TypeError: `minibatches` is a single TensorDict, or a pipeline.
        ValueError: `max_grad_norm` is not above 0; or `transform` is an unknown word.
        BatchError: the gradient is not finite (raised before the step); or a minibatch contains several
            minibatches; or its rows are not those of one weighted step, as in a sample of a replay buffer; or
            the loss would read the rows wrongly (:func:`check_loss`).
        MissingKeyError: the weights (see `reduce`) or the loss mask are missing.
    """
    above_zero("max_grad_norm", max_grad_norm)
    if isinstance(minibatches, TensorDictBase | BatchTransform):
        raise TypeError(
            f"optimise needs an iterable of minibatches; got one {type(minibatches).__name__}. Give it "
            "pipeline.minibatches(collected), or split_minibatches(batch) of a batch that a pipeline has "
            "processed"
        )
    transform = transform_of(transform, loss_mask_key)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    group = resolve_group(process_group)
    keys = {"loss_mask_key": loss_mask_key, "log_prob_key": log_prob_key, "weight_key": weight_key}
    stream, steps, began = iter(minibatches), 0, time.perf_counter()
    averaging, seen = set[Averaging](), False  # the modules that ran in the first micro-batch
    while (minibatch := next(stream, None)) is not None:
        cut = has_key(minibatch, MICROBATCH)
        # A rank without rows runs no forward pass, but takes part in the collective operations below.
        microbatches = list(split_microbatches(minibatch)) if cut else [minibatch][: len(minibatch)]
        tokens, weights, shares = count_step(minibatch, group=group, **keys)
        del minibatch  # so that only one minibatch is in memory when the next is gathered
        if not tokens and not shares:
            continue
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)  # the loss of the step
        while microbatches:
            microbatch = microbatches.pop(0)
            trains = None if record is None else loss_tokens(microbatch, loss_mask_key, log_prob_key)
            if transform is not None:
                microbatch = transform(microbatch)
            check_loss(loss, microbatch)
            with nullcontext() if seen else noting(averaging):
                terms = loss(microbatch)
            seen = True
            scalar = reduce(terms, microbatch)
            scalar.backward()
            total += scalar.detach()
            if record is not None and trains is not None:
                record.add_terms(terms, trains)
            del microbatch, terms, scalar, trains
        check_gradients(weights, averaging, group)
        for parameter in parameters if group is not None else ():
            if parameter.requires_grad:
                if parameter.grad is None:  # another rank may have a gradient
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)
        if group is not None:
            dist.all_reduce(total, group=group)
        norm = nn.utils.clip_grad_norm_(parameters, math.inf if max_grad_norm is None else max_grad_norm)
        if not bool(torch.isfinite(norm)):
            raise BatchError(
                f"the gradient of an optimiser step must be finite; step {steps} of this batch has the norm "
                f"{float(norm)}. The parameters are unchanged. Check that advantages and the sampler's "
                "log-probabilities are finite"
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
    transform: Transform | Packed | None, loss_mask_key: NestedKey = ("masks", "all_assistant_mask")
) -> Transform | None:
    """Return the transform that ``pack`` or ``tree`` names; a function is returned unchanged."""
    if not isinstance(transform, str):
        return transform
    return partial(pack, tree=transform == "tree", loss_mask_key=loss_mask_key)


def total_loss(
    terms: TensorDictBase,
    batch: TensorDictBase | None = None,
    *,
    weight_key: NestedKey = "loss_weight",
) -> Tensor:
    """Sum the ``loss_*`` entries of a loss, which must be scalars.

    Args:
        terms: output of the loss.
        batch: input of the loss, to check that it has no weights. None: not checked.
        weight_key: column of loss weights, which this sum would ignore.

    Raises:
        BatchError: an entry has one value for each token, or the batch has weights.

    Example:
        >>> from tensordict import TensorDict
        >>> float(total_loss(TensorDict({"loss_objective": torch.tensor(2.0), "ESS": torch.tensor(1.0)})))
        2.0
    """
    if batch is not None and has_key(batch, weight_key):
        raise BatchError(
            f"the rows have loss weights, {weight_key!r} (weight_key), which total_loss ignores. Use "
            "weighted_loss, or set fold on LossWeight, or remove the column if it is not for the loss"
        )
    losses = {k: value for k, value in terms.items() if k.startswith("loss_") and isinstance(value, Tensor)}
    if not losses:
        raise BatchError(f"a loss must have entries named loss_*; found {sorted(map(str, terms.keys()))}")
    if longer := [f"{key!r} {tuple(value.shape)}" for key, value in losses.items() if value.numel() != 1]:
        raise BatchError(
            f"total_loss needs scalar entries; found {', '.join(longer)}. Set aggregation='token_mean' on "
            "GRPOLoss, or add LossWeight to the pipeline and use weighted_loss"
        )
    return torch.stack([value.squeeze() for value in losses.values()]).sum()


def check_loss(loss: Callable, rows: TensorDictBase) -> None:
    """Refuse rows that a loss would read wrongly.

    TorchRL's losses list the columns that they read in `tensor_keys`, even inside DDP. Other losses, and
    columns without their default names, are not checked.

    Raises:
        BatchError: the loss would correct for the sampler a second time, or would apply a token's advantage
            to another token.
    """
    while not hasattr(loss, "tensor_keys") and hasattr(loss, "module"):
        loss = loss.module
    keys = getattr(loss, "tensor_keys", None)
    # An advantage times π_old / μ needs the ratio π / π_old. By default a loss computes π / μ.
    from_sampler = nested_key(getattr(keys, "sample_log_prob", None)) == SAMPLER
    if from_sampler and has_key(rows, WEIGHTS) and has_key(rows, OLD):
        raise BatchError(
            f"the advantage has been multiplied by {WEIGHTS!r}, π_old / μ, and the loss computes its ratio "
            f"from μ, {SAMPLER!r}, so the correction would count twice. Make the loss read π_old: "
            f"loss.set_keys(sample_log_prob={OLD!r})"
        )
    # GRPOLoss pads ragged log-probabilities on the left, and a ragged advantage on the right.
    key = nested_key(getattr(keys, "advantage", None))
    if key is None or not isinstance(rows, LazyStackedTensorDict) or not has_key(rows, key):
        return
    if len({row.get(key).shape for row in rows.tensordicts}) > 1:
        raise BatchError(
            f"token advantages, {key!r}, need dense rows: in ragged rows, {type(loss).__name__} pads "
            "advantages on the right and log-probabilities on the left, so that tokens get each other's "
            "advantages. Put DenseRows first (rows=llm), or use optimise(..., transform=pack)"
        )


class Averaging(NamedTuple):
    """A module that averages the gradients of ranks."""

    name: str
    ranks: int


@contextmanager
def noting(averaging: set[Averaging]) -> Iterator[None]:
    """Collect the modules of DDP and FSDP that run within the context, even inside a function."""
    if not dist.is_initialized():
        yield
        return

    def note(module: nn.Module, _: Any) -> None:
        if named := AVERAGE.intersection(base.__name__ for base in type(module).__mro__):
            averaging.add(Averaging(min(named), dist.get_world_size(getattr(module, "process_group", None))))

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


def check_gradients(
    weights: float, averaging: Collection[Averaging], group: dist.ProcessGroup | None
) -> None:
    """Warn if a step's weights do not fit the way in which the gradients of ranks are combined.

    The weights of a step sum to 1 if gradients are summed, and to the number of ranks if they are averaged.

    Args:
        weights: Σ weight × tokens of the step, over all ranks.
        averaging: the modules that ran.
        group: ranks over which the gradients are summed; None: not summed.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    needed, combined = 1, "summed, by optimise(process_group=...)"
    if group is None and averaging:
        (name, ranks), *_ = sorted(averaging)
        needed, combined = ranks, f"averaged, by {name}"
    if ranks > 1 and weights in (1, ranks) and weights != needed:
        warnings.warn(
            f"the gradients of {ranks} ranks are {combined}, and the loss weights of a step sum to "
            f"{weights:g}, so the gradient is {weights / needed:g} times that of the mean: set "
            f"pipeline.stages.weight.gradients={'sum' if needed == 1 else 'mean'}",
            stacklevel=3,
        )


def count_step(
    minibatch: TensorDictBase,
    *,
    loss_mask_key: NestedKey,
    log_prob_key: NestedKey | None,
    weight_key: NestedKey,
    group: dist.ProcessGroup | None,
) -> tuple[float, float, float]:
    """Count the tokens in the loss of an optimiser step, over all ranks, and its weights.

    Weighted rows carry the number of tokens and the sum of weights of their step (``num_tokens`` and
    ``("headrace", "step_weight")``). The rows must then have these sums, and no row may occur twice. The
    weights of each component must have the sum that the rows carry for it, too. The device is read once. If
    there is a group, two collective operations are needed.

    Returns:
        The number of tokens; Σ weight × tokens of the step, or −∞ if the rows do not carry this sum; and the
        number of components with a token in the step.

    Raises:
        BatchError: the rows are not those of one step, as in a sample of a replay buffer.
        MissingKeyError: the loss mask is missing.
    """
    device = device_of(minibatch)
    # tokens; weight × tokens; duplicate rows; Σ over components of weights / (their sum in the step)
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    ends = torch.full(
        (3, 2), -torch.inf, dtype=torch.float64, device=device
    )  # maximum, and minus the minimum
    if len(minibatch):
        tokens = loss_tokens(minibatch, loss_mask_key, log_prob_key)
        sums[0] = tokens.sum()
        weighed = has_key(minibatch, weight_key)
        if weighed and has_key(minibatch, STEP_WEIGHT):
            sums[1] = (minibatch.get(weight_key).reshape(-1).double() * tokens).sum()
        if has_key(minibatch, ROW):  # padding rows have a negative number
            rows = minibatch.get(ROW).sort().values
            sums[2] = ((rows[1:] == rows[:-1]) & (rows[1:] >= 0)).sum()
        says = weighed and has_key(minibatch, "num_tokens")
        for place, key in enumerate(("num_tokens", STEP_WEIGHT if says else None)):
            if has_key(minibatch, key):
                column = minibatch.get(key).reshape(-1).double()
                ends[place] = torch.stack([column.amax(), -column.amin()])
        if has_key(minibatch, LOSS_WEIGHTS):
            sums[3], column = _shares_of_components(minibatch)
            ends[2] = torch.stack([column.amax(), -column.amin()])
    if group is not None:  # ranks take each step together
        dist.all_reduce(sums, group=group)
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    found, weighs, twice, shares, *of_rows = torch.cat([sums, ends.flatten()]).tolist()
    most, least, heaviest, lightest, highest, lowest = of_rows
    # Without a group, other ranks may have further rows of the step.
    part = group is None and (dist.is_initialized() or has_key(minibatch, RANK))
    wrong = twice > 0 or _differs(found, most, -least, 0.0, part)
    if _differs(shares, highest, -lowest, CLOSE, part):
        raise BatchError(
            f"the rows must be those of one weighted step, with all tokens of {highest:g} components of the "
            f"loss; found the weights of {shares:.4g}. For samples of a replay buffer use first, second = "
            "pipeline.halves(), and run the second on each sample"
        )
    if wrong or _differs(weighs, heaviest, -lightest, CLOSE, part):
        raise BatchError(
            f"the rows must be those of one weighted step: {most:g} tokens (num_tokens) with weights that "
            f"sum to {heaviest:.4g}; found {found:g} tokens in the loss with weights that sum to "
            f"{weighs:.4g}, and {twice:g} duplicate rows. For samples of a replay buffer use first, second = "
            "pipeline.halves(), and run the second on each sample"
        )
    # With DDP, a rank without tokens of the step must take part in the step, too.
    return max(found, most), heaviest, max(shares, highest)


def _shares_of_components(minibatch: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Σ over components of weights / (their sum in the step). Each component with tokens adds 1.

    Returns:
        The sum; and (n,) the number of components with tokens in the step of each row. If rows do not carry
        the sums of their step: the sum of all weights, and −∞.
    """
    rows = minibatch.tensordicts if isinstance(minibatch, LazyStackedTensorDict) else [minibatch]
    share, counts = torch.zeros((), dtype=torch.float64, device=device_of(minibatch)), []
    for row in rows:
        of_row = {name: each.double().sum(-1) for name, each in row.get(LOSS_WEIGHTS).items()}
        if (sums := row.get(STEP_WEIGHTS, None)) is None:
            return torch.stack([each.sum() for each in of_row.values()]).sum(), share.new_full(
                (1,), -torch.inf
            )
        of_step = torch.stack([sums.get(name).reshape(-1) for name in of_row])
        shares = torch.stack([each.reshape(-1) for each in of_row.values()]) / of_step
        share = share + torch.where(of_step > 0, shares, 0.0).sum()
        counts.append((of_step > 0).double().sum(0))
    return share, torch.cat(counts)


def _differs(found: float, most: float, least: float, share: float, part: bool) -> bool:
    """Whether a sum differs from the sum that the rows carry. If the rows are a `part`, it may be less."""
    if most == -torch.inf:
        return False  # the rows carry no sum
    slack = share * abs(most)
    return most - least > slack or found > most + slack or (found < most - slack and not part)
