"""Whole groups alone on the way into a replay buffer."""

from __future__ import annotations

import os
from multiprocessing.context import get_spawning_popen
from typing import Any, NoReturn

from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform

from headrace.transforms import GroupAssembler
from headrace.transforms.tensordicts import join_rows

COPY = "a copy of it in a worker process"


class AssembleOnWrite(Transform):
    """Write whole groups alone into a replay buffer, whoever extends it in this process.

    ``buffer.append_transform(AssembleOnWrite(assembler), invert=True)``: rows wait in the assembler, and an
    extend writes the groups that became whole, or nothing. With a pipeline they go on to it where both are
    appended as one, in this order: ``Compose(AssembleOnWrite(assembler), first)``. What is sampled passes
    unchanged. The state is in that of the buffer.

    Worker processes would each have an assembler of their own, in which no group is ever whole: what they
    write is read by :func:`drained`, and assembled behind it.

    Args:
        assembler: which makes groups of rows; `groups` of them at a time. Without `partition_key`, since the
            ids of two partitions would be one in the buffer.

    Raises:
        ValueError: the assembler has a `partition_key`.
        TypeError: it is not on the way into a buffer.
        RuntimeError: it is copied into a worker process.
        BatchError: when rows are written: as :meth:`GroupAssembler.put`; so StalledError.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(9))
        >>> _ = buffer.append_transform(AssembleOnWrite(GroupAssembler(group_size=2)), invert=True)
        >>> for rollout in (0, 2, 1):
        ...     ids = {"group_id": [rollout // 2], "rollout_id": [rollout], ("next", "done"): [True]}
        ...     _ = buffer.extend(TensorDict(ids, batch_size=[1]))
        ...     print(len(buffer))
        0
        0
        2
    """

    requires_shared_write_state = True  # TorchRL looks at it where it is not inverted

    def __init__(self, assembler: GroupAssembler):
        if assembler.partition_key is not None:
            raise ValueError(
                "AssembleOnWrite takes an assembler without partition_key: in a buffer the ids of two "
                "partitions would be one. Number groups and rollouts over all of them"
            )
        super().__init__()
        self.assembler, self._process = assembler, os.getpid()

    def _call(self, rows: TensorDictBase | None) -> TensorDictBase | None:
        if os.getpid() != self._process:
            raise RuntimeError(_misplaced(COPY))
        if rows is not None:
            self.assembler.put(rows)
        batches = []
        while (batch := self.assembler.take()) is not None:
            batches.append(batch)
        return join_rows(batches, "groups") if batches else None

    def forward(self, tensordict: TensorDictBase) -> NoReturn:
        """Refuse rows that are no longer on their way into a buffer."""
        raise TypeError(_misplaced("rows that are sampled, or passed by hand"))

    def set_container(self, container: Transform | EnvBase) -> None:
        """Refuse an environment."""
        if isinstance(container, EnvBase):
            raise TypeError(_misplaced("an environment's steps"))
        super().set_container(container)

    def get_extra_state(self) -> dict[str, Any]:
        """That of the assembler, for the state of the buffer."""
        return self.assembler.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.assembler.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise RuntimeError(_misplaced(COPY))
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._process = os.getpid()


def _misplaced(found: str) -> str:
    return (
        "AssembleOnWrite works on rows on their way into a buffer of this process: append_transform(…, "
        f"invert=True); it got {found}. Around a collector use assembled(collector, assembler), and over a "
        "buffer that worker processes write assembled(drained(buffer), assembler)"
    )
