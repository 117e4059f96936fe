"""Columns of tokens, (N, T), read from a batch and written to it, dense or ragged."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.checks import Rule
from headrace.transforms.errors import BatchError
from headrace.transforms.schema import has_key
from headrace.transforms.tokens import read_advantage, read_loss_mask, read_tokens, write_tokens

from .ratios import Ratios, finite_rule


class Policies(NamedTuple):
    """What two policies say of the tokens in the loss."""

    ratio: Ratios
    """Of the trainer's and the sampler's."""
    rule: Rule
    """Both are finite in the mask."""


def read_policies(
    batch: TensorDictBase,
    old_log_prob_key: NestedKey,
    sampler_log_prob_key: NestedKey,
    loss_mask_key: NestedKey,
    *,
    reader: str,
) -> Policies:
    """Read the log-probabilities of both policies, and which tokens are in the loss. No device read.

    Rows that a filter has taken out of the loss have no token in it, whether or not they are silenced yet.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: they are not of the same tokens; the mask is not bool.
    """
    old = read_tokens(batch, old_log_prob_key, reader=reader, option="old_log_prob_key")
    sampler = read_tokens(batch, sampler_log_prob_key, reader=reader, option="sampler_log_prob_key")
    mask = read_loss_mask(batch, loss_mask_key, reader=reader)
    if not old.shape == sampler.shape == mask.shape:
        shapes = ", ".join(
            f"{key!r} {tuple(column.shape)}"
            for key, column in (
                (old_log_prob_key, old),
                (sampler_log_prob_key, sampler),
                (loss_mask_key, mask),
            )
        )
        raise BatchError(
            f"a token has a log-probability under both policies and one mask; {reader} found {shapes}"
        )
    ratio = Ratios(old, sampler, mask)
    return Policies(ratio, finite_rule(ratio, old, sampler, _names(batch)))


def change_advantage(
    batch: TensorDictBase,
    key: NestedKey,
    loss_mask_key: NestedKey,
    change: Callable[[Tensor], Tensor],
    *,
    reader: str,
) -> None:
    """Rewrite the advantage as one of tokens, (N, T, 1), in its own dtype.

    Args:
        batch: TensorDict ``[N]``.
        key: of the advantage.
        loss_mask_key: by which ragged rows are as long as they are.
        change: from (N, 1) or (N, T), at least float32, to (N, T).
        reader: who it is, for messages.
    """
    mask = read_tokens(batch, loss_mask_key, reader=reader, option="loss_mask_key")
    credit = read_advantage(batch, key, mask.shape[-1], reader=reader)
    changed = change(credit.to(torch.promote_types(credit.dtype, torch.float32)))
    write_tokens(batch, key, changed.to(credit.dtype).unsqueeze(-1), loss_mask_key)


def _names(batch: TensorDictBase) -> Callable[[int], str]:
    """What a row is called in messages: by its ids, where it has any."""
    ids = {unit: batch.get(f"{unit}_id") for unit in ("group", "rollout") if has_key(batch, f"{unit}_id")}

    def name(row: int) -> str:
        found = [f"{unit} {int(column.reshape(-1)[row])}" for unit, column in ids.items() if _numbers(column)]
        return f"row {row}" + (f" ({', '.join(found)})" if found else "")

    return name


def _numbers(column: object) -> bool:
    return isinstance(column, Tensor) and column.numel() == len(column)
