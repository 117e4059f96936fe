"""The stage that cuts a batch into optimiser steps and forward passes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import (
    BatchError,
    BatchTransform,
    ColumnNames,
    Effect,
    Ids,
    Rows,
    labels_in_errors,
    listing,
)
from headrace.transforms.table.schema import MICROBATCH, MINIBATCH, RANK, Unit, unit_keys
from headrace.transforms.table.table import Reduced
from headrace.transforms.table.tokens import read_tokens
from headrace.transforms.table.votes import drop_votes_only

from .permuted import Permuted
from .plan import Balance, CutOptions, Plan, PrefixTrees, Tree, draw_plans, measure_plans
from .shuffle import TOGETHER, Remainder

log = logging.getLogger(__name__)


class ShuffleSplit(
    BatchTransform,
    columns=("rollout", "group", "reward", "length", "tokens", "loss_mask", "log_prob", "weight"),
):
    """Shuffle the rows and cut them into minibatches, ranks and micro-batches.

    A minibatch is one optimiser step. A micro-batch is one forward and backward pass. The stage guarantees:

    - Each row is in exactly one micro-batch of one minibatch, or it leaves the batch with a reason.
    - The rows of a `unit` are in one minibatch (:func:`shuffle_split`). They may be in several micro-batches:
      :class:`LossWeight` makes the gradient independent of micro-batches.
    - `seed` and the number of earlier permutations decide which rows are in which minibatch. The device, the
      number of ranks and the micro-batches do not matter. The exception is ``drop`` with `max_tokens`, which
      leaves out rows to keep the budget.
    - Every rank has the same number of micro-batches, and `balance` evens out their cost
      (:func:`assign_rows`).
    - No micro-batch has more than `max_tokens` tokens, except a single row that is longer.
    - Rows of one `tree` are in one micro-batch and their shared tokens count once. A tree larger than
      `max_tokens` is cut into pieces.

    The output is one TensorDict. Its rows are in training order, with the columns
    ``("headrace", "minibatch")``, ``("headrace", "microbatch")`` and, for more than one rank,
    ``("headrace", "rank")``. :func:`split_minibatches` and :func:`split_microbatches` yield views of it. A
    pipeline gathers one minibatch at a time instead.

    ``state_dict`` holds the number of permutations, the carried rows, and how many minibatches of the current
    batch were taken. Each rank saves its own state. After ``load_state_dict``:

    - The permutations continue where they stopped.
    - If the batch was interrupted, give it again, and take the remaining minibatches. The stage recognises
      the batch by its ids and rewards, and refuses another batch or other options. :meth:`discard_batch`
      drops the remaining minibatches instead.
    - If the batch was trained to its end and comes again, its rows leave as ``trained_before``. Give it once
      more to train a second pass over it.

    Reads the ids of `unit` and `tree`, `length_key` for a balance, a budget or a tree, and `tokens_key` for a
    tree. Rows leave for the reasons ``remainder``, ``carried`` or ``trained_before``.

    Args:
        minibatches: K ≥ 1, the number of minibatches; give this or `minibatch_size`.
        minibatch_size: units per minibatch, ≥ 1.
        unit: ``sample``, ``rollout`` or ``group``; the rows of a unit stay in one minibatch.
        remainder: for leftover units. ``raise`` an error; ``drop`` them; cut ``uneven`` minibatches;
            ``carry`` them into the next batch, which must have other ids and trains them first; or ``pad``:
            uneven minibatches, filled up with masked copies of rows until all micro-batches have the same
            number of rows. Under ``pad`` and ``carry``, a rank that has fewer micro-batches with rows than
            another rank gets such copies, too. A rank without rows copies a row of another rank. ``carry``,
            and ``pad`` with `max_tokens`, fill only empty micro-batches. ``drop`` also drops the last units
            of a minibatch that needs more micro-batches than a rank has rows.
        microbatches: micro-batches per minibatch and rank, ≥ 1; give at most one of this and `max_tokens`.
            Without both: 1.
        max_tokens: largest number of tokens per micro-batch, ≥ 1. A longer row is alone in its micro-batch,
            and counted in the metric ``oversized``. With several ranks `remainder` must be ``pad``,
            ``carry`` or ``drop``.
        balance: the cost that is evened out over ranks and micro-batches: ``none``, ``tokens``, or
            ``attention`` (tokens² + 24,576 · tokens, where 24,576 is 6 × a hidden size of 4096).
        tree: ``rollout`` or ``group``: its rows with a common prefix stay together, to be packed; ``none``.
        ranks: number of ranks that each hold the whole batch, ≥ 1.
        rank: yield only the rows of this rank; None: of all ranks, one after the other.
        process_group: a group, or ``world``, of ranks that each hold their own rows. All ranks take the same
            number of optimiser steps and micro-batches; a rank without rows takes empty ones. The pipeline
            uses this group for its other stages as well.
        shuffle: False keeps the units in the order of their first rows.
        seed: seed of the permutations.
        names: other names of columns, such as `rollout_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: as :func:`shuffle_split` and :func:`assign_rows`; ids of carried rows are in the batch
            again; or another batch was interrupted and must come first.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"x": torch.arange(4)}, batch_size=[4])
        >>> ShuffleSplit(minibatches=2, unit="sample")(td)["headrace", "minibatch"].tolist()
        [0, 0, 1, 1]
    """

    # `trained_before` is not listed: it is in the ledger only if a batch comes again after a restart.
    reasons: Mapping[str, Effect] = {"remainder": "dropped", "carried": "carried"}
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
        max_tokens: int | None = None,
        balance: Balance = "none",
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
        self.microbatches, self.max_tokens, self.balance = microbatches, max_tokens, balance
        self.ranks, self.rank, self.process_group = ranks, rank, process_group
        self.unit, self.tree, self.shuffle, self.seed = unit, tree, shuffle, seed
        self.options = CutOptions(*(getattr(self, option.name) for option in fields(CutOptions)))
        self.memory: Any = import_module("headrace.transforms.carry").SplitMemory()
        ids = self.rollout_key, self.group_key
        reads = [*unit_keys(unit, *ids), *([self.length_key] if self.options.measures else [])]
        reads += [] if tree == "none" else [*unit_keys(tree, *ids), self.tokens_key]
        BatchTransform.__init__(self, reads, [MINIBATCH, MICROBATCH, *([RANK] if ranks > 1 else [])])

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """The mask that defines the lengths of rows, if an option needs these lengths."""
        return [(self.length_key, None)] if self.options.measures else []

    def check_ranks(self, process_group: Any) -> None:
        """Check the options as if `process_group` were the split's own (:class:`CutOptions`)."""
        replace(self.options, process_group=process_group)

    def same_on_all_ranks(self) -> str:
        """The options and the state that must be equal on all ranks, as text to compare."""
        return f"{super().same_on_all_ranks()}\n{self.memory.same_on_all_ranks()}"

    @property
    def state(self) -> Any:
        """The `SplitState` after the last accepted batch."""
        return self.memory.state

    def restart(self, seed: int | None = None) -> None:
        """Forget all batches, and begin the permutations of another seed if one is given."""
        self.memory.restart()
        if seed not in (None, self.seed):
            self.__dict__["seed"], self.options = seed, replace(self.options, seed=seed)

    def discard_batch(self) -> None:
        """Drop the remaining minibatches of an interrupted batch (:meth:`SplitMemory.discard_batch`)."""
        self.memory.discard_batch()

    def get_extra_state(self) -> dict[str, Any]:
        """The state for ``state_dict`` (:meth:`SplitMemory.to_plain`)."""
        return self.memory.to_plain()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the output of :meth:`get_extra_state`."""
        self.memory.load(state)

    def permute(self, rows: Rows, epochs: int = 1, *, calls: int = 0) -> Permuted:
        """Draw a permutation for each pass and cut it. No row is moved yet.

        Every rank permutes its own rows, as it would alone. Each rank computes the plans of all ranks, so
        all ranks agree without communication.

        Args:
            rows: the rows of all ranks.
            epochs: passes, ≥ 1.
            calls: number of earlier permutations.

        Raises:
            MissingKeyError: a column is missing.
            BatchError: as :func:`shuffle_split` and :func:`assign_rows`.
        """
        options, table = self.options, rows.table
        # 1. Read what the permutations depend on: units, lengths and trees.
        rows_of_ranks = table.rows_of_ranks()
        labels, units = self._units(rows, rows_of_ranks)
        lengths, forest = torch.zeros(table.size, dtype=torch.int64), None
        if options.measures:
            lengths = rows.on_arrival.count("length")
            if self.length_key in table.masking.columns:  # masked tokens cost nothing
                lengths = lengths * table.fates.in_loss
        if options.tree != "none":
            forest = self._forest(rows.on_arrival, rows_of_ranks, lengths)

        # 2. Draw the permutations, and note the minibatch, micro-batch and rank of each row.
        by_rank = draw_plans(
            list(zip(rows_of_ranks, units, strict=True)),
            labels,
            lengths,
            options,
            calls=calls,
            epochs=epochs,
            forest=forest,
            came=None if table.carried is None else table.starts[1][0],
        )
        passes = [_numbers_by_row(plans, table.size) for plans in zip(*by_rank, strict=True)]  # one per epoch
        left = None
        if any(len(plan.left) for plans in by_rank for plan in plans):
            left = table.fates.here & (torch.stack([each["minibatch"] for each in passes]).amax(0) < 0)

        # 3. Record the metrics.
        measured = measure_plans([plans[-1] for plans in by_rank], lengths, options, forest)
        measured["left"] = 0.0 if left is None else float(left.sum())
        if options.max_tokens is not None and measured["minibatches"]:
            measured["oversized"] = float((table.fates.here & (lengths > options.max_tokens)).sum())
        for name, value in measured.items():
            rows.metric(name, value)
        return Permuted(rows, self, passes, by_rank[table.ranks.rank], left)

    def _alone(self, batch: TensorDictBase) -> TensorDictBase:
        """Permute and gather a batch outside a pipeline. One thread at a time may use the state."""
        ranks = self._own_ranks()
        with self.memory.lock:
            with labels_in_errors(batch, self._id_keys()), ranks.block():
                rows = self.read_table(batch, ranks)
                if rows is None:
                    return batch
                if rows.votes_only is not None:
                    drop_votes_only(rows.seen_by(self))
                cut = self.memory.cut(self, rows.seen_by(self))
                if cut.permuted is None:
                    out = rows.write()
                else:
                    table = rows.table
                    steps = cut.permuted.steps(
                        [(table.written_columns(), table.late, table.batch)], cut.progress
                    )
                    out = steps.whole()
            self.memory.remember(cut)  # the block has ended, so no rank has refused the batch
        return out

    def _units(
        self, rows: Rows, rows_of_ranks: Sequence[Tensor]
    ) -> tuple[Tensor | None, list[Ids] | list[None]]:
        """The (N,) labels of the units, and the units of each rank's rows.

        Raises:
            BatchError: an id is missing, or a unit has rows on several ranks, each of which cuts its own
                minibatches.
        """
        if self.unit == "sample":
            return None, [None] * len(rows_of_ranks)
        key, name, ranks = rows.key(self.unit), f"{self.unit}_id", rows.table.ranks
        known = rows.with_excluded.ids(self.unit, checked=False)
        if known.lowest < 0:  # also if only an excluded row has no id
            needed = torch.ones_like(known.labels, dtype=torch.bool)
            rows.require_set(known, name, TOGETHER, needed=needed)
        labels = rows.table.every if key is None else rows.on_arrival.integers(self.unit, name)
        if ranks.size == 1:
            return labels, [known]
        if self.minibatches != 1 and ranks.shared_ids not in (None, "different"):
            rank = rows.from_arrival(rows.table.rank_of_rows())
            on_several = (known.min(rank) != known.max(rank)).nonzero().flatten()
            if len(on_several):
                found = known.labels[known.first[on_several]].tolist()
                raise BatchError(
                    f"{self.unit}s {listing(map(str, found))} have rows on more than one rank. Each rank "
                    "cuts its own minibatches, so these rows would be in several optimiser steps. Keep the "
                    f"rows of a {self.unit} on one rank, or set {{minibatches=1}}"
                )
        return labels, [Ids(labels.index_select(0, own)) for own in rows_of_ranks]

    def _forest(self, on_arrival: Rows, rows_of_ranks: Sequence[Tensor], lengths: Tensor) -> PrefixTrees:
        """The prefix trees of the rows; only rows of one rollout or group share a prefix."""
        table, reader = on_arrival.table, type(self).__name__
        table.settle()
        table.compact()
        tokens = read_tokens(table.batch, self.tokens_key, reader=reader, option="tokens_key").long()
        mask = read_tokens(table.batch, self.length_key, reader=reader, option="length_key").bool()
        key = on_arrival.key(self.tree)
        ids = torch.arange(len(lengths)) if key is None else on_arrival.integers(self.tree, f"{self.tree}_id")
        trees = import_module("headrace.transforms.trees.forest")
        by_row = trees.prefix_ranks(tokens, mask, ids[table.live])
        by_row = table.measure(Reduced("prefixes", self.tokens_key), by_row)  # of all ranks
        return trees.forest_of(by_row, rows_of_ranks, lengths)


def _numbers_by_row(plans: Sequence[Plan], rows: int) -> dict[str, Tensor]:
    """Read the plans of all ranks for one pass into numbers by table row (:attr:`Permuted.passes`)."""
    several = any(plan.has_ranks for plan in plans)
    names = ("minibatch", "microbatch", "rank") if several else ("minibatch", "microbatch")
    columns = {name: torch.full((rows,), -1, dtype=torch.int64) for name in names}
    for plan in plans:
        order = plan.order if plan.padding is None else plan.order[~plan.padding]
        for column, numbers in zip(columns.values(), plan.numbers, strict=False):
            column.scatter_(0, order, numbers if plan.padding is None else numbers[~plan.padding])
    return columns
