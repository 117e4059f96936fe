"""A recipe inside TRL's ``GRPOTrainer`` and ``RLOOTrainer``: `attach(trainer, "as/trl")`.

huggingface/trl 1.16.0, the release, trl/trainer/grpo_trainer.py and rloo_trainer.py: ``_calculate_rewards``
returns the rewards of all ranks, and ``_generate_and_score_completions`` returns the tensors of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from headrace.pipeline import Pipeline, advantages_of
from headrace.transforms import BatchError, Status
from headrace.transforms.table import listing

from .attaching import GIVEN, Follows, log_run, warn_of_no_rows
from .over_generation import rows_of, rows_to_train, train_first


class RecipeAdvantages(Follows):
    """The methods of TRL's ``GRPOTrainer`` that a recipe replaces."""

    gives = GIVEN
    pipeline: Pipeline
    over_generation: int

    def _calculate_rewards(self: Any, inputs: Any, prompts: Any, completions: Any, ids: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, ids)  # type: ignore[misc]
        first = self.accelerator.process_index * len(inputs)  # `rewards` has the rows of all ranks, in order
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
        training = self.model.training
        size = self.num_generations if training else self.num_generations_eval
        # TRL repeats each prompt `size` times. Another prompt among them makes a group that is too small.
        places = (batch["rollout_id"] // size).tolist()
        batch["group_id"] = [f"{at}: {row.get('prompt')}" for at, row in zip(places, inputs, strict=True)]
        batch["expected_rollouts"] = torch.full_like(batch["rollout_id"], size)
        batch["masks", "all_assistant_mask"] = (output["completion_mask"] * output.get("tool_mask", 1)).bool()
        kept = len(inputs) // self.over_generation if training else len(inputs)
        chooses = kept < len(inputs)
        pipeline = train_first(self.pipeline, kept // size) if chooses else self.pipeline
        try:
            result = advantages_of(pipeline, batch)
        except BatchError as error:
            error.more += say_without_reward(self.reward_func_names, batch["next", "reward"])
            raise
        self._put_advantages(output, result)
        log_run(self, result.run)
        if training and not self.accelerator.gather(result.in_loss.any(1)).any():
            warn_of_no_rows(self)
        logged, found = self._logs["advantages"], self.accelerator.gather(result.advantage.mean(1)).tolist()
        for _ in range(min(len(logged), len(found))):  # replaces TRL's own advantages
            logged.pop()
        logged.extend(found)
        return rows_of(output, rows_to_train(result.in_loss, size, kept), len(inputs)) if chooses else output

    def _put_advantages(self: Any, output: dict[str, Any], result: Any) -> None:
        """Write the advantages, the mask of the tokens in the loss, and their number."""
        output["advantages"] = result.advantage
        output["tool_mask"] = result.in_loss.int()
        output["num_items_in_batch"] = self.accelerator.gather(result.in_loss.sum()).sum()


def say_without_reward(names: Sequence[str], rewards: torch.Tensor) -> str:
    """Name the reward functions that gave None or NaN, if any. `rewards`: (N, K), a column for each."""
    lacking = [name for name, lacks in zip(names, rewards.isnan().any(0).tolist(), strict=True) if lacks]
    return f". Reward functions that gave None or NaN: {listing(lacking)}" if lacking else ""


class RecipeAdvantagesOfRows(RecipeAdvantages):
    """The methods of TRL's ``RLOOTrainer`` that a recipe replaces. The loss needs one advantage per row."""

    @staticmethod
    def check(trainer: Any) -> None:
        """Check that the trainer itself changes neither rewards nor advantages.

        Raises:
            ValueError: a setting of RLOOConfig changes them.
        """
        for name, off in (("beta", 0.0), ("normalize_advantages", False), ("reward_clip_range", None)):
            if (found := getattr(trainer, name, off)) != off:
                raise ValueError(
                    "a recipe takes rewards without a KL term and computes the advantages, so RLOOTrainer's "
                    f"{name}={found!r} would have no effect: set {name}={off!r} in RLOOConfig. "
                    "docs/coming-from/trl.md has stages that do the same"
                )

    @staticmethod
    def of_trainer(trainer: Any) -> dict[str, str]:
        """Options of the default recipe that give RLOOTrainer's advantages."""
        return {"advantage.baseline": "leave_one_out", "advantage.scale": "none"}

    def _put_advantages(self: Any, output: dict[str, Any], result: Any) -> None:
        part = (result.in_loss != output["completion_mask"].bool()).any(1) & result.in_loss.any(1)
        if result.advantage.shape[1] > 1 or part.any():
            raise ValueError(
                "RLOOTrainer's loss has one advantage and one probability ratio of each completion, and the "
                "recipe gives its tokens different advantages or masks some of them: attach it to GRPOTrainer"
            )
        output["advantages"] = result.advantage.squeeze(1)  # 0 in a row that is out of the loss


class RecipeAdvantagesOfUnsloth(RecipeAdvantages):
    """The methods that a recipe replaces in Unsloth's ``GRPOTrainer`` (2026.10.9, unsloth/models/rl.py).

    Unsloth's loss also pads completions on the left (``max_left_pad``), but not advantages.
    """

    def _put_advantages(self: Any, output: dict[str, Any], result: Any) -> None:
        if result.advantage.shape[1] > 1:
            raise ValueError(
                "Unsloth's loss has one advantage of each completion, and the recipe gives its tokens "
                "different ones: attach it to TRL's own GRPOTrainer, without Unsloth's patch"
            )
        super()._put_advantages(output, result)
