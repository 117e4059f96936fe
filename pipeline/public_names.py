"""Say where the public names of headrace are, and give hints for names that do not exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from headrace.faces import FOLDER, exported
from headrace.spelling import suggest

PACKAGES = ("adapters", "conf", "pipeline", "transforms")
# The names that `dir(headrace)` shows, by task. The packages list all names.
BY_TASK = {
    "from a recipe to minibatches": ("recipes", "load_pipeline", "Pipeline", "Run"),
    "the same on plain columns": ("decide", "Decider", "Decision", "advantages_of"),
    "ids and complete groups": ("StampIds", "stamp_ids", "RepeatSampler", "GroupAssembler", "assembled"),
    "groups from workers": ("informative", "paced", "RolloutStream"),
    "optimiser steps": ("optimise", "weighted_loss", "TokenGRPOLoss", "PipelineHook", "Checkpoint"),
    "what happened to the rows": ("make_report", "ReportFolder", "log_report", "write_page"),
    "finished runs": ("write_dump", "open_dump", "replay", "compare", "audit", "plan", "xray"),
    "parts of your own": ("BatchTransform", "RewardShaping", "Criterion", "TokenTerm", "Rows"),
    "errors": ("ConfigError", "BatchError", "MissingKeyError", "IncompleteGroupsError", "StageError"),
}
# Names that users may look for in `headrace`, and where they are.
INNER = (
    "adapters",
    "pipeline.reverse",
    "pipeline.tools.certify",
    "pipeline.tools.dumps.readers",
    "pipeline.tools.report",
    "pipeline.train",
)
OF_OTHERS = {
    "tensordict": ("TensorDict", "LazyStackedTensorDict", "NonTensorData"),
    "torchrl.collectors": ("Collector", "MultiCollector"),
    "torchrl.collectors.llm": ("LLMCollector",),
    "torchrl.data": ("ReplayBuffer",),
    "torchrl.objectives.llm": ("CISPOLoss", "DAPO", "GRPOLoss", "MCAdvantage"),
}
COMMANDS = {"doctor": "doctor", "stages": "stages", "train": "task=train", "view": "view"}


HOMES = {name: package for package in ("pipeline", "transforms") for name in exported(f"headrace.{package}")}
SHOWN = sorted(["__version__", *(name for names in BY_TASK.values() for name in names), *PACKAGES])


def spelt(name: str) -> str:
    """A name without case and underscores."""
    return name.replace("_", "").lower()


@cache
def all_answers() -> dict[str, str]:
    """The answers of `guesses.txt`, by guess."""
    lines = (FOLDER / "pipeline" / "guesses.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition(": ")[::2] for line in lines[1:]]
    return {guess: answer for guesses, answer in pairs for guess in guesses.split()}


def answer_to(*guesses: str) -> str:
    """The answer of `guesses.txt` to the first of these guesses that it has; empty if it has none."""
    found = (all_answers().get(spelt(guess)) for guess in guesses)
    return next((f": use {answer}" for answer in found if answer), "")


def hint(name: str) -> str:
    """Say where a missing name is, or which name is meant; empty for names that Python itself looks up."""
    if name.startswith("_"):
        return ""
    other = next((f"{module}.{name}" for module, names in OF_OTHERS.items() if name in names), "")
    conf, own = FOLDER / "conf", spelt(name)
    for path in sorted(conf.glob("pipeline/*.yaml")):
        if spelt(path.stem) == own:
            loss = f"; the loss is {other}" if other else ""
            return f": it is a recipe, headrace.load_pipeline({path.stem!r}){loss}"
    if other or name in HOMES:  # a name of HOMES that was looked for elsewhere
        return f": it is {other or f'headrace.{name}'}"
    if answer := answer_to(own):
        return answer
    for package in INNER:
        if name in exported(f"headrace.{package}"):
            return f": it is headrace.{package}.{name}"
    if name in COMMANDS:
        return f": it is a command, `headrace {COMMANDS[name]}`"
    if name in trainers():
        return f": it is headrace.adapters.{name}"
    if (alike := next((home for home in HOMES if spelt(home) == own), None)) is not None:
        return f" (did you mean {alike!r}?)"
    if target := target_of(conf / "stage" / f"{name}.yaml"):  # the name of a criterion is near its class
        return f": it is the node of headrace.{target}"
    return suggest(name, HOMES) or "; dir(headrace) lists the names to begin with"


def trainers() -> list[str]:
    """The modules of `headrace.adapters`."""
    return [path.stem for path in FOLDER.glob("adapters/*.py")]


def target_of(path: Path) -> str:
    """The name of a node's class; empty if the file does not exist."""
    found = re.search(r"^_target_: [\w.]+\.(\w+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1] if found else ""
