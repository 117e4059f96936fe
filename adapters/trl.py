"""A recipe inside TRL's ``GRPOTrainer``: `attach(trainer, "as/trl")`.

huggingface/trl 1.16.0, the release, trl/trainer/grpo_trainer.py: ``_calculate_rewards`` returns the rewards
of all ranks, ``_generate_and_score_completions`` what the loss is made of.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from headrace.pipeline import Pipeline, advantages_of
from headrace.transforms import Status

from .attaching import log_run


class RecipeAdvantages:
    """What a trainer of TRL does otherwise with a recipe attached."""

    pipeline: Pipeline

    def _calculate_rewards(self: Any, inputs: Any, prompts: Any, completions: Any, ids: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, ids)  # type: ignore[misc]
        first = self.accelerator.process_index * len(inputs)  # they are those of all ranks, rank after rank
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        cut_off = torch.tensor([row[-1] not in ends for row in ids], device=rewards.device)
        self._scored = {
            "rollout_id": torch.arange(first, first + len(inputs), device=rewards.device),
            ("next", "reward"): rewards[first : first + len(inputs)],
            "status": torch.where(cut_off, Status.TRUNCATED, Status.COMPLETED),
        }
        return rewards

    def _generate_and_score_completions(self: Any, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        batch = TensorDict(self._scored, [len(inputs)], device=output["completion_mask"].device)
        size = self.num_generations if self.model.training else self.num_generations_eval
        # TRL repeats each prompt `size` times. Another one among them is a group that the gate refuses.
        places = (batch["rollout_id"] // size).tolist()
        batch["group_id"] = [f"{at}: {row.get('prompt')}" for at, row in zip(places, inputs, strict=True)]
        batch["expected_rollouts"] = torch.full_like(batch["rollout_id"], size)
        batch["masks", "all_assistant_mask"] = (output["completion_mask"] * output.get("tool_mask", 1)).bool()
        result = advantages_of(self.pipeline, batch)
        output["advantages"] = result.advantage
        output["tool_mask"] = result.in_loss.int()  # by which TRL's losses count tokens
        output["num_items_in_batch"] = self.accelerator.gather(result.in_loss.sum()).sum()
        log_run(self, result.run)
        logged, found = self._logs["advantages"], self.accelerator.gather(result.advantage.mean(1)).tolist()
        for _ in range(min(len(logged), len(found))):  # in the place of TRL's own
            logged.pop()
        logged.extend(found)
        return output
