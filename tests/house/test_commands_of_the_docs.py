"""Every command of a page runs, in order, in a folder of its own.

If a page reads ``run/rollouts`` before it writes them, the test puts a dump of plain rollouts there. The
``mine.jsonl`` of a page is a file of two rollouts.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import signal
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path

import pytest
import torch
from command import QUICK, headrace_here, run_here
from pages_as_written import PAGES, ROOT, Fence, commands, fences
from stored_runs import started
from tensordict import TensorDict

from headrace.pipeline import load_pipeline, make_report, write_dump

pytestmark = pytest.mark.slow
INSTALLS = ("make ", "source ", "pip ", "python -m venv ", "pre-commit ")  # tried by continuous integration
YOURS = re.compile(r"\b(my|your)\.module\.")  # such a module does not exist here


def write_rollouts(folder: Path) -> None:
    """Write a dump of two steps with complete groups of four rollouts."""
    for step in range(2):
        batch = TensorDict(
            {
                "group_id": torch.arange(16) // 4,
                "rollout_id": torch.arange(16),
                "expected_rollouts": torch.full((16,), 4),
                ("next", "reward"): torch.arange(16.0) % 3,
                ("masks", "all_assistant_mask"): torch.ones(16, 4, dtype=torch.bool),
            },
            batch_size=[16],
        )
        run = load_pipeline("pipeline=grpo").run(batch)
        write_dump(make_report(run, step=step, batch=batch), folder)


def write_own(path: Path) -> None:
    """Write a file of a user's own trainer, in the first shape that docs/dumps.md shows."""
    rows = [{"problem_id": 7, "metrics": {"score": score}, "output": "4"} for score in (1.0, 0.0)]
    path.write_text("\n".join(map(json.dumps, rows)))


def words_of(line: str) -> list[str]:
    """The words after the command, and options that shorten a run."""
    words = shlex.split(line)
    if "task=certify" in words:
        less = {"certify.only=": "[stop_or_continue]", "certify.group_sizes=": "[2]"}
        return words + [name + few for name, few in less.items() if name not in line]
    if "-m" in words:  # run one job of a sweep; test_sweep.py runs more
        words = [word.partition(",")[0] if word.startswith("seed=") else word for word in words]
    if any(word.startswith(("task=", "--")) or word.isalpha() for word in words):
        return words
    if any("hydra.run.dir" in word for word in words):
        return [*words, *QUICK]
    return [*words, *QUICK, "train.steps=1", "report.dump=null", "report.html=false"]


def run_example(line: str, folder: Path) -> subprocess.CompletedProcess:
    """Check that a program of examples/ has these options. Another test runs the program."""
    pytest.importorskip("torchrl")
    words = shlex.split(line)
    place = next(place for place, word in enumerate(words) if word.startswith("examples/"))
    name, *more = words[place:]
    program = partial(runpy.run_path, str(ROOT / name), run_name="__main__")
    assert list((ROOT / "tests").rglob(f"test_*{Path(name).stem.partition('_')[0]}*.py")), line
    done = run_here(program, folder, name, *more, "--help")
    assert all(word in done.stdout for word in more if word.startswith("--")), line
    return done


def run_with_a_module(line: str, page: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a command that imports a module, which gets the Python blocks of the page."""
    modules = re.findall(r"(?:_target_: |=)([a-z]\w*)\.(?=[A-Z])", line)  # `mystages` of mystages.MinReward
    for module in modules:
        blocks = [block.text for block in fences(page, "python") if block.mark is None]
        (folder / f"{module}.py").write_text("\n".join(blocks))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for module in modules:  # another page may have a module of this name
            sys.modules.pop(module, None)
        return headrace_here(folder, *words_of(line.removeprefix("PYTHONPATH=. headrace")), check=False)


def run_view(line: str, folder: Path) -> subprocess.CompletedProcess:
    """Run the viewer until it has shown its page."""
    with started(shlex.split(line)[1:], folder) as (process, _, address):
        with urllib.request.urlopen(address + "api/runs") as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        return subprocess.CompletedProcess([], process.wait(60), "", "")


def run_line(line: str, page: str, folder: Path) -> subprocess.CompletedProcess:
    if line.startswith("headrace view") and "--help" not in line:
        return run_view(line, folder)
    if line.startswith("headrace"):
        return headrace_here(folder, *words_of(line.removeprefix("headrace")), check=False)
    if line.startswith("PYTHONPATH=. headrace"):
        return run_with_a_module(line, page, folder)
    assert line.startswith(("python examples/", "torchrun ")), f"{page}: what runs this? {line}"
    return run_example(line, folder)


def run_block(block: Fence, folder: Path) -> None:
    for line in commands(block.text):
        if line.startswith(INSTALLS) or YOURS.search(line):
            continue
        if "run/rollouts" in line and "task=" in line and not (folder / "run").exists():
            write_rollouts(folder / "run" / "rollouts")
        if "source.path=mine.jsonl" in line:
            write_own(folder / "mine.jsonl")
        done = run_line(line, block.page, folder)
        said = done.stdout + done.stderr
        if block.mark == "fails":
            assert done.returncode, line
            assert block.said in said
        else:
            assert done.returncode == 0, said[-4000:]


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "sh")])
def test_commands_run_in_order(page, tmp_path):
    for block in fences(page, "sh"):
        if block.mark != "not run":
            run_block(block, tmp_path)
