"""From a symptom to the number that shows it, what it means, and the words that change it.

symptoms.yaml is the one source: of docs/symptoms.md, which ``tools/make_symptoms.py`` writes, and of what
stands beside an advisory on the page.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import NamedTuple

from omegaconf import OmegaConf


class Remedy(NamedTuple):
    """Something to do."""

    text: str
    words: str
    """To type behind ``headrace``; empty: it is done elsewhere."""


class Symptom(NamedTuple):
    """Something that goes wrong, as it looks in a report."""

    name: str
    """By which advisories and links call it."""
    title: str
    shows: str
    """The number of the report that shows it, and the rule by which it becomes an advisory."""
    means: str
    remedies: tuple[Remedy, ...]


@cache
def symptoms() -> dict[str, Symptom]:
    """All symptoms by name, most urgent first.

    Example:
        >>> symptoms()["stalled"].title
        'The reward rose, and no longer does'
    """
    text = (files(__package__) / "symptoms.yaml").read_text(encoding="utf-8")
    return {
        str(name): Symptom(
            str(name),
            node.title,
            node.shows,
            node.means,
            tuple(Remedy(each.text, each.get("words", "")) for each in node.remedies),
        )
        for name, node in OmegaConf.create(text).items()
    }
