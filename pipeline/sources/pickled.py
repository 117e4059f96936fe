"""Files of ``torch.save``, loaded without running code and without more memory than they have bytes for.

They are zip archives since torch 1.6; the format before that is refused.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from .malformed import SourceError, first_line

# What plain data and tensors call. Of what else torch holds for safe, much takes memory by a size that is
# claimed: bytearray(2**40), torch.LongTensor(2**40), a hexadecimal encoding of an encoding.
CALLED = re.compile(rb"c(?=((?:__builtin__|builtins|_?codecs|collections|torch[\w.]*)\n\w+)\n)")
ALLOWED = re.compile(
    rb"collections\nOrderedDict|(?:__builtin__|builtins)\n(?:set|complex)"
    rb"|torch\._utils\n_rebuild_(?:tensor_v2|tensor_v3|parameter)"
    rb"|torch\n(?:Size|device|bool|[a-z]+\d+\w*|(?!Untyped|Typed)\w+Storage)"
)


def load_plain(path: Path) -> Any:
    """The plain data and tensors of a file of ``torch.save``; nothing in it is executed.

    Raises:
        SourceError: it holds something else, or is damaged, compressed, or not an archive.
    """
    try:
        _check_size(path)
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as err:  # a damaged file makes the unpickler raise anything
        raise SourceError(
            f"{path}: a dump must load as plain data and tensors, without running code; "
            f"found {first_line(err)}"
        ) from None


def _check_size(path: Path) -> None:
    """Check that the archive is as large as what is in it, before that is in memory.

    Raises:
        ValueError: it is not.
    """
    with zipfile.ZipFile(path) as archive:
        items = archive.infolist()
        if any(item.compress_type != zipfile.ZIP_STORED for item in items):
            raise ValueError("a compressed archive, which torch.save does not write")
        if (size := sum(item.file_size for item in items)) > path.stat().st_size:
            raise ValueError(f"{size} bytes in an archive of {path.stat().st_size}")
        for item in items:
            if item.filename.endswith(".pkl"):
                for name in CALLED.findall(archive.read(item)):
                    if not ALLOWED.fullmatch(name):
                        raise ValueError(f"a call of {name.decode().replace(chr(10), '.')}")
