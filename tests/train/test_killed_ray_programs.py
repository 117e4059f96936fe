"""Programs whose rollouts are Ray tasks: if they or their workers are killed, each group is trained once."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import Groups
from tensordict import TensorDict

from headrace.pipeline import Checkpoint, RayAssembler, RepeatSampler, RolloutStream
from headrace.transforms import StalledError

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

SIZE, GROUPS, PROMPTS = 2, 2, 20
LOST = 3  # the exit code of a program that lost a writer


@ray.remote(max_retries=0, num_cpus=4)  # with 4 CPUs for each task, few processes start
def generate(assembler: RayAssembler, ids: TensorDict, version: int, folder: Path) -> None:
    """Generate a rollout of one to three rows; the worker may be killed before each row."""
    (folder / f"worker_{os.getpid()}").touch()
    dice = random.Random(int(ids["rollout_id"]))
    turns = dice.randint(1, 3)
    for turn in range(turns):
        time.sleep(dice.random() * 0.05)
        row = ids.clone()
        row["next", "done"] = torch.tensor([turn == turns - 1])
        row["next", "policy_version"] = torch.tensor([version])
        assembler.put(row)


def train(folder: Path, address: str, epochs: int, every: int) -> None:
    """The program. When all epochs are trained, it writes the groups in the saved weights."""
    os.setsid()
    torch.set_num_threads(1)
    ray.init(address=address, log_to_driver=False)
    sampler = RepeatSampler(PROMPTS, group_size=SIZE, prompts_per_batch=GROUPS)
    options: dict[str, Any] = {"max_staleness": 4, "epochs": epochs, "patience": 300}
    stream = RolloutStream(sampler, assembler=RayAssembler, journal=folder / "journal", **options)
    weights = Groups()
    checkpoint = Checkpoint(folder / "saved", stream=stream, weights=weights)
    step = checkpoint.load() or 0

    def dispatch() -> None:
        for draws in stream.draws(wait=True):
            version = stream.version
            stream.watch(*[generate.remote(stream.assembler, ids, version, folder) for ids in draws.split(1)])

    threading.Thread(target=dispatch, daemon=True).start()
    try:
        for batch in stream:
            (folder / "begun").touch()
            step += 1
            weights.trained = [*weights.trained, *dict.fromkeys(batch["group_id"].tolist())]
            stream.version = step
            if step % every == 0:
                checkpoint.save(step)
    except StalledError as lost:
        (folder / "lost").write_text(str(lost))
        os._exit(LOST)
    checkpoint.save(step)
    (folder / "over").write_text(json.dumps(weights.trained))
    os._exit(0)


def killed(folder: Path, kills: int, seed: int, epochs: int, every: int) -> tuple[list[int], list[str]]:
    """Kill the program or its workers `kills` times. Return the trained groups and what was killed."""
    # Start a new interpreter, because on import Ray reads the token of its cluster from the environment.
    context, dice = torch.multiprocessing.get_context("spawn"), random.Random(seed)
    address, happened = ray.get_runtime_context().gcs_address, []
    for number in range(kills + 1):
        for file in ("begun", "lost"):
            (folder / file).unlink(missing_ok=True)
        for file in folder.glob("worker_*"):
            file.unlink()
        process = context.Process(target=train, args=(folder, address, epochs, every))
        process.start()
        if number == kills:
            process.join(300)
            break
        while not (folder / "begun").exists():
            assert process.is_alive()
            time.sleep(0.005)
        time.sleep(dice.random() * 0.5)
        if dice.random() < 0.3 and (workers := list(folder.glob("worker_*"))):
            lose_a_worker(process, [int(file.name.split("_")[1]) for file in workers], dice, folder)
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.join(120)
        if (folder / "over").exists():
            break
        happened.append("worker" if (folder / "lost").exists() else "program")
    return json.loads((folder / "over").read_text()), happened


def lose_a_worker(process: Any, workers: list[int], dice: random.Random, folder: Path) -> None:
    """Kill workers until the killed one was writing. Then the program ends with an error that names it."""
    for worker in dice.sample(workers, len(workers)):
        try:
            os.kill(worker, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.join(300)
    assert process.exitcode in (0, LOST)
    if process.exitcode == LOST:
        assert "writers lost" in (folder / "lost").read_text()


LONG = [pytest.param(every, 6, 4, seed, marks=pytest.mark.long) for every in (1, 3) for seed in (1, 2)]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("every", "kills", "epochs", "seed"), [(3, 2, 1, 0), *LONG])
def test_no_group_of_a_task_is_lost_or_trained_twice(every, kills, epochs, seed, tmp_path):
    trained, happened = killed(tmp_path, kills, seed, epochs, every)
    assert Counter(trained) == dict.fromkeys(range(PROMPTS * epochs), 1)
    assert happened
