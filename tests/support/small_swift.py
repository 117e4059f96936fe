"""A stand-in for ms-swift, which is not installed: a step of its GRPOTrainer."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@contextmanager
def instead_of_swift() -> Iterator[None]:
    """Put the stand-in in place of ms-swift."""
    if find_spec("swift") is not None:
        yield
        return
    modules = {name: ModuleType(name) for name in ("swift", "swift.model", "swift.rlhf_trainers")}
    names: dict[str, Any] = {
        "swift.model": {"ModelMeta": meta},
        "swift.model.model_meta": {"ModelInfo": info},
        "swift.rlhf_trainers": {"GRPOConfig": SimpleNamespace},
        "swift.rlhf_trainers.grpo_trainer": {"GRPOTrainer": GRPOTrainer},
        "swift.template": {"get_template": Template},
    }
    for name, inside in names.items():
        vars(modules.setdefault(name, ModuleType(name))).update(inside)
    sys.modules |= modules
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def meta(name: str, groups: list[Any], *, template: str) -> SimpleNamespace:
    return SimpleNamespace(template=template)


def info(name: str, folder: str, dtype: torch.dtype, **options: Any) -> SimpleNamespace:
    return SimpleNamespace(dtype=dtype, **options)


class Template:
    """The template of a model without a chat format."""

    def __init__(self, tokenizer: Any, *, template_type: str, truncation_strategy: str):
        assert tokenizer.model_meta.template == template_type == "dummy"
        assert tokenizer.model_info.dtype == torch.float32
        assert truncation_strategy == "left"
        self.tokenizer, self.length, self.mode = tokenizer, tokenizer.model_info.max_model_len, ""

    def set_mode(self, mode: str) -> None:
        self.mode = mode

    def encode(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """The tokens of the prompt and of the answer."""
        assert self.mode == "train"
        asked, answered = messages
        assert (asked["role"], answered["role"]) == ("user", "assistant")
        prompt = self.tokenizer(asked["content"])["input_ids"]
        return (prompt + answered["content"])[-self.length :][: len(prompt)], answered["content"]


class GRPOTrainer:
    """The first optimiser step of a generation batch, without clipping."""

    kl_in_reward, beta = False, 0.0

    def __init__(self, *, model: Any, args: Any, template: Any, reward_funcs: list[Any], train_dataset: Any):
        self.args, self.model, self.template, self.reward_funcs = args, model, template, reward_funcs
        self.questions = [each["messages"] for each in train_dataset]
        self.num_generations = self.num_generations_eval = args.num_generations
        self.reward_weights, self.scale_rewards = torch.ones(len(reward_funcs)), args.scale_rewards
        self.state, self.callbacks = SimpleNamespace(global_step=0), []
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        assert model.model_meta.template == "dummy"

    def remove_callback(self, kind: type) -> None:
        assert kind.__name__ == "PrinterCallback"

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def _preprocess_inputs(self, samples: list[Any]) -> list[Any]:
        return samples

    def _compute_advantages(self, samples: list[Any], rewards_per_func: Tensor, batches: Any) -> Tensor:
        of_group = rewards_per_func.sum(1).view(-1, self.num_generations)
        apart = of_group - of_group.mean(1, keepdim=True)
        return (apart / (of_group.std(1, keepdim=True) + 1e-4)).flatten()

    def _prepare_batch_inputs(self, samples: list[Any]) -> list[dict[str, Any]]:
        size, made = self.args.per_device_train_batch_size, []
        for start in range(0, len(samples), size):
            part = samples[start : start + size]
            tokens = [self.template.encode(each.messages) for each in part]
            assert [each.response_token_ids[-1] for each in part] == [answer for _, answer in tokens]
            mask = torch.arange(max(len(answer) for _, answer in tokens)) < torch.tensor(
                [[len(answer)] for _, answer in tokens]
            )
            own = self.log_probs(tokens, mask).detach()
            made.append({"tokens": tokens, "grpo_batch": SimpleNamespace(mask=mask, old_per_token_logps=own)})
        return made

    def log_probs(self, tokens: list[tuple[list[int], list[int]]], mask: Tensor) -> Tensor:
        found = torch.zeros(mask.shape)
        for row, (prompt, answer) in enumerate(tokens):
            every = torch.tensor([prompt + answer])
            shown = self.model(input_ids=every).logits[0, :-1].log_softmax(-1)
            found[row, : len(answer)] = shown.gather(-1, every[0, 1:, None]).squeeze(-1)[-len(answer) :]
        return found

    def train(self) -> None:
        size, args = self.num_generations, self.args
        samples = [
            SimpleNamespace(prompt_id=f"p{number}", request_id=f"r{number}/{at}", messages=messages)
            for number, messages in enumerate(self.questions)
            for at in range(size)
        ]
        assert len(samples) == args.per_device_train_batch_size * args.steps_per_generation
        samples = self._generate_completions(samples)  # type: ignore[attr-defined]
        assert {each.finish_reason for each in samples} == {"stop"}
        answers = [each.messages[-1]["content"] for each in samples]
        rewards = torch.tensor([each(answers) for each in self.reward_funcs]).T
        advantages = self._compute_advantages(samples, rewards, None).split(args.per_device_train_batch_size)
        batches = self._prepare_batch_inputs(samples)
        every = sum(map(len, answers))
        for number in range(cuts := args.gradient_accumulation_steps):
            mask, old = (
                getattr(batches[number]["grpo_batch"], name) for name in ("mask", "old_per_token_logps")
            )
            ratio = (self.log_probs(batches[number]["tokens"], mask) - old).exp()
            term = -ratio * advantages[number].float()[:, None] * mask
            loss = {
                "grpo": (term.sum(1) / mask.sum(1)).mean() / cuts,
                "dr_grpo": term.sum() / len(mask) / args.max_completion_length / cuts,
                "bnpo": term.sum() / mask.sum() / cuts,
                "dapo": term.sum() / every,
            }
            loss[args.loss_type].backward()
        for callback in self.callbacks:
            callback.on_pre_optimizer_step(args, self.state, None)


GRPOTrainer.__module__ = "swift.rlhf_trainers.grpo_trainer"  # by which `attach` recognises it
