"""Collectors cut their batches in the middle of rollouts: nobody is trained with a part of a reward.

What each rollout earned, and how many turns it had, is known from its id alone (``tests/chats.py``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector

from headrace.pipeline import Pipeline, assembled
from headrace.transforms import (
    CompletenessGate,
    DenseRows,
    FanOutCollapse,
    GroupAssembler,
    GroupRelativeAdvantage,
    schema,
)

pytest.importorskip("transformers", reason="the extra `llm` is not installed")
from chats import GROUP_SIZE, make_env, make_model, make_policy, make_tokenizer, reward_of, turns_of
from torchrl.collectors.llm import LLMCollector

pytestmark = [pytest.mark.llm, pytest.mark.slow]
TOKENIZER = make_tokenizer()
ENVS, CUTS = 3, (3, 6, 15, 18)


def source(kind: str, turns: int, total: int = 90) -> Iterable[TensorDictBase]:
    """Batches of so many turns."""
    env, policy = make_env(TOKENIZER, envs=ENVS), make_policy(make_model(TOKENIZER), TOKENIZER)
    if kind == "Collector":
        counts = {"frames_per_batch": turns, "total_frames": total, "use_buffers": False}
        return Collector(env, policy, **counts, trust_policy=True, auto_register_policy_transforms=False)
    counts = {"dialog_turns_per_batch": turns, "total_dialog_turns": total}
    return LLMCollector(env, policy=policy, **counts)


def make_pipeline(on_incomplete: str) -> Pipeline:
    return Pipeline(
        {
            "dense": DenseRows(pad_id=TOKENIZER.pad_token_id),
            "gate": CompletenessGate(on_incomplete=on_incomplete),
            "collapse": FanOutCollapse(reward="sum"),
            "advantage": GroupRelativeAdvantage(scale="none"),
        }
    )


def earned(rollout: int) -> float:
    return sum(reward_of(rollout, turn) for turn in range(turns_of(rollout)))


def advantage_of(rollout: int) -> float:
    group = rollout // GROUP_SIZE
    return earned(rollout) - sum(earned(group * GROUP_SIZE + i) for i in range(GROUP_SIZE)) / GROUP_SIZE


def check(batch: TensorDictBase) -> list[int]:
    """Every rollout is whole, every row has its whole reward and its true advantage; returns the rollouts."""
    rollouts = batch["rollout_id"].flatten().tolist()
    assert Counter(rollouts) == {rollout: turns_of(rollout) for rollout in set(rollouts)}
    assert batch[schema.REWARD].tolist() == [earned(rollout) for rollout in rollouts]
    expected = torch.tensor([advantage_of(rollout) for rollout in rollouts])
    torch.testing.assert_close(batch["advantage"].flatten(), expected, rtol=0, atol=1e-5)
    return sorted(set(rollouts))


def naive(batch: TensorDictBase) -> int:
    """Rows with a wrong reward, where what is there of a rollout is taken for all of it."""
    flat, sums = batch.reshape(-1), defaultdict(float)
    pairs = zip(flat["rollout_id"].tolist(), flat["next", "reward"].flatten().tolist(), strict=True)
    for rollout, reward in pairs:
        sums[rollout] += reward
    return sum(sums[rollout] != earned(rollout) for rollout in flat["rollout_id"].tolist())


every_cut = pytest.mark.parametrize("turns", CUTS)
every_kind = pytest.mark.parametrize("kind", ["LLMCollector", "Collector"])


@every_kind
@every_cut
def test_behind_the_gate_no_row_has_a_wrong_reward(kind, turns):
    wrong, trained = 0, []
    for batch in source(kind, turns):
        wrong += naive(batch)
        run = make_pipeline("drop").run(batch)
        if len(run.batch):
            trained += check(run.batch)
    assert wrong > 0, "the batches of this test are cut"
    assert len(trained) == len(set(trained))
    assert trained or turns < 15


@every_kind
@every_cut
def test_behind_the_assembler_every_whole_group_is_trained_once_with_its_true_rewards(kind, turns):
    assembler, rows, ended = GroupAssembler(groups=2), 0, set()

    def seen():
        nonlocal rows
        for batch in source(kind, turns):
            flat = batch.reshape(-1)
            rows += len(flat)
            ended.update(flat["rollout_id"][flat["next", "done"].flatten()].tolist())
            yield batch

    trained: list[int] = []
    for whole in assembled(seen(), assembler):
        trained += check(make_pipeline("raise")(whole))
    groups = Counter(rollout // GROUP_SIZE for rollout in ended)
    whole_groups = {group for group, number in groups.items() if number == GROUP_SIZE}
    assert sorted(trained) == sorted(
        group * GROUP_SIZE + i for group in whole_groups for i in range(GROUP_SIZE)
    )
    assert len(trained) >= 20
    assert rows == sum(map(turns_of, trained)) + sum(assembler.counts.values())
