"""Settings of `task=xray` for recipes that are attached to a trainer: its whole step, with its own loss."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from headrace.pipeline import load_pipeline, trl_step
from headrace.pipeline.tools.xray.setting import LONGEST, RECIPE, Setting

from .attaching import FewerRowsWarning, attach

# The trainer's loss weighs the tokens: by recipe, the `loss_type`, and the recipe's option with its weights.
OF_TRL = {
    "grpo": ("grpo", "weight.unit=sample"),
    "dapo": ("dapo", "weight.unit=token"),
    "reinforce_pp": ("dapo", "weight.unit=token"),
    "dr_grpo": ("dr_grpo", f"weight.length={LONGEST}"),
}


def recipes_in_trl() -> list[Setting]:
    """Return recipes in TRL's GRPOTrainer, each with the `loss_type` that has its weights."""
    from trl import GRPOTrainer

    class Attached(GRPOTrainer):
        def __init__(self, *args: Any, recipe: str, **kwargs: Any):
            super().__init__(*args, **kwargs)
            with warnings.catch_warnings():  # that rows are dropped is no matter of their weights
                warnings.simplefilter("ignore", FewerRowsWarning)
                attach(self, recipe)

    found = []
    for recipe, (loss_type, weight) in OF_TRL.items():
        words = (f"pipeline.stages.{word}" for word in (weight, "split.minibatches=1"))
        name = f"attach(GRPOTrainer(loss_type={loss_type}), {recipe}), {weight}"
        step = trl_step(Attached, {"recipe": recipe}, loss_type=loss_type)
        pipeline = load_pipeline(recipe, *words)
        found.append(Setting(name, step, RECIPE, pipeline=pipeline, dtype=torch.float32))
    return found
