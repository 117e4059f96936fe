"""The wheel works, installed alone in an environment and used from another folder."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from command import Started, run_here

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
VERSION = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A clean clone."""
    folder = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    return wheel_of(source, tmp_path_factory.mktemp("wheel"))


def wheel_of(source: Path, folder: Path) -> Path:
    return built("wheel", source, folder)


def built(kind: str, source: Path, folder: Path) -> Path:
    """Build a wheel or a source distribution as pip does, but faster."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    return folder / run(sys.executable, "-W", "error::UserWarning", "-c", code, cwd=source).split()[-1]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    return environment(tmp_path_factory.mktemp("venv"), wheel)


@pytest.fixture(scope="module")
def editable(source, tmp_path_factory) -> Path:
    return environment(tmp_path_factory.mktemp("editable"), "--no-build-isolation", "--editable", source)


def environment(folder: Path, *what: str | Path) -> Path:
    """The Python of a new environment in which pip installs `what`, on top of the tested packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    # Python searches a folder that a .pth file names, but reads no .pth file in that folder. So the editable
    # headrace is not found.
    (site_of(python) / "tested.pth").write_text(sysconfig.get_path("purelib"))
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", "--no-deps", "--ignore-installed", *what)
    return python


def site_of(python: Path) -> Path:
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def run(*words, fails=False, **options) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **options,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_the_packages_and_every_recipe(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    packed = (".py", ".yaml", ".html", ".css", ".js", "py.typed", "constraints.txt")
    for folder in ("transforms", "pipeline", "adapters", "conf"):
        for path in (ROOT / folder).rglob("*"):
            assert not path.name.endswith(packed) or f"headrace/{path.relative_to(ROOT)}" in names, path
    assert {name.split("/")[0] for name in names} == {"headrace", f"headrace-{VERSION}.dist-info"}


def test_the_source_distribution_builds_the_same_wheel(source, wheel, tmp_path):
    with tarfile.open(built("sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"headrace-{VERSION}"
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md"} <= {
        path.name for path in unpacked.iterdir()
    }
    assert contents(wheel_of(unpacked, tmp_path)) == contents(wheel)


def contents(wheel: Path) -> dict[str, bytes]:
    archive = zipfile.ZipFile(wheel)
    return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.torchrl
@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_type_checkers_find_the_installed_packages(kind, request, tmp_path, tmp_path_factory):
    """An editable install has the same packages. Type checkers find them by a path in a .pth file."""
    python, follow = request.getfixturevalue(kind), {"installed": "normal", "editable": "skip"}[kind]
    (tmp_path / "use.py").write_text(
        "import headrace\n"
        "from headrace.pipeline import load_pipeline\n"
        "reveal_type(headrace.__version__)\n"
        "reveal_type(load_pipeline('grpo').minibatches)\n"
        "load_pipeline('grpo', scale='nose')\n"
    )
    (tmp_path / "mypy.ini").write_text(  # types of other packages, which take a minute
        "[mypy]\nignore_missing_imports = true\nfollow_imports = skip\n"
        f"[mypy-headrace]\nfollow_imports = normal\n[mypy-headrace.*.*]\nfollow_imports = {follow}\n"
    )
    words = ("--python-executable", python, "--cache-dir", tmp_path_factory.getbasetemp() / "mypy")
    found = run(sys.executable, "-m", "mypy", *words, "use.py", cwd=tmp_path, fails=kind == "installed")
    assert 'note: Revealed type is "str"' in found
    if kind == "editable":
        return
    assert "epochs: int =) -> typing.Iterator" in found
    assert """error: Argument "scale" to "load_pipeline" has incompatible type "Literal['nose']\"""" in found


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_a_wheel_uses_its_own_files_and_an_editable_install_the_root_folders(kind, request, source, tmp_path):
    python = request.getfixturevalue(kind)
    code = "import headrace, sys; from importlib.util import find_spec; print(headrace.__version__, "
    code += "find_spec('headrace.transforms').origin, 'torch' in sys.modules)"
    version, shown, starts_torch = run(python, "-c", code, cwd=tmp_path).split()
    assert (version, starts_torch) == (VERSION, "False")
    if kind == "installed":
        assert str(python.parent.parent) in shown
        return
    assert Path(shown).resolve() == source / "transforms" / "__init__.py"
    entries = [path.read_text().strip() for path in site_of(python).glob("__editable__*")]
    assert entries == [str(source / "src")]


def test_every_adapter_attaches_as_its_page_says(tmp_path):
    """All adapters run in one process. TRL is the real package. Other trainers have stand-ins."""
    if not find_spec("trl"):
        pytest.skip("TRL is not installed")
    script, pages = ROOT / "tests/support/attach_as_pages_say.py", ROOT / "docs" / "coming-from"
    program = partial(runpy.run_path, str(script), run_name="__main__")
    done = Started(program, tmp_path, str(pages)).ends()
    assert done.returncode == 0, done.stderr
    shown = done.stdout.splitlines()
    assert [line for line in shown if re.fullmatch(r"[\w-]+: [\w -]+: \d+", line)] == ATTACHED
    table = re.findall(r"\]\(([\w-]+)\.md\) \|[^|]*\| (\d+) \|", (pages / "README.md").read_text())
    assert dict(table).items() >= {(line.split(": ")[0], line.split(": ")[2]) for line in ATTACHED}


ATTACHED = [
    "agent-lightning: agent-lightning: 4",
    "ms-swift: swift: 6",
    "nemo-rl: nemo_rl: 8",
    "openrlhf: openrlhf: 4",
    "prime-rl: prime-rl: 3",
    "rllm: rllm: 3",
    "skyrl: skyrl: 3",
    "slime: slime rewards: 1",
    "slime: slime data: 1",
    "slime: miles data: 1",
    "slime: slime tokens: 1",
    "torchtitan: torchtitan: 3",
    "trinity-rft: trinity: 4",
    "trl: trl: 2",
    "verl: verl: 3",
]


def test_the_command_runs_from_another_folder(installed, tmp_path):
    """The command needs the entry point and the YAML files of the wheel."""
    shown = run(installed.parent / "headrace", "--cfg", "job", "pipeline=dr_grpo", cwd=tmp_path)
    assert "scale: none" in shown


def test_another_projects_config_uses_the_recipes(tmp_path):
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
    app = partial(runpy.run_path, str(tmp_path / "app.py"), run_name="__main__")
    shown = run_here(app, tmp_path, "app.py", "pipeline.stages.split.minibatches=4").stdout
    assert "CompletenessGate(group_size=5)" in shown
    assert "GroupRelativeAdvantage(scale='none')" in shown
    assert "ShuffleSplit(minibatches=4" in shown
