"""Plant faults in the code, one at a time, and run the tests that are nearest: `make mutants`.

python tools/mutants.py                            # in the lines that differ from main
python tools/mutants.py adapters pipeline/run.py   # in these files and folders
python tools/mutants.py --sample 200 --seed 1      # at random places of the product, or of files and folders

The faults are made by the operators of cosmic-ray; at each place one of them, by chance. Its own runner has
one command for all modules, and changes the clone. mutmut leaves out functions with a decorator, and tests do
not see its copies, because they import through `src/`.

Faults that change nothing are listed with the reason in benchmarks/equivalent_mutants.json. The status is 1
if another one survives. A sample of the product writes benchmarks/results/mutants.json and the page.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
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

from nearest import nearest_tests  # noqa: E402

FOLDERS = ("transforms", "pipeline", "adapters")
EQUIVALENT = ROOT / "benchmarks" / "equivalent_mutants.json"
PYTEST = ["-m", "pytest", "-x", "-q", "-m", "not (long or browser or ray or gpu)"]
NO_SOURCE = (".*", "build", "dist", "site", "outputs", "multirun", "__pycache__", "*.egg-info")
LEAST, TIMES = 60, 4  # tests of a mutant may take so many seconds, or so many times those without it
FATES = ("killed", "timed out", "survived", "equivalent")


class Mutant(NamedTuple):
    """A fault, with the lines that it changes; `code` is that of the whole file."""

    file: str
    line: int
    was: str
    now: str
    code: str

    @property
    def is_equivalent(self) -> bool:
        """Whether it is listed as one that changes nothing."""
        return self[:1] + self[2:4] in equivalent()


@cache
def equivalent() -> set[tuple[str, ...]]:
    """File and lines of the mutants that change nothing."""
    return {(each["file"], each["was"], each["now"]) for each in json.loads(EQUIVALENT.read_text())}


def guard_of(node: ast.AST) -> ast.AST | None:
    """The value of `strict=`, which matters only where lengths differ, and they do not."""
    return node.value if isinstance(node, ast.keyword) and node.arg == "strict" else None


@cache
def places_of(file: str) -> dict[Any, list[tuple[Any, int]]]:
    """The places of a file that operators change, each with the operators and the number of the place.

    Not those of annotations, which nothing reads.
    """
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    source = (ROOT / file).read_text()
    nodes, places = [*ast_nodes(get_ast(source))], dict[Any, list[tuple[Any, int]]]()
    unseen = [
        ((note.lineno, note.col_offset), (note.end_lineno, note.end_col_offset))
        for node in ast.walk(ast.parse(source))
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None), guard_of(node))
        if isinstance(note, ast.expr)
    ]
    for operator in map(plugins.get_operator, sorted(plugins.operator_names())):
        if not operator.arguments():  # those need the names of variables
            found = (place for node in nodes for place in operator().mutation_positions(node))
            for number, (start, end) in enumerate(found):
                if not any(first <= start and end <= last for first, last in unseen):
                    places.setdefault((start, end), []).append((operator(), number))
    return places


def mutant_at(file: str, place: Any, rng: random.Random) -> Mutant | None:
    """One of the mutants of a place, by chance; None if none is another program."""
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
    """The lines of the product that are not as where this branch left `base`, by file."""
    words = ["git", "diff", "-U0", "--merge-base", base, "--", *(f"{folder}/*.py" for folder in FOLDERS)]
    text = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found, file = dict[str, set[int]](), ""
    for line in text.splitlines():
        file = line[6:] if line.startswith("+++ b/") else file
        if hunk := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))?", line):
            start, count = int(hunk[1]), int(hunk[2] or 1)
            found.setdefault(file, set()).update(range(start, start + count))
    return {file: lines for file, lines in found.items() if lines}


def chosen_mutants(paths: list[str], base: str, sample: int | None, seed: int) -> list[Mutant]:
    """A mutant of each place in `paths`, or in lines that differ from `base`, or of a sample of places."""
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


class Runner:
    """Runs tests in copies of the clone, so that it stays as it is."""

    def __init__(self, count: int, folder: Path):
        self.copies, self.seconds = Queue[Path](), dict[tuple[str, ...], float]()
        for copy in (folder / str(number) for number in range(count)):
            shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NO_SOURCE))
            self.copies.put(copy)

    def fate_of(self, mutant: Mutant) -> str:
        """What becomes of a mutant."""
        if mutant.is_equivalent:
            return "equivalent"
        tests, copy = tuple(nearest_tests(mutant.file)), self.copies.get()
        try:
            if tests not in self.seconds:
                start = time.monotonic()
                if (status := status_of(copy, tests, 1800)) not in (0, 5):
                    raise SystemExit(f"without a fault, pytest ends with status {status}: {' '.join(tests)}")
                self.seconds[tests] = time.monotonic() - start
            source = (copy / mutant.file).read_text()
            (copy / mutant.file).write_text(mutant.code)
            status = status_of(copy, tests, max(LEAST, TIMES * self.seconds[tests]))
            (copy / mutant.file).write_text(source)
        finally:
            self.copies.put(copy)
        fate = {None: "timed out", 0: "survived", 5: "survived"}.get(status, "killed")
        lines = f"\n- {mutant.was}\n+ {mutant.now}" if fate == "survived" else ""
        print(f"{fate:9} {mutant.file}:{mutant.line}{lines}", flush=True)
        return fate


def status_of(copy: Path, tests: tuple[str, ...], seconds: float) -> int | None:
    """The status of pytest; None if it takes longer. Then all that it has started is killed."""
    paths = os.pathsep.join([str(copy / "src"), str(copy / "tests" / "support")])
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE")}
    variables |= {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [sys.executable, *PYTEST, *tests],
        cwd=copy,
        env=variables,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    ) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None


def fates_of(mutants: list[Mutant], processes: int = 2) -> dict[Mutant, str]:
    """What becomes of each mutant."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        runner = Runner(processes, Path(folder))
        return dict(zip(mutants, pool.map(runner.fate_of, mutants), strict=True))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Plant faults, one at a time, and run the nearest tests.")
    parser.add_argument("paths", nargs="*", help="files and folders")
    parser.add_argument("--base", default="main", help="the branch that a change leaves")
    parser.add_argument("--sample", type=int, help="number of random places")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.sample is not None and not options.paths:
        numbers = ["--sample", str(options.sample), "--seed", str(options.seed)]
        for words in (
            ["benchmarks/mutants.py", "--json", "benchmarks/results/mutants.json", *numbers],
            ["benchmarks", "--render"],
        ):
            subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
        return
    fates = fates_of(chosen_mutants(options.paths, options.base, options.sample, options.seed))
    print(", ".join(f"{[*fates.values()].count(fate)} {fate}" for fate in FATES))
    raise SystemExit("survived" in fates.values())


if __name__ == "__main__":
    main()
