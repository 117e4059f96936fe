"""The site builds without a warning, has every public name once, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
from pages_as_written import ROOT

import headrace.pipeline
import headrace.transforms

pytest.importorskip("mkdocstrings", reason="the extra `docs` is not installed")
sys.path.insert(0, str(ROOT / "tools" / "docs"))

from docstrings import as_markdown
from hooks import expanded
from mkdocs.commands.build import build
from mkdocs.config import load_config
from topics import INNER, LISTINGS, SHOWN, entries_by_topic, topics

pytestmark = [pytest.mark.slow, pytest.mark.torchrl]
ENTRIES = [path for paths in entries_by_topic().values() for path in paths]


def test_every_public_name_belongs_to_one_page():
    names = [path.rpartition(".")[2] for path in ENTRIES]
    assert len(set(names)) == len(names)
    assert {*headrace.transforms.__all__, *headrace.pipeline.__all__} <= set(names)
    assert all(entries_by_topic()[page] for page in topics())
    assert sorted(SHOWN) == sorted(topics())


def test_names_that_are_not_shown_are_listed_by_a_package():
    assert set().union(*(import_module(listing).__all__ for listing in LISTINGS)) >= INNER


def test_roles_tables_and_literal_blocks_become_markdown():
    text = as_markdown(
        "As :func:`pack`, not :func:`of_nobody`; with :meth:`put`::\n\n    a = b\n\n"
        "=== =====\nkey what\n=== =====\na   :func:`pack`\n=== =====\n",
        "GroupAssembler",
    )
    assert "[`pack`][headrace.transforms.pack], not `of_nobody`" in text
    assert "[`put`][headrace.transforms.GroupAssembler.put]:\n\n```text\na = b\n```" in text
    assert "```text\n=== =====\nkey what\n=== =====\na   pack\n=== =====\n```" in text


def test_text_under_returns_is_not_read_as_a_type():
    text = as_markdown("Add.\n\nReturns:\n    (N,) sums: of rows.\n\nRaises:\n    E: x.")
    assert text.startswith("Add.\n\n**Returns:**\n\n(N,) sums: of rows.\n")
    assert text.endswith("\n\nRaises:\n    E: x.")


def test_a_navigation_pattern_takes_each_page_once_and_a_readme_first():
    nav = [{"One": ["a.md", "to/*.md"]}, {"Rest": ["*.md"]}]
    unnamed = ["b.md", "to/b.md", "to/README.md", "to/deep/c.md"]
    assert expanded(nav, unnamed) == [{"One": ["a.md", "to/README.md", "to/b.md"]}, {"Rest": ["b.md"]}]
    assert unnamed == ["to/deep/c.md"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the pages without the search index and coloured source code, which take half of the time."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for warnings from the imports of mkdocs
        patch.chdir(ROOT)
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder))
        config.plugins["material/search"].config.enabled = False
        config.plugins["mkdocstrings"].config.handlers["python"]["options"]["show_source"] = False
        build(config)  # raises if there is a warning
    return folder


def test_every_public_name_has_one_entry(site):
    ids = [
        found
        for path in (site / "api").glob("*.html")
        for found in re.findall(r'id="([^"]+)"', path.read_text())
    ]
    assert [path for path in ENTRIES if ids.count(path) != 1] == []


def test_no_docstring_markup_remains(site):
    for path in (site / "api").glob("*.html"):
        text = re.sub(r"<div class=\"[^\"]*highlight.*?</div>", "", path.read_text(), flags=re.DOTALL)
        for markup in (r":(?:func|class|meth|mod):", r"={4,}", r"::\s*</p>", r"\| ---", r"build/docs"):
            assert not re.findall(markup, text), f"{path.name}: {markup}"


def test_the_site_loads_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"', path.read_text())
        fetched += re.findall(
            r'<link[^>]* rel="(?:stylesheet|icon|preload)"[^>]* href="([^"]+)"', path.read_text()
        )
        fetched += re.findall(
            r'<link[^>]* href="([^"]+)"[^>]* rel="(?:stylesheet|icon|preload)"', path.read_text()
        )
        assert fetched
        assert [address for address in fetched if "//" in address] == []


def test_llms_txt_lists_every_page(site):
    index = (site / "llms.txt").read_text()
    lines = re.findall(r"^- \[([^]]+)\]\(([^)]+)\): (.+)$", index, re.MULTILINE)
    assert len(lines) == len(re.findall(r"^- ", index, re.MULTILINE)) > 40
    for _, address, _ in lines:
        assert (site / address).exists(), address
    shown = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    others = {path for path in shown if not path.startswith("source/")} - {address for _, address, _ in lines}
    assert others == {"404.html"}
    full = (site / "llms-full.txt").read_text()
    assert not re.findall(r"^::: ", full, re.MULTILINE)
    assert "headrace.transforms.group_relative_advantage(reward" in full
