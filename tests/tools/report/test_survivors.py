"""A report says how many groups a stream lost, and why."""

from __future__ import annotations

import pytest
from rich.console import Console
from tensordict import TensorDict

from headrace.pipeline import Pipeline, make_report
from headrace.pipeline.tools.report import advise, page_data, show_report, unchecked
from headrace.pipeline.tools.report.survivors import OPTIONS, WORDS, lost_groups
from headrace.transforms.streams import Survivors

SLOW, FAST = 48, 0  # the bins of 64 s and 1 s
KINDS = ["stale", "timeout", "failed", "evicted", "lost"]


def survivors(reason: str, *, value: str = "latency", lost: int = 20, slow: int = SLOW) -> Survivors:
    """The counts of 80 fast groups that were trained, and of fast and slow groups that were lost."""
    trained, known = {("trained", True, FAST): 80}, reason != "timeout"
    fates = {"latency": {(reason, known, FAST): lost}} | {value: {(reason, known, slow): lost}}
    return Survivors({name: trained | (each if lost else {}) for name, each in fates.items()}, outstanding=3)


def report(found: Survivors | None):
    run = Pipeline({}).run(TensorDict({"rollout_id": [4, 5]}, batch_size=[2]))
    return make_report(run, survivors=found)


@pytest.mark.parametrize(
    ("value", "slow", "which", "reason"),
    [
        *(("latency", SLOW, "took at least 64 s", reason) for reason in KINDS),
        ("turns", SLOW, "have at least 64 turns", "stale"),
        ("length", 83, "have a rollout of at least 1,328 tokens", "stale"),  # bin 83 begins at 1,327.9 tokens
    ],
)
def test_an_advisory_has_the_shares_of_slow_and_other_groups_the_reason_and_the_option(
    value, slow, which, reason
):
    made = report(survivors(reason, value=value, slow=slow))
    (found,) = [each for each in made.advisories if each.name == "slow-groups-lost"]
    z = made.numbers[f"survivors/{value}/z"]
    assert (found.number, found.text) == (
        f"survivors/{value}/z",
        f"Of the groups that {which}, 0 % were trained, and of the others 100 % (z = {z:.1f}). Most of the "
        f"lost were {WORDS.get(reason, reason)}. Set {OPTIONS[reason]}.",
    )


def test_an_advisory_says_that_lost_groups_are_slow_if_z_is_below_minus_4():
    numbers = {
        "lost/stale": 40.0,
        "latency/slow": 64.0,
        "latency/slow_trained": 0.1,
        "latency/others_trained": 1,
    }
    numbers = {f"survivors/{name}": value for name, value in numbers.items()}
    assert lost_groups(numbers | {"survivors/latency/z": -4.0}) is None
    assert lost_groups(numbers | {"survivors/latency/z": -4.001}) is not None


def test_the_reward_has_a_table_with_signs_and_no_advisory():
    rewards = {("trained", True, 81): 80, ("stale", True, 0): 9, ("stale", True, -89): 11}
    latency = {("trained", True, FAST): 80, ("stale", True, FAST): 40}
    made = report(Survivors({"latency": latency, "reward": rewards}, outstanding=1))
    assert made.advisories == []
    (table,) = page_data([made], title="")["steps"][0]["survivors"]
    assert table["head"] == ["reward", "dispatched", "trained", "stale"]
    assert [line[0] for line in table["lines"]] == ["-2.18 to -2", "0", "1 to 1.09"]
    assert table["note"] == "1 group is outstanding; 20 groups are left out, because they have no reward"


def test_a_length_of_zero_is_shown_as_zero():
    found = survivors("stale", value="length", slow=-80)
    (table,) = page_data([report(found)], title="")["steps"][0]["survivors"]
    assert [line[0] for line in table["lines"]] == ["0", "1"]


@pytest.mark.parametrize("quiet", [{"lost": 0}, {"slow": FAST}, {"lost": 2}])
def test_no_advisory_is_given_if_no_slow_groups_are_lost(quiet):
    """No group is lost, lost groups are as fast as others, or two groups are too few."""
    assert advise(report(survivors("stale", **quiet)).numbers) == []


def test_the_advisory_names_the_most_frequent_reason():
    fates = {("stale", True, SLOW): 19, ("evicted", True, SLOW): 20, ("failed", True, SLOW): 9}
    made = report(Survivors({"latency": {("trained", True, FAST): 80} | fates}, outstanding=0))
    assert "Most of the lost were evicted. Set a greater max_pending_groups" in made.advisories[0].text


def test_groups_of_one_value_have_no_table():
    made = report(survivors("stale", slow=FAST))
    assert page_data([made], title="")["steps"][0]["survivors"] == []


def test_without_a_stream_nothing_is_shown():
    assert page_data([report(None)], title="")["steps"][0]["survivors"] == []
    assert not any("survivors" in name for name in report(None).numbers)
    assert "slow-groups-lost" in unchecked([(0, report(None).numbers)])


def test_the_page_and_the_terminal_have_the_same_table():
    made = report(survivors("timeout"))
    (table,) = page_data([made], title="")["steps"][0]["survivors"]
    assert table["head"] == ["latency, s", "dispatched", "trained", "timeout", "early"]
    assert table["lines"] == [["1 to 1.09", "80", "80", "0", "0"], ["64 to 69.8", "20", "0", "20", "20"]]
    assert table["note"] == "3 groups are outstanding"
    (turns,) = page_data([report(survivors("timeout", value="turns"))], title="")["steps"][0]["survivors"]
    assert [line[0] for line in turns["lines"]] == ["1", "64 to 69"]
    console = Console(width=80, record=True)
    console.print(show_report(made))
    text = console.export_text()
    assert "64 to 69.8" in text
    assert "3 groups are outstanding" in text
    assert "slow-groups-lost: Of the groups that took at least 64 s" in text
