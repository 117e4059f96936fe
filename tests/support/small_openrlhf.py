"""A stand-in for OpenRLHF, which is not installed: its losses, and a step of its trainer."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import init_device_mesh  # noqa: F401  (see MODULES)

MODULES = {
    "models.loss": "PolicyLoss, SFTLoss",
    "models.utils": "compute_reward",
    "utils.loss_utils": "iter_grad_accum_global_norm",
    # The step replaces a function of this module.
    "utils.deepspeed.deepspeed": "Strategy, init_device_mesh\n\n"
    "class DeepspeedStrategy(Strategy):\n    def mesh(self):\n        return init_device_mesh('cuda', (1,))",
    "trainer.ray.ppo_actor": "Actor, ActorPPOTrainer, Experience",
    "trainer.ppo_utils.experience_maker": "RemoteExperienceMaker",
    "trainer.ppo_utils.length_penalty": "apply_length_penalties",
}
LISTINGS = ("models", "utils", "trainer.ray")  # packages whose listings import models and DeepSpeed
LISTED: list[str] = []  # listings that were imported


@contextmanager
def instead_of_openrlhf(folder: Path) -> Iterator[None]:
    """Put the stand-in in place of OpenRLHF, and an empty module in place of DeepSpeed."""
    if find_spec("openrlhf") is not None:
        yield
        return
    for module, names in MODULES.items():
        path = folder.joinpath("openrlhf", *module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        needs_gpu = "from flash_attn.utils.distributed import all_gather\n" * ("ppo_actor" in module)
        path.write_text(f"{needs_gpu}from small_openrlhf import {names}\n")
        for parent in path.relative_to(folder).parents[:-1]:
            listing = ".".join(parent.parts[1:]) in LISTINGS
            text = "import small_openrlhf\nsmall_openrlhf.LISTED.append(__name__)\n" if listing else ""
            (folder / parent / "__init__.py").write_text(text)
    LISTED.clear()
    deepspeed = ModuleType("deepspeed")
    deepspeed.__spec__ = ModuleSpec("deepspeed", None)
    sys.modules["deepspeed"] = deepspeed
    try:
        with patch("sys.path", [str(folder), *sys.path]):
            yield
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] in ("deepspeed", "openrlhf")]:
            del sys.modules[name]
        if dist.is_initialized():
            dist.destroy_process_group()


def compute_reward(reward, kl_coef, kl, action_mask=None, reward_clip_range=None):
    """-β · KL for each token, and the reward at the last token in the loss."""
    reward = reward if reward_clip_range is None else reward.clamp(*reward_clip_range)
    found = -kl_coef * (torch.zeros(action_mask.shape) if kl is None else kl)
    for row, mask in enumerate(action_mask):
        found[row, int(mask.nonzero().max())] += reward[row]
    return found


def apply_length_penalties(experiences: list[Any], args: Any) -> None:
    """Change nothing."""


def mean_of(term: Tensor, mask: Tensor, by_token: bool, *, tokens: int, rows: int, parts: int) -> Tensor:
    """Return a mean over the tokens or the rows of a step, times the number of micro-batches."""
    if by_token:
        return (term * mask).sum() / tokens * parts
    return ((term * mask).sum(1) / mask.sum(1)).sum() / rows * parts


class PolicyLoss(nn.Module):
    def __init__(self, *, token_level_loss: bool = True, policy_loss_type: str = "ppo", **_: Any):
        super().__init__()
        self.by_token = token_level_loss and policy_loss_type == "ppo"

    def forward(
        self, log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **counts: int
    ) -> tuple[Tensor, None]:
        return mean_of(-(log_probs - old).exp() * advantages, mask, self.by_token, **counts), None


class SFTLoss(nn.Module):
    def __init__(self, *, token_level_loss: bool = True):
        super().__init__()
        self.by_token = token_level_loss

    def forward(self, log_probs: Tensor, mask: Tensor, **counts: int) -> Tensor:
        return mean_of(-log_probs, mask, self.by_token, **counts)


def iter_grad_accum_global_norm(parts: list[Any], group: None, size: int, mask_of: Any) -> Any:
    """Yield each micro-batch with the counts of the whole window."""
    assert (group, len(parts)) == (None, size)
    masks = [mask_of(part) for part in parts]
    counts = {"tokens": sum(int(each.sum()) for each in masks), "rows": sum(map(len, masks)), "parts": size}
    yield from ((part, counts) for part in parts)


class Experience(SimpleNamespace):
    """Rows, with a tensor or a list for each column."""

    def rows(self) -> list[dict[str, Any]]:
        columns = {**vars(self), **self.info}
        return [{name: value[row] for name, value in columns.items() if name != "info" and value is not None}
                for row in range(len(self.index))]  # fmt: skip


class RemoteExperienceMaker:
    """The returns of rewards for each token."""

    def get_cumulative_returns(self, reward: Tensor, mask: Tensor, gamma: float) -> Tensor:
        """Σ over later tokens of γ^distance · reward, at the tokens in the loss."""
        found, after = torch.zeros_like(reward), torch.zeros(len(reward))
        for token in reversed(range(reward.shape[1])):
            found[:, token] = after = reward[:, token] * mask[:, token] + gamma * after
        return found * mask


class Actor(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.packing_samples = model, True

    def log_probs(self, tokens: Tensor) -> Tensor:
        assert not self.packing_samples
        logits = self.model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
        return logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)


class Strategy:
    def __init__(self, *, args: Any, zero_stage: int, train_batch_size: int, micro_train_batch_size: int):
        self.args, self.ready = args, False
        assert zero_stage == args.ds.zero_stage
        assert train_batch_size == args.train.batch_size == 12 == 4 * args.rollout.batch_size
        assert args.rollout.n_samples_per_prompt == 4
        alone = (args.local_rank, args.ds.tensor_parallel_size, args.ds.ring_attn_size)
        assert (alone, args.actor.aux_loss_coef) == ((-1, 1, 1), 0)  # one process, and one loss

    def mesh(self) -> Any:
        raise NotImplementedError

    def setup_distributed(self) -> None:
        torch.cuda.set_device(0)
        device = torch.cuda.current_device()
        assert (device, f"cuda:{device}") == ("cpu", "cuda:0")
        self.ready = self.mesh().device_type == "cpu"

    def get_ds_train_config(self, name: str) -> dict[str, Any]:
        return {"optimizer": {"type": name, "params": {}}}

    def prepare(self, given: tuple[Actor, dict[str, Any]]) -> tuple[Actor, Any, None]:
        (actor, config), adam = given, self.get_ds_train_config("Adam")["optimizer"]
        assert (self.ready, adam) == (True, {"type": "Adam", "params": {"torch_adam": True}})
        assert (config["optim"], config["max_norm"], config["scheduler_steps"]) == ("adam", 0.0, 1)
        made = torch.optim.AdamW(
            [each for each in actor.parameters() if each.requires_grad], **config["adam"]
        )
        return actor, SimpleNamespace(optimizer=made, step=made.step), None


class ActorPPOTrainer:
    """Train one step. With dynamic batches, ZeRO 1 and 2 keep the gradient of the last micro-batch alone."""

    def __init__(
        self, strategy: Any, actor: Actor, ema: None, optimizer: Any, scheduler: None, **options: Any
    ):
        self.args, self.actor, self.optimizer = strategy.args, actor, optimizer
        self.size, self.replay_buffer = options.pop("micro_train_batch_size"), []
        assert options == {"dataloader_pin_memory": False}

    def ppo_train(self, kl: float) -> None:
        torch.cuda.synchronize()
        rows = [row for each in self.replay_buffer for row in each.rows()]
        dynamic = self.args.train.dynamic_batch_enable
        if dynamic:
            tokens = sum(int(row["total_length"]) for row in rows)
            self.size = len(rows) // math.ceil(tokens / self.args.train.max_tokens_per_gpu)
        parts = [rows[at : at + self.size] for at in range(0, len(rows), self.size)]
        tokens = sum(int(row["action_mask"].sum()) for row in rows)
        self.counts = {"tokens": tokens, "rows": len(rows), "parts": 1}
        for part in parts * self.args.train.max_epochs:
            if dynamic and self.args.ds.zero_stage < 3:
                self.actor.zero_grad()
            made = {name: [row[name] for row in part] for name in part[0]}
            self.training_step(Experience(info={"row": torch.stack(made["row"])}, **made), kl)
        self.optimizer.step()

    def training_step(self, part: Experience, kl: float) -> None:
        for row in range(len(part.index)):  # each row has what its rollout has
            assert part.prompts[row] == f"prompt {part.index[row] // 4}"
            assert part.response_length[row] == part.action_mask[row].sum()
            assert part.attention_mask[row].sum() == part.total_length[row] > part.response_length[row]
        columns = (part.sequences, part.action_log_probs, part.advantages, part.action_mask)
        tokens, *given = (torch.stack(each) for each in columns)
        loss = PolicyLoss(token_level_loss=self.args.actor.loss_agg_mode == "token-mean")
        loss(self.actor.log_probs(tokens), *given, **self.counts)[0].backward()
