"""Packages that only some need."""

from __future__ import annotations

import importlib
from types import ModuleType


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
