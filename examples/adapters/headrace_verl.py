"""verl's advantage estimator `headrace`, for verl 0.9: algorithm.adv_estimator=headrace.

VERL_USE_EXTERNAL_MODULES=headrace_verl makes verl import it in every process.
"""

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import register_adv_est

from headrace.pipeline import advantages_of, load_pipeline

PIPELINE = load_pipeline("pipeline=as/verl", "pipeline.stages.gate.group_size=8")  # rollout.n


@register_adv_est("headrace")
def headrace_advantages(token_level_rewards, response_mask, index, config=None, **others):
    batch = TensorDict({"group_id": [str(uid) for uid in index]}, [len(index)], device=response_mask.device)
    batch["rollout_id"] = torch.arange(len(index), device=response_mask.device)
    batch["next", "reward"] = token_level_rewards.sum(-1)
    batch["masks", "all_assistant_mask"] = response_mask.bool()
    credit = advantages_of(PIPELINE, batch)
    advantages = credit.advantage * response_mask
    return advantages, advantages
