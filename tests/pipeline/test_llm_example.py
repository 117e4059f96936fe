"""The example with a language model keeps the promises of the pipeline in each step."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from headrace.transforms import IncompleteGroupsError

pytest.importorskip("transformers", reason="the extra `llm` is not installed")
pytestmark = [pytest.mark.llm, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "llm_grpo.py"
STEPS, ENVS, PER_ENV, GROUP_SIZE = 3, 16, 2, 4
SIZES = {"num_envs": ENVS, "rollouts_per_env": PER_ENV, "group_size": GROUP_SIZE}
FULL, LOSS_MASK = ("tokens", "full"), ("masks", "all_assistant_mask")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llm_grpo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(example) -> SimpleNamespace:
    """A short run: its batches, their metrics, and the weights before and after."""
    tokenizer = example.make_tokenizer()
    model = example.make_model(tokenizer, seed=0)
    before = [p.detach().clone() for p in model.parameters()]
    pairs = list(example.train(model, tokenizer, steps=STEPS, seed=0, **SIZES))
    return SimpleNamespace(
        tokenizer=tokenizer,
        batches=[batch for batch, _ in pairs],
        metrics=[numbers for _, numbers in pairs],
        before=before,
        after=[p.detach() for p in model.parameters()],
    )


def prompts_of(batch: TensorDict, tokenizer) -> list[str]:
    texts = tokenizer.batch_decode(batch[FULL], skip_special_tokens=True)
    return [text.split("=")[1] for text in texts]  # "=123=" and the response


def test_the_steps_have_all_rollouts_except_those_of_the_first_reset(run):
    assert [len(batch) for batch in run.batches] == [ENVS * PER_ENV] * STEPS
    collected = torch.cat([batch["rollout_id"] for batch in run.batches]).sort().values
    assert collected.tolist() == list(range(ENVS, ENVS + ENVS * PER_ENV * STEPS))


def test_a_group_has_one_prompt(run):
    for batch in run.batches:
        pairs = {*zip(batch["group_id"].tolist(), prompts_of(batch, run.tokenizer), strict=True)}
        assert len(pairs) == len(batch) // GROUP_SIZE


def test_the_tokens_in_the_loss_are_the_rewarded_response(run):
    for batch in run.batches:
        prompts = prompts_of(batch, run.tokenizer)
        for row in batch["headrace", "in_loss"].nonzero().flatten().tolist():
            response = batch[FULL][row, batch[LOSS_MASK][row]].tolist()
            answer = [*run.tokenizer(prompts[row][::-1])["input_ids"], run.tokenizer.eos_token_id]
            right = sum(a == b for a, b in zip(response, answer, strict=False))
            assert batch["next", "reward"][row].item() == pytest.approx(right / len(answer))


def test_tokens_in_the_loss_have_the_log_probability_of_sampling(run):
    for batch in run.batches:
        mask, log_probs = batch[LOSS_MASK], batch["log_probs", "full"]
        assert (mask <= batch["masks", "all_attention_mask"]).all()
        # TransformersWrapper would write 0 for the first token of each response.
        assert ((log_probs < 0) & log_probs.isfinite())[mask].all()
        assert log_probs[~batch["headrace", "in_loss"]].isnan().all()


def test_training_changes_the_weights(run):
    assert any(not torch.equal(old, new) for old, new in zip(run.before, run.after, strict=True))


def test_the_same_seed_gives_the_same_rewards(example, run):
    model = example.make_model(run.tokenizer, seed=0)
    _, numbers = next(example.train(model, run.tokenizer, steps=1, seed=0, **SIZES))
    assert numbers["collapse/reward_mean"] == run.metrics[0]["collapse/reward_mean"]


def test_the_gate_names_the_groups_split_by_the_first_reset(example):
    tokenizer = example.make_tokenizer()
    model = example.make_model(tokenizer, seed=0)
    sizes = {"num_envs": 6, "rollouts_per_env": 2, "group_size": 4}
    with pytest.raises(
        IncompleteGroupsError, match=r"2 incomplete groups: group 1 has 2 of 4 .*group 4 has 2 of 4"
    ):
        next(example.train(model, tokenizer, steps=1, seed=0, **sizes))
