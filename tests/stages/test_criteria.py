"""The contract of all criteria: rollouts without a reward, excluded rows, and fan-out."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable

import pytest
import torch
from batches import batch_of
from recipes import of
from tensordict import TensorDict
from test_contract import rows, undeclared

from headrace.transforms import (
    BatchError,
    BestOf,
    Criterion,
    Diverged,
    Finite,
    Fresh,
    GroupMeanWithin,
    LengthWithin,
    MissingKeyError,
    NotTruncated,
    RewardsVary,
    RewardWithin,
    Rows,
    SampleFilter,
    Status,
)
from headrace.transforms.table.schema import COUNTED, REWARD

# Each criterion keeps some rows of the batch, and removes others.
CRITERIA: dict[str, Callable[[], Criterion]] = {
    "best-reward": lambda: BestOf(k=2),
    "best-variance": lambda: BestOf(k=2, by="variance"),
    "best-length": lambda: BestOf(k=2, by="length"),
    "diverged": lambda: Diverged(estimator="k1", level="sum", high=1.002, unit="rollout"),
    "finite": lambda: Finite(),
    "fresh": lambda: Fresh(current=3, max_staleness=1),
    "group-mean": lambda: GroupMeanWithin(high=3.5 / 16),
    "length": lambda: LengthWithin(high=2),
    "not-truncated": lambda: NotTruncated(truncated_key="truncated"),
    "reward": lambda: RewardWithin(high=2 / 16),
    "rewards-vary": lambda: RewardsVary(),
}


def batch() -> TensorDict:
    """Three groups, the last with one rollout. Rollout 1 has two rows."""
    found = rows().exclude("prompt_text", "stranger")
    found["number"] = torch.arange(8)
    found["next", "policy_version"] = torch.tensor([1, 2, 2, 3, 1, 2, 3, 3])
    found["truncated"] = torch.tensor([0, 1, 1, 0, 0, 1, 0, 0]).bool()
    return found


def kept(name: str, batch: TensorDict, without: int) -> list[int]:
    """The rows that stay, without those of one rollout."""
    out = SampleFilter(criterion=CRITERIA[name](), action="drop")(batch)
    return out["number"][out["rollout_id"] != without].tolist()


def test_a_rollout_that_is_excluded_or_has_no_reward_counts_as_absent():
    """Such a rollout changes nothing for others, and makes no group leave."""
    for name in CRITERIA:
        for rollout in (1, 2):  # rollout 1 has two rows, and rollout 2 the highest reward
            with of(f"{name}, rollout {rollout}"):
                full = batch()
                its = full["rollout_id"] == rollout
                expected = kept(name, full[~its], rollout)
                excluded = batch()
                excluded[COUNTED] = ~its
                assert kept(name, excluded, rollout) == expected, "excluded"
                unscored = batch()
                for key in (REWARD, ("next", "reward")):
                    unscored[key][its] = torch.nan
                assert kept(name, unscored, rollout) == expected, "without a reward"


def test_every_criterion_of_headrace_compares_rows_within_groups_only():
    """Each group alone keeps the rows that it keeps in the batch. The attribute says so."""
    full = batch()
    for name, make in CRITERIA.items():
        together = kept(name, full, -1)
        alone = [row for group in (0, 1, 2) for row in kept(name, full[full["group_id"] == group], -1)]
        with of(name):
            assert (sorted(alone), make().within_groups) == (sorted(together), True)


def test_more_rows_of_a_rollout_change_no_other_rollout():
    """A rollout of a batch with any rewards gets up to nine more rows, without tokens in the loss."""
    draw = random.Random(0)
    for name in CRITERIA:
        with of(name):
            for _ in range(8):
                full, row = batch(), draw.randrange(8)
                rewards = draw.sample([1, 2, 3, 3, 3, 4, 9], 7)
                full[REWARD] = full["next", "reward"] = torch.tensor(
                    [rewards[i] / 16 for i in full["rollout_id"]]
                )
                fanned = torch.cat([full, *[full[row : row + 1]] * draw.randint(1, 9)])
                fanned["masks", "all_assistant_mask"][8:] = False
                rollout = int(full["rollout_id"][row])
                assert kept(name, fanned, rollout) == kept(name, full, rollout), (
                    "the criterion counts rows: compute statistics over rows.voters, or one row per rollout"
                )


def test_a_criterion_declares_the_columns_that_it_reads():
    for name, make in CRITERIA.items():
        with of(name):
            lacking = undeclared(SampleFilter(criterion=make(), action="drop"), batch())
            assert not lacking, lacking


class RowMean(Criterion, columns=("reward", "group")):
    """A criterion with two faults: it counts rows, and its `in_keys` lack the reward."""

    def __init__(self, **names):
        self.name_columns(names)
        self.in_keys = (self.group_key,)

    def decide(self, rows: Rows) -> torch.Tensor:
        groups = rows.groups
        mean = groups.sum(rows.number("reward").nan_to_num(0.0)) / groups.count
        return groups.spread(mean > 3.2 / 16)


def test_these_laws_find_both_faults_of_a_wrong_criterion(monkeypatch):
    monkeypatch.setitem(globals(), "CRITERIA", {"row-mean": RowMean})
    with pytest.raises(AssertionError, match=r"row-mean: the criterion counts rows"):
        test_more_rows_of_a_rollout_change_no_other_rollout()
    with pytest.raises(AssertionError, match=r"row-mean: .*self.reward_key to its in_keys"):
        test_a_criterion_declares_the_columns_that_it_reads()


def test_options_of_a_criterion_are_given_by_name_and_printed():
    for name, make in CRITERIA.items():
        with of(name):
            parameters = inspect.signature(type(make())).parameters.values()
            assert all(each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD) for each in parameters)
            options = {each.name: getattr(make(), each.name) for each in parameters if each.name != "names"}
            assert repr(type(make())(**options)) == repr(make())


@pytest.mark.parametrize("kind", [RewardWithin, LengthWithin, GroupMeanWithin])
def test_a_value_equal_to_a_bound_is_within_it(kind):
    rows = batch_of([1.0, 2, 3, 4], [0, 1, 2, 3])
    rows[REWARD] = rows["next", "reward"].flatten()
    rows["masks", "all_assistant_mask"] = torch.arange(4) < torch.tensor([1, 2, 3, 4])[:, None]
    for low, high in ((2, 3), (2, 2), (1, 4), (3, 9)):
        expected = [low <= value <= high for value in (1, 2, 3, 4)]
        assert kind(low=low, high=high)(rows).tolist() == expected
        assert kind(low=low)(rows).tolist() == [low <= value for value in (1, 2, 3, 4)]
        assert kind(high=high)(rows).tolist() == [value <= high for value in (1, 2, 3, 4)]
    with pytest.raises(ValueError, match=r"^low must be ≤ high; got 3 and 2$"):
        kind(low=3, high=2)


TRUNCATED = int(Status.TRUNCATED)


@pytest.mark.parametrize(
    ("status", "said"),
    [([0, -1], r"1 row without one: row 1$"), ([-1, -1], r"2 rows without one: row 0, row 1$")],
)
def test_rows_without_a_status_are_counted_and_named(status, said):
    with pytest.raises(BatchError, match=said):
        NotTruncated()(batch_of([0.0, 1.0], [0, 0], status=status))


@pytest.mark.torchrl
@pytest.mark.slow
def test_truncation_is_read_from_the_status_after_the_step():
    """The root has the status before the step, which is read only if `next` has no status."""
    from rollouts import make_collector, make_env, make_policy

    batch = next(iter(make_collector(make_env(prompts=8), policy=make_policy(3)))).reshape(-1)
    after = batch["next", "status"].flatten()
    assert int((after == TRUNCATED).sum()) > 10
    assert torch.equal(NotTruncated()(batch), after != TRUNCATED)
    root = batch.exclude(("next", "status"))
    assert torch.equal(NotTruncated()(root), root["status"].flatten() != TRUNCATED)
    with pytest.raises(MissingKeyError, match=r"needs the key \('next', 'status'\) \(status_key\)"):
        NotTruncated()(root.exclude("status"))


class High(Criterion, columns=("reward",)):
    """A criterion without a constructor."""

    def decide(self, rows):
        return rows.reward > 0.15


def test_a_criterion_reads_the_columns_that_its_class_names():
    """Also by another name, and the reward of a stage in place of the collected one."""
    rows = batch()
    assert set(SampleFilter(criterion=High(), action="drop").in_keys) == {REWARD, ("next", "reward")}
    kept = rows[rows["next", "reward"].flatten() > 0.15]["rollout_id"].tolist()
    assert 0 < len(kept) < len(rows)
    rows["score"] = rows["next", "reward"]
    for names in ({}, {"reward_key": "score"}):
        found = SampleFilter(criterion=High(**names), action="drop")(rows)
        assert found["rollout_id"].tolist() == kept
        rows["next", "reward"] = -rows["next", "reward"]
    with pytest.raises(TypeError, match=r"High.*has no option 'low'"):
        High(low=0.15)
