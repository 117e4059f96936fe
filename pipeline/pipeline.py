"""The pipeline: named stages that run in order, with an account of every row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from importlib import import_module
from numbers import Integral
from time import perf_counter
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from typing_extensions import Unpack

from headrace.faces import answer_to
from headrace.transforms.split import ShuffleSplit
from headrace.transforms.table import (
    AHEAD,
    COLUMNS,
    OF_TOKENS,
    BatchError,
    BatchTransform,
    ColumnNames,
    OtherRankError,
    Rows,
    SharedIds,
    Table,
    TokenCount,
    check_kind,
    column_keys,
    enter_rows,
    labels_in_errors,
    stage_parts,
    stages_of_values,
)
from headrace.transforms.table.alone import connect
from headrace.transforms.table.columns import REFERENCE
from headrace.transforms.table.empty import Empty, take_empty_out
from headrace.transforms.table.masking import Tokens
from headrace.transforms.table.options import nested_key
from headrace.transforms.table.process_group import RankOptions
from headrace.transforms.table.schema import FOLDED_WEIGHT, PLACES, PROCESSED, ROW
from headrace.transforms.table.table import Late, Written
from headrace.transforms.table.votes import drop_votes_only, note_votes_only

from .account_keys import KEYS, Asked, Keys
from .callables import run_callable
from .halves import Half, check_half, check_place, make_halves
from .order import (
    Places,
    arrange,
    check_advantage,
    check_column_names,
    check_comparison,
    check_order,
    index_of_split,
)
from .report_notes import note_advantage, note_carried, note_collected, texts_with_carried
from .run import LastRun, Run
from .stage import StageError, Stages, check_callable
from .wording import printable

__all__ = ["Pipeline"]

log = logging.getLogger(__name__.rpartition(".")[0])

MaskedLogProb = Literal["nan", "keep"]


OfEpoch = tuple[dict[NestedKey, tuple[Tensor, torch.dtype, int]], list[Late], TensorDictBase]
"""The columns that stages have written in one epoch (:meth:`Table.written_columns`), the changes to make when
rows are gathered, and the rows with the token columns that stages have changed."""


class Pipeline(LastRun, BatchTransform, columns=("loss_mask", "log_prob", "group", "rollout", "votes_only")):
    """Run named stages in order over a batch, and record what happens to each row.

    Each input row is trained, or has exactly one recorded reason why it is not. The pipeline marks the rows
    that it returns as processed. A second pipeline, or a second pass, refuses these rows. So no row is
    filtered twice. A pipeline is a transform itself: use it wherever you can use one of its stages.

    :meth:`run` returns a :class:`Run` with rows, ledger and metrics. A call and :meth:`minibatches` return
    rows alone. :attr:`metrics`, :attr:`ledger` and :meth:`report` describe the calling thread's last run. If
    that thread has run no batch, they describe the last run of any thread.

    Reads the columns that its stages read, and `loss_mask_key` if the batch has it. Writes the columns
    that its stages write, ``("headrace", "row")`` and ``("headrace", "processed")``.

    Args:
        stages: transforms or callables from batch to batch, by name. A stage that is None is skipped.
        order: names of all stages in the order of execution. None: the order of `stages`.
        after: stages that `order` does not name, each with the stage that it comes directly after.
        before: stages that `order` does not name, each with the stage that it comes directly before.
        columns: other names of columns, by role (:data:`headrace.transforms.table.columns.COLUMNS`). A recipe
            passes them to its stages. Stages that you construct yourself need them as ``<role>_key``.
        report_keys: other names of columns that the report shows, such as ``reward``, ``status``,
            ``policy_version``, ``expected_rollouts``, ``advantage``, ``loss_weight``, ``prompt`` and
            ``response``.
        process_group: a group of ranks, or ``world``, that share one batch. Each rank has rows of its own,
            and all stages compute their statistics over the rows of all ranks, as one process would. Each
            rank must run every batch, even if it has no rows.
        shared_ids: the meaning of an id that occurs on several ranks: the ``same`` rollout or group,
            ``different`` ones, or an error (``raise``). None: the option of LossWeight, else ``raise``.
        patience: seconds that ranks wait for one another. An error on one rank is raised on all.
        masked_log_prob: the value of `log_prob_key` for rows and tokens that are masked. ``nan``: NaN, which
            TorchRL's GRPOLoss excludes under each of its masking strategies. ``keep``: the original number,
            for a loss of your own that multiplies by the loss mask. ``keep`` also makes the token columns
            that stages name finite outside the mask, where NaN and infinite values become 0, and masks each
            token with a non-finite log-probability. A stage that runs without a pipeline writes NaN.
        empty: what to do with a rollout that has no token in the loss on input: leave it out of all
            statistics (``exclude``), count it in them (``count``), or refuse the batch (``raise``). If the
            pipeline has a gate, the gate's option applies.
        names: other names of the pipeline's own columns, such as `loss_mask_key` (:class:`ColumnNames`). A
            row trains only if a token in its mask has a finite log-probability. Groups and rollouts are
            counted by id.

    Raises:
        ValueError: at construction, if the order of two stages cannot work; the message names both.
        BatchError: a stage refused a batch. The error has the stage's class of error, name and options.
        StageError: a stage failed for another reason.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.transforms import FanOutCollapse, GroupRelativeAdvantage
        >>> advantage = GroupRelativeAdvantage(scale="none")
        >>> pipeline = Pipeline({"collapse": FanOutCollapse(), "advantage": advantage})
        >>> td = TensorDict(
        ...     {"rollout_id": [0, 1, 1], "group_id": [0, 0, 0], ("next", "reward"): [1.0, 3.0, 3.0]},
        ...     batch_size=[3],
        ... )
        >>> pipeline(td)["advantage"].flatten().tolist(), pipeline.metrics["rollouts/trained"]
        ([-1.0, 1.0, 1.0], 2.0)
    """

    def __init__(
        self,
        stages: Mapping[str, Callable[[TensorDictBase], TensorDictBase] | None],
        *,
        order: Sequence[str] | None = None,
        after: Places | None = None,
        before: Places | None = None,
        columns: Mapping[str, NestedKey | None] | None = None,
        report_keys: Mapping[str, NestedKey] | None = None,
        process_group: dist.ProcessGroup | str | None = None,
        shared_ids: SharedIds | None = None,
        patience: float = 600.0,
        masked_log_prob: MaskedLogProb = "nan",
        empty: Empty = "exclude",
        **names: Unpack[ColumnNames],
    ):
        BatchTransform.__init__(self)
        arranged = arrange(stages, order, after, before)
        for name, stage in arranged.items():
            try:
                check_kind(stage, "stage", name)
                check_callable(stage)
            except ValueError as err:
                raise ValueError(f"stage {name!r}: {err}") from err
            if isinstance(stage, Pipeline):
                raise ValueError(f"stage {name!r} is a pipeline: put its stages into this one instead")
        check_order(arranged)
        check_comparison(arranged)
        check_column_names(arranged, columns or {}, names)
        self.rank_options = RankOptions.of(arranged.values(), process_group, shared_ids, patience)
        for name, stage in arranged.items():
            if isinstance(stage, BatchTransform):
                try:
                    stage.check_ranks(self.rank_options.process_group)
                except ValueError as err:
                    raise ValueError(f"stage {name!r}: {err}") from err
        self.stages = Stages(arranged)
        self.order, self._split_index = list(arranged), index_of_split(arranged)
        each = (own for stage in arranged.values() for own in stages_of_values(stage).values())
        self._takes_empty_out = not any(hasattr(own, "empty") for own in each)
        self.columns, own = dict(columns or {}), self._columns
        self.name_columns({f"{role}_key": key for role, key in self.columns.items() if role in own} | names)
        self.masked_log_prob = masked_log_prob
        self.empty = empty
        self.report_keys = dict(report_keys or {})
        if unknown := sorted(set(self.report_keys) - set(KEYS)):
            raise ValueError(f"report_keys must be among {', '.join(KEYS)}; got {', '.join(unknown)}")
        ids = {"rollouts": self.rollout_key, "groups": self.group_key}
        self._keys = Keys.of(arranged.values(), self.loss_mask_key, self.log_prob_key, ids, self.report_keys)
        check_advantage(arranged, self._keys.found["advantage"][0])
        self.asked = Asked.of([self, *arranged.values()], self._keys)
        self._half: Half | None = None  # None: this pipeline is not a half
        LastRun.__init__(self)

    def run(self, batch: TensorDictBase, epochs: int = 1) -> Run:
        """Run all stages over a batch.

        The stages before the split run once. In each epoch the split draws a new permutation, and the stages
        after it compute new loss weights.

        Args:
            batch: TensorDict of rows, as they were collected.
            epochs: passes over the rows, ≥ 1.

        Returns:
            The result. It gathers rows when you read its batch or minibatches.

        Raises:
            ValueError: `epochs` < 1.
            BatchError: a stage refused the batch. The error has the stage's class of error, name and options.
            StageError: a stage failed for another reason.
        """
        return self._run(batch, epochs, whole=False)

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the rows in training order, all minibatches in one batch; see :meth:`run`.

        A batch has no method `minibatches`: call ``pipeline.run(batch).minibatches()``, or
        :func:`headrace.transforms.split_minibatches` of what is returned here.
        """
        return self._run(batch, 1, whole=True).batch

    apply = forward

    def minibatches(self, batch: TensorDictBase, *, epochs: int = 1) -> Iterator[TensorDictBase]:
        """Run all stages at once, and return an iterator that gathers one minibatch at a time.

        Without a ShuffleSplit the whole batch is one minibatch. If no row is left, there is none. See
        :meth:`run` and :meth:`Run.minibatches`.
        """
        return self.run(batch, epochs=epochs).minibatches()

    def __getitem__(self, name: object) -> Any:
        raise TypeError(f"a pipeline has no items: a stage is pipeline.stages[name]; {self.stages.named()}")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as err:
            if name in self.__dict__.get("_modules", {}).get("stages", ()):
                raise AttributeError(f"the stage {name!r} is pipeline.stages[{name!r}]") from None
            raise AttributeError(f"{err}{answer_to(f'pipeline.{name}')}") from None

    @property
    def weighs(self) -> bool:
        """Whether a stage writes loss weights. If not, the advantage includes them, or there are none."""
        return self._keys.weight_is_written(dict(self.stages.items()))

    def __repr__(self) -> str:
        lines = [f"  {i}. {name}: {self.stages[name]!r}" for i, name in enumerate(self.order, start=1)]
        return "\n".join(["Pipeline", *lines])

    def _repr_html_(self) -> str:
        return import_module("headrace.pipeline.tools.report.notebook").pipeline_html(self)

    def halves(self) -> tuple[Pipeline, Pipeline]:
        """Split the pipeline for a replay buffer: one half for writing, one for sampling.

        The first half has the stages before the split. It runs on what is written to the buffer:
        ``buffer.append_transform(first, invert=True)``. The second half has the other stages. It runs on what
        is sampled: ``second.minibatches(buffer.sample())``. Loss weights depend on the rows of an optimiser
        step, so they are computed after sampling.

        Raises:
            ValueError: the pipeline has no split, or is a half itself.
        """
        return make_halves(self)

    @property
    def is_second_half(self) -> bool:
        """Whether this is the second of :meth:`halves`."""
        return self._half == "second"

    def _inv_call(self, batch: TensorDictBase) -> TensorDictBase:
        return check_place(batch, self._half)

    def _run(self, batch: TensorDictBase, epochs: int, *, whole: bool) -> Run:
        self._last.run = None  # after a refused batch there is no last run
        try:
            run = self._read_and_decide(batch, epochs, whole=whole)
        except Exception as err:  # the caller may be a worker whose errors are not shown, so log it here
            log.info("a batch was refused: %s", printable(str(err), keep="\n"))
            raise
        self._last.run = run.without_batch()
        if log.isEnabledFor(logging.DEBUG):
            log.debug("a batch: %s", run.ledger.sentence())
        return run

    def _same_on_all_ranks(self, epochs: int) -> str:
        """The options that must be equal on all ranks, as a text with one option or stage on each line."""
        texts = [
            f"{name}: {stage.same_on_all_ranks() if isinstance(stage, BatchTransform) else repr(stage)}"
            for name, stage in self.stages.items()
        ]
        own = [f"epochs={epochs}", f"shared_ids={self.rank_options.shared_ids!r}"]
        own += [f"masked_log_prob={self.masked_log_prob!r}", f"empty={self.empty!r}"]
        return "\n".join([*own, *texts])

    def _kept_finite(self) -> Tokens:
        """The token columns that must be finite outside the mask: those named by the pipeline or a stage."""
        usual = [self.columns.get(role, COLUMNS[role].default) for role in OF_TOKENS]
        keys = [*map(nested_key, usual), *REFERENCE]
        for stage in (self, *self.stages.values()):
            for part in stage_parts(stage):
                keys += [key for role, key in column_keys(part).items() if role in OF_TOKENS]
        others = [key for key in dict.fromkeys(keys) if key is not None]
        return Tokens(self.loss_mask_key, self.log_prob_key, others)

    def _read_and_decide(self, batch: TensorDictBase, epochs: int, *, whole: bool) -> Run:
        """Read the table of a batch and run the stages on it. Rows are gathered when they are read."""
        if not isinstance(epochs, Integral) or epochs < 1:
            raise ValueError(f"epochs must be an integer ≥ 1; got {epochs!r}")
        stages, asked, options = dict(self.stages.items()), self.asked, self.rank_options
        ranks = connect(options.process_group, options.shared_ids, options.patience, asked.ids)
        with ExitStack() as locks:
            with ranks.block(), labels_in_errors(batch, [*asked.ids, *asked.columns]):
                # 1. Read the table. A second half accepts only rows of the first half.
                given = batch if self._half is None else check_half(batch, self._half)
                flat = enter_rows(given, list(asked.ids), reader=type(self).__name__)
                about = partial(self._same_on_all_ranks, epochs)
                rows = Rows.read(flat, keys=asked.columns, tokens=asked.counts, ranks=ranks, about=about)
                rows.table.names = {role: nested_key(key) for role, key in self.columns.items()}
                rows.table.names |= column_keys(self)
                if self.masked_log_prob == "keep":
                    rows.table.masking.kept_finite = self._kept_finite()
                if not rows.table.size:  # no rank has a row
                    refuse_nothing(stages, flat)
                    return Run(stages, self._keys, None, batch=batch, epochs=epochs)
                # 2. Decide.
                run, remember = self._decide(stages, rows, epochs, locks, whole=whole)
            # 3. Change the states: no stage has refused the batch on any rank.
            remember()
            for stage in stages.values():
                if isinstance(stage, BatchTransform):
                    stage.state_after(rows)
        return run

    def _decide(
        self, stages: dict[str, nn.Module], rows: Rows, epochs: int, locks: ExitStack, *, whole: bool
    ) -> tuple[Run, Callable[[], object]]:
        """Run the stages. The split may carry rows to the next batch, so it is locked until `locks` closes.

        Returns:
            The run, and a function that changes the state of the split. Call the function when no stage has
            refused the batch.
        """
        table, keys, split_index = rows.table, self._keys, self._split_index
        texts = note_collected(rows, keys)
        weights_came = table.find(keys.weight) is not None
        table.written[ROW], table.columns[ROW] = Written(torch.int64, 1), table.row_numbers()
        # 1. The stages before the split. After them, rollouts that vote only are no longer needed.
        if self.votes_only_key in table.columns:
            note_votes_only(rows.seen_by(self, "pipeline"))
        if self._takes_empty_out and self._half != "second":
            take_empty_out(rows.seen_by(self, "pipeline"), self.empty)
        for name in self.order[:split_index]:
            self._run_stage(name, stages[name], rows)
        note_advantage(rows, keys)
        if table.fates.votes_only is not None:
            drop_votes_only(rows.seen_by(self, "pipeline"))
        # 2. The split, and in each epoch the stages after it. Carried rows of the previous batch join here.
        each_epoch, places, cut = list[OfEpoch](), list[dict[str, Tensor]](), None
        if split_index is not None:
            name, *later = self.order[split_index:]
            split = cast(ShuffleSplit, stages[name])
            locks.enter_context(split.memory.lock)
            if len(table.fates) == 0 and table.ranks.size == 1:
                name_reasons(rows, name, split)
            else:
                with stage_in_errors(name, split, table):
                    # A replay buffer's sampler decides whether a row comes twice, so a second half allows it.
                    skips = self._half != "second"
                    cut = split.memory.cut(split, rows.seen_by(split, name), epochs, skips=skips)
            if cut is not None and cut.permuted is not None:
                places, before = cut.permuted.passes, (table.batch, table.live, table.kept)
                for of_epoch in places:  # each epoch begins with the rows as they were before the first epoch
                    table.batch, table.live, table.kept = before
                    each_epoch.append(self._run_epoch(stages, rows, later, of_epoch))
            if table.carried is not None:
                note_carried(rows, keys)
                texts = texts_with_carried(texts, split.state.carried, keys)
        # 3. The reason of rows that train nothing, and the mark that shows that a batch was processed.
        self._record_no_loss_tokens(rows, places, weights_came)
        processed = torch.full((table.size,), self._half != "first")
        table.columns[PROCESSED], table.written[PROCESSED] = processed, Written(torch.bool, 1)
        # 4. How minibatches are gathered: each epoch has its own columns besides those of the table.
        steps = None
        if cut is not None and cut.permuted is not None:
            for columns, *_ in each_epoch:
                columns[PROCESSED] = (processed, torch.bool, 1)
            with stage_in_errors(name, split, table):
                steps = cut.permuted.steps(each_epoch, cut.progress)
                if whole:
                    steps.refuse_to_resume()
        run = Run(stages, keys, rows, steps=steps, epochs=epochs, places=places, texts=texts)
        return run, (int if cut is None else partial(split.memory.remember, cut))

    def _run_epoch(
        self, stages: dict[str, nn.Module], rows: Rows, names: Sequence[str], places: dict[str, Tensor]
    ) -> OfEpoch:
        """Run the stages after the split on one epoch.

        Args:
            stages: all stages by name.
            rows: the table.
            names: names of the stages after the split.
            places: minibatch, micro-batch and rank of each row of the table. The row's loss weight is added.
        """
        table, weight_key = rows.table, self._keys.weight
        with table.restoring_columns():
            # 1. Write the places of this epoch into the table.
            for key in PLACES:
                table.columns.pop(key, None)
                table.written.pop(key, None)
                if key[-1] in places:
                    table.columns[key], table.written[key] = places[key[-1]], Written(torch.int64, 1)
            # 2. Run the stages after the split.
            for name in names:
                self._run_stage(name, stages[name], rows, after_split=True)
            # 3. Keep what they wrote, and the loss weight in the precision of the loss.
            table.load([weight_key], most=AHEAD)
            weight_is_at = FOLDED_WEIGHT if FOLDED_WEIGHT in table.columns else weight_key
            weight = table.columns.get(weight_is_at)
            if weight is not None and weight.ndim == 1:
                places["loss_weight"] = weight.to(rows.dtype(weight_is_at)).double()
            return table.written_columns(), table.late, table.batch

    def _run_stage(self, name: str, stage: nn.Module, rows: Rows, *, after_split: bool = False) -> None:
        """Run one stage on the table. A stage that does not read the table gets a batch."""
        table, before, start = rows.table, len(rows.table.fates), perf_counter()
        if before == 0:
            name_reasons(rows, name, stage)
            return
        with stage_in_errors(name, stage, table):
            if isinstance(stage, BatchTransform) and stage.knows_the_table():
                stage.work_on(rows.seen_by(stage, name))
            else:
                run_callable(name, stage, rows.seen_by(self))
            if after_split and len(table.fates) < before:
                raise BatchError(
                    f"a stage after the split must keep all {before} rows of the minibatches; this stage "
                    f"kept {len(table.fates)}. Put it before the split"
                )
        table.metrics[f"time/{name}"] = table.metrics.get(f"time/{name}", 0.0) + perf_counter() - start

    # -- after the split ----------------------------------------------------------------------------------

    def _record_no_loss_tokens(self, rows: Rows, places: list[dict[str, Tensor]], weights_came: bool) -> None:
        """Record rows that train nothing: no token in the mask, or loss weight 0 in all epochs."""
        table, count = rows.table, TokenCount(self.loss_mask_key, self.log_prob_key)
        rows.table.load([] if places else [self._keys.weight], [count], most=AHEAD)
        trains = table.fates.in_loss
        if count in table.columns:
            trains = trains & (table.columns[count] > 0)
        weights = [each.get("loss_weight") for each in places] or [table.columns.get(self._keys.weight)]
        are_known = all(weight is not None and weight.ndim == 1 for weight in weights)
        if are_known and (not weights_came or self.weighs):
            trains = torch.logical_and(trains, reduce(torch.logical_or, weights))
        masked = ~trains
        if table.masking.no_lengths and not bool((masked & (table.fates.reason == 0)).any()):
            return  # it is unknown which rows have no token, so a reason with 0 rows would be wrong
        table.fates.note(masked, "pipeline/no_loss_tokens", "masked")


@contextmanager
def stage_in_errors(name: str, stage: nn.Module, table: Table | None = None) -> Iterator[None]:
    """Add a stage's name and options to errors raised inside. All but BatchError become StageError."""
    if table is not None:
        table.ranks.place = f"stage {name!r}"
    try:
        yield
    except (OtherRankError, StageError):
        raise
    except BatchError as err:
        if not err.stage:
            err.stage, err.made_by = name, repr(stage)
        raise
    except Exception as err:
        raise StageError(f"stage {name!r}, {stage!r}: {err}") from err


def name_reasons(rows: Rows, name: str, stage: Any) -> None:
    """Add the reasons of a stage that did not run to the ledger, each with 0 rows."""
    for reason, effect in getattr(stage, "reasons", {}).items():
        rows.table.fates.register(f"{name}/{reason}", effect)


def refuse_nothing(stages: Mapping[str, nn.Module], batch: TensorDictBase) -> None:
    """Run the checks of all stages on a batch without rows, because a gate may expect groups."""
    for name, stage in stages.items():
        if isinstance(stage, BatchTransform):
            with stage_in_errors(name, stage):
                stage.enter(batch)
                stage.apply_to_nothing(batch)
