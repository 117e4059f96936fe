"""What stands over a source of batches, and is it to whoever asks for anything else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torchrl.collectors import MultiAsyncCollector


class OverSource:
    """Makes batches of those of a source. What is not iteration is the source's: weights, shutdown, …"""

    def __init__(self, source: Any):
        self.source = source

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """The state of all but the source, under names of its own."""

    @abstractmethod
    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`own_state`."""

    def state_dict(self) -> dict[str, Any]:
        """Its own state, and that of the source where it has one.

        Raises:
            TypeError: the source is a MultiAsyncCollector.
        """
        if isinstance(self.source, MultiAsyncCollector):
            raise TypeError(
                "a MultiAsyncCollector that is asked for its state throws away the rows that its workers are "
                "collecting: save what is over it alone, stream.own_state(), or that of the assembler, "
                "assembler.state_dict(). Rollouts under way end with their workers: set the assembler's "
                "timeout, which lets go of their groups"
            )
        own = self.own_state()
        return own | ({"source": self.source.state_dict()} if hasattr(self.source, "state_dict") else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: it is of one with other options; one source has a state and the other has none.
        """
        has_state = hasattr(self.source, "load_state_dict")
        if has_state != ("source" in state):
            raise ValueError(
                f"the state {'has' if 'source' in state else 'lacks'} that of a source, and this source "
                f"{'takes' if has_state else 'takes no'} state"
            )
        self.load_own_state(state)
        if has_state:
            self.source.load_state_dict(state["source"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":  # while it is copied it has none
            raise AttributeError(name)
        return getattr(self.source, name)
