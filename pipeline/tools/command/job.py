"""The task ``train``: sampler → environment → collector → pipeline → loss → optimiser."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDictBase

from headrace.installed import import_extra
from headrace.pipeline.composing.nodes import build_node
from headrace.pipeline.error_overrides import text_with_overrides
from headrace.pipeline.load import ConfigError, build_pipeline
from headrace.pipeline.pipeline import Pipeline
from headrace.pipeline.tools.dumps import refused_report
from headrace.pipeline.tools.report import (
    REWARD,
    ReportFolder,
    StepReport,
    TrainingDisplay,
    decoder_of,
    make_report,
    show_advisories,
    show_pipeline,
)
from headrace.pipeline.train import OptimiserRecord, optimise, total_loss
from headrace.transforms import BatchError, weighted_loss
from headrace.transforms.table import count_of
from headrace.transforms.table.schema import FINISHED


class TrainingInterrupted(Exception):
    """The user interrupted the training. Files and the table hold all steps up to the interruption."""


def train(config: DictConfig, output: Path) -> float:
    """Train with a configuration.

    Args:
        config: the configuration, composed from ``conf/config.yaml``.
        output: an existing folder for the resolved ``config.yaml``, ``metrics.csv`` and ``report.html``.

    Returns:
        The mean reward of the last step's rollouts; NaN if none has a reward.

    Raises:
        ConfigError: an unknown stage or option; raised before the first batch is collected.
        BatchError: a stage refused a batch.
        MissingPackageError: TorchRL is not installed, or cannot be imported.
        TrainingInterrupted: the user pressed Ctrl-C.
    """
    check_settings(config)
    pipeline = build_pipeline(config.pipeline)
    collectors = import_extra("torchrl.collectors", "task=train")  # errors about options come first
    OmegaConf.save(config, output / "config.yaml", resolve=True)
    device = choose_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    components = _instantiate_components(config, device)
    stages = pipeline.stages
    key = getattr(getattr(components["loss"], "tensor_keys", None), "advantage", None)
    if key is not None and not any(key in getattr(each, "out_keys", [key]) for each in stages.values()):
        raise ConfigError(
            f"no stage writes the column {key!r}, which the loss reads; the stages are {', '.join(stages)}. "
            "Add one, such as the usual stage 'advantage', or train with a loss that does not read it"
        )
    env, steps = components["env"], config.train.steps
    for stage in pipeline.stages.values() if getattr(env, "whole_draws", False) else ():
        if FINISHED in getattr(stage, "out_keys", ()) and getattr(stage, "expected_groups", ()) is None:
            stage.expected_groups = env.sampler  # tells the gate which groups have no row at all
    frames = {"frames_per_batch": env.frames_per_batch, "total_frames": env.frames_per_batch * steps}
    policy = components["policy"]
    collector = collectors.Collector(env, policy, auto_register_policy_transforms=False, **frames)
    display = TrainingDisplay(steps, output / "metrics.csv")
    folder = ReportFolder.configured(config, output, title=count_of(steps, "step"))
    display.console.print(show_pipeline(pipeline))
    ending = f"where the rows of {steps:,} steps went" if steps > 1 else "where the rows went"
    try:
        with display:
            began, graded = time.perf_counter(), getattr(env, "reward_seconds", None)
            for step, batch in enumerate(collector):
                record, spent = OptimiserRecord(), time.perf_counter() - began
                if graded is not None:  # the environment measures the time for rewards
                    record.add_seconds("reward", env.reward_seconds - graded)
                    spent, graded = spent - (env.reward_seconds - graded), env.reward_seconds
                record.add_seconds("collect", spent)
                try:
                    report = _train_step(pipeline, batch, components, config, step, record)
                except BatchError as err:
                    folder.fail(step, text_with_overrides(err), refused_report(batch, step, err))
                    raise
                folder.add(report)
                display.step({"step": step, **report.numbers})
                began = time.perf_counter()
    except KeyboardInterrupt as stop:
        ending = f"interrupted after step {len(display.history)} of {steps}"
        raise TrainingInterrupted(ending) from stop
    finally:
        collector.shutdown()
        page = folder.close()
        advice = show_advisories(folder.advisories, folder.verdict, folder.unchecked, folder.setup)
        display.close(ending, page=page, lines=advice)
    return display.history[-1].get(REWARD, float("nan"))


def _train_step(
    pipeline: Pipeline,
    batch: TensorDictBase,
    components: dict[str, Any],
    config: DictConfig,
    step: int,
    record: OptimiserRecord,
) -> StepReport:
    """Train on one batch, and return its report, which has no reference to the batch."""
    began = time.perf_counter()
    run = pipeline.run(batch, epochs=config.train.epochs)
    record.add_seconds("headrace", time.perf_counter() - began)
    optimise(
        run.minibatches(),
        components["loss"],
        components["optimizer"],
        transform=components["transform"],
        reduce=weighted_loss if pipeline.weighs else total_loss,
        max_grad_norm=config.train.max_grad_norm,
        loss_mask_key=pipeline.loss_mask_key,
        log_prob_key=pipeline.log_prob_key,
        record=record,
    )
    how = {"solved": config.report.solved, "parameters": config.report.parameters}
    decode = decoder_of(components["env"], components["policy"])
    return make_report(run, step=step, batch=batch, decode=decode, numbers=record.numbers, **how)


def check_settings(config: DictConfig) -> None:
    """Check settings before the first rollouts, because wrong values would fail late or be ignored.

    Raises:
        ConfigError: a count below 1, or a `max_grad_norm` that is not above 0.
    """
    for name in ("train.steps", "train.epochs", "threads"):
        if (value := OmegaConf.select(config, name)) is not None and value < 1:
            raise ConfigError(f"{name} must be an integer ≥ 1; got {value!r}")
    if config.train.max_grad_norm is not None and not config.train.max_grad_norm > 0:
        raise ConfigError(f"train.max_grad_norm must be > 0 or null; got {config.train.max_grad_norm!r}")


def choose_device(wanted: str) -> torch.device:
    """Return the device of a name; ``auto`` is the GPU if there is one, else the CPU.

    Raises:
        ConfigError: the machine has no such device.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as err:
        there = ["cpu", *["cuda"] * torch.cuda.is_available(), *["mps"] * torch.backends.mps.is_available()]
        raise ConfigError(f"device={wanted} is not available; choose from auto, {', '.join(there)}") from err


def _instantiate_components(config: DictConfig, device: torch.device) -> dict[str, Any]:
    sampler = build_node(config.sampler, "sampler")
    policy = build_node(config.policy, "policy", device=str(device))
    transform = config.train.transform
    return {
        "env": build_node(config.env, "env", sampler=sampler, device=str(device)),
        "policy": policy,
        "loss": build_node(config.loss, "loss", actor_network=policy),
        "transform": build_node(transform, "train.transform") if OmegaConf.is_dict(transform) else transform,
        "optimizer": build_node(config.optimizer, "optimizer", params=list(policy.parameters())),
    }
