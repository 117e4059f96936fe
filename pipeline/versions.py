"""What is installed: nothing here imports what it asks about."""

from __future__ import annotations

from importlib import metadata

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
