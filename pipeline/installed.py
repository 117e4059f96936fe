"""What is installed: versions of packages, without importing them, and extras where somebody needs one."""

from __future__ import annotations

import importlib
from importlib import metadata
from types import ModuleType

PACKAGES = ("headrace", "torch", "torchrl", "tensordict")


def version_of(package: str) -> str | None:
    """The version of an installed package; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # not installed, or run from its folder
        return None


def versions() -> dict[str, str]:
    """The versions of headrace and of what it stands on, by name; without those that are not installed.

    Example:
        >>> "torch" in versions()
        True
    """
    return {name: found for name in PACKAGES if (found := version_of(name))}


def import_extra(module: str, extra: str, reader: str) -> ModuleType:
    """Import a module of an extra, when somebody needs it.

    Raises:
        ImportError: it is not installed; the message names the extra.

    Example:
        >>> import_extra("json", "ray", "RayAssembler").dumps(1)
        '1'
    """
    try:
        return importlib.import_module(module)
    except ImportError as err:
        raise ImportError(f"{reader} needs {module}: pip install 'headrace[{extra}]'") from err
