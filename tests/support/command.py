"""The command in its own process, or in this process if that is enough."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import process_context
from rich.console import Console

from headrace.pipeline.main import main

QUICK = ["train.steps=2", "sampler.prompts_per_batch=4", "policy.width=16", "policy.layers=1"]


class Started:
    """A program in its own process, which is forked from one that has imported what it needs."""

    def __init__(self, program: Callable[[], object], folder: Path, *words: str, **environment: str):
        self.shown = Path(tempfile.mkdtemp())
        where = (str(folder), str(self.shown), [getattr(program, "__name__", "program"), *words])
        target = partial(_begin, program, *where, os.environ | environment)
        self.process = process_context().Process(target=target)
        self.process.start()

    def ends(self, timeout: float = 300) -> subprocess.CompletedProcess:
        self.process.join(timeout)
        assert self.process.exitcode is not None, "it does not end"
        out, err = ((self.shown / name).read_text() for name in ("out", "err"))
        shutil.rmtree(self.shown)
        return subprocess.CompletedProcess([], self.process.exitcode, out, err)


def _begin(program: Callable, folder: str, shown: str, words: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{shown}/{name}", os.O_CREAT | os.O_WRONLY), number)
    sys.argv = words
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell runs this behind `&`
    warnings.simplefilter("error", FutureWarning)
    program()


def skip_without_torchrl(said: str) -> None:
    """If TorchRL is missing, skip a test that trains or measures TorchRL. Other tests get the error."""
    if re.search("(task=train|xray=torchrl) needs TorchRL", said, re.IGNORECASE):
        pytest.skip("TorchRL cannot be imported")


def headrace(
    folder: Path, *words: str, check: bool = True, **environment: str
) -> subprocess.CompletedProcess:
    """Run the command in its own process, without the time of the imports."""
    done = Started(main, folder, *words, **environment).ends()
    skip_without_torchrl(done.stderr)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def headrace_here(folder: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess:
    """Run the command in this process."""
    done = run_here(main, folder, "headrace", *words)
    skip_without_torchrl(done.stderr)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def run_here(program: Callable[[], object], folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Run a program in `folder`. Return its output and its exit code."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    handlers = list(logging.root.handlers)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        for name in ("HYDRA_FULL_ERROR", "HEADRACE_TRACE", "RL_LOGGING_LEVEL"):
            patch.setenv(name, os.environ.get(name, ""))  # main() sets them, the patch restores them
            patch.delenv(name)
        patch.chdir(folder)
        patch.setattr(sys, "argv", list(words))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                program()
            except SystemExit as end:
                code = end.code or 0
    for handler in set(logging.root.handlers) - set(handlers):  # Hydra's handlers, which keep a file open
        logging.root.removeHandler(handler)
        handler.close()
    return subprocess.CompletedProcess(list(words), code, out.getvalue(), err.getvalue())


def told(task: Callable, config: Any, folder: Path, *more: Any) -> tuple[float, str]:
    """The number that a task returns, and the text that it prints."""
    console = Console(width=200, record=True, file=io.StringIO())
    return float(task(config, folder, *more, console)), console.export_text()


def refused(folder: Path, *words: str) -> str:
    """The paragraph of the error with which the command refuses its arguments."""
    done = headrace_here(folder, *words, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("headrace: ")
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())
