"""Ray without processes: actors are objects of this process, and the store is a list.

Laws of actors can then be tried on thousands of calls per second.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

LOOP = asyncio.new_event_loop()


class Stored:
    """A reference to a value or to an error."""

    def __init__(self, value: Any = None, error: Exception | None = None):
        self.value, self.error = value, error


class Actor:
    """A handle of an actor. A call has ended when it returns; coroutines of actors await their calls."""

    def __init__(self, made: Any):
        self.made = made

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **words: self._run(name, *args, **words))

    def _run(self, name: str, *args: Any, **words: Any) -> Any:
        if self.made is None:
            return Stored(error=RuntimeError("the actor is dead"))
        coroutine = getattr(self.made, name)(*args, **words)
        if LOOP.is_running():
            return coroutine
        try:
            return Stored(LOOP.run_until_complete(asyncio.wait_for(coroutine, 10)))  # at most 10 s
        except Exception as error:
            return Stored(error=error)


def get(found: Any) -> Any:
    if isinstance(found, list):
        return [get(each) for each in found]
    if found.error is not None:
        raise found.error
    return found.value


def kill(actor: Actor) -> None:
    actor.made = None


@contextmanager
def ray_here() -> Iterator[Any]:
    """In this context, `import ray` gives this stand-in."""
    import ray.cloudpickle  # the real module packs rows

    here: Any = SimpleNamespace(
        __name__="ray",
        __path__=ray.__path__,
        remote=lambda **_: lambda made: SimpleNamespace(remote=lambda *args: Actor(made(*args))),
        put=Stored,
        get=get,
        kill=kill,
        wait=lambda tasks, **_: (tasks, []),
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "here"),
        exceptions=ray.exceptions,
        cloudpickle=ray.cloudpickle,
        util=SimpleNamespace(
            scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
        ),
    )
    with patch.dict(sys.modules, {"ray": here}):
        yield here
