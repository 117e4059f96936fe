"""TRL's trainers with a model of one layer, whose tokens are digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

GROUP_SIZE, ROWS = 4, 8
PROMPTS = ["12", "34", "56", "78", "9", "0", "1", "2"]
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
IDS: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
PLAIN: dict[str, Any] = {
    "learning_rate": 1e-2,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
}


def digits(kind: Any = PreTrainedTokenizerFast) -> Any:
    """A tokenizer: 0 is padding, 1 the end, 2 to 11 the digits."""
    tokens: Any = Tokenizer(models.WordLevel({token: i for i, token in enumerate("_$0123456789")}))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return kind(tokenizer_object=tokens, pad_token="_", eos_token="$", padding_side="left")


def small_model() -> Any:
    """A one-layer model, with equal weights at each call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=12, **SIZES, **IDS))


def small_trainer(
    folder: Path, kind: Any, rewards: Sequence[Callable[..., Any]], steps: int, **options: Any
) -> Any:
    """A GRPOTrainer or RLOOTrainer, or a class derived from one."""
    config = trl.RLOOConfig if issubclass(kind, trl.RLOOTrainer) else trl.GRPOConfig
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "num_generations": GROUP_SIZE,
        "max_completion_length": 4,
        "max_steps": steps,
    }
    return kind(
        model=small_model(),
        args=config(**settings | PLAIN | options),
        reward_funcs=list(rewards),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=digits(),
    )
