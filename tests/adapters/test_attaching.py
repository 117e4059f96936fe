"""An option of an attached recipe follows the trainer, unless you set the option."""

from __future__ import annotations

import warnings
from itertools import product
from math import nan
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from tensordict import TensorDict

from headrace.adapters import FewerRowsWarning, attach
from headrace.adapters.attaching import warn_of_no_rows
from headrace.adapters.environment import scale_overrides
from headrace.adapters.trl import RecipeAdvantagesOfUnsloth, say_without_reward
from headrace.pipeline import advantages_of, load_pipeline
from headrace.pipeline.composing.recipe_names import Recipe
from headrace.transforms import GroupRelativeAdvantage, MissingKeyError

SCALES = {"group": "group", True: "group", "batch": "batch", "none": "none", False: "none"}
CLIP = "pipeline.stages.advantage.clip=[-5,5]"
# Ways to set options other than the scale and the number of rewards, in the same stages and in others.
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
    """A stand-in for a trainer, with the attributes that `attach` reads."""
    made = type("GRPOTrainer", (), {"__module__": module})()
    made.reward_weights = torch.ones(rewards)
    for name, value in options.items():
        setattr(made, name, value)
    return made


def attached(trainer: Any, *words: str, **options: Any) -> Any:
    return attach(trainer, None, "pipeline.stages.gate.group_size=4", *words, **options).pipeline.stages


def test_an_option_follows_the_trainer_whatever_other_options_are_set():
    for (words, options), rewards, scale in product(OTHERS, (1, 2), SCALES):
        stages = attached(trainer_of(rewards=rewards, scale_rewards=scale), *words, **options)
        assert stages["advantage"].scale == SCALES[scale], (words, options, scale)
        assert stages["collapse"].columns == rewards, (words, options, rewards)


def test_an_option_that_you_set_has_priority_over_that_of_the_trainer():
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


def test_a_trainer_with_a_recipe_names_its_stages_and_the_options_from_the_trainer():
    trainer = attach(trainer_of(rewards=2, scale_rewards="batch"), stages={"advantage": {"clip": [-5, 5]}})
    stages = "gate → collapse → advantage → split → weight"
    taken = "advantage.scale=batch, collapse.columns=2"
    assert repr(trainer) == f"<GRPOTrainer: {stages}; from the trainer: {taken}>"
    assert repr(attach(trainer_of(), "grpo")).endswith("; from the trainer: no option>")


def test_rewards_that_are_normalized_one_by_one_are_refused_unless_the_scale_is_set():
    apart = {"multi_objective_aggregation": "normalize_then_sum", "rewards": 2}
    for words, options in OTHERS:
        with pytest.raises(ValueError, match=r"='normalize_then_sum': name a recipe"):
            attached(trainer_of(**apart), *words, **options)
    assert attached(trainer_of(**apart), scale="none")["advantage"].scale == "none"


def test_the_trainers_scale_applies_unless_the_overrides_set_the_scale_or_replace_the_stage():
    for (words, _), recipe in product(OTHERS, (None, "as/verl")):
        assert scale_overrides(False, recipe, "as/verl", words) == ("pipeline.stages.advantage.scale=none",)
    assert scale_overrides(False, "grpo", "as/verl", []) == ()
    for word in (
        "pipeline.stages.advantage.scale=batch",
        "~pipeline.stages.advantage.scale",
        "stage@pipeline.stages.advantage=whitening",
        "pipeline.stages.advantage=null",
        "~pipeline.stages.advantage",
        "pipeline.stages.advantage={_target_: my.Advantage}",
    ):
        assert scale_overrides(False, None, "as/verl", [CLIP, word]) == ()


def test_unsloths_grpo_trainer_is_recognised_and_its_other_trainers_are_refused():
    """Unsloth generates a class that is derived from TRL's class, in a module that is in no package."""

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


CANNOT_RUN = {
    **dict.fromkeys(("tis", "icepop"), r"'correction' reads \('old_log_probs', 'full'\)"),
    **dict.fromkeys(("mis",), r"'reject' reads .*; stage 'correction' reads \('old_log_probs', 'full'\)"),
    **dict.fromkeys(("opsm", "mlperf"), r"'mask' reads \('old_log_probs', 'full'\)"),
    "high_entropy": r"'forks' reads \('entropy', 'full'\)",
    "gtpo": r"'entropy' reads \('entropy', 'full'\)",
    "kl_in_advantage": r"'kl' reads .*'ref_log_probs'",
    **dict.fromkeys(("opd", "rlsd"), "'teacher' reads .*'teacher_log_probs'"),
    "otb": "'otb' reads .*'sum_pi_squared'",
    "ppo": r"'gae' reads \('values', 'full'\)",
    "gigpo": "'states' reads 'state_id'",
    "mt_grpo": "'turns' reads 'turn_index', 'turn_reward'",
    "tree_grpo": r"'tree' reads .*\('tokens', 'full'\)",
    "roles": "'peers' reads 'role'",
    **dict.fromkeys(("remax", "a_star_po"), "'advantage' reads 'votes_only'"),
}


def given_by_trl(columns: int) -> TensorDict:
    """A batch with the columns that TRL's adapter gives to a recipe."""
    at = torch.arange(8)
    batch = TensorDict({"rollout_id": at, "group_id": at // 4, "status": torch.zeros_like(at)}, [8])
    reward = torch.tensor([[0.0, 1.0], [1.0, 1.0]]).repeat(4, 1)[:, :columns]
    batch["next", "reward"] = reward if columns > 1 else reward.flatten()
    batch["expected_rollouts"] = torch.full_like(at, 4)
    batch["masks", "all_assistant_mask"] = torch.ones(8, 3, dtype=torch.bool)
    return batch


@pytest.mark.parametrize("recipe", get_args(Recipe))
def test_a_recipe_is_refused_if_and_only_if_it_lacks_a_column_of_trl(recipe):
    pipeline = load_pipeline(recipe)
    batch, trainer = given_by_trl(getattr(dict(pipeline.stages).get("collapse"), "columns", 1)), trainer_of()
    if recipe not in CANNOT_RUN:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FewerRowsWarning)
            attach(trainer, pipeline)
        advantages_of(pipeline, batch)
        return
    with pytest.raises(ValueError, match=f"the trainer cannot run this recipe: stage {CANNOT_RUN[recipe]}"):
        attach(trainer, pipeline)
    assert type(trainer).__module__ == "trl.trainer"  # its class is unchanged
    with pytest.raises(MissingKeyError):
        advantages_of(pipeline, batch)


def test_a_group_size_that_is_not_num_generations_is_refused():
    said = "'gate' has group_size=8, and the trainer num_generations=4"
    with pytest.raises(ValueError, match=said):
        attach(trainer_of(num_generations=4), "grpo", group_size=8)
    trainer = attach(trainer_of(num_generations=4), "grpo", group_size=4)
    with pytest.raises(ValueError, match=said):
        trainer.pipeline = load_pipeline("grpo", group_size=8)


def test_a_recipe_that_is_set_later_is_checked_and_a_refused_one_changes_nothing():
    trainer = attach(trainer_of(), "grpo")
    before = trainer.pipeline
    with pytest.raises(
        TypeError, match=r"got 'rloo'\. Set trainer\.pipeline = headrace\.load_pipeline\('rloo'\)"
    ):
        trainer.pipeline = "rloo"
    with pytest.raises(TypeError, match=r"got None\. .*load_pipeline\('grpo'\)"):
        trainer.pipeline = None
    with pytest.raises(ValueError, match="'correction' reads"):
        trainer.pipeline = load_pipeline("tis")
    assert trainer.pipeline is before
    trainer.pipeline = after = load_pipeline("rloo")
    assert trainer.pipeline is after


def test_the_first_batch_without_a_training_row_is_a_warning():
    trainer = trainer_of(state=SimpleNamespace(global_step=7))
    with pytest.warns(FewerRowsWarning, match="no row of the batch of step 7 trains"):
        warn_of_no_rows(trainer)
    warn_of_no_rows(trainer)  # warnings are errors here


def test_the_reward_functions_without_a_reward_are_named():
    rewards = torch.tensor([[1.0, nan, 0.0], [1.0, 2.0, nan]])
    assert say_without_reward(["a", "b", "c"], rewards).endswith(": b, c")
    assert say_without_reward(["a"], rewards[:, :1]) == ""
