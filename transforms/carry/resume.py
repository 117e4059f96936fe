"""The state of a split, between batches and in the middle of an interrupted batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.split import Progress
from headrace.transforms.table import BatchError, Table, count_of, few
from headrace.transforms.table.schema import REASON
from headrace.transforms.table.tensordicts import column_of, flat_rows, leaves_of

from .saved_rows import from_plain, to_plain

CLOSE = 1e-4  # tolerance: rewards that were shaped on another device differ in the last digits


class InterruptedBatch(NamedTuple):
    """A batch that was interrupted between its minibatches."""

    rows: int
    taken: int
    """Number of minibatches taken."""
    options: dict[str, Any]
    """The options of the split, by name."""
    columns: dict[str, Tensor]
    """(N, ...) ids and rewards of the batch's rows, on the CPU, by name."""
    after: SplitState
    """The state after the batch, for :meth:`ShuffleSplit.discard_batch`."""

    def to_plain(self) -> dict[str, Any]:
        """Convert to dicts, tensors and lists."""
        return self._asdict() | {"after": self.after.to_plain()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> InterruptedBatch:
        """Restore the output of :meth:`to_plain`."""
        return cls(**plain | {"after": SplitState.from_plain(plain["after"])})


class KnownBatch(NamedTuple):
    """A batch with the columns that identify it if it comes again."""

    rows: int
    columns: Mapping[str, Tensor]
    """(N, ...) ids and rewards of the batch's rows, by name."""

    def is_again(self, other: KnownBatch) -> bool:
        """Whether the other batch has the same rows, in any order. False for batches without ids."""
        if self.rows != other.rows or self.columns.keys() != other.columns.keys():
            return False
        names = [name for name in sorted(self.columns) if not self.columns[name].is_floating_point()]
        sorted_columns = []
        for batch in (self, other):
            columns = {name: column.cpu() for name, column in batch.columns.items()}
            order = torch.arange(self.rows)
            for name in names:  # stable, so rows with equal ids keep their order
                for numbers in columns[name].view(self.rows, -1).unbind(1):
                    order = order[numbers[order].argsort(stable=True)]
            sorted_columns.append([columns[name][order] for name in sorted(columns)])
        return bool(names) and not any(map(_difference, *sorted_columns))


class SplitState(NamedTuple):
    """The state of a split before or after a batch."""

    calls: int = 0
    """Permutations drawn so far. Each has its own seed."""
    carried: TensorDictBase | None = None
    """Rows carried into the next batch."""
    interrupted: InterruptedBatch | None = None
    """The batch that must be given again to continue."""
    trained: KnownBatch | None = None
    """The last batch that was trained to its end."""

    def to_plain(self) -> dict[str, Any]:
        """Convert to dicts, tensors and lists, which ``torch.load`` reads with ``weights_only=True``."""
        interrupted, trained = self.interrupted, self.trained
        if trained is not None:
            trained = trained._replace(columns={name: each.cpu() for name, each in trained.columns.items()})
        return {
            "calls": self.calls,
            "carried": to_plain(self.carried),
            "interrupted": None if interrupted is None else interrupted.to_plain(),
            "trained": None if trained is None else trained._asdict(),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> SplitState:
        """Restore the output of :meth:`to_plain`.

        Raises:
            ValueError: another version of headrace has saved the state.
        """
        carried, found = from_plain(plain.get("carried")), sorted(plain)
        if carried is not None and column_of(carried, REASON) is None:
            found[found.index("carried")] = "carried rows without reasons"
        if found != sorted(cls._fields):
            raise ValueError(
                f"the state of a split has {', '.join(sorted(cls._fields))}; found {', '.join(found)}. "
                "Another version of headrace has saved it: load it with that version, or delete the split's "
                "_extra_state and load the rest with strict=False. The split then begins anew, without "
                "carried rows"
            )
        interrupted, trained = plain["interrupted"], plain["trained"]
        return cls(
            plain["calls"],
            carried,
            None if interrupted is None else InterruptedBatch.from_plain(interrupted),
            None if trained is None else KnownBatch(**trained),
        )


def identifying_columns(table: Table, numbers: Tensor, reward_key: NestedKey) -> dict[str, Tensor]:
    """Copy the columns that identify the rows: the reward, and columns of one integer per row, such as ids.

    Other float columns, such as advantages, are not used, because they may differ when computed again.

    Args:
        table: the table of a batch.
        numbers: (n,) int64, the table rows to copy.
        reward_key: the reward column.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.transforms import Rows
        >>> batch = TensorDict({"id": torch.tensor([7, 8]), "advantage": torch.ones(2)}, batch_size=[2])
        >>> identifying_columns(Rows.read(batch).table, torch.arange(2), "reward")
        {'id': tensor([7, 8])}
    """
    batch, at, found = table.batch, None, dict[str, Tensor]()
    is_ragged = isinstance(batch, LazyStackedTensorDict) and len(batch) > 0
    row, each = (batch.tensordicts[0], 1) if is_ragged else (batch, len(batch))
    renumbered = table.ranks.id_keys  # the table has other ids than the batch
    for key, value in {**dict.fromkeys(table.written), **dict(leaves_of(row))}.items():
        column, is_reward = None if key in renumbered else table.columns.get(key), key == reward_key
        if isinstance(key, tuple) and key[0] == "headrace":
            continue
        if column is not None:
            if is_reward or (column.ndim == 1 and column.dtype is not torch.float64):
                column = column if len(numbers) == table.size else column.index_select(0, numbers)
                found[str(key)] = column if is_reward else column.long()
        elif value is not None and (is_reward or (value.numel() == each and not value.is_floating_point())):
            try:
                value = column_of(batch, key)
            except BatchError:  # a column that no stage reads may be on some rows only
                continue
            if isinstance(value, Tensor):  # rows with different shapes are no Tensor
                at = table.batch_rows(numbers).to(value.device) if at is None else at
                value = value.detach().reshape(-1) if value.numel() == len(batch) else value.detach()
                # Copy: collectors reuse their memory.
                found[str(key)] = value.index_select(0, at).to(torch.float64 if is_reward else torch.int64)
    return found


class BatchProgress(Progress):
    """The progress of a batch that is recognised if it comes again.

    Args:
        before: the state before this batch.
        batch: this batch.
        options: the options of the split, plain values by name.

    Raises:
        BatchError: a batch was interrupted, and this batch has other rows, or the split has other options.
            The message lists the differences.
    """

    def __init__(self, before: SplitState, batch: KnownBatch, options: Mapping[str, Any]):
        super().__init__(0 if before.interrupted is None else before.interrupted.taken)
        self.before, self.batch, self.options = before, batch, options
        last = before.interrupted
        if last is not None and (differences := list(_differences(last, batch, self.options))):
            raise BatchError(
                f"a batch of {count_of(last.rows, 'row')} was interrupted after {{taken}}, and this batch "
                "differs from it: {found}. To train its remaining minibatches, give that batch again, with "
                "the same options. To drop them and start another batch, call discard_batch() of this stage, "
                "such as pipeline.stages['split'].discard_batch()",
                taken=count_of(last.taken, "minibatch"),
                found="; ".join(differences),
            )

    @property
    def trained(self) -> KnownBatch | None:
        """This batch if it has begun, is done or has no minibatches; else the last trained one before."""
        if self.taken or self.done or self.minibatches == 0:
            return self.batch
        return self.before.trained

    def state(self, after: SplitState) -> SplitState:
        """The state to save now.

        - All minibatches were taken: `after`, the state after the batch.
        - None was taken: the state before the batch, as if the batch had not come.
        - In between: the state before the batch, and what is needed to continue the batch. This copies the
          columns that identify the batch to the CPU.
        """
        if self.done or self.taken >= self.minibatches:
            return after._replace(trained=self.trained)
        before = self.before._replace(interrupted=None)
        if self.taken == 0:
            return before
        known = {name: column.cpu() for name, column in self.batch.columns.items()}
        interrupted = InterruptedBatch(self.batch.rows, self.taken, dict(self.options), known, after)
        return before._replace(interrupted=interrupted, trained=None)


def _differences(last: InterruptedBatch, batch: KnownBatch, options: Mapping[str, Any]) -> Iterator[str]:
    if last.rows != batch.rows:
        yield f"this one has {count_of(batch.rows, 'row')}"
        return
    pairs = {name: (value, options.get(name)) for name, value in last.options.items()}
    changed = [f"{name} was {old!r} and is {new!r}" for name, (old, new) in pairs.items() if old != new]
    if changed:
        yield "the split has other options: " + ", ".join(changed)
    for name in sorted(last.columns.keys() | batch.columns.keys()):
        old, new = last.columns.get(name), batch.columns.get(name)
        if old is None or new is None:
            yield f"only one of the two batches has column {name!r}"
        elif difference := _difference(old, new.to(old.device)):
            yield f"{name!r} {difference}"


def _difference(old: Tensor, new: Tensor) -> str:
    """Describe how two columns differ; empty if they are equal."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"was {tuple(old.shape)} {old.dtype} and is {tuple(new.shape)} {new.dtype}"
    same = (
        torch.isclose(new, old, rtol=CLOSE, atol=CLOSE, equal_nan=True)
        if old.is_floating_point()
        else new == old
    )
    rows = (~flat_rows(same).all(1)).nonzero().flatten()
    return f"was {few(old[rows], 3)} and is {few(new[rows], 3)} at rows {few(rows, 3)}" if len(rows) else ""
