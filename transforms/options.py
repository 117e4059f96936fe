"""Options of transforms and criteria: checks at construction, and their text form.

:func:`takes_options` checks the types of numbers against annotations. Each class checks the ranges of its
options, and their combinations.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections import abc
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import torch
from tensordict.utils import NestedKey

INF = float("inf")
LowerBound = Annotated[float, -INF]
"""A number, or −∞ for no bound."""
UpperBound = Annotated[float, INF]
"""A number, or ∞ for no bound."""

T = TypeVar("T", bound=Callable[..., Any])


def takes_options(thing: T) -> T:
    """Check the numeric options of a function or class before each call.

    An option is numeric if its annotation is ``int`` or ``float``, or a sequence of them. A bool or NaN is
    refused. The number must be finite, except for :data:`LowerBound` and :data:`UpperBound`. An argument that
    may also be a tensor is data, and is not checked.

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
    signature = inspect.signature(thing)

    @wraps(thing)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # the call below raises it with a better message
            given = {}
        for name, hint in numeric_options(thing).items():
            if name in given and (wanted := wanted_number(given[name], hint)):
                raise ValueError(f"{name} must be {wanted}; got {given[name]!r}")
        return thing(*args, **kwargs)

    return checked  # type: ignore[return-value]


def annotations_of(thing: Callable[..., Any]) -> dict[str, Any]:
    """The types of the parameters of a class or function, by name; Any if a type cannot be resolved."""
    function = inspect.unwrap(thing.__init__ if inspect.isclass(thing) else thing)
    module = sys.modules.get(getattr(function, "__module__", ""), types.SimpleNamespace())
    names = {"NestedKey": NestedKey, **vars(module)}  # signatures list the keys of columns as NestedKey
    found = {}
    for name, parameter in inspect.signature(thing).parameters.items():
        annotation = parameter.annotation
        if annotation is parameter.empty:
            continue
        try:
            found[name] = eval(annotation, dict(names)) if isinstance(annotation, str) else annotation
        except Exception:  # a name that is only imported for type checkers
            found[name] = Any
    return found


@cache
def numeric_options(thing: Callable[..., Any]) -> dict[str, Any]:
    """The numeric options of a class or function, with their types."""
    hints = annotations_of(thing)
    return {name: hint for name, hint in hints.items() if any(map(_has_numbers, _parts(hint)))}


def is_numeric(hint: Any) -> bool:
    """Whether a type is a number type, not a union."""
    return hint in (int, float) or get_origin(hint) is Annotated


def wanted_number(value: Any, hint: Any) -> str | None:
    """Describe what a value must be if it is an invalid number for the type; None if it is not invalid.

    Example:
        >>> wanted_number(True, int | None), wanted_number(2, int | None), wanted_number("sum", int | str)
        ('an integer or None', None, None)
    """
    parts = _parts(hint)
    numbers = [part for part in parts if _has_numbers(part)]
    others = [part for part in parts if part not in numbers]
    if any(_is_number(value, part) for part in numbers):
        return None
    plain = value is None or isinstance(value, bool | float | str) or getattr(value, "ndim", None) == 0
    if type(value) in others or not (plain or set(others) <= {type(None)}):
        return None  # not a number: its type is not checked here
    return " or ".join(number_in_words(part) for part in parts)


def number_in_words(part: Any) -> str:
    """Describe a type for a message."""
    if get_origin(part) is abc.Sequence:
        return f"a list (each {' or '.join(map(number_in_words, _parts(get_args(part)[0])))})"
    if get_origin(part) is Annotated:
        return f"a number or {get_args(part)[1]}"
    if get_origin(part) is abc.Callable:
        return "a callable"
    words = {int: "an integer", float: "a finite number", type(None): "None"}
    return words.get(part, getattr(part, "__name__", str(part)))


def _parts(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the single type; empty if a tensor is allowed."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return () if torch.Tensor in parts else parts


def _has_numbers(part: Any) -> bool:
    """Whether a type is a number type, or a sequence of numbers."""
    return is_numeric(part) or (
        get_origin(part) is abc.Sequence and any(map(is_numeric, _parts(get_args(part)[0])))
    )


def _is_number(value: Any, part: Any) -> bool:
    if get_origin(part) is abc.Sequence:
        inner = get_args(part)[0]
        if isinstance(value, str) or not hasattr(value, "__len__"):
            return False
        return not any(wanted_number(each, inner) for each in value)
    if part is not int and getattr(value, "ndim", None) == 0:  # a numpy or torch scalar
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int if part is int else int | float):
        return False
    return -INF < value < INF or (get_origin(part) is Annotated and value == get_args(part)[1])


def one_of(option: str, value: Any, allowed: Sequence[Any]) -> Any:
    """Check that a value is one of the allowed values, and return it.

    Raises:
        ValueError: it is not; the message lists the allowed values.
    """
    if value not in allowed:
        raise ValueError(f"{option} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def at_least(option: str, value: Any, low: int) -> Any:
    """Check that an integer is ≥ `low`, and return it. None is allowed.

    Raises:
        ValueError: it is not.
    """
    if value is not None and value < low:
        raise ValueError(f"{option} must be an integer ≥ {low}; got {value!r}")
    return value


def within(option: str, value: Any, low: float, high: float = INF) -> Any:
    """Check that a number is in [low, high], and return it. None is allowed.

    Raises:
        ValueError: it is not.
    """
    if value is not None and not low <= value <= high:
        range_ = f"in [{low:g}, {high:g}]" if high < INF else f"finite and ≥ {low:g}"
        raise ValueError(f"{option} must be {range_}; got {value!r}")
    return value


def above_zero(option: str, value: Any, high: float = INF) -> Any:
    """Check that a number is in (0, high], and return it. None is allowed.

    Raises:
        ValueError: it is not.
    """
    if value is not None and not 0 < value <= high:
        range_ = f"in (0, {high:g}]" if high < INF else "finite and > 0"
        raise ValueError(f"{option} must be {range_}; got {value!r}")
    return value


def has_effect(owner: Callable[..., Any], option: str, value: Any, there: bool, needed: str) -> None:
    """Refuse an option that has no effect, unless it has its default value.

    Args:
        owner: class or function with the option; its signature has the default.
        option: name of the option.
        value: given value.
        there: whether the option has an effect with the other options.
        needed: the option that it needs to have an effect, for the message.

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
        ValueError: it is not a floating-point dtype.
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
def _defaults(kind: type) -> list[tuple[str, Any]]:
    return [(each.name, each.default) for each in inspect.signature(kind).parameters.values()]


def _differ(value: Any, default: Any) -> bool:
    try:
        return bool(value != default)
    except (TypeError, ValueError, RuntimeError):  # an array compares element by element
        return True
