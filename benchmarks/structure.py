"""Count the code that runs, and its size, for maintainers.

    python benchmarks/structure.py

These are counts, not times, so they are the same on every machine with the same versions.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from batches import MINIBATCHES, collected, grpo_loop
from results import main
from tables import Cell, Row, Table
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.envs.transforms import Transform

import headrace
from headrace.transforms import BatchTransform

ROOT = Path(__file__).parent.parent
SMALL, ONE_PIECE = (64, 100), (512, 100)  # rows, tokens of each row
ASKED_BY_TORCHRL = {"requires_shared_write_state"}
NOTE_RUN = f"""Counts for the loop over the minibatches of the grpo recipe: {SMALL[0]} rows in
{MINIBATCHES} minibatches, if the line does not say otherwise. Files and functions are those of headrace. On
a GPU each operator call is a kernel launch."""
NOTE_READ = """Lines of code without docstrings, comments and empty lines. A trait is a public attribute of
BatchTransform by which a stage describes itself."""


class Operators(TorchDispatchMode):
    """Count operator calls."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def operator_calls(function: Callable[[], object]) -> int:
    """Count the operator calls of a function, after a first run."""
    function()
    with Operators() as operators:
        function()
    return operators.count


class Entered(NamedTuple):
    """Counts of the code that a function runs."""

    files: int  # files of headrace
    functions: int  # functions of headrace
    calls: int  # calls of any function


def entered(function: Callable[[], object]) -> Entered:
    """Count the code that a function runs after a first run, by ``sys.setprofile``."""
    function()
    codes: set[CodeType] = set()
    calls: Counter[str] = Counter()

    def look(frame: FrameType, event: str, _: Any) -> None:
        calls[event] += 1
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    home = str(Path(headrace.__file__).parent)
    ours = [code for code in codes if code.co_filename.startswith(home)]
    names = {(code.co_filename, getattr(code, "co_qualname", code.co_name)) for code in ours}
    return Entered(len({code.co_filename for code in ours}), len(names), calls["call"] + calls["c_call"])


def traits() -> set[str]:
    """The names of public attributes of BatchTransform that are neither methods nor TorchRL's."""
    found: set[str] = set()
    for each in BatchTransform.__mro__[: BatchTransform.__mro__.index(Transform)]:
        found |= {name for name, value in vars(each).items() if not callable(value)}
        found |= inspect.get_annotations(each).keys()
    return {name for name in found if not name.startswith("_")} - ASKED_BY_TORCHRL - set(dir(Transform))


def code_lines(folder: str, files: int | None) -> int:
    """Count the lines with code in the Python files of a folder, or in its first `files` files."""
    paths = list((ROOT / folder).rglob("*.py"))[:files]
    return sum(len(lines_with_code(path.read_text())) for path in paths)


def lines_with_code(source: str) -> set[int]:
    """The numbers of the lines that are neither empty, nor comments, nor docstrings."""
    texts = enumerate(map(str.strip, source.splitlines()), 1)
    lines = {number for number, text in texts if text and not text.startswith("#")}
    docstrings: set[int] = set()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr | ast.Constant):
            lines |= spanned(node)  # a string may contain empty lines
        elif isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= spanned(node.body[0])
    return lines - docstrings


def spanned(node: ast.expr | ast.stmt) -> set[int]:
    """The numbers of the lines that a node spans."""
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """Make the tables of the code that runs, and of the size of the code."""
    small = grpo_loop(collected(*SMALL), MINIBATCHES)
    found = entered(small)
    numbers = {
        "files entered": (found.files, 20),
        "functions entered": (found.functions, 170),
        "calls": (found.calls, None),
        f"operator calls, {SMALL[0]} rows in {MINIBATCHES} minibatches": (operator_calls(small), 240),
        f"operator calls, {ONE_PIECE[0]} rows in one": (
            operator_calls(grpo_loop(collected(*ONE_PIECE), 1)),
            200,
        ),
    }
    lines = [Row(name, [Cell(count, ",d", goal)]) for name, (count, goal) in numbers.items()]
    yield Table("Code that a GRPO batch runs through", NOTE_RUN, ["what", "number"], lines)

    goals = {"transforms": 7000, "pipeline": 8500, "tests": 18_000}
    most = 1 if options.quick else None
    counts = {name: code_lines(name, most) for name in goals}
    lines = [Row(f"lines of {name}", [Cell(counts[name], ",d", goal)]) for name, goal in goals.items()]
    lines.append(Row("traits of a stage", [Cell(len(traits()), ",d", 8)]))
    yield Table("Size of the code", NOTE_READ, ["what", "number"], lines)


if __name__ == "__main__":
    main(tables, __doc__, warm=False)
