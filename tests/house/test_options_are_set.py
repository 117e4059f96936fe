"""Every option of a stage, criterion, term or pipeline is set by a recipe, an adapter, an example or a page.

An option that nothing sets costs code, tests and a line for every reader. Options that name columns are left
out: their values follow from `columns`.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from typing import Any

import yaml
from hydra.utils import get_object
from pages_as_written import PAGES, ROOT, fences

from headrace.pipeline import Pipeline
from headrace.pipeline.load import KEYWORDS
from headrace.transforms.table.options import options_of

CONF = ROOT / "conf"
PARTS = ("stage", "criterion", "term")
# Options that nothing sets, and why they stay.
KEPT = {
    "Diverged.unit": "a sequence may be all rows of a rollout",
    "LossWeight.dtype": "laws of the loss are tested in float64",
    "LossWeight.process_group": "for the stage without a pipeline, which sets it otherwise",
    "LossWeight.shared_ids": "for the stage without a pipeline, which sets it otherwise",
    "RolloutCorrection.unit": "a sequence may be all rows of a rollout",
    "SampleFilter.unit": "whole rollouts or groups leave, if a criterion judges rows",
    "ShuffleSplit.process_group": "for the stage without a pipeline, which sets it otherwise",
    "StateAdvantage.scale": "the other normalisation of GiGPO's paper",
    "TurnAdvantage.discount": "the discount of the return per turn",
}

TARGETS = {
    file.stem: yaml.safe_load(file.read_text())["_target_"]
    for part in PARTS
    for file in (CONF / part).glob("*.yaml")
}
KINDS = {target.rpartition(".")[2]: get_object(target) for target in TARGETS.values()} | {
    "Pipeline": Pipeline
}
COLUMNS = {("Finite", "key"), ("CombineIds", "keys")}
OPTIONS = {
    (kind, option)
    for kind in KINDS
    for option in options_of(KINDS[kind])
    if not option.endswith("_key") and option not in ("stages", "columns") and (kind, option) not in COLUMNS
}


def kinds_by_place() -> dict[str, set[str]]:
    """The classes that recipes use for each stage (`filter`) and part of a stage (`filter.criterion`)."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in CONF.rglob("*.yaml"):
        for place, name in re.findall(r" /\w+@stages\.([\w.]+): (\w+)", file.read_text()):
            found[place].add(TARGETS[name].rpartition(".")[2])
    for page in PAGES:
        for place, name in re.findall(r"\bpipeline\.stages\.([\w.]+)=(\w+)", (ROOT / page).read_text()):
            if name in TARGETS:  # other names are values, or a user's own files
                found[place].add(TARGETS[name].rpartition(".")[2])
    for name, target in TARGETS.items():  # users name a stage after its file
        found[name].add(target.rpartition(".")[2])
    return found


PLACES = kinds_by_place()


class Found(set):
    """The set of (class, option) pairs that something sets. Each method reads one kind of source."""

    def at(self, place: str, option: str) -> None:
        """Add an option of the stage or part at a place below `stages`."""
        self.update((kind, option) for kind in PLACES.get(place, ()))

    def node(self, node: Any, place: str = "") -> None:
        """Add the options of a YAML node, or of a mapping in Python."""
        if not isinstance(node, dict):
            return
        named = str(node.get("_target_", ""))
        if kind := TARGETS.get(named, named).rpartition(".")[2]:
            self.update((kind, option) for option in node)
        for option, value in node.items():
            self.at(place, str(option))
            self.node(value, f"{place}.{option}".lstrip(".") if place in PLACES or not place else str(option))

    def yaml(self, text: str) -> None:
        tree = yaml.safe_load(text)
        tree = tree if isinstance(tree, dict) else {}
        pipeline = tree.get("pipeline") if isinstance(tree.get("pipeline"), dict) else tree
        self.update(("Pipeline", option) for option in pipeline)
        for name, node in (pipeline.get("stages") or {}).items():
            self.node(node, name)

    def overrides(self, text: str) -> None:
        """Add full overrides, such as ``pipeline.stages.split.minibatches=2``."""
        for path, value in re.findall(r"\bpipeline\.([\w.]+)=(\{[^}]*\}|)", text):
            inner, _, option = path.removeprefix("stages.").rpartition(".")
            if path.startswith("stages."):
                self.at(inner, option)
                if value and "_target_" in value:
                    self.node(yaml.safe_load(value))
            else:
                self.add(("Pipeline", path.partition(".")[0]))

    def calls(self, text: str) -> None:
        """Add options of calls in prose, such as ``RewardScale(scale=2, bias=-1)``."""
        for kind, options in re.findall(r"\b(\w+)\(([^()]*)\)", text):
            self.update((kind, option) for option in re.findall(r"\b(\w+)=", options) if kind in KINDS)

    def python(self, text: str) -> None:
        """Add options in calls, in mappings of `stages`, in texts, and in assignments to a stage."""
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                named = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                for keyword in node.keywords:
                    option = str(keyword.arg)
                    if named in KINDS:
                        self.add((named, option))
                    elif (place := KEYWORDS.get(option, "")).startswith("stages."):
                        self.at(place.split(".")[1], place.split(".")[2])
                    elif place:
                        self.add(("Pipeline", option))
            elif isinstance(node, ast.Dict):
                for name, value in zip(node.keys, node.values, strict=True):
                    if isinstance(name, ast.Constant) and isinstance(value, ast.Dict):
                        for key in value.keys:
                            self.at(str(name.value), str(getattr(key, "value", "")))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.overrides(node.value)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self.update((kind, node.attr) for kind in KINDS if (kind, node.attr) in OPTIONS)


def options_set() -> Found:
    found = Found()
    for file in CONF.rglob("*.yaml"):
        if file.parent.name not in PARTS:
            found.yaml(file.read_text())
    for folder in ("adapters", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            found.python(file.read_text())
    for page in PAGES:
        if page != "CHANGELOG.md":
            found.overrides((ROOT / page).read_text())
            found.calls((ROOT / page).read_text())
            for block in fences(page, "python"):
                if block.mark is None:
                    found.python(block.text)
            for block in fences(page, "yaml"):
                found.yaml(block.text)
    return found


def test_every_option_is_set_by_a_recipe_an_adapter_an_example_or_a_page():
    needed = {
        (kind, option)
        for kind, option in OPTIONS
        if inspect.signature(KINDS[kind]).parameters[option].default is inspect.Parameter.empty
    }
    unset = {f"{kind}.{option}" for kind, option in OPTIONS - options_set() - needed}
    assert sorted(unset - KEPT.keys()) == []
    assert sorted(KEPT.keys() - unset) == [], "it is set, or is no option"
    assert len(KEPT) <= 10
    assert all(len(reason.split()) >= 3 for reason in KEPT.values())
