"""The command: ``headrace`` and ``python -m headrace.pipeline``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from .command.refusing import EARLY, give_up, refuse
from .command.sweep import record_job
from .command.words import answer, ready_words


@hydra.main(version_base="1.3", config_path="pkg://headrace.conf", config_name="config")
def run_task(config: DictConfig) -> float:
    """Run the task of the composed configuration, and return its number."""
    from .tasks.by_name import REFUSALS, perform  # here: to compose and to print needs no torch
    from .train import TrainingInterrupted

    hydra_config = HydraConfig.get()
    typed: Any = OmegaConf.to_container(hydra_config.overrides)  # as they are, with their interpolations
    words = [*typed["task"], *(word for word in typed["hydra"] if word.startswith("hydra.searchpath="))]
    output, began, failure = Path(hydra_config.runtime.output_dir), time.time(), ""
    in_sweep, number = hydra_config.mode == RunMode.MULTIRUN, float("nan")
    try:
        number = perform(config, output, words)
    except TrainingInterrupted:
        sys.exit(130)
    except REFUSALS as err:  # before Hydra prints a line of its own about it
        failure = refuse(err, go_on=in_sweep)
    except Exception as err:
        failure = give_up(err, go_on=in_sweep)
    if in_sweep:
        job = {"job": hydra_config.job.num, "task": config.task, "words": words, "began": began}
        record_job(output, number=None if failure else number, failure=failure, **job)
    return number


def main() -> None:
    """Run the command; print an error as one paragraph, or with HYDRA_FULL_ERROR=1 as a trace."""
    os.environ["HEADRACE_TRACE"] = os.environ.get("HYDRA_FULL_ERROR", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, instead of printing and exiting
    os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")
    try:
        if (status := answer(sys.argv[1:])) is not None:
            sys.stdout.flush()  # or it fails after the end, where nobody could say why
            sys.exit(status)
        sys.argv[1:] = ready_words(sys.argv[1:])
        run_task()
    except EARLY as err:
        refuse(err)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as err:
        give_up(err)
