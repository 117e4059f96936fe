"""`import headrace` has every public name, imports lazily, and says where other names are."""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from public import public

import headrace
import headrace.pipeline
import headrace.transforms
from headrace.pipeline.public_names import INNER, OF_OTHERS

PUBLIC = {*headrace.pipeline.__all__, *headrace.transforms.__all__}


def test_headrace_exports_the_public_names_of_both_packages():
    assert not set(headrace.pipeline.__all__) & set(headrace.transforms.__all__)
    assert set(headrace.__all__) == PUBLIC | {"__version__"}
    assert PUBLIC | {"conf", "pipeline", "transforms"} <= set(dir(headrace))
    for package in (headrace.pipeline, headrace.transforms):
        assert all(getattr(headrace, name) is thing for name, thing in public(package))


def test_help_begins_with_public_names_by_what_they_are_for():
    rows = re.findall(r"^\w[\w ]+  +(\w+(?:, \w+)*)$", headrace.__doc__, re.MULTILINE)
    named = [name for row in rows for name in row.split(", ")]
    assert len(rows) == 7
    assert {"load_pipeline", "decide", "ConfigError"} < {*named} < PUBLIC


def test_type_checkers_see_all_names_of_both_packages():
    """Star imports take the names of `__all__`, so there is no second list."""
    tree = ast.parse(Path(headrace.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(guarded.test) == "TYPE_CHECKING"
    stars = [ast.unparse(node) for node in guarded.body if isinstance(node, ast.ImportFrom)]
    assert stars == ["from .pipeline import *", "from .transforms import *"]


def run(*lines: str) -> None:
    code = "\n".join(["import sys, headrace", *lines])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_listing_and_misspelling_do_not_import_torch():
    run(
        "assert 'load_pipeline' in dir(headrace) and 'whiten' in dir(headrace)",
        "assert not hasattr(headrace, 'open_source') and not hasattr(headrace, 'load_pipelines')",
        "headrace.pipeline",
        "assert 'torch' not in sys.modules",
    )


@pytest.mark.slow
def test_importing_a_stage_does_not_import_hydra():
    run("headrace.GroupRelativeAdvantage", "assert 'torch' in sys.modules and 'hydra' not in sys.modules")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("open_source", ": it is headrace.pipeline.tools.dumps.readers.open_source"),
        ("certify_recipe", ": it is headrace.pipeline.tools.certify.certify_recipe"),
        ("GRPOLoss", ": it is torchrl.objectives.llm.GRPOLoss"),
        ("TensorDict", ": it is tensordict.TensorDict"),
        ("grpo", ": it is a recipe, headrace.load_pipeline('grpo')"),
        ("load_pipelines", " (did you mean 'load_pipeline' or 'build_pipeline'?)"),
        ("CompletnessGate", " (did you mean 'CompletenessGate' or 'IncompleteGroups'?)"),
        ("qqq", "; dir(headrace) lists the public names"),
        ("__path_hooks__", ""),
    ],
)
def test_an_unknown_name_is_refused_with_its_module_or_nearest_name(name, hint):
    for module in (headrace, headrace.pipeline):
        with pytest.raises(AttributeError) as refused:
            getattr(module, name)
        assert str(refused.value) == f"module {module.__name__!r} has no attribute {name!r}{hint}"


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=pytest.mark.torchrl if module.startswith("torchrl") else ())
        for module in OF_OTHERS
    ],
)
def test_each_hinted_module_has_the_name(module):
    assert all(hasattr(import_module(module), name) for name in OF_OTHERS[module])


def test_each_inner_package_that_is_hinted_lists_its_names():
    for package in INNER:
        assert set(import_module(f"headrace.{package}").__all__)


def test_its_example_runs():
    assert doctest.testmod(headrace).failed == 0
