"""Examples in docstrings and in the README run, and say what they print."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import headrace.pipeline
import headrace.transforms

ROOT = Path(__file__).parent.parent
MODULES = [
    name
    for package in (headrace.transforms, headrace.pipeline)
    for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not name.endswith("__main__")
]
PAGES = ["README.md", "CONTRIBUTING.md"]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, raise_on_error=False).failed == 0


def test_every_exported_transform_and_function_has_an_example():
    for package in (headrace.transforms, headrace.pipeline):
        for name in package.__all__:
            thing = getattr(package, name)
            abstract = name in ("BatchTransform", "build_pipeline", "optimise")  # shown in the README
            if not abstract and (not isinstance(thing, type) or hasattr(thing, "forward")):
                assert ">>>" in thing.__doc__, name


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run_in_order(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks or page != "README.md"
    scope: dict = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, page, "exec"), scope)


@pytest.mark.parametrize("page", PAGES)
def test_links_within_the_project_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
        assert (ROOT / target).exists(), target
