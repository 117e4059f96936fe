"""Plant faults in the code, one at a time, and run the tests that reach them: `make mutants`.

python tools/mutants.py                            # plants faults in the lines that differ from main
python tools/mutants.py adapters pipeline/run.py   # in these files and folders
python tools/mutants.py --sample 200 --seed 1      # at random places of all code, or of files and folders
python tools/mutants.py --sample 200 --each 25     # and up to 25 in each folder

The operators of cosmic-ray make the faults. At each place one operator is chosen at random. cosmic-ray's own
runner has one command for all modules, and changes the clone. mutmut leaves out functions with a decorator,
and tests do not see its copies, because they import through `src/`.

First all tests run once, with coverage, which notes the tests that run each line. The time of each test is
kept. A fault gets the tests that run its line: the tests of its module first, then the tests with the fewest
lines; and then the other tests of its module. They run in a fork of a process that has the slow imports,
which halves the time of a fault.

Faults that change nothing are listed with the reason in benchmarks/equivalent_mutants.json. The status is 1
if any other fault survives. `--sample` without paths writes benchmarks/results/mutation.json and the page.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "support"))

import pytest  # noqa: E402
from nearest import nearest_tests  # noqa: E402

FOLDERS = ("transforms", "pipeline", "adapters")
EQUIVALENT = ROOT / "benchmarks" / "equivalent_mutants.json"
OTHERS = "not (long or browser or gpu)"  # tests that a fault may get
# Limits in seconds without a fault: of one quick test, and of all quick or all slow tests of a fault.
QUICK, TOGETHER = 1.0, 100.0
NEAREST = 100  # so many tests kill most faults, and are in few files
BY_NAME = "tests/house/test_house.py::test_an_argument_may_be_given_by_its_name"  # reads all signatures
NO_SOURCE = (".*", "build", "dist", "site", "outputs", "multirun", "__pycache__", "*.egg-info")
TAKEN = "taken.json"
WITH_IMPORTS = multiprocessing.get_context("forkserver")
SLOW_IMPORTS = "torchrl.collectors torchrl.objectives.llm transformers.modeling_utils pandas pyarrow.compute"
WITH_IMPORTS.set_forkserver_preload([*SLOW_IMPORTS.split(), "hydra", "hypothesis", "rich.console", "pytest"])
MOST_FAILED = 20  # number of tests that may fail without a fault: on a busy machine, some time out
START, SLOWER = 60, 4  # time limit with a fault: START seconds + SLOWER × the time of its tests without it
FATES = ("killed", "timed out", "survived", "equivalent")
FATE_OF = {None: "timed out", pytest.ExitCode.OK: "survived", pytest.ExitCode.NO_TESTS_COLLECTED: "survived"}


class Mutant(NamedTuple):
    """A fault, with the lines that it changes; `code` is the code of the whole file."""

    file: str
    line: int
    was: str
    now: str
    code: str

    @property
    def is_equivalent(self) -> bool:
        """Whether this mutant is listed as a fault that changes nothing."""
        return self[:1] + self[2:4] in equivalent()


@cache
def equivalent() -> set[tuple[str, ...]]:
    """The file and the lines of each mutant that changes nothing."""
    return {(each["file"], each["was"], each["now"]) for each in json.loads(EQUIVALENT.read_text())}


def unseen_by_tests(node: ast.AST) -> ast.AST | None:
    """Code whose faults no test sees: `strict=` of equal lengths, and code that only type checkers read."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return node
    return node.value if isinstance(node, ast.keyword) and node.arg == "strict" else None


@cache
def places_of(file: str) -> dict[Any, list[tuple[Any, int]]]:
    """The places of a file that operators change. Each has its operators, and its number for each operator.

    Annotations are left out, because nothing reads them.
    """
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    source = (ROOT / file).read_text()
    nodes, places = [*ast_nodes(get_ast(source))], dict[Any, list[tuple[Any, int]]]()
    unseen = [
        ((note.lineno, note.col_offset), (note.end_lineno, note.end_col_offset))
        for node in ast.walk(ast.parse(source))
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None), unseen_by_tests(node))
        if isinstance(note, (ast.expr, ast.If))
    ]
    for operator in map(plugins.get_operator, sorted(plugins.operator_names())):
        if not operator.arguments():  # operators with arguments need the names of variables
            found = (place for node in nodes for place in operator().mutation_positions(node))
            for number, (start, end) in enumerate(found):
                if not any(first <= start and end <= last for first, last in unseen):
                    places.setdefault((start, end), []).append((operator(), number))
    return places


def mutant_at(file: str, place: Any, rng: random.Random) -> Mutant | None:
    """A random mutant of a place, or None if no mutant of the place changes the program."""
    from cosmic_ray.mutating import mutate_code

    source, ways = (ROOT / file).read_text(), places_of(file)[place]
    for way in rng.sample(ways, len(ways)):
        code = mutate_code(source, *way)
        with suppress(SyntaxError):
            if ast.dump(ast.parse(code)) != ast.dump(ast.parse(source)):
                break
    else:
        return None
    before, after = source.splitlines(), code.splitlines()
    first, behind = (
        next(at for at, (old, new) in enumerate(zip(before[::way], after[::way], strict=False)) if old != new)
        for way in (1, -1)
    )
    was, now = ("\n".join(map(str.strip, text[first : len(text) - behind])) for text in (before, after))
    return Mutant(file, first + 1, was, now, code)


def changed_lines(base: str) -> dict[str, set[int]]:
    """The lines of each file that changed since this branch left `base`."""
    words = ["git", "diff", "-U0", "--merge-base", base, "--", *(f"{folder}/*.py" for folder in FOLDERS)]
    text = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    new = ["git", "ls-files", "--others", "--exclude-standard", *words[-len(FOLDERS) :]]
    files = subprocess.run(new, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    found = {file: {*range(1, 1 + (ROOT / file).read_text().count("\n"))} for file in files}
    file = ""
    for line in text.splitlines():
        file = line[6:] if line.startswith("+++ b/") else file
        if hunk := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))?", line):
            start, count = int(hunk[1]), int(hunk[2] or 1)
            found.setdefault(file, set()).update(range(start, start + count))
    return {file: lines for file, lines in found.items() if lines}


def chosen_mutants(paths: list[str], base: str, sample: int | None, seed: int) -> list[Mutant]:
    """One mutant for each place in `paths`, in the lines that differ from `base`, or in a random sample."""
    rng = random.Random(seed)
    within = [ROOT / each for each in paths or FOLDERS]
    files = [path for each in within for path in (sorted(each.rglob("*.py")) if each.is_dir() else [each])]
    names = [str(path.relative_to(ROOT)) for path in files]
    if sample is None:
        lines = dict.fromkeys(names) if paths else changed_lines(base)
        at = [(f, p) for f in lines for p in places_of(f) if lines[f] is None or p[0][0] in lines[f]]
    else:
        drawn = rng.choices(names, [path.stat().st_size for path in files], k=4 * sample)
        at = list(dict.fromkeys((f, rng.choice([*places_of(f)])) for f in drawn if places_of(f)))
    return list(islice(filter(None, (mutant_at(*each, rng) for each in at)), sample))


def lines_of(mutant: Mutant) -> tuple[range, bool]:
    """The lines of a mutant's statement, or of a compound statement's head, and whether they run at import.

    Coverage may name any of these lines.
    """
    lines, at_import = range(mutant.line, mutant.line + 1 + mutant.was.count("\n")), True
    for node in ast.walk(ast.parse((ROOT / mutant.file).read_text())):
        if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or 0
            if mutant.line <= end:
                lines = range(min(lines.start, node.lineno), max(lines.stop, end + 1))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                at_import = False
    return lines, at_import


class Runner:
    """Runs tests in copies of the clone, so that the clone is not changed."""

    def __init__(self, count: int, folder: Path):
        self.copies = Queue[Path]()
        for copy in (folder / str(number) for number in range(count)):
            shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NO_SOURCE))
            self.copies.put(copy)
        self.tests, self.seconds = tests_by_line(folder / "0")
        self.lines = Counter(test for tests in self.tests.values() for test in tests)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that run a mutant's line, nearest first; if none is known, the tests of the file.

        Then the other tests of the module: coverage does not see other processes, such as actors, and no line
        that runs at import.
        """
        near, (lines, at_import) = tuple(nearest_tests(mutant.file)), lines_of(mutant)
        found = {test for line in lines for test in self.tests.get((mutant.file, line), ())}
        if at_import:
            found.add(BY_NAME)
        if at_import or not found:
            found |= {
                test for (file, _), tests in self.tests.items() if file == mutant.file for test in tests
            }
        every = found | {test for test in self.seconds if test.startswith(near)}
        return sorted(
            every,
            key=lambda test: (test not in found, not test.startswith(near), self.lines[test], test),
        )

    def batches_of(self, mutant: Mutant) -> tuple[list[str], list[str]]:
        """Two batches of a mutant's tests: the nearest quick ones, then all others."""
        kinds = list[str](), list[str]()
        left = [TOGETHER, TOGETHER]
        for test in self.tests_of(mutant):
            slow = (seconds := self.seconds[test]) > QUICK
            left[slow] -= seconds
            if left[slow] >= 0:
                kinds[slow].append(test)
        quick, slower = kinds
        return quick[:NEAREST], quick[NEAREST:] + slower

    def fate_of(self, mutant: Mutant) -> str:
        """Run the tests of a mutant, and return its fate."""
        if mutant.is_equivalent:
            return "equivalent"
        batches, copy = self.batches_of(mutant), self.copies.get()
        source, fate = (copy / mutant.file).read_text(), "survived"
        try:
            (copy / mutant.file).write_text(mutant.code)
            for tests in batches:
                if tests and fate == "survived":
                    seconds = START + SLOWER * sum(self.seconds[test] for test in tests)
                    status = status_of(copy, ["-xq", f"--basetemp={copy}/.tmp"], tests, seconds)
                    fate = FATE_OF.get(status, "killed")
        finally:
            (copy / mutant.file).write_text(source)
            self.copies.put(copy)
        lines = f"\n- {mutant.was}\n+ {mutant.now}" if fate == "survived" else ""
        print(f"{fate:9} {mutant.file}:{mutant.line}{lines}", flush=True)
        return fate


def tests_by_line(copy: Path) -> tuple[dict[tuple[str, int], set[str]], Counter[str]]:
    """The tests that run each line, by file and line, and the seconds that each test takes.

    Tests that fail without a fault are left out, because their failure says nothing about a fault.
    """
    from coverage import CoverageData

    words = ["-q", "-n", "auto", "-m", OTHERS, "--cov-context=test", "--cov-report="]
    status_of(copy, [*words, *(f"--cov={folder}" for folder in FOLDERS)], [], 7200)
    taken = json.loads((copy / TAKEN).read_text())
    failed = {*taken["failed"]}
    found, data = defaultdict[tuple[str, int], set[str]](set), CoverageData(str(copy / ".coverage"))
    data.read()
    for name in data.measured_files():
        file = str(Path(name).relative_to(copy.resolve()))
        for line, contexts in data.contexts_by_lineno(name).items():
            found[file, line] |= {context.rpartition("|")[0] for context in contexts if context} - failed
    if failed:
        print(f"these fail without a fault, and are left out: {', '.join(sorted(failed))}", flush=True)
    if len(failed) > MOST_FAILED:
        raise SystemExit(f"without a fault, {len(failed)} tests fail")
    return found, Counter({test: each for test, each in taken["seconds"].items() if test not in failed})


class Taken:
    """A plugin of pytest that writes which tests failed, and how long each took."""

    def __init__(self) -> None:
        self.failed, self.seconds = set[str](), Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome and the time of a test, a setup or a teardown."""
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the results into the folder where pytest was started."""
        Path(TAKEN).write_text(json.dumps({"failed": sorted(self.failed), "seconds": self.seconds}))


class Chosen:
    """A plugin of pytest that runs only listed tests, in their order."""

    def __init__(self, tests: list[str]):
        self.places = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the listed tests."""
        kept = [item for item in items if item.nodeid in self.places]
        items[:] = sorted(kept, key=lambda item: self.places[item.nodeid])


def run_tests(copy: Path, words: list[str], tests: list[str]) -> None:
    """Run pytest in a copy of the clone, on the listed tests or, if none is, on all. Exit with its status."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    os.chdir(copy)
    paths = [str(copy / folder) for folder in ("src", "tests/support", "tools")]
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:], sys.dont_write_bytecode = [*paths, *installed], True
    for name in [name for name in os.environ if name.startswith("HEADRACE")]:
        del os.environ[name]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    raise SystemExit(pytest.main([*words, *files], plugins=[Chosen(tests) if tests else Taken()]))


def status_of(copy: Path, words: list[str], tests: list[str], seconds: float) -> int | None:
    """The status of pytest, or None after the time limit, when pytest and its processes are killed.

    The process that it is forked from has imported nothing of the clone.
    """
    process = WITH_IMPORTS.Process(target=run_tests, args=(copy, words, tests))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        return None
    return process.exitcode


def fates_of(mutants: list[Mutant], processes: int = 2) -> dict[Mutant, str]:
    """The fate of each mutant."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        runner = Runner(processes, Path(folder))
        return dict(zip(mutants, pool.map(runner.fate_of, mutants), strict=True))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Plant faults, one at a time, and run the nearest tests.")
    parser.add_argument("paths", nargs="*", help="files and folders")
    parser.add_argument("--base", default="main", help="the branch to compare with")
    parser.add_argument("--sample", type=int, help="number of random places")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=0, help="least number of places in each folder")
    options = parser.parse_args()
    if options.sample is not None and not options.paths:
        numbers = ["--sample", str(options.sample), "--seed", str(options.seed), "--each", str(options.each)]
        for words in (
            ["benchmarks/mutation.py", "--json", "benchmarks/results/mutation.json", *numbers],
            ["benchmarks", "--render"],
        ):
            subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
        return
    fates = fates_of(chosen_mutants(options.paths, options.base, options.sample, options.seed))
    print(", ".join(f"{[*fates.values()].count(fate)} {fate}" for fate in FATES))
    raise SystemExit("survived" in fates.values())


if __name__ == "__main__":
    main()
