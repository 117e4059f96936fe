"""When a run began."""

from __future__ import annotations

from datetime import datetime, timezone


def now() -> str:
    """The time, UTC, ISO 8601 to the second: ``2026-11-22T04:19:11+00:00``."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
