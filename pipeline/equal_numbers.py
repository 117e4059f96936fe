"""What two runs have in common, without torch: the viewer starts at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast


def names_of_equal(first: Mapping[str, float | None], second: Mapping[str, float | None]) -> list[str]:
    """Names of the numbers that both have and that are equal, up to float32 rounding, or both unknown.

    Example:
        >>> names_of_equal({"a": 1.0, "b": 2.0, "c": None}, {"a": 1.0, "b": 3.0, "c": float("nan")})
        ['a', 'c']
    """

    def same(a: float | None, b: float | None) -> bool:
        unknown = [value is None or math.isnan(value) for value in (a, b)]
        if any(unknown):
            return all(unknown)
        return math.isclose(cast(float, a), cast(float, b), rel_tol=1e-5, abs_tol=1e-9)

    return [name for name, value in first.items() if name in second and same(value, second[name])]
