"""What a split remembers from one batch to the next, and in the middle of one."""

from __future__ import annotations

from typing import Any

from headrace.transforms.errors import BatchError

from .checkpoint import SplitState, Turn
from .progress import Progress


class SplitMemory:
    """The state of a split: what ``state_dict`` saves and what :meth:`give_up` lets go of.

    Attributes:
        state: after the batch accepted last.
        turn: whose turn it is to use it.
    """

    def __init__(self) -> None:
        self.state, self.turn = SplitState(), Turn()
        self._progress: Progress | None = None  # of the batch accepted last
        self._earlier: list[Progress] = []  # of batches before it that were in the middle then

    def remember(self, state: SplitState, progress: Progress) -> None:
        """A batch was accepted."""
        known = [*self._earlier, *([] if self._progress is None else [self._progress])]
        self._earlier = [each for each in known if each.in_the_middle]
        self.state, self._progress = state, progress

    def give_up(self) -> None:
        """Let go of the minibatches that are left of an interrupted batch; without one, nothing happens.

        They are never trained. Those that were taken are not trained again: the next batch is drawn as if the
        interrupted one had come to its end, with the rows that it had left over under ``carry``. A loop that
        was left by ``break`` calls this before the state is saved, unless it means to go on.
        """
        with self.turn:
            for progress in (*self._earlier, *([] if self._progress is None else [self._progress])):
                progress.done = True
            self._earlier = []
            if self.state.interrupted is not None:
                self.state = self.state.interrupted.after

    def get_extra_state(self) -> dict[str, Any]:
        """What ``state_dict`` saves; in the middle of a batch, the state before it and how far it came.

        Raises:
            BatchError: two batches are in the middle, as when two pipelines share the split.
        """
        if any(progress.in_the_middle for progress in self._earlier):
            raise BatchError(
                "a state remembers one batch between its minibatches, and iterators of several are open: "
                "take those of one batch to their end before the next one comes, give each pipeline a split "
                "of its own, or call give_up() on the split"
            )
        return (self._progress.state(self.state) if self._progress else self.state).to_plain()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.state, self._progress, self._earlier = SplitState.from_plain(state), None, []
