"""What one batch leaves to the next: rows that a split holds back, and the place where a run resumes.

Also how rows are joined, saved and sent.
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
