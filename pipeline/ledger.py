"""Where each row of a batch went: trained, or left at one stage for one reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.transforms.table import TRAINED

from .conversations import labels_of_ids


class Ledger:
    """One entry for each row that came in: a view of the table.

    Attributes:
        reason: (N,) int64; 0 is trained, and `names` says what the others are.
        names: ``stage/reason`` by code.
        actions: what became of the rows, by code: ``masked``, ``excluded``, ``dropped``, ``carried``.
        left: (N,) bool, rows that are gone, ``dropped`` or ``carried``, maybe after they were masked.
        ids: (N,) int64 by unit, ``rollouts`` and ``groups``, where the batch has them.
    """

    def __init__(
        self,
        reason: Tensor,
        left: Tensor,
        names: Sequence[str],
        actions: Sequence[str],
        ids: Mapping[str, Tensor],
        labels: Mapping[str, Any],
    ):
        self.reason, self.left, self.ids, self._labels = reason, left, ids, labels
        self.names, self.actions = list(names), list(actions)

    def rows(self, name: str) -> list[dict[str, int | str]]:
        """The rows with a reason, each with its rollout and group, by their labels where ids have some.

        Args:
            name: ``stage/reason``, or ``trained``.

        Raises:
            KeyError: no stage has such a reason.
        """
        if name not in self.names:
            raise KeyError(f"there is no reason {name!r}; there are {self.names}")
        found = (self.reason == self.names.index(name)).nonzero().flatten()
        columns: dict[str, list] = {"row": found.tolist()}
        for unit, ids in self.ids.items():
            texts = self._labels.get(unit)
            labels = None if texts is None else labels_of_ids(texts, ids.tolist())
            named = ids[found].tolist() if labels is None else [labels[row] for row in columns["row"]]
            columns[unit.removesuffix("s")] = named
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def __repr__(self) -> str:
        return f"Ledger({', '.join(f'{name}: {count}' for name, count in self.counts().items() if count)})"

    def _repr_html_(self) -> str:
        # Here: it shows reports too, and those import this.
        from headrace.pipeline.notebook import ledger_html

        ids = {unit: column.numpy() for unit, column in self.ids.items()}
        return ledger_html(self.reason.numpy(), self.names, self.actions, ids)

    def in_words(self) -> str:
        """Where the rows went, in a line: ``3 of 4 rows trained; out: gate/failed 1 row``."""
        numbers, units = self.numbers(), ["rows", *self.ids]
        said = [f"{numbers[f'{u}/trained']:.0f} of {numbers[f'{u}/in']:.0f} {u}" for u in units]
        gone = {name: count for name, count in self.counts().items() if count and name != TRAINED}
        out = [f"{name} {count} row{'s' * (count != 1)}" for name, count in gone.items()]
        return f"{', '.join(said)} trained" + (f"; out: {', '.join(out)}" if out else "")

    def counts(self) -> dict[str, int]:
        """Rows per reason, `trained` first; reasons without rows included."""
        tally = torch.bincount(self.reason, minlength=len(self.names)).tolist()
        return dict(zip(self.names, tally, strict=True))

    def numbers(self) -> dict[str, float]:
        """Rows, and where the batch has ids rollouts and groups, in and trained; rows by reason."""
        trained = self.reason == self.names.index(TRAINED)
        found: dict[str, float] = {"rows/in": len(self.reason), "rows/trained": int(trained.sum())}
        for unit, ids in self.ids.items():
            column = ids.numpy()
            found[f"{unit}/in"] = len(np.unique(column))
            found[f"{unit}/trained"] = len(np.unique(column[trained.numpy()]))
        found |= {f"out/{name}": count for name, count in self.counts().items() if name != TRAINED}
        return {name: float(value) for name, value in found.items()}
