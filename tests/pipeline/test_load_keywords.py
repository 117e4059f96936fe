"""load_pipeline takes overrides as typed keywords, and its errors name the option."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import typing
from types import EllipsisType

import pytest
from omegaconf import DictConfig, OmegaConf

from headrace.adapters import attach
from headrace.pipeline import ConfigError, Decider, build_pipeline, decide, load_pipeline
from headrace.pipeline.composing.compose import compose_config, recipes
from headrace.pipeline.composing.recipe_names import Recipe
from headrace.pipeline.load import KEYWORDS, PipelineOptions, settings_of
from headrace.transforms import LengthWithin, NotTruncated, RewardShaping, SampleFilter, SignFactors
from headrace.transforms.table.annotations import annotations_of

pytestmark = pytest.mark.slow

# For each keyword, a value that no recipe has, and this value in an override.
VALUES = {
    "group_size": (13, "13"),
    "on_incomplete": ("drop", "drop"),
    "min_rollouts": (3, "3"),
    "missing": ("mask", "mask"),
    "reward": ("max", "max"),
    "baseline": ("best_other", "best_other"),
    "scale": ("mad", "mad"),
    "minibatches": (7, "7"),
    "microbatches": (3, "3"),
    "max_tokens": (1 << 14, "16384"),
    "ranks": (2, "2"),
    "rank": (0, "0"),
    "shuffle": (False, "false"),
    "seed": (11, "11"),
    "loss_unit": ("sample", "sample"),
    "order": (["gate", "split"], "[gate,split]"),
    "after": ({"mine": "gate"}, "{mine: gate}"),
    "before": ({"mine": "gate"}, "{mine: gate}"),
    "columns": ({"reward": "score", "turn": ("mine", "turn")}, "{reward: score, turn: [mine, turn]}"),
    "group_key": (("mine", "group"), "[mine,group]"),
    "rollout_key": (None, "null"),
    "loss_mask_key": ("mask", "mask"),
    "log_prob_key": (None, "null"),
    "process_group": ("world", "world"),
    "shared_ids": ("different", "different"),
    "patience": (2.5, "2.5"),
    "masked_log_prob": ("keep", "keep"),
    "empty": ("count", "count"),
}


@pytest.fixture
def node(monkeypatch):
    """`load_pipeline`, which here returns the configuration that it would build."""
    monkeypatch.setattr("headrace.pipeline.load.build_pipeline", lambda config: config)
    return load_pipeline


def has(pipeline: DictConfig, key: str) -> bool:
    stage = key.split(".")[1] if key.startswith("stages.") else None
    return stage is None or pipeline.stages.get(stage) is not None


@pytest.mark.parametrize("recipe", ["as/miles", "mt_grpo", "tree_grpo"])
def test_keywords_equal_their_overrides(recipe, node):
    plain = compose_config("load", f"pipeline={recipe}").pipeline
    taken = {word: key for word, key in KEYWORDS.items() if has(plain, key)}
    assert len(taken) >= len(KEYWORDS) - 2
    by_keyword = node(recipe, **{word: VALUES[word][0] for word in taken})
    by_override = node(f"pipeline={recipe}", *(f"pipeline.{key}={VALUES[w][1]}" for w, key in taken.items()))
    assert OmegaConf.to_container(by_keyword) == OmegaConf.to_container(by_override)
    assert by_keyword != plain
    for word in KEYWORDS.keys() - taken.keys():
        with pytest.raises(
            ConfigError, match=rf"no stage 'advantage'.*; its stages are gate, collapse, .*{'split'}"
        ):
            node(recipe, **{word: VALUES[word][0]})


def test_an_omitted_keyword_keeps_the_value_of_the_recipe(node):
    assert node("rloo", **dict.fromkeys(KEYWORDS, ...)) == node("rloo") == node("pipeline=rloo")
    assert node() == node("grpo")


def test_any_option_of_any_stage_can_be_set(node):
    found = node(
        "as/verl",
        stages={
            "advantage": {"clip": (-5, 5.0)},
            "collapse": None,
            "filter": {"_target_": "headrace.transforms.SampleFilter", "criterion": {"_target_": "my.Own"}},
            "bonus": {"_target_": "my.Bonus", "by": 2},
        },
        scale="none",
        order=["bonus"],
    )
    advantage = node("as/verl", "pipeline.stages.advantage.clip=[-5,5.0]", scale="none").stages.advantage
    assert found.stages.advantage == advantage
    assert found.stages.collapse is None
    assert found.stages.filter == {
        "_target_": "headrace.transforms.SampleFilter",
        "criterion": {"_target_": "my.Own"},
    }
    assert found.stages.bonus == {"_target_": "my.Bonus", "by": 2}
    replaced = node("grpo", stages={"filter": {"_target_": "my.Other"}})
    assert replaced.stages.filter == {"_target_": "my.Other"}, "no old option remains"


def test_a_value_that_yaml_reads_otherwise_is_the_one_that_is_meant():
    """The node of columns is no null, and Hydra reads the word nan as a number."""
    found = load_pipeline("grpo", "pipeline.masked_log_prob=nan", columns=None)
    assert (found.masked_log_prob, found.columns) == ("nan", load_pipeline("grpo").columns)


def test_rows_is_a_keyword():
    pipeline = load_pipeline("grpo", rows="llm", stages={"dense": {"pad_id": 0}}, minibatches=4)
    assert pipeline.order[0] == "dense"
    by_override = load_pipeline(
        "pipeline=grpo",
        "rows=llm",
        "pipeline.stages.dense.pad_id=0",
        "pipeline.stages.split.minibatches=4",
    )
    assert repr(pipeline) == repr(by_override)


BY = "+pipeline.stages.split"


@pytest.mark.parametrize(
    ("words", "keywords", "message"),
    [
        (["grp"], {}, r"unknown recipe 'grp' \(did you mean 'grpo'"),
        (["grpo", "rloo"], {}, "KEY=VALUE; got 'rloo'. .* one recipe, here 'grpo'"),
        (["grpo", "pipeline=rloo"], {}, "pipeline is set twice, by pipeline=grpo and by pipeline=rloo"),
        (["grpo"], {"groupsize": 8}, r"no keyword 'groupsize' \(did you mean 'group_size'.*are rows"),
        (["grpo", 8], {}, "KEY=VALUE; got 8. Give options by keyword, such as group_size=8"),
        (["grpo"], {"clip": 8}, r"no keyword 'clip'; set it as stages={'advantage': {'clip': 8}}"),
        (["grpo"], {"advantage": {"clip": 8}}, r"'advantage'; set it as stages={'advantage': {'clip': 8}}"),
        (["grpo"], {"reward": "avg"}, r"'max' \(did you mean 'mean'\?\); got 'avg'"),
        (
            ["grpo"],
            {"stages": {"filter": {"also": ["finite", "fresh"]}}},
            r"filter.also must be one criterion; .*stages={'second': {.*}}, after={'second': 'filter'}$",
        ),
        (["grpo"], {"stages": {"filter": {"criterion": (len, any)}}}, "criterion must be one criterion; got"),
        (["grpo"], {"reward_key": "score"}, r"'reward_key'; set it as columns={'reward': 'score'}"),
        ([{"gate": {}}], {}, r"a recipe is a name, such as 'grpo'; got a dict.* columns to headrace.decide"),
        (["grpo"], {"columns": ["uid"]}, r"columns must be a mapping, .*; got \['uid'\]$"),
        (["grpo"], {"stages": [0] * 4000}, r"^stages must be a mapping .{0,300}$"),
        (
            ["grpo"],
            {"stages": {"advantge": {"clip": None}}},
            r"no stage 'advantge' \(did you mean 'advantage'\?\); its stages are gate",
        ),
        (
            ["grpo"],
            {"stages": {"advantage": {"clp": None}}},
            r"pipeline.stages.advantage .*no option 'clp' \(did you mean 'clip'",
        ),
        (["grpo"], {"stages": {"signs": None}}, r"stages\.signs: the recipe has no stage 'signs'; its"),
        (["as/verl"], {"stages": {"filter": {"action": "drop"}}}, "no stage 'filter'; its stages are gate, "),
        (["grpo"], {"scale": "nose"}, "scale must be one of 'group'"),
        (["grpo"], {"stages": {"filter": 3}}, r"^stages\['filter'\] must be a mapping .*, or None; got 3$"),
        (["grpo", "pipeline.stages=3"], {}, "stages must map names to nodes with a _target_; got 3$"),
        (["grpo", "pipeline.patience=???"], {}, "is not complete: pipeline.patience has no value: set pipel"),
        (["grpo", f"{BY}.by_column=kind"], {}, "by_column='kind' and values=None$"),
        (["grpo", f"{BY}.values={{a: {{}}}}"], {}, "by_column=None and values={'a': {}}$"),
        (["grpo", f"{BY}.by_column=kind", f"{BY}.values={{}}"], {}, "values={}$"),
        (
            ["grpo", f"{BY}.by_column=kind", f"{BY}.values={{a: {{}}, b: 3}}"],
            {},
            "^pipeline.stages.split.values.b must map options; got 3$",
        ),
        (["grpo"], {"seed": object()}, "seed must be a value that YAML has, or a callable; got <object"),
        (["grpo", "pipeline.stages.split.seed=1"], {"seed": 1}, "split.seed is set twice, by seed=1 and by"),
        (["grpo", "~pipeline.stages.split"], {"seed": 1}, "twice, by seed=1 and by .*split=null"),
        (["pipeline.stages.split={seed: 4}"], {"seed": 1}, "twice, by seed=1 and by .*split={"),
        (["grpo"], {"seed": 1, "stages": {"split": {"seed": 2}}}, r"stages.'split'..'seed'. and by seed=1"),
        (["grpo"], {"seed": 1, "stages": {"split": None}}, r"twice, by stages\['split'\] and by seed=1"),
        (
            ["grpo", "criterion@pipeline.stages.filter.criterion=finite"],
            {"stages": {"filter": {"criterion": {"_target_": "my.Own"}}}},
            "is set twice",
        ),
    ],
)  # fmt: skip
def test_unknown_or_repeated_options_are_refused(words, keywords, message):
    with pytest.raises(ConfigError, match=message):
        load_pipeline(*words, **keywords)


def test_options_of_other_nodes_do_not_conflict():
    assert settings_of(["pipeline=grpo", "seed=3", "rows=null"], {"seed": 1}, {}) == {"stages.split.seed": 1}


def test_keywords_have_the_types_of_the_stages_and_are_documented():
    """Each keyword takes exactly the values of the option that it sets."""
    hints = typing.get_type_hints(PipelineOptions)
    parameters = inspect.signature(load_pipeline).parameters
    by_keyword = {name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
    assert by_keyword == {*KEYWORDS, "rows", "stages"} == {*VALUES, "rows", "stages"}
    plain = compose_config("load").pipeline
    for word, key in KEYWORDS.items():
        *path, option = key.split(".")
        target = OmegaConf.select(plain, ".".join(path)) if path else plain
        module, _, name = target["_target_"].rpartition(".")
        owner = getattr(importlib.import_module(module), name)
        theirs = annotations_of(owner)[option]
        if word == "process_group":  # a keyword takes only the name of a group
            assert literals(hints[word]) == {"world"}
            continue
        assert members(hints[word]) == members(theirs), word
        assert re.search(rf"^ +{word}: ", load_pipeline.__doc__, re.MULTILINE), word


@pytest.mark.parametrize("function", [load_pipeline, decide, Decider, attach])
def test_help_shows_the_keywords_of_each_function_that_loads_a_pipeline(function):
    parameters = inspect.signature(function).parameters
    assert {*PipelineOptions.__annotations__} <= {*parameters}
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters.values())


def members(hint) -> set:
    """The parts of a hint, whether it is a union, a Literal or a single type."""
    return set(typing.get_args(hint | EllipsisType)) - {EllipsisType}


def literals(hint) -> set:
    return {
        value for part in typing.get_args(hint) for value in typing.get_args(part) if isinstance(value, str)
    }


def test_editors_complete_every_recipe():
    assert list(typing.get_args(Recipe)) == recipes()


ORDER = ["gate", "collapse", "filter", "advantage", "whitening", "split", "weight"]
IN_ORDER = f"pipeline.order=[{','.join(ORDER)}]"


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ((), {"stages": {"filter": {}}, "order": ORDER}),
        ((), {"stages": {"filter": {}}, "after": {"filter": "collapse"}}),
        ((), {"stages": {"filter": "filter"}, "order": ORDER}),
        (("pipeline.stages.filter={}", IN_ORDER), {}),
        (("pipeline.stages.filter=filter",), {"order": ORDER}),
    ],
)
def test_a_stage_without_options_is_the_usual_stage(overrides, options):
    """GDPO has no filter. The usual filter of GRPO then looks at each reward, as the advantage does."""
    found = load_pipeline("gdpo", *overrides, **options)
    assert list(found.stages) == ORDER
    assert repr(found.stages["filter"]) == "SampleFilter(criterion=RewardsVary(several='decoupled'))"


def test_options_of_a_stage_that_the_recipe_lacks_change_the_usual_stage():
    options = ("pipeline.stages.filter={action: exclude}", "+pipeline.stages.whitening={per: sample}")
    found = load_pipeline("grpo", *options, order=ORDER).stages
    assert (found["filter"].action, found["whitening"].per) == ("exclude", "sample")


MINE = "{_target_: headrace.transforms.SignFactors, negative: 0.5}"
PLACE = "pipeline.after.mine=advantage"
WITH_MINE = ["gate", "collapse", "filter", "advantage", "mine", "split", "weight"]


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ((), {"stages": {"mine": SignFactors(negative=0.5)}, "after": {"mine": "advantage"}}),
        ((), {"stages": {"mine": SignFactors(negative=0.5)}, "before": {"mine": "split"}}),
        ((PLACE,), {"stages": {"mine": SignFactors(negative=0.5)}}),
        ((f"pipeline.stages.mine={MINE}", PLACE), {}),
        ((f"+pipeline.stages.mine={MINE}", PLACE), {}),
        ((f"+pipeline.stages.mine={MINE}", f"+{PLACE}"), {}),
        ((f"pipeline.stages.mine={MINE}", "pipeline.after={mine: advantage}"), {}),
        (("+stage@pipeline.stages.mine=signs", "pipeline.stages.mine.negative=0.5", PLACE), {}),
        ((f"pipeline.stages.mine={MINE}",), {"order": WITH_MINE}),  # the whole order can still be given
    ],
)
def test_a_new_stage_is_inserted_by_the_name_of_its_neighbour(overrides, options):
    pipeline = load_pipeline("grpo", *overrides, **options)
    assert pipeline.order == WITH_MINE
    assert repr(pipeline.stages["mine"]) == "SignFactors(negative=0.5)"


def test_options_of_a_placed_stage_change_the_usual_stage():
    found = load_pipeline("grpo", stages={"signs": {"negative": 0.5}}, after={"signs": "advantage"})
    assert repr(found.stages["signs"]) == "SignFactors(negative=0.5)"


def test_a_recipe_inserts_a_stage_by_the_name_of_its_neighbour(tmp_path):
    folder = tmp_path / "pipeline"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        "defaults: [grpo, /stage@stages.signs: signs, _self_]\nafter: {signs: advantage}\n"
    )
    (folder / "more.yaml").write_text(
        "defaults: [mine, /stage@stages.overlong: overlong, _self_]\nbefore: {overlong: advantage}\n"
        "stages: {overlong: {max_length: 8, cache: 4}}\n"
    )
    path = f"hydra.searchpath=[file://{tmp_path}]"
    order = ["gate", "collapse", "filter", "advantage", "signs", "split", "weight"]
    assert load_pipeline("mine", path).order == order
    assert load_pipeline("more", path).order == [*order[:3], "overlong", *order[3:]]
    assert load_pipeline("mine", path, "pipeline.after.signs=null", order=order).order == order
    assert load_pipeline("mine", path, "~pipeline.stages.signs").order == load_pipeline("grpo").order
    with pytest.raises(ConfigError, match=r"^pipeline\.after\.signs=advantage places a stage that pipeline"):
        load_pipeline("mine", path, order=order)


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (("pipeline.stages.fliter={action: drop}",), {}, r"no stage 'fliter' \(did you mean 'filter'\?\)"),
        ((f"pipeline.stages.fliter={MINE}",), {}, r"it lacks 'fliter' \(did you mean 'filter'"),
        ((PLACE,), {}, r"^pipeline\.after\.mine=advantage names the unknown stage 'mine'"),
        ((PLACE,), {"after": {"mine": "gate"}}, "after is set twice, by .* and by pipeline.after.mine=adv"),
        ((), {"after": "advantage"}, "pipeline.after must be a mapping, .* or None; got 'advantage'"),
        (("pipeline.after.mine=",), {"stages": {"mine": print}}, "names the unknown stage ''"),
    ],
)
def test_a_place_without_a_stage_or_a_stage_without_a_place_is_refused(overrides, options, message):
    with pytest.raises(ConfigError, match=message):
        load_pipeline("grpo", *overrides, **options)


@pytest.mark.parametrize(
    ("words", "stages"),
    [(["~pipeline.stages.filter"], {}), (["pipeline.stages.filter=null"], {}), ([], {"filter": None})],
)
def test_an_order_may_name_a_stage_that_the_caller_removes(words, stages):
    order = ["gate", "collapse", "filter", "advantage", "split", "weight"]
    found = load_pipeline("grpo", *words, stages=stages, order=order)
    assert found.order == [name for name in order if name != "filter"]
    for typed, options in (((), {"order": [*order, "whitening"]}), ((IN_ORDER,), {})):
        with pytest.raises(ConfigError) as refused:
            load_pipeline("gdpo", *typed, stages={"whitening": None}, **options)
        assert str(refused.value) == (
            "pipeline.order names 'filter', which the recipe has set to null. To add the usual stage: "
            "stages={'filter': {}}"
        )


def test_errors_name_the_place_of_a_pipeline_in_another_configuration():
    config = OmegaConf.create({"algo": {"rl": compose_config("load", "pipeline=grpo").pipeline}})
    for path, value, said in (
        ("stages.advantage.eps", -1, "algo.rl.stages.advantage.eps must be finite and ≥ 0; got -1"),
        ("stages.advantage.scale", "no", "algo.rl.stages.advantage.scale must be"),
        ("order", ["gate"], "algo.rl.order must name each stage once"),
        ("stages.mine", {"a": 1}, "algo.rl.stages.mine: the recipe has no stage 'mine'; its stages are"),
        ("stages.mine", 3, "algo.rl.stages.mine must be a name, a node with a _target_, or null; got 3"),
    ):
        wrong = copy.deepcopy(config)
        OmegaConf.update(wrong, f"algo.rl.{path}", value, force_add=True)
        with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
            build_pipeline(wrong.algo.rl)
    assert build_pipeline(config.algo.rl).order == load_pipeline("grpo").order


class KeepsReward(RewardShaping):
    """A stage that must be between the collapse and the advantage."""

    def shape(self, reward, rollouts):
        return reward


@pytest.mark.parametrize(
    ("stage", "place"), [(KeepsReward(), "collapse"), ({}, "advantage"), (lambda batch: batch, "advantage")]
)
def test_the_place_that_an_error_advises_is_accepted(stage, place):
    with pytest.raises(ConfigError) as info:
        load_pipeline("grpo", stages={"signs": stage})
    assert f"(in Python after={{'signs': '{place}'}})" in str(info.value)
    option = str(info.value).rpartition("as in ")[2].partition(" ")[0]
    for typed, options in (((option,), {}), ((), {"after": {"signs": place}})):
        order = load_pipeline("grpo", *typed, stages={"signs": stage}, **options).order
        assert order[order.index(place) + 1] == "signs"


SAME = {"_target_": "filter", "criterion": {"_target_": "length_within", "high": 3}, "action": "drop"}


def of_second(words: str) -> list[str]:
    """Overrides of the stage `second`."""
    return re.sub(r"\bsecond(?=[.=])", "pipeline.stages.second", words).split()


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        ("second=filter second.action=drop second.criterion={_target_:length_within,high:3}", {}),
        ("second.criterion.high=3 second.criterion=length_within second.action=drop +second=filter", {}),
        ("second={_target_:filter,action:drop} +criterion@second.criterion=length_within "
         "second.criterion.high=3", {}),
        ("second=headrace.transforms.SampleFilter second.criterion=headrace.transforms.LengthWithin "
         "second.criterion.high=3 second.action=drop", {}),
        ("", {"second": SAME}),
        ("", {"second": SAME | {"criterion": LengthWithin(high=3)}}),
        ("", {"second": SampleFilter(criterion=LengthWithin(high=3), action="drop")}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("recipe", ["grpo", "as/trl"])  # with and without a first filter
def test_a_second_filter_has_its_own_name(recipe, words, stages):
    pipeline = load_pipeline(recipe, *of_second(words), stages=stages, after={"second": "collapse"})
    assert pipeline.order[:3] == ["gate", "collapse", "second"]
    assert repr(pipeline.stages["second"]) == "SampleFilter(criterion=LengthWithin(high=3), action='drop')"


def test_a_recipe_can_add_a_second_filter(tmp_path):
    (tmp_path / "pipeline").mkdir()
    for second in ("filter", "{_target_: filter, criterion: not_truncated, unit: rollout}"):
        text = f"defaults: [grpo, _self_]\nafter: {{second: filter}}\nstages: {{second: {second}}}\n"
        (tmp_path / "pipeline" / "mine.yaml").write_text(text)
        stages = load_pipeline("mine", f"hydra.searchpath=[file://{tmp_path}]").stages
        plain = second == "filter"
        wanted = stages["filter"] if plain else SampleFilter(criterion=NotTruncated(), unit="rollout")
        assert repr(stages["second"]) == repr(wanted)


@pytest.mark.parametrize(
    ("words", "stages", "message"),
    [
        ("second={action:drop}", {}, "no stage 'second'; .*To add one.*: pipeline.stages.second=filter"),
        ("second.action=drop", {}, "did you mean .*To add one.*: pipeline.stages.second=filter"),
        ("second.criterion.high=3", {}, "To add one.*: pipeline.stages.second=filter"),
        ("", {"second": {"negative": 0.5}}, "To add one.* stages={'second': {'_target_': 'signs', ...}}"),
        ("second=fliter", {}, r"second: unknown stage 'fliter' \(did you mean 'filter'"),
        ("second=SampleFilter", {}, r"unknown stage 'SampleFilter' \(did you mean 'filter'\?\)"),
        ("second=fresh", {}, "a criterion: did you mean .*second=filter .*second.criterion=fresh"),
        ("second=log_ratio", {}, "a term: did you mean .*second=token_advantage .*second.term=log_rat"),
        ("second=filter second.acton=drop", {}, r"has no option 'acton' \(did you mean 'action'"),
        (
            "second=filter",
            {"second": {"action": "drop"}},
            "is set twice, .* by pipeline.stages.second=filter",
        ),
    ],
)
def test_the_error_for_options_of_an_unknown_stage_says_how_to_add_it(words, stages, message):
    with pytest.raises(ConfigError, match=message):
        load_pipeline("grpo", *of_second(words), stages=stages, after={"second": "filter"})


def test_a_part_takes_no_option_from_the_part_that_it_replaces():
    node = {"_target_": "headrace.transforms.NotTruncated"}  # the usual criterion has more options
    found = load_pipeline("gdpo", stages={"filter": {"criterion": node}}, after={"filter": "collapse"})
    assert repr(found.stages["filter"]) == "SampleFilter(criterion=NotTruncated())"
    assert repr(load_pipeline("grpo", "pipeline.stages.advantage=gae").stages["advantage"]) == "GAE()"


def test_the_path_of_a_class_must_be_that_of_a_stage():
    for stage, said in (
        ("fractions.Fractio", "fractions has no Fractio (did you mean 'Fraction'?)"),
        ("{_target_: fractions.Fraction}", "must be a transform or a callable; got Fraction(0, 1)"),
    ):
        for name, place in (("filter", []), ("bonus", ["pipeline.after.bonus=collapse"])):
            with pytest.raises(ConfigError, match=re.escape(said)):
                load_pipeline("grpo", f"pipeline.stages.{name}={stage}", *place)
