"""Run a recipe in OpenRLHF, in place of a method of the experience maker in the workers that Ray starts.

OpenRLHF/OpenRLHF 0.11.2, the release, openrlhf/trainer/ppo_utils/experience_maker.py,
``RemoteExperienceMaker.compute_advantages_and_returns``. OpenRLHF takes no import path. So Ray calls
:func:`replace_advantages` in each process that it starts: set ``worker_process_setup_hook``.
"""

from __future__ import annotations

from typing import Any

import torch

from headrace.transforms import Status

from .environment import decide_here, recipe_of_environment


def replace_advantages() -> None:
    """Let OpenRLHF's experience maker take its advantages from the recipe of the environment variables."""
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    recipe_of_environment("as/openrlhf")  # an unknown recipe raises here
    RemoteExperienceMaker.compute_advantages_and_returns = compute_advantages_and_returns


@torch.no_grad()
def compute_advantages_and_returns(self: Any, experiences: list[Any]) -> list[Any]:
    """Do what OpenRLHF's method of this name does, with the recipe's advantages instead of shaped rewards."""
    from openrlhf.models.utils import compute_reward
    from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties

    args = self.strategy.args
    for each in experiences:
        each.rewards = each.rewards.float()
    apply_length_penalties(experiences, args)
    size = args.rollout.n_samples_per_prompt
    places = [place for each in experiences for place in each.index]
    prompts = [prompt for each in experiences for prompt in each.prompts]
    columns = {
        # The rollouts of a prompt are consecutive. Another prompt among them makes a group that is too small.
        "group_id": [f"{place // size}: {prompt}" for place, prompt in zip(places, prompts, strict=True)],
        "rollout_id": places,
        "expected_rollouts": [size] * len(places),
        "reward": torch.cat([each.rewards for each in experiences]),
        "tokens": torch.cat([each.action_mask.sum(1) for each in experiences]),
        "status": torch.cat(
            [torch.where(each.truncated.bool(), Status.TRUNCATED, Status.COMPLETED) for each in experiences]
        ),
    }
    advantage = decide_here("as/openrlhf", columns).advantage.float()
    for each, shaped in zip(experiences, advantage.split([len(e.index) for e in experiences]), strict=True):
        reward = compute_reward(
            shaped.to(each.rewards),
            self.kl_ctl.value,
            each.kl,
            action_mask=each.action_mask,
            reward_clip_range=args.reward.clip_range,
        )
        each.returns = self.get_cumulative_returns(reward, each.action_mask, 1.0)
        each.advantages = each.returns.clone()
        each.info["return"] = reward.sum(dim=-1)
        each.kl = None
    return experiences
