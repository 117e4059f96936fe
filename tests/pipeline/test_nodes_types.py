"""Values of a wrong type are refused with the name of the option, before anything is built."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import pytest
import torch
from omegaconf import OmegaConf
from recipes import CHAINS
from tensordict.utils import NestedKey

from headrace.pipeline import ConfigError
from headrace.pipeline.composing.compose import TASKS, compose_config, leaves
from headrace.pipeline.composing.nodes import build_node, misfit
from headrace.pipeline.tools.command.perform import TYPES, check_types
from headrace.transforms import CompletenessGate, Status
from headrace.transforms.table.annotations import annotations_of

pytestmark = pytest.mark.slow

PYTHON = ("Error", "None", "__init__", "<class", "Traceback", "object at")
WRONG = ("abc", -1, [], None)


@pytest.mark.parametrize(
    ("value", "hint", "wanted"),
    [
        (3, int, None),
        (True, int, "an integer"),
        (3.5, int, "an integer"),
        (3, float, None),
        ("3", float, "a finite number"),
        (False, float, "a finite number"),
        (None, int | None, None),
        (None, int, "an integer"),
        ("abc", int | None, "an integer or null"),
        (1, bool, "true or false"),
        ("sum", Literal["sum", "mean"], None),
        (True, Literal[1], "1"),
        ("maen", Literal["sum", "mean"], "one of 'sum', 'mean' (did you mean 'mean'?)"),
        ([1, 2], Sequence[int], None),
        ([1, "b"], list[int], "a list (each an integer)"),
        ("ab", Sequence[str], "a list (each a word)"),
        ([1.0, 2.0], tuple[float, float], None),
        ([1.0], tuple[float, float], "a list of 2 (each a finite number)"),
        ({"a": 1}, Mapping[str, int], None),
        ([], Mapping[str, int], "names and values in braces"),
        (["next", "reward"], NestedKey, None),
        ([], NestedKey, "a column, as a name or a list of names"),
        (-1, NestedKey | None, "a column, as a name or a list of names or null"),
        ("abc", Callable[[int], int], "a node with a _target_"),
        ({"_target_": "my.module.term"}, Callable[[int], int], None),
        ("abc", Callable, "a node with a _target_"),
        (1, Status, None),
        ([2, 3], torch.Size, None),
        ("abc", Hashable, None),
        (len, Callable, None),
        ("anything", Any, None),
    ],
)
def test_a_value_fits_its_type_or_the_error_has_the_type(value, hint, wanted):
    assert misfit(value, hint) == wanted


def test_an_unresolved_annotation_is_any():
    assert annotations_of(CompletenessGate)["group_size"] == int | None

    def of_others(count: int, thing: NotImported) -> None: ...  # noqa: F821

    assert annotations_of(of_others)["thing"] is Any


def test_every_option_takes_its_type_or_raises_by_name_without_python_terms():
    """Each option of each class of a recipe is tried."""
    tried, refused = set(), 0
    for recipe in CHAINS:
        config = compose_config("load", f"pipeline={recipe}")
        plain = OmegaConf.to_container(config.pipeline.stages)
        for path, value in leaves(plain).items():
            stage, option = path.split(".")[0], path.split(".")[-1]
            whole = f"pipeline.stages.{path}"
            node = OmegaConf.select(config, whole.rpartition(".")[0])
            if option in ("_target_", stage) or "_target_" not in node or (node["_target_"], option) in tried:
                continue
            tried.add((node["_target_"], option))
            for wrong in WRONG:
                OmegaConf.update(config, whole, wrong, merge=False)
                try:
                    build_node(config.pipeline.stages[stage], f"pipeline.stages.{stage}")
                except ConfigError as err:
                    refused += 1
                    said = str(err)
                    assert said.startswith(f"pipeline.stages.{stage}"), said
                    assert option in said
                    assert not [word for word in PYTHON if word in said], said
            OmegaConf.update(config, whole, value, merge=False)  # a copy for each option would take a minute
    assert len(tried) > 200
    assert refused > 200


@pytest.mark.parametrize("task", TASKS)
def test_every_setting_without_a_target_has_a_type_and_refuses_others_by_name(task):
    """The default of each setting has this type."""
    config = compose_config("config", f"task={task}")
    check_types(config)
    settings = settings_of(config)
    assert not [path for path in settings if path not in TYPES], "add them to TYPES"
    for path in settings:
        wrong = copy.deepcopy(config)
        OmegaConf.update(wrong, path, {"nothing": [{}]}, merge=False)
        with pytest.raises(ConfigError) as refusal:
            check_types(wrong)
        assert str(refusal.value).startswith(path)


def settings_of(config):
    """The paths of all settings outside of nodes with a `_target_`. Such nodes check their own values."""
    found = leaves(of_no_target(OmegaConf.to_container(config, resolve=True)))
    return [path for path, value in found.items() if value != {}]


def of_no_target(node):
    return {
        name: of_no_target(value) if isinstance(value, dict) else value
        for name, value in node.items()
        if not (isinstance(value, dict) and "_target_" in value)
    }
