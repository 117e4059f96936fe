"""A split alone: what it makes of a batch, and which rows are left over."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from headrace.transforms import ShuffleSplit


class Done(NamedTuple):
    """A batch that was cut."""

    batch: TensorDictBase
    verdict: Tensor
    """(N,) int64: 0 stays, 1 is left over, 2 is carried."""
    measured: dict[str, float]


def cut_alone(split: ShuffleSplit, batch: TensorDictBase) -> Done:
    """Cut a batch, with the rows that were carried behind it; with other ranks, where the split has some."""
    ranks = split._own_ranks()
    with ranks.block():
        rows = split.read_table(batch, ranks)
        cut = split.memory.cut(split, rows.seen_by(split))
        whole = cut.permuted.steps([(rows.table.written_columns(), (), rows.table.batch)]).whole()
    split.memory.remember(cut)
    names, table = ["trained", "remainder", "carried"], rows.table
    reasons = table.of_this_rank(table.fates.reason).tolist()
    verdict = torch.tensor([names.index(table.fates.names[reason]) for reason in reasons])
    return Done(whole, verdict, table.metrics)
