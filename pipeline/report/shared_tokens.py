"""How many tokens the rows of a step would be, were those that they share computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.prefixes import left_aligned, prefix_order
from headrace.transforms.schema import MINIBATCH, has_key
from headrace.transforms.split.trees import Forest
from headrace.transforms.tokens import ATTENTION, read_tokens

TOKENS: NestedKey = ("tokens", "full")
LINEAR = 24576.0  # 6 × a hidden size of 4096
CELLS = 2**24  # rows × the longest, padding included, that are compared at once


class SharedTokens(NamedTuple):
    """What rows cost, and what they would cost as trees of their rollouts or groups. Counts add up.

    The estimate is that of ShuffleSplit's balance: with P parameters a forward pass takes 2 · P FLOPs a
    token, and attention 4 · hidden size a layer for each pair of tokens of a row. With P = 12 · layers ·
    hidden size² and `linear` = 6 · hidden size, and a backward pass of two forward passes::

        FLOPs = 6 P · (tokens + squares / linear),   squares = Σ t² over rows of t tokens

    A row that shares its first s tokens has t − s of the tokens, and t² − s² of the squares.
    """

    tokens: Mapping[str, float]
    """Tokens by what shares them: ``rows`` nothing, ``rollout``, ``group``."""
    squares: Mapping[str, float]
    """Squares, likewise."""

    def __add__(self, other: SharedTokens) -> SharedTokens:  # type: ignore[override]
        sums = (
            {key: a.get(key, 0.0) + b.get(key, 0.0) for key in {**a, **b}}
            for a, b in zip(self, other, strict=True)
        )
        return SharedTokens(*sums)

    def flops(self, unit: str, *, linear: float = LINEAR, parameters: float = 1.0) -> float:
        """Of forward and backward, with `parameters`."""
        return 6 * parameters * (self.tokens[unit] + self.squares[unit] / linear)

    def numbers(self, *, linear: float = LINEAR, parameters: float | None = None) -> dict[str, float]:
        """By name, for a report.

        ============================== ==============================================================
        ``tree/tokens/rows``           tokens that go through a model, row by row
        ``tree/tokens/rollout``        were those once that the rows of a rollout share
        ``tree/tokens/group``          were those once that the rows of a group share
        ``tree/flops/rollout``, group  FLOPs in units of those of the rows
        ``tree/pflops/rows``, …        10^15 FLOPs of forward and backward, where `parameters` are given
        ============================== ==============================================================

        Args:
            linear: 6 × the model's hidden size.
            parameters: of the model.
        """
        if not self.tokens.get("rows"):
            return {}
        whole = self.flops("rows", linear=linear)
        found = {f"tree/tokens/{unit}": count for unit, count in self.tokens.items()}
        for unit in self.tokens:
            if unit != "rows":
                found[f"tree/flops/{unit}"] = self.flops(unit, linear=linear) / whole
            if parameters is not None:
                found[f"tree/pflops/{unit}"] = self.flops(unit, linear=linear, parameters=parameters) / 1e15
        return found


NOTHING = SharedTokens({}, {})


def linear_of(stages: Iterable[Any]) -> float:
    """6 × the hidden size, as the stage that cuts has it."""
    cutting = (stage for stage in stages if MINIBATCH in getattr(stage, "out_keys", ()))
    return getattr(next(cutting, None), "linear", LINEAR)


def count_shared_tokens(
    batch: TensorDictBase,
    ids: Mapping[str, np.ndarray],
    chosen: np.ndarray | None = None,
    *,
    cells: int = CELLS,
) -> SharedTokens:
    """Count the tokens of a batch's rows, and those that rows of one rollout or group share.

    Args:
        batch: TensorDict ``[N]``; without ``("tokens", "full")``, or dense and without their mask, there is
            nothing to count.
        ids: (N,) integers, ``group_id`` and ``rollout_id`` or one of them; a rollout is of one group.
        chosen: (N,) bool, rows that go through the model; None: all.
        cells: rows × the longest that are compared at once, about; groups stay whole.

    Example:
        >>> from tensordict import TensorDict
        >>> tokens = torch.tensor([[5, 6, 7], [5, 6, 8]])
        >>> columns = {"tokens": {"full": tokens}, "masks": {"all_attention_mask": tokens > 0}}
        >>> batch = TensorDict(columns, batch_size=[2])
        >>> count_shared_tokens(batch, {"group_id": np.array([0, 0])}).tokens
        {'rows': 6.0, 'group': 4.0}
    """
    units = [unit for unit in ("rollout", "group") if f"{unit}_id" in ids]
    ragged = isinstance(batch, LazyStackedTensorDict)
    if (
        len(batch) == 0
        or not units
        or not has_key(batch, TOKENS)
        or not (ragged or has_key(batch, ATTENTION))
    ):
        return NOTHING
    tokens = read_tokens(batch, TOKENS, reader="a report", option="where a loss finds them").cpu()
    if not has_key(batch, ATTENTION):  # ragged
        sizes = torch.tensor([len(row) for row in batch.get(TOKENS, as_list=True)])
        mask = torch.arange(tokens.shape[1]) < sizes[:, None]
    else:
        mask = read_tokens(batch, ATTENTION, reader="a report", option="which are no padding").cpu().bool()
    homes = {unit: torch.from_numpy(np.asarray(ids[f"{unit}_id"])).long() for unit in units}
    rows = torch.arange(len(batch)) if chosen is None else torch.from_numpy(np.flatnonzero(chosen))
    total = NOTHING
    for some in _chunks(homes[units[-1]], rows, cells // max(tokens.shape[1], 1)):
        own = {unit: home[some] for unit, home in homes.items()}
        total = total + _count(tokens[some], mask[some], own)
    return total


def _chunks(home: Tensor, rows: Tensor, most: int) -> Iterator[Tensor]:
    """Rows by home, whole homes together, about so many rows at a time."""
    rows = rows[home[rows].sort(stable=True).indices]
    ends = (home[rows][1:] != home[rows][:-1]).nonzero().flatten() + 1
    begin = 0
    for end, after in pairwise([*ends.tolist(), len(rows)]):
        if after - begin > most:
            yield rows[begin:end]
            begin = end
    yield rows[begin:]


def _count(tokens: Tensor, mask: Tensor, homes: Mapping[str, Tensor]) -> SharedTokens:
    lengths, outer = mask.sum(1), list(homes)[-1]
    labels = left_aligned(tokens.long(), mask)[:, : int(lengths.amax()) if len(lengths) else 0]
    forest = Forest(*prefix_order(labels, homes[outer]), lengths)
    every = torch.arange(len(lengths))
    shared = {unit: forest.shared(every, home) for unit, home in homes.items()}
    shared = {"rows": torch.zeros_like(lengths)} | shared
    return SharedTokens(
        {unit: float((lengths - own).sum()) for unit, own in shared.items()},
        {unit: float((lengths**2 - own**2).sum()) for unit, own in shared.items()},
    )


def tree_words(numbers: Mapping[str, float]) -> str:
    """What a report's numbers say of trees, in a line; empty where there are no tokens.

    Example:
        >>> counts = SharedTokens({"rows": 3072.0, "group": 1280.0}, {"rows": 294912.0, "group": 180224.0})
        >>> tree_words(counts.numbers())
        'tokens: 3,072 row by row; 1,280 as trees of groups, 2.4 times fewer, with 0.42 of the FLOPs'
    """
    whole = numbers.get("tree/tokens/rows")
    if not whole:
        return ""
    fewer = {unit: numbers.get(f"tree/tokens/{unit}", whole) for unit in ("rollout", "group")}
    words = []
    for unit, count in fewer.items():
        if count < whole:
            share = numbers.get(f"tree/flops/{unit}")
            words.append(f"{count:,.0f} as trees of {unit}s, {whole / count:.1f} times fewer")
            words[-1] += f", with {share:.2f} of the FLOPs" if share is not None else ""
    return "; ".join([f"tokens: {whole:,.0f} row by row", *(words or ["rows share none"])])
