"""TRL's trainers with a model of one layer, whose tokens are digits."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.adapters import attach

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
    """A tokenizer. Token 0 is padding, token 1 the end, and tokens 2 to 11 are the digits."""
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


def some_equal(prompts: Sequence[str], completions: Sequence[str], **others: Any) -> list[float]:
    """Equal rewards in the groups of four of the eight prompts."""
    found = [completion.count("1") + 0.1 * len(completion) for completion in completions]
    return [
        0.0 if prompt in ("34", "78", "0", "2") else each for prompt, each in zip(prompts, found, strict=True)
    ]


def over_generating(rank: int, world: int, folder: str, port: int) -> dict[str, list[Any]]:
    """Take two steps of a GRPOTrainer on each rank. It trains half of the groups that it generates."""
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: str(value) for name, value in (found | {"MASTER_PORT": port}).items()}
    trainer = small_trainer(Path(folder), trl.GRPOTrainer, (some_equal,), 2, gradient_accumulation_steps=2)
    attach(trainer, "grpo", over_generation=2, scale="none")
    own, steps, runs = trainer._compute_loss, [], []
    trainer._compute_loss = lambda model, inputs: steps.append(inputs) or own(model, inputs)
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda each: (generate(each), runs.append(trainer.last_run))[0]
    trainer.train()
    return {
        "ranks": [trainer.accelerator.num_processes],
        "counts": [dict(run.ledger.counts()) for run in runs],
        "advantages": [each["advantages"].flatten().tolist() for each in steps],
        "tokens": [int(each["tool_mask"].sum()) for each in steps],
        "denominators": [int(each["num_items_in_batch"]) for each in steps],
        "weights": [each.detach().flatten()[:5].tolist() for each in trainer.model.parameters()],
    }
