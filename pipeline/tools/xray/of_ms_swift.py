"""The GRPO losses of ms-swift as steps for `xray`, with its trainer's gradient accumulation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from .measure import Step
from .setting import (
    LONGEST,
    ROWS_OF_STEP,
    SUM_OF_STEP,
    TOKENS_OF_PART,
    TOKENS_OF_STEP,
    Setting,
    table_log_probs,
)
from .token_table import LOSS, TOKENS


def ms_swift_settings() -> list[Setting]:
    """Return a setting for each ``loss_type`` of its GRPOTrainer that is a mean over tokens."""

    def of(
        name: str, documented: str, constant: float = 1.0, epsilon_high: float = 0.2, **more: Any
    ) -> Setting:
        step = _ms_swift_step(name.partition(",")[0], epsilon_high)
        return Setting(f"GRPOTrainer(loss_type={name})", step, documented, constant, **more)

    bound = "epsilon_high bounds the ratio; its page sets 5.0, the default is 0.2"
    return [
        of("grpo", ROWS_OF_STEP, curve=True),
        of("bnpo", TOKENS_OF_PART, note="normalised by the tokens of the micro-batch"),
        of("dr_grpo", SUM_OF_STEP, 1 / LONGEST, note="the constant is max_completion_length"),
        of("dapo", TOKENS_OF_STEP),
        of("cispo", TOKENS_OF_STEP, note=bound),
        of("cispo, epsilon_high=5.0", TOKENS_OF_STEP, epsilon_high=5.0, curve=True),
        of("sapo", ROWS_OF_STEP, curve=True),
    ]


def _ms_swift_step(loss_type: str, epsilon_high: float) -> Step:
    from accelerate import Accelerator
    from swift.rl_core.data import GRPOBatch
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    settings: dict[str, Any] = {
        "loss_type": loss_type,
        "epsilon_low": 0.2,
        "epsilon_high": epsilon_high,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "beta": 0.0,
        "max_completion_length": LONGEST,
        "importance_sampling_level": "token",
        "compute_entropy": False,
        "overlong_filter": False,
        "disable_rollout_importance_sampling": True,
        "rollout_importance_sampling_mode": None,
        "log_rollout_offpolicy_metrics": False,
        "off_policy_sequence_mask_delta": None,
        "sdar_loss_coef": 0.0,
        "chord_sft_iterator": None,
        "model_accepts_loss_kwargs": False,
        "compute_loss_func": None,
    }

    class Losses(GRPOTrainer):
        """Its losses without its model, templates and rollouts, which a table cannot provide."""

        _has_teacher = False

        def __init__(self, model: nn.Module, cut: int):
            self.__dict__.update(settings, model=model, accelerator=Accelerator(cpu=True))
            self.args = SimpleNamespace(delta=None, gradient_accumulation_steps=cut)
            self.current_gradient_accumulation_steps = cut

        def _get_per_token_logps_and_entropies(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return table_log_probs(model, inputs["input_ids"]), None

    def step(model: nn.Module, batch: TensorDictBase, cut: int) -> None:
        trainer = Losses(model, cut)
        for part in batch.chunk(cut):
            inside = part[LOSS][:, 1:]
            given = GRPOBatch(
                completion_mask=inside,
                truncated_mask=torch.zeros(len(part), dtype=torch.bool),
                seq_lengths=inside.sum(1),
                old_per_token_logps=part["log_probs", "full"][:, 1:],
                advantages=part["advantage"].squeeze(-1).expand(inside.shape),
                num_items_in_batch=batch[
                    LOSS
                ].sum(),  # the trainer counts these before it makes micro-batches
            )
            loss, _ = trainer._compute_loss_and_metrics(model, {"input_ids": part[TOKENS]}, given)
            # transformers' Trainer divides each loss by the number of micro-batches.
            (loss / cut).backward()

    return step
