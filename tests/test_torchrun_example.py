"""The example on two processes under torchrun equals the same in one process."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from command import Started

EXAMPLE = Path(__file__).parent.parent / "examples" / "torchrun_grpo.py"
STEPS, SECONDS = 4, 240


def run(*words: str) -> None:
    """A command, and whatever it started, in bounded time."""
    process = subprocess.Popen(
        [sys.executable, *words], start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, output.decode()


@pytest.mark.slow
def test_two_processes_with_shared_groups_train_as_one(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    options = ("--steps", str(STEPS), "--out")
    example = partial(runpy.run_path, str(EXAMPLE), run_name="__main__")
    assert Started(example, tmp_path, *options, str(tmp_path / "one")).ends(SECONDS).returncode == 0
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run(*torchrun, str(EXAMPLE), *options, str(tmp_path / "two"))
    one, *two = (torch.load(tmp_path / file) for file in ("one/0.pt", "two/0.pt", "two/1.pt"))
    shares = [set(rank["advantages"]) for rank in two]
    groups = [{rollout // 8 for rollout in share} for share in shares]
    assert groups[0] == groups[1]  # all of them straddle the ranks
    assert not shares[0] & shares[1]
    assert one["advantages"] == two[0]["advantages"] | two[1]["advantages"]  # bit by bit
    assert len(set(one["advantages"].values())) > 20
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two[0]["weights"][name], weight, rtol=0, atol=2e-6)
        assert torch.equal(two[0]["weights"][name], two[1]["weights"][name])
