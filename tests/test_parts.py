"""Parts of recipes equal slow references, and keep their laws."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from batches import batch_of
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    BestOf,
    CombineIds,
    DifficultyWeight,
    FanOutCollapse,
    GroupMeanWithin,
    GroupRelativeAdvantage,
    LossWeight,
    MissingKeyError,
    RelativeLength,
    RewardsVary,
    RunningBaseline,
    SampleFilter,
    ShuffleSplit,
    SignFactors,
    TurnDiscount,
    combine_ids,
    difficulty_weight,
)
from headrace.transforms.schema import COUNTED, REWARD

MASK = ("masks", "all_assistant_mask")
NAN = float("nan")
REWARDS = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 1000).map(lambda x: x / 1000))


@st.composite
def rollouts(draw):
    """(group, id, reward, length of each segment) of some rollouts, and an order of the rows."""
    number = draw(st.integers(1, 10))
    labels = draw(st.lists(st.integers(0, 2**40), min_size=number, max_size=number, unique=True))
    found = [
        (
            draw(st.integers(0, 2)) * 7,
            label,
            draw(REWARDS),
            draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)),
        )
        for label in labels
    ]
    rows = sum(len(lengths) for *_, lengths in found)
    return found, draw(st.permutations(range(rows)))


def batch_of_rollouts(found, order, **extra):
    """A row a segment, collapsed."""
    rows = [(group, label, reward, length) for group, label, reward, lengths in found for length in lengths]
    groups, ids, rewards, lengths = (list(column) for column in zip(*(rows[i] for i in order), strict=True))
    batch = batch_of(rewards, groups, ids, tokens=4)
    batch["next", "reward"] = torch.tensor(rewards, dtype=torch.float64)
    batch[MASK] = torch.arange(4) < torch.tensor(lengths)[:, None]
    return FanOutCollapse()(batch)


def per_rollout(batch, column):
    return dict(zip(batch["rollout_id"].tolist(), column.flatten().tolist(), strict=True))


# -- lengths among those of the group -------------------------------------------------------------------


@given(rollouts(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([None, 0.5]))
def test_length_penalties_apply_among_successful_rollouts(drawn, coefficient, success):
    """prime-rl's shaping, orchestrator/algo/advantage.py, one rollout after another."""
    found, order = drawn
    batch = batch_of_rollouts(found, order)
    shaped = RelativeLength(coefficient=coefficient, success=success)(batch)
    for label, reward in per_rollout(shaped, shaped[REWARD]).items():
        group, _, own, lengths = next(each for each in found if each[1] == label)
        members = [each for each in found if each[0] == group]
        best = max(each[2] for each in members)
        good = [each for each in members if (each[2] == best > 0 if success is None else each[2] >= success)]
        expected = own
        if any(each[1] == label for each in good):
            mean = statistics.fmean(sum(each[3]) for each in good)
            expected = own * (1 + coefficient * min(max(1 - sum(lengths) / mean, 0), 1))
        assert reward == pytest.approx(expected, rel=1e-12)


@given(rollouts())
def test_a_rescaled_reward_is_divided_by_its_relative_length(drawn):
    """GR³, arXiv:2603.10535."""
    found, order = drawn
    shaped = RelativeLength(form="rescale", coefficient=0.5)(batch_of_rollouts(found, order))
    for label, reward in per_rollout(shaped, shaped[REWARD]).items():
        group, _, own, lengths = next(each for each in found if each[1] == label)
        mean = statistics.fmean(sum(each[3]) for each in found if each[0] == group)
        assert reward == pytest.approx(own / (1 + 0.5 * sum(lengths) / mean), rel=1e-12)


def test_a_negative_reward_is_not_rescaled():
    batch = FanOutCollapse()(batch_of([1.0, -0.5], [0, 0]))
    with pytest.raises(BatchError, match=r"needs rewards ≥ 0.*found -0.5 at row 1"):
        RelativeLength(form="rescale")(batch)
    assert RelativeLength()(batch)[REWARD][1] == -0.5


def test_without_success_no_length_is_penalized():
    batch = FanOutCollapse()(batch_of([-1.0, -1, -2], [0, 0, 0]))
    batch[MASK] = torch.arange(4) < torch.tensor([1, 4, 1])[:, None]
    assert RelativeLength()(batch)[REWARD].tolist() == [-1, -1, -2]


def test_excluded_rollouts_are_not_in_length_statistics():
    batch = batch_of([1.0, 1, 1], [0, 0, 0])
    batch[MASK] = torch.arange(4) < torch.tensor([2, 4, 1])[:, None]
    out = SampleFilter(criterion=lambda batch: batch["rollout_id"] < 2, action="exclude")
    shaped = RelativeLength()(FanOutCollapse()(out(batch)))[REWARD].tolist()
    assert shaped[:2] == pytest.approx([1 + 1 / 3, 1.0])


# -- the best of a group --------------------------------------------------------------------------------


def kept_by_loops(members, k, by):
    """Labels of those kept of (label, reward, length)."""
    keys = {
        "reward": lambda each: (-each[1], each[0]),
        "length": lambda each: (each[2], each[0]),
        "efficiency": lambda each: (-each[1] / each[2], each[0]),
    }
    return {each[0] for each in sorted(members, key=keys[by])[:k]}


@given(rollouts(), st.integers(1, 5), st.sampled_from(["reward", "length", "efficiency"]))
def test_the_best_k_of_each_group_are_kept(drawn, k, by):
    found, order = drawn
    batch = batch_of_rollouts(found, order)
    keep = BestOf(k=k, by=by)(batch)
    stay = {label for label, flag in zip(batch["rollout_id"].tolist(), keep.tolist(), strict=True) if flag}
    expected = set()
    for group in {each[0] for each in found}:
        members = [(each[1], each[2], sum(each[3])) for each in found if each[0] == group]
        expected |= kept_by_loops(members, k, by)
    assert stay == expected
    assert keep.tolist() == [label in stay for label in batch["rollout_id"].tolist()]


def test_of_sets_of_equal_variance_the_one_with_the_most_large_rewards_is_kept():
    """Rounding must not decide between the sets."""
    for most in (0.1, 0.3, 0.7):
        batch = FanOutCollapse()(batch_of([most, 0, 0, 0, 0], [0] * 5))
        assert BestOf(k=4, by="variance")(batch).tolist() == [True] * 4 + [False]


def test_a_group_mean_equal_to_the_bound_is_within_it():
    kinds = itertools.product((torch.float32, torch.float64), (0.1, 0.2, 0.7, 0.8), (3, 6, 7))
    for dtype, value, rows in kinds:
        batch = batch_of([0.0] * rows, [0] * rows)
        batch[REWARD] = torch.full((rows,), value, dtype=dtype)
        assert GroupMeanWithin(low=value, high=value)(batch).all(), (dtype, value, rows)


@given(rollouts(), st.integers(1, 5))
def test_the_k_of_largest_variance_are_kept(drawn, k):
    """PODS, arXiv:2504.13818, compared with all sets of k; the order of rows changes nothing."""
    found, order = drawn
    batch = batch_of_rollouts(found, order)
    keep = per_rollout(batch, BestOf(k=k, by="variance")(batch))
    again = batch_of_rollouts(found, range(len(order)))
    assert per_rollout(again, BestOf(k=k, by="variance")(again)) == keep
    for group in {each[0] for each in found}:
        members = [each for each in found if each[0] == group]
        chosen = [each[2] for each in members if keep[each[1]]]
        assert len(chosen) == min(k, len(members))
        sets = itertools.combinations([each[2] for each in members], len(chosen))
        assert statistics.pvariance(chosen) == pytest.approx(max(map(statistics.pvariance, sets)), abs=1e-12)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=7), st.integers(1, 5), st.randoms())
def test_of_equal_rewards_at_either_end_the_smaller_ids_are_kept(rewards, k, random):
    """As for any other `by`: of equal rewards the smaller ids are kept."""
    ids = random.sample(range(20), len(rewards))
    batch = FanOutCollapse()(batch_of(rewards, [0] * len(rewards), ids))
    keep = BestOf(k=k, by="variance")(batch).tolist()
    assert sum(keep) == min(k, len(keep))
    found = list(zip(rewards, ids, keep, strict=True))
    for reward, label, kept in found:
        assert not kept or all(stays for equal, less, stays in found if equal == reward and less < label)


def test_statistics_are_over_the_kept_rollouts():
    batch = batch_of([0.0, 1, 5, 6], [0] * 4)
    stages = {
        "collapse": FanOutCollapse(),
        "filter": SampleFilter(criterion=BestOf(k=2), action="exclude"),
        "advantage": GroupRelativeAdvantage(scale="none"),
    }
    run = Pipeline(stages).run(batch)
    assert run.batch["advantage"].flatten().tolist() == [0, 0, -0.5, 0.5]
    assert run.ledger.counts()["filter/not_best"] == 2
    stages["filter"] = SampleFilter(criterion=BestOf(k=2))
    assert Pipeline(stages)(batch)["advantage"].flatten().tolist() == [-3, -2, 2, 3]


def test_criteria_of_groups_come_after_the_collapse():
    for criterion in (BestOf(k=1), GroupMeanWithin(low=0.5)):
        with pytest.raises(MissingKeyError, match="put FanOutCollapse before it"):
            criterion(batch_of([1.0, 2], [0, 0]))
        stage = SampleFilter(criterion=criterion)
        with pytest.raises(BatchError, match="needs a group_id ≥ 0; found -1 at row 1"):
            stage(FanOutCollapse(group_key=None)(batch_of([1.0, 2], [0, -1])))
    for wrong in (0, True, None):
        with pytest.raises(ValueError, match="k must be an integer"):
            BestOf(k=wrong)


@given(rollouts(), st.sampled_from([(0.25, 0.75), (0.5, 1.0), (-math.inf, 0.5)]))
def test_the_mean_of_a_group_decides_for_all_its_rows(drawn, bounds):
    found, order = drawn
    batch = batch_of_rollouts(found, order)
    low, high = bounds
    keep = GroupMeanWithin(low=low, high=high)(batch)
    for row, group in enumerate(batch["group_id"].tolist()):
        mean = math.fsum(each[2] for each in found if each[0] == group) / sum(
            each[0] == group for each in found
        )
        assert bool(keep[row]) == (low <= mean <= high)


# -- factors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_positive_and_negative_advantages_have_their_factors(dtype):
    batch = batch_of([0.0] * 3, [0] * 3)
    batch["advantage"] = torch.tensor([-2.0, 0.0, 4.0], dtype=dtype).view(3, 1, 1)
    out = SignFactors(positive=0.25, negative=2.0)(batch)["advantage"]
    assert out.dtype == dtype
    assert out.flatten().tolist() == [-4, 0, 1]


def test_stages_change_a_token_advantage_as_that_of_its_row():
    """In the table, where rows are gathered, or when a later stage reads it."""
    batch = FanOutCollapse()(batch_of([1.0, 1, 0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 1, 2, 3]))
    batch["advantage"] = torch.tensor([-2.0, 1, 3, 4, -5]).view(5, 1, 1)
    stages = {
        "difficulty": DifficultyWeight(strength=2.0),
        "signs": SignFactors(positive=0.5),
        "discount": TurnDiscount(discount=0.5),
        "weight": LossWeight(fold="sum"),
    }
    of_rows = Pipeline(stages)(batch)["advantage"]
    by_token = batch.set("advantage", batch["advantage"].expand(5, 4, 1).contiguous())
    torch.testing.assert_close(Pipeline(stages)(by_token)["advantage"], of_rows.expand(5, 4, 1))
    for stage in stages.values():
        by_token = stage(by_token)
    torch.testing.assert_close(by_token["advantage"], of_rows.expand(5, 4, 1))


def test_a_group_is_weighted_by_its_difficulty():
    """MGPO, arXiv:2511.06221."""
    for strength, successes in itertools.product((0.0, 1.0, 4.0), range(5)):
        batch = batch_of([1.0] * successes + [0.0] * (4 - successes), [0] * 4)
        batch = GroupRelativeAdvantage(scale="none")(FanOutCollapse()(batch))
        p = successes / 4
        weight = math.exp(-strength * sum(x * math.log(2 * x) for x in (p, 1 - p) if x))
        found = DifficultyWeight(strength=strength)(batch)["advantage"]
        torch.testing.assert_close(found, batch["advantage"] * weight)
        assert float(difficulty_weight(torch.tensor([p]), strength)) == pytest.approx(weight)


def test_difficulty_needs_rewards_from_0_to_1():
    batch = GroupRelativeAdvantage()(FanOutCollapse()(batch_of([0.0, 1.5], [0, 0])))
    with pytest.raises(BatchError, match=r"needs rewards in \[0, 1\], .*; found 1.5 at row 1 \(rollout 1\)"):
        DifficultyWeight()(batch)


# -- a baseline that goes on ----------------------------------------------------------------------------


def groups_of_one(rewards, keys, start, **columns):
    ids = list(range(start, start + len(rewards)))
    batch = FanOutCollapse(missing="skip")(batch_of(rewards, ids, ids, task=keys, **columns))
    return GroupRelativeAdvantage(baseline="none", scale="none", missing="skip")(batch)


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=6), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.randoms(),
)
def test_a_running_mean_equals_that_of_a_loop(steps, decay, random):
    """Row order, segments and a state between two batches change no bit."""
    options = {"decay": decay, "start": 0.5, "start_weight": 2.0, "baseline_key": "task"}
    stage, other = RunningBaseline(**options), RunningBaseline(**options)
    known: dict[int, tuple[float, float]] = {}
    for step, rows in enumerate(steps):
        batch = groups_of_one([r for r, _ in rows], [k for _, k in rows], 100 * step)
        batch["advantage"] = batch["advantage"].double()
        found = stage(batch)["advantage"].flatten()
        rewards = batch[REWARD].tolist()
        expected = [
            reward - known.get(key, (0.5, 2.0))[0] for reward, (_, key) in zip(rewards, rows, strict=True)
        ]
        assert found.tolist() == pytest.approx(expected, abs=1e-9)
        for key in {key for _, key in rows}:
            own = [reward for reward, (_, k) in zip(rewards, rows, strict=True) if k == key]
            mean, weight = known.get(key, (0.5, 2.0))
            for _ in own:
                weight = decay * weight + 1
                mean += (statistics.fmean(own) - mean) / weight
            known[key] = mean, weight
        order = [*range(len(rows)), random.randrange(len(rows))]
        random.shuffle(order)
        shuffled = other(batch[order])["advantage"].flatten()
        assert torch.equal(shuffled, found[order])
        state, other = other.state_dict(), RunningBaseline(**options)
        other.load_state_dict(state)


def test_a_repeated_batch_counts_once():
    """As an interrupted batch does after its state was loaded."""
    stage = RunningBaseline(decay=0.5)
    first, second = (groups_of_one(rewards, [0, 0], 10 * i) for i, rewards in enumerate([[1.0, 3], [5.0, 7]]))
    stage(first)
    before = stage(second)["advantage"]
    restored = RunningBaseline(decay=0.5)
    restored.load_state_dict(stage.state_dict())
    assert torch.equal(restored(second)["advantage"], before)
    assert torch.equal(restored(second[torch.tensor([1, 0])])["advantage"].flip(0), before)
    third = groups_of_one([2.0], [0], 50)
    assert torch.equal(restored(third)["advantage"], stage(third)["advantage"])


def test_rows_of_a_rollout_have_one_baseline():
    wrong = batch_of([1.0, 1.0], [0, 0], [3, 3], task=[1, 2])
    wrong["advantage"] = torch.zeros(2, 1, 1)
    with pytest.raises(BatchError, match=r"have the same baseline_key; found 2 at row 1 \(rollout 3\)"):
        RunningBaseline(baseline_key="task")(FanOutCollapse()(wrong))


def test_a_batch_refused_by_a_later_stage_does_not_count():
    """Before and after the split; the next batch is measured as if the refused one had not come."""
    running = RunningBaseline(decay=0.5)
    stages = {
        "collapse": FanOutCollapse(),
        "advantage": GroupRelativeAdvantage(baseline="none", scale="none"),
        "running": running,
    }

    def refuse(_):
        raise BatchError("not these")

    without_tokens = {"split": ShuffleSplit(minibatch_size=2), "weight": LossWeight(loss_mask_key="none")}
    for later in ({"filter": SampleFilter(criterion=refuse)}, without_tokens):
        with pytest.raises(BatchError, match=r"not these|'none' \(loss_mask_key\)"):
            Pipeline(stages | later)(batch_of([8.0, 8.0], [0, 1]))
        assert len(running.memory.after.keys) == 0
    found = Pipeline(stages)(batch_of([4.0, 2.0], [0, 1]))
    assert found["advantage"].flatten().tolist() == [4, 2]
    assert running.memory.after.mean.tolist() == [2.25]  # 0 + (3 - 0) · (1 + ½) / 2, worth two of them


def test_rollouts_without_a_reward_or_excluded_are_not_counted():
    stage = RunningBaseline(decay=0.0, start=1.0)
    batch = groups_of_one([5.0, NAN, 9.0], [0, 0, 0], 0)
    batch[COUNTED] = torch.tensor([True, True, False])
    assert stage(batch)["advantage"].flatten().tolist() == [4, 0, 9]
    assert stage(groups_of_one([6.0], [0], 10))["advantage"].flatten().tolist() == [1]


def test_a_batch_is_recognised_by_its_rollouts_not_by_row_numbers():
    """Otherwise equal rewards in every batch would look like a repeated batch."""
    with pytest.raises(ValueError, match="needs rollout_key, with ids that are unique across batches"):
        RunningBaseline(rollout_key=None)
    stage = RunningBaseline(decay=0.5)
    found = [float(stage(groups_of_one([1.0], [0], start))["advantage"]) for start in range(3)]
    assert found == [1, 0.5, 0.25]


# -- roles ----------------------------------------------------------------------------------------------

# Two episodes of a prompt, each of a proposer and two solvers: a rollout is what one role did.
PROMPT, EPISODE = [3] * 6, [0, 0, 0, 1, 1, 1]
ROLES = ["proposer", "solver", "solver"] * 2
SCORES = [1.0, 4, 6, 3, 0, 8]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["group_id", "role"], [-1, -0.5, 1.5, 1, -4.5, 3.5]),  # across episodes: means 2 and 4.5
        (["episode_id", "role"], [0, -1, 1, 0, -4, 4]),  # within one: means 5 and 4; a proposer is alone
        (
            ["peer", "role"],
            [-1, -1, 1, 1, -4, 4],
        ),  # proposers across, solvers within, as prime-rl's hierarchy
    ],
)
def test_roles_are_compared_within_or_across_episodes(keys, expected):
    batch = batch_of(SCORES, PROMPT, episode_id=EPISODE, peer=[9, 0, 0, 9, 1, 1])
    batch["role"] = ROLES
    stages = {
        "collapse": FanOutCollapse(),
        "peers": CombineIds(keys=keys),
        "filter": SampleFilter(criterion=RewardsVary(group_key="peer_id"), group_key="peer_id"),
        "advantage": GroupRelativeAdvantage(scale="none", group_key="peer_id"),
    }
    assert Pipeline(stages)(batch)["advantage"].flatten().tolist() == expected


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**62), st.integers(0, 2)), min_size=1, max_size=20)
)
def test_equal_tuples_have_equal_ids_in_any_batch(tuples):
    columns = [torch.tensor(column) for column in zip(*tuples, strict=True)]
    ids = combine_ids(*columns)
    assert bool((ids >= 0).all())
    assert len(set(ids.tolist())) == len(set(tuples))
    assert torch.equal(combine_ids(*(column[:1] for column in columns)), ids[:1])


def test_an_unset_id_is_refused():
    batch = batch_of([1.0, 2], [0, 0], role=[1, -1])
    with pytest.raises(BatchError, match="needs a role ≥ 0; found -1 at row 1"):
        CombineIds(keys=["group_id", "role"])(batch)
    with pytest.raises(ValueError, match=r"a list .*; got 'role'"):
        CombineIds(keys="role")


# -- images ---------------------------------------------------------------------------------------------


def test_images_stay_with_their_rows():
    """A column of one size, and lists of some images each, which are no tensors."""
    batch = batch_of([1.0, 3, 5, 11], [0, 0, 1, 1], expected_rollouts=[2] * 4)
    batch["pixels"] = torch.arange(4 * 3 * 2 * 2).view(4, 3, 2, 2).to(torch.uint8)
    batch["images"] = NonTensorStack(
        *(NonTensorData([f"{row}-{i}.png" for i in range(row)]) for row in range(4))
    )
    out = composed("pipeline=dr_grpo", "pipeline.stages.split.minibatches=2")(batch)
    rows = out["headrace", "row"].tolist()
    assert sorted(rows) == [0, 1, 2, 3]
    assert torch.equal(out["pixels"], batch["pixels"][rows])
    assert [list(each) for each in out["images"]] == [[f"{r}-{i}.png" for i in range(r)] for r in rows]
