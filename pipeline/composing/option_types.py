"""Values from YAML against the annotations of what takes them: the signature is the schema.

Ranges are the business of constructors; whether a value is a number at all is said here, in YAML's words.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

from tensordict.utils import NestedKey

from .hints import suggest

PLAIN = (type(None), bool, int, float, str, list, tuple, dict)
WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a word", type(None): "null"}
OPAQUE = ("headrace", "torch", "torchrl", "tensordict")  # their classes cannot be written down as a value
NAMED = ("device", "dtype")  # but these can, as a word


def annotations_of(thing: Callable[..., Any]) -> dict[str, Any]:
    """The types of the parameters of a class or function by name; those that cannot be resolved are Any."""
    function = thing.__init__ if inspect.isclass(thing) else thing
    written = getattr(function, "__annotations__", {})
    names = vars(sys.modules.get(getattr(function, "__module__", ""), types.SimpleNamespace()))
    found = {}
    for name, annotation in written.items():
        try:
            found[name] = eval(annotation, dict(names)) if isinstance(annotation, str) else annotation
        except Exception:  # a name that is imported for type checkers alone
            found[name] = Any
    return found


def misfit(value: Any, hint: Any) -> str | None:
    """What a value from YAML must be to fit a type; None where it fits, or the type says nothing about it.

    Args:
        value: as YAML has it: a node with a ``_target_`` is whatever it makes.
        hint: the type.

    Example:
        >>> misfit("abc", int | None), misfit(3, float), misfit("sum", Literal["sum", "mean"])
        ('an integer or null', None, None)
    """
    return None if fits(value, hint) else described(hint) + _nearest(value, hint)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from YAML is of a type."""
    if not _is_written(value):
        return True
    if hint is NestedKey:
        return fits(value, str) or (
            _is_list(value) and bool(value) and all(fits(name, str) for name in value)
        )
    if hint in (bool, str, type(None), None):
        return isinstance(value, type(None) if hint is None else hint)
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in inner)
    if Callable in (origin, hint) or _is_opaque(hint):
        return isinstance(value, str) and getattr(hint, "__name__", "") in NAMED
    kind = origin or hint
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return _is_list(value) and len(value) == len(inner) and all(map(fits, value, inner))
    if inspect.isclass(kind) and issubclass(kind, Mapping):
        return isinstance(value, Mapping)
    abstract = inspect.isclass(kind) and kind.__module__ == "collections.abc"
    if (abstract and issubclass(kind, Iterable)) or kind in (list, tuple):
        return _is_list(value) and all(fits(each, inner[0]) for each in value if inner)
    return True


def described(hint: Any) -> str:
    """A type in the words of YAML.

    Example:
        >>> described(Literal["sum", "mean"] | None)
        "one of 'sum', 'mean' or null"
    """
    if hint is NestedKey:
        return "a column, as a name or a list of names"
    if hint in WORDS:
        return WORDS[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(described, inner)))
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if Callable in (origin, hint) or _is_opaque(hint):
        return "a word" if getattr(hint, "__name__", "") in NAMED else "a node with a _target_"
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return "names and values in braces"
    of = f" of {len(inner)}" if origin is tuple and inner and inner[-1] is not Ellipsis else ""
    return f"a list{of}, each {described(inner[0])}" if inner else "a list"


def as_typed(value: Any) -> str:
    """A value as YAML, and not Python, has it."""
    return (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or isinstance(value, bool)
        else repr(value)
    )


def _nearest(value: Any, hint: Any) -> str:
    """Did you mean: of the words that a type allows."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    allowed = [str(word) for part in parts if get_origin(part) is Literal for word in get_args(part)]
    return suggest(value, allowed) if isinstance(value, str) else ""


def _is_written(value: Any) -> bool:
    """Whether a value stands in the YAML as it is: not an object, nor a node that makes one."""
    return isinstance(value, PLAIN) and not (isinstance(value, Mapping) and "_target_" in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_opaque(hint: Any) -> bool:
    # A member of an enumeration is its value, and a torch.Size a list.
    return (
        inspect.isclass(hint)
        and hint.__module__.split(".")[0] in OPAQUE
        and not issubclass(hint, Enum | tuple)
    )
