"""Find faults of a run in its dump (``task=audit``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .audit_task import AuditFailed, audit_dump
    from .logged import LoggedAdvantages

__all__ = ["AuditFailed", "LoggedAdvantages", "audit_dump"]

__getattr__, __dir__ = lazy(__name__, __all__)
