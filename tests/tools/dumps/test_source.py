"""Tasks share how they read overrides, sizes and callables, and how they say where their files are."""

from __future__ import annotations

import io
import math
import re
import sys
from types import SimpleNamespace

import pytest
from dumps import trl_dump
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from rich.console import Console

from headrace.pipeline import ConfigError
from headrace.pipeline.tools.dumps import (
    import_callable,
    open_configured,
    overrides_by_recipe,
    print_files,
    said_of_overrides,
    sizes_of_groups,
)
from headrace.pipeline.wording import said_in_python


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


NO_IDS = (
    "it has no ids of groups",
    "no two prompts of a step have the same text (else source.group_by=order)",
)
NO_SIZE = (
    "it does not say how many rollouts each group should have",
    "each group should have 2, as most groups of the first step have",
)
TWO = ("it has the rewards accuracy, short", "their sum is the reward (else source.reward_key=accuracy)")
BY_PROMPT, SIZE, SUM = "source.group_by=prompt", "source.group_size=2", "pipeline.stages.collapse.columns=2"
WITH = {"short": [0.5, 0.25]}  # a second reward


@pytest.mark.parametrize(
    ("changes", "more", "why", "options"),
    [
        ({}, {}, [NO_IDS, NO_SIZE], [BY_PROMPT, SIZE]),
        ({"task": "plan"}, {}, [NO_IDS, NO_SIZE], [BY_PROMPT, SIZE]),
        ({}, WITH, [NO_IDS, NO_SIZE, TWO], [BY_PROMPT, SIZE, SUM]),
        ({"task": "audit"}, WITH, [NO_IDS, NO_SIZE, TWO], [BY_PROMPT, SIZE, SUM]),
        ({"task": "compare"}, WITH, [NO_IDS, NO_SIZE], [BY_PROMPT, SIZE]),
        ({"columns": 2}, WITH, [NO_IDS, NO_SIZE], [BY_PROMPT, SIZE]),
        ({"group_by": "prompt"}, {}, [NO_SIZE], [SIZE]),
        ({"group_by": "prompt", "size": 2}, {}, None, None),
        ({"group_by": "prompt", "size": 2}, WITH, [NO_SIZE, TWO], [SIZE, SUM]),
        ({"group_by": "prompt", "task": "audit"}, {}, None, None),
        ({"group_by": "prompt", "gate": None}, {}, None, None),
        ({"group_by": "prompt", "gate": None, "collapse": None}, WITH, None, None),
        ({"group_by": "prompt", "group_size": 2}, {}, None, None),
        ({"group_by": "prompt", "group_size": 2}, WITH, [TWO], [SUM]),
        ({"group_by": "prompt", "group_size": 2, "reward_key": "short"}, WITH, None, None),
    ],
)
def test_one_message_says_why_options_are_needed_and_when_they_fit(
    changes, more, why, options, tmp_path, monkeypatch
):
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # errors repeat the overrides of a command
    path = trl_dump(tmp_path / "completions_4.parquet", **more)
    given = {"columns": 1, "size": None, "gate": {}, "collapse": {}, "task": "replay"} | changes
    gate = given["gate"] if given["gate"] is None else {"group_size": given["size"]}
    collapse = given["collapse"] if given["collapse"] is None else {"columns": given["columns"]}
    source = {name: given[name] for name in ("group_by", "group_size", "reward_key") if name in given}
    stages = {"gate": gate, "collapse": collapse}
    config = {"task": given["task"], "source": {"path": str(path), **source}, "pipeline": {"stages": stages}}
    if why is None:
        assert open_configured(OmegaConf.create(config)).format == "trl"
        return
    reasons, conditions = (", and ".join(each) for each in zip(*why, strict=True))
    typed = " ".join(["headrace", f"task={given['task']}", f"source.path={path}", *options])
    with pytest.raises(ConfigError) as raised:
        open_configured(OmegaConf.create(config))
    said = f"{path}, a dump of trl: {reasons}. If {conditions}, "
    assert str(raised.value) == f"{said}type:\n{typed}"
    own = {BY_PROMPT: "'group_by': 'prompt'", SIZE: "'group_size': 2"}
    lacking = ", ".join(own[each] for each in options if each in own)
    todo = [f"source={{{lacking}}}"] * bool(lacking)
    todo += ["stages={'collapse': {'columns': 2}}"] * (SUM in options)
    with pytest.raises(ConfigError) as raised, said_in_python():
        open_configured(OmegaConf.create(config))
    assert str(raised.value) == f"{said}add {' and '.join(todo)}"


@pytest.mark.parametrize("source", [{}, {"path": None}, {"path": ""}])
def test_a_dump_needs_a_path(source):
    with pytest.raises(
        ConfigError, match=r"^a dump to read is required: source.path=FILE, FOLDER or a glob in quotes"
    ):
        open_configured(OmegaConf.create({"source": source}))
