"""Limit the dispatch of prompts to what can be trained in time, and go on after a restart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from headrace.transforms.table import as_ids, count_of, labels_of
from headrace.transforms.table.options import takes_options

from .assembling import check_patience, wait_for


@takes_options
def paced(draws: Any, assembler: Any, *, patience: float | None = None) -> Iterator[TensorDictBase]:
    """Yield draws while :meth:`GroupAssembler.capacity` allows, and announce their groups.

    Use it in the thread, process or actor that dispatches prompts. It waits until groups become whole or the
    policy version increases. A draw waits until the capacity is enough for all its groups. If no group is
    pending, waiting cannot help, and the draw is yielded in parts. In the thread that trains, set `patience`:
    nothing else would increase the capacity there.

    With :func:`informative` after the assembler, groups without information do not use capacity. So the loop
    continues for any share of such groups below one.

    If the assembler continues from a journal or a state, the rollouts that were lost with the earlier process
    are yielded first (:meth:`GroupAssembler.unfinished`). Groups that the assembler knows are not yielded.

    Args:
        draws: a :class:`RepeatSampler`, or the output of ``draws()`` of a sampler or StampIds. Nothing of a
            RepeatSampler needs to be saved: after a restart it continues at the first group that was never
            announced.
        assembler: :class:`GroupAssembler` or :class:`RayAssembler`.
        patience: seconds to wait for capacity; None: forever.

    Raises:
        StalledError: while iterating: there was no capacity in time.
        BatchError: while iterating: :meth:`GroupAssembler.announce` raises it.
        ValueError: `patience` is not > 0; or, while iterating, :meth:`GroupAssembler.capacity` raises it.

    Example:
        >>> from headrace.pipeline import RepeatSampler
        >>> from headrace.transforms import GroupAssembler
        >>> assembler = GroupAssembler(groups=2, max_staleness=3, steps_ahead=1)
        >>> draws = paced(RepeatSampler(9, group_size=8, prompts_per_batch=3).draws(), assembler)
        >>> next(draws)["group_id"].unique().tolist(), assembler.capacity()
        ([0, 1, 2], 1)
    """
    check_patience(patience)
    return Pacing(draws, assembler).wait(patience)


class Pacing:
    """Decide what may be dispatched now.

    Args:
        draws: as for :func:`paced`.
        assembler: gets the ids of the groups that are dispatched.
        over: returns True if no further draw is wanted; called before each draw.
    """

    def __init__(self, draws: Any, assembler: Any, over: Callable[[], bool] = lambda: False):
        self.assembler, self.ended, self.wanted = assembler, False, 0
        """The assembler; whether all draws are dispatched; the number of groups in the draw that waits."""
        self._source, self._over = draws, over
        self._draws: Iterator[TensorDictBase] | None = None
        self._lost: list[TensorDictBase] = []
        self._rest: Any = None
        self._skips = False
        self._lock = threading.Lock()  # several threads may dispatch

    def now(self) -> TensorDictBase | None:
        """Announce and return the next draws. None: there is no capacity, or no further draw."""
        with self._lock:
            return self._now()

    def wait(self, patience: float | None) -> Iterator[TensorDictBase]:
        """Yield the draws of :func:`paced`."""
        while (draws := wait_for(self.now, lambda: self.ended, patience)) is not None:
            yield draws
        if not self.ended:
            why = f"No capacity to dispatch {count_of(self.wanted, 'group')} for {patience:g} s"
            raise self.assembler.stalled(why)

    @property
    def begun(self) -> bool:
        """Whether draws were requested before."""
        return self._draws is not None

    def _now(self) -> TensorDictBase | None:
        if self._draws is None:
            self._draws = self._begin()
        if self._lost:
            return self._lost.pop(0)
        draw, self._rest = self._rest if self._rest is not None else self._next(), None
        if draw is None or not len(draw):
            return draw
        assembler = self.assembler
        key = assembler.group_key
        ids = as_ids(labels_of(draw, key) or draw.get(key), "group_id")
        groups = list(dict.fromkeys(ids.tolist()))
        self.wanted, largest = len(groups), int(ids.unique(return_counts=True)[1].max())
        idle = assembler.pending == 0  # read before the capacity, which can only grow meanwhile
        room = assembler.capacity(largest)
        if room < len(groups):
            if not (idle and room > 0):
                self._rest = draw
                return None
            now = torch.isin(ids, torch.tensor(groups[:room], device=ids.device))
            draw, self._rest = draw[now], draw[~now]
        assembler.announce(draw)
        return draw

    def _begin(self) -> Iterator[TensorDictBase]:
        """Ask for the rollouts that an earlier process lost, and return an iterator over the draws."""
        self._lost, self._skips = self.assembler.unfinished(), self.assembler.restored
        if not hasattr(self._source, "draws"):
            return iter(self._source)
        if self._skips:
            self._source.go_on(self._is_known)
        return self._source.draws()

    def _is_known(self, group: int) -> bool:
        draw = TensorDict({self.assembler.group_key: [group]}, batch_size=[1])
        return not len(self.assembler.never_announced(draw))

    def _next(self) -> TensorDictBase | None:
        """The next draw with groups that the assembler does not know. None: no draw is left."""
        while not self.ended:
            draw = None if self._over() else next(self._draws, None)  # type: ignore[arg-type]  # it has begun
            if draw is None:
                self.ended = True
            elif self._skips and len(draw):
                every, draw = len(draw), self.assembler.never_announced(draw)
                self._skips = len(draw) < every  # groups were announced in the order of the draws
                if len(draw):
                    return draw
            else:
                return draw
        return None
