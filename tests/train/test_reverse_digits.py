"""Prompts, answers and grades of the task of the demo, as text."""

from __future__ import annotations

import random

import pytest
import torch
from tensordict import TensorDict

from headrace.pipeline.reverse import digits
from headrace.pipeline.train import RepeatSampler


def text_of(ids: torch.Tensor) -> str:
    return "".join(digits.token_texts(ids.tolist()))


def test_the_prompt_of_a_revision_has_the_prompt_and_the_draft():
    """A draft without an end has four digits."""
    dice, asked = random.Random(0), digits.prompts()
    numbers = dice.sample(range(len(asked)), 50)
    drafts = ["".join(dice.choices("0123456789", k=dice.randint(0, 4))) for _ in numbers]
    tokens = [
        [*map(int, draft), *[digits.END] * (len(draft) < 4), *[digits.PAD] * (3 - len(draft))]
        for draft in drafts
    ]
    found = digits.revision_prompts(asked[numbers], torch.tensor(tokens))
    for row, number, draft in zip(found, numbers, drafts, strict=True):
        end = "." if len(draft) < 4 else ""
        assert text_of(row) == f"{text_of(asked[number])}{draft}{end} Again: "


def test_only_the_reversed_prompt_gets_the_grade_1():
    asked, answers = digits.prompts(), digits.answers()
    for prompt, answer in zip(asked, answers, strict=True):
        assert text_of(answer) == f"{text_of(prompt).removesuffix(' backwards? ')[::-1]}."
    assert digits.graded(answers, answers).unique().tolist() == [1.0]
    one_two, two_one = (next(row for row in answers if text_of(row) == text) for text in ("12.", "21."))
    assert digits.graded(one_two[None], two_one[None]).item() == torch.tensor(1 / 3).item()


@pytest.mark.torchrl
def test_specs_of_the_environment_fit_its_rows():
    """Half of the rollouts are revised, so all columns of both turns are compared with the specs."""
    from torchrl.envs import check_env_specs

    from headrace.pipeline.reverse import ReverseEnv

    sampler = RepeatSampler(len(digits.STRINGS), prompts_per_batch=3, group_size=4)
    check_env_specs(ReverseEnv(sampler, revised=0.5))


def tokens_of(texts: list[str]) -> torch.Tensor:
    """Responses of four tokens. A dot is the end."""
    rows = [[digits.END if each == "." else int(each) for each in text] for text in texts]
    return torch.tensor([row + [digits.PAD] * (4 - len(row)) for row in rows])


@pytest.mark.torchrl
def test_a_slot_runs_one_revised_rollout_or_two_rollouts_of_one_turn():
    """In each of two groups of four rollouts, two are revised and two are not, so there are three slots."""
    from headrace.pipeline.reverse import ReverseEnv

    def draw(prompts: list[int]) -> TensorDict:
        ids = torch.arange(8)
        columns = {"prompt": torch.tensor(prompts).repeat_interleave(4), "group_id": 70 + ids // 4}
        return TensorDict(columns | {"rollout_id": 50 + ids, "expected_rollouts": torch.full((8,), 4)}, [8])

    number = {"".join(map(str, each)): at for at, each in enumerate(digits.STRINGS)}
    draws = [draw([number["12"], number["345"]]), draw([number["7"], number["08"]])]
    sampler = RepeatSampler(len(digits.STRINGS), prompts_per_batch=2, group_size=4)
    env = ReverseEnv(sampler, draws=iter(draws), revised=0.5)
    first = env.reset()
    slots = [0, 1, 2, 4, 5, 6], [0, 1, 3, 4, 5, 7]  # the rollouts of the two turns
    goes_on = torch.tensor([True, True, False] * 2)
    asked = [text_of(row) for row in first["tokens", "prompt"]]
    assert asked == ["12 backwards? "] * 3 + ["345 backwards? "] * 3
    answers = tokens_of(["21.", "2.", "2134", "543.", "54.", "5"])
    one, again = env.step_and_maybe_reset(first.set(("tokens", "response"), answers))
    one = one["next"]
    assert one["reward"].flatten().tolist() == pytest.approx([0, 0, 2 / 3, 0, 0, 1 / 4])
    assert one["done"].flatten().tolist() == (~goes_on).tolist()
    assert one["status"].flatten().tolist() == [0, 0, 1, 0, 0, 1]  # without an end, truncated
    assert [text_of(row) for row in again["tokens", "prompt"]] == [
        "12 backwards? 21. Again: ",
        "12 backwards? 2. Again: ",
        "12 backwards? ",
        "345 backwards? 543. Again: ",
        "345 backwards? 54. Again: ",
        "345 backwards? ",
    ]
    answers = tokens_of(["21.", ".", "1", "543.", "543", "345."])
    two, third = env.step_and_maybe_reset(again.set(("tokens", "response"), answers))
    two = two["next"]
    assert two["reward"].flatten().tolist() == pytest.approx([1, 0, 0, 1, 3 / 4, 2 / 4])
    assert two["done"].all()
    assert two["status"].flatten().tolist() == [0, 0, 1, 0, 1, 0]
    for rows, rollouts in zip((first, again), slots, strict=True):
        assert rows["rollout_id"].flatten().tolist() == [50 + each for each in rollouts]
        assert rows["group_id"].flatten().tolist() == [70 + each // 4 for each in rollouts]
        assert rows["expected_rollouts"].unique().tolist() == [4]
        assert rows["status"].unique().tolist() == [0]
    asked = [text_of(row) for row in third["tokens", "prompt"]]
    assert asked == ["7 backwards? "] * 3 + ["08 backwards? "] * 3
    assert env.frames_per_batch == 12


@pytest.mark.torchrl
def test_a_grader_fails_on_a_share_of_the_rows():
    from headrace.pipeline.reverse import ReverseEnv

    sampler = RepeatSampler(len(digits.STRINGS), prompts_per_batch=37, group_size=8)
    found = []
    for seed in (3, 3, 4):
        env = ReverseEnv(sampler, failing=0.25, revised=0.0, seed=seed)
        start = env.reset()
        answers = tokens_of(["1."]).expand(148, 4)
        found.append(env.step(start.set(("tokens", "response"), answers))["next", "status"].flatten())
    assert found[0].unique().tolist() == [0, 3]
    assert float((found[0] == 3).float().mean()) == pytest.approx(0.25, abs=0.1)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    for options in ({"failing": 1.0}, {"failing": -0.1}, {"revised": 1.5}, {"revised": -0.5}):
        said = r"revised must be in \[0, 1\] and failing in \[0, 1\); got"
        with pytest.raises(ValueError, match=said):
            ReverseEnv(sampler, **options)


@pytest.mark.torchrl
def test_a_slot_has_two_turns_so_the_turns_of_a_group_are_even():
    """A revised rollout has two turns, any other has one."""
    from headrace.pipeline.reverse import ReverseEnv

    for size in (2, 3, 4):
        sampler = RepeatSampler(len(digits.STRINGS), prompts_per_batch=3, group_size=size)
        for revised in range(size + 1):
            turns = size + revised
            if turns % 2:
                with pytest.raises(ValueError, match=rf"must be even.*got {size} \+ {revised}$"):
                    ReverseEnv(sampler, revised=revised / size)
            else:
                assert 2 * ReverseEnv(sampler, revised=revised / size).batch_size[0] == 3 * turns
