"""RL post-training steps between a TorchRL collector and the loss.

:mod:`headrace.transforms` has what happens to a batch, :mod:`headrace.pipeline` how it is chained, run and
shown, and :mod:`headrace.conf` the recipes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

__all__ = ["__version__"]

# A library prints nothing by itself: who wants to see it configures `logging`.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # here: it is asked for rarely, and takes as long as all else

    globals()[name] = found = version("headrace")
    return found
