"""Calls that do not fit the signature of a function or class: what is wrong, and which call is meant."""

from __future__ import annotations

import inspect
from collections import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_origin

from headrace.spelling import suggest

from .annotations import ANY_TEXT, BY_PLACE, PLAIN, annotations_of, fits, union_parts, value_meant


def no_option(owner: str, name: str, options: Iterable[str]) -> str:
    """The message for an option that a class or function does not have."""
    return f"{owner} has no option {name!r}{suggest(name, options)}; its options are {', '.join(options)}"


def accepts(function: Callable[..., Any], *args: Any) -> bool:
    """Whether a callable takes these arguments by place.

    Example:
        >>> accepts(lambda batch: batch, 1), accepts(lambda reward, rollouts: reward, 1)
        (True, False)
    """
    try:
        inspect.signature(function).bind(*args)
    except (TypeError, ValueError) as err:  # ValueError: a function in C, whose signature is not known
        return isinstance(err, ValueError)
    return True


def call_meant(thing: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What is wrong with a call, and which options are probably meant; None if it fits the signature."""
    try:
        inspect.signature(thing).bind(*args, **kwargs)
        return None
    except TypeError as err:
        said = str(err)
    if thing.__name__ == "__init__":  # perhaps of a base class, which a subclass calls
        thing = next(kind for kind in type(args[0]).__mro__ if _unwrapped_init(kind) is inspect.unwrap(thing))
        if (to_write := vars(type(args[0])).get("_to_write")) is not None:  # a base class
            return to_write
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
        takes_any_name = any(it.kind is it.VAR_KEYWORD for it in parameters.values())
        if not free and not takes_any_name:
            return f"{name} takes {len(by_place)} arguments without a name: {', '.join(by_place)}"
        of_text = [each for each in free if not ANY_TEXT.isdisjoint(union_parts(hints[each]))]
        fit = [each for each in free if fits(more[0], hints[each])]
        near = [each for each in free if value_meant(more[0], hints[each])]
        fit = [*(each for each in fit if each not in of_text), *near, *fit]
        said = repr(more[0]).partition("\n")[0]
        call = f"{name}({fit[0]}={said:.60})" if fit else ", ".join(free)
        if not isinstance(more[0], PLAIN) and takes_any_name:
            return f"{name} takes its parts by name: {name}({type(more[0]).__name__.lower()}=…)"
        call += value_meant(more[0], hints[fit[0]]) if fit and not fits(more[0], hints[fit[0]]) else ""
        return f"{name} takes its options by name: {call}"
    needed = [each for each in [*by_place, *options] if parameters[each].default is inspect.Parameter.empty]
    call = ", ".join(each if each in by_place else f"{each}=…" for each in needed)
    lacking = [each for each in needed if each not in {*by_place[: len(args)], *kwargs}]
    return f"{name} needs {' and '.join(lacking)}: {name}({call})" if lacking else said


def _is_mapping(thing: Callable[..., Any], name: str) -> bool:
    return get_origin(annotations_of(thing).get(name)) is abc.Mapping


def _unwrapped_init(kind: type) -> Any:
    return inspect.unwrap(vars(kind).get("__init__", object))
