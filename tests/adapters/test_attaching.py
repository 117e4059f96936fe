"""A trainer with a recipe attached: what you do not set is as in the trainer."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from headrace.adapters import attach
from headrace.adapters.environment import scale_overrides
from headrace.adapters.trl import RecipeAdvantagesOfUnsloth
from headrace.pipeline import load_pipeline
from headrace.transforms import GroupRelativeAdvantage

SCALES = {"group": "group", True: "group", "batch": "batch", "none": "none", False: "none"}
CLIP = "pipeline.stages.advantage.clip=[-5,5]"
# Ways to set other options than the scale and the number of rewards, at the same stages and elsewhere.
OTHERS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    ((), {}),
    ((CLIP,), {}),
    (("pipeline.stages.advantage={clip:[-5,5]}",), {}),
    (("pipeline.stages.collapse.missing=skip", "~pipeline.stages.split"), {}),
    (("pipeline.order=[gate,collapse,advantage,split,weight]",), {}),
    ((), {"stages": {"advantage": {"clip": [-5, 5]}}}),
    ((), {"stages": {"collapse": {"missing": "skip"}}}),
    ((), {"missing": "skip", "baseline": "leave_one_out"}),
    ((), {"scale": ..., "stages": {"advantage": {"eps": 1e-4}}}),
]


def trainer_of(module: str = "trl.trainer", rewards: int = 1, **options: Any) -> Any:
    """What `attach` reads of a trainer."""
    made = type("GRPOTrainer", (), {"__module__": module})()
    made.reward_weights = torch.ones(rewards)
    for name, value in options.items():
        setattr(made, name, value)
    return made


def attached(trainer: Any, *words: str, **options: Any) -> Any:
    return attach(trainer, None, "pipeline.stages.gate.group_size=4", *words, **options).pipeline.stages


def test_an_option_that_is_not_set_follows_the_trainer_however_others_are_set():
    for (words, options), rewards, scale in product(OTHERS, (1, 2), SCALES):
        stages = attached(trainer_of(rewards=rewards, scale_rewards=scale), *words, **options)
        assert stages["advantage"].scale == SCALES[scale], (words, options, scale)
        assert stages["collapse"].columns == rewards, (words, options, rewards)


def test_an_option_that_is_set_wins_over_the_trainers():
    own = GroupRelativeAdvantage(scale="batch")
    for words, options in (
        ((), {"scale": "batch"}),
        (("pipeline.stages.advantage.scale=batch",), {}),
        (("pipeline.stages.advantage={scale:batch}", "pipeline.stages.collapse={columns:3}"), {}),
        ((), {"stages": {"advantage": {"scale": "batch", "clip": [-5, 5]}, "collapse": {"columns": 3}}}),
        ((), {"stages": {"advantage": own}}),
    ):
        stages = attached(trainer_of(rewards=2, scale_rewards="none"), *words, **options)
        assert stages["advantage"].scale == "batch", (words, options)
        assert stages["collapse"].columns == (3 if "collapse" in str((words, options)) else 2)
    named = attach(trainer_of(scale_rewards="none"), "grpo", group_size=4).pipeline
    assert named.stages["advantage"].scale == load_pipeline("grpo").stages["advantage"].scale == "group"


def test_rewards_that_are_normalized_one_by_one_are_refused_unless_the_scale_is_set():
    apart = {"multi_objective_aggregation": "normalize_then_sum", "rewards": 2}
    for words, options in OTHERS:
        with pytest.raises(ValueError, match=r"='normalize_then_sum': name a recipe"):
            attached(trainer_of(**apart), *words, **options)
    assert attached(trainer_of(**apart), scale="none")["advantage"].scale == "none"


def test_an_environment_whose_overrides_set_other_options_has_the_trainers_scale():
    for words, _ in OTHERS:
        assert scale_overrides(False, None, "as/verl", words) == ("pipeline.stages.advantage.scale=none",)
    for word in (
        "pipeline.stages.advantage.scale=batch",
        "~pipeline.stages.advantage.scale",
        "stage@pipeline.stages.advantage=whitening",
        "pipeline.stages.advantage=null",
        "~pipeline.stages.advantage",
        "pipeline.stages.advantage={_target_: my.Advantage}",
    ):
        assert scale_overrides(False, None, "as/verl", [CLIP, word]) == ()


def test_unsloths_patched_trainer_is_known_by_name_and_its_others_are_refused():
    """A class that Unsloth writes derives from a base of TRL's, and its own module is in no package."""

    def of_unsloth(name: str) -> Any:
        base = type("_BaseTrainer", (), {"__module__": "trl.trainer.base_trainer"})
        inner = type(f"_{name}", (base,), {"__module__": name})
        made = type(name, (inner,), {"__module__": name})()
        made.reward_weights = torch.ones(1)
        return made

    trainer = attach(of_unsloth("UnslothGRPOTrainer"), "grpo")
    assert isinstance(trainer, RecipeAdvantagesOfUnsloth)
    assert type(trainer).__name__ == "UnslothGRPOTrainer"
    for name in ("UnslothRLOOTrainer", "UnslothSFTTrainer"):
        with pytest.raises(TypeError, match=f"of trl, unsloth or swift, .*; got a {name}\\.{name}"):
            attach(of_unsloth(name), "grpo")
