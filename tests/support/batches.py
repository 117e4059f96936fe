"""A batch in the layout that GRPOLoss takes, with all columns that stages read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, lazy_stack


def batch_of(
    rewards: Sequence[float],
    groups: Sequence[int],
    rollouts: Sequence[int] | None = None,
    *,
    tokens: int = 4,
    device: str = "cpu",
    **columns: Sequence[int],
) -> TensorDict:
    """Rows with ids, rewards, tokens, masks, log-probabilities, a string, and columns that no stage knows."""
    rows = len(rewards)
    generator = torch.Generator().manual_seed(rows)
    batch = TensorDict(
        {
            "group_id": torch.tensor(groups, dtype=torch.int64),
            "rollout_id": torch.tensor(range(rows) if rollouts is None else rollouts, dtype=torch.int64),
            ("next", "reward"): torch.tensor(rewards, dtype=torch.float32).view(rows, 1),
            ("tokens", "full"): torch.randint(0, 9, (rows, tokens), generator=generator),
            ("masks", "all_attention_mask"): torch.ones(rows, tokens, dtype=torch.bool),
            ("masks", "all_assistant_mask"): torch.rand(rows, tokens, generator=generator) < 0.7,
            ("log_probs", "full"): -torch.rand(rows, tokens, generator=generator),
            ("stranger", "deep"): torch.arange(rows * 6).view(rows, 2, 3),
        },
        batch_size=[rows],
    )
    if tokens:
        batch["masks", "all_assistant_mask"][:, 0] = True  # each row has a token that trains
    for name in (
        "teacher_log_probs",
        "ref_log_probs",
        "entropy",
        "values",
        "sum_pi_squared",
    ):  # one number per token, for token advantages
        sign = 1 if name in ("entropy", "values", "sum_pi_squared") else -1
        batch[name, "full"] = sign * torch.rand(rows, tokens, generator=generator)
    batch["role"] = batch["rollout_id"] % 2
    for name, values in columns.items():
        batch[name] = torch.tensor(values, dtype=torch.int64)
    if device == "cpu":
        batch["prompt_text"] = [f"prompt {g}" for g in groups]
    return batch.to(device)


def no_rows(batch: TensorDict) -> TensorDict:
    """The batch without its rows. Texts are left out in tensordict 0.10, which has no empty stack of them."""
    try:
        return batch[:0]
    except RuntimeError:
        return batch.exclude("prompt_text")[:0]


def cut_rows(batch: TensorDict, parts: Iterable[Any], keys: Iterable[NestedKey]) -> TensorDict:
    """The same rows in a lazy stack. A slice or a mask selects the part of these columns that a row keeps."""
    keys, rows = list(keys), []
    for row, part in zip(batch.unbind(0), parts, strict=True):
        row = row.clone()
        for key in keys:
            row[key] = row[key][part].clone()
        rows.append(row)
    return lazy_stack(rows)
