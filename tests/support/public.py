"""The public names of a package that can be imported here. Some names need an optional package."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from headrace.installed import MissingPackageError

NEED_TORCHRL = ("AssembleOnWrite", "DrainWriter", "GroupUnit", "PipelineHook", "TokenGRPOLoss")


def public(package: ModuleType) -> list[tuple[str, Any]]:
    """The names of `__all__` with their objects, except names that need a package that is not installed."""
    found = []
    for name in getattr(package, "__all__", ()):
        try:
            found.append((name, getattr(package, name)))
        except MissingPackageError:
            continue
    return found
