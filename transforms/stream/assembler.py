"""The assembler: rows come in as they come, whole groups go out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase

from headrace.transforms.checks import enforce
from headrace.transforms.door import enter_rows, labels_in_errors
from headrace.transforms.ids import is_first
from headrace.transforms.options import at_least, describe_options, nested_key, one_of
from headrace.transforms.rows import device_of
from headrace.transforms.schema import DISPATCHED, DONE
from headrace.transforms.tokens import silence

from .arriving import Reads, announce_rules, read_arriving, read_dispatch
from .changes import REASONS, Stream, admit, drop_all, drop_older, let_go, open_groups
from .choosing import choose, in_order
from .chunks import Chunks
from .held import HeldRows, is_among
from .limits import Limits, check_limits, count_idle, describe_stall, repeat_rules, settle
from .settled import Selector
from .stalled import StalledError

Remedy = Literal["drop", "raise", "keep", "refill"]
OnRepeat = Literal["drop", "raise"]
Refill = Callable[[int, int], Any]


class GroupAssembler:
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
    ``timeout``, ``stale``, ``evicted``, ``unfinished``.

    Reads `group_key`, `rollout_key`, `done_key`, with `partition_key`, `segment_key` or `max_staleness` those
    columns, and if they are there `expected_key`, `status_key`, ``expected_segments`` and ``is_init``. Their
    numbers are read to the CPU once a put. Several threads may use it.

    Args:
        groups: whole groups in a batch. None: all that are whole.
        group_size: rollouts of a whole group. None: as many as `expected_key` says.
        on_failure: where a group is settled and not whole, because rollouts failed: ``drop`` the group;
            ``raise``; ``keep`` it if it has `min_rollouts` and `min_fraction` of what was dispatched, else
            drop it; ``refill``, which asks for more rollouts.
        timeout: puts, of whoever, after which a group is too old that is not whole; they count from its first
            row or its announcement. None: none is.
        timeout_seconds: the same in seconds.
        on_timeout: where a group is too old: as `on_failure`.
        min_rollouts: for ``keep``, ≥ 1.
        min_fraction: for ``keep``, in (0, 1].
        refill: for ``refill``, called with a group's id and the number of rollouts that it lacks, each of
            which gets an id of its own. What it raises comes out of :meth:`put`, whose rows are in.
        max_refills: how often it is called for a group, which is dropped after that.
        max_staleness: policy versions for which a row may be older than `version` when it is handed out.
            None: any number.
        on_stale: where a row of a group is older: ``drop`` the group, or ``mask`` the row, which leaves the
            loss and stays in the statistics, as under :class:`SampleFilter`.
        on_late: where a rollout of a closed group comes: ``drop`` it, or ``raise``.
        on_duplicate: where a rollout ends twice, also after its group was closed, or a segment comes twice:
            ``raise``, or ``drop`` it, and the first stays.
        on_surplus: where more rollouts end than `group_size`: ``drop`` those that end last; or a callable
            from their rewards (n,) float64, ordered by rollout id, and k = `group_size` to the k that stay,
            as indices or as a mask, asked once all that were dispatched are over, or the group too old.
        max_pending_groups: groups that may wait. None: any number.
        on_full: where more wait: the oldest leave (``drop``), or ``raise``.
        max_idle: puts in a row in which no group became whole, after which something is wrong. None: eight
            times the rollouts of a batch, and at least 100.
        segment_key: (N,) or (N, 1) int ≥ 0, the number of the row's segment, which may arrive in any order.
            None: the rows of a rollout arrive in their order.
        done_key: (N,) or (N, 1) bool, True where a rollout ends. None: each row is a whole rollout.
        partition_key: (N,) or (N, 1) int ≥ 0; ids are unique in their partition, and a batch is of one. None:
            there is one.
        group_key: (N,) or (N, 1) int ≥ 0.
        rollout_key: (N,) or (N, 1) int ≥ 0.
        expected_key: (N,) or (N, 1) int ≥ 1, how many rollouts the group was dispatched with.
        status_key: (N,) or (N, 1) :class:`Status`. None: ``("next", "status")`` if it is there, else
            ``status`` if that is, else all have completed.
        version_key: (N,) or (N, 1) int, who acted; read with `max_staleness`.
        loss_mask_key: (N, T) bool, True trains; written under ``on_stale="mask"``, if it is there.
        log_prob_key: (N, T) float, likewise. None: never.
        reward_key: (N,) or (N, 1) float, a rollout's on its last row; read where `on_surplus` is a callable.

    Raises:
        ValueError: an option with a wrong value, or that needs another.

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
        on_stale: Literal["drop", "mask"] = "drop",
        on_late: OnRepeat = "drop",
        on_duplicate: OnRepeat = "raise",
        on_surplus: Literal["drop"] | Selector = "drop",
        max_pending_groups: int | None = None,
        on_full: OnRepeat = "drop",
        max_idle: int | None = None,
        segment_key: NestedKey | None = None,
        done_key: NestedKey | None = DONE,
        partition_key: NestedKey | None = None,
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey = "rollout_id",
        expected_key: NestedKey = "expected_rollouts",
        status_key: NestedKey | None = None,
        version_key: NestedKey = ("next", "policy_version"),
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        log_prob_key: NestedKey | None = ("log_probs", "full"),
        reward_key: NestedKey = ("next", "reward"),
    ):
        self.groups, self.group_size = at_least("groups", groups, 1), at_least("group_size", group_size, 1)
        self.on_failure = one_of("on_failure", on_failure, get_args(Remedy))
        self.on_timeout = one_of("on_timeout", on_timeout, get_args(Remedy))
        self.on_late = one_of("on_late", on_late, get_args(OnRepeat))
        self.on_duplicate = one_of("on_duplicate", on_duplicate, get_args(OnRepeat))
        self.timeout, self.timeout_seconds = at_least("timeout", timeout, 1), timeout_seconds
        self.min_rollouts, self.min_fraction = at_least("min_rollouts", min_rollouts, 1), min_fraction
        self.refill, self.max_refills = refill, at_least("max_refills", max_refills, 1, required=True)
        self.max_staleness = at_least("max_staleness", max_staleness, 0)
        self.max_pending_groups = at_least("max_pending_groups", max_pending_groups, 1)
        self.on_full = one_of("on_full", on_full, get_args(OnRepeat))
        self.max_idle = at_least("max_idle", max_idle, 1)
        self.segment_key, self.done_key = nested_key(segment_key), nested_key(done_key)
        self.partition_key, self.group_key = nested_key(partition_key), nested_key(group_key)
        self.rollout_key, self.expected_key = nested_key(rollout_key), nested_key(expected_key)
        self.status_key, self.version_key = nested_key(status_key), nested_key(version_key)
        self.loss_mask_key, self.log_prob_key = nested_key(loss_mask_key), nested_key(log_prob_key)
        self.on_stale = one_of("on_stale", on_stale, ("drop", "mask"))
        self.reward_key, self.on_surplus = nested_key(reward_key), on_surplus
        self._limits = Limits(*(getattr(self, name) for name in Limits._fields))
        check_limits(self._limits, self.refill)
        self._reads = Reads(
            *(self.group_key, self.rollout_key, self.expected_key, self.partition_key, self.segment_key),
            *(self.done_key, self.status_key, self.version_key if max_staleness is not None else None),
            reward_key=self.reward_key if callable(on_surplus) else None,
            group_size=group_size,
        )
        self.version = 0
        """The newest policy version, for `max_staleness`; whoever trains counts it up."""
        self._state, self._chunks = Stream.nothing(), Chunks()
        self._turn = threading.RLock()

    # -- what is there ------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Whole groups."""
        return int(self._state.groups.ready.sum())

    @property
    def pending(self) -> int:
        """Groups that are announced or begun, and not whole."""
        return int((~self._state.groups.ready).sum())

    @property
    def held(self) -> int:
        """Rows that are neither handed out nor counted."""
        return len(self._state.rows.slot)

    @property
    def counts(self) -> dict[str, int]:
        """Rows that left, by reason."""
        return dict(zip(REASONS, self._state.counts, strict=True))

    @property
    def emitted(self) -> int:
        """Groups that were handed out."""
        return self._state.emitted

    def room(self) -> int:
        """Groups that may be dispatched now and still be trained within `max_staleness`.

        (`max_staleness` + `version` + 1) · `groups` − groups handed out − ready − pending, ≥ 0: ask for no
        more, and announce what was dispatched. Not to dispatch is better than to drop what is slow, which is
        what is long.

        Raises:
            ValueError: `max_staleness` or `groups` is None.
        """
        if self.max_staleness is None or self.groups is None:
            raise ValueError("room() needs both max_staleness and groups")
        with self._turn:
            most = (self.max_staleness + self.version + 1) * self.groups
            return max(0, most - self._state.emitted - self.ready - self.pending)

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
        with self._turn, labels_in_errors(batch, [self.group_key, self.rollout_key]):
            flat = enter_rows(batch, [self.group_key, self.rollout_key], reader=type(self).__name__)
            self._chunks.check(flat)
            now, state = time.monotonic(), self._state
            arrival = torch.empty(0, dtype=torch.int64)
            if flat.shape.numel():
                new = read_arriving(flat, self._reads, state.groups, state.received)
                admission = admit(state, new, now, self.group_size, self.segment_key is not None)
                enforce([*admission.rules, *repeat_rules(new, admission.leaves, self._limits)])
                state, arrival = admission.state, new.rows.arrival
            state, asked = settle(state._replace(puts=state.puts + 1), self._limits, now)
            state = count_idle(state, self._state.whole, self._limits)
            stays = is_among(arrival, state.rows.arrival)
            self._chunks.add(arrival[stays], flat, stays.nonzero().flatten())
            self._commit(state, asked)

    def stalled(self, why: str) -> StalledError:
        """The error that says which groups wait longest, and what became of all rows."""
        with self._turn:
            return describe_stall(why, self._state, self._limits)

    def _settle(self, state: Stream, now: float) -> None:
        """Settle groups without a put."""
        state, asked = settle(state, self._limits, now)
        self._commit(state._replace(idle=0) if state.whole > self._state.whole else state, asked)

    def _commit(self, state: Stream, asked: list[tuple[int, int]]) -> None:
        if len(state.rows.slot) < sum(len(chunk.arrival) for chunk in self._chunks.chunks):
            self._chunks.keep(state.rows.arrival)
        self._state = state
        for group, missing in asked:
            self.refill(group, missing)  # type: ignore[misc]  # it was given, or nobody is asked

    # -- groups go out ------------------------------------------------------------------------------

    def take(self, n: int | None = None) -> TensorDictBase | None:
        """Hand out whole groups: `n` of them, else `groups`, else all there are; None while there are fewer.

        With partitions they are of one, that in which as many became whole first.

        Raises:
            ValueError: `n` is no integer ≥ 1.
            IncompleteGroupsError: a group is too old by its seconds, under ``on_timeout="raise"``.
        """
        return self._take(at_least("n", n, 1) or self.groups)

    def take_rest(self) -> TensorDictBase | None:
        """Hand out all whole groups of a partition, though they be fewer than `groups`; None if none is.

        Raises:
            IncompleteGroupsError: as :meth:`take`.
        """
        return self._take(None)

    def _take(self, wanted: int | None) -> TensorDictBase | None:
        with self._turn:
            if self.timeout_seconds is not None:
                self._settle(self._state, time.monotonic())
            if self.max_staleness is not None and self.on_stale == "drop":
                self._commit(drop_older(self._state, self.version - self.max_staleness), [])
            chosen = choose(self._state.groups, wanted)
            if chosen is None:
                return None
            rows = in_order(self._state.rows, chosen)
            batch = self._write(self._chunks.gather(rows.arrival), rows)
            if self.max_staleness is not None and self.on_stale == "mask":
                fresh = rows.version >= self.version - self.max_staleness
                silence(batch, fresh.to(device_of(batch)), self.loss_mask_key, self.log_prob_key)
            which = torch.zeros_like(self._state.groups.ready).index_fill(0, chosen, True)
            gone = which[self._state.rows.slot]
            state = let_go(self._state, which, gone, gone)
            self._commit(state._replace(emitted=state.emitted + len(chosen)), [])
            return batch

    def _write(self, batch: TensorDictBase, rows: HeldRows) -> TensorDictBase:
        """Say how many rollouts each group has, and how many were dispatched."""
        have = torch.zeros_like(self._state.groups.group)
        have = have.index_add(0, rows.slot, is_first(rows.first).long())
        device = device_of(batch)
        batch.set(self.expected_key, have[rows.slot].to(device))
        batch.set(DISPATCHED, self._state.groups.dispatched[rows.slot].to(device))
        return batch

    def give_up(self) -> int:
        """Let go of all that is held, counted as ``unfinished``, and return how many rows that were."""
        with self._turn:
            rows, count = self.held, self._limits.tally(self._state)
            self._commit(drop_all(self._state, count.ended | count.failed), [])
            return rows

    # -- what was dispatched ------------------------------------------------------------------------

    def announce(self, draws: TensorDictBase) -> None:
        """Say which groups were dispatched: their time runs from now, and they take :meth:`room`.

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
            if draws.shape.numel() == 0:
                return
            came = read_dispatch(draws, self._reads, self._state.groups)
            enforce(announce_rules(self._state.groups, self._state.closed_groups, came, self.group_size))
            now = time.monotonic()
            self._settle(open_groups(self._state, came, now), now)

    # -- state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that is held and known, as dicts, tensors and lists, which ``torch.load`` reads with
        ``weights_only=True``.
        """
        with self._turn:
            state = self._state.to_plain(time.monotonic())
            return {
                "options": self._identity(),
                "version": self.version,
                "state": state,
                "chunks": self._chunks.to_plain(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: it is of an assembler that reads rows in another way.
        """
        if state["options"] != self._identity():
            raise ValueError(
                f"the state must be of an assembler that reads rows as this one does ({self._identity()}); "
                f"it is of one with {state['options']}"
            )
        with self._turn:
            stream, chunks = Stream.from_plain(state["state"], time.monotonic()), state["chunks"]
            self._chunks, self._state, self.version = Chunks.from_plain(chunks), stream, state["version"]

    def _identity(self) -> dict[str, Any]:
        """The options by which rows that are held were read."""
        return self._reads._asdict()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_turn"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _turn=threading.RLock())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"
