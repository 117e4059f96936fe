"""The command: ``headrace`` and ``python -m headrace.pipeline``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape

from headrace.transforms import BatchError

from .load import ConfigError, explain_composition
from .sources import SourceError
from .tasks.compare import compare
from .tasks.group_sizes import plan_group_sizes
from .tasks.replay import replay
from .train import TrainingInterrupted, train

REFUSALS = (HydraException, OmegaConfBaseException, ConfigError, BatchError, SourceError, FileExistsError)
TASKS = {"train": train, "replay": replay, "plan": plan_group_sizes}


@hydra.main(version_base="1.3", config_path="pkg://headrace.conf", config_name="config")
def run_task(config: DictConfig) -> float:
    """Run the task that the command line composed."""
    hydra_config = HydraConfig.get()
    output = Path(hydra_config.runtime.output_dir)
    try:
        if config.task == "compare":
            return compare(config, output, list(hydra_config.overrides.task))
        return TASKS[config.task](config, output)
    except REFUSALS as err:  # here, since Hydra would print a line of its own above ours
        refuse(err)


def main() -> None:
    """Run; say what is wrong in one paragraph, or with HYDRA_FULL_ERROR=1 in a trace."""
    os.environ["HEADRACE_TRACE"] = os.environ.get("HYDRA_FULL_ERROR", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, instead of printing a trace of its own and leaving
    os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")
    try:
        run_task()
    except TrainingInterrupted:
        sys.exit(130)
    except REFUSALS as err:
        refuse(err)


def refuse(err: Exception) -> NoReturn:
    """End with what is wrong."""
    if os.environ.get("HEADRACE_TRACE") == "1":
        raise err
    words = [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")]
    text = (
        str(err)
        if isinstance(err, ValueError | FileExistsError)
        else explain_composition(err, words, "config")
    )
    Console(stderr=True).print(f"[bold red]headrace:[/] {escape(text)}", soft_wrap=True)
    sys.exit(2)
