"""What becomes of the rows of a table: whether they train, and the reason if they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Effect = Literal["masked", "excluded", "dropped", "carried"]
"""A masked row leaves the loss, an excluded row also the statistics. A dropped row leaves the batch, and a
carried row leaves it until the next batch.
"""

TRAINED = "trained"


class Fates:
    """The fates of N rows. Each row is trained, or has one reason: the first for which it was taken out.

    Attributes:
        names: the reasons, in the order in which they were registered; number 0 is ``trained``.
        effects: the effect of each reason.
        reason: (N,) int64, index into `names` of the reason of each row.
        here: (N,) bool, rows that are neither dropped nor carried.
        index: (M,) int64, numbers of the rows that are `here`; None: all rows are.
        in_loss: (N,) bool, rows in the loss.
        counted: (N,) bool, rows that are in the statistics; None: all rows are.
        votes_only: (N,) bool, rows in the statistics that will not train; None: there are none.
        masks: a stage may take rows out of the loss, so the batch must say which.
        excludes: a stage may take rows out of the statistics, so the batch must say which.
    """

    def __init__(self, size: int):
        self.names, self.effects = [TRAINED], [TRAINED]
        self.reason = torch.zeros(size, dtype=torch.int64)
        self.here = self.in_loss = torch.ones(size, dtype=torch.bool)
        self.counted: Tensor | None = None
        self.votes_only: Tensor | None = None
        self.index: Tensor | None = None
        self.masks = self.excludes = False

    def __len__(self) -> int:
        """The number of rows that are here."""
        return len(self.reason) if self.index is None else len(self.index)

    def register(self, name: str, effect: Effect) -> int:
        """Register a reason, even if no row has it, and return its number.

        Raises:
            ValueError: the reason is registered with another effect.
        """
        if name not in self.names:
            self.names.append(name)
            self.effects.append(effect)
        code = self.names.index(name)
        if (before := self.effects[code]) != effect:
            raise ValueError(
                f"rows that leave for {name!r} are {before}; give those that are {effect} another reason"
            )
        return code

    def leave(self, rows: Tensor, name: str, effect: Effect) -> None:
        """Take out (N,) bool `rows` for a reason. Rows that already have a reason keep it."""
        self.note(rows, name, effect)
        self.in_loss = self.in_loss.masked_fill(rows, False)
        if effect == "excluded":
            self.counted = ~rows if self.counted is None else self.counted.masked_fill(rows, False)
        if effect in ("dropped", "carried"):
            self.here = self.here.masked_fill(rows, False)
            self.index = self.here.nonzero().flatten()

    def note(self, rows: Tensor, name: str, effect: Effect) -> None:
        """Note the reason of (N,) bool `rows` that have none yet."""
        code = self.register(name, effect)
        self.reason = self.reason.masked_fill(rows & (self.reason == 0), code)

    def let_vote(self, rows: Tensor, name: str) -> None:
        """Take (N,) bool `rows` out of the loss. They are dropped later, for this reason."""
        self.note(rows, name, "dropped")
        self.votes_only, self.in_loss = rows, self.in_loss & ~rows

    def came(self, in_loss: Tensor | None, counted: Tensor | None) -> None:
        """Read from a batch which rows earlier stages have taken out of the loss and of the statistics.

        Args:
            in_loss: (N,) bool; None: the batch does not say it.
            counted: (N,) bool; None: the batch does not say it.
        """
        if in_loss is not None:
            self.in_loss, self.masks = self.in_loss & in_loss, True
        if counted is not None:
            self.excludes = True
            counted = counted if self.counted is None else self.counted & counted
            self.counted = None if bool(counted.all()) else counted

    @property
    def counts(self) -> Tensor:
        """(N,) bool, rows that are in the statistics."""
        return torch.ones(len(self.reason), dtype=torch.bool) if self.counted is None else self.counted

    def reasons_of(self, rows: Tensor) -> list[str]:
        """The names of the reasons of (n,) int64 `rows`."""
        return [self.names[code] for code in self.reason[rows].tolist()]

    def extend(self, reasons: Sequence[str], in_loss: Tensor, counted: Tensor) -> None:
        """Append n rows that are here, with their reasons, (n,) bool `in_loss` and `counted`."""
        for name, is_counted in zip(reasons, counted.tolist(), strict=True):
            if name not in self.names:  # no stage has registered it, because the pipeline has changed
                self.register(name, "masked" if is_counted else "excluded")
        codes = torch.tensor([self.names.index(name) for name in reasons], dtype=torch.int64)
        counted = torch.cat([self.counts, counted])
        self.counted = None if bool(counted.all()) else counted
        self.reason, self.in_loss = torch.cat([self.reason, codes]), torch.cat([self.in_loss, in_loss])
        self.here = torch.cat([self.here, torch.ones_like(in_loss)])
        self.index = None if self.index is None else self.here.nonzero().flatten()
