"""A process without other ranks. It has the methods by which a table exchanges rows with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from torch import Tensor

from .process_group import SharedIds, resolve_group


class Alone:
    """One process without others. :class:`~headrace.transforms.ranks.Ranks` has the same methods for several.

    When a table is read, it is extended by the rows of all ranks (:meth:`share`). Numbers that are computed
    from tokens are exchanged later (:meth:`gather_rows`). Each rank gathers only its own rows
    (:meth:`Table.rows_of_ranks`).

    Attributes:
        size: number of ranks.
        rank: number of this rank.
        shared_ids: whether an id on several ranks is the same unit.
        id_keys: columns of ids that :meth:`share` may renumber, with their names for messages.
        place: what this rank is doing, for messages.
    """

    size, rank = 1, 0
    shared_ids: Any = None
    id_keys: Mapping[Any, str] = {}
    place = ""

    def block(self) -> AbstractContextManager[None]:
        """Share a batch with other ranks in a ``with`` block. An error of one rank is raised on all."""
        return nullcontext()

    def share(self, table: Any, about: Callable[[], str] = str) -> None:
        """Extend a table by the rows of all ranks; what `about` returns must be equal on all ranks."""

    def gather_rows(self, values: Tensor, counts: list[int]) -> Tensor:
        """Join the (B, ...) values of all ranks, rank after rank."""
        return values

    def gather_objects(self, value: Any) -> list[Any]:
        """Exchange small objects; the result is sorted by rank."""
        return [value]

    def send_object(self, value: Any, sender: int) -> Any:
        """Return the object of the rank `sender`, on all ranks."""
        return value

    def note(self, starts: list[int]) -> str:
        """Explain row numbers and ids, at the end of a message."""
        return ""


def connect(
    group: Any,
    shared_ids: SharedIds | None = None,
    patience: float = 600.0,
    id_keys: Mapping[Any, str] | None = None,
) -> Alone:
    """Connect to the ranks of a process group or of a group's name. None gives a process alone."""
    if group is None:
        return Alone()
    ranks = import_module("headrace.transforms.ranks").Ranks
    return ranks(resolve_group(group), shared_ids, patience, id_keys)
