"""OpenRLHF's losses as steps for `xray`, normalised over accumulated micro-batches as in its trainers."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from .measure import Step
from .setting import ROWS_OF_STEP, TOKENS_OF_STEP, Setting, table_log_probs
from .token_table import LOSS, TOKENS

ABSENT = "flash_attn", "deepspeed"  # they need a GPU, and the losses do not use them


def openrlhf_settings() -> list[Setting]:
    """Return settings of PolicyLoss by token and by sequence, with its clipping, and of SFTLoss."""
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


@contextmanager
def _without_their_listings(*packages: str) -> Any:
    """Import modules without running their packages' __init__, which imports models and DeepSpeed."""
    root = Path(find_spec("openrlhf").submodule_search_locations[0])  # type: ignore[union-attr,index]
    stands = {name: ModuleType(name) for name in ABSENT if find_spec(name) is None}
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
