"""Named stages, run in order, each row accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from rich.console import Console
from tensordict import NestedKey, TensorDictBase
from torch import nn

from headrace.transforms.base import BatchTransform, has_key, nested_key, read_numbers
from headrace.transforms.columns import IN_LOSS, PROCESSED, ROW
from headrace.transforms.errors import BatchError
from headrace.transforms.plan import Plan, mark
from headrace.transforms.rows import any_token, check_mask, device_of
from headrace.transforms.shallow import shallow_copy
from headrace.transforms.shuffle import ShuffleSplit
from headrace.transforms.weight import LossWeight

from .ledger import Ledger
from .order import arrange, check_order
from .record import KEYS, Record
from .report import StepReport, make_report, show_report
from .stage import StageError, as_module

# What a report tells of, and the option under which stages know it.
STAGES_KEYS = {
    "reward": "reward_key",
    "status": "status_key",
    "policy_version": "version_key",
    "expected_rollouts": "expected_key",
    "advantage": "advantage_key",
    "loss_weight": "weight_key",
}
# What becomes of a row, by what its stage does.
ACTIONS = {"mask": "masked", "exclude": "excluded", "drop": "dropped"}


class Pipeline(BatchTransform):
    """Run named stages in order over a batch, and record where each row went.

    A pipeline is a transform like its stages and goes wherever they go. It stamps what it has processed:
    a second pipeline, or a second pass, raises instead of filtering twice. Every input row is trained or
    has exactly one recorded reason why not (:attr:`ledger`, :attr:`metrics`).

    Reads what its stages read, and `loss_mask_key` if it is there; writes what they write, and
    ``("headrace", "row")`` and ``("headrace", "processed")``. No device read of its own until
    :attr:`metrics` is read.

    Args:
        stages: transforms or callables from batch to batch, by name. One that is None is left out.
        order: names of all stages, where the mapping's order is not the order of execution.
        loss_mask_key: (N, T) bool; a row without a True in it has nothing to train, and is recorded so.
        group_key: (N,) or (N, 1) int, for counting groups.
        rollout_key: (N,) or (N, 1) int, for counting rollouts.
        report_keys: where the report finds ``reward``, ``status``, ``policy_version``, ``expected_rollouts``,
            ``advantage``, ``loss_weight``, ``prompt`` and ``response``, where they go by other names than
            the usual ones.

    Raises:
        ValueError: at construction, an order that cannot work, with the two stages' names.
        BatchError: a stage refused a batch; of the class that the stage raised, with its name and options.
        StageError: a stage failed otherwise.

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
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey = "rollout_id",
        report_keys: Mapping[str, NestedKey] | None = None,
    ):
        super().__init__()
        arranged = arrange(stages, order)
        for name, stage in arranged.items():
            if not callable(stage):
                raise ValueError(f"stage {name!r} must be a transform or a callable; got {stage!r}")
            if isinstance(stage, Pipeline):
                raise ValueError(f"stage {name!r} is a pipeline: put its stages into this one instead")
        check_order(arranged)
        self.stages = nn.ModuleDict({name: as_module(stage) for name, stage in arranged.items()})
        self.order = list(arranged)
        self.loss_mask_key = nested_key(loss_mask_key)
        self.group_key, self.rollout_key = nested_key(group_key), nested_key(rollout_key)
        self._units = {"rollouts": self.rollout_key, "groups": self.group_key}
        splits = [i for i, name in enumerate(self.order) if isinstance(self.stages[name], ShuffleSplit)]
        self._split_at = splits[0] if splits else len(self.order)
        self.report_keys = dict(report_keys or {})
        if unknown := sorted(set(self.report_keys) - set(KEYS)):
            raise ValueError(f"report_keys must be among {', '.join(KEYS)}; got {', '.join(unknown)}")
        self.ledger: Ledger | None = None
        self.record: Record | None = None
        self.empty = False  # whether the last batch had no rows at all

    def apply(self, batch: TensorDictBase) -> TensorDictBase:
        """Run all stages on a flat batch; rows come back in training order."""
        split = self._split
        if split is None:
            return self._stamp(self._judge_silent(self._run(batch, self.order)))
        out, passes = self._cut(batch, split, 1, whole=True)
        for marked, plan in passes:
            return split.arrange(marked, plan)
        return out

    def minibatches(self, batch: TensorDictBase, *, epochs: int = 1) -> Iterator[TensorDictBase]:
        """Run all stages, now, and return the minibatches, which are gathered one at a time.

        The stages before the split run once; with several epochs the split draws an order for each, and the
        stages after it, which weigh the rows of a step, run for each. Without a ShuffleSplit the whole batch
        is the one minibatch. A batch from which nothing is left has none.

        A loop that lets go of a minibatch before it asks for the next (``del minibatch``), as
        :func:`optimise` does, has one in memory at a time.

        Args:
            batch: TensorDict, as collected.
            epochs: passes over the rows, ≥ 1.

        Raises:
            ValueError: `epochs` < 1.
            BatchError: as a call of the pipeline.
        """
        if epochs < 1:
            raise ValueError(f"epochs must be ≥ 1; got {epochs}")
        split = self._split
        if split is None:
            out = self(batch)
            return (shallow_copy(out) for _ in range(epochs if len(out) else 0))
        entered = self.enter(batch)
        if entered is None:
            return iter(())
        passes = self._cut(entered, split, epochs, whole=False)[1]
        with self._naming(self.order[self._split_at]):
            try:
                return split.stream(passes)
            except BatchError:
                split.undo()
                raise

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of the last batch: what came in, what is trained, what left where and why.

        ``rows/in``, ``rows/trained``, ``rollouts/…``, ``groups/…``, ``out/<stage>/<reason>``, and what each
        stage measured as ``<stage>/<name>``. Empty before the first batch. A few device reads.
        """
        numbers = {} if self.ledger is None else self.ledger.numbers()
        return numbers | read_numbers(self.stages_measured())

    def stages_measured(self) -> dict[str, torch.Tensor | float]:
        """What each stage measured of the last batch, as ``<stage>/<name>``, not read yet."""
        return {
            f"{name}/{key}": value
            for name, stage in self.stages.items()
            if isinstance(stage, BatchTransform)
            for key, value in stage.measured.items()
        }

    def report(self, *, step: int = 0, console: Console | None = None, solved: float = 1.0) -> StepReport:
        """Print a funnel and a table of groups for the last batch, and return its report.

        :func:`headrace.pipeline.make_report` returns it without printing. One device read.

        Args:
            step: its number.
            console: where to print; None: standard output, as wide as it is, plain where it is no terminal.
            solved: least reward of a solved rollout.

        Raises:
            RuntimeError: there was no batch, or a stage refused it.
        """
        report = make_report(self, step=step, solved=solved)
        (console or Console()).print(show_report(report))
        return report

    def __repr__(self) -> str:
        lines = [f"  {i}. {name}: {self.stages[name]!r}" for i, name in enumerate(self.order, start=1)]
        return "\n".join(["Pipeline", *lines])

    # -- the run ------------------------------------------------------------------------------------

    def enter(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Check a batch at the door, forget the last one and open the ledger."""
        self.ledger, self.record, self.empty = None, None, False
        for stage in self.stages.values():
            if isinstance(stage, BatchTransform):
                stage.verdict, stage.measured = None, {}
        flat = super().enter(batch)
        if flat is not None:
            if has_key(flat, self.loss_mask_key):
                check_mask(flat, self.loss_mask_key)
            self.ledger = Ledger(flat, self._units)
            self.record = Record(
                flat,
                keys=self._stages_keys() | self.report_keys,
                loss_mask_key=self.loss_mask_key,
                ids=self.ledger.ids,
            )
            flat.set(ROW, torch.arange(len(flat), device=device_of(flat)))
        else:
            self.empty = True
            self._tell_ranks(batch)
        return flat

    def _run(self, batch: TensorDictBase, names: Sequence[str]) -> TensorDictBase:
        for name in names:
            stage = self.stages[name]
            if len(batch) == 0:  # a foreign stage need not know what to do with nothing
                with self._naming(name):
                    batch = stage(batch) if isinstance(stage, BatchTransform) else batch
                self._book.judge(name, getattr(stage, "reasons", ()), torch.empty(0), None)
                continue
            rows, before = batch.get(ROW), batch
            with self._naming(name):
                batch = stage(batch)
                remaining = self._rows_of(batch)
                verdict = stage.verdict if isinstance(stage, BatchTransform) else None
                if verdict is not None:
                    action = ACTIONS.get(getattr(stage, "action", "drop"), "dropped")
                    self._book.judge(name, stage.reasons, rows, verdict, action)
                elif not isinstance(stage, BatchTransform) or len(remaining) != len(rows):
                    self._book.miss(name, rows, remaining.to(rows.device))
            if len(remaining) < len(rows) and self.record is not None:
                self.record.see(before)  # the last that is known of rows that are gone
        return batch

    def _cut(
        self, batch: TensorDictBase, split: ShuffleSplit, epochs: int, *, whole: bool
    ) -> tuple[TensorDictBase, list[tuple[TensorDictBase, Plan]]]:
        """Run the stages before the split; then, for each epoch, mark where rows go and run those after."""
        at = self._split_at
        out = self._run(batch, self.order[:at])
        if len(out) == 0:
            return self._run(out, self.order[at:]), []
        with self._naming(self.order[at]):
            split.begin(out, whole=whole)
        try:
            with self._naming(self.order[at]):
                out = self._admit(split, out)
                plans = split.plans(out, epochs)
            self._book.judge(self.order[at], split.reasons, out.get(ROW), split.verdict)
            if self.record is not None:
                self.record.see(out)
            weighed = [self._weigh(mark(out, plan)) for plan in plans]
        except BaseException:
            split.undo()  # what it drew and carried was for a batch that is not trained
            raise
        self._judge_silent(out, weighed[0])
        return out, [(self._stamp(each), plan) for each, plan in zip(weighed, plans, strict=True)]

    def _weigh(self, marked: TensorDictBase) -> TensorDictBase:
        """Run the stages after the split, which may add columns and move nothing."""
        names = self.order[self._split_at + 1 :]
        out = self._run(marked, names)
        kept = len(out) == len(marked)
        if kept and not all(isinstance(self.stages[name], LossWeight) for name in names):
            kept = torch.equal(out.get(ROW), marked.get(ROW))
        if not kept:
            raise BatchError(
                f"stages after {self.order[self._split_at]!r} leave all rows where they are, since they were "
                f"cut already; one of {', '.join(map(repr, names))} moved or dropped some"
            )
        return out

    def _stages_keys(self) -> dict[str, NestedKey]:
        """Keys that stages were given, for a report to look under."""
        stages = list(self.stages.values())
        given = {
            name: [key for stage in stages if (key := getattr(stage, option, None)) is not None]
            for name, option in STAGES_KEYS.items()
        }
        return {name: keys[0] for name, keys in given.items() if keys}

    def _tell_ranks(self, batch: TensorDictBase) -> None:
        """Let stages that talk to other ranks say that this one has no rows, lest those wait for it."""
        for stage in self.stages.values():
            if getattr(stage, "process_group", None) is not None:
                stage(batch)

    def _admit(self, split: ShuffleSplit, batch: TensorDictBase) -> TensorDictBase:
        """Add the rows that the split carried over from the last batch, and enter them in the ledger."""
        rows = batch.get(ROW)
        admitted = split.admit(batch.exclude(ROW))
        if len(admitted) > len(rows):
            carried = admitted[len(rows) :]
            numbers = self._book.admit(carried, self._units)
            if self.record is not None:
                self.record.admit(carried, self._book.ids, numbers)
            rows = torch.cat([rows, numbers])
        return admitted.set(ROW, rows)

    def _judge_silent(self, batch: TensorDictBase, weighed: TensorDictBase | None = None) -> TensorDictBase:
        """Record the rows that train nothing: none of their tokens is in the loss, or weighs anything."""
        if len(batch) == 0:
            return batch
        silent = torch.zeros(len(batch), dtype=torch.bool, device=device_of(batch))
        if has_key(batch, self.loss_mask_key):
            silent = ~any_token(batch, self.loss_mask_key)
        if has_key(batch, IN_LOSS):
            silent = silent | ~batch.get(IN_LOSS)
        for stage in self.stages.values():
            if isinstance(stage, LossWeight) and stage.fold == "none" and weighed is not None:
                silent = silent | (weighed.get(stage.weight_key) == 0)
        self._book.judge("pipeline", ("no_loss_tokens",), batch.get(ROW), silent, "masked")
        return batch

    def _stamp(self, batch: TensorDictBase) -> TensorDictBase:
        if len(batch) == 0:
            return batch
        if self.record is not None:
            self.record.see(batch, credit=self._split is None)
        return batch.set(PROCESSED, torch.ones(len(batch), dtype=torch.bool, device=device_of(batch)))

    @property
    def _split(self) -> ShuffleSplit | None:
        return self.stages[self.order[self._split_at]] if self._split_at < len(self.order) else None

    @property
    def _book(self) -> Ledger:
        if self.ledger is None:
            raise RuntimeError("the ledger is opened when a batch enters")
        return self.ledger

    @staticmethod
    def _rows_of(batch: TensorDictBase) -> torch.Tensor:
        if isinstance(batch, TensorDictBase) and len(batch) == 0:
            return torch.empty(0, dtype=torch.int64)  # an empty lazy stack has no columns
        if not isinstance(batch, TensorDictBase) or not has_key(batch, ROW):
            raise BatchError(
                f"a stage returns a TensorDict that keeps the column {ROW!r}, by which rows are accounted "
                f"for; it returned {type(batch).__name__} without it"
            )
        return batch.get(ROW)

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as err:
            self.ledger = self.record = None  # nothing was trained
            kind = type(err) if isinstance(err, BatchError) else StageError
            raise kind(f"stage {name!r}, {self.stages[name]!r}: {err}") from err
