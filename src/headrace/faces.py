"""Faces: the public names of a package, each imported when it is first used.

To import a package may also import torch. So its names are read from its text.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.installed import lacking

FOLDER = Path(__file__).parent


@cache
def _text_of(package: str) -> ast.Module:
    path = FOLDER.joinpath(*package.split(".")[1:], "__init__.py")
    return ast.parse(path.read_text(encoding="utf-8"))


def exported(package: str) -> list[str]:
    """The `__all__` of a package of headrace."""
    for node in _text_of(package).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


@cache
def _modules_of(package: str) -> dict[str, str]:
    """By name, the relative module from which a package imports it for type checkers."""
    imports = [node for node in ast.walk(_text_of(package)) if isinstance(node, ast.ImportFrom)]
    return {alias.name: f".{node.module or ''}" for node in imports if node.level for alias in node.names}


def hint(name: str) -> str:
    """The hint of :mod:`headrace.pipeline.public_names` for an unknown name.

    `headrace` imports that module before any other, so no package has to import it.
    """
    return sys.modules["headrace.pipeline.public_names"].hint(name)


def answer_to(*guesses: str) -> str:
    """The answer of that module to a guessed attribute, `run.mask`, item, `run[]`, or argument."""
    return sys.modules["headrace.pipeline.public_names"].answer_to(*guesses)


class AnswersGuesses:
    """Base class of results. Its errors about a guessed attribute or item say what there is instead.

    Without ``__iter__``, a loop asks for the item 0.
    """

    if not TYPE_CHECKING:  # a type checker would take any name

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property, whose own error says what is missing
                return object.__getattribute__(self, name)
            answer = answer_to(*(f"{kind.__name__}.{name}" for kind in type(self).__mro__))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{answer}")

        def __getitem__(self, item: Any) -> Any:
            answer = answer_to(*(f"{kind.__name__}[]" for kind in type(self).__mro__))
            raise TypeError(f"{type(self).__name__!r} object has no items{answer}")


def lazy(
    package: str, names: list[str], hint: Callable[[str], str] = lambda name: ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose names are imported when they are first used.

    Args:
        package: its full name. It imports its names under ``TYPE_CHECKING``.
        names: its `__all__`.
        hint: the end of the error about an unknown name.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint(name)}")
        try:
            value = getattr(import_module(_modules_of(package)[name], package), name)
        except ImportError as err:
            if (explained := lacking(name, err)) is err:  # it keeps its own cause
                raise
            raise explained from err
        setattr(import_module(package), name, value)
        return value

    return get, lambda: sorted(names)
