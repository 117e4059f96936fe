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

PROMPTS, STEP = 200, 40


def planted(
    seed: int, chance: Callable[[float], float], epochs: int = 3
) -> tuple[list[list[tuple]], list[int]]:
    """The steps of a run over shuffled prompts, as groups (id, prompt, length), and the lost ids.

    A prompt has about the same length in each epoch. `chance` computes the probability of a loss from the
    rank of the prompt's length. A group may overtake up to 20 others.
    """
    dice = Random(seed)
    middle = sorted(dice.lognormvariate(4, 0.7) for _ in range(PROMPTS))
    dispatched = [prompt for _ in range(epochs) for prompt in dice.sample(range(PROMPTS), PROMPTS)]
    trained, lost = [], []
    for number, prompt in enumerate(dispatched):
        if dice.random() < chance(prompt / PROMPTS):
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


@pytest.mark.slow
@pytest.mark.parametrize("chance", [0.05, 0.3])
def test_a_random_loss_is_counted_and_is_not_attributed_to_length(chance):
    for seed in range(25):
        steps, lost = planted(seed, lambda _: chance)
        found = collected(steps)
        over = min(number for number, _, _ in steps[-1])
        first = min(number for step in steps for number, _, _ in step)
        assert found.holes == (sum(first < number < over for number in lost), first, over - 1)
        assert found.survivors is not None
        (text,) = found.said
        assert "long rollouts" not in text


@pytest.mark.slow
def test_a_loss_of_long_prompts_is_found():
    for seed in range(10):
        (text,) = collected(planted(seed, lambda place: 0.05 + 0.6 * (place > 0.75))[0]).said
        assert "They are more often groups with long rollouts" in text
        assert "The symptom slow-groups-lost says what to set." in text


def test_each_prompt_counts_once_an_epoch_by_its_length_in_an_adjacent_epoch():
    """The counts equal those of loops that know the epochs, up to 2 groups."""
    steps, _ = planted(3, lambda place: 0.3 * (place > 0.5))
    found, lengths = collected(steps), {}
    for number, prompt, length in (group for step in steps for group in step):
        lengths[number // PROMPTS, prompt] = length
    expected = {"trained": [], "missing": []}
    for epoch in range(2):
        for prompt in range(PROMPTS):
            other = lengths.get((epoch + 1, prompt)) or lengths.get((epoch - 1, prompt))
            if other is not None:
                expected["trained" if (epoch, prompt) in lengths else "missing"].append(other)
    for tenth in found.survivors.tenths("length"):
        # For a replay an epoch ends at the first repeated prompt, which may be a few groups too late.
        for fate, counted in (("trained", tenth.trained), ("missing", tenth.lost.get("missing", 0))):
            assert abs(counted - sum(tenth.least <= each < tenth.below for each in expected[fate])) <= 2
    assert found.table.columns[0].name == "length in another epoch"


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
    assert text.startswith(f"{found.holes[0]:,} groups are not in this dump")
    assert text.endswith(f"It is not known whether their rollouts are long: {why}")
    assert found.table is None


def test_prompts_that_are_drawn_at_random_have_no_epochs():
    dice = Random(0)
    groups = [(number, dice.randrange(PROMPTS), 10 + dice.randrange(90)) for number in range(400)]
    kept = [group for group in groups if dice.random() < 0.8]
    (text,) = collected([kept[:200], kept[200:]]).said
    assert text.endswith("prompts were not drawn in epochs.")


STEPS = planted(0, lambda _: 0.2)[0]


@pytest.mark.parametrize(
    ("steps", "how"),
    [
        (STEPS, {"label": str}),  # ids are texts
        (STEPS, {"label": lambda number: f"g{number}"}),
        ([[(number % STEP, *rest) for number, *rest in step] for step in STEPS], {}),  # ids repeat
        ([[(5 * number, *rest) for number, *rest in step] for step in STEPS], {}),  # most ids are missing
        (planted(0, lambda _: 0.0)[0], {}),
        (STEPS[:1], {}),  # any group may have been outstanding
        ([], {}),
    ],
)
def test_no_notice_is_given_if_ids_are_unsuitable_or_no_group_is_missing(steps, how):
    found = collected(steps, **how)
    assert found.said == []
    assert found.table is None


def test_ids_above_the_lowest_of_the_last_step_may_be_outstanding_groups():
    groups = {number: (number, number, 9) for number in range(40)}
    steps = [[groups[number] for number in numbers] for numbers in ([0, 1, 3, 4, 7], [5, 8, 11, 12])]
    assert collected(steps).holes == (1, 0, 4)  # 2 is missing; 6, 9 and 10 may be outstanding


@pytest.mark.parametrize(("last", "holes"), [(4, (2, 0, 3)), (5, (0, 0, 0))])
def test_holes_are_counted_if_at_least_half_of_the_ids_are_in_the_dump(last, holes):
    steps = [[(number, number, 9) for number in numbers] for numbers in ([0, 2], [last])]
    assert collected(steps).holes == holes


def test_holes_are_not_counted_if_one_id_is_in_two_steps():
    for second, holes in ([3, 4], (0, 0, 0)), ([4, 5], (1, 0, 5)):
        steps = [[(number, number, 9) for number in numbers] for numbers in ([0, 1, 3], second, [6])]
        assert collected(steps).holes == holes


LOST = (
    "1,200 groups are not in this dump: of the ids 3 to 9000, it lacks 1,200. They were lost, or left out "
    "before the dump was written."
)


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


@pytest.mark.parametrize(("prompts", "said"), [("A?BABCD", 0), ("A?BABCDE", 1)])
def test_an_epoch_has_at_least_half_of_all_prompts(prompts, said):
    groups = [(number, prompt, 9) for number, prompt in enumerate(prompts) if prompt != "?"]
    (text,) = collected([groups[:2], groups[2:]]).said
    assert text.endswith("prompts were not drawn in epochs.") == said


@pytest.mark.parametrize(("first", "counted"), [(3, {"trained": 2, "missing": 1}), (2, {})])
def test_an_epoch_counts_if_all_its_ids_are_below_those_of_the_last_step(first, counted):
    """The first epoch has the groups 0 to 2, of the prompts A, B and C. The group of B is missing."""
    groups = [(number, prompt, 9) for number, prompt in enumerate("A?CABC") if prompt != "?"]
    steps = [[group for group in groups if (group[0] < first) == early] for early in (True, False)]
    found: dict[str, int] = {}
    for (fate, _, _), number in collected(steps).survivors.fates["length"].items():
        found[fate] = found.get(fate, 0) + number
    assert found == counted


@pytest.mark.slow
def test_a_replay_shows_missing_groups_in_the_terminal_and_on_the_page(tmp_path):
    steps, _ = planted(1, lambda place: 0.05 + 0.6 * (place > 0.75))
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
    assert "groups are not in this dump" in flat
    assert "more often groups with long rollouts" in flat
    (table,) = page["steps"][-1]["survivors"]
    assert table["head"] == ["length in another epoch", "dispatched", "trained", "missing"]
    assert table["lines"][-1][0] in text
    assert any("groups are not in this dump" in notice for notice in page["notices"])
