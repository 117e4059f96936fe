"""The rows that a statistic is of: those of the batch that count, on all ranks that share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensordict import TensorDictBase
from torch import Tensor

from headrace.transforms.checks import Rule
from headrace.transforms.rows import SomeRows
from headrace.transforms.schema import COUNTED

from .ranks import Ranks, present_ranks


class Population:
    """Rows taken out of columns, of all ranks where several share the batch, and results put back.

    Args:
        chosen: (N,) bool, the rows of this rank that count; None: all. One device read, if given.
        ranks: that share the batch; None: this process has the whole of it.

    Example:
        >>> import torch
        >>> people = Population(torch.tensor([True, False, True]))
        >>> columns = {"reward": torch.tensor([1.0, 2.0, 4.0])}
        >>> everyone = people.take(columns, ids={"groups": torch.tensor([0, 0, 3])})
        >>> everyone["reward"].tolist(), everyone["groups"].tolist()
        ([1.0, 4.0], [0, 3])
        >>> people.put_back(everyone["reward"] * 2).tolist()
        [2.0, 0.0, 8.0]
    """

    def __init__(self, chosen: Tensor | None = None, ranks: Ranks | None = None):
        self.rows, self.ranks = SomeRows(chosen), ranks
        self._own = slice(None)  # this rank's rows among those of all

    def take(
        self, columns: Mapping[str, Tensor], ids: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """(N, ...) → (M, ...) each, in order of rank. Over ranks an exchange; all take part in it.

        Args:
            columns: by name.
            ids: (N,) int64, ``rollouts`` and ``groups``, which may mean other units on other ranks.

        Returns:
            Both, by name.

        Raises:
            BatchError: several ranks have an id, and must not.
        """
        values = {name: self.rows.take(column) for name, column in columns.items()}
        labels = {name: self.rows.take(column) for name, column in (ids or {}).items()}
        if self.ranks is None:
            return values | labels
        found, self._own = self.ranks.gather(values, labels)
        return dict(zip([*values, *labels], found, strict=True))

    def put_back(self, values: Tensor) -> Tensor:
        """(M, ...) → (N, ...) on this rank, zeros for rows that do not count."""
        return self.rows.put_back(values if self.ranks is None else values[self._own])

    def rules(self, rules: Sequence[Rule]) -> list[Rule]:
        """Rules of the M rows, in the row numbers of this batch or, over ranks, in those of all."""
        if self.ranks is None:
            return self.rows.rules(rules)
        note = f" (Rows are numbered over all ranks, from {self._own.start} on rank {self.ranks.rank}.)"
        if self.ranks.shared_ids == "different":
            note += " (Short ids are written behind the number of their rank.)"
        return [rule._replace(message=rule.message.removesuffix(note) + note) for rule in rules]


def population_of(batch: TensorDictBase, *, every: bool = False) -> Population:
    """The rows that are in the statistics: all, but where ``("headrace", "counted")`` says otherwise.

    To a statistic an excluded row does not exist: its ids and rewards are neither used nor checked. One
    device read where the batch has excluded rows, none where it has not.

    Args:
        batch: TensorDict ``[N]``.
        every: rows that are excluded too.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"reward": [1.0, 5.0]}, batch_size=[2])
        >>> everyone = population_of(batch).take({"reward": batch["reward"]})
        >>> everyone["reward"].mean()
        tensor(3.)
    """
    return Population(None if every else batch.get(COUNTED, None), present_ranks())
