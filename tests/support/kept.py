"""Objects that one process of a pytest run makes, and that the other processes read."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any


def kept(key: str, make: Callable[[], Any]) -> Any:
    """A new copy of the object that `make` returns. `make` runs once per key."""
    file = Path(os.environ["HEADRACE_KEPT"], sha256(key.encode()).hexdigest())
    if not file.exists():
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_bytes(pickle.dumps(make()))
        draft.rename(file)
    return pickle.loads(file.read_bytes())
