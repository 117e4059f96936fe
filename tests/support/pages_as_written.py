"""The pages of the docs and the fenced blocks in them.

A block is executed unless the comment above it is ``<!-- not run: why -->``, or ``<!-- from: file -->`` for
an excerpt. Under ``<!-- fails: word -->`` a command must be refused with that word.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[a-z ]+): (?P<said>[^>]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PAGES = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
]


class Fence(NamedTuple):
    """A fenced block: its page, its language, the comment above it, and its text."""

    page: str
    language: str
    mark: str | None
    said: str | None
    text: str


def fences(page: str, language: str) -> list[Fence]:
    """The blocks of a page in one language, in order."""
    found = FENCE.finditer((ROOT / page).read_text())
    all_of_them = [Fence(page, each["language"], each["mark"], each["said"], each["text"]) for each in found]
    return [each for each in all_of_them if each.language == language]


def commands(text: str) -> list[str]:
    """The commands of a block, without comments. A backslash at the end of a line joins the next line."""
    joined = re.sub(r"\\\n\s*", " ", textwrap.dedent(text))
    lines = [re.split(r"(?:^|\s{2,})#", line)[0].strip() for line in joined.splitlines()]
    return [line for line in lines if line]
