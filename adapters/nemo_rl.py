"""A sampler for NeMo RL that trains every prompt in time: ``async_rl.sampler``, docs/coming-from/nemo-rl.md.

NVIDIA-NeMo/RL at 7ea279abfb (2026-08-22), nemo_rl/algorithms/async_utils/: ``PromptGroupSampler`` in
staleness_sampler.py, and ``TQReplayBuffer`` in replay_buffer.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.transforms.streams import Steps, waits_for

__all__ = ["DeadlineSampler"]

POLL = 0.005  # seconds, as in NeMo RL's own samplers


class Slot(NamedTuple):
    """A slot of the buffer, with the policy version when the slot began, which rows do not change."""

    born: int
    order: int
    announced: bool = True
    is_ready: bool = False


class DeadlineSampler:
    """Sample from NeMo RL's buffer by the rules of ``GroupAssembler(on_stale="wait")``, see streams/steps.py.

    Args:
        buffer: a ``TQReplayBuffer``. Its method ``reserve`` is replaced by :meth:`reserve`.
        max_staleness_versions: largest number of versions that a group may be behind the trainer, ≥ 1.
        steps_ahead: steps for which groups are dispatched ahead; None: min(2, max_staleness_versions).
    """

    is_on_policy = False

    def __init__(self, buffer: Any, *, max_staleness_versions: int, steps_ahead: int | None = None):
        ahead = min(2, max_staleness_versions) if steps_ahead is None else steps_ahead
        if not 0 <= ahead <= max_staleness_versions or max_staleness_versions == 0:
            raise ValueError(
                "needs max_staleness_versions ≥ 1, and steps_ahead from 0 to max_staleness_versions; got "
                f"{max_staleness_versions} and {ahead}. With max_staleness_versions 0, a prompt that fails "
                "would stop its step for ever: use {name: in_order, max_lookahead_versions: 0} instead"
            )
        self.max_staleness = max_staleness_versions
        self.buffer, self.steps, self.ahead, self.groups = buffer, Steps(), ahead, 0
        self.unreserved = 0  # prompts of admitted batches that have no slot yet
        self._reserve, buffer.reserve = buffer.reserve, self.reserve

    def reserve(self, **options: Any) -> Any:
        """Call the buffer's method. A prompt that is tried again reserves twice: `unreserved` stops at 0."""
        self.unreserved = max(0, self.unreserved - 1)
        return self._reserve(**options)

    def required_buffer_capacity(self, groups_per_step: int) -> int:
        """Return the least ``max_buffered_rollouts``, and note the number of groups of a step."""
        self.groups = groups_per_step
        return (max(self.ahead, 1) + 1) * groups_per_step

    def set_dispatch_index(self, resume_from_step: int) -> None:
        """Note the step with which the trainer begins."""
        self._at(resume_from_step)

    def outstanding(self, version: int) -> int:
        """Count the dispatched groups, except lost groups and groups of steps that have ended."""
        self._at(version)
        return self.unreserved + len(self.buffer.ready_list) + self.steps.taken

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> None:
        """Wait until groups of at most `steps_ahead` steps are outstanding. Then admit groups of one step.

        The wait also ends if fewer groups than one step's are outstanding, to replace failed prompts.
        """
        if not self.groups:
            raise ValueError("call required_buffer_capacity, which gets the groups of a step, before admit")
        while self.outstanding(trainer_version_fn()) >= max(self.ahead * self.groups + 1, self.groups):
            await asyncio.sleep(POLL)
        self.unreserved += self.groups

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> tuple[Any, int]:
        """Return the groups of a step and their number, or None and 0 to wait. Ignore `min_prompt_groups`."""
        self._at(current_train_weight)
        slots: list[Any] = [Slot(born, order) for order, born in enumerate(self.buffer.start_weight_list)]
        ready = [slot for slot in slots if self.buffer.ready_list[slot.order]]
        waiting = [slot for slot in slots if not self.buffer.ready_list[slot.order]]
        waits = waits_for(self.steps, ready, waiting, max_prompt_groups, self) is not None
        if waits or len(ready) < max_prompt_groups:
            return None, 0
        taken = self.steps.in_order(ready)[:max_prompt_groups]
        first, *others = [self.buffer.meta_list[slot.order] for slot in taken]
        self.steps.take([slot.born for slot in taken])
        await self.buffer.remove([slot.order for slot in taken], remove_in_dp=False)
        return first.concat(*others), len(taken)

    async def evict(self, *, current_train_weight: int) -> int:
        """Evict nothing, because no group is too old."""
        return 0

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        """Return False, because no group will be too old."""
        return False

    def _at(self, version: int) -> None:
        while self.steps.over < version:
            self.steps.end()
            self.steps.begin(self.steps.over)
