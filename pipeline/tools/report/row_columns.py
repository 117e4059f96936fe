"""Convert the table of a run to NumPy columns, for its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import NestedKey
from torch import Tensor

from headrace.pipeline.account_keys import OF_TOKENS, OF_VERSIONS
from headrace.transforms.stages.sequences import with_merged
from headrace.transforms.table import TokenCount, weighted_reward
from headrace.transforms.table.schema import COMPARED, REWARD
from headrace.transforms.table.tensordicts import flat_rows

if TYPE_CHECKING:
    from headrace.pipeline.run import Run


def report_columns(run: Run) -> dict[str, np.ndarray]:
    """(N,) or (N, K) columns by name, for the rows of this rank. :class:`StepReport` says what they mean."""
    table, keys, found = run.known_rows.table, run.keys, dict[str, Tensor]()

    def first(name: str) -> Tensor | None:
        return next((table.columns[key] for key in keys.found[name] if key in table.columns), None)

    def number(name: str) -> Tensor | None:
        column = first(name)
        return None if column is None or column.numel() != table.size else column.double().reshape(-1)

    for unit, key in keys.units.items():
        if key in table.columns:
            found[f"{unit.removesuffix('s')}_id"] = table.columns[key]
    for name in ("status", "policy_version", "trainer_version", "expected_rollouts"):
        if (column := first(name)) is not None and column.ndim == 1:
            found[name] = column.long()
    if OF_VERSIONS in table.columns:
        oldest, newest, total, sampled = table.columns[OF_VERSIONS].unbind(1)
        found |= {"policy_version": oldest, "newest_version": newest}
        found |= {"version_sum": total, "version_tokens": sampled}
    counted = table.fates.counts
    if (collected := table.columns.get("collected reward")) is not None:
        several = flat_rows(collected.double())
        fits = keys.reward_weights is not None and len(keys.reward_weights) == several.shape[1] > 1
        found["collected_reward"] = weighted_reward(several, keys.reward_weights if fits else None)
        found["reward"] = found["collected_reward"]
        if several.shape[1] > 1:
            found["rewards"] = several
    if REWARD in table.columns:
        reward = table.columns[REWARD]
        # These rows left before each rollout had one reward.
        unseen = (reward.isnan() & ~table.fates.here) | (~counted & ~_left_after(run, REWARD))
        before = found.get("reward", torch.full_like(reward, float("nan")))
        found["reward"] = torch.where(unseen, before, reward)
    elif "reward" in found and (now := number("reward")) is not None:
        found["reward"] = now
    if (logged := number("logged_advantage")) is not None:
        found["logged_advantage"] = logged
    if table.masking.no_lengths:
        found["no_lengths"] = torch.ones(table.size, dtype=torch.int64)
    if (tokens := table.columns.get("collected tokens")) is not None:
        found["tokens"] = tokens = with_merged(table, tokens)
        now = table.columns.get(TokenCount(keys.loss_mask, keys.log_prob), tokens)
        found["trained_tokens"] = now * table.fates.in_loss
    if OF_TOKENS in table.columns:
        found["advantage"], found["advantage_size"] = table.columns[OF_TOKENS].unbind(1)
    elif (advantage := number("advantage")) is not None:
        found["advantage"] = advantage
    if "advantage" in found:
        # If a row was excluded before rewards were compared, the 0 in its column has no meaning.
        none = ~counted & ~_left_after(run, keys.found["advantage"][0])
        found["advantage"] = found["advantage"].masked_fill(none, torch.nan)
    if "peers" in keys.found and keys.found["peers"][0] in table.columns:
        found["peers"] = table.columns[keys.found["peers"][0]]
    if table.fates.counted is not None and "tokens" in found:
        kinds = zip(table.fates.names, table.fates.effects, strict=True)
        filtered = torch.tensor([kind == "excluded" and not name.endswith("/empty") for name, kind in kinds])
        found["empty"] = (~counted & ~filtered[table.fates.reason] & (found["tokens"] == 0)).long()
    if "advantage" in found:
        found["compared"], found["baseline"] = _compared(run)
    found |= run.trained_at
    if "loss_weight" not in found and (weight := number("loss_weight")) is not None:
        found["loss_weight"] = weight
    if table.carried is not None:
        found["carried_in"] = torch.zeros(table.size, dtype=torch.int64).index_fill_(0, table.carried, 1)
    return {name: run.of_rank(column).numpy() for name, column in found.items()}


def _left_after(run: Run, key: NestedKey) -> Tensor:
    """(N,) bool: rows that left the batch or the statistics after the first stage that writes the column."""
    fates, stages = run.known_rows.table.fates, list(run.stages.items())
    writers = [at for at, (_, stage) in enumerate(stages) if key in getattr(stage, "out_keys", ())]
    later = {name for name, _ in stages[min(writers, default=-1) + 1 :]}
    return torch.tensor([name.rpartition("/")[0] in later for name in fates.names])[fates.reason]


def _compared(run: Run) -> tuple[Tensor, Tensor]:
    """(N,) numbers of rollouts compared with a row, −1 if unknown; and (N,) baselines, NaN if unknown."""
    table = run.known_rows.table
    compared = table.notes.get(COMPARED)
    if compared is None:
        return torch.full((table.size,), -1), torch.full((table.size,), torch.nan, dtype=torch.float64)
    number, baseline = compared(table.size).unbind(1)
    if table.carried is not None:  # carried rows were compared at an earlier step
        number = number.index_fill(0, table.carried, -1)
    stages = list(run.stages.values())
    writers = [stage for stage in stages if run.keys.found["advantage"][0] in getattr(stage, "out_keys", ())]
    return number.long(), baseline if len(writers) == 1 else torch.full_like(baseline, torch.nan)
