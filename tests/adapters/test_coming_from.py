"""The adapters of docs/coming-from compute what the trainers compute, and refuse invalid batches.

Trainers that are not on the package index have stand-ins here. tests/support/peer_checks.py runs the
others, and `make test-light` runs this script.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import random
import re
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import foreign
import numpy as np
import pytest
import torch

from headrace.adapters import attach, recipe_of_environment, slime, swift
from headrace.pipeline import load_pipeline
from headrace.transforms import BatchError, IncompleteGroupsError, Status

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
NOT_TRUNCATED = "criterion@pipeline.stages.filter.criterion=not_truncated"


def adapter(name: str) -> ModuleType:
    """Import an adapter again, because it replaces functions of the trainer's modules."""
    return importlib.reload(importlib.import_module(f"headrace.adapters.{name}"))


@pytest.fixture
def recipe(monkeypatch) -> Callable[..., None]:
    """A function that sets the recipe and its overrides in the environment."""

    def name(recipe: str | None = None, *words: str) -> None:
        if recipe is not None:
            monkeypatch.setenv("HEADRACE_RECIPE", recipe)
        monkeypatch.setenv("HEADRACE_OVERRIDES", " ".join(words))

    monkeypatch.delenv("HEADRACE_RECIPE", raising=False)
    name()
    return name


SHARED = ("__init__", "attaching", "environment", "measured", "over_generation", "samples")
# These limits are longer: NeMo RL's protocol has eight methods, `trl` two trainers, `trl_async` pacing.
OWN_RULES = {"nemo_rl": 90, "trl": 105, "trl_async": 250}


def test_every_adapter_is_short_and_has_a_page():
    pages = "\n".join(page.read_text() for page in PAGES)
    for path in (ROOT / "adapters").glob("*.py"):
        text = path.read_text()
        code = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
        if path.stem not in SHARED:
            assert len(code) <= OWN_RULES.get(path.stem, 75), path.name
            attached = path.stem in ("trl", "trl_async", "swift")
            assert attached or f"headrace.adapters.{path.stem}" in pages, path.name


def test_the_environment_names_the_recipe(recipe):
    recipe("rloo", "pipeline.stages.gate.group_size=4", "'pipeline.stages.advantage.scale=none'")
    found = recipe_of_environment("as/slime")
    assert found.stages["advantage"].baseline == "leave_one_out"
    assert found.stages["gate"].group_size == 4
    assert "split" not in found.stages
    assert "weight" not in found.stages
    assert recipe_of_environment("as/slime") is found  # composed once
    recipe("rae")
    with pytest.raises(ValueError, match=r"the state of the stage running lasts"):
        recipe_of_environment("as/slime")


def test_a_misspelt_recipe_raises_before_any_rollout(recipe):
    recipe("grop")
    with pytest.raises(ValueError, match=r"unknown recipe 'grop' \(did you mean 'grpo'"):
        adapter("slime")


def test_a_missing_option_is_named_as_an_environment_override(monkeypatch, recipe):
    registry, status = foreign.skyrl_ppo_utils(monkeypatch), foreign.torchtitan_config(monkeypatch)
    adapter("skyrl")
    said = r'HEADRACE_OVERRIDES="pipeline\.stages\.gate\.group_size=8"'
    with pytest.raises(BatchError, match=said):
        registry["headrace"](torch.ones(2, 1), torch.ones(2, 1), index=["u", "u"])
    estimator = adapter("torchtitan").RecipeEstimator.Config().build()
    with pytest.raises(BatchError, match=said):
        estimator(foreign.torchtitan_group([1.0, 0.0], [status.COMPLETED] * 2))


def test_without_std_in_the_trainer_the_default_recipe_has_none(monkeypatch, recipe):
    """The advantages are 3/4 and -1/4. A scale or a recipe that you name divides them by the std, 1/2."""
    registry = foreign.skyrl_ppo_utils(monkeypatch)
    status = foreign.torchtitan_config(monkeypatch)
    size, rewards = "pipeline.stages.gate.group_size=4", [1.0, 0.0, 0.0, 0.0]

    def of_skyrl():
        adapter("skyrl")
        rows = torch.tensor(rewards).unsqueeze(1), torch.ones(4, 1)
        return registry["headrace"](*rows, index=["u"] * 4, grpo_norm_by_std=False)[0].flatten().tolist()

    def of_slime():
        args = foreign.slime_args(4, 1)
        args.grpo_std_normalization = False
        return slime.post_process_rewards(args, samples_of(rewards, [0] * 4))[1]

    def of_torchtitan():
        estimator = adapter("torchtitan").RecipeEstimator.Config().build()
        return estimator(foreign.torchtitan_group(rewards, [status.COMPLETED] * 4))

    for named, std in (((), 1.0), (("pipeline.stages.advantage.scale=group",), 0.5)):
        for found in (of_skyrl, of_slime, of_torchtitan):
            recipe(None, size, *named)
            assert found() == pytest.approx([0.75 / std, *[-0.25 / std] * 3], abs=1e-5)
    recipe("grpo", size)
    assert of_slime() == pytest.approx([1.5, *[-0.5] * 3], abs=1e-5)


def statuses_by(name: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each of four rollouts trains, of which the trainer has cut off the second."""
    rewards, cut = [1.0, 0.0, 0.0, 0.0], [False, True, False, False]
    if name == "slime":
        samples = samples_of(rewards, [0] * 4)
        samples[1].status = foreign.SlimeStatus.TRUNCATED
        slime.post_process_rewards(foreign.slime_args(4, 1), samples)
        return [not sample.remove_sample for sample in samples]
    if name == "torchtitan":
        status = foreign.torchtitan_config(monkeypatch)
        ends = [status.TRUNCATED_LENGTH if each else status.COMPLETED for each in cut]
        found = adapter(name).RecipeEstimator.Config().build()(foreign.torchtitan_group(rewards, ends))
        return [value != 0 for value in found]
    if name == "trinity":
        foreign.trinity_operator(monkeypatch)
        mask = torch.ones(2, dtype=torch.bool)
        rows = [
            foreign.trinity_experience("t", f"{at}", 0, reward, mask, "response_truncated" if each else None)
            for at, (reward, each) in enumerate(zip(rewards, cut, strict=True))
        ]
        asyncio.run(adapter(name).RecipeOperator().process(rows))
        return [bool(row.advantages.any()) for row in rows]
    maker = foreign.openrlhf_maker(monkeypatch, group_size=4)
    one = foreign.openrlhf_experience([0, 1, 2, 3], ["a"] * 4, torch.tensor(rewards), torch.ones(4, 2).bool())
    one.truncated = torch.tensor(cut).int()
    adapter(name).replace_advantages()
    return [bool(row.any()) for row in maker.compute_advantages_and_returns([one])[0].advantages]


@pytest.mark.parametrize("name", ["slime", "torchtitan", "trinity", "openrlhf"])
def test_a_rollout_that_a_trainer_has_cut_off_is_truncated_for_the_recipe(monkeypatch, recipe, name):
    recipe("grpo", "pipeline.stages.gate.group_size=4", NOT_TRUNCATED)
    assert statuses_by(name, monkeypatch) == [True, False, True, True]


def test_finish_reasons_of_ms_swift_become_statuses():
    assert [swift.status_of(each) for each in ("length", "stop", None)] == [
        Status.TRUNCATED,
        Status.COMPLETED,
        Status.COMPLETED,
    ]


@pytest.mark.parametrize("name", ["prime_rl", "rllm"])
def test_roles_are_compared_apart(monkeypatch, recipe, name):
    """In each role the advantage is ±1/2. Over both roles the mean would be 3/2."""
    roles = ["solver", "judge", "solver", "judge"]
    recipe("roles", "~pipeline.stages.gate", "pipeline.stages.advantage.scale=none")
    if name == "prime_rl":
        foreign.prime_rl_algo(monkeypatch)
        agents = [SimpleNamespace(name=role, trainable=True) for role in roles]
        episodes = [
            episode(reward, [True], agent=agent)
            for reward, agent in zip([0.0, 2.0, 1.0, 3.0], agents, strict=True)
        ]
        found = [values[0] for values in score(adapter(name), episodes)]
        recipe(
            "roles",
            "~pipeline.stages.gate",
            "pipeline.stages.advantage.scale=none",
            "pipeline.stages.peers.keys=[group_id,episode_id]",
        )
        for number, each in enumerate(episodes):
            each.id = "first" if number < 2 else "second"
        by_episode = [values[0] for values in score(adapter(name), episodes)]
        assert by_episode == pytest.approx([-1.0, 1.0, -1.0, 1.0])
    else:
        registry = foreign.rllm_advantage(monkeypatch)
        adapter(name)
        group = SimpleNamespace(group_id="task", trajectories=[])
        for at, role in enumerate(roles):
            steps = [SimpleNamespace(response_ids=[1])]
            group.trajectories.append(SimpleNamespace(uid=f"{at}", name=role, steps=steps))
        rewards = [np.array([0.0, 2.0, 1.0, 3.0])]
        (found,), _ = registry["headrace"](rewards=rewards, algorithm_config=None, traj_groups=[group])
    assert [*found] == pytest.approx([-0.5, -0.5, 0.5, 0.5])


def test_an_unknown_trainer_is_refused():
    with pytest.raises(TypeError, match=r"import path in their configuration: docs/coming-from/README\.md"):
        attach(SimpleNamespace(reward_weights=torch.ones(1)))


# -- slime and miles --------------------------------------------------------------------------------------


def samples_of(rewards, groups, rollouts=None, **columns) -> list[foreign.SlimeSample]:
    rows = zip(rewards, groups, rollouts or [None] * len(rewards), strict=True)
    return [
        foreign.SlimeSample(group_index=group, index=row, rollout_id=rollout, reward=reward, **columns)
        for row, (reward, group, rollout) in enumerate(rows)
    ]


def test_slime_gets_its_usual_advantages_for_complete_groups(recipe):
    args = foreign.slime_args(group_size=8, groups=3)
    for seed in range(5):
        rng = random.Random(seed)
        rewards = [rng.random() for _ in range(24)]
        samples = samples_of(rewards, [row // 8 for row in range(24)])
        raw, advantages = slime.post_process_rewards(args, samples)
        assert raw == rewards
        assert advantages == pytest.approx(foreign.slime_rewards(args, rewards), rel=1e-4, abs=1e-6)
        assert not any(sample.remove_sample for sample in samples)


def test_miles_gets_its_usual_advantages_if_rollouts_fan_out(recipe):
    recipe("as/miles")
    for seed in range(5):
        rng = random.Random(seed)
        rollouts = [rollout for rollout in range(12) for _ in range(rng.randint(1, 3))]
        reward = [rng.random() for _ in range(12)]
        samples = samples_of([reward[r] for r in rollouts], [r // 4 for r in rollouts], rollouts)
        _, advantages = slime.post_process_rewards(foreign.slime_args(4, 3), samples)
        assert advantages == pytest.approx(foreign.miles_rewards(samples), rel=1e-4, abs=1e-6)


def test_slime_removes_rows_that_a_recipe_masks(recipe):
    recipe("grpo", "pipeline.empty=count")  # slime also counts removed rows in the baseline
    samples = samples_of([1.0, 1.0, 1.0, 0.0], [0, 0, 1, 1])
    samples[2].remove_sample = True
    _, advantages = slime.post_process_rewards(foreign.slime_args(2, 2), samples)
    assert [sample.remove_sample for sample in samples] == [True, True, True, False]
    assert advantages == pytest.approx([0.0, 0.0, 0.0, -(0.5**0.5)], abs=1e-5)


def test_invalid_samples_of_slime_are_refused(recipe):
    for change, message in (
        ({"group_index": None}, "group_id"),
        ({"status": foreign.SlimeStatus.ABORTED}, "1 of 2"),
        ({"reward": float("nan")}, "every reward must be finite"),
        ({"reward": 0.5}, "must have the same reward; found rollout 1"),
        ({"index": None, "rollout_id": None}, "None"),
    ):
        samples = samples_of([1.0, 0.0, 0.0], [0, 0, 0], [0, 1, 1])
        vars(samples[2]).update(change)
        with pytest.raises(BatchError, match=message):
            slime.post_process_rewards(foreign.slime_args(2, 1), samples)


def mean_of(unit: str, rows: list[foreign.SlimeSample]) -> dict[int, float]:
    """For each row, the weight of each of its tokens in the mean over tokens, samples or rollouts."""
    tokens = {s.index: sum(s.loss_mask) for s in rows}
    of_rollout = {
        s.rollout_id: sum(tokens[t.index] for t in rows if t.rollout_id == s.rollout_id) for s in rows
    }
    every = sum(tokens.values())
    weights = {
        "token": lambda s: 1 / every,
        "sample": lambda s: 1 / (len(rows) * tokens[s.index]),
        "rollout": lambda s: 1 / (len(of_rollout) * of_rollout[s.rollout_id]),
    }
    return {s.index: weights[unit](s) for s in rows}


@pytest.mark.parametrize(("trainer", "unit"), [("slime", "token"), ("miles", "sample"), ("slime", "rollout")])
def test_slimes_data_have_the_weights_of_the_recipe(monkeypatch, recipe, trainer, unit):
    """Rollouts fan out, there are two steps, and groups of equal rewards are masked."""
    {"slime": foreign.slime_ray, "miles": foreign.miles_ray}[trainer](monkeypatch)
    hook = importlib.import_module(f"headrace.adapters.{trainer}").convert_samples_to_train_data
    recipe("dr_grpo", f"pipeline.stages.weight.unit={unit}", "pipeline.stages.weight.length=null")
    args = foreign.slime_args(group_size=4, groups=4)
    args.global_batch_size = 8
    silent = 0
    for seed in range(4):
        rng = random.Random(seed)
        rollouts = [rollout for rollout in range(16) for _ in range(rng.randint(1, 3))]
        reward = [rng.choice([0.0, 1.0]) if rollout >= 4 else 1.0 for rollout in range(16)]
        samples = samples_of([reward[r] for r in rollouts], [r // 4 for r in rollouts], rollouts)
        for sample in samples:
            sample.loss_mask = [1] + [rng.randint(0, 1) for _ in range(rng.randint(0, 2))]
            sample.response_length = len(sample.loss_mask)
        data = hook(args, samples)
        steps = foreign.slime_coefficients(data, 8)
        mean = {group: statistics.fmean(reward[4 * group : 4 * group + 4]) for group in range(4)}
        varies = {group: len(set(reward[4 * group : 4 * group + 4])) > 1 for group in range(4)}
        silent += sum(not each for each in varies.values())
        for step, groups in zip(steps, ((0, 1), (2, 3)), strict=True):
            rows = [s for s in samples if s.group_index in groups and varies[s.group_index]]
            weights = mean_of(unit, rows)
            expected = {s.index: weights[s.index] * (s.reward - mean[s.group_index]) for s in rows}
            assert step == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert data["raw_reward"] == [samples[at].reward for at in data["sample_indices"]]
        for at, sums, advantage in zip(
            *(data[name] for name in ("sample_indices", "rollout_mask_sums", "rewards")), strict=True
        ):
            group = samples[at].group_index
            if not varies[group]:  # masked rows have no weight, and a finite number all the same
                assert (advantage, sums) == (0, 1)
            elif trainer == "miles":
                assert type(sums) is int
            elif sums > 1:  # slime stores exact denominators, so that the advantage is the recipe's own
                assert advantage == pytest.approx(reward[rollouts[at]] - mean[group], abs=1e-6)
    assert silent > 4


def test_with_the_default_recipe_slimes_data_are_unchanged(monkeypatch, recipe):
    foreign.slime_ray(monkeypatch)
    args = foreign.slime_args(group_size=4, groups=2)
    rng = random.Random(0)
    samples = samples_of([rng.random() for _ in range(8)], [row // 4 for row in range(8)])
    rewards = [sample.reward for sample in samples]
    own = foreign.train_data(samples, (rewards, foreign.slime_rewards(args, rewards)))
    found = slime.convert_samples_to_train_data(args, samples)
    assert found["rewards"] == pytest.approx(own.pop("rewards"), rel=1e-4)
    assert found["rollout_mask_sums"] == pytest.approx(own.pop("rollout_mask_sums"))
    assert {name: found[name] for name in own} == own


def test_weights_and_steps_that_slimes_data_cannot_express_are_refused(monkeypatch, recipe):
    foreign.slime_ray(monkeypatch)
    foreign.miles_ray(monkeypatch)
    samples = samples_of([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1])
    args = foreign.slime_args(group_size=2, groups=2)
    recipe("dr_grpo", "pipeline.stages.filter.action=drop")
    with pytest.raises(BatchError, match=r"minibatch of 4"):
        slime.convert_samples_to_train_data(args, samples)
    recipe("dr_grpo", "pipeline.stages.split.unit=group", "pipeline.stages.split.remainder=uneven")
    args.global_batch_size = 1
    with pytest.raises(BatchError, match=r"global_batch_size=1 rollouts; found steps of \[2, 2\]"):
        slime.convert_samples_to_train_data(args, samples)
    for args.use_dynamic_global_batch_size, samples[2].adapter in ((True, None), (False, "lora")):
        with pytest.raises(BatchError, match="no metadata"):
            adapter("miles").convert_samples_to_train_data(args, samples)
    args.calculate_per_token_loss = True
    with pytest.raises(ValueError, match=r"ignores weights of rows.*weight\.unit=token"):
        slime.convert_samples_to_train_data(args, samples)


def rollout_data(seed: int, **columns) -> dict[str, list]:
    """The rows of one rank, with different lengths and with log-probabilities, as in slime's actor."""
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [rng.randint(1, 5) for _ in range(6)]
    made = {"response_lengths": lengths, "rollout_ids": [10 + row // 2 for row in range(6)]}
    made["rewards"] = [rng.uniform(-1, 1) for _ in range(6)]
    made["loss_masks"] = [torch.ones(length, dtype=torch.int) for length in lengths]
    for name in ("kl", "log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs"):
        made[name] = [-torch.rand(length, generator=torch_rng) for length in lengths]
    return made | columns


def test_slimes_tokens_have_the_recipes_advantage(recipe):
    """A token has the reward of its row, or with `opd` slime's A − c · (student − teacher) of --use-opd."""
    args = foreign.slime_args(2, 3)
    for seed in range(5):
        recipe("as/slime")
        data = rollout_data(seed)
        for mask in data["loss_masks"]:
            mask[1::2] = 0  # the term changes nothing at these tokens
        slime.compute_advantages(args, data)
        data["returns"][0] = None  # slime may whiten one of the lists
        for row, length in enumerate(data["response_lengths"]):
            assert data["advantages"][row].tolist() == pytest.approx(
                [data["rewards"][row]] * length, abs=1e-6
            )
        recipe("opd", "pipeline.stages.teacher.factor=0.5")
        for args.use_rollout_logprobs in (False, True):
            student = data["rollout_log_probs" if args.use_rollout_logprobs else "log_probs"]
            slime.compute_advantages(args, data)
            for row, teacher in enumerate(data["teacher_log_probs"]):
                theirs = data["rewards"][row] - 0.5 * (student[row] - teacher) * data["loss_masks"][row]
                torch.testing.assert_close(data["advantages"][row], theirs, rtol=1e-6, atol=1e-6)
                assert torch.equal(data["returns"][row], data["advantages"][row])


def test_slimes_hooks_share_a_recipe_between_rows_and_tokens(recipe):
    recipe("opd")
    args, samples = foreign.slime_args(2, 2), samples_of([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1])
    with pytest.raises(BatchError, match="teacher_log_probs"):
        slime.post_process_rewards(args, samples)
    args.custom_advantage_function_path = "headrace.adapters.slime.compute_advantages"
    _, advantages = slime.post_process_rewards(args, samples)
    assert advantages == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0, 0.0], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "columns", "error", "message"),
    [
        ("gtpo", {}, ValueError, r"without their groups: .*these compare rows: entropy"),
        ("kl_in_advantage", {}, ValueError, r"without their groups: .*these compare rows: kl"),
        (
            "opd pipeline.stages.signs=signs pipeline.after.signs=teacher",
            {},
            ValueError,
            r"must come last, .*found gate, collapse, advantage, teacher, signs$",
        ),
        (
            "opd +stage@pipeline.stages.whole=signs pipeline.after.whole=teacher",
            {},
            ValueError,
            r"must come last, .*found gate, collapse, advantage, teacher, whole$",
        ),
        ("opd", {"teacher_log_probs": None}, BatchError, "teacher_log_probs"),
        ("opd", {"kl": [torch.zeros(4)] * 6}, BatchError, r"kl must .*found 4 for the 1 tokens of row 2"),
    ],
)
def test_recipes_that_compare_rows_of_slimes_ranks_are_refused(recipe, name, columns, error, message):
    recipe(*name.split())
    with pytest.raises(error, match=message):
        slime.compute_advantages(foreign.slime_args(2, 3), rollout_data(0, **columns))


# -- prime-rl ---------------------------------------------------------------------------------------------


def score(module: ModuleType, episodes: list[foreign.Episode]) -> list[list[float] | None]:
    algorithm = module.RecipeAlgorithm(SimpleNamespace(), None)
    asyncio.run(algorithm.score_group(episodes))
    return [node.advantages for e in episodes for t in e.traces for node in t.nodes]


@pytest.fixture
def prime_rl(monkeypatch, recipe) -> ModuleType:
    foreign.prime_rl_algo(monkeypatch)
    recipe(None, "~pipeline.stages.gate")
    return adapter("prime_rl")


def episode(reward: float, *masks: list[bool], **columns) -> foreign.Episode:
    return foreign.Episode([foreign.Trace(reward, [foreign.Node(mask) for mask in masks], **columns)])


def test_prime_rl_gets_its_usual_advantages(prime_rl):
    for seed in range(5):
        rng = random.Random(seed)
        episodes = [episode(rng.random(), [False], [True] * rng.randint(1, 3)) for _ in range(8)]
        episodes[3].traces[0].has_error = True
        found = [values for values in score(prime_rl, episodes) if values is not None]
        sampled = [sum(e.traces[0].nodes[1].mask) for e in episodes if not e.traces[0].has_error]
        theirs = zip(foreign.prime_rl_advantages(episodes), sampled, strict=True)
        assert found == [pytest.approx([value] * number, abs=1e-6) for value, number in theirs]


def test_prime_rl_gets_an_advantage_per_token(prime_rl, recipe):
    words = [
        "~pipeline.stages.gate",
        "+stage@pipeline.stages.late=token_advantage",
        "pipeline.stages.late.how=multiply",
        "'+pipeline.stages.late.term={_target_: test_coming_from.Position}'",
        "pipeline.order=[collapse,advantage,late,split,weight]",
    ]
    recipe("as/prime_rl", *words)
    episodes = [episode(1.0, [True, True], [False, True]), episode(0.0, [True])]
    assert score(prime_rl, episodes) == [[0.0, 0.5], [1.0], [-0.0]]
    episodes = [episode(1.0, [True, True]), episode(0.0, [True])]
    assert score(prime_rl, episodes) == [[0.0, 0.5], [-0.0]]


def test_prime_rl_refuses_a_group_that_lacks_a_rollout(prime_rl, recipe):
    recipe(None, "pipeline.stages.gate.group_size=3")
    with pytest.raises(IncompleteGroupsError, match="2 of 3"):
        score(prime_rl, [episode(1.0, [True]), episode(0.0, [True])])
    assert score(prime_rl, []) == []


class Position:
    """A token term: the index of the token."""

    def __call__(self, batch, mask):
        return mask.cumsum(1) - 1.0


# -- SkyRL, rLLM, torchtitan ------------------------------------------------------------------------------


def test_skyrl_gets_its_usual_advantages_in_groups_of_different_sizes(monkeypatch, recipe):
    registry = foreign.skyrl_ppo_utils(monkeypatch)
    recipe(None, "~pipeline.stages.gate")
    adapter("skyrl")
    for seed in range(5):
        rng = random.Random(seed)
        uids = np.array([f"uid-{group}" for group in range(5) for _ in range(rng.randint(1, 4))])
        rng.shuffle(uids)
        rewards, mask = torch.zeros(len(uids), 4), torch.zeros(len(uids), 4)
        for row in range(len(uids)):
            mask[row, : rng.randint(1, 4)], rewards[row, 0] = 1.0, rng.choice([0.0, 1.0, 0.25])
        found, returns = registry["headrace"](
            token_level_rewards=rewards, response_mask=mask, index=uids, values=None, config=None
        )
        torch.testing.assert_close(
            found, foreign.verl_advantages(rewards, mask, uids)[0], rtol=2e-6, atol=2e-6
        )
        assert torch.equal(found, returns)
    pairs = [(uid, 0) for uid in uids]  # a uid may be any object
    assert torch.equal(registry["headrace"](rewards, mask, index=pairs)[0], found)
    recipe(None, "pipeline.stages.gate.group_size=8")
    with pytest.raises(IncompleteGroupsError, match=r"uid-0.* of 8"):
        registry["headrace"](token_level_rewards=rewards, response_mask=mask, index=uids)


def test_verl_gives_all_outputs_of_a_session_the_advantage_of_the_last_output(monkeypatch, recipe):
    """The advantages equal those of a loop, which orders the outputs by number, and are 0 if masked."""
    registry, trainer = foreign.verl_trainer(monkeypatch)
    monkeypatch.delitem(sys.modules, "headrace.adapters.verl", raising=False)
    importlib.import_module("headrace.adapters.verl")  # the import replaces the trainer's function
    compute, seen = trainer.compute_advantage_for_multi_trajectories, 0
    for seed in range(5):
        rng = random.Random(seed)
        sessions = [f"a_prompt_{uid}_{session}" for uid in range(3) for session in range(4)]
        keys = [f"{one}_{output}" for one in sessions for output in range(rng.choice([1, 2, 12]))]
        keys += [f"pad{seed:032x}_{number}_0" for number in range(3)]
        rng.shuffle(keys)
        scores, mask = torch.zeros(len(keys), 5), torch.zeros(len(keys), 5)
        for row in range(len(keys)):
            scores[row, 0] = rng.choice([0.0, 1.0, 0.25])
            mask[row, rng.randint(0, 2) : rng.randint(3, 5)] = 1.0
        data = SimpleNamespace(batch={"response_mask": mask, "token_level_rewards": scores})
        found = compute(data, keys, "headrace", num_repeat=4).batch["advantages"]
        last: dict[str, tuple[int, float]] = {}
        for key, score in zip(keys, scores.sum(1).tolist(), strict=True):
            session, _, output = key.rpartition("_")
            last[session] = max(last.get(session, (-1, 0.0)), (int(output), score))
        for key, advantages, own in zip(keys, found, mask, strict=True):
            expected = 0.0
            if not key.startswith("pad"):
                uid = key.rsplit("_", 2)[0]
                group = [score for session, (_, score) in last.items() if session.rsplit("_", 1)[0] == uid]
                mine, std = last[key.rpartition("_")[0]][1], statistics.stdev(group)
                expected = (mine - statistics.fmean(group)) / (std + 1e-6) if std else 0.0
                seen += int(own.sum() < 5) * bool(expected)
            assert advantages.tolist() == pytest.approx((own * expected).tolist(), abs=1e-5), key
        assert torch.equal(data.batch["returns"], found)
    assert seen > 20
    by_std = compute(data, keys, "headrace", num_repeat=4).batch["advantages"]
    off = compute(data, keys, "headrace", num_repeat=4, norm_adv_by_std_in_grpo=False).batch["advantages"]
    assert not torch.equal(by_std, off)
    for options, said in (({"num_repeat": 3}, "4 of 3"), ({}, "4 of 1")):
        with pytest.raises(BatchError, match=said):
            compute(data, keys, "headrace", **options)
    recipe(None, "~pipeline.stages.gate")
    row = {"token_level_rewards": scores, "response_mask": mask, "index": ["u"] * len(mask)}
    with_std, usual, without = (
        registry["headrace"](**row, config=config)[0]
        for config in (None, {"others": 1}, {"norm_adv_by_std_in_grpo": False})
    )
    assert torch.equal(with_std, usual)
    assert not torch.equal(with_std, without)
    assert compute(data, keys, "grpo", num_repeat=4) == "verl's grpo, 4 rollouts"
    recipe("grpo")
    few = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])  # the last session has no token in the loss
    data = SimpleNamespace(batch={"response_mask": few, "token_level_rewards": torch.eye(3)[:, :2]})
    found = compute(data, ["a_0_0", "a_1_0", "a_2_0"], "headrace", num_repeat=3).batch["advantages"]
    assert not found.any()  # the other two have equal rewards
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.v1", None)  # a verl without TransferQueue
    registry.clear()
    adapter("verl")
    assert [*registry] == ["headrace"]


def test_rllm_gets_its_usual_advantages_for_each_role(monkeypatch, recipe):
    registry = foreign.rllm_advantage(monkeypatch)
    recipe(None, "~pipeline.stages.gate")
    adapter("rllm")
    for seed in range(5):
        rng = random.Random(seed)
        groups = [foreign.rllm_group(f"task{at}:solver", rng) for at in range(4)]
        rewards = [np.array([trajectory.reward for trajectory in group.trajectories]) for group in groups]
        found, returns = registry["headrace"](
            rewards=rewards, algorithm_config=SimpleNamespace(), traj_groups=groups
        )
        for mine, theirs, again in zip(found, rewards, returns, strict=True):
            alone = len(theirs) == 1
            expected = (theirs - (0 if alone else theirs.mean())) / ((1 if alone else theirs.std()) + 1e-6)
            assert mine == pytest.approx(expected, rel=2e-6, abs=2e-6)
            assert again is mine
    assert registry["headrace"](rewards=[], algorithm_config=None, traj_groups=[]) == ([], [])
    groups[1].trajectories.append(groups[0].trajectories[0])  # a rollout of another task
    rewards[1] = np.append(rewards[1], rewards[0][0])
    with pytest.raises(BatchError, match="group"):
        registry["headrace"](rewards=rewards, algorithm_config=None, traj_groups=groups)


def test_torchtitan_gets_its_usual_advantages_and_failed_rollouts_are_refused(monkeypatch, recipe):
    status = foreign.torchtitan_config(monkeypatch)
    recipe(None, "pipeline.stages.gate.group_size=6")
    module = adapter("torchtitan")
    estimator = module.RecipeEstimator.Config().build()
    for seed in range(5):
        rng = random.Random(seed)
        rewards = [rng.choice([0.0, 1.0, 0.25]) for _ in range(6)]
        group = foreign.torchtitan_group(rewards, [status.COMPLETED] * 6)
        mean = sum(rewards) / 6
        assert estimator(group) == pytest.approx([reward - mean for reward in rewards], abs=1e-6)
    config = module.RecipeEstimator.Config(should_std_normalize=True)
    with pytest.raises(AttributeError):
        config.should_normalize = True  # a misspelt option
    with pytest.raises(TypeError):
        type(config)(True)
    estimator = config.build()
    std = np.std(rewards) + 1e-6
    assert estimator(group) == pytest.approx([(reward - mean) / std for reward in rewards], abs=2e-6)
    for each in group.rollouts:
        each.reward *= 1e-6
    tiny = [(reward - mean) * 1e-6 / (np.std(rewards) * 1e-6 + 1e-6) for reward in rewards]
    assert estimator(group) == pytest.approx(tiny, abs=1e-4)
    for each, reward in zip(group.rollouts, rewards, strict=True):
        each.reward = reward
    group.rollouts[2].status = status.ERROR_TIMEOUT
    with pytest.raises(IncompleteGroupsError, match=r"5 of 6"):
        estimator(group)
    group.rollouts[2].status = status.TRUNCATED_LENGTH
    assert estimator(group)[2] == pytest.approx((rewards[2] - mean) / std, abs=2e-6)
    recipe("grpo", "pipeline.stages.gate.group_size=6")
    own = statistics.stdev(rewards)  # a recipe that you name keeps its divisor n − 1
    assert estimator(group)[2] == pytest.approx((rewards[2] - mean) / own, abs=1e-4)


# -- Trinity-RFT, OpenRLHF ---------------------------------------------------------------------------------


def test_trinity_gets_its_own_numbers_of_runs_with_several_steps(monkeypatch, recipe):
    """The advantage of a run, which counts once, is in the mask of each of its steps."""
    foreign.trinity_operator(monkeypatch)
    recipe(None, "pipeline.stages.gate.group_size=4")
    operator = adapter("trinity").RecipeOperator()
    for seed in range(5):
        rng = random.Random(seed)
        rewards = {f"{task}/{run}": rng.choice([0.0, 1.0, 0.25]) for task in range(3) for run in range(4)}
        experiences = [
            foreign.trinity_experience(
                run[0], run, step, reward, torch.tensor([rng.random() < 0.7 for _ in range(5)])
            )
            for run, reward in rewards.items()
            for step in range(rng.randint(1, 3))
        ]
        rng.shuffle(experiences)
        found, metrics = asyncio.run(operator.process(experiences))
        assert [id(each) for each in found] == [id(e) for e in experiences if e.action_mask.any()]
        assert metrics["headrace/rows/trained"] == len(found)
        for each in found:
            group = [reward for run, reward in rewards.items() if run[0] == each.eid.tid]
            expected = (each.reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)
            assert each.advantages.tolist() == pytest.approx((each.action_mask * expected).tolist(), abs=1e-5)
            assert torch.equal(each.returns, each.advantages)
            assert each.returns is not each.advantages
    assert asyncio.run(operator.process([])) == ([], {})
    kind = type(operator)  # Trinity calls these two on the class
    assert not kind.compute_in_trainer()  # a step of the trainer has only some experiences
    assert kind.default_args() == {}
    last = next(each for each in experiences if each.action_mask.any())
    last.truncate_status = "response_truncated"
    recipe("grpo", "pipeline.stages.gate.group_size=4", NOT_TRUNCATED)
    found, _ = asyncio.run(adapter("trinity").RecipeOperator().process(experiences))
    assert found
    assert id(last) not in map(id, found)


def test_the_steps_of_a_run_of_trinity_are_in_order(monkeypatch, recipe):
    """The rewards of the last steps are 0 and 1."""
    foreign.trinity_operator(monkeypatch)
    by_turn = ("pipeline.stages.collapse.reward=last", "pipeline.stages.collapse.turn_key=turn")
    recipe(None, "pipeline.stages.gate.group_size=2", *by_turn)
    rows = [("a", 1, 0.0), ("b", 1, 1.0), ("a", 0, 5.0), ("b", 0, 5.0)]
    mask = torch.ones(2, dtype=torch.bool)
    given = [foreign.trinity_experience("t", run, step, reward, mask) for run, step, reward in rows]
    found, _ = asyncio.run(adapter("trinity").RecipeOperator().process(given))
    signs = [float(each.advantages[0].sign()) for each in found]
    assert signs == [-1.0, 1.0, -1.0, 1.0]


def test_openrlhf_gets_its_own_numbers_with_its_kl(monkeypatch, recipe):
    """The rollouts of three prompts are in four experiences in any order; one text is drawn twice."""
    maker = foreign.openrlhf_maker(monkeypatch, group_size=4, kl=0.1)
    recipe()
    adapter("openrlhf").replace_advantages()
    for seed in range(5):
        rng = random.Random(seed)
        order, prompts = rng.sample(range(12), 12), ["a", "b", "a"]
        rewards = [rng.choice([0.0, 1.0, 0.25]) for _ in range(12)]
        experiences = []
        for start in range(0, 12, 3):
            rows = order[start : start + 3]
            mask = torch.tensor(
                [[at < length for at in range(5)] for length in rng.choices(range(1, 6), k=3)]
            )
            kl = torch.rand(3, 5, requires_grad=True) * mask
            given = torch.tensor([rewards[row] for row in rows]), mask, kl
            experiences.append(foreign.openrlhf_experience(rows, [prompts[row // 4] for row in rows], *given))
        terms = [each.kl for each in experiences]
        found = maker.compute_advantages_and_returns(experiences)
        for each, kl in zip(found, terms, strict=True):
            for at, row in enumerate(each.index):
                group = rewards[row // 4 * 4 : row // 4 * 4 + 4]
                shaped = (rewards[row] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-9)
                length, penalty = int(each.action_mask[at].sum()), (0.1 * kl[at]).tolist()
                returns = [shaped - sum(penalty[token:]) for token in range(length)] + [0.0] * (5 - length)
                assert each.advantages[at].tolist() == pytest.approx(returns, abs=1e-4)
                assert each.info["return"][at].item() == pytest.approx(shaped - sum(penalty), abs=1e-4)
            assert torch.equal(each.returns, each.advantages)
            assert not each.returns.requires_grad
            assert each.kl is None
    experiences[0].prompts[0] = "another"
    with pytest.raises(IncompleteGroupsError, match="of 4"):
        maker.compute_advantages_and_returns(experiences)


def test_openrlhfs_penalties_of_length_and_clip_range_apply(monkeypatch, recipe):
    """A penalty lowers the second reward from 3 to 1. The advantages −1 and 1 are clipped to ±1/2."""
    maker = foreign.openrlhf_maker(monkeypatch, group_size=2)
    maker.strategy.args.reward.clip_range = (-0.5, 0.5)

    def penalise(experiences, args):
        experiences[0].rewards[1] -= 2.0

    penalties = sys.modules["openrlhf.trainer.ppo_utils.length_penalty"]
    monkeypatch.setattr(penalties, "apply_length_penalties", penalise)
    recipe("as/openrlhf", "pipeline.stages.advantage.scale=none")
    mask = torch.tensor([[True, True], [True, False]])
    one = foreign.openrlhf_experience([0, 1], ["a", "a"], torch.tensor([-1, 3]), mask)  # whole numbers
    adapter("openrlhf").replace_advantages()
    (found,) = maker.compute_advantages_and_returns([one])
    assert found.advantages.tolist() == [[-0.5, -0.5], [0.5, 0.0]]
    assert found.rewards.tolist() == [-1.0, 1.0]
    found.advantages += 1.0  # OpenRLHF normalizes the advantages in place
    assert found.returns.tolist() == [[-0.5, -0.5], [0.5, 0.0]]


def test_modules_and_calls_in_the_pages_exist():
    text = "\n".join(page.read_text() for page in PAGES)
    paths = set(re.findall(r"headrace\.adapters\.(\w+)(?:\.(\w+)| import (\w+))?", text))
    assert len(paths) >= 8
    for module, attribute, imported in paths:
        tree = ast.parse((ROOT / "adapters" / f"{module}.py").read_text())
        names = {getattr(node, "name", "") for node in tree.body}
        assert not (attribute or imported) or (attribute or imported) in names, (module, attribute, imported)
    of_recipe = r'(?:HEADRACE_RECIPE=([\w/]+)[^\n]*\nexport )?HEADRACE_OVERRIDES="([^"]*)"'
    for recipe, said in set(re.findall(of_recipe, text)):
        assert load_pipeline(recipe or "grpo", *shlex.split(said)).stages
    quoted = re.findall(r"^(attach\(.*?\)) *(?:#.*)?$", text, re.MULTILINE)
    assert len(quoted) > 4
    for line in quoted:
        call = ast.parse(line).body[0].value
        recipe = ast.literal_eval(call.args[1]) if call.args[1:] else "as/trl"
        keywords = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        keywords.pop("over_generation", None)  # load_pipeline lacks this option
        assert load_pipeline(recipe, **keywords)


def test_recipes_criteria_and_options_in_the_pages_exist():
    text = "\n".join(page.read_text() for page in PAGES)
    for cell in re.findall(r"`pipeline=[^|\n]*", text):
        for name in re.findall(r"`(?:pipeline=)?([\w/]+)`", cell):
            assert (ROOT / "conf" / "pipeline" / f"{name}.yaml").exists(), name
    for name in re.findall(r"`(as/\w+)`|HEADRACE_RECIPE(?:=|\": \")([\w/]+)", text):
        name = "".join(name)
        assert (ROOT / "conf" / "pipeline" / f"{name}.yaml").exists(), name
    for stage, option in re.findall(r"`(?:pipeline\.stages\.)?(\w+)\.(\w+)(?:=[^`]*)?`", text):
        node = ROOT / "conf" / "stage" / f"{stage}.yaml"
        assert not node.exists() or re.search(rf"^{option}:", node.read_text(), re.MULTILINE), option
