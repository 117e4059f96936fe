"""Every table must list a new part. One failure names all files that lack the part, and what to do."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import get_args, get_type_hints

import pytest
from composed import composed
from dumps import RECORDS
from recipes import ADVANTAGES, CHAINS, NAMES

try:
    from test_contract import NEEDED, STAGES
    from test_criteria import CRITERIA
except ImportError as err:  # for a part that is not in the generated list of imports
    told = f"{err}. Run `make generate`, which lists new parts"
    raise pytest.fail.Exception(told, pytrace=False) from None

import headrace.pipeline
import headrace.transforms
from headrace.pipeline import ConfigError
from headrace.pipeline.tools.certify import Refused
from headrace.pipeline.tools.dumps.readers import READERS
from headrace.transforms import (
    BatchTransform,
    Criterion,
    GroupRelativeAdvantage,
    RewardShaping,
    TokenTerm,
    group_relative_advantage,
)

ROOT = Path(__file__).parents[2]


def classes_of(kind: type) -> set[type]:
    """The public classes of a kind, except base classes for users' own classes."""
    return {
        thing
        for module in (headrace.transforms, headrace.pipeline)
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, kind)
        if thing not in (kind, RewardShaping)
    }


def lacking_stages() -> list[str]:
    stages = {type(make()) for make in STAGES.values()}
    untried = sorted(part.__name__ for part in classes_of(BatchTransform) - stages)
    criteria = {type(make()).__name__ for make in CRITERIA.values()}
    unjudged = sorted({part.__name__ for part in classes_of(Criterion)} - criteria)
    return (
        [f"{name}: a line of STAGES and of NEEDED in tests/stages/test_contract.py" for name in untried]
        + [
            f"{name}: a line of CRITERIA in tests/stages/test_criteria.py, whose batch() needs the columns "
            "that it reads"
            for name in unjudged
        ]
        + [
            f"{name}: a line of NEEDED in tests/stages/test_contract.py, the columns that it requires"
            for name in STAGES.keys() - NEEDED
        ]
    )


def lacking_pages_and_tests() -> list[str]:
    """Stages, criteria and token terms that a page does not name, or whose numbers have no test."""
    parts = sorted(
        part.__name__ for kind in (BatchTransform, Criterion, TokenTerm) for part in classes_of(kind)
    )
    contracts = ("test_contract.py", "test_criteria.py")
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path.name not in contracts]
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    unsaid = [f"{name}: a word of docs/glossary.md" for name in parts if f"`{name}`" not in glossary]
    tested = set[str]().union(*map(used_in, tests))
    stages = (ROOT / "docs" / "stages.md").read_text()
    unlisted = sorted(part.__name__ for part in classes_of(BatchTransform) - {headrace.pipeline.Pipeline})
    unsaid += [
        f'{name}: a line in "Further stages" of docs/stages.md' for name in unlisted if name not in stages
    ]
    untested = [part for part in parts if part not in tested]
    return unsaid + [f"{name}: a test of its numbers, in {file_of_test(name)}" for name in untested]


def file_of_test(name: str) -> str:
    """The file for the test of a part's numbers: a criterion is tested with the filter."""
    part = getattr(headrace.transforms, name, None) or getattr(headrace.pipeline, name)
    file = "filter" if issubclass(part, Criterion) else part.__module__.rpartition(".")[2]
    return f"tests/stages/test_{file}.py, which imports the class"


def used_in(text: str) -> set[str]:
    """The names of headrace that a test uses in its code, without names in texts and comments."""
    nodes = list(ast.walk(ast.parse(text)))
    modules = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {
        alias.name for node in modules if str(node.module).startswith("headrace") for alias in node.names
    }
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return (imported & names) | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def lacking_equations() -> list[str]:
    """Baselines and scales without a line in the table of their function, as ``mean  b_i = ...``."""
    table, hints = group_relative_advantage.__doc__ or "", get_type_hints(group_relative_advantage)
    unnamed = [
        f"{name}: its name under `{option}:` in the docstring of GroupRelativeAdvantage"
        for option in ("baseline", "scale")
        for name in get_args(hints[option])
        if f"``{name}``" not in (GroupRelativeAdvantage.__doc__ or "").split(f" {option}: ")[1].split(": ")[0]
    ]
    return unnamed + [
        f"{name}: its equation, {symbol} = ..., in the docstring of group_relative_advantage"
        for option, symbol in (("baseline", "b"), ("scale", "s"))
        for name in get_args(hints[option])
        if not re.search(rf"^ *(?:{option} +)?{name} +{symbol}\w* = ", table, re.MULTILINE)
    ]


def uncertified() -> list[str]:
    certified = json.loads((ROOT / "docs" / "certificates.json").read_text())["certificates"]
    missing = set(NAMES) - {each["recipe"] for each in certified}
    return [f"{name}: its certificates. Run `make certificates ARGS={name}`" for name in sorted(missing)]


def lacking_recipes() -> list[str]:
    """Recipes that lack a line in tests/support/recipes.py. Recipes that differ only in numbers share one."""
    lacking: list[str] = []
    chains: dict[object, list[str]] = {}
    measures: dict[object, list[str]] = {}
    for name in NAMES:
        stages = dict(composed(f"pipeline={name}").stages.items())
        chain = [(stage, type(made), type(getattr(made, "criterion", 0))) for stage, made in stages.items()]
        chains.setdefault(tuple(chain), []).append(name)
        advantage = stages.get("advantage")
        measure = tuple(getattr(advantage, option, None) for option in ("baseline", "scale", "dtype"))
        measures.setdefault(measure, []).append(name)
    for alike in chains.values():
        if len(set(alike) & set(CHAINS)) != 1:
            lacking.append(f"{one_of(alike)}: a line of CHAINS in tests/support/recipes.py, for its stages")
    for alike in measures.values():
        if not set(alike) & set(ADVANTAGES):
            lacking.append(f"{one_of(alike)}: a line of ADVANTAGES in tests/support/recipes.py")
    return lacking


def one_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def lacking_readers() -> list[str]:
    """Readers that lack a sound dump or tests. Modules that take no Reading are helpers, not readers."""
    audits = (ROOT / "tests/tools/audit/test_audit.py").read_text()  # as text, because its import takes long
    sound = re.findall(r'^    "(\w+)": ', audits.split("\nSOUND = {")[1].split("\n}")[0], re.MULTILINE)
    helpers = {"file_kinds.py", "open.py", "__init__.py"}
    names = [
        path.name
        for path in (ROOT / "pipeline/tools/dumps/readers").glob("*.py")
        if path.name not in helpers and re.search(r"\b(Reading|Format)\b", path.read_text())
        if path.stem.removesuffix("_dump") not in READERS
    ]
    page = (ROOT / "docs" / "dumps.md").read_text()
    undescribed = [
        f"{name}: a row in the tables of docs/dumps.md"
        for name in sorted(READERS)
        if page.count(f"`{name}`") < 3
    ]
    tests = (ROOT / "tests/tools/dumps/test_readers.py").read_text()
    undamaged = [
        f"{name}: a record in RECORDS of tests/support/dumps.py, which the tests damage at random"
        for name, format in READERS.items()
        if format.files[0].endswith(".jsonl") and name not in {*RECORDS, "headrace"}
    ]
    untested = [
        f"{name}: a record in WHOLE of tests/tools/dumps/test_readers.py, or a test test_{name}_..."
        for name in READERS.keys() - {"headrace"}
        if f"def test_{name}" not in tests and f'    "{name}": (\n' not in tests
    ]
    return (
        undescribed
        + undamaged
        + untested
        + [f"pipeline/tools/dumps/readers/{name} has no FORMAT, so it is no reader" for name in names]
        + [
            f"{name}: a sound dump in SOUND of tests/tools/audit/test_audit.py"
            for name in sorted(READERS.keys() - set(sound))
        ]
    )


def outdated(*makers: ModuleType) -> list[str]:
    """The files that `make generate` would write, or the error that it raises."""
    try:
        files = [path for make in makers for path, text in make.files().items() if not holds(path, text)]
    except SystemExit as refusal:
        return str(refusal).splitlines()
    return [f"{path.relative_to(ROOT)}: run `make generate`" for path in files]


def holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


@pytest.mark.torchrl  # without TorchRL, some parts are not tried
def test_every_table_lists_a_new_part(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import make_listings
    import make_stages

    lacking = outdated(make_listings, make_stages) + lacking_stages() + lacking_readers()
    lacking += lacking_pages_and_tests() + lacking_equations() + uncertified()
    assert not lacking, "to be added:\n" + "\n".join(lacking)


def test_the_tools_name_what_a_new_part_lacks(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import make_recipes
    import make_stages

    class Clip(BatchTransform):
        """Clip rewards.

        Args:
            low: lowest reward.
        """

        def __init__(self, *, low: float, high: float, **names):
            super().__init__()

    monkeypatch.setattr(make_stages, "nodes", lambda contract: {"clip": Clip})
    told = "lacks high, names under Args: add a line '    high: what it is' for each, in the order low, high"
    assert told in make_stages.undocumented()[0]
    assert outdated(make_stages) == make_stages.undocumented()

    (tmp_path / "bare.yaml").write_text("defaults: [rloo]\n")
    monkeypatch.setattr(make_recipes, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"^bare.yaml: its first line must be a comment with the equation"):
        make_recipes.comment_of(tmp_path / "bare.yaml")

    def refuse(word: str) -> None:
        raise ConfigError("unknown stage 'clip'")

    monkeypatch.setattr(make_recipes, "load_pipeline", refuse)
    with pytest.raises(SystemExit, match=r"^bare.yaml: unknown stage 'clip'$"):
        make_recipes.table(tmp_path)


def test_generate_writes_a_stage_before_it_reads_a_recipe_of_the_stage(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import generate

    node, page = tmp_path / "clip_reward.yaml", tmp_path / "recipes.md"
    stages = SimpleNamespace(files=lambda: {node: "high: 1"})
    recipes = SimpleNamespace(files=lambda: {page: node.read_text()})  # an error if there is no such stage
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "MAKERS", ("stages", "recipes"))
    monkeypatch.setattr(generate, "import_module", {"stages": stages, "recipes": recipes}.get)
    with pytest.raises(SystemExit, match=r"^out of date: clip_reward.yaml\. Run `make generate`$"):
        generate.check()
    generate.generate()
    assert page.read_text() == "high: 1"
    assert capsys.readouterr().out == "wrote clip_reward.yaml\nwrote recipes.md\n"
    generate.check()
    generate.generate()
    assert capsys.readouterr().out == "up to date\n"


def test_computing_certificates_of_named_recipes_keeps_the_others(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import make_certificates

    before = json.loads(make_certificates.PAGE.read_text())["certificates"]
    refused = Refused("gdpo", "", 4, "")
    monkeypatch.setattr(make_certificates, "certify_recipe", lambda node, recipe, *task: refused)
    found = make_certificates.certificates(["gdpo"])
    assert found == [each for each in before if each["recipe"] != "gdpo"]
    with pytest.raises(SystemExit, match=r"^unknown recipes: grop\. The recipes are a_star_po, "):
        make_certificates.certificates(["grop"])


@pytest.mark.slow
def test_a_stage_that_cannot_be_imported_is_not_listed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import make_listings

    package = tmp_path / "headrace" / "transforms"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "x.py").write_text("from headrace.transforms.table import BatchTransfrom\n")
    listing = package / "__init__.py"
    listing.write_text("__all__ = []\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(make_listings, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"^transforms/x.py: .* Nothing was written$"):
        make_listings.write({listing: "from .x import X\n__all__ = ['X']\n"})
    assert listing.read_text() == "__all__ = []\n"


@pytest.mark.torchrl
@pytest.mark.slow
def test_every_table_lists_a_new_recipe(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setattr("headrace.pipeline.load_pipeline", composed)  # other tests compose most of them, too
    import make_recipes
    import make_symptoms

    lacking = outdated(make_recipes, make_symptoms) + lacking_recipes()
    assert not lacking, "to be added:\n" + "\n".join(lacking)
