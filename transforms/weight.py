"""What each row weighs in the loss of its optimiser step."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from .base import BatchTransform, as_dtype, at_least, has_key, nested_key, one_of, require
from .columns import IN_LOSS, MICROBATCH, MINIBATCH, RANK
from .errors import BatchError
from .ids import as_ids, first_row, sum_by
from .means import Mean, Weighed, check_mean, loss_weight
from .ranks import SHARED_IDS, SharedIds, gather_columns, raise_together, resolve_group, tell_apart
from .rows import device_of, loss_tokens
from .rules import Rule, broken, explain

Fold = Literal["none", "sum", "token_mean"]
FOLDS = ("none", "sum", "token_mean")


class LossWeight(BatchTransform):
    """Write what each token in the loss weighs, so that the gradient does not depend on the cut.

    The sum of weight × token loss over all rows, micro-batches and ranks of an optimiser step is the named
    mean over the step (:func:`loss_weight`). It stands after :class:`ShuffleSplit`, whose columns say which
    rows are one step; without them the batch is one step. A row out of the loss is in no denominator.

    Two ways into TorchRL's GRPOLoss, which has no key for weights: ``GRPOLoss(aggregation="none")`` with
    :func:`weighted_loss`, which weighs every term; or `fold`, which multiplies the advantage by w (``sum``)
    or by w · (tokens in the loss of the row's micro-batch) (``token_mean``, for GRPOLoss's default
    aggregation, whose losses of a step's micro-batches are then added up). A positive factor commutes with
    clipping, so fold is exact for the policy term (not under GRPOLoss's `kl_mask_threshold`, which takes
    further tokens out of its mean); the entropy and KL terms have no advantage in them and
    stay means over their micro-batch.

    Reads `loss_mask_key` and `log_prob_key` (a token whose log-probability is not finite is out of
    GRPOLoss), at least one of them; `rollout_key` and `group_key` where they are there or `unit` needs them.
    Writes `weight_key` (N,), or under `fold` `advantage_key` in its place; and the counts of the row's step,
    (N,) int64: ``num_tokens``, ``num_samples``, and where there are ids ``num_rollouts`` and ``num_groups``.
    One device read; with a process group a few, and two collectives by every rank, also for an empty batch.

    Args:
        unit: ``token``, ``sample``, ``rollout``, ``group``, ``constant``.
        length: tokens, for ``constant``.
        fold: ``none``, ``sum``, ``token_mean``.
        gradients: how those of several ranks meet: ``sum``, or ``mean`` as in DDP and FSDP, for which the
            weights are multiplied by the number of ranks.
        ranks: that share a batch which each of them holds whole (``ShuffleSplit(ranks=...)``), ≥ 1.
        process_group: of ranks that hold rows of their own, whose steps have one denominator: a process
            group, or ``world``.
        shared_ids: an id that several ranks of the process group have is the ``same`` unit there, or
            ``different`` ones, or must not be: ``raise``.
        dtype: of the weight; None: that of the advantage, at least float32.
        loss_mask_key: (N, T) bool, True trains.
        log_prob_key: (N, T) float; None: not looked at.
        group_key: (N,) or (N, 1) int.
        rollout_key: (N,) or (N, 1) int.
        advantage_key: (N, 1, 1) or (N, T, 1) float.
        weight_key: (N,) float, written.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: an unset id on a row in the loss; an id on several ranks, under ``raise``.

    Example:
        >>> from tensordict import TensorDict
        >>> mask = torch.tensor([[True, True, False], [True, True, True]])
        >>> batch = LossWeight()(TensorDict({("masks", "all_assistant_mask"): mask}, batch_size=[2]))
        >>> loss = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        >>> round(float((batch["loss_weight"][:, None] * mask * loss).sum()), 4)
        3.6
    """

    def __init__(
        self,
        *,
        unit: Mean = "token",
        length: int | None = None,
        fold: Fold = "none",
        gradients: Literal["sum", "mean"] = "sum",
        ranks: int = 1,
        process_group: dist.ProcessGroup | str | None = None,
        shared_ids: SharedIds = "raise",
        dtype: torch.dtype | str | None = None,
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        log_prob_key: NestedKey | None = ("log_probs", "full"),
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey = "rollout_id",
        advantage_key: NestedKey = "advantage",
        weight_key: NestedKey = "loss_weight",
    ):
        check_mean(unit, length)
        one_of("fold", fold, FOLDS)
        one_of("gradients", gradients, ("sum", "mean"))
        one_of("shared_ids", shared_ids, SHARED_IDS)
        at_least("ranks", ranks, 1)
        if ranks > 1 and process_group is not None:
            raise ValueError(
                "give ranks where each rank holds the whole batch, process_group where each holds rows of "
                f"its own; got {ranks=} and {process_group=}"
            )
        keys = [nested_key(k) for k in (loss_mask_key, log_prob_key, advantage_key, weight_key)]
        ids = {"rollout": nested_key(rollout_key), "group": nested_key(group_key)}
        needed = {"rollout": ["rollout"], "group": ["group"], "constant": ["rollout"]}.get(unit, [])
        written = keys[3] if fold == "none" else keys[2]
        super().__init__(
            [MINIBATCH, *(ids[name] for name in needed), *([] if fold == "none" else [written])],
            [written, "num_tokens", "num_samples", "num_rollouts", "num_groups"],
        )
        self.unit, self.length, self.fold, self.gradients = unit, length, fold, gradients
        self.ranks, self.process_group, self.shared_ids = ranks, process_group, shared_ids
        self.dtype = as_dtype(dtype)
        self.loss_mask_key, self.log_prob_key, self.advantage_key, self.weight_key = keys
        self.rollout_key, self.group_key = ids["rollout"], ids["group"]
        self._needed = needed

    def enter(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Check a batch at the door; a rank without rows still tells the others so."""
        flat = super().enter(batch)
        if flat is None and (group := resolve_group(self.process_group)) is not None:
            nothing = torch.empty(0, dtype=torch.int64, device=device_of(batch))
            raise_together(None, group)
            self._weigh(nothing, nothing, nothing, nothing, None)
        return flat

    def apply(self, batch: TensorDictBase) -> TensorDictBase:
        """Weigh the rows of each step."""
        group = resolve_group(self.process_group)
        try:
            tokens, rollouts, groups = self._read(batch)
        except BatchError as err:
            if group is not None:
                raise_together(err, group)
            raise
        if group is not None:
            raise_together(None, group)
        self.measured = {"tokens": tokens.sum(), "samples": (tokens > 0).sum()}
        found = self._weigh(tokens, batch.get(MINIBATCH, None), rollouts, groups, self._dtype_in(batch))
        weight = found.weight * (self._ranks() if self.gradients == "mean" else 1)
        if self.fold == "none":
            batch.set(self.weight_key, weight)
        else:
            factor = weight if self.fold == "sum" else weight * self._tokens_of_microbatch(batch, tokens)
            self._fold(batch, factor)
        for name in ("tokens", "samples", "rollouts", "groups"):
            if (count := getattr(found, name)) is not None:
                batch.set(f"num_{name}", count)
        return batch

    def _read(self, batch: TensorDictBase) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Tokens in the loss, and ids."""
        if has_key(batch, RANK) and self.ranks == 1 and self.gradients == "mean":
            raise BatchError(
                "rows are dealt to several ranks whose gradients are averaged: set ranks on LossWeight, to "
                "the split's own"
            )
        tokens = loss_tokens(batch, self.loss_mask_key, self.log_prob_key)
        if (in_loss := batch.get(IN_LOSS, None)) is not None:
            tokens = tokens * in_loss
        ids = {name: self._ids(batch, name) for name in ("rollout", "group")}
        rules = [_set_in_loss(column, name, tokens) for name, column in ids.items() if column is not None]
        if rules and bool(broken(rules)):
            explain(rules)
        return tokens, ids["rollout"], ids["group"]

    def _fold(self, batch: TensorDictBase, factor: Tensor) -> None:
        if has_key(batch, "num_tokens"):
            raise BatchError("these rows were weighed already: folding twice would weigh them twice")
        require(batch[:1], self.advantage_key, reader="LossWeight", option="advantage_key")
        rows = batch.tensordicts if isinstance(batch, LazyStackedTensorDict) else [batch]
        for row, mine in zip(rows, factor.split(1) if len(rows) > 1 else [factor], strict=True):
            advantage = row.get(self.advantage_key)
            if not advantage.is_floating_point():
                raise BatchError(f"an advantage is a floating-point number; found {advantage.dtype}")
            wide = mine.view(-1, *[1] * (advantage.ndim - 1)) if rows[0] is batch else mine
            row.set(self.advantage_key, advantage * wide.to(advantage.dtype))

    def _weigh(
        self,
        tokens: Tensor,
        step: Tensor | None,
        rollouts: Tensor | None,
        groups: Tensor | None,
        dtype: torch.dtype | None,
    ) -> Weighed:
        process_group = resolve_group(self.process_group)
        if process_group is None:
            ids = {"rollout_id": rollouts, "group_id": groups}
            return loss_weight(tokens, self.unit, **ids, step=step, length=self.length, dtype=dtype)
        nothing = torch.zeros_like(tokens)
        columns = [nothing if column is None else column for column in (tokens, step, rollouts, groups)]
        told = gather_columns(torch.stack(columns), process_group)
        everyones = {}
        for name, own, column in zip(
            ("rollout_id", "group_id"), (rollouts, groups), told.columns[2:], strict=True
        ):
            if own is not None:
                everyones[name] = tell_apart(column, told.rank, self.shared_ids, name)
        every = loss_weight(
            told.columns[0], self.unit, **everyones, step=told.columns[1], length=self.length, dtype=dtype
        )
        return Weighed(*(None if column is None else column[told.mine] for column in every))

    def _ids(self, batch: TensorDictBase, name: str) -> Tensor | None:
        option = f"{name}_key"
        if name not in self._needed and not has_key(batch, getattr(self, option)):
            return None
        return as_ids(self.column(batch, option), f"{name}_id")

    def _dtype_in(self, batch: TensorDictBase) -> torch.dtype | None:
        if self.dtype is not None or not has_key(batch, self.advantage_key):
            return self.dtype
        return torch.promote_types(batch[0].get(self.advantage_key).dtype, torch.float32)

    def _ranks(self) -> int:
        group = resolve_group(self.process_group)
        return self.ranks if group is None else dist.get_world_size(group)

    @staticmethod
    def _tokens_of_microbatch(batch: TensorDictBase, tokens: Tensor) -> Tensor:
        """(N,) int64: tokens in the loss of each row's forward pass."""
        passes = torch.zeros_like(tokens)
        for key in (MINIBATCH, RANK, MICROBATCH):
            if (number := batch.get(key, None)) is not None:
                passes = first_row(passes * len(tokens) + first_row(number))
        return sum_by(first_row(passes), tokens)


def _set_in_loss(ids: Tensor, name: str, tokens: Tensor) -> Rule:
    return Rule(
        (ids < 0) & (tokens > 0),
        lambda row: f"{int(ids[row])} at row {row}",
        f"every row in the loss needs a {name}_id ≥ 0; found {{found}}: an unset id would weigh strangers "
        "as one",
    )
