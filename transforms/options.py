"""Options of transforms and criteria: checked at construction, printed as they were given.

That a number is one is checked here for all, against annotations (:func:`takes_options`); its range, and what
goes together, by whoever has the option.
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
"""A number, or −∞: open."""
UpperBound = Annotated[float, INF]
"""A number, or ∞: open."""

T = TypeVar("T", bound=Callable[..., Any])


def takes_options(thing: T) -> T:
    """Check the numbers among the options of a function or class before it is called.

    An option is numeric where its annotation says ``int`` or ``float``, or is a sequence of them. It is no
    bool, not NaN, and finite, but for :data:`LowerBound` and :data:`UpperBound`. An argument that may also be
    a tensor is data, and not looked at.

    Subclasses of BatchTransform, Criterion and TokenTerm are checked without it.

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
        except TypeError:  # which the call raises, in better words
            given = {}
        for name, hint in numeric_options(thing).items():
            if name in given and (wanted := wanted_number(given[name], hint)):
                raise ValueError(f"{name} must be {wanted}; got {given[name]!r}")
        return thing(*args, **kwargs)

    return checked  # type: ignore[return-value]


def annotations_of(thing: Callable[..., Any]) -> dict[str, Any]:
    """The types of the parameters of a class or function by name; those that cannot be resolved are Any."""
    function = inspect.unwrap(thing.__init__ if inspect.isclass(thing) else thing)
    module = sys.modules.get(getattr(function, "__module__", ""), types.SimpleNamespace())
    names = {"NestedKey": NestedKey, **vars(module)}  # of columns, which signatures spell out
    found = {}
    for name, parameter in inspect.signature(thing).parameters.items():
        annotation = parameter.annotation
        if annotation is parameter.empty:
            continue
        try:
            found[name] = eval(annotation, dict(names)) if isinstance(annotation, str) else annotation
        except Exception:  # a name that is imported for type checkers alone
            found[name] = Any
    return found


@cache
def numeric_options(thing: Callable[..., Any]) -> dict[str, Any]:
    """The options of a class or function that have a number in them, each with its type."""
    hints = annotations_of(thing)
    return {name: hint for name, hint in hints.items() if any(map(_has_numbers, _parts(hint)))}


def is_numeric(hint: Any) -> bool:
    """Whether a type is one of numbers, and no union."""
    return hint in (int, float) or get_origin(hint) is Annotated


def wanted_number(value: Any, hint: Any) -> str | None:
    """What a value must be for the numbers in a type; None where it is that, or may be something else.

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
        return None  # what else it is, or is not, is not for here to say
    return " or ".join(number_in_words(part) for part in parts)


def number_in_words(part: Any) -> str:
    """A type of a union with numbers, in words."""
    if get_origin(part) is abc.Sequence:
        return f"a list (each {' or '.join(map(number_in_words, _parts(get_args(part)[0])))})"
    if get_origin(part) is Annotated:
        return f"a number or {get_args(part)[1]}"
    if get_origin(part) is abc.Callable:
        return "a callable"
    words = {int: "an integer", float: "a finite number", type(None): "None"}
    return words.get(part, getattr(part, "__name__", str(part)))


def _parts(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type; none where data may be given."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return () if torch.Tensor in parts else parts


def _has_numbers(part: Any) -> bool:
    """Whether a type is one of numbers, or a sequence of them."""
    return is_numeric(part) or (
        get_origin(part) is abc.Sequence and any(map(is_numeric, _parts(get_args(part)[0])))
    )


def _is_number(value: Any, part: Any) -> bool:
    if get_origin(part) is abc.Sequence:
        inner = get_args(part)[0]
        if isinstance(value, str) or not hasattr(value, "__len__"):
            return False
        return not any(wanted_number(each, inner) for each in value)
    if part is not int and getattr(value, "ndim", None) == 0:  # of numpy or torch
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int if part is int else int | float):
        return False
    return -INF < value < INF or (get_origin(part) is Annotated and value == get_args(part)[1])


def one_of(option: str, value: Any, allowed: Sequence[Any]) -> Any:
    """Check that a value is one of a few.

    Raises:
        ValueError: it is not; the message lists them.
    """
    if value not in allowed:
        raise ValueError(f"{option} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def at_least(option: str, value: Any, low: int) -> Any:
    """Check that an integer is ≥ `low`; None passes.

    Raises:
        ValueError: it is not.
    """
    if value is not None and value < low:
        raise ValueError(f"{option} must be an integer ≥ {low}; got {value!r}")
    return value


def within(option: str, value: Any, low: float, high: float = INF) -> Any:
    """Check that a number is in [low, high]; None passes.

    Raises:
        ValueError: it is not.
    """
    if value is not None and not low <= value <= high:
        range_ = f"in [{low:g}, {high:g}]" if high < INF else f"finite and ≥ {low:g}"
        raise ValueError(f"{option} must be {range_}; got {value!r}")
    return value


def above_zero(option: str, value: Any, high: float = INF) -> Any:
    """Check that a number is in (0, high]; None passes.

    Raises:
        ValueError: it is not.
    """
    if value is not None and not 0 < value <= high:
        range_ = f"in (0, {high:g}]" if high < INF else "finite and > 0"
        raise ValueError(f"{option} must be {range_}; got {value!r}")
    return value


def has_effect(owner: Callable[..., Any], option: str, value: Any, there: bool, needed: str) -> None:
    """Check that an option is at its default where it has no effect.

    Args:
        owner: the class or function that has it, whose signature says its default.
        option: its name.
        value: as given.
        there: whether it has an effect in this combination.
        needed: with what it has one, as it is written.

    Raises:
        ValueError: it is at another value, and has none.
    """
    if not there and value != inspect.signature(owner).parameters[option].default:
        raise ValueError(
            f"{option} must be left out without {needed}, since it has no effect; got {option}={value!r}"
        )


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
    given = [(name, getattr(thing, name, default), default) for name, default in _defaults(thing.__class__)]
    shown = [(name, value) for name, value, default in given if _differ(value, default)]
    return ", ".join(f"{name}={value!r}" for name, value in shown if name not in leave_out)


def options_of(kind: type) -> list[str]:
    """The names of its options, those of its columns among them."""
    return [name for name, _ in _defaults(kind)]


@cache
def _defaults(kind: type) -> list[tuple[str, Any]]:
    return [(each.name, each.default) for each in inspect.signature(kind).parameters.values()]


def _differ(value: Any, default: Any) -> bool:
    try:
        return bool(value != default)
    except (TypeError, ValueError, RuntimeError):  # an array compares element by element
        return True
