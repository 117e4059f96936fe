"""Chats with a small language model: rollouts of one to three turns with rewards that a test can compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import Lock

import torch
from tensordict import NonTensorStack, TensorDict, set_list_to_stack
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torchrl.data import Unbounded
from torchrl.envs import InitTracker, StepCounter, Transform
from torchrl.envs.llm import DatasetChatEnv
from torchrl.modules.llm import TransformersWrapper
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.pipeline import RepeatSampler

GROUP_SIZE = 2
WORDS = ["<pad>", "<|im_start|>", "<|im_end|>", "user", "assistant", "\n", "?", *"0123456789"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each word of TorchRL's chat template and each digit."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"user|assistant|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<|im_end|>", "unk_token": "?", "padding_side": "left"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<|im_start|>"], **special
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, **size, **ids)).eval()


def make_policy(model, tokenizer, mode: str = "text", **options) -> TransformersWrapper:
    """A policy that never samples <pad>, because this token would be taken for padding."""
    sampling = {"max_new_tokens": 3, "do_sample": True, "bad_words_ids": [[tokenizer.pad_token_id]]}
    options = {"return_log_probs": False, "pad_output": False, "generate_kwargs": sampling} | options
    return TransformersWrapper(model, tokenizer=tokenizer, input_mode=mode, **options)


def make_actor(model, tokenizer) -> TransformersWrapper:
    """The trained actor, which scores dense rows."""
    scoring = {"input_mode": "tokens", "input_key": ("tokens", "full"), "generate": False, "pad_output": True}
    return TransformersWrapper(model, tokenizer=tokenizer, **scoring)


def turns_of(rollout: int, most: int = 3) -> int:
    return 1 + rollout % most


def reward_of(rollout: int, turn: int) -> float:
    return (rollout * 7 + turn * 3) % 5 + 1.0


class Turns(Transform):
    """Give each turn a reward, and end a rollout after some turns. Both follow from the rollout id."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def _step(self, now: TensorDict, following: TensorDict) -> TensorDict:
        ids, turns = now["rollout_id"].flatten().tolist(), now["step_count"].flatten().tolist()
        pairs = list(zip(ids, turns, strict=True))
        ends = torch.tensor([[turn + 1 >= turns_of(rollout, self.most)] for rollout, turn in pairs])
        shape = following["done"].shape
        following["reward"] = torch.tensor([[reward_of(*pair)] for pair in pairs]).view(shape)
        following["terminated"], following["done"] = ends.view(shape), ends.view(shape).clone()
        return following

    def transform_reward_spec(self, reward_spec):
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1))
        return reward_spec


def prompts(digits: int = 3, first_group: int = 0) -> Iterator[TensorDict]:
    """Groups with ids from `first_group` on, each with a query of up to `digits` digits."""
    for draws in RepeatSampler(997, group_size=GROUP_SIZE, seed=0).draws():
        queries = (str(p * 613)[: 1 + p % digits] for p in draws["prompt"].tolist())
        draws["group_id"] += first_group
        draws["rollout_id"] += first_group * GROUP_SIZE
        yield draws.set("query", NonTensorStack(*queries))


class SharedRows:
    """An iterator of single rows that environments share, from any thread."""

    def __init__(self):
        self.rows = (row for draws in prompts() for row in draws.split(1))
        self.lock = Lock()

    def __iter__(self) -> SharedRows:
        return self

    def __next__(self) -> TensorDict:
        with self.lock:
            return next(self.rows)


def make_env(
    tokenizer,
    *,
    envs: int,
    mode: str = "text",
    most: int = 3,
    first_group: int = 0,
    source: Iterable[TensorDict] | None = None,
) -> DatasetChatEnv:
    """An environment. Each reset takes the next rollout of a source, or of the environment's own prompts."""
    set_list_to_stack(True).set()
    if source is None:
        source = prompts(1 if mode == "tokens" else 3, first_group)  # ChatEnv needs tokens of one length
    env = DatasetChatEnv.from_dataloader(source, batch_size=(envs,), tokenizer=tokenizer, input_mode=mode)
    for transform in (InitTracker(), StepCounter(), Turns(most)):
        env.append_transform(transform)
    return env
