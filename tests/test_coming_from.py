"""The adapters of docs/coming-from give the trainers' own numbers, and refuse what these do not notice."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import re
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import foreign
import pytest
import torch

from headrace.pipeline import load_pipeline
from headrace.transforms import BatchError, IncompleteGroupsError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
ADAPTERS = sorted((ROOT / "examples" / "adapters").glob("*.py"))
PAGES = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
QUOTE = re.compile(r"<!-- from: (examples/adapters/\w+\.py) -->\n```python\n(.*?)```", re.DOTALL)


def adapter(name: str) -> ModuleType:
    path = ROOT / "examples" / "adapters" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_adapter_is_short_and_is_quoted_as_it_is():
    quoted = {file: text for page in PAGES for file, text in QUOTE.findall(page.read_text())}
    assert {str(path.relative_to(ROOT)) for path in ADAPTERS} == set(quoted)
    for path in ADAPTERS:
        text = path.read_text()
        assert quoted[str(path.relative_to(ROOT))] == text
        code = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
        assert len(code) <= 45, path.name


# -- verl -----------------------------------------------------------------------------------------------


@pytest.fixture
def verl(monkeypatch) -> SimpleNamespace:
    algos = foreign.verl_core_algos(monkeypatch)
    monkeypatch.setattr(algos, "ADV_ESTIMATOR_REGISTRY", dict(algos.ADV_ESTIMATOR_REGISTRY), raising=False)
    return SimpleNamespace(algos=algos, adapter=adapter("headrace_verl"))


def verl_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Groups of one to five rollouts, in any order; the reward on the last token, as verl has it."""
    rng = random.Random(seed)
    uids = [f"uid-{group}" for group in range(6) for _ in range(rng.randint(1, 5))]
    rng.shuffle(uids)
    rewards, mask = torch.zeros(len(uids), 7), torch.zeros(len(uids), 7)
    for row in range(len(uids)):
        length = rng.randint(1, 7)
        mask[row, :length] = 1.0
        rewards[row, length - 1] = rng.choice([0.0, 1.0, rng.random()])
    return rewards, mask, uids


def test_verl_gets_its_own_numbers_over_uneven_groups(verl, monkeypatch):
    pipeline = load_pipeline("pipeline=as/verl", "~pipeline.stages.gate")
    monkeypatch.setattr(verl.adapter, "PIPELINE", pipeline)
    estimate = verl.algos.get_adv_estimator_fn("headrace")
    for seed in range(20):
        rewards, mask, uids = verl_batch(seed)
        found, returns = estimate(token_level_rewards=rewards, response_mask=mask, index=uids, config=None)
        theirs, _ = verl.algos.compute_grpo_outcome_advantage(rewards.clone(), mask, uids)
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)
        assert torch.equal(found, returns)


def test_verl_is_told_of_a_lost_rollout_by_its_uid(verl):
    rewards, mask, uids = torch.rand(15, 2), torch.ones(15, 2), ["first"] * 8 + ["second"] * 7
    with pytest.raises(IncompleteGroupsError, match=r"second.* 7 of 8"):
        verl.adapter.headrace_advantages(rewards, mask, uids)


# -- slime and miles --------------------------------------------------------------------------------------


@cache
def slime() -> ModuleType:
    return adapter("headrace_slime")


def samples_of(rewards, groups, rollouts=None, **columns) -> list[foreign.SlimeSample]:
    rows = zip(rewards, groups, rollouts or [None] * len(rewards), strict=True)
    return [
        foreign.SlimeSample(group_index=group, index=row, rollout_id=rollout, reward=reward, **columns)
        for row, (reward, group, rollout) in enumerate(rows)
    ]


def test_slime_gets_its_own_numbers_for_whole_groups():
    args, module = foreign.slime_args(group_size=8, groups=3), adapter("headrace_slime")
    for seed in range(5):
        rng = random.Random(seed)
        rewards = [rng.random() for _ in range(24)]
        samples = samples_of(rewards, [row // 8 for row in range(24)])
        raw, advantages = module.post_process_rewards(args, samples)
        assert raw == rewards
        assert advantages == pytest.approx(foreign.slime_rewards(args, rewards), rel=1e-4, abs=1e-6)
        assert not any(sample.remove_sample for sample in samples)


def test_a_fan_out_leaves_slimes_groups_as_they_are():
    """Three rows of one rollout make nine rows of eight: slime takes them for one group."""
    rewards, groups = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 9.0, 9.0, 8.0, 8.0], [0] * 6 + [1] * 4
    samples = samples_of(rewards, groups, [0, 0, 0, 1, 2, 3, 4, 5, 6, 7])
    args = foreign.slime_args(group_size=4, groups=2)
    _, advantages = adapter("headrace_slime").post_process_rewards(args, samples)
    assert advantages == pytest.approx([1.5] * 3 + [-0.5] * 3 + [0.8660] * 2 + [-0.8660] * 2, abs=1e-4)
    theirs = foreign.slime_rewards(args, rewards)
    assert theirs[0] < 0 < theirs[8]  # a prompt that was solved is pushed down, for another is worth more


def test_miles_gets_its_own_numbers_where_rollouts_fan_out(monkeypatch):
    module = adapter("headrace_slime")
    monkeypatch.setattr(module, "PIPELINE", load_pipeline("pipeline=as/miles"))
    for seed in range(5):
        rng = random.Random(seed)
        rollouts = [rollout for rollout in range(12) for _ in range(rng.randint(1, 3))]
        reward = [rng.random() for _ in range(12)]
        samples = samples_of([reward[r] for r in rollouts], [r // 4 for r in rollouts], rollouts)
        _, advantages = module.post_process_rewards(foreign.slime_args(4, 3), samples)
        assert advantages == pytest.approx(foreign.miles_rewards(samples), rel=1e-4, abs=1e-6)


def test_what_a_recipe_takes_out_of_the_loss_slime_removes(monkeypatch):
    module = adapter("headrace_slime")
    monkeypatch.setattr(module, "PIPELINE", load_pipeline("grpo", empty="count"))  # as slime does
    samples = samples_of([1.0, 1.0, 1.0, 0.0], [0, 0, 1, 1])
    samples[2].remove_sample = True
    _, advantages = module.post_process_rewards(foreign.slime_args(2, 2), samples)
    assert [sample.remove_sample for sample in samples] == [True, True, True, False]
    assert advantages == pytest.approx([0.0, 0.0, 0.0, -(0.5**0.5)], abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_index": None}, "group_id"),
        ({"status": foreign.SlimeStatus.ABORTED}, "1 of 2"),
        ({"reward": float("nan")}, "every reward must be finite"),
        ({"reward": 0.5}, "share its reward; found rollout 1"),
        ({"index": None, "rollout_id": None}, "None"),
    ],
)
def test_slimes_broken_samples_are_refused(change, message):
    samples = samples_of([1.0, 0.0, 0.0], [0, 0, 0], [0, 1, 1])
    vars(samples[2]).update(change)
    with pytest.raises(BatchError, match=message):
        slime().post_process_rewards(foreign.slime_args(2, 1), samples)


# -- prime-rl ---------------------------------------------------------------------------------------------


def score(module: ModuleType, episodes: list[foreign.Episode]) -> list[list[float] | None]:
    algorithm = module.HeadraceAlgorithm(SimpleNamespace(), None)
    asyncio.run(algorithm.score_group(episodes))
    return [node.advantages for e in episodes for t in e.traces for node in t.nodes]


@pytest.fixture
def prime_rl(monkeypatch) -> ModuleType:
    foreign.prime_rl_algo(monkeypatch)
    return adapter("headrace_prime_rl")


def episode(reward: float, *masks: list[bool], **columns) -> foreign.Episode:
    return foreign.Episode([foreign.Trace(reward, [foreign.Node(mask) for mask in masks], **columns)])


def test_prime_rl_gets_its_own_numbers(prime_rl):
    for seed in range(5):
        rng = random.Random(seed)
        episodes = [episode(rng.random(), [False], [True] * rng.randint(1, 3)) for _ in range(8)]
        episodes[3].traces[0].has_error = True
        found = [values for values in score(prime_rl, episodes) if values is not None]
        sampled = [sum(e.traces[0].nodes[1].mask) for e in episodes if not e.traces[0].has_error]
        theirs = zip(foreign.prime_rl_advantages(episodes), sampled, strict=True)
        assert found == [pytest.approx([value] * number, abs=1e-6) for value, number in theirs]


def test_prime_rl_gets_an_advantage_for_each_token_where_a_recipe_has_them(prime_rl, monkeypatch):
    words = [
        "pipeline=as/prime_rl",
        "~pipeline.stages.gate",
        "+stage@pipeline.stages.late=token_advantage",
        "pipeline.stages.late.how=multiply",
        "+pipeline.stages.late.term={_target_: test_coming_from.Position}",
        "pipeline.order=[collapse,advantage,late,split,weight]",
    ]
    monkeypatch.setattr(prime_rl, "PIPELINE", load_pipeline(*words))
    episodes = [episode(1.0, [True, True], [False, True]), episode(0.0, [True])]
    assert score(prime_rl, episodes) == [[0.0, 0.5], [1.0], [-0.0]]


class Position:
    """A term by token: its position."""

    def __call__(self, batch, mask):
        return mask.cumsum(1) - 1.0


def test_recipes_criteria_and_options_that_pages_name_are_there():
    text = "\n".join(page.read_text() for page in PAGES)
    for cell in re.findall(r"`pipeline=[^|\n]*", text):
        for name in re.findall(r"`(?:pipeline=)?([\w/]+)`", cell):
            assert (ROOT / "conf" / "pipeline" / f"{name}.yaml").exists(), name
    for name in re.findall(r"`(as/\w+)`", text):
        assert (ROOT / "conf" / "pipeline" / f"{name}.yaml").exists(), name
    for stage, option in re.findall(r"`(?:pipeline\.stages\.)?(\w+)\.(\w+)(?:=[^`]*)?`", text):
        node = ROOT / "conf" / "stage" / f"{stage}.yaml"
        assert not node.exists() or re.search(rf"^{option}:", node.read_text(), re.MULTILINE), option
