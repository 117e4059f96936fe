"""Check an adapter in the installed code of its trainer, in one process: `python peer_checks.py verl`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.adapters import attach
from headrace.pipeline import Pipeline, load_pipeline
from headrace.transforms import BatchError, TokenAdvantage

BATCHES = 100


def same(found: torch.Tensor, theirs: torch.Tensor) -> None:
    """Check that advantages near 1 differ by at most 2e-6. float32 loses digits if a group's std is small."""
    torch.testing.assert_close(found.float(), theirs.float(), rtol=2e-6, atol=2e-6)


def refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises((BatchError, ValueError), match=says):
        call()


def rewards_of(rng: random.Random, count: int) -> list[float]:
    """Random rewards, some equal. None are nearly equal, or the peer's std would be a rounding error."""
    return [rng.choice([0.0, 1.0, 0.5, round(rng.random(), 2)]) for _ in range(count)]


class ForGPUs(MetaPathFinder, Loader):
    """Stand-ins for packages that are not called here, and can only be installed with a GPU."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return (
            ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ("flash_attn", "vllm") else None
        )

    def exec_module(self, module: ModuleType) -> None:
        def anything(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = anything  # type: ignore[method-assign]


def verl() -> None:
    """verl 0.9.1: the registry, with a row per rollout, and the v1 trainer's function, with more rows."""
    import numpy as np

    os.environ["VERL_USE_EXTERNAL_MODULES"] = "headrace.adapters.verl"
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.v1 import trainer_base

    import headrace.adapters.verl as adapter

    their_sessions = adapter.theirs

    os.environ["HEADRACE_OVERRIDES"] = "~pipeline.stages.gate"
    for seed in range(BATCHES):
        rng = random.Random(seed)
        uids = [f"uid-{group}" for group in range(4) for _ in range(rng.randint(1, 4))]
        rng.shuffle(uids)
        rewards, mask = torch.zeros(len(uids), 5), torch.zeros(len(uids), 5)
        for row, reward in enumerate(rewards_of(rng, len(uids))):
            length = rng.randint(1, 5)
            mask[row, :length], rewards[row, length - 1] = 1.0, reward
        found, _ = core_algos.get_adv_estimator_fn("headrace")(
            token_level_rewards=rewards, response_mask=mask, index=np.array(uids, dtype=object), config=None
        )
        theirs, _ = core_algos.compute_grpo_outcome_advantage(rewards.clone(), mask, np.array(uids))
        same(found, theirs)

    os.environ.pop("HEADRACE_OVERRIDES")
    for seed in range(BATCHES):
        rng = random.Random(seed)
        keys = [
            f"prompt_{uid}_{session}_{output}"
            for uid in range(3)
            for session in range(4)
            for output in range(rng.randint(1, 3))
        ]
        rng.shuffle(keys)
        # verl may pad with more or fewer rows than a group has.
        real, filling = len(keys), rng.choice([0, 0, 2, 7])
        keys += [f"pad{seed:032x}_{number}_0" for number in range(filling)]
        rewards, mask = torch.zeros(len(keys), 5), torch.zeros(len(keys), 5)
        for row, reward in enumerate(rewards_of(rng, real)):
            rewards[row, 0], mask[row, : rng.randint(1, 5)] = reward, 1.0

        def batch(rows=None, keys=keys, rewards=rewards, mask=mask):
            rows = range(len(keys)) if rows is None else rows
            uids = np.array([keys[row].rsplit("_", 2)[0] for row in rows], dtype=object)
            columns = {"token_level_rewards": rewards[rows].clone(), "response_mask": mask[rows].clone()}
            return DataProto(TensorDict(columns, [len(uids)]), {"uid": uids}), [keys[row] for row in rows]

        def ours(name="headrace", rows=None, batch=batch, num_repeat=4):
            compute = trainer_base.compute_advantage_for_multi_trajectories
            return compute(*batch(rows), name, num_repeat=num_repeat).batch["advantages"]

        theirs = their_sessions(*batch(), core_algos.AdvantageEstimator.GRPO).batch["advantages"]
        same(ours(), theirs)
        same(ours("rloo"), their_sessions(*batch(), "rloo").batch["advantages"])  # verl's own estimator

        os.environ["HEADRACE_OVERRIDES"] = "pipeline.stages.collapse.reward=sum"
        of_session, of_uid = (
            torch.stack(
                [
                    sum(rewards.sum(1)[at] for at, e in enumerate(keys) if e.rsplit("_", n)[0] == key)
                    for key in (row.rsplit("_", n)[0] for row in keys)
                ]
            )
            for n in (1, 2)
        )  # by hand, over the rewards of all outputs
        below = of_session < of_uid / 4
        assert ((ours().sum(1) < 0) == below)[(of_session - of_uid / 4).abs() > 1e-5].all()
        os.environ.pop("HEADRACE_OVERRIDES")

        last: dict[str, int] = {}
        for row, key in enumerate(keys[:real]):
            session, output = key.rsplit("_", 1)
            if session not in last or int(keys[last[session]].rsplit("_", 1)[1]) < int(output):
                last[session] = row
        session, row = rng.choice(list(last.items()))
        siblings = [at for at, key in enumerate(keys) if key.rsplit("_", 1)[0] == session and at != row]
        mask[row] = 0.0
        again = their_sessions(*batch(), core_algos.AdvantageEstimator.GRPO).batch["advantages"]
        assert not again[siblings].any()  # the whole session, because its last output is masked
        same(ours()[siblings], theirs[siblings])
        lost = [at for at, key in enumerate(keys) if key.rsplit("_", 1)[0] != session]
        refused(lambda: ours(rows=lost), "has 3 of 4")  # noqa: B023


def verl_sampler() -> None:
    """Compare verl 0.9.1's ReplayBufferAsync with ours in the loop of verl's trainer. Print a table."""
    from statistics import fmean

    from verl.trainer.ppo.v1 import replay_buffer
    from verl_loop import Trainer

    from headrace.pipeline.queues import in_place

    def own(**options: object) -> replay_buffer.ReplayBufferAsync:
        buffer = replay_buffer.ReplayBufferAsync(**options)
        buffer._wait_for_next_poll = lambda *_: trainer.sleep(0.0) or 0.0
        return buffer

    steps, groups, bound = 150, 8, 4
    kinds = {
        "verl, `drop`": {"strategy": "drop", "kind": own},
        "verl, `wait`": {"strategy": "wait", "kind": own},
        "headrace, `wait`": {"strategy": "wait"},
    }
    print("| sampler | slow prompts, dispatched → trained | lost | mean age | oldest | steps |")
    for name, options in kinds.items():
        runs = []
        for seed in range(5):
            trainer = Trainer(seed, groups, warmup=2, bound=bound, steps=steps, spread=0.9, **options)
            replay_buffer.tq = trainer.queue
            in_place.tq, in_place.time = (lambda: trainer.queue), SimpleNamespace(sleep=trainer.sleep)  # noqa: B023
            runs.append(trainer.go())
            assert all(len(ages) == 1 for ages in trainer.ages.values())
        sent, trained, lost = (100 * fmean(run.shares()[at] for run in runs) for at in range(3))
        ages = [age for run in runs for ages in run.ages.values() for age in ages]
        speed = fmean(100 * steps * run.ticks / run.now for run in runs)
        print(
            f"| {name} | {sent:.1f} → {trained:.1f} % | {lost:.0f} % | {fmean(ages):.1f} | {max(ages)} | "
            f"{speed:.0f} % |"
        )
        if name.startswith("headrace"):
            assert (sent, lost) == (trained, 0.0)
            assert max(ages) <= bound


def agentlightning() -> None:
    """verl's estimator gets one row of each rollout, and the other rows get the same advantage."""
    import numpy as np

    os.environ["VERL_USE_EXTERNAL_MODULES"] = "headrace.adapters.verl"
    os.environ["HEADRACE_OVERRIDES"] = "pipeline.stages.gate.group_size=4"
    from agentlightning.verl.rollout_level_advantage import compute_rollout_level_advantage
    from tensordict import TensorDict
    from verl import DataProto

    for seed in range(BATCHES):
        rng = random.Random(seed)
        rollouts = [rollout for rollout in range(12) for _ in range(rng.randint(1, 3))]
        rng.shuffle(rollouts)
        reward = rewards_of(rng, 12)
        rewards, mask = torch.zeros(len(rollouts), 4), torch.zeros(len(rollouts), 4)
        for row, rollout in enumerate(rollouts):
            rewards[row, 0], mask[row, : rng.randint(1, 4)] = reward[rollout], 1.0

        def advantages(name, rows=rollouts, rewards=rewards, mask=mask):
            columns = {"token_level_rewards": rewards.clone(), "response_mask": mask.clone()}
            ids = {"uid": [f"prompt {row // 4}" for row in rows], "rollout_id_list": list(map(str, rows))}
            texts = {key: np.array(values, dtype=object) for key, values in ids.items()}
            batch = DataProto(TensorDict(columns, [len(rows)]), texts)
            options = {"gamma": 1.0, "lam": 1.0, "num_repeat": 4, "config": None}
            found, _ = compute_rollout_level_advantage(batch, adv_estimator=name, **options)
            return found.batch["advantages"]

        same(advantages("headrace"), advantages("grpo"))


def swift() -> None:
    """`_compute_advantages` of the real class on samples and rewards, called as by its trainer."""
    os.environ.update(RANK="-1", WORLD_SIZE="1")
    from accelerate import PartialState
    from swift.pipelines.train.rlhf import SwiftRLHF
    from swift.rl_core.data import GRPOSample
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    PartialState(cpu=True)

    def trainer(dynamic: bool) -> GRPOTrainer:
        made = GRPOTrainer.__new__(GRPOTrainer)
        names = ["one", "two"]
        metrics = {"train": defaultdict(list)}
        logs = {"advantages": [], "rewards": {name: [] for name in names}}
        vars(made).update(
            model=SimpleNamespace(training=True), num_generations=4, num_generations_eval=2, beta=0.0
        )
        vars(made).update(kl_in_reward=False, reward_weights=torch.ones(2), dynamic_num_samples=dynamic)
        vars(made).update(advantage_estimator="grpo", scale_rewards="group", reward_func_names=names)
        vars(made).update(_metrics=metrics, _logs=logs, accelerator=SimpleNamespace(device="cpu"))
        vars(made).update(state=SimpleNamespace(global_step=0))
        return made

    for seed in range(BATCHES):
        rng = random.Random(seed)
        requests = [f"request {at}" for at in range(12)]
        dynamic = seed % 2 == 1
        rows = [at for at in range(12) for _ in range(rng.randint(1, 3) if dynamic else 1)]
        reward = torch.tensor([rewards_of(rng, 2) for _ in range(12)])
        reward[3, 1] = float("nan")
        samples = [
            GRPOSample(messages=[], prompt_id=f"prompt_{at // 4}", request_id=requests[at]) for at in rows
        ]
        theirs = trainer(dynamic)._compute_advantages(samples, reward[rows], [])
        options = {"stages": {"collapse": {"columns": 2}}}
        mine = attach(trainer(dynamic), **options)
        same(mine._compute_advantages(samples, reward[rows], []), theirs)
        assert len(mine._metrics["train"]["reward"]) == 1
        samples[0].finish_reason = "length"
        not_truncated = "criterion@pipeline.stages.filter.criterion=not_truncated"
        skip = {"collapse": {"columns": 2, "missing": "skip"}}
        mine.pipeline = load_pipeline("dr_grpo", not_truncated, stages=skip)
        found = mine._compute_advantages(samples, reward[rows], [])
        assert found[0] == 0.0
        samples[-1].prompt_id = "prompt_0"
        refused(lambda: mine._compute_advantages(samples, reward[rows], []), "group")  # noqa: B023
    assert list(inspect.signature(SwiftRLHF.train).parameters) == ["self", "trainer"]  # as on the page
    other = trainer(False)
    other.reward_weights = torch.tensor([1.0, 0.5])
    refused(lambda: attach(other), "remove reward_weights from the trainer")


def unsloth() -> None:
    """Training steps of the GRPOTrainer that unsloth 2026.10.9 writes, loaded as in its own CPU tests."""
    os.environ |= {
        "UNSLOTH_ALLOW_CPU": "1",
        "UNSLOTH_COMPILE_DISABLE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
    }
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)  # Unsloth writes its trainers into this folder
    importlib.import_module("unsloth")
    patch = importlib.import_module("unsloth.models.rl")._patch_trl_rl_trainers
    patch("grpo_trainer")
    patch("rloo_trainer")
    import trl
    from small_trl import small_trainer

    def trained(
        recipe: str | None, *words: str, **options: Any
    ) -> tuple[Any, list[dict[str, Any]], list[Any]]:
        """Return a trainer after two steps, its batches and its parameters. Recipe None: without headrace."""

        def ones(completions: list[str], **others: Any) -> list[float]:
            return [completion.count("1") + 0.1 * len(completion) for completion in completions]

        trainer = small_trainer(
            folder, trl.GRPOTrainer, [ones], 2, optim="adamw_torch", bf16=False, gradient_accumulation_steps=1
        )
        trainer.model.for_training = lambda **_: trainer.model.train()  # FastLanguageModel adds such methods
        trainer.model.for_inference = trainer.model.eval
        assert "Unsloth" in type(trainer).__name__
        if recipe:
            attach(trainer, recipe, *words, **options)
        own, batches = trainer._generate_and_score_completions, []

        def spy(inputs: Any) -> Any:
            batches.append(own(inputs))
            return batches[-1]

        trainer._generate_and_score_completions = spy
        torch.manual_seed(1)
        trainer.train()
        return trainer, batches, [each.detach().clone() for each in trainer.model.parameters()]

    _, theirs, their_weights = trained(None)
    ours, batches, weights = trained("as/trl")
    for mine, own in zip(batches, theirs, strict=True):
        torch.testing.assert_close(mine["advantages"].squeeze(1), own["advantages"], rtol=1e-4, atol=1e-5)
    for mine, own in zip(weights, their_weights, strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-5)
    assert ours.last_run.ledger.counts()["trained"] == 8
    masked, batches, _ = trained("dr_grpo", "criterion@pipeline.stages.filter.criterion=not_truncated")
    assert masked.last_run.ledger.counts()["filter/truncated"]
    assert all(torch.equal(each["tool_mask"].any(1), (each["advantages"] != 0).any(1)) for each in batches)
    _, batches, _ = trained("grpo", over_generation=2)
    assert [len(each["completion_ids"]) for each in batches] == [4, 4]
    stages = {name: load_pipeline("rloo").stages[name] for name in ("gate", "collapse", "advantage")}
    by_token = TokenAdvantage(term=lambda batch, tokens: tokens.float().cumsum(1))
    refused(lambda: trained(Pipeline(stages | {"token": by_token})), "Unsloth's loss has one advantage")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got a UnslothRLOOTrainer"):
        attach(small_trainer(folder, trl.RLOOTrainer, [len], 1, beta=0.0, optim="adamw_torch", bf16=False))


def trinity() -> None:
    """The operator in Trinity's registry, made from the configuration as by its pipeline."""
    from trinity.algorithm.advantage_fn import ADVANTAGE_FN
    from trinity.algorithm.advantage_fn.grpo_advantage import GRPOGroupedAdvantage
    from trinity.buffer.operators.experience_operator import ensure_v1_operator
    from trinity.common.experience import EID, Experience

    os.environ["HEADRACE_OVERRIDES"] = "pipeline.stages.gate.group_size=4"
    named = ADVANTAGE_FN.get("headrace.adapters.trinity.RecipeOperator")
    assert not named.compute_in_trainer()
    operator = ensure_v1_operator(named(**named.default_args()))

    def experiences(rng: random.Random, steps: int = 1) -> list[Experience]:
        rewards = rewards_of(rng, 12)
        return [
            Experience(
                eid=EID(batch=1, task=run // 4, run=run % 4, step=step),
                tokens=torch.arange(6),
                prompt_length=2,
                action_mask=torch.tensor([rng.random() < 0.7 for _ in range(4)]),
                reward=rewards[run],
            )
            for run in range(12)
            for step in range(rng.randint(1, steps))
        ]

    os.environ["HEADRACE_OVERRIDES"] = "pipeline.stages.gate.group_size=4"
    for seed in range(BATCHES):
        mine, theirs = experiences(random.Random(seed)), experiences(random.Random(seed))
        found, metrics = asyncio.run(operator.process(mine))
        expected, _ = GRPOGroupedAdvantage().process(theirs)
        trains = {str(exp.eid.rid): exp for exp in found}
        for exp in expected:
            if exp.action_mask.any():
                same(trains[exp.eid.rid].advantages, exp.advantages)
            else:
                assert exp.eid.rid not in trains
        assert metrics["headrace/rows/trained"] == len(found)
        several = experiences(random.Random(seed), 3)  # the steps of a run count once together
        one = {exp.eid.rid: exp.reward for exp in several}
        for exp in asyncio.run(operator.process(several))[0]:
            group = torch.tensor([one[f"{exp.eid.tid}/{run}"] for run in range(4)])
            same(exp.advantages, (exp.reward - group.mean()) / (group.std() + 1e-6) * exp.action_mask)
    several[-1].truncate_status = "response_truncated"
    os.environ["HEADRACE_OVERRIDES"] += " criterion@pipeline.stages.filter.criterion=not_truncated"
    os.environ["HEADRACE_RECIPE"] = "grpo"
    left = {str(exp.eid) for exp in several} - {str(e.eid) for e in asyncio.run(operator.process(several))[0]}
    assert str(several[-1].eid) in left
    os.environ.pop("HEADRACE_RECIPE")
    os.environ["HEADRACE_OVERRIDES"] = "pipeline.stages.gate.group_size=4"
    refused(lambda: asyncio.run(operator.process(mine[1:])), "has 3 of 4")


def openrlhf() -> None:
    """`compute_advantages_and_returns` of the real class with a KL term, before and after its replacement."""
    sys.meta_path.append(ForGPUs())
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    from headrace.adapters.openrlhf import replace_advantages

    def maker() -> RemoteExperienceMaker:
        made = RemoteExperienceMaker.__new__(RemoteExperienceMaker)
        algo = SimpleNamespace(advantage=SimpleNamespace(estimator="group_norm", gamma=1.0, lambd=1.0))
        reward = SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None)
        args = SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=4), algo=algo, reward=reward)
        made.strategy, made.args, made.advantage_estimator = SimpleNamespace(args=args), args, "group_norm"
        made.kl_ctl = SimpleNamespace(value=0.1)
        return made

    def experiences(seed: int, prompts: list[str]) -> list[Experience]:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        rewards, order = torch.tensor(rewards_of(rng, 12)), rng.sample(range(12), 12)
        made = []
        for start in range(0, 12, 3):
            rows = order[start : start + 3]
            mask = torch.zeros(3, 5, dtype=torch.bool)
            for row in mask:
                row[: rng.randint(1, 5)] = True
            made.append(
                Experience(
                    index=rows,
                    prompts=[prompts[row // 4] for row in rows],
                    rewards=rewards[rows],
                    action_mask=mask,
                    kl=torch.rand(3, 5) * mask,
                    truncated=torch.zeros(3),
                    response_length=mask.sum(1),
                    info={},
                )
            )
        return made

    prompts = ["a", "b", "a"]
    theirs = [maker().compute_advantages_and_returns(experiences(seed, prompts)) for seed in range(BATCHES)]
    replace_advantages()
    for seed in range(BATCHES):
        found = maker().compute_advantages_and_returns(experiences(seed, prompts))
        for mine, other in zip(found, theirs[seed], strict=True):
            same(mine.advantages, other.advantages)
            same(mine.returns, other.returns)
            same(mine.info["return"], other.info["return"])
            assert mine.kl is None
    mixed = experiences(0, prompts)
    mixed[0].prompts[0] = "another"
    refused(lambda: maker().compute_advantages_and_returns(mixed), "of 4")


def nemo_rl() -> None:
    """Run NeMo RL's own pumps and buffer with its samplers and ours, from a clone at CLONE. Print a table."""
    import contextlib
    import io
    from statistics import fmean

    from nemo_rl_here import load, simulate
    from prompt_groups import World

    import headrace.adapters.nemo_rl as adapter

    adapter.POLL, nemo, bound, groups = 1.0, load(os.environ["CLONE"]), 4, 8
    ours = {"name": "custom", "target": "headrace.adapters.nemo_rl:DeadlineSampler"}
    of_version = {"max_staleness_versions": bound}
    samplers = {
        "`windowed`": {"name": "windowed"} | of_version,
        "`ready_first`": {"name": "ready_first"} | of_version,
        "`weight_fifo`": {"name": "weight_fifo"} | of_version,
        "`in_order`": {"name": "in_order", "max_lookahead_versions": bound},
        **{
            f"ours, `steps_ahead: {ahead}`": ours | of_version | {"steps_ahead": ahead} for ahead in (2, 3, 4)
        },
    }
    most = World.seconds / World.step
    print("| sampler | slow prompts, dispatched → trained | lost | mean age | oldest | steps |")
    for title, spread in (("a heavy tail", 0.9), ("two classes", 0.0)):
        print(f"| **{title}** | | | | | |")
        for name, config in samplers.items():
            runs = []
            for seed in range(5):
                # max_inflight_prompts is from NeMo RL's guide. min_groups_for_streaming_train is a step's.
                world = World(seed, groups, spread=spread, slots=groups * (bound + 1), together=groups)
                with contextlib.redirect_stdout(io.StringIO()):
                    runs.append(simulate(nemo, world, config))
            sent, trained = (100 * fmean(run.shares()[at] for run in runs) for at in (0, 1))
            gone = fmean(run.lost for run in runs)
            ages = fmean(age for run in runs for age in run.ages.elements())
            oldest, steps = max(max(run.ages) for run in runs), fmean(run.version for run in runs)
            print(
                f"| {name} | {sent:.1f} → {trained:.1f} % | {100 * gone:.0f} % | {ages:.1f} | {oldest} | "
                f"{100 * steps / most:.0f} % |"
            )
            if config["name"] == "custom":
                assert (gone, sent) == (0.0, trained)
                assert oldest <= bound
                assert all(run.sizes == {groups} for run in runs)
                assert all(set(run.trained.values()) == {1} for run in runs)
    few = World(0, groups, slots=16, together=groups)  # weight_fifo stops, as the page says
    with contextlib.redirect_stdout(io.StringIO()):
        assert simulate(nemo, few, samplers["`weight_fifo`"]).version == 4
    for seed in range(5):  # with prompts that fail or are generated again
        world = World(seed, groups, slots=24, failing=0.03)
        with contextlib.redirect_stdout(io.StringIO()):
            run = simulate(nemo, world, ours | of_version | {"steps_ahead": 2}, hiccups=0.1)
        assert run.lost == run.evicted == 0
        assert max(run.ages) <= bound
        assert run.version > 0.4 * most
        assert run.shares()[0] == run.shares()[1]
        assert set(run.trained.values()) == {1}
        assert run.failed
        assert not run.failed & set(run.trained)
    for options, says in (
        ({"max_staleness_versions": 0}, "in_order"),
        (of_version | {"steps_ahead": 5}, "got 4 and 5"),
    ):
        refused(lambda: simulate(nemo, World(), ours | options), says)  # noqa: B023


if __name__ == "__main__":
    with suppress(KeyError):
        os.environ.pop("HEADRACE_RECIPE")
    globals()[sys.argv[1]]()
    print("as it is")
