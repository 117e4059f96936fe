"""JSON that the project writes is valid: it has no NaN."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest

from headrace.pipeline.tools.report import json_text

ROOT = Path(__file__).parents[2]
FOLDERS = ("transforms", "pipeline", "adapters", "conf", "tools", "benchmarks")
INSIDE = {  # JSON that only headrace reads again, or of which only a digest is kept
    ("transforms/streams/journal.py", "_to_json"),
    ("pipeline/conversations.py", "_is_in"),
    ("tools/mutants.py", "pytest_sessionfinish"),
    ("pipeline/tools/dumps/readers/file_kinds.py", "group_of_prompt"),
    ("pipeline/tools/dumps/readers/verifiers.py", "parse_row"),
}


def writers(tree: ast.AST, name: str = "") -> set[str]:
    """Functions that write JSON without refusing NaN; "" stands for code outside of functions."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        found |= writers(node, node.name if isinstance(node, ast.FunctionDef) else name)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dump", "json.dumps"):
            found |= set() if "allow_nan=False" in ast.unparse(node) else {name}
    return found


@pytest.mark.slow
def test_every_json_writer_refuses_nan_or_writes_null():
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {
        (str(path.relative_to(ROOT)), name) for path in paths for name in writers(ast.parse(path.read_text()))
    }
    assert found == INSIDE
    assert len(paths) > 200


def test_a_non_finite_number_is_null():
    value = {"a": [1.5, math.nan, (math.inf, "NaN")], "b": {"c": -math.inf}}
    assert json.loads(json_text(value, indent=1)) == {"a": [1.5, None, [None, "NaN"]], "b": {"c": None}}


def test_result_files_are_valid_json():
    def refuse(name: str) -> None:
        raise AssertionError(name)

    paths = [*(ROOT / "benchmarks" / "results").glob("*.json"), *(ROOT / "docs").glob("*.json")]
    assert len(paths) > 5
    for path in paths:
        json.loads(path.read_text(), parse_constant=refuse)
