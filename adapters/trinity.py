"""A recipe as Trinity-RFT's ``algorithm.advantage_fn``: headrace.adapters.trinity.RecipeOperator.

agentscope-ai/Trinity-RFT 0.6.0, the release: trinity/buffer/operators/experience_operator.py,
``ExperienceOperatorV1``, and trinity/buffer/pipelines/experience_pipeline.py. It takes the operator from
`algorithm.advantage_fn` if an algorithm, such as `grpo`, computes advantages outside its trainer.
"""

from __future__ import annotations

from typing import Any

import torch
from trinity.buffer.operators import ExperienceOperatorV1

from headrace.transforms import Status

from .environment import decide_here, recipe_of_environment

recipe_of_environment("as/verl")  # an unknown recipe raises here


class RecipeOperator(ExperienceOperatorV1):
    """Experiences of one task are a group. Experiences of one run are a rollout of any number of steps."""

    async def process(self, exps: list[Any]) -> tuple[list[Any], dict[str, float]]:
        """Write advantages and returns. Remove experiences that leave the loss, as Trinity's operators do."""
        if not exps:
            return [], {}
        columns = {
            "group_id": [exp.eid.tid for exp in exps],
            "rollout_id": [exp.eid.rid for exp in exps],
            "turn": [exp.eid.step for exp in exps],
            "status": [Status.TRUNCATED if exp.truncate_status else Status.COMPLETED for exp in exps],
            "reward": [exp.reward for exp in exps],
            "tokens": [int(exp.action_mask.sum()) for exp in exps],
            "length": [len(exp.action_mask) for exp in exps],
        }
        decision = decide_here("as/verl", columns)
        kept = []
        for exp, advantage, trains in zip(
            exps, decision.advantage.tolist(), decision.keep.tolist(), strict=True
        ):
            exp.advantages = exp.action_mask * torch.tensor(advantage, dtype=torch.float32)
            exp.returns = exp.advantages.clone()
            if trains:
                kept.append(exp)
        return kept, {f"headrace/{name}": float(value) for name, value in decision.metrics.items()}

    @classmethod
    def compute_in_trainer(cls) -> bool:
        """Return False: compute here, where all experiences of a step are."""
        return False

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return no arguments, because the environment names the recipe."""
        return {}
