"""Masked, excluded and dropped are three different actions."""

from __future__ import annotations

import pytest
import torch
from alone import said_by
from any_rank import collected
from composed import composed
from tensordict import TensorDict, lazy_stack
from versions import LAYOUTS, sampled_by, with_versions

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    FanOutCollapse,
    Finite,
    Fresh,
    GroupRelativeAdvantage,
    LengthWithin,
    NotTruncated,
    RewardsVary,
    RewardWithin,
    SampleFilter,
    Status,
)
from headrace.transforms.table.schema import IN_LOSS, LENGTH

MASK, LOG_PROBS = ("masks", "all_assistant_mask"), ("log_probs", "full")


def advantage_after(batch, **options):
    """The advantages of a group, after a filter has removed rewards above 5."""
    stage = SampleFilter(criterion=RewardWithin(high=5.0), **options)
    return GroupRelativeAdvantage(scale="none")(stage(FanOutCollapse()(batch)))


@pytest.mark.parametrize(
    ("action", "advantage"), [("mask", [-3, -1, 4]), ("exclude", [-1, 1, 0]), ("drop", [-1, 1])]
)
def test_the_action_decides_what_the_baseline_includes(make_batch, action, advantage):
    out = advantage_after(make_batch([1.0, 3, 8], [0, 0, 0]), action=action)
    assert out["advantage"].flatten().tolist() == advantage


@pytest.mark.parametrize("action", ["mask", "exclude"])
def test_masked_and_excluded_rows_train_nothing(make_batch, action):
    batch = make_batch([1.0, 3, 8], [0, 0, 0])
    out = advantage_after(batch, action=action)
    assert not out[MASK][2].any()
    assert out[LOG_PROBS][2].isnan().all()
    assert torch.equal(out[MASK][:2], batch[MASK][:2])
    assert torch.equal(out[LOG_PROBS][:2], batch[LOG_PROBS][:2])
    assert out[IN_LOSS].tolist() == [True, True, False]


def test_a_class_in_place_of_a_criterion_is_refused():
    for words in ({"criterion": Finite}, {"criterion": RewardWithin(high=1.0), "also": Finite}):
        with pytest.raises(
            ValueError, match=r"a criterion is an object; got the class Finite: give Finite\(\)"
        ):
            SampleFilter(**words)


def test_a_row_stays_and_is_counted_if_both_criteria_keep_it(make_batch):
    batch = FanOutCollapse()(make_batch([1.0, 3, 8, 9], [0] * 4))
    stage = SampleFilter(criterion=RewardWithin(high=8.5), also=RewardWithin(low=2.0), action="mask")
    run = Pipeline({"filter": stage}).run(batch)
    assert run.batch[IN_LOSS].tolist() == [False, True, True, False]
    found = {name.rpartition("/")[2]: value for name, value in run.metrics.items() if "kept" in name}
    assert found == {"kept": 2, "fraction_kept": 0.5}


def test_a_masked_row_keeps_its_length_in_statistics(make_batch):
    """Two filters mask rows, one after the other. The batch is dense or a lazy stack."""
    batch = make_batch([1.0, 8, 9, 3], [0] * 4)
    batch[MASK] = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    for form in (batch, lazy_stack(list(batch.exclude("prompt_text").unbind(0)))):
        once = SampleFilter(criterion=RewardWithin(high=8.5))(form)
        assert once[LENGTH].tolist() == [-1, -1, 3, -1]
        twice = SampleFilter(criterion=RewardWithin(high=5.0))(once)
        assert twice[LENGTH].tolist() == [-1, 2, 3, -1]
        assert LengthWithin(low=1)(twice).tolist() == [True, False, False, True]
        stage = SampleFilter(criterion=LengthWithin(low=1), action="drop")
        assert stage(twice)["rollout_id"].tolist() == [0, 3]


def test_a_filter_that_masks_no_row_writes_the_same_columns(make_batch):
    stage = SampleFilter(criterion=RewardWithin(high=5.0))
    some, none = stage(make_batch([1.0, 8], [0, 0])), stage(make_batch([1.0, 2], [0, 0]))
    assert set(some.keys(True, True)) == set(none.keys(True, True))


@pytest.mark.parametrize(
    ("unit", "kept"),
    [(None, [0, 1, 3, 4, 5]), ("sample", [0, 1, 3, 4, 5]), ("rollout", [0, 3, 4, 5]), ("group", [4, 5])],
)
def test_a_unit_is_kept_or_removed_with_all_its_rows(make_batch, unit, kept):
    batch = make_batch([1.0, 1, 9, 1, 1, 1], [0, 0, 0, 0, 1, 1], [0, 1, 1, 2, 3, 4])
    batch["row"] = torch.arange(6)
    stage = SampleFilter(criterion=RewardWithin(high=5.0), unit=unit, action="drop")
    assert stage(batch)["row"].tolist() == kept


@pytest.mark.parametrize(("words", "said"), [(("no score",), "no score"), ((), "")])
@pytest.mark.parametrize("collapsed", [False, True])
def test_a_function_that_misses_a_column_is_told_where_the_reward_is(make_batch, words, said, collapsed):
    def scored(batch):
        raise KeyError(*words)

    batch = make_batch([1.0, 2], [0, 0])
    key = "('headrace', 'reward')" if collapsed else "('next', 'reward')"
    with pytest.raises(BatchError) as refused:
        SampleFilter(criterion=scored)(FanOutCollapse()(batch) if collapsed else batch)
    assert str(refused.value) == f"a function gets the batch, where the reward is {key}; {said}"


@pytest.mark.parametrize(("rewards", "kept"), [([1.0], 1), ([8.0, 9.0], 0), ([8.0, 1, 1, 1, 8], 3)])
@pytest.mark.parametrize("action", ["mask", "drop"])
def test_the_metrics_count_the_rows_that_stay(make_batch, rewards, kept, action):
    batch = make_batch(rewards, [0] * len(rewards))
    said = said_by(SampleFilter(criterion=RewardWithin(high=5.0), action=action), batch)
    assert said.metrics == {"kept": kept, "fraction_kept": kept / len(rewards)}
    assert said.reasons == ["reward_bounds" if reward > 5 else "trained" for reward in rewards]
    assert len(said.batch) == (kept if action == "drop" else len(rewards))


def test_a_row_that_cannot_be_masked_is_refused(make_batch):
    batch = make_batch([1.0, 8], [0, 0]).exclude(MASK, LOG_PROBS)
    with pytest.raises(BatchError, match=r"1 row must be masked out of the loss, but .*would still train"):
        SampleFilter(criterion=RewardWithin(high=5.0))(batch)
    assert len(SampleFilter(criterion=RewardWithin(high=9.0))(batch)) == 2


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (lambda batch: torch.ones(len(batch)), r"float32 \(2,\)"),
        (lambda batch: torch.ones(3, dtype=torch.bool), r"bool \(3,\)"),
        (lambda batch: torch.ones(1, dtype=torch.bool), r"bool \(1,\)"),
        (lambda batch: [True, True], "list"),
    ],
)
def test_a_criterion_that_returns_no_mask_is_refused(make_batch, answer, found):
    with pytest.raises(BatchError, match=rf"one bool per row, \(2,\).*returned .*{found}"):
        SampleFilter(criterion=answer)(make_batch([1.0, 8], [0, 0]))


# -- criteria -----------------------------------------------------------------------------------------


def kept_by(criterion, batch):
    return criterion(batch).tolist()


def test_rewards_vary_keeps_groups_with_different_rewards(make_batch):
    batch = make_batch([1.0, 1.5, 2, 2, 7], [0, 0, 1, 1, 2])
    assert kept_by(RewardsVary(), batch) == [True, True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_integer_rewards_do_not_overflow(make_batch, dtype):
    batch = make_batch([0.0] * 4, [0, 0, 1, 1])
    values = [0, 1, 1, 1] if dtype is torch.bool else [-100, 100, 7, 7]  # 200 is −56 in eight bits
    batch["next", "reward"] = torch.tensor(values, dtype=dtype).view(4, 1)
    assert kept_by(RewardsVary(), batch) == [True, True, False, False]


def test_rewards_vary_compares_rollouts_not_segments(make_batch):
    # the rewards of both rollouts add up to 3
    batch = make_batch([1.0, 2, 3], [0, 0, 0], [5, 5, 6])
    assert kept_by(RewardsVary(), FanOutCollapse(reward="sum")(batch)) == [False] * 3


def test_reward_bounds_are_inclusive_and_nan_is_outside(make_batch):
    batch = make_batch([0.0, 1, 2, float("nan")], [0] * 4)
    assert kept_by(RewardWithin(low=0.0, high=1.0), batch) == [True, True, False, False]


def test_finite_checks_every_value_of_a_row(make_batch):
    batch = make_batch([0.0, float("inf"), float("nan")], [0] * 3)
    assert kept_by(Finite(), batch) == [True, False, False]
    batch[LOG_PROBS][0, 2] = float("nan")
    assert kept_by(Finite(key=LOG_PROBS), batch) == [False, True, True]


def test_truncation_is_a_status_or_a_flag(make_batch):
    batch = make_batch([0.0, 1], [0, 0], status=[Status.TRUNCATED, Status.COMPLETED])
    batch["next", "truncated"] = torch.tensor([[False], [True]])
    assert kept_by(NotTruncated(), batch) == [False, True]
    assert kept_by(NotTruncated(truncated_key=("next", "truncated")), batch) == [True, False]


def test_length_counts_tokens_in_the_loss(make_batch):
    batch = make_batch([0.0, 1, 2], [0] * 3)
    batch[MASK] = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]]).bool()
    assert kept_by(LengthWithin(low=1), batch) == [False, True, True]
    assert kept_by(LengthWithin(high=3), batch) == [True, True, False]
    ragged = lazy_stack([TensorDict({MASK: torch.ones(n, dtype=torch.bool)}) for n in (1, 4)])
    assert kept_by(LengthWithin(high=3), ragged) == [True, False]


def test_staleness_is_counted_in_versions(make_batch):
    batch = make_batch([0.0, 1, 2], [0] * 3)
    batch["next", "policy_version"] = torch.tensor([3, 5, 4])
    assert kept_by(Fresh(current=5), batch) == [False, True, False]
    assert kept_by(Fresh(max_staleness=1, current=5), batch) == [False, True, True]
    assert kept_by(Fresh(max_staleness=1, current=6), batch) == [False, True, False]
    assert kept_by(Fresh(max_staleness=3, current=lambda: 7), batch) == [False, True, True]


def test_a_row_of_a_later_version_is_refused(make_batch):
    batch = make_batch([0.0, 1], [0] * 2)
    batch["next", "policy_version"] = torch.tensor([3, 5])
    with pytest.raises(
        BatchError, match=r"newer than the policy version that trains, 4 \(current\); found 5 at row 1"
    ):
        SampleFilter(criterion=Fresh(current=lambda: 4))(batch)


def test_every_value_of_a_ragged_column_is_checked():
    rows = [[1.0, 2.0], [1.0, float("nan"), 2.0], [float("inf")], [0.0]]
    batch = lazy_stack([TensorDict({"x": torch.tensor(row)}, batch_size=[]) for row in rows])
    assert Finite(key="x")(batch).tolist() == [True, False, False, True]


def test_a_callable_keeps_the_same_rows_of_ragged_and_dense_batches():
    for action in ("mask", "exclude"):
        judged = {"judged": SampleFilter(criterion=lambda rows: rows["rollout_id"] % 2 == 0, action=action)}
        dense = collected("uniform", "opd")
        one, other = (Pipeline(judged | dict(composed("pipeline=opd").stages.items())) for _ in range(2))
        ragged, expected = one.run(lazy_stack(list(dense.unbind(0)))), other.run(dense)
        assert ragged.ledger.counts() == expected.ledger.counts()
        for rows, dense_rows in zip(ragged.minibatches(), expected.minibatches(), strict=True):
            credit = torch.stack(rows.get("advantage", as_list=True))
            assert torch.equal(credit, dense_rows["advantage"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_oldest_sampled_token_of_a_row_decides(layout):
    """Only sampled tokens count. Rows without sampled tokens stay."""
    found = set()
    for seed in range(40):
        batch = with_versions(seed, layout, rows=12)
        for most in (0, 1, 3):
            expected = [min(own, default=8) >= 8 - most for own in sampled_by(batch)]
            assert kept_by(Fresh(current=8, max_staleness=most), batch) == expected
            said = said_by(SampleFilter(criterion=Fresh(current=8, max_staleness=most)), batch)
            assert said.reasons == ["trained" if stays else "stale" for stays in expected]
            found |= set(expected)
    assert found == {True, False}


def test_versions_of_two_tokens_are_not_read_as_one_version_per_row():
    """The table reads columns of two numbers per row before a stage asks for them."""
    columns = {
        ("next", "policy_version"): [[5, 3], [3, 5], [4, 4]],
        MASK: [[True, True], [False, True], [0, 0]],
    }
    batch = TensorDict({key: torch.tensor(value) for key, value in columns.items()}, batch_size=[3])
    batch[MASK] = batch[MASK].bool()
    assert kept_by(Fresh(current=5), batch) == [False, True, True]
    with pytest.raises(BatchError, match=r"that trains, 4 \(current\); found 5 at row 0, 5 at row 1"):
        SampleFilter(criterion=Fresh(current=4))(batch)
