"""Tasks share how they read overrides, sizes and callables, and how they say where their files are."""

from __future__ import annotations

import io
import math
import re
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from headrace.pipeline import ConfigError
from headrace.pipeline.tools.dumps import (
    import_callable,
    overrides_by_recipe,
    print_files,
    said_of_overrides,
    sizes_of_groups,
)


def test_the_address_of_the_page_is_printed_if_the_folder_has_a_page(tmp_path):
    def said() -> list[str]:
        text = io.StringIO()
        print_files(Console(file=text, width=20), tmp_path, "and more")
        return text.getvalue().splitlines()

    assert said() == [f"written to {tmp_path}", "and more"]
    (tmp_path / "report.html").write_text("<html>")
    assert said() == [f"written to {tmp_path}", f"the page: {tmp_path.as_uri()}/report.html", "and more"]


STAGES = {  # the stages of three recipes; one recipe has switched its filter off
    "one": {"gate": {}, "filter": {}},
    "two": {"gate": {}, "filter": None, "clip": {}},
    "three": {"gate": {}},
}


@pytest.fixture
def recipes(monkeypatch):
    """Recipes with the stages of `STAGES`; returns the overrides with which they were composed."""
    seen = []

    def compose(name, recipe, *overrides):
        seen.append(overrides)
        stages = OmegaConf.create(STAGES[recipe.removeprefix("pipeline=")])
        return SimpleNamespace(pipeline=SimpleNamespace(stages=stages))

    monkeypatch.setattr(sys.modules["headrace.pipeline.tools.dumps.source"], "compose_config", compose)
    return seen


@pytest.mark.parametrize(
    ("overrides", "apply"),
    [
        (["seed=1"], {}),
        (["pipeline.empty=count"], {"pipeline.empty=count": "one two three"}),
        (["hydra.searchpath=[x]"], {"hydra.searchpath=[x]": "one two three"}),
        (["pipeline.stages.gate.x=1"], {"pipeline.stages.gate.x=1": "one two three"}),
        (["pipeline.stages.clip.x=1"], {"pipeline.stages.clip.x=1": "two"}),
        (["pipeline.stages.filter.x=1"], {"pipeline.stages.filter.x=1": "one"}),
        (["~pipeline.stages.filter"], {"~pipeline.stages.filter": "one"}),  # nothing is left to remove in two
        (["pipeline.stages.filter={}"], {"pipeline.stages.filter={}": "one two"}),
        (["criterion@pipeline.stages.filter.c=d"], {"criterion@pipeline.stages.filter.c=d": "one"}),
        (["~pipeline.stages.filter.x"], {"~pipeline.stages.filter.x": "one"}),
        (
            ["+pipeline.stages.new={}", "pipeline.stages.new.x=1", "pipeline.stages.clip.x=1"],
            {
                "+pipeline.stages.new={}": "one two three",
                "pipeline.stages.new.x=1": "one two three",
                "pipeline.stages.clip.x=1": "two",
            },
        ),
        (["+pipeline.stages.clip.x=1"], {"+pipeline.stages.clip.x=1": "two"}),
        (["pipeline.stages.none.x=1"], {"pipeline.stages.none.x=1": "one"}),  # composing it names the stages
    ],
)
def test_overrides_of_a_stage_apply_to_recipes_that_have_it_or_get_it(overrides, apply, recipes):
    found = overrides_by_recipe(["one", "two", "three"], overrides)
    assert found == {name: [each for each in overrides if name in apply.get(each, "")] for name in STAGES}
    assert {*recipes} <= {()}


def test_recipes_are_searched_where_the_overrides_say(recipes):
    overrides_by_recipe(["one", "two"], ["hydra.searchpath=[x]", "pipeline.stages.gate.x=1"])
    assert recipes == [("hydra.searchpath=[x]",)] * 2


@pytest.mark.parametrize(
    ("by_recipe", "said"),
    [
        ({"one": ["pipeline.empty=count"], "two": ["pipeline.empty=count"]}, []),
        ({"one": ["pipeline.stages.a.x=1"], "two": ["pipeline.stages.a.x=1"]}, []),
        (
            {"one": ["pipeline.stages.a.x=1", "pipeline.stages.a.y=1"], "two": [], "three": []},
            ["The overrides of the stage 'a' do not apply to two and three, which do not have it."],
        ),
        (
            {"one": ["pipeline.stages.a.x=1"], "two": ["pipeline.stages.b.x=1"]},
            [
                "The overrides of the stage 'a' do not apply to two, which does not have it.",
                "The overrides of the stage 'b' do not apply to one, which does not have it.",
            ],
        ),
    ],
)
def test_a_sentence_names_the_recipes_that_lack_a_stage(by_recipe, said):
    assert said_of_overrides(by_recipe) == said


@pytest.mark.parametrize(
    ("given", "sizes"), [(4, [4]), ([4, 1], [4, 1]), ([], None), (0, None), ([2, 0], None)]
)
def test_sizes_of_groups_are_one_integer_or_several(given, sizes):
    config = OmegaConf.create({"plan": {"group_sizes": given}})
    if sizes is None:
        shown = given if isinstance(given, list) else [given]
        with pytest.raises(
            ConfigError, match=rf"^plan.group_sizes must be integers ≥ 1; got {re.escape(str(shown))}$"
        ):
            sizes_of_groups(config, "plan.group_sizes")
    else:
        assert sizes_of_groups(config, "plan.group_sizes") == sizes
    for other in (True, 2.0, "4", None):
        with pytest.raises(ConfigError, match="must be integers ≥ 1"):
            sizes_of_groups(OmegaConf.create({"plan": {"group_sizes": other}}), "plan.group_sizes")


def test_a_callable_is_named_with_a_dot_or_a_colon():
    for node in ("math.floor", "math:floor"):
        assert import_callable(node, "option", "a function") is math.floor
    for node, said in {
        "math.pi": "option must name a function; got 3.14",
        "math.none": "option cannot be imported: module 'math' has no attribute 'none'. ",
        "nowhere.grade": "option cannot be imported: No module named 'nowhere'. ",
    }.items():
        with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
            import_callable(node, "option", "a function")
