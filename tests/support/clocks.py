"""Clocks of tests, whose time only passes while the test sleeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

MONOTONIC, SLEEP = time.monotonic, time.sleep


class Clock:
    """The time of a run that only passes while it sleeps. For other threads, real time goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: float = 0.0) -> None:
        self.thread, self.now = threading.get_ident(), now
        self.after = dict[float, Callable[[], Any]]()
        """What others do once so many seconds have passed."""
        for name in ("monotonic", "sleep"):
            monkeypatch.setattr(f"time.{name}", getattr(self, name))

    def monotonic(self) -> float:
        return self.now if threading.get_ident() == self.thread else MONOTONIC()

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() != self.thread:  # a thread of Ray, for example
            return SLEEP(seconds)
        self.now = round(self.now + seconds, 6)  # twenty waits of 0.05 s are one second
        for when in sorted(when for when in self.after if when <= self.now):
            self.after.pop(when)()
        return None
