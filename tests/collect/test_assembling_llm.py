"""LLMCollector through the assembler, in every mode: complete groups with their rewards."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from processes import quick_starts
from tensordict import NonTensorStack
from torchrl.envs import AsyncEnvPool, InitTracker

from headrace.pipeline import Pipeline, RepeatSampler, RolloutStream, assembled
from headrace.transforms import CompletenessGate, DenseRows, FanOutCollapse, GroupAssembler
from headrace.transforms.table import schema

pytest.importorskip("transformers", reason="the extra `llm` is not installed")
from chats import (
    GROUP_SIZE,
    SharedRows,
    make_env,
    make_model,
    make_policy,
    make_tokenizer,
    reward_of,
    turns_of,
)
from torchrl.collectors.llm import LLMCollector
from torchrl.envs.llm import DatasetChatEnv

pytestmark = [pytest.mark.torchrl, pytest.mark.llm, pytest.mark.slow]
TOKENIZER = make_tokenizer()
TURNS = {"dialog_turns_per_batch": 6, "total_dialog_turns": 90}
MODES = {
    "turns": {},
    "turns-flat": {"flatten_data": True},
    "trajectories": {"yield_completed_trajectories": True},
    "trajectories-flat": {"yield_completed_trajectories": True, "flatten_data": True},
    "last-steps": {"yield_only_last_steps": True},
}
LAST, ENOUGH = "last-steps", 8
# torchrl 0.14.1 hangs if its budget ends between two turns: it waits for an environment that has no request.
ENDLESS = {"total_dialog_turns": -1}


def whole_groups(env, mode: str, **options) -> list[int]:
    """The ids of the rollouts that the assembler gives, after a check of their rows."""
    policy = make_policy(make_model(TOKENIZER), TOKENIZER)
    collector = LLMCollector(env, policy=policy, **TURNS | MODES[mode] | options)
    # With only the last step, each row is a rollout and has the reward of its last turn.
    ends = {"done_key": None} if mode == LAST else {}
    pipeline = Pipeline(
        {
            "dense": DenseRows(pad_id=TOKENIZER.pad_token_id),
            "gate": CompletenessGate(**ends),
            "collapse": FanOutCollapse(reward="sum"),
        }
    )
    assembler, found = GroupAssembler(groups=1, **ends), []
    try:
        for batch in assembled(collector, assembler, patience=120):
            out = pipeline(batch)
            rollouts = out["rollout_id"].flatten().tolist()
            for rollout, rows in Counter(rollouts).items():
                assert rows == (1 if mode == LAST else turns_of(rollout))
            for rollout, reward in zip(rollouts, out[schema.REWARD].tolist(), strict=True):
                turns = range(turns_of(rollout))
                assert reward == sum(
                    reward_of(rollout, turn) for turn in (turns[-1:] if mode == LAST else turns)
                )
            found += sorted(set(rollouts))
            if len(found) == ENOUGH:
                break
    finally:
        collector.shutdown()
    assert len(found) == len(set(found))
    assert all(found[i] + 1 == found[i + 1] for i in range(0, len(found), GROUP_SIZE))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_complete_groups_come_out_in_every_mode(mode):
    assert len(whole_groups(make_env(TOKENIZER, envs=3), mode)) == ENOUGH


@pytest.mark.parametrize("mode", ["trajectories", LAST])
def test_groups_spread_over_asynchronous_environments_come_out_complete(mode):
    """AsyncEnvPool yields one trajectory at a time, from whichever environment is first."""
    rows = SharedRows()
    make = partial(make_env, TOKENIZER, envs=1, source=rows)
    pool = AsyncEnvPool([make] * 3, backend="threading", stack="lazy")
    assert len(whole_groups(pool, mode, **ENDLESS)) == ENOUGH


def test_environments_in_processes_number_their_own_groups():
    makes = [partial(make_env, TOKENIZER, envs=1, first_group=1000 * worker) for worker in range(2)]
    with quick_starts():
        pool = AsyncEnvPool(makes, backend="multiprocessing", stack="lazy", exchange="queue")
        found = whole_groups(pool, "trajectories", **ENDLESS)
    assert {rollout // GROUP_SIZE // 1000 for rollout in found} == {0, 1}


def test_a_collector_that_drops_the_prompts_of_its_first_reset_is_refused():
    """These prompts would be announced without any row. An environment with its own draws is accepted."""

    def collector_of(draws) -> LLMCollector:
        rows = (row.set("query", NonTensorStack(*("12" for _ in row["prompt"]))) for row in draws)
        chat = {"input_mode": "text", "template_kwargs": {"chat_template": "{{ messages[0]['content'] }}"}}
        env = DatasetChatEnv.from_dataloader(rows, batch_size=(4,), tokenizer=TOKENIZER, **chat)
        env.append_transform(InitTracker())
        policy = make_policy(make_model(TOKENIZER), TOKENIZER)
        return LLMCollector(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=88)

    sampler = partial(RepeatSampler, 100, group_size=2, prompts_per_batch=2)
    stream = RolloutStream(
        sampler(), source=lambda stream: collector_of(stream.draws(wait=True, patience=5)), max_staleness=4
    )
    with pytest.raises(TypeError, match="prompts of the first reset would be announced and never arrive"):
        next(iter(stream))
    collector_of(sampler().draws()).shutdown()
