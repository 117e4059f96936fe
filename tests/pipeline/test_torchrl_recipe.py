"""TorchRL's GRPO recipe runs with MCAdvantage and with headrace. At most five lines differ."""

from __future__ import annotations

import ast
import difflib
import importlib
import math
import sys
from pathlib import Path

import pytest
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.objectives.llm import MCAdvantage

from headrace.pipeline import assembled, load_pipeline
from headrace.transforms import GroupAssembler

pytest.importorskip("transformers", reason="the extra `llm` is not installed")
from chats import GROUP_SIZE, make_env, make_model, make_policy, make_tokenizer
from torchrl.collectors.llm import LLMCollector

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.llm,
    pytest.mark.slow,
    # torchrl 0.14.1 computes log-probabilities in a way that torch has deprecated.
    pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated:UserWarning"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
BEFORE, AFTER = "torchrl_mcadvantage", "torchrl_grpo"


def code_of(name: str) -> list[str]:
    """The lines of an example, without its docstring and blank lines."""
    text = (EXAMPLES / f"{name}.py").read_text()
    behind = ast.parse(text).body[0].end_lineno
    return [line for line in text.splitlines()[behind:] if line.strip()]


def test_the_two_recipes_differ_by_at_most_five_lines():
    lines = list(difflib.ndiff(code_of(BEFORE), code_of(AFTER)))
    gone, new = ([line for line in lines if line.startswith(sign)] for sign in "-+")
    assert len(gone) <= 5
    assert len(new) <= 5
    assert any("MCAdvantage" in line for line in gone)
    assert "headrace" not in "\n".join(code_of(BEFORE))


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield {name: importlib.import_module(name) for name in (BEFORE, AFTER)}
    for name in (BEFORE, AFTER, "llm_grpo"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("name", "turns"), [(BEFORE, 1), (AFTER, 2)])
def test_both_recipes_run_and_stop(examples, name, turns):
    steps = list(
        examples[name].train(steps=2, turns=turns, num_envs=16, dialog_turns_per_batch=32, batch_size=16)
    )
    assert len(steps) == 2
    assert all(0 <= reward <= 1 and math.isfinite(value) for reward, value in steps)
    assert any(value != 0 for _, value in steps)


def test_rollouts_of_several_turns_get_equal_advantages_from_both():
    """If the rewards of a group are equal, MCAdvantage divides rounding errors by 1e-6. headrace gives 0."""
    tokenizer = make_tokenizer()

    def collect():
        policy = make_policy(make_model(tokenizer), tokenizer)
        counts = {"dialog_turns_per_batch": 9, "total_dialog_turns": 36}
        env = make_env(tokenizer, envs=3)
        return LLMCollector(env, policy=policy, yield_completed_trajectories=True, **counts)

    def advantages(buffer, source):
        for rows in source:
            buffer.extend(rows.set(("next", "reward"), rows["next", "reward"].unsqueeze(-1)))
        rows = buffer[:]
        pairs = zip(rows["rollout_id"].tolist(), rows["advantage"].flatten().tolist(), strict=True)
        return dict(pairs), len(rows)

    theirs, ours = (ReplayBuffer(storage=LazyStackStorage(999)) for _ in range(2))
    theirs.append_transform(MCAdvantage(GROUP_SIZE, "group_id", trajectory_return="sum"))
    ours.append_transform(load_pipeline("pipeline.stages.collapse.reward=sum").halves()[0], invert=True)
    expected, rows = advantages(theirs, collect())
    found, as_many = advantages(ours, assembled(collect(), GroupAssembler(group_size=GROUP_SIZE)))
    assert (found.keys(), as_many) == (expected.keys(), rows)
    assert len(found) >= 8
    assert found == pytest.approx(expected, abs=1e-4)
