"""How a rollout ended."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """Values of the ``status`` column, (N,) int.

    A truncated rollout has a reward and counts as present; a failed or aborted one has none that means
    anything and does not.
    """

    COMPLETED = 0
    TRUNCATED = 1
    ABORTED = 2
    FAILED = 3
