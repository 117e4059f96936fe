"""Install headrace beside other packages, and run the tests there: `make test-light`.

python tools/beside.py             # all environments, in an hour or so; writes docs/beside.json
python tools/beside.py verl oldest # only these two; the others keep their results

Each environment is made anew in build/beside/NAME from the package index: first the other packages, then the
wheel of this clone. `pip check` must find no new conflict, no version of another package may change,
and the trainer's own tests must end as they did before.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "beside.json"
BUILD = ROOT / "build" / "beside"
TORCH = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:7] == "torch==")
TOOLS = "pytest pytest-benchmark pytest-xdist hypothesis selenium"
QUICK = "-m pytest -q -n 2 -m 'not slow'"
VERSIONS = ("torch", "tensordict", "torchrl", "numpy", "hydra-core", "omegaconf", "pyarrow")
VERL = "verl==0.9.1 TransferQueue cachetools uvicorn fastapi"


class Beside(NamedTuple):
    """An environment with other packages."""

    title: str
    packages: str
    """Arguments of the `pip install` before headrace's. After ``;`` come the arguments of a second call."""
    runs: tuple[str, ...] = ()
    """Commands for the environment's Python, run in the clone. Each must end with status 0."""
    extra: str = ""
    """The extra that headrace is installed with."""
    own_tests: str = ""
    """Package whose source distribution has tests. Its tests `*_on_cpu.py` run before and after."""
    clone: str = ""
    """Repository whose clone the commands need. The variable CLONE has its path."""
    asks_only: bool = False
    """Whether pip only resolves the packages together, and installs nothing."""
    python: str = ""
    """Another Python. It gets no torch, and headrace without its requirements."""


COMPILES = "-W error -m compileall -q {folder}/lib/*/site-packages/headrace"
COMPOSES = (
    "-c 'import sys; from headrace.pipeline.composing import compose_config, recipes; "
    'assert len([compose_config("load", f"pipeline={name}") for name in recipes()]) > 50; '
    'assert "torch" not in sys.modules\''
)


def peer(name: str) -> str:
    """The command that runs an adapter's checks inside its trainer."""
    return f"-W ignore tests/support/peer_checks.py {name}"


def measured(name: str) -> str:
    """The command that measures the weights of an adapter's recipes in a whole step of its trainer."""
    return f"-m pytest -q tests/adapters/test_measured.py -k {name}"


OF_OPENRLHF = (
    "deepspeed==0.19.6 transformers==5.15.0 ray accelerate aiohttp datasets peft pillow pylatexenc torchdata"
)
OF_TRL = ("coming_from_trl", "over_generation", "trl_async")
BESIDE = {
    "oldest": Beside("no TorchRL, oldest versions", "tensordict==0.10.0 numpy==1.26.* pyarrow<22", (QUICK,)),
    "newest": Beside("no TorchRL, newest tensordict", "tensordict==0.15.3", (QUICK,)),
    "hydra": Beside("Hydra 1.4", "hydra-core==1.4.0.dev1 omegaconf==2.4.0.dev2", (QUICK,), extra="[torchrl]"),
    "verl": Beside(
        "verl 0.9.1",
        VERL,
        (peer("verl"), peer("verl_sampler"), "-m pytest -q -p no:asyncio tests/adapters/test_coming_from.py"),
        own_tests="verl==0.9.1",
    ),
    "agentlightning": Beside(
        "agent-lightning 1.0.2",
        f"{VERL} ; --no-deps --ignore-requires-python agentlightning==1.0.2",
        (peer("agentlightning"),),
    ),
    "trl": Beside(
        "TRL 1.16.0",
        "trl==1.16.0",
        (f"-m pytest -q {' '.join(f'tests/adapters/test_{name}.py' for name in OF_TRL)}",),
    ),
    "unsloth": Beside("Unsloth 2026.10.9", "unsloth==2026.10.9 trl==1.15.0", (peer("unsloth"),)),
    "swift": Beside(
        "ms-swift 4.6.0", "ms-swift==4.6.0 trl==0.29.1 msgspec", (peer("swift"), measured("ms_swift"))
    ),
    "trinity": Beside("Trinity-RFT 0.6.0", "trinity-rft==0.6.0 pyarrow<22", (peer("trinity"),)),
    "nemo_rl": Beside(
        "NeMo RL 7ea279abfb, its samplers",
        "pydantic",
        (peer("nemo_rl"),),
        clone="https://github.com/NVIDIA-NeMo/RL",
    ),
    "transfer_queue": Beside("TransferQueue", "TransferQueue ray", ("-m pytest -q tests/queues",)),
    **{
        f"python{version}": Beside(
            f"Python {version}, without torch",
            "hydra-core rich packaging typing_extensions wheel",
            (COMPILES, COMPOSES),
            python=f"python{version}",
        )
        for version in ("3.10", "3.12", "3.13")
    },
    "openrlhf": Beside(
        "OpenRLHF 0.11.2, without flash-attn and vLLM",
        f"{OF_OPENRLHF} ; --no-deps openrlhf==0.11.2",
        (peer("openrlhf"), measured("openrlhf")),
    ),
    "areal": Beside("AReaL 1.0.4", "areal==1.0.4", asks_only=True),
}


class RunError(Exception):
    """A command ended with a status other than 0."""


def run(command: str, log: Path, **options: Any) -> str:
    """Run a shell command, append its output to `log`, and return the output."""
    with log.open("a") as file:
        print(f"$ {command}", file=file, flush=True)
        done = subprocess.run(
            command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
        )
        print(done.stdout, file=file, flush=True)
    if done.returncode:
        lines = done.stdout.splitlines()
        last = ([line.strip() for line in lines if re.match(r"\s*\w*Error: ", line)] or lines)[-1][:200]
        raise RunError(f"{command} … {last}".replace(f"{BUILD}/", "").replace(f"{ROOT}/", ""))
    return done.stdout


def frozen(python: Path, log: Path) -> dict[str, str]:
    """The installed versions, by package."""
    found = json.loads(run(f"{python} -m pip list --format json 2>/dev/null", log))
    return {each["name"].lower(): each["version"] for each in found}


def conflicts(python: Path, log: Path) -> set[str]:
    """The conflicts that `pip check` finds."""
    found = run(f"{python} -m pip check || true", log).splitlines()
    return set(found) - {"No broken requirements found."}


def outcomes(python: Path, package: str, folder: Path, log: Path) -> dict[str, str]:
    """Run those tests of a package that need no GPU, and return the result of each."""
    if not list(folder.glob("*/tests")):
        run(f"{python} -m pip download -q --no-deps --no-binary :all: {package} -d {folder}", log)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    source = next(folder.glob("*/tests")).parent
    files = " ".join(str(path.relative_to(source)) for path in sorted(source.glob("tests/**/*_on_cpu.py")))
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = f"{python} -m pytest -q -c /dev/null --rootdir . --junitxml={report} {files}"
    try:
        run(command, log, cwd=source, timeout=1800)
    except RunError:  # some tests fail in any environment; only a changed result matters
        if not report.exists():
            raise
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}": _ended(case) for case in cases}


def _ended(case: ElementTree.Element) -> str:
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def wheel() -> Path:
    """The wheel of this clone."""
    folder = BUILD / "dist"
    rmtree(folder, ignore_errors=True)
    run(f"{sys.executable} -m build --wheel --outdir {folder} {ROOT}", BUILD / "wheel.log")
    return next(folder.glob("*.whl"))


def check(name: str, beside: Beside, built: Path) -> dict[str, Any]:
    """Make one environment, run its commands, and return a line of the table."""
    folder, log = BUILD / name, BUILD / f"{name}.log"
    rmtree(folder, ignore_errors=True)
    log.unlink(missing_ok=True)
    python, result = folder / "bin" / "python", {"title": beside.title, "packages": beside.packages}
    pip = f"{python} -m pip install -q --disable-pip-version-check"
    with_headrace = f"'{built}{beside.extra}'" + " --no-deps" * bool(beside.python)
    packages = [" ".join(f"'{each}'" for each in part.split()) for part in beside.packages.split(" ; ")]
    try:
        run(f"{beside.python or sys.executable} -m venv {folder}", log)
        if not beside.python:
            run(f"{pip} {TORCH}", log)
        if beside.asks_only:
            packages[-1] = f"--dry-run {packages[-1]} {with_headrace}"
        for part in packages:
            run(f"{pip} {part}", log, timeout=1800)
        if beside.asks_only:
            return result | {"resolved": True}
        before, known = frozen(python, log), conflicts(python, log)
        if beside.own_tests:
            run(f"{pip} pytest pytest-asyncio", log)
            theirs = outcomes(python, beside.own_tests, BUILD / f"{name}-source", log)
        run(f"{pip} {with_headrace}", log)
        if not beside.python and (new := conflicts(python, log) - known):
            raise RunError(f"pip check: {sorted(new)}")
        after = frozen(python, log)
        result["versions"] = {each: after[each] for each in VERSIONS if each in after}
        result["moved"] = sorted(each for each in before if after.get(each) != before[each])
        if not beside.python:
            run(f"{pip} {TOOLS}", log)
        clone = BUILD / f"{name}-source"
        if beside.clone and not clone.exists():
            run(f"git clone -q --filter=blob:none --no-checkout {beside.clone} {clone}", log, timeout=1800)
        for arguments in beside.runs:
            run(
                f"{python} {arguments.replace('{folder}', str(folder))}",
                log,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": "", "CLONE": str(clone)},
                timeout=1800,
            )
        if beside.own_tests:
            now = outcomes(python, beside.own_tests, BUILD / f"{name}-source", log)
            changed = sorted(each for each in theirs | now if theirs.get(each) != now.get(each))
            result |= {"own_tests": len(theirs), "changed": changed}
            if changed:
                raise RunError(f"tests of {beside.own_tests} give other results than before: {changed[:5]}")
        if result["moved"]:
            raise RunError(f"installing headrace changed the versions of {result['moved']}")
    except (RunError, subprocess.TimeoutExpired) as err:
        result["failed"] = str(err)
    finally:
        rmtree(folder, ignore_errors=True)  # some environments have gigabytes
    return result


def main(names: list[str]) -> int:
    """Check the named environments, or all; return the exit status."""
    if unknown := sorted(set(names) - set(BESIDE)):
        sys.exit(f"no such environment: {', '.join(unknown)}; there are {', '.join(BESIDE)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    built = wheel()
    for name in names or BESIDE:
        known[name] = check(name, BESIDE[name], built)
        print(f"{name}: {known[name].get('failed', 'ok')}", flush=True)
        text = json.dumps({each: known[each] for each in BESIDE if each in known}, indent=1, allow_nan=False)
        RESULTS.write_text(text + "\n")
    return int(any("failed" in known[name] for name in names or BESIDE))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
