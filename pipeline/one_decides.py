"""``decide_on=first_rank``: which stages allow it, and how the other ranks get the decisions."""

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
    """The result of the split and of the stages after it, for one epoch."""

    places: dict[str, Tensor]
    """Minibatch, micro-batch, rank and loss weight of each row of the table, by name."""
    columns: dict[NestedKey, tuple[Tensor, torch.dtype, int]]
    """Columns that the stages have written (:meth:`Table.written_columns`)."""
    late: list[Late]
    """Changes that are applied to rows when they are gathered."""
    batch: TensorDictBase
    """The rows, with the token columns that the stages have changed."""


def check_by_table(stages: Mapping[str, Any]) -> None:
    """Check that all stages decide by the table alone, so that the first rank can run them for all.

    Raises:
        ValueError: some stages must run on each rank; the message names them and what each needs.
    """
    asked = {
        name: stage.needs_each_rank() if isinstance(stage, BatchTransform) else "code of your own"
        for name, stage in stages.items()
    }
    if any(asked.values()):
        named = ", ".join(f"{name!r} ({why})" for name, why in asked.items() if why)
        raise ValueError(
            "under pipeline.decide_on=first_rank all stages run on the first rank, on the table alone; these "
            f"stages must run on each rank: {named}. Set pipeline.decide_on=each_rank, or remove them"
        )


def hand_out_passes(table: Table, passes: Sequence[Epoch], plans: Sequence[Sequence[Plan]]) -> None:
    """Send each rank the epochs of its rows and its plans, if the first rank decides for all."""
    if table.ranks is None or not table.ranks.one_decides:
        return
    number = torch.empty(table.size, dtype=torch.int64)  # index of each row among those of its rank
    for rank in range(len(plans)):
        known = 0
        for a, b in table.spans(rank):
            number[a:b] = torch.arange(known, known + b - a)
            known += b - a

    def sent(plan: Plan) -> tuple[Any, ...]:
        padding = None if plan.padding is None else plan.padding.numpy()
        return number[plan.order].numpy(), padding, plan.sizes, number[plan.left].numpy()

    of_ranks = [[sent(plan) for plan in own] for own in plans]
    hand_out(table, [(each.places, each.columns) for each in passes], of_ranks)


def take_passes(rows: Rows, split: ShuffleSplit) -> tuple[list[Epoch], Any]:
    """Receive this rank's epochs and permutation from the first rank."""
    before = copy(rows.table)
    found, plans = hand_out(rows.table)
    passes = [Epoch(places, columns, [], rows.table.batch) for places, columns in found]
    own = [
        Plan(
            torch.from_numpy(order),
            None if padding is None else torch.from_numpy(padding),
            sizes,
            torch.from_numpy(left),
        )
        for order, padding, sizes, left in plans
    ]
    return passes, split.permuted_by_another(rows, own, before)
