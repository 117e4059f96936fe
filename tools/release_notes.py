"""Print what CHANGELOG.md says of a release, or refuse a tag that is not the version that there is.

python tools/release_notes.py v0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RELEASE = re.compile(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d{2}-\d{2})\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def versions() -> dict[str, str]:
    """The version, by the file that says it."""
    said = {"pyproject.toml": r'^version = "(.*)"$', "CITATION.cff": r"^version: (.*)$"}
    found = {name: re.search(form, (ROOT / name).read_text(), re.MULTILINE) for name, form in said.items()}
    return {name: match[1] if match else "none" for name, match in found.items()}


def notes_of(tag: str, said: dict[str, str], changelog: str) -> str:
    """The changes of a version.

    Raises:
        ValueError: a file says another version, or the changelog has none like that with a date.
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
    try:
        print(notes_of(sys.argv[1], versions(), (ROOT / "CHANGELOG.md").read_text()))
    except ValueError as err:
        sys.exit(str(err))
