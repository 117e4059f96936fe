"""``headrace doctor``: check the installation, and compute a batch with known results."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from headrace.installed import TENSORDICT_OF_TORCHRL, broken, refuses, version_of
from headrace.pipeline.wording import printable

NEEDED = ("torch", "tensordict", "hydra-core", "omegaconf", "rich", "pyarrow")
EXTRAS = {"torchrl": "torchrl", "llm": "transformers", "ray": "ray", "tq": "TransferQueue"}
# Rollout 11 has two rows. A = (R − mean) / std is (R − 10) / 7 in group 0, and (R − 9) / 13 in group 7.
# Group 9 has equal rewards, and does not train.
GROUPS, ROLLOUTS = [0, 0, 0, 0, 7, 7, 7, 9, 9, 9], [10, 11, 11, 12, 13, 14, 15, 16, 17, 18]
REWARDS = [13.0, 15, 15, 2, 16, 17, -6, 4, 4, 4]
GOLDEN, TOLERANCE = [3 / 7, 5 / 7, 5 / 7, -8 / 7, 7 / 13, 8 / 13, -15 / 13], 1e-4
TESTED = "all tests ran with {}; docs/beside.md says what ran with other versions"
STYLES = {"ok": "green", "note": "yellow", "bad": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the output. It is ok, a note, or bad. A bad line makes the exit status 1."""

    state: Literal["ok", "note", "bad"]
    what: str


def examine(console: Console | None = None) -> int:
    """Print a line for each finding and a last line; return the exit status, 1 if something is bad.

    Args:
        console: where to print; None: standard output.
    """
    console = console or Console()
    bad = 0
    for check in (packages, extras, devices, golden_runs):
        for finding in _findings(check):
            bad += finding.state == "bad"
            line = Text(f"{finding.state:5}", STYLES[finding.state]).append(
                printable(finding.what), "default"
            )
            console.print(line, soft_wrap=True)
    console.print(
        "everything is in order" if not bad else f"{bad} to fix, see above",
        style="green" if not bad else "red",
    )
    return int(bad > 0)


def _findings(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check. An exception in it becomes a finding."""
    try:
        yield from check()
    except Exception as err:
        yield Finding("bad", f"{check.__name__.replace('_', ' ')}: {str(err) or repr(err)}")


def tested() -> dict[str, str]:
    """The tested versions, by package."""
    text = files("headrace.conf").joinpath("constraints.txt").read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if "==" in line and not line.startswith("#"))
    return dict(line.split("==", 1) for line in lines)


def packages() -> Iterator[Finding]:
    """Check Python and the required packages."""
    yield Finding("ok", f"python {platform.python_version()}, {platform.system()} {platform.machine()}")
    yield Finding("ok", f"headrace {version_of('headrace') or '(not installed, run from its folder)'}")
    known = _known()
    for name in NEEDED:
        install = f"pip install {name}=={known[name]}" if name in known else f"pip install {name}"
        yield _compared(name, known.get(name)) or Finding("bad", f"{name} is not installed: {install}")
    for name in ("torch", "tensordict", "pyarrow"):
        if why := broken(name):
            yield Finding("bad", why)


def extras() -> Iterator[Finding]:
    """Check the optional packages."""
    known = _known()
    for extra, package in EXTRAS.items():
        if extra == "torchrl" and (why := broken(package)):
            yield Finding("note", f"extra {extra}: {why}. What needs TorchRL does not work")
        else:
            absent = f"extra {extra} is not installed: pip install 'headrace[{extra}]' if you need it"
            if extra == "torchrl" and (others := refuses("tensordict", TENSORDICT_OF_TORCHRL)):
                absent = f"extra {extra} is not installed, and cannot be here: {others}"
            yield _compared(package, known.get(package), f"extra {extra}: ") or Finding("note", absent)


def _known() -> dict[str, str]:
    """The tested versions; empty if their list is missing. Then versions are shown, and not compared."""
    try:
        return tested()
    except OSError:
        return {}


def _compared(package: str, wanted: str | None, start: str = "") -> Finding | None:
    """Compare the version of a package with the tested one; None if the package is not installed."""
    if (found := version_of(package)) is None:
        return None
    if wanted and found.partition("+")[0] != wanted:
        return Finding("note", f"{start}{package} {found}; {TESTED.format(wanted)}")
    return Finding("ok", f"{start}{package} {found}" + (", the tested version" if wanted else ""))


def devices() -> Iterator[Finding]:
    """Check the devices."""
    torch: Any = import_module("torch")
    yield Finding("ok", f"cpu: {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding("ok", f"cuda:{index}: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    if torch.version.cuda and not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda} and finds no device"
        yield Finding("note", f"{built}: nvidia-smi says whether there is one")
    elif not torch.cuda.is_available():
        yield Finding("ok", "no CUDA: everything runs on the CPU")
    if torch.backends.mps.is_available():
        yield Finding("ok", "mps is there; headrace is not tested on it (device=mps)")


def golden_runs() -> Iterator[Finding]:
    """Run a small batch through the recipe grpo, on the CPU and on a GPU if there is one."""
    torch: Any = import_module("torch")
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        try:
            began = time.perf_counter()
            found = run_golden(device)
            seconds = time.perf_counter() - began
        except Exception as err:
            yield Finding("bad", f"grpo on {device} failed: {str(err) or repr(err)}")
            continue
        worst = max(abs(one - other) for one, other in zip(found, GOLDEN, strict=True))
        if worst <= TOLERANCE:
            yield Finding("ok", f"grpo on {device}: the right advantages, in {seconds:.1f} s")
        else:
            yield Finding("bad", f"grpo on {device}: wrong advantages, by {worst:.3g}: {found}")


def run_golden(device: str) -> list[float]:
    """The advantages of the trained rows of a small batch under grpo, in order.

    Args:
        device: device of the batch.
    """
    torch: Any = import_module("torch")
    from tensordict import TensorDict

    from headrace.pipeline.load import load_pipeline

    columns = {
        "group_id": torch.tensor(GROUPS),
        "rollout_id": torch.tensor(ROLLOUTS),
        ("next", "reward"): torch.tensor(REWARDS, dtype=torch.float32),
        ("masks", "all_assistant_mask"): torch.ones(len(GROUPS), 4, dtype=torch.bool),
    }
    pipeline = load_pipeline("pipeline.stages.gate.group_size=3", "pipeline.stages.split.shuffle=false")
    run = pipeline.run(TensorDict(columns, batch_size=[len(GROUPS)]).to(device))
    trained = []
    for minibatch in run.minibatches():
        in_loss = minibatch["masks", "all_assistant_mask"].any(-1)
        trained += minibatch["advantage"].flatten()[in_loss].tolist()
    return trained
