"""``headrace --help``, ``--version``, ``recipes`` and ``stages``: text alone, at once, without torch."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from headrace.pipeline.composing import ConfigError, recipes
from headrace.pipeline.composing.hints import suggest
from headrace.pipeline.versions import PACKAGES, versions

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


def list_versions() -> str:
    """A line for each package, with the version that is installed."""
    found = versions()
    return "\n".join(f"{name} {found.get(name) or 'is not installed'}" for name in PACKAGES)


def list_recipes() -> str:
    """A line for each recipe: its name, and how the comment in its file begins."""
    return _listing({name: CONF / "pipeline" / f"{name}.yaml" for name in recipes()}) + (
        "\n\nheadrace pipeline=NAME runs one, and headrace recipes NAME prints its file."
    )


def list_stages() -> str:
    """A line for each stage, criterion and token term."""
    parts = []
    for folder, title in (("stage", "stages"), ("criterion", "criteria"), ("term", "token terms")):
        nodes = {path.stem: path for path in sorted((CONF / folder).glob("*.yaml"))}
        parts.append(f"{title}\n{_listing(nodes)}")
    return "\n\n".join([*parts, "headrace stages NAME prints the options of one."])


def print_file(kind: str, name: str) -> str:
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


def _listing(paths: dict[str, Path]) -> str:
    width = max(map(len, paths), default=0)
    room = min(shutil.get_terminal_size((100, 24)).columns, 120) - width - 4
    return "\n".join(f"  {name:{width}}  {_first(path, max(room, 20))}" for name, path in paths.items())


def _first(path: Path, room: int) -> str:
    """How the comment at the head of a file begins, in one line."""
    return textwrap.shorten(
        " ".join(_comment(path.read_text(encoding="utf-8").splitlines())), room, placeholder=" …"
    )


def _comment(lines: Sequence[str]) -> list[str]:
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        if not line.startswith(("# @package", "# Generated")):
            comment.append(line.removeprefix("#").strip())
    return comment
