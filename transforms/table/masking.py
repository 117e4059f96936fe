"""Mask rows out of the loss: in which token columns of a batch, and with which values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .errors import BatchError, ColumnFact, count_of
from .schema import key_names
from .tensordicts import column_of, device_of, mask_tokens_of, number_of, parts_of, write_column


class Tokens(NamedTuple):
    """The token columns that a loss reads."""

    mask: NestedKey
    """(N, T) bool, True at tokens in the loss."""
    log_prob: NestedKey | None
    """(N, T) float; a token whose value is not finite is out of the loss."""
    others: Sequence[NestedKey]
    """(N, T) float each; columns that the batch does not have are ignored."""


class Masking:
    """The token columns in which rows are masked when the batch is written or gathered.

    Attributes:
        columns: the columns, in order.
        elsewhere: the batch has token counts instead of tokens. The tokens are masked where they are stored.
        no_lengths: the batch has neither tokens nor counts, because it was read from a dump of texts.
        kept_finite: columns that stay finite at masked tokens, under ``masked_log_prob="keep"``; None: masked
            log-probabilities become NaN.
    """

    def __init__(self, *, elsewhere: bool = False, no_lengths: bool = False):
        self.columns: dict[NestedKey, None] = {}
        self.elsewhere, self.no_lengths = elsewhere or no_lengths, no_lengths
        self.kept_finite: Tokens | None = None

    def note(
        self, batch: TensorDictBase, loss_mask: NestedKey | None, log_prob: NestedKey | None, out: Tensor
    ) -> bool:
        """Note in which columns rows will be masked. Return whether the loss mask is one that can be counted.

        The loss mask becomes False. Log-probabilities become NaN, except under ``masked_log_prob='keep'``.

        Args:
            batch: the batch.
            loss_mask: key of the loss mask.
            log_prob: key of the log-probabilities.
            out: (M,) bool, the rows to mask.

        Raises:
            BatchError: there are rows to mask, and the batch has no column in which they can be masked.
        """
        log_prob = log_prob if self.kept_finite is None else None
        given = [key for key in (loss_mask, log_prob) if key is not None]
        to_mask = [key for key in given if self.elsewhere or parts_of(batch, key)]
        self.columns |= dict.fromkeys(to_mask)
        if not to_mask and bool(out.any()):
            lacks = "neither {mask} nor {log_prob}"
            if self.kept_finite is not None:
                lacks = "no {mask}, the only mask under masked_log_prob='keep'"
            raise BatchError(
                f"{count_of(int(out.sum()), 'row')} must be masked out of the loss, but the batch has "
                f"{lacks}, so they would still train; {{present}}. Set the keys, or drop the rows",
                mask=ColumnFact(loss_mask, "loss_mask_key"),
                log_prob=ColumnFact(log_prob, "log_prob_key"),
                batch=key_names(batch),
            )
        has_counts = not self.elsewhere or column_of(batch, number_of(loss_mask)) is not None
        return loss_mask in to_mask and has_counts

    def mask(self, batch: TensorDictBase, out: Tensor) -> None:
        """Mask (B,) bool rows `out` of a batch."""
        out = out.to(device_of(batch))
        for key in self.columns:
            if not self.elsewhere:
                mask_tokens_of(batch, key, out)
            elif (counts := column_of(batch, number_of(key))) is not None:
                wide = out.view(-1, *[1] * (counts.ndim - 1))
                write_column(batch, number_of(key), counts.masked_fill(wide, 0))
