"""One object for a run: it says what to dispatch next, takes rows in, and yields batches of whole groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from tensordict import TensorDictBase

from headrace.spelling import suggest
from headrace.transforms import GroupAssembler
from headrace.transforms.streams import Survivors
from headrace.transforms.table.options import at_least, takes_options

from .assembling import Assembled, Leftovers, OverSource, Source, assembled, check_patience, rest_of, wait_for
from .informing import Informative, Stages, informative
from .on_ray import Writers
from .pacing import Pacing

PATIENCE = 1800.0  # seconds without a batch, after which the run has stalled
LIMITS = ("max_staleness", "steps_ahead", "max_concurrent_rollouts", "max_pending_groups")


class RolloutStream(OverSource):
    """A sampler of prompts, the pacing of their dispatch, an assembler, and dynamic sampling.

    :meth:`draws` says what to dispatch now, :meth:`put` takes the rows in, and the stream yields batches of
    whole groups. Set :attr:`version` when the policy is updated. Each group that is dispatched is trained
    exactly once, or counted once under a reason.

    In one thread, :meth:`draws` and :meth:`take` return at once, perhaps without a result. If other threads
    dispatch and put, use ``draws(wait=True)`` there, and iterate over the stream to train.

    With ``assembler=RayAssembler``, rows are put from any process of the cluster: send ``stream.assembler``
    to the tasks that put, and give these tasks to :meth:`watch`.

    Args:
        sampler: a :class:`RepeatSampler`. Its state need not be saved.
        assembler: the class that makes the groups: GroupAssembler or RayAssembler.
        source: an iterable of rows, such as a collector or a queue; or a function that gets this stream and
            returns the source. The function is called when rows are first needed, after a state is loaded.
            None: rows are given to :meth:`put`.
        informative: True, or the stages that filter: yield only informative groups (:func:`informative`), and
            sample further groups until a batch is full.
        epochs: passes over the prompts, after which :meth:`draws` ends; None: endless.
        max_batches: as for :func:`informative`.
        patience: seconds to wait for a batch before :class:`StalledError`.
        worker_patience: limit for the workers of `source`, as for :func:`assembled`.
        leftovers: what to do with groups that are too few for a batch at the end, as for :func:`assembled`.
        options: options of `assembler`. `group_size` and `groups` are by default those of the sampler. If no
            option limits the dispatch, ``steps_ahead=0`` is set: nothing is dispatched ahead of the step that
            trains. With ``journal=PATH`` the run goes on after a crash.

    Raises:
        ValueError: an option has an invalid value, or `group_size` is not that of the sampler.
        StalledError: while iterating: there was no batch in time; or too few groups are informative.

    Example:
        >>> import torch
        >>> from headrace.pipeline import RepeatSampler
        >>> sampler = RepeatSampler(4, group_size=2, prompts_per_batch=2, shuffle=False)
        >>> stream = RolloutStream(sampler, epochs=1)
        >>> while not stream.ended:
        ...     for rows in stream.draws():  # generate: here each rollout is one row
        ...         rows["next", "done"] = torch.ones(len(rows), dtype=torch.bool)
        ...         stream.put(rows)
        ...     if (batch := stream.take()) is not None:
        ...         print(batch["group_id"].tolist())
        [0, 0, 1, 1]
        [2, 2, 3, 3]
    """

    @takes_options
    def __init__(
        self,
        sampler: Any,
        *,
        assembler: Callable[..., Any] = GroupAssembler,
        source: Source | Callable[[RolloutStream], Source] | None = None,
        informative: bool | Stages = False,
        epochs: int | None = None,
        max_batches: int = 16,
        patience: float = PATIENCE,
        worker_patience: float | None = None,
        leftovers: Leftovers = "yield",
        **options: Any,
    ):
        check_patience(patience, worker_patience)
        self.sampler, self.epochs = sampler, at_least("epochs", epochs, 1)
        self._source = source
        size = options.get("group_size")
        if size is not None and size != sampler.group_size:
            raise ValueError(
                f"group_size must be that of the sampler: it draws {sampler.group_size} rollouts of a "
                f"prompt, and group_size={size} here. Leave it out, or change it where you make the sampler"
            )
        own = {"groups": sampler.prompts_per_batch // sampler.ranks, "group_size": sampler.group_size}
        if not any(options.get(name) is not None for name in LIMITS):
            own["steps_ahead"] = 0
        self.assembler = assembler(**own | options)
        self._writers = Writers()
        self.patience, self.worker_patience, self.leftovers = patience, worker_patience, leftovers
        self._pacing = Pacing(sampler, self.assembler, self._is_over)
        self._filter = self._filtered(informative, max_batches)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_filter" in self.__dict__ and name[0] != "_" and name not in dir(self):  # after __init__
            raise AttributeError(
                f"a RolloutStream has no attribute {name!r} to set{suggest(name, dir(self))}"
            )
        super().__setattr__(name, value)

    @property
    def _makes_source(self) -> bool:
        return callable(self._source) and not hasattr(self._source, "__iter__")

    @cached_property
    def _rows(self) -> Assembled:
        made: Any = self._source(self) if self._makes_source else self._source  # type: ignore[operator, misc]
        if self._pacing.begun and getattr(made, "_shuttle", ...) is None:
            raise TypeError(
                f"{type(made).__name__} resets its environment when it is made, and again before its first "
                "rollouts, so the prompts of the first reset would be announced and never arrive. Let its "
                "environment draw from the sampler, and read it with assembled(collector, assembler), where "
                "groups need not be announced"
            )
        limits: dict[str, Any] = {"patience": self.patience, "worker_patience": self.worker_patience}
        source = () if made is None else made
        return assembled(source, self.assembler, leftovers=self.leftovers, **limits)

    @property
    def source(self) -> Any:
        """Where the rows come from."""
        return self._rows.source

    def _of_source(self, name: str) -> Any:
        if self._makes_source and "_rows" not in vars(self):  # hasattr() must not make it
            raise AttributeError(
                f"{name}: no such attribute before the stream is iterated, and has its source"
            )
        return self._rows._of_source(name)

    def _filtered(self, stages: bool | Stages, max_batches: int) -> Informative | None:
        if stages is False:
            return None
        words: dict[str, Any] = {} if stages is True else {"stages": stages}
        words |= {"groups": self.assembler.groups, "assembler": self.assembler}
        return informative((), max_batches=max_batches, **words)

    def _is_over(self) -> bool:
        return self.epochs is not None and self.sampler.epoch >= self.epochs

    # -- dispatch -----------------------------------------------------------------------------------

    def draws(self, *, wait: bool = False, patience: float | None = None) -> Iterator[TensorDictBase]:
        """Yield prompts with ids that may be dispatched now. After a restart, lost rollouts come first.

        An environment may call this method. If it draws the next prompts before its rows are put, as in a
        collector, set ``steps_ahead=1`` or more, and `patience`.

        Args:
            wait: wait for capacity until the data ends. False: return when there is no more capacity.
            patience: seconds to `wait` before it raises; None: wait forever, which is safe only in a thread
                that dispatches.

        Raises:
            StalledError: there was no capacity in time.
        """
        if wait:
            yield from self._pacing.wait(check_patience(patience))
        else:
            while (draws := self._pacing.now()) is not None:
                yield draws

    def put(self, rows: TensorDictBase) -> None:
        """Take rows in (:meth:`GroupAssembler.put`)."""
        self.assembler.put(rows)

    def watch(self, *tasks: Any) -> None:
        """Watch tasks that put rows: if one dies or raises, :meth:`take` and the iteration raise.

        Args:
            tasks: the objects that ``.remote()`` of Ray returned, or ``submit()`` of an executor of Python.
        """
        self._writers.watch(tasks)

    # -- batches ------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether the data has ended, and no batch is left."""
        assembler = self.assembler
        if not self._pacing.ended or assembler.pending:
            return False
        held = assembler.ready + (self._filter.ready if self._filter else 0)
        return held < (1 if self.leftovers == "yield" else assembler.groups or 1)

    def take(self) -> TensorDictBase | None:
        """The next batch; None while there is none. At the end of the data, the last groups, however few.

        Raises:
            StalledError: too few groups are informative; or there is no batch, and a watched task was lost.
            BatchError: at the end, groups are left over, with ``leftovers="raise"``.
        """
        if self.ended and self.assembler.ready:
            list(rest_of(self.assembler, self.leftovers))  # drops them, or raises
        last = self._pacing.ended and self.assembler.pending == 0 and self.leftovers == "yield"
        if self._filter is not None:
            batch = self._filter.take_from(self.assembler, last=last)
        elif (batch := self.assembler.take()) is None and last:
            batch = self.assembler.take_rest()
        if batch is None:
            self._writers.look()
            self._writers.refuse_lost(self.assembler, "Start again, from the last state or checkpoint")
        return batch

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches until the source, or the data, has ended."""
        if self._source is not None:
            if self._filter is not None:
                self._filter.source = self._rows
            yield from self._rows if self._filter is None else self._filter
            return
        while (batch := wait_for(self.take, lambda: self.ended, self.patience)) is not None:
            yield batch
        if not self.ended:
            raise self.assembler.stalled(f"There was no batch for {self.patience:g} s")
        yield from rest_of(self.assembler, self.leftovers)

    # -- the run ------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The newest policy version. The trainer sets it when it updates the policy."""
        return self.assembler.version

    @version.setter
    def version(self, version: int) -> None:
        self.assembler.version = version

    @property
    def blocked_by(self) -> list[str]:
        """What the next step waits for (:attr:`GroupAssembler.blocked_by`)."""
        return self.assembler.blocked_by

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows that left without being trained, by reason."""
        return self.assembler.counts | (self._filter.counts if self._filter else {})

    @property
    def survivors(self) -> Survivors:
        """Which groups were trained and lost (:attr:`GroupAssembler.survivors`), for :func:`make_report`."""
        return self.assembler.survivors

    def commit(self, step: int | None = None) -> None:
        """Record that weights are saved (:meth:`GroupAssembler.commit`); does nothing without a journal."""
        if self.assembler.journal is not None:
            self.assembler.commit(step)

    def state_dict(self) -> dict[str, Any]:
        """The state of the stream, and the state of the source unless the stream made the source.

        Raises:
            TypeError: the source is a MultiAsyncCollector.
        """
        return self.own_state() if self._makes_source else super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, before anything else happens.

        Raises:
            ValueError: :meth:`load_own_state` raises it.
        """
        if self._makes_source:
            self.load_own_state(state)
        else:
            super().load_state_dict(state)

    def own_state(self) -> dict[str, Any]:
        """The state to save with the weights. With a journal, it has the number of taken groups, no rows."""
        assembler = self.assembler
        known: dict[str, Any] = {"version": assembler.version, "emitted": assembler.emitted}
        if assembler.journal is None:
            known["assembler"] = assembler.state_dict()
        return known | ({"informative": self._filter.own_state()} if self._filter else {})

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore the output of :meth:`own_state`, before anything else happens.

        Raises:
            ValueError: draws() was called; the journal does not belong to the weights; or the state has
                other options.
        """
        assembler = self.assembler
        if self._pacing.begun:
            raise ValueError(
                "load the state before draws() is called: rollouts that were drawn before would be lost. If "
                "a collector draws, let the stream make it: RolloutStream(sampler, source=make), where "
                "make(stream) returns the collector"
            )
        if assembler.journal is None:
            assembler.load_state_dict(state["assembler"])
        else:
            assembler.version = state["version"]
            assembler.commit(emitted=state["emitted"])
        if self._filter:
            self._filter.load_own_state(state["informative"])
