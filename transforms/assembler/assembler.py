"""The assembler: rows come in as they come, whole groups go out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from typing_extensions import Unpack

from headrace.transforms.columns import ColumnNames, TakesColumns
from headrace.transforms.entry import enter_rows, labels_in_errors
from headrace.transforms.options import (
    at_least,
    describe_options,
    has_effect,
    nested_key,
    one_of,
    options_of,
    takes_options,
)
from headrace.transforms.rows import Rows
from headrace.transforms.schema import DISPATCHED
from headrace.transforms.tensordicts import to_plain

from .arriving import OPTIONS, admit, announce, arriving_rows, find_columns
from .limits import (
    Selector,
    StalledError,
    check_idle,
    check_limits,
    may_refill,
    settle,
    stalled,
    warn_of_endless,
)
from .lost import warn_of_lost
from .open_groups import Group
from .pieces import Kinds, Places, RowPiece, check_kinds, gather, kinds_of
from .stream import STALE, UNFINISHED, Stream, StreamPlan

if TYPE_CHECKING:
    from .journal import Journal

Remedy = Literal["drop", "raise", "keep", "refill"]
OnRepeat = Literal["drop", "raise"]
Refill = Callable[[int, int], Any]


class GroupAssembler(
    TakesColumns,
    columns=(
        *("group", "rollout", "expected", "segment", "done", "status", "version", "reward"),
        *("loss_mask", "log_prob"),
    ),
    needed=("rollout",),
):
    """Collect rows, in whatever pieces and order they come, and hand out whole groups.

    A row is (partition, group, rollout, segment). A rollout has **ended** when its last row is there: the one
    that is done, and with `segment_key` the segments 0, 1, … before it; where segments end each by
    themselves, as those of sub-agents do, all of the column ``expected_segments``. One of which a row failed
    or was aborted has **failed**. A group is **whole** when `group_size` rollouts have ended, or as many as
    were dispatched, and **settled** when all that were dispatched have ended or failed: it waits for nothing
    that can no longer come.

    What is handed out passes a strict :class:`CompletenessGate`: groups in the order in which they became
    whole, rollouts by id, segments by their number or arrival. `expected_key` says how many rollouts the
    group has now, and ``("headrace", "dispatched")`` (N,) int64 how many were asked for. Each row that came
    is handed out, held, or counted under one reason: ``late``, ``duplicate``, ``surplus``, ``failed``,
    ``timeout``, ``stale``, ``evicted``, ``unfinished``. The same rows end with the same groups and counts in
    every order, save where an option asks what came first or how long it took. So what comes of a rollout
    that has left is counted with it: as ``failed`` if it has failed, as ``surplus`` if its group was whole
    without it, and as ``late`` if its group was closed while more of it was awaited.

    Reads `group_key`, `rollout_key`, `done_key` (None: each row is a whole rollout), with `partition_key`,
    `segment_key` or `max_staleness` those columns and that of the version, and if they are there
    `expected_key`, `status_key`, ``expected_segments`` and ``is_init``. Without `segment_key` the rows of a
    rollout arrive in their order; with it, numbers of segments (N,) int ≥ 0, in any. `reward_key`, a
    rollout's on its last row, is read where `on_surplus` is a callable; `loss_mask_key` and `log_prob_key`
    are written under ``on_stale="mask"``, if they are there. Numbers are read to the CPU once a put. Several
    threads may use it.

    Args:
        groups: whole groups in a batch. None: all that are whole.
        group_size: rollouts of a whole group. None: as many as `expected_key` says.
        on_failure: where a group is settled and not whole, because rollouts failed: ``drop`` the group;
            ``raise``; ``keep`` it if it has `min_rollouts` and `min_fraction`, else ask for more rollouts
            if there is a `refill`, else drop it; ``refill``: ask for more, and after `max_refills` keep it
            if it has those where they are given, else drop it.
        timeout: puts, of whoever, after which a group is too old that is not whole; they count from its first
            row or its announcement. None: none is.
        timeout_seconds: the same in seconds.
        on_timeout: where a group is too old: as `on_failure`.
        min_rollouts: for ``keep`` and after ``refill``, ≥ 1.
        min_fraction: the same in (0, 1], of the rollouts with which the group was first dispatched.
        refill: for ``refill`` and ``keep``, called with a group's id and the number of rollouts that it
            lacks, each of which gets an id of its own; they are not announced. What it raises comes out of
            :meth:`put`, whose rows are in, or of :meth:`take`.
        max_refills: for `refill`, how often it is called for a group, ≥ 1.
        max_staleness: policy versions for which a row may be older than `version` when it is handed out.
            None: any number.
        on_stale: for `max_staleness`, where a row of a group is older: ``drop`` the group; ``mask`` the row,
            which leaves the loss and stays in the statistics, as under :class:`SampleFilter`; ``refill``: let
            go of its rows, and ask for all of its rollouts anew, or drop it after `max_refills`.
        on_newer: for `max_staleness`, where a row is newer than `version`, which nobody counts up then:
            ``raise``, or ``wait``: its group is not handed out before `version` is the row's.
        max_concurrent_rollouts: rollouts that :meth:`capacity` lets be under way: dispatched or begun, and
            not over. None: any number.
        on_late: where a rollout comes that is late: ``drop`` it, or ``raise``.
        on_duplicate: where a rollout ends twice, also after its group was closed, or a segment comes twice:
            ``raise``, or ``drop`` it, and the first stays.
        on_surplus: where more rollouts end than `group_size`: ``drop`` those that end last; or a callable
            from their rewards (n,) float64, ordered by rollout id, and k = `group_size` to the k that stay,
            as indices or as a mask, asked once all that were dispatched are over, or the group too old.
        max_pending_groups: groups that may wait. None: any number.
        on_full: where more wait: the oldest leave (``drop``), or ``raise``.
        in_order: what an environment sends later is put later, so that what was lost on its way is known by
            the origin that :class:`headrace.pipeline.StampIds` stamps. False: the origin is not looked at,
            for rows that are put in another order, as it is not where segments have numbers.
        max_idle: puts in a row in which no group became whole, after which something is wrong. None: eight
            times the rollouts of a batch, and at least 100.
        journal: a file in which everything that happens is written first, and from which an assembler with
            the same options goes on: after a crash as if there had been none, save that groups which were
            handed out since the last :meth:`commit` come out again. None: what is held dies with the process.
        partition_key: (N,) or (N, 1) int ≥ 0; ids are unique in their partition, and a batch is of one. None:
            there is one.
        names: other names of columns, such as `group_key` (:class:`ColumnNames`).

    Raises:
        ValueError: an option with a wrong value, or that needs another; a file that is no journal, is of
            other options, or is damaged before its end, with the place.

    Example:
        >>> from tensordict import TensorDict
        >>> def piece(group, rollout, done):
        ...     columns = {"group_id": group, "rollout_id": rollout, ("next", "done"): done}
        ...     return TensorDict(columns, batch_size=[len(done)])
        >>> assembler = GroupAssembler(groups=1, group_size=2)
        >>> assembler.put(piece([4, 9], [0, 2], [True, True]))
        >>> assembler.take(), assembler.pending, assembler.held
        (None, 2, 2)
        >>> assembler.put(piece([4], [1], [True]))
        >>> assembler.take()["rollout_id"].tolist()
        [0, 1]
    """

    def __init__(
        self,
        *,
        groups: int | None = None,
        group_size: int | None = None,
        on_failure: Remedy = "drop",
        timeout: int | None = None,
        timeout_seconds: float | None = None,
        on_timeout: Remedy = "drop",
        min_rollouts: int | None = None,
        min_fraction: float | None = None,
        refill: Refill | None = None,
        max_refills: int = 1,
        max_staleness: int | None = None,
        on_stale: Literal["drop", "mask", "refill"] = "drop",
        on_newer: Literal["raise", "wait"] = "raise",
        max_concurrent_rollouts: int | None = None,
        on_late: OnRepeat = "drop",
        on_duplicate: OnRepeat = "raise",
        on_surplus: Literal["drop"] | Selector = "drop",
        max_pending_groups: int | None = None,
        on_full: OnRepeat = "drop",
        in_order: bool = True,
        max_idle: int | None = None,
        journal: str | Path | None = None,
        partition_key: NestedKey | None = None,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.partition_key = nested_key(partition_key)
        self.groups, self.group_size = at_least("groups", groups, 1), at_least("group_size", group_size, 1)
        self.on_failure = one_of("on_failure", on_failure, get_args(Remedy))
        self.on_timeout = one_of("on_timeout", on_timeout, get_args(Remedy))
        self.on_late = one_of("on_late", on_late, get_args(OnRepeat))
        self.on_duplicate = one_of("on_duplicate", on_duplicate, get_args(OnRepeat))
        self.timeout, self.timeout_seconds = at_least("timeout", timeout, 1), timeout_seconds
        self.min_rollouts, self.min_fraction = at_least("min_rollouts", min_rollouts, 1), min_fraction
        self.refill, self.max_refills = refill, at_least("max_refills", max_refills, 1)
        self.max_staleness = at_least("max_staleness", max_staleness, 0)
        self.max_pending_groups = at_least("max_pending_groups", max_pending_groups, 1)
        self.on_full = one_of("on_full", on_full, get_args(OnRepeat))
        self.in_order, self.max_idle = in_order, at_least("max_idle", max_idle, 1)
        self.on_stale = one_of("on_stale", on_stale, ("drop", "mask", "refill"))
        self.on_newer = one_of("on_newer", on_newer, ("raise", "wait"))
        self.max_concurrent_rollouts = at_least("max_concurrent_rollouts", max_concurrent_rollouts, 1)
        self.on_surplus = on_surplus
        check_limits(self)
        has_effect(GroupAssembler, "max_refills", max_refills, refill is not None, "refill")
        for name, value in (("on_stale", on_stale), ("on_newer", on_newer)):
            has_effect(GroupAssembler, name, value, max_staleness is not None, "max_staleness")
        self._options = {name: getattr(self, name) for name in OPTIONS}
        self._options["in_order"] = in_order and self.segment_key is None
        self._options["version_key"] = self.version_key if max_staleness is not None else None
        self._options["reward_key"] = self.reward_key if callable(on_surplus) else None
        self.version = 0
        """The newest policy version, for `max_staleness`; whoever trains counts it up."""
        self._stream = Stream()
        self._wanted: int | None = None  # groups at most in the next batch, and at least one
        self._kinds: dict[tuple[str, ...], Any] = {}  # of the columns of the last rows that came
        self._found: dict[str, NestedKey] | None = None  # and where these say what they are
        self._turn = threading.RLock()
        self._journal: Journal | None = None
        self.journal = journal
        if journal is not None:
            from .journal import Journal, options_that_decide  # here: it imports pyarrow

            self._journal = Journal(journal, options_that_decide(self, options_of(GroupAssembler)))
            self._journal.replay(self)

    # -- what is there ------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Whole groups."""
        return sum(map(len, self._stream.ready.values()))

    @property
    def pending(self) -> int:
        """Groups that are announced or begun, and not whole."""
        return len(self._stream.waiting)

    @property
    def held(self) -> int:
        """Rows that are neither handed out nor counted."""
        return self._stream.held

    @property
    def counts(self) -> dict[str, int]:
        """Rows that left, by reason."""
        return dict(self._stream.counts)

    @property
    def emitted(self) -> int:
        """Groups that were handed out."""
        return self._stream.emitted

    @takes_options
    def capacity(self, rollouts: int | None = None) -> int:
        """Groups that may be dispatched now, ≥ 0: the least that these leave.

        - `max_staleness` and `groups`, of a step: (`max_staleness` + `version` + 1) · `groups` − ready −
          pending − those handed out and not rejected are still trained in time, as in AReaL
          (arXiv:2505.24298, section 5.1).
        - `max_concurrent_rollouts`: those under way, by the rollouts of a group.
        - `max_pending_groups` − pending.

        Ask for no more, and announce what was dispatched. Not to dispatch is better than to drop what is
        slow, which is what is long.

        Args:
            rollouts: of a group that would be dispatched. None: `group_size`, or one.

        Raises:
            ValueError: none of them is set, or `max_staleness` without `groups`; a group has more rollouts
                than may be under way.
        """
        concurrent, size = self.max_concurrent_rollouts, rollouts or self.group_size or 1
        stale = self.max_staleness is not None
        if (stale and self.groups is None) or not (stale or concurrent or self.max_pending_groups):
            raise ValueError(
                "capacity() needs max_staleness and groups, or max_concurrent_rollouts, or max_pending_groups"
            )
        if concurrent is not None and concurrent < size:
            raise ValueError(
                f"max_concurrent_rollouts must be at least the rollouts of a group, {size}; got {concurrent}"
            )
        with self._turn:
            stream, least = self._stream, []
            if self.max_staleness is not None and self.groups is not None:
                most = (self.max_staleness + self.version + 1) * self.groups
                least.append(most - (stream.emitted - stream.rejected) - self.ready - self.pending)
            if concurrent is not None:
                running = (g.dispatched - g.have - g.lost for g in stream.waiting.values())
                least.append((concurrent - sum(max(0, number) for number in running)) // size)
            if self.max_pending_groups is not None:
                least.append(self.max_pending_groups - self.pending)
            return max(0, min(least))

    # -- rows come in -------------------------------------------------------------------------------

    def put(self, batch: TensorDictBase) -> None:
        """Take in a batch of rows: all of them are copied, or it is refused and nothing has changed.

        Args:
            batch: TensorDict ``[N]`` or ``[envs, time]``, dense or a lazy stack.

        Raises:
            MissingKeyError: a column is not there.
            BatchError: a row without an id, a rollout in two groups, an unknown status, numbers of expected
                rollouts that differ, columns that do not fit those that wait; what ``raise`` is set for.
            StalledError: no group has become whole for `max_idle` puts.
        """
        keys = [self.group_key, self.rollout_key]
        with self._turn, labels_in_errors(batch, keys):
            kinds = None
            if isinstance(batch, TensorDictBase) and batch.batch_dims == 1:
                kinds = kinds_of(batch)
            if kinds != self._kinds:  # rows like those before were looked at with these
                batch = enter_rows(batch, keys, reader=type(self).__name__)
                kinds = kinds_of(batch)
            self._put(batch, kinds)

    def _put(self, batch: TensorDictBase, kinds: Kinds, holds: Sequence[Any] = ()) -> None:
        """Take in rows that were entered.

        Args:
            batch: TensorDict ``[N]`` with the columns that are read; the others may be elsewhere.
            kinds: of all columns.
            holds: what must live as long as each row does.
        """
        with self._turn:
            stream, found = self._stream, self._found if kinds == self._kinds else None
            piece = RowPiece(batch, range(stream.received, stream.received + len(batch)), holds)
            plan = StreamPlan(stream, stream.puts + 1, self._now(), came=len(batch))
            if len(batch):
                if found is None:
                    if stream.held:
                        check_kinds(self._kinds, kinds)
                    found = find_columns(piece, self._options)
                rows, plan.origins = arriving_rows(piece, found, self.group_size)
                admitted = admit(plan, rows, self)
                piece.place = {arrival: piece.place[arrival] for arrival in admitted}
            settle(plan, self)
            check_idle(plan, self)
            if self._journal is not None:
                plain = to_plain(batch) if len(batch) else None
                self._journal.put(plain, len(batch), self.version, plan.now, self._chosen(plan))
            if piece.place:
                piece.own()
                plan.piece = piece
            if len(batch):
                self._kinds, self._found = kinds, found
            self._carry_out(plan)
            warn_of_lost(plan)
            warn_of_endless(plan)

    def stalled(self, why: str, worker: tuple[int, int] | None = None) -> StalledError:
        """The error that says which groups wait longest, and what became of all rows.

        Args:
            why: with what it begins.
            worker: w and W, of those which :class:`headrace.pipeline.StampIds` numbers: its groups alone.
        """
        with self._turn:
            return stalled(why, self._plan(), worker)

    def _plan(self) -> StreamPlan:
        """Of no rows."""
        return StreamPlan(self._stream, self._stream.puts, self._now())

    def _now(self) -> float:
        return time.monotonic() if self._journal is None else self._journal.now()

    def _note(self, event: str, now: float | None = None, **said: Any) -> None:
        """Write down what is about to happen."""
        if self._journal is not None:
            self._journal.write(event, self.version, self._now() if now is None else now, **said)

    def _chosen(self, plan: StreamPlan) -> list[Any]:
        """What a selector has chosen, of each group: so that it is known whether it would again."""
        ready = [group for group in plan.groups.values() if group.fate == "ready"]
        return [[*group.key, sorted(group.stays)] for group in ready] if callable(self.on_surplus) else []

    def _carry_out(self, plan: StreamPlan) -> None:
        self._stream.carry_out(plan)
        groups = plan.groups.values()
        self._ask_for([(group, group.missing) for group in groups if group.fate == "refilled"])

    def _ask_for(self, missing: list[tuple[Group, int]]) -> None:
        """Ask for rollouts of groups that wait for them: of all of these, whatever one of them raises."""
        if self._journal is not None and self._journal.replaying is not None:
            return  # they were asked for when it happened
        errors: list[Exception] = []
        for group, rollouts in missing:
            try:
                self.refill(group.group, rollouts)  # type: ignore[misc]  # it was given
            except Exception as err:  # the user's, raised below
                errors.append(err)
        if errors:
            raise errors[0]

    # -- groups go out ------------------------------------------------------------------------------

    @takes_options
    def take(self, n: int | None = None) -> TensorDictBase | None:
        """Hand out whole groups: `n` of them, else `groups`, else all there are; None while there are fewer.

        With partitions they are of one, that in which as many became whole first.

        Raises:
            ValueError: `n` is no integer ≥ 1.
            IncompleteGroupsError: a group is too old by its seconds, under ``on_timeout="raise"``.
        """
        n = at_least("n", n, 1)
        if n is None and self._wanted is not None:
            return self._take(None, self._wanted)
        return self._take(n or self.groups)

    def take_rest(self) -> TensorDictBase | None:
        """Hand out all whole groups of a partition, though they be fewer than `groups`; None if none is.

        Raises:
            IncompleteGroupsError: as :meth:`take`.
        """
        return self._take(None)

    @takes_options
    def want(self, groups: int) -> bool:
        """Say how many groups whoever makes batches of what is handed out lacks, as :func:`informative` does.

        With `max_staleness` the next batch has as many at most, and at least one: none waits elsewhere and
        grows too old there, and nothing waits for more than may be dispatched.

        Returns:
            Whether it will.
        """
        with self._turn:
            self._wanted = at_least("groups", groups, 1) if self.max_staleness is not None else None
            return self._wanted is not None

    def reject(self, groups: int) -> None:
        """Say that so many groups that were handed out are not trained: they take no :meth:`capacity`."""
        with self._turn:
            if self._journal is not None:
                self._journal.reject(groups, self.version, self._now())
            self._stream.rejected += groups

    def commit(self) -> None:
        """Say that the weights are saved which were trained on all that was handed out: with a `journal`, it
        does not come out again, whatever happens to the process or, from here on, to the machine.

        Call it after the optimiser step whose weights were saved. Rows that were put survive the process as
        soon as :meth:`put` has returned, and the machine after the next commit. What has left is taken out
        of the file where it is more than half.

        Raises:
            ValueError: there is no journal.
            RuntimeError: another assembler goes on from the journal.

        Example:
            >>> import tempfile
            >>> from tensordict import TensorDict
            >>> ids = {"group_id": [4, 9], "rollout_id": [0, 2], ("next", "done"): [True, True]}
            >>> path = tempfile.mkdtemp() + "/rows.journal"
            >>> assembler = GroupAssembler(groups=1, group_size=1, journal=path)
            >>> assembler.put(TensorDict(ids, batch_size=[2]))
            >>> assembler.take()["group_id"].tolist()
            [4]
            >>> assembler.commit()
            >>> assembler.take()["group_id"].tolist()
            [9]
            >>> again = GroupAssembler(groups=1, group_size=1, journal=path)  # as after a crash
            >>> again.take()["group_id"].tolist()
            [9]
        """
        with self._turn:
            if self._journal is None:
                raise ValueError("commit() needs a journal: GroupAssembler(journal=PATH)")
            self._journal.commit(self)

    def _take(self, wanted: int | None, most: int | None = None) -> TensorDictBase | None:
        with self._turn:
            self._expire()
            return self._hand_out(wanted, most)

    def _expire(self) -> None:
        """Let go of groups that are too old by now, by their seconds or by the policy version."""
        stream, plan = self._stream, self._plan()
        if self.timeout_seconds is not None:
            settle(plan, self)
            if any(group.fate != "waits" for group in plan.groups.values()):
                self._note("expire", plan.now, stays=self._chosen(plan))
            self._carry_out(plan)
        if self.max_staleness is not None and self.on_stale != "mask":
            oldest, anew = self.version - self.max_staleness, []
            stale = [g for g in stream.whole_groups() if min(row.version for row in g.rows()) < oldest]
            if stale:
                self._note("expire", plan.now)
            for group in stale:
                if self.on_stale == "refill" and may_refill(group, self):
                    anew.append((group, self.group_size or group.expected))
                    stream.dispatch_again(*anew[-1], plan)
                else:
                    stream.close([group], STALE)
            self._ask_for(anew)

    def _hand_out(self, wanted: int | None, most: int | None) -> TensorDictBase | None:
        stream, oldest = self._stream, self.version - (self.max_staleness or 0)
        newest = self.version if self.on_newer == "wait" else None
        if not (groups := stream.choose(wanted, most, newest)):
            return None
        if self._journal is not None:
            self._journal.take(groups, self.version, self._now(), wanted=wanted, most=most)
        self._wanted = None
        rows = [(group, row) for group in groups for row in group.rows()]
        have = [len(group.rollouts) for group, _ in rows]
        dispatched = [group.dispatched for group, _ in rows]
        places = [(row.piece, row.arrival) for _, row in rows]
        masks = self.max_staleness is not None and self.on_stale == "mask"
        masked = [row.version < oldest for _, row in rows] if masks else None
        batch = self._joined(places, {self.expected_key: have, DISPATCHED: dispatched}, masked)
        stream.close(groups)
        stream.emitted += len(groups)
        return batch

    def _joined(
        self, places: Places, numbers: Mapping[NestedKey, Sequence[int]], stale: Sequence[bool] | None
    ) -> Any:
        """The batch that is handed out.

        Args:
            places: its rows, M of them.
            numbers: further columns, M each.
            stale: which rows are masked. None: none is.
        """
        batch = gather(places, numbers)
        if stale is None:
            return batch
        seen = Rows.read(batch).seen_by(self)
        seen.leave(torch.tensor(stale), STALE, "masked")
        return seen.write()

    def discard_batch(self) -> int:
        """Let go of all that is held, counted as ``unfinished``, and return how many rows that were."""
        with self._turn:
            stream = self._stream
            self._note("discard_batch")
            return stream.close([*stream.waiting.values(), *stream.whole_groups()], UNFINISHED)

    # -- what was dispatched ------------------------------------------------------------------------

    def announce(self, draws: TensorDictBase) -> None:
        """Say which groups were dispatched: their time runs from now, and they take :meth:`capacity`.

        Args:
            draws: as ``RepeatSampler.draws()`` yields them; the group's id, and its expected rollouts where
                `group_size` is None.

        Raises:
            BatchError: a group has been announced, has rows or is closed; numbers of expected rollouts
                differ; more groups wait than may, under ``on_full="raise"``.
        """
        keys = [self.group_key, self.rollout_key]
        with self._turn, labels_in_errors(draws, keys):
            draws = enter_rows(draws, keys, reader=type(self).__name__)
            if draws.shape.numel():
                plan = self._plan()
                piece = RowPiece(draws, range(len(draws)))
                found = find_columns(piece, self._options, groups_only=True)
                announce(plan, arriving_rows(piece, found, self.group_size)[0], self)
                settle(plan, self)
                self._note("announce", plan.now, draws=to_plain(draws), stays=self._chosen(plan))
                self._carry_out(plan)

    # -- state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that is held and known, as dicts, tensors and lists, which ``torch.load`` reads with
        ``weights_only=True``.
        """
        with self._turn:
            return self._state(self._now())

    def _state(self, now: float) -> dict[str, Any]:
        state, chunks = self._stream.to_plain(now)
        return {"options": dict(self._options), "version": self.version, "state": state, "chunks": chunks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: it is of an assembler that reads rows in another way; this one has a journal with
                events in it, from which it goes on.
        """
        pieces = [RowPiece.from_plain(rows) for rows in state["chunks"]]
        self._load(state, pieces, kinds_of(pieces[0].batch) if pieces else {})

    def _check_options(self, state: Mapping[str, Any]) -> None:
        if state["options"] | {"in_order": self.in_order} != self._options | {"in_order": self.in_order}:
            raise ValueError(
                f"the state must be of an assembler that reads rows as this one does ({self._options}); "
                f"it is of one with {state['options']}"
            )

    def _load(self, state: Mapping[str, Any], pieces: Sequence[RowPiece], kinds: Kinds) -> None:
        """Go on from a state with these rows, whose columns are of these kinds."""
        self._check_options(state)
        with self._turn:
            known = self._stream.puts or self._stream.waiting or self._stream.emitted
            if self._journal is not None and known:
                raise ValueError(
                    f"this assembler goes on from its journal {self.journal}, which has all that happened "
                    "since that state: load none; or give a path where no file is, and load the state there"
                )
            self._go_on(state, self._now(), pieces, kinds)
            if self._journal is not None:
                self._journal.begin_anew(self)

    def _go_on(self, state: Mapping[str, Any], now: float, pieces: Sequence[RowPiece], kinds: Kinds) -> None:
        found = find_columns(pieces[0], self._options) if pieces else None
        read = (arriving_rows(piece, found or {}, self.group_size)[0] for piece in pieces)
        rows, by_segment = chain.from_iterable(read), self.segment_key is not None
        self._stream = Stream.from_plain(state["state"], rows, now, by_segment=by_segment)
        self._kinds, self._found = kinds, found
        self.version = state["version"]

    def __getstate__(self) -> dict[str, Any]:
        if self._journal is not None:
            raise TypeError(
                f"an assembler with a journal ({self.journal}) is not copied or pickled, since one alone "
                "writes to its file: make it where it runs, or save state_dict()"
            )
        return {name: value for name, value in self.__dict__.items() if name != "_turn"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _turn=threading.RLock())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"
