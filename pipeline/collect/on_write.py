"""Whole groups alone on the way into a replay buffer, in this process or in an actor of Ray."""

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

from headrace.pipeline.installed import import_extra
from headrace.pipeline.ledger import Ledger
from headrace.pipeline.load import load_pipeline
from headrace.pipeline.pipeline import Pipeline
from headrace.transforms import GroupAssembler
from headrace.transforms.tensordicts import join_rows

from .assembling import check_patience
from .workers import WorkerWatch

COPY = "a copy of it in a worker process"


class AssembleOnWrite(Transform):
    """Write whole groups alone into a replay buffer, whoever extends it in this process.

    ``buffer.append_transform(AssembleOnWrite(assembler), invert=True)``: rows wait in the assembler, and an
    extend writes the groups that became whole, or nothing. With a pipeline, the first of its
    :meth:`Pipeline.halves`, they go on to it. What is sampled passes unchanged. The state is in that of the
    buffer. Where the buffer is an actor of Ray, see :func:`groups_on_write`.

    What refuses rows is raised at whoever writes, and, since that may be a process at which nobody looks, once
    more when the buffer is sampled.

    Worker processes would each have an assembler of their own, in which no group is ever whole: what they
    write is read by :func:`drained`, and assembled behind it.

    Args:
        assembler: which makes groups of rows; `groups` of them at a time. Without `partition_key`, since the
            ids of two partitions would be one in the buffer.
        pipeline: what runs over whole groups before they are written; None: nothing does.
        patience: seconds for which a worker may be silent while another one writes, as of :func:`assembled`;
            it is looked at when the buffer is sampled.
        worker_patience: the same, whatever pauses it has made.

    Raises:
        ValueError: the assembler has a `partition_key`; an option with a wrong value.
        TypeError: it is not on the way into a buffer.
        RuntimeError: it is copied into a worker process.
        BatchError: when rows are written: as :meth:`GroupAssembler.put`; so StalledError. When they are
            sampled: rows were refused since.
        StalledError: when they are sampled: a worker is silent.

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

    def __init__(
        self,
        assembler: GroupAssembler,
        pipeline: Pipeline | None = None,
        *,
        patience: float | None = None,
        worker_patience: float | None = None,
    ):
        check_patience(patience, worker_patience)
        if assembler.partition_key is not None:
            raise ValueError(
                "AssembleOnWrite takes an assembler without partition_key: in a buffer the ids of two "
                "partitions would be one. Number groups and rollouts over all of them"
            )
        super().__init__()
        self.assembler, self.pipeline, self._process = assembler, pipeline, os.getpid()
        self.error: Exception | None = None
        """What refused rows since the buffer was last sampled."""
        self._watch = WorkerWatch(patience, worker_patience)

    def _call(self, rows: TensorDictBase | None) -> TensorDictBase | None:
        if os.getpid() != self._process:
            raise RuntimeError(_misplaced(COPY))
        try:
            return self._written(rows)
        except Exception as err:  # whoever writes may be a process at which nobody looks
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
        if not batches:
            return None
        groups = join_rows(batches, "groups")
        return groups if self.pipeline is None else self.pipeline(groups)

    def _inv_call(self, sampled: TensorDictBase) -> TensorDictBase:
        error, self.error = self.error, None
        if error is not None:
            raise type(error)(f"rows were refused on their way into the buffer: {error}") from error
        self._watch.check(self.assembler)
        return sampled

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


class _Inverted(Transform):
    """A transform that a buffer inverts, for where a buffer takes none that is inverted: a factory."""

    def __init__(self, transform: Transform):
        super().__init__()
        self.transform = transform

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.transform._inv_call(next_tensordict)

    forward = _call

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.transform._call(tensordict)

    inv = _inv_call


def groups_on_write(
    *recipe: str,
    assembler: Mapping[str, Any] | None = None,
    patience: float | None = None,
    worker_patience: float | None = None,
    **options: Any,
) -> Transform:
    """Whole groups with their advantages on the way into a buffer that is an actor of Ray.

    ``RayReplayBuffer(transform_factory=partial(groups_on_write, "grpo", assembler={"group_size": 16}), …)``, in
    place of ``partial(MCAdvantage, grpo_size=16)``: in the actor this is an :class:`AssembleOnWrite` with the
    first half of the recipe. :func:`buffer_account` says what it did.

    Args:
        recipe: a recipe's name and overrides, as :func:`load_pipeline` takes them.
        assembler: options of :class:`GroupAssembler`.
        patience: as of :class:`AssembleOnWrite`.
        worker_patience: as of :class:`AssembleOnWrite`.
        options: keywords of :func:`load_pipeline`.

    Raises:
        ValueError: as :class:`GroupAssembler` and :func:`load_pipeline`.

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
        >>> rows = {"group_id": ids // 2, "rollout_id": ids, ("next", "done"): torch.ones(4, dtype=torch.bool)}
        >>> mask = torch.ones(4, 5, dtype=torch.bool)
        >>> rows |= {("next", "reward"): ids % 2 * 1.0, ("masks", "all_assistant_mask"): mask}
        >>> _ = buffer.extend(TensorDict(rows, batch_size=[4]))
        >>> buffer[:]["advantage"].flatten()
        tensor([-0.7071,  0.7071, -0.7071,  0.7071])
        >>> buffer_account(buffer).metrics["groups/trained"]
        2.0
    """
    first, _ = load_pipeline(*recipe, **options).halves()
    silence = {"patience": patience, "worker_patience": worker_patience}
    return _Inverted(AssembleOnWrite(GroupAssembler(**(assembler or {})), first, **silence))


@dataclass(frozen=True)
class BufferAccount:
    """What an :class:`AssembleOnWrite` did.

    Attributes:
        metrics: of the last run of its pipeline.
        ledger: where each row of that run went; None: there was none.
        counts: rows that left the assembler, by reason, so far.
        held: rows that wait.
        ready: whole groups that wait.
        emitted: groups that were handed out so far.
        error: what refused rows since the buffer was last sampled, in words; None: nothing did.
    """

    metrics: dict[str, float]
    ledger: Ledger | None
    counts: dict[str, int]
    held: int
    ready: int
    emitted: int
    error: str | None


def buffer_account(buffer: ReplayBuffer) -> BufferAccount:
    """What was done on the way into a replay buffer: of this process, or of one in an actor of Ray.

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
        ray = import_extra("ray", "ray", "buffer_account")
        return ray.get(buffer._rb.__ray_call__.remote(buffer_account))
    chain: list[Any] = [getattr(buffer, "_transform", None)]
    pipeline, assembled = None, None
    while chain:
        transform = chain.pop(0)
        if isinstance(transform, Compose):
            chain = [*transform, *chain]
        elif isinstance(transform, AssembleOnWrite):
            assembled, pipeline = transform, transform.pipeline
        elif isinstance(transform, Pipeline):
            pipeline = transform
        elif hasattr(transform, "transform"):  # one that is inverted
            chain.insert(0, transform.transform)
    if assembled is None:
        raise ValueError(f"buffer_account is for a buffer with an AssembleOnWrite; got {buffer!r}")
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
        "AssembleOnWrite works on rows on their way into a buffer of this process: append_transform(…, "
        f"invert=True); it got {found}. Around a collector use assembled(collector, assembler), and over a "
        "buffer that worker processes write assembled(drained(buffer), assembler)"
    )
