"""Dynamic sampling: ask for more prompts until enough groups have something to teach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms import (
    BatchError,
    CompletenessGate,
    FanOutCollapse,
    RewardsVary,
    SampleFilter,
    StalledError,
)
from headrace.transforms.door import enter_rows
from headrace.transforms.errors import listing
from headrace.transforms.ids import any_by, as_ids, first_row, is_first, number_of
from headrace.transforms.options import at_least, nested_key, one_of
from headrace.transforms.rows import device_of, shallow_copy
from headrace.transforms.schema import IN_LOSS, ROW, has_key, read_column
from headrace.transforms.stream.chunks import Chunks
from headrace.transforms.stream.closed import Closed, close_ids, is_closed

from .over_source import OverSource

OnShort = Literal["raise", "yield"]
READER = "informative()"
Stages = Sequence[Callable[[TensorDictBase], TensorDictBase]]


def informative(
    source: Iterable[TensorDictBase],
    *,
    groups: int,
    stages: Stages | None = None,
    max_batches: int = 16,
    on_short: OnShort = "raise",
    group_key: NestedKey = "group_id",
) -> Informative:
    """Iterate over batches of so many informative groups, whatever share of a source's groups are.

    A group is informative that `stages` leave a row of in the loss; its rows come out as they came in, all of
    them. The source is asked for more until there are enough. What is over waits for the next batch.

    This is the dynamic sampling of DAPO (arXiv:2503.14476, section 3.2) as a loop. What is not iteration goes
    to the source, and ``state_dict`` has the groups that wait, and the source's state.

    Args:
        source: yields batches of whole groups, as :func:`assembled` does, or a collector of whole groups.
        groups: informative groups in a batch, ≥ 1.
        stages: transforms that decide, in order: those of the recipe up to its filter, say
            ``[pipeline.stages[name] for name in ("gate", "collapse", "filter")]``. None: complete groups
            whose rewards differ, where the rows of a rollout share its reward.
        max_batches: how often the source is asked for one batch, ≥ 1.
        on_short: where that was not enough: ``raise``, or ``yield`` what there is, if anything is.
        group_key: (N,) or (N, 1) int ≥ 0.

    Raises:
        StalledError: when iterated: `max_batches` did not bring enough.
        BatchError: when iterated: a group came in two batches; columns differ between batches; as `stages`.
        ValueError: an option with a wrong value.

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
    at_least("groups", groups, 1, required=True)
    at_least("max_batches", max_batches, 1, required=True)
    one_of("on_short", on_short, get_args(OnShort))
    return Informative(
        source, stages, nested_key(group_key), groups=groups, max_batches=max_batches, on_short=on_short
    )


class Informative(OverSource):
    """What :func:`informative` returns.

    Attributes:
        counts: rows that left, by reason: ``uninformative``.
        seen, found: groups that came, and those of them that were informative.
    """

    def __init__(
        self,
        source: Iterable[TensorDictBase],
        stages: Stages,
        group_key: NestedKey,
        *,
        groups: int,
        max_batches: int,
        on_short: OnShort,
    ):
        super().__init__(source)
        self.stages, self.group_key = stages, group_key
        self.groups, self.max_batches, self.on_short = groups, max_batches, on_short
        self.counts = {"uninformative": 0}
        self.seen = self.found = 0
        self._rows, self._came = Chunks(), 0
        self._closed: Closed = {}  # groups that came
        self._group = self._arrival = torch.empty(0, dtype=torch.int64)  # of the rows that wait

    @property
    def ready(self) -> int:
        """Informative groups that wait."""
        return len(self._group.unique())

    @property
    def held(self) -> int:
        """Rows of them."""
        return len(self._group)

    def __iter__(self) -> Iterator[TensorDictBase]:
        batches = iter(self.source)
        while (more := self._ask(batches)) or self.ready:
            if self.ready < self.groups and more:
                self._stalled()
            yield self._take()

    def _ask(self, batches: Iterator[TensorDictBase]) -> bool:
        """Ask until there are enough, so often and no more; False: the source has ended."""
        self._asked, self._before = 0, (self.seen, self.found)
        while self.ready < self.groups and self._asked < self.max_batches:
            batch = next(batches, _END)
            if batch is _END:
                return False
            self._asked += 1
            if batch is not None:
                self._add(batch)
        return True

    def _stalled(self) -> None:
        """What was brought is less than a batch.

        Raises:
            StalledError: that is an error, or it is nothing.
        """
        if self.on_short == "yield" and self.ready:
            return
        seen, found = self.seen - self._before[0], self.found - self._before[1]
        raise StalledError(
            f"{self._asked} batches have brought {seen} groups, of which {found} are informative; "
            f"{self.groups} are wanted, and {self.ready} wait. Are the prompts too easy, or too hard? Raise "
            "max_batches, or set on_short='yield'"
        )

    def _add(self, batch: TensorDictBase) -> None:
        flat = enter_rows(batch, [self.group_key], reader=READER)
        if len(flat) == 0:
            return
        group = as_ids(read_column(flat, self.group_key, reader=READER, option="group_key"), "group_id").cpu()
        nowhere = torch.zeros_like(group)  # groups have no partitions here
        torn = group[is_closed(self._closed, nowhere, group)]
        if len(torn):
            raise BatchError(
                f"{READER} takes batches of whole groups; in two batches came "
                f"{listing(map(str, torn.unique().tolist()))}. Put assembled() between it and the collector"
            )
        self._rows.check(flat)
        first = first_row(group)
        stays = any_by(first, self._in_loss(flat))
        arrival = self._came + stays.nonzero().flatten()
        self._rows.add(arrival, flat, stays.nonzero().flatten())
        self._group, self._arrival = (
            torch.cat([self._group, group[stays]]),
            torch.cat([self._arrival, arrival]),
        )
        self._came += len(flat)
        self._closed = close_ids(self._closed, nowhere, group)
        self.counts["uninformative"] += int((~stays).sum())
        self.seen += int(is_first(first).sum())
        self.found += int((is_first(first) & stays).sum())

    def _in_loss(self, flat: TensorDictBase) -> Tensor:
        """(N,) bool, on the CPU: the stages leave the row in the loss."""
        batch = shallow_copy(flat)
        batch.set(ROW, torch.arange(len(flat), device=device_of(flat)))
        for stage in self.stages:
            batch = stage(batch)
        found = torch.zeros(len(flat), dtype=torch.bool)
        if len(batch):
            rows = batch.get(ROW).cpu()
            found[rows] = batch.get(IN_LOSS).cpu() if has_key(batch, IN_LOSS) else True
        return found

    def _take(self) -> TensorDictBase:
        """Hand out the first groups that wait."""
        goes = number_of(first_row(self._group)) < self.groups
        batch = self._rows.gather(self._arrival[goes])
        self._group, self._arrival = self._group[~goes], self._arrival[~goes]
        self._rows.keep(self._arrival)
        return batch

    def own_state(self) -> dict[str, Any]:
        """The groups that wait, and the counts."""
        rows = {"rows": self._rows.to_plain(), "group": self._group, "arrival": self._arrival}
        return rows | {
            "closed": dict(self._closed),
            "came": self._came,
            "counts": dict(self.counts),
            "seen": self.seen,
            "found": self.found,
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`own_state`."""
        self._rows, self._group = Chunks.from_plain(state["rows"]), state["group"]
        self._arrival, self._came, self._closed = state["arrival"], state["came"], dict(state["closed"])
        self.counts, self.seen, self.found = dict(state["counts"]), state["seen"], state["found"]


_END: Any = object()
