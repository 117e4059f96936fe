"""Small real rollouts from the default experiment's environment and policy."""

from __future__ import annotations

import torch
from composed import composed
from torchrl.collectors import Collector

from headrace.pipeline import Pipeline, RepeatSampler
from headrace.pipeline.reverse import DigitPolicy, ReverseEnv

OVERRIDES = (
    "pipeline.stages.collapse.reward=sum",
    "pipeline.stages.split.remainder=uneven",
)


def make_env(*, prompts: int = 3, group_size: int = 4, failing: float = 0.0, seed: int = 0) -> ReverseEnv:
    """An environment in which some rollouts fan out: they have a second turn."""
    sampler = RepeatSampler(
        1110, group_size=group_size, prompts_per_batch=prompts, seed=seed, remainder="drop"
    )
    return ReverseEnv(sampler, revised=0.5, failing=failing, seed=seed)


def make_policy(seed: int = 0) -> DigitPolicy:
    torch.manual_seed(seed)
    return DigitPolicy(width=16, heads=2, layers=1)


def make_pipeline(*overrides: str) -> Pipeline:
    return composed("pipeline=grpo", *OVERRIDES, *overrides)


def make_collector(env: ReverseEnv, batches: int = 1, **options) -> Collector:
    return Collector(
        env,
        options.pop("policy", None) or make_policy(),
        frames_per_batch=env.frames_per_batch,
        total_frames=env.frames_per_batch * batches,
        auto_register_policy_transforms=False,
        **options,
    )
