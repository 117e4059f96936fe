"""Write JSON that every reader accepts. Numbers that are not finite become null, because JSON has no NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Write plain values as JSON. Numbers that are not finite become null.

    Args:
        value: nested dicts, lists and tuples of text, numbers, bools and None.
        indent: as for :func:`json.dumps`.

    Example:
        >>> json_text({"mean": float("nan"), "rows": [1, 0.5]})
        '{"mean": null, "rows": [1, 0.5]}'
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
