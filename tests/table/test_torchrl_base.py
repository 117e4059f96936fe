"""Without TorchRL, stages give the same numbers, and parts that need TorchRL say so."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from public import NEED_TORCHRL
from recipes import CHAINS
from tensordict import TensorDict

import headrace

pytestmark = pytest.mark.slow  # they need processes that import torch

# The beginning of a program in which TorchRL cannot be imported, for example because of another tensordict.
WITHOUT = """
import sys

class Finder:  # it does not find refused packages; tensordict 0.15 imports pyarrow late if it is found
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in REFUSED else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Finder, sys.meta_path)
"""
BATCH = {
    "group_id": torch.arange(8) // 4,
    "rollout_id": torch.arange(8),
    ("next", "reward"): torch.tensor([0.0, 1, 1, 3, 5, 5, 5, 5]),
    ("masks", "all_assistant_mask"): torch.ones(8, 3, dtype=torch.bool),
}


# It forks for each program, because to import torch takes longer than most of them.
FORKS = """
import json, os, warnings
import torch, tensordict, tensordict.nn, hydra, omegaconf

warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # of Python 3.12, for threads of BLAS
for line in sys.stdin:
    program, file = json.loads(line)
    if os.fork() == 0:
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), 1)
        exec(program)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Callable[[str], str]]:
    """Runs a program without TorchRL, and returns its output."""
    file = tmp_path_factory.mktemp("said") / "said"
    code = f"REFUSED = ('torchrl',)\n{WITHOUT}\n{FORKS}"
    words = [sys.executable, "-W", "error", "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:

        def said(program: str) -> str:
            file.unlink(missing_ok=True)
            process.stdin.write(json.dumps([program, str(file)]) + "\n")
            assert process.stdout.readline() == "0\n", "the captured stderr has its error"
            return file.read_text()

        yield said
        process.stdin.close()


def advantages() -> list[float]:
    batch = TensorDict(BATCH, batch_size=[8])
    run = headrace.load_pipeline("grpo", group_size=4, shuffle=False).run(batch)
    return run.batch["advantage"].flatten().tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "batch.pt"
    torch.save({str(key): value for key, value in BATCH.items()}, path)
    return path


LOAD = """
import torch, pickle
from ast import literal_eval
from tensordict import TensorDict
keys = torch.load({path!r})
keys = {{literal_eval(key) if key.startswith("(") else key: value for key, value in keys.items()}}
batch = TensorDict(keys, batch_size=[8])
"""


def test_without_torchrl_each_list_of_stages_is_built_and_the_numbers_are_the_same(run, saved):
    program = LOAD.format(path=str(saved)) + (
        "from headrace import load_pipeline\n"
        f"for name in {CHAINS}:\n"
        "    load_pipeline(name)\n"
        "run = load_pipeline('grpo', group_size=4, shuffle=False).run(batch)\n"
        "print(run.batch['advantage'].flatten().tolist())"
    )
    assert run(program) == f"{advantages()}\n"


def test_pickles_can_be_loaded_with_and_without_torchrl(run, saved, tmp_path):
    pipeline = headrace.load_pipeline("grpo", group_size=4, shuffle=False)
    with_torchrl, without = tmp_path / "with", tmp_path / "without"
    with_torchrl.write_bytes(pickle.dumps(pipeline))
    said = run(
        LOAD.format(path=str(saved)) + f"pipeline = pickle.load(open({str(with_torchrl)!r}, 'rb'))\n"
        f"pickle.dump(pipeline, open({str(without)!r}, 'wb'))\n"
        "print(pipeline.run(batch).batch['advantage'].flatten().tolist())"
    )
    back = pickle.loads(without.read_bytes())
    batch = TensorDict(BATCH, batch_size=[8])
    assert said == f"{back.run(batch).batch['advantage'].flatten().tolist()}\n" == f"{advantages()}\n"


def test_names_that_need_torchrl_say_so(run):
    program = f"import headrace\nfor name in {NEED_TORCHRL}:\n" + (
        "    try:\n        getattr(headrace, name)\n    except ImportError as err:\n        print(err)\n"
    )
    lines = run(program).splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"{name} needs TorchRL" for name in NEED_TORCHRL]
    assert all("pip install 'headrace[torchrl]'" in line for line in lines)


def test_the_error_of_a_training_without_torchrl_is_one_sentence(run, tmp_path):
    program = (
        f"import os\nos.chdir({str(tmp_path)!r})\n"
        "from headrace.pipeline.main import main\n"
        "sys.argv[1:] = ['task=train']\n"
        "sys.stderr = sys.stdout\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as err:\n"
        "    print(err.code)\n"
    )
    said = run(program)
    assert said.startswith("headrace: task=train needs TorchRL: pip install 'headrace[torchrl]'")
    assert said.endswith("\n2\n")


def test_plain_columns_and_adapters_need_neither_rich_nor_pyarrow(run):
    """rich and pyarrow are not imported even if they are installed."""
    program = (
        "from headrace import decide\n"
        "import headrace.adapters\n"
        "columns = {'group_id': [*'aabb'], 'rollout_id': [*'wxyz'], 'reward': [0.0, 1, 2, 4]}\n"
        "found = decide(columns, 'rloo', group_size=2)\n"
        "print(found.advantage.tolist())\n"
        "print([name for name in ('rich', 'pyarrow', 'torchrl') if name in sys.modules])"
    )
    for refused in ("", "REFUSED += ('rich', 'pyarrow')\n"):
        assert run(refused + program) == "[-1.0, 1.0, -2.0, 2.0]\n[]\n"


def test_plain_columns_need_only_torch_tensordict_and_hydra(run):
    """Each module makes the start slower, so few of headrace's own modules are imported.

    The process has imported these four packages before.
    """
    program = (
        "def packages():\n"
        "    return {name.partition('.')[0] for name in sys.modules}\n"
        "before = packages()\n"
        "from headrace import decide\n"
        "columns = {'group_id': [*'aabb'], 'rollout_id': [*'wxyz'], 'reward': [0.0, 1, 2, 4]}\n"
        "decide(columns, 'rloo', group_size=2)\n"
        "print(*packages() - before - sys.stdlib_module_names)\n"
        "print(len([name for name in sys.modules if name.startswith('headrace')]))"
    )
    others, own = run(program).splitlines()
    assert others == "headrace"
    assert int(own) <= 86
