"""What a user gets from the package index: the wheel, alone in an environment, used from another folder."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source)
    return next(folder.glob("headrace-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The Python of an empty environment with the wheel, on top of the tested packages."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel)
    # A path in a .pth file is searched, but .pth files in it, such as the editable headrace's, are not.
    (site / "tested.pth").write_text(sysconfig.get_path("purelib"))
    return python


def run(*words, **options) -> str:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_holds_the_packages_and_every_recipe(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("transforms", "pipeline", "conf"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".html", ".css", ".js") or path.name in (
                "py.typed",
                "constraints.txt",
            ):
                assert f"headrace/{path.relative_to(ROOT)}" in names
    assert not [name for name in names if name.startswith(("tests/", "transforms/", "pipeline/", "conf/"))]


def test_it_is_the_wheels_code_that_runs(installed, tmp_path):
    where = run(installed, "-c", "import headrace.transforms as t; print(t.__file__)", cwd=tmp_path)
    assert str(installed.parent.parent) in where


def test_the_command_runs_from_another_folder(installed, tmp_path):
    words = ["train.steps=1", "sampler.prompts_per_batch=2", "policy.width=16"]
    assert "trained" in run(installed.parent / "headrace", *words, cwd=tmp_path)


def test_another_projects_config_uses_the_recipes(installed, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "defaults: [pipeline: dr_grpo, _self_]\n"
        "hydra: {searchpath: ['pkg://headrace.conf'], run: {dir: .}}\n"
        "pipeline: {stages: {gate: {group_size: 5}}}\n"
    )
    (tmp_path / "app.py").write_text(
        "import hydra\n"
        "from headrace.pipeline import build_pipeline\n"
        "@hydra.main(version_base='1.3', config_path='.', config_name='config')\n"
        "def main(config):\n"
        "    print(build_pipeline(config.pipeline))\n"
        "main()\n"
    )
    shown = run(installed, "app.py", "pipeline.stages.split.minibatches=4", cwd=tmp_path)
    assert "CompletenessGate(group_size=5)" in shown
    assert "GroupRelativeAdvantage(scale='none')" in shown
    assert "ShuffleSplit(minibatches=4" in shown
