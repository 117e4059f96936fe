"""Run each peer's own code on the rows of a case. The answer is its numbers, or its refusal.

    python peers.py NAME        in the environment of that peer; prints JSON

A function takes a case and returns one number for each row: its advantage, the weight of each of its tokens
in the gradient of the step, or the number of times that the tokens of a turn train. None: the row does not
train. The function calls the peer with its defaults, or with the setting that the peer documents for such
rows. If the peer's trainer passes rows in the order of their groups, so does the call here. `NOT_SEEN` says
why a peer is not run on a case.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import math
import os
import sys
import tempfile
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any
from unittest import mock

from cases import CASES, Case

VERSION, MAX_STALENESS = 8, 1
# Why a case does not concern a peer's function, by case and peer; "" stands for all others.
NOT_SEEN = {
    "stale-group": {
        "": "its advantage function gets no policy version",
        "trinity-rft": "its `staleness_control` reads from a buffer in Ray, which was not run",
        "verl v1": "its replay buffer drops old rows in TransferQueue's processes, which were not run",
    },
    "masked-row": {
        "torchrl": "`MCAdvantage` reads no mask",
        "twinkle-kit": "`GRPOAdvantage` takes no mask",
    },
    "rejected-row": dict.fromkeys(
        ("torchrl", "twinkle-kit", "ms-swift", "openrlhf", "trinity-rft", "rlinf"),
        "its advantage function does not know which rows were rejected",
    ),
    "uneven-groups": {"trl": "its sampler gives each prompt `num_generations` rows, never more or fewer"},
    "fan-out": {
        "trl": "a completion is one row, with any number of turns",
        "verl": "agent loops with several outputs only run in the v1 trainer",
    },
}
NOT_SEEN["truncated-session"] = NOT_SEEN["fan-out"]
NOT_SEEN["sum-over-ranks"] = {
    "torchrl": "its losses are means",
    "openrlhf": "its losses are means",
    "agentlightning": "its loss is a mean",
}
NOT_SEEN["threshold"] = {
    "": "the loss that was run chooses no tokens by a threshold",
    "ms-swift": "it has `top_entropy_quantile`, but its `GRPOTrainer` cannot be imported beside TRL 1.16.0",
}
NOT_SEEN["shared-tokens"] = {
    "": "the functions that were run get rows with their masks, and make no rows of turns"
}
# The peers that answer in a case in which "" stands for all others.
ANSWER = {
    "stale-group": ("headrace", "trl"),
    "threshold": ("headrace", "trl", "verl", "verl v1"),
    "shared-tokens": ("headrace", "trl", "agentlightning"),
}


@dataclass
class Peer:
    """A project, how it is installed, and its functions.

    Attributes:
        packages: the first package is the peer; the others are needed to import it. They are installed
            without their requirements, so that torch comes from the running environment. Empty: the peer is
            installed already.
        calls: the names of the functions that are called, for the page.
        advantages, weights, times: the functions for the three kinds of answers. `other`: the name of the
            peer's second path to advantages, and its function.
    """

    calls: str
    advantages: Callable[[Case], list]
    packages: list[str] = field(default_factory=list)
    weights: Callable[[Case], list] | None = None
    other: tuple[str, Callable[[Case], list]] | None = None
    times: Callable[[Case], list] | None = None


# -- functions that several peers need -------------------------------------------------------------------


def mask_of(case: Case) -> Any:
    """(N, 5) bool, True for tokens in the loss."""
    import torch

    return torch.arange(5) < torch.tensor(case.rows["tokens"])[:, None]


def of_rows(values: Any, case: Case) -> list:
    """The advantage of each row, from (N, T). It is None for a row without a token in the loss."""
    return [
        float(row[0]) if tokens else None for row, tokens in zip(values, case.rows["tokens"], strict=True)
    ]


def by_position(case: Case, function: Callable[[Any, Any], Any]) -> list:
    """Call a function on rewards (N,) and masks (N, 5) sorted by group. The answer is in row order."""
    import torch

    order = sorted(range(len(case.rows["group"])), key=lambda row: case.rows["group"][row])
    found = function(torch.tensor(case.rows["reward"])[order], mask_of(case)[order])
    back = {row: float(value) for row, value in zip(order, found, strict=True)}
    return [back[row] if tokens else None for row, tokens in enumerate(case.rows["tokens"])]


def fans_out(case: Case) -> bool:
    pairs = list(zip(case.rows["group"], case.rows["rollout"], strict=True))
    return len(set(pairs)) < len(pairs)


def weights(case: Case, loss_of: Callable[[Any, Any, int], Any]) -> list:
    """The negative gradient of the tokens' log-probabilities, summed over micro-batches, averaged over ranks.

    The loss gets log-probabilities (n, T) with the advantage 1, the mask, and the number of micro-batches.
    """
    import torch

    log_probs, mask = torch.zeros(len(case.rows["tokens"]), 5, requires_grad=True), mask_of(case)
    ranks, cuts = sorted(set(case.rows["rank"])), sorted(set(case.rows["micro"]))
    for rank in ranks:
        for cut in cuts:
            pairs = zip(case.rows["rank"], case.rows["micro"], strict=True)
            rows = [row for row, pair in enumerate(pairs) if pair == (rank, cut)]
            (loss_of(log_probs[rows], mask[rows], len(cuts)) / len(ranks)).backward()
    assert log_probs.grad is not None
    found = -log_probs.grad
    return [float(row.sum() / max(1, tokens)) for row, tokens in zip(found, case.rows["tokens"], strict=True)]


def total(case: Case) -> float:
    return float(sum(case.rows["tokens"]))


def in_parts(values: Any) -> Callable[[int], Any]:
    """Return the values of the next rows at each call, because `weights` takes the rows in order."""
    at = 0

    def take(number: int) -> Any:
        nonlocal at
        at += number
        return values[at - number : at]

    return take


def turns(case: Case) -> list[tuple[list[int], list[int]]]:
    """The prompt and the sampled tokens of each turn."""
    texts = zip(case.rows["prompt"], case.rows["sampled"], strict=True)
    return [([*map(int, prompt.split())], [*map(int, sampled.split())]) for prompt, sampled in texts]


def times(case: Case, trained: list[tuple[list[int], list[int]]]) -> list:
    """How often the sampled tokens of each turn are in the loss. `trained` has rows as (tokens, mask)."""
    return [
        sum(
            sum(mask[len(prompt) : len(prompt) + len(sampled)])
            for tokens, mask in trained
            if tokens[: len(prompt) + len(sampled)] == prompt + sampled
        )
        / len(sampled)
        for prompt, sampled in turns(case)
    ]


class StandIn(MetaPathFinder, Loader):
    """Provides empty modules for packages that need a GPU to be built, and that nothing here calls."""

    def __init__(self, *names: str):
        self.names = names

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda _: None  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty."""


# -- headrace --------------------------------------------------------------------------------------------


def headrace(case: Case) -> list:
    """Run the default recipe. If the case has versions, add the criterion `fresh`."""
    found = decided(case)
    pairs = zip(found.advantage.tolist(), found.keep.tolist(), strict=True)
    return [value if keep else None for value, keep in pairs]


def decided(case: Case) -> Any:
    from headrace import decide

    names = {"group": "group_id", "rollout": "rollout_id", "reward": "reward", "tokens": "tokens"}
    columns = {ours: case.rows[name] for name, ours in names.items()}
    if case.name == "sum-over-ranks":
        length = "pipeline.stages.weight.length=5"
        return decide(columns, "dr_grpo", length, group_size=case.group_size, minibatches=1)
    if case.name != "stale-group":
        return decide(columns, "grpo", group_size=case.group_size, minibatches=1)
    criterion = "pipeline.stages.filter.criterion"
    fresh = [f"criterion@{criterion}=fresh", f"{criterion}.current={VERSION}"]
    fresh += [f"{criterion}.max_staleness={MAX_STALENESS}"]
    columns["policy_version"] = case.rows["version"]
    return decide(columns, "grpo", *fresh, group_size=case.group_size, minibatches=1)


def headrace_weights(case: Case) -> list:
    if case.name == "threshold":
        return headrace_threshold(case)
    return decided(case).loss_weight.tolist()


def headrace_threshold(case: Case) -> list:
    """Return the weights of the tokens whose advantage is not 0. All rewards differ within their groups."""
    import torch
    from tensordict import TensorDict

    from headrace import load_pipeline

    mask = mask_of(case)
    batch = TensorDict(
        {
            "group_id": case.rows["group"],
            "rollout_id": case.rows["rollout"],
            ("next", "reward"): torch.tensor(case.rows["reward"], dtype=torch.float64),
            ("masks", "all_assistant_mask"): mask,
            ("entropy", "full"): torch.tensor(case.rows["score"])[:, None].expand(mask.shape),
            "place": torch.arange(len(mask)),
        },
        [len(mask)],
    )
    share = "pipeline.stages.forks.term.share=0.25"
    pipeline = load_pipeline("high_entropy", share, group_size=case.group_size, minibatches=1)
    for half in pipeline.halves():
        batch = half.run(batch).batch
    found = batch["loss_weight"] * (batch["advantage"][:, 0, 0] != 0)
    return found[batch["place"].argsort()].tolist()  # the split has changed the order


def headrace_times(case: Case) -> list:
    """Run `TrainSharedOnce` on a row for each branch."""
    import torch
    from tensordict import TensorDict

    from headrace.transforms import TrainSharedOnce

    wholes = [prompt + sampled for prompt, sampled in turns(case)]
    branches = [one for one in wholes if not any(other[: len(one)] == one != other for other in wholes)]
    tokens = torch.tensor(branches)
    of_prompt = torch.arange(tokens.shape[1]) < 2
    masks = {"all_attention_mask": tokens > 0, "all_assistant_mask": (tokens > 0) & ~of_prompt}
    rows = {"tokens": {"full": tokens}, "masks": masks, "rollout_id": [0] * len(tokens)}
    found = TrainSharedOnce()(TensorDict(rows, [len(tokens)]))["masks", "all_assistant_mask"]
    return times(case, list(zip(branches, found.int().tolist(), strict=True)))


def headrace_batch(case: Case) -> list:
    """Run the stages that come before a replay buffer, on a TensorDict with tokens."""
    import torch
    from tensordict import TensorDict

    from headrace import load_pipeline

    rows = len(case.rows["group"])
    batch = TensorDict(
        {
            "group_id": case.rows["group"],
            "rollout_id": case.rows["rollout"],
            ("next", "reward"): torch.tensor(case.rows["reward"], dtype=torch.float64),
            ("masks", "all_assistant_mask"): mask_of(case),
            "place": torch.arange(rows),
        },
        [rows],
    )
    run = load_pipeline("grpo", group_size=case.group_size, minibatches=1).halves()[0].run(batch)
    out = [0.0] * rows
    for row, value, mask in zip(
        run.batch["place"], run.batch["advantage"], run.batch["masks", "all_assistant_mask"], strict=True
    ):
        out[int(row)] = float(value) if mask.any() else 0.0
    return [value or None for value in out]


# -- TRL -------------------------------------------------------------------------------------------------


def trl_trainer(case: Case, **options: Any) -> Any:
    """Make TRL's GRPOTrainer with a small model, and with the completions and rewards of the case."""
    import torch
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    class Given(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *_):
            cut = case.name == "masked-row"  # completions that reach max_completion_length have no end token
            return [[2, 2, 2 if cut and not n else 1] for n in case.rows["tokens"]], None

    tokens = Tokenizer(models.WordLevel({token: i for i, token in enumerate("_$ab2+")}))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    ends = {"pad_token": "_", "eos_token": "$", "padding_side": "left"}
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        num_generations=case.group_size,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        **options,
    )
    order = sorted(range(len(case.rows["group"])), key=lambda row: case.rows["group"][row])
    rewards = [case.rows["reward"][row] for row in order]
    # A missing reward is None: TRL documents that a reward function may return None.
    ungraded = [
        reward != reward or case.columns.get("rejected", [False] * len(order))[row]
        for row, reward in zip(order, rewards, strict=True)
    ]
    given = [None if none else reward for reward, none in zip(rewards, ungraded, strict=True)]
    torch.manual_seed(0)
    return Given(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=8, **size, pad_token_id=0, eos_token_id=1)),
        args=config,
        reward_funcs=[lambda completions, **_: given],
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"] * 8}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokens, **ends),
    )


def trl(case: Case) -> list:
    if case.name == "stale-group":
        return trl_stale(case)
    masked = {"mask_truncated_completions": True} if case.name == "masked-row" else {}
    trainer = trl_trainer(case, per_device_train_batch_size=len(case.rows["group"]), **masked)
    prompts = sorted(case.rows["group"])
    rows = [{"prompt": prompt} for prompt in prompts]
    return by_position(case, lambda *_: trainer._generate_and_score_completions(rows)["advantages"])


def trl_stale(case: Case) -> list:
    """Run the queue of TRL's asynchronous trainer. Groups are scored after the queue."""
    import queue

    from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

    class Empty(Exception):
        pass

    def stop(_: float) -> None:
        raise Empty

    rows = queue.Queue()
    for row, version in enumerate(case.rows["version"]):
        rows.put(Sample(row, version))
    dataset = RolloutQueueDataset(
        rows, lambda: VERSION, stop, 1.0, defaultdict(list), max_staleness=MAX_STALENESS, poll_interval_s=0.01
    )
    seen = set()
    with contextlib.suppress(Empty):
        for sample in dataset:
            seen.add(sample["advantage"])
    answer = case.accepted[0]
    return [answer[row] if row in seen else None for row in range(len(answer))]


class Sample:
    """A scored rollout. Only the version and the row matter; every other field holds the row."""

    def __init__(self, row: int, version: int):
        self.row, self.model_version, self.enqueued_at = row, version, None

    def __getattr__(self, _: str) -> int:
        return self.row


def trl_weights(case: Case) -> list:
    import torch

    cuts, ranks = len(set(case.rows["micro"])), len(set(case.rows["rank"]))
    options: dict[str, Any] = {
        "sum-over-ranks": {"loss_type": "dr_grpo", "max_completion_length": 5},
        "threshold": {"top_entropy_quantile": 0.25},
    }.get(case.name, {})
    trainer = trl_trainer(
        case, per_device_train_batch_size=max(2, 4 // cuts), gradient_accumulation_steps=cuts, **options
    )
    entropies = in_parts(torch.tensor(case.rows.get("score", [0.0] * len(case.rows["tokens"]))))
    trainer.current_gradient_accumulation_steps = cuts
    trainer.model.train()

    def loss_of(log_probs, mask, _):
        entropy = entropies(len(mask))[:, None].expand(mask.shape)
        logits = lambda *_, **__: (log_probs, entropy, None)  # noqa: E731
        trainer._get_per_token_logps_and_entropies = logits
        ids = torch.zeros(log_probs.shape, dtype=torch.long)
        return trainer._compute_loss(
            trainer.model,
            {
                "prompt_ids": ids[:, :1],
                "prompt_mask": ids[:, :1] + 1,
                "completion_ids": ids,
                "completion_mask": mask.long(),
                "advantages": torch.ones(len(ids)),
                "num_items_in_batch": torch.tensor(total(case)),
            },
        )

    # accelerate does the same with this number of processes.
    with mock.patch.object(type(trainer.accelerator), "num_processes", ranks):
        return weights(case, loss_of)


def trl_times(case: Case) -> list:
    """Count over the rows that TRL's asynchronous trainer makes of the turns, with its default threshold."""
    from trl.experimental.async_grpo import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

    records = [TurnRecord(prompt, sampled, [0.0] * len(sampled)) for prompt, sampled in turns(case)]
    rows, _ = _chain_to_sequences(records, "0", AsyncGRPOConfig.fork_threshold_tokens)
    return times(case, [(row.input_ids, row.completion_mask) for row in rows])


# -- TorchRL ---------------------------------------------------------------------------------------------


def torchrl(case: Case) -> list:
    """Run MCAdvantage with group ids and one return for each trajectory, as its docstring documents."""
    return mc_advantage(case, trajectory_return="max")


def mc_advantage(case: Case, **options: Any) -> list:
    import torch
    from tensordict import TensorDict
    from torchrl.objectives.llm import MCAdvantage

    rollout = list(zip(case.rows["group"], case.rows["rollout"], strict=True))
    rows = len(rollout)
    done = [row + 1 == rows or rollout[row + 1] != rollout[row] for row in range(rows)]
    batch = TensorDict(
        {
            "group_id": torch.tensor([ord(group) for group in case.rows["group"]]).view(-1, 1),
            ("next", "reward"): torch.tensor(case.rows["reward"]).view(-1, 1),
            ("next", "done"): torch.tensor(done).view(-1, 1),
            "row": torch.arange(rows).view(-1, 1),
        },
        [rows],
    )
    out = MCAdvantage(case.group_size, prompt_key="group_id", **options).inv(batch)
    found: list = [None] * rows
    if out is None:
        return found
    for row, value in zip(out["row"].flatten(), out["advantage"].flatten(), strict=True):
        found[int(row)] = float(value) if case.rows["tokens"][int(row)] else None
    return found


def torchrl_weights(case: Case) -> list:
    """Run GRPOLoss, divided by the number of micro-batches, as in the loop of TorchRL's own recipe."""
    import torch
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModuleBase
    from torchrl.objectives.llm import GRPOLoss

    class Given(torch.distributions.Distribution):
        arg_constraints = None

        def __init__(self, log_probs, mask):
            super().__init__(log_probs.shape, validate_args=False)
            self.log_probs, self.mask = log_probs, mask

        def log_prob(self, _):
            return self.log_probs

    class Actor(TensorDictModuleBase):
        in_keys, out_keys = [("tokens", "full")], [("log_probs", "full")]

        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(1))

        def get_dist(self, batch, **_):
            return Given(batch["given"], batch["masks", "all_attention_mask"])

    loss = GRPOLoss(Actor(), masking_strategy="generic", entropy_bonus=False)

    def loss_of(log_probs, mask, cuts):
        batch = {
            ("tokens", "full"): torch.zeros(mask.shape, dtype=torch.long),
            ("log_probs", "full"): log_probs.detach(),
            ("masks", "all_attention_mask"): mask,
            ("masks", "all_assistant_mask"): mask,
            "given": log_probs,
            "advantage": torch.ones(*mask.shape, 1),
        }
        return loss(TensorDict(batch, [len(mask)])).loss_objective.sum() / cuts

    return weights(case, loss_of)


# -- verl ------------------------------------------------------------------------------------------------


def verl(case: Case) -> list:
    return verl_estimator(case, "compute_grpo_outcome_advantage")


def verl_estimator(case: Case, name: str) -> list:
    import numpy as np
    from verl.trainer.ppo import core_algos

    mask = mask_of(case)
    uids = np.array(case.rows["group"], dtype=object)
    return of_rows(getattr(core_algos, name)(scores_of(case), mask.float(), uids)[0], case)


def scores_of(case: Case) -> Any:
    """(N, T) rewards by token. The first token has the reward of the rollout."""
    import torch

    scores = torch.zeros(len(case.rows["group"]), 5)
    scores[:, 0] = torch.tensor(case.rows["reward"])
    return scores


def verl_batch(case: Case) -> Any:
    import numpy as np
    from verl import DataProto

    columns = {"token_level_rewards": scores_of(case), "response_mask": mask_of(case).float()}
    ids = {"uid": case.rows["group"], "rollout_id_list": case.rows["rollout"]}
    texts = {name: np.array(values, dtype=object) for name, values in ids.items()}
    return DataProto.from_dict(tensors=columns, non_tensors=texts)


def verl_v1(case: Case) -> list:
    from verl.trainer.ppo.core_algos import AdvantageEstimator
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    seen: dict = {}
    keys = []
    for group, rollout in zip(case.rows["group"], case.rows["rollout"], strict=True):
        seen[group, rollout] = seen.get((group, rollout), -1) + 1
        keys.append(f"{group}_{rollout}_{seen[group, rollout]}")
    found = compute_advantage_for_multi_trajectories(verl_batch(case), keys, AdvantageEstimator.GRPO)
    return of_rows(found.batch["advantages"], case)


def verl_weights(case: Case) -> list:
    """Call verl's loss as its engines do, with the tokens and the ranks of the whole step."""
    from verl.trainer.ppo.core_algos import agg_loss

    ranks = len(set(case.rows["rank"]))
    counts = {
        "dp_size": ranks,
        "batch_num_tokens": total(case),
        "global_batch_size": len(case.rows["tokens"]),
    }
    mode = "seq-mean-token-sum-norm" if case.name == "sum-over-ranks" else "token-mean"
    if case.name == "threshold":
        return verl_threshold(case, counts)
    return weights(case, lambda lp, mask, _: agg_loss(-lp.exp(), mask.float(), mode, **counts))


def verl_threshold(case: Case, counts: dict[str, Any]) -> list:
    """The weight of KL-Cov's penalty: the weights without the penalty minus those with it."""
    import torch
    from verl.trainer.ppo.core_algos import compute_policy_loss_kl_cov
    from verl.workers.config.actor import PolicyLossConfig

    deviations = in_parts(torch.tensor(case.rows["deviation"]))

    def loss_of(log_probs, mask, _):
        deviation = deviations(len(mask))[:, None].expand(mask.shape)
        log_probs = log_probs + deviation - 5
        older = log_probs.detach() - 0.01  # equal log-probabilities have no penalty

        def loss(coefficient: float) -> Any:
            options = {"kl_cov_ratio": 0.25, "ppo_kl_coef": coefficient}
            config = types.SimpleNamespace(policy_loss=PolicyLossConfig(**options), global_batch_info=counts)
            return compute_policy_loss_kl_cov(older, log_probs, deviation, mask.float(), config=config)[0]

        return loss(0.0) - loss(1.0)

    return weights(case, loss_of)


# -- ms-swift --------------------------------------------------------------------------------------------


def swift(case: Case) -> list:
    """Run ms-swift by position or, if rows are uneven, by prompt and request id, as its docstring says."""
    import torch
    from swift.rl_core.advantage import compute_advantages

    counts = Counter(case.rows["group"]).values()
    if fans_out(case) or set(counts) != {case.group_size}:
        return swift_dynamic(case)
    weight, size = torch.ones(1), case.group_size
    return by_position(case, lambda rewards, _: compute_advantages(rewards.view(-1, 1), weight, size)[0])


def swift_dynamic(case: Case) -> list:
    import torch
    from swift.rl_core.advantage import compute_advantages_dynamic

    ids = case.rows["group"], case.rows["rollout"]
    rewards = torch.tensor(case.rows["reward"]).view(-1, 1)
    return of_rows(compute_advantages_dynamic(rewards, torch.ones(1), *ids)[0].view(-1, 1), case)


# -- OpenRLHF --------------------------------------------------------------------------------------------


def openrlhf(case: Case) -> list:
    import torch

    sys.meta_path.append(StandIn("flash_attn", "vllm"))
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    name = types.SimpleNamespace
    maker = RemoteExperienceMaker.__new__(RemoteExperienceMaker)
    advantage = name(estimator="group_norm", gamma=1.0, lambd=1.0, no_std_norm=False)
    reward = name(clip_range=(-1e9, 1e9), overlong_buffer_len=None, stop_properly_penalty_coef=None)
    rollout = name(n_samples_per_prompt=case.group_size, max_new_tokens=5)
    args = name(rollout=rollout, algo=name(advantage=advantage), reward=reward)
    maker.strategy, maker.kl_ctl = name(args=args), name(value=0.0)
    maker.advantage_estimator = "group_norm"

    def of_rewards(rewards: Any, mask: Any) -> list[float]:
        kl = torch.zeros(mask.shape)
        batch = Experience(index=list(range(len(mask))), rewards=rewards, action_mask=mask, kl=kl, info={})
        return maker.compute_advantages_and_returns([batch])[0].advantages[:, 0].tolist()

    return by_position(case, of_rewards)


def openrlhf_weights(case: Case) -> list:
    """Use the counts of the step, summed over ranks as in OpenRLHF's trainer, and DeepSpeed's 1 / cuts."""
    import torch

    sys.meta_path.append(StandIn("flash_attn", "vllm"))
    from openrlhf.models.loss import PolicyLoss

    loss, ranks = PolicyLoss(), len(set(case.rows["rank"]))

    def loss_of(log_probs, mask, cuts):
        counts = {"dp_size": ranks, "batch_num_tokens": total(case) / cuts}
        ones = torch.ones_like(log_probs)
        return loss(log_probs, log_probs.detach(), ones, mask.float(), **counts)[0] / cuts

    return weights(case, loss_of)


# -- Trinity-RFT -----------------------------------------------------------------------------------------


def trinity(case: Case) -> list:
    """Run Trinity-RFT. If rollouts have several rows, use the function of its multi-step GRPO."""
    from trinity.algorithm.advantage_fn.grpo_advantage import GRPOGroupedAdvantage

    return trinity_steps(case) if fans_out(case) else trinity_by(case, GRPOGroupedAdvantage)


def trinity_steps(case: Case) -> list:
    from trinity.algorithm.advantage_fn.multi_step_grpo_advantage import StepWiseGRPOAdvantageFn

    return trinity_by(case, StepWiseGRPOAdvantageFn)


def trinity_by(case: Case, function: type) -> list:
    import torch
    from trinity.common.experience import EID, Experience

    mask, experiences = mask_of(case), []
    for row, (group, rollout) in enumerate(zip(case.rows["group"], case.rows["rollout"], strict=True)):
        eid = EID(batch=0, task=group, run=int(rollout), step=row, suffix=str(row))
        tokens = torch.zeros(6, dtype=torch.long)
        experiences.append(
            Experience(
                eid=eid,
                tokens=tokens,
                prompt_length=1,
                reward=case.rows["reward"][row],
                action_mask=mask[row],
            )
        )
    found: list = [None] * len(experiences)
    for each in function().process(experiences)[0]:
        row = int(each.eid.suffix)
        found[row] = float(each.advantages[0]) if case.rows["tokens"][row] else None
    return found


def trinity_weights(case: Case) -> list:
    """Run the loss as verl's engine does, which adds up the micro-batches and averages the ranks."""
    import torch
    from trinity.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn

    mode = {"sum-over-ranks": {"loss_agg_mode": "seq-mean-token-sum-norm"}}.get(case.name, {})
    loss = PPOPolicyLossFn(**PPOPolicyLossFn.default_args() | mode)
    return weights(
        case, lambda lp, mask, _: loss(lp, lp.detach(), action_mask=mask, advantages=torch.ones_like(lp))[0]
    )


# -- RLinf -----------------------------------------------------------------------------------------------


def rlinf(case: Case) -> list:
    """Run RLinf. If rollouts have several rows, use its dynamic GRPO by trajectory."""
    return rlinf_dynamic(case) if fans_out(case) else rlinf_by(case, adv_type="grpo")


def rlinf_dynamic(case: Case) -> list:
    number: dict = {}
    for pair in zip(case.rows["group"], case.rows["rollout"], strict=True):
        number.setdefault(pair, len(number))
    places = [number[pair] for pair in zip(case.rows["group"], case.rows["rollout"], strict=True)]
    options = {"idx_to_traj": places, "num_sequence": len(places), "advantage_mode": "trajectory"}
    return rlinf_by(case, adv_type="grpo_dynamic", **options)


def rlinf_by(case: Case, **options: Any) -> list:
    from rlinf.algorithms.registry import calculate_adv_and_returns

    def of_rewards(rewards: Any, mask: Any) -> Any:
        common = {"task_type": "reasoning", "group_size": case.group_size, "loss_mask": mask}
        return calculate_adv_and_returns(**common, rewards=rewards, **options)[0][:, 0]

    return by_position(case, of_rewards)


def rlinf_weights(case: Case) -> list:
    """Do as RLinf does: its actor divides by the number of micro-batches, and FSDP averages the ranks."""
    import torch
    from rlinf.algorithms.losses import compute_ppo_actor_loss
    from rlinf.utils.utils import get_loss_agg_func

    mode = "seq-mean-token-sum" if case.name == "sum-over-ranks" else "token-mean"

    def loss_of(log_probs, mask, cuts):
        found = compute_ppo_actor_loss(
            logprobs=log_probs,
            old_logprobs=log_probs.detach(),
            advantages=torch.ones_like(log_probs),
            clip_ratio_low=0.2,
            clip_ratio_high=0.2,
            loss_mask=mask,
            loss_agg_func=get_loss_agg_func(mode),
        )
        return found[0] / cuts

    return weights(case, loss_of)


# -- twinkle ---------------------------------------------------------------------------------------------


def twinkle(case: Case) -> list:
    from twinkle.advantage import GRPOAdvantage

    return by_position(case, lambda rewards, _: GRPOAdvantage()(rewards, num_generations=case.group_size))


def twinkle_weights(case: Case) -> list:
    """Do as twinkle does: its model divides the gradient by the number of micro-batches."""
    import torch
    from twinkle.loss.grpo import DRGRPOLoss, GRPOLoss

    loss = DRGRPOLoss(max_completion_length=5) if case.name == "sum-over-ranks" else GRPOLoss()

    def loss_of(log_probs, mask, cuts):
        labels, ones = torch.where(mask, 1, -100), torch.ones(len(mask))
        return loss({"labels": labels}, {"logps": log_probs}, advantages=ones)["loss"] / cuts

    return weights(case, loss_of)


# -- agent-lightning -------------------------------------------------------------------------------------


def agentlightning(case: Case) -> list:
    from agentlightning.verl.rollout_level_advantage import compute_rollout_level_advantage
    from verl.trainer.ppo.core_algos import AdvantageEstimator

    options = {"adv_estimator": AdvantageEstimator.GRPO, "gamma": 1.0, "lam": 1.0}
    found, _ = compute_rollout_level_advantage(verl_batch(case), num_repeat=case.group_size, **options)
    return of_rows(found.batch["advantages"], case)


def agentlightning_weights(case: Case) -> list:
    """Divide advantages by tokens and rows of the step, and sum the loss over ranks, as its trainer does."""
    import torch
    from agentlightning.verl.per_rollout_loss import (
        compute_policy_loss_per_rollout_mean,
        normalize_advantages_by_rollout,
    )

    ranks, mask = len(set(case.rows["rank"])), mask_of(case)
    rows = len(mask)
    ids = case.rows["rollout"]
    advantages = normalize_advantages_by_rollout(
        torch.ones(rows, 5), mask.float(), ids, num_trained_rows=rows
    )
    config = types.SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        get=lambda _, default: default,
        global_batch_info={"dp_size": ranks},
    )
    start = 0

    def loss_of(log_probs, mask, _):
        nonlocal start
        part = advantages[start : start + len(mask)]
        start += len(mask)
        found = compute_policy_loss_per_rollout_mean(
            log_probs.detach(), log_probs, part, mask.float(), config=config
        )
        return found[0]

    return weights(case, loss_of)


def agentlightning_times(case: Case) -> list:
    """Count over the rows that its adapter makes from the turns of a rollout, by default one for each."""
    import torch
    from agentlightning.verl.agl_rollout_manager import CompletedRollout, Triplet
    from agentlightning.verl.rollout_adapter import RolloutAdapter

    triplets = [
        Triplet(
            prompt={"token_ids": prompt}, response={"token_ids": sampled, "log_probs": [0.0] * len(sampled)}
        )
        for prompt, sampled in turns(case)
    ]
    ids = {"rollout_id": "0", "data_id": "a", "step": 0, "sample_idx_in_step": 0, "enqueue_time": 0.0}
    rollout = CompletedRollout(**ids, final_reward=1.0, triplets=triplets)
    lengths = {"max_prompt_length": 8, "max_response_length": 8}
    adapter = RolloutAdapter(**lengths, device=torch.device("cpu"), pad_token_id=0)
    batch = adapter.get_train_data_batch([rollout])[0].batch
    # If a row has no mask of its own, the trainer trains each response token that is not padding.
    rows = []
    for tokens, there in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        trains = torch.arange(len(there)) >= lengths["max_prompt_length"]
        rows.append((tokens[there].tolist(), trains[there].int().tolist()))
    return times(case, rows)


VERL = ["verl==0.9.1", "codetiming==1.4.0", "cachetools==8.0.1", "torchdata==0.11.0", "peft==0.21.2"]
VERL += ["fastapi==0.165.0", "starlette==1.10.0", "uvicorn==0.54.0"]
OPENRLHF = ["openrlhf==0.11.2", "deepspeed==0.19.8", "hjson==3.1.0", "einops==0.8.2", "peft==0.21.2"]
OPENRLHF += ["pylatexenc==2.11", "torchdata==0.11.0"]
PEERS = {
    "headrace": Peer("`headrace.decide`, recipe `grpo`", headrace, [], headrace_weights),
    "trl": Peer("a real `GRPOTrainer` with a small model", trl, [], trl_weights),
    "torchrl": Peer("`MCAdvantage`; `GRPOLoss`", torchrl, [], torchrl_weights),
    "verl": Peer("`compute_grpo_outcome_advantage`; `agg_loss`", verl, VERL, verl_weights),
    "verl v1": Peer("`compute_advantage_for_multi_trajectories`; `agg_loss`", verl_v1, VERL, verl_weights),
    "ms-swift": Peer(
        "`compute_advantages`, `compute_advantages_dynamic`",
        swift,
        ["ms-swift==4.6.0", "modelscope==1.40.2", "modelscope_hub==0.5.1"],
    ),
    "openrlhf": Peer(
        "`compute_advantages_and_returns`, `group_norm`; `PolicyLoss`",
        openrlhf,
        OPENRLHF,
        openrlhf_weights,
    ),
    "trinity-rft": Peer(
        "`GRPOGroupedAdvantage`, `StepWiseGRPOAdvantageFn`; `PPOPolicyLossFn`",
        trinity,
        ["trinity-rft==0.6.0"],
        trinity_weights,
    ),
    "rlinf": Peer(
        "`calculate_adv_and_returns`; `compute_ppo_actor_loss`", rlinf, ["rlinf==0.3.0"], rlinf_weights
    ),
    "twinkle-kit": Peer("`GRPOAdvantage`; `GRPOLoss`", twinkle, ["twinkle-kit==0.5.1"], twinkle_weights),
    "agentlightning": Peer(
        "`compute_rollout_level_advantage`; `compute_policy_loss_per_rollout_mean`",
        agentlightning,
        ["agentlightning==1.0.2", "httpx-retries==0.6.0", *VERL],
        agentlightning_weights,
    ),
}
PEERS["headrace"].times = headrace_times
PEERS["trl"].times = trl_times
PEERS["agentlightning"].times = agentlightning_times
PEERS["headrace"].other = ("a pipeline that gets the same rows as a TensorDict", headrace_batch)
PEERS["torchrl"].other = ("a run without `trajectory_return`", mc_advantage)
vectorised = "compute_grpo_vectorized_outcome_advantage"
PEERS["verl"].other = (f"`{vectorised}`", lambda case: verl_estimator(case, vectorised))
PEERS["verl v1"].other = ("`compute_grpo_outcome_advantage`", verl)
PEERS["ms-swift"].other = ("`compute_advantages_dynamic`", swift_dynamic)
PEERS["trinity-rft"].other = ("`StepWiseGRPOAdvantageFn`", trinity_steps)
PEERS["rlinf"].other = ('`adv_type="grpo_dynamic", advantage_mode="trajectory"`', rlinf_dynamic)


def answer(name: str, case: Case) -> dict[str, Any]:
    """The answer of a peer: numbers, a refusal in the peer's words, or the reason why it was not run."""
    peer, reasons = PEERS[name], NOT_SEEN.get(case.name, {})
    if name in reasons or ("" in reasons and name not in ANSWER[case.name]):
        return {"not_seen": reasons.get(name, reasons.get(""))}
    try:
        if case.asks == "weight":
            if peer.weights is None:
                return {"not_seen": "its loss needs its whole trainer, which was not run"}
            return {"found": peer.weights(case)}
        if case.asks == "times":
            assert peer.times is not None
            return {"found": peer.times(case)}
        if case.asks == "paths":
            if peer.other is None:
                return {"not_seen": "it has only one function"}
            return {"found": peer.advantages(case), "other": peer.other[1](case), "path": peer.other[0]}
        return {"found": peer.advantages(case)}
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def answers(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the answers by case."""
    for case in CASES:
        yield case.name, answer(name, case)


def written(answer: dict[str, Any]) -> dict[str, Any]:
    """Convert an answer for JSON: numbers that are not finite become text, such as `nan`."""
    return answer | {
        name: [v if v is None or math.isfinite(v) else str(float(v)) for v in answer[name]]
        for name in ("found", "other")
        if name in answer
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    printed = sys.stdout
    sys.stdout = sys.stderr  # peers print greetings
    found = {name: written(each) for name, each in answers(sys.argv[1])}
    package = {"verl v1": "verl"}.get(sys.argv[1], sys.argv[1])
    json.dump({"version": importlib.metadata.version(package), "cases": found}, printed, allow_nan=False)
