"""What each row weighs in the loss, so that a sum over any cut of the batch is a named mean of the whole."""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from .columns import ColumnNames
from .distributed import SharedIds, check_one_way
from .errors import BatchError, MissingKeyError
from .ids import Ids
from .options import as_dtype, at_least, one_of, takes_options, within
from .rows import Rows
from .schema import (
    FLOAT,
    FOLDED_WEIGHT,
    MICROBATCH,
    MINIBATCH,
    RANK,
    STEP_WEIGHT,
    TOKEN_WEIGHT,
    has_key,
    key_names,
)
from .stage import BatchTransform
from .tensordicts import column_of
from .tokens import (
    describe_row,
    in_blocks,
    read_tokens,
    same_width,
    tokens_in_loss,
    whole_numbers,
    write_tokens,
)

Mean = Literal["token", "sample", "turn", "rollout", "group", "constant", "inverse_length"]
Fold = Literal["none", "sum", "token_mean"]
Gradients = Literal["sum", "mean"]
SORTED = 2**15  # tokens whose turns are sorted at once, which takes 100 bytes of each


class Weighed(NamedTuple):
    """What each row weighs, and what its optimiser step holds. All (N,)."""

    weight: Tensor
    """float: of each of the row's tokens in the loss; 0 for a row that has none."""
    tokens: Tensor
    """int64: tokens in the loss of the row's step."""
    samples: Tensor
    """int64: rows of the step with a token in the loss."""
    rollouts: Tensor | None
    """int64: rollouts of the step with a token in the loss; None without `rollout_id`."""
    groups: Tensor | None
    """int64: groups of the step with a token in the loss; None without `group_id`."""
    total: Tensor
    """float64: what weight × tokens adds up to over the step; 1, but for ``constant``, ``inverse_length``."""


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
    """Weigh rows so that Σ_i w_i Σ_t m_it ℓ_it, over any cut of a step, is a mean of the whole step.

    With t_i tokens in the loss of row i, T_u those of its turn, rollout or group u in the step, and only
    rows, turns, rollouts and groups counted that have a token in the loss::

        token     w_i = 1 / Σ_j t_j              all tokens weigh the same (DAPO, arXiv:2503.14476)
        sample    w_i = 1 / (samples · t_i)      mean of samples' token means (GRPO, arXiv:2402.03300)
        turn      w_i = 1 / (turns · T_u)        each turn of a rollout weighs one
        rollout   w_i = 1 / (rollouts · T_u)     each rollout weighs one, whatever its number of samples
        group     w_i = 1 / (groups · T_u)       each group weighs one
        constant  w_i = 1 / (rollouts · length)  no length bias (Dr. GRPO, arXiv:2503.20783)
        inverse_length  w_i = T_u^−α / Σ_v T_v^−α    over rollouts v; α is `power` (VL Norm, arXiv:2509.07558)

    Without fan-out ``rollout`` is ``sample``. Of turns inside rows, K_i of them with a token in the loss of
    row i, w_i = K_i / (turns · t_i), and a token weighs w_i times its :func:`turn_weight`: 1 / (turns · T_u).

    Args:
        tokens: (N,) int64, t.
        unit: which mean.
        rollout_id: (N,) int64, for ``turn``, ``rollout``, ``constant`` and ``inverse_length``.
        group_id: (N,) int64, for ``group``.
        turn: (N,) int64, for ``turn``: rows of one rollout and one number are one.
        turns: (N,) int64, K, for ``turn`` where they are inside rows, in place of `rollout_id` and `turn`.
        minibatch: (N,) int64, which optimiser step a row is in; below 0 it is in none and weighs 0. None:
            all are in one.
        length: tokens, > 0, for ``constant``: the longest response that is sampled, say.
        power: α ≥ 0, for ``inverse_length``; under 0 it is ``constant`` with a length of 1.
        dtype: of the weight, floating point; None: float32.

    Raises:
        ValueError: an option that is none; `unit` needs ids or a length that are not given.

    Example:
        >>> weighed = loss_weight(torch.tensor([2, 3, 4]), "rollout", rollout_id=torch.tensor([7, 7, 9]))
        >>> (1 / weighed.weight).tolist()  # two rollouts, of 5 and 4 tokens
        [10.0, 10.0, 8.0]
    """
    check_mean(unit, length, power)
    needed = {"token": [], "sample": [], "group": ["group_id"], "turn": ["rollout_id", "turn"]}
    given = {"rollout_id": rollout_id, "group_id": group_id, "turn": turn}
    if turns is not None and (unit != "turn" or turn is not None):
        raise ValueError(f"turns inside rows are for unit='turn', and without turn; got {unit=} and {turn=}")
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
    """:func:`loss_weight` of rows whose ids are numbered already; the weight is float64."""
    step = torch.zeros_like(tokens) if minibatch is None else minibatch.clamp_min(-1) + 1  # 0: in none
    steps = int(step.max()) + 1 if len(step) else 1
    if minibatch is not None:
        tokens = torch.where(step > 0, tokens, 0)
    in_loss = tokens > 0

    def by_step(values: Tensor) -> Tensor:
        return torch.zeros(steps, dtype=torch.int64, device=step.device).scatter_add_(0, step, values)

    total, samples = by_step(tokens)[step], by_step(in_loss.long())[step]

    def of_units(units: Ids) -> tuple[Tensor, Tensor]:
        """By row, tokens of the row's unit and units of its step: a rollout in two steps is two."""
        if units.n == len(tokens):
            return tokens, samples  # each row is a unit
        pair = units.of * steps + step
        if units.n * steps > 8 * len(pair) + 64:  # units are few in each of many steps
            ids = Ids(pair)
            pair, home = ids.of, step[ids.first]
            of_unit = torch.zeros_like(home).scatter_add_(0, pair, tokens)
            count = torch.bincount(home[of_unit > 0], minlength=steps)
        else:
            of_unit = torch.zeros(units.n * steps, dtype=torch.int64, device=step.device)
            of_unit.scatter_add_(0, pair, tokens)
            count = (of_unit > 0).view(units.n, steps).sum(0)
        return of_unit[pair], count[step]

    counted = {} if rollouts is None else {"rollout": of_units(rollouts)}
    if groups is not None:
        counted["group"] = of_units(groups)
    if unit == "turn" and rollouts is not None and turns is not None:
        counted["turn"] = of_units(rollouts.paired_with(turns))
    if unit == "token":
        share = total
    elif unit == "sample":
        share = samples * tokens
    elif unit == "turn" and inside is not None:
        turns_in = torch.where(in_loss, inside, 0)
        share = (by_step(turns_in)[step] * tokens).double() / turns_in.clamp_min(1)
    elif unit == "constant":
        share = counted["rollout"][1] * (length or 1)
    elif unit == "inverse_length":
        of_unit = counted["rollout"][0].double().clamp_min(1)
        # Each row adds its part of its rollout, and the sum follows from the set of parts.
        parts = torch.where(in_loss, of_unit.pow(-(power or 0.0)) * tokens / of_unit, 0.0)
        order = parts.argsort()
        share = torch.bincount(step[order], parts[order], minlength=steps)[step] * of_unit.pow(power or 0.0)
    else:
        of_unit, units = counted[unit]
        share = units * of_unit
    # In float64: past 2^24 a float32 cannot hold the denominator.
    weight = torch.where(in_loss, share.double().reciprocal(), 0.0)
    whole = (total > 0).double() if length is None else total / share.double().clamp_min(1)
    if unit == "inverse_length":
        sizes = weight * tokens
        order = sizes.argsort()
        whole = torch.bincount(step[order], sizes[order], minlength=steps)[step]
    rollouts_in, groups_in = (counted[name][1] if name in counted else None for name in ("rollout", "group"))
    return Weighed(weight, total, samples, rollouts_in, groups_in, whole)


def turn_weight(turn: Tensor, in_loss: Tensor) -> tuple[Tensor, Tensor]:
    """By what a row's weight is multiplied at each of its tokens, so that each turn inside it weighs one.

    With t tokens and K turns in the loss of the row, and T_u those tokens of the token's turn u::

        f = t / (K · T_u),   of mean 1 over the row's tokens in the loss

    Args:
        turn: (N, T) int64, any number for each turn.
        in_loss: (N, T) bool.

    Returns:
        (N, T) float64, 0 out of the loss; and (N,) int64, K.

    Example:
        >>> weight, turns = turn_weight(torch.tensor([[-1, 0, 0, 0, 1]]), torch.tensor([[0, 1, 1, 1, 1]]) > 0)
        >>> weight.tolist(), turns.tolist()  # doctest: +ELLIPSIS
        ([[0.0, 0.66..., 0.66..., 0.66..., 2.0]], [2])
    """
    last = torch.iinfo(turn.dtype).max
    ordered, order = turn.masked_fill(~in_loss, last).sort(1)
    begins = in_loss.gather(1, order)  # where a turn begins among them
    begins[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    place = torch.empty_like(order).scatter_(1, order, begins.cumsum(1))  # of each token's turn, from 1 on
    tokens = torch.zeros(len(turn), turn.shape[1] + 1, dtype=torch.int64, device=turn.device)
    of_turn = tokens.scatter_add_(1, place, in_loss.long()).gather(1, place)
    turns, length = begins.sum(1), in_loss.sum(1)
    weight = length.double().unsqueeze(1) / (turns.unsqueeze(1) * of_turn).clamp_min(1)
    return torch.where(in_loss, weight, 0.0), turns


def check_mean(unit: str, length: int | None, power: float | None = None) -> None:
    """Check the options of a mean.

    Raises:
        ValueError: there is no such mean; its length or power is missing, too small, or of no use.
    """
    one_of("unit", unit, get_args(Mean))
    at_least("length", length, 1)
    if (unit == "constant") != (length is not None):
        raise ValueError(
            f"unit='constant' divides by a length, and no other mean does; got {unit=} and {length=}"
        )
    within("power", power, 0)
    if (unit == "inverse_length") != (power is not None):
        raise ValueError(
            "unit='inverse_length' has a power of the length, and no other mean does; "
            f"got {unit=} and {power=}"
        )


class LossWeight(
    BatchTransform,
    columns=("loss_mask", "log_prob", "group", "rollout", "turn", "turn_index", "advantage", "weight"),
    unset=("turn_index",),
):
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
    there or where `unit` needs them; for ``turn`` either `turn_key`, where turns are rows, or
    `turn_index_key`, where they are inside rows and those of two rows are different ones.
    Writes `weight_key` (N,) and ``("headrace", "step_weight")``, or under `fold` `advantage_key` and
    ``("headrace", "folded_weight")`` in their place; and the counts of the row's step,
    (N,) int64: ``num_tokens``, ``num_samples``, and where there are ids ``num_rollouts`` and ``num_groups``.
    Of turns inside rows it also writes ``("headrace", "token_weight")`` (N, T), where rows are gathered: by
    what a token's loss is multiplied beside its row's weight (:func:`turn_weight`). :func:`weighted_loss`
    does, also of packed rows; no `fold` can.

    Args:
        unit: ``token``, ``sample``, ``turn``, ``rollout``, ``group``, ``constant``, ``inverse_length``.
        length: tokens, for ``constant``.
        power: α ≥ 0, for ``inverse_length``.
        fold: ``none``, ``sum``, ``token_mean``.
        gradients: how those of several ranks meet: ``sum``, or ``mean`` as in DDP and FSDP, for which the
            weights are multiplied by the number of ranks.
        ranks: that share a batch which each of them holds whole (``ShuffleSplit(ranks=...)``), ≥ 1.
        process_group: a group, or ``world``, of ranks that hold rows of their own, whose steps have one
            denominator. A pipeline takes it over for all stages.
        shared_ids: an id that several ranks of the process group have is the ``same`` unit there, or
            ``different`` ones, or must not be: ``raise``; for `process_group`.
        dtype: of the weight; None: that of the advantage, at least float32.
        names: other names of columns, such as `loss_mask_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is not there.
        BatchError: an unset id on a row in the loss; an id on several ranks, under ``raise``; a token in the
            loss without a turn; rows that have weights of tokens already.

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
        dtype: torch.dtype | str | None = None,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        check_mean(unit, length, power)
        given = [key for key in (self.turn_key, self.turn_index_key) if key is not None]
        if len(given) != (unit == "turn"):
            raise ValueError(
                "unit='turn' needs turn_key, where rows are turns, or turn_index_key, where turns are inside "
                f"rows, and only it does; got {unit=}, turn_key={self.turn_key!r} and "
                f"turn_index_key={self.turn_index_key!r}"
            )
        if self.turn_index_key is not None and fold != "none":
            raise ValueError(
                f"a weight by turn inside rows is one of each token, which {fold=} cannot put into the "
                "advantage of a row: leave it 'none', and sum the loss by weighted_loss"
            )
        one_of("fold", fold, get_args(Fold))
        one_of("gradients", gradients, get_args(Gradients))
        one_of("shared_ids", shared_ids, get_args(SharedIds))
        check_one_way(ranks, process_group)
        self.unit, self.length, self.power = unit, length, power
        self.fold, self.gradients = fold, gradients
        self.ranks, self.process_group, self.shared_ids = ranks, process_group, shared_ids
        self.dtype = as_dtype(dtype)
        needs = {
            "constant": "rollout",
            "inverse_length": "rollout",
            "turn": "rollout" if self.turn_index_key is None else "",
        }
        self._needs = needs.get(unit, unit)  # whose ids must be there
        ids = {"rollout": self.rollout_key, "group": self.group_key}.get(self._needs)
        written = self.weight_key if fold == "none" else self.advantage_key
        beside = STEP_WEIGHT if fold == "none" else FOLDED_WEIGHT
        super().__init__(
            [MINIBATCH, ids, *given, None if fold == "none" else written],
            [written, beside, "num_tokens", "num_samples", "num_rollouts", "num_groups"]
            + ([] if self.turn_index_key is None else [TOKEN_WEIGHT]),
        )
        self.weighed_keys = () if fold == "none" else (written,)

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """Those in the loss."""
        return [(self.loss_mask_key, self.log_prob_key)]

    def needs_each_rank(self) -> str:
        """It does, for turns inside rows."""
        return super().needs_each_rank() if self.turn_index_key is None else "it reads tokens"

    def decide(self, rows: Rows) -> None:
        """Weigh the rows of each step."""
        if self.ranks == 1 and self.gradients == "mean" and rows.has(RANK):
            raise BatchError(
                "rows are assigned to several ranks whose gradients are averaged: set ranks of LossWeight to "
                "the ranks of the split"
            )
        if rows.table.is_late(TOKEN_WEIGHT) or column_of(rows.table.batch, TOKEN_WEIGHT) is not None:
            raise BatchError(
                f"these rows were weighed by turn already, and have {TOKEN_WEIGHT!r}: take it out "
                "(batch.exclude), or else it would weigh their tokens again"
            )
        tokens = rows.loss_tokens
        ids = {
            unit: rows.ids(unit, checked=False).everyone if unit == self._needs or rows.has(unit) else None
            for unit in ("rollout", "group")
        }
        turns = None if self.turn_key is None else Ids(rows.integers("turn", "turn"))
        for name, each in {"rollout_id": ids["rollout"], "group_id": ids["group"], "turn": turns}.items():
            if each is not None and each.lowest < 0:
                why = "rows without an id would weigh as one"
                rows.require_set(each, name, why, who="every row in the loss", needed=tokens > 0)
        minibatch = rows[MINIBATCH] if rows.has(MINIBATCH) else None
        inside = None if self.turn_index_key is None else self._turns_inside(rows, tokens)
        columns = (tokens, self.unit, ids["rollout"], ids["group"], turns, minibatch)
        weighed = weigh(*columns, self.length, inside, self.power)
        averaged = 1
        if self.gradients == "mean":
            averaged = self.ranks if rows.table.ranks is None else rows.table.ranks.size
        weight = weighed.weight * averaged if averaged > 1 else weighed.weight
        dtype = self.dtype or FLOAT
        if self.dtype is None and (credit := rows.advantage_dtype) is not None:
            dtype = torch.promote_types(credit, torch.float32)
        if self.fold == "none":
            rows.put("weight", weight, dtype=dtype, ndim=1)
            rows.put(STEP_WEIGHT, weighed.total * averaged, dtype=torch.float64, ndim=1)
            if inside is not None:
                rows.when_gathered(partial(self._weigh_tokens, dtype=dtype), [TOKEN_WEIGHT])
        else:
            factor = weight if self.fold == "sum" else weight * self._tokens_of_microbatch(rows, tokens)
            if rows.has("num_tokens"):
                raise BatchError("these rows were weighed already: folding twice would weigh them twice")
            rows.change_advantage(
                lambda advantage, factor: advantage * factor, at_least=torch.float32, factor=factor
            )
            rows.put(FOLDED_WEIGHT, weight, dtype=dtype, ndim=1)
        for name in ("tokens", "samples", "rollouts", "groups"):
            if (count := getattr(weighed, name)) is not None:
                rows.put(f"num_{name}", count, dtype=torch.int64, ndim=1)
        for view in rows.of_each_rank():
            own = view.of_rank(tokens)
            view.metric("tokens", own.sum())
            view.metric("samples", (own > 0).sum())

    def _turns_inside(self, rows: Rows, tokens: Tensor) -> Tensor:
        """(M,) int64: turns with a token in the loss of each row.

        Raises:
            BatchError: a token in the loss has no turn.
        """

        def count(turn: Tensor, in_loss: Tensor) -> dict[str, Tensor]:
            return {"turns": turn_weight(turn, in_loss)[1], "unplaced": (in_loss & (turn < 0)).any(1)}

        # What waits for the gathering of rows may go on waiting.
        batch = rows.tokens() if rows.table.is_late(self.turn_index_key) else rows.table.batch
        found = rows.measured(**in_blocks(count, *self._read_turns(batch), at_once=SORTED))
        rows.require(
            (found["unplaced"] == 0) | (tokens == 0),
            "every token in the loss needs a turn, from 0 on; found others in {found}. Write turn_index "
            "where turns are generated",
            describe_row(rows),
        )
        return found["turns"].long()

    def _weigh_tokens(self, batch: TensorDictBase, numbers: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Write what each token of gathered rows weighs beside its row."""

        def weigh_tokens(turn: Tensor, in_loss: Tensor) -> dict[str, Tensor]:
            return {"weight": turn_weight(turn, in_loss)[0].to(dtype)}

        made = in_blocks(weigh_tokens, *self._read_turns(batch), at_once=SORTED)
        write_tokens(batch, TOKEN_WEIGHT, made["weight"], self.turn_index_key)

    def _read_turns(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """(B, T) int64, each token's turn, −1 where it is of none; and (B, T) bool, whether it trains."""
        key, option = self.turn_index_key, "turn_index_key"
        turn = read_tokens(batch, key, fill=-1, reader=type(self).__name__, option=option)
        in_loss = tokens_in_loss(batch, self.loss_mask_key, self.log_prob_key)
        same_width(turn, in_loss, f"{option} and loss_mask_key")
        return whole_numbers(turn, key, option), in_loss

    @staticmethod
    def _tokens_of_microbatch(rows: Rows, tokens: Tensor) -> Tensor:
        """(M,) int64: tokens in the loss of each row's forward pass."""
        passes = Ids(torch.zeros_like(tokens))
        for key in (MINIBATCH, RANK, MICROBATCH):
            if rows.has(key):
                passes = passes.paired_with(Ids(rows[key]))
        passes = passes.paired_with(Ids(rows.from_arrival(rows.table.by_rank())))  # they number them alike
        return passes.spread(passes.sum(tokens))


def weighted_loss(
    terms: TensorDictBase, batch: TensorDictBase, *, weight_key: NestedKey = "loss_weight"
) -> Tensor:
    """Sum the terms of a loss over tokens, each with its row's weight.

    ::

        L = Σ_k Σ_i w_i Σ_t f_it ℓ_kit,   ℓ_k the entries named loss_*, 0 for tokens out of the loss

    f are the weights of tokens that rows have where turns inside them weigh one, and else 1.

    Sums of L over the micro-batches and ranks of an optimiser step are the step's loss.

    Args:
        terms: entries named ``loss_*`` (N, T) or (N, T, 1), as ``GRPOLoss(aggregation="none")`` returns them.
        batch: TensorDict ``[N]`` with the weights.
        weight_key: (N,), or (N, T) where the batch is packed; written by :class:`LossWeight`.

    Returns:
        A scalar.

    Raises:
        MissingKeyError: the batch has no weights.
        BatchError: a term is no per-token tensor of these rows, since it was averaged already; weights of
            tokens are on ragged rows, and nothing says on which side the loss has filled them up.

    Example:
        >>> from tensordict import TensorDict
        >>> terms = TensorDict({"loss_objective": torch.tensor([[[1.0], [2.0]], [[3.0], [0.0]]])})
        >>> batch = TensorDict({"loss_weight": torch.tensor([0.25, 0.5])}, batch_size=[2])
        >>> float(weighted_loss(terms, batch))
        2.25
    """
    if not has_key(batch, weight_key):
        raise MissingKeyError(
            f"weighted_loss needs the key {weight_key!r} (weight_key), written by LossWeight after the "
            f"split; the batch has {key_names(batch)}. Where weights are folded into the advantage, or the "
            "loss makes means of its own, add them up by headrace.pipeline.total_loss: optimise(..., "
            "reduce=total_loss)"
        )
    weight = batch.get(weight_key)
    if weight.numel() == len(batch):
        weight = weight.reshape(-1)
    if (of_token := column_of(batch, TOKEN_WEIGHT)) is not None:
        if not isinstance(of_token, Tensor):
            raise BatchError(
                f"a weight by token, {TOKEN_WEIGHT!r}, is of dense rows: of ragged ones nothing says on "
                "which side the loss has filled them up, and each token would get another's. Put DenseRows "
                "in front (rows=llm), or optimise(..., transform=pack)"
            )
        weight = weight.reshape(len(batch), -1) * of_token
    losses = {
        key: value for key, value in terms.items() if key.startswith("loss_") and isinstance(value, Tensor)
    }
    total = torch.zeros((), dtype=weight.dtype, device=weight.device)
    for key, value in losses.items():
        if value.ndim < 2 or value.shape[: weight.ndim] != weight.shape:
            raise BatchError(
                f"weights are for per-token terms, ({len(batch)}, T) or ({len(batch)}, T, 1); {key!r} is "
                f"{tuple(value.shape)}. Set aggregation='none' on GRPOLoss; its KL terms stay means of their "
                "micro-batch all the same: use headrace.pipeline.TokenGRPOLoss for those"
            )
        total = total + (value * weight.reshape(*weight.shape, *[1] * (value.ndim - weight.ndim))).sum()
    if not losses:
        raise BatchError(f"a loss has entries named loss_*; found {sorted(map(str, terms.keys()))}")
    return total
