"""A recipe inside ms-swift's ``GRPOTrainer``: `attach(trainer, "as/trl")`.

modelscope/ms-swift 4.6.0, the release, swift/rlhf_trainers/grpo_trainer.py: ``_compute_advantages`` gets the
rewards of all ranks and the samples of this rank, with `prompt_id` and `request_id`. It returns the
advantages of all ranks. swift/rl_core/advantage.py computes them as TRL does.
"""

from __future__ import annotations

from typing import Any

import torch

from headrace.pipeline import Decider, Pipeline
from headrace.pipeline.halves import before_the_split
from headrace.transforms import Status

from .attaching import Follows, log_run


class RecipeAdvantages(Follows):
    """The methods of ms-swift's trainer that a recipe replaces."""

    pipeline: Pipeline

    def _compute_advantages(self: Any, samples: Any, rewards_per_func: Any, batches: Any) -> torch.Tensor:
        from accelerate.utils import gather_object

        if self.kl_in_reward and self.beta != 0.0:
            raise ValueError("a recipe takes rewards without a KL term: set kl_in_reward=false")
        size = self.num_generations if self.model.training else self.num_generations_eval
        prompts = gather_object([sample.prompt_id for sample in samples])
        decider = Decider(before_the_split(self.pipeline))
        columns = {
            "group_id": prompts,
            "rollout_id": gather_object([sample.request_id for sample in samples]),
            "expected_rollouts": [size] * len(prompts),
            "status": gather_object([status_of(sample.finish_reason) for sample in samples]),
            "reward": rewards_per_func,
        }
        decision = decider.decide({name: each for name, each in columns.items() if decider.reads(name)})
        super()._compute_advantages(samples, rewards_per_func, batches)  # type: ignore[misc]  # for its metrics
        log_run(self, decision.run)
        return decision.advantage.to(rewards_per_func)


def status_of(finish_reason: str | None) -> int:
    """Convert an engine's finish reason to our status number."""
    return int(Status.TRUNCATED if finish_reason == "length" else Status.COMPLETED)
