"""Count the tokens that a step would compute if it computed shared tokens once.

A second function counts the tokens that train more than once.
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
BLOCK = 128  # tokens of a row that are compared before rows that differ are set aside
CELLS = 2**16  # tokens compared at once, so that they stay in the cache


class SharedTokens(NamedTuple):
    """The cost of rows, and their cost as trees of rollouts or groups. The costs of batches can be added.

    ShuffleSplit balances by the same estimate. With P parameters, a forward pass takes 2 · P FLOPs for each
    token, and attention takes 4 · hidden size for each layer and pair of tokens of a row. A backward pass
    takes as much as two forward passes. With P = 12 · layers · hidden size² and :data:`LINEAR` = 6 · hidden
    size::

        FLOPs = 6 P · (tokens + squares / LINEAR),   squares = Σ t² over rows of t tokens

    A row that shares its first s tokens adds t − s tokens and t² − s² squares.
    """

    tokens: Mapping[str, float]
    """Number of tokens if ``rows`` share none, or if the rows of a ``rollout`` or ``group`` share tokens."""
    squares: Mapping[str, float]
    """Squares, likewise."""

    def __add__(self, other: SharedTokens) -> SharedTokens:  # type: ignore[override]
        sums = (
            {key: a.get(key, 0.0) + b.get(key, 0.0) for key in {**a, **b}}
            for a, b in zip(self, other, strict=True)
        )
        return SharedTokens(*sums)

    def flops(self, unit: str, *, parameters: float = 1.0) -> float:
        """FLOPs of a forward and a backward pass of a model with this number of parameters."""
        return 6 * parameters * (self.tokens[unit] + self.squares[unit] / LINEAR)

    def numbers(self, *, parameters: float | None = None) -> dict[str, float]:
        """The numbers by name, for a report.

        ============================== ==============================================================
        ``tree/tokens/rows``           tokens that go through a model, row by row
        ``tree/tokens/rollout``        the same, if the rows of a rollout share their prefixes
        ``tree/tokens/group``          the same, if the rows of a group share their prefixes
        ``tree/flops/rollout``, group  FLOPs, divided by those of the rows
        ``tree/pflops/rows``, …        10^15 FLOPs of forward and backward, if `parameters` is given
        ============================== ==============================================================

        Args:
            parameters: number of parameters of the model.
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
    """Count the tokens of a batch's rows, and the tokens if rows of one rollout or group share them.

    Args:
        batch: TensorDict ``[N]``. Nothing is counted without ``("tokens", "full")``, or for dense rows
            without their mask.
        ids: (N,) integers: ``group_id``, ``rollout_id`` or both. A rollout must be in one group.
        chosen: (N,) bool, rows that go through the model; None: all rows.
        cells: approximate number of tokens that are compared at once.

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
    """(N, T) tokens and (N, T) bool, False at padding, on the CPU; None if one of them is missing."""
    ragged, known = isinstance(batch, LazyStackedTensorDict), has_key(batch, ATTENTION)
    if not has_key(batch, TOKENS) or not (ragged or known):
        return None
    tokens = read_tokens(batch, TOKENS, reader="a report", option="").cpu()
    if known:
        mask = read_tokens(batch, ATTENTION, reader="a report", option="").cpu().bool()
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

    ``TrainSharedOnce`` removes them from the loss (:func:`~headrace.transforms.trees.train_shared_once`).

    Args:
        batch: TensorDict ``[N]`` after the stages, with the masks that the loss reads.
        rollouts: (N,) integers, the rollout of each row.
        loss_mask_key: key of the loss mask, (N, T) bool.
        log_prob_key: key of (N, T) float. A token whose number is not finite does not train. None: not read.

    Returns:
        The number of such tokens; None if the batch has no tokens, or does not say which tokens train.

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
    if len(at) == 0:  # without reading the device
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
    """All tokens in one array, and for each row its start and its length. Padding may be between rows."""
    lengths, first = count_true(mask).numpy(), mask.numpy().argmax(1)
    runs = int(count_true(mask[:, 1:] & ~mask[:, :-1]).sum()) + int(mask[:, :1].sum())
    if runs == np.count_nonzero(lengths):  # the tokens of each row are contiguous: no copy is needed
        return tokens.reshape(-1).numpy(), np.arange(len(tokens)) * tokens.shape[1] + first, lengths
    return tokens[mask].numpy(), np.cumsum(lengths) - lengths, lengths


def _shared_within(
    home: np.ndarray, flat: np.ndarray, starts: np.ndarray, lengths: np.ndarray, cells: int
) -> np.ndarray:
    """(n,) for each row, the number of leading tokens that an earlier row of its tree already has.

    The rows of a tree form a class. The longest row leads it, and every other row is compared with the leader
    up to the first different token. Rows that differ at the same position by the same token form a new class
    from that position on, with its own leader.

    Args:
        home: (n,) integers; rows with the same number are one tree.
        flat: tokens of all rows.
        starts: (n,) index of the first token of each row.
        lengths: (n,) number of tokens of each row.
        cells: tokens that are compared at once.
    """
    shared, rows = np.zeros_like(lengths), _order(-lengths, home)
    known, begins = np.zeros_like(lengths), _begins(home[rows])  # shared tokens and first row of a class
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
    """(n,) an order: by the last key, among equal values by the key before it, and so on."""
    order = np.arange(len(keys[0]))
    for key in keys:
        order = order[stable_order(torch.from_numpy(key[order])).numpy()]
    return order


def _begins(values: np.ndarray) -> np.ndarray:
    """(n,) bool: values that differ from the value before."""
    return np.append(np.ones(min(len(values), 1), dtype=bool), values[1:] != values[:-1])


def _alike(
    flat: np.ndarray, a: np.ndarray, b: np.ndarray, known: np.ndarray, most: np.ndarray, cells: int
) -> np.ndarray:
    """(n,) the number of equal tokens from the positions `a` and `b` on, up to the limits `most`.

    Args:
        flat: the tokens of all rows.
        a: (n,) positions in `flat`.
        b: (n,) positions in `flat`.
        known: (n,) number of tokens that are known to be equal.
        most: (n,) limits.
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
    """(n, BLOCK) the tokens from (n,) positions on. Behind the end of `flat`, its last token is repeated."""
    if places.max() <= len(flat) - BLOCK:
        return np.lib.stride_tricks.sliding_window_view(flat, BLOCK)[places]
    return flat.take(places[:, None] + np.arange(BLOCK), mode="clip")


def said_of_trees(numbers: Mapping[str, float]) -> str:
    """Say in one line what trees would save, from a report's numbers; empty if there are no tokens.

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
