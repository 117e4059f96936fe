"""How a batch is cut into optimiser steps, ranks and forward passes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch.distributed as dist

from headrace.transforms.distributed import check_one_way
from headrace.transforms.options import at_least, one_of

from .microbatches import Balance, check_deal
from .minibatches import Remainder, check_split
from .trees import Tree

Oversized = Literal["alone", "raise"]


@dataclass(frozen=True)
class CutOptions:
    """How a batch is cut: the options of :class:`ShuffleSplit` that do not name columns.

    Raises:
        ValueError: one is none of its values, or two do not go together.
    """

    minibatches: int | None
    minibatch_size: int | None
    remainder: Remainder
    microbatches: int | None
    microbatch_size: int | None
    max_tokens: int | None
    multiple_of: int
    oversized: Oversized
    balance: Balance
    linear: float
    tree: Tree
    ranks: int
    rank: int | None
    process_group: dist.ProcessGroup | str | None
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        check_split(self.minibatches, self.minibatch_size, self.remainder)
        check_deal(
            ranks=self.ranks,
            microbatches=self.microbatches,
            microbatch_size=self.microbatch_size,
            max_tokens=self.max_tokens,
            balance=self.balance,
            linear=self.linear,
        )
        at_least("multiple_of", self.multiple_of, 1)
        at_least("rank", self.rank, 0)
        if self.rank is not None and self.rank >= self.ranks:
            raise ValueError(f"rank must be below ranks; got rank={self.rank} and ranks={self.ranks}")
        check_one_way(self.ranks, self.process_group)
        over_ranks = self.ranks > 1 or self.process_group is not None
        if self.max_tokens is not None and over_ranks and self.remainder not in ("pad", "drop"):
            raise ValueError(
                "with max_tokens a rank may have fewer rows than others have micro-batches: set "
                "remainder='pad' to fill them up, or 'drop' to leave out rows that make them too many; got "
                f"remainder={self.remainder!r}"
            )
        if one_of("tree", self.tree, get_args(Tree)) != "none" and (
            self.microbatch_size is not None or (self.max_tokens is not None and self.remainder == "drop")
        ):
            raise ValueError(
                f"tree={self.tree!r} deals whole trees, whatever their number of rows: cut by max_tokens or "
                "microbatches in place of microbatch_size, and with max_tokens set remainder='pad' in place "
                f"of 'drop'; got microbatch_size={self.microbatch_size}, remainder={self.remainder!r}"
            )
        one_of("oversized", self.oversized, get_args(Oversized))
        one_of("shuffle", self.shuffle, (True, False))

    @property
    def measures(self) -> bool:
        """Whether the lengths of rows matter."""
        return self.max_tokens is not None or self.balance != "none" or self.tree != "none"

    def plain(self) -> dict[str, Any]:
        """What an order and its cut follow from, by name; the process group is no part of that."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "process_group"}
