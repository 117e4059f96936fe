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
from rich.text import Text

from .composing import ConfigError, explain_composition, leave_out
from .printable import printable


@hydra.main(version_base="1.3", config_path="pkg://headrace.conf", config_name="config")
def run_task(config: DictConfig) -> float:
    """Run the task of the composed configuration, and return its number."""
    from .tasks.by_name import REFUSALS, perform  # here: to compose and to print needs no torch
    from .train import TrainingInterrupted

    hydra_config = HydraConfig.get()
    try:
        found_in = [word for word in hydra_config.overrides.hydra if word.startswith("hydra.searchpath=")]
        words = [*hydra_config.overrides.task, *found_in]
        return perform(config, Path(hydra_config.runtime.output_dir), words)
    except TrainingInterrupted:
        sys.exit(130)
    except REFUSALS as err:  # before Hydra prints a line of its own about it
        refuse(err)


def main() -> None:
    """Run the command; print an error as one paragraph, or with HYDRA_FULL_ERROR=1 as a trace."""
    os.environ["HEADRACE_TRACE"] = os.environ.get("HYDRA_FULL_ERROR", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, instead of printing and exiting
    os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")
    sys.argv[1:] = map(leave_out, sys.argv[1:])
    try:
        run_task()
    except (HydraException, OmegaConfBaseException, ConfigError) as err:  # before there was a task
        refuse(err)


def refuse(err: Exception) -> NoReturn:
    """Print an error, with hints for a word that Hydra does not know, and exit with status 2.

    Raises:
        Exception: the error itself, where HYDRA_FULL_ERROR is 1.
        SystemExit: else.
    """
    if os.environ.get("HEADRACE_TRACE") == "1":
        raise err
    words = [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")]
    text = (
        str(err)
        if isinstance(err, ValueError | FileExistsError)
        else explain_composition(err, words, "config")
    )
    lines = Text(printable(text, keep="\n"))  # no words in it are markup, or emoji such as :100:
    Console(stderr=True).print(Text("headrace: ", "bold red").append_text(lines), soft_wrap=True)
    sys.exit(2)
