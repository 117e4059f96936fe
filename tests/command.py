"""The command in a process of its own."""

from __future__ import annotations

import subprocess
import sys

QUICK = ["train.steps=2", "sampler.prompts_per_batch=4", "policy.width=16", "policy.layers=1"]


def headrace(folder, *words, check=True):
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
