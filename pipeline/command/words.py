"""The words of the command line before Hydra reads them: what needs no task, and what no word can be."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from headrace.pipeline.composing import TASKS, ConfigError, recipes, without_stage
from headrace.pipeline.installed import PACKAGES, versions
from headrace.pipeline.wording import suggest

CONF = Path(str(files("headrace.conf")))
ALONE = ("recipes", "stages", "doctor", "help", "version", "view")


def answer(words: Sequence[str]) -> int | None:
    """Do what the words ask for where that is no task; the exit status, or None for a task.

    Args:
        words: of the command line.

    Raises:
        ConfigError: a name that there is not.
    """
    first, alone = words[0] if words else "", len(words) == 1
    if first == "view":
        try:
            from headrace.pipeline.view.server import view
        except ImportError as err:
            raise ConfigError(
                f"headrace view reads rows with pyarrow, which cannot be imported ({err}): "
                "pip install pyarrow"
            ) from None
        return view(words[1:])
    if first == "doctor" and alone:
        from .doctor import examine  # which imports torch, if it can

        return examine()
    if first == "help" or any(word in ("--help", "-h") for word in words):
        print((files(__package__) / "help.txt").read_text(encoding="utf-8").rstrip())
    elif first == "version" or "--version" in words:
        found = versions()
        print("\n".join(f"{name} {found.get(name) or 'is not installed'}" for name in PACKAGES))
    elif first in ("recipes", "stages") and len(words) == 2:
        print(read_file(first.removesuffix("s"), words[1]))
    elif first == "recipes" and alone:
        print(list_files({name: CONF / "pipeline" / f"{name}.yaml" for name in recipes()}))
        print("\nheadrace pipeline=NAME runs one, and headrace recipes NAME prints its file.")
    elif first == "stages" and alone:
        for folder, title in (("stage", "stages"), ("criterion", "criteria"), ("term", "token terms")):
            nodes = {path.stem: path for path in sorted((CONF / folder).glob("*.yaml"))}
            print(f"{title}\n{list_files(nodes)}\n")
        print("headrace stages NAME prints the options of one.")
    else:
        return None
    return 0


def ready_words(words: Sequence[str]) -> list[str]:
    """The words as Hydra reads them: flags first, ``~pipeline.stages.NAME`` as its value null.

    Raises:
        ConfigError: a flag or a bare word that means nothing; the message has what may be meant.
    """
    for word in words:
        if "=" not in word and word.startswith("-"):
            _check_flag(word)

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; headrace --help says what there is")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    read, unknown = parser.parse_known_intermixed_args(list(words))
    for word in unknown:
        _check_flag(word)
    if read.multirun and read.cfg:
        raise ConfigError("--cfg prints what one job is composed of, and -m runs several: take one of them")
    for word in read.overrides:
        if "=" not in word and not word.startswith("~"):
            meant = suggest(word, [*TASKS, *recipes(), *ALONE])
            if word in ALONE:
                meant = f"; headrace {word} is a command of its own, without other words before it"
            elif word in TASKS or word in recipes():
                meant = f" (did you mean {'task' if word in TASKS else 'pipeline'}={word}?)"
            raise ConfigError(f"a word is NAME=VALUE; got {word!r}{meant}")
        if re.fullmatch(r"(pipeline|task|report)=(null)?", word):
            raise ConfigError(f"{word}: a name is required; headrace --help says which there are")
    values = [word for word in words if word in read.overrides]
    flags = [word for word in words if word not in read.overrides]
    if "task=xray" in values:  # Hydra takes `source` for the file of a dump
        values = [f"xray.{word}" if word.startswith("source=") else word for word in values]
    return [*flags, *map(without_stage, values)]


def _check_flag(word: str) -> None:
    """Check that Hydra knows a flag.

    Raises:
        ConfigError: it does not.
    """
    known = list(get_args_parser()._option_string_actions)
    name = word.partition("=")[0]
    if name not in known:
        raise ConfigError(
            f"there is no flag {name!r}{suggest(name, known)}; headrace --help says what there is"
        )


def read_file(kind: str, name: str) -> str:
    """The file of a recipe, or of a stage, criterion or term: its options, values and what they are.

    Args:
        kind: ``recipe`` or ``stage``.
        name: of the file.

    Raises:
        ConfigError: there is none of that name.
    """
    folders = ["pipeline"] if kind == "recipe" else ["stage", "criterion", "term"]
    found = {
        path.relative_to(CONF / folder).with_suffix("").as_posix(): path
        for folder in folders
        for path in sorted((CONF / folder).rglob("*.yaml"))
    }
    if name not in found:
        raise ConfigError(f"there is no {kind} {name!r}{suggest(name, found)}; there are {', '.join(found)}")
    return found[name].read_text(encoding="utf-8").rstrip()


def list_files(paths: Mapping[str, Path]) -> str:
    """A line for each file: its name, and how the comment at its head begins."""
    width = max(map(len, paths), default=0)
    room = min(shutil.get_terminal_size((100, 24)).columns, 120) - width - 4
    lines = []
    for name, path in paths.items():
        head = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        comment = [line[1:].strip() for line in head if not line.startswith(("# @package", "# Generated"))]
        shown = textwrap.shorten(" ".join(comment), max(room, 20), placeholder=" …")
        lines.append(f"  {name:{width}}  {shown}")
    return "\n".join(lines)
