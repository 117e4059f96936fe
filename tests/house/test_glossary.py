"""docs/glossary.md matches the code: one word per concept, one concept per word."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

import headrace.adapters
import headrace.pipeline
import headrace.transforms
from headrace.transforms.table import schema

pytestmark = [pytest.mark.slow, pytest.mark.torchrl]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "glossary.md").read_text()
WORDS = ("The field's words", "Words of this library")
COLUMNS, OPTIONS = "Columns that stages write", "Options that name a column"
CONTRACTS = (headrace.transforms.BatchTransform, headrace.transforms.Criterion, headrace.transforms.TokenTerm)
AVOIDED = "Words that we do not use"
SOURCES = sorted(
    path for folder in ("transforms", "pipeline", "adapters") for path in (ROOT / folder).rglob("*.py")
)
PROSE = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    if path.name != "glossary.md"
)
PUBLIC = {
    name: getattr(package, name)
    for package in (headrace.transforms, headrace.pipeline, headrace.adapters)
    for name in package.__all__
}


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the table that follows a heading, as lists of cells."""
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert section, heading
    lines = [line for line in section[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def code() -> str:
    return "\n".join(path.read_text() for path in [*SOURCES, *(ROOT / "conf").rglob("*.yaml")])


def plain(text: str) -> str:
    return re.sub(r"[-_\s]+", " ", text).lower()


@cache
def used() -> str:
    """All text of the code and the pages, except the glossary."""
    return plain("\n".join([code(), *(path.read_text() for path in PROSE)]))


def parameters_of(thing: object) -> Mapping[str, inspect.Parameter]:
    if not callable(thing) or (isinstance(thing, type) and issubclass(thing, Exception)):
        return {}
    return inspect.signature(thing).parameters


def keys_in_code() -> dict[str, dict[str, object]]:
    """By option and class, the default of each option that names a column."""
    found: dict[str, dict[str, object]] = defaultdict(dict)
    for owner, thing in PUBLIC.items():
        for option, parameter in parameters_of(thing).items():
            if parameter.annotation in ("NestedKey", "NestedKey | None"):
                found[option][owner] = parameter.default
    return found


@cache
def public_names() -> dict[str, str]:
    """The names that users see (modules, classes, options, columns, YAML), each with a place."""
    names: dict[str, str] = {}
    for path in SOURCES:
        where = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
            for item in body:
                targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", item)]
                for target in targets:
                    name = getattr(target, "name", getattr(target, "id", "_"))
                    if not name.startswith("_"):
                        names[name] = where
    for owner, thing in PUBLIC.items():
        names |= dict.fromkeys(parameters_of(thing), owner)
    for path in (ROOT / "conf").rglob("*.yaml"):
        names |= dict.fromkeys(re.findall(r"^ *(\w+):", path.read_text(), re.MULTILINE), path.name)
    return names | {key[1]: "transforms/table/schema.py" for key in columns_in_code()}


def columns_in_code() -> list[tuple[str, str]]:
    return [value for value in vars(schema).values() if isinstance(value, tuple) and value[0] == "headrace"]


@cache
def in_words(name: str) -> str:
    """A name as ``_word_word_``."""
    return f"_{re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', name).lower()}_"


# -- what can be wrong with the page: one function per fault ----------------------------------------------


def wrong_options(page: str) -> list[str]:
    """Options that the table lacks, lists twice, lists without need, or lists with another default.

    `...` stands for the default of the recipe.
    """
    rows, taken, wrong = table(page, OPTIONS), keys_in_code(), []
    named = [quoted(option)[0] for option, _, _ in rows]
    wrong += [f"{option} is in the table {named.count(option)} times" for option in {*taken, *named}
              if named.count(option) != 1 or option not in taken]  # fmt: skip
    meanings = [meaning for _, _, meaning in rows]
    wrong += [f"two options mean {meaning!r}" for meaning in set(meanings) if meanings.count(meaning) > 1]
    for option, defaults, _ in rows:
        option, default = quoted(option)[0], ast.literal_eval(quoted(defaults)[0])
        others = {
            owner: ast.literal_eval(other) for other, owner in re.findall(r"`(\S+)` in `(\w+)`", defaults)
        }
        wrong += [
            f"{owner}({option}={found!r}), and the table says {others.get(owner, default)!r}"
            for owner, found in taken.get(option, {}).items()
            if found not in (others.get(owner, default), inspect.Parameter.empty, ...)
        ]
        wrong += [f"{owner} takes no {option}" for owner in others if owner not in taken.get(option, {})]
    return wrong


def avoided_names(page: str) -> list[str]:
    """Names, files and words of the docs that the page says we do not use."""
    wrong, texts = [], {path: path.read_text().lower() for path in PROSE}
    for word, where, _ in table(page, AVOIDED):
        word = quoted(word)[0]
        if where == "file":
            wrong += [str(path.relative_to(ROOT)) for path in SOURCES if path.stem == word]
            continue
        assert where in ("name", "word"), where
        wrong += [
            f"{name} in {place}"
            for name, place in public_names().items()
            if (name == word if where == "name" else f"_{word}_" in in_words(name))
        ]
        if where == "word":
            wrong += [
                f"{word!r} in {path.name}" for path, text in texts.items() if re.search(rf"\b{word}\b", text)
            ]
    return wrong


def missing_classes(page: str) -> list[str]:
    """Public classes that the two tables of words do not name, except parts that have a YAML node."""
    carried = {name for heading in WORDS for row in table(page, heading) for name in quoted(row[2])}
    classes = {
        name: thing for name, thing in PUBLIC.items() if isinstance(thing, type) and name not in carried
    }
    return [name for name, thing in classes.items() if not issubclass(thing, CONTRACTS)]


def unused_terms(page: str) -> list[str]:
    """Words that only the glossary uses, and words that the glossary has twice."""
    terms = [row[0].strip("*") for heading in WORDS for row in table(page, heading)]
    unused = [term for term in terms if not re.search(rf"\b{plain(term)}s?\b", used())]
    return unused + [term for term in set(terms) if terms.count(term) > 1]


def unknown_carriers(page: str) -> list[str]:
    """Options, columns and classes in the table that the code does not have."""
    names = [name for heading in WORDS for row in table(page, heading) for name in quoted(row[2])]
    words = set(re.findall(r"\w+", code()))
    return [n for n in names if n not in words and not re.search(rf"\b{re.escape(n)}\b", code())]


def wrong_columns(page: str) -> list[str]:
    """Columns that are only in the table, or only in the code."""
    named = {quoted(row[0])[0] for row in table(page, COLUMNS)}
    return sorted(named ^ {key[1] for key in columns_in_code()})


CHECKS = (wrong_options, avoided_names, missing_classes, unused_terms, unknown_carriers, wrong_columns)


@pytest.mark.parametrize("check", CHECKS)
def test_glossary_matches_the_code(check):
    assert check(PAGE) == []
