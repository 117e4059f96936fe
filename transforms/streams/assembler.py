"""The assembler: takes rows in any order, and returns batches of whole groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from typing_extensions import Unpack

from headrace.installed import import_extra
from headrace.transforms.carry import to_plain
from headrace.transforms.table import ColumnNames, Rows, TakesColumns, count_of, enter_rows, labels_in_errors
from headrace.transforms.table.options import (
    at_least,
    describe_options,
    has_effect,
    nested_key,
    options_of,
    takes_options,
)
from headrace.transforms.table.schema import DISPATCHED, STEPS_LEFT, TRAINER_VERSION

from .arriving import OPTIONS, admit, announce, arriving_rows, find_columns, measures
from .draws import draws_of, groups_of_rows
from .limits import (
    Selector,
    StalledError,
    check_idle,
    check_limits,
    may_refill,
    settle,
    stalled,
    waiting_for,
    warn_of_endless,
)
from .lost import warn_of_lost
from .open_groups import Group, Key
from .pieces import PUT, Kinds, Place, RowPiece, check_kinds, gather, kinds_of
from .steps import waits_for, warn_of_no_slack
from .stream import STALE, UNFINISHED, Stream, StreamPlan
from .survival import Survivors
from .waiting import Wait

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
    """Collect rows in any order and return batches of whole groups.

    - A rollout has **ended** when all its rows have arrived. Without `segment_key` its row with done=True is
      the last. With `segment_key` the segments 0, 1, … up to the one that is done must have arrived. If the
      segments end independently, as those of sub-agents do, all ``expected_segments`` must be done.
    - A rollout has **failed** if the status of one of its rows is failed or aborted.
    - A group is **whole** when `group_size` of its rollouts have ended; without `group_size`, as many as were
      dispatched.
    - A group is **settled** when all dispatched rollouts have ended, failed or been lost.

    A batch passes a strict :class:`CompletenessGate`. Its groups are in the order in which they became whole,
    rollouts are sorted by id, and segments by number or arrival. The column `expected_key` holds the number
    of rollouts that the group has now. The column ``("headrace", "dispatched")``, (N,) int64, holds the
    number that was dispatched; with `max_staleness`, ``("headrace", "trainer_version")`` holds `version`, and
    under ``on_stale="wait"``, ``("headrace", "steps_left")`` the further steps for which a row may wait.

    Each row is taken, held, or counted under one reason: ``late``, ``duplicate``, ``surplus``, ``failed``,
    ``timeout``, ``stale``, ``evicted``, ``unfinished``, ``lost`` or ``undone``. The order of arrival does not
    change groups and counts, except with options about order or time. So a row of a rollout that has left is
    counted like its rollout: as ``failed`` if the rollout failed, as ``surplus`` if its group became whole
    without it, and as ``late`` if its group was closed while rows were missing.

    Reads `group_key`, `rollout_key` and `done_key` (None: each row is a whole rollout). Reads `partition_key`
    and `segment_key` if they are set, and `version_key` with `max_staleness`. If versions are per token, it
    also reads `loss_mask_key`, and a row is as old as its oldest sampled token and as new as its newest. A
    row without a sampled token has the version `version`. Reads `expected_key`, `status_key`,
    ``expected_segments`` and ``is_init`` if the batch has them. Reads `reward_key`, from the
    last row of each rollout, if `on_surplus` is a callable. For :attr:`survivors` it reads `loss_mask_key`
    and `reward_key`, if the batch has them. Writes `loss_mask_key` and `log_prob_key`, if the batch has them,
    under ``on_stale="mask"``. Without `segment_key` the rows of a rollout must arrive in order. With it, (N,)
    int ≥ 0, any order is allowed. A put copies the numbers of rows to the CPU in one transfer.
    Several threads may use one assembler.

    Args:
        groups: whole groups per batch; None: all that are whole.
        group_size: rollouts of a whole group; None: as many as `expected_key` says.
        on_failure: what happens to a settled group with too few ended rollouts. ``drop`` it, or ``raise``.
            ``keep`` it if it has `min_rollouts` and `min_fraction`; otherwise refill it if `refill` is set,
            else drop it. ``refill`` it; after `max_refills` keep it if `min_rollouts` or `min_fraction` are
            set and reached, else drop it.
        timeout: puts after which a group that is not whole is too old; None: never. Puts of all workers
            count, from the group's first row or announcement on. While nothing is put and the trainer waits,
            the time counts as puts at their usual rate.
        timeout_seconds: the same limit in seconds.
        on_timeout: what happens to a group that is too old, with the values of `on_failure`.
        min_rollouts: ended rollouts that a group needs for ``keep`` and after ``refill``, ≥ 1.
        min_fraction: the same as a share in (0, 1] of the rollouts that the group was first dispatched with.
        refill: a function for ``refill`` and ``keep``. It gets a group id and the number of missing rollouts.
            Dispatch that many rollouts with new rollout ids, and do not announce them. Its exceptions are
            raised by :meth:`put`, after the rows were taken in, or by :meth:`take`.
        max_refills: largest number of calls of `refill` per group, ≥ 1.
        max_staleness: largest number of policy versions that a row may be behind `version` when it is
            taken; None: any.
        on_stale: how older rows than `max_staleness` allows are kept out of training. ``wait``: a step waits
            for slow groups before these are too old, and none is dropped (docs/streams.md). Ages count steps,
            and numbers of versions may have gaps. ``wait`` needs `groups`, the number that all takers
            together train in a step. Groups that were not announced are dropped if a row is older. ``drop``
            the group. ``mask`` the row: it leaves the loss and stays in the statistics, as with
            :class:`SampleFilter`. ``refill``: drop the rows of the group and dispatch all its rollouts again;
            after `max_refills` drop it. None: ``wait``, or ``drop`` without `groups` or with a
            `partition_key`.
        steps_ahead: steps for which groups are dispatched ahead of the current one, for :meth:`capacity`, at
            most `max_staleness`. The mean age of the groups is about this number. None: 2, or `max_staleness`
            if that is less; without `max_staleness` there is no limit.
        on_newer: with `max_staleness`, what happens if a row is newer than `version`. ``raise``, because
            `version` is not updated; or ``wait``, which holds the group until `version` is as high.
        max_concurrent_rollouts: largest number of unfinished rollouts, for :meth:`capacity`; None: any.
        on_late: what happens to late rows: ``drop`` or ``raise``.
        on_duplicate: what happens if a rollout ends twice or a segment arrives twice, even after its group
            was closed: ``raise``, or ``drop`` the later one.
        on_surplus: what happens to more than `group_size` ended rollouts. ``drop`` the last ones. Or a
            callable that gets their rewards, (n,) float64 sorted by rollout id, and k = `group_size`, and
            returns the k rollouts to keep, as indices or as a mask. It is called when the group is settled or
            too old.
        max_pending_groups: largest number of waiting groups; None: any.
        on_full: what happens if more groups wait: ``drop`` the oldest, or ``raise``.
        in_order: rows of an environment are put in the order in which it sent them. Then the assembler
            detects lost rows by the origin that :class:`headrace.pipeline.StampIds` stamps. False, or a
            `segment_key`: the origin is ignored.
        max_idle: consecutive puts without a new whole group until :class:`StalledError`; None: eight times
            the rollouts of a batch, at least 100.
        journal: path of a file that records each event before it takes effect. An assembler with the same
            options continues from it after a crash. Only groups that were taken since the last
            :meth:`commit` are taken again. None: held rows are lost with the process.
        partition_key: (N,) or (N, 1) int ≥ 0. Ids are unique within a partition, and a batch has groups of
            one partition. None: a single partition.
        names: other names of columns, such as `group_key` (:class:`ColumnNames`).

    Raises:
        ValueError: an option has an invalid value or needs another option; or the file is not a journal, has
            other options, or is damaged before its end.

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

    _journals_rows = True  # False: rows are stored where they are lost with the process

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
        on_stale: Literal["wait", "drop", "mask", "refill"] | None = None,
        steps_ahead: int | None = None,
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
        self.on_failure = on_failure
        self.on_timeout = on_timeout
        self.on_late = on_late
        self.on_duplicate = on_duplicate
        self.timeout, self.timeout_seconds = at_least("timeout", timeout, 1), timeout_seconds
        self.min_rollouts, self.min_fraction = at_least("min_rollouts", min_rollouts, 1), min_fraction
        self.refill, self.max_refills = refill, at_least("max_refills", max_refills, 1)
        self.max_staleness = at_least("max_staleness", max_staleness, 0)
        self.max_pending_groups = at_least("max_pending_groups", max_pending_groups, 1)
        self.on_full = on_full
        self.in_order, self.max_idle = in_order, at_least("max_idle", max_idle, 1)
        self.on_stale, self.steps_ahead = on_stale, at_least("steps_ahead", steps_ahead, 0)
        one_batch_a_step = groups is not None and self.partition_key is None
        waits = on_stale == "wait" or (on_stale is None and one_batch_a_step)
        self.waits = waits and max_staleness is not None
        """Whether steps wait for slow groups: ``on_stale="wait"``."""
        default = None if max_staleness is None else min(2, max_staleness)
        self.ahead = default if steps_ahead is None else steps_ahead
        """`steps_ahead`, or its default."""
        self.on_newer = on_newer
        self.max_concurrent_rollouts = at_least("max_concurrent_rollouts", max_concurrent_rollouts, 1)
        self.on_surplus = on_surplus
        check_limits(self)
        has_effect(GroupAssembler, "max_refills", max_refills, refill is not None, "refill")
        for name, value in (("on_stale", on_stale), ("on_newer", on_newer)):
            has_effect(GroupAssembler, name, value, max_staleness is not None, "max_staleness")
        has_effect(GroupAssembler, "steps_ahead", steps_ahead, groups is not None, "groups")
        self._options = {name: getattr(self, name) for name in OPTIONS}
        self._options["in_order"] = in_order and self.segment_key is None
        if max_staleness is None:
            self._options |= {"version_key": None, "loss_mask_key": None}
        self._options["reward_key"] = self.reward_key if callable(on_surplus) else None
        self._version = 0
        self._stream = Stream()
        self._paced = False  # groups were announced
        self.restored = False
        """Whether the assembler continues from a journal or a state."""
        self.committed: int | None = None
        """The step of the last :meth:`commit` with a step; None: there was no such commit."""
        self._wait = Wait()
        self._begins = False  # the assembler was restored, and nothing has happened since
        # Groups that were taken after the last commit, in this order, with the oldest version of their rows.
        self._taken_back: dict[Key, int | None] = {}
        self._wanted: int | None = None  # largest number of groups in the next batch, by want()
        self._kinds: dict[tuple[str, ...], Any] = {}  # kinds_of the last rows
        self._found: dict[str, NestedKey] | None = None  # find_columns of the last rows
        self._lock = threading.RLock()
        self._journal: Journal | None = None
        self.journal = journal
        if journal is not None:
            import_extra("pyarrow", "journal=")
            from .journal import Journal, options_that_decide  # imported here because it needs pyarrow

            decide = options_that_decide(self, options_of(GroupAssembler))
            self._journal = Journal(journal, decide, rows=self._journals_rows)
            self._journal.replay(self)
            self._begins = self.restored

    # -- counts -------------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Number of whole groups that can be taken."""
        return sum(map(len, self._stream.ready.values()))

    @property
    def pending(self) -> int:
        """Number of groups that were announced or have rows, and are not whole."""
        return len(self._stream.waiting)

    @property
    def held(self) -> int:
        """Number of rows of ready and pending groups."""
        return self._stream.held

    @property
    def version(self) -> int:
        """The newest policy version, for `max_staleness`. The trainer sets it when it updates the policy.

        Raises:
            ValueError: on setting, it is no integer, or lower than before. After a restart it may be lower,
                before anything else happens.
        """
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        with self._lock:
            if not isinstance(version, Integral) or (version < self._version and not self._begins):
                raise ValueError(
                    f"version must be an integer that never gets smaller; it is {self._version}, and got "
                    f"{version!r:.200}. To go on with older weights, load the state that was saved with them"
                )
            changed, self._version = version != self._version, int(version)
            if changed and self.ahead is not None:
                self._pass_step(over=self._stream.steps.taken > 0)

    def _pass_step(self, *, over: bool) -> None:
        """Note the policy version, and whether a step has ended."""
        self._note("step", over=over)
        if over:
            self._stream.steps.end()
        self._stream.steps.begin(self._version)

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows that left without being taken, by reason."""
        return dict(self._stream.counts)

    @property
    def lost_groups(self) -> dict[str, int]:
        """Number of groups that left without being taken, by reason, including groups without rows."""
        return {reason: number for reason, number in self._stream.lost_groups.items() if number}

    _refused: tuple[int, str] = (0, "")  # puts that raised, and the error of the last

    @property
    def survivors(self) -> Survivors:
        """Counts of trained and lost groups by latency, turns, length and reward.

        Counting begins at the start or the last restart.
        """
        with self._lock:
            return self._stream.survival.so_far()

    @property
    def emitted(self) -> int:
        """Number of groups that were taken."""
        return self._stream.emitted

    @property
    def blocked_by(self) -> list[str]:
        """The groups that the next step waits for, each with its age; empty if the step may begin.

        With ``on_stale="wait"`` these include groups that would be too old for a later step.
        """
        with self._lock:
            return waiting_for(self._awaited(self.groups or 1) or [], self._plan())

    @property
    def ages(self) -> dict[int, int]:
        """Number of groups that were taken at each age, in steps, with `max_staleness`."""
        return dict(sorted(self._stream.steps.ages.items()))

    @takes_options
    def capacity(self, rollouts: int | None = None) -> int:
        """Number of groups that may be dispatched now, ≥ 0: the minimum over the limits that are set.

        - `max_staleness` or `steps_ahead`: (`steps_ahead` + 1) · `groups` − the outstanding groups.
          These are ready, pending, or taken by the current step, without rejected ones. With `steps_ahead`
          = `max_staleness` this is the limit of AReaL (arXiv:2505.24298, section 5.1).
        - `max_concurrent_rollouts`: the remaining rollouts, divided by the rollouts of a group.
        - `max_pending_groups` − pending.

        Dispatch at most that many groups, and announce them. Limiting the dispatch is better than dropping
        slow rollouts later, because slow rollouts are the long ones.

        Args:
            rollouts: rollouts of a group to dispatch; None: `group_size`, or one.

        Raises:
            ValueError: no limit is set, or `max_staleness` without `groups`; or a group has more rollouts
                than `max_concurrent_rollouts`.
        """
        concurrent, size = self.max_concurrent_rollouts, rollouts or self.group_size or 1
        ahead = self.ahead is not None
        if (ahead and self.groups is None) or not (ahead or concurrent or self.max_pending_groups):
            raise ValueError(
                "capacity() needs max_staleness or steps_ahead, with groups, or max_concurrent_rollouts, or "
                "max_pending_groups"
            )
        if concurrent is not None and concurrent < size:
            raise ValueError(
                f"max_concurrent_rollouts must be at least the rollouts of a group ({size}); got {concurrent}"
            )
        with self._lock:
            self._begin()
            stream, least = self._stream, []
            if self.ahead is not None and self.groups is not None:
                most = (self.ahead + 1) * self.groups
                room = most - stream.steps.taken - self.ready - self.pending
                # If no partition has enough groups for a batch, the trainer would wait forever without new
                # groups.
                stuck = not self.pending and len(stream.ready) > 1
                stuck = stuck and max(map(len, stream.ready.values())) < self.groups
                least.append(max(room, int(stuck)))
            if concurrent is not None:
                running = sum(g.dispatched - g.have - g.lost for g in stream.waiting.values())
                least.append((concurrent - running) // size)
            if self.max_pending_groups is not None:
                least.append(self.max_pending_groups - self.pending)
            return max(0, min(least))

    # -- rows come in -------------------------------------------------------------------------------

    def put(self, batch: TensorDictBase) -> None:
        """Take in a batch of rows: copy all of them, or raise an error and change nothing.

        Args:
            batch: TensorDict ``[N]`` or ``[envs, time]``, dense or a lazy stack.

        Raises:
            MissingKeyError: a column is missing.
            BatchError: a row has no id, a rollout is in two groups, a status is unknown, the loss mask is not
                bool, expected rollouts differ within a group, columns differ from those of the held rows, or
                an option that is set to ``raise`` applies.
            StalledError: no group has become whole for `max_idle` puts.
        """
        keys = [self.group_key, self.rollout_key]
        try:
            with self._lock, labels_in_errors(batch, keys):
                self._begin()
                kinds = None
                if isinstance(batch, TensorDictBase) and batch.batch_dims == 1:
                    kinds = kinds_of(batch)
                if kinds != self._kinds:  # rows of the same kinds as before need no further check
                    batch = enter_rows(batch, keys, reader=type(self).__name__)
                    kinds = kinds_of(batch)
                self._put(batch, kinds)
        except Exception as err:  # the caller may be a thread whose errors are not shown
            self._refused = self._refused[0] + 1, f"{type(err).__name__}: {err}"
            raise

    def _put(self, batch: TensorDictBase, kinds: Kinds, holds: Sequence[Any] = ()) -> None:
        """Take in rows after :func:`enter_rows`.

        Args:
            batch: TensorDict ``[N]`` with at least the columns that are read.
            kinds: kinds of all columns.
            holds: an object per row to keep alive as long as the row is held.
        """
        with self._lock:
            stream, found = self._stream, self._found if kinds == self._kinds else None
            plan = StreamPlan(stream, stream.puts + 1, self._now(), new=len(batch))
            piece = RowPiece(batch, range(plan.puts * PUT, plan.puts * PUT + len(batch)), holds)
            stream.by_put[plan.puts] = piece
            try:
                if len(batch):
                    if found is None:
                        if stream.held:
                            check_kinds(self._kinds, kinds)
                        found = find_columns(piece, self._options)
                    measured = measures(batch, self.loss_mask_key, self.reward_key)
                    rows, plan.origins = arriving_rows(piece, found, self._options, self.version, measured)
                    for arrival in admit(plan, rows, self):
                        del piece.place[arrival]
                settle(plan, self)
                check_idle(plan, self)
                if self._journal is not None and self._journal.rows:
                    self._note("put", plan.now, rows=to_plain(batch) if len(batch) else None)
                if piece.place:
                    piece.own()
                    plan.piece = piece
                if len(batch):
                    self._kinds, self._found = kinds, found
                self._wait.note_put(plan.now)
                self._carry_out(plan)
            finally:
                if piece not in stream.pieces:
                    stream.by_put.pop(plan.puts, None)
            warn_of_lost(plan)
            warn_of_endless(plan)

    def stalled(self, why: str, worker: tuple[int, int] | None = None) -> StalledError:
        """Make an error that lists the oldest waiting groups and counts all rows.

        Args:
            why: the beginning of the message.
            worker: (w, W), to list only the groups of worker w of W, as :class:`headrace.pipeline.StampIds`
                numbers them.
        """
        with self._lock:
            puts, last = self._refused
            if puts:
                refused = f"The stream refused {count_of(puts, 'put')}, the last by {last.rstrip('.')}"
                why = f"{why.rstrip('.')}. {refused}"
            return stalled(why, self._plan(), self._awaited(self.groups or 1) or (), worker)

    def _plan(self) -> StreamPlan:
        """A plan without new rows."""
        return StreamPlan(self._stream, self._stream.puts, self._now())

    def _now(self) -> float:
        return time.monotonic() if self._journal is None else self._journal.now()

    def _note(self, event: str, now: float | None = None, **details: Any) -> None:
        """Write an event to the journal, before it takes effect."""
        if self._journal is not None:
            self._journal.write(event, self.version, self._now() if now is None else now, **details)

    def _carry_out(self, plan: StreamPlan) -> None:
        self._stream.carry_out(plan)
        groups = plan.groups.values()
        self._ask_for([(group, group.missing) for group in groups if group.fate == "refilled"])

    def _ask_for(self, missing: list[tuple[Group, int]]) -> None:
        """Call `refill` for all groups, then raise the first error of any call."""
        if self._journal is not None and self._journal.replaying is not None:
            return  # `refill` was called when the event first happened
        errors: list[Exception] = []
        for group, rollouts in missing:
            try:
                self.refill(group.group, rollouts)  # type: ignore[misc]  # check_limits requires `refill`
            except Exception as err:  # from the user's function; the other groups still get their call
                errors.append(err)
        if errors:
            raise errors[0]

    # -- groups go out ------------------------------------------------------------------------------

    @takes_options
    def take(self, n: int | None = None) -> TensorDictBase | None:
        """Take `n` whole groups, else `groups`, else all of them. Return None while there are fewer.

        A batch has groups of one partition: the one that had enough whole groups first.

        Raises:
            ValueError: `n` is not an integer ≥ 1.
            IncompleteGroupsError: a group is too old, under ``on_timeout="raise"``.
        """
        n = at_least("n", n, 1)
        if n is None and self._wanted is not None:
            return self._take(None, self._wanted)
        return self._take(n or self.groups)

    def take_rest(self) -> TensorDictBase | None:
        """Take all whole groups of a partition, even if they are fewer than `groups`; None if none is whole.

        Raises:
            IncompleteGroupsError: as :meth:`take`.
        """
        return self._take(None)

    @takes_options
    def want(self, groups: int) -> None:
        """Tell the assembler how many groups the caller still needs, as :func:`informative` does.

        The next batch then has between one and `groups` groups. So no group waits, or becomes stale, in the
        caller's buffer, and the assembler does not wait for more groups than :meth:`capacity` allows.
        """
        with self._lock:
            self._wanted = at_least("groups", groups, 1)

    def reject(self, groups: int) -> None:
        """Tell the assembler that taken groups are not trained, so that :meth:`capacity` excludes them."""
        with self._lock:
            self._note("reject", rejected=groups)
            steps = self._stream.steps
            steps.taken = max(0, steps.taken - groups)

    @takes_options
    def commit(self, step: int | None = None, *, emitted: int | None = None) -> None:
        """Record in the `journal` that all taken groups are trained and the weights are saved.

        After a crash these groups are not taken again. Call it after you saved the weights of an optimiser
        step. Rows survive a crash of the process as soon as :meth:`put` has returned, and a crash of the
        machine after the next commit. When the file has become more than twice as long, it is rewritten
        without the rows that have left.

        A process may die after it saved the weights and before it committed. So save :attr:`emitted` with the
        weights. After a restart set `version` to the version of the weights, and first of all commit again:
        ``assembler.commit(step, emitted=saved)``. Then groups that these weights have trained are not taken
        again.

        Args:
            step: the number of the step, for :attr:`committed`.
            emitted: the groups that had been taken when the weights were saved; None: all.

        Raises:
            ValueError: there is no journal; or the weights are older than the last commit, or have trained
                groups that the journal does not have.
            RuntimeError: another assembler has opened the journal.

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
            >>> again = GroupAssembler(groups=1, group_size=1, journal=path)  # after a crash
            >>> again.take()["group_id"].tolist()
            [9]
        """
        with self._lock:
            if self._journal is None:
                raise ValueError("commit() needs a journal: set journal=PATH")
            known = self._stream.emitted
            more = 0 if emitted is None else emitted - known
            if not 0 <= more <= len(self._taken_back):
                was, trained = self.committed, count_of(known + more, "group")
                then = "Begin" if was is None else f"Load the weights of step {was}, or begin"
                raise ValueError(
                    f"the weights have trained {trained}, and the journal {self.journal} has {known} that "
                    f"were committed and {len(self._taken_back)} after them. {then} a new journal"
                )
            self._commit(step, more)
            self._journal.commit(self, step, more)

    def _commit(self, step: int | None, more: int) -> None:
        """Count the first `more` groups that were taken back as trained."""
        stream, steps = self._stream, self._stream.steps
        for key, oldest in islice(self._taken_back.items(), more):
            if self.groups is not None and steps.taken >= self.groups:
                steps.end()
            if self.ahead is not None:
                steps.take([oldest])
            stream.close_key(key)
            stream.emitted += 1
        if more and self.groups is not None:
            steps.taken = self.groups  # the weights contain this step, even if groups were rejected
        self._taken_back, self.committed = {}, self.committed if step is None else step

    def _take(self, wanted: int | None, most: int | None = None) -> TensorDictBase | None:
        with self._lock:
            self._begin()
            self._expire()
            batch = self._hand_out(wanted, most)
            if wanted or most:
                self._wait.look(self._now(), over=batch is not None, blocked_by=lambda: self.blocked_by)
            return batch

    def _expire(self, puts: int | None = None) -> None:
        """Give up groups that exceed `timeout`, `timeout_seconds` or `max_staleness`."""
        stream, plan = self._stream, self._plan()
        if self.timeout_seconds is not None or self.timeout is not None:
            plan.puts = plan.puts + self._wait.missed_puts(plan.now) if puts is None else puts
            settle(plan, self)
            if any(group.fate != "waits" for group in plan.groups.values()):
                self._note("expire", plan.now, puts=plan.puts)
                self._carry_out(plan)
                self._wait.note_missed(plan.now)
        if self.max_staleness is not None and self.on_stale != "mask":
            oldest, refilled = self.version - self.max_staleness, []
            whole = (g for g in stream.whole_groups() if not (self.waits and g.announced))
            stale = [g for g in whole if g.oldest < oldest]
            if stale:
                self._note("expire", plan.now, puts=plan.puts)
            for group in stale:
                if self.on_stale == "refill" and may_refill(group, self):
                    refilled.append((group, self.group_size or group.expected))
                    stream.dispatch_again(*refilled[-1], plan)
                else:
                    stream.close([group], STALE)
            self._ask_for(refilled)

    def _hand_out(self, wanted: int | None, most: int | None) -> TensorDictBase | None:
        stream, oldest = self._stream, self.version - (self.max_staleness or 0)
        newest = self.version if self.on_newer == "wait" else None
        if self.groups is not None and stream.steps.taken >= self.groups:  # wait for the next step
            self._pass_step(over=True)
        asked = max(wanted or 0, self.groups or 0) if (wanted or most) else 0  # 0: all groups that are left
        few = self.ready < asked and not stream.steps.taken  # called often: do not look at all waiting groups
        if self.waits and asked and (few or self._awaited(asked) is not None):
            return None
        if not (groups := stream.choose(wanted, most, newest, by_deadline=self.waits)):
            return None
        if self._journal is not None:
            self._journal.take(self, groups, wanted=wanted, most=most)
        self._wanted = None
        of_groups = [(group, group.places()) for group in groups]
        places = [place for _, rows in of_groups for place in rows]
        have = [len(group.members) for group, rows in of_groups for _ in rows]
        dispatched = [group.dispatched for group, rows in of_groups for _ in rows]
        aged = self.max_staleness is not None
        versions = [version for group in groups for version in group.versions] if aged else []
        masked = [version < oldest for version in versions] if aged and self.on_stale == "mask" else None
        numbers: dict[NestedKey, Sequence[int]] = {self.expected_key: have, DISPATCHED: dispatched}
        if aged:
            numbers[TRAINER_VERSION] = [self.version] * len(places)
        if self.waits:
            numbers[STEPS_LEFT] = [stream.steps.left(version, self) for version in versions]
        batch = self._joined(places, numbers, masked)
        if self.ahead is not None:
            stream.steps.take(list(map(self._oldest, groups)))
        stale = {group.key for group in groups if masked and group.oldest < oldest}
        stream.close(groups, stale=stale)
        stream.emitted += len(groups)
        return batch

    def _oldest(self, group: Group) -> int | None:
        """The oldest policy version of a group, if it is read."""
        return group.oldest if self.max_staleness is not None else None

    def _awaited(self, size: int) -> list[Group] | None:
        """The groups that a step of `size` groups waits for; None: the step may begin."""
        stream = self._stream
        if self.waits:
            whole = (group for group in stream.whole_groups() if group.newest <= self.version)
            return waits_for(stream.steps, whole, stream.waiting.values(), size, self)
        missing = size - max(map(len, stream.ready.values()), default=0)
        return list(islice(stream.waiting.values(), missing)) if missing > 0 else None

    def _joined(
        self,
        places: Iterable[Place],
        numbers: Mapping[NestedKey, Sequence[int]],
        stale: Sequence[bool] | None,
    ) -> Any:
        """Build the batch that is taken.

        Args:
            places: the M rows of the batch.
            numbers: further columns of M numbers.
            stale: the rows to mask; None: none.
        """
        batch = gather(places, numbers)
        if stale is None:
            return batch
        seen = Rows.read(batch).seen_by(self)
        seen.leave(torch.tensor(stale), STALE, "masked")
        return seen.write()

    def discard_batch(self) -> int:
        """Drop all held rows, counted as ``unfinished``, and return their number."""
        with self._lock:
            stream = self._stream
            self._note("discard_batch")
            return stream.close([*stream.waiting.values(), *stream.whole_groups()], UNFINISHED)

    # -- dispatch -----------------------------------------------------------------------------------

    def announce(self, draws: TensorDictBase) -> None:
        """Tell the assembler which groups were dispatched. Their timeouts start, and they use capacity.

        Args:
            draws: the output of ``RepeatSampler.draws()``: group ids, and expected rollouts if `group_size`
                is None. With `max_staleness`, groups that are announced after their dispatch need the policy
                version of the dispatch, as `version_key`.

        Raises:
            BatchError: a group was announced before, has rows or is closed; or its expected rollouts differ.
            IncompleteGroupsError: more than `max_pending_groups` wait, under ``on_full="raise"``.
        """
        keys = [self.group_key, self.rollout_key]
        with self._lock, labels_in_errors(draws, keys):
            self._begin()
            flat = draws.reshape(-1) if len(draws) else draws
            draws = enter_rows(draws, keys, reader=type(self).__name__)
            if draws.shape.numel():
                if self.max_staleness is not None and not self._paced:
                    warn_of_no_slack(self)
                self._paced = True
                plan = self._plan()
                piece = RowPiece(draws, range(len(draws)))
                found = find_columns(piece, self._options, groups_only=True)
                rows, _ = arriving_rows(piece, found, self._options, self.version)
                announce(plan, rows, draws_of(flat.clone(), self._options), self)
                if self._journal is None or not self._journal.without_rows:
                    settle(plan, self)
                if self._journal is not None:
                    self._note("announce", plan.now, draws=to_plain(flat))
                self._carry_out(plan)

    # -- after a restart ----------------------------------------------------------------------------

    def unfinished(self) -> list[TensorDictBase]:
        """The announced rollouts that have not ended, if the process that announced them is gone.

        Dispatch them again, and do not announce them. If rows of a rollout had arrived, the rollout gets a
        new id, and these rows leave as ``surplus``. A second call returns nothing.
        :func:`headrace.pipeline.paced` does it. Groups that were announced after the step of the loaded
        weights are forgotten: draw them again (:meth:`never_announced`).

        Returns:
            Rows of the announcements: prompts and ids.

        Example:
            >>> from tensordict import TensorDict
            >>> columns = {"group_id": [4, 4], "rollout_id": [8, 9], "prompt": [2, 2]}
            >>> draws = TensorDict(columns, batch_size=[2])
            >>> assembler = GroupAssembler(group_size=2)
            >>> assembler.announce(draws)
            >>> again = GroupAssembler(group_size=2)
            >>> again.load_state_dict(assembler.state_dict())
            >>> [draws["rollout_id"].tolist() for draws in again.unfinished()]
            [[8, 9]]
        """
        with self._lock:
            self._begin()
            self._note("unfinished")
            return self._stream.unfinished(self.rollout_key)

    def never_announced(self, draws: TensorDictBase) -> TensorDictBase:
        """The rows of unknown groups, which were not announced, have no rows and are not closed.

        A sampler that continues after a restart dispatches them.

        Args:
            draws: see :meth:`announce`.
        """
        if not draws.shape.numel():
            return draws
        with self._lock:
            known = [self._stream.knows(key) for key in groups_of_rows(draws, self._options)]
        return draws if not any(known) else draws[~torch.tensor(known)]

    def _begin(self) -> None:
        """Drop rows that were sampled with lost weights, before anything else happens after a restart."""
        if self._begins:
            self._note("begin")
            self._restart()

    def _restart(self) -> None:
        self._begins, self._taken_back = False, {}
        self._stream.begin(None if self.max_staleness is None else self.version)

    # -- state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state and the held rows, as dicts, tensors and lists for ``torch.load(weights_only=True)``."""
        with self._lock:
            return self._state(self._now())

    def _state(self, now: float) -> dict[str, Any]:
        state, rows = self._stream.to_plain(now)
        return {"options": dict(self._options), "version": self.version, "state": state, "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Raises:
            ValueError: the state is of an assembler with other columns, or this one has continued from a
                journal.
        """
        piece = RowPiece.from_plain(state["rows"])
        self._load(state, piece, kinds_of(piece.batch))

    def _check_options(self, state: Mapping[str, Any]) -> None:
        if state["options"] | {"in_order": self.in_order} != self._options | {"in_order": self.in_order}:
            raise ValueError(
                f"the state must be of an assembler that reads the same columns ({self._options}); it is of "
                f"one with {state['options']}"
            )

    def _load(self, state: Mapping[str, Any], piece: RowPiece, kinds: Kinds) -> None:
        """Restore a state with these rows, whose columns are of these kinds."""
        self._check_options(state)
        with self._lock:
            known = self._stream.puts or self._stream.waiting or self._stream.emitted
            if self._journal is not None and known:
                raise ValueError(
                    f"this assembler continues from its journal {self.journal}, which is at least as new as "
                    "the state: do not load the state; or set journal to a new path, and load the state then"
                )
            self._go_on(state, self._now(), piece, kinds)
            self.restored = True
            self._stream.begin(None)  # a state is as old as the weights that were saved with it
            if self._journal is not None:
                self._journal.begin_anew(self)

    def _go_on(self, state: Mapping[str, Any], now: float, piece: RowPiece, kinds: Kinds) -> None:
        found = find_columns(piece, self._options) if piece.place else None
        rows = () if found is None else arriving_rows(piece, found, self._options, state["version"])[0]
        self._stream = Stream.from_plain(state["state"], rows, now, self._options)
        self._kinds, self._found = kinds, found
        self._version = state["version"]

    def __getstate__(self) -> dict[str, Any]:
        if self._journal is not None:
            raise TypeError(
                f"an assembler with a journal ({self.journal}) cannot be copied or pickled, because only one "
                "may write to the file: create it in the process that uses it, or save state_dict()"
            )
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"
