"""The words of the command line before Hydra reads them: what needs no task, and what no word can be."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra._internal.utils import get_args_parser

from headrace.pipeline.composing import TASKS, ConfigError, leave_out, recipes
from headrace.pipeline.composing.hints import suggest

from .help import HELP, list_recipes, list_stages, list_versions, print_file

ALONE = ("recipes", "stages", "doctor", "help", "version")


def answer(words: Sequence[str]) -> int | None:
    """Do what the words ask for where that is no task; the exit status, or None for a task.

    Args:
        words: of the command line.

    Raises:
        ConfigError: a name that there is not.
    """
    first = words[0] if words else ""
    if first == "help" or any(word in ("--help", "-h") for word in words):
        return _say(HELP.rstrip())
    if first == "version" or "--version" in words:
        return _say(list_versions())
    if first == "doctor" and len(words) == 1:
        from .doctor import examine  # which imports torch, if it can

        return examine()
    if first in ("recipes", "stages") and len(words) <= 2:
        if len(words) == 2:
            return _say(print_file(first.removesuffix("s"), words[1]))
        return _say(list_recipes() if first == "recipes" else list_stages())
    return None


def ready_words(words: Sequence[str]) -> list[str]:
    """The words as Hydra reads them: flags first, ``~pipeline.stages.NAME`` as its value null.

    Raises:
        ConfigError: a flag or a bare word that means nothing; the message has what may be meant.
    """
    for word in words:
        if "=" not in word and word.startswith("-"):
            _check_flag(word)
    parser = get_args_parser()
    parser.error = _refuse_flags  # type: ignore[assignment]
    read, unknown = parser.parse_known_intermixed_args(list(words))
    for word in unknown:
        _check_flag(word)
    if read.multirun and read.cfg:
        raise ConfigError("--cfg prints what one job is composed of, and -m runs several: take one of them")
    for word in read.overrides:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"a word is NAME=VALUE; got {word!r}{_meant(word)}")
        if re.fullmatch(r"(pipeline|task|report)=(null)?", word):
            raise ConfigError(f"{word}: a name is required; headrace --help says which there are")
    values = [word for word in words if word in read.overrides]
    flags = [word for word in words if word not in read.overrides]
    return [*flags, *map(leave_out, values)]


def _say(text: str) -> int:
    print(text)
    return 0


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


def _refuse_flags(message: str) -> None:
    raise ConfigError(f"{message}; headrace --help says what there is")


def _meant(word: str) -> str:
    """What a bare word may be meant as."""
    if word in ALONE:
        return f"; headrace {word} is a command of its own, without other words before it"
    tasks, names = {f"task={task}": task for task in TASKS}, {f"pipeline={name}": name for name in recipes()}
    exact = [full for full, short in (tasks | names).items() if short == word]
    near = suggest(word, [*TASKS, *recipes(), *ALONE])
    return f" (did you mean {' or '.join(exact)}?)" if exact else near
