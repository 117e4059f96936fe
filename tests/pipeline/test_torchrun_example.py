"""In two processes with the variables of torchrun, the example gives the numbers of one process."""

from __future__ import annotations

import runpy
import socket
from functools import partial
from pathlib import Path

import pytest
import torch
from command import Started, run_here

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun_grpo.py"
STEPS, SECONDS = 4, 240


@pytest.mark.slow
@pytest.mark.torchrl
def test_two_processes_with_shared_groups_train_like_one_process(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    options = ("--steps", str(STEPS), "--out")
    example = partial(runpy.run_path, str(EXAMPLE), run_name="__main__")
    run_here(example, tmp_path, "example", *options, str(tmp_path / "one"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    words = (*options, str(tmp_path / "two"))
    ranks = [Started(example, tmp_path, *words, **shared, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    for done in [rank.ends(SECONDS) for rank in ranks]:
        assert done.returncode == 0, done.stderr
    one, *two = (torch.load(tmp_path / file) for file in ("one/0.pt", "two/0.pt", "two/1.pt"))
    shares = [set(rank["advantages"]) for rank in two]
    groups = [{rollout // 8 for rollout in share} for share in shares]
    assert groups[0] == groups[1]  # every group has rows on both ranks
    assert not shares[0] & shares[1]
    assert one["advantages"] == two[0]["advantages"] | two[1]["advantages"]  # bit by bit
    assert len(set(one["advantages"].values())) > 20
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two[0]["weights"][name], weight, rtol=0, atol=2e-6)
        assert torch.equal(two[0]["weights"][name], two[1]["weights"][name])
