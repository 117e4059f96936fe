"""Stages in TorchRL's own Hydra configurations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torchrl.trainers.algorithms.configs  # the import registers TorchRL's entries
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rollouts import make_collector, make_env, make_policy
from torchrl.objectives.llm import GRPOLoss

from headrace.pipeline import Pipeline, PipelineHook, StampIds, load_pipeline, register_configs
from headrace.transforms import CompletenessGate, RewardsVary

pytestmark = [pytest.mark.torchrl, pytest.mark.slow]

CONF = Path(__file__).parents[2] / "conf"
STAGES = sorted(path.stem for path in (CONF / "stage").glob("*.yaml"))
CRITERIA = sorted(path.stem for path in (CONF / "criterion").glob("*.yaml"))
TERMS = sorted(path.stem for path in (CONF / "term").glob("*.yaml"))
STORE = ConfigStore.instance()


@pytest.fixture(autouse=True, scope="module")
def app() -> None:
    """A primary configuration with TorchRL's groups."""
    register_configs()
    defaults = [{"transform": []}, {"trainer": None}, {"hook": None}, "_self_"]
    STORE.store(name="torchrl_app", node=OmegaConf.create({"defaults": defaults}))


def composed_app(*overrides: str) -> DictConfig:
    with initialize(None, version_base="1.3"):
        return compose("torchrl_app", list(overrides))


def test_every_stage_criterion_and_term_is_an_entry():
    assert {f"{name}.yaml" for name in [*STAGES, "stamp_ids"]} <= set(STORE.list("transform"))
    assert {f"{name}.yaml" for name in CRITERIA} <= set(STORE.list("transform/criterion"))
    assert {f"{name}.yaml" for name in TERMS} <= set(STORE.list("transform/term"))


def test_no_entry_has_the_name_of_one_of_torchrl():
    source = Path(torchrl.trainers.algorithms.configs.__file__).read_text()
    theirs = set(re.findall(r'cs.store\(\s*group="transform",\s*name="(\w+)"', source))
    assert len(theirs) > 50
    assert not theirs & {*STAGES, "stamp_ids"}
    assert not {"recipe", "stages"} & set(re.findall(r'group="hook",\s*name="(\w+)"', source))


def test_an_entry_has_its_class_options_at_their_defaults():
    """An entry has the defaults of conf/stage, except that no pipeline renames columns for all stages."""
    nodes = OmegaConf.to_container(composed_app(f"transform=[{','.join(STAGES)}]").transform)
    for name in STAGES:
        node, written = nodes[name], OmegaConf.load(CONF / "stage" / f"{name}.yaml")
        assert node.pop("_convert_") == "all"
        assert list(node) == list(written)
        for option, value in OmegaConf.to_container(written).items():
            assert node[option] == value or str(value).startswith("${"), f"{name}.{option}"


def test_a_list_of_entries_is_a_pipeline_in_its_order():
    config = composed_app(
        "transform=[gate,collapse,filter,advantage]",
        "+transform/criterion@transform.filter.criterion=rewards_vary",
        "transform.gate.group_size=4",
        "transform.advantage.scale=none",
        "transform.collapse.reward=sum",
    )
    pipeline = Pipeline(instantiate(config.transform))
    assert pipeline.order == ["gate", "collapse", "filter", "advantage"]
    assert type(pipeline.stages["filter"].criterion) is RewardsVary
    batch = next(iter(make_collector(make_env())))
    overrides = ("pipeline.stages.collapse.reward=sum", "pipeline.stages.advantage.scale=none")
    leave_out = ("~pipeline.stages.split", "~pipeline.stages.weight")
    same = load_pipeline("pipeline=grpo", *overrides, *leave_out)(batch)
    torch.testing.assert_close(pipeline(batch)["advantage"], same["advantage"], rtol=0, atol=0)


def test_an_entry_composes_beside_torchrls_own():
    config = composed_app(
        "transform=[stamp_ids]",
        "transform.stamp_ids.repeats=4",
        "+transform@transform.counter=step_counter",
        "+transform@inside=gate",
    )
    stamp, counter = instantiate(config.transform).values()
    assert isinstance(stamp, StampIds)
    assert type(counter).__name__ == "StepCounter"
    assert isinstance(instantiate(config.inside), CompletenessGate)


@pytest.mark.parametrize(
    ("hook", "overrides"),
    [
        ("recipe", ["hook.pipeline._args_=['pipeline=grpo','pipeline.stages.collapse.reward=sum']"]),
        ("stages", []),
    ],
)
def test_torchrls_trainer_grpo_trains_with_it(hook, overrides):
    config = composed_app(
        "trainer=grpo",
        f"hook={hook}",
        "transform=[gate,collapse,advantage,split,weight]",
        "transform.collapse.reward=sum",
        "transform.split.minibatches=2",
        *overrides,
        "trainer.progress_bar=false",
        "trainer.num_epochs=2",
        "trainer.total_frames=54",
    )
    policy = make_policy()
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False, aggregation="none")
    made = instantiate(config.hook)
    assert isinstance(made, PipelineHook)
    before = [p.detach().clone() for p in policy.parameters()]
    with pytest.warns(UserWarning, match="experimental"):
        trainer = instantiate(
            config.trainer,
            collector=make_collector(make_env(), 3, policy=policy),
            loss_module=loss,
            optimizer=torch.optim.SGD(policy.parameters(), lr=0.1),
            hooks=[made],
        )
    trainer.train()
    assert trainer.collected_frames == 54
    assert not all(map(torch.equal, before, policy.parameters()))
