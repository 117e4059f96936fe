"""Every group is counted once, as trained or lost, and slow groups that are lost are found."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from test_steps import random_run

from headrace.pipeline.tools.report.survivors import lost_groups
from headrace.transforms import GroupAssembler
from headrace.transforms.streams import Survivors
from headrace.transforms.streams.survival import (
    LONG,
    Survival,
    bin_of,
    least_of,
    signed_bin_of,
    signed_least_of,
    slow_loss,
)

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # after tests/support, which has a batches.py
import survivors
from worlds import columns

LOSSY = list(survivors.POLICIES)[:5]


def tail(trained: list[int], lost: list[int], k: int) -> float:
    """The probability that parts from k on lose at least as many groups, if all groups are equally likely
    to be lost."""
    total, above, losses = sum(trained + lost), sum(trained[k:] + lost[k:]), sum(lost)
    ways = [math.comb(above, x) * math.comb(total - above, losses - x) for x in range(losses + 1)]
    return sum(ways[sum(lost[k:]) :]) / math.comb(total, losses)


PARTS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=10)


@given(PARTS)
def test_the_bound_holds_for_any_number_of_groups(parts):
    """For K cuts, P(z ≤ the found z) ≤ Σ of the tails over all cuts ≤ K · exp(−z² / 2 − ln K)."""
    trained, lost = (list(each) for each in zip(*parts, strict=True))
    z, part = slow_loss(trained, lost)
    assert (z < 0) == (part > 0)
    if part:
        assert tail(trained, lost, part) * (len(parts) - 1) <= math.exp(-(z**2) / 2) * (1 + 1e-9)


@given(PARTS)
def test_the_clearest_difference_is_that_of_a_loop_over_all_cuts(parts):
    trained, lost = (list(each) for each in zip(*parts, strict=True))
    found = []
    for k in range(1, len(parts)):
        total, losses = sum(trained + lost), sum(lost)
        slow = sum(trained[k:] + lost[k:])
        evidence = []
        for some, group in ((sum(trained[k:]), total - losses), (sum(lost[k:]), losses)):
            shares = [(some, slow), (group - some, total - slow)]
            evidence.append(sum(x * math.log2(x * total / (group * y)) for x, y in shares if x) * math.log(2))
        if sum(lost[k:]) * total > slow * losses:
            found.append(max(evidence) - math.log(len(parts) - 1))
    best = max(found, default=0.0)
    z, cut = slow_loss(trained, lost)
    assert z == pytest.approx(-math.sqrt(2 * max(0.0, best)), abs=1e-6)
    assert (cut > 0) == (z < 0)


@given(PARTS)
def test_losses_of_fast_groups_or_of_equal_shares_are_not_found(parts):
    shares = [(10, 10 - at) for at in range(len(parts))]
    assert slow_loss(*zip(*shares, strict=True)) == (0.0, 0)
    assert slow_loss(*zip(*[(n, n) for n, _ in parts], strict=True)) == (0.0, 0)
    assert slow_loss([n for n, _ in parts], [0] * len(parts)) == (0.0, 0)


@given(st.integers(1, 12), st.floats(1.0, 1e6))
def test_a_bin_is_one_number_of_turns_or_nine_per_cent_wide(turns, latency):
    assert math.ceil(least_of(bin_of(turns))) == turns
    assert least_of(bin_of(latency)) <= latency * (1 + 1e-9) <= 1.0906 * least_of(bin_of(latency))


@given(st.floats(-1e6, 1e6))
def test_the_bin_of_a_reward_keeps_its_sign_and_the_order(reward):
    number = signed_bin_of(reward)
    assert signed_bin_of(-reward) == -number
    slack = 1 + 1e-9  # allows a rounding error; a negative bin does not contain its lower end
    least, below = signed_least_of(number), signed_least_of(number + 1)
    assert min(least * slack, least / slack) <= reward <= max(below * slack, below / slack)
    assert number == 0 or abs(below - least) <= 0.0906 * abs(reward) * 1.0906
    assert (number > 0) == (reward >= 2**-10)


def test_numbers_for_loggers_name_the_slow_part_of_each_value():
    fates = {
        ("trained", True, 0): 50,
        ("trained", True, 8): 20,
        ("stale", True, 8): 10,
        ("timeout", False, 16): 20,
    }
    turns = {("trained", True, bin_of(1)): 60, ("trained", True, bin_of(3)): 10}
    turns |= {("stale", True, bin_of(3)): 10, ("timeout", False, bin_of(5)): 20}
    found = Survivors({"latency": fates, "turns": turns, "length": {}, "reward": turns}, 3)
    z, part = slow_loss([50, 20, 0], [0, 10, 20])
    of_turns, second = slow_loss([60, 10, 0], [0, 10, 20])
    assert (part, second) == (1, 1)
    assert found.numbers() == {
        "survivors/trained": 0.7,
        "survivors/lost/stale": 10,
        "survivors/lost/timeout": 20,
        "survivors/early": 20,
        "survivors/outstanding": 3,
        "survivors/latency/z": z,
        "survivors/latency/slow": 2,  # from 2 s on, 20 of 50 are trained
        "survivors/latency/slow_trained": 0.4,
        "survivors/latency/others_trained": 1,
        "survivors/turns/z": of_turns,
        "survivors/turns/slow": least_of(bin_of(3)),  # of 40 groups with three turns or more, 10 are trained
        "survivors/turns/slow_trained": 0.25,
        "survivors/turns/others_trained": 1,
    }
    equal = {("trained", True, 8): 5, ("stale", True, 8): 5}
    assert Survivors({"latency": equal, "turns": equal}, 0).numbers() == {
        "survivors/trained": 0.5,
        "survivors/lost/stale": 5,
        "survivors/early": 0,
        "survivors/outstanding": 0,
        "survivors/latency/z": 0,
    }
    assert found.lacking("length") == 100
    assert found.lacking("turns") == 0
    assert Survivors({"latency": {}}, 3).numbers() == {}


FATES = ("trained", "stale", "timeout")
COUNTS = st.dictionaries(
    st.tuples(st.sampled_from(FATES), st.booleans(), st.integers(-40, 40)), st.integers(1, 9), min_size=1
)


@settings(max_examples=30)
@given(COUNTS, st.sampled_from(["latency", "reward"]))
def test_a_group_is_in_the_tenth_of_the_middle_of_its_bin(fates, value):
    """With b groups in lower bins, n in its own and N in all, it is in part ⌊10 · (b + n / 2) / N⌋."""
    total, parts = sum(fates.values()), dict[int, list[tuple[str, bool, int]]]()
    for key in sorted(fates, key=lambda key: key[2]):
        below = sum(groups for (_, _, bin), groups in fates.items() if bin < key[2])
        own = sum(groups for (_, _, bin), groups in fates.items() if bin == key[2])
        parts.setdefault(5 * (2 * below + own) // total, []).append(key)
    least, expected = signed_least_of if value == "reward" else least_of, []
    for keys in parts.values():
        lost = {name: sum(fates[key] for key in keys if key[0] == name) for name in FATES}
        trained, early = lost.pop("trained"), sum(fates[key] for key in keys if not key[1])
        lost = {name: groups for name, groups in lost.items() if groups}
        expected.append((least(keys[0][2]), least(keys[-1][2] + 1), trained, lost, early))
    found = Survivors({value: fates}, 0).tenths(value)
    assert found == expected
    assert [tenth.left for tenth in found] == [sum(fates[key] for key in keys) for keys in parts.values()]


# -- what an assembler counts -------------------------------------------------------------------------------


class Clock:
    """An assembler with a clock that the test sets; by default a group has one rollout."""

    def __init__(self, **options):
        self.now, options = 0.0, {"group_size": 1} | options
        self.assembler = GroupAssembler(version_key="version", **options)
        self.assembler._now = lambda: self.now

    def announce(self, *groups: int) -> None:
        self.assembler.announce(columns(group_id=[*groups], rollout_id=[*groups]))

    def put(self, group: int, now: float, *, version: int = 0, rows: int = 1, status: int = 0) -> None:
        self.now = now
        batch = columns(group_id=[group] * rows, rollout_id=[group] * rows, version=[version] * rows)
        batch["next", "done"], batch["status"] = [False] * (rows - 1) + [True], [status] * rows
        batch["log_probs", "full"] = [[0.0]] * rows
        self.assembler.put(batch)

    def fates(self, value: str = "latency") -> dict:
        found = self.assembler.survivors.fates[value]
        return {(fate, known, least_of(number)): groups for (fate, known, number), groups in found.items()}


def test_the_latency_is_from_the_announcement_to_the_last_row():
    run = Clock()
    run.now = 16.0
    run.announce(0, 1)
    run.put(0, 20.0, rows=2)
    run.now = 64.0
    run.assembler.take()
    assert run.fates() == {("trained", True, 4.0): 1}
    assert run.fates("turns") == {("trained", True, 2.0): 1}
    assert run.assembler.survivors.outstanding == 1


def test_a_group_that_times_out_has_a_lower_bound():
    run = Clock(timeout_seconds=8.0)
    run.announce(0, 1)
    run.put(0, 8.0)  # both groups are too old, but group 0 became complete in time
    assert run.fates() == {("timeout", False, 8.0): 1}
    run.assembler.take()
    assert run.fates() == {("timeout", False, 8.0): 1, ("trained", True, 8.0): 1}


def test_a_failed_group_ends_when_all_its_rollouts_have_ended():
    run = Clock()
    run.announce(0)
    run.put(0, 2.0, status=3)
    assert run.fates() == {("failed", True, 2.0): 1}


@pytest.mark.parametrize("on_stale", ["drop", "mask"])
def test_a_stale_group_is_lost_whether_it_is_dropped_or_masked(on_stale):
    run = Clock(max_staleness=1, on_stale=on_stale)
    run.announce(0)
    run.put(0, 2.0)
    run.assembler.version, run.now = 2, 64.0
    run.assembler.take()
    assert run.fates() == {("stale", True, 2.0): 1}


def test_groups_in_flight_at_a_restart_are_not_counted(tmp_path):
    options = {"groups": 1, "max_staleness": 1, "steps_ahead": 0}
    for journal in (None, tmp_path / "journal"):
        run = Clock(journal=journal, **options)
        run.announce(0, 1)
        run.put(0, 2.0)
        again = Clock(journal=journal, **options)
        if journal is None:
            again.assembler.load_state_dict(run.assembler.state_dict())
        again.announce(2)
        for group in (1, 2):
            again.put(group, 4.0)
        for _ in range(3):
            again.assembler.take()
        assert again.assembler.ready == again.assembler.pending == 0
        assert again.fates() == {("trained", True, 4.0): 1}


def test_outstanding_groups_at_the_end_are_in_no_share():
    run = Clock()
    run.announce(0, 1)
    run.put(0, 1.0)
    run.assembler.discard_batch()
    assert run.fates() == {}
    assert run.assembler.survivors.outstanding == 0


def test_memory_does_not_grow_with_the_groups():
    dice, run = Random(0), Clock(timeout_seconds=50.0)
    for group in range(300):
        run.announce(group)
        run.put(group, run.now + dice.expovariate(1.0))
        run.assembler.take()
    survival: Survival = run.assembler._stream.survival
    assert not survival._since
    assert not survival._took
    assert all(len(fates) < 120 for fates in survival._fates.values())


def test_memory_does_not_grow_with_lengths_and_rewards():
    dice, run = Random(0), Clock()
    for group in range(150):
        batch = with_lengths([dice.randint(0, WIDTH)], group_id=[group], rollout_id=[group])
        batch["next", "reward"] = torch.tensor([dice.gauss(0, 10)])
        run.assembler.put(batch)
        run.assembler.take()
    fates = run.assembler._stream.survival._fates
    assert len(fates["length"]) <= 8 * 9 + 2
    assert len(fates["reward"]) < 2 * 8 * 16


@pytest.mark.filterwarnings("ignore:no group may take longer")
@pytest.mark.parametrize("seed", range(12))
def test_each_dispatched_group_is_trained_or_lost_or_outstanding_once(seed):
    run = random_run(seed)
    run.world = run.world.__class__(**vars(run.world) | {"ticks": 200})
    run.go()
    fates, rest = run.assembler.survivors.fates, run.assembler.survivors.outstanding
    lost = Counter(run.assembler.lost_groups)
    for value in ("latency", "turns"):  # rows of these worlds have no tokens and no rewards
        counts = fates[value]
        by_fate = Counter()
        for (fate, _, _), groups in counts.items():
            by_fate[fate] += groups
        assert by_fate.pop("trained", 0) == run.assembler.emitted
        assert by_fate == lost
    assert run.assembler.emitted + lost.total() + rest == len(run.known)
    assert rest == run.assembler.pending + run.assembler.ready


# -- by length and by reward --------------------------------------------------------------------------------

WIDTH = 512


def with_lengths(lengths: list[int], **numbers: list) -> TensorDict:
    """A row for each length. Each row is a group of its own, unless `numbers` has group ids."""
    ids = [*range(len(lengths))]
    batch = columns(**{"group_id": ids, "rollout_id": ids, "version": [0] * len(ids)} | numbers)
    batch["next", "done"] = batch.get("done", torch.ones(len(ids), dtype=torch.bool))
    batch["masks", "all_assistant_mask"] = torch.arange(WIDTH) < torch.tensor(lengths).unsqueeze(1)
    return batch


def rows_of_two(**more: list) -> TensorDict:
    """Group 0 has rollouts of 4 + 3 and of 6 tokens. Group 1 has rollouts of 1 and of 2 tokens."""
    ids = {"group_id": [0, 0, 0, 1, 1], "rollout_id": [0, 0, 1, 2, 3], "version": [0] * 5}
    batch = with_lengths([4, 3, 6, 1, 2], **ids, done=[False, True, True, True, True])
    for key, values in more.items():
        batch["next", key] = torch.tensor(values)
    return batch


@pytest.mark.parametrize("at_once", [True, False])
def test_a_group_has_the_length_of_its_longest_rollout_and_the_mean_reward(at_once):
    """The last row of a rollout has its reward. Group 0: (2 + (−1)) / 2 = 0.5. Group 1: −8."""
    run, batch = Clock(group_size=2), rows_of_two(reward=[[9.0], [2.0], [-1.0], [math.nan], [-8.0]])
    for piece in [batch] if at_once else batch.split(1):
        run.assembler.put(piece)
    assert len(run.assembler.take()) == 5
    found = run.assembler.survivors.fates
    assert found["length"] == {("trained", True, bin_of(7)): 1, ("trained", True, bin_of(2)): 1}
    assert found["reward"] == {("trained", True, signed_bin_of(each)): 1 for each in (0.5, -8.0)}


def test_several_rewards_of_a_row_are_added_up():
    run, batch = Clock(), with_lengths([1])
    batch["next", "reward"] = torch.tensor([[2.0, -1.5]])
    run.assembler.put(batch)
    run.assembler.take()
    assert run.assembler.survivors.fates["reward"] == {("trained", True, signed_bin_of(0.5)): 1}


def test_a_group_that_leaves_early_has_a_lower_bound_of_its_length_and_no_reward():
    run = Clock(timeout_seconds=8.0, group_size=2)
    run.announce(3)  # no row of group 3 comes, so its length is unknown, too
    run.assembler.put(with_lengths([5, 9], group_id=[0, 0], rollout_id=[0, 1], reward=[1, 1])[:1])
    run.now = 16.0
    run.assembler.take()
    survivors = run.assembler.survivors
    assert survivors.fates["length"] == {("timeout", False, bin_of(5)): 1}
    assert survivors.fates["reward"] == {}
    assert [survivors.lacking(value) for value in (*LONG, "reward")] == [0, 0, 1, 2]


@pytest.mark.parametrize("rewards", [None, [math.nan, math.inf]])
def test_numbers_without_a_column_are_absent_and_not_zero(rewards):
    run, batch = Clock(), columns(group_id=[0, 1], rollout_id=[0, 1], version=[0, 0])
    batch["next", "done"] = [True, True]
    if rewards is not None:
        batch["next", "reward"] = torch.tensor(rewards)
    run.assembler.put(batch)
    run.assembler.take()
    found = run.assembler.survivors
    assert found.fates["length"] == found.fates["reward"] == {}
    assert found.lacking("length") == found.lacking("reward") == 2
    assert not any("length" in name or "reward" in name for name in found.numbers())


def test_a_response_without_tokens_has_the_length_zero():
    run = Clock()
    run.assembler.put(with_lengths([0]))
    run.assembler.take()
    assert run.assembler.survivors.tenths("length") == [(2**-10, least_of(-79), 1, {}, 0)]


def test_rows_keep_their_lengths_when_others_of_their_put_have_left():
    run = Clock(groups=1)
    run.assembler.put(with_lengths([3, 50, 7, 400]))
    for taken in range(1, 5):
        run.assembler.take()
        known = {bin_of(length) for length in [3, 50, 7, 400][:taken]}
        assert {number for _, _, number in run.assembler.survivors.fates["length"]} == known


def test_ragged_rows_and_rows_without_tokens_here_have_the_same_lengths():
    dense = rows_of_two(reward=[1.0, 2.0, 3.0, 4.0, 5.0])
    ragged = [row.clone() for row in dense.unbind(0)]
    for row in ragged:
        row["masks", "all_assistant_mask"] = row["masks", "all_assistant_mask"][: 10 + len(ragged)]
    elsewhere = dense.exclude(("masks", "all_assistant_mask"))
    elsewhere["headrace", "number_of", "masks.all_assistant_mask"] = torch.tensor([4, 3, 6, 1, 2])
    found = []
    for batch in (dense, lazy_stack(ragged), elsewhere):
        run = Clock(group_size=2)
        run.assembler.put(batch)
        run.assembler.take()
        found.append(run.assembler.survivors.fates)
    assert found[0] == found[1] == found[2]
    assert found[0]["length"]


def lose(seed: int, chance: Callable[[float], float]) -> tuple[list[int], list[bool], Survivors]:
    """The lengths of 400 groups, which groups are lost, and the survivors that an assembler counted."""
    dice, run = Random(seed), Clock()
    lengths = [min(WIDTH, int(dice.lognormvariate(4, 0.8))) for _ in range(400)]
    places = {length: at / 400 for at, length in enumerate(sorted(lengths))}
    lost = [dice.random() < chance(places[length]) for length in lengths]
    run.assembler.put(with_lengths(lengths, status=[3 * each for each in lost]))
    run.assembler.take()
    return lengths, lost, run.assembler.survivors


@pytest.mark.parametrize("chance", [0.02, 0.3])
def test_a_loss_that_does_not_depend_on_the_length_has_no_advisory(chance):
    for seed in range(15):
        assert lost_groups(lose(seed, lambda _: chance)[2].numbers()) is None


def test_the_advisory_on_lost_long_groups_names_the_option():
    for seed in range(4):
        found = lost_groups(lose(seed, lambda place: 0.05 + 0.5 * (place > 0.8))[2].numbers())
        assert found.number == "survivors/length/z"
        assert "have a rollout of at least" in found.text
        assert found.text.endswith("Most of the lost were failed. Set on_failure='refill'.")


def test_a_loss_of_short_groups_has_no_advisory():
    assert all(
        lost_groups(lose(seed, lambda place: 0.9 - 0.8 * place)[2].numbers()) is None for seed in range(4)
    )


# -- what it finds ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("title", survivors.TITLES)
@pytest.mark.parametrize("policy", survivors.POLICIES)
def test_the_report_names_a_loss_of_slow_groups_only_if_there_is_one(policy, title):
    """A run has 400 groups. The benchmark tries 100 seeds for each kind of run."""
    known = title != survivors.TITLES[2] or policy != "not announced, drop"  # else the latency is 0
    assert survivors.fires(title, policy, 0, 400) == (policy in LOSSY and known)
