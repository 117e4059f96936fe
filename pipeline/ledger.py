"""The ledger of a batch: each row is trained, or has one stage and one reason why it is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.faces import AnswersGuesses
from headrace.transforms.table import count_of
from headrace.transforms.table.fates import TRAINED

from .conversations import labels_of_ids

__all__ = ["Ledger"]


@dataclass(eq=False, repr=False)
class Ledger(AnswersGuesses):
    """The outcome of each input row: a view of the table.

    Attributes:
        reason: (N,) int64, a code for each row. 0 means trained; `names` explains the other codes.
        names: ``stage/reason`` by code.
        actions: ``masked``, ``excluded``, ``dropped`` or ``carried``, by code.
        left: (N,) bool, True for rows that were ``dropped`` or ``carried``. If such a row was masked before,
            it keeps that reason.
        ids: (N,) int64 ids for ``rollouts`` and ``groups``, if the batch has them.
        labels: N labels of the ids, if the batch has labels.
    """

    reason: Tensor
    names: list[str]
    actions: list[str]
    left: Tensor
    ids: Mapping[str, Tensor]
    labels: Mapping[str, Any]

    def rows(self, name: str) -> list[dict[str, int | str]]:
        """Return the rows with a reason, each with its rollout and group. Labels replace ids where known.

        Args:
            name: ``stage/reason``, or ``trained``.

        Raises:
            KeyError: no stage has this reason.
        """
        if name not in self.names:
            raise KeyError(f"unknown reason {name!r}; the reasons are {self.names}")
        found = (self.reason == self.names.index(name)).nonzero().flatten()
        columns: dict[str, list] = {"row": found.tolist()}
        for unit, ids in self.ids.items():
            texts = self.labels.get(unit)
            labels = None if texts is None else labels_of_ids(texts, ids.tolist())
            named = ids[found].tolist() if labels is None else [labels[row] for row in columns["row"]]
            columns[unit.removesuffix("s")] = named
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def __repr__(self) -> str:
        return f"Ledger({', '.join(f'{name}: {count}' for name, count in self.counts().items() if count)})"

    def _repr_html_(self) -> str:
        ids = {unit: column.numpy() for unit, column in self.ids.items()}
        return import_module("headrace.pipeline.tools.report.notebook").ledger_html(
            self.reason.numpy(), self.names, self.actions, ids
        )

    def sentence(self) -> str:
        """Return the outcome in one line: ``3 of 4 rows trained; out: gate/failed 1 row``."""
        numbers, units = self.numbers(), ["rows", *self.ids]
        trained = [f"{numbers[f'{u}/trained']:.0f} of {numbers[f'{u}/in']:.0f} {u}" for u in units]
        reasons = {name: count for name, count in self.counts().items() if count and name != TRAINED}
        out = [f"{name} {count_of(count, 'row')}" for name, count in reasons.items()]
        return f"{', '.join(trained)} trained" + (f"; out: {', '.join(out)}" if out else "")

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each reason, `trained` first, including reasons without rows."""
        tally = torch.bincount(self.reason, minlength=len(self.names)).tolist()
        return dict(zip(self.names, tally, strict=True))

    def numbers(self) -> dict[str, float]:
        """Return the numbers of all and of trained rows, rollouts and groups, and of rows by reason."""
        trained = self.reason == self.names.index(TRAINED)
        found: dict[str, float] = {"rows/in": len(self.reason), "rows/trained": int(trained.sum())}
        for unit, ids in self.ids.items():
            column = ids.numpy()
            found[f"{unit}/in"] = len(np.unique(column))
            found[f"{unit}/trained"] = len(np.unique(column[trained.numpy()]))
        found |= {f"out/{name}": count for name, count in self.counts().items() if name != TRAINED}
        return {name: float(value) for name, value in found.items()}
