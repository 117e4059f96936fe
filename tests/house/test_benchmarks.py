"""Benchmarks run and measure every cell, and their page has the stored results. No test depends on timing."""

from __future__ import annotations

import json
import re
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
from command import Started

ROOT = Path(__file__).parents[2]
BENCHMARKS, PAGE = ROOT / "benchmarks", ROOT / "docs" / "benchmarks.md"
RESULTS = {path.stem: json.loads(path.read_text()) for path in (BENCHMARKS / "results").glob("*.json")}
del RESULTS["field_bugs"]  # measures no time; tested in tests/house/test_field_bugs.py
del RESULTS["lost_rollouts"]  # has a simulated clock; tested in tests/house/test_lost_rollouts.py
RESULTS.pop("mutation", None)  # runs for hours; tested in tests/house/test_mutants.py


def run(*words: object) -> None:
    program = partial(runpy.run_path, str(BENCHMARKS), run_name="__main__")
    done = Started(program, ROOT, *map(str, words)).ends(600)
    assert done.returncode == 0, done.stderr


def cells(result: dict) -> dict[tuple[str, str, str], dict]:
    """The cells of a result, by table, row and column."""
    return {
        (table["title"], row["name"], column): cell
        for table in result["tables"]
        for row in table["rows"]
        for column, cell in zip(table["head"][1:], row["cells"], strict=True)
    }


def shape(result: dict) -> list[tuple[int, int]]:
    return [(len(table["rows"]), len(table["head"])) for table in result["tables"]]


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> tuple[dict[str, dict], str]:
    folder = tmp_path_factory.mktemp("benchmarks")
    run("--quick", "--results", folder, "--page", folder / "page.md")
    results = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return results, (folder / "page.md").read_text()


@pytest.mark.torchrl
@pytest.mark.slow
def test_every_benchmark_measures_every_cell(quick):
    results, page = quick
    texts = {path.stem: path.read_text() for path in BENCHMARKS.glob("*.py")}
    # __main__.py does not run the benchmarks that need a Ray cluster.
    scripts = {name for name, text in texts.items() if "main(tables" in text and "import ray" not in text}
    scripts -= {"mutation"}
    assert results.keys() == scripts, "__main__.py does not run every benchmark"
    assert "these numbers mean nothing" in page
    for name, result in results.items():
        for place, cell in cells(result).items():
            waited = name != "gpu" or torch.cuda.is_available()
            given_up = place[1] == "MCAdvantage" and place[2] == result["tables"][0]["head"][-1]
            if name != "tokens" or place[2] != "formula, ms":  # some measures have no formula
                assert (cell["value"] is not None) == (waited and not given_up), (name, place)
            assert place[0] in page
            assert place[1] in page


@pytest.mark.torchrl
@pytest.mark.slow
def test_stored_results_belong_to_existing_benchmarks(quick):
    results, _ = quick
    assert results.keys() == RESULTS.keys()
    for name, result in results.items():
        kept = RESULTS[name]
        assert not kept["quick"], name
        assert shape(result) == shape(kept), f"{name} has changed: run `make bench`"
        assert [table["note"] for table in result["tables"] if name != "gpu"] == [
            table["note"] for table in kept["tables"] if name != "gpu"
        ], name
        assert {key for key, value in kept["machine"].items() if value == ""} <= {"gpu"}, name


def test_the_page_has_the_numbers_of_the_results(tmp_path):
    run("--render", "--page", tmp_path / "page.md")
    assert PAGE.read_text() == (tmp_path / "page.md").read_text(), "make bench ARGS=--render"


def test_every_cost_at_the_top_is_computed_from_the_results():
    costs = re.findall(r'^    "(.+)": _\w+,$', (BENCHMARKS / "page.py").read_text(), re.MULTILINE)
    top = PAGE.read_text().partition("## What it costs")[2].partition("## How")[0]
    assert re.findall(r"^\| (.+?) \| .*\d.* \|$", top, re.MULTILINE) == costs != []


def test_a_missed_target_is_reported(tmp_path):
    kept = RESULTS["advantage"]
    table = {"title": "T", "note": "N", "head": ["rows", "x"]}
    # for each row: its value, its target, and whether a larger value is better
    numbers = {"a": (1.9, 1.9, False), "b": (1.91, 1.9, False), "c": (50, 50, True), "d": (49, 50, True)}
    table["rows"] = [
        {"name": name, "cells": [{"value": value, "target": target, "at_least": at_least, "form": ".2f"}]}
        for name, (value, target, at_least) in numbers.items()
    ]
    (tmp_path / "advantage.json").write_text(json.dumps(kept | {"tables": [table]}))
    run("--render", "--results", tmp_path, "--page", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "2 of 4 targets are met.\n\n| table | targets met |\n| --- | ---: |\n| [T](#t) | 2 of 4 |" in page
    assert re.findall(r"^\| (\w) \| (\*\*)?[\d.]+", page, re.MULTILINE) == [
        ("a", ""),
        ("b", "**"),
        ("c", ""),
        ("d", "**"),
    ]
