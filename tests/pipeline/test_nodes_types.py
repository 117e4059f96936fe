"""Values of a wrong type are refused with the name of the option, before anything is built."""

from __future__ import annotations

import copy
import logging
from argparse import Namespace
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from recipes import CHAINS
from tensordict.utils import NestedKey

from headrace.pipeline import ConfigError
from headrace.pipeline.composing.compose import TASKS, compose_config, leaves
from headrace.pipeline.composing.nodes import build_node, misfit, resolved
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


MADE = {"_target_": "argparse.Namespace"}


@pytest.mark.parametrize(
    ("node", "made"),
    [
        (
            {**MADE, "a": 1, "b": MADE, "c": [MADE, {"d": MADE}], "e": {"_target": 2}},
            Namespace(a=1, b=Namespace(), c=[Namespace(), {"d": Namespace()}], e={"_target": 2}),
        ),
        ({**MADE, "_recursive_": False, "b": MADE}, Namespace(b=MADE)),
        ({**MADE, "_recursive_": True, "_convert_": "all", "b": MADE}, Namespace(b=Namespace())),
        ({"_target_": "fractions.Fraction", "_args_": [1, 3]}, Fraction(1, 3)),
        ({"_target_": "fractions.Fraction", "_args_": [1], "denominator": 3}, Fraction(1, 3)),
    ],
)
def test_a_node_is_the_object_that_its_target_makes(node, made):
    assert build_node(OmegaConf.create(node), "x") == made


def test_a_partial_node_takes_further_arguments_and_given_ones_replace_options():
    partial = build_node(OmegaConf.create({**MADE, "_partial_": True, "a": 1, "b": 2}), "x", b=3)
    assert partial(c=4) == Namespace(a=1, b=3, c=4)
    assert build_node(OmegaConf.create({**MADE, "a": 1}), "x", a=5) == Namespace(a=5)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (3, "x must be a node with a _target_; got 3"),
        ({"a": 1}, "x must be a node with a _target_; got {'a': 1}"),
        (
            {"_target_": "fractions.Fraction", "numerator": 1, "denominator": 0},
            "x.denominator=0: Fraction(1, 0)",
        ),
        (
            {"_target_": "fractions.Fraction", "numerator": "1/2", "denominator": 1},
            "x.numerator='1/2' or x.denominator=1: both arguments should be Rational instances",
        ),
        (
            {**MADE, "b": [{"_target_": "fractions.Fraction", "numerator": "a"}]},
            "x.b.0.numerator='a': Invalid literal",
        ),
        ({"_target_": "fractions.Fraction", "numbr": 1}, "x (fractions.Fraction) has no option 'numbr'"),
    ],
)  # fmt: skip
def test_an_error_of_a_target_names_the_options_without_which_it_does_not_occur(node, said):
    with pytest.raises(ConfigError) as refused:
        build_node(OmegaConf.create(node) if isinstance(node, dict) else node, "x")
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("length", [55, 56])
def test_a_value_of_sixty_characters_is_left_out_of_an_error(length):
    """With the quotes and the = there are three more."""
    value = "a" * (length + 1)
    with pytest.raises(ConfigError) as refused:
        build_node(OmegaConf.create({"_target_": "fractions.Fraction", "numerator": value}), "x")
    shown = f"={value!r}" if length == 55 else ""
    assert str(refused.value) == f"x.numerator{shown}: Invalid literal for Fraction: {value!r}"


IN_THIS_FOLDER = ". A module in this folder is found with PYTHONPATH=. in front of the command"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_module.Bonus", f"No module named 'no_such_module'{IN_THIS_FOLDER}"),
        ("no_such_module", f"No module named 'no_such_module'{IN_THIS_FOLDER}"),
        ("fractions.Fractio", "fractions has no Fractio (did you mean 'Fraction'?)"),
        ("fractions.more.Own", "No module named 'fractions.more'; 'fractions' is not a package"),
        ("fractions.Fraction.nothing", "type object 'Fraction' has no attribute 'nothing'"),
        ("own_part.Bonus", "No module named 'not_installed'"),
    ],
)
def test_a_target_that_cannot_be_imported_is_refused_with_the_first_reason(
    target, said, tmp_path, monkeypatch, caplog
):
    """Hydra, which would log the error that is raised, logs as before afterwards."""
    (tmp_path / "own_part.py").write_text("import not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    for disabled in (False, True):
        monkeypatch.setattr(logging.getLogger("hydra.utils"), "disabled", disabled)
        with pytest.raises(ConfigError) as refused:
            build_node(OmegaConf.create({"_target_": target}), "x")
        assert str(refused.value) == f"x: _target_ {target!r} cannot be imported: {said}"
        assert (caplog.records, logging.getLogger("hydra.utils").disabled) == ([], disabled)


def test_interpolations_are_resolved_as_omegaconf_resolves_them():
    """References to values, nodes, lists and other references: relative, absolute, and within a text."""
    text = {
        "of": "${.name}",
        "name": "a",
        "twice": "${.of}-${..low}",
        "list": [1, "${..name}", {"in": "${...name}"}],
    }
    root = {"high": {"own": 7, "node": {"b": 2}}, "here": {"low": 3, "text": text, "null": None}}
    root["here"] |= {"far": "${..high.own}", "all": "${high.node}", "as": "${.text.list}", "deep": "${.far}"}
    config = OmegaConf.create(root)
    assert resolved(config.here) == OmegaConf.to_container(config.here, resolve=True)
    assert resolved(config.here)["deep"] == 7
    for wrong in ("${.nothing}", "${.text.nothing}", "${.null.nothing}", "${.wrong}", "${....high}", "???"):
        node = OmegaConf.create(root | {"here": {**root["here"], "wrong": wrong}}).here
        with pytest.raises((OmegaConfBaseException, RecursionError)):
            resolved(node)


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
