"""A callable grades the texts of a dump again, and the recipe runs on the new rewards."""

from __future__ import annotations

import math
import random
import sys
import types

import numpy as np
import pytest
import torch
from command import told
from composed import configure
from dumps import tinker_row, verl_row, write_lines

from headrace.pipeline import ConfigError
from headrace.pipeline.tools.dumps.readers import Regraded, Sample, SourceError, open_dump, regrade, to_batch
from headrace.pipeline.tools.replay import replay_dump
from headrace.transforms import Status

pytestmark = pytest.mark.slow


def by_length(prompts, responses):
    return [float(len(text)) for text in responses]


class Matches:
    """A grader: a response is right if it contains the truth."""

    def __init__(self, bonus=0.0):
        self.bonus = bonus

    def __call__(self, prompts, responses, *, columns):
        pairs = zip(responses, columns["ground_truth"], strict=True)
        return np.array([(truth in text) + self.bonus for text, truth in pairs])


@pytest.fixture(autouse=True)
def my_module(monkeypatch):
    module = types.ModuleType("my_graders")
    module.by_length, module.Matches, module.number = by_length, Matches, 3
    monkeypatch.setitem(sys.modules, "my_graders", module)


def batch_of(*texts, group="g", **changes):
    return to_batch([Sample(group, i, 0.0, response=text, **changes) for i, text in enumerate(texts)])


@pytest.fixture
def dump(tmp_path):
    rows = [{**verl_row(f"a_{i}_0", 0.0, prompt="1+1?"), "output": text} for i, text in enumerate("2345")] + [
        {**verl_row(f"b_{i}_0", 1.0, prompt="1+2?"), "output": "x" * 3, "gts": "x"} for i in range(4)
    ]
    return write_lines(tmp_path / "7.jsonl", rows)


# -- the function ------------------------------------------------------------------------------------


def test_each_rollout_is_graded_once_and_its_rows_share_the_reward():
    seen = []

    def grade(prompts, responses):
        seen.append((prompts, responses))
        return torch.tensor([5.0, 7.0])

    rows = [("x", "one"), ("y", "other"), ("x", "two")]
    batch = to_batch([Sample("g", r, 1.0, prompt=f"p{i}", response=text) for i, (r, text) in enumerate(rows)])
    again, changed = regrade(batch, grade)
    assert seen == [(["p0", "p1"], ["one\ntwo", "other"])]
    assert again["next", "reward"].flatten().tolist() == [5.0, 7.0, 5.0]
    assert batch["next", "reward"].flatten().tolist() == [1.0] * 3, "the input is left alone"
    assert (changed.rollouts, changed.changed, changed.gained) == (2, 2, 1)


def test_a_grader_gets_the_columns_it_asks_for():
    batch = batch_of("a", "b", ground_truth="a", prompt="?")
    got = {}

    def grade(prompts, responses, columns):
        got.update(columns)
        return [0, 0]

    regrade(batch, grade)
    assert got == {
        "group": ["g", "g"],
        "rollout": ["0", "1"],
        "reward": [0.0, 0.0],
        "ground_truth": ["a", "a"],
    }
    regrade(batch, lambda prompts, responses, **more: [len(more["columns"])] * 2)


def loop_over(rows, several, count):
    """The new rewards of the rows, and what changed. A row is (group, rollout, text, old rewards, lost)."""
    rollouts = {}
    for row in rows:
        rollouts.setdefault(row[1], []).append(row)
    graded = {
        rollout: grades("\n".join(each[2] for each in own), count)
        for rollout, own in rollouts.items()
        if not any(each[4] for each in own)
    }
    kept = [old if several == count else [math.nan] * count for _, _, _, old, _ in rows]
    rewards = [graded.get(row[1], old) for row, old in zip(rows, kept, strict=True)]
    before = {rollout: rollouts[rollout][0][3] for rollout in graded}
    known = [rollout for rollout in graded if not all(map(math.isnan, before[rollout]))]
    groups = {group: [r for r in graded if rollouts[r][0][0] == group] for group, *_ in rows}
    pairs = [(varied(before, some), varied(graded, some)) for some in groups.values() if len(some) > 1]
    return rewards, (
        len(graded),
        sum(graded[rollout] != before[rollout] for rollout in graded),
        len(known),
        sum(value for rollout in known for value in before[rollout] if not math.isnan(value)),
        sum(sum(graded[rollout]) for rollout in known),
        len(pairs),
        sum(after and not before for before, after in pairs),
        sum(before and not after for before, after in pairs),
    )


def grades(text, count):
    return [float(text.count(letter)) for letter in "ab"[:count]]


def varied(rewards, some):
    """Whether a reward has two different values among these rollouts. A missing reward has no value."""
    columns = zip(*(rewards[rollout] for rollout in some), strict=True)
    return any(len({each for each in column if not math.isnan(each)}) > 1 for column in columns)


def test_new_rewards_and_the_counts_of_changes_equal_those_of_a_loop():
    for seed in range(200):
        dice = random.Random(seed)
        several, count, rows = dice.choice([1, 2]), dice.choice([1, 2]), []
        for rollout in range(dice.randint(1, 6)):
            old = [dice.choice([0.0, 1.0]) for _ in range(several)]
            if several == 2 and dice.random() < 0.3:
                old[dice.randrange(2)] = math.nan
            for _ in range(dice.randint(1, 3)):
                text = "".join(dice.choices("ab", k=dice.randint(0, 2)))
                rows.append((rollout % 3, rollout, text, old, dice.random() < 0.1))
        dice.shuffle(rows)
        names = [["one", "two"][:several]] * len(rows)
        batch = to_batch(
            Sample(
                group,
                rollout,
                old[0] if several == 1 else None,
                rewards=dict(zip(name, old, strict=True)) if several == 2 else None,
                status=Status.FAILED if lost else Status.COMPLETED,
                response=text,
                advantage=0.5,
            )
            for (group, rollout, text, old, lost), name in zip(rows, names, strict=True)
        )
        if dice.random() < 0.3:  # a batch that is not from a dump may lack a reward
            rows = [(*row[:3], [math.nan] * several, row[4]) if row[1] == 0 else row for row in rows]
            batch["next", "reward"] = torch.tensor([row[3] for row in rows], dtype=torch.float64)
        again, changed = regrade(batch, lambda _, texts, count=count: [grades(text, count) for text in texts])
        rewards, numbers = loop_over(rows, several, count)
        if numbers[0]:
            np.testing.assert_array_equal(again["next", "reward"].numpy(), np.array(rewards), str(seed))
        assert tuple(changed) == numbers, seed
        assert "logged_advantage" not in again.keys()
        assert "reward_names" not in again.keys()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            Regraded(),
            "0 rollouts, 0 have another reward; of 0 groups 0 became informative and 0 uninformative",
        ),
        (
            Regraded(2000, 1500, 4, 2.0, 3.0, 1200, 1100, 5),
            "2,000 rollouts, 1,500 (75%) have another reward; mean 0.5 → 0.75; of 1,200 groups 1,100 "
            "became informative "
            "and 5 uninformative",
        ),
        (
            Regraded(3, 1, 0, 2.0, 3.0, 2, 0, 1).with_step(Regraded(5, 1, 8, 2.0, 1.0, 1, 1, 1)),
            "8 rollouts, 2 (25%) have another reward; mean 0.5 → 0.5; of 3 groups 1 became informative and 2 "
            "uninformative",
        ),
    ],
)
def test_the_changes_of_several_steps_are_said_together(changes, said):
    assert str(changes) == f"re-graded: {said}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1.0], r"\(2,\) or \(2, K\) rewards, one for each rollout; found \(1,\) for the rollouts 0, 1"),
        ([1.0, float("nan")], r"a reward is finite; found \[nan\] for the rollout 1"),
        ([float("inf"), 1.0], r"a reward is finite; found \[inf\] for the rollout 0"),
        (["right", "wrong"], "a number, or K of them, for each rollout; found .*right"),
        ([None, 1.0], "a number, or K of them, for each rollout"),
        (None, "a number, or K of them, for each rollout; found None"),
        ([[], []], r"found \(2, 0\)"),
        (1.0, r"found \(\)"),
    ],
)
def test_invalid_grades_are_refused_with_their_rollouts(given, message):
    with pytest.raises(SourceError, match=message):
        regrade(batch_of("a", "b"), lambda prompts, responses: given)


def test_a_grader_with_other_arguments_is_refused():
    with pytest.raises(
        SourceError, match="takes two lists, of prompts and of responses: too many positional"
    ):
        regrade(batch_of("a", "b"), lambda response: [0.0, 1.0])


def test_a_dump_without_texts_is_refused(tmp_path):
    path = write_lines(tmp_path / "train_rollout_summaries.jsonl", [tinker_row(0, i, 1.0) for i in range(2)])
    with pytest.raises(SourceError, match=r"step 6: re-grading needs the texts of the responses"):
        list(open_dump(path, regrade=by_length))


# -- the tasks ---------------------------------------------------------------------------------------


def replayed(path, folder, *words):
    shared = (f"source.path={path}", "report.html=false", "pipeline.stages.gate.group_size=4")
    return told(replay_dump, configure("config", "task=replay", *shared, *words), folder / "replay")


CHANGED = (
    "re-graded: 8 rollouts, 1 (12%) have another reward; mean 0.5 → 0.625; of 2 groups 1 became informative"
)
NODE = "source.regrade={_target_: my_graders.Matches}"


def test_a_replay_regrades_and_reports_what_changed(dump, tmp_path):
    trained, _ = replayed(dump, tmp_path / "before")
    assert trained == 0
    trained, text = replayed(dump, tmp_path, NODE)
    assert trained == 4
    assert CHANGED in text
    ((_, again),) = open_dump(tmp_path / "replay" / "rollouts")
    assert again["next", "reward"].flatten().tolist() == [1.0, 0, 0, 0, 1, 1, 1, 1]
    words = ("source.regrade={_target_: my_graders.Matches, bonus: 1}", "report.dump=null")
    _, text = replayed(tmp_path / "replay" / "rollouts", tmp_path / "again", *words)
    assert "8 (100%) have another reward; mean 0.625 → 1.625; of 2 groups 0 became informative" in text


def test_a_grader_is_given_by_name_and_an_unknown_name_is_refused(dump, tmp_path):
    _, text = replayed(dump, tmp_path, "source.regrade=my_graders.by_length")
    assert "re-graded: 8 rollouts" in text
    for word, message in (
        ("source.regrade=my_graders.nothing", "source.regrade: 'my_graders.nothing' cannot be imported"),
        ("source.regrade=no_module.grade", "cannot be imported: .*PYTHONPATH=. in front"),
        ("source.regrade=my_graders.number", "must name a callable"),
    ):
        with pytest.raises(ConfigError, match=message):
            replayed(dump, tmp_path / "no", word)


def test_a_recipe_that_sums_segments_is_refused(dump, tmp_path):
    words = ("source.regrade=my_graders.by_length", "pipeline.stages.collapse.reward=sum")
    with pytest.raises(ConfigError, match=r"pipeline.stages.collapse.reward must be shared; got sum"):
        replayed(dump, tmp_path, *words)
