"""Loss weights of rows. The weighted sum over micro-batches and ranks is a mean over the optimiser step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import (
    BatchError,
    BatchTransform,
    ColumnNames,
    Ids,
    MissingKeyError,
    Rows,
    SharedIds,
)
from headrace.transforms.table.options import as_dtype, at_least, takes_options, within
from headrace.transforms.table.process_group import check_one_way
from headrace.transforms.table.schema import (
    FLOAT,
    FOLDED_WEIGHT,
    LOSS_WEIGHTS,
    MICROBATCH,
    MINIBATCH,
    PADDING,
    RANK,
    STEP_WEIGHT,
    STEP_WEIGHTS,
    TOKEN_WEIGHT,
    has_key,
    key_names,
)
from headrace.transforms.table.tensordicts import column_of
from headrace.transforms.table.tokens import (
    advantage_dtype,
    change_advantage,
    describe_row,
    in_blocks,
    read_tokens,
    same_width,
    tokens_in_loss,
    whole_numbers,
    write_tokens,
)

from .components import component_loss, read_components

Mean = Literal["token", "sample", "turn", "rollout", "group", "constant", "inverse_length"]
Fold = Literal["none", "sum", "token_mean"]
Gradients = Literal["sum", "mean"]
NEEDS = {
    "constant": "rollout",
    "inverse_length": "rollout",
}  # means that need the ids of another unit
SORTED = 2**15  # tokens whose turns are sorted in one block; sorting needs 100 bytes per token


class Weighed(NamedTuple):
    """The weight of each row, and counts of its optimiser step. All (N,)."""

    weight: Tensor
    """float: weight of each token in the loss of the row; 0 for a row without such tokens."""
    tokens: Tensor
    """int64: tokens in the loss of the row's step."""
    samples: Tensor
    """int64: rows of the step with a token in the loss."""
    rollouts: Tensor | None
    """int64: rollouts of the step with a token in the loss; None without `rollout_id`."""
    groups: Tensor | None
    """int64: groups of the step with a token in the loss; None without `group_id`."""
    total: Tensor
    """float64: Σ weight × tokens over the step; 1 except for ``constant`` and ``inverse_length``."""


@takes_options
def loss_weight(
    tokens: Tensor,
    unit: Mean = "token",
    *,
    rollout_id: Tensor | None = None,
    group_id: Tensor | None = None,
    turn: Tensor | None = None,
    turns: Tensor | None = None,
    minibatch: Tensor | None = None,
    length: int | None = None,
    power: float | None = None,
    dtype: torch.dtype | None = None,
) -> Weighed:
    """Compute weights w so that Σ_i w_i Σ_t m_it ℓ_it is a mean over an optimiser step, for any split.

    m is the loss mask, ℓ the loss of a token, t_i = Σ_t m_it, and T_u the number of tokens in the loss of the
    row's turn, rollout or group u in the step. Rows, turns, rollouts and groups without a token in the loss
    are not counted::

        token     w_i = 1 / Σ_j t_j              all tokens weigh the same (DAPO, arXiv:2503.14476)
        sample    w_i = 1 / (samples · t_i)      mean of samples' token means (GRPO, arXiv:2402.03300)
        turn      w_i = 1 / (turns · T_u)        all turns weigh the same
        rollout   w_i = 1 / (rollouts · T_u)     all rollouts weigh the same, whatever their samples
        group     w_i = 1 / (groups · T_u)       all groups weigh the same
        constant  w_i = 1 / (rollouts · length)  no length bias (Dr. GRPO, arXiv:2503.20783)
        inverse_length  w_i = T_u^−α / Σ_v T_v^−α    over rollouts v; α is `power` (VL Norm, arXiv:2509.07558)

    Without fan-out ``rollout`` equals ``sample``. If turns are inside rows and K_i turns of row i have a
    token in the loss, w_i = K_i / (turns · t_i). The weight of a token is then w_i times its
    :func:`turn_weight`. This product is 1 / (turns · T_u).

    Args:
        tokens: (N,) int64, t.
        unit: one of the means above.
        rollout_id: (N,) int64, for ``turn``, ``rollout``, ``constant`` and ``inverse_length``.
        group_id: (N,) int64, for ``group``.
        turn: (N,) int64, for ``turn``; rows of one rollout with the same number are one turn.
        turns: (N,) int64, K, for ``turn`` with turns inside rows. Replaces `rollout_id` and `turn`.
        minibatch: (N,) int64, optimiser step of each row. A row with a negative number is in no step and has
            weight 0. None: all rows are in one step.
        length: number of tokens > 0, for ``constant``, such as the longest response that is sampled.
        power: α ≥ 0, for ``inverse_length``; with α = 0 it equals ``constant`` with length 1.
        dtype: floating-point dtype of the weight; None: float32.

    Raises:
        ValueError: an option has an unknown value, or ids, a length or a power that `unit` needs are missing.

    Example:
        >>> weighed = loss_weight(torch.tensor([2, 3, 4]), "rollout", rollout_id=torch.tensor([7, 7, 9]))
        >>> (1 / weighed.weight).tolist()  # two rollouts, of 5 and 4 tokens
        [10.0, 10.0, 8.0]
    """
    check_mean(unit, length, power)
    needed = {"token": [], "sample": [], "group": ["group_id"], "turn": ["rollout_id", "turn"]}
    given = {"rollout_id": rollout_id, "group_id": group_id, "turn": turn}
    if turns is not None and (unit != "turn" or turn is not None):
        raise ValueError(f"turns is only read with unit='turn' and without turn; got {unit=} and {turn=}")
    if turns is None and any(given[name] is None for name in needed.get(unit, ["rollout_id"])):
        raise ValueError(f"unit={unit!r} needs {' and '.join(needed.get(unit, ['rollout_id']))}")
    rollouts, groups, of_rows = (None if each is None else Ids(each) for each in given.values())
    weighed = weigh(tokens, unit, rollouts, groups, of_rows, minibatch, length, turns, power)
    return weighed._replace(weight=weighed.weight.to(dtype or FLOAT))


def weigh(
    tokens: Tensor,
    unit: Mean,
    rollouts: Ids | None,
    groups: Ids | None,
    turns: Ids | None,
    minibatch: Tensor | None,
    length: int | None,
    inside: Tensor | None = None,
    power: float | None = None,
) -> Weighed:
    """Compute :func:`loss_weight` from :class:`Ids`. The weight is float64."""
    step, steps = minibatch, 1
    if step is None or len(step) == 0:
        step = torch.zeros_like(tokens)
    else:
        low, high = step.aminmax()
        steps = int(high) + 1
        if int(low) < 0:  # rows without a step are a step without tokens
            tokens, step = tokens.masked_fill(step < 0, 0), step.masked_fill(step < 0, steps)
            steps += 1
    in_loss = tokens > 0

    def by_step(values: Tensor) -> Tensor:
        return torch.zeros(steps, dtype=torch.int64, device=step.device).scatter_add_(0, step, values)

    def spread(per_step: Tensor) -> Tensor:
        return per_step.index_select(0, step)

    def sum_of_step(values: Tensor) -> Tensor:  # sorted, so that the order of the rows changes no bit
        order = values.argsort()
        return spread(torch.bincount(step[order], values[order], minlength=steps))

    total, samples = spread(by_step(tokens)), spread(by_step(in_loss.long()))

    def of_units(units: Ids) -> tuple[Tensor, Tensor]:
        """Per row: tokens of its unit in its step, and units of its step. A rollout may be in many steps."""
        if units.n == len(tokens):
            return tokens, samples  # each row is a unit
        pair = units.of * steps + step
        if units.n * steps > 8 * len(pair) + 64:  # most pairs of a unit and a step have no row
            ids = Ids(pair)
            pair, step_of = ids.of, step.index_select(0, ids.first)
            of_unit = torch.zeros_like(step_of).scatter_add_(0, pair, tokens)
            count = torch.bincount(step_of[of_unit > 0], minlength=steps)
        else:
            of_unit = torch.zeros(units.n * steps, dtype=torch.int64, device=step.device)
            of_unit.scatter_add_(0, pair, tokens)
            count = (of_unit > 0).view(units.n, steps).sum(0)
        return of_unit.index_select(0, pair), spread(count)

    counted = {} if rollouts is None else {"rollout": of_units(rollouts)}
    if groups is not None:
        counted["group"] = of_units(groups)
    if unit == "turn" and rollouts is not None and turns is not None:
        counted["turn"] = of_units(rollouts.paired_with(turns))
    if unit == "token":
        divisor = total
    elif unit == "sample":
        divisor = samples * tokens
    elif unit == "turn" and inside is not None:
        turns_in = torch.where(in_loss, inside, 0)
        divisor = (spread(by_step(turns_in)) * tokens).double() / turns_in.clamp_min(1)
    elif unit == "constant":
        divisor = counted["rollout"][1] * cast(int, length)
    elif unit == "inverse_length":
        of_unit = counted["rollout"][0].double().clamp_min(1)
        # Each row adds its part of its rollout's term.
        parts = of_unit.pow(-cast(float, power)) * tokens / of_unit
        divisor = sum_of_step(parts) * of_unit.pow(cast(float, power))
    else:
        of_unit, units = counted[unit]
        divisor = units * of_unit
    # float64, because float32 cannot represent all integers above 2^24.
    weight = torch.where(in_loss, divisor.double().reciprocal(), 0.0)
    step_weight = (total > 0).double() if length is None else total / divisor.double().clamp_min(1)
    if unit == "inverse_length":
        step_weight = sum_of_step(weight * tokens)
    nothing = None, None
    rollouts_in, groups_in = counted.get("rollout", nothing)[1], counted.get("group", nothing)[1]
    return Weighed(weight, total, samples, rollouts_in, groups_in, step_weight)


def turn_weight(turn: Tensor, in_loss: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the factor of the row's weight at each token, so that all turns inside the row weigh the same.

    For a row with t tokens in the loss in K turns, and T_u tokens in the loss of the token's turn u::

        f = t / (K · T_u),   with mean 1 over the row's tokens in the loss

    Args:
        turn: (N, T) int64, number of the turn of each token.
        in_loss: (N, T) bool, True at tokens in the loss.

    Returns:
        (N, T) float64, f, which is 0 out of the loss; (N,) int64, K.

    Example:
        >>> weight, turns = turn_weight(torch.tensor([[-1, 0, 0, 0, 1]]), torch.tensor([[0, 1, 1, 1, 1]]) > 0)
        >>> weight.tolist(), turns.tolist()  # doctest: +ELLIPSIS
        ([[0.0, 0.66..., 0.66..., 0.66..., 2.0]], [2])
    """
    last = torch.iinfo(turn.dtype).max
    ordered, order = turn.masked_fill(~in_loss, last).sort(1)
    begins = in_loss.gather(1, order)  # True at the first sorted token of each turn
    begins[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    place = torch.empty_like(order).scatter_(1, order, begins.cumsum(1))  # index of each token's turn, from 1
    tokens = torch.zeros(len(turn), turn.shape[1] + 1, dtype=torch.int64, device=turn.device)
    of_turn = tokens.scatter_add_(1, place, in_loss.long()).gather(1, place)
    turns, length = begins.sum(1), in_loss.sum(1)
    weight = length.double().unsqueeze(1) / (turns.unsqueeze(1) * of_turn)  # not used out of the loss
    return torch.where(in_loss, weight, 0.0), turns


def check_mean(unit: str, length: int | None, power: float | None = None) -> None:
    """Check the options of a mean.

    Raises:
        ValueError: the length or power of the mean is missing, too small, or not read.
    """
    at_least("length", length, 1)
    if (unit == "constant") != (length is not None):
        raise ValueError(
            f"unit='constant' needs length, and no other unit reads it; got {unit=} and {length=}"
        )
    within("power", power, 0)
    if (unit == "inverse_length") != (power is not None):
        raise ValueError(
            f"unit='inverse_length' needs power, and no other unit reads it; got {unit=} and {power=}"
        )


class LossWeight(
    BatchTransform,
    columns=("loss_mask", "log_prob", "group", "rollout", "turn", "turn_index", "advantage", "weight"),
    unset=("turn_index",),
):
    """Write the weight of each token in the loss, so that the gradient does not depend on the split.

    The sum of weight × token loss over all rows, micro-batches and ranks of an optimiser step is the mean
    over the step that `unit` names (:func:`loss_weight`). Put this stage after :class:`ShuffleSplit`, whose
    columns give the optimiser step of each row. Without these columns the batch is one step. Rows out of the
    loss are in no denominator.

    TorchRL's GRPOLoss reads no weights. There are two ways to apply the weights:

    - ``GRPOLoss(aggregation="none")`` with :func:`weighted_loss`, which weighs every loss term;
    - `fold`, which multiplies the advantage by w (``sum``), or by w times the number of tokens in the loss of
      the row's micro-batch (``token_mean``, for GRPOLoss's default aggregation). Add up the losses of the
      micro-batches of a step.

    A positive factor commutes with clipping, so `fold` is exact for the policy term. `fold` is not exact with
    GRPOLoss's `kl_mask_threshold`, which takes further tokens out of its mean. Entropy and KL terms do not
    contain the advantage, so they stay means over their micro-batch.

    Reads `loss_mask_key`, or else TorchRL's tokens of prompt and response. Reads `log_prob_key` if it exists:
    GRPOLoss leaves out tokens whose log-probability is not finite. Reads `rollout_key` and `group_key` if
    they exist or `unit` needs them. For ``turn`` it reads `turn_key` if turns are rows, or `turn_index_key`
    if turns are inside rows; turns of different rows are then different turns.

    Writes `weight_key` (N,) and ``("headrace", "step_weight")``, or with `fold` `advantage_key` and
    ``("headrace", "folded_weight")`` instead. Writes counts of the row's step, (N,) int64: ``num_tokens``,
    ``num_samples``, and with ids ``num_rollouts`` and ``num_groups``. For turns inside rows it also writes
    ``("headrace", "token_weight")`` (N, T) when rows are gathered: a factor of the row's weight at each token
    (:func:`turn_weight`). :func:`weighted_loss` applies this factor, also to packed rows. `fold` cannot
    apply it.

    With `components`, each term of the loss has weights of its own. The component ``kl`` is for the term
    ``loss_kl``. ``("loss_weights", name)`` (N, T) is the weight of a component at each token: 0 outside of
    its tokens, and else `factor` times the weight in the mean over its tokens of the step. The options of a
    component are:

    - `unit`, `length`, `power`: as for the stage, but without ``turn``. Without `unit`, the stage's apply.
    - `factor`: coefficient of the mean in the loss, ≥ 0. The default is 1.
    - `loss_mask_key`: (N, T) bool, True at the tokens of the component, in all rows of a minibatch. Such
      tokens may be in rows that a stage has masked or excluded, such as a group with equal rewards, or in a
      demonstration without a token in the loss mask. The default is the tokens in the loss.

    ``("headrace", "step_weights", name)`` (N,) is the sum of the component's weights over the row's step.

    For a dump with neither tokens nor their number (``("headrace", "no_lengths")``) the stage writes nothing,
    because a weight depends on lengths and there is no loss to weigh. With `fold` it raises an error.

    Args:
        unit: ``token``, ``sample``, ``turn``, ``rollout``, ``group``, ``constant``, ``inverse_length``.
        length: number of tokens, for ``constant``.
        power: α ≥ 0, for ``inverse_length``.
        fold: ``none``, ``sum``, ``token_mean``.
        gradients: how the gradients of ranks are combined: ``sum``; or ``mean``, as in DDP and FSDP. Under
            ``mean`` the weights are multiplied by the number of ranks.
        ranks: number of ranks that each hold all rows of the batch (``ShuffleSplit(ranks=...)``), ≥ 1.
        process_group: a group, or ``world``, of ranks that each hold their own rows. A step has rows of all
            ranks. A pipeline uses this group for all stages.
        shared_ids: meaning of an id that several ranks of `process_group` have: the ``same`` unit,
            ``different`` units, or ``raise`` an error.
        components: options of each term of the loss by its name: `unit`, `length`, `power`, `factor`,
            `loss_mask_key`. None: all terms have the weight of the row.
        dtype: dtype of the weight; None: that of the advantage, but at least float32.
        names: other names of columns, such as `loss_mask_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: a row in the loss or in a component has no id, an id is on several ranks under ``raise``,
            a token in the loss has no turn, a mask of a component has another width than the loss mask, or
            the rows have token weights already.

    Example:
        >>> from tensordict import TensorDict
        >>> mask = torch.tensor([[True, True, False], [True, True, True]])
        >>> batch = LossWeight()(TensorDict({("masks", "all_assistant_mask"): mask}, batch_size=[2]))
        >>> loss = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        >>> round(float((batch["loss_weight"][:, None] * mask * loss).sum()), 4)
        3.6
    """

    within_groups = True

    def __init__(
        self,
        *,
        unit: Mean = "token",
        length: int | None = None,
        power: float | None = None,
        fold: Fold = "none",
        gradients: Gradients = "sum",
        ranks: int = 1,
        process_group: dist.ProcessGroup | str | None = None,
        shared_ids: SharedIds = "raise",
        components: Mapping[str, Any] | None = None,
        dtype: torch.dtype | str | None = None,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        check_mean(unit, length, power)
        given = [key for key in (self.turn_key, self.turn_index_key) if key is not None]
        if len(given) != (unit == "turn"):
            raise ValueError(
                "unit='turn' needs either turn_key (each row is a turn) or turn_index_key (turns are inside "
                f"rows), and no other unit reads them; got {unit=}, turn_key={self.turn_key!r} and "
                f"turn_index_key={self.turn_index_key!r}"
            )
        if self.turn_index_key is not None and fold != "none":
            raise ValueError(
                f"with turn_index_key each token has its own weight, and {fold=} cannot put it into the "
                "advantage of a row: set fold='none', and sum the loss with weighted_loss"
            )
        self.unit, self.length, self.power = unit, length, power
        self.fold, self.gradients = fold, gradients
        self.ranks, self.process_group, self.shared_ids = ranks, process_group, shared_ids
        self.check_ranks(process_group)
        self.components, self.dtype = components, as_dtype(dtype)
        needs = {**NEEDS, "turn": "rollout" if self.turn_index_key is None else ""}
        self._needs = needs.get(unit, unit)  # the unit whose ids are required
        keys = {"rollout": self.rollout_key, "group": self.group_key}
        ids = keys.get(self._needs)
        self._components = read_components(components or {}, (unit, length, power), self.loss_mask_key)
        for each in self._components.values():
            check_mean(each.unit, each.length, each.power)
        if components and fold != "none":
            raise ValueError(
                f"with components each term has its own weight, and {fold=} cannot put it into the "
                "advantage: set fold='none', and sum the loss with weighted_loss"
            )
        written = self.weight_key if fold == "none" else self.advantage_key
        second = STEP_WEIGHT if fold == "none" else FOLDED_WEIGHT
        super().__init__(
            [MINIBATCH, ids, *given, None if fold == "none" else written]
            + [keys.get(NEEDS.get(each.unit, each.unit)) for each in self._components.values()]
            + [PADDING] * bool(components),
            [written, second, "num_tokens", "num_samples", "num_rollouts", "num_groups"]
            + ([] if self.turn_index_key is None else [TOKEN_WEIGHT])
            + [key for name in self._components for key in ((LOSS_WEIGHTS, name), (*STEP_WEIGHTS, name))],
        )
        self.weighed_keys = () if fold == "none" else (written,)

    def check_ranks(self, process_group: Any) -> None:
        """Refuse `process_group` together with `ranks` (:func:`check_one_way`)."""
        check_one_way(self.ranks, process_group)

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """Tokens in the loss, and those of components with a mask."""
        masks = [each.loss_mask_key for each in self._components.values() if each.loss_mask_key is not None]
        return [(self.loss_mask_key, self.log_prob_key), *((mask, None) for mask in masks)]

    def decide(self, rows: Rows) -> None:
        """Write the weights of the rows of each step."""
        # 1. Refuse rows that have weights already, or whose weights would be wrong.
        if self.ranks == 1 and self.gradients == "mean" and rows.has(RANK):
            raise BatchError(
                "the split assigned rows to several ranks, whose gradients are averaged "
                "(gradients='mean'): set ranks of LossWeight to the ranks of the split"
            )
        if rows.table.is_late(TOKEN_WEIGHT) or rows.table.find(TOKEN_WEIGHT) is not None:
            raise BatchError(
                f"these rows already have token weights, {TOKEN_WEIGHT!r}, which would be applied twice: "
                "remove the column with batch.exclude"
            )
        late = [key[0] for each in rows.table.late for key in each.writes]
        if LOSS_WEIGHTS in late or rows.table.find(LOSS_WEIGHTS) is not None:
            raise BatchError(
                "these rows already have the weights of components, which weighted_loss would apply instead "
                f"of new ones: use one LossWeight, or remove the column with batch.exclude({LOSS_WEIGHTS!r})"
            )
        if rows.table.masking.no_lengths and self.fold == "none":
            return  # without tokens there is no loss to weigh; only a fold would change the advantage
        # 2. What is counted in each step: tokens, and the units that have a token in the loss.
        tokens = rows.count("loss_mask", finite=True) * rows.in_loss
        units = dict[str, Ids]()
        for unit in ("rollout", "group"):
            if unit == self._needs or rows.has(unit):
                units[f"{unit}_id"] = rows.with_excluded.ids(unit, checked=False)
        if self.turn_key is not None:
            units["turn"] = Ids(rows.integers("turn", "turn"))
        for name, each in units.items():
            if each.lowest < 0:
                why = "rows without an id would share one weight"
                rows.require_set(each, name, why, who="every row in the loss", needed=tokens > 0)
        minibatch = rows[MINIBATCH] if rows.has(MINIBATCH) else None
        inside = None if self.turn_index_key is None else self._turns_inside(rows, tokens)
        ids = units.get("rollout_id"), units.get("group_id"), units.get("turn")
        weighed = weigh(tokens, self.unit, *ids, minibatch, self.length, inside, self.power)
        averaged = self.ranks * rows.table.ranks.size if self.gradients == "mean" else 1
        weight, total = weighed.weight * averaged, weighed.total * averaged
        # 3. Write the weights, or multiply the advantage by them.
        dtype = self.dtype or FLOAT
        if self.dtype is None and (credit := advantage_dtype(rows)) is not None:
            dtype = torch.promote_types(credit, torch.float32)
        if self.fold == "none":
            rows.put("weight", weight, dtype=dtype, ndim=1)
            rows.put(STEP_WEIGHT, total, dtype=torch.float64, ndim=1)
            if inside is not None:
                rows.when_gathered(partial(self._weigh_tokens, dtype=dtype), [TOKEN_WEIGHT])
            self._weigh_components(rows, tokens, minibatch, averaged, dtype)
        else:
            factor = weight if self.fold == "sum" else weight * self._tokens_of_microbatch(rows, tokens)
            if rows.has("num_tokens"):
                raise BatchError(
                    "these rows already have weights (num_tokens), and a second fold would apply weights "
                    "twice. Use one LossWeight"
                )
            change_advantage(
                rows, lambda advantage, factor: advantage * factor, at_least=torch.float32, factor=factor
            )
            rows.put(FOLDED_WEIGHT, weight, dtype=dtype, ndim=1)
        # 4. Write and record the counts.
        for name in ("tokens", "samples", "rollouts", "groups"):
            if (count := getattr(weighed, name)) is not None:
                rows.put(f"num_{name}", count, dtype=torch.int64, ndim=1)
        rows.metric("tokens", tokens.sum())
        rows.metric("samples", tokens.count_nonzero())
        if self.length is not None:
            rows.metric("divisor", self.length)

    def _weigh_components(
        self, rows: Rows, in_loss: Tensor, minibatch: Tensor | None, averaged: int, dtype: torch.dtype
    ) -> None:
        """Write the weights of each component; `in_loss`: (M,) int64, tokens in the loss."""
        for name, each in self._components.items():
            tokens, ids = each.tokens(rows, in_loss), dict[str, Ids]()
            if (unit := NEEDS.get(each.unit, each.unit)) in ("rollout", "group"):
                ids[unit] = rows.with_excluded.ids(unit, checked=False)
                why, who = "rows without an id would share one weight", f"every row in the component {name!r}"
                rows.with_excluded.require_set(ids[unit], f"{unit}_id", why, who=who, needed=tokens > 0)
            of_rows = ids.get("rollout"), ids.get("group"), None
            weighed = weigh(tokens, each.unit, *of_rows, minibatch, each.length, None, each.power)
            factor = each.factor * averaged
            rows.put((*STEP_WEIGHTS, name), weighed.total * factor, dtype=torch.float64, ndim=1)
            change = partial(each.write, name=name, keys=(self.loss_mask_key, self.log_prob_key), dtype=dtype)
            rows.when_gathered(change, [(LOSS_WEIGHTS, name)], weight=weighed.weight * factor)
            rows.metric(f"tokens_{name}", tokens.sum())

    def _turns_inside(self, rows: Rows, tokens: Tensor) -> Tensor:
        """(M,) int64: for each row, the number of turns with a token in the loss.

        Raises:
            BatchError: a token in the loss has no turn.
        """

        def count(turn: Tensor, in_loss: Tensor) -> dict[str, Tensor]:
            return {"turns": turn_weight(turn, in_loss)[1], "unplaced": (in_loss & (turn < 0)).any(1)}

        # rows.tokens() would make all columns that are computed when rows are gathered.
        batch = rows.tokens() if rows.table.is_late(self.turn_index_key) else rows.table.batch
        found = rows.measured(**in_blocks(count, *self._read_turns(batch), at_once=SORTED))
        rows.require(
            (found["unplaced"] == 0) | (tokens == 0),
            "every token in the loss needs a turn index ≥ 0; found others in {found}. Write turn_index where "
            "turns are generated",
            describe_row(rows),
        )
        return found["turns"].long()

    def _weigh_tokens(self, batch: TensorDictBase, numbers: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Write the token weights of gathered rows."""

        def weigh_tokens(turn: Tensor, in_loss: Tensor) -> dict[str, Tensor]:
            return {"weight": turn_weight(turn, in_loss)[0].to(dtype)}

        made = in_blocks(weigh_tokens, *self._read_turns(batch), at_once=SORTED)
        write_tokens(batch, TOKEN_WEIGHT, made["weight"], self.turn_index_key)

    def _read_turns(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """(B, T) int64, turn of each token, −1 outside of turns; (B, T) bool, True at tokens in the loss."""
        key, option = self.turn_index_key, "turn_index_key"
        turn = read_tokens(batch, key, fill=-1, reader=type(self).__name__, option=option)
        in_loss = tokens_in_loss(batch, self.loss_mask_key, self.log_prob_key)
        same_width(turn, in_loss, f"{option} and loss_mask_key")
        return whole_numbers(turn, key, option), in_loss

    @staticmethod
    def _tokens_of_microbatch(rows: Rows, tokens: Tensor) -> Tensor:
        """(M,) int64: tokens in the loss of each row's micro-batch."""
        passes = Ids(torch.zeros_like(tokens))
        for key in (MINIBATCH, RANK, MICROBATCH):
            if rows.has(key):
                passes = passes.paired_with(Ids(rows[key]))
        # Micro-batches of different ranks have the same indices.
        passes = passes.paired_with(Ids(rows.from_arrival(rows.table.rank_of_rows())))
        return passes.spread(passes.sum(tokens))


def weighted_loss(
    terms: TensorDictBase, batch: TensorDictBase, *, weight_key: NestedKey = "loss_weight"
) -> Tensor:
    """Sum the terms of a loss over tokens, weighted by row.

    ::

        L = Σ_k Σ_i w_i Σ_t f_it ℓ_kit,   ℓ_k the entries named loss_*, 0 for tokens out of the loss

    f is ``("headrace", "token_weight")`` if the batch has it (turns inside rows), else 1. If the batch has
    ``("loss_weights", name)`` (N, T), the components of :class:`LossWeight`, each term ``loss_<name>`` is
    weighted by its own component: L = Σ_k Σ_it w_kit ℓ_kit. Values of a term outside of its component have no
    effect.

    The loss of an optimiser step is the sum of L over its micro-batches and ranks.

    Args:
        terms: entries named ``loss_*`` (N, T) or (N, T, 1), as ``GRPOLoss(aggregation="none")`` returns them.
        batch: TensorDict ``[N]`` with the weights.
        weight_key: key of the weights, (N,), or (N, T) if the batch is packed; :class:`LossWeight` writes
            them.

    Returns:
        A scalar.

    Raises:
        MissingKeyError: the batch has no weights.
        BatchError: a term is not per token, because it was averaged already; a term has no component, or a
            component has no term; or ragged rows have token weights, and it is not known on which side the
            loss padded them.

    Example:
        >>> from tensordict import TensorDict
        >>> terms = TensorDict({"loss_objective": torch.tensor([[[1.0], [2.0]], [[3.0], [0.0]]])})
        >>> batch = TensorDict({"loss_weight": torch.tensor([0.25, 0.5])}, batch_size=[2])
        >>> float(weighted_loss(terms, batch))
        2.25
    """
    if not isinstance(batch, TensorDictBase):
        raise BatchError(
            f"weighted_loss needs the terms of the loss, and then the minibatch, a TensorDict; got a "
            f"{type(batch).__name__} as the second. {EXAMPLE}"
        )
    if has_key(batch, LOSS_WEIGHTS):
        return component_loss(terms_of(terms), batch)
    if not has_key(batch, weight_key):
        raise MissingKeyError(
            f"weighted_loss needs the key {weight_key!r} (weight_key), written by LossWeight after the "
            f"split; the batch has {key_names(batch)}. If the weights are folded into the advantage, or the "
            "loss computes its own means, use headrace.pipeline.total_loss: optimise(..., reduce=total_loss)"
        )
    weight = batch.get(weight_key)
    if weight.numel() == len(batch):
        weight = weight.reshape(-1)
    if (of_token := column_of(batch, TOKEN_WEIGHT)) is not None:
        if not isinstance(of_token, Tensor):
            raise BatchError(
                f"token weights, {TOKEN_WEIGHT!r}, need dense rows: it is not known on which side the loss "
                "padded ragged rows, so tokens could get the weights of others. Put DenseRows in front "
                "(rows=llm), or use optimise(..., transform=pack)"
            )
        weight = weight.reshape(len(batch), -1) * of_token
    total = torch.zeros((), dtype=weight.dtype, device=weight.device)
    for key, value in terms_of(terms).items():
        if value.ndim < 2 or value.shape[: weight.ndim] != weight.shape:
            raise BatchError(
                f"weighted_loss needs per-token terms, ({len(batch)}, T) or ({len(batch)}, T, 1); {key!r} is "
                f"{tuple(value.shape)}. Set aggregation='none' on GRPOLoss. Its KL terms are still means of "
                "their micro-batch: use headrace.pipeline.TokenGRPOLoss for these"
            )
        total = total + (value * weight.reshape(*weight.shape, *[1] * (value.ndim - weight.ndim))).sum()
    return total


EXAMPLE = "For example, with the loss of each token, (N, T): weighted_loss({'loss_policy': loss}, minibatch)"


def terms_of(terms: TensorDictBase) -> dict[str, Tensor]:
    """The entries ``loss_*`` of a loss, by their names.

    Raises:
        BatchError: the loss has no such entries, or is not a TensorDict.
    """
    if not hasattr(terms, "items"):
        kind = type(terms).__name__
        raise BatchError(
            f"a loss must return a TensorDict with entries loss_* per token; got a {kind}. {EXAMPLE}"
        )
    losses = {key: value for key, value in terms.items() if key.startswith("loss_")}
    losses = {key: value for key, value in losses.items() if isinstance(value, Tensor)}
    if not losses:
        raise BatchError(f"a loss must have entries named loss_*; found {sorted(map(str, terms.keys()))}")
    return losses
