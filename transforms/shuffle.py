"""The stage that cuts a batch into optimiser steps and forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import BatchTransform, has_key, nested_key, one_of
from .carry import from_plain, join_rows, to_plain
from .columns import MICROBATCH, MINIBATCH, RANK, ROW
from .criteria import count_tokens
from .deal import Balance, check_deal
from .errors import BatchError
from .plan import Plan, Silence, deal_minibatches, make_plan, mark, measure, take_span
from .progress import Progress
from .ranks import ToldError, agree_on_counts, check_ranks, raise_together, resolve_group
from .rows import device_of, take_rows
from .seeds import stream_seed
from .split import Remainder, check_split, shuffle_split
from .units import Unit, unit_ids, unit_keys


class ShuffleSplit(BatchTransform):
    """Order the rows at random, and cut them into minibatches, ranks and micro-batches.

    A minibatch is one optimiser step, a micro-batch one forward and backward of it. What it promises:

    - each row is in exactly one micro-batch of one minibatch, or left with a reason;
    - the rows of a `unit` are in one minibatch (:func:`shuffle_split`); they may be in several micro-batches,
      since :class:`LossWeight` makes the gradient the same wherever a row is;
    - which rows are in which minibatch follows from `seed` and the number of the draw alone: on any device,
      for any number of ranks, however the minibatch is cut;
    - every rank has as many micro-batches as the others, levelled by `balance` (:func:`deal`);
    - no micro-batch holds more than `max_tokens`, but for a single row that is longer.

    One TensorDict in, one out: rows in training order with the columns ``("headrace", "minibatch")``,
    ``("headrace", "microbatch")`` and, for more than one rank, ``("headrace", "rank")``, of which
    :func:`split_minibatches` and :func:`split_microbatches` yield views. In a pipeline the minibatches are
    gathered one at a time, views where the rows are in order already. ``state_dict`` holds the number of
    draws, carried rows, and how many minibatches of the batch at hand were taken, so that a restored run
    goes on with the same orders and, given the same batch, with the minibatches that it had not seen.

    Reads `rollout_key` or `group_key` by `unit`, and `length_key` to balance or keep a budget. Its verdicts
    are 1 ``remainder`` and 2 ``carried``. Device reads: the unit ids, and the lengths.

    Args:
        minibatches: K ≥ 1; give this or `minibatch_size`.
        minibatch_size: n ≥ 1 units.
        unit: ``sample``, ``rollout`` or ``group`` stays in one minibatch.
        remainder: units over: ``raise``, ``drop``, ``uneven``; ``carry`` keeps them for the next batch, whose
            ids must be others; ``pad`` cuts unevenly and fills up with copies that train nothing, until all
            micro-batches have as many rows, or under `max_tokens` until none is empty.
        microbatches: per minibatch and rank, ≥ 1; of the three give at most one. None of them: 1.
        microbatch_size: rows at most, ≥ 1.
        max_tokens: of a micro-batch, ≥ 1. Over several ranks it needs ``pad``.
        oversized: a row longer than `max_tokens` goes ``alone``, counted as ``oversized``; or ``raise``.
        balance: what to level over micro-batches and ranks: ``none``, ``tokens``, or ``attention``, which is
            tokens² + `linear` · tokens.
        linear: 6 × the model's hidden size, say.
        ranks: that share the batch, each holding the whole of it, ≥ 1.
        rank: which of them this is, to get its part alone; None: all, one after the other.
        process_group: of ranks that hold rows of their own: they agree on the number of micro-batches, and
            raise where their numbers of minibatches differ. A process group, or ``world``.
        shuffle: False keeps the order of first rows.
        seed: of the order.
        rollout_key: (N,) or (N, 1) int.
        group_key: (N,) or (N, 1) int.
        length_key: (N, T) bool, True at tokens that cost something.
        loss_mask_key: (N, T) bool, becomes False where a row is padding.
        log_prob_key: (N, T) float, becomes NaN there; None: not touched.
        weight_key: (N,) float, becomes 0 there.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: as :func:`shuffle_split` and :func:`deal`; a carried id comes back; carried rows have
            other columns or widths than those of the batch; a batch to resume is not the interrupted one.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.transforms import split_minibatches
        >>> td = TensorDict({"x": torch.arange(4)}, batch_size=[4])
        >>> [len(part) for part in split_minibatches(ShuffleSplit(minibatches=2, unit="sample")(td))]
        [2, 2]
    """

    reasons = ("remainder", "carried")

    def __init__(
        self,
        *,
        minibatches: int | None = None,
        minibatch_size: int | None = None,
        unit: Unit = "rollout",
        remainder: Remainder = "raise",
        microbatches: int | None = None,
        microbatch_size: int | None = None,
        max_tokens: int | None = None,
        oversized: str = "alone",
        balance: Balance = "none",
        linear: float = 24576.0,
        ranks: int = 1,
        rank: int | None = None,
        process_group: dist.ProcessGroup | str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rollout_key: NestedKey = "rollout_id",
        group_key: NestedKey = "group_id",
        length_key: NestedKey = ("masks", "all_attention_mask"),
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        log_prob_key: NestedKey | None = ("log_probs", "full"),
        weight_key: NestedKey = "loss_weight",
    ):
        check_split(minibatches, minibatch_size, remainder)
        check_deal(
            ranks=ranks,
            microbatches=microbatches,
            microbatch_size=microbatch_size,
            max_tokens=max_tokens,
            balance=balance,
            linear=linear,
        )
        check_ranks(ranks, rank, process_group, max_tokens, remainder)
        ids = nested_key(rollout_key), nested_key(group_key)
        self.length_key = nested_key(length_key)
        self._measures = max_tokens is not None or balance != "none"
        reads = [*unit_keys(unit, *ids), *([self.length_key] if self._measures else [])]
        super().__init__(reads, [MINIBATCH, MICROBATCH, *([RANK] if ranks > 1 else [])])
        self.rollout_key, self.group_key = ids
        self.minibatches, self.minibatch_size, self.remainder = minibatches, minibatch_size, remainder
        self.microbatches, self.microbatch_size, self.max_tokens = microbatches, microbatch_size, max_tokens
        self.oversized = one_of("oversized", oversized, ("alone", "raise"))
        self.balance, self.linear = balance, linear
        self.ranks, self.rank, self.process_group = ranks, rank, process_group
        self.unit, self.shuffle, self.seed = unit, one_of("shuffle", shuffle, (True, False)), seed
        self.loss_mask_key, self.log_prob_key = nested_key(loss_mask_key), nested_key(log_prob_key)
        self.weight_key = nested_key(weight_key)
        self.calls = 0
        self.carried: TensorDictBase | None = None
        self._admitted = 0
        self._progress: Progress | None = None  # of the batch at hand
        self._resume: dict[str, Any] | None = None  # a state whose batch is still to be given again

    @property
    def _how(self) -> dict[str, Any]:
        """The options of :func:`deal`, as they are set."""
        names = ("microbatches", "microbatch_size", "max_tokens", "balance", "linear")
        return {name: getattr(self, name) for name in names}

    @property
    def _silence(self) -> Silence:
        return Silence(self.loss_mask_key, self.log_prob_key, self.weight_key)

    # -- one batch ----------------------------------------------------------------------------------

    def enter(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Check a batch at the door; a rank without rows still tells the others so."""
        flat = super().enter(batch)
        if flat is None and (group := resolve_group(self.process_group)) is not None:
            raise_together(None, group)
            agree_on_counts([], group)
        return flat

    def apply(self, batch: TensorDictBase) -> TensorDictBase:
        """Gather all rows in order."""
        batch = self.admit(batch)
        plan = self.plan(batch)
        return self.arrange(mark(batch, plan), plan)

    def arrange(self, batch: TensorDictBase, plan: Plan) -> TensorDictBase:
        """Gather all minibatches of a marked batch, of all ranks or of one, at once."""
        if self.rank is None or self.ranks == 1:
            return take_span(batch, plan, slice(0, len(plan.order)), self._silence)
        rows = [torch.arange(span.start, span.stop) for span in plan.spans(self.rank)]
        mine = torch.cat(rows) if rows else plan.order[:0]
        return take_span(batch, plan, mine, self._silence)

    def admit(self, batch: TensorDictBase) -> TensorDictBase:
        """Put carried rows behind those of a batch.

        Raises:
            BatchError: they do not fit, or a carried unit's id is in the batch too.
        """
        self._admitted = 0 if self.carried is None else len(self.carried)
        if self.carried is None:
            return batch
        option = "group_key" if self.unit == "group" else "rollout_key"
        if has_key(batch, getattr(self, option)):
            ours, theirs = (self.column(rows, option) for rows in (self.carried, batch))
            again = ours[torch.isin(ours, theirs)].tolist()
        else:
            again = []
        if again:
            raise BatchError(
                f"rows were carried for {option.removesuffix('_key')}s {sorted(set(again))[:10]}, and the "
                "batch has those ids again: ids must be unique over batches to be carried, as RepeatSampler "
                "stamps them"
            )
        return join_rows([batch, self.carried], "carried rows")

    def plan(self, batch: TensorDictBase) -> Plan:
        """Draw the next order for a batch ``[N]``, without moving a row."""
        return self.plans(batch, 1)[0]

    def plans(self, batch: TensorDictBase, epochs: int) -> list[Plan]:
        """Draw an order for each pass over a batch ``[N]``, carried rows included (:meth:`admit`).

        Under ``carry`` the first order says who is carried, and the others are orders of the rest.
        """
        try:
            return self._plans(batch, epochs)
        except BatchError as err:
            if (group := resolve_group(self.process_group)) is not None and not isinstance(err, ToldError):
                raise_together(err, group)
            raise

    def _plans(self, batch: TensorDictBase, epochs: int) -> list[Plan]:
        ids = unit_ids(self, self.unit, batch)
        ids = None if ids is None else ids.cpu()
        lengths = self._lengths(batch)
        rows = torch.arange(len(batch))
        plans, verdicts = [], []
        for epoch in range(epochs):
            plan = self._draw(rows, ids, lengths)
            verdict = torch.zeros(len(batch), dtype=torch.int8)
            verdict[plan.left] = 1
            if self.remainder == "carry":
                if epoch == 0:
                    rows, carried = plan.order.sort().values, plan.left
                verdict[carried] = 2
            plans.append(plan)
            verdicts.append(verdict)
        device = device_of(batch)
        out = torch.stack(verdicts).amin(0)  # a row is out only if every pass leaves it out
        self.verdict = out.to(device)
        if self.remainder == "carry":
            self.carried = self._keep(batch, carried.to(device))
        self.measured = measure(plans[-1], lengths if self._measures else None, self.max_tokens)
        self.measured["left"] = float((out > 0).sum())
        if self.remainder == "carry":
            self.measured["carried_in"] = float(self._admitted)
        return plans

    def _draw(self, rows: Tensor, ids: Tensor | None, lengths: Tensor) -> Plan:
        generator = torch.Generator().manual_seed(stream_seed("split", self.seed, self.calls))
        cut = shuffle_split(
            len(rows),
            None if ids is None else ids[rows],
            minibatches=self.minibatches,
            minibatch_size=self.minibatch_size,
            remainder=self.remainder,
            shuffle=self.shuffle,
            generator=generator,
        )
        self.calls += 1
        cut = cut._replace(order=rows[cut.order], left=rows[cut.left])
        group, pad = resolve_group(self.process_group), self.remainder == "pad"
        dealt = deal_minibatches(cut, lengths, ranks=self.ranks, pad=pad, **self._how)
        if group is not None:
            raise_together(None, group)
            mine = [len(each[0]) for each in dealt]
            if (counts := agree_on_counts(mine, group)) != mine:
                dealt = deal_minibatches(
                    cut, lengths, ranks=self.ranks, pad=pad, multiples=counts, **self._how
                )
        return make_plan(cut, dealt, ranks=self.ranks, pad=pad, level=self.max_tokens is None)

    def _lengths(self, batch: TensorDictBase) -> Tensor:
        if not self._measures:
            return torch.zeros(len(batch), dtype=torch.int64)
        lengths = count_tokens(batch, self.length_key, reader=type(self).__name__, option="length_key").cpu()
        if self.oversized == "raise" and self.max_tokens is not None:
            long = (lengths > self.max_tokens).nonzero().flatten().tolist()
            if long:
                raise BatchError(
                    f"rows {long[:10]} have {lengths[long[:10]].tolist()} tokens, and a micro-batch holds "
                    f"{self.max_tokens} (max_tokens): raise it, filter them, or set oversized='alone'"
                )
        return lengths

    def _keep(self, batch: TensorDictBase, rows: Tensor) -> TensorDictBase | None:
        return None if len(rows) == 0 else take_rows(batch, rows).exclude(ROW)

    # -- one batch after the other ------------------------------------------------------------------

    def begin(self, batch: TensorDictBase, *, whole: bool = False) -> None:
        """Remember the state before a batch, to which a checkpoint in its middle goes back.

        Args:
            batch: TensorDict ``[N]``, before :meth:`admit`.
            whole: its minibatches are not taken one by one.

        Raises:
            BatchError: an interrupted batch is to be resumed, and this is another one, or comes whole.
        """
        ids = self.column(batch, "rollout_key") if has_key(batch, self.rollout_key) else None
        progress = Progress({"calls": self.calls, "carried": self.carried}, len(batch), ids)
        if self._resume is not None:
            progress.check(self._resume["batch"])
            if whole:
                raise BatchError(
                    "a batch was interrupted between its minibatches: go on with pipeline.minibatches(batch)"
                )
        progress.closed = whole
        self._progress = progress

    def undo(self) -> None:
        """Forget the batch that was begun: what follows the split refused it."""
        if self._progress is not None:
            self.calls, self.carried = (self._progress.before[name] for name in ("calls", "carried"))
            self._progress = None

    def stream(self, passes: Sequence[tuple[TensorDictBase, Plan]]) -> Iterator[TensorDictBase]:
        """Yield the minibatches of marked batches, but those that a restored run had taken.

        An iterator that is closed before its end, as a loop does that is left by ``break``, has done with
        the batch. The state is that of the batch begun last.
        """
        progress = self._progress or Progress({"calls": self.calls, "carried": self.carried}, 0, None)
        progress.minibatches = sum(len(plan.sizes) for _, plan in passes)
        if self._resume is not None and passes:
            progress.resume(self._resume["batch"])
            self._resume = None
        return self._yield(passes, progress)

    def _yield(
        self, passes: Sequence[tuple[TensorDictBase, Plan]], progress: Progress
    ) -> Iterator[TensorDictBase]:
        skip = progress.taken
        try:
            for batch, plan in passes:
                spans = plan.spans(self.rank)
                for span in spans[skip:]:
                    progress.taken += 1
                    yield take_span(batch, plan, span, self._silence)
                skip = max(skip - len(spans), 0)
        finally:
            progress.closed = True

    def get_extra_state(self) -> dict[str, Any]:
        """What ``state_dict`` saves; in the middle of a batch, the state before it and how far it came."""
        state = {"calls": self.calls, "carried": self.carried}
        if self._resume is not None:
            state = self._resume
        elif self._progress is not None and not self._progress.done:
            state = self._progress.state()
        return state | {"carried": to_plain(state["carried"])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.calls, self.carried = state["calls"], from_plain(state["carried"])
        self._progress = None
        self._resume = state | {"carried": self.carried} if "batch" in state else None
