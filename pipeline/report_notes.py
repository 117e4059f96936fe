"""Note facts about rows for the report: their columns on arrival, and their advantages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.table import Rows, TokenCount
from headrace.transforms.table.tensordicts import column_of, flat_rows, loss_mask_of
from headrace.transforms.table.tokens import versions_of_rows

from .account_keys import OF_TOKENS, OF_VERSIONS, TEXTS, Keys
from .conversations import strings


def note_collected(rows: Rows, keys: Keys) -> dict[str, Any]:
    """Note the columns of rows on arrival, and return their columns of text by name."""
    rows.table.columns |= _collected(rows, keys)
    texts = dict[str, Any]()
    for name in TEXTS:
        text = _first_column(rows.table.find, keys.found[name])
        if text is not None and not isinstance(text, Tensor):
            texts[name] = text
    return texts


def _collected(rows: Rows, keys: Keys) -> dict[str, Tensor]:
    columns, found = rows.table.columns, dict[str, Tensor]()
    if (tokens := columns.get(TokenCount(keys.loss_mask, keys.log_prob))) is not None:
        found["collected tokens"] = tokens
    for key in reversed(keys.found["reward"]):
        if key in columns:
            found["collected reward"] = columns[key]
    # Versions per token are read on arrival, because a report also shows rows that leave the batch later.
    key = next((key for key in keys.found["policy_version"] if rows.table.find(key) is not None), None)
    if key is not None and loss_mask_of(rows.table.batch, keys.loss_mask) is not None:
        versions = versions_of_rows(rows, key, keys.loss_mask)
        if versions is not None:
            found[OF_VERSIONS] = versions
    return found


def note_carried(rows: Rows, keys: Keys) -> None:
    """Note for carried rows what :func:`note_collected` notes for new rows."""
    table = rows.table
    for name, column in _collected(rows, keys).items():
        if name in table.columns and table.carried is not None:
            noted = table.columns[name].clone()
            noted[table.carried] = column[table.carried].to(noted.dtype)
            table.columns[name] = noted


def texts_with_carried(
    texts: Mapping[str, Any], carried: TensorDictBase | None, keys: Keys
) -> dict[str, Sequence[str]]:
    """Append the texts of carried rows to columns of text. A column that either lacks is left out."""
    found: dict[str, Sequence[str]] = {}
    for name, text in texts.items():
        more = () if carried is None else _first_column(partial(column_of, carried), keys.found[name])
        parts = [None if part is None else strings(part, len(part)) for part in (text, more)]
        if None not in parts:
            found[name] = [each for part in parts for each in part or ()]
    return found


def note_advantage(rows: Rows, keys: Keys) -> None:
    """Note the mean and size of each row's advantage per token, before it is multiplied by weights."""
    key = keys.found["advantage"][0]
    known = rows.table.columns.get(key)
    of_rows = known is not None and known.ndim == 1 and not rows.table.is_late(key)
    if of_rows or rows.table.batch is None:
        return
    both = []
    for batch in rows.table.decided_in_parts():
        values, mask = column_of(batch, key), column_of(batch, keys.loss_mask)
        if values is None:
            return
        if isinstance(values, Tensor):
            both.append(_mean_and_size(values, mask if isinstance(mask, Tensor) else None))
            continue
        for row, own in zip(values, [None] * len(values) if mask is None else mask, strict=True):
            both.append(_mean_and_size(row[None], own if own is None else own[None]))
    rows.table.measure(OF_TOKENS, torch.cat(both))


def _mean_and_size(values: Tensor, mask: Tensor | None) -> Tensor:
    """(n, 2): the mean over a row's tokens in the loss (0 without any), and the sum of absolute values."""
    flat = flat_rows(values).double()
    inside = torch.ones_like(flat, dtype=torch.bool)
    if mask is not None and mask.numel() == flat.numel():
        inside = flat_rows(mask)
    flat = torch.where(inside, flat, 0.0)
    return torch.stack([flat.sum(1) / inside.sum(1).clamp_min(1), flat.abs().sum(1)], 1)


def _first_column(find: Callable[[NestedKey], Any], keys: Iterable[NestedKey]) -> Any:
    for key in keys:
        value = find(key)
        if value is not None:
            return value
    return None
