"""An algorithm of prime-rl: ALGORITHM_CLASSES["grpo"] = HeadraceAlgorithm."""

import torch
from prime_rl.orchestrator.algo.base import Algorithm, iter_trainable_traces
from prime_rl.orchestrator.algo.routing import assign_advantages
from tensordict import TensorDict

from headrace.pipeline import advantages_of, load_pipeline

PIPELINE = load_pipeline("pipeline=as/prime_rl", "~pipeline.stages.gate")  # traces with an error left already


class HeadraceAlgorithm(Algorithm):
    async def score_group(self, episodes):
        found = list(iter_trainable_traces(episodes))
        sampled = torch.tensor([sum(sum(node.mask) for node in trace.nodes) for _, trace in found])
        columns = {
            "group_id": torch.zeros(len(found), dtype=torch.int64),  # prime-rl calls once for each group
            "rollout_id": torch.arange(len(found)),
            "episode_id": [episode.id for episode, _ in found],
            "role": [trace.agent.name for _, trace in found],
            ("next", "reward"): torch.tensor([trace.reward for _, trace in found], dtype=torch.float32),
            ("masks", "all_assistant_mask"): torch.arange(max(sampled, default=0)) < sampled.unsqueeze(1),
        }
        credit = advantages_of(PIPELINE, TensorDict(columns, [len(found)]))
        for (_, trace), values, tokens in zip(
            found, credit.advantage.tolist(), sampled.tolist(), strict=True
        ):
            assign_advantages(trace, values[:tokens] if len(values) > 1 else values[0])
