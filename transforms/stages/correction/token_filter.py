"""The stage that takes single tokens out of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import BatchError, BatchTransform, ColumnNames, Rows, check_kind
from headrace.transforms.table.schema import LENGTH
from headrace.transforms.table.tensordicts import count_true
from headrace.transforms.table.tokens import (
    in_loss_there,
    mask_tokens,
    read_advantage,
    read_loss_mask,
    write_tokens,
)

Denominator = Literal["kept", "all"]


class TokenFilter(BatchTransform, columns=("loss_mask", "log_prob", "advantage")):
    """Take tokens that fail a criterion out of the loss.

    ============ =========================================================== =======================
    denominator   effect on the token                                         the loss is divided by
    ============ =========================================================== =======================
    ``kept``      out of the loss mask, its behaviour log-probability is NaN  tokens that are kept
    ``all``       its advantage becomes 0, (N, T, 1); it stays in the mask    all tokens
    ============ =========================================================== =======================

    In a pipeline with ``masked_log_prob=keep`` the log-probability does not change, only the loss mask.

    Put the filter after the advantage under ``all``. The token then stays in the entropy and KL terms of the
    loss. Under ``kept`` later stages still see the row's original length. A row without any kept token does
    not train (``no_loss_tokens``). Under ``kept`` and ``all``, the row's reward stays in the baseline of its
    group. To take this reward out, reject the row before the advantage with SampleFilter (``exclude``).

    Reads the columns of its criterion, `loss_mask_key`, and ``("headrace", "in_loss")`` if it exists. Writes
    `loss_mask_key`, `log_prob_key` and ``("headrace", "length")``, or under ``all`` `advantage_key`. Measures
    ``kept``, the number of kept tokens in the loss, and their fraction ``fraction_kept``.

    Args:
        criterion: a callable from a batch to (N, T) bool, True where the token stays; or to (N,) bool, for
            all tokens of a row. Ragged rows are padded on the right. Diverged is such a criterion.
        denominator: ``kept``, ``all``.
        names: other names of columns, such as `loss_mask_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: the criterion does not return one bool per token or per row.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"entropy": torch.tensor([[0.1, 2.0, 0.7]])}, batch_size=[1])
        >>> td["masks", "all_assistant_mask"] = torch.ones(1, 3, dtype=torch.bool)
        >>> uncertain = TokenFilter(criterion=lambda rows: rows["entropy"] > 0.5)
        >>> uncertain(td)["masks", "all_assistant_mask"].tolist()
        [[False, True, True]]
    """

    def __init__(
        self,
        *,
        criterion: Callable[[TensorDictBase], Tensor],
        denominator: Denominator = "kept",
        **names: Unpack[ColumnNames],
    ):
        check_kind(criterion, "criterion")
        self.name_columns(names)
        credit = [self.advantage_key] if denominator == "all" else []
        reads = [*getattr(criterion, "in_keys", ()), self.loss_mask_key, *credit]
        super().__init__(reads, credit or [LENGTH])
        self.weighed_keys = tuple(credit)
        self.criterion, self.denominator = criterion, denominator

    @property
    def masked_tokens_key(self) -> NestedKey | None:
        """The log-probabilities that become NaN at single tokens."""
        return self.log_prob_key if self.denominator == "kept" else None

    @property
    def within_groups(self) -> bool:  # type: ignore[override]
        """Whether the criterion compares tokens within groups only."""
        return getattr(self.criterion, "within_groups", False)

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Apply the criterion to all tokens, and take out those that fail."""
        reader, like = type(self).__name__, self.loss_mask_key
        mask = read_loss_mask(batch, like, in_loss_there(rows), reader=reader)
        out = mask & ~self._judge(rows, batch, mask)
        numbers = {"tokens": count_true(mask), "out": count_true(out)}
        if self.denominator == "all":
            credit = read_advantage(batch, self.advantage_key, mask, like, reader=reader, rows=rows)
            changed = torch.where(out, 0.0, credit)
            numbers["finite"] = changed.isfinite().all(-1)
        found = rows.measured(**numbers)
        tokens, kept = found["tokens"].sum(), (found["tokens"] - found["out"]).sum()
        rows.metric("kept", kept)
        rows.metric("fraction_kept", kept / tokens.clamp_min(1))
        if self.denominator == "all":
            rows.require(
                found["finite"].bool(),
                f"an advantage must be finite in {credit.dtype}; found others in {{found}}",
            )
            write_tokens(batch, self.advantage_key, changed.unsqueeze(-1), like)
            return batch
        mask_tokens(rows, batch, out, tokens=found["tokens"], taken=found["out"])
        return batch

    def _judge(self, rows: Rows, batch: TensorDictBase, mask: Tensor) -> Tensor:
        """(B, T) or (B, 1) bool, True where the tokens stay."""
        of_tokens = getattr(self.criterion, "of_tokens", None)
        if of_tokens is not None:
            keep = of_tokens(rows.seen_by(self.criterion, rows.stage), batch)
        else:  # a user's criterion gets the batch with all decisions; a rank may have no rows
            keep = self.criterion(rows.write()) if len(batch) else mask
        is_bool = isinstance(keep, Tensor) and keep.dtype is torch.bool
        if not is_bool or keep.numel() not in (mask.numel(), len(batch)):
            found = f"{keep.dtype} {tuple(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
            raise BatchError(
                f"a criterion must return one bool per token, {tuple(mask.shape)}, or one per row; "
                f"{{criterion}} returned {found}",
                criterion=repr(self.criterion),
            )
        return keep.reshape(len(batch), -1) if len(batch) else mask
