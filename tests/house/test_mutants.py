"""`make mutants` plants valid faults in the chosen lines, and runs tests in a copy of the repository."""

from __future__ import annotations

import argparse
import ast
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import mutants  # noqa: E402

pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed")
pytestmark = pytest.mark.slow
FILE = "transforms/split/shuffle.py"


def test_each_mutant_is_a_program_with_other_lines_at_its_place():
    source, seen = (ROOT / FILE).read_text().splitlines(), set()
    for mutant in mutants.chosen_mutants([FILE], "", None, 0):
        changed = mutant.code.splitlines()
        assert ast.dump(ast.parse(mutant.code)) != ast.dump(ast.parse("\n".join(source)))
        first = next(at for at, (old, new) in enumerate(zip(source, changed, strict=False), 1) if old != new)
        assert mutant.line == first
        assert [source[first - 1].strip()] == mutant.was.splitlines()[:1] != mutant.now.splitlines()[:1]
        seen.add(mutant.line)
    assert len(seen) > 10


def test_only_changed_lines_have_mutants(monkeypatch):
    monkeypatch.setattr(mutants, "mutant_at", lambda file, place, rng: place[0][0])
    some = {*sorted(place[0][0] for place in mutants.places_of(FILE))[:9]}
    monkeypatch.setattr(mutants, "changed_lines", lambda base: {FILE: some})
    assert {*mutants.chosen_mutants([], "main", None, 0)} == some


def test_changed_lines_include_those_of_new_files(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    for folder in mutants.FOLDERS:
        (tmp_path / folder).mkdir()
    (tmp_path / "adapters" / "old.py").write_text("a = 1\nb = 2\nc = 3\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "begin"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    (tmp_path / "adapters" / "old.py").write_text("a = 1\nb = 3\nc = 3\nd = 4\n")
    (tmp_path / "pipeline" / "new.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "other.py").write_text("a = 1\n")
    assert mutants.changed_lines("main") == {"adapters/old.py": {2, 4}, "pipeline/new.py": {1, 2}}


def test_a_fault_has_the_lines_of_its_statement_without_the_body(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    head, body = "A = (\n    1,\n)\n\n\ndef f(\n    x=2,\n):\n", "    y = [\n        x,\n    ]\n"
    code = f"{head}{body}    if (\n        y\n    ):\n        return 3\n"
    (tmp_path / "some.py").write_text(code)
    found = [mutants.lines_of(mutants.Mutant("some.py", line, "", "", "")) for line in (2, 7, 10, 13, 15)]
    assert found == [
        (range(1, 4), True),
        (range(6, 9), True),
        (range(9, 12), False),
        (range(12, 15), False),
        (range(15, 16), False),
    ]


def test_a_line_has_the_passing_tests_that_run_it(tmp_path):
    for folder in (*mutants.FOLDERS, "tests/support", "tools"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("tools/mutants.py", "tests/support/nearest.py"):
        (tmp_path / file).write_text((ROOT / file).read_text())
    (tmp_path / "adapters" / "some.py").write_text("def f(x):\n    if x:\n        return 1\n    return 2\n")
    (tmp_path / "tests" / "test_some.py").write_text(
        "from adapters.some import f\n\n\n"
        "def test_of_true():\n    assert f(True) == 1\n\n\n"
        "def test_of_false():\n    assert f(False) == 2\n\n\n"
        "def test_that_fails():\n    assert f(True) == 3\n"
    )
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\npythonpath = .\nmarkers =\n    long\n    browser\n    gpu\n"
    )
    found, seconds = mutants.tests_by_line(tmp_path)
    by_line = {
        line: {test.partition("::")[2] for test in found["adapters/some.py", line]} for line in (2, 3, 4)
    }
    both, true, false = by_line.values()
    assert (both, true, false) == ({"test_of_true", "test_of_false"}, {"test_of_true"}, {"test_of_false"})
    assert len(seconds) == 2
    assert min(seconds.values()) > 0


def test_a_sample_has_its_size_and_follows_its_seed():
    first, again, other = (mutants.chosen_mutants(["transforms/split"], "", 5, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({*first}) == 5


def test_a_fault_is_killed_if_a_test_fails_and_survives_otherwise(monkeypatch):
    source = (ROOT / FILE).read_text()
    tests = {"tests/house/test_mutants.py::test_a_file_that_a_fault_can_break"}
    monkeypatch.setattr(mutants, "tests_by_line", lambda copy: ({(FILE, 1): tests}, Counter()))
    killed, alive, known = (
        mutants.Mutant(FILE, 1, "was", word, f"{source}\n{word}\n") for word in ("1 / 0", "1 / 1", "2 / 1")
    )
    monkeypatch.setattr(mutants, "equivalent", lambda: {(FILE, "was", "2 / 1")})
    fates = mutants.fates_of([killed, alive, known], 1)
    assert [*fates.values()] == ["killed", "survived", "equivalent"]
    assert (ROOT / FILE).read_text() == source


def test_a_fault_gets_the_nearest_quick_tests_first_within_the_time_limit(monkeypatch):
    seconds = Counter({f"quick{at}": 0.5 for at in range(800)} | {f"slow{at}": 100.0 for at in range(9)})
    runner = mutants.Runner.__new__(mutants.Runner)
    runner.seconds, runner.lines = seconds, Counter({name: int(name[-1]) for name in seconds})
    runner.tests = {(FILE, 1): {*seconds}}
    monkeypatch.setattr(mutants, "lines_of", lambda mutant: (range(1, 2), False))
    first, rest = runner.batches_of(mutants.Mutant(FILE, 1, "", "", ""))
    ordered = sorted(seconds, key=lambda name: (runner.lines[name], name))
    quick, slow = ([name for name in ordered if name.startswith(kind)] for kind in ("quick", "slow"))
    assert first == quick[:100]
    assert rest == quick[100:200] + slow[:1]


def test_the_tests_of_a_module_that_run_the_line_in_another_process_come_last(monkeypatch):
    near = mutants.nearest_tests(FILE)[0]
    runner = mutants.Runner.__new__(mutants.Runner)
    runner.seconds = runner.lines = Counter({f"{near}::a": 1, f"{near}::b": 2, "c": 3, "d": 4})
    runner.tests = {(FILE, 1): {f"{near}::b", "c"}, (FILE, 3): {"d"}}
    monkeypatch.setattr(mutants, "lines_of", lambda mutant: (range(mutant.line, mutant.line + 1), False))
    found, unknown = (runner.tests_of(mutants.Mutant(FILE, line, "", "", "")) for line in (1, 2))
    assert found == [f"{near}::b", "c", f"{near}::a"]
    assert unknown == [f"{near}::b", "c", "d", f"{near}::a"]


def test_a_file_that_a_fault_can_break():
    exec(
        compile((ROOT / FILE).read_text(), FILE, "exec"),
        {"__name__": "broken", "__package__": "headrace.transforms.split"},
    )


def test_each_equivalent_mutant_has_a_reason_and_its_lines_are_in_the_file():
    for each in json.loads(mutants.EQUIVALENT.read_text()):
        assert len(each["why"]) > 20, each
        lines = [line.strip() for line in (ROOT / each["file"]).read_text().splitlines()]
        assert each["was"].splitlines()[0] in lines, each


def test_an_annotation_has_no_mutant(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "some.py").write_text(
        "def f(x: int | None = 1 + 2) -> int | None:\n    y: int | None = 3 * x\n"
    )
    places = mutants.places_of("some.py")
    assert len(places) == 5  # 1, +, 2, 3, *
    for place in places:
        now = mutants.mutant_at("some.py", place, random.Random(0)).now
        assert now.count("int | None") == (2 if now.startswith("def") else 1), now


def test_a_folder_has_its_faults_of_the_sample_and_further_ones_up_to_a_number(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import mutation

    def faults(files, base, number, seed):
        found = [mutants.Mutant(file, line, "", "", "") for file in files or [FILE] for line in (3, 1, 2)]
        return found[:number]

    monkeypatch.setattr(mutation, "chosen_mutants", faults)
    for each, of_split in ((0, 2), (1, 2), (3, 3)):
        found = mutation.faults_by_folder(argparse.Namespace(sample=2, each=each, seed=1))
        assert [fault.line for fault in found["all"]] == [3, 1]
        assert len({*found["transforms/split"]}) == len(found["transforms/split"]) == of_split
        assert {*found["all"]} <= {*found["transforms/split"]}
        others = {
            folder: len(own) for folder, own in found.items() if folder not in ("all", "transforms/split")
        }
        assert {*others.values()} == ({each} if each else set())
