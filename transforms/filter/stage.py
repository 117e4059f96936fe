"""The stage that acts on what a criterion says: out of the loss, out of the statistics, or gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.columns import ColumnNames
from headrace.transforms.errors import BatchError
from headrace.transforms.options import one_of
from headrace.transforms.rows import Rows
from headrace.transforms.schema import COUNTED, IN_LOSS, LENGTH, Unit, unit_keys
from headrace.transforms.stage import BatchTransform
from headrace.transforms.table import Effect

Action = Literal["mask", "exclude", "drop"]
EFFECTS: dict[str, Effect] = {"mask": "masked", "exclude": "excluded", "drop": "dropped"}


class SampleFilter(BatchTransform, columns=("loss_mask", "log_prob", "rollout", "group")):
    """Take rows that fail a criterion out of the loss, out of the statistics, or away.

    =========== ============ ======================== =========
    action      in the loss  in the statistics        row there
    =========== ============ ======================== =========
    ``mask``    no           yes                      yes
    ``exclude`` no           no, its advantage is 0   yes
    ``drop``    no           no                       no
    =========== ============ ======================== =========

    Statistics are those of later stages: a filter after the advantage changes no baseline. Out of the loss
    is meant for good: the row's loss mask becomes False and its behaviour log-probabilities NaN, which
    TorchRL's GRPOLoss takes out exactly, whichever masking strategy it uses, token count included. To the
    statistics of later stages the row is as long as it was. (GRPOLoss's
    ``prompt_mean`` and its KL terms divide by all rows: after the advantage, a second filter with
    ``LengthWithin(low=1)`` and ``drop`` takes masked rows away.) A filter that leaves nothing gives an empty
    batch.

    Reads what its criterion reads, `rollout_key` or `group_key` by `unit`; writes `loss_mask_key`,
    `log_prob_key`, ``("headrace", "in_loss")``, ``("headrace", "length")`` and, under ``exclude``,
    ``("headrace", "counted")``.

    Args:
        criterion: a :class:`Criterion`, or a callable batch → (N,) bool, True where the row stays.
        unit: what stays or goes as one: a row that fails takes its whole ``rollout`` or ``group`` along.
            None: the criterion's own (``group`` for RewardsVary), else ``sample``.
        action: ``mask``, ``exclude``, ``drop``.
        on_batch: called as ``on_batch(batch, keep)`` with every row, those that will go included, and the
            (N,) bool that says who stays.
        names: other names of columns, such as `loss_mask_key` (:class:`ColumnNames`).

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
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        if not callable(criterion) and not hasattr(criterion, "decide"):
            raise ValueError(f"criterion must be a callable from a batch to (N,) bool; got {criterion!r}")
        own: str = unit if unit is not None else getattr(criterion, "unit", "sample")
        reads = unit_keys(own, self.rollout_key, self.group_key)
        writes = {"mask": [IN_LOSS, LENGTH], "exclude": [IN_LOSS, LENGTH, COUNTED], "drop": []}
        one_of("action", action, tuple(writes))
        super().__init__([*getattr(criterion, "in_keys", ()), *reads], writes[action])
        self.criterion, self.unit, self.action, self.on_batch = criterion, unit, action, on_batch
        self._unit = own
        function = getattr(criterion, "func", criterion)  # also behind functools.partial
        name = getattr(function, "reason", None) or getattr(function, "__name__", type(function).__name__)
        self.reasons, self.effects = (str(name),), (EFFECTS[action],)

    @property
    def before_baseline(self) -> bool:  # type: ignore[override]
        """Where its criterion says so."""
        return getattr(self.criterion, "before_baseline", False)

    @property
    def takes_rows(self) -> Literal["", "drop", "exclude"]:
        """Where it judges rows one by one, and does not leave them in the statistics."""
        return "" if self._unit != "sample" or self.action == "mask" else self.action

    @property
    def within_groups(self) -> bool:  # type: ignore[override]
        """Where its criterion says so, and no hook sees the batch."""
        return self.on_batch is None and getattr(self.criterion, "within_groups", False)

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """Those of the rows that it masks, and of its criterion."""
        own = getattr(self.criterion, "loss_mask_key", None)
        return [(self.loss_mask_key, self.log_prob_key)] + ([] if own is None else [(own, None)])

    def needs_each_rank(self) -> str:
        """It may, for its hook or its criterion."""
        if self.on_batch is not None or not type(self.criterion).__module__.startswith("headrace."):
            return "code of your own"
        reads_tokens = getattr(self.criterion, "reads_tokens", False)
        return "it reads tokens" if reads_tokens else super().needs_each_rank()

    def decide(self, rows: Rows) -> None:
        """Judge all rows, call the hook, and act."""
        decide = getattr(self.criterion, "decide", None)
        keep = (
            rows.ask(self.criterion) if decide is None else decide(rows.seen_by(self.criterion, rows.stage))
        )
        if not isinstance(keep, Tensor) or keep.dtype is not torch.bool or keep.numel() != len(rows):
            found = f"{keep.dtype} {tuple(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
            raise BatchError(
                f"a criterion returns one bool a row, ({len(rows)},), True where it stays; "
                f"{self.criterion!r} returned {found}"
            )
        keep = keep.reshape(-1)
        if rows.counted is not None:
            keep = keep | ~rows.counted  # who has left the statistics judges nobody
        if self._unit != "sample":
            ids = rows.ids(self._unit).everyone
            rows.require_set(ids, f"{self._unit}_id", "rows without an id would be judged as one")
            keep = ids.spread(ids.all(keep))
        if self.on_batch is not None:
            batch, stays = rows.shown(keep)
            if len(batch):  # a rank without rows has nothing to show
                self.on_batch(batch, stays)
        for view in rows.of_each_rank():
            own = view.of_rank(keep)
            kept = int(own.sum())
            view.metric("kept", kept)
            view.metric("fraction_kept", kept / max(len(own), 1))
        rows.leave(~keep, self.reasons[0], self.effects[0])
