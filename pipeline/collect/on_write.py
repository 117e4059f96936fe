"""Write only whole groups into a replay buffer, in this process or in a Ray actor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any, NoReturn

from tensordict import TensorDictBase
from torchrl.data import RayReplayBuffer, ReplayBuffer
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Compose, Transform
from torchrl.envs.transforms.transforms import _InvertTransform

from headrace.installed import import_extra
from headrace.pipeline.ledger import Ledger
from headrace.pipeline.load import load_pipeline
from headrace.pipeline.pipeline import Pipeline
from headrace.transforms import GroupAssembler
from headrace.transforms.carry import join_rows
from headrace.transforms.table.options import takes_options

from .assembling import check_patience
from .workers import WorkerWatch

COPY = "a copy of it in a worker process"


@takes_options
class AssembleOnWrite(Transform):
    """Write only whole groups into a replay buffer of this process.

    Append it with ``buffer.append_transform(AssembleOnWrite(assembler), invert=True)``. Rows wait in the
    assembler. Each ``extend`` writes the groups that became whole, or nothing. To run a pipeline on these
    groups first, append ``Compose(AssembleOnWrite(assembler), first)``, with the first of its
    :meth:`Pipeline.halves`. Sampled rows are unchanged. The buffer saves the state of this transform. For a
    buffer in a Ray actor see :func:`groups_on_write`.

    If rows are refused, ``extend`` raises the error. The writer may be a process whose errors are not shown,
    so the error is raised again when the buffer is next sampled.

    Do not copy it into worker processes: each would have its own assembler with incomplete groups. If worker
    processes write, read their rows with :func:`drained`, and assemble them after that.

    Args:
        assembler: makes groups from the rows, and hands out `groups` of them at a time. It must have no
            `partition_key`, because group ids of different partitions would collide in the buffer.
        worker_patience: seconds after which a silent worker raises while another one writes, as for
            :func:`assembled`. This is checked when the buffer is sampled. None: never.

    Raises:
        ValueError: the assembler has a `partition_key`; or an option has an invalid value.
        TypeError: this transform is used on sampled rows or in an environment.
        RuntimeError: this transform is copied into a worker process.
        BatchError: when rows are written: :meth:`GroupAssembler.put` raised. When rows are sampled: rows were
            refused since the last sample.
        StalledError: when rows are written: :meth:`GroupAssembler.put` raised. When rows are sampled: a
            worker is silent.

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

    requires_shared_write_state = True  # read by TorchRL if the transform is not inverted

    def __init__(
        self,
        assembler: GroupAssembler,
        *,
        worker_patience: float | None = None,
    ):
        check_patience(None, worker_patience)
        if assembler.partition_key is not None:
            raise ValueError(
                "AssembleOnWrite needs an assembler without partition_key, because the ids of different "
                "partitions would collide in the buffer: make ids unique over all partitions"
            )
        super().__init__()
        self.assembler, self._process = assembler, os.getpid()
        self.error: Exception | None = None
        """The error of the last refused rows since the buffer was sampled."""
        self._watch = WorkerWatch(None, worker_patience)

    def _call(self, rows: TensorDictBase | None) -> TensorDictBase | None:
        if os.getpid() != self._process:
            raise RuntimeError(_misplaced(COPY))
        try:
            return self._written(rows)
        except Exception as err:  # raised again on sampling: the writer's errors may not be shown
            self.error = err
            raise

    def _written(self, rows: TensorDictBase | None) -> TensorDictBase | None:
        if rows is not None:
            self._watch.begin()
            self.assembler.put(rows)
            self._watch.saw(rows, self.assembler)
        batches = []
        while (batch := self.assembler.take()) is not None:
            batches.append(batch)
        return join_rows(batches, "groups") if batches else None

    def _inv_call(self, sampled: TensorDictBase) -> TensorDictBase:
        error, self.error = self.error, None
        if error is not None:
            raise type(error)(f"rows were refused when they were written into the buffer: {error}") from error
        self._watch.check(self.assembler)
        return sampled

    def forward(self, tensordict: TensorDictBase) -> NoReturn:
        """Refuse sampled rows."""
        raise TypeError(_misplaced("sampled rows, or a direct call"))

    def set_container(self, container: Transform | EnvBase) -> None:
        """Refuse an environment."""
        if isinstance(container, EnvBase):
            raise TypeError(_misplaced("an environment's steps"))
        super().set_container(container)

    def get_extra_state(self) -> dict[str, Any]:
        """The state of the assembler, which the buffer saves with its own."""
        return self.assembler.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.assembler.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise RuntimeError(_misplaced(COPY))
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._process = os.getpid()


def groups_on_write(
    *recipe: str,
    assembler: Mapping[str, Any] | None = None,
    worker_patience: float | None = None,
    **options: Any,
) -> Transform:
    """A transform factory that writes whole groups with their advantages into a buffer in a Ray actor.

    Set ``RayReplayBuffer(transform_factory=partial(groups_on_write, "grpo", assembler={"group_size": 8}))``
    in place of ``partial(MCAdvantage, grpo_size=8)``. In the actor this makes an :class:`AssembleOnWrite`
    with the first half of the recipe. :func:`buffer_account` reports its counts.

    Args:
        recipe: the name and overrides of a recipe, as for :func:`load_pipeline`.
        assembler: options of :class:`GroupAssembler`.
        worker_patience: as for :class:`AssembleOnWrite`.
        options: keywords of :func:`load_pipeline`.

    Raises:
        ValueError: :class:`GroupAssembler` or :func:`load_pipeline` raises it.

    Example:
        >>> from functools import partial
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(
        ...     storage=LazyTensorStorage(9),
        ...     transform_factory=partial(groups_on_write, "grpo", assembler={"group_size": 2}),
        ... )
        >>> ids = torch.tensor([0, 2, 1, 3])
        >>> rows = {"group_id": ids // 2, "rollout_id": ids, ("next", "reward"): ids % 2 * 1.0}
        >>> done, mask = torch.ones(4, dtype=torch.bool), torch.ones(4, 5, dtype=torch.bool)
        >>> rows |= {("next", "done"): done, ("masks", "all_assistant_mask"): mask}
        >>> _ = buffer.extend(TensorDict(rows, batch_size=[4]))
        >>> buffer[:]["advantage"].flatten()
        tensor([-0.7071,  0.7071, -0.7071,  0.7071])
        >>> buffer_account(buffer).metrics["groups/trained"]
        2.0
    """
    first, _ = load_pipeline(*recipe, **options).halves()
    on_write = AssembleOnWrite(GroupAssembler(**(assembler or {})), worker_patience=worker_patience)
    return _InvertTransform(Compose(on_write, first))


@dataclass(frozen=True)
class BufferAccount:
    """The counts and results of an :class:`AssembleOnWrite`.

    Attributes:
        metrics: the metrics of the last run of its pipeline.
        ledger: the ledger of the last run of its pipeline; None without a run.
        counts: number of rows that left the assembler without being taken, by reason.
        held: number of rows that wait.
        ready: number of whole groups that wait.
        emitted: number of groups that were taken.
        error: the error of the last refused rows since the buffer was sampled; None without one.
    """

    metrics: dict[str, float]
    ledger: Ledger | None
    counts: dict[str, int]
    held: int
    ready: int
    emitted: int
    error: str | None


def buffer_account(buffer: ReplayBuffer) -> BufferAccount:
    """Report on the :class:`AssembleOnWrite` of a replay buffer, in this process or in a Ray actor.

    Raises:
        ValueError: the buffer has no :class:`AssembleOnWrite`.

    Example:
        >>> from torchrl.data import LazyTensorStorage
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(9))
        >>> _ = buffer.append_transform(AssembleOnWrite(GroupAssembler(group_size=2)), invert=True)
        >>> buffer_account(buffer).counts["lost"]
        0
    """
    if isinstance(buffer, RayReplayBuffer):
        ray = import_extra("ray", "buffer_account")
        return ray.get(buffer._rb.__ray_call__.remote(buffer_account))
    chain: list[Any] = [getattr(buffer, "_transform", None)]
    pipeline, assembled = None, None
    while chain:
        transform = chain.pop(0)
        if isinstance(transform, Compose):
            chain += [*transform]
        elif isinstance(transform, AssembleOnWrite):
            assembled = transform
        elif isinstance(transform, Pipeline):
            pipeline = transform
        elif hasattr(transform, "transform"):  # an inverted transform
            chain.append(transform.transform)
    if assembled is None:
        raise ValueError(f"buffer_account needs a buffer with an AssembleOnWrite; got {buffer!r}")
    own = assembled.assembler
    return BufferAccount(
        metrics={} if pipeline is None else pipeline.metrics,
        ledger=None if pipeline is None else pipeline.ledger,
        counts=own.counts,
        held=own.held,
        ready=own.ready,
        emitted=own.emitted,
        error=None if assembled.error is None else str(assembled.error),
    )


def _misplaced(found: str) -> str:
    return (
        "AssembleOnWrite works on rows that are written into a buffer of this process: use "
        f"append_transform(…, invert=True); it got {found}. For a collector use assembled(collector, "
        "assembler). For a buffer that worker processes write use assembled(drained(buffer), assembler)"
    )
