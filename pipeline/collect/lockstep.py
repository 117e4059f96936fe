"""Yield batches on ranks that share a pipeline, if their sources end or fail at different times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase

from headrace.transforms.ranks import Ranks
from headrace.transforms.table import resolve_group
from headrace.transforms.table.options import takes_options


@takes_options
def on_every_rank(
    batches: Iterable[TensorDictBase],
    *,
    process_group: dist.ProcessGroup | str = "world",
    patience: float = 600.0,
) -> Iterator[TensorDictBase]:
    """Yield the batches of this rank until the sources of all ranks have ended.

    A pipeline with a process group must run every batch on every rank. A rank whose source has ended gets
    batches without rows as long as another rank has rows. If the source of one rank raises an error, all
    ranks raise.

    Args:
        batches: the source of this rank, such as ``assembler.batches(...)`` or ``assembled(...)``.
        process_group: the ranks; a process group, or ``world``.
        patience: seconds that the ranks wait for the slowest source.

    Raises:
        OtherRankError: while iterating: the source of another rank raised, or had no batch in time.
        ValueError: `patience` is not a finite number; while iterating: torch.distributed is not initialised.

    Example:
        >>> import torch.distributed as dist
        >>> from tensordict import TensorDict
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> [len(batch) for batch in on_every_rank([TensorDict({}, batch_size=[3])])]
        [3]
        >>> dist.destroy_process_group()
    """
    group = resolve_group(process_group)
    ranks, source = Ranks(group, patience=patience), iter(batches)
    while True:
        with ranks.block():
            ranks.place = "the next batch of its source"
            batch = next(source, None)
            if not any(ranks.gather_objects(batch is not None)):
                return
        yield TensorDict({}, batch_size=[0]) if batch is None else batch
