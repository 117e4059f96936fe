"""The stage that takes single tokens out of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.distributed import population_of
from headrace.transforms.errors import BatchError
from headrace.transforms.options import nested_key, one_of
from headrace.transforms.schema import LENGTH, has_key
from headrace.transforms.tokens import read_loss_mask, read_tokens, remember_lengths, write_tokens

from .policies import change_advantage

Denominator = Literal["kept", "all"]


class TokenFilter(BatchTransform):
    """Take tokens that fail a criterion out of the loss, and say what its mean is divided by.

    ============ =========================================================== =======================
    denominator   what becomes of the token                                   the loss is divided by
    ============ =========================================================== =======================
    ``kept``      out of the loss mask, its behaviour log-probability is NaN  tokens that are left
    ``all``       its advantage becomes 0, (N, T, 1); it stays in the mask    all tokens
    ============ =========================================================== =======================

    ``all`` stands after the advantage, and leaves the token in a loss's entropy and KL terms. Under ``kept``
    a row is as long to later statistics as it was, and one of which no token is left trains nothing
    (``no_loss_tokens``). A row's reward stays in its group's baseline under both: to take it out, reject the
    row before the advantage by SampleFilter (``exclude``).

    Reads what its criterion reads, `loss_mask_key`, and ``("headrace", "in_loss")`` if there; writes
    `loss_mask_key`, `log_prob_key` and ``("headrace", "length")``, or under ``all`` `advantage_key`. Measures
    ``kept`` and ``fraction_kept``, of tokens. No device read besides what the criterion reads.

    Args:
        criterion: batch → (N, T) bool, True where the token stays, of ragged rows padded behind; or (N,)
            bool, for all tokens of the row. Such as Diverged.
        denominator: ``kept``, ``all``.
        loss_mask_key: (N, T) bool, True trains.
        log_prob_key: (N, T) float, which the loss reads; written if it is there. None: never.
        advantage_key: (N, 1, 1) or (N, T, 1) float, written under ``all``.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: the criterion returns something else than a bool a token or a row.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"entropy": torch.tensor([[0.1, 2.0, 0.7]])}, batch_size=[1])
        >>> td["masks", "all_assistant_mask"] = torch.ones(1, 3, dtype=torch.bool)
        >>> uncertain = TokenFilter(criterion=lambda rows: rows["entropy"] > 0.5)
        >>> uncertain(td)["masks", "all_assistant_mask"].tolist()
        [[False, True, True]]
    """

    keeps_rows = True
    spans_ranks = True

    def __init__(
        self,
        *,
        criterion: Callable[[TensorDictBase], Tensor],
        denominator: Denominator = "kept",
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        log_prob_key: NestedKey | None = ("log_probs", "full"),
        advantage_key: NestedKey = "advantage",
    ):
        if not callable(criterion):
            raise ValueError(f"criterion must be a callable from a batch to (N, T) bool; got {criterion!r}")
        one_of("denominator", denominator, get_args(Denominator))
        self.loss_mask_key, self.log_prob_key = nested_key(loss_mask_key), nested_key(log_prob_key)
        self.advantage_key = nested_key(advantage_key)
        credit = [self.advantage_key] if denominator == "all" else []
        reads = [*getattr(criterion, "in_keys", ()), self.loss_mask_key, *credit]
        super().__init__(reads, credit or [LENGTH])
        self.weighed_keys = tuple(credit)
        self.criterion, self.denominator = criterion, denominator

    @property
    def asks_in_loss(self) -> bool:  # type: ignore[override]
        """Unless its criterion looks at tokens of rows that are out of it."""
        return getattr(self.criterion, "asks_in_loss", False)

    @property
    def silenced_tokens(self) -> NestedKey | None:
        """The log-probabilities that become NaN, token by token."""
        return self.log_prob_key if self.denominator == "kept" else None

    @property
    def within_groups(self) -> bool:  # type: ignore[override]
        """Where its criterion says so."""
        return getattr(self.criterion, "within_groups", False)

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Judge all tokens, and act."""
        mask = read_loss_mask(batch, self.loss_mask_key, reader=type(self).__name__)
        keep = self._judge(batch, mask)
        rules = getattr(self.criterion, "rules", lambda _: ())(batch)
        more: dict[str, Tensor] = getattr(self.criterion, "measured", lambda _: {})(batch)
        out = mask & ~keep
        if self.denominator == "all":
            change_advantage(
                batch,
                self.advantage_key,
                self.loss_mask_key,
                lambda credit, out: torch.where(out, 0.0, credit),
                out,
                reader=type(self).__name__,
            )
        else:
            self._silence(batch, out)
        everyone = population_of(batch, every=True).take({"tokens": mask.sum(-1), "out": out.sum(-1)})
        tokens, kept = everyone["tokens"].sum(), (everyone["tokens"] - everyone["out"]).sum()
        measured = {"kept": kept, "fraction_kept": kept / tokens.clamp_min(1)}
        return Outcome(batch, measured=more | measured, rules=rules)

    def _judge(self, batch: TensorDictBase, mask: Tensor) -> Tensor:
        """(N, T) or (N, 1) bool."""
        # Other ranks may have all rows; a criterion that meets them there is asked here too.
        asked = len(batch) > 0 or getattr(self.criterion, "spans_ranks", False)
        keep = self.criterion(batch) if asked else mask
        if not isinstance(keep, Tensor) or keep.dtype is not torch.bool:
            found = f"{keep.dtype}" if isinstance(keep, Tensor) else type(keep).__name__
        elif keep.numel() in (mask.numel(), len(batch)):
            return keep.reshape(len(batch), -1) if len(batch) else mask
        else:
            found = f"{keep.dtype} {tuple(keep.shape)}"
        raise BatchError(
            f"a criterion of tokens returns one bool each, {tuple(mask.shape)}, or one a row; "
            f"{self.criterion!r} returned {found}"
        )

    def _silence(self, batch: TensorDictBase, out: Tensor) -> None:
        """Take tokens out of the loss mask, and out of a loss that reads another one."""
        remember_lengths(batch, self.loss_mask_key, out.any(-1))
        mask = read_tokens(batch, self.loss_mask_key, reader=type(self).__name__, option="loss_mask_key")
        if self.log_prob_key is not None and has_key(batch, self.log_prob_key):
            log_prob = read_tokens(
                batch, self.log_prob_key, reader=type(self).__name__, option="log_prob_key"
            )
            silent = log_prob.masked_fill(out, float("nan"))
            write_tokens(batch, self.log_prob_key, silent, self.loss_mask_key)
        write_tokens(batch, self.loss_mask_key, mask & ~out, self.loss_mask_key)
