"""A recipe is composed once in a process. Overrides give what Hydra composes from the files."""

from __future__ import annotations

from itertools import cycle

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from recipes import FEW, NAMES, of

from headrace.pipeline import ConfigError, load_pipeline
from headrace.pipeline.composing.compose import compose_config, explain_composition, refuse_parts_of_no_stage
from headrace.pipeline.composing.nodes import resolved

OVERRIDES = [
    ("pipeline.stages.gate.group_size=8",),
    ("pipeline.stages.split.minibatches=null", "pipeline.stages.split.minibatch_size=4"),
    ("pipeline.stages.split.minibatches=2", "pipeline.stages.split.minibatches=3"),
    ("pipeline.columns.reward=score", "pipeline.group_key=[next,uid]", "pipeline.empty=count"),
    ("pipeline.stages.collapse.missing=mask", "pipeline.stages.split.ranks=2"),
    ("pipeline.stages.weight.unit=${.fold}", "pipeline.stages.gate.group_size=${..split.ranks}"),
    ("pipeline.stages.gate=null",),
    ("pipeline.stages.filter=null", "pipeline.stages.filter={_target_: my.Filter}"),
    ("+pipeline.stages.bonus={_target_: my.module.Bonus, low: 1}", "+pipeline.stages.gate.more.deep=2"),
    ("++pipeline.stages.bonus.low=1", "~pipeline.stages.gate.group_size"),
    ("criterion@pipeline.stages.filter.criterion=not_truncated", "pipeline.stages.filter.action=drop"),
    ("+criterion@pipeline.stages.filter.also=fresh", "pipeline.stages.filter.also.current=3"),
    ("rows=llm", "pipeline.stages.dense.pad_id=0"),
    # these are refused
    ("pipeline.stages.gate.gruop_size=8",),
    ("pipeline.stages.gate.group_size=8", "+pipeline.stages.gate.group_size=8"),
    ("+pipeline.stages.gate.group_size=8",),
    ("~pipeline.stages.gate.group=8", "~pipeline.stages.none"),
    ("pipeline.stages.gate.group_size=4,8",),
    ("pipeline.stages.gate.group_size==8",),
    ("pipeline.columns=3", "pipeline.columns.reward=score"),
    ("pipeline.stages.gate.group_size=[1", "rows=none"),
    ("hydra.verbose=true", "pipeline.stages.gate.group_size=8"),
]


def from_the_files(overrides):
    """The configuration as plain values and the flags of each container, or the message of an error."""
    try:
        with initialize_config_module("headrace.conf", version_base="1.3"):
            config = compose("load", list(overrides))
        refuse_parts_of_no_stage(config, overrides)
    except (HydraException, OmegaConfBaseException) as err:
        return explain_composition(err, overrides, "load")
    except ConfigError as err:
        return str(err)
    return described(config)


def from_what_is_known(overrides):
    try:
        return described(compose_config("load", *overrides))
    except ConfigError as err:
        return str(err)


def described(config):
    flags = {path: (node._get_flag("struct"), node._get_flag("readonly")) for path, node in nodes(config)}
    return OmegaConf.to_container(config), flags


def nodes(config, path=""):
    yield path, config
    for name in config if OmegaConf.is_dict(config) else ():
        inner = config._get_node(name)
        if OmegaConf.is_config(inner) and not inner._is_none() and not inner._is_interpolation():
            yield from nodes(inner, f"{path}.{name}")


def check(recipe, overrides):
    words = (f"pipeline={recipe}", *overrides)
    expected = from_the_files(words)
    for number in (1, 2):  # the first call may compose
        with of(f"{number}: {words}"):
            assert from_what_is_known(words) == expected


def test_overrides_of_a_known_recipe_equal_those_of_its_files():
    for overrides in OVERRIDES:
        check("grpo", overrides)


@pytest.mark.slow
def test_overrides_of_any_known_recipe_equal_those_of_its_files():
    """Each fourth recipe gets one set of overrides, because composing from the files takes long."""
    for recipe, overrides in zip(NAMES[::4], cycle(OVERRIDES), strict=False):
        check(recipe, overrides)


def test_a_change_of_a_composed_configuration_changes_no_other():
    first = compose_config("load", "pipeline=grpo")
    first.pipeline.stages.advantage.scale = "none"
    assert compose_config("load", "pipeline=grpo").pipeline.stages.advantage.scale == "group"


def test_values_resolve_as_omegaconf_resolves_them():
    for recipe in FEW:
        node = compose_config("load", f"pipeline={recipe}").pipeline
        with of(recipe):
            assert resolved(node) == OmegaConf.to_container(node, resolve=True)


def test_a_file_in_a_search_path_is_read_each_time(tmp_path):
    (tmp_path / "pipeline").mkdir()
    file = tmp_path / "pipeline" / "own.yaml"
    for scale in ("none", "batch"):
        file.write_text(f"defaults: [grpo, _self_]\nstages: {{advantage: {{scale: {scale}}}}}\n")
        pipeline = load_pipeline("own", f"hydra.searchpath=[file://{tmp_path}]")
        assert pipeline.stages["advantage"].scale == scale
