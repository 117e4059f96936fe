"""The filter: it masks, excludes or drops the rows that fail a criterion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import BatchError, BatchTransform, ColumnNames, Effect, Rows
from headrace.transforms.table.schema import COUNTED, IN_LOSS, LENGTH, Unit, unit_keys

from .criteria import as_criterion

Action = Literal["mask", "exclude", "drop"]
EFFECTS: dict[str, Effect] = {"mask": "masked", "exclude": "excluded", "drop": "dropped"}


class SampleFilter(BatchTransform, columns=("loss_mask", "log_prob", "rollout", "group")):
    """Mask, exclude or drop the rows that fail a criterion.

    =========== ============ ======================== =================
    action      in the loss  in the statistics        row in the batch
    =========== ============ ======================== =================
    mask        no           yes                      yes
    exclude     no           no, its advantage is 0   yes
    drop        no           no                       no
    =========== ============ ======================== =================

    Only the statistics of later stages change. A filter after the advantage changes no baseline.

    A row that is masked or excluded has False in its loss mask and NaN in its behaviour log-probabilities.
    TorchRL's GRPOLoss then leaves out this row exactly, under each of its masking strategies, also from the
    token count. Later stages still see the row's original length. GRPOLoss's ``prompt_mean`` and its KL terms
    divide by all rows. To leave masked rows out of these too, add a second filter with
    ``LengthWithin(low=1)`` and ``drop`` after the advantage. If no row stays, the batch is empty.

    Reads the columns of its criterion, and `rollout_key` or `group_key` by `unit`. Writes `loss_mask_key`,
    `log_prob_key`, ``("headrace", "in_loss")``, ``("headrace", "length")`` and, under ``exclude``,
    ``("headrace", "counted")``.

    Args:
        criterion: a :class:`Criterion`, or a callable from a batch to (N,) bool, True where the row stays.
        also: a second criterion, with its own reason and unit. Both judge the same rows. A row that fails
            both has the reason of the first.
        unit: what stays or leaves together. If one row of a ``rollout`` or ``group`` fails, all its rows
            leave. None: the criterion's own unit (``group`` for RewardsVary), else ``sample``.
        action: ``mask``, ``exclude`` or ``drop``.
        names: other names of columns, such as `loss_mask_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: the criterion does not return (N,) bool, or rows must be masked in a batch that has
            neither a loss mask nor log-probabilities.

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
        also: Callable[[TensorDictBase], Tensor] | None = None,
        unit: Unit | None = None,
        action: Action = "mask",
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self._criteria = [as_criterion(each) for each in (criterion, also) if each is not None]
        self._units = [unit or cast(Unit, each.unit) for each in self._criteria]
        reads = [key for own in self._units for key in unit_keys(own, self.rollout_key, self.group_key)]
        reads += [key for each in self._criteria for key in (*each.in_keys, *each.token_keys)]
        writes = {"mask": [IN_LOSS, LENGTH], "exclude": [IN_LOSS, LENGTH, COUNTED], "drop": []}
        super().__init__(list(dict.fromkeys(reads)), writes[action])
        self.criterion, self.also, self.unit = criterion, also, unit
        self.action = action
        self._reasons = [each.reason or type(each).__name__ for each in self._criteria]
        self.reasons = dict.fromkeys(self._reasons, EFFECTS[action])

    @property
    def before_baseline(self) -> bool:  # type: ignore[override]
        """Whether a criterion must be before the stages that compute a baseline."""
        return any(each.before_baseline for each in self._criteria)

    @property
    def takes_rows(self) -> Literal["", "drop", "exclude"]:
        """The action, if it takes single rows of a rollout out of the statistics; else empty."""
        return "" if "sample" not in self._units or self.action == "mask" else self.action

    @property
    def within_groups(self) -> bool:  # type: ignore[override]
        """Whether the criteria compare rows within groups only."""
        return all(each.within_groups for each in self._criteria)

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """The columns of tokens of rows that the filter masks, and of tokens that its criteria count."""
        masked = (self.loss_mask_key, self.log_prob_key)
        return [masked, *(tokens for each in self._criteria for tokens in each.tokens_counted)]

    def decide(self, rows: Rows) -> None:
        """Apply the criteria to all rows, and take out the rows that fail."""
        # 1. The rows that each criterion keeps, by whole units.
        kept = list[Tensor]()
        for criterion, unit in zip(self._criteria, self._units, strict=True):
            keep = criterion.decide(rows.seen_by(criterion, rows.stage).only_declared(criterion))
            if not isinstance(keep, Tensor) or keep.dtype is not torch.bool or keep.numel() != len(rows):
                is_tensor = isinstance(keep, Tensor)
                found = f"{keep.dtype} {tuple(keep.shape)}" if is_tensor else type(keep).__name__
                raise BatchError(
                    f"a criterion must return one bool per row, ({len(rows)},), True where the row stays; "
                    f"{{criterion}} returned {found}. Convert a result that was computed from tokens "
                    "with rows.from_batch(result)",
                    criterion=repr(criterion),
                )
            keep = keep.flatten()
            if rows.counted is not None:
                keep = keep | ~rows.counted  # an excluded row must not take the rest of its unit out
            if unit != "sample":
                rows.ids(unit)  # refuses rows without an id
                ids = rows.with_excluded.ids(unit, checked=False)
                keep = ids.spread(ids.all(keep))
            kept.append(keep)
        keep = torch.stack(kept).all(0)
        # 2. Count the rows that stay, and take the others out.
        count = int(keep.sum())
        rows.metric("kept", count)
        rows.metric("fraction_kept", count / max(len(keep), 1))
        for stays, reason in zip(kept, self._reasons, strict=True):
            rows.leave(~stays, reason, EFFECTS[self.action])
