"""Dynamic sampling: read groups until enough of them are informative."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase

from headrace.transforms import (
    BatchError,
    CompletenessGate,
    FanOutCollapse,
    GroupAssembler,
    RewardsVary,
    SampleFilter,
    StalledError,
)
from headrace.transforms.carry import from_plain, join_rows, to_plain
from headrace.transforms.streams import Intervals, check_kinds, kinds_of
from headrace.transforms.table import as_ids, enter_rows, listing
from headrace.transforms.table.options import at_least, nested_key, takes_options
from headrace.transforms.table.schema import IN_LOSS, ROW, has_key, read_column
from headrace.transforms.table.tensordicts import device_of, shallow_copy, take_rows

from .assembling import OverSource
from .on_ray import RayAssembler

OnShort = Literal["raise", "yield"]
READER = "informative()"
Stages = Sequence[Callable[[TensorDictBase], TensorDictBase]]


@takes_options
def informative(
    source: Iterable[TensorDictBase],
    *,
    groups: int,
    stages: Stages | None = None,
    max_batches: int = 16,
    on_short: OnShort = "raise",
    group_key: NestedKey = "group_id",
    assembler: GroupAssembler | RayAssembler | None = None,
) -> Informative:
    """Iterate over batches with a fixed number of informative groups.

    A group is informative if `stages` leave at least one of its rows in the loss. All its rows are yielded
    unchanged. The source is read until there are enough such groups. Leftover groups wait for the next batch.

    This is the dynamic sampling of DAPO (arXiv:2503.14476, section 3.2) as a loop. Other attributes are those
    of the source. ``state_dict`` holds the waiting groups and the state of the source.

    Args:
        source: yields batches of whole groups, such as :func:`assembled`, or is a collector of whole groups.
            From an assembler, single groups are taken as they become whole, and only as many as needed, so
            that none waits here. If the assembler has `max_staleness`, both need the same `groups`.
        groups: informative groups in a batch, ≥ 1.
        stages: transforms that filter, in order, such as the stages of the recipe up to its filter:
            ``[pipeline.stages[name] for name in ("gate", "collapse", "filter")]``. None: keep complete groups
            whose rewards differ; all rows of a rollout must have its reward.
        max_batches: largest number of batches that are read for one batch, ≥ 1. When single groups are
            taken, the limit is `max_batches` × `groups` groups.
        on_short: what to do when the limit is reached: ``raise``, or ``yield`` the groups that were found, if
            any.
        group_key: (N,) or (N, 1) int ≥ 0.
        assembler: is told how many groups are not informative, so that these use no capacity
            (:func:`paced`). None: the assembler of the source, if that is `assembled(…)` or a RayAssembler's
            `batches(…)`.

    Raises:
        StalledError: while iterating: `max_batches` did not contain enough informative groups.
        BatchError: while iterating: a group is in two batches; columns differ between batches; or `stages`
            raised.
        ValueError: an option has an invalid value; or an assembler with `max_staleness` has other `groups`.

    Example:
        >>> from tensordict import TensorDict
        >>> ids, rewards = torch.arange(8), [0.0, 0, 0, 1, 1, 1, 1, 0]
        >>> rows = {"group_id": ids // 2, "rollout_id": ids, ("next", "reward"): torch.tensor(rewards)}
        >>> batch = TensorDict({**rows, "expected_rollouts": torch.full((8,), 2)}, batch_size=[8])
        >>> [some["group_id"].tolist() for some in informative(batch.split(2), groups=2)]
        [[1, 1, 3, 3]]
    """
    if stages is None:
        varied = SampleFilter(criterion=RewardsVary(), action="drop")
        stages = [CompletenessGate(), FanOutCollapse(), varied]
    at_least("groups", groups, 1)
    at_least("max_batches", max_batches, 1)
    assembler = assembler or getattr(source, "assembler", None)
    paces = assembler is not None and assembler.max_staleness is not None
    if assembler is not None and paces and assembler.groups not in (None, groups):
        raise ValueError(
            "informative() and an assembler with max_staleness need the same number of groups per step, "
            f"because capacity() uses it; got groups={groups} and GroupAssembler(groups={assembler.groups})"
        )
    return Informative(source, stages, nested_key(group_key), groups, max_batches, on_short, assembler)


@dataclass(eq=False, repr=False)
class Informative(OverSource):
    """The iterator that :func:`informative` returns.

    Attributes:
        counts: number of rows that left, by reason: ``uninformative``.
        seen, found: number of groups that were read, and number of informative ones among them.
    """

    source: Iterable[TensorDictBase]
    stages: Stages
    group_key: NestedKey
    groups: int
    max_batches: int
    on_short: OnShort
    assembler: Any = None

    def __post_init__(self) -> None:
        self.counts = {"uninformative": 0}
        self.seen = self.found = 0
        self._waiting: dict[int, TensorDictBase] = {}  # the rows of each group
        self._closed = Intervals()  # ids of groups that were read
        self._asked, self._before = 0, (0, 0)  # groups since the last batch; `seen` and `found` until then

    @property
    def ready(self) -> int:
        """Number of informative groups that wait."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """Number of rows of the waiting groups."""
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[TensorDictBase]:
        batches = iter(self.source)
        while (more := self._ask(batches)) or self.ready:
            if self.ready < self.groups and more and not (self.on_short == "yield" and self.ready):
                raise self._short()
            yield self.take()

    def take_from(self, assembler: GroupAssembler, *, last: bool) -> TensorDictBase | None:
        """The next batch of an assembler, if it has enough informative groups; else None.

        Args:
            assembler: gives only as many groups as are needed.
            last: True if no further group becomes whole. Then the remaining groups are a batch.

        Raises:
            StalledError: `max_batches` did not contain enough informative groups.
        """
        while self.ready < self.groups:
            assembler.want(self.groups - self.ready)
            batch = assembler.take()
            if batch is None and last:
                batch = assembler.take_rest()
            if batch is None:
                break
            before = self.seen
            self.judge(batch)
            self._asked += self.seen - before
            if self.ready < self.groups and self._asked >= self.max_batches * self.groups:
                raise self._short()
        if self.ready < self.groups and not (last and self.ready):
            return None
        self._asked, self._before = 0, (self.seen, self.found)
        return self.take()

    def _short(self) -> StalledError:
        seen, found = self.seen - self._before[0], self.found - self._before[1]
        asked = -(-self._asked // self.groups)
        return StalledError(
            f"{asked} batches had {seen} groups, {found} of them informative; a batch needs "
            f"{self.groups}, and {self.ready} wait. Are the prompts too easy or too hard? Raise "
            "max_batches, or set on_short='yield'"
        )

    def _ask(self, batches: Iterator[TensorDictBase]) -> bool:
        """Read until there are enough groups or the limit is reached. Returns False if the source ended."""
        self._asked, self._before = 0, (self.seen, self.found)  # counted in groups
        while self.ready < self.groups and self._asked < self.max_batches * self.groups:
            seen = self.seen
            if by_group := self.assembler is not None:
                self.assembler.want(self.groups - self.ready)
            batch = next(batches, _END)
            if batch is _END:
                return False
            if batch is not None:
                self.judge(batch)
            self._asked += self.seen - seen if by_group and batch is not None else self.groups
        return True

    def judge(self, batch: TensorDictBase) -> None:
        """Hold the informative groups of a batch, and tell the assembler the number of the others."""
        before = self.seen - self.found
        self._add(batch)
        if self.assembler is not None:
            self.assembler.reject(self.seen - self.found - before)

    def take(self) -> TensorDictBase:
        """Join the first waiting groups, at most `groups` of them."""
        return join_rows([self._waiting.pop(group) for group in list(self._waiting)[: self.groups]], "groups")

    def _add(self, batch: TensorDictBase) -> None:
        flat = enter_rows(batch, [self.group_key], reader=READER)
        if len(flat) == 0:
            return
        groups = self._groups_of(flat)
        if again := {group for group in groups if group in self._closed}:
            raise BatchError(
                f"{READER} needs batches of whole groups; these group_ids are in two batches: "
                f"{listing(map(str, sorted(again)))}. Put assembled() between it and the collector"
            )
        for held in list(self._waiting.values())[:1]:
            check_kinds(kinds_of(held), kinds_of(flat))
        judged = shallow_copy(flat)
        judged.set(ROW, torch.arange(len(flat), device=device_of(flat)))
        for stage in self.stages:
            judged = stage(judged)
        rows = judged.get(ROW) if len(judged) else torch.empty(0, dtype=torch.int64)
        if len(judged) and has_key(judged, IN_LOSS):
            rows = rows[judged.get(IN_LOSS)]
        before, informs = self.held, {groups[row] for row in rows.tolist()}
        self._hold(flat, groups, informs)
        for group in set(groups):
            self._closed.add(group)
        self.counts["uninformative"] += len(flat) - (self.held - before)
        self.seen += len(set(groups))
        self.found += len(informs)

    def _groups_of(self, rows: TensorDictBase) -> list[int]:
        column = read_column(rows, self.group_key, reader=READER, option="group_key")
        return as_ids(column, "group_id").tolist()

    def _hold(self, rows: TensorDictBase, groups: list[int], informs: Collection[int]) -> None:
        """Copy the rows of informative groups, because collectors reuse their memory."""
        of: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            of.setdefault(group, []).append(row)
        for group in of:
            if group in informs:
                at = torch.tensor(of[group])
                self._waiting[group] = take_rows(rows, at.to(device_of(rows)), on_cpu=at, shared=True).clone()

    def own_state(self) -> dict[str, Any]:
        """The waiting groups and the counts."""
        waiting = list(self._waiting.values())
        return {
            "rows": to_plain(join_rows(waiting, "groups") if waiting else None),
            "closed": self._closed.to_tensor(),
            "counts": dict(self.counts),
            "seen": self.seen,
            "found": self.found,
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore the output of :meth:`own_state`."""
        self._waiting, rows = {}, from_plain(state["rows"])
        if rows is not None:
            groups = self._groups_of(rows)
            self._hold(rows, groups, set(groups))
        self._closed = Intervals(state["closed"])
        self.counts, self.seen, self.found = dict(state["counts"]), state["seen"], state["found"]


_END: Any = object()
