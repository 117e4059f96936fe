"""Optimiser steps over minibatches, each made of one or several of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
from tensordict import NestedKey, TensorDictBase
from torch import nn

from headrace.transforms.criteria import count_tokens


def optimise(
    minibatches: Iterable[TensorDictBase],
    loss: Callable[[TensorDictBase], TensorDictBase],
    optimizer: torch.optim.Optimizer,
    *,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
) -> int:
    """Take one optimiser step per `accumulate` parts of the batch; a short last one takes what is left.

    A loss that is a mean over tokens is weighted by the minibatch's share of the step's tokens, so that
    accumulating n minibatches has the gradient of their union::

        Σ_k (T_k / Σ_j T_j) · L_k,   T_k the tokens in the loss of minibatch k

    A step without a token in the loss is not taken.

    Args:
        minibatches: TensorDicts ``[n]``, as the pipeline yields them; with `accumulate` > 1 each is a
            micro-batch of its step, and steps do not stop at the end of an epoch.
        loss: returns a TensorDict whose entries named ``loss_*`` are scalars to minimise, each a mean over
            the tokens in the loss, such as TorchRL's GRPOLoss with ``token_mean``.
        optimizer: of the loss's parameters.
        accumulate: minibatches per step, ≥ 1.
        max_grad_norm: clips the gradient of a step; None: not clipped.
        loss_mask_key: (n, T) bool.

    Returns:
        The number of steps taken.

    Raises:
        ValueError: `accumulate` < 1, or `max_grad_norm` not above 0.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate must be ≥ 1; got {accumulate}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be > 0, or None; got {max_grad_norm}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    steps = 0
    for parts in _chunks(minibatches, accumulate):
        tokens = [int(count_tokens(part, loss_mask_key, reader="optimise").sum()) for part in parts]
        if sum(tokens) == 0:
            continue
        optimizer.zero_grad()
        for part, count in zip(parts, tokens, strict=True):
            if count:
                (total_loss(loss(part)) * (count / sum(tokens))).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        steps += 1
    return steps


def total_loss(terms: TensorDictBase) -> torch.Tensor:
    """The sum of a loss module's ``loss_*`` entries."""
    return sum(value for key, value in terms.items() if key.startswith("loss_") and value is not None)


def _chunks(items: Iterable[TensorDictBase], size: int) -> Iterator[list[TensorDictBase]]:
    stream = iter(items)
    while chunk := list(islice(stream, size)):
        yield chunk
