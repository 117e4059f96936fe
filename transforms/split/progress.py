"""How far the minibatches of a batch have been taken, and by what an interrupted batch is known again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from headrace.transforms.checks import few
from headrace.transforms.errors import BatchError
from headrace.transforms.rows import flat_rows

from .checkpoint import InterruptedBatch, SplitState

CLOSE = 1e-4  # rewards that were shaped on another device differ in their last digits


class KnownBy(NamedTuple):
    """What a batch and its cut are known by, when it comes again."""

    rows: int
    options: Mapping[str, Any]
    """What the cut depends on besides the rows, plain values by name."""
    columns: Mapping[str, Tensor]
    """(N,) int64, or (N, ...) float64, by name."""


def identifying_columns(batch: TensorDictBase, reward_key: NestedKey) -> dict[str, Tensor]:
    """Copies of a batch's columns of one integer a row, such as ids, and of the reward.

    Integers are the same wherever they are computed again; an advantage is not, and says less.

    Example:
        >>> from tensordict import TensorDict
        >>> rows = TensorDict({"id": torch.tensor([7, 8]), "advantage": torch.ones(2)}, batch_size=[2])
        >>> identifying_columns(rows, "reward")
        {'id': tensor([7, 8])}
    """
    found = {}
    keys = batch.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    for key in sorted(keys, key=str):
        if isinstance(key, tuple) and key[0] == "headrace":
            continue
        column = _numbers_by_row(batch, key, wide=key == reward_key)
        if column is None or (column.is_floating_point() and key != reward_key):
            continue
        dtype = torch.float64 if key == reward_key else torch.int64
        # Copies: collectors use their memory again.
        found[str(key)] = (column.detach() if column.requires_grad else column).to(dtype, copy=True)
    return found


class Progress:
    """How far the minibatches of one batch have been taken.

    A minibatch is taken when it is handed out. Whether it was trained, and why an iterator was closed, by
    ``break`` or by an exception, cannot be seen from here; so a batch is done with when all were taken.

    Args:
        before: the state before the batch's orders were drawn.
        known_by: what the batch is known by.
    """

    def __init__(self, before: SplitState, known_by: KnownBy):
        self.before, self.known_by = before, known_by
        self.taken = 0 if before.interrupted is None else before.interrupted.taken
        self.minibatches = 0  # set with the plans
        self.begun = False  # minibatches are taken one by one
        self.open = 0  # iterators that are not at their end
        self.done = False  # no more of them will be taken

    @property
    def in_the_middle(self) -> bool:
        """Whether some were taken and an iterator waits to hand out the others."""
        return not self.done and self.open > 0 and 0 < self.taken < self.minibatches

    def check(self) -> None:
        """Refuse a batch that is not the interrupted one. Reads columns where there was an interruption.

        Raises:
            BatchError: it has other rows, or is cut by other options; the message says which.
        """
        batch = self.before.interrupted
        if batch is not None and (differences := list(_differences(batch, self.known_by))):
            raise BatchError(
                f"a batch of {batch.rows} rows was interrupted after {batch.taken} minibatches; to go on "
                f"with the others give it again as it was: {'; '.join(differences)}. To give up what is left "
                "of it, and go on with another batch, call this stage's give_up(): in a pipeline, "
                "pipeline.stages['split'].give_up()"
            )

    def state(self, after: SplitState) -> SplitState:
        """What to save now. Reads columns in the middle of the batch.

        Args:
            after: the state after the batch.
        """
        if self.done or self.taken >= self.minibatches:
            return after
        before = self.before._replace(interrupted=None)
        if self.taken == 0:
            return before
        rows, options, columns = self.known_by
        known = {name: column.cpu() for name, column in columns.items()}
        return before._replace(interrupted=InterruptedBatch(rows, self.taken, dict(options), known, after))


def _numbers_by_row(batch: TensorDictBase, key: NestedKey, *, wide: bool) -> Tensor | None:
    """(N,) of a column of one number a row; `wide`: (N, ...) of any. None where it is none, or ragged."""
    if isinstance(batch, LazyStackedTensorDict):
        first = batch.tensordicts[0].get(key)
        if not isinstance(first, Tensor) or (first.numel() != 1 and not wide):
            return None
        rows = batch.get(key, as_list=True)
        if len({row.shape for row in rows}) > 1:
            return None
        value = torch.stack(list(rows))
    else:
        value = batch.get(key)
    if not isinstance(value, Tensor):
        return None
    if value.numel() == len(batch):
        return value if value.ndim == 1 else value.reshape(-1)
    return value if wide else None


def _differences(batch: InterruptedBatch, known_by: KnownBy) -> Iterator[str]:
    if batch.options is None or batch.columns is None:
        yield "its state is of an earlier version, which does not say by what it is known again"
        return
    if batch.rows != known_by.rows:
        yield f"this one has {known_by.rows} rows"
        return
    options = {name: (value, known_by.options.get(name)) for name, value in batch.options.items()}
    changed = [f"{name} was {old!r} and is {new!r}" for name, (old, new) in options.items() if old != new]
    if changed:
        yield "it is cut by other options: " + ", ".join(changed)
    for name in sorted(batch.columns.keys() | known_by.columns.keys()):
        old, new = batch.columns.get(name), known_by.columns.get(name)
        if old is None or new is None:
            yield f"{name!r} is a column of only one of them"
        elif difference := _difference(old, new.to(old.device)):
            yield f"{name!r} {difference}"


def _difference(old: Tensor, new: Tensor) -> str:
    """How two columns differ, in words; empty where they do not."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"was {tuple(old.shape)} {old.dtype} and is {tuple(new.shape)} {new.dtype}"
    same = (
        torch.isclose(new, old, rtol=CLOSE, atol=CLOSE, equal_nan=True)
        if old.is_floating_point()
        else new == old
    )
    rows = (~flat_rows(same).all(1)).nonzero().flatten()
    return f"was {few(old[rows], 3)} and is {few(new[rows], 3)} at rows {few(rows, 3)}" if len(rows) else ""
