"""Read the texts of prompts and responses, and numbers that belong to single tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.table.schema import ROW, has_key
from headrace.transforms.table.tensordicts import ATTENTION, PROMPT, RESPONSE, device_of, take_rows

Decode = Callable[[list[int]], Sequence[str]]
TOKENS: NestedKey = ("tokens", "full")


class TokenValues(NamedTuple):
    """The texts and numbers of a response, from its first token in the loss to its last."""

    texts: Sequence[str] | None  # the text of each token; None: there is no decoder
    values: Mapping[str, Sequence[float]]  # a number for each token, by name; NaN: not in the loss


def decoder_of(*components: Any) -> Decode | None:
    """Find a function that shows tokens as text: the `token_texts` of a component, else its tokenizer.

    Args:
        components: objects such as an environment and a policy. The first that can decode is used.

    Returns:
        A function from token ids to one string for each; None if no component can decode.

    Example:
        >>> from headrace.pipeline.reverse import DigitPolicy
        >>> decoder_of(object(), DigitPolicy())([1, 2, 12])
        ['1', '2', ' backwards? ']
    """
    for component in components:
        if callable(decode := getattr(component, "token_texts", None)):
            return decode
        if callable(decode := getattr(getattr(component, "tokenizer", None), "batch_decode", None)):
            return partial(_one_by_one, decode)
    return None


def _one_by_one(batch_decode: Callable[[list[list[int]]], list[str]], ids: list[int]) -> list[str]:
    return batch_decode([[each] for each in ids])


def texts_of_tokens(
    batch: TensorDictBase, rows: int, decode: Decode, loss_mask_key: NestedKey
) -> dict[str, list[str]]:
    """Decode the prompt and the response of each row. This reads the device a few times.

    Args:
        batch: TensorDict ``[n]`` with ``("tokens", "full")``. If rows have left, the batch needs row numbers.
        rows: number of strings to return. A row that is not in the batch gets an empty string.
        decode: a function from token ids to one string for each.
        loss_mask_key: key of (n, T) bool. If it is missing, ``("tokens", "response")`` gives the length of
            the response.

    Returns:
        Under ``prompt`` and under ``response``, `rows` strings; empty if the batch has no tokens.
    """
    if len(batch) == 0 or not has_key(batch, TOKENS):
        return {}
    some = _select(batch, [TOKENS, ATTENTION, PROMPT, RESPONSE, loss_mask_key])
    texts = {name: [""] * rows for name in ("prompt", "response")}
    if not (has_key(batch, loss_mask_key) or has_key(batch, RESPONSE)):
        return texts
    for row, part in zip(row_numbers(batch), _rows(some), strict=True):
        tokens = part.get(TOKENS).reshape(-1)
        real = torch.ones_like(tokens, dtype=torch.bool)  # False at padding
        if has_key(part, ATTENTION):
            real = part.get(ATTENTION).reshape(-1).bool()
        if has_key(part, loss_mask_key):
            trains = part.get(loss_mask_key).reshape(-1)
        else:
            trains = torch.arange(len(tokens)) >= len(tokens) - part.get(RESPONSE).numel()
            trains = trains & real if len(real) == len(tokens) else trains
        if not bool(trains.any()):
            continue
        first, last = _span(trains)
        before, ids = tokens[:first][real[:first]], tokens[first : last + 1]
        texts["prompt"][row] = "".join(_decoded(decode, before.tolist(), row))
        texts["response"][row] = "".join(_decoded(decode, ids.tolist(), row))
    return texts


def values_by_token(
    batch: TensorDictBase,
    keys: Mapping[str, NestedKey],
    rows: Iterable[int],
    loss_mask_key: NestedKey,
    decode: Decode | None = None,
) -> dict[int, TokenValues]:
    """Read the numbers of each token of some rows, such as its advantage. This reads the device a few times.

    Args:
        batch: TensorDict ``[n]``, after the stages, with row numbers.
        keys: keys of columns (n, T) or (n, T, 1), by name. Columns with one number per row are skipped.
        rows: row numbers. Rows that have left the batch, or have no token in the loss, are left out.
        loss_mask_key: key of (n, T) bool.
        decode: a function from token ids to one string for each; None: the texts of tokens are not known.

    Returns:
        The values by row number; empty if no column has a number per token.
    """
    there = {name: key for name, key in keys.items() if _by_token(batch, key, loss_mask_key)}
    if not there:
        return {}
    place = {row: at for at, row in reversed(list(enumerate(row_numbers(batch))))}
    wanted = [row for row in rows if row in place]
    at = torch.tensor([place[row] for row in wanted], dtype=torch.int64)
    some = _select(batch, [loss_mask_key, TOKENS, *there.values()])
    found = {}
    for row, part in zip(wanted, _rows(take_rows(some, at.to(device_of(batch)), on_cpu=at)), strict=True):
        trains = part.get(loss_mask_key).reshape(-1)
        if not bool(trains.any()):
            continue
        first, last = _span(trains)
        here = slice(first, last + 1)
        columns = {name: part.get(key).reshape(-1).double() for name, key in there.items()}
        values = {name: torch.where(trains, each, torch.nan)[here] for name, each in columns.items()}
        ids = part.get(TOKENS).reshape(-1)[here].tolist() if has_key(part, TOKENS) else []
        texts = _decoded(decode, ids, row) if decode is not None and ids else None
        found[row] = TokenValues(texts, {name: each.tolist() for name, each in values.items()})
    return found


def _decoded(decode: Decode, ids: list[int], row: int) -> list[str]:
    texts = list(decode(ids)) if ids else []
    if len(texts) != len(ids) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"decode must return a string for each token; for {len(ids)} tokens of row {row} it returned "
            f"{texts!r:.80}. Decode one by one: decode=lambda ids: [tokenizer.decode([id]) for id in ids]"
        )
    return texts


def _by_token(batch: TensorDictBase, key: NestedKey, mask_key: NestedKey) -> bool:
    """Whether a column has a number for each entry of the mask, and rows have several entries each."""
    if len(batch) == 0 or not has_key(batch, key) or not has_key(batch, mask_key):
        return False
    parts = batch.tensordicts if isinstance(batch, LazyStackedTensorDict) else [batch]
    pairs = [(part.get(key), part.get(mask_key)) for part in parts]
    alike = all(isinstance(value, Tensor) and value.numel() == mask.numel() for value, mask in pairs)
    return alike and sum(mask.numel() for _, mask in pairs) > len(batch)


def _span(trains: Tensor) -> tuple[int, int]:
    places = trains.nonzero().flatten()
    return int(places[0]), int(places[-1])


def _select(batch: TensorDictBase, keys: Iterable[NestedKey]) -> TensorDictBase:
    return batch.select(*(key for key in keys if has_key(batch, key)))


def _rows(batch: TensorDictBase) -> Sequence[TensorDictBase]:
    """List the rows one by one, on the CPU."""
    there = batch.cpu()
    return there.tensordicts if isinstance(there, LazyStackedTensorDict) else there.unbind(0)


def row_numbers(batch: TensorDictBase) -> list[int]:
    """The row numbers of a batch. A batch that no stage has seen has all its rows."""
    return batch.get(ROW).tolist() if has_key(batch, ROW) else list(range(len(batch)))
