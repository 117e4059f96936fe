"""Rules of the house that a linter does not know."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for folder in ("transforms", "pipeline") for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_dependencies_point_one_way(path):
    names = imported(path)
    tops = {name.split(".")[0] for name in names}
    assert not tops & {"transforms", "pipeline", "conf"}, (
        "import headrace.…: the root folders make second copies"
    )
    if path.is_relative_to(ROOT / "transforms"):
        assert not [name for name in names if name.startswith("headrace")]
        assert not tops & {"hydra", "omegaconf", "rich"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            body = [
                n for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
            ]
            assert not body or node.end_lineno - body[0].lineno < 60, f"{path}:{node.lineno} {node.name}"


def test_data_is_never_checked_with_assert():
    assert not [
        f"{path}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]


def test_every_package_is_listed_for_the_wheel():
    listed = (ROOT / "pyproject.toml").read_text()
    for init in [*(ROOT / "transforms").rglob("__init__.py"), *(ROOT / "pipeline").rglob("__init__.py")]:
        assert f'"headrace.{".".join(init.parent.relative_to(ROOT).parts)}"' in listed


def test_importing_the_transforms_brings_no_hydra_along():
    code = "import sys, headrace.transforms; sys.exit('hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
