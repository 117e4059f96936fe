"""The main job: sampler → environment → collector → pipeline → loss → optimiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torchrl.collectors import Collector

from .display import RunDisplay
from .load import build_pipeline
from .optimise import optimise


class Interrupted(Exception):
    """The user ended a run; what it had done is written and shown."""


def train(config: DictConfig, output: Path) -> float:
    """Run an experiment as composed.

    Args:
        config: as ``conf/config.yaml`` composes it.
        output: folder for ``config.yaml``, resolved, and ``metrics.csv``.

    Returns:
        The mean reward of the last step's rollouts.

    Raises:
        ConfigError: a stage or option that there is not, before anything is collected.
        StageError: a stage refused a batch.
        Interrupted: the user pressed Ctrl-C; the table has been shown.
    """
    output.mkdir(parents=True, exist_ok=True)
    pipeline = build_pipeline(config.pipeline)
    OmegaConf.save(config, output / "config.yaml", resolve=True)
    device = choose_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    parts = _instantiate_parts(config, device)
    settings = config.train
    collector = Collector(
        parts["env"],
        parts["policy"],
        frames_per_batch=parts["env"].frames_per_batch,
        total_frames=parts["env"].frames_per_batch * settings.steps,
        auto_register_policy_transforms=False,
    )
    display = RunDisplay(settings.steps, output / "metrics.csv")
    display.console.print(pipeline)
    ending = "the run"
    try:
        with display:
            for step, batch in enumerate(collector):
                taken = optimise(
                    pipeline.minibatches(batch, epochs=settings.epochs),
                    parts["loss"],
                    parts["optimizer"],
                    accumulate=settings.accumulate,
                    max_grad_norm=settings.max_grad_norm,
                    loss_mask_key=pipeline.loss_mask_key,
                )
                numbers = pipeline.metrics
                reward = numbers.get("collapse/reward_mean", float(batch["next", "reward"].mean()))
                display.step({"step": step, "reward": reward, "optimiser_steps": taken, **numbers})
    except KeyboardInterrupt as stop:
        ending = f"interrupted after step {len(display.history)} of {settings.steps}"
        raise Interrupted(ending) from stop
    finally:
        collector.shutdown()
        display.close(f"{ending}, {output}")
    return display.history[-1]["reward"] if display.history else float("nan")


def choose_device(wanted: str) -> torch.device:
    """``auto`` is the GPU if there is one."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def _instantiate_parts(config: DictConfig, device: torch.device) -> dict[str, Any]:
    sampler = instantiate(config.sampler, _convert_="all")
    policy = instantiate(config.policy, device=str(device), _convert_="all")
    loss = instantiate(config.loss, actor_network=policy, _convert_="all")
    return {
        "env": instantiate(config.env, sampler=sampler, device=str(device), _convert_="all"),
        "policy": policy,
        "loss": loss,
        "optimizer": instantiate(config.optimizer, params=policy.parameters(), _convert_="all"),
    }
