"""A replay counts missing groups by gaps in the ids, and says whether long groups are missing more often."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace

import pytest
from command import told
from composed import configure
from dumps import slime_dump, slime_sample
from pages import data_of
from tensordict import TensorDict

from headrace.pipeline import Pipeline, make_report
from headrace.pipeline.tools.dumps.readers import Sample, to_batch
from headrace.pipeline.tools.replay import replay_dump
from headrace.pipeline.tools.replay.missing_groups import GroupHoles
from headrace.transforms.table.tensordicts import as_texts

PROMPTS, STEP = 200, 40


def planted(
    seed: int, chance: Callable[[float], float], epochs: int = 3, prompts: int = PROMPTS
) -> tuple[list[list[tuple]], list[int]]:
    """The steps of a run over shuffled prompts, as groups (id, prompt, length), and the lost ids.

    A prompt has about the same length in each epoch. `chance` computes the probability of a loss from the
    rank of the prompt's length. A group may overtake up to 20 others.
    """
    dice = Random(seed)
    middle = sorted(dice.lognormvariate(4, 0.7) for _ in range(prompts))
    dispatched = [prompt for _ in range(epochs) for prompt in dice.sample(range(prompts), prompts)]
    trained, lost = [], []
    for number, prompt in enumerate(dispatched):
        if dice.random() < chance(prompt / prompts):
            lost.append(number)
        else:
            length = max(1, int(middle[prompt] * dice.lognormvariate(0, 0.3)))
            trained.append((number + 20 * dice.random(), number, prompt, length))
    order = [group[1:] for group in sorted(trained)]
    return [order[at : at + STEP] for at in range(0, len(order), STEP)], lost


def batch_of(groups: list[tuple], texts: bool = True, lengths: bool = True, label=int) -> TensorDict:
    """A batch with two rollouts for each group. The first is the longer one."""
    samples = []
    for number, prompt, length in groups:
        for at in range(2):
            tokens = {"response_length": max(1, length // (at + 1))} if lengths else {}
            text = {"prompt": f"prompt {prompt}"} if texts else {}
            rollout = 2 * number + at
            samples.append(Sample(group=label(number), rollout=rollout, reward=float(at), **tokens, **text))
    return to_batch(samples)


def collected(steps: list[list[tuple]], **how) -> GroupHoles:
    found = GroupHoles()
    for step, groups in enumerate(steps):
        found.add(make_report(Pipeline({}).run(batch_of(groups, **how)), step=step))
    return found


def more_of_long(place: float) -> float:
    return 0.05 + 0.6 * (place > 0.75)


@pytest.mark.parametrize(("chance", "is_long"), [(0.05, False), (0.3, False), (more_of_long, True)])
def test_a_loss_is_counted_and_attributed_to_length_only_if_long_groups_are_lost_more_often(chance, is_long):
    for seed in range(2):
        steps, lost = planted(seed, chance if is_long else lambda _: chance)
        found = collected(steps)
        over = min(number for number, _, _ in steps[-1])
        first = min(number for step in steps for number, _, _ in step)
        assert found.holes == (sum(first < number < over for number in lost), first, over - 1)
        (text,) = found.said
        assert ("They are more often groups with long rollouts" in text) == is_long
        assert found.survivors.outstanding == 0


EPOCHS = "ABCDAB?DABC?ABCD"  # the prompts of four epochs; the groups 6 and 11 are missing
BEFORE_2 = [
    ("10", 1, 1, 0),
    ("20", 2, 2, 0),
    ("30 to 31", 1, 1, 0),
    ("39 to 41", 2, 1, 1),
    ("59 to 63", 1, 1, 0),
]


@pytest.mark.parametrize(
    ("last", "lines"),
    [
        (12, [*BEFORE_2, ("77 to 82", 3, 2, 1), ("118 to 127", 1, 1, 0)]),
        (10, BEFORE_2),
        (8, BEFORE_2),
        (7, None),  # no prompt is missing in the first epoch
    ],
)
def test_each_prompt_counts_once_an_epoch_by_its_length_in_an_adjacent_epoch(last, lines):
    """Prompt B has the lengths 15, 30, 60 and 120, and the others 10, 20, 40 and 80. Bins are 9 % wide.

    A length is that of the next epoch: D has 10 tokens in the second epoch, because the third lacks it. C
    does not count in the first. Epochs count up to the lowest id of the last step.
    """
    groups = [
        (number, prompt, (15 if prompt == "B" else 10) * 2 ** (number // 4))
        for number, prompt in enumerate(EPOCHS)
        if prompt != "?"
    ]
    steps = [[group for group in groups[::-1] if (group[0] < last) == early] for early in (True, False)]
    table = collected(steps).table
    if lines is None:
        assert table is None
        return
    assert [column.name for column in table.columns] == [
        "length in another epoch",
        *("dispatched", "trained", "missing"),
    ]
    cells = [tuple(map(str, cells)) for cells, *_ in table.rows]
    assert cells == [tuple(map(str, line)) for line in lines]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"texts": False}, "the dump has no texts of prompts."),
        ({"lengths": False}, "the dump has no lengths in tokens."),
        ({}, "no prompt is in the dump twice."),
    ],
)
def test_one_line_says_why_lengths_cannot_be_compared(how, why):
    steps, _ = planted(0, lambda _: 0.2, epochs=1)
    found = collected(steps, **how)
    (text,) = found.said
    assert text.startswith(f"This dump lacks {found.holes[0]:,} group")
    assert text.endswith(f"It is not known whether their rollouts are long: {why}")
    assert found.table is None


STEPS = planted(0, lambda _: 0.2, prompts=60)[0]


@pytest.mark.parametrize(
    ("steps", "how"),
    [
        (STEPS, {"label": str}),  # ids are texts
        ([[(number % STEP, *rest) for number, *rest in step] for step in STEPS], {}),  # ids repeat
        ([[(5 * number, *rest) for number, *rest in step] for step in STEPS], {}),  # most ids are missing
        (planted(0, lambda _: 0.0, prompts=60)[0], {}),
        (STEPS[:1], {}),  # any group may have been outstanding
        ([], {}),
    ],
)
def test_no_notice_is_given_if_ids_are_unsuitable_or_no_group_is_missing(steps, how):
    found = collected(steps, **how)
    assert found.said == []
    assert found.table is None


@pytest.mark.parametrize(
    ("steps", "holes"),
    [
        # 2 is missing; 6, 9 and 10 may be outstanding
        ([[0, 1, 3, 4, 7], [5, 8, 11, 12]], (1, 0, 4)),
        # at least half of the ids must be in the dump
        ([[0, 2], [4]], (2, 0, 3)),
        ([[0, 2], [5]], (0, 0, 0)),
        # no id may be in two steps
        ([[0, 1, 3], [4, 5], [6]], (1, 0, 5)),
        ([[0, 1, 3], [3, 4], [6]], (0, 0, 0)),
    ],
)
def test_the_missing_ids_below_those_of_the_last_step_are_counted(steps, holes):
    assert collected([[(number, number, 9) for number in step] for step in steps]).holes == holes


LOST = "This dump lacks 1,200 groups of the ids 3 to 9000, lost or left out before the dump was written."


@pytest.mark.parametrize(
    ("z", "more"),
    [
        (-4.0, ""),
        (
            -4.04,
            " They are more often groups with long rollouts: of the groups whose prompt has a rollout of at "
            "least 1,328 tokens in another epoch, 25 % are in the dump, and of the others 99.5 % (z = -4.0). "
            "The symptom slow-groups-lost says what to set.",
        ),
    ],
)
def test_the_sentence_about_missing_groups_equals_one_by_hand(z, more):
    """At z = −4 the loss may be by chance."""
    numbers = {"z": z, "slow_trained": 0.25, "others_trained": 0.995, "slow": 1327.9}
    found = GroupHoles()
    found.__dict__["holes"] = (1200, 3, 9000)
    named = {f"survivors/length/{name}": value for name, value in numbers.items()}
    found.__dict__["survivors"] = SimpleNamespace(numbers=lambda: named)
    assert found.said == [LOST + more]


def test_numbers_of_groups_with_labels_have_no_holes():
    """The labels are the ids of the dump."""
    found = GroupHoles()
    for step, ids in enumerate([[0, 1, 3], [4, 5]]):
        batch = batch_of([(number, number, 9) for number in ids])
        batch["group_label"] = as_texts([f"g{number}" for number in ids for _ in range(2)])
        found.add(make_report(Pipeline({}).run(batch), step=step))
    assert found.holes == (0, 0, 0)


@pytest.mark.parametrize(("prompts", "said"), [("A?BABCD", 0), ("A?BABCDE", 1)])
def test_an_epoch_has_at_least_half_of_all_prompts(prompts, said):
    groups = [(number, prompt, 9) for number, prompt in enumerate(prompts) if prompt != "?"]
    (text,) = collected([groups[:2], groups[2:]]).said
    assert text.endswith("prompts were not drawn in epochs.") == said


@pytest.mark.slow
def test_a_replay_shows_missing_groups_in_the_terminal_and_on_the_page(tmp_path):
    steps, _ = planted(1, lambda place: 0.7 * (place > 0.7), prompts=100)
    (tmp_path / "dump").mkdir()
    for step, groups in enumerate(steps):
        samples = []
        for number, prompt, length in groups:
            for at in range(2):
                sample = slime_sample(number, 2 * number + at, float(at), prompt=f"prompt {prompt}")
                size = max(1, length // (at + 1))
                tokens = {"tokens": [1] * (size + 2), "rollout_log_probs": [-0.5] * size}
                samples.append(sample | {"response_length": size} | tokens)
        slime_dump(tmp_path / "dump" / f"data_{step}.pt", step, samples)
    config = configure(
        "config",
        "task=replay",
        f"source.path={tmp_path / 'dump'}",
        "source.format=slime",
        "pipeline.stages.gate.group_size=2",
        "report.dump=null",
    )
    _, text = told(replay_dump, config, tmp_path / "out")
    page = data_of(tmp_path / "out" / "report.html")
    flat = " ".join(text.split())
    assert "This dump lacks" in flat
    assert "more often groups with long rollouts" in flat
    (table,) = page["steps"][-1]["survivors"]
    assert table["head"] == ["length in another epoch", "dispatched", "trained", "missing"]
    assert table["lines"][-1][0] in text
    assert any("This dump lacks" in notice for notice in page["notices"])
