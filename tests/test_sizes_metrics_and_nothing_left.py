"""Group size against column, batches that end up empty, and token metrics over ranks."""

from __future__ import annotations

import math

import pytest
import torch
from any_rank import collected, results_of
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st
from nothing_left import run_to_nothing
from policies import MASK, OLD, SAMPLER, alone, clamp, log_ratios, ragged, two_policies
from recipes import CHAINS
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    CompletenessGate,
    Diverged,
    IncompleteGroupsError,
    LogRatio,
    RolloutCorrection,
    SampleFilter,
    TokenAdvantage,
    TokenFilter,
    divergence,
    incomplete_groups,
)

# -- how many rollouts a group has is said by one source, or by two that agree ----------------------------


def who_passes(groups, rollouts, size, said):
    """By a loop: the groups that lack rollouts, or in words what is wrong with the numbers."""
    wrong = []
    for group in dict.fromkeys(groups):
        own = {number for number, home in zip(said, groups, strict=True) if home == group}
        if len(own) > 1 or min(own) < 1:
            return "one number ≥ 1 per group"
        if size is not None and own != {size}:
            wrong.append(f"group {group} expects {own.pop()}")
    if wrong:
        return wrong
    short = []
    for group in dict.fromkeys(groups):
        there = {rollout for rollout, home in zip(rollouts, groups, strict=True) if home == group}
        expected = next(number for number, home in zip(said, groups, strict=True) if home == group)
        if len(there) > expected:
            return f"more rollouts than were dispatched; found .*group {group} has {len(there)} of {expected}"
        if len(there) < expected:
            short.append((group, len(there), expected))
    return short


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=8),
    st.sampled_from([None, 1, 2, 3]),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.booleans(),
)
def test_a_group_size_must_match_the_column_and_groups_pass_as_by_a_loop(rows, size, of_group, agree):
    groups = [group for group, _ in rows]
    rollouts = [group * 10 + number for group, number in rows]
    said = [size if agree and size else of_group[group] for group in groups]
    expected = who_passes(groups, rollouts, size, said)
    batch = TensorDict(
        {"group_id": groups, "rollout_id": rollouts, "expected_rollouts": said}, batch_size=[len(rows)]
    )
    gate = CompletenessGate(group_size=size, on_incomplete="drop")
    counts = {"group_size": size, "expected_rollouts": said}
    if isinstance(expected, str) or (expected and isinstance(expected[0], str)):
        message = expected if isinstance(expected, str) else ", ".join(expected)
        for judge in (lambda: gate(batch), lambda: incomplete_groups(groups, rollouts, **counts)):
            with pytest.raises(BatchError, match=message) as caught:
                judge()
            assert not isinstance(caught.value, IncompleteGroupsError)
        return
    short = incomplete_groups(groups, rollouts, **counts)
    assert sorted(zip(*(column.tolist() for column in short), strict=True)) == sorted(expected)
    lacking = {group for group, *_ in expected}
    assert gate(batch)["group_id"].tolist() == [group for group in groups if group not in lacking]


def test_the_error_has_both_sizes_and_what_to_do():
    batch = TensorDict(
        {"group_id": [7] * 4, "rollout_id": [0, 1, 2, 3], "expected_rollouts": [5] * 4}, batch_size=[4]
    )
    said = (
        r"group_size and the column 'expected_rollouts' \(expected_key\) must give the same number of "
        r"rollouts per group: group_size=4, but group 7 expects 5\. Leave group_size out, or correct"
    )
    for how in ({}, {"on_incomplete": "drop"}, {"on_incomplete": "keep", "min_rollouts": 1}):
        with pytest.raises(BatchError, match=said):
            CompletenessGate(group_size=4, **how)(batch)
    renamed = batch.rename_key_("expected_rollouts", "size")
    with pytest.raises(BatchError, match=r"the column 'size' \(expected_key\)"):
        CompletenessGate(group_size=4, expected_key="size")(renamed)
    assert len(CompletenessGate(group_size=5, on_incomplete="drop")(torch.cat([renamed, renamed[:0]]))) == 0


# -- a batch of which nothing is left ----------------------------------------------------------------------


@pytest.mark.slow
def test_every_recipe_gives_an_empty_run_if_all_rows_leave():
    pipelines = [(recipe, composed(f"pipeline={recipe}")) for recipe in CHAINS]
    tried, wrong = run_to_nothing(0, 1, pipelines)
    assert tried > 5 * len(CHAINS)
    assert not wrong


@pytest.mark.slow
def test_two_ranks_give_empty_runs_also_if_one_has_no_rows(tmp_path):
    pipelines = [(recipe, composed(f"pipeline={recipe}")) for recipe in CHAINS[::3]]
    results = results_of(run_to_nothing, 2, tmp_path, pipelines)
    assert all(tried > 5 * len(pipelines) for tried, _ in results)
    assert [wrong for _, wrong in results] == [[], []]


def test_a_callables_verdict_on_ragged_rows_is_not_taken_for_a_column():
    for action in ("mask", "exclude"):
        judged = {"judged": SampleFilter(criterion=lambda rows: rows["rollout_id"] % 2 == 0, action=action)}
        dense = collected("uniform", "opd")
        one, other = (Pipeline(judged | dict(composed("pipeline=opd").stages.items())) for _ in range(2))
        ragged, expected = one.run(lazy_stack(list(dense.unbind(0)))), other.run(dense)
        assert ragged.ledger.counts() == expected.ledger.counts()
        for rows, dense_rows in zip(ragged.minibatches(), expected.minibatches(), strict=True):
            credit = torch.stack(rows.get("advantage", as_list=True))
            assert torch.equal(credit, dense_rows["advantage"])


# -- what stages measure follows from the set of rows ------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=15)
@given(st.data())
def test_row_order_changes_no_bit_of_divergences_and_padding_only_rounding(data):
    rows, tokens = data.draw(st.integers(4, 9)), data.draw(st.integers(1, 12))
    batch = two_policies(rows, tokens, data.draw(st.integers(0, 99)))
    left, right = data.draw(st.integers(0, 70)), data.draw(st.integers(0, 70))
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    padded = batch.clone()
    for key in (OLD, SAMPLER, MASK):
        padded[key] = torch.nn.functional.pad(batch[key], (left, right))
    level = data.draw(st.sampled_from(["token", "sequence", "mean"]))
    unit = data.draw(st.sampled_from(["sample", "rollout"]))
    for stage in (
        RolloutCorrection(level=level, unit=unit),
        SampleFilter(criterion=Diverged(high=0.1, unit=unit)),
        TokenFilter(criterion=Diverged(high=0.1, level="token")),
        TokenAdvantage(term=LogRatio(numerator_key=OLD, denominator_key=SAMPLER)),
    ):
        here, there, elsewhere = (alone(stage, each) for each in (batch, batch[order], padded[order]))
        assert here.metrics == there.metrics
        assert elsewhere.metrics == pytest.approx(here.metrics, rel=1e-12, abs=1e-12)
        for key in ("advantage", "importance_weight", MASK):  # and no bit of what is trained
            if here.batch.get(key) is not None:
                trained = elsewhere.batch[key]
                trained = trained[:, left : left + tokens] if trained.shape[1] > 1 else trained
                assert torch.equal(trained, here.batch[key][order].expand_as(trained))


# -- one token out of bounds takes its row out -------------------------------------------------------------


@given(st.integers(0, 99), st.floats(0.01, 0.9), st.floats(1.1, 50), st.booleans(), st.booleans())
def test_every_removes_a_row_if_the_ratio_of_a_token_is_out_of_bounds(seed, least, most, of_rollout, half):
    """ρ = π_old / μ in [a, b], by a loop over tokens; low and high bound its inverse."""
    batch = two_policies(8, 6, seed, spread=1.5)
    logs = log_ratios(batch)
    inside = [all(math.log(least) <= clamp(log) <= math.log(most) for log in row) for row in logs]
    if half:  # open above
        inside = [all(math.log(least) <= clamp(log) for log in row) for row in logs]
    if of_rollout:  # rows of one rollout lie two by two, and stay or go as one
        inside = [inside[row - row % 2] and inside[row - row % 2 + 1] for row in range(8)]
    criterion = Diverged(
        estimator="k1",
        level="every",
        low=0.0 if half else 1 / most,
        high=1 / least,
        unit="rollout" if of_rollout else "sample",
    )
    assert criterion(batch).tolist() == inside
    gone = alone(SampleFilter(criterion=criterion, action="drop"), batch)
    assert len(gone.batch) == sum(inside)
    assert criterion(ragged(batch)).tolist() == inside


def test_max_bounds_the_largest_token_and_every_bounds_all():
    # μ / π_old of the tokens is 0.33 and 1: the second is the largest, and 1/3 bounds nothing else.
    logs = torch.tensor([[math.log(3.03), 0.0]], dtype=torch.float64)
    zero = torch.zeros(1, 2, dtype=torch.float64)
    batch = TensorDict({OLD: logs, SAMPLER: zero, MASK: zero == 0}, batch_size=[1])
    assert Diverged(estimator="k1", level="max", low=1 / 3, high=None)(batch).tolist() == [True]
    assert Diverged(estimator="k1", level="every", low=1 / 3, high=None)(batch).tolist() == [False]
    assert Diverged(estimator="k1", level="every", low=1 / 3.1, high=None)(batch).tolist() == [True]
    for estimator in ("k2", "k3"):  # which are bounded above alone
        for high in (0.5, 0.62, 1.0, 3.0):
            levels = [Diverged(estimator=estimator, level=level, high=high) for level in ("max", "every")]
            assert levels[0](batch).tolist() == levels[1](batch).tolist()


def test_every_judges_rows_and_token_judges_single_tokens():
    with pytest.raises(ValueError, match="level must be one of 'token', 'sum', 'mean', 'max'"):
        divergence(*[torch.zeros(1, 1)] * 2, torch.ones(1, 1) > 0, level="every")
