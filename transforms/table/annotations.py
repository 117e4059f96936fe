"""Type annotations: whether a value fits one, how a message describes it, and which value is meant."""

from __future__ import annotations

import inspect
import os
import sys
import types
from collections import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from math import inf
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
from tensordict import NestedKey, TensorDictBase

from headrace.faces import exported
from headrace.spelling import closest, suggest

__all__ = ["annotations_of", "closest_value", "described", "fits"]

DATA = (torch.Tensor, TensorDictBase)
PLAIN = (type(None), bool, int, float, str, list, tuple, dict)
OPAQUE = ("headrace", "torch", "torchrl", "tensordict")  # a plain value fits none of their classes
NAMED = ("device", "dtype")  # except these, which a text can name
BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
PYTHON = {bool: "True or False", str: "a string", type(None): "None"}
ANY_TEXT = {str, NestedKey, Any}
NUMBERS = {int: "an integer", float: "a finite number"}


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
        except Exception:  # it uses a name that is only imported for type checkers
            found[name] = Any
    return found


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
    if isinstance(value, DATA) and _is_opaque(hint):
        return issubclass(hint, DATA)
    if not isinstance(value, PLAIN):
        return True
    if hint is NestedKey:
        return isinstance(value, str) or (
            isinstance(value, list | tuple) and bool(value) and all(fits(name, str) for name in value)
        )
    if _is_opaque(hint):
        return isinstance(value, str) and getattr(hint, "__name__", "") in NAMED
    kind = origin or hint
    if inspect.isclass(kind) and issubclass(kind, Mapping):
        return isinstance(value, Mapping)
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(fits, value, inner))
    abstract = inspect.isclass(kind) and kind.__module__ == "collections.abc"
    if (abstract and issubclass(kind, Iterable)) or kind in (list, tuple):
        return isinstance(value, list | tuple) and all(fits(each, inner[0]) for each in value if inner)
    return isinstance(value, kind) if abstract else True


def in_one_line(value: Any) -> str:
    """A value for a message: in one line, or the name of its class."""
    text = f"{value!r:.200}"
    return _named(type(value)) if "\n" in text else text


def _named(kind: type) -> str:
    name = kind.__name__.removesuffix("Base")
    return f"a{'n' * (name[0] in 'AEIOU')} {name}"


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
        if getattr(hint, "__name__", "") in NAMED:
            return words[str]
        in_python = _named(hint) if _is_opaque(hint) else "a callable"
        return in_python if words is PYTHON else "a node with a _target_"
    if inspect.isclass(origin or hint) and issubclass(origin or hint, Mapping):
        return "a mapping, as {'name': value}" if words is PYTHON else "names and values in braces"
    of = f" of {len(inner)}" if origin is tuple and inner and inner[-1] is not Ellipsis else ""
    return f"a list{of}" + (f" (each {described(inner[0], words)})" if inner else "")


def union_parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_callable(hint: Any) -> bool:
    return any(Callable in (get_origin(part), part) for part in union_parts(hint))


def value_meant(value: Any, hint: Any) -> str:
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
    if Sequence[float | None] in union_parts(hint) and type(value) in NUMBERS and value > 0:
        return f" (did you mean [{-value}, {value}]?)"
    listed = [get_args(part) for part in union_parts(hint) if get_origin(part) is Literal]
    words = [str(each) for words in listed for each in words]
    return suggest(str(value), words) if isinstance(value, str | bool) else ""


def _is_opaque(hint: Any) -> bool:
    # A plain value stands for an enumeration's member, a list for a torch.Size, and a dict for a TypedDict.
    return (
        inspect.isclass(hint)
        and hint.__module__.split(".")[0] in OPAQUE
        and not issubclass(hint, Enum | tuple | dict)
    )


def _is_number(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return False
    return -inf < value < inf or (get_origin(kind) is Annotated and value == get_args(kind)[1])
