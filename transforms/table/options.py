"""Options of transforms and criteria: checks at construction, and their text form.

:func:`takes_options` checks values against annotations. Each class checks the ranges and combinations of its
options.
"""

from __future__ import annotations

import inspect
import os
import sys
import types
from collections import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache, wraps
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import torch
from tensordict.utils import NestedKey

from headrace.faces import exported
from headrace.spelling import closest, suggest

__all__ = [
    "INF",
    "LowerBound",
    "UpperBound",
    "above_zero",
    "annotations_of",
    "as_dtype",
    "at_least",
    "closest_value",
    "describe_options",
    "described",
    "fits",
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

    Numbers must be finite, except for :data:`LowerBound` and :data:`UpperBound`, and neither a bool nor NaN.
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
                needed = described(hints[name]) + _meant(value, hints[name])
                raise ValueError(f"{name} must be {needed}; got {value!r:.200}")
        try:
            return thing(*args, **kwargs)
        except TypeError:
            if (meant := _call_meant(thing, args, kwargs)) is None:  # the call is as the signature says
                raise
            raise TypeError(meant) from None

    return checked  # type: ignore[return-value]


@cache
def annotations_of(thing: Callable[..., Any]) -> dict[str, Any]:
    """The types of the parameters of a class or function, by name; Any if a type cannot be resolved."""
    function = inspect.unwrap(thing.__init__ if inspect.isclass(thing) else thing)
    module = sys.modules.get(getattr(function, "__module__", ""), types.SimpleNamespace())
    names = {"NestedKey": NestedKey, **vars(module)}  # signatures list the keys of columns as NestedKey
    found = {}
    for name, parameter in inspect.signature(thing).parameters.items():
        annotation = parameter.annotation
        if annotation is parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            continue
        try:
            found[name] = eval(annotation, dict(names)) if isinstance(annotation, str) else annotation
        except Exception:  # a name that is only imported for type checkers
            found[name] = Any
    return found


def is_default(parameter: inspect.Parameter, value: Any) -> bool:
    """Whether a plain value is the default of an option, which needs no check."""
    default = parameter.default
    return value is default or (type(value) is type(default) and type(value) in SCALARS and value == default)


SCALARS = (bool, int, float, str)
PLAIN = (type(None), bool, int, float, str, list, tuple, dict)
OPAQUE = ("headrace", "torch", "torchrl", "tensordict")  # no plain value stands for their classes
NAMED = ("device", "dtype")  # except these, by name
BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
PYTHON = {bool: "True or False", str: "a string", type(None): "None"}
ANY_TEXT = {str, NestedKey, Any}
NUMBERS = {int: "an integer", float: "a finite number"}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value fits a type annotation. An object fits, unless a number, word or bool is needed.

    A node of a configuration with a ``_target_`` fits any type.

    Example:
        >>> fits(True, int), fits(2, int | None), fits("sum", Literal["sum", "mean"])
        (False, True, True)
    """
    origin, inner = get_origin(hint), get_args(hint)
    is_union = origin in (Union, types.UnionType)
    if not isinstance(value, str) and (hint is torch.Tensor or (is_union and torch.Tensor in inner)):
        return True  # data
    if isinstance(value, Mapping) and "_target_" in value:
        return True
    if getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
        value = value.item()
    if is_union:
        return any(fits(value, each) for each in inner)
    if hint in NUMBERS or origin is Annotated:
        return _is_number(value, hint)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if hint in (bool, type(None), None):
        return isinstance(value, type(None) if hint is None else hint)
    if hint is str:
        return isinstance(value, str | os.PathLike)
    if origin is abc.Sequence and not isinstance(value, str | Mapping) and hasattr(value, "__len__"):
        return all(fits(each, inner[0]) for each in value)  # also the numbers of an array
    if Callable in (origin, hint):
        return callable(value)
    if not isinstance(value, PLAIN):
        return True
    if hint is NestedKey:
        return isinstance(value, str) or (
            isinstance(value, list | tuple) and bool(value) and all(fits(name, str) for name in value)
        )
    kind = origin or hint
    if inspect.isclass(kind) and issubclass(kind, Mapping):
        return isinstance(value, Mapping)
    if _is_opaque(hint):
        return isinstance(value, str) and getattr(hint, "__name__", "") in NAMED
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(fits, value, inner))
    abstract = inspect.isclass(kind) and kind.__module__ == "collections.abc"
    if (abstract and issubclass(kind, Iterable)) or kind in (list, tuple):
        return isinstance(value, list | tuple) and all(fits(each, inner[0]) for each in value if inner)
    return isinstance(value, kind) if abstract else True


def described(hint: Any, words: Mapping[Any, str] = PYTHON) -> str:
    """Describe a type annotation for a message.

    Args:
        hint: the annotation.
        words: names of bool, str and None, which YAML writes in another way than Python.

    Example:
        >>> described(Literal["sum", "mean"] | None)
        "one of 'sum', 'mean' or None"
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint in words or hint in NUMBERS:
        return words.get(hint) or NUMBERS[hint]
    if origin in (Union, types.UnionType):
        listed = [each for each in inner if str not in inner or get_origin(each) is not Literal]
        return " or ".join(dict.fromkeys(described(each, words) for each in listed))
    if origin is Annotated:
        return f"a number or {inner[1]}"
    if origin is Literal:
        return "one of " * (len(inner) > 1) + ", ".join(map(repr, inner))
    if hint is NestedKey:
        return "a column, as a name or a list of names"
    if Callable in (origin, hint) or _is_opaque(hint):
        named = getattr(hint, "__name__", "") in NAMED
        return words[str] if named else "a callable" if words is PYTHON else "a node with a _target_"
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return "a mapping, as {'name': value}" if words is PYTHON else "names and values in braces"
    of = f" of {len(inner)}" if origin is tuple and inner and inner[-1] is not Ellipsis else ""
    return f"a list{of}" + (f" (each {described(inner[0], words)})" if inner else "")


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_callable(hint: Any) -> bool:
    return any(Callable in (get_origin(part), part) for part in _parts(hint))


def _meant(value: Any, hint: Any) -> str:
    """Suggest the listed value that a word probably means, or the call that makes the needed object."""
    if get_origin(hint) is abc.Mapping and _is_callable(get_args(hint)[1]):
        return " (headrace.load_pipeline takes the name of a recipe)"
    if isinstance(value, str) and _is_callable(hint):
        classes = [name for name in exported("headrace.transforms") if name[0].isupper()]
        return "".join(f" (did you mean {name}()?)" for name in closest(value, classes, 1, 0.7))
    return closest_value(value, hint)


def closest_value(value: Any, hint: Any) -> str:
    """Suggest the listed word that a value probably means, or two bounds for a number.

    Example:
        >>> closest_value("men", Literal["sum", "mean"]), closest_value(5, Sequence[float | None] | None)
        (" (did you mean 'mean'?)", ' (did you mean [-5, 5]?)')
    """
    if Sequence[float | None] in _parts(hint) and type(value) in NUMBERS and value > 0:
        return f" (did you mean [{-value}, {value}]?)"
    listed = [get_args(part) for part in _parts(hint) if get_origin(part) is Literal]
    words = [str(each) for words in listed for each in words]
    return suggest(str(value), words) if isinstance(value, str | bool) else ""


def no_option(owner: str, name: str, options: Iterable[str]) -> str:
    """The message for an option that a class or function does not have."""
    return f"{owner} has no option {name!r}{suggest(name, options)}; its options are {', '.join(options)}"


def _call_meant(thing: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What is wrong with a call, and which options are probably meant; None if it fits the signature."""
    try:
        inspect.signature(thing).bind(*args, **kwargs)
        return None
    except TypeError as err:
        said = str(err)
    if thing.__name__ == "__init__":  # perhaps of a base class, which a subclass calls
        thing = next(kind for kind in type(args[0]).__mro__ if _unwrapped_init(kind) is inspect.unwrap(thing))
        args = args[1:]
    name, parameters = thing.__name__, inspect.signature(thing).parameters
    by_place = [each for each, it in parameters.items() if it.kind in BY_PLACE]
    options = {each: it for each, it in parameters.items() if it.kind is it.KEYWORD_ONLY}
    unknown = [each for each in kwargs if each not in parameters]
    if unknown and not args and by_place and _is_mapping(thing, by_place[0]):
        return f"{name} needs {by_place[0]}: {name}({{{', '.join(f'{each!r}: …' for each in unknown)}}})"
    if unknown and len(by_place) + len(options) == len(parameters):
        return no_option(name, unknown[0], parameters)
    hints = dict.fromkeys(parameters, Any) | annotations_of(thing)
    if more := args[len(by_place) :]:
        free = [each for each in options if each not in kwargs]
        of_text = [each for each in free if not ANY_TEXT.isdisjoint(_parts(hints[each]))]
        fit = [each for each in free if fits(more[0], hints[each])]
        near = [each for each in free if _meant(more[0], hints[each])]
        fit = [*(each for each in fit if each not in of_text), *near, *fit]
        said = repr(more[0]).partition("\n")[0]
        call = f"{name}({fit[0]}={said:.60})" if fit else ", ".join(free)
        if not isinstance(more[0], PLAIN) and _takes_any_name(parameters, hints):
            return f"{name} takes its parts by name: {name}({type(more[0]).__name__.lower()}=…)"
        call += _meant(more[0], hints[fit[0]]) if fit and not fits(more[0], hints[fit[0]]) else ""
        return f"{name} takes its options by name: {call}"
    needed = [each for each in [*by_place, *options] if parameters[each].default is inspect.Parameter.empty]
    call = ", ".join(each if each in by_place else f"{each}=…" for each in needed)
    lacking = [each for each in needed if each not in {*by_place[: len(args)], *kwargs}]
    return f"{name} needs {' and '.join(lacking)}: {name}({call})" if lacking else said


def _takes_any_name(parameters: Mapping[str, inspect.Parameter], hints: Mapping[str, Any]) -> bool:
    return any(it.kind is it.VAR_KEYWORD and hints[each] is Any for each, it in parameters.items())


def _is_mapping(thing: Callable[..., Any], name: str) -> bool:
    return get_origin(annotations_of(thing).get(name)) is abc.Mapping


def _unwrapped_init(kind: type) -> Any:
    return inspect.unwrap(vars(kind).get("__init__", object))


def _is_opaque(hint: Any) -> bool:
    # A plain value stands for an enumeration's member, and a list for a torch.Size.
    return (
        inspect.isclass(hint)
        and hint.__module__.split(".")[0] in OPAQUE
        and not issubclass(hint, Enum | tuple)
    )


def _is_number(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return False
    return -INF < value < INF or (get_origin(kind) is Annotated and value == get_args(kind)[1])


def at_least(option: str, value: Any, low: int) -> Any:
    """Check that an integer is ≥ `low`, and return it. None is allowed.

    Raises:
        ValueError: it is not.
    """
    if value is not None and value < low:
        raise ValueError(f"{option} must be an integer ≥ {low}; got {value!r:.200}")
    return value


def within(option: str, value: Any, low: float, high: float = INF) -> Any:
    """Check that a number is in [low, high], and return it. None is allowed.

    Raises:
        ValueError: it is not.
    """
    if value is not None and not low <= value <= high:
        range_ = f"in [{low:g}, {high:g}]" if high < INF else f"finite and ≥ {low:g}"
        raise ValueError(f"{option} must be {range_}; got {value!r:.200}")
    return value


def above_zero(option: str, value: Any, high: float = INF) -> Any:
    """Check that a number is in (0, high], and return it. None is allowed.

    Raises:
        ValueError: it is not.
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
