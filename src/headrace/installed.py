"""Versions of installed packages, without importing them, and errors that name a package that is missing."""

from __future__ import annotations

from importlib import import_module, metadata
from types import ModuleType

PACKAGES = ("headrace", "torch", "torchrl", "tensordict")
# Packages that a part of headrace may lack: how people write them, and what to install.
OPTIONAL = {
    "torchrl": ("TorchRL", "'headrace[torchrl]'"),
    "transformers": ("transformers", "'headrace[llm]'"),
    "ray": ("ray", "'headrace[ray]'"),
    "transfer_queue": ("transfer_queue", "'headrace[tq]'"),
    "pyarrow": ("pyarrow", "pyarrow"),
    "rich": ("rich", "rich"),
}


TENSORDICT_OF_TORCHRL = "0.14.3"


class MissingPackageError(ImportError):
    """An optional package is not installed, or cannot be imported. The message says what to install."""


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


def unmet(package: str) -> list[str]:
    """What an installed package requires, and what is installed instead.

    Example:
        >>> unmet("tensordict")
        []
    """
    from packaging.requirements import Requirement  # here: it is needed for an error only

    found = []
    for each in map(Requirement, metadata.requires(package) or ()):
        version = version_of(each.name)
        needed = each.marker is None or each.marker.evaluate({"extra": ""})
        if needed and not (version and each.specifier.contains(version, prereleases=True)):
            found.append(f"{each.name}{each.specifier}, and {version or 'none'} is installed")
    return found


def broken(package: str) -> str:
    """Why an installed package cannot be imported; empty if it can, or if it is not installed."""
    if (version := version_of(package)) is None:
        return ""
    try:
        import_module("torchrl.envs" if package == "torchrl" else package)
    except Exception as err:
        needs = "; ".join(f"it requires {each}" for each in unmet(package)) or f"{type(err).__name__}: {err}"
        return f"{package} {version} is installed and cannot be imported: {needs}"
    return ""


def refuses(package: str, version: str) -> str:
    """The installed packages that do not allow this version of a package, as text; empty if all do."""
    from packaging.requirements import InvalidRequirement, Requirement

    found = []
    for each in metadata.distributions():
        for line in each.requires or () if package in str(each.requires) else ():
            try:
                needs = Requirement(line)
            except InvalidRequirement:  # of an old package
                continue
            applies = needs.marker is None or needs.marker.evaluate({"extra": ""})
            if needs.name == package and applies and not needs.specifier.contains(version):
                found.append(f"{each.metadata['Name']} {each.version} requires {needs.name}{needs.specifier}")
    return "; ".join(sorted(set(found)))


def why_not(package: str) -> str:
    """How to install a package that cannot be imported; if it is installed, why it cannot be imported."""
    said, target = OPTIONAL[package]
    install = f"{said}: pip install {target}"
    if package == "torchrl" and (others := refuses("tensordict", TENSORDICT_OF_TORCHRL)):
        install += f" in another environment, because {others}, and TorchRL another version"
    return ". ".join(filter(None, [install, broken(package)]))


def import_extra(module: str, reader: str) -> ModuleType:
    """Import a module of an optional package.

    Raises:
        MissingPackageError: it cannot be imported.

    Example:
        >>> import_extra("pyarrow", "a report").__name__
        'pyarrow'
    """
    try:
        return import_module(module)
    except ImportError as err:
        raise MissingPackageError(f"{reader} needs {why_not(module.partition('.')[0])}") from err


def lacking(name: str, err: ImportError) -> ImportError:
    """The error of a public name whose import failed, with what to install if an optional package failed."""
    if isinstance(err, MissingPackageError):
        return err
    failed = [] if err.name is None else [err.name]
    frame = err.__traceback__
    while frame is not None:  # a package that cannot be imported raises in a module of its own
        failed.append(frame.tb_frame.f_globals.get("__name__", ""))
        frame = frame.tb_next
    for package in OPTIONAL:
        if any(each.partition(".")[0] == package for each in failed):
            return MissingPackageError(f"{name} needs {why_not(package)}")
    return err
