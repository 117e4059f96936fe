"""Let the first rank run the stages for all ranks, and send each rank its part of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms import ShuffleSplit
from headrace.transforms.distributed import hand_out
from headrace.transforms.rows import Rows
from headrace.transforms.split.plan import Plan
from headrace.transforms.stage import BatchTransform
from headrace.transforms.table import Late, Table


class Epoch(NamedTuple):
    """The results of the stages after the split, for one pass over the rows."""

    places: dict[str, Tensor]
    """The minibatch, micro-batch and rank of each row of the table, by name."""
    columns: dict[NestedKey, tuple[Tensor, torch.dtype, int]]
    """The columns that stages wrote (:meth:`Table.written_columns`)."""
    late: list[Late]
    """The changes that stages make to gathered rows."""
    batch: TensorDictBase
    """The rows, with the token columns that stages changed."""


def check_by_table(stages: Mapping[str, Any]) -> None:
    """Check that all stages decide only by the table, so that the first rank can run them alone.

    Raises:
        ValueError: some do not. Lists their names and what each needs.
    """
    needs = {
        name: stage.needs_each_rank() if isinstance(stage, BatchTransform) else "code of your own"
        for name, stage in stages.items()
    }
    if any(needs.values()):
        named = ", ".join(f"{name!r} ({why})" for name, why in needs.items() if why)
        raise ValueError(
            f"decide_on='first_rank' runs the stages only on the first rank, and these stages must run on "
            f"each rank: {named}. Set pipeline.decide_on=each_rank, or remove these stages"
        )


def hand_out_passes(table: Table, passes: Sequence[Epoch], plans: Sequence[Sequence[Plan]]) -> None:
    """Send each rank the passes over its rows and its plans, if the first rank decides."""
    if table.ranks is None or not table.ranks.one_decides:
        return
    number = torch.empty(table.size, dtype=torch.int64)  # the number of each row among those of its rank
    for rank in range(len(plans)):
        count = 0
        for start, stop in table.spans(rank):
            number[start:stop] = torch.arange(count, count + stop - start)
            count += stop - start
    of_ranks = [
        [
            (number[plan.order].numpy(), plan.padding.numpy(), plan.sizes, number[plan.left].numpy())
            for plan in own
        ]
        for own in plans
    ]
    hand_out(table, [(epoch.places, epoch.columns) for epoch in passes], of_ranks)


def take_passes(rows: Rows, split: ShuffleSplit) -> tuple[list[Epoch], Any]:
    """Receive the passes over the rows of this rank, and its permutations, from the first rank."""
    before = copy(rows.table)
    received, plans = hand_out(rows.table)
    passes = [Epoch(places, columns, [], rows.table.batch) for places, columns in received]
    own = [
        Plan(torch.from_numpy(order), torch.from_numpy(padding), sizes, torch.from_numpy(left))
        for order, padding, sizes, left in plans
    ]
    return passes, split.permuted_by_another(rows, own, before)
