"""Files that are written as a whole or not at all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make a temporary file beside `path`, and rename it, so that half a file is never read.

    Args:
        path: of the file; its folder must exist. A file that is there is replaced.
        write: writes the file that it is given the path of; what it raises leaves `path` as it was.

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
        os.replace(temporary, path)
        log.debug("%s is written", path)
    finally:
        temporary.unlink(missing_ok=True)
