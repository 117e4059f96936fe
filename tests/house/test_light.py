"""Tests that need TorchRL have a marker: without TorchRL, all other test files are imported and run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from public import NEED_TORCHRL

TESTS = Path(__file__).parents[1]
FILES = {path.stem: path for path in TESTS.rglob("*.py")}
MARKED = re.compile(r"^pytestmark = (\[[^]]*)?pytest\.mark\.torchrl\b", re.M)
OURS = {*NEED_TORCHRL, "DigitPolicy", "ReverseEnv"}


def at_module_level(node: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """The modules that a file imports at module level, each with the imported names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, set()) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield child.module or "", {alias.name for alias in child.names}
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from at_module_level(child)


@cache
def needs_torchrl(name: str) -> list[str]:
    """The imports by which a file of tests, or a shared file, needs TorchRL before any test runs."""
    found = []
    for module, taken in at_module_level(ast.parse(FILES[name].read_text())):
        top = module.partition(".")[0]
        if top == "torchrl" or (top == "headrace" and taken & OURS) or (top in FILES and needs_torchrl(top)):
            found.append(module)
    return found


def test_no_file_without_the_marker_imports_torchrl_at_module_level():
    marked = {name for name, path in FILES.items() if MARKED.search(path.read_text())}
    wrong = {name: found for name in FILES.keys() - marked if (found := needs_torchrl(name))}
    assert not {name: found for name, found in wrong.items() if name.startswith("test_")}, (
        "import it in the tests that need it, and mark them with pytest.mark.torchrl"
    )
    assert {"rollouts", "quizzes"} <= wrong.keys()
    assert all(needs_torchrl(name) for name in ("test_drain", "test_trainer_hook"))
