"""Rows with the log-probabilities of two policies, and loops that compute their statistics."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from batches import cut_rows
from tensordict import TensorDict

from headrace.pipeline import Pipeline

OLD, SAMPLER, MASK = ("old_log_probs", "full"), ("log_probs", "full"), ("masks", "all_assistant_mask")


def with_old(batch: TensorDict, spread: float = 0.002) -> TensorDict:
    """Add the trainer's log-probabilities: the sampler's, with a small difference for each token."""
    steps = batch["tokens", "full"] * 7 % 5 - 2
    batch[OLD] = batch[SAMPLER] + spread * steps
    return batch


def two_policies(rows: int, tokens: int, seed: int = 0, spread: float = 0.7) -> TensorDict:
    """Random rows in float64. Row 1 has no token in the loss, row 2 has one. Outside are NaN and infinity."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    mask[1] = mask[2] = False
    mask[2, tokens // 2] = True
    sampler = -torch.rand(rows, tokens, generator=generator, dtype=torch.float64)
    old = sampler + spread * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    old[3, 0], mask[3, 0] = sampler[3, 0] + 30.0, True  # a log-ratio beyond the clamp
    sampler[~mask], old[~mask] = math.nan, math.inf
    batch = TensorDict({"rollout_id": torch.arange(rows) // 2, "group_id": torch.arange(rows) // 4}, [rows])
    batch[OLD], batch[SAMPLER], batch[MASK] = old, sampler, mask
    batch["advantage"] = torch.randn(rows, 1, 1, generator=generator, dtype=torch.float64)
    return batch


def ragged(batch: TensorDict) -> TensorDict:
    """The same rows, each cut after its last token in the loss."""
    ends = [max(row.nonzero().flatten().tolist(), default=0) + 1 for row in batch[MASK]]
    return cut_rows(batch, map(slice, ends), (OLD, SAMPLER, MASK))


class Alone(NamedTuple):
    """The results of one stage for a batch."""

    batch: TensorDict
    metrics: dict[str, float]


def alone(stage, batch: TensorDict) -> Alone:
    """Run one stage in a pipeline, which records its metrics."""
    run = Pipeline({"it": stage}).run(batch)
    own = {name.removeprefix("it/"): value for name, value in run.metrics.items() if name.startswith("it/")}
    return Alone(run.batch, own)


# -- one row after another, one token after another ------------------------------------------------------


def clamp(log: float) -> float:
    return min(max(log, -20.0), 20.0)


def log_ratios(batch: TensorDict) -> list[list[float]]:
    """log π_old − log μ of each row's tokens in the loss."""
    return [
        [float(o) - float(s) for o, s, inside in zip(old, sampler, mask, strict=True) if inside]
        for old, sampler, mask in zip(batch[OLD], batch[SAMPLER], batch[MASK], strict=True)
    ]


def stated_weights(rows: list[list[float]], level, bound, low, high) -> list[list[float]]:
    """The weights of each row's tokens in the loss."""
    weights = []
    for logs in rows:
        if level == "token":
            found = [math.exp(clamp(log)) for log in logs]
        elif logs:
            log = math.fsum(logs) / (len(logs) if level == "mean" else 1)
            found = [math.exp(clamp(log))] * len(logs)
        else:
            found = []
        weights.append([stated_bound(w, bound, low, high) for w in found])
    return weights


def stated_bound(w: float, bound: str, low: float | None, high: float | None) -> float:
    below, above = low is not None and w < low, high is not None and w > high
    if bound == "truncate":
        return low if below else high if above else w
    return 0.0 if bound == "zero" and (below or above) else w


def stated_divergence(rows: list[list[float]], estimator: str, level: str) -> list:
    """The divergence of each token in the loss, by row, or of each row."""
    found = []
    for logs in rows:
        each = []
        for log in logs:
            d = -clamp(log)
            each.append({"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator])
        if level == "token":
            found.append(each)
        elif not each:
            found.append(0.0)
        else:
            found.append(
                {"sum": math.fsum(each), "mean": math.fsum(each) / len(each), "max": max(each)}[level]
            )
    return found
