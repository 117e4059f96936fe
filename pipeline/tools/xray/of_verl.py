"""Make steps for `xray` from verl's policy losses and `ppo_loss`, accumulated as in verl's FSDP engine."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import nn

from .measure import Step
from .setting import LENGTHS, LONGEST, ROWS_OF_STEP, SUM_OF_STEP, TOKENS_OF_STEP, Setting, table_log_probs
from .token_table import LOSS, REAL, TOKENS

PROMPT = 2  # tokens of each prompt


def verl_settings() -> list[Setting]:
    """Return a setting for each ``loss_agg_mode`` with the loss ``vanilla``, and settings of other losses."""

    def of(loss: str, mode: str, documented: str, constant: float = 1.0, **more: Any) -> Setting:
        return Setting(f"{loss}, loss_agg_mode={mode}", verl_step(loss, mode), documented, constant, **more)

    width = "loss_scale_factor is the width of the batch where it is not set"
    return [
        of("vanilla", "token-mean", TOKENS_OF_STEP, curve=True),
        of("vanilla", "token-sum", SUM_OF_STEP, float(len(LENGTHS))),
        of("vanilla", "seq-mean-token-sum", SUM_OF_STEP),
        of("vanilla", "seq-mean-token-mean", ROWS_OF_STEP),
        of("vanilla", "seq-mean-token-sum-norm", SUM_OF_STEP, 1 / LONGEST, note=width),
        of("gspo", "seq-mean-token-mean", ROWS_OF_STEP, curve=True),
        of("sapo", "seq-mean-token-mean", ROWS_OF_STEP, curve=True),
        of("cispo", "token-mean", TOKENS_OF_STEP, curve=True),
        of("gpg", "token-mean", TOKENS_OF_STEP),
        of("geo_mean", "token-mean", ROWS_OF_STEP, note="loss_agg_mode is not used", curve=True),
    ]


def verl_step(loss: str, mode: str) -> Step:
    """Make a step from a policy loss of verl and its ``loss_agg_mode``."""
    from verl.utils.tensordict_utils import assign_non_tensor
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    def step(model: nn.Module, batch: TensorDictBase, cut: int) -> None:
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=int(batch["expected_rollouts"][0]),
            ppo_micro_batch_size_per_gpu=len(batch) // cut,
            loss_agg_mode=mode,
            policy_loss=PolicyLossConfig(loss_mode=loss),
        )
        for part in batch.chunk(cut):
            tokens, real, inside = part[TOKENS], part[REAL], part[LOSS][:, PROMPT:]
            # verl's models return the log-probability of the next token at each position, without padding.
            shown = nn.functional.pad(table_log_probs(model, tokens), (0, 1))[real]
            data: Any = TensorDict(
                {
                    "prompts": tokens[:, :PROMPT],
                    "responses": tokens[:, PROMPT:],
                    "attention_mask": real.long(),
                    "response_mask": inside,
                    "old_log_probs": part["log_probs", "full"][:, PROMPT:],
                    "advantages": part["advantage"].squeeze(-1).expand(inside.shape) * inside,
                },
                batch_size=[len(part)],
            )
            # Counts of the whole step, which FSDPEngine.forward_backward_batch takes before it makes
            # micro-batches.
            tokens_of_step = int(batch[LOSS].sum())
            assign_non_tensor(data, dp_size=1, global_batch_size=len(batch), batch_num_tokens=tokens_of_step)
            ppo_loss(config, {"log_probs": shown}, data)[0].backward()

    return step
