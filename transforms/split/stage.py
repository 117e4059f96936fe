"""The stage that cuts a batch into optimiser steps and forward passes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.columns import ColumnNames
from headrace.transforms.distributed import sharing
from headrace.transforms.entry import labels_in_errors
from headrace.transforms.errors import BatchError, listing
from headrace.transforms.ids import Ids
from headrace.transforms.options import has_effect
from headrace.transforms.prefixes import left_aligned, prefix_order
from headrace.transforms.rows import Rows
from headrace.transforms.schema import MICROBATCH, MINIBATCH, RANK, Unit, unit_keys
from headrace.transforms.stage import BatchTransform
from headrace.transforms.table import Effect, Late, Reduced, Table
from headrace.transforms.tensordicts import number_column
from headrace.transforms.tokens import read_tokens

from .gather import Columns, LossColumns, OptimiserSteps
from .plan import Balance, CutOptions, Oversized, Part, Plan, draw_plans, measure_plan
from .resume import KnownBy, Progress, SplitMemory, SplitState, TrainedBatch, identifying_columns
from .shuffle import TOGETHER, Remainder
from .trees import Forest, Tree

log = logging.getLogger(__name__)


class Pass(NamedTuple):
    """Where each row of the table is trained in one pass over the batch; (N,) int64, −1: in no step."""

    minibatch: Tensor
    microbatch: Tensor
    rank: Tensor | None
    """None: there is one."""


@dataclass
class Permuted:
    """The orders of one batch, and what follows from them; nothing is remembered before it is accepted.

    Attributes:
        passes: one for each epoch.
        plans: one for each epoch, of this rank's rows, in row numbers of the table.
        of_ranks: those of all ranks, where this one has permuted them.
        state: after the batch.
        progress: of the batch.
    """

    rows: Rows
    split: ShuffleSplit
    passes: list[Pass]
    plans: list[Plan]
    state: SplitState
    progress: Progress
    of_ranks: Sequence[list[Plan]] = ()

    def steps(self, passes: Sequence[tuple[Columns, Sequence[Late], TensorDictBase]]) -> OptimiserSteps:
        """The optimiser steps, which are gathered one at a time.

        Args:
            passes: by epoch, the columns that stages have written, by row of the table, what they do to
                gathered rows, and the rows.

        Raises:
            BatchError: there is padding, and no column to keep it out of the loss.
        """
        split, rank = self.split, self.split.rank if self.split.ranks > 1 else None
        loss_columns = LossColumns(split.loss_mask_key, split.log_prob_key, split.weight_key)
        each = [(plan, *what) for plan, what in zip(self.plans, passes, strict=True)]
        return OptimiserSteps(
            self.rows.table, each, rank, loss_columns, self.progress, in_order=not split.shuffle
        )


class ShuffleSplit(
    SplitMemory,
    BatchTransform,
    columns=("rollout", "group", "reward", "length", "tokens", "loss_mask", "log_prob", "weight"),
):
    """Order the rows at random, and cut them into minibatches, ranks and micro-batches.

    A minibatch is one optimiser step, a micro-batch one forward and backward of it. What it promises:

    - each row is in exactly one micro-batch of one minibatch, or left with a reason;
    - the rows of a `unit` are in one minibatch (:func:`shuffle_split`); they may be in several micro-batches,
      since :class:`LossWeight` makes the gradient the same wherever a row is;
    - which rows are in which minibatch follows from `seed` and the number of the draw alone: on any device,
      for any number of ranks, however it is cut, but for those that ``drop`` leaves out to keep a budget;
    - every rank has as many micro-batches as the others, levelled by `balance` (:func:`assign_rows`);
    - no micro-batch holds more than `max_tokens`, but for a single row that is longer;
    - of a `tree` tokens cost once, and its rows are in one micro-batch, but for what is over `max_tokens`.

    One TensorDict in, one out: rows in training order with the columns ``("headrace", "minibatch")``,
    ``("headrace", "microbatch")`` and, for more than one rank, ``("headrace", "rank")``, of which
    :func:`split_minibatches` and :func:`split_microbatches` yield views. In a pipeline the minibatches are
    gathered one at a time, views where the rows are in order. ``state_dict`` holds the number of draws,
    carried rows, and how many minibatches of the batch at hand were taken: a restored run draws the same
    orders and, given that batch again, yields the others, or :meth:`discard_batch` lets go of them. It
    refuses another batch, known by its ids and rewards, and another cut; each rank saves its own state.
    Behind the last minibatch, the rows of a batch that comes again leave as ``trained_before``, the first
    time after ``load_state_dict``: given once more, it is trained in a second pass.

    Reads the ids of its `unit` and `tree`, and `length_key` to balance or keep a budget. Rows
    leave as ``remainder``, ``carried`` or ``trained_before``.

    Args:
        minibatches: K ≥ 1; give this or `minibatch_size`.
        minibatch_size: n ≥ 1 units.
        unit: ``sample``, ``rollout`` or ``group`` stays in one minibatch.
        remainder: units over: ``raise``, ``drop``, ``uneven``; ``carry`` keeps them for the next batch, whose
            ids must be others; ``pad`` cuts unevenly and fills up with copies that train nothing, until all
            micro-batches have as many rows, or under `max_tokens` until none is empty, for which ``drop``
            leaves out further units, the last of their minibatch.
        microbatches: per minibatch and rank, ≥ 1; of the three give at most one. None of them: 1.
        microbatch_size: rows at most, ≥ 1.
        max_tokens: of a micro-batch, ≥ 1. Over several ranks it needs ``pad`` or ``drop``.
        multiple_of: the number of micro-batches per rank is a multiple of it, ≥ 1.
        oversized: a row longer than `max_tokens` goes ``alone``, counted as ``oversized``; or ``raise``.
        balance: ``none``, ``tokens``, or ``attention`` (tokens² + `linear` · tokens) is levelled over them.
        linear: for ``attention``, 6 × the model's hidden size, say.
        tree: the rows of a ``rollout`` or ``group`` that begin alike, to be packed as one; ``none``.
        ranks: that share the batch, each holding the whole of it, ≥ 1.
        rank: which of them this is, to get its part alone; None: all, one after the other.
        process_group: a group, or ``world``, of ranks that hold rows of their own: each takes as many steps,
            of as many micro-batches, and one without rows empty ones. A pipeline takes it over for all.
        shuffle: False keeps the order of first rows.
        seed: of the order.
        names: other names of columns, such as `rollout_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is not there.
        BatchError: as those functions; carried rows do not fit the batch, or that to resume is another.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"x": torch.arange(4)}, batch_size=[4])
        >>> ShuffleSplit(minibatches=2, unit="sample")(td)["headrace", "minibatch"].tolist()
        [0, 0, 1, 1]
    """

    reasons = ("remainder", "carried")
    effects: tuple[Effect, ...] = ("dropped", "carried")
    within_groups = True
    stateful = True

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
        multiple_of: int = 1,
        oversized: Oversized = "alone",
        balance: Balance = "none",
        linear: float = 24576.0,
        tree: Tree = "none",
        ranks: int = 1,
        rank: int | None = None,
        process_group: dist.ProcessGroup | str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.minibatches, self.minibatch_size, self.remainder = minibatches, minibatch_size, remainder
        self.microbatches, self.microbatch_size, self.max_tokens = microbatches, microbatch_size, max_tokens
        self.multiple_of, self.oversized, self.balance, self.linear = multiple_of, oversized, balance, linear
        self.ranks, self.rank, self.process_group = ranks, rank, process_group
        self.unit, self.tree, self.shuffle, self.seed = unit, tree, shuffle, seed
        SplitMemory.__init__(self)
        ids = self.rollout_key, self.group_key
        reads = [*unit_keys(unit, *ids), *([self.length_key] if self.cut.measures else [])]
        has_effect(ShuffleSplit, "oversized", oversized, max_tokens is not None, "max_tokens")
        has_effect(ShuffleSplit, "linear", linear, balance == "attention", "balance='attention'")
        reads += [] if tree == "none" else [*unit_keys(tree, *ids), self.tokens_key]
        BatchTransform.__init__(self, reads, [MINIBATCH, MICROBATCH, *([RANK] if ranks > 1 else [])])

    @property
    def cut(self) -> CutOptions:
        """The options that name no column, checked."""
        return CutOptions(*(getattr(self, option.name) for option in fields(CutOptions)))

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """The lengths of rows, where they matter."""
        return [(self.length_key, None)] if self.cut.measures else []

    def same_on_all_ranks(self) -> str:
        """Options, and where it stands in its draws."""
        taken = 0 if self.state.interrupted is None else self.state.interrupted.taken
        known = "a" if self.trained_before else "no"
        return (
            f"{super().same_on_all_ranks()}\n{self.state.calls} draws before, {taken} minibatches taken, and "
            f"{known} batch that is not trained again"
        )

    def needs_each_rank(self) -> str:
        """It does, for trees of tokens; its state is of each rank's own rows."""
        return "" if self.tree == "none" else "it reads tokens"

    def carried_rows(self) -> TensorDictBase | None:
        """Rows of earlier batches that wait for this one, TensorDict ``[C]``; None: there are none."""
        return self.state.carried

    def permute(self, rows: Rows, epochs: int = 1) -> Permuted:
        """Draw an order for each pass, and cut it. No row is moved, and nothing remembered.

        Ranks that share the batch draw orders of their own rows, as each would alone. Each makes the plans of
        all, so that they agree without a word.

        Args:
            rows: of all ranks, with those that were carried (``rows.table.extend(split.carried_rows())``).
            epochs: passes, ≥ 1.

        Raises:
            MissingKeyError: a column is not there.
            BatchError: as :func:`shuffle_split` and :func:`assign_rows`; a batch was interrupted, this is
            another.
        """
        cut, table, before = self.cut, rows.table, self.state
        # 1. Is it the batch that was interrupted, if one was?
        parts = table.of_ranks(table.here)
        own = parts[rows.rank]
        progress = self._begin(table, own, epochs)

        # 2. What the orders follow from: units, lengths, and trees.
        every = Rows(table, rows.names, rows.reader, rows.stage)
        labels, units = self._units(rows, every, parts)
        if table.carried is not None and cut.remainder == "carry":
            self._refuse_again(every)
        lengths, forest = torch.zeros(table.size, dtype=torch.int64), None
        if cut.measures:
            lengths = every.count("length")
            if self.length_key in table.masked_columns:  # masked tokens cost nothing
                lengths = lengths * table.in_loss
            if cut.max_tokens is not None and cut.oversized == "raise":
                self._refuse_oversized(table, lengths, torch.cat(parts))
        if cut.tree != "none":
            forest = self._forest(every, parts, lengths)

        # 3. The orders, and where they put each row.
        drawn_of = [Part(*each) for each in zip(parts, units, strict=True)]
        plans = draw_plans(drawn_of, labels, lengths, cut, calls=before.calls, epochs=epochs, forest=forest)
        passes = [_where(each, table.size) for each in zip(*plans, strict=True)]
        progress.minibatches = sum(len(plan.sizes) for plan in plans[rows.rank])

        # 4. Who is left over, and is carried or dropped.
        trained, kept, carries = torch.ones(table.size, dtype=torch.bool), None, cut.remainder == "carry"
        for reason, effect in zip(self.reasons, self.effects, strict=True):
            rows.name_reason(reason, effect)
        if any(len(plan.left) for of_rank in plans for plan in of_rank):
            trained = torch.stack([each.minibatch for each in passes]).amax(0) >= 0
            kept = self._kept(table, own[~trained[own]])
            out = ~trained if rows.index is None else ~trained[rows.index]
            if carries:
                rows.leave(out, "carried", "carried")
            else:
                rows.leave(out, "remainder", "dropped")

        # 5. Numbers of this rank's rows.
        for view in rows.of_each_rank():
            own, last = parts[view.rank], plans[view.rank][-1]
            measured = measure_plan(last, lengths, cut, forest) | {"left": float((~trained[own]).sum())}
            if cut.max_tokens is not None and len(last.sizes):
                measured["oversized"] = float((lengths[own] > cut.max_tokens).sum())
            if carries:
                measured["carried_in"] = float(len(own) - len(_fresh(table, own)))
            for name, value in measured.items():
                view.metric(name, value)
        state, mine = SplitState(before.calls + epochs, kept), plans[rows.rank]
        return Permuted(rows, self, passes, mine, state, progress, plans)

    def permuted_by_another(self, rows: Rows, plans: list[Plan], before: Table) -> Permuted:
        """What another rank has permuted for the rows of this one (:meth:`permute`).

        Args:
            rows: of this rank, as they are behind the draw.
            plans: by epoch, in their numbers.
            before: the table as it was when they were permuted.

        Raises:
            BatchError: a batch was interrupted, this is another; carried rows have ids of the batch.
        """
        progress = self._begin(before, before.here.nonzero().flatten(), len(plans))
        progress.minibatches = sum(len(plan.sizes) for plan in plans)
        if before.carried is not None and self.remainder == "carry":
            self._refuse_again(Rows(before, rows.names, rows.reader, rows.stage))
        trained = torch.cat([plan.order for plan in plans])
        left = before.here.index_fill(0, trained, False).nonzero().flatten()
        state = SplitState(self.state.calls + len(plans), self._kept(before, left))
        return Permuted(rows, self, [], plans, state, progress)

    def _begin(self, table: Table, own: Tensor, epochs: int) -> Progress:
        """Of a batch of these (n,) rows of this rank."""
        cut_by = self.cut.plain() | {"unit": self.unit, "keys": repr(self.in_keys), "epochs": epochs}
        fresh = _fresh(table, own)
        known_by = KnownBy(len(fresh), cut_by, identifying_columns(table, fresh, self.reward_key))
        return Progress(self.state, known_by)

    def _kept(self, table: Table, left: Tensor) -> TensorDictBase | None:
        """Rows of this rank that are left over, if they are carried."""
        return table.taken(left) if self.remainder == "carry" and len(left) else None

    def take_out_trained(self, rows: Rows) -> bool:
        """Take all rows out where they are the last batch that was trained before the state was loaded.

        Args:
            rows: of all ranks, without those that were carried.

        Returns:
            Whether they are: nothing is permuted then.

        Raises:
            BatchError: on some ranks they are, and on others they are not.
        """
        known, table = self.trained_before, rows.table
        if known is None:
            return False
        me = 0 if table.ranks is None else table.ranks.rank
        own = table.of_ranks(table.here)[me]
        came = TrainedBatch(len(own), identifying_columns(table, own, self.reward_key))
        says = [known.is_again(came)] if known.rows or came.rows else []  # a rank without rows does not say
        every = [says] if table.ranks is None else table.ranks.gather_objects(says)
        votes = [vote for each in every for vote in each]
        if len(set(votes)) > 1:
            again = [rank for rank, each in enumerate(every) if True in each]
            raise BatchError(
                f"the rows of ranks {again} are those that were trained before the state was saved, and "
                "those of the others are not: give all ranks the rows of one batch, that one or the next"
            )
        if not any(votes):
            return False
        log.warning(
            "a batch of %d rows was trained before the state was saved, and is not trained again. For a "
            "second pass over it give it once more",
            len(own),
        )
        rows.leave(torch.ones(len(rows), dtype=torch.bool), "trained_before")
        table.notes[self] = "trained_before"
        return True

    def state_after(self, rows: Rows) -> None:
        """A batch that was not trained again has come: it may now, for a second pass."""
        if rows.table.notes.pop(self, None) is not None:
            self.restored = False

    def accept(self, permuted: Permuted) -> None:
        """Remember a draw: nobody has refused the batch."""
        self.remember(permuted.state, permuted.progress)

    def _alone(self, batch: TensorDictBase) -> TensorDictBase:
        ranks = self._own_ranks()
        with self.lock:
            with labels_in_errors(batch, self._id_keys()), sharing(ranks):
                rows = self.read_table(batch, ranks)
                if rows is None:
                    return batch
                permuted = None
                if self.take_out_trained(rows.seen_by(self)):
                    out = rows.write()
                else:
                    rows.table.extend(self.state.carried, self.remainder)
                    permuted = self.permute(rows.seen_by(self))
                    steps = permuted.steps(
                        [(rows.table.written_columns(), rows.table.late, rows.table.batch)]
                    )
                    out = steps.whole()
            if permuted is not None:  # behind the end of the batch: no rank has refused it
                self.accept(permuted)
            self.state_after(rows)
        return out

    def _units(
        self, rows: Rows, every: Rows, parts: Sequence[Tensor]
    ) -> tuple[Tensor | None, list[Ids] | list[None]]:
        """Which rows stay in one minibatch: by (N,) labels, and of the rows of each rank.

        Raises:
            BatchError: an id is missing; a unit has rows on several ranks, each of which draws minibatches of
                its own.
        """
        if self.unit == "sample":
            return None, [None] * len(parts)
        key, name, ranks = rows.key(self.unit), f"{self.unit}_id", rows.table.ranks
        known = rows.ids(self.unit, checked=False).everyone
        rows.require_set(known, name, TOGETHER, needed=torch.ones_like(known.labels, dtype=torch.bool))
        labels = torch.arange(rows.table.size) if key is None else every.integers(self.unit, name)
        if ranks is None:
            return labels, [known]
        if self.minibatches != 1 and ranks.shared_ids not in (None, "different"):
            rank = torch.zeros_like(labels)
            for number, part in enumerate(parts):
                rank[part] = number
            rank = rank if rows.index is None else rank[rows.index]
            torn = (known.min(rank) != known.max(rank)).nonzero().flatten()
            if len(torn):
                found = known.labels[known.first[torn]].tolist()
                raise BatchError(
                    f"{self.unit}s {listing(map(str, found))} have rows on more than one rank, and each rank "
                    "draws its own minibatches: they would be in several optimiser steps. Keep the rows of a "
                    f"{self.unit} on one rank, or set split.minibatches=1"
                )
        return labels, [Ids(labels.index_select(0, part)) for part in parts]

    def _refuse_again(self, every: Rows) -> None:
        """Refuse ids of carried rows that the batch has as well.

        Raises:
            BatchError: with the ids.
        """
        unit, table = "group" if self.unit == "group" else "rollout", every.table
        if every.key(unit) is None or not every.has(unit):
            return
        ids = every.integers(unit, f"{unit}_id")
        came = table.here.index_fill(0, table.carried, False)
        waiting = torch.zeros_like(came).index_fill_(0, table.carried, True)
        if table.ranks is not None and table.ranks.shared_ids == "different":  # as each rank numbers its own
            ids = ids.index_copy(0, table.live, number_column(table.batch, every.key(unit)).long().cpu())
            own = torch.zeros_like(came).index_fill_(0, table.live, True)
            came, waiting = came & own, waiting & own
        if again := ids[waiting][torch.isin(ids[waiting], ids[came])].tolist():
            raise BatchError(
                f"rows were carried for {unit}s {sorted(set(again))[:10]}, and the batch has those ids "
                "again: ids must be unique over batches to be carried, as RepeatSampler stamps them"
            )

    def _refuse_oversized(self, table: Table, lengths: Tensor, rows: Tensor) -> None:
        """Refuse rows that no micro-batch holds.

        Raises:
            BatchError: naming them, with their lengths.
        """
        rows = rows[lengths[rows] > self.max_tokens][:10]
        if len(rows):
            note = "" if table.ranks is None else table.ranks.note(table.own.start)
            raise BatchError(
                f"rows {rows.tolist()} have {lengths[rows].tolist()} tokens, and a micro-batch holds "
                f"{self.max_tokens} (max_tokens): raise it, filter them, or set oversized='alone'{note}"
            )

    def _forest(self, every: Rows, parts: Sequence[Tensor], lengths: Tensor) -> Forest:
        """The rows by their prefixes, which they share within one rollout or group."""
        every.table.settle()
        every.table.compact()
        batch, reader = every.table.batch, type(self).__name__
        tokens = read_tokens(batch, self.tokens_key, reader=reader, option="tokens_key").long()
        mask = read_tokens(batch, self.length_key, reader=reader, option="length_key").bool()
        key = every.key(self.tree)
        ids = torch.arange(len(lengths)) if key is None else every.integers(self.tree, f"{self.tree}_id")
        order, shared = prefix_order(left_aligned(tokens, mask), ids[every.table.live])
        rank = torch.arange(len(order))
        by_row = torch.empty(len(order), 2, dtype=torch.int64)
        by_row[order] = torch.stack([rank, shared], 1)
        place, shared = every.measure(Reduced("prefixes", self.tokens_key), by_row).unbind(1)  # of all ranks
        order = torch.cat([part[place[part].argsort()] for part in parts])
        return Forest(order, shared[order], lengths)


def _fresh(table: Table, rows: Tensor) -> Tensor:
    """Those of (n,) rows that came with the batch."""
    return rows if table.carried is None else rows[~torch.isin(rows, table.carried)]


def _where(plans: Sequence[Plan], rows: int) -> Pass:
    """The plans of all ranks for one pass, by row of the table."""
    numbers = torch.full((3, rows), -1, dtype=torch.int64)
    for plan in plans:
        order, found = plan.order, plan.numbers
        if plan.is_padded:
            order, found = order[~plan.padding], found[:, ~plan.padding]
        numbers.index_copy_(1, order, found)
    minibatch, microbatch, rank = numbers
    several = any(len(ranks) > 1 for plan in plans for ranks in plan.sizes)
    return Pass(minibatch, microbatch, rank if several else None)
