"""GRPOTrainer with the advantages of a headrace pipeline, for TRL 1.16."""

import torch
from tensordict import TensorDict
from trl import GRPOTrainer

from headrace.pipeline import Pipeline, advantages_of
from headrace.transforms import Status


class HeadraceGRPOTrainer(GRPOTrainer):
    def __init__(self, *args, pipeline: Pipeline, **kwargs):
        super().__init__(*args, **kwargs)
        self.pipeline = pipeline
        if (self.reward_weights != 1).any():
            raise ValueError("the recipe weighs rewards: set collapse.weights, and no reward_weights")

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        first = self.accelerator.process_index * len(inputs)  # they are those of all ranks, rank after rank
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        cut_off = torch.tensor([ids[-1] not in ends for ids in completion_ids_list], device=rewards.device)
        self._scored = {
            "rollout_id": torch.arange(first, first + len(inputs), device=rewards.device),
            ("next", "reward"): rewards[first : first + len(inputs)],
            "status": torch.where(cut_off, Status.TRUNCATED, Status.COMPLETED),
        }
        return rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        batch = TensorDict(self._scored, [len(inputs)], device=output["completion_mask"].device)
        size = self.num_generations if self.model.training else self.num_generations_eval
        # TRL repeats each prompt `size` times. Another one among them is a group that the gate refuses.
        places = (batch["rollout_id"] // size).tolist()
        batch["group_id"] = [f"{at}: {row.get('prompt')}" for at, row in zip(places, inputs, strict=True)]
        batch["expected_rollouts"] = torch.full_like(batch["rollout_id"], size)
        batch["masks", "all_assistant_mask"] = (output["completion_mask"] * output.get("tool_mask", 1)).bool()
        credit = advantages_of(self.pipeline, batch)
        output["advantages"] = credit.advantage
        output["tool_mask"] = credit.in_loss.int()  # by which TRL's losses count tokens
        output["num_items_in_batch"] = self.accelerator.gather(credit.in_loss.sum()).sum()
        logged, found = self._logs["advantages"], self.accelerator.gather(credit.advantage.mean(1)).tolist()
        for _ in range(min(len(logged), len(found))):  # in the place of TRL's own
            logged.pop()
        logged.extend(found)
        return output
