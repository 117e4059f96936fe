"""Make steps for `xray` from TorchRL's losses, with TorchRL's own or headrace's advantages."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.objectives.llm import DAPO, CISPOLoss, DistillationLoss, GRPOLoss, MCAdvantage, SFTLoss

from headrace.pipeline.load import load_pipeline
from headrace.pipeline.train import optimise
from headrace.transforms import group_relative_advantage

from .measure import Step
from .setting import RECIPE, ROWS_OF_PART, SUM_OF_STEP, TOKENS_OF_PART, Setting, table_log_probs
from .token_table import LOSS, TOKENS

ACCUMULATED = (
    "a mean over the batch that the loss gets; TorchRL's optimisation stepper divides losses by their number"
)


def torchrl_settings() -> list[Setting]:
    """Return settings of three losses with MCAdvantage and recipes, and of two losses with a teacher."""
    found = []
    clipped = ((GRPOLoss, 0.2, "grpo"), (DAPO, (0.2, 0.28), "dapo"), (CISPOLoss, (0.2, 0.28), "scalerl"))
    for kind, clip, recipe in clipped:
        options: Any = {"clip_epsilon": clip, "entropy_bonus": False, "masking_strategy": "generic"}
        for aggregation, documented in (("token_mean", TOKENS_OF_PART), ("prompt_mean", ROWS_OF_PART)):
            name = f"{kind.__name__}(aggregation={aggregation}), MCAdvantage"
            step = _with_mc_advantage(kind, **options, aggregation=aggregation)
            curve = aggregation == "token_mean"
            found.append(Setting(name, step, documented, note=ACCUMULATED, curve=curve))
        name = f"{kind.__name__}(aggregation=none), weighted by headrace's {recipe}"
        pipeline = load_pipeline(recipe, "pipeline.stages.split.minibatches=1")
        found.append(Setting(name, _with_headrace(kind, recipe, **options), RECIPE, pipeline=pipeline))
    reduced = (("mean", True, ROWS_OF_PART), ("mean", False, SUM_OF_STEP), ("sum", False, SUM_OF_STEP))
    for reduction, normalised, documented in reduced:
        options = {"normalize_by_seq_length": normalised, "reduction": reduction}
        constant, note = (1.0, ACCUMULATED) if reduction == "mean" else (12.0, "")
        for teacher in (SFTLoss, DistillationLoss):
            name = f"{teacher.__name__}(normalize_by_seq_length={normalised}, reduction={reduction})"
            step = _with_a_teacher(teacher, accumulated=reduction == "mean", **options)
            found.append(Setting(name, step, documented, constant, note=note))
    return found


def _with_mc_advantage(kind: type[GRPOLoss], **options: Any) -> Step:
    def step(model: nn.Module, batch: TensorDictBase, cut: int) -> None:
        size = int(batch["expected_rollouts"][0])
        out = MCAdvantage(size, prompt_key="group_id").inv(batch.clone())
        reward, group = batch["next", "reward"].sum(-1), batch["group_id"].flatten()
        said = group_relative_advantage(reward, group, eps_mode="clamp")
        batch["advantage"] = said[:, None, None]
        out["advantage"] = out["advantage"].reshape(-1, 1, 1)
        loss = kind(model, **options)
        for part in out.chunk(cut):
            (loss(part).loss_objective.sum() / cut).backward()

    return step


def _with_headrace(kind: type[GRPOLoss], recipe: str, **options: Any) -> Step:
    def step(model: nn.Module, batch: TensorDictBase, cut: int) -> None:
        words = [f"pipeline.stages.split.{word}" for word in ("minibatches=1", f"microbatches={cut}")]
        loss = kind(model, **options, aggregation="none")
        optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
        optimise(load_pipeline(recipe, *words).minibatches(batch), loss, optimiser)

    return step


def _with_a_teacher(kind: type[nn.Module], accumulated: bool, **options: Any) -> Step:
    """Make a step without rewards. All advantages are 1. A teacher gives tokens twice their probability."""

    def step(model: nn.Module, batch: TensorDictBase, cut: int) -> None:
        batch["advantage"] = torch.ones(len(batch), 1, 1, dtype=torch.float64)
        batch["teacher"] = torch.where(batch[LOSS], batch["log_probs", "full"] + math.log(2), 0.0)

        def log_probs(tokens: torch.Tensor) -> torch.Tensor:
            return nn.functional.pad(table_log_probs(model, tokens), (1, 0))

        actor = TensorDictModule(log_probs, [TOKENS], [("log_probs", "full")])
        actor.model = model
        loss = kind(actor, tokenizer=object(), **options)
        keys = {"history": TOKENS} | ({"teacher_log_prob": "teacher"} if kind is DistillationLoss else {})
        loss.set_keys(**keys)
        for part in batch.chunk(cut):
            (sum(loss(part).values()) / (cut if accumulated else 1)).backward()

    return step
