"""One batch on its way through the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import read_columns
from headrace.transforms.distributed import present_ranks
from headrace.transforms.errors import BatchError
from headrace.transforms.once import forget
from headrace.transforms.rows import device_of, flat_rows
from headrace.transforms.schema import IN_LOSS, PROCESSED, ROW, has_key
from headrace.transforms.split.steps import OptimiserSteps
from headrace.transforms.tokens import (
    check_mask,
    knows_loss_tokens,
    loss_tokens,
    silence_gathered,
    silencing_later,
)

from .accounting.keys import Keys
from .accounting.ledger import Ledger
from .accounting.row_table import RowTable
from .chain.order import place_of_cut
from .chain.rules import Rules, own_numbers
from .chain.stage import with_stage


class Passage:
    """Runs stages, and keeps the account of one batch: who left, what was measured, what is to be read.

    Args:
        stages: by name, in order.
        batch: TensorDict ``[N]``, N ≥ 1, that may be written to; `numbered` is it with row numbers.
        keys: where to find what is accounted for.
        done: these are all the stages there are for these rows.
        deferred: the rules are left to the caller, but for foreign stages and hooks, which see no batch
            that breaks one.
    """

    def __init__(
        self,
        stages: Mapping[str, nn.Module],
        batch: TensorDictBase,
        keys: Keys,
        *,
        done: bool = True,
        deferred: bool = False,
    ):
        self.stages, self.keys, self.ranks, self.done = stages, keys, present_ranks(), done
        self._deferred = deferred
        if deferred:
            own_numbers(batch)
        # What the stage that cuts silences as it gathers; till then rows are only said to be out of the loss.
        self.silenced_late = [key for stage in stages.values() for key in getattr(stage, "silences", ())]
        if has_key(batch, keys.loss_mask):
            check_mask(batch, keys.loss_mask)
        self.ledger = Ledger(batch, keys.units)
        self.table = RowTable(
            batch,
            keys=keys.report,
            loss_mask_key=keys.loss_mask,
            log_prob_key=keys.log_prob,
            ids=self.ledger.ids,
            weights=keys.reward_weights,
        )
        # Weights that came with the batch weigh nothing here, unless a stage says that it writes them anew.
        self.weights_are_ours = not has_key(batch, keys.weight) or keys.weight_is_written(stages)
        self.numbers: dict[str, Tensor | float] = {}
        self.rules = Rules(stages, self.ranks)
        self._asked: set[str] = set()
        self._to_remember: list[Callable[[], None]] = []
        self.numbered = batch.set(ROW, torch.arange(len(batch), device=device_of(batch)))

    def run(self, epochs: int, *, whole: bool) -> tuple[TensorDictBase, OptimiserSteps | None]:
        """Run the stages: in one go, or up to the one that cuts, and from there for each epoch."""
        names, at = list(self.stages), place_of_cut(self.stages)
        if at is None:
            return self.finish(self.through(names, self.numbered)), None
        arrived = self.through(names[:at], self.numbered)
        return self.cut(names[at], names[at + 1 :], arrived, epochs, whole=whole)

    def through(self, names: Sequence[str], batch: TensorDictBase) -> TensorDictBase:
        """Run stages in order; their rules are not read yet."""
        for name in names:
            self._read_before_others(self.stages[name])
            late = {key for key in self.silenced_late if has_key(batch, key)}
            if late and not getattr(self.stages[name], "asks_in_loss", False):
                silence_gathered(batch, late, own_memory=False)
            with self.rules.naming(name), silencing_later(late or None), self._timing(name):
                spans = self.ranks is not None and getattr(self.stages[name], "spans_ranks", False)
                batch = self._stage(name, batch) if len(batch) or spans else self._nothing(name, batch)
                if _runs_others(self.stages[name]):
                    forget()
                if self.ranks is not None and not spans:
                    batch = self.ranks.share_columns(batch)
        return batch

    def finish(self, batch: TensorDictBase) -> TensorDictBase:
        """Read all rules, record who trains nothing, and stamp the batch as processed."""
        self._record_silent(batch, [batch])
        self._read_rules()
        stamped = self._stamp(batch)
        self._remember()
        return stamped

    def cut(
        self, name: str, later: Sequence[str], batch: TensorDictBase, epochs: int, *, whole: bool
    ) -> tuple[TensorDictBase, OptimiserSteps | None]:
        """Cut a batch into optimiser steps, and run the stages after the cut on each pass over it.

        Args:
            name: of the stage that cuts.
            later: those after it, which may add columns and move nothing.
            batch: TensorDict ``[n]``.
            epochs: passes.
            whole: the caller gathers all steps at once, which one that was interrupted between its
                minibatches cannot be.

        Returns:
            The batch with carried rows, and its steps; None where no row is left.
        """
        if len(batch) == 0 and self.ranks is None:
            self.through([name, *later], batch)
            self._read_rules()
            self._remember()
            return batch, None
        split, rows = self.stages[name], batch.exclude(ROW)
        with split.turn:
            self._read_before_others(split)
            self._ask(later, rows)
            with self.rules.naming(name), self._timing(name):
                read = read_columns if self._deferred else self.rules.read_with
                draw = split.draw(rows, split.state, epochs, read=read)
                draw = draw._replace(batch=draw.batch.set(ROW, self._row_numbers(batch, draw.batch)))
            self.ledger.judge(name, split.reasons, draw.batch.get(ROW), draw.verdict, split.effects)
            self._measure(name, draw.measured)
            self.table.update(draw.batch)
            passes = [self._after_cut(name, later, marked) for marked in draw.marked()]
            self._record_silent(draw.batch, passes)
            self._read_rules()
            with self.rules.naming(name):
                stamped = [self._stamp(each, credit=False) for each in passes]
                steps = split.accept(draw, stamped, whole=whole)
            self._remember()
            return draw.batch, steps

    # -- one stage ------------------------------------------------------------------------------------

    def _stage(self, name: str, batch: TensorDictBase) -> TensorDictBase:
        stage, rows = self.stages[name], batch.get(ROW)
        asked = name in self._asked
        outcome = (
            stage.run(batch, asked=asked) if isinstance(stage, BatchTransform) else Outcome(stage(batch))
        )
        remaining = _rows_of(outcome.batch)
        keeps_rows = getattr(stage, "keeps_rows", False)
        if keeps_rows and len(remaining) != len(rows):
            raise BatchError(
                f"a stage with keeps_rows=True returns all rows; {len(remaining)} of {len(rows)} came out. "
                "Give a verdict for those that leave, and leave keeps_rows at False"
            )
        if outcome.verdict is not None:
            if not stage.reasons:
                raise BatchError("a stage that gives verdicts names its reasons; it has none")
            self.ledger.judge(name, stage.reasons, rows, outcome.verdict, stage.effects)
        elif not keeps_rows:
            self.ledger.miss(name, rows, remaining.to(rows.device))
        self._measure(name, outcome.measured)
        self.rules.add(name, outcome.rules)
        if outcome.remember is not None:
            self._to_remember.append(outcome.remember)
        if len(remaining) < len(rows):
            self.table.update(batch)  # rows that leave here are recorded as they are now
        if outcome.into is not None:
            self.table.move_tokens(rows, rows.index_select(0, outcome.into))
        return outcome.batch

    def _nothing(self, name: str, batch: TensorDictBase) -> TensorDictBase:
        """A stage with no rows, which a foreign one need not know what to do with."""
        stage = self.stages[name]
        if isinstance(stage, BatchTransform) and self.ranks is None:
            stage.run(batch)
        self.ledger.add_reasons(name, getattr(stage, "reasons", ("gone",)), getattr(stage, "effects", ()))
        return batch

    def _after_cut(self, name: str, later: Sequence[str], marked: TensorDictBase) -> TensorDictBase:
        out = self.through(later, marked)
        if any(not getattr(self.stages[each], "keeps_rows", False) for each in later) and not torch.equal(
            _rows_of(out), marked.get(ROW)
        ):
            raise BatchError(
                f"stages after {name!r} leave all rows where they are, since they were cut already; one of "
                f"{', '.join(map(repr, later))} moved or dropped some"
            )
        return out

    def _ask(self, later: Sequence[str], batch: TensorDictBase) -> None:
        """What the stage behind the cut requires is read with all the rest, in front of it."""
        for name in later[:1]:  # another one may read what this one writes
            if isinstance(stage := self.stages[name], BatchTransform):
                with self.rules.naming(name):
                    self.rules.add(name, stage.requires(batch))
                self._asked.add(name)

    def _read_before_others(self, stage: nn.Module) -> None:
        """Neither code that is not the library's own nor a hook sees a batch that is to be refused."""
        if not isinstance(stage, BatchTransform) or stage.shows_batch:
            self.rules.read()

    def _read_rules(self) -> None:
        if not self._deferred:
            self.rules.read()

    def _remember(self) -> None:
        """Nobody has refused the batch: stages with a state take it in."""
        for remember in self._to_remember:
            remember()

    @contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        """Add to the seconds of a stage; on a device those until it is asked, not until it has done."""
        start = perf_counter()
        yield
        key = f"time/{name}"
        self.numbers[key] = float(self.numbers.get(key, 0.0)) + perf_counter() - start

    def _measure(self, name: str, measured: Mapping[str, Tensor | float]) -> None:
        self.numbers |= {f"{name}/{key}": value for key, value in measured.items()}

    def _row_numbers(self, batch: TensorDictBase, with_carried: TensorDictBase) -> Tensor:
        """The numbers of a batch's rows, and of those carried from earlier batches behind them."""
        rows = batch.get(ROW)
        if len(with_carried) == len(batch):
            return rows
        carried = with_carried[len(batch) :]
        numbers = self.ledger.add_carried(carried)
        self.table.add_carried(carried, self.ledger.ids, numbers)
        return torch.cat([rows, numbers])

    def _record_silent(self, batch: TensorDictBase, passes: Sequence[TensorDictBase]) -> None:
        """Record the rows that train nothing: no token in the loss, or no weight in any pass."""
        if len(batch) == 0:
            return
        silent = torch.zeros(len(batch), dtype=torch.bool, device=device_of(batch))
        if knows_loss_tokens(batch, self.keys.loss_mask):
            silent = loss_tokens(batch, self.keys.loss_mask, self.keys.log_prob) == 0
        if has_key(batch, IN_LOSS):
            silent = silent | ~batch.get(IN_LOSS)
        if self.weights_are_ours and all(has_key(each, self.keys.weight) for each in passes):
            weights = [flat_rows(each.get(self.keys.weight)) for each in passes]
            silent = silent | torch.stack([(weight == 0).all(-1) for weight in weights]).all(0)
        self.ledger.judge("pipeline", ("no_loss_tokens",), batch.get(ROW), silent, ("masked",))

    def _stamp(self, batch: TensorDictBase, *, credit: bool = True) -> TensorDictBase:
        if len(batch) == 0:
            return batch
        self.table.update(batch, credit=credit, last=True)
        return batch.set(PROCESSED, torch.full((len(batch),), self.done, device=device_of(batch)))


def _runs_others(stage: nn.Module) -> bool:
    """Whether code that is not the library's own has the batch there: a stage, its criterion or its hook."""
    parts = stage, getattr(stage, "criterion", stage)
    ours = isinstance(stage, BatchTransform) and not stage.shows_batch
    return not ours or any(not type(part).__module__.startswith("headrace.") for part in parts)


def run_empty(stages: Mapping[str, nn.Module], batch: TensorDictBase) -> None:
    """Run stages over a batch of which nobody has rows: groups may be missing."""
    for name, stage in stages.items():
        if isinstance(stage, BatchTransform):
            try:
                stage.enter(batch)
                stage.apply_to_nothing(batch)
            except BatchError as err:
                raise with_stage(name, stage, err) from err


def _rows_of(batch: TensorDictBase) -> Tensor:
    """The row numbers that a stage hands on.

    Raises:
        BatchError: it hands on none.
    """
    if isinstance(batch, TensorDictBase) and len(batch) == 0:
        return torch.empty(0, dtype=torch.int64)  # an empty lazy stack has no columns
    if not isinstance(batch, TensorDictBase) or not has_key(batch, ROW):
        raise BatchError(
            f"a stage returns a TensorDict that keeps the column {ROW!r}, by which rows are accounted "
            f"for; it returned {type(batch).__name__} without it"
        )
    return batch.get(ROW)
