"""Did you mean: the words nearest to one that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def suggest(word: str, words: Iterable[str]) -> str:
    """Close matches, as the end of a sentence; nothing if there are none.

    Example:
        >>> suggest("gprpo", ["grpo", "dapo"])
        " (did you mean 'grpo'?)"
    """
    close = difflib.get_close_matches(word, list(words), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Every value of nested mappings by its dotted path, shallow ones first.

    Example:
        >>> leaves({"a": {"b": {"c": 1}, "d": 2}, "e": 3})
        {'e': 3, 'a.d': 2, 'a.b.c': 1}
    """
    found: dict[str, Any] = {}
    for name, value in node.items():
        inner = leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {}
        found |= inner or {f"{prefix}{name}": value}
    return dict(sorted(found.items(), key=lambda leaf: leaf[0].count(".")))


def deeper(path: str, known: Mapping[str, Any], most: int = 3) -> list[str]:
    """The paths at which what was written without its place, or with a part of it, may be meant.

    They end in the same name and have the other names in the same order. Values that follow others, by an
    interpolation, come last.

    Args:
        path: as it was written, dotted.
        known: values by dotted path, as :func:`leaves` has them.
        most: paths at most.

    Example:
        >>> deeper("gate.group_size", {"source.group_size": 1, "pipeline.stages.gate.group_size": 2})
        ['pipeline.stages.gate.group_size']
    """
    *places, name = path.split(".")

    def holds(other: str) -> bool:
        *around, last = other.split(".")
        ahead = iter(around)
        return last == name and all(place in ahead for place in places)

    found = [other for other in known if other != path and holds(other)]
    return sorted(found, key=lambda other: "${" in str(known[other]))[:most]
