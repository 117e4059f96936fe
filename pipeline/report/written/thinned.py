"""Of things that come one after the other, some: the first, the last, and others evenly spread."""

from __future__ import annotations

from typing import Generic, TypeVar

Item = TypeVar("Item")


class Thinned(Generic[Item]):
    """Keep at most `most` of the things that come, and the last one.

    Args:
        most: ≥ 2; where there would be more, every other one goes, and from then on half as many stay.

    Example:
        >>> some = Thinned(4)
        >>> for number in range(11):
        ...     some.add(number)
        >>> some.all()
        [0, 4, 8, 10]
    """

    def __init__(self, most: int):
        self.most = most
        self._kept: list[Item] = []  # every `_every`-th, from the first on
        self._every, self._seen = 1, 0

    def add(self, item: Item) -> None:
        """Take the next one."""
        self._last = item
        if self._seen % self._every == 0:
            self._kept.append(item)
            if len(self._kept) >= self.most:
                self._kept, self._every = self._kept[::2], 2 * self._every
        self._seen += 1

    def all(self) -> list[Item]:
        """Those that are kept, in order."""
        last_is_kept = (len(self._kept) - 1) * self._every == self._seen - 1
        return [*self._kept] if last_is_kept else [*self._kept, self._last]
