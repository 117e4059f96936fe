"""Criteria decide which rows stay; what follows for the others is three different things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import BatchTransform, has_key, key_names, nested_key, one_of
from .columns import COUNTED, IN_LOSS
from .errors import BatchError
from .ids import any_by, first_row
from .rows import check_mask, silence_rows, take_rows
from .rules import explain, set_rule
from .units import Unit, unit_ids, unit_keys

Action = Literal["mask", "exclude", "drop"]


class SampleFilter(BatchTransform):
    """Take rows that fail a criterion out of the loss, out of the statistics, or away.

    ============ ============ ====================== ==========
    action        in the loss  in the statistics      row there
    ============ ============ ====================== ==========
    ``mask``      no           yes                    yes
    ``exclude``   no           no, its advantage is 0 yes
    ``drop``      no           no                     no
    ============ ============ ====================== ==========

    Statistics are those of later stages: a filter after the advantage changes no baseline. Out of the loss
    is meant for good: the row's loss mask becomes False and its behaviour log-probabilities NaN, which
    TorchRL's GRPOLoss takes out exactly, whichever masking strategy it uses, token count included. (Its
    ``prompt_mean`` and its KL terms divide by all rows: after the advantage, a second filter with
    ``LengthWithin(low=1)`` and ``drop`` takes silent rows away.) A filter that leaves nothing gives an empty
    batch.

    Reads what its criterion reads, `rollout_key` or `group_key` by `unit`; writes `loss_mask_key`,
    `log_prob_key`, ``("headrace", "in_loss")`` and, under ``exclude``, ``("headrace", "counted")``. One
    device read under ``drop`` only, besides what the criterion reads.

    Args:
        criterion: batch → (N,) bool, True where the row stays; see :mod:`headrace.transforms.criteria`.
        unit: what stays or goes as one: a row that fails takes its whole ``rollout`` or ``group`` along.
            None: the criterion's own (``group`` for RewardsVary), else ``sample``.
        action: ``mask``, ``exclude``, ``drop``.
        on_batch: called as ``on_batch(batch, keep)`` with every row, those that will go included, and the
            (N,) bool verdicts.
        loss_mask_key: (N, T) bool, True trains; written if it is there.
        log_prob_key: (N, T) float, written if it is there; None: never.
        rollout_key: (N,) or (N, 1) int.
        group_key: (N,) or (N, 1) int.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: the criterion returns something else than (N,) bool; rows are to be masked in a batch
            that has neither a loss mask nor log-probabilities.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.transforms import RewardWithin
        >>> td = TensorDict({("next", "reward"): [0.0, 7.0]}, batch_size=[2])
        >>> SampleFilter(criterion=RewardWithin(high=1.0), action="drop")(td)["next", "reward"].tolist()
        [0.0]
    """

    def __init__(
        self,
        *,
        criterion: Callable[[TensorDictBase], Tensor],
        unit: Unit | None = None,
        action: Action = "mask",
        on_batch: Callable[[TensorDictBase, Tensor], None] | None = None,
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        log_prob_key: NestedKey | None = ("log_probs", "full"),
        rollout_key: NestedKey = "rollout_id",
        group_key: NestedKey = "group_id",
    ):
        if not callable(criterion):
            raise ValueError(f"criterion must be a callable from a batch to (N,) bool; got {criterion!r}")
        keys = [nested_key(k) for k in (loss_mask_key, log_prob_key, rollout_key, group_key)]
        own: str = unit if unit is not None else getattr(criterion, "unit", "sample")
        reads = unit_keys(own, *keys[2:])
        writes = {"mask": [IN_LOSS], "exclude": [IN_LOSS, COUNTED], "drop": []}
        one_of("action", action, tuple(writes))
        super().__init__([*getattr(criterion, "in_keys", ()), *reads], writes[action])
        self.loss_mask_key, self.log_prob_key, self.rollout_key, self.group_key = keys
        self.criterion, self.unit, self.action, self.on_batch = criterion, unit, action, on_batch
        self._unit = own
        self.reasons = (_name_of(criterion),)

    def apply(self, batch: TensorDictBase) -> TensorDictBase:
        """Judge all rows, tell the hook, and act."""
        keep = self._judge(batch)
        if (counted := batch.get(COUNTED, None)) is not None:
            keep = keep | ~counted  # who has left the statistics judges nobody
        ids = unit_ids(self, self._unit, batch)
        if ids is not None:
            rule = set_rule(ids, f"{self._unit}_id", "an unset id would judge strangers together")
            if ids.device.type == "cpu" or self.action == "drop":  # where looking costs nothing more
                explain([rule])
            keep = ~any_by(first_row(ids), ~keep)
        if self.on_batch is not None:
            self.on_batch(batch, keep)
        self.verdict = (~keep).to(torch.int8)
        self.measured = {"kept": keep.sum(), "fraction_kept": keep.double().mean()}
        if self.action == "drop":
            rows = keep.nonzero().flatten()
            return batch if len(rows) == len(keep) else take_rows(batch, rows)
        self._silence(batch, ~keep)
        if self.action == "exclude":
            batch.set(COUNTED, keep & batch.get(COUNTED, keep))
        return batch

    def _judge(self, batch: TensorDictBase) -> Tensor:
        keep = self.criterion(batch)
        if not isinstance(keep, Tensor) or keep.dtype is not torch.bool or keep.numel() != len(batch):
            found = f"{keep.dtype} {tuple(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
            raise BatchError(
                f"a criterion returns one bool a row, ({len(batch)},), True where it stays; "
                f"{self.criterion!r} returned {found}"
            )
        return keep.reshape(-1)

    def _silence(self, batch: TensorDictBase, quiet: Tensor) -> None:
        if has_key(batch, self.loss_mask_key):
            check_mask(batch, self.loss_mask_key)
        masks = [key for key in (self.loss_mask_key, self.log_prob_key) if key and has_key(batch, key)]
        if not masks and bool(quiet.any()):
            raise BatchError(
                f"{int(quiet.sum())} rows are to leave the loss, but the batch has neither "
                f"{self.loss_mask_key!r} (loss_mask_key) nor {self.log_prob_key!r} (log_prob_key): they "
                f"would train all the same. It has {key_names(batch)}; set the keys, or action='drop'"
            )
        if quiet.device.type != "cpu" or bool(quiet.any()):  # a copy saved where looking costs nothing
            for key in masks:
                silence_rows(batch, key, quiet)
        batch.set(IN_LOSS, ~quiet & batch.get(IN_LOSS, ~quiet))


def _name_of(criterion: Callable) -> str:
    """A criterion's reason, or the name of the function (also behind functools.partial) or class."""
    function = getattr(criterion, "func", criterion)
    name = getattr(function, "reason", None) or getattr(function, "__name__", type(function).__name__)
    return str(name)
