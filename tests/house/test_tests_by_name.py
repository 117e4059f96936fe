"""A module's tests are in a file with its name, in the folder of tests that mirrors the module's folder."""

from __future__ import annotations

import re
from pathlib import Path

from nearest import TESTED_ELSEWHERE, TESTS, file_of, nearest_tests, place_of
from test_house import OURS, ROOT, TREES

MODULES = [
    path.relative_to(ROOT)
    for path in OURS
    if "tools" not in path.relative_to(ROOT).parts and not path.stem.startswith("__")
]


def test_each_module_has_a_test_file_with_its_name():
    lacking = {
        str(module.with_suffix("")): f"{place_of(module).relative_to(TESTS)}/{file_of(module)}*.py"
        for module in MODULES
        if not list(place_of(module).glob(f"{file_of(module)}*.py"))
    }
    assert lacking.keys() == TESTED_ELSEWHERE.keys(), lacking


def test_a_module_without_its_own_test_file_is_named_in_another():
    """The listed file has the name of the module, or a name that the module defines."""
    wrong = []
    for name, file in TESTED_ELSEWHERE.items():
        tree, text = TREES[ROOT / f"{name}.py"], (TESTS / file).read_text()
        defined = re.findall(
            r"^ *(?:class|def) ([A-Za-z]\w+)", (ROOT / f"{name}.py").read_text(), re.MULTILINE
        )
        constants = [
            target.id
            for node in tree.body
            for target in getattr(node, "targets", ())
            if hasattr(target, "id")
        ]
        if not any(re.search(rf"\b{each}\b", text) for each in (Path(name).name, *defined, *constants)):
            wrong.append(f"{name}: {file}")
    assert not wrong


def test_every_module_has_nearest_tests():
    """Nearest tests have the name of the module or its folder. Without such a file, they are all tests of the
    mirroring folder."""
    for path in OURS:
        tests = nearest_tests(str(path.relative_to(ROOT)))
        assert tests, path
        assert all((ROOT / test).exists() for test in tests), path
    assert nearest_tests("transforms/split/bins.py") == ["tests/split/test_bins.py"]
    assert nearest_tests("transforms/split/permuted.py") == ["tests/split/test_split.py"]
    assert "tests/tools/dumps/test_readers.py" in nearest_tests("pipeline/tools/dumps/readers/prime_rl.py")


def test_no_two_test_files_have_the_same_name():
    """pytest imports test files by their names alone."""
    names = [path.name for path in TESTS.rglob("*.py")]
    assert not {name for name in names if names.count(name) > 1}
