"""How many tokens the rows of a step would be, were those that they share computed once.

And how many tokens train more than once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.split import LINEAR
from headrace.transforms.table import stable_order
from headrace.transforms.table.schema import has_key
from headrace.transforms.table.tensordicts import ATTENTION, count_true, device_of, take_rows
from headrace.transforms.table.tokens import loss_tokens, read_tokens, tokens_in_loss
from headrace.transforms.trees import train_shared_once

TOKENS: NestedKey = ("tokens", "full")
BLOCK = 128  # tokens of a row that are compared before it is asked which rows go on
CELLS = 2**16  # tokens that are compared at once, so that they stay in the cache


class SharedTokens(NamedTuple):
    """What rows cost, and what they would cost as trees of their rollouts or groups. Counts add up.

    The estimate is that of ShuffleSplit's balance: with P parameters a forward pass takes 2 · P FLOPs a
    token, and attention 4 · hidden size a layer for each pair of tokens of a row. With P = 12 · layers ·
    hidden size² and :data:`LINEAR` = 6 · hidden size, and a backward pass of two forward passes::

        FLOPs = 6 P · (tokens + squares / LINEAR),   squares = Σ t² over rows of t tokens

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

    def flops(self, unit: str, *, parameters: float = 1.0) -> float:
        """Of forward and backward, with `parameters`."""
        return 6 * parameters * (self.tokens[unit] + self.squares[unit] / LINEAR)

    def numbers(self, *, parameters: float | None = None) -> dict[str, float]:
        """By name, for a report.

        ============================== ==============================================================
        ``tree/tokens/rows``           tokens that go through a model, row by row
        ``tree/tokens/rollout``        were those once that the rows of a rollout share
        ``tree/tokens/group``          were those once that the rows of a group share
        ``tree/flops/rollout``, group  FLOPs in units of those of the rows
        ``tree/pflops/rows``, …        10^15 FLOPs of forward and backward, where `parameters` are given
        ============================== ==============================================================

        Args:
            parameters: of the model.
        """
        if not self.tokens.get("rows"):
            return {}
        whole = self.flops("rows")
        found = {f"tree/tokens/{unit}": count for unit, count in self.tokens.items()}
        for unit in self.tokens:
            if unit != "rows":
                found[f"tree/flops/{unit}"] = self.flops(unit) / whole
            if parameters is not None:
                found[f"tree/pflops/{unit}"] = self.flops(unit, parameters=parameters) / 1e15
        return found


NOTHING = SharedTokens({}, {})


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
        cells: tokens that are compared at once, about.

    Example:
        >>> from tensordict import TensorDict
        >>> tokens = torch.tensor([[5, 6, 7], [5, 6, 8]])
        >>> columns = {"tokens": {"full": tokens}, "masks": {"all_attention_mask": tokens > 0}}
        >>> batch = TensorDict(columns, batch_size=[2])
        >>> count_shared_tokens(batch, {"group_id": np.array([0, 0])}).tokens
        {'rows': 6.0, 'group': 4.0}
    """
    units = [unit for unit in ("rollout", "group") if f"{unit}_id" in ids]
    if len(batch) == 0 or not units or (found := _tokens_of(batch)) is None:
        return NOTHING
    tokens, mask = found
    rows = np.arange(len(batch)) if chosen is None else np.flatnonzero(chosen)
    flat, starts, lengths = _in_one_line(tokens.long(), mask)
    starts, lengths = starts[rows], lengths[rows]
    shared = {"rows": np.zeros_like(lengths)}
    for unit in units:
        shared[unit] = _shared_within(np.asarray(ids[f"{unit}_id"])[rows], flat, starts, lengths, cells)
    return SharedTokens(
        {unit: float((lengths - own).sum()) for unit, own in shared.items()},
        {unit: float((lengths**2 - own**2).sum()) for unit, own in shared.items()},
    )


def _tokens_of(batch: TensorDictBase) -> tuple[Tensor, Tensor] | None:
    """(N, T) tokens, and bool where they are no padding, on the CPU; None where one of them is missing."""
    ragged, known = isinstance(batch, LazyStackedTensorDict), has_key(batch, ATTENTION)
    if not has_key(batch, TOKENS) or not (ragged or known):
        return None
    tokens = read_tokens(batch, TOKENS, reader="a report", option="where a loss finds them").cpu()
    if known:
        mask = read_tokens(batch, ATTENTION, reader="a report", option="which are no padding").cpu().bool()
    else:
        sizes = torch.tensor([len(row.get(TOKENS)) for row in batch.unbind(0)])
        mask = torch.arange(tokens.shape[1]) < sizes[:, None]
    return tokens, mask


def count_trained_again(
    batch: TensorDictBase,
    rollouts: np.ndarray,
    loss_mask_key: NestedKey,
    log_prob_key: NestedKey | None = None,
) -> float | None:
    """Count the tokens in the loss that an earlier row of the same rollout trains, too.

    ``TrainSharedOnce`` takes them out (:func:`~headrace.transforms.trees.train_shared_once`).

    Args:
        batch: TensorDict ``[N]`` after the stages, with the masks that the loss reads.
        rollouts: (N,) integers, the rollout of each row.
        loss_mask_key: (N, T) bool.
        log_prob_key: (N, T) float, a token whose number is not finite does not train; None: not read.

    Returns:
        None where the batch has no tokens or does not say which of them train.

    Example:
        >>> from tensordict import TensorDict
        >>> tokens = torch.tensor([[3, 4, 5, 6], [3, 4, 7, 8]])
        >>> columns = {"tokens": {"full": tokens}, "masks": {"all_attention_mask": tokens > 0}}
        >>> count_trained_again(
        ...     TensorDict(columns, batch_size=[2]), np.array([9, 9]), ("masks", "all_attention_mask")
        ... )
        2.0
    """
    if not len(batch) or not has_key(batch, TOKENS) or not has_key(batch, loss_mask_key):
        return None
    number, count = np.unique(rollouts, return_inverse=True, return_counts=True)[1:]
    at = torch.from_numpy(np.flatnonzero(count[number] > 1))
    if len(at) == 0:  # no device read
        return 0.0
    keys = [TOKENS, ATTENTION, loss_mask_key, *([] if log_prob_key is None else [log_prob_key])]
    some = batch.select(*keys, strict=False)
    some = take_rows(some, at.to(device_of(batch)), on_cpu=at)
    if (found := _tokens_of(some)) is None:
        return None
    loss_tokens(some, loss_mask_key, log_prob_key)  # checks the columns
    trains = tokens_in_loss(some, loss_mask_key, log_prob_key).cpu()
    tokens, mask = found
    keeps = train_shared_once(tokens, trains, torch.from_numpy(number)[at], mask)
    return float((trains & mask & ~keeps).sum())


def _in_one_line(tokens: Tensor, mask: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All tokens, and by row where its own begin and how many these are; padding may be between rows."""
    lengths, first = count_true(mask).numpy(), mask.numpy().argmax(1)
    runs = int(count_true(mask[:, 1:] & ~mask[:, :-1]).sum()) + int(mask[:, :1].sum())
    if runs == np.count_nonzero(lengths):  # one in each row: they are read where they are
        return tokens.reshape(-1).numpy(), np.arange(len(tokens)) * tokens.shape[1] + first, lengths
    return tokens[mask].numpy(), np.cumsum(lengths) - lengths, lengths


def _shared_within(
    home: np.ndarray, flat: np.ndarray, starts: np.ndarray, lengths: np.ndarray, cells: int
) -> np.ndarray:
    """(n,) how many of its first tokens a row finds where rows of one home become a tree, one by one.

    The longest row of a home leads, and each other one follows it to where they part. Those that part from it
    at one place by one token are a class of their own behind that, with a leader of their own.

    Args:
        home: (n,) integers.
        flat: tokens of all rows.
        starts: (n,) where those of each begin.
        lengths: (n,) and how many there are.
        cells: tokens that are compared at once.
    """
    shared, rows = np.zeros_like(lengths), _order(-lengths, home)
    known, begins = np.zeros_like(lengths), _begins(home[rows])  # what a class has in common, and its first
    while True:
        several = ~begins | np.append(~begins[1:], False)
        rows, known, begins = rows[several], known[several], begins[several]
        if len(rows) == 0:
            return shared
        leader = np.maximum.accumulate(np.where(begins, np.arange(len(rows)), 0))[~begins]
        leads, rows, known = rows[leader], rows[~begins], known[~begins]
        most = np.minimum(lengths[rows], lengths[leads])
        shared[rows] = same = _alike(flat, starts[rows], starts[leads], known, most, cells)
        goes_on = same < lengths[rows]
        rows, same, leader = rows[goes_on], same[goes_on], leader[goes_on]
        token = flat[starts[rows] + same]
        order = _order(token, same, leader)
        rows, known = rows[order], same[order] + 1
        begins = _begins(leader[order]) | _begins(same[order]) | _begins(token[order])


def _order(*keys: np.ndarray) -> np.ndarray:
    """(n,) the order of integers by the last key, among equal ones by the key before, and so on."""
    order = np.arange(len(keys[0]))
    for key in keys:
        order = order[stable_order(torch.from_numpy(key[order])).numpy()]
    return order


def _begins(values: np.ndarray) -> np.ndarray:
    """(n,) bool: which differ from the one before."""
    return np.append(np.ones(min(len(values), 1), dtype=bool), values[1:] != values[:-1])


def _alike(
    flat: np.ndarray, a: np.ndarray, b: np.ndarray, known: np.ndarray, most: np.ndarray, cells: int
) -> np.ndarray:
    """(n,) how many tokens from a and from b on are the same, at most so many.

    Args:
        flat: tokens.
        a: (n,) places.
        b: (n,) places.
        known: (n,) so many are.
        most: (n,) counts.
        cells: tokens that are compared at once.
    """

    def step(some: np.ndarray) -> np.ndarray:
        ours, theirs = (_block(flat, starts[some] + found[some]) for starts in (a, b))
        parted = ours != theirs
        return np.where(parted.any(1), parted.argmax(1), BLOCK)

    found, left = known.copy(), np.flatnonzero(known < most)
    while len(left):
        parts = np.array_split(left, min(len(left), -(-len(left) * BLOCK // cells)))
        steps = np.concatenate([step(some) for some in parts])
        found[left] += steps
        left = left[(steps == BLOCK) & (found[left] < most[left])]
    return np.minimum(found, most)


def _block(flat: np.ndarray, places: np.ndarray) -> np.ndarray:
    """(n, BLOCK) the tokens from (n,) places on; behind the last of all, that one again."""
    if places.max() <= len(flat) - BLOCK:
        return np.lib.stride_tricks.sliding_window_view(flat, BLOCK)[places]
    return flat.take(places[:, None] + np.arange(BLOCK), mode="clip")


def said_of_trees(numbers: Mapping[str, float]) -> str:
    """What a report's numbers say of trees, in a line; empty where there are no tokens.

    Example:
        >>> counts = SharedTokens({"rows": 3072.0, "group": 1280.0}, {"rows": 294912.0, "group": 180224.0})
        >>> said_of_trees(counts.numbers()).split("; ")  # doctest: +NORMALIZE_WHITESPACE
        ['tokens of prompts and responses: 3,072 row by row',
         '1,280 as trees of groups, 2.4 times fewer, with 0.42 of the FLOPs']
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
    return "; ".join(
        [f"tokens of prompts and responses: {whole:,.0f} row by row", *(words or ["rows share none"])]
    )
