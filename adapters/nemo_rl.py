"""Every prompt trained in time in NeMo RL: a sampler for ``async_rl.sampler``, by the rule of GroupAssembler.

NVIDIA-NeMo/RL at 7ea279abfb (2026-08-22), nemo_rl/algorithms/async_utils/staleness_sampler.py:
``PromptGroupSampler``, and replay_buffer.py: ``TQReplayBuffer``. It imports nothing of NeMo RL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.transforms.streams import Steps, waits_for
from headrace.transforms.table.options import at_least

__all__ = ["DeadlineSampler"]

POLL = 0.005
"""Seconds between two looks at the version of the trainer, as in NeMo RL's own samplers."""


class Slot(NamedTuple):
    """A slot of the buffer, as the rule reads it."""

    born: int
    order: int
    announced: bool = True
    is_ready: bool = False
    """Whether its rows may be younger. They are not: NeMo RL stamps a slot when generation begins."""


class DeadlineSampler:
    """Trains every prompt that was dispatched, and none after its deadline, whatever it takes.

    With G prompt groups a step, a = `steps_ahead` and k = `max_staleness_versions`, these are the rules of
    ``GroupAssembler(on_stale="wait")``, see :mod:`headrace.transforms.streams.steps`:

    1. A batch of G prompts is dispatched if at most a · G groups are outstanding, so (a + 1) · G afterwards;
       also if fewer than G are, so that a lost prompt stops no step.
    2. A step takes G groups at once: those that were dispatched first.
    3. It waits if otherwise a group could no longer be trained in time. Nothing is evicted or aborted.

    Args:
        buffer: NeMo RL's ``TQReplayBuffer``. Its ``reserve`` is replaced by one that counts.
        max_staleness_versions: k, the largest number of versions between a group's weights and the trainer's.
        steps_ahead: a ≤ k, about the mean age of the groups; None: 2, or k if that is less.
        groups: G; None: what the trainer says at its start, its ``grpo.num_prompts_per_step``.

    Raises:
        ValueError: an option has an invalid value.
    """

    is_on_policy = False

    def __init__(
        self,
        buffer: Any,
        *,
        max_staleness_versions: int,
        steps_ahead: int | None = None,
        groups: int | None = None,
    ):
        if max_staleness_versions == 0:
            raise ValueError(
                "DeadlineSampler needs max_staleness_versions ≥ 1, got 0: with 0 a prompt that fails would "
                "stop its step for ever. To train on the newest weights only, set async_rl.sampler to "
                "{name: in_order, max_lookahead_versions: 0}"
            )
        self.max_staleness = at_least("max_staleness_versions", max_staleness_versions, 1)
        self.ahead = min(2, self.max_staleness) if steps_ahead is None else steps_ahead
        if not 0 <= self.ahead <= self.max_staleness:
            raise ValueError(
                f"steps_ahead must be from 0 to max_staleness_versions ({self.max_staleness}), or groups are "
                f"too old before they can be trained; got {steps_ahead}"
            )
        self.groups = at_least("groups", groups, 1)
        self.buffer, self.steps = buffer, Steps()
        self.unreserved = 0
        """Prompts that may be dispatched, and have no slot yet."""
        self._reserve, buffer.reserve = buffer.reserve, self.reserve

    def reserve(self, **options: Any) -> Any:
        """The buffer's own, counted. Of a prompt that is tried again the second slot counts for another one,
        until all prompts of the batch have one."""
        self.unreserved = max(0, self.unreserved - 1)
        return self._reserve(**options)

    def required_buffer_capacity(self, groups_per_step: int) -> int:
        """The least ``async_rl.max_buffered_rollouts``. The trainer asks for it before it starts."""
        self.groups = groups_per_step if self.groups is None else self.groups
        return (max(self.ahead, 1) + 1) * groups_per_step

    def set_dispatch_index(self, resume_from_step: int) -> None:
        """The trainer starts at this step."""
        self._at(at_least("resume_from_step", resume_from_step, 0))

    def outstanding(self, version: int) -> int:
        """Groups that were dispatched, and are not lost or trained. A step's count until it is over."""
        self._at(version)
        return self.unreserved + len(self.buffer.ready_list) + self.steps.taken

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> None:
        """Wait until the next batch of prompts may be dispatched. It gets no target step."""
        if self.groups is None:
            raise ValueError("DeadlineSampler must know the prompts of a step before the first: set groups")
        while self.outstanding(trainer_version_fn()) >= max(self.ahead * self.groups + 1, self.groups):
            await asyncio.sleep(POLL)
        self.unreserved += self.groups

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> tuple[Any, int]:
        """The rows and the number of the groups of a step; or None and 0 while it waits.

        All groups of a step at once, whatever `min_prompt_groups` is: rule 3 is about all of them.
        """
        self._at(current_train_weight)
        slots = [Slot(born, order) for order, born in enumerate(self.buffer.start_weight_list)]
        ready: list[Any] = [slot for slot in slots if self.buffer.ready_list[slot.order]]
        waiting: list[Any] = [slot for slot in slots if not self.buffer.ready_list[slot.order]]
        if waits_for(self.steps, ready, waiting, max_prompt_groups, self) is not None:
            return None, 0
        taken = self.steps.in_order(ready)[:max_prompt_groups]
        if len(taken) < max_prompt_groups:
            return None, 0
        first, *others = [self.buffer.meta_list[slot.order] for slot in taken]
        self.steps.take([slot.born for slot in taken])
        await self.buffer.remove([slot.order for slot in taken], remove_in_dp=False)
        return first.concat(*others), len(taken)

    async def evict(self, *, current_train_weight: int) -> int:
        """Nothing: no group becomes too old."""
        return 0

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        """Never: each is trained in time."""
        return False

    def _at(self, version: int) -> None:
        """The trainer has this version: the number of its steps that are over."""
        while self.steps.over < version:
            self.steps.end()
            self.steps.begin(self.steps.over)
