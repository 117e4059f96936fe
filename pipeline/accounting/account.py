"""What is known of one batch after a pipeline has been over it. It holds none of the batch's columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from headrace.pipeline.passage import Passage
from headrace.transforms.base import read_numbers

from .ledger import Ledger
from .row_table import RowTable


@dataclass(frozen=True)
class Account:
    """Where each row went, and what was measured. Tensors until somebody reads them.

    Attributes:
        stages: by name, in order.
        ledger: who left where; None where the batch had no rows.
        table: an entry for each row; None where the batch had no rows.
        numbers: what stages measured, as ``<stage>/<name>``.
        group_size: rollouts that each group was dispatched with, if a gate says so.
        advantage_by_row: from rewards and group ids (N,) to what rows would get if each were a rollout;
            None where no stage compares rewards in groups, or ranks share the batch.
        each_reward: whether of several rewards each is compared, and not the one that they add up to.
    """

    stages: Mapping[str, nn.Module]
    ledger: Ledger | None
    table: RowTable | None
    numbers: Mapping[str, Tensor | float]
    group_size: int | None = None
    advantage_by_row: Callable[[Tensor, Tensor], Tensor | None] | None = None
    each_reward: bool = True

    @classmethod
    def of(cls, stages: Mapping[str, nn.Module], passage: Passage | None = None) -> Account:
        """The account of a batch's passage through stages; without one, of a batch that had no rows."""
        gates = [stage for stage in stages.values() if getattr(stage, "gates", False)]
        comparing = [stage for stage in stages.values() if getattr(stage, "compares", False)]
        spread = passage is not None and passage.ranks is not None
        return cls(
            stages=stages,
            ledger=None if passage is None else passage.ledger,
            table=None if passage is None else passage.table,
            numbers={} if passage is None else passage.numbers,
            group_size=gates[0].group_size if gates else None,
            # Of rows that are spread over ranks, this one's alone say nothing.
            advantage_by_row=comparing[0].advantage_by_row if comparing and not spread else None,
            each_reward=not comparing or getattr(comparing[0], "several", "sum") != "sum",
        )

    @property
    def recipe(self) -> tuple[tuple[str, str], ...]:
        """(name, text) of each stage, in order."""
        return tuple((name, repr(stage)) for name, stage in self.stages.items())

    @property
    def metrics(self) -> dict[str, float]:
        """The ledger's numbers and what stages measured, as floats. A few device reads."""
        of_rows = {} if self.ledger is None else self.ledger.numbers()
        return of_rows | read_numbers(self.numbers)
