"""The state that a split keeps from batch to batch, around :meth:`ShuffleSplit.permute`."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import torch

from headrace.transforms.split import Permuted
from headrace.transforms.table import BatchError, Rows, count_of

from .carry import join, refuse_again, take, wait_a_step
from .resume import BatchProgress, KnownBatch, SplitState, identifying_columns

log = logging.getLogger(__name__)


@dataclass
class Remembered:
    """A batch that was cut, and the state to remember once all stages have accepted the batch."""

    permuted: Permuted | None = None
    """None: the batch is skipped, because it was trained before the state was saved."""
    progress: BatchProgress | None = None
    """Counts the minibatches that are taken."""
    state: SplitState | None = None


class SplitMemory:
    """Holds the state of a split, for ``state_dict`` and :meth:`discard_batch`.

    Attributes:
        state: the state after the last accepted batch.
        lock: hold it while you use the state.
        restored: the state was loaded, and no batch has been accepted since.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.restart()

    def restart(self) -> None:
        """Forget all batches."""
        self.state, self.restored = SplitState(), False
        self._progress: BatchProgress | None = None  # progress of the last accepted batch
        self._earlier: list[BatchProgress] = []  # progress of earlier, unfinished batches

    def cut(self, split: Any, rows: Rows, epochs: int = 1, *, skips: bool = True) -> Remembered:
        """Skip a batch that was trained before. Otherwise join the carried rows to the batch, and permute it.

        Args:
            split: the split that permutes.
            rows: the rows of all ranks, as the split sees them.
            epochs: passes, ≥ 1.
            skips: whether to skip a batch that was trained before the state was saved.

        Raises:
            BatchError: as :meth:`ShuffleSplit.permute`; or another batch was interrupted and must come
                first; or ids of carried rows are in the batch again.
        """
        table, carries = rows.table, split.remainder == "carry"
        # 1. Skip a batch that was trained already. Otherwise join the carried rows.
        if skips and self.trained_before is not None and self._skips(split, rows, self.trained_before):
            return Remembered()
        if carries or self.state.carried is not None:
            join(rows, self.state.carried, split.remainder)
            rows = rows.seen_by(split, rows.stage)
        own = came = table.rows_of_ranks()[table.ranks.rank]
        if (carried := table.carried) is not None:
            came = own[~torch.isin(own, carried)]
        cut_by = split.options.plain | {"unit": split.unit, "keys": repr(split.in_keys), "epochs": epochs}
        batch = KnownBatch(len(came), identifying_columns(table, came, split.reward_key))
        progress = BatchProgress(self.state, batch, cut_by)
        if carried is not None and carries:
            refuse_again(rows.on_arrival, "group" if split.unit == "group" else "rollout")
        # 2. Permute.
        permuted = split.permute(rows, epochs, calls=self.state.calls)
        # 3. Keep the leftover rows, as they are before they leave.
        kept = None
        if carries:
            left = own[:0] if permuted.left is None else own[permuted.left[own]]
            if carried is not None:  # rows that were carried before come first
                left = torch.cat([left[left >= carried[0]], left[left < carried[0]]])
            kept = wait_a_step(take(table, left), rows) if len(left) else None
            rows.metric("carried_in", 0 if carried is None else table.fates.here[carried].sum())
        permuted.leave()
        return Remembered(permuted, progress, SplitState(self.state.calls + epochs, kept))

    def _skips(self, split: Any, rows: Rows, trained: KnownBatch) -> bool:
        """Take all rows out if this batch is the one that was trained before the loaded state was saved.

        Raises:
            BatchError: some ranks hold the trained batch, and others do not.
        """
        table = rows.table
        own = table.rows_of_ranks()[table.ranks.rank]
        came = KnownBatch(len(own), identifying_columns(table, own, split.reward_key))
        # A rank that had no rows in the trained batch, and has none now, gives no answer.
        vote = [trained.is_again(came)] if trained.rows or came.rows else []
        votes_of_ranks = table.ranks.gather_objects(vote)
        votes = [vote for votes in votes_of_ranks for vote in votes]
        if len(set(votes)) > 1:
            again = [rank for rank, votes in enumerate(votes_of_ranks) if True in votes]
            raise BatchError(
                f"ranks {again} hold rows that were trained before the state was saved, and the other ranks "
                "hold other rows: give all ranks the rows of the same batch"
            )
        if not any(votes):
            return False
        log.warning(
            "this batch of %d rows was trained before the state was saved, so it is skipped. Give it once "
            "more to train a second pass over it",
            len(own),
        )
        rows.leave(torch.ones(len(rows), dtype=torch.bool), "trained_before")
        return True

    def remember(self, cut: Remembered) -> None:
        """Store the state after a batch. Call this once all stages have accepted the batch."""
        progress = cut.progress
        if cut.state is None or progress is None:
            self.restored = False  # the batch was skipped; it trains if it is given again
            return
        if (last := self._progress) is not None:
            self._earlier = [each for each in (*self._earlier, last) if each.in_the_middle]
            progress.before = progress.before._replace(trained=last.trained)
        self.state, self._progress, self.restored = cut.state, progress, False

    def same_on_all_ranks(self) -> str:
        """The state that must be equal on all ranks, as text to compare."""
        taken = 0 if self.state.interrupted is None else self.state.interrupted.taken
        known = "a" if self.trained_before else "no"
        return (
            f"{self.state.calls} permutations before, {count_of(taken, 'minibatch')} taken, and {known} "
            "batch that is not trained again"
        )

    @property
    def trained_before(self) -> KnownBatch | None:
        """The last trained batch of a loaded state. It is skipped if it comes next.

        None in the process that trained the batch. If a batch is given again there, it trains a second time.
        """
        return self.state.trained if self.restored and self.state.interrupted is None else None

    def discard_batch(self) -> None:
        """Drop the remaining minibatches of an interrupted batch. Without such a batch, do nothing.

        The remaining minibatches are never trained, and the taken ones are not trained again. The state
        becomes that after the batch, with its carried rows. If you leave a loop by ``break`` and do not want
        to continue its batch later, call this before you save the state.
        """
        with self.lock:
            for progress in (*self._earlier, *([] if self._progress is None else [self._progress])):
                progress.done = True
            self._earlier = []
            if (batch := self.state.interrupted) is not None:
                self.state = batch.after._replace(trained=KnownBatch(batch.rows, batch.columns))

    def to_plain(self) -> dict[str, Any]:
        """The state for ``state_dict``.

        In the middle of a batch, this is the state before the batch with the number of taken minibatches.
        After the last minibatch, the state has the columns that identify the batch, so that the batch is
        skipped if it is given again.

        Raises:
            BatchError: several batches are unfinished, for example because two pipelines share the split.
        """
        if any(progress.in_the_middle for progress in self._earlier):
            raise BatchError(
                "a state can hold one unfinished batch, and iterators of several batches are open: take all "
                "minibatches of one batch before the next batch, give each pipeline its own split, or call "
                "discard_batch() on the split"
            )
        return (self._progress.state(self.state) if self._progress else self.state).to_plain()

    def load(self, state: dict[str, Any]) -> None:
        """Restore the output of :meth:`to_plain`.

        Raises:
            ValueError: another version of headrace has saved the state.
        """
        self.state, self._progress, self._earlier = SplitState.from_plain(state), None, []
        self.restored = True


class Lock(type(threading.RLock())):  # type: ignore[misc]  # RLock is a function
    """A reentrant lock that can be pickled and copied; the copy is unlocked."""

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()
