"""Which of its rollout's rows each row is, as they arrived."""

from __future__ import annotations

import torch
from torch import Tensor

from .ids import Ids
from .required import require_turns
from .rows import Rows
from .schema import SEGMENTS


def places_on_arrival(rows: Rows, *, checked: bool = True) -> tuple[Ids, Tensor]:
    """The rollouts of all rows on arrival, and (N,) int64 which segment of its rollout each is, from 0.

    Raises:
        BatchError: an id is not set; two segments have one turn; rows of a rollout are not there any more, of
            which nothing says where they were. Each with the ids.
    """
    rows.ids("rollout", checked=checked)
    everyone, turn = rows.on_arrival, None
    if rows.key("turn") is not None:
        require_turns(rows, rows.integers("turn", "turn"))
        turn = everyone.integers("turn", "turn")
    rollouts = everyone.ids("rollout", checked=False).everyone
    whole = torch.ones(rollouts.n, dtype=torch.bool)
    if rows.has(SEGMENTS):
        whole = rollouts.max(everyone[SEGMENTS]) <= rollouts.count
    if rows.table.into is not None:
        whole = whole & ~rollouts.any(rows.table.into != torch.arange(rows.table.size))
    _require(
        rows,
        rows.from_arrival(rollouts.spread(whole)),
        f"{rows.reader} goes by the place of a row among those of its rollout; found {{found}}, of which "
        "rows were merged, or dropped by a stage alone. Put it before that stage, keep the rows (mask or "
        "exclude), or drop whole rollouts (unit='rollout'); within a pipeline dropped rows keep their places",
    )
    return rollouts, rollouts.positions(turn)


def require_edge(rows: Rows, which: str) -> None:
    """The ``first`` or ``last`` segment that a rollout arrived with is among the rows of this view.

    Raises:
        BatchError: it is not, while others are; with the ids, and as :func:`places_on_arrival`.
    """
    rollouts, place = places_on_arrival(rows)
    edge = place == (0 if which == "first" else rollouts.spread(rollouts.count) - 1)
    here = rows.to_arrival(torch.ones(len(rows), dtype=torch.bool))
    _require(
        rows,
        rows.from_arrival(rollouts.spread(rollouts.any(edge & here))),
        f"a rollout's reward is that of its {which} segment, which was taken out of {{found}}, while others "
        "stay. Take whole rollouts out (unit='rollout'), or mask the row",
    )


def _require(rows: Rows, ok: Tensor, message: str) -> None:
    """Refuse the rollouts of rows that count where (M,) bool `ok` does not hold."""
    ok = ok if rows.counted is None else ok | ~rows.counted
    rows.require(ok, message, lambda row: f"rollout {rows.name('rollout', row)}")
