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

HELP = """\
headrace carries rollouts from a collector to a group-relative loss.

  headrace [task=TASK] [pipeline=RECIPE] [NAME=VALUE ...]

Tasks
  task=train        train a small model on live rollouts, the demo (default)
  task=replay       rollouts of a dump through a recipe
  task=compare      the same rollouts through two recipes
  task=plan         how many rollouts a filter will cost, by group size
  task=certify      exact bias and variance of a recipe's gradient
Without a task
  headrace recipes [NAME]    all recipes, or the file of one
  headrace stages [NAME]     all stages and criteria, or the options of one
  headrace doctor            check this machine and installation
  headrace --version         versions of headrace and what it stands on

Words
  pipeline=NAME              the recipe
  pipeline.stages.NAME.OPTION=VALUE    an option of a stage
  ~pipeline.stages.NAME      leave a stage out
  group_size=8 train.steps=60 seed=0 device=auto     of task=train
  source.path=FILE           the dump of replay, compare and plan
  hydra.run.dir=FOLDER       where files go (outputs/DATE/TIME)
  -m NAME=A,B                a job for each value, and a table at the end
  --cfg job                  print all options of these words, run nothing

Examples
  headrace pipeline=dr_grpo train.steps=20
  headrace -m pipeline=grpo,dr_grpo,dapo seed=1,2
  headrace task=replay source.path='dump/*.parquet' pipeline=rloo
  headrace task=compare source.path=dump 'pipelines=[as/verl,grpo]'
  headrace --cfg job task=replay pipeline=dapo

README.md and docs/ say more; --hydra-help has the flags of Hydra.
"""
CONF = Path(str(files("headrace.conf")))
ALONE = ("recipes", "stages", "doctor", "help", "version")


def answer(words: Sequence[str]) -> int | None:
    """Do what the words ask for where that is no task; the exit status, or None for a task.

    Args:
        words: of the command line.

    Raises:
        ConfigError: a name that there is not.
    """
    first, alone = words[0] if words else "", len(words) == 1
    if first == "doctor" and alone:
        from .doctor import examine  # which imports torch, if it can

        return examine()
    if first == "help" or any(word in ("--help", "-h") for word in words):
        print(HELP.rstrip())
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
