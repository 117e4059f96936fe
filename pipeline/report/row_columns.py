"""What a report knows of each row: the table of a run as NumPy columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from headrace.pipeline.account_keys import TEXTS, Keys
from headrace.pipeline.conversations import strings
from headrace.transforms.rewards import weighted_reward
from headrace.transforms.rows import Rows, TokenCount
from headrace.transforms.schema import REWARD
from headrace.transforms.tensordicts import column_of, flat_rows

if TYPE_CHECKING:
    from headrace.pipeline.run import Run

COLLECTED = ("collected tokens", "collected reward")
OF_TOKENS = "advantage of tokens"  # (N, 2): its mean, and the sum of its sizes


def note_collected(rows: Rows, keys: Keys) -> dict[str, Any]:
    """Note what rows were when they came in, and return their columns of text, by name."""
    table = rows.table
    table.columns |= _collected(rows, keys)
    found = {name: _first_column(table.batch, keys, name) for name in TEXTS}
    return {name: text for name, text in found.items() if text is not None and not isinstance(text, Tensor)}


def _collected(rows: Rows, keys: Keys) -> dict[str, Tensor]:
    columns = rows.table.columns
    tokens = columns.get(TokenCount(keys.loss_mask, keys.log_prob))
    reward = next((columns[key] for key in keys.found["reward"] if key in columns), None)
    found = zip(COLLECTED, (tokens, reward), strict=True)
    return {name: column for name, column in found if column is not None}


def note_carried(rows: Rows, keys: Keys) -> None:
    """Note of carried rows what :func:`note_collected` has noted of the others."""
    table = rows.table
    for name, column in _collected(rows, keys).items():
        if name in table.columns and table.carried is not None:
            noted = table.columns[name].clone()
            noted[table.carried] = column[table.carried].to(noted.dtype)
            table.columns[name] = noted


def texts_with_carried(
    texts: Mapping[str, Any], carried: TensorDictBase | None, keys: Keys
) -> dict[str, Sequence[str]]:
    """Columns of text with those of carried rows behind them; one that either lacks is left out."""
    found: dict[str, Sequence[str]] = {}
    for name, text in texts.items():
        more = () if carried is None else _first_column(carried, keys, name)
        parts = [None if part is None else strings(part, len(part)) for part in (text, more)]
        if None not in parts:
            found[name] = [each for part in parts for each in part or ()]
    return found


def note_advantage(rows: Rows, keys: Keys) -> None:
    """Note the mean and size of each row's advantage, where it is per token: before weights are in it."""
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
    rows.measure(OF_TOKENS, torch.cat(both))


def _mean_and_size(values: Tensor, mask: Tensor | None) -> Tensor:
    """(n, 2): the mean over tokens in the loss, 0 where there is none, and the sum of sizes over them."""
    flat = flat_rows(values).double()
    inside = torch.ones_like(flat, dtype=torch.bool)
    if mask is not None and mask.numel() == flat.numel():
        inside = flat_rows(mask)
    flat = torch.where(inside, flat, 0.0)
    return torch.stack([flat.sum(1) / inside.sum(1).clamp_min(1), flat.abs().sum(1)], 1)


def report_columns(run: Run) -> dict[str, np.ndarray]:
    """(N,) or (N, K) by name, of the rows of this rank; what they mean says :class:`StepReport`."""
    table, keys, found = run.known_rows.table, run.keys, dict[str, Tensor]()

    def first(name: str) -> Tensor | None:
        return next((table.columns[key] for key in keys.found[name] if key in table.columns), None)

    for unit, key in keys.units.items():
        if key in table.columns:
            found[f"{unit.removesuffix('s')}_id"] = table.columns[key]
    for name in ("status", "policy_version", "expected_rollouts"):
        if (column := first(name)) is not None and column.ndim == 1:
            found[name] = column.long()
    counted = torch.ones(table.size, dtype=torch.bool) if table.counted is None else table.counted
    if (collected := table.columns.get("collected reward")) is not None:
        several = flat_rows(collected.double())
        fits = keys.reward_weights is not None and len(keys.reward_weights) == several.shape[1] > 1
        found["collected_reward"] = weighted_reward(several, keys.reward_weights if fits else None)
        found["reward"] = found["collected_reward"]
        if several.shape[1] > 1:
            found["rewards"] = several
    if REWARD in table.columns:
        reward = table.columns[REWARD]
        unseen = reward.isnan() & ~table.here  # it left before rollouts had one reward
        before = found.get("reward", torch.full_like(reward, float("nan")))
        found["reward"] = torch.where(counted & ~unseen, reward, before)
    elif "reward" in found and (now := first("reward")) is not None and now.numel() == table.size:
        found["reward"] = now.double().reshape(-1)
    if (logged := first("logged_advantage")) is not None and logged.numel() == table.size:
        found["logged_advantage"] = logged.double().reshape(-1)
    if table.no_lengths:
        found["no_lengths"] = torch.ones(table.size, dtype=torch.int64)
    if (tokens := table.columns.get("collected tokens")) is not None:
        found["tokens"] = tokens = table.with_merged(tokens)
        now = table.columns.get(TokenCount(keys.loss_mask, keys.log_prob), tokens)
        found["trained_tokens"] = now * table.in_loss
    if OF_TOKENS in table.columns:
        found["advantage"], found["advantage_size"] = table.columns[OF_TOKENS].unbind(1)
    elif (advantage := first("advantage")) is not None and advantage.numel() == table.size:
        found["advantage"] = advantage.double().reshape(-1)
    if "peers" in keys.found and keys.found["peers"][0] in table.columns:
        found["peers"] = table.columns[keys.found["peers"][0]]
    if table.counted is not None:
        found["counted"] = counted.long()
    found |= run.trained_at
    weight = first("loss_weight")
    if "loss_weight" not in found and weight is not None and weight.numel() == table.size:
        found["loss_weight"] = weight.double().reshape(-1)
    if table.carried is not None:
        found["carried_in"] = torch.zeros(table.size, dtype=torch.int64).index_fill_(0, table.carried, 1)
    return {name: run.of_rank(column).numpy() for name, column in found.items()}


def _first_column(batch: TensorDictBase, keys: Keys, name: str) -> Any:
    for key in keys.found[name]:
        value = column_of(batch, key)
        if value is not None:
            return value
    return None
