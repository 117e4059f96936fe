"""Options of transforms and criteria: checked at construction, printed as they were given."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch


def one_of(option: str, value: Any, allowed: Sequence[Any]) -> Any:
    """Check that a value is one of a few.

    Raises:
        ValueError: it is not; the message lists them.
    """
    if value not in allowed:
        raise ValueError(f"{option} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def at_least(option: str, value: Any, low: int, *, required: bool = False) -> Any:
    """Check that a value is an integer ≥ `low`; None passes, unless one is required.

    Raises:
        ValueError: it is not.
    """
    if value is None and not required:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{option} must be an integer ≥ {low}; got {value!r}")
    return value


def within(option: str, value: float, low: float, high: float) -> float:
    """Check that a number is in [low, high]; an infinite bound itself is outside, and NaN always.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, int | float) or not (low <= value <= high and abs(value) != float("inf")):
        range_ = f"finite and ≥ {low:g}" if low > -float("inf") else "a finite number"
        range_ = f"in [{low:g}, {high:g}]" if high < float("inf") else range_
        raise ValueError(f"{option} must be {range_}; got {value!r}")
    return value


def above_zero(option: str, value: float, high: float = float("inf")) -> float:
    """Check that a number is in (0, high], and finite.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, int | float) or not (0 < value <= high and value < float("inf")):
        range_ = f"in (0, {high:g}]" if high < float("inf") else "finite and > 0"
        raise ValueError(f"{option} must be {range_}; got {value!r}")
    return value


def nested_key(key: Any) -> Any:
    """A key from YAML by TorchRL's convention: ``[next, reward]`` is ``("next", "reward")``."""
    if key is None or isinstance(key, str):
        return key
    key = tuple(key)
    return key[0] if len(key) == 1 else key


def as_dtype(dtype: Any) -> torch.dtype | None:
    """A floating-point dtype, also by its name, as YAML has it; None stays None.

    Raises:
        ValueError: it is none.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype must be a floating-point dtype of torch; got {dtype!r}")
    return found


def describe_options(thing: Any, *, leave_out: Sequence[str] = ()) -> str:
    """The options of a transform or criterion that are not at their defaults, as they were given."""
    parameters = inspect.signature(type(thing)).parameters.values()
    given = [(p.name, getattr(thing, p.name), p.default) for p in parameters if hasattr(thing, p.name)]
    shown = [(name, value) for name, value, default in given if _differ(value, default)]
    return ", ".join(f"{name}={value!r}" for name, value in shown if name not in leave_out)


def _differ(value: Any, default: Any) -> bool:
    try:
        return bool(value != default)
    except (TypeError, ValueError, RuntimeError):  # an array compares element by element
        return True
