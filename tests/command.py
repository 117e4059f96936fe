"""The command: in a process of its own, or, where that shows no more, in this one."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from headrace.pipeline.main import main

TOOLS = Path(__file__).parent.parent / "tools"
QUICK = ["train.steps=2", "sampler.prompts_per_batch=4", "policy.width=16", "policy.layers=1"]


def headrace(folder, *words, check=True):
    """As a user runs it. Starting takes longer than most of what it is asked for."""
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-m", "headrace.pipeline", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def headrace_here(folder: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess:
    """The same without the start: its main function, in `folder`, with what it writes and how it ends."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    handlers = list(logging.root.handlers)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        for name in ("HYDRA_FULL_ERROR", "HEADRACE_TRACE", "RL_LOGGING_LEVEL"):
            patch.setenv(name, os.environ.get(name, ""))  # what main() sets is put back
            patch.delenv(name)
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["headrace", *words])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as end:
                code = end.code or 0
    for handler in set(logging.root.handlers) - set(handlers):  # Hydra's, one of which holds a file open
        logging.root.removeHandler(handler)
        handler.close()
    done = subprocess.CompletedProcess(list(words), code, out.getvalue(), err.getvalue())
    assert not check or code == 0, done.stdout + done.stderr
    return done


def is_up_to_date(tool: str) -> bool:
    """Whether a tool with ``--check`` says that what it writes is what is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [tool, "--check"])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(TOOLS / tool), run_name="__main__")
    return not end.value.code
