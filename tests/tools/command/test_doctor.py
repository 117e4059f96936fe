"""``headrace doctor`` checks an installation, and gives advice for each check that fails."""

from __future__ import annotations

import io
from dataclasses import FrozenInstanceError
from itertools import count
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace

import pytest
import torch
from command import headrace_here
from rich.console import Console

from headrace import installed
from headrace.pipeline.tools.command import doctor

pytestmark = pytest.mark.slow


@pytest.fixture
def examine():
    def run():
        """The status, the text, and whether the last line is red."""
        console = Console(file=io.StringIO(), width=80, record=True)
        status, styled = doctor.examine(console), console.export_text(clear=False, styles=True)
        return status, console.export_text(), "\x1b[31m" in styled.splitlines()[-1]

    return run


def test_a_sound_installation_has_no_findings(tmp_path):
    shown = headrace_here(tmp_path, "doctor").stdout
    assert shown.splitlines()[-1] == "everything is in order"
    assert "grpo on cpu: the right advantages, in " in shown
    assert f"torch {torch.__version__}" in shown
    assert not [line for line in shown.splitlines() if line.startswith("bad")]
    assert not list(tmp_path.iterdir())


def test_the_golden_advantages_equal_the_equation():
    """A = (R − mean) / std over the rollouts of a group, where the std divides by n − 1."""
    trained = zip(doctor.GROUPS[:7], doctor.REWARDS, strict=False)
    rewards = {0: [13, 15, 2], 7: [16, 17, -6]}
    assert pytest.approx([(r - mean(rewards[g])) / stdev(rewards[g]) for g, r in trained]) == doctor.GOLDEN
    assert doctor.run_golden("cpu") == pytest.approx(doctor.GOLDEN, abs=doctor.TOLERANCE)
    with pytest.raises(FrozenInstanceError):
        doctor.Finding("ok", "said").what = "else"


def test_the_tested_versions_are_those_of_the_constraints():
    lines = (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()
    assert doctor.tested() == dict(line.split("==") for line in lines if "==" in line)
    assert {*doctor.NEEDED, *doctor.EXTRAS.values()} <= doctor.tested().keys()


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        ({"version_of": lambda name: None}, "torch is not installed: pip install torch=="),
        ({"run_golden": lambda device: [0.0] * 7}, "bad  grpo on cpu: wrong advantages, by 1.15"),
        (
            {"tested": lambda: {}, "run_golden": lambda device: 1 / 0},
            "bad  grpo on cpu failed: division by zero",
        ),
        ({"tested": lambda: {"torch": "0.1"}}, f"note torch {torch.__version__}; all tests ran with 0.1"),
        ({"tested": lambda: Path("/no/such/file").read_text()}, f"ok   torch {torch.__version__}\n"),
        (
            {"tested": lambda: {"ray": "7"}, "version_of": lambda name: "7+cu"},
            "ray: ray 7+cu, the tested version\n",
        ),
        (
            {"tested": lambda: {"ray": "0.1"}, "version_of": lambda name: "7"},
            "note extra ray: ray 7; all tests ran with 0.1",
        ),
    ],
)
def test_each_fault_has_a_line_that_says_what_to_do(examine, monkeypatch, broken, line):
    for name, stub in broken.items():
        monkeypatch.setattr(doctor, name, stub)
    status, shown, red = examine()
    assert line in shown
    assert status == red == ("bad " in shown)
    assert shown.splitlines()[-1] == (
        "everything is in order" if not status else f"{shown.count('bad  ')} to fix, see above"
    )


@pytest.mark.parametrize(
    ("why", "wants", "of_torchrl"),
    [
        ("", "", " is not installed: pip install 'headrace[torchrl]' if you need it"),
        ("", "trainer wants {}", " is not installed, and cannot be here: trainer wants tensordict 0.14.3"),
        ("{} cannot be imported", "", ": torchrl cannot be imported. What needs TorchRL does not work"),
    ],
)
def test_each_missing_extra_is_a_note_and_only_that_of_torchrl_may_be_refused(
    why, wants, of_torchrl, monkeypatch
):
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    monkeypatch.setattr(doctor, "broken", why.format)
    monkeypatch.setattr(doctor, "refuses", lambda *of: wants.format(" ".join(map(str, of))))
    absent = {
        extra: f" is not installed: pip install 'headrace[{extra}]' if you need it" for extra in doctor.EXTRAS
    }
    notes = {f"extra {extra}{said}" for extra, said in (absent | {"torchrl": of_torchrl}).items()}
    assert {(found.state, found.what) for found in doctor.extras()} == {("note", said) for said in notes}


def test_each_gpu_has_a_line_with_its_memory_and_runs_the_batch(monkeypatch):
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        mem_get_info=lambda at: ((3 + at) * 2**29, 80 * 2**30),
        get_device_name=lambda at: f"GPU {at}",
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    _, first, second, *others = doctor.devices()
    assert [first.what, second.what, others] == [
        "cuda:0: GPU 0, 1.5 of 80.0 GiB free",
        "cuda:1: GPU 1, 2.0 of 80.0 GiB free",
        [],
    ]
    near, far = ([value + share * doctor.TOLERANCE for value in doctor.GOLDEN] for share in (-0.9, 2))
    monkeypatch.setattr(doctor, "time", SimpleNamespace(perf_counter=count(100, 0.5).__next__))
    right = "the right advantages, in 0.5 s"
    for found, lines in (
        (
            {"cpu": near, "cuda": far},
            [("ok", f"cpu: {right}"), ("bad", f"cuda: wrong advantages, by 0.0002: {far}")],
        ),
        ({"cuda": near}, [("bad", "cpu failed: 'cpu'"), ("ok", f"cuda: {right}")]),
    ):
        monkeypatch.setattr(doctor, "run_golden", found.__getitem__)
        assert [(each.state, each.what.removeprefix("grpo on ")) for each in doctor.golden_runs()] == lines


def test_a_torch_for_cuda_that_finds_no_device_is_a_note(monkeypatch):
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: False, device_count=lambda: 0))
    for built, said in ((None, ("ok", "no CUDA")), ("13.0", ("note", "torch is built for CUDA 13.0"))):
        monkeypatch.setattr(torch.version, "cuda", built)
        for more in ([], ["mps is there; headrace is not tested on it (device=mps)"]):
            monkeypatch.setattr(torch.backends.mps, "is_available", lambda more=more: bool(more))
            _, found, *others = doctor.devices()
            assert (found.state, found.what[: len(said[1])]) == said
            assert [each.what for each in others] == more


def test_without_torch_the_other_checks_still_run(examine, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    for module, name in ((doctor, "import_module"), (installed, "import_module")):
        monkeypatch.setattr(module, name, missing)
    status, shown, _ = examine()
    assert status == 1
    assert "is installed and cannot be imported: ModuleNotFoundError: No module named 'torch'" in shown
    assert "bad  devices: No module named 'torch'" in shown
    assert "extra llm" in shown
