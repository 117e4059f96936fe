"""Run the process of the command: read the arguments, run one task, and print errors as paragraphs."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.text import Text

from headrace.installed import MissingPackageError
from headrace.pipeline.composing.compose import ConfigError, explain_composition
from headrace.pipeline.tools.dumps import missing_path
from headrace.pipeline.wording import printable

from .arguments import OF_ANY_RECIPE, answer, hydra_arguments
from .sweep import record_job

EARLY = (
    HydraException,
    OmegaConfBaseException,
    OSError,
    ValueError,
    MissingPackageError,
)  # errors before a task runs


@hydra.main(version_base="1.3", config_path="pkg://headrace.conf", config_name="config")
def run_task(config: DictConfig) -> float:
    """Run the task of the composed configuration, and return the number that it computes."""
    hydra_config, path = HydraConfig.get(), OmegaConf.select(config, "source.path")
    in_sweep, output = hydra_config.mode == RunMode.MULTIRUN, Path(hydra_config.runtime.output_dir)
    if not in_sweep and isinstance(path, str) and (wrong := missing_path(path)):  # before torch is imported
        remove_unused(output)
        fail(ConfigError(wrong), expected=True)
    from headrace.pipeline.composing.compose import refuse_parts_of_no_stage
    from headrace.pipeline.error_overrides import CommandNames
    from headrace.pipeline.tools.audit import AuditFailed
    from headrace.pipeline.tools.dumps import StepsFailed

    from .job import TrainingInterrupted
    from .perform import REFUSALS, perform  # here, because composing and printing need no torch

    typed: Any = OmegaConf.to_container(hydra_config.overrides)  # unresolved, with their interpolations
    overrides = [*typed["task"], *(each for each in typed["hydra"] if each.startswith("hydra.searchpath="))]
    if config.get("pipelines"):  # Hydra has composed overrides of stages with a ++
        whole = "|".join(re.findall(r"^\+\+pipeline\.stages\.(\w+)=(?!null$)", "\n".join(overrides), re.M))
        of_recipe = re.compile(rf"^\+\+(?!pipeline\.stages\.({whole})\.)(?={OF_ANY_RECIPE})")
        overrides = [of_recipe.sub("", each) for each in overrides]
    began, failure, number = time.time(), "", float("nan")
    try:
        refuse_parts_of_no_stage(config, overrides)
        number = float(perform(config, output, overrides))
    except TrainingInterrupted:
        sys.exit(130)
    except (AuditFailed, StepsFailed) as err:  # the results are printed by now
        failure = str(err)
        if not in_sweep:
            sys.exit(1)
    except REFUSALS as err:  # caught here, because Hydra would print a line about it
        err.names = CommandNames()  # type: ignore[union-attr]  # for the options in a BatchError
        if not in_sweep:
            remove_unused(output)
        failure = fail(err, expected=True, go_on=in_sweep)
    except Exception as err:
        failure = fail(err, expected=False, go_on=in_sweep)
    if in_sweep:
        job = {"job": hydra_config.job.num, "task": config.task, "overrides": overrides, "began": began}
        record_job(output, number=None if failure else number, failure=failure, **job)
    return number


def remove_unused(output: Path) -> None:
    """Remove the output folder if the command wrote nothing into it, so that it only has Hydra's files.

    Args:
        output: the folder. Its parents are removed, too, if Hydra named them and they are empty.
    """
    logged = output / "headrace.log"
    own = {output / ".hydra", *([logged] if logged.exists() and not logged.stat().st_size else [])}
    if not output.exists() or set(output.iterdir()) - own:
        return
    shutil.rmtree(output)
    if not any(each.startswith("hydra.run.dir=") for each in sys.argv):  # outputs/DATE/TIME
        with suppress(OSError):  # fails if a parent has other folders
            output.parent.rmdir()
            output.parent.parent.rmdir()


def run_command() -> None:
    """Run the command. An error is printed as one paragraph; with HYDRA_FULL_ERROR=1, as a traceback."""
    os.environ["HEADRACE_TRACE"] = os.environ.get("HYDRA_FULL_ERROR", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors instead of printing them
    os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")
    try:
        if (status := answer(sys.argv[1:])) is None:
            sys.argv[1:] = hydra_arguments(sys.argv[1:])
            run_task()
        sys.stdout.flush()  # otherwise an error would come at exit, without a message
        if status:
            sys.exit(status)
    except EARLY as err:
        fail(err, expected=True)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as err:
        fail(err, expected=False)


def fail(err: Exception, *, expected: bool, go_on: bool = False) -> str:
    """Print an error as a paragraph, and exit with status 2, or with status 1 if it was not expected.

    Args:
        err: the error.
        expected: whether the error is about arguments or data. If not, the message says how to see its
            traceback.
        go_on: for a sweep: return what was printed, and do not exit.

    Raises:
        Exception: the error itself, if HYDRA_FULL_ERROR is 1.
        SystemExit: otherwise.
    """
    if expected and isinstance(
        err, BrokenPipeError
    ):  # the reader of a pipe, such as `| head`, has ended: no error
        try:
            print(flush=True)  # raises, and drops the text that was not written
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drops later output
            sys.exit(141)  # 128 + 13, the status of a program that SIGPIPE ended
    if os.environ.get("HEADRACE_TRACE") == "1":
        raise err
    said = str(err) if isinstance(err, RuntimeError) else repr(err)
    hint = "This error was not expected; HYDRA_FULL_ERROR=1 before the command shows where it comes from."
    text = paragraph_of(err) if expected else f"{said}\n{hint}"
    lines = Text(printable(text, keep="\n"))  # nothing in it is markup, or an emoji such as :100:
    Console(stderr=True).print(Text("headrace: ", "bold red").append_text(lines), soft_wrap=True)
    if not go_on:
        sys.exit(2 if expected else 1)
    return text


def paragraph_of(err: Exception) -> str:
    """The message of an error, for the user of the command."""
    if isinstance(err, HydraException | OmegaConfBaseException):  # some are also an OSError
        overrides = [each for each in sys.argv[1:] if re.match(r"~|[^-].*=", each)]
        return explain_composition(err, overrides, "config")
    if isinstance(err, FileExistsError) and err.errno is not None:
        return (
            f"{err.filename}: this is a file, and a folder is required. hydra.run.dir=FOLDER (with -m "
            "hydra.sweep.dir=FOLDER) sets the output folder"
        )
    if isinstance(err, OSError) and not isinstance(err, FileExistsError):
        reason = (err.strerror or str(err)).lower()
        where = f"{err.filename}: " if err.filename else ""
        return (
            f"{where}{reason}. hydra.run.dir=FOLDER (with -m hydra.sweep.dir=FOLDER) sets the output folder"
        )
    if str(err).startswith("Config group override"):  # Hydra does not say which file
        files = [each for each in sys.argv[1:] if re.fullmatch(r"[\w/@]+=[\d.]+", each)]
        return f"{', '.join(files)} must be the name of a file, as in pipeline=grpo"
    return str(err)
