"""The first rank decides for all: with which stages it can, and how the others get their passes."""

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
    """What the stages behind the cut made of one pass over the rows."""

    places: dict[str, Tensor]
    """Where each row of the table is trained, by name."""
    columns: dict[NestedKey, tuple[Tensor, torch.dtype, int]]
    """What stages have written (:meth:`Table.written_columns`)."""
    late: list[Late]
    """What they do to gathered rows."""
    batch: TensorDictBase
    """The rows, with the columns of tokens that they have changed."""


def check_by_table(stages: Mapping[str, Any]) -> None:
    """Check that stages decide by the table alone, and take part on no other rank.

    Raises:
        ValueError: some do not, with their names and what each needs.
    """
    asked = {
        name: stage.needs_each_rank() if isinstance(stage, BatchTransform) else "code of your own"
        for name, stage in stages.items()
    }
    if any(asked.values()):
        named = ", ".join(f"{name!r} ({why})" for name, why in asked.items() if why)
        raise ValueError(
            f"under decide_on='first_rank' stages decide by the table, on that rank alone, and these take "
            f"part on each: {named}. Set pipeline.decide_on=each_rank, or leave them out"
        )


def hand_out_passes(table: Table, passes: Sequence[Epoch], plans: Sequence[Sequence[Plan]]) -> None:
    """Give each rank the passes over its rows, and its plans, where one decides."""
    if table.ranks is None or not table.ranks.one_decides:
        return
    number = torch.empty(table.size, dtype=torch.int64)  # of each row, among those of its rank
    for rank in range(len(plans)):
        known = 0
        for a, b in table.spans(rank):
            number[a:b] = torch.arange(known, known + b - a)
            known += b - a
    of_ranks = [
        [
            (number[plan.order].numpy(), plan.padding.numpy(), plan.sizes, number[plan.left].numpy())
            for plan in own
        ]
        for own in plans
    ]
    hand_out(table, [(each.places, each.columns) for each in passes], of_ranks)


def take_passes(rows: Rows, split: ShuffleSplit) -> tuple[list[Epoch], Any]:
    """The passes over the rows of this rank, and what was permuted, as the first rank has decided."""
    before = copy(rows.table)
    found, plans = hand_out(rows.table)
    passes = [Epoch(places, columns, [], rows.table.batch) for places, columns in found]
    own = [
        Plan(torch.from_numpy(order), torch.from_numpy(padding), sizes, torch.from_numpy(left))
        for order, padding, sizes, left in plans
    ]
    return passes, split.permuted_by_another(rows, own, before)
