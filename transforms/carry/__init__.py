"""State that passes between batches: rows that a split carries, and the point where a run resumes.

Functions here also join, save and send rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .memory import SplitMemory
    from .saved_rows import from_plain, join_rows, to_plain
    from .whole_files import write_whole

__all__ = ["SplitMemory", "from_plain", "join_rows", "to_plain", "write_whole"]

__getattr__, __dir__ = lazy(__name__, __all__)
