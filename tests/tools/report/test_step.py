"""A report refuses what it cannot show, and says what a batch cannot have."""

from __future__ import annotations

import math
import random
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from reports_by_hand import report_by_hand
from tensordict import TensorDict

from headrace.pipeline import Pipeline, make_report
from headrace.pipeline.tools.report import StepReport
from headrace.pipeline.tools.report.groups import reading_order
from headrace.pipeline.tools.report.step import rows_to_read


def run_of_two():
    return Pipeline({}).run(TensorDict({"rollout_id": [4, 5]}, batch_size=[2]))


def test_numbers_of_a_trainer_are_floats_and_keep_both_spellings():
    tensor = torch.tensor([[0.5]])
    numbers = make_report(run_of_two(), numbers={"optimizer/lr": tensor, "mine": 3}).numbers
    assert (numbers["optimiser/lr"], numbers["mine"]) == (0.5, 3)
    assert type(numbers["optimiser/lr"]) is float
    assert numbers["rollouts/in"] == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"numbers": {"a": True}}, "numbers must have a number under each name; got a=True"),
        ({"numbers": {"a": "3"}}, "numbers must have a number under each name; got a='3'"),
        (
            {"numbers": {"a": torch.zeros(2)}},
            "numbers must have a number under each name; got a=tensor([0., 0.])",
        ),
        (
            {"numbers": {"rows/trained": 1.0, "rows/in": 1.0, "a": 1.0}},
            "numbers must have names that the report does not have; found rows/in, rows/trained",
        ),
        (
            {"texts": {"promt": ["a", "b"]}},
            "texts has no 'promt' (did you mean 'prompt'?); its names are prompt, response, response_parts, "
            "ground_truth, other_columns, group_label, rollout_label",
        ),
        (
            {"texts": {"prompt": ["a", "b"], "response": ["a"]}},
            "texts must have one text for each of 2 rows; found {'response': 1}",
        ),
    ],
)
def test_numbers_and_texts_that_do_not_fit_are_refused(given, said):
    with pytest.raises(ValueError) as raised:
        make_report(run_of_two(), **given)
    assert str(raised.value) == said


def test_given_texts_are_strings_of_the_report():
    report = make_report(run_of_two(), texts={"prompt": ["user: a?", 3], "response": ["abc", "d"]})
    assert report.texts == {"prompt": ["user: a?", "3"], "response": ["abc", "d"]}
    assert [report.asked(row) for row in (0, 1)] == ["a?", "3"]
    assert make_report(run_of_two()).asked(0) is None


def test_a_step_has_the_number_of_its_run_unless_it_is_given():
    run = run_of_two()
    run.step = 7
    assert [make_report(run).step, make_report(run, step=0).step] == [7, 0]


def test_characters_of_a_response_are_counted_if_tokens_are_not_known():
    """The rollout 12 has two rows. A row without a text has no characters."""
    texts = {"response": ["four", "", "abc", "de"]}
    ones = [1] * 4
    numbers = report_by_hand(texts, no_lengths=ones).numbers
    assert (numbers["response_characters/mean"], numbers["response_characters/max"]) == (3.0, 5.0)
    for report in (report_by_hand(texts), report_by_hand({}, no_lengths=ones)):
        assert "response_characters/mean" not in report.numbers


@pytest.mark.parametrize(
    ("columns", "unsaid"),
    [
        ({"status": [0, 1, 3, 0]}, []),
        ({"status": [0, 1, -1, 0]}, ["rollouts/truncated"]),
        ({"status": [0] * 4, "no_lengths": [1] * 4}, ["response_length/mean"]),
        ({"status": [-1] * 4, "no_lengths": [1] * 4}, ["response_length/mean", "rollouts/truncated"]),
    ],
)
def test_a_report_names_the_numbers_that_its_batch_cannot_have(columns, unsaid):
    assert report_by_hand(**columns).unsaid == unsaid


def test_a_report_without_statuses_cannot_have_truncations():
    bare = StepReport(0, (), {"reason": np.zeros(2, int), "row": np.arange(2)}, ("trained",), ("trained",))
    assert (bare.unsaid, bare.statuses) == (["rollouts/truncated"], None)
    with pytest.raises(FrozenInstanceError):  # numbers are computed once
        bare.step = 1  # type: ignore[misc]
    assert (bare.first_of_group(0), bare.groups, repr(bare)) == (
        None,
        {},
        "StepReport(step=0, 2 of 2 rows trained)",
    )
    assert report_by_hand(status=[0, 2, -1, 9]).statuses == ["completed", "aborted", None, "9"]
    assert [report_by_hand().first_of_group(row) for row in range(4)] == [0, 0, 2, 2]


def test_the_worst_and_the_best_rollout_of_each_group_are_read_first():
    """Of equal rewards, the first row is the worst. A rollout without a reward has the mean of its group."""
    for seed in range(40):
        rng = random.Random(seed)
        rewards = {
            rollout: rng.choice([0.0, 0.5, 1.0, 1.0, math.nan]) for rollout in range(rng.randint(1, 12))
        }
        lines = [rollout for rollout in rewards for _ in range(rng.randint(1, 2))]
        rng.shuffle(lines)
        columns = {
            "group_id": np.array([9 - rollout % 4 for rollout in lines]),
            "rollout_id": np.array(lines),
            "reward": np.array([rewards[rollout] for rollout in lines]),
            "reason": np.zeros(len(lines), int),
            "row": np.arange(len(lines)),
        }
        report = StepReport(0, (), columns, ("trained",), ("trained",))
        heads, rest = list[int](), list[int]()
        for at in reading_order(report.groups).tolist():
            mine = [rollout for rollout in dict.fromkeys(lines) if 9 - rollout % 4 == report.groups["id"][at]]
            known = [rewards[rollout] for rollout in mine if math.isfinite(rewards[rollout])]
            mean = sum(known) / len(known) if known else 0.0
            mine.sort(key=lambda rollout: rewards[rollout] if math.isfinite(rewards[rollout]) else mean)
            ends = {mine[0]: 0} if len(known) > 1 and len({*known}) == 1 else {mine[0]: 0, mine[-1]: 0}
            heads += ends
            rest += [rollout for rollout in mine if rollout not in ends]
        expected = [row for rollout in heads + rest for row, own in enumerate(lines) if own == rollout]
        assert rows_to_read(report).tolist() == expected, seed
