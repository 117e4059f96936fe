"""Adapters run inside the installed code of the trainers, each in its own process and with its own packages.

A folder of packages for each, since they need versions of others that do not go together:
`pip install --no-deps --target FOLDER/verl verl==0.9.1 …`, and so on, as `PEERS` has it. HEADRACE_PEERS
names the folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(os.environ.get("HEADRACE_PEERS", "nowhere"))
VERL = "verl==0.9.1 codetiming cachetools uvicorn fastapi starlette torchdata peft"
PEERS = {
    "verl": VERL,
    "agentlightning": f"--ignore-requires-python agentlightning==1.0.2 {VERL}",
    "swift": ("ms-swift==4.6.0 trl==0.29.1 modelscope modelscope_hub peft json_repair einops dacite"),
    "trinity": "trinity-rft==0.6.0",
    "openrlhf": "openrlhf==0.11.2 pylatexenc peft deepspeed hjson py-cpuinfo ninja msgpack einops torchdata",
}


@pytest.mark.parametrize("name", PEERS)
def test_an_adapter_inside_its_trainer_gives_the_trainers_numbers(name):
    if not (FOLDER / name).is_dir():
        pytest.skip(
            f"HEADRACE_PEERS names no folder with {name}: "
            f"pip install --no-deps --target FOLDER/{name} {PEERS[name]}"
        )
    path = os.pathsep.join([str(FOLDER / name), *sys.path[1:]])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parents[1] / "support" / "peer_checks.py"), name],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.endswith("as it is\n"), done.stdout + done.stderr
