"""How long the trainer waits for a batch. A warning names what it waits for, and timeouts go on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from headrace.transforms.table import StreamWarning, listing

LONGER = 4  # warn of a wait that is longer than this many times the longest so far
LEAST, FIRST = 10.0, 60.0  # seconds of a wait before a warning: in general, and before the first batch


class Wait:
    """The current wait, and the longest so far."""

    def __init__(self) -> None:
        self.since: float | None = None
        """The time at which the current wait began; None: there is none."""
        self.longest = 0.0
        """Seconds of the longest wait that has ended."""
        self._first, self._warn_after = True, 0.0
        self._last_put: float | None = None
        self._puts, self._seconds = 0, 0.0  # intervals between puts, and their sum

    def look(self, now: float, *, over: bool, blocked_by: Callable[[], Sequence[str]]) -> None:
        """Note that the trainer asked for a batch. Warn if it has waited too long, and at twice that time.

        Args:
            now: seconds.
            over: whether the trainer got a batch.
            blocked_by: returns what the trainer waits for.
        """
        if over:
            self.longest = max(self.longest, now - (now if self.since is None else self.since))
            self.since, self._first = None, False
        elif self.since is None:
            self.since, least = now, FIRST if self._first else LEAST
            self._warn_after = max(least, LONGER * self.longest)
        elif (waited := now - self.since) >= self._warn_after:
            self._warn_after = 2 * waited
            found = listing(blocked_by()) or "no group: nothing is dispatched"
            warnings.warn(
                f"the trainer has waited {waited:.0f} s for a batch; before at most {self.longest:.0f} s. "
                f"It waits for {found}. Check whether their workers hang. Set timeout or timeout_seconds, "
                "and on_timeout, to go on without them",
                StreamWarning,
                stacklevel=5,  # the caller of take()
            )

    def note_put(self, now: float) -> None:
        """Note a put, for the usual time between two puts."""
        if self._last_put is not None:
            self._puts, self._seconds = self._puts + 1, self._seconds + now - self._last_put
        self._last_put = now

    def note_missed(self, now: float) -> None:
        """Note that the missed puts until now were counted."""
        self._last_put = now

    def missed_puts(self, now: float) -> int:
        """The number of puts that would have come at their usual rate while the trainer waits for one."""
        if self.since is None or self._last_put is None or not self._seconds:
            return 0
        return int((now - max(self.since, self._last_put)) * self._puts / self._seconds)
