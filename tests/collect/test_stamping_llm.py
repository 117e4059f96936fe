"""Ids in TorchRL's environments for language models, through its collector."""

from __future__ import annotations

from collections import defaultdict

import pytest
from tensordict import set_list_to_stack

from headrace.pipeline import assembled
from headrace.transforms import BatchError, CompletenessGate, GroupAssembler

pytest.importorskip("transformers", reason="the extra `llm` is not installed")
from countdown import collect_countdown, make_countdown, make_tokenizer

pytestmark = [pytest.mark.torchrl, pytest.mark.llm, pytest.mark.slow]
REPEATS = 2
YIELDED = {
    "turns": {},
    "completed": {"yield_completed_trajectories": True},
    "last steps": {"yield_only_last_steps": True},
}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.mark.parametrize(
    ("mode", "yielded"), [("text", "turns"), ("history", "completed"), ("text", "last steps")]
)
def test_rows_of_an_llm_collector_make_complete_groups_of_one_prompt(tokenizer, mode, yielded):
    """The collector drops the two rollouts of the first reset. No other group waits for their group."""
    env = make_countdown(tokenizer, slots=2, repeats=REPEATS, mode=mode, worker=1, workers=3)
    with set_list_to_stack(True):
        sizes = {"dialog_turns_per_batch": 4, "total_dialog_turns": 12}
        collector = collect_countdown(env, tokenizer, mode, **sizes, **YIELDED[yielded])
        prompts, numbers = defaultdict(set), []
        for batch in assembled(collector, GroupAssembler()):
            CompletenessGate()(batch)
            numbers += batch["rollout_id"].flatten().tolist()
            for group, query in zip(batch["group_id"].flatten().tolist(), batch["query"], strict=True):
                prompts[group].add(str(query))
    assert numbers == [(3 * group + 1) * REPEATS + i for group in range(1, len(prompts) + 1) for i in (0, 1)]
    assert len(prompts) >= 5
    assert all(len(found) == 1 for found in prompts.values())
    assert sorted(set(env.transform[-1].draws()["group_id"].tolist()))[: len(prompts)] == sorted(prompts)


@pytest.mark.parametrize("mode", ["text", "history"])
def test_the_prompt_is_read_from_the_environments_key(tokenizer, mode):
    env = make_countdown(tokenizer, slots=3, repeats=1, mode=mode)
    stamp = env.transform[-1]
    key = ("text", "prompt") if mode == "text" else ("history", "prompt", "content")
    with set_list_to_stack(True):
        stamp.repeats, stamp.prompt_key = 3, key
        with pytest.raises(BatchError, match=r"same prompt .*row 1 of group 0 has '….*' after '….*'"):
            env.reset()
