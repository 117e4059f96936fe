"""Run a split without a pipeline: the cut batch, and the left-over rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from headrace.transforms import ShuffleSplit


class Done(NamedTuple):
    """A batch after the cut."""

    batch: TensorDictBase
    verdict: Tensor
    """(N,) int64: 0 if the row stays, 1 if it is left over, 2 if it is carried."""
    measured: dict[str, float]


def cut_alone(split: ShuffleSplit, batch: TensorDictBase) -> Done:
    """Cut a batch together with the carried rows, and with other ranks if the split has other ranks."""
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
