"""The files of a release have one version."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
TOOL = runpy.run_path(str(ROOT / "tools" / "release.py"))
KINDS = ["Added", "Changed", "Deprecated", "Fixed", "Removed", "Security"]


def said(name: str) -> str:
    found = re.search(rf'^{name} = "(.*)"$', PROJECT, re.MULTILINE)
    assert found, name
    return found[1]


def test_the_citation_matches_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == said("name")
    assert (citation["abstract"], citation["license"]) == (said("description"), said("license"))
    assert citation["message"]
    assert [author["name"] for author in citation["authors"]] == [
        re.search(r'authors = .*"(.*)"', PROJECT)[1]
    ]
    assert citation["keywords"] == re.findall(
        r'"(.*?)"', re.search(r"^keywords = \[(.*)\]$", PROJECT, re.M)[1]
    )


def test_every_file_has_the_same_version():
    assert set(TOOL["versions"]().values()) == {said("version")}


def test_the_changelog_can_be_released():
    """Unreleased changes come first, then releases by date. Each kind of change has one heading."""
    headings = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert headings[0] == "Unreleased"
    releases = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) - \d{4}-\d{2}-\d{2}", heading) for heading in headings[1:]]
    assert all(releases)
    numbers = [tuple(map(int, release.groups())) for release in releases]
    assert numbers == sorted(set(numbers), reverse=True)
    for section in CHANGELOG.split("\n## ")[1:]:
        kinds = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert set(kinds) <= set(KINDS)
        assert len(set(kinds)) == len(kinds)


def test_release_notes_are_those_of_the_tag_and_an_unknown_tag_is_refused():
    notes_of = TOOL["notes_of"]
    changelog = (
        "# Changelog\n\n## Unreleased\n\n## 1.2.0 - 2026-02-01\n\n- new\n\n## 1.1.0 - 2026-01-01\n\n- old\n"
    )
    assert notes_of("v1.2.0", {"a": "1.2.0"}, changelog) == "- new"
    assert notes_of("v1.1.0", {"a": "1.1.0"}, changelog) == "- old"
    for tag in ("v1.2.1", "1.2.0"):
        with pytest.raises(ValueError, match=f"the tag is '{tag}', and 1.2.0 in a$"):
            notes_of(tag, {"a": "1.2.0"}, changelog)
    with pytest.raises(ValueError, match=r"needs .## 1\.3\.0 - YYYY-MM-DD.; there are 1\.2\.0, 1\.1\.0"):
        notes_of("v1.3.0", {"a": "1.3.0"}, changelog)


def test_preparing_a_release_sets_version_and_date_everywhere():
    files = {name: (ROOT / name).read_text() for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")}
    done = TOOL["prepared"]("1.2.0", "2026-02-01", files)
    assert yaml.safe_load(done["CITATION.cff"])["version"] == "1.2.0"
    assert str(yaml.safe_load(done["CITATION.cff"])["date-released"]) == "2026-02-01"
    assert re.findall('^version = "(.*)"$', done["pyproject.toml"], re.MULTILINE) == ["1.2.0"]
    unreleased = files["CHANGELOG.md"].split("## Unreleased\n")[1].split("\n## ")[0]
    assert TOOL["notes_of"]("v1.2.0", {"a": "1.2.0"}, done["CHANGELOG.md"]) == unreleased.strip()
    with pytest.raises(ValueError, match=r"nothing under '## Unreleased'"):
        TOOL["prepared"]("1.3.0", "2026-02-02", files | done)
    with pytest.raises(ValueError, match=r"has 1\.2\.0 already"):
        TOOL["prepared"]("1.2.0", "2026-02-02", files | done)
    with pytest.raises(ValueError, match="three numbers"):
        TOOL["prepared"]("v1.2", "2026-02-02", files)


def test_a_released_version_is_installed_from_the_index():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = {str(page): page.read_text() for page in pages}
    texts |= {name: (ROOT / name).read_text() for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")}
    done = TOOL["prepared"]("1.2.0", "2026-02-01", texts)
    assert [name for name, text in done.items() if re.search(r"\.whl|on PyPI yet|pip wheel", text)] == []
    for page in pages:
        assert done[str(page)].count("pip install headrace\n") == texts[str(page)].count(".whl\n")
    assert "| `pip install 'headrace[torchrl]'` |" in done[str(ROOT / "README.md")]


def test_a_release_is_the_wheel_that_was_tested():
    ci, dist, release = (
        yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
        for name in ("ci", "dist", "release")
    )
    assert ci["jobs"]["dist"]["uses"] == "./.github/workflows/dist.yml"
    jobs = release["jobs"]
    assert jobs["tests"]["uses"] == "./.github/workflows/ci.yml"
    assert jobs["publish"]["needs"] == "tests"
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name, job in (ci["jobs"] | dist["jobs"]).items():  # each job runs a target of the Makefile
        made = [
            step["run"].split()[1:] for step in job.get("steps", ()) if step.get("run", "").startswith("make")
        ]
        assert "steps" not in job or {word for words in made for word in words if "=" not in word} & {
            *targets
        }, name
    steps = [step["uses"].split("@")[0] for step in dist["jobs"]["build"]["steps"] if "uses" in step]
    assert "actions/upload-artifact" in steps
    publish = [step.get("uses", "").split("@")[0] for step in jobs["publish"]["steps"]]
    assert publish.index("actions/download-artifact") < publish.index("pypa/gh-action-pypi-publish")
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "secrets." not in text
