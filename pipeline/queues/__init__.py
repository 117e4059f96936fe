"""Send rollouts and optimiser steps through TransferQueue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .in_place import GroupReplayBuffer, QueuedGroups
    from .queue_sampler import group_sampler, group_tags
    from .queues import RolloutQueue, StepQueue

__all__ = ["GroupReplayBuffer", "QueuedGroups", "RolloutQueue", "StepQueue", "group_sampler", "group_tags"]

__getattr__, __dir__ = lazy(__name__, __all__)
