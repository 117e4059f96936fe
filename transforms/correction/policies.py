"""What two policies say of the tokens in the loss, read from a batch; and the advantage, rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.checks import Rule
from headrace.transforms.errors import BatchError
from headrace.transforms.schema import has_key
from headrace.transforms.tokens import (
    check_lengths,
    in_blocks,
    read_advantage,
    read_loss_mask,
    read_tokens,
    write_tokens,
)

from .ratios import Ratios, rounded_to


class Policies:
    """What two policies say of the tokens in the loss.

    Args:
        log_prob: (N, T) float, log π_old.
        sampler_log_prob: (N, T) float, log μ.
        mask: (N, T) bool.
        name_row: a row in words, for messages.
        names: what the columns are called there.

    Raises:
        BatchError: shapes differ, or are not (N, T); the mask is not bool.
    """

    def __init__(
        self,
        log_prob: Tensor,
        sampler_log_prob: Tensor,
        mask: Tensor,
        name_row: Callable[[int], str] = lambda row: f"row {row}",
        names: Sequence[NestedKey] = ("log_prob", "sampler_log_prob", "mask"),
    ):
        columns = log_prob, sampler_log_prob, mask
        if len({column.shape for column in columns}) > 1 or mask.ndim != 2:
            shapes = zip(names, (tuple(column.shape) for column in columns), strict=True)
            raise BatchError(
                "a token has a log-probability under both policies and one mask, (N, T) each; found "
                + ", ".join(f"{name!r} {shape}" for name, shape in shapes)
            )
        if mask.dtype is not torch.bool:
            raise BatchError(
                f"a loss mask is bool, True trains; found {mask.dtype}: convert it by `mask != 0`"
            )
        self.log_prob, self.sampler_log_prob, self.mask = log_prob.detach(), sampler_log_prob.detach(), mask
        self.dtype = rounded_to(log_prob, sampler_log_prob)
        self._name_row = name_row

    def each_row(
        self, function: Callable[..., Mapping[str, Tensor]], *more: Tensor | None
    ) -> dict[str, Tensor]:
        """What a function of the :class:`Ratios` of some rows, and of their `more`, says of all rows."""

        def of_some(log_prob: Tensor, sampler: Tensor, mask: Tensor, *more: Tensor) -> Mapping[str, Tensor]:
            return function(Ratios(log_prob, sampler, mask), *more)

        return in_blocks(of_some, self.log_prob, self.sampler_log_prob, self.mask, *more)

    def rule(self, wrong: Tensor) -> Rule:
        """Every token in the loss has finite log-probabilities.

        Args:
            wrong: (N,) bool, rows that have one that is not (:attr:`Ratios.wrong`).
        """

        def describe(row: int) -> str:
            token = int(
                Ratios(self.log_prob[row], self.sampler_log_prob[row], self.mask[row]).wrong.nonzero()[0]
            )
            trainer, sampler = (
                float(column[row, token]) for column in (self.log_prob, self.sampler_log_prob)
            )
            return f"{trainer:g} (trainer) and {sampler:g} (sampler) at {self._name_row(row)}, token {token}"

        return Rule(
            wrong,
            describe,
            "tokens in the loss have a finite log-probability under both policies; found {found}. Record "
            "both for every token that trains, or take those rows out before: "
            "SampleFilter(criterion=Finite(key=...))",
        )


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
    keys = old_log_prob_key, sampler_log_prob_key, loss_mask_key
    check_lengths(batch, keys, loss_mask_key, reader=reader)
    return Policies(old, sampler, mask, _names(batch), keys)


def change_advantage(
    batch: TensorDictBase,
    key: NestedKey,
    loss_mask_key: NestedKey,
    change: Callable[..., Tensor],
    *columns: Tensor,
    reader: str,
) -> Rule:
    """Rewrite the advantage as one of tokens, (N, T, 1), in its own dtype, in which it must be finite.

    Args:
        batch: TensorDict ``[N]``.
        key: of the advantage.
        loss_mask_key: by which ragged rows are as long as they are.
        change: of (N, 1) or (N, T), at least float32, and of `columns` → (N, T), row by row.
        columns: (N, T) each.
        reader: who it is, for messages.
    """
    credit = read_advantage(batch, key, columns[0].shape[-1], reader=reader)
    check_lengths(batch, [key], loss_mask_key, reader=reader)

    def changed(first: Tensor, credit: Tensor, *others: Tensor) -> dict[str, Tensor]:
        precise = credit.to(torch.promote_types(credit.dtype, torch.float32))
        made = change(precise, first, *others).to(credit.dtype)
        return {"credit": made, "wrong": ~made.isfinite().all(-1)}

    made = in_blocks(changed, columns[0], credit, *columns[1:])
    write_tokens(batch, key, made["credit"].unsqueeze(-1), loss_mask_key)
    return Rule(
        made["wrong"],
        lambda row: f"row {row}",
        f"an advantage must be finite in {credit.dtype}; found others in {{found}}",
    )


def _names(batch: TensorDictBase) -> Callable[[int], str]:
    """What a row is called in messages: by its ids, where it has any."""
    ids = {unit: batch.get(f"{unit}_id") for unit in ("group", "rollout") if has_key(batch, f"{unit}_id")}

    def name(row: int) -> str:
        found = [f"{unit} {int(column.reshape(-1)[row])}" for unit, column in ids.items() if _numbers(column)]
        return f"row {row}" + (f" ({', '.join(found)})" if found else "")

    return name


def _numbers(column: object) -> bool:
    return isinstance(column, Tensor) and column.numel() == len(column)
