"""Options of transforms and criteria: checks at construction, and their text form.

:func:`takes_options` checks values against annotations. Each class checks the ranges and combinations of its
options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Annotated, Any, TypeVar

import torch

from headrace.faces import answer_to

from .annotations import BY_PLACE, annotations_of, described, fits, in_one_line, value_meant
from .calls import call_meant

__all__ = [
    "INF",
    "LowerBound",
    "UpperBound",
    "above_zero",
    "as_dtype",
    "at_least",
    "describe_options",
    "has_effect",
    "is_default",
    "nested_key",
    "options_of",
    "takes_options",
    "within",
]

INF = float("inf")
LowerBound = Annotated[float, -INF]
"""A number, or −∞ for no bound."""
UpperBound = Annotated[float, INF]
"""A number, or ∞ for no bound."""

T = TypeVar("T", bound=Callable[..., Any])


def takes_options(thing: T) -> T:
    """Check the options of a function or class against their annotations before each call.

    Numbers must be finite, except for :data:`LowerBound` and :data:`UpperBound`. No bool or NaN is a number.
    A ``Literal`` lists the allowed values. An argument that may also be a tensor is data, and is not checked.

    Subclasses of BatchTransform, Criterion and TokenTerm are checked without this decorator.

    Raises:
        ValueError: when called, with the option, its value and what is allowed.

    Example:
        >>> @takes_options
        ... def scaled(reward: torch.Tensor, *, scale: float, high: UpperBound = INF):
        ...     return (scale * reward).clamp(max=high)
        >>> scaled(torch.ones(1), scale=float("nan"))
        Traceback (most recent call last):
        ValueError: scale must be a finite number; got nan
    """
    if inspect.isclass(thing):
        thing.__init__ = takes_options(thing.__init__)  # type: ignore[method-assign]
        return thing
    parameters = inspect.signature(thing).parameters
    defaults = {name: each.default for name, each in parameters.items()}
    by_place = [name for name, each in parameters.items() if each.kind in BY_PLACE]
    is_method = "self" in defaults

    @wraps(thing)
    def checked(*args: Any, **kwargs: Any) -> Any:
        hints = annotations_of(thing) if kwargs or len(args) > is_method else {}
        for name, value in (dict(zip(by_place, args, strict=False)) | kwargs).items():  # most are defaults
            if value is not defaults.get(name) and not fits(value, hints.get(name, Any)):
                needed = described(hints[name]) + value_meant(value, hints[name])
                found = in_one_line(value) + answer_to(f"{thing.__name__}.{name}")
                raise ValueError(f"{name} must be {needed}; got {found}")
        try:
            return thing(*args, **kwargs)
        except TypeError:
            if (meant := call_meant(thing, args, kwargs)) is None:  # the call is as the signature says
                raise
            raise TypeError(meant) from None

    return checked  # type: ignore[return-value]


SCALARS = (bool, int, float, str)


def is_default(parameter: inspect.Parameter, value: Any) -> bool:
    """Whether a plain value is the default of an option, which needs no check."""
    default = parameter.default
    return value is default or (type(value) is type(default) and type(value) in SCALARS and value == default)


def at_least(option: str, value: Any, low: int) -> Any:
    """Check that an integer is ≥ `low`, and return it. None is allowed.

    Raises:
        ValueError: the integer is lower.
    """
    if value is not None and value < low:
        raise ValueError(f"{option} must be an integer ≥ {low}; got {value!r:.200}")
    return value


def within(option: str, value: Any, low: float, high: float = INF) -> Any:
    """Check that a number is in [low, high], and return it. None is allowed.

    Raises:
        ValueError: the number is outside.
    """
    if value is not None and not low <= value <= high:
        range_ = f"in [{low:g}, {high:g}]" if high < INF else f"finite and ≥ {low:g}"
        raise ValueError(f"{option} must be {range_}; got {value!r:.200}")
    return value


def above_zero(option: str, value: Any, high: float = INF) -> Any:
    """Check that a number is in (0, high], and return it. None is allowed.

    Raises:
        ValueError: the number is outside.
    """
    if value is not None and not 0 < value <= high:
        range_ = f"in (0, {high:g}]" if high < INF else "finite and > 0"
        raise ValueError(f"{option} must be {range_}; got {value!r:.200}")
    return value


def has_effect(owner: Callable[..., Any], option: str, value: Any, there: bool, needed: str) -> None:
    """Refuse an option that has no effect, unless it has its default value.

    Args:
        owner: class or function with the option; its signature has the default.
        option: name of the option.
        value: given value.
        there: whether the option has an effect, given the other options.
        needed: the option without which it has no effect, for the message.

    Raises:
        ValueError: the option has another value than its default, and no effect.
    """
    if not there and value != inspect.signature(owner).parameters[option].default:
        raise ValueError(
            f"{option} must be left out without {needed}, since it has no effect; got {option}={value!r}"
        )


def nested_key(key: Any) -> Any:
    """Convert a key from YAML to TorchRL's convention: ``[next, reward]`` to ``("next", "reward")``."""
    if key is None or isinstance(key, str):
        return key
    key = tuple(key)
    return key[0] if len(key) == 1 else key


def as_dtype(dtype: Any) -> torch.dtype | None:
    """Convert the name of a floating-point dtype, from YAML, to the dtype. None stays None.

    Raises:
        ValueError: `dtype` is not a floating-point dtype or its name.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype must be a floating-point dtype of torch; got {dtype!r}")
    return found


def describe_options(thing: Any, *, leave_out: Sequence[str] = ()) -> str:
    """The options of a transform or criterion that differ from their defaults, as text."""
    given = [(name, getattr(thing, name, default), default) for name, default in _defaults(thing.__class__)]
    shown = [(name, value) for name, value, default in given if _differ(value, default)]
    return ", ".join(f"{name}={value!r}" for name, value in shown if name not in leave_out)


def options_of(kind: type) -> list[str]:
    """The names of the options of a class, including those of its columns."""
    return [name for name, _ in _defaults(kind)]


@cache
def option_names(kind: type) -> frozenset[str]:
    """:func:`options_of` as a set, for lookups."""
    return frozenset(options_of(kind))


@cache
def _defaults(kind: type) -> list[tuple[str, Any]]:
    return [(each.name, each.default) for each in inspect.signature(kind).parameters.values()]


def _differ(value: Any, default: Any) -> bool:
    try:
        return bool(value != default)
    except (TypeError, ValueError, RuntimeError):  # an array compares element by element
        return True
