"""Make steps for `xray` from OpenRLHF's losses, and from the whole step of its trainer."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import OmegaConf
from tensordict import TensorDictBase
from torch import distributed as dist
from torch import nn

from headrace.transforms.table.schema import MICROBATCH

from .causal_lm import table_as_causal_lm
from .measure import Step
from .setting import ROWS_OF_STEP, TOKENS_OF_STEP, Setting, table_log_probs
from .token_table import LOSS, REAL, TOKENS

# These modules need a GPU. The measured code does not call them.
ABSENT = (
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.utils",
    "flash_attn.utils.distributed",
    "deepspeed",
)
OFF = {"is_correction_level": "off", "is_correction_mode": "mask", "is_correction_gating": "ratio"}
ARGUMENTS = {
    "local_rank": -1,
    "actor": {"eps_clip_low_high": [0.2, 0.2], "dual_clip": None, "policy_loss_type": "ppo"}
    | {"aux_loss_coef": 0, "entropy_coef": None, "loss_agg_mode": "token-mean"},
    "algo": {
        "advantage": OFF | {"is_correction_threshold": [0.5, 5.0]},
        "kl": {"use_loss": False},
    },
    "ds": {"param_dtype": "fp32", "tensor_parallel_size": 1, "ring_attn_size": 1, "packing_samples": False}
    | {"zero_stage": 2},
    "reward": {"clip_range": None, "overlong_buffer_len": None, "stop_properly_penalty_coef": None},
    "train": {"max_epochs": 1, "colocate_all": False, "async_enable": False, "dynamic_batch_enable": False},
    "vllm": {},
}


def openrlhf_settings() -> list[Setting]:
    """Return settings of PolicyLoss, by token and by sequence, with its clipping curve, and of SFTLoss."""
    with _without_their_listings("openrlhf.models", "openrlhf.utils"):
        losses: Any = import_module("openrlhf.models.loss")
        windows: Any = import_module("openrlhf.utils.loss_utils").iter_grad_accum_global_norm

    def of(kind: str, documented: str, **options: Any) -> Setting:
        words = ", ".join(f"{name}={value}" for name, value in options.items())
        step = _openrlhf_step(getattr(losses, kind)(**options), windows)
        return Setting(f"{kind}({words})", step, documented, curve=kind == "PolicyLoss")

    return [
        of("PolicyLoss", TOKENS_OF_STEP),
        of("PolicyLoss", ROWS_OF_STEP, token_level_loss=False),
        of("PolicyLoss", TOKENS_OF_STEP, dual_clip=3.0),
        of("PolicyLoss", ROWS_OF_STEP, policy_loss_type="gspo"),
        of("SFTLoss", TOKENS_OF_STEP),
        of("SFTLoss", ROWS_OF_STEP, token_level_loss=False),
    ]


def _openrlhf_step(loss: nn.Module, windows: Any) -> Step:
    rewarded = type(loss).__name__ == "PolicyLoss"

    def step(model: nn.Module, batch: TensorDictBase, cut: int) -> None:
        if not rewarded:
            batch["advantage"] = torch.ones(len(batch), 1, 1, dtype=torch.float64)
        parts = windows(batch.chunk(cut), None, cut, lambda part: part[LOSS][:, 1:])
        for part, normalisers in parts:
            tokens, inside = part[TOKENS], part[LOSS][:, 1:]
            advantage = part["advantage"].squeeze(-1).expand(inside.shape)
            given = (part["log_probs", "full"][:, 1:], advantage) if rewarded else ()
            found = loss(table_log_probs(model, tokens), *given, inside.double(), **normalisers)
            # DeepSpeed's backward divides by the number of micro-batches.
            ((found[0] if rewarded else found) / cut).backward()

    return step


def openrlhf_step(compute_advantages: Callable[[Any, list[Any]], Any], **arguments: Any) -> Step:
    """Make a step from OpenRLHF's ActorPPOTrainer, from the experiences to its optimiser step.

    These parts are OpenRLHF's own: the experiences, the replay buffer, the micro-batches, the
    log-probabilities, the loss with its denominators and the DeepSpeed engine. These are replaced: the GPU by
    the CPU, several processes by one, the optimiser by torch's AdamW with a learning rate of 0, and
    flash-attn, which is imported and not called, by an empty module. The gradient is read when the optimiser
    begins its step. The process group stays open, because DeepSpeed keeps it.

    Args:
        compute_advantages: a function in place of ``RemoteExperienceMaker.compute_advantages_and_returns``.
        arguments: command-line arguments of OpenRLHF, such as ``{"ds.zero_stage": 3}``. With
            ``train.dynamic_batch_enable``, the token limit of micro-batches is set for the requested number
            of micro-batches.

    Raises:
        ImportError: OpenRLHF or DeepSpeed is not installed.
    """
    if find_spec("deepspeed") is None:
        raise ImportError("OpenRLHF's trainer needs deepspeed")
    with (
        warnings.catch_warnings(),
        patch.dict(os.environ, DS_ACCELERATOR="cpu"),
        _without_their_listings("openrlhf.trainer.ray"),
    ):
        warnings.simplefilter("ignore")
        ppo: Any = import_module("openrlhf.trainer.ray.ppo_actor")
        maker_class = import_module("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
        strategies: Any = import_module("openrlhf.utils.deepspeed.deepspeed")

    class OnCPU(strategies.DeepspeedStrategy):
        def get_ds_train_config(self, *given: Any, **options: Any) -> Any:
            config = super().get_ds_train_config(*given, **options)
            config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's own Adam would be compiled
            return config

    def train(model: Any, batch: TensorDictBase, cut: int) -> None:
        rows, size = len(batch), int(batch["expected_rollouts"][0])
        args: Any = OmegaConf.create(ARGUMENTS)
        given = arguments | {"rollout.n_samples_per_prompt": size, "rollout.batch_size": rows // size}
        given |= {"train.batch_size": rows, "train.max_tokens_per_gpu": int(batch[REAL].sum()) // cut + 2}
        for name, value in given.items():
            OmegaConf.update(args, name, value)
        sizes = {"train_batch_size": rows, "micro_train_batch_size": rows // cut}
        strategy = OnCPU(args=args, zero_stage=args.ds.zero_stage, **sizes)
        strategy.setup_distributed()
        actor = ppo.Actor(table_as_causal_lm(model))
        actor.packing_samples = False
        adam = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
        config = {"optim": "adam", "adam": adam, "max_norm": 0.0, "scheduler_steps": 1}
        actor, optimizer, scheduler = strategy.prepare((actor, config))
        found: list[torch.Tensor] = []

        def read(optimizer: Any, *_: Any) -> None:
            every = (each.grad for group in optimizer.param_groups for each in group["params"])
            found.extend(each.flatten().clone() for each in every if each is not None)

        getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(read)
        options = {"micro_train_batch_size": rows // cut, "dataloader_pin_memory": False}
        trainer = ppo.ActorPPOTrainer(strategy, actor, None, optimizer, scheduler, **options)
        maker = maker_class.__new__(maker_class)
        maker.strategy, maker.args, maker.kl_ctl = strategy, args, SimpleNamespace(value=0.0)
        experiences = [
            ppo.Experience(
                sequences=part[TOKENS],
                attention_mask=part[REAL].long(),
                action_mask=part[LOSS][:, 1:],
                action_log_probs=part["log_probs", "full"][:, 1:].float(),
                rewards=part["next", "reward"].sum(-1),
                kl=torch.zeros(part[LOSS][:, 1:].shape),
                truncated=torch.zeros(len(part)),
                response_length=part[LOSS].sum(1),
                total_length=part[REAL].sum(1),
                info={"row": part["rollout_id"].flatten()},
                index=part["rollout_id"].flatten().tolist(),
                prompts=[f"prompt {group}" for group in part["group_id"].flatten().tolist()],
            )
            for part in batch.chunk(3)
        ]
        for each in compute_advantages(maker, experiences):
            trainer.replay_buffer.append(each)
        own, rows_of_parts = trainer.training_step, list[list[int]]()

        def training_step(experience: Any, *given: Any) -> Any:
            rows_of_parts.append([int(row) for row in experience.info["row"]])
            return own(experience, *given)

        trainer.training_step = training_step
        trainer.ppo_train(0.0)
        batch[MICROBATCH] = torch.zeros(rows, dtype=torch.int64)
        for number, part in enumerate(rows_of_parts):
            batch[MICROBATCH][part] = number
        if (len(rows_of_parts), len(found)) != (cut, 1):
            counts = f"{len(rows_of_parts)} micro-batches and {len(found)} steps of the optimiser"
            raise ValueError(f"{cut} micro-batches and one step are required; OpenRLHF made {counts}")
        gradient = found.pop()[: model.table.numel()]  # without the padding of ZeRO
        model.table.grad = gradient.view_as(model.table)

    def step(model: nn.Module, batch: TensorDictBase, cut: int) -> None:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "", "MASTER_PORT": "0"}
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with (
            warnings.catch_warnings(),
            patch.dict(os.environ, alone),
            patch("torch.cuda.current_device", lambda: _CPU("cpu")),
            patch("torch.cuda.set_device", lambda _: None),
            patch("torch.cuda.synchronize", lambda *_: None),
            patch.object(
                strategies, "init_device_mesh", lambda _, *a, **b: dist.init_device_mesh("cpu", *a, **b)
            ),
        ):
            warnings.simplefilter("ignore")
            train(model, batch, cut)

    return step


class _CPU(str):
    """The CPU as a device where OpenRLHF asks for a GPU. In ``cuda:{device}`` it is formatted as a number."""

    def __format__(self, _: str) -> str:
        return "0"


def _stand_in(name: str) -> ModuleType:
    """A module from which every name can be imported."""
    made = module_from_spec(ModuleSpec(name, None, is_package=True))

    def nothing(name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    made.__getattr__ = nothing  # type: ignore[method-assign]
    return made


@contextmanager
def _without_their_listings(*packages: str) -> Any:
    """Import modules without running their packages' __init__, which imports models and DeepSpeed."""
    root = Path(find_spec("openrlhf").submodule_search_locations[0])  # type: ignore[union-attr,index]
    stands = {name: _stand_in(name) for name in ABSENT if find_spec(name.partition(".")[0]) is None}
    for name in packages:
        stands[name] = ModuleType(name)
        stands[name].__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    stands = {name: module for name, module in stands.items() if name not in sys.modules}
    sys.modules.update(stands)
    try:
        yield
    finally:
        for name in [each for each in sys.modules if each in stands or each.rpartition(".")[0] in stands]:
            del sys.modules[name]
