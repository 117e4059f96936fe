"""The stage that writes what each row weighs in the loss of its optimiser step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import Rule
from headrace.transforms.distributed import SharedIds, check_one_way, population_of, present_ranks
from headrace.transforms.errors import BatchError, who_stamps
from headrace.transforms.ids import as_ids, first_row_of_pairs, sum_by
from headrace.transforms.options import as_dtype, nested_key, one_of
from headrace.transforms.schema import (
    FOLDED_WEIGHT,
    IN_LOSS,
    MICROBATCH,
    MINIBATCH,
    RANK,
    STEP_WEIGHT,
    has_key,
    require,
)
from headrace.transforms.tokens import loss_tokens

from .loss_weight import Mean, Weighed, check_mean, loss_weight

Fold = Literal["none", "sum", "token_mean"]
Gradients = Literal["sum", "mean"]


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

    Reads `loss_mask_key`, or where it is not there TorchRL's tokens of prompt and response; `log_prob_key` if
    there (a token whose log-probability is not finite is out of GRPOLoss); `rollout_key` and `group_key` if
    there or where `unit` needs them; `turn_key` for ``turn``.
    Writes `weight_key` (N,) and ``("headrace", "step_weight")``, or under `fold` `advantage_key` and
    ``("headrace", "folded_weight")`` in their place; and the counts of the row's step,
    (N,) int64: ``num_tokens``, ``num_samples``, and where there are ids ``num_rollouts`` and ``num_groups``.
    No device read; with a process group a few, and collectives by every rank, also for an empty batch.

    Args:
        unit: ``token``, ``sample``, ``turn``, ``rollout``, ``group``, ``constant``.
        length: tokens, for ``constant``.
        fold: ``none``, ``sum``, ``token_mean``.
        gradients: how those of several ranks meet: ``sum``, or ``mean`` as in DDP and FSDP, for which the
            weights are multiplied by the number of ranks.
        ranks: that share a batch which each of them holds whole (``ShuffleSplit(ranks=...)``), ≥ 1.
        process_group: a group, or ``world``, of ranks that hold rows of their own, whose steps have one
            denominator. A pipeline takes it over for all stages.
        shared_ids: an id that several ranks of the process group have is the ``same`` unit there, or
            ``different`` ones, or must not be: ``raise``.
        dtype: of the weight; None: that of the advantage, at least float32.
        loss_mask_key: (N, T) bool, True trains.
        log_prob_key: (N, T) float; None: not looked at.
        group_key: (N,) or (N, 1) int.
        rollout_key: (N,) or (N, 1) int; None: each row is a rollout.
        turn_key: (N,) or (N, 1) int, for ``turn``: rows of one rollout and one number are one turn.
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

    keeps_rows = True
    asks_in_loss = True
    spans_ranks = True
    within_groups = True

    def __init__(
        self,
        *,
        unit: Mean = "token",
        length: int | None = None,
        fold: Fold = "none",
        gradients: Gradients = "sum",
        ranks: int = 1,
        process_group: dist.ProcessGroup | str | None = None,
        shared_ids: SharedIds = "raise",
        dtype: torch.dtype | str | None = None,
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        log_prob_key: NestedKey | None = ("log_probs", "full"),
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey | None = "rollout_id",
        turn_key: NestedKey | None = None,
        advantage_key: NestedKey = "advantage",
        weight_key: NestedKey = "loss_weight",
    ):
        check_mean(unit, length)
        if (unit == "turn") != (turn_key is not None):
            raise ValueError(f"unit='turn' needs turn_key, and only it does; got {unit=} and {turn_key=}")
        one_of("fold", fold, get_args(Fold))
        one_of("gradients", gradients, get_args(Gradients))
        one_of("shared_ids", shared_ids, get_args(SharedIds))
        check_one_way(ranks, process_group)
        self.loss_mask_key, self.log_prob_key = nested_key(loss_mask_key), nested_key(log_prob_key)
        self.group_key, self.rollout_key = nested_key(group_key), nested_key(rollout_key)
        self.turn_key = nested_key(turn_key)
        self.advantage_key, self.weight_key = nested_key(advantage_key), nested_key(weight_key)
        self.unit, self.length, self.fold, self.gradients = unit, length, fold, gradients
        self.ranks, self.process_group, self.shared_ids = ranks, process_group, shared_ids
        self.dtype = as_dtype(dtype)
        self._needs = {"constant": "rollout", "turn": "rollout"}.get(unit, unit)  # whose ids must be there
        ids = {"rollout": self.rollout_key, "group": self.group_key}.get(self._needs)
        written = self.weight_key if fold == "none" else self.advantage_key
        beside = STEP_WEIGHT if fold == "none" else FOLDED_WEIGHT
        super().__init__(
            [MINIBATCH, ids, self.turn_key, None if fold == "none" else written],
            [written, beside, "num_tokens", "num_samples", "num_rollouts", "num_groups"],
        )
        self.weighed_keys = () if fold == "none" else (written,)

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Weigh the rows of each step."""
        self._check_gradients(batch)
        tokens = self._loss_tokens(batch)
        rollouts, groups = (self._ids_if_any(batch, unit) for unit in ("rollout", "group"))
        weighed = self._weigh(batch, tokens, rollouts, groups)
        averaged = self._number_of_ranks() if self.gradients == "mean" else 1
        weight = weighed.weight * averaged
        if self.fold == "none":
            batch.set(self.weight_key, weight).set(STEP_WEIGHT, weighed.total * averaged)
        else:
            factor = weight if self.fold == "sum" else weight * self._tokens_of_microbatch(batch, tokens)
            self._fold(batch, factor)
            batch.set(FOLDED_WEIGHT, weight)
        for name in ("tokens", "samples", "rollouts", "groups"):
            if (count := getattr(weighed, name)) is not None:
                batch.set(f"num_{name}", count)
        return Outcome(batch, measured={"tokens": tokens.sum(), "samples": (tokens > 0).sum()})

    def requires(self, batch: TensorDictBase) -> Sequence[Rule]:
        """Ids are set on rows in the loss."""
        tokens = self._loss_tokens(batch)
        ids = {f"{unit}_id": self._ids_if_any(batch, unit) for unit in ("rollout", "group")}
        ids["turn"] = None if self.turn_key is None else as_ids(self.column(batch, "turn_key"), "turn")
        return [_set_in_loss(column, name, tokens) for name, column in ids.items() if column is not None]

    def _check_gradients(self, batch: TensorDictBase) -> None:
        if has_key(batch, RANK) and self.ranks == 1 and self.gradients == "mean":
            raise BatchError(
                "rows are dealt to several ranks whose gradients are averaged: set ranks on LossWeight, to "
                "the split's own"
            )

    def _loss_tokens(self, batch: TensorDictBase) -> Tensor:
        tokens = loss_tokens(batch, self.loss_mask_key, self.log_prob_key)
        in_loss = batch.get(IN_LOSS, None)
        return tokens if in_loss is None else tokens * in_loss

    def _ids_if_any(self, batch: TensorDictBase, unit: str) -> Tensor | None:
        there = has_key(batch, getattr(self, f"{unit}_key"))
        return self.ids(batch, unit) if there or self._needs == unit else None

    def _fold(self, batch: TensorDictBase, factor: Tensor) -> None:
        """Multiply the advantage by (N,) factors."""
        if has_key(batch, "num_tokens"):
            raise BatchError("these rows were weighed already: folding twice would weigh them twice")
        require(batch[:1], self.advantage_key, reader="LossWeight", option="advantage_key")
        if isinstance(batch, LazyStackedTensorDict):
            for row, own in zip(batch.tensordicts, factor, strict=True):
                row.set(self.advantage_key, _scaled(row.get(self.advantage_key), own))
        else:
            advantage = batch.get(self.advantage_key)
            batch.set(self.advantage_key, _scaled(advantage, factor.view(-1, *[1] * (advantage.ndim - 1))))

    def _weigh(
        self, batch: TensorDictBase, tokens: Tensor, rollouts: Tensor | None, groups: Tensor | None
    ) -> Weighed:
        """Weigh the rows, of all ranks together where several share the batch, and keep this rank's."""
        population = population_of(batch, every=True)
        turn = None if self.turn_key is None else as_ids(self.column(batch, "turn_key"), "turn")
        columns = {"tokens": tokens, "minibatch": batch.get(MINIBATCH, None), "turn": turn}
        ids = {"rollouts": rollouts, "groups": groups}
        every = population.take(_there(columns), _there(ids))
        weighed = loss_weight(
            every["tokens"],
            self.unit,
            rollout_id=every.get("rollouts"),
            group_id=every.get("groups"),
            turn=every.get("turn"),
            minibatch=every.get("minibatch"),
            length=self.length,
            dtype=self._dtype_in(batch),
        )
        return Weighed(*(None if column is None else population.put_back(column) for column in weighed))

    def _dtype_in(self, batch: TensorDictBase) -> torch.dtype | None:
        if self.dtype is not None or not has_key(batch, self.advantage_key):
            return self.dtype
        row = batch.tensordicts[0] if isinstance(batch, LazyStackedTensorDict) else batch
        return torch.promote_types(row.get(self.advantage_key).dtype, torch.float32)

    def _number_of_ranks(self) -> int:
        ranks = present_ranks()
        return self.ranks if ranks is None else ranks.size

    @staticmethod
    def _tokens_of_microbatch(batch: TensorDictBase, tokens: Tensor) -> Tensor:
        """(N,) int64: tokens in the loss of each row's forward pass."""
        passes = torch.zeros_like(tokens)
        for key in (MINIBATCH, RANK, MICROBATCH):
            if (number := batch.get(key, None)) is not None:
                passes = first_row_of_pairs(passes, number)
        return sum_by(passes, tokens)


def _there(columns: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: column for name, column in columns.items() if column is not None}


def _scaled(advantage: Tensor, factor: Tensor) -> Tensor:
    if not advantage.is_floating_point():
        raise BatchError(f"an advantage is a floating-point number; found {advantage.dtype}")
    return advantage * factor.to(torch.promote_types(advantage.dtype, torch.float32))


def _set_in_loss(ids: Tensor, name: str, tokens: Tensor) -> Rule:
    """No row in the loss has a negative id."""
    return Rule(
        (ids < 0) & (tokens > 0),
        lambda row: f"{int(ids[row])} at row {row}",
        f"every row in the loss needs a {name} ≥ 0; found {{found}}: rows without an id would weigh as one"
        + who_stamps(name),
    )
