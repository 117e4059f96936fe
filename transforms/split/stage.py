"""The stage that cuts a batch into optimiser steps and forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import ReadsColumns, read_columns
from headrace.transforms.distributed import present_ranks
from headrace.transforms.options import nested_key
from headrace.transforms.schema import MICROBATCH, MINIBATCH, RANK, Unit, unit_keys

from .checkpoint import SplitState
from .cut_options import CutOptions, Oversized
from .draw import Draw, conclude, draw_plans, meet_to_draw, with_those_carried
from .gather import LossColumns
from .memory import SplitMemory
from .microbatches import Balance
from .minibatches import Remainder
from .progress import KnownBy, Progress, identifying_columns
from .steps import OptimiserSteps
from .trees import Forest, Tree, prefixes_of


class ShuffleSplit(SplitMemory, BatchTransform):
    """Order the rows at random, and cut them into minibatches, ranks and micro-batches.

    A minibatch is one optimiser step, a micro-batch one forward and backward of it. What it promises:

    - each row is in exactly one micro-batch of one minibatch, or left with a reason;
    - the rows of a `unit` are in one minibatch (:func:`shuffle_split`); they may be in several micro-batches,
      since :class:`LossWeight` makes the gradient the same wherever a row is;
    - which rows are in which minibatch follows from `seed` and the number of the draw alone: on any device,
      for any number of ranks, however it is cut, but for those that ``drop`` leaves out to keep a budget;
    - every rank has as many micro-batches as the others, levelled by `balance` (:func:`deal`);
    - no micro-batch holds more than `max_tokens`, but for a single row that is longer;
    - of a `tree` tokens cost once, and its rows are in one micro-batch, but for what is over `max_tokens`.

    One TensorDict in, one out: rows in training order with the columns ``("headrace", "minibatch")``,
    ``("headrace", "microbatch")`` and, for more than one rank, ``("headrace", "rank")``, of which
    :func:`split_minibatches` and :func:`split_microbatches` yield views. In a pipeline the minibatches are
    gathered one at a time, views where the rows are in order. ``state_dict`` holds the number of draws,
    carried rows, and how many minibatches of the batch at hand were taken: a restored run draws the same
    orders and, given that batch again, yields the others, or :meth:`give_up` lets go of them. It refuses
    another batch, known by its ids and rewards, and another cut; each rank saves its own state.

    Reads the ids of its `unit` and `tree`, and `length_key` to balance or keep a budget. Its verdicts are
    1 ``remainder`` and 2 ``carried``. One device read, of numbers by row, and one copy of the plan.

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
        linear: 6 × the model's hidden size, say.
        tree: the rows of a ``rollout`` or ``group`` that begin alike, to be packed as one; ``none``.
        ranks: that share the batch, each holding the whole of it, ≥ 1.
        rank: which of them this is, to get its part alone; None: all, one after the other.
        process_group: a group, or ``world``, of ranks that hold rows of their own: each takes as many steps,
            of as many micro-batches, and one without rows empty ones. A pipeline takes it over for all.
        shuffle: False keeps the order of first rows.
        seed: of the order.
        rollout_key: (N,) or (N, 1) int; None: each row is a rollout.
        group_key: (N,) or (N, 1) int.
        reward_key: (N, ...) float, by which, as by ids, an interrupted batch is known again.
        length_key: (N, T) bool, True at tokens that cost something.
        tokens_key: (N, T) int64, looked at for a `tree`.
        loss_mask_key: (N, T) bool, becomes False where a row is padding.
        log_prob_key: (N, T) float, becomes NaN there; None: not touched.
        weight_key: (N,) float, becomes 0 there.

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
    effects = ("dropped", "carried")
    cuts = True
    spans_ranks = True
    within_groups = True
    asks_in_loss = True
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
        rollout_key: NestedKey | None = "rollout_id",
        group_key: NestedKey = "group_id",
        reward_key: NestedKey = ("next", "reward"),
        length_key: NestedKey = ("masks", "all_attention_mask"),
        tokens_key: NestedKey = ("tokens", "full"),
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        log_prob_key: NestedKey | None = ("log_probs", "full"),
        weight_key: NestedKey = "loss_weight",
    ):
        self.minibatches, self.minibatch_size, self.remainder = minibatches, minibatch_size, remainder
        self.microbatches, self.microbatch_size, self.max_tokens = microbatches, microbatch_size, max_tokens
        self.multiple_of, self.oversized, self.balance, self.linear = multiple_of, oversized, balance, linear
        self.ranks, self.rank, self.process_group = ranks, rank, process_group
        self.unit, self.tree, self.shuffle, self.seed = unit, tree, shuffle, seed
        self.rollout_key, self.group_key = ids = nested_key(rollout_key), nested_key(group_key)
        self.length_key, self.weight_key = nested_key(length_key), nested_key(weight_key)
        self.reward_key, self.tokens_key = nested_key(reward_key), nested_key(tokens_key)
        self.loss_mask_key, self.log_prob_key = nested_key(loss_mask_key), nested_key(log_prob_key)
        # Where it silences rows that are out of the loss, as it gathers them; but for what it measures.
        self.silences = {self.loss_mask_key, self.log_prob_key} - {None, self.length_key}
        SplitMemory.__init__(self)
        reads = [*unit_keys(unit, *ids), *([self.length_key] if self.cut.measures else [])]
        reads += [] if tree == "none" else [*unit_keys(tree, *ids), self.tokens_key]
        BatchTransform.__init__(self, reads, [MINIBATCH, MICROBATCH, *([RANK] if ranks > 1 else [])])

    @property
    def cut(self) -> CutOptions:
        """The options that name no column, checked."""
        return CutOptions(*(getattr(self, option.name) for option in fields(CutOptions)))

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Gather all rows in order."""
        with self.turn:
            draw = self.draw(batch, self.state)
            steps = self.accept(draw, draw.marked(), whole=True)
        return Outcome(steps.whole(), draw.verdict, draw.measured)

    def draw(
        self, batch: TensorDictBase, state: SplitState, epochs: int = 1, read: ReadsColumns = read_columns
    ) -> Draw:
        """Draw an order for each pass over a batch ``[N]``. No row is moved, and nothing remembered.

        Args:
            batch: TensorDict ``[N]``.
            state: before the batch: ``split.state``, which is used within ``with split.turn``.
            epochs: passes, ≥ 1.
            read: brings numbers by row, (N,) int64 or None, to the CPU.
        """
        cut, columns = self.cut, identifying_columns(batch, self.reward_key)
        cut_by = cut.plain() | {"unit": self.unit, "keys": repr(self.in_keys), "epochs": epochs}
        progress = Progress(state, KnownBy(len(batch), cut_by, columns))
        progress.check()
        unit = "group" if self.unit == "group" else "rollout"
        batch = with_those_carried(batch, state, getattr(self, f"{unit}_key"), unit, cut)
        ids = None if self.unit == "sample" else self.ids(batch, self.unit)
        meet_to_draw(ids, self.unit, cut, state, progress.taken)
        lengths = self.tokens(batch, "length_key") if cut.measures else None
        prefixes = [] if self.tree == "none" else prefixes_of(batch, self.ids(batch, self.tree), self)
        ids, lengths, *prefixes = read([ids, lengths, *prefixes])
        lengths = torch.zeros(len(batch), dtype=torch.int64) if lengths is None else lengths
        forest = Forest(prefixes[0], prefixes[1], lengths) if prefixes else None
        plans = draw_plans(ids, lengths, cut, calls=state.calls, epochs=epochs, forest=forest)
        return conclude(batch, plans, lengths, cut, progress, forest)

    def accept(self, draw: Draw, marked: Sequence[TensorDictBase], *, whole: bool) -> OptimiserSteps:
        """Remember a draw, and return its steps, of `marked`: ``draw.marked()``, maybe with columns added."""
        columns = LossColumns(self.loss_mask_key, self.log_prob_key, self.weight_key)
        passes = zip(marked, draw.plans, draw.placed, strict=True)
        steps = OptimiserSteps(list(passes), self.rank if self.ranks > 1 else None, columns, draw.progress)
        if whole:
            steps.refuse_to_resume()
        if (ranks := present_ranks()) is not None:
            ranks.meet("to accept the draw")  # none remembers a batch that another refuses
        self.remember(draw.state, draw.progress)
        return steps
