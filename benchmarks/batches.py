"""Make the batch that several benchmarks share, and the loop over its minibatches."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache

import torch
from tensordict import TensorDict

from headrace.pipeline import Pipeline, load_pipeline

GROUP_SIZE, MINIBATCHES = 8, 8


def collected(rows: int, tokens: int, *, texts: bool = False) -> TensorDict:
    """A batch of rollouts with one row each. Every tenth group has equal rewards."""
    generator = torch.Generator().manual_seed(0)
    number = torch.arange(rows)
    reward = torch.rand(rows, generator=generator)
    reward.view(-1, GROUP_SIZE)[::10] = 1.0
    length = torch.randint(max(tokens // 4, 1), tokens, (rows, 1), generator=generator)  # no row is empty
    mask = torch.arange(tokens, 0, -1) <= length
    columns = {
        "group_id": number // GROUP_SIZE,
        "rollout_id": number,
        "expected_rollouts": torch.full((rows,), GROUP_SIZE),
        ("next", "reward"): reward.unsqueeze(-1),
        ("tokens", "full"): torch.randint(0, 30_000, (rows, tokens), generator=generator),
        ("masks", "all_assistant_mask"): mask,
        ("masks", "all_attention_mask"): mask.clone(),
        ("log_probs", "full"): -torch.rand(rows, tokens, generator=generator),
    }
    for name in ("prompt", "text") if texts else ():
        columns[name] = [f"{name} {row}" for row in range(rows)]
    return TensorDict(columns, batch_size=[rows])


@cache
def grpo(minibatches: int, *words: str) -> Pipeline:
    """Load the grpo recipe once, because composing it takes longer than most measurements."""
    return load_pipeline("pipeline=grpo", f"pipeline.stages.split.minibatches={minibatches}", *words)


def grpo_loop(batch: TensorDict, minibatches: int, *words: str) -> Callable[[], None]:
    """A loop over the minibatches of the grpo recipe. One minibatch is in memory at a time."""
    pipeline = deepcopy(grpo(minibatches, *words))

    def run() -> None:
        for minibatch in pipeline.minibatches(batch):
            del minibatch

    return run


def in_pieces(batch: TensorDict) -> Callable[[], None]:
    """The loop with the number of minibatches that most benchmarks use."""
    return grpo_loop(batch, MINIBATCHES)


def finished(rows: int) -> TensorDict:
    """Rollouts that have ended, with one row each, group by group."""
    generator, number = torch.Generator().manual_seed(0), torch.arange(rows).unsqueeze(-1)
    columns = {
        "group_id": number // GROUP_SIZE,
        "rollout_id": number,
        "expected_rollouts": torch.full_like(number, GROUP_SIZE),
        ("next", "reward"): torch.rand(rows, 1, generator=generator),
        ("next", "done"): torch.ones(rows, 1, dtype=torch.bool),
        ("tokens", "full"): torch.randint(0, 99, (rows, 16), generator=generator),
    }
    return TensorDict(columns, batch_size=[rows])
