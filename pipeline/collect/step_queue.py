"""TransferQueue as the way of optimiser steps to ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from headrace.transforms import BatchError, StalledError
from headrace.transforms.options import at_least
from headrace.transforms.rows import take_rows
from headrace.transforms.schema import RANK, read_written

from .assembling import check_patience
from .extras import import_extra
from .queue_rows import END, POLL, encode_rows, fetch_rows


class StepQueue:
    """Optimiser steps, through partitions of TransferQueue, to the ranks that train.

    ::

        queue = StepQueue("steps", ranks=2)                         # with pipeline.stages.split.ranks=2
        for batch in assembled(source, assembler):                  # one process runs the pipeline
            queue.put(pipeline.minibatches(batch))
        queue.end()
        optimise(StepQueue("steps", ranks=2).minibatches(rank), loss, optimizer, process_group="world")

    A rank gets its rows of every step, in their order, and takes part without rows in a step that has none
    for it. Its partition is the name, a slash and its number.

    Args:
        partition: of the queue; a name that no earlier run has used.
        ranks: that train, ≥ 1.
        max_steps: that wait for a rank before :meth:`put` waits. None: any number.

    Raises:
        ImportError: the extra `tq` is not installed.
        ValueError: an option with a wrong value.
    """

    def __init__(self, partition: str, *, ranks: int, max_steps: int | None = None):
        self._queue()
        self.partition, self.ranks = partition, at_least("ranks", ranks, 1, required=True)
        self.max_steps = at_least("max_steps", max_steps, 1)
        self.steps = 0
        """Steps that were put."""

    @staticmethod
    def _queue() -> Any:
        return import_extra("transfer_queue", "tq", "StepQueue")

    def put(self, minibatches: Iterable[TensorDictBase], *, patience: float | None = None) -> int:
        """Send optimiser steps, and return how many.

        Args:
            minibatches: of a run, cut for all ranks: ``ShuffleSplit(ranks=…)`` without a rank of its own.
            patience: seconds for which to wait until a rank takes a step. None: without end.

        Raises:
            MissingKeyError: rows do not say which rank they are for.
            BatchError: they are for a rank that there is not.
            StalledError: a rank has taken none in time.
        """
        before, patience = self.steps, check_patience(patience)
        for minibatch in minibatches:
            # All is looked at before anything is sent: else some ranks would have a step that others lack.
            parts = rows_by_rank(minibatch, self.ranks)
            for rank in range(self.ranks):
                self._wait_for_room(rank, patience)
            for rank, part in enumerate(parts):
                self._send(rank, part)
            self.steps += 1
        return self.steps - before

    def _send(self, rank: int, rows: TensorDictBase) -> None:
        name = f"{self.partition}/{rank}"
        tag: dict[str, Any] = {}
        if len(rows):
            columns, tag = encode_rows(rows)
            keys = [f"{self.steps}/{row}" for row in range(len(rows))]
            self._queue().kv_batch_put(keys, name, fields=columns, tags=[tag] * len(rows))
        self._queue().kv_batch_put([f"{self.steps}"], name, tags=[tag | {"rows": len(rows)}])

    def _wait_for_room(self, rank: int, patience: float | None) -> None:
        asked = time.monotonic()
        while self.max_steps is not None and len(waiting := self._tags(rank)) >= self.max_steps:
            if patience is not None and time.monotonic() - asked >= patience:
                first = min(waiting, key=int)
                raise StalledError(f"rank {rank} has not taken optimiser step {first} for {patience:g} s")
            time.sleep(POLL)

    def _tags(self, rank: int) -> dict[str, Any]:
        """Of the steps that a rank has not taken, by number."""
        name = f"{self.partition}/{rank}"
        tags = self._queue().kv_list(name).get(name, {})
        return {key: tag for key, tag in tags.items() if "/" not in key and tag}

    def end(self) -> None:
        """Say that no more steps come."""
        for rank in range(self.ranks):
            self._queue().kv_batch_put([END], f"{self.partition}/{rank}", tags=[{END: self.steps}])

    def minibatches(
        self, rank: int, *, first: int = 0, patience: float | None = None
    ) -> Iterator[TensorDictBase]:
        """Yield a rank's part of each step.

        Args:
            rank: which.
            first: the step to begin with: a rank that goes on after a restart has trained those before.
            patience: seconds for which to wait for a step. None: without end.

        Raises:
            StalledError: none came in time.
            BatchError: the queue has lost rows of a step.
        """
        return self._take_steps(rank, first, check_patience(patience))

    def _take_steps(self, rank: int, step: int, patience: float | None) -> Iterator[TensorDictBase]:
        name, asked = f"{self.partition}/{rank}", time.monotonic()
        while True:
            tags = self._tags(rank)
            if (tag := tags.get(f"{step}")) is not None:
                keys = [f"{step}/{row}" for row in range(tag["rows"])]
                rows = fetch_rows(self._queue(), keys, name, tag) if keys else TensorDict({}, batch_size=[0])
                self._queue().kv_clear([*keys, f"{step}"], name)
                yield rows
                step, asked = step + 1, time.monotonic()
            elif END in tags and tags[END][END] == step:
                self._queue().kv_clear([END], name)
                return
            elif patience is not None and time.monotonic() - asked >= patience:
                raise StalledError(f"rank {rank} has waited {patience:g} s for optimiser step {step}")
            else:
                time.sleep(POLL)


def rows_by_rank(minibatch: TensorDictBase, ranks: int) -> list[TensorDictBase]:
    """The part of each rank in an optimiser step.

    Raises:
        MissingKeyError: rows do not say which rank they are for, and there are several.
        BatchError: they are for a rank that there is not.

    Example:
        >>> minibatch = TensorDict({RANK: torch.tensor([0, 0, 1]), "x": torch.arange(3)}, batch_size=[3])
        >>> [part["x"].tolist() for part in rows_by_rank(minibatch, 3)]
        [[0, 1], [2], []]
    """
    rank = torch.zeros(len(minibatch), dtype=torch.int64)
    if ranks > 1 and len(minibatch):
        rank = read_written(minibatch, RANK, reader="StepQueue", writer="ShuffleSplit")
    if bool((rank >= ranks).any()):
        raise BatchError(
            f"rows must be for ranks 0 to {ranks - 1}; found some for rank {int(rank.max())}: ranks must be "
            "those of the split"
        )
    return [take_rows(minibatch, (rank == each).nonzero().flatten()) for each in range(ranks)]
