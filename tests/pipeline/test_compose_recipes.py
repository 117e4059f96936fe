"""Recipes contain only what differs from others, and overrides change them."""

from __future__ import annotations

import inspect
from functools import cache

import pytest
from composed import configure
from omegaconf import OmegaConf
from recipes import NAMES

from headrace.pipeline import ConfigError, Pipeline, load_pipeline
from headrace.pipeline.composing.compose import TASKS, compose_config
from headrace.transforms.table import COLUMNS

pytestmark = pytest.mark.slow

GATE = "pipeline.stages.gate.group_size=2"


def advantage_of(batch, *overrides):
    return load_pipeline(GATE, "pipeline.stages.split.shuffle=false", *overrides)(batch)[
        "advantage"
    ].flatten()


def test_grpo_divides_by_std_and_dr_grpo_does_not(make_batch):
    batch = make_batch([1.0, 3, 5, 11], [0, 0, 1, 1])
    # ±1 / (√2 + ε) and ±3 / (√18 + ε)
    assert advantage_of(batch).tolist() == pytest.approx([-0.7071063, 0.7071063, -0.7071066, 0.7071066])
    assert advantage_of(batch, "pipeline=dr_grpo").tolist() == [-1, 1, -3, 3]


def test_grpo_masks_groups_without_variance_and_dapo_drops_them(make_batch):
    batch = make_batch([1.0, 3, 5, 5], [0, 0, 1, 1])
    assert len(load_pipeline(GATE)(batch)) == 4
    assert len(load_pipeline(GATE, "pipeline=dapo")(batch)) == 2


@cache
def nodes_of(recipe):
    return OmegaConf.to_container(configure("load", f"pipeline={recipe}").pipeline)["stages"]


def test_a_recipe_lists_only_what_differs():
    """Every option in a file differs from the option in the recipe that the file builds on."""
    for name in (name for name in NAMES if name != "grpo"):
        written = OmegaConf.to_container(OmegaConf.load(f"conf/pipeline/{name}.yaml"))
        builds_on, *added = [entry for entry in written["defaults"] if entry != "_self_"]
        base = builds_on if isinstance(builds_on, str) else next(iter(builds_on))
        below = nodes_of(base.removeprefix("/pipeline/").removesuffix("@_here_"))
        for key, value in (item for entry in added for item in entry.items()):
            folder, _, place = key.removeprefix("override ").partition("@stages.")
            stage, _, option = place.partition(".")
            node = OmegaConf.to_container(OmegaConf.load(f"conf{folder}/{value}.yaml"))
            below = below | {stage: {**below[stage], option: node} if option else node}
        for stage, options in written.get("stages", {}).items():
            if options is None:
                assert below[stage] is not None, (name, stage)
            for option, value in (options or {}).items():
                if isinstance(value, dict):  # options of a criterion, or of a term
                    assert all(below[stage][option].get(inner) != value[inner] for inner in value), name
                else:
                    assert below[stage][option] != value, f"{name}: {stage}.{option} is {value!r} already"


def test_recipes_have_every_option_of_the_pipeline_at_its_default():
    node = configure("load").pipeline
    parameters = inspect.signature(Pipeline).parameters
    assert set(node) - {"_target_", "stages"} == set(parameters) - {"stages"}
    assert set(node["columns"]) == set(COLUMNS)
    for option in set(parameters) - {"stages", "columns", "order"}:
        default = parameters[option].default
        assert node[option] == (list(default) if isinstance(default, tuple) else default)


def test_each_recipe_says_its_order():
    """With an order, a stage without a place is refused, and `after` cannot move a stage of the recipe."""
    for name in NAMES:
        node = configure("load", f"pipeline={name}").pipeline
        assert {stage for stage, own in node.stages.items() if own} <= set(node.order), name


def test_a_stage_can_be_deleted_and_moved():
    deleted, moved = "~pipeline.stages.filter", "pipeline.order=[collapse,gate,filter,advantage,split,weight]"
    order = ["collapse", "gate", "advantage", "split", "weight"]
    assert load_pipeline(deleted, moved).order == order


def test_an_empty_name_is_refused_before_any_rollout():
    with pytest.raises(ConfigError, match=r"'pipeline\.\.stages=1' is not NAME=VALUE"):
        load_pipeline("pipeline..stages=1")


@pytest.mark.parametrize(
    ("name", "override", "said"),
    [
        (
            "config",
            "pipeline=[grpo,rloo]",
            "pipeline=[grpo,rloo] has several recipes (did you mean task=compare 'pipelines=[grpo,rloo]'?)",
        ),
        ("config", "+seed=1", "seed is there already, and needs no + (did you mean seed=1?)"),
        (
            "config",
            "task=rloo",
            f"unknown task 'rloo' (did you mean pipeline=rloo?); choose from {', '.join(TASKS)}",
        ),
        ("config", "sed=1", "unknown option 'sed' (did you mean seed=1?); CHOOSE"),
        ("config", "train.step=2", "unknown option 'train.step' (did you mean train.steps=2?); CHOOSE"),
        ("load", "sed=1", "unknown option 'sed' (did you mean pipeline.stages.split.seed=1?)"),
        ("load", "train.step=2", "unknown option 'train'; choose from pipeline"),
        ("load", "rows=nothing", "unknown rows 'nothing'; choose from llm"),
        (
            "load",
            "pipeline.stages.gate.group_sze=1",
            "unknown option 'pipeline.stages.gate.group_sze' (did you mean pipeline.stages.gate.group_size"
            "=1?); CHOOSE",
        ),
    ],
)
def test_an_override_that_does_not_compose_is_refused_with_one_that_does(name, override, said):
    node = compose_config(name)
    for key in override.partition("=")[0].split(".")[:-1] if "CHOOSE" in said else ():
        node = node[key]
    with pytest.raises(ConfigError) as refused:
        compose_config(name, override)
    assert str(refused.value) == said.replace("CHOOSE", f"choose from {', '.join(node)}")


def test_loading_leaves_an_outer_hydra_application_unchanged():
    from hydra import compose, initialize_config_module

    with initialize_config_module("headrace.conf", version_base="1.3"):
        load_pipeline("pipeline=dapo")
        assert compose("config").seed == 0
