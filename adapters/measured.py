"""Settings of `task=xray` that run the whole step and loss of a trainer with a recipe."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from tensordict import TensorDictBase
from torch import nn

from headrace.pipeline import load_pipeline, trl_step
from headrace.pipeline.tools.xray.measure import Step
from headrace.pipeline.tools.xray.setting import LONGEST, RECIPE, Setting

from .attaching import FewerRowsWarning, attach

# The trainer's loss weighs the tokens. For each recipe: TRL's `loss_type`, and the recipe's option that gives
# the same weights.
OF_TRL = {
    "grpo": ("grpo", "weight.unit=sample"),
    "dapo": ("dapo", "weight.unit=token"),
    "reinforce_pp": ("dapo", "weight.unit=token"),
    "dr_grpo": ("dr_grpo", f"weight.length={LONGEST}"),
}


def recipes_in_trl() -> list[Setting]:
    """Return recipes in TRL's GRPOTrainer, each with the `loss_type` that gives the recipe's weights."""
    from trl import GRPOTrainer

    class Attached(GRPOTrainer):
        def __init__(self, *args: Any, recipe: str, **kwargs: Any):
            super().__init__(*args, **kwargs)
            with warnings.catch_warnings():  # weights do not depend on dropped rows
                warnings.simplefilter("ignore", FewerRowsWarning)
                attach(self, recipe)

    found = []
    for recipe, (loss_type, weight) in OF_TRL.items():
        name = f"attach(GRPOTrainer(loss_type={loss_type}), {recipe}), {weight}"
        step = trl_step(Attached, {"recipe": recipe}, loss_type=loss_type)
        found.append(_setting(name, step, recipe, weight, torch.float32))
    return found


def _setting(name: str, step: Step, recipe: str, weights: str, dtype: torch.dtype = torch.float64) -> Setting:
    """Make a setting that compares a step with a recipe of one minibatch. `weights` are stage options."""
    words = (f"pipeline.stages.{word}" for word in (*weights.split(), "split.minibatches=1"))
    return Setting(name, step, RECIPE, pipeline=load_pipeline(recipe, *words), dtype=dtype)


# For each recipe: verl's ``loss_agg_mode``, and the recipe's option that gives the same weights.
OF_VERL = {
    "as/verl": ("token-mean", "weight.unit=token"),
    "rloo": ("seq-mean-token-mean", "weight.unit=sample"),
    "dr_grpo": ("seq-mean-token-sum-norm", f"weight.length={LONGEST}"),
}


def recipes_in_verl() -> list[Setting]:
    """Return recipes that verl's registry calls, each in verl's loss with its `loss_agg_mode`."""
    from headrace.pipeline.tools.xray.of_verl import PROMPT, verl_step

    from .verl import estimate_advantages

    def step_of(recipe: str, mode: str) -> Any:
        loss = verl_step("vanilla", mode)

        def step(model: nn.Module, batch: TensorDictBase, cut: int) -> None:
            inside = batch["masks", "all_assistant_mask"][:, PROMPT:]
            rewards = torch.zeros(inside.shape)
            rewards[:, 0] = batch["next", "reward"].sum(-1)
            size = f"pipeline.stages.gate.group_size={int(batch['expected_rollouts'][0])}"
            with patch.dict(os.environ, {"HEADRACE_RECIPE": recipe, "HEADRACE_OVERRIDES": size}):
                found, _ = estimate_advantages(rewards, inside, batch["group_id"].flatten().tolist())
            of_row = found.sum(1) / inside.sum(1).clamp_min(1)
            loss(model, batch.clone().set("advantage", of_row[:, None, None]), cut)

        return step

    found = []
    for recipe, (mode, weight) in OF_VERL.items():
        name = f"adv_estimator=headrace, HEADRACE_RECIPE={recipe}, loss_agg_mode={mode}"
        found.append(_setting(name, step_of(recipe, mode), recipe, weight))
    return found


# For each recipe: OpenRLHF's ``actor.loss_agg_mode``, and the recipe's options that give the same weights.
OF_OPENRLHF = {
    "as/openrlhf": ("token-mean", "weight.unit=token"),
    "rloo": ("seq-mean-token-mean", "weight.unit=sample"),
    "dr_grpo": ("token-mean", "weight.unit=token weight.length=null"),
}
DYNAMIC = "train.dynamic_batch_enable"


def recipes_in_openrlhf() -> list[Setting]:
    """Return recipes in OpenRLHF's whole step, each with the `loss_agg_mode` that gives the recipe's weights.

    With dynamic batches, ZeRO 1 and 2 train the last micro-batch alone. ZeRO 3 trains all micro-batches.
    """
    from headrace.pipeline.tools.xray.of_openrlhf import openrlhf_step

    from .openrlhf import compute_advantages_and_returns

    def of(recipe: str, **arguments: Any) -> Setting:
        def advantages(maker: Any, experiences: list[Any]) -> list[Any]:
            with patch.dict(os.environ, {"HEADRACE_RECIPE": recipe}):
                return compute_advantages_and_returns(maker, experiences)

        mode, weight = OF_OPENRLHF[recipe]
        given = {"actor.loss_agg_mode": mode} | arguments
        name = ", ".join([f"HEADRACE_RECIPE={recipe}", *(f"{key}={value}" for key, value in given.items())])
        return _setting(name, openrlhf_step(advantages, **given), recipe, weight, torch.float32)

    dynamic = [of("as/openrlhf", **{DYNAMIC: True, "ds.zero_stage": stage}) for stage in (2, 3)]
    return [*(of(recipe) for recipe in OF_OPENRLHF), *dynamic]


# For each recipe: the `loss_type` of ms-swift, and the recipe's options that give the same weights.
OF_MS_SWIFT = {
    "as/trl": ("grpo", "weight.unit=sample"),
    "rloo": ("dapo", "weight.unit=token weight.length=null"),
    "dr_grpo": ("dr_grpo", f"weight.length={LONGEST}"),
}


def recipes_in_ms_swift() -> list[Setting]:
    """Return recipes in ms-swift's GRPOTrainer, each with the `loss_type` that gives the recipe's weights."""
    from headrace.pipeline.tools.xray.of_ms_swift import ms_swift_step

    found = []
    for recipe, (loss_type, weight) in OF_MS_SWIFT.items():
        name = f"attach(GRPOTrainer(loss_type={loss_type}), {recipe})"
        step = ms_swift_step(partial(attach, recipe=recipe), loss_type=loss_type)
        found.append(_setting(name, step, recipe, weight, torch.float32))
    return found
