"""An option of an attached recipe follows the trainer, unless you set the option."""

from __future__ import annotations

import asyncio
import queue
import statistics
import sys
import threading
import warnings
from ast import literal_eval
from collections import defaultdict
from contextlib import suppress
from inspect import getsourcelines
from itertools import product
from math import inf, nan
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from composed import composed
from prompt_groups import in_simulated_time
from recipes import CHAINS
from tensordict import TensorDict

from headrace.adapters import FewerRowsWarning, attach
from headrace.adapters.environment import scale_overrides, token_stages
from headrace.adapters.swift import RecipeAdvantages as OfSwift
from headrace.adapters.trl import RecipeAdvantagesOfUnsloth, say_without_reward
from headrace.adapters.trl_async import LAST, ROLLOUT, Dispatched, PacedLoops, WholeGroups
from headrace.pipeline import Pipeline, advantages_of, load_pipeline
from headrace.transforms import GroupRelativeAdvantage, MissingKeyError, TokenAdvantage

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
    follows = [*zip(SCALES, (1, 2, 2, 1, 2), strict=True)]
    for (words, options), (scale, rewards) in zip(OTHERS, follows + follows[:4], strict=True):
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
    others = ["pipeline.stages.advantage={rescale: 2}", "pipeline.stages.advantage.scales=2"]
    assert scale_overrides(False, None, "as/verl", others)  # of a stage of your own
    assert scale_overrides(False, "grpo", "as/verl", []) == ()
    for word in (
        "pipeline.stages.advantage.scale=batch",
        "++pipeline.stages.advantage.scale=batch",
        "pipeline.stages.advantage={clip: [-5, 5],\n scale: none}",
        "~pipeline.stages.advantage.scale",
        "stage@pipeline.stages.advantage=whitening",
        "pipeline.stages.advantage=null",
        "~pipeline.stages.advantage",
        "pipeline.stages.advantage={_target_: my.Advantage}",
    ):
        assert scale_overrides(False, None, "as/verl", [CLIP, word]) == ()


def test_a_term_of_your_own_is_refused_where_rows_have_no_groups_unless_it_is_elementwise():
    stages = {name: load_pipeline("rloo").stages[name] for name in ("gate", "collapse", "advantage")}

    def term(batch, tokens):
        return tokens.float()

    pipeline = Pipeline(stages | {"token": TokenAdvantage(term=term)})
    with pytest.raises(ValueError, match="without their groups") as refused:
        token_stages(pipeline)
    assert str(refused.value) == (
        "the trainer's function sees only some rows, without their groups: stages of tokens must come last, "
        "and change each token from its own numbers; found gate, collapse, advantage, token; these compare "
        "rows: token"
    )
    term.elementwise = True
    assert [*token_stages(pipeline)] == ["token"]


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


def test_the_nearest_class_of_a_trainer_decides():
    """The trainer of ms-swift is derived from TRL's, and yours is derived from that of ms-swift."""
    base = type(trainer_of())
    swifts = type("GRPOTrainer", (base,), {"__module__": "swift.rlhf_trainers.grpo_trainer"})
    mine = type("Mine", (swifts,), {"__module__": "my.trainers", "reward_weights": torch.ones(1)})()
    assert isinstance(attach(mine, "grpo"), OfSwift)


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


@pytest.mark.parametrize("recipe", sorted({*CHAINS, *CANNOT_RUN}))
def test_a_recipe_is_refused_if_and_only_if_it_lacks_a_column_of_trl(recipe):
    pipeline = composed(f"pipeline={recipe}")
    batch, trainer = given_by_trl(getattr(dict(pipeline.stages).get("collapse"), "columns", 1)), trainer_of()
    if recipe not in CANNOT_RUN:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FewerRowsWarning)
            attach(trainer, pipeline)
        advantages_of(pipeline, batch)
        return
    with pytest.raises(
        ValueError, match=f"the trainer cannot run this recipe: stage {CANNOT_RUN[recipe]}"
    ) as refused:
        attach(trainer, pipeline)
    said = str(refused.value)
    first = said.partition("stage ")[2].partition(" reads")[0]
    assert f"stages={{{first}: None}}" in said
    assert all(repr(key) in said.partition("gives only ")[2] for key in batch.keys(True, True))
    assert type(trainer).__module__ == "trl.trainer"  # its class is unchanged
    with pytest.raises(MissingKeyError):
        advantages_of(pipeline, batch)


def test_a_group_size_that_is_not_num_generations_is_refused():
    said = "'gate' has group_size=8, and the trainer num_generations=4"
    with pytest.raises(ValueError, match=said):
        attach(trainer_of(num_generations=4), "grpo", group_size=8)
    with pytest.raises(ValueError, match=said):  # AsyncGRPOTrainer has only the arguments
        attach(trainer_of(args=SimpleNamespace(num_generations=4)), "grpo", group_size=8)
    trainer = attach(trainer_of(num_generations=4), "grpo", group_size=4)
    with pytest.raises(ValueError, match=said):
        trainer.pipeline = load_pipeline("grpo", group_size=8)


@pytest.mark.parametrize(
    ("weights", "listed"), [([2.0], "2"), ([0.5], "0.5"), ([1.0, 0.25, 3.0], "1,0.25,3")]
)
def test_reward_weights_of_the_trainer_are_refused_with_the_option_in_their_place(weights, listed):
    trainer = trainer_of(reward_weights=torch.tensor(weights))
    with pytest.raises(ValueError, match="the recipe weighs rewards") as refused:
        attach(trainer, "grpo")
    assert str(refused.value) == (
        "the recipe weighs rewards: remove reward_weights from the trainer, and give attach "
        f"'pipeline.stages.collapse.columns={len(weights)}', 'pipeline.stages.collapse.weights=[{listed}]'"
    )


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


def test_the_reward_functions_without_a_reward_are_named():
    rewards = torch.tensor([[1.0, nan, 0.0], [1.0, 2.0, nan]])
    assert say_without_reward(["a", "b", "c"], rewards).endswith(": b, c")
    assert say_without_reward(["a"], rewards[:, :1]) == ""


# -- batches of stand-ins for trainers ---------------------------------------------------------------------

REWARDS = [1.0, 0.0, 0.5, 2.0]
STOP, PAD = 1, 0


class OfTrl:
    """The parts of TRL's trainers that the adapter replaces or reads; a process has two groups of two."""

    reward_weights, reward_func_names, multi_objective_aggregation = (
        torch.ones(1),
        ["right"],
        "sum_then_normalize",
    )
    num_generations = num_generations_eval = 2
    eos_token_ids, _tokenizer = [STOP], SimpleNamespace(pad_token_id=PAD)
    beta, normalize_advantages, reward_clip_range = 0.0, False, None

    def __init__(self, ids: list[list[int]], rewards: list[float] = REWARDS, rank: int = 0, **output: Any):
        self.ids, self.rewards, self.output = ids, torch.tensor(rewards).unsqueeze(1), output
        self.accelerator = SimpleNamespace(process_index=rank, gather=lambda values: values)
        self.model, self.state = SimpleNamespace(training=True), SimpleNamespace(global_step=3)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._logs = {"advantages": [7.0, 8.0]}

    def _calculate_rewards(self, inputs, prompts, completions, ids):
        return self.rewards

    def _generate_and_score_completions(self, inputs):
        self._calculate_rewards(inputs, None, None, self.ids)
        return {"completion_mask": torch.ones(len(self.ids), 2, dtype=torch.int), **self.output}

    def step(self) -> dict[str, Any]:
        return self._generate_and_score_completions([{"prompt": "a"}] * 2 + [{"prompt": "b"}] * 2)


def of_trl(name: str, *arguments: Any, **output: Any) -> Any:
    kind = type(
        f"_Unsloth{name}" if output.pop("unsloth", False) else name, (OfTrl,), {"__module__": "trl.trainer"}
    )
    return kind(*arguments, **output)


ENDED = [[5, STOP]] * 4


def test_a_completion_is_cut_off_if_it_ends_neither_with_a_stop_token_nor_with_padding():
    trainer = of_trl("GRPOTrainer", [[5, STOP], [STOP, 5], [5, PAD], [5, STOP]])
    attach(trainer, "grpo", "criterion@pipeline.stages.filter.criterion=not_truncated").step()
    ledger = trainer.last_run.ledger
    assert [ledger.names[code] for code in ledger.reason.tolist()] == [
        "trained",
        "filter/truncated",
        "trained",
        "trained",
    ]
    assert trainer.last_run.step == 3
    assert trainer._metrics["train"]["headrace/rows/trained"] == [3]


def test_a_rank_of_trl_has_its_own_rows_of_the_rewards_of_all_ranks():
    trainer = attach(of_trl("GRPOTrainer", ENDED, [9.0] * 4 + REWARDS, 1), "dr_grpo")
    found = trainer.step()["advantages"]
    assert found.flatten().tolist() == [0.5, -0.5, -0.75, 0.75]
    assert trainer._scored["rollout_id"].tolist() == [4, 5, 6, 7]
    assert trainer._logs["advantages"] == found.flatten().tolist()


def test_tokens_of_tools_stay_out_of_trls_loss():
    tools = torch.tensor([[1, 0], [1, 1], [0, 1], [1, 1]])
    found = attach(of_trl("GRPOTrainer", ENDED, tool_mask=tools), "dr_grpo").step()
    assert torch.equal(found["tool_mask"], tools.int())
    assert found["num_items_in_batch"] == 6


def test_an_evaluation_without_a_training_row_is_no_warning():
    trainer = attach(of_trl("GRPOTrainer", ENDED, [1.0] * 4), "grpo")
    trainer.model.training = False
    trainer.step()  # warnings are errors here
    assert trainer._metrics["eval"]["headrace/rows/trained"] == [0]
    assert not trainer._metrics["train"]
    trainer.model.training = True
    with pytest.warns(FewerRowsWarning, match="no row of the batch of step 3 trains") as found:
        trainer.step()
    trainer.step()  # the warning comes once
    line = getsourcelines(OfTrl.step)[1] + 1  # the line that calls the adapter
    assert [(each.filename, each.lineno) for each in found] == [(__file__, line)]


def test_a_loss_of_whole_completions_refuses_advantages_and_masks_of_tokens():
    stages = dict(load_pipeline("rloo").stages)
    stages = {name: stages[name] for name in ("gate", "collapse", "advantage")}
    stages["token"] = TokenAdvantage(term=lambda batch, tokens: tokens.float().cumsum(1))
    for name, unsloth, said in (
        ("RLOOTrainer", False, "RLOOTrainer's loss has one advantage and one probability ratio"),
        ("GRPOTrainer", True, "Unsloth's loss has one advantage of each completion"),
    ):
        with pytest.raises(ValueError, match=said):
            attach(of_trl(name, ENDED, unsloth=unsloth), Pipeline(stages)).step()
        assert len(attach(of_trl(name, ENDED, unsloth=unsloth), "rloo").step()["advantages"]) == 4
    partly = torch.tensor([[1, 1], [1, 1], [0, 1], [1, 1]])
    with pytest.raises(ValueError, match="masks some of them"):
        attach(of_trl("RLOOTrainer", ENDED, tool_mask=partly), "rloo").step()
    wholly = torch.tensor([[1, 1], [1, 1], [0, 0], [1, 1]])  # no token of the third row trains
    found = attach(of_trl("RLOOTrainer", ENDED, tool_mask=wholly), "rloo", "pipeline.empty=count").step()
    assert found["advantages"].tolist() == [1.0, -1.0, 0.0, 1.5]


@pytest.mark.parametrize(
    ("name", "found", "off"),
    [
        ("beta", "0.05", "0.0"),
        ("normalize_advantages", "True", "False"),
        ("reward_clip_range", "(-1, 1)", "None"),
    ],
)
def test_a_setting_of_rloo_that_changes_rewards_or_advantages_is_refused(name, found, off):
    for recipe in (None, "grpo"):
        trainer = of_trl("RLOOTrainer", ENDED)
        setattr(trainer, name, literal_eval(found))
        with pytest.raises(ValueError, match="no effect") as caught:
            attach(trainer, recipe)
        assert str(caught.value) == (
            "a recipe takes rewards without a KL term and computes the advantages, so RLOOTrainer's "
            f"{name}={found} would have no effect: set {name}={off} in RLOOConfig. "
            "docs/coming-from/trl.md has stages that do the same"
        )


def test_the_default_recipe_has_the_options_of_the_trainers_own_advantages():
    queued = type("AsyncGRPOTrainer", (), {"__module__": "trl.experimental", "rollout_worker": None})
    for trainer, expected in (
        (of_trl("GRPOTrainer", ENDED), {"advantage.scale": "group"}),
        (of_trl("RLOOTrainer", ENDED), {"advantage.baseline": "leave_one_out", "advantage.scale": "none"}),
        (queued(), {"advantage.scale": "group", "advantage.ddof": "0", "advantage.eps": "1e-8"}),
    ):
        attach(trainer)
        assert trainer.followed == trainer.of_trainer(trainer) == expected
        assert trainer.check(trainer) is None


class OfSwiftsTrainer:
    """The parts of ms-swift's trainer that the adapter reads; a training group has four rollouts."""

    num_generations, num_generations_eval = 4, 2
    kl_in_reward, beta, scale_rewards = False, 0.04, "group"

    def __init__(self, rewards: int = 1):
        self.reward_weights = torch.ones(rewards)
        self.model, self.state = SimpleNamespace(training=True), SimpleNamespace(global_step=0)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.counted = 0

    def _compute_advantages(self, samples, rewards_per_func, batches):
        self.counted += 1


def swifts(groups: list[int], ends: dict[int, str] | None = None) -> list[SimpleNamespace]:
    """Samples of groups. `ends` has the finish reasons other than ``stop``, by row."""
    return [
        SimpleNamespace(
            prompt_id=f"p{group}", request_id=f"r{row}", finish_reason=(ends or {}).get(row, "stop")
        )
        for row, group in enumerate(groups)
    ]


def of_swift(rewards: int = 1, *arguments: Any, **options: Any) -> Any:
    kind = type("GRPOTrainer", (OfSwiftsTrainer,), {"__module__": "swift.rlhf_trainers.grpo_trainer"})
    return attach(kind(rewards), *arguments, **options)


def test_ms_swift_gets_the_advantages_of_a_loop_over_its_groups():
    """Two reward functions are added up, and the groups are not in order."""
    pytest.importorskip("accelerate", reason="the extra `llm` is not installed")
    groups = [0, 1, 0, 1, 1, 0, 0, 1]
    rewards = torch.tensor(
        [[1.0, 0.5], [0.0, 0.0], [2.0, 0.0], [1.0, 1.0], [0.0, 3.0], [0.25, 0], [0, 1], [4, 0]]
    )
    trainer = of_swift(2)
    found = trainer._compute_advantages(swifts(groups), rewards, None)
    sums = rewards.sum(1).tolist()
    for row, group in enumerate(groups):
        own = [each for each, other in zip(sums, groups, strict=True) if other == group]
        expected = (sums[row] - statistics.fmean(own)) / (statistics.stdev(own) + 1e-4)
        assert found[row].item() == pytest.approx(expected, abs=1e-5)
    assert (found.dtype, trainer.counted) == (rewards.dtype, 1)  # ms-swift's method ran for its own metrics
    assert trainer._metrics["train"]["headrace/rows/trained"] == [8]


def test_a_batch_of_ms_swift_has_statuses_group_sizes_and_no_kl_in_its_rewards():
    pytest.importorskip("accelerate", reason="the extra `llm` is not installed")
    trainer = of_swift(1, "dr_grpo", "criterion@pipeline.stages.filter.criterion=not_truncated")
    rewards = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    found = trainer._compute_advantages(swifts([0, 0, 0, 0], {1: "length"}), rewards, None)
    assert found.tolist() == [0.5, 0.0, 0.5, -0.5]  # the filter masks the row, which counts in the mean
    with pytest.raises(ValueError, match="2 of 4"):
        trainer._compute_advantages(swifts([0, 0, 1, 1]), rewards, None)
    trainer.model.training = False  # evaluation groups have two rollouts
    found = trainer._compute_advantages(swifts([0, 0, 1, 1]), rewards, None)
    assert found.tolist() == [0.5, -0.5, 0.5, -0.5]
    trainer.kl_in_reward = True
    with pytest.raises(ValueError, match="set kl_in_reward=false"):
        trainer._compute_advantages(swifts([0, 0, 1, 1]), rewards, None)
    trainer.beta = 0.0
    trainer._compute_advantages(swifts([0, 0, 1, 1]), rewards, None)


# -- the queue of AsyncGRPOTrainer, without TRL ------------------------------------------------------------


def queue_of(*words: str, size: int = 2, groups: int = 1, **args: Any) -> WholeGroups:
    """The queue of a stand-in for AsyncGRPOTrainer, whose step has `groups` groups."""
    settings = {
        "max_staleness": 3,
        "weight_sync_steps": 1,
        "token_budget": None,
        "num_generations": size,
    } | args
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            per_device_train_batch_size=size, gradient_accumulation_steps=groups, **settings
        ),
        accelerator=SimpleNamespace(num_processes=1),
        rollout_worker=SimpleNamespace(rollout_buffer=queue.Queue()),
        pipeline=load_pipeline(*words),
        eos_token_ids=[STOP],
        model_version=0,
        _trained_groups=set(),
        _metrics={"train": defaultdict(list)},
        state=SimpleNamespace(global_step=0),
    )
    return WholeGroups(trainer)


def put(
    queued: WholeGroups, group: int, reward: float, *, ids=(5, STOP), mask=(1, 1), version=0, **metrics: Any
):
    """Put a sample on TRL's queue."""
    metrics = {"reward": reward, "reward_std": 7.0} | {
        name.replace("_", "/"): v for name, v in metrics.items()
    }
    sample = SimpleNamespace(
        group_id=group,
        metrics=metrics,
        input_ids=[*ids],
        completion_mask=np.array(mask),
        model_version=version,
        advantage=None,
    )
    queued.trainer.rollout_worker.rollout_buffer.put(sample)


def taken(queued: WholeGroups) -> list[Any]:
    """All samples that can be trained now."""
    found = []
    with suppress(queue.Empty):
        while True:
            found.append(queued.get(block=False))
    return found


def test_only_the_last_row_of_a_rollout_may_be_cut_off():
    queued = queue_of("dr_grpo", "criterion@pipeline.stages.filter.criterion=not_truncated", size=3)
    put(queued, 0, 1.0, ids=(5, 5), headrace_rollout=0, headrace_last=False)
    put(queued, 0, 1.0, headrace_rollout=0, headrace_last=True)
    put(queued, 0, 0.0, ids=(STOP, 5), headrace_rollout=1, headrace_last=True)
    put(queued, 0, 2.0, headrace_rollout=2, headrace_last=True)
    assert queued.qsize() == 4
    assert [each.advantage for each in taken(queued)] == [0.0, 0.0, 1.0]  # the mean is 3 / 3
    assert queued.counts["filter/truncated"] == 1
    assert queued.qsize() == 0


def test_rows_up_to_the_last_one_are_a_rollout_if_rollouts_have_no_numbers():
    queued = queue_of("dr_grpo")
    for reward, last in ((8.0, False), (8.0, True)):
        put(queued, 0, reward, headrace_last=last)
    queued_here = [queued._take_in(queued._queue.get()) for _ in range(2)]
    assert (len(queued_here), queued.qsize()) == (2, 2)  # they wait for the other rollout
    put(queued, 0, 0.0)
    assert [each.advantage for each in taken(queued)] == [4.0, 4.0, -4.0]
    assert not queued._rollouts  # nothing is kept of a group that has ended


def test_each_reward_function_of_the_queue_is_a_column():
    queued = queue_of("dr_grpo", "pipeline.stages.collapse.columns=2")
    put(queued, 0, 9.0, rewards_a=1.0, rewards_b=2.0)
    put(queued, 0, 9.0, rewards_a=0.0, rewards_b=1.0)
    assert [each.advantage for each in taken(queued)] == [1.0, -1.0]
    queued = queue_of("dr_grpo", "~pipeline.stages.collapse")  # one column, the reward of all functions
    put(queued, 0, 9.0, rewards_a=1.0, rewards_b=2.0)
    put(queued, 0, 7.0, rewards_a=0.0, rewards_b=1.0)
    assert [each.advantage for each in taken(queued)] == [1.0, -1.0]


def test_a_row_of_the_queue_keeps_its_own_mask():
    queued = queue_of("dr_grpo")
    masks = [[1, 0, 1], [0, 1]]
    for reward, mask in enumerate(masks):
        put(queued, 0, float(reward), mask=mask)
    assert [each.completion_mask.tolist() for each in taken(queued)] == masks
    stages = {name: load_pipeline("rloo").stages[name] for name in ("gate", "collapse", "advantage")}
    queued.trainer.pipeline = Pipeline(
        stages | {"token": TokenAdvantage(term=lambda batch, tokens: tokens.float().cumsum(1))}
    )
    for reward in (0.0, 1.0):
        put(queued, 1, reward)
    with pytest.raises(ValueError, match="one advantage of each sample"):
        queued.get(block=False)


def test_one_more_group_fills_a_step_from_which_a_row_was_taken_out():
    queued = queue_of("dr_grpo", size=3, groups=2)
    for group, reward in product((0, 1), (0.0, 1.0, 2.0)):
        put(queued, group, reward, mask=(0, 0) if (group, reward) == (1, 2.0) else (1, 1))
    assert len(taken(queued)) == 5
    for reward in (0.0, 1.0, 2.0):
        put(queued, 2, reward)
    assert [each.group_id for each in taken(queued)] == [2, 2, 2]


def test_rows_that_became_too_old_are_logged_once():
    queued = queue_of("dr_grpo", max_staleness=0)
    logged = queued.trainer._metrics["train"]
    for group in range(2):
        queued.trainer.model_version = 5 + group
        put(queued, group, 0.0)
        put(queued, group, 1.0)
        assert taken(queued) == taken(queued) == []
        assert logged["headrace/out/stream/stale_total"] == [2.0] * (group + 1)


@pytest.mark.parametrize("paced", [False, True])
def test_samples_two_or_more_versions_too_old_are_forgotten_unless_groups_begin_in_time(paced):
    """Each sample waits for the other sample of its group."""
    queued = queue_of("dr_grpo", max_staleness=1)
    queued.allowed = SimpleNamespace(value=0) if paced else None
    for version in range(4):
        put(queued, version, 0.0, version=version)
    queued.trainer.model_version = 3
    assert taken(queued) == []
    assert [each.model_version for each in queued._samples.values()] == [*range(0 if paced else 1, 4)]


def test_a_step_ends_the_version_of_its_rows_unless_its_size_is_a_number_of_tokens():
    for args, versions in (
        ({}, [0, 1, 2]),
        ({"weight_sync_steps": 2}, [0, 0, 1]),
        ({"token_budget": 9}, [0, 0, 0]),
    ):
        queued = queue_of("dr_grpo", **args)
        found = []
        for group in range(3):
            found.append(queued._version())
            put(queued, group, 0.0)
            put(queued, group, 1.0)
            assert len(taken(queued)) == 2
        assert found == versions


@pytest.mark.parametrize("allowed", [None, SimpleNamespace(value=0)], ids=["own worker", "TRL's"])
def test_rows_that_wait_for_a_later_step_are_dropped_before_they_are_too_old(allowed):
    """A group of four rollouts with six rows each has enough rows for six steps of four rows."""
    queued = WholeGroups(queue_of("dr_grpo", size=4).trainer, allowed)
    if allowed is not None:
        queued._take_in(Dispatched(0, 0))
    for at in range(24):
        put(queued, 0, float(at % 4), headrace_rollout=at % 4, headrace_last=at >= 20)
    # With TRL's own worker, a row may be one version older than its group.
    handed_out = 4 * 4 if allowed is None else 4 * 5
    assert len(taken(queued)) == handed_out
    assert queued.counts == {"came": 24, "handed_out": handed_out, "waiting": 0, "stale": 24 - handed_out}


class OwnWorker:
    """A worker with TRL's queue."""

    def __init__(self):
        self.rollout_buffer = queue.Queue()


class TrlsWorker(OwnWorker):
    """A worker that starts TRL's loop in another process."""

    _loop_cls = object
    _mp_ctx = SimpleNamespace(Value=lambda kind, number: SimpleNamespace(kind=kind, value=number))


@pytest.mark.parametrize("worker", [None, OwnWorker(), TrlsWorker()], ids=lambda it: type(it).__name__)
def test_the_data_of_a_step_come_through_the_recipe_if_there_is_a_worker(worker):
    def get_train_dataloader(self) -> str:
        self._rollout_dataset = SimpleNamespace(max_staleness=3, source=getattr(self, "rollout_queue", None))
        return "TRL's loader"

    methods = {"__module__": "trl.experimental", "get_train_dataloader": get_train_dataloader}
    trainer: Any = type("AsyncGRPOTrainer", (), methods)()
    vars(trainer).update(vars(queue_of("grpo").trainer), rollout_worker=worker, pipeline=None)
    attach(trainer, "grpo")
    assert trainer.get_train_dataloader() == "TRL's loader"
    data = trainer._rollout_dataset
    if worker is None:
        assert vars(data) == {"max_staleness": 3, "source": None}
        return
    assert (data.max_staleness, data.source) == (inf, trainer.queued)
    allowed = trainer.queued.allowed
    if isinstance(worker, TrlsWorker):
        assert vars(allowed) == {"kind": "i", "value": 3}  # two steps ahead, of one group each
        assert worker._loop_cls == PacedLoops(object, allowed)
    else:
        assert allowed is None


# -- the rollout loop of AsyncGRPOTrainer, without TRL ------------------------------------------------------


class Sequence(NamedTuple):
    """TRL's ``TrainingSequence``."""

    ids: list[int]
    mask: list[int]
    log_probs: list[float]
    text: str


class Loop:
    """The parts of TRL's rollout loop that are replaced or read; a sample for each sequence of a group."""

    def __init__(self, *, announcements: int):
        self.rollout_buffer = queue.Queue(announcements)
        self.model_version, self._stop_event, self.begun = 0, threading.Event(), []
        self.tokenizer = SimpleNamespace(pad_token_id=PAD)

    async def _generate_one(self, prompt, group_id, temperature):
        self.begun.append((asyncio.get_running_loop().time(), group_id))
        return prompt, temperature

    async def _score_group(self, group):
        return [
            SimpleNamespace(sequence=each, version=group.model_version, metrics={"reward": 1.0})
            for sequences in group.completions_sequences
            for each in sequences
        ]


def paced(groups: int, announcements: int = 9) -> tuple[Any, SimpleNamespace]:
    """A loop that may begin a number of groups, and this number."""
    allowed = SimpleNamespace(value=groups)
    return PacedLoops(Loop, allowed)(announcements=announcements), allowed


def announced(loop: Any) -> list[Dispatched]:
    """All announcements that wait on the queue."""
    return [loop.rollout_buffer.get_nowait() for _ in range(loop.rollout_buffer.qsize())]


@pytest.fixture
def sequences(monkeypatch) -> None:
    """Put `Sequence` in place of TRL's class."""
    module = ModuleType("trl.experimental.async_grpo.async_rollout_worker")
    module.TrainingSequence = Sequence
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_a_group_begins_when_the_trainer_has_capacity_and_is_announced_once():
    """The announcement has the version with which the group began. A full queue delays the rollouts."""

    async def go():
        loop, allowed = paced(1, announcements=1)
        tasks = [
            asyncio.create_task(loop._generate_one("p", group_id=group, temperature=0.5))
            for group in (1, 0, 0, 1, 2)
        ]
        await asyncio.sleep(0.5)
        assert loop.begun == [(0.0, 0), (0.0, 0)]
        loop.model_version, allowed.value = 7, 3
        await asyncio.sleep(1)  # the queue is full, so the first rollouts of groups 1 and 2 wait
        assert [group for _, group in loop.begun] == [0, 0, 1]
        assert loop.begun[-1][0] < 0.6
        found = []
        for _ in range(3):
            found += announced(loop)
            await asyncio.sleep(0.1)
        assert found == [Dispatched(0, 0), Dispatched(1, 7), Dispatched(2, 7)]
        assert [await task for task in tasks] == [("p", 0.5)] * 5
        assert [group for _, group in loop.begun[3:]] == [1, 2]
        assert max(time for time, _ in loop.begun) < 1.9

    in_simulated_time(go())


@pytest.mark.usefixtures("sequences")
def test_a_loop_that_is_stopped_begins_no_group_and_ends_its_rollouts():
    async def go():
        loop, allowed = paced(1, announcements=1)
        waits = [
            asyncio.create_task(loop._generate_one("p", group_id=each, temperature=1)) for each in (0, 1)
        ]
        await asyncio.sleep(1)
        allowed.value = 3  # group 1 cannot be announced, because the queue is full
        await asyncio.sleep(1)
        late = asyncio.create_task(loop._generate_one("p", group_id=3, temperature=1))
        await asyncio.sleep(1)
        loop._stop_event.set()
        assert await late == ([], [], [], 0, 0, None)
        assert [await each for each in waits] == [("p", 1)] * 2
        assert await loop._score_group(SimpleNamespace(group_id=3, completions_sequences=[[]])) == []

    in_simulated_time(go())


@pytest.mark.usefixtures("sequences")
def test_samples_have_the_number_of_their_rollout_and_the_version_of_their_group():
    """The second rollout has no token, so it gets a row of one token that is not trained."""
    loop, _ = paced(1)
    loop.model_version = 4
    asyncio.run(loop._generate_one("p", group_id=0, temperature=1))
    loop.model_version = 6  # TRL gives the group the version of its end
    real = [Sequence([5, at], [1, 1], [0.1, 0.2], "text") for at in range(3)]
    group = SimpleNamespace(group_id=0, model_version=6, completions_sequences=[real[:2], [], real[2:]])
    found = asyncio.run(loop._score_group(group))
    assert [each.sequence for each in found] == [*real[:2], Sequence([PAD], [0], [0.0], ""), real[2]]
    assert [each.version for each in found] == [4] * 4
    places = [(0, False), (0, True), (1, True), (2, True)]
    assert [each.metrics for each in found] == [
        {"reward": 1.0, ROLLOUT: rollout, LAST: last} for rollout, last in places
    ]
    assert asyncio.run(loop._score_group(group)) == []  # nothing is kept of a group that has ended
