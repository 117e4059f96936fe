"""Write a file as a whole, so that no reader sees half of it, even if the process dies."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def write_whole(path: Path, write: Callable[[Path], Any], *, durable: bool = False) -> None:
    """Let `write` make a temporary file beside `path`, then rename this file to `path`.

    Args:
        path: path of the file; its folder must exist. An existing file is replaced.
        write: gets the path of the temporary file, and writes it. If it raises, `path` is not changed.
        durable: whether the file is on the disk when this function returns, even if the machine dies then.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_whole(Path(folder) / "a.txt", lambda file: file.write_text("all of it"))
        ...     [(file.name, file.read_text()) for file in Path(folder).iterdir()]
        [('a.txt', 'all of it')]
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        if durable:
            _sync(temporary)
        os.replace(temporary, path)
        if durable:
            _sync(path.parent)
        log.debug("%s is written", path)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
