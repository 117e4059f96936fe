"""How far the minibatches of a batch have been taken, for runs that are interrupted in its middle."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor

from .errors import BatchError


class Progress:
    """One batch, from its order on.

    Args:
        before: the state of the stage before it drew the batch's orders.
        rows: of the batch.
        ids: (N,) int64, by which the batch is known again; None: by its number of rows.
    """

    def __init__(self, before: dict[str, Any], rows: int, ids: Tensor | None):
        self.before, self.rows, self._ids = before, rows, ids
        self.taken, self.minibatches = 0, 0
        self.closed = False

    @property
    def done(self) -> bool:
        """Whether nothing of it is left to take, or nobody will come for it."""
        return self.closed or 0 < self.minibatches <= self.taken

    def state(self) -> dict[str, Any]:
        """What to save in its middle. Reads the ids."""
        if self.taken == 0:
            return self.before
        return self.before | {
            "batch": {
                "rows": self.rows,
                "ids": self.fingerprint(),
                "taken": self.taken,
                "minibatches": self.minibatches,
            }
        }

    def fingerprint(self) -> str:
        """What tells this batch from another."""
        if self._ids is None:
            return ""
        return hashlib.blake2b(self._ids.cpu().numpy().tobytes(), digest_size=16).hexdigest()

    def check(self, resume: dict[str, Any]) -> None:
        """Refuse a batch that is not the one that was interrupted.

        Raises:
            BatchError: it has other rows, or other ids.
        """
        told = f"a batch of {resume['rows']} rows was interrupted after {resume['taken']} minibatches"
        if resume["rows"] != self.rows:
            raise BatchError(f"{told}; to go on with the others give it again: this one has {self.rows} rows")
        if resume["ids"] != self.fingerprint():
            raise BatchError(
                f"{told}; to go on with the others give it again: this one has other rollout_ids"
            )

    def resume(self, resume: dict[str, Any]) -> None:
        """Count as taken what was taken before.

        Raises:
            BatchError: it was to be cut into another number of minibatches.
        """
        if resume["minibatches"] != self.minibatches:
            raise BatchError(
                f"the interrupted batch had {resume['minibatches']} minibatches, this one has "
                f"{self.minibatches}: resume it with the same options and epochs"
            )
        self.taken = resume["taken"]
