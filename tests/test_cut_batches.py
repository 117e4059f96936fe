"""Collectors cut batches inside rollouts: no rollout is trained with a part of its reward.

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
ENVS = 3


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


@pytest.mark.parametrize(("kind", "turns"), [("Collector", 6), ("LLMCollector", 18)])
def test_no_rollout_is_trained_with_part_of_its_reward(kind, turns):
    """The gate refuses or drops cut rollouts; the assembler returns every complete group once."""
    batches = list(source(kind, turns))
    assert sum(map(naive, batches)) > 0, "the batches of this test are cut"
    runs = [make_pipeline("drop").run(batch) for batch in batches]
    trained = [rollout for run in runs if len(run.batch) for rollout in check(run.batch)]
    assert len(trained) == len(set(trained))
    assert trained or turns < 15

    assembler = GroupAssembler(groups=2)
    wholes = assembled(batches, assembler)
    trained = [rollout for whole in wholes for rollout in check(make_pipeline("raise")(whole))]
    rows = torch.cat([batch.reshape(-1).select("rollout_id", ("next", "done")) for batch in batches])
    ended = rows["rollout_id"][rows["next", "done"].flatten()].flatten().tolist()
    groups = Counter(rollout // GROUP_SIZE for rollout in set(ended))
    whole = {group for group, number in groups.items() if number == GROUP_SIZE}
    assert sorted(trained) == sorted(group * GROUP_SIZE + i for group in whole for i in range(GROUP_SIZE))
    assert len(trained) >= 20
    assert len(rows) == sum(map(turns_of, trained)) + sum(assembler.counts.values())
