"""What two runs have in common, without torch: the viewer starts at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def names_of_equal(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """Names of the numbers that are equal in each pair, or unknown in both.

    Equal is a relative difference of at most 2⁻²¹, a few roundings of float32, or an absolute one of 2⁻⁴⁰.

    Example:
        >>> names_of_equal([({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0}), ({"a": None, "b": 2}, {"b": 3})])
        ['a']
        >>> names_of_equal([({"optimiser/lr": 1e-9}, {"optimiser/lr": 0.0})])
        []
    """
    names: list[str] | None = None
    for first, second in pairs:
        found = list(first) if names is None else names
        names = [name for name in found if _same(first.get(name), second.get(name))]
    return names or []


def _same(a: Any, b: Any) -> bool:
    if a == b:
        return True
    if not isinstance(a, int | float) or not isinstance(b, int | float):
        return False
    return math.isclose(a, b, rel_tol=2**-21, abs_tol=2**-40) or (math.isnan(a) and math.isnan(b))
