"""Where each row of a batch went: trained, or left at one stage for one reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import Effect
from headrace.transforms.door import label_key
from headrace.transforms.errors import BatchError, listing
from headrace.transforms.rows import device_of
from headrace.transforms.schema import has_key

from .row_table import labels_of_ids

TRAINED = "trained"


class Ledger:
    """One entry for each row that came in. Tensors until somebody reads them.

    Attributes:
        reason: (N,) int64; 0 is trained, and `names` says what the others are.
        names: ``stage/reason`` by code.
        actions: what became of the rows, by code: ``masked``, ``excluded``, ``dropped``, ``carried``.
        ids: (N,) int64 by unit, ``rollouts`` and ``groups``, where the batch has them.
    """

    def __init__(self, batch: TensorDictBase, units: Mapping[str, NestedKey]):
        self.units = units
        self._rows, self._device = len(batch), device_of(batch)
        self._judged: list[tuple[int, Tensor, Tensor]] = []  # added up when somebody asks
        self.names: list[str] = [TRAINED]
        self.actions: list[str] = [TRAINED]
        self.ids = {
            unit: batch.get(key).reshape(-1).clone() for unit, key in units.items() if has_key(batch, key)
        }
        self._labels = {unit: self._labels_in(batch, unit) for unit in self.ids}

    @property
    def reason(self) -> Tensor:
        """(N,) int64; of several verdicts on a row the first counts."""
        reason = torch.zeros(self._rows, dtype=torch.int64, device=self._device)
        for base, rows, verdict in self._judged:
            before = reason.index_select(0, rows)
            after = torch.where((before == 0) & (verdict > 0), verdict.long() + base, before)
            reason.index_copy_(0, rows, after)
        return reason

    @property
    def left(self) -> Tensor:
        """(N,) bool, rows that are gone, ``dropped`` or ``carried``, maybe after they were silenced."""
        left = torch.zeros(self._rows, dtype=torch.bool, device=self._device)
        for base, rows, verdict in self._judged:
            gone = torch.zeros_like(verdict, dtype=torch.bool)
            for code, action in enumerate(self.actions[base + 1 :], 1):
                if action in ("dropped", "carried"):
                    gone = gone | (verdict == code)
            left.index_copy_(0, rows, left.index_select(0, rows) | gone)
        return left

    def add_carried(self, batch: TensorDictBase) -> Tensor:
        """Give numbers to rows that an earlier batch left for this one.

        Args:
            batch: TensorDict ``[n]``, those rows alone.

        Returns:
            (n,) int64, their row numbers.
        """
        start = self._rows
        self._rows += len(batch)
        for unit, ids in self.ids.items():
            more = batch.get(self.units[unit]).reshape(-1)
            self.ids[unit] = torch.cat([ids, more.to(ids.dtype)])
            self._labels[unit] = [*self._labels[unit], *self._labels_in(batch, unit)]
        return torch.arange(start, self._rows, device=self._device)

    def judge(
        self,
        stage: str,
        reasons: Sequence[str],
        rows: Tensor,
        verdict: Tensor,
        effects: Sequence[Effect] = (),
    ) -> None:
        """Record the verdicts of a stage on `rows` (M,), the row numbers that it saw.

        A row that has left already keeps its first reason. `effects` are what becomes of rows, by reason;
        empty: they are dropped. No device read.
        """
        self._judged.append((len(self.names) - 1, rows.clone(), verdict.clone()))
        self.add_reasons(stage, reasons, effects)

    def add_reasons(self, stage: str, reasons: Sequence[str], effects: Sequence[Effect] = ()) -> None:
        """Enter the reasons of a stage, also where no row leaves for them."""
        self.names += [f"{stage}/{reason}" for reason in reasons]
        self.actions += effects or ["dropped"] * len(reasons)

    def miss(self, stage: str, rows: Tensor, remaining: Tensor) -> None:
        """Record those of `rows` that are not among `remaining` as gone at a stage that gave no verdicts.

        Raises:
            BatchError: a row is there twice. One device read.
        """
        times = rows.new_zeros(self._rows).index_add_(0, remaining, torch.ones_like(remaining))
        if bool((times > 1).any()):
            twice = listing(map(str, (times > 1).nonzero().flatten().tolist()))
            raise BatchError(f"a stage may drop rows but not repeat them; found twice: rows {twice}")
        self.judge(stage, ("gone",), rows, times.index_select(0, rows) == 0)

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
            labels = labels_of_ids(self._labels[unit], ids.tolist()) if len(self._labels[unit]) else None
            named = ids[found].tolist() if labels is None else [labels[row] for row in columns["row"]]
            columns[unit.removesuffix("s")] = named
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def _labels_in(self, batch: TensorDictBase, unit: str) -> Any:
        """The labels of a unit's ids in a batch, as they are there; empty where there are none."""
        key = label_key(self.units[unit])
        return batch.get(key) if has_key(batch, key) else []

    def __repr__(self) -> str:
        return f"Ledger({', '.join(f'{name}: {count}' for name, count in self.counts().items() if count)})"

    def _repr_html_(self) -> str:
        # Here: it shows reports too, and those import this.
        from headrace.pipeline.notebook import ledger_html

        ids = {unit: column.cpu().numpy() for unit, column in self.ids.items()}
        return ledger_html(self.reason.cpu().numpy(), self.names, self.actions, ids)

    def counts(self) -> dict[str, int]:
        """Rows per reason, `trained` first; reasons without rows included. One device read."""
        tally = torch.bincount(self.reason, minlength=len(self.names)).tolist()
        return dict(zip(self.names, tally, strict=True))

    def numbers(self) -> dict[str, float]:
        """Rows, and where the batch has ids rollouts and groups, in and trained; rows by reason."""
        ids = {unit: column.cpu().numpy() for unit, column in self.ids.items()}
        return ledger_numbers(self.reason.cpu().numpy(), self.names, ids)


def ledger_numbers(
    reason: np.ndarray, names: Sequence[str], ids: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """The numbers of a ledger, of columns that have been read: (N,) each."""
    tally = np.bincount(reason, minlength=len(names)).tolist()
    trained = reason == 0
    found: dict[str, float] = {"rows/in": len(reason), "rows/trained": tally[0]}
    for unit, column in ids.items():
        found[f"{unit}/in"] = len(np.unique(column))
        found[f"{unit}/trained"] = len(np.unique(column[trained]))
    found |= {f"out/{name}": count for name, count in zip(names[1:], tally[1:], strict=True)}
    return {name: float(value) for name, value in found.items()}
