"""Repository checks that a linter does not have."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import headrace.pipeline
import headrace.transforms
from headrace.faces import exported
from headrace.transforms import BatchError, BatchTransform

ROOT = Path(__file__).parents[2]
FOLDERS = ("transforms", "pipeline", "adapters")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# Adapters are left out: an adapter and a reader share a trainer's name, and hooks share names.
OURS = [path for path in SOURCES if not path.is_relative_to(ROOT / "adapters")]


class Trees(dict):
    """The syntax tree of each file, parsed on first use."""

    def __missing__(self, path: Path) -> ast.Module:
        self[path] = ast.parse(path.read_text())
        return self[path]


TREES = Trees()
NAMES = {path: "headrace." + ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES}
NAMES = {path: name.removesuffix(".__init__") for path, name in NAMES.items()}
MODULES = {name: path for path, name in NAMES.items()}
# The modules that users, tests, benchmarks and examples import from, by their `__all__`.
FACES = {path for path in OURS if path.name == "__init__.py" and ast.get_docstring(TREES[path])}
PUBLIC_MODULES = {
    *(f"transforms.table.{name}" for name in ("annotations", "options", "schema", "tensordicts", "tokens")),
    "adapters.environment",
    *("adapters.nemo_rl", "adapters.openrlhf", "adapters.slime"),
}
# Modules of the chain from which the other layers of headrace import the names in `__all__`.
PUBLIC_IN_HEADRACE = {
    "faces",
    "installed",
    "spelling",
    "transforms.table.torchrl_base",
    *(f"pipeline.{name}" for name in ("account_keys", "conversations", "error_overrides", "halves")),
    *(f"pipeline.{name}" for name in ("ledger", "load", "order", "pipeline", "run", "stage", "wording")),
    *(f"pipeline.composing.{name}" for name in ("compose", "nodes", "recipe_names")),
}
# Inner modules with unit tests, which tests import too.
INNER = {
    "adapters.measured",
    "adapters.over_generation",
    "adapters.slime",
    "adapters.swift",
    "adapters.trl",
    "adapters.trl_async",
    "pipeline.account_keys",
    "pipeline.collect.informing",
    "pipeline.collect.on_ray",
    "pipeline.collect.reading",
    "pipeline.collect.stamping",
    "pipeline.collect.stored_rows",
    "pipeline.collect.workers",
    "pipeline.main",
    "pipeline.order",
    "pipeline.public_names",
    "pipeline.queues.in_place",
    "pipeline.queues.queues",
    "pipeline.report_notes",
    "pipeline.tools.audit.audit_checks",
    "pipeline.tools.audit.audit_task",
    "pipeline.tools.audit.logged",
    "pipeline.tools.certify.certificate",
    "pipeline.tools.certify.certify_task",
    "pipeline.tools.certify.exact_gradient",
    "pipeline.tools.command.arguments",
    "pipeline.tools.command.doctor",
    "pipeline.tools.command.job",
    "pipeline.tools.command.perform",
    "pipeline.tools.command.process",
    "pipeline.tools.command.sweep",
    "pipeline.tools.decide.decision",
    "pipeline.tools.dumps.dump_steps",
    "pipeline.tools.dumps.readers.batch",
    "pipeline.tools.dumps.readers.file_kinds",
    "pipeline.tools.dumps.readers.record",
    "pipeline.tools.dumps.readers.tokenizing",
    "pipeline.tools.plan.chances",
    "pipeline.tools.plan.group_sizes",
    "pipeline.tools.replay.compare_task",
    "pipeline.tools.replay.missing_groups",
    "pipeline.tools.report.advice",
    "pipeline.tools.report.comparison",
    "pipeline.tools.report.display",
    "pipeline.tools.report.folder",
    "pipeline.tools.report.funnel",
    "pipeline.tools.report.groups",
    "pipeline.tools.report.history",
    "pipeline.tools.report.html",
    "pipeline.tools.report.loggers",
    "pipeline.tools.report.notebook",
    "pipeline.tools.report.numbers",
    "pipeline.tools.report.over_steps",
    "pipeline.tools.report.page_contents",
    "pipeline.tools.report.page_schema",
    "pipeline.tools.report.step",
    "pipeline.tools.report.survivors",
    "pipeline.tools.report.tables",
    "pipeline.tools.report.texts",
    "pipeline.tools.view.server",
    "pipeline.tools.view.stored_run",
    "pipeline.tools.xray.means",
    "pipeline.tools.xray.measure",
    "pipeline.tools.xray.of_ms_swift",
    "pipeline.tools.xray.of_openrlhf",
    "pipeline.tools.xray.of_trl",
    "pipeline.tools.xray.of_verl",
    "pipeline.tools.xray.page",
    "pipeline.tools.xray.setting",
    "pipeline.tools.xray.token_table",
    "pipeline.tools.xray.xray_task",
    "pipeline.train.optimiser_steps",
    "transforms.carry.carry",
    "transforms.carry.resume",
    "transforms.ranks.barrier",
    "transforms.split.bins",
    "transforms.split.gather",
    "transforms.stages.filter.group_criteria",
    "transforms.stages.sequences.dense",
    "transforms.stages.shaping",
    "transforms.streams.assembler",
    "transforms.streams.steps",
    "transforms.streams.survival",
    "transforms.table.alone",
    "transforms.table.annotations",
    "transforms.table.calls",
    "transforms.table.checks",
    "transforms.table.empty",
    "transforms.table.ends",
    "transforms.table.fates",
    "transforms.table.labels",
    "transforms.table.masking",
    "transforms.table.options",
    "transforms.table.places",
    "transforms.table.process_group",
    "transforms.table.tensordicts",
    "transforms.table.votes",
    "transforms.trees.by_prefix",
    "transforms.trees.forest",
    "transforms.trees.prefixes",
}


ROOT_MODULES = ("__init__", "__main__", "faces", "installed", "spelling")
ROOTS = [ROOT / "src" / "headrace" / f"{name}.py" for name in ROOT_MODULES]
NAMES |= {path: f"headrace.{path.stem}".removesuffix(".__init__") for path in ROOTS}
MODULES |= {NAMES[path]: path for path in ROOTS}

# Inner modules with a function that imports an outer part when it is called: (inner, outer) and the reason.
DOORS = {
    ("transforms.table.alone", "transforms.ranks"): "only a process that is given a group needs the others",
    (
        "transforms.split.stage",
        "transforms.carry",
    ): "what a split leaves to the next batch is around it",
    (
        "transforms.split.stage",
        "transforms.trees.forest",
    ): "only rows with `tree` are sorted by their prefixes",
    ("transforms.stages.sequences.packing", "transforms.trees"): "only rows with `tree` share tokens",
    ("pipeline.run", "pipeline.tools.report"): "run.report() and pipeline.report() print the report of a run",
    ("pipeline.pipeline", "pipeline.tools.report.notebook"): "a notebook shows a pipeline as a table",
    ("pipeline.ledger", "pipeline.tools.report.notebook"): "a notebook shows a ledger as a table",
    (
        "pipeline.main",
        "pipeline.tools.command",
    ): "the command is a tool; its entry is here",
}


def packages_of(name: str) -> set[str]:
    """The packages that a module is in, which Python imports before it."""
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}


@cache
def imports(path: Path) -> dict[str, bool]:
    """The modules that a file imports, and whether only when a function is called.

    Our modules have their full names. Imports under TYPE_CHECKING, and by `import_module` with a text, count.
    """
    found = dict[str, bool]()
    package = NAMES[path] if path.name == "__init__.py" else NAMES[path].rpartition(".")[0]

    def note(names: Iterable[str], on_call: bool) -> None:
        found.update({name: on_call and found.get(name, True) for name in names})

    def visit(node: ast.AST, on_call: bool) -> None:
        on_call |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.Import):
            note({alias.name for alias in node.names}, on_call)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            inner = {f"{module}.{alias.name}" for alias in node.names} & MODULES.keys()
            note(inner if len(inner) == len(node.names) else {module, *inner}, on_call)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            note({each.value for each in node.args[:1] if isinstance(each, ast.Constant)}, on_call)
        for child in ast.iter_child_nodes(node):
            visit(child, on_call)

    visit(TREES[path], False)
    return found


def graph() -> dict[str, dict[str, bool]]:
    """For each module, the modules of headrace that it imports, and their packages but its own."""
    edges: dict[str, dict[str, bool]] = {}
    for name, path in MODULES.items():
        inside, edges[name] = {name, *packages_of(name)}, {}
        for module, on_call in imports(path).items():
            for each in ({module} | (packages_of(module) - inside)) & MODULES.keys() - {name}:
                edges[name][each] = on_call and edges[name].get(each, True)
    return edges


def room(name: str) -> str | None:
    """The stage that a module belongs to: the first name below `transforms.stages`, or None."""
    parts = name.split(".")
    return parts[3] if parts[:3] == ["headrace", "transforms", "stages"] and len(parts) > 3 else None


def test_dependencies_point_one_way():
    for path in SOURCES:
        names = imports(path)
        tops = {name.split(".")[0] for name in names}
        found = tops & {*FOLDERS, "conf"}
        assert not found, f"{path}: import headrace.…: the root folders make second copies"
        if path in OURS:
            assert not [name for name in names if name.startswith("headrace.adapters")], path
        if path.is_relative_to(ROOT / "transforms"):
            above = [name for name in names if name.startswith(("headrace.pipeline", "headrace.conf"))]
            others = tops & {"hydra", "omegaconf", "rich", "pyarrow"}
            allowed = {"pyarrow"} if path.name == "journal.py" else set()
            assert not above + sorted(others - allowed), path


def test_no_stage_imports_another():
    for path in SOURCES:
        if (mine := room(NAMES[path])) and path.parent.name != "transforms":
            assert not [name for name in imports(path) if room(name) not in (None, mine)], path


def test_arithmetic_imports_no_torchrl():
    """A module without a transform works on tensors or a batch, and does not import the contract."""
    for path in SOURCES:
        if not path.is_relative_to(ROOT / "transforms") or path.name in (
            "stage.py",
            "torchrl_base.py",
            "__init__.py",
        ):
            continue
        classes = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.ClassDef)]
        module = importlib.import_module(NAMES[path])
        if not any(issubclass(getattr(module, node.name, object), BatchTransform) for node in classes):
            found = [
                name
                for name in imports(path)
                if name.split(".")[0] == "torchrl" or name == "headrace.transforms.table.stage"
            ]
            assert not found, path


def inner_imports(path: Path) -> set[str]:
    """The modules of headrace that a file imports although they, or the imported names, are not public."""
    found = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace."):
            found |= {
                inner.removeprefix("headrace.")
                for inner, name in taken(node)
                if name not in public_names(inner.removeprefix("headrace."))
            }
    return found


def taken(node: ast.ImportFrom) -> Iterator[tuple[str, str | None]]:
    """The (module, name) pairs of an absolute import. The name of an imported module is None."""
    for alias in node.names:
        is_module = f"{node.module}.{alias.name}" in MODULES
        listed = alias.name in public_names((node.module or "").removeprefix("headrace."))
        inner = f"{node.module}.{alias.name}", None
        yield inner if is_module and not listed else (node.module or "", alias.name)


@cache
def public_names(module: str) -> frozenset[str]:
    """The `__all__` of a package, or of a module that is public itself."""
    path = MODULES.get(f"headrace.{module}")
    if path is None or not (path.name == "__init__.py" or module in PUBLIC_MODULES | PUBLIC_IN_HEADRACE):
        return frozenset()
    found = importlib.import_module(f"headrace.{module}")
    return frozenset(getattr(found, "__all__", () if path.name == "__init__.py" else vars(found)))


@pytest.mark.slow
def test_tests_benchmarks_and_examples_import_public_names():
    """Exceptions are the listed inner modules, each of which is used."""
    files = [path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert set().union(*map(inner_imports, files)) == INNER


def test_imports_have_no_cycle():
    """Imports in `__init__.py`, in functions and for type checkers count. Listed doors do not count."""
    ends = {(f"headrace.{inner}", f"headrace.{outer}") for inner, outer in DOORS}
    found = graph()
    behind = {
        name: {each for each in names if not any(each in {b, *packages_of(b)} for a, b in ends if a == name)}
        for name, names in found.items()
    }
    in_order = list(TopologicalSorter(behind).static_order())  # raises CycleError with the cycle
    assert set(in_order) == set(MODULES)


def test_a_door_is_an_import_in_a_function():
    found = graph()
    assert all(found[f"headrace.{inner}"][f"headrace.{outer}"] for inner, outer in DOORS)


def test_no_two_public_names_are_equal():
    """A class and its function in one folder may have equal names.

    Other exceptions are `parse_row`, which every reader of dumps has, and `plan`, which is also a task.
    """
    homes = defaultdict(list)
    for path in OURS:
        for node in TREES[path].body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                homes[node.name.replace("_", "").lower()].append((node.name, path.parent))
    for name, places in homes.items():
        spelt, folders = {spelling for spelling, _ in places}, {folder for _, folder in places}
        assert (
            len(places) == 1
            or (len(spelt) == len(places) and len(folders) == 1)
            or name
            in (
                "parserow",
                "plan",
            )
        ), places


def test_no_two_files_have_the_same_name():
    stems = [path.stem for path in OURS if path.name not in ("__init__.py", "__main__.py")]
    alike = {stem for stem in stems if stems.count(stem) > 1}
    assert alike <= {"stage"}, "a file is named after its one concept"


def test_no_module_has_the_name_of_an_exported_function():
    """With equal names, `package.name` depends on the order of imports. Two modules are exceptions."""
    packages = {NAMES[path] for path in FACES}
    found = {
        name
        for name in MODULES
        if (home := name.rpartition(".")[0]) in packages and name.rpartition(".")[2] in exported(home)
    }
    assert found == {
        "headrace.transforms.table.schema",
        "headrace.pipeline.reverse.digits",
    }


def test_the_pipeline_does_not_check_stage_types():
    """Stages declare their traits; only BatchTransform and Pipeline may be checked."""
    things = {name: getattr(headrace.transforms, name) for name in headrace.transforms.__all__}
    stages = {
        name
        for name, thing in things.items()
        if isinstance(thing, type) and issubclass(thing, BatchTransform) and thing is not BatchTransform
    }
    for path in SOURCES:
        if not path.is_relative_to(ROOT / "pipeline"):
            continue
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("isinstance", "issubclass"):
                asked = {getattr(part, "id", None) for part in ast.walk(node.args[1])}
                assert not asked & stages, f"{path}:{node.lineno}"


def test_an_argument_may_be_given_by_its_name():
    """Functions that take keywords of any name may have positional-only arguments."""
    for path in SOURCES:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert not node.args.posonlyargs or node.args.kwarg, f"{path}:{node.lineno}"


def test_data_is_never_checked_with_assert():
    assert not [
        f"{path}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Assert)
    ]


ERRORS = {kind.__name__ for kind in (BatchError, *BatchError.__subclasses__())}


def calls() -> Iterator[tuple[str, ast.Call]]:
    for path in SOURCES:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Call):
                yield f"{path}:{node.lineno}", node


def test_the_text_of_an_error_without_facts_has_no_field():
    field = re.compile(r"\{(\w+/)?\w+\}")
    for where, call in calls():
        if getattr(call.func, "id", "") in ERRORS and not call.keywords:
            words = [each.value for each in ast.walk(call) if isinstance(each, ast.Constant)]
            assert not [each for each in words if field.search(str(each))], where


def test_the_text_of_an_error_with_facts_contains_no_data():
    """A name in capitals is allowed, because it is a constant."""
    for where, call in calls():
        is_verb = isinstance(call.func, ast.Attribute) and call.func.attr.startswith("require")
        if is_verb or (getattr(call.func, "id", "") in ERRORS and call.keywords):
            texts = [each for each in call.args if isinstance(each, ast.JoinedStr | ast.BinOp)]
            data = [part for text in texts for part in ast.walk(text) if isinstance(part, ast.FormattedValue)]
            shown = [ast.unparse(part.value) for part in data if part.conversion == ord("r")]
            assert not [name for name in shown if not name.isupper()], where


def test_every_folder_of_modules_is_a_package():
    """setuptools finds packages by their `__init__.py`, so a folder without this file is in no wheel."""
    folders = {path.parent for path in SOURCES}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_root_folders_are_installed_once():
    """`src/headrace` links to them, and `import headrace` finds these links."""
    entries = {
        path.name: path for path in (ROOT / "src" / "headrace").iterdir() if path.name != "__pycache__"
    }
    links = {name: path.resolve() for name, path in entries.items() if path.is_symlink()}
    assert links == {name: ROOT / name for name in (*FOLDERS, "conf")}
    assert entries.keys() - links.keys() == {*(path.name for path in ROOTS), "py.typed"}
