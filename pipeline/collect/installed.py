"""Versions of installed packages, without importing them, and imports of optional extras."""

from __future__ import annotations

import importlib
from importlib import metadata
from types import ModuleType

PACKAGES = ("headrace", "torch", "torchrl", "tensordict")


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # not installed, or run from a checkout
        return None


def versions() -> dict[str, str]:
    """Return the versions of headrace, torch, torchrl and tensordict, as far as they are installed.

    Example:
        >>> "torch" in versions()
        True
    """
    return {name: found for name in PACKAGES if (found := version_of(name))}


def import_extra(module: str, extra: str, reader: str) -> ModuleType:
    """Import a module of an optional extra.

    Raises:
        ImportError: the module is not installed; the message names the extra.

    Example:
        >>> import_extra("json", "ray", "RayAssembler").dumps(1)
        '1'
    """
    try:
        return importlib.import_module(module)
    except ImportError as err:
        raise ImportError(f"{reader} needs {module}: pip install 'headrace[{extra}]'") from err
