"""Prepare a release, or print its section of CHANGELOG.md.

python tools/release.py prepare 0.1.0 # sets the version and the date in all files, and changes the pages to
install from PyPI python tools/release.py notes v0.1.0 # refuses a tag that differs from the version in the
files
"""

from __future__ import annotations

import re
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
RELEASE = re.compile(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d{2}-\d{2})\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
# The installation text of pages, until headrace is on a package index.
UNPUBLISHED = re.compile(r"\s<!-- until it is on PyPI -->.*?<!-- \. -->", re.DOTALL)
WHEEL = re.compile(r"[\w/]*headrace-[\d.]+-py3-none-any\.whl")
VERSIONS = {"pyproject.toml": r'(?<=^version = ").*(?="$)', "CITATION.cff": r"(?<=^version: ).*$"}


def versions() -> dict[str, str]:
    """The version in each file that has it."""
    found = {
        name: re.search(form, (ROOT / name).read_text(), re.MULTILINE) for name, form in VERSIONS.items()
    }
    return {name: match[0] if match else "none" for name, match in found.items()}


def prepared(version: str, today: str, texts: dict[str, str]) -> dict[str, str]:
    """The files of a release: with its version and date, the unreleased changes below its heading, and pages
    that install it from the index.

    Args:
        version: such as 0.1.0.
        today: the date of the release, as YYYY-MM-DD.
        texts: the present texts of pyproject.toml, CITATION.cff, CHANGELOG.md and pages.

    Raises:
        ValueError: the version is invalid or in the changelog already, or there are no unreleased changes.
    """
    changelog = texts["CHANGELOG.md"]
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"a version is three numbers, such as 0.1.0; got {version!r}")
    if f"## {version} - " in changelog:
        raise ValueError(f"CHANGELOG.md has {version} already")
    if re.search(r"^## Unreleased\n\s*(?=## |\Z)", changelog, re.MULTILINE):
        raise ValueError("CHANGELOG.md has nothing under '## Unreleased'")
    out = {name: re.sub(form, version, texts[name], flags=re.MULTILINE) for name, form in VERSIONS.items()}
    undated = re.sub(r"^date-released: .*\n", "", out["CITATION.cff"], flags=re.MULTILINE)
    out["CITATION.cff"] = undated.rstrip("\n") + f"\ndate-released: {today}\n"
    for name in texts.keys() - out - {"CHANGELOG.md"}:
        out[name] = WHEEL.sub("headrace", UNPUBLISHED.sub("", texts[name]))
    heading = f"## Unreleased\n\n## {version} - {today}\n"
    return out | {"CHANGELOG.md": changelog.replace("## Unreleased\n", heading, 1)}


def notes_of(tag: str, said: dict[str, str], changelog: str) -> str:
    """The changes of a version.

    Raises:
        ValueError: a file has another version, or the changelog has no section with this version and a date.
    """
    version = tag.removeprefix("v")
    if others := {name: other for name, other in said.items() if f"v{other}" != tag}:
        raise ValueError(f"the tag is {tag!r}, and {', '.join(f'{o} in {n}' for n, o in others.items())}")
    notes = {number: text.strip() for number, _, text in RELEASE.findall(changelog)}
    if not notes.get(version):
        raise ValueError(
            f"CHANGELOG.md needs '## {version} - YYYY-MM-DD'; there are {', '.join(notes) or 'none'}"
        )
    return notes[version]


if __name__ == "__main__":
    pages = (str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))
    texts = {name: (ROOT / name).read_text() for name in (*VERSIONS, "CHANGELOG.md", "README.md", *pages)}
    try:
        match sys.argv[1:]:
            case ["prepare", version]:
                for name, text in prepared(version, date.today().isoformat(), texts).items():
                    (ROOT / name).write_text(text)
            case ["notes", tag]:
                print(notes_of(tag, versions(), texts["CHANGELOG.md"]))
            case _:
                sys.exit(__doc__)
    except ValueError as err:
        sys.exit(str(err))
