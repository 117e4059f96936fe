"""The index of each row in its rollout, as the rows arrived."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import require_turns
from .ids import Ids
from .rows import Rows
from .schema import INTO, SEGMENTS


def places_on_arrival(rows: Rows, *, checked: bool = True) -> tuple[Ids, Tensor]:
    """The rollouts of all rows on arrival, and (N,) int64 the index of each row in its rollout, from 0.

    Raises:
        BatchError: an id is missing, two segments have the same turn, or rows of a rollout were merged or
            were dropped before this pipeline. The message lists the ids.
    """
    rows.ids("rollout", checked=checked)
    everyone, turn = rows.on_arrival, None
    if rows.key("turn") is not None:
        require_turns(rows.with_excluded, rows.integers("turn", "turn"))
        turn = everyone.integers("turn", "turn")
    rollouts = everyone.ids("rollout", checked=False)
    whole = torch.ones(rollouts.n, dtype=torch.bool)
    if rows.has(SEGMENTS):
        whole = rollouts.max(everyone[SEGMENTS]) <= rollouts.count
    if everyone.has(INTO):
        whole = whole & ~rollouts.any(everyone[INTO] >= 0)
    rows.require(
        rows.from_arrival(rollouts.spread(whole)),
        f"{rows.reader} needs the index of each row in its rollout; found {{found}} with rows that were "
        f"merged, or dropped outside this pipeline. Put {rows.reader} before the stage that does so, mask or "
        "exclude the rows, or drop whole rollouts (unit='rollout'). Rows that are dropped within a pipeline "
        "keep their indices",
        lambda row: f"rollout {rows.name('rollout', row)}",
    )
    return rollouts, rollouts.positions(turn)


def require_edge(rows: Rows, which: str) -> None:
    """Require that the ``first`` or ``last`` segment of each rollout on arrival is still in this view.

    Raises:
        BatchError: that segment was taken out and others stay (the message lists the ids), or as
            :func:`places_on_arrival`.
    """
    rollouts, place = places_on_arrival(rows)
    edge = place == (0 if which == "first" else rollouts.spread(rollouts.count) - 1)
    here = rows.to_arrival(torch.ones(len(rows), dtype=torch.bool) if rows.counted is None else rows.counted)
    rows.require(
        rows.from_arrival(rollouts.spread(rollouts.any(edge & here))),
        f"the reward of a rollout is that of its {which} segment, but this segment was taken out of "
        "{found} and others stay. Take whole rollouts out (unit='rollout'), or mask the row",
        lambda row: f"rollout {rows.name('rollout', row)}",
    )
