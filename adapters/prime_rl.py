"""A recipe as an algorithm of prime-rl: ``ALGORITHM_CLASSES["grpo"] = RecipeAlgorithm``.

PrimeIntellect-ai/prime-rl, src/prime_rl/orchestrator/algo/, at 559b44772e (2026-08-21). The registry takes no
import path. So add a line with the class to prime-rl's `algo/__init__.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from prime_rl.orchestrator.algo.base import Algorithm, iter_trainable_traces
from prime_rl.orchestrator.algo.routing import assign_advantages
from tensordict import TensorDict

from headrace.pipeline import advantages_of

from .environment import recipe_of_environment

recipe_of_environment("as/prime_rl")  # an unknown recipe raises here


class RecipeAlgorithm(Algorithm):
    """Score one group at a time. Each trainable trace is a rollout."""

    async def score_group(self, episodes: list[Any]) -> None:
        """Assign advantages to the traces of one group."""
        found = list(iter_trainable_traces(episodes))
        if not found:
            return
        sampled = torch.tensor([sum(sum(node.mask) for node in trace.nodes) for _, trace in found])
        columns = {
            "group_id": torch.zeros(len(found), dtype=torch.int64),  # prime-rl calls once for each group
            "rollout_id": torch.arange(len(found)),
            "episode_id": [episode.id for episode, _ in found],
            "role": [trace.agent.name for _, trace in found],
            ("next", "reward"): torch.tensor([trace.reward for _, trace in found], dtype=torch.float32),
            ("masks", "all_assistant_mask"): torch.arange(int(sampled.max())) < sampled.unsqueeze(1),
        }
        result = advantages_of(recipe_of_environment("as/prime_rl"), TensorDict(columns, [len(found)]))
        for (_, trace), values, tokens in zip(
            found, result.advantage.tolist(), sampled.tolist(), strict=True
        ):
            assign_advantages(trace, values[:tokens] if len(values) > 1 else values[0])
