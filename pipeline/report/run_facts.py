"""When a run began, and what it ran on."""

from __future__ import annotations

from datetime import datetime, timezone
from functools import cache
from importlib import metadata

PACKAGES = ("headrace", "torch", "torchrl", "tensordict")


def now() -> str:
    """The time, UTC, ISO 8601 to the second: ``2026-11-22T04:19:11+00:00``."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@cache
def versions() -> dict[str, str]:
    """The versions of headrace and of what it stands on, by name; without those that are not installed.

    Example:
        >>> "torch" in versions()
        True
    """
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from its folder, say
            continue
    return found
