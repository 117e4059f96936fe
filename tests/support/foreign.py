"""Stand-ins for trainers that are not installed: the parts that adapters use, and their formulas as loops.

If the real package can be imported, tests use the package.
"""

from __future__ import annotations

import enum
import importlib
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import small_openrlhf
import torch


def module_of(monkeypatch: pytest.MonkeyPatch, name: str, stand_in: dict[str, Any]) -> ModuleType:
    """Return the module or, if its package is not installed, a module with the names in `stand_in`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as err:
        if not (err.name or "").startswith(name.partition(".")[0]):
            raise  # the package is installed, but something that it needs is not
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        inner = ".".join(parts[:length])
        if inner not in sys.modules:
            module = ModuleType(inner)
            module.__path__ = []  # type: ignore[attr-defined]  # so that it counts as a package
            monkeypatch.setitem(sys.modules, inner, module)
    vars(sys.modules[name]).update(stand_in)
    return sys.modules[name]


# -- verl and SkyRL: compute_grpo_outcome_advantage -----------------------------------------------------


def verl_advantages(token_level_rewards, response_mask, index, epsilon=1e-6):
    """(R - mean) / (std + ε) in each group of equal uids. In a group of one, R / (1 + ε)."""
    rewards = token_level_rewards.sum(-1).tolist()
    by_uid = defaultdict(list)
    for uid, reward in zip(index, rewards, strict=True):
        by_uid[uid].append(reward)
    found = []
    for uid, reward in zip(index, rewards, strict=True):
        group = by_uid[uid]
        mean, std = (0.0, 1.0) if len(group) == 1 else (statistics.fmean(group), statistics.stdev(group))
        found.append((reward - mean) / (std + epsilon))
    found = torch.tensor(found, dtype=torch.float32).unsqueeze(1) * response_mask
    return found, found


def verl_trainer(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], ModuleType]:
    """verl's registry of advantage estimators, and the module of the v1 trainer's function for sessions."""
    registry: dict[str, Any] = {}
    names = {"register_adv_est": lambda name: lambda each: registry.setdefault(name, each)}
    module_of(monkeypatch, "verl.trainer.ppo.core_algos", names)
    sessions = {
        "compute_advantage_for_multi_trajectories": lambda data, keys, name, num_repeat: (
            f"verl's {name}, {num_repeat} rollouts"
        )
    }
    return registry, module_of(monkeypatch, "verl.trainer.ppo.v1.trainer_base", sessions)


def verl_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's ``ppo_loss`` without clipping, with the denominators of the whole step."""

    def ppo_loss(config, output, data):
        rows = data.get_non_tensor("global_batch_size")
        assert (data.get_non_tensor("dp_size"), rows) == (1, 12)
        assert (config.strategy, config.rollout_n, config.policy_loss.loss_mode) == ("fsdp", 4, "vanilla")
        assert config.ppo_micro_batch_size_per_gpu == len(data)
        first, total, mode = 0, torch.zeros(()), config.loss_agg_mode
        for row in range(len(data)):
            tokens, trains = int(data["attention_mask"][row].sum()), data["response_mask"][row].bool()
            shown = output["log_probs"][first : first + tokens]
            first, prompt = first + tokens, tokens - int(trains.sum())
            ratio = (shown[prompt - 1 : -1] - data["old_log_probs"][row][trains]).exp()
            of_row = -(ratio * data["advantages"][row][trains])
            total = (
                total
                + {
                    "token-mean": of_row.sum() / data.get_non_tensor("batch_num_tokens"),
                    "token-sum": of_row.sum(),
                    "seq-mean-token-sum": of_row.sum() / rows,
                    "seq-mean-token-mean": of_row.mean() / rows,
                    "seq-mean-token-sum-norm": of_row.sum() / len(trains) / rows,
                }[mode]
            )
        assert first == len(output["log_probs"])
        return total, {}

    def assign_non_tensor(data, **values):
        for name, value in values.items():
            data.set_non_tensor(name, value)

    names = {"ActorConfig": SimpleNamespace, "PolicyLossConfig": SimpleNamespace, "ppo_loss": ppo_loss}
    module_of(monkeypatch, "verl.utils.tensordict_utils", {"assign_non_tensor": assign_non_tensor})
    for module in ("config", "config.actor", "utils.losses"):
        module_of(monkeypatch, f"verl.workers.{module}", names)


# -- slime and miles: utils/types.py and ray/rollout ----------------------------------------------------


class SlimeStatus(enum.Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class SlimeSample:
    """The fields of ``Sample`` that the hook reads, with their defaults."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    response_length: int = 3
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    remove_sample: bool = False
    status: SlimeStatus = SlimeStatus.COMPLETED
    adapter: Any = None

    def get_reward_value(self, args) -> Any:
        return self.reward if not args.reward_key else self.reward[args.reward_key]


def slime_args(group_size: int, groups: int, reward_key: str | None = None) -> SimpleNamespace:
    made = SimpleNamespace(n_samples_per_prompt=group_size, rollout_batch_size=groups, reward_key=reward_key)
    made.calculate_per_token_loss = made.use_dynamic_global_batch_size = made.use_rollout_logprobs = False
    made.custom_advantage_function_path, made.global_batch_size = None, group_size * groups
    return made


def slime_rewards(args, rewards: Sequence[float]) -> list[float]:
    """slime's advantages in chunks of `n_samples_per_prompt`. Without a full batch, all are one group."""
    whole = len(rewards) == args.n_samples_per_prompt * args.rollout_batch_size
    size = args.n_samples_per_prompt if whole else len(rewards)
    found = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        mean, std = statistics.fmean(group), statistics.stdev(group)
        found += [(reward - mean) / (std + 1e-6) for reward in group]
    return found


def miles_rewards(samples: Sequence[SlimeSample]) -> list[float]:
    """miles's advantages over the rollouts of a `group_index`. A rollout of several samples counts once."""
    rollouts: dict[Any, dict[Any, float]] = defaultdict(dict)
    for sample in samples:
        rollout = sample.index if sample.rollout_id is None else sample.rollout_id
        rollouts[sample.group_index][rollout] = sample.reward
    found = []
    for sample in samples:
        group = list(rollouts[sample.group_index].values())
        std = statistics.stdev(group) if len(group) > 1 else 0.0
        centred = sample.reward - statistics.fmean(group)
        found.append(centred / (std + 1e-6) if std > 0 else centred)
    return found


def train_data(samples: Sequence[SlimeSample], rewards: tuple[list[float], list[float]]) -> dict[str, list]:
    """The columns of ``convert_samples_to_train_data`` that a loss reads, with all loss masks filled in."""
    masks = [
        [0] * s.response_length if s.remove_sample else s.loss_mask or [1] * s.response_length
        for s in samples
    ]
    ids = [s.index if s.rollout_id is None else s.rollout_id for s in samples]
    sums = [sum(sum(m) for m, other in zip(masks, ids, strict=True) if other == mine) for mine in ids]
    raw, advantages = rewards
    return {
        "sample_indices": [s.index for s in samples],
        "rollout_ids": ids,
        "loss_masks": masks,
        "rewards": advantages,
        "raw_reward": raw,
        "rollout_mask_sums": sums,
    }


def slime_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """slime's ``RolloutManager``, an actor class of Ray, whose metadata hold the plain class."""

    class Manager:
        def _convert_samples_to_train_data(self, samples):
            assert self.custom_convert_samples_to_train_data_func is None
            return train_data(samples, self._post_process_rewards(samples))

    actor = SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=Manager))
    module_of(monkeypatch, "slime.ray.rollout", {"RolloutManager": actor})


def miles_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(args, samples, metadata, custom_convert_samples_to_train_data_func, custom_reward):
        assert custom_convert_samples_to_train_data_func is None
        return train_data(samples, custom_reward(args, samples))

    module = module_of(monkeypatch, "miles.ray.rollout.train_data_conversion", {})
    monkeypatch.setattr(module, "convert_samples_to_train_data", convert, raising=False)
    monkeypatch.setitem(vars(sys.modules["miles.ray.rollout"]), "train_data_conversion", module)


def slime_coefficients(data: dict[str, list], size: int) -> list[dict[Any, float]]:
    """For each step of `size` rollouts: the factor of the tokens in the loss of each sample."""
    rollouts = list(dict.fromkeys(data["rollout_ids"]))
    steps = [rollouts[start : start + size] for start in range(0, len(rollouts) - size + 1, size)]
    columns = ("sample_indices", "rollout_ids", "loss_masks", "rewards", "rollout_mask_sums")
    rows = list(zip(*(data[name] for name in columns), strict=True))
    return [
        {
            index: advantage / max(total, 1) / size
            for index, rollout, mask, advantage, total in rows
            if rollout in step and any(mask)
        }
        for step in steps
    ]


# -- prime-rl: orchestrator/algo/base.py and routing.py -----------------------------------------------------


@dataclass
class Node:
    mask: list[bool]
    advantages: list[float] | None = None

    @property
    def token_ids(self) -> list[int]:
        return [0] * len(self.mask)


@dataclass
class Trace:
    reward: float
    nodes: list[Node]
    agent: Any = field(default_factory=lambda: SimpleNamespace(name="solver", trainable=True))
    has_error: bool = False
    id: str = "trace"


@dataclass
class Episode:
    traces: list[Trace]
    id: str = "episode"


def prime_rl_algo(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    def iter_trainable_traces(episodes):
        for episode in episodes:
            for trace in episode.traces:
                if not trace.has_error and trace.agent.trainable and any(any(n.mask) for n in trace.nodes):
                    yield episode, trace

    def assign_advantages(trace, values):
        total = sum(sum(node.mask) for node in trace.nodes)
        values = [float(values)] * total if isinstance(values, int | float) else list(values)
        if len(values) != total:
            raise ValueError(f"{len(values)} advantages for {total} sampled tokens")
        for node in trace.nodes:
            if any(node.mask):
                node.advantages, values = values[: sum(node.mask)], values[sum(node.mask) :]

    class Algorithm:
        def __init__(self, config, policy_pool):
            self.policy_pool = policy_pool

    base = {"Algorithm": Algorithm, "iter_trainable_traces": iter_trainable_traces}
    routing = {"assign_advantages": assign_advantages}
    return (
        module_of(monkeypatch, "prime_rl.orchestrator.algo.base", base),
        module_of(monkeypatch, "prime_rl.orchestrator.algo.routing", routing),
    )


def prime_rl_advantages(episodes: Sequence[Episode]) -> list[float]:
    """R - mean, over the traces that can train."""
    rewards = [t.reward for e in episodes for t in e.traces if not t.has_error and t.agent.trainable]
    return [reward - math.fsum(rewards) / len(rewards) for reward in rewards]


# -- SkyRL, rLLM, torchtitan: what an adapter imports -----------------------------------------------------


def skyrl_ppo_utils(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Its registry of advantage estimators."""
    registry: dict[str, Any] = {}
    names = {"register_advantage_estimator": lambda name: lambda each: registry.setdefault(name, each)}
    module_of(monkeypatch, "skyrl.backends.skyrl_train.utils.ppo_utils", names)
    return registry


def rllm_advantage(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Its registry of advantage estimators."""
    registry: dict[str, Any] = {}
    names = {"register_rllm_adv_estimator": lambda name: lambda each: registry.setdefault(name, each)}
    module_of(monkeypatch, "rllm.trainer.algorithms.advantage", names)
    return registry


def rllm_group(name: str, rng: random.Random) -> SimpleNamespace:
    """A TrajectoryGroup of one to five trajectories, each of one to three steps."""
    trajectories = [
        SimpleNamespace(
            uid=f"{name}/{at}",
            name=name.split(":")[1],
            reward=rng.choice([0.0, 1.0, 0.25]),
            steps=[SimpleNamespace(response_ids=[1] * rng.randint(1, 4)) for _ in range(rng.randint(1, 3))],
        )
        for at in range(rng.randint(1, 5))
    ]
    return SimpleNamespace(group_id=name, trajectories=trajectories)


class TorchtitanStatus(enum.Enum):
    COMPLETED = "completed"
    TRUNCATED_LENGTH = "truncated_length"
    ERROR_TIMEOUT = "error_timeout"

    def is_truncated(self) -> bool:
        return self.name.startswith("TRUNCATED")

    def is_error(self) -> bool:
        return self.name.startswith("ERROR")


def torchtitan_config(monkeypatch: pytest.MonkeyPatch) -> type[TorchtitanStatus]:
    """`Configurable`, whose nested Config builds it, and the status of rollouts."""

    class Configurable:
        @dataclass(kw_only=True, slots=True)
        class Config:
            def build(self):
                return self._owner(config=self)

        def __init_subclass__(cls):
            cls.Config._owner = cls

    module_of(monkeypatch, "torchtitan.config", {"Configurable": Configurable})
    return TorchtitanStatus


def torchtitan_group(rewards: Sequence[float], status: Sequence[TorchtitanStatus]) -> SimpleNamespace:
    turn = SimpleNamespace(completion_token_ids=[1, 2])
    rollouts = [
        SimpleNamespace(group_id=7, rollout_id=at, reward=reward, status=each, turns=[turn])
        for at, (reward, each) in enumerate(zip(rewards, status, strict=True))
    ]
    return SimpleNamespace(group_id=7, rollouts=rollouts)


# -- Trinity-RFT and OpenRLHF -----------------------------------------------------------------------------


def trinity_operator(monkeypatch: pytest.MonkeyPatch) -> type:
    """The base class of its operators."""
    stand_in = {"ExperienceOperatorV1": type("ExperienceOperatorV1", (), {})}
    base: type = module_of(monkeypatch, "trinity.buffer.operators", stand_in).ExperienceOperatorV1
    return base


def trinity_experience(
    task: str, run: str, step: int, reward: float, mask: torch.Tensor, truncated: str | None = None
) -> SimpleNamespace:
    eid = SimpleNamespace(tid=task, rid=run, step=step)
    return SimpleNamespace(eid=eid, reward=reward, action_mask=mask, truncate_status=truncated)


def openrlhf_maker(monkeypatch: pytest.MonkeyPatch, group_size: int, kl: float = 0.0) -> Any:
    """Its maker of experiences, without a penalty of lengths, and with its formulas of reward and returns."""

    class RemoteExperienceMaker(small_openrlhf.RemoteExperienceMaker):
        strategy = SimpleNamespace(
            args=SimpleNamespace(
                rollout=SimpleNamespace(n_samples_per_prompt=group_size),
                reward=SimpleNamespace(clip_range=None),
            )
        )
        kl_ctl = SimpleNamespace(value=kl)

        def compute_advantages_and_returns(self, experiences):
            raise AssertionError("OpenRLHF's own function")

    utils = "openrlhf.trainer.ppo_utils"
    module_of(monkeypatch, f"{utils}.experience_maker", {"RemoteExperienceMaker": RemoteExperienceMaker})
    for module, name in (
        (f"{utils}.length_penalty", "apply_length_penalties"),
        ("openrlhf.models.utils", "compute_reward"),
    ):
        module_of(monkeypatch, module, {name: getattr(small_openrlhf, name)})
    return RemoteExperienceMaker()


def openrlhf_experience(
    places: Sequence[int],
    prompts: Sequence[str],
    rewards: torch.Tensor,
    mask: torch.Tensor,
    kl: torch.Tensor | None = None,
) -> SimpleNamespace:
    rows = {"index": [*places], "prompts": [*prompts], "rewards": rewards, "action_mask": mask, "kl": kl}
    return SimpleNamespace(**rows, truncated=torch.zeros(len(mask)), info={})
