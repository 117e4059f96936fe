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


# The last override is an unknown option, and this one is meant. With a * the message also lists the options
# beside it.
MEANT = {
    "config sed=1": "seed=1*",
    "config ~sed": "~seed*",
    "load sed=1": "pipeline.stages.split.seed=1",
    "config train.step=2": "train.steps=2*",
    "config train.max-grad-norm=3": "train.max_grad_norm=3",
    "config max-grad-norm=1": "train.max_grad_norm=1",
    "config hydra.run.dri=x": "'hydra.run.dir' or 'hydra.sweep.dir'",
    "config recipe=grpo": "pipeline=grpo",
    "config scale_rewards=none": "pipeline.stages.advantage.scale=none",
    "config pipeline.stages.gate.group_sze=1": "pipeline.stages.gate.group_size=1*",
    "config pipeline.gate.group_size=8": "pipeline.stages.gate.group_size=8",
    "config pipeline.stages.gate.scale=mad": "pipeline.stages.advantage.scale=mad",
    "load pipeline.stages.filter.criteron.reward_key=1": " or ".join(
        f"pipeline.stages.{stage}.reward_key=1" for stage in ("collapse", "advantage", "split")
    ),
    "config num_generations=8": "group_size=8",
    "config filter.criterion=fresh": "pipeline.stages.filter.criterion=fresh",
    "config gaet.group_size=8": "pipeline.stages.gate.group_size=8",
    "config ~filter": "~pipeline.stages.filter",
    "load pipeline.stages.fliter=null": "~pipeline.stages.filter",
    "config sorce.group_by=prompt": "task=replay source.group_by=prompt",
    "config task=replay sorce.group_by=prompt": "source.group_by=prompt",
}


@pytest.mark.parametrize("words", MEANT)
def test_an_unknown_option_is_refused_with_the_one_that_is_meant(words):
    name, *overrides = words.split()
    key, node = overrides[-1].partition("=")[0].lstrip("~"), compose_config(name)
    meant = MEANT[words].removesuffix("*")
    for each in key.split(".")[:-1]:
        node = node.get(each, {})
    beside = f"; choose from {', '.join(node)}" * MEANT[words].endswith("*")
    with pytest.raises(ConfigError) as refused:
        compose_config(name, *overrides)
    assert str(refused.value) == f"unknown option {key!r} (did you mean {meant}?){beside}"


# What is composed, and the whole message.
REFUSED = {
    "load pipeline=Dr_GRPO": "unknown recipe 'Dr_GRPO' (did you mean 'dr_grpo'?); headrace recipes lists all",
    "load pipeline=as/vrl": (
        "unknown recipe 'as/vrl' (did you mean 'as/verl' or 'as/trl'?); headrace recipes lists all"
    ),
    "load pipeline=replay": "unknown recipe 'replay' (did you mean task=replay?); headrace recipes lists all",
    "load pipeline=nothing sed=1": "unknown recipe 'nothing'; headrace recipes lists all",
    "config task=rloo": "unknown task 'rloo' (did you mean pipeline=rloo?); choose from TASKS",
    "config task=repaly": "unknown task 'repaly' (did you mean 'replay'?); choose from TASKS",
    "config task=zzz": "unknown task 'zzz'; choose from TASKS",
    "load rows=nothing": "unknown rows 'nothing'; choose from llm",
    "config task=xray xray=trlx": (
        "unknown xray 'trlx' (did you mean 'trl' or 'torchrl'?); choose from mine, ms_swift, openrlhf, "
        "torchrl, trl, verl"
    ),
    "config seed==1": "'seed==1' is not NAME=VALUE (did you mean seed=1?); IN_QUOTES",
    "config seed=[1": "'seed=[1' is not NAME=VALUE; IN_QUOTES",
    "load pipeline..stages=1": "'pipeline..stages=1' is not NAME=VALUE; IN_QUOTES",
    "config device=cpu pipeline=[grpo,rloo]": (
        "pipeline=[grpo,rloo] has several recipes (did you mean task=compare 'pipelines=[grpo,rloo]'?)"
    ),
    "config task=compare pipeline=grpo,rloo": (
        "pipeline=grpo,rloo has several recipes (did you mean 'pipelines=[grpo,rloo]'?)"
    ),
    "config task=compare seed=1,2": (
        "seed=1,2 has several values. For a sweep: headrace -m seed=1,2. For a list: 'seed=[1,2]', in quotes"
    ),
    "config pipeline=grpo,rloo": (
        "pipeline=grpo,rloo has several values. For a sweep: headrace -m pipeline=grpo,rloo. For a list: "
        "'pipeline=[grpo,rloo]', in quotes"
    ),
    "config train.steps=2 +seed=1": "seed is there already, and needs no + (did you mean seed=1?)",
    "load criterion@pipeline.stages.filter.also=fresh": (
        "criterion@pipeline.stages.filter.also=fresh: the recipe names no file there (did you mean "
        "+criterion@pipeline.stages.filter.also=fresh, which adds it?)"
    ),
    "load rows=llm criterion@pipeline.stages.fliter.criterion=fresh": (
        "criterion@pipeline.stages.fliter.criterion=fresh: the recipe names no file there (did you mean "
        "criterion@pipeline.stages.filter.criterion=fresh?)"
    ),
    "load pipeline=as/trl criterion@pipeline.stages.filter.criterion=fresh": (
        "criterion@pipeline.stages.filter.criterion=fresh: the recipe has no stage 'filter'; its stages are "
        "gate, collapse, advantage, split, weight"
    ),
    "config zzz=1": "unknown option 'zzz'; choose from NAMES",
    "load train.step=2": "unknown option 'train'; choose from pipeline",
    "config overlnog.max_length=8": (
        "unknown option 'overlnog.max_length': pipeline=grpo has no stage 'overlong'; it has STAGES"
    ),
    "config task=replay overlnog.max_length=8 pipeline=as/verl": (
        "unknown option 'overlnog.max_length': pipeline=as/verl has no stage 'overlong'; it has "
        "gate, collapse, advantage, split, weight"
    ),
    "config pipeline.stages.second.action=drop": (
        "unknown option 'pipeline.stages.second.action' (did you mean pipeline.stages.filter.action=drop?). "
        "To add one, name one of `headrace stages`, or the path of a class: pipeline.stages.second=filter "
        "(in Python stages={'second': {'_target_': 'filter', ...}})"
    ),
    "config pipeline.stages.second.zzz=drop": (
        "pipeline.stages.second.zzz=drop: the recipe has no stage 'second'; its stages are STAGES. To add "
        "one, name one of `headrace stages`, or the path of a class: pipeline.stages.second=NAME (in Python "
        "stages={'second': {'_target_': 'NAME', ...}})"
    ),
    "config task=replay train.steps=3": "unknown option 'train.steps' here: it is an option of task=train",
    "config task=replay group_size=3": (
        "unknown option 'group_size' here: it is an option of task=train; for a dump set source.group_size=3"
    ),
    "config source=dump": (
        "unknown option 'source' here: it is an option of task=replay and task=compare and task=plan and "
        "task=audit"
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_an_override_that_does_not_compose_is_refused_with_the_reason(words):
    (name, *overrides), said = words.split(), REFUSED[words]
    whole = compose_config(name)
    for word, names in (("TASKS", TASKS), ("STAGES", whole.pipeline.stages), ("NAMES", whole)):
        said = said.replace(word, ", ".join(names))
    with pytest.raises(ConfigError) as refused:
        compose_config(name, *overrides)
    assert str(refused.value) == said.replace("IN_QUOTES", "put values with brackets or spaces in quotes")


def test_an_override_in_python_is_refused_in_the_words_of_python():
    for word, said in (
        ("pipeline=nothing", "unknown recipe 'nothing'; headrace.recipes() lists all"),
        (
            "pipeline.empty=a,b",
            "pipeline.empty=a,b has several values. For a list: 'pipeline.empty=[a,b]', in quotes",
        ),
    ):
        with pytest.raises(ConfigError) as refused:
            load_pipeline(word)
        assert str(refused.value) == said


def test_loading_leaves_an_outer_hydra_application_unchanged():
    from hydra import compose, initialize_config_module

    with initialize_config_module("headrace.conf", version_base="1.3"):
        load_pipeline("pipeline=dapo")
        assert compose("config").seed == 0
