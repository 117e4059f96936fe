"""A seeded order of the rows, cut into minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import BatchTransform, at_least, nested_key, one_of, written_column
from .columns import MINIBATCH
from .errors import BatchError
from .ids import as_ids, first_row
from .rows import device_of, take_rows
from .rules import explain, set_rule
from .seeds import stream_seed
from .units import Unit, unit_ids, unit_keys

Remainder = Literal["raise", "drop", "uneven"]
REMAINDERS = ("raise", "drop", "uneven")


class Plan(NamedTuple):
    """Which row goes where."""

    order: Tensor
    """(M,) int64, row numbers in training order."""
    sizes: list[int]
    """Rows of each minibatch; they add up to M."""
    dropped: Tensor
    """(N − M,) int64, rows in no minibatch."""


def shuffle_split(
    rows: int,
    unit_id: Tensor | Sequence[int] | None = None,
    *,
    minibatches: int | None = None,
    minibatch_size: int | None = None,
    remainder: Remainder = "raise",
    shuffle: bool = True,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Plan:
    """Put rows into a random order and cut it, keeping the rows of a unit together.

    A unit is a row, or all rows that share a `unit_id`, which stay in row order. With U units, K
    minibatches get ⌊U/K⌋ or ⌈U/K⌉ units each; minibatches of n units are U/n many. No device read without
    `unit_id`, a few with it.

    Args:
        rows: N.
        unit_id: (N,) integers ≥ 0, which rows stay together; None: each row is a unit.
        minibatches: K ≥ 1; give this or `minibatch_size`.
        minibatch_size: n ≥ 1 units.
        remainder: what happens to units over, when U is no multiple of K or n: ``raise``; ``drop`` the last
            of the order; ``uneven`` minibatches, which differ by one unit (K given) or end in a short one.
        shuffle: False keeps the order of first rows.
        generator: source of the order, on `device`.
        device: where the order is drawn; that of `unit_id` where there is one.

    Raises:
        BatchError: there is a remainder, under ``raise``; a unit_id is missing or negative.

    Example:
        >>> shuffle_split(5, minibatches=2, remainder="uneven", shuffle=False).sizes
        [3, 2]
    """
    _check_options(minibatches, minibatch_size, remainder)
    units = None if unit_id is None else as_ids(unit_id, "unit_id", device=torch.device(device or "cpu"))
    if units is not None:
        if len(units) != rows:
            raise BatchError(f"every row needs a unit_id; got {len(units)} for {rows} rows")
        explain([set_rule(units, "unit_id", "an unset id would tie strangers together")])
        device = units.device
    if shuffle:
        key = torch.randperm(rows, generator=generator, device=device)
    else:
        key = torch.arange(rows, device=device)
    if units is None:
        bounds = _cut(rows, minibatches, minibatch_size, remainder)
        # `key` is as good a permutation as its inverse.
        return Plan(key[: bounds[-1]], _differences(bounds), key[bounds[-1] :])
    # The rows of a unit share its first row's key, so a stable sort puts them together.
    ordered, order = key.index_select(0, first_row(units)).sort(stable=True)
    starts = torch.cat([ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).nonzero().flatten() + 1])
    cuts = _cut(len(starts), minibatches, minibatch_size, remainder)
    edges = torch.cat([starts, starts.new_full((1,), rows)])
    bounds = edges[torch.tensor(cuts, device=edges.device)].tolist()
    return Plan(order[: bounds[-1]], _differences(bounds), order[bounds[-1] :])


def _check_options(minibatches: int | None, minibatch_size: int | None, remainder: str) -> None:
    if (minibatches is None) == (minibatch_size is None):
        raise ValueError(
            f"give one of minibatches and minibatch_size; got {minibatches=} and {minibatch_size=}"
        )
    at_least("minibatches", minibatches, 1)
    at_least("minibatch_size", minibatch_size, 1)
    one_of("remainder", remainder, REMAINDERS)


def _cut(units: int, minibatches: int | None, size: int | None, remainder: str) -> list[int]:
    """The unit numbers at which minibatches begin, and the end of the last."""
    over = units % (minibatches or size or 1)
    if over and remainder == "raise":
        wanted = f"{minibatches} minibatches" if minibatches else f"minibatches of {size}"
        raise BatchError(
            f"{units} units do not make {wanted}: {over} over. Set remainder='uneven' to train them in "
            "minibatches of different size, or 'drop' to leave them out"
        )
    if remainder == "drop":
        units -= over
    if minibatches is not None:
        count = min(minibatches, units)  # none is empty
        small, larger = divmod(units, count) if count else (0, 0)
        return [i * small + min(i, larger) for i in range(count + 1)]
    return [*range(0, units, size or 1), units]


def _differences(bounds: list[int]) -> list[int]:
    return [b - a for a, b in pairwise(bounds)]


class ShuffleSplit(BatchTransform):
    """Order the rows at random and number their minibatches (:func:`shuffle_split`).

    One TensorDict in, one out: rows in training order with a ``("headrace", "minibatch")`` column;
    :func:`split_minibatches` yields the views. :meth:`plan` and :meth:`gather` copy one minibatch at a time.
    The n-th call's order follows from `seed` and n alone, so ``state_dict`` holds one number and a restored
    run goes on with the same orders. The order is drawn on the batch's device.

    Reads `rollout_key` or `group_key` by `unit`. Writes ``("headrace", "minibatch")``; its verdict is 1
    ``remainder``.

    Args:
        minibatches: K ≥ 1; give this or `minibatch_size`.
        minibatch_size: n ≥ 1 units.
        unit: ``sample``, ``rollout`` or ``group`` stays together.
        remainder: ``raise``, ``drop``, ``uneven``.
        shuffle: False keeps the order of first rows.
        seed: of the order.
        rollout_key: (N,) or (N, 1) int.
        group_key: (N,) or (N, 1) int.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: as :func:`shuffle_split`.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"x": torch.arange(4)}, batch_size=[4])
        >>> [len(part) for part in split_minibatches(ShuffleSplit(minibatches=2)(td))]
        [2, 2]
    """

    reasons = ("remainder",)

    def __init__(
        self,
        *,
        minibatches: int | None = None,
        minibatch_size: int | None = None,
        unit: Unit = "sample",
        remainder: Remainder = "raise",
        shuffle: bool = True,
        seed: int = 0,
        rollout_key: NestedKey = "rollout_id",
        group_key: NestedKey = "group_id",
    ):
        _check_options(minibatches, minibatch_size, remainder)
        keys = nested_key(rollout_key), nested_key(group_key)
        super().__init__(unit_keys(unit, *keys), [MINIBATCH])
        self.rollout_key, self.group_key = keys
        self.minibatches, self.minibatch_size, self.remainder = minibatches, minibatch_size, remainder
        self.unit, self.shuffle, self.seed = unit, one_of("shuffle", shuffle, (True, False)), seed
        self.calls = 0

    def plan(self, batch: TensorDictBase) -> Plan:
        """Draw the next order for a batch ``[N]``, without moving a row."""
        ids = unit_ids(self, self.unit, batch)
        device = device_of(batch) if ids is None else ids.device
        generator = torch.Generator(device=device).manual_seed(stream_seed("split", self.seed, self.calls))
        plan = shuffle_split(
            len(batch),
            ids,
            minibatches=self.minibatches,
            minibatch_size=self.minibatch_size,
            remainder=self.remainder,
            shuffle=self.shuffle,
            generator=generator,
            device=device,
        )
        self.calls += 1
        self.verdict = torch.zeros(len(batch), dtype=torch.int8, device=device)
        self.verdict.index_fill_(0, plan.dropped, 1)
        self.measured = {"minibatches": float(len(plan.sizes)), "dropped": float(len(plan.dropped))}
        return plan

    def apply(self, batch: TensorDictBase) -> TensorDictBase:
        """Gather all rows in order."""
        plan = self.plan(batch)
        numbers = torch.empty_like(plan.order)
        for number, part in enumerate(numbers.split(plan.sizes)):
            part.fill_(number)
        return take_rows(batch, plan.order).set(MINIBATCH, numbers)

    def gather(self, batch: TensorDictBase, plan: Plan) -> Iterator[TensorDictBase]:
        """Yield the minibatches of a plan, one in memory at a time."""
        for number, rows in enumerate(plan.order.split(plan.sizes)):
            yield take_rows(batch, rows).set(MINIBATCH, torch.full_like(rows, number))

    def get_extra_state(self) -> dict[str, int]:
        """What ``state_dict`` saves: how many orders were drawn."""
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Go on after as many orders."""
        self.calls = state["calls"]


def split_minibatches(batch: TensorDictBase) -> Iterator[TensorDictBase]:
    """Yield the minibatches of a batch that :class:`ShuffleSplit` ordered, as views. Reads their sizes.

    Raises:
        MissingKeyError: the batch has no ``("headrace", "minibatch")`` column.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = ShuffleSplit(minibatches=3)(TensorDict({"x": torch.arange(6)}, batch_size=[6]))
        >>> [part["x"].shape[0] for part in split_minibatches(batch)]
        [2, 2, 2]
    """
    if len(batch) == 0:
        return
    numbers = written_column(batch, MINIBATCH, reader="split_minibatches", writer="ShuffleSplit")
    start = 0
    for size in torch.unique_consecutive(numbers, return_counts=True)[1].tolist():
        yield batch[start : start + size]
        start += size
