"""Prompts, answers and grades of the task of the demo, as text."""

from __future__ import annotations

import random

import pytest
import torch

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
