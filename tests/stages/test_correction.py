"""Importance weights, divergences and rejection equal loops over rows and tokens."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import (
    MASK,
    OLD,
    SAMPLER,
    alone,
    clamp,
    log_ratios,
    ragged,
    stated_divergence,
    stated_weights,
    two_policies,
)
from recipes import of
from tensordict import TensorDict

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    DirectedWeight,
    Diverged,
    LogRatio,
    RolloutCorrection,
    SampleFilter,
    TokenAdvantage,
    TokenFilter,
    divergence,
    importance_weight,
)

LEVELS, BOUNDS = ("token", "sequence", "mean"), ("truncate", "zero", "none")
LIMITS = [(None, 2.0), (0.5, 5.0), (0.8, None), (None, None), (0.0, 1.0)]
ESTIMATORS, OVER = ("k1", "k2", "k3"), ("token", "sum", "mean", "max")


def spread_out(rows: list[list[float]], mask: torch.Tensor) -> torch.Tensor:
    """(N, T) numbers: those of `rows` at the tokens in the loss, and 0 at all other tokens."""
    out = torch.zeros(mask.shape, dtype=torch.float64)
    out[mask] = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    return out


def close(found: torch.Tensor, expected) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=1e-12, atol=1e-15)


def test_weights_equal_those_of_a_loop():
    batch, names = two_policies(9, 7, 0), ("level", "bound", "low", "high")
    for level, bound, limits in itertools.product(LEVELS, BOUNDS, LIMITS):
        if (bound, *limits) == ("zero", None, None):
            continue
        options = dict(zip(names, (level, bound, *limits), strict=True))
        expected = spread_out(stated_weights(log_ratios(batch), **options), batch[MASK])
        with of(str(options)):
            close(importance_weight(batch[OLD], batch[SAMPLER], batch[MASK], **options), expected)
            out = RolloutCorrection(**options)(batch)
            close(out["importance_weight"], expected)
            close(out["advantage"][..., 0], batch["advantage"][..., 0] * expected)
            assert out["advantage"].shape == (9, 7, 1)


def test_a_row_without_tokens_has_the_divergence_0_at_every_level():
    nothing = torch.zeros(2, 0)
    for estimator, level in itertools.product(ESTIMATORS, OVER):
        found = divergence(nothing, nothing, nothing > 0, estimator=estimator, level=level)
        assert found.tolist() == ([[], []] if level == "token" else [0.0, 0.0])


def test_divergences_equal_those_of_a_loop():
    batch = two_policies(9, 7, 5)
    for estimator, level in itertools.product(ESTIMATORS, OVER):
        found = divergence(batch[OLD], batch[SAMPLER], batch[MASK], estimator=estimator, level=level)
        expected = stated_divergence(log_ratios(batch), estimator, level)
        with of(f"{estimator} {level}"):
            close(found, spread_out(expected, batch[MASK]) if level == "token" else expected)


def test_rejection_equals_that_of_a_loop():
    limits = ((0.5, 2.0), (None, 1.5), (0.9, None), (0.0, 1.01))
    for estimator, level, (low, high) in itertools.product(ESTIMATORS, OVER, limits):
        with of(f"{estimator} {level} {low} {high}"):
            if estimator == "k1" or (low is None and high is not None):
                check_rejection(estimator, level, low, high)
                continue
            with pytest.raises(ValueError, match=f"{estimator} needs high > 0 and has no low"):
                Diverged(estimator=estimator, level=level, low=low, high=high)


def check_rejection(estimator, level, low, high) -> None:
    batch = two_policies(12, 6, 2)
    least = 1 / high if low is None and estimator == "k1" else low

    def stays(d: float) -> bool:
        if estimator != "k1":
            return d <= high
        return (not least or d >= math.log(least)) and (high is None or d <= math.log(high))

    values = stated_divergence(log_ratios(batch), estimator, level)
    criterion = Diverged(estimator=estimator, level=level, low=low, high=high)
    if level == "token":
        expected = ~batch[MASK] | (
            spread_out([[float(stays(d)) for d in row] for row in values], batch[MASK]) > 0
        )
        assert torch.equal(criterion(batch), expected)
        assert torch.equal(TokenFilter(criterion=criterion)(batch)[MASK], batch[MASK] & expected)
    else:
        there = batch[MASK].any(1).tolist()
        expected = [not token or stays(d) for token, d in zip(there, values, strict=True)]
        assert criterion(batch).tolist() == expected
        assert SampleFilter(criterion=criterion)(batch)["headrace", "in_loss"].tolist() == expected


@pytest.mark.parametrize(("old", "low", "high"), [(math.log(2.0), None, 2.0), (math.log(0.5), 0.5, 5.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_are_inclusive(old, low, high, dtype):
    """Values are compared in their own precision: log 2, rounded to float32, is above the float64 log 2."""
    ratio, zero, mask = (
        torch.tensor([[old]], dtype=dtype),
        torch.zeros(1, 1, dtype=dtype),
        torch.ones(1, 1) > 0,
    )
    weight = importance_weight(ratio, zero, mask, bound="zero", low=low, high=high)
    assert float(weight) == pytest.approx(math.exp(old))
    batch = TensorDict({OLD: zero, SAMPLER: ratio, MASK: mask}, [1])
    assert Diverged(estimator="k1", low=low or 0.0, high=high)(batch).item()


@pytest.mark.parametrize("level", LEVELS)
def test_ragged_rows_have_the_bits_of_dense_rows(level):
    batch = two_policies(9, 7, 4)
    stage = RolloutCorrection(level=level, bound="truncate")
    dense, rows = alone(stage, batch), alone(stage, ragged(batch))
    for row, own in enumerate(rows.batch.tensordicts):
        length = own[MASK].numel()
        for key in ("importance_weight", "advantage"):
            assert torch.equal(own[key], dense.batch[key][row, :length])
            assert not dense.batch[key][row, length:].any()
    assert rows.metrics == dense.metrics
    for criterion in (
        Diverged(high=0.3),
        Diverged(high=0.3, judges="negative"),
        Diverged(high=0.3, level="max"),
    ):
        assert torch.equal(criterion(ragged(batch)), criterion(batch))
    tokens = TokenFilter(criterion=Diverged(high=0.3, level="token"))
    for row, own in enumerate(tokens(ragged(batch)).tensordicts):
        length = own[MASK].numel()
        assert torch.equal(own[MASK], tokens(batch)[MASK][row, :length])


@pytest.mark.parametrize("level", ["sequence", "mean"])
def test_a_rollout_is_one_sequence_for_any_cut_into_rows(level):
    """The rows of a rollout have the weight of the rollout as one row. In metrics it counts once."""
    batch = two_policies(8, 6, 3)
    whole = TensorDict({"rollout_id": torch.arange(4), "advantage": torch.ones(4, 1, 1).double()}, [4])
    for key in (OLD, SAMPLER, MASK):
        whole[key] = batch[key].reshape(4, 12)
    options = {"level": level, "unit": "rollout"}
    cut, one = alone(RolloutCorrection(**options), batch), alone(RolloutCorrection(**options), whole)
    assert torch.equal(cut.batch["importance_weight"].reshape(4, 12), one.batch["importance_weight"])
    assert cut.metrics == pytest.approx(one.metrics, rel=1e-14)
    for estimator, over in itertools.product(ESTIMATORS, ("sum", "mean", "max")):
        criterion = Diverged(estimator=estimator, level=over, high=1.4, unit="rollout")
        assert criterion(batch).tolist() == criterion(whole).repeat_interleave(2).tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", [OLD, SAMPLER])
def test_non_finite_values_in_the_mask_are_refused_with_their_rows(key, value):
    batch = two_policies(6, 5)
    row, token = 4, int(batch[MASK][4].nonzero()[0])
    batch[key][row, token] = value
    both = {OLD: "trainer", SAMPLER: "sampler"}
    other = float(batch[SAMPLER if key == OLD else OLD][row, token])
    values = {key: f"{value:g}", (SAMPLER if key == OLD else OLD): f"{other:g}"}
    told = " and ".join(f"{values[each]} ({name})" for each, name in both.items())
    words = re.escape(f"found {told} at row 4 (group 1, rollout 2), token {token}. Record both")
    for stage in (RolloutCorrection(), SampleFilter(criterion=Diverged(high=1.0)),
                  TokenFilter(criterion=Diverged(high=1.0, level="token"))):  # fmt: skip
        with pytest.raises(BatchError, match=words):
            stage(batch)
    for function in (importance_weight, divergence):
        with pytest.raises(BatchError, match=re.escape(f"found {told} at row 4, token {token}. Record both")):
            function(batch[OLD], batch[SAMPLER], batch[MASK])


def test_masked_rows_are_in_no_weight_and_no_metric():
    batch = two_policies(6, 5)
    batch["headrace", "in_loss"] = torch.tensor([True, True, False, True, True, True])
    gone = batch.clone()
    gone[MASK][2] = False
    for key in (OLD, SAMPLER):
        batch[key][2] = math.nan
    with_row, without = (alone(RolloutCorrection(), each) for each in (batch, gone))
    assert torch.equal(with_row.batch["importance_weight"], without.batch["importance_weight"])
    assert with_row.metrics == without.metrics
    assert Diverged(high=1e-9)(batch)[2]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_advantage_out_of_the_loss_mask_becomes_0_if_it_is_not_a_number(level, wrong):
    """Row 1 has no token in the loss. The last token of row 0 is out of the loss mask."""
    batch = two_policies(4, 5)
    batch[MASK][0, 4] = False
    expected = RolloutCorrection(level=level)(batch)["advantage"]
    by_row, by_token = batch.clone(), batch.clone()
    by_row["advantage"][1] = wrong
    by_token["advantage"] = batch["advantage"].repeat(1, 5, 1)
    by_token["advantage"][1] = by_token["advantage"][0, 4] = wrong
    for each in (by_row, by_token):
        assert torch.equal(RolloutCorrection(level=level)(each)["advantage"], expected)


def test_columns_of_another_width_are_refused():
    batch = two_policies(4, 5)
    batch[OLD] = batch[OLD][:, :3]
    with pytest.raises(BatchError, match=r"one shape \(N, T\); found \('old_log_probs', 'full'\) \(4, 3\)"):
        RolloutCorrection()(batch)
    with pytest.raises(BatchError, match=r"found 'log_prob' \(4, 3\), 'sampler_log_prob' \(4, 5\)"):
        importance_weight(batch[OLD], batch[SAMPLER], batch[MASK])
    with pytest.raises(
        BatchError, match=r"found 'log_prob' \(4,\), 'sampler_log_prob' \(4,\), 'mask' \(4,\)"
    ):
        importance_weight(*[batch[SAMPLER][:, 0]] * 2, batch[MASK][:, 0])
    with pytest.raises(BatchError, match=r"must be bool, True trains; found torch.int64: convert it with"):
        importance_weight(batch[SAMPLER], batch[SAMPLER], batch[MASK].long())
    batch = two_policies(4, 5)
    batch["advantage"] = torch.zeros(4, 3, 1)
    with pytest.raises(BatchError, match=r"per token, \(N, 5, 1\); RolloutCorrection found 'advantage'"):
        RolloutCorrection()(batch)


def test_corrected_rows_are_not_corrected_again():
    with pytest.raises(BatchError, match="a second correction would apply weights twice"):
        RolloutCorrection()(RolloutCorrection()(two_policies(4, 5)))


@pytest.mark.parametrize("form", [lambda batch: batch, ragged], ids=["dense", "ragged"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_pipeline_equals_its_stages_one_after_another(level, form):
    """Stages read columns that the stages before them compute only when rows are gathered."""
    keys = {"numerator_key": OLD, "denominator_key": SAMPLER}
    stages = {
        "term": TokenAdvantage(term=LogRatio(**keys), factor=0.5),
        "share": TokenAdvantage(term=DirectedWeight(clip=0.2, **keys), how="multiply"),
        "weigh": RolloutCorrection(level=level, bound="zero", high=1.5),
        "reject": TokenFilter(criterion=Diverged(high=0.3, judges="negative"), denominator="all"),
    }
    expected = form(two_policies(9, 7, 4))
    found = Pipeline(stages).run(expected).batch
    for stage in stages.values():
        expected = stage(expected)
    for key in ("advantage", "importance_weight"):
        rows = zip(*([row[key] for row in each.unbind(0)] for each in (found, expected)), strict=True)
        assert all(torch.equal(one, other) for one, other in rows)


# -- tokens, and the denominator of the loss --------------------------------------------------------------


def test_rejected_tokens_leave_the_mask_or_stay_in_the_denominator():
    batch = two_policies(6, 5)
    criterion = Diverged(estimator="k1", level="token", high=1.5)
    out = batch[MASK] & ~criterion(batch)
    assert out.any()
    kept = alone(TokenFilter(criterion=criterion), batch)
    assert torch.equal(kept.batch[MASK], batch[MASK] & ~out)
    assert kept.batch[SAMPLER][out].isnan().all()
    assert torch.equal(kept.batch["advantage"], batch["advantage"])
    lengths = torch.where(out.any(1), batch[MASK].sum(1), -1)
    assert torch.equal(kept.batch["headrace", "length"], lengths)
    every = alone(TokenFilter(criterion=criterion, denominator="all"), batch)
    assert torch.equal(every.batch[MASK], batch[MASK])
    assert torch.equal(every.batch["advantage"][..., 0], torch.where(out, 0.0, batch["advantage"][..., 0]))
    tokens = int(batch[MASK].sum())
    for run in (kept, every):
        assert {k: run.metrics[k] for k in ("kept", "fraction_kept")} == {
            "kept": tokens - int(out.sum()),
            "fraction_kept": 1 - int(out.sum()) / tokens,
        }


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (torch.ones(6, 5), "torch.float32 (6, 5)"),
        ([True], "list"),
        (torch.ones(6, 4) > 0, "torch.bool (6, 4)"),
    ],
)
def test_a_criterion_of_another_shape_or_dtype_is_refused(returned, found):
    message = r"a criterion must return one bool per token, \(6, 5\), or one per row; .* returned "
    with pytest.raises(BatchError, match=message + re.escape(found)):
        TokenFilter(criterion=lambda _: returned)(two_policies(6, 5))
    with pytest.raises(ValueError, match="criterion must be a callable"):
        TokenFilter(criterion=3)


def test_an_advantage_that_is_not_finite_may_only_be_at_a_rejected_token():
    batch = two_policies(6, 5)
    batch["advantage"] = torch.ones(6, 5, 1)
    batch["advantage"][2, 1], batch[MASK][2, 1] = math.inf, True
    keep = torch.ones(6, 5, dtype=torch.bool)
    stage = TokenFilter(criterion=lambda _: keep, denominator="all")
    with pytest.raises(
        BatchError, match=r"^an advantage must be finite in torch.float32; found others in row 2$"
    ):
        stage(batch)
    keep[2, 1] = False
    expected = batch["advantage"].clone()
    expected[2, 1] = 0.0
    assert torch.equal(stage(batch)["advantage"], expected)


def test_a_criterion_of_rows_takes_out_all_their_tokens():
    batch = two_policies(6, 5)
    keep = torch.tensor([True, True, False, True, False, True])
    found = TokenFilter(criterion=lambda _: keep)(batch)[MASK]
    assert torch.equal(found, batch[MASK] & keep[:, None])
    column = TokenFilter(criterion=lambda _: keep[:, None])(batch)[MASK]
    assert torch.equal(column, found)


@pytest.mark.parametrize("level", ["token", "mean", "every"])
def test_a_row_is_judged_at_its_tokens_with_a_negative_advantage(level):
    """Both rows are out of bounds at all tokens, and the advantage of one token is negative. 0 is not."""
    zero = torch.zeros(2, 4)
    credit = torch.tensor([[1.0, -1.0, 0.0, -0.0], [2.0, 0.0, -0.0, 2.0]])
    batch = TensorDict({OLD: zero - 1, SAMPLER: zero, MASK: zero == 0, "advantage": credit[..., None]}, [2])
    criterion = Diverged(estimator="k1", level=level, high=2.0, judges="negative")
    assert torch.equal(criterion(batch), credit >= 0)
    assert torch.equal(TokenFilter(criterion=criterion)(batch)[MASK], credit >= 0)
    narrow = TensorDict({key: batch[key][:, 1:2] for key in (OLD, SAMPLER, MASK)}, [2])
    narrow["advantage"] = credit[:, 1:2, None]
    stays = torch.tensor([False, True])
    if level == "token":
        assert torch.equal(criterion(narrow), stays[:, None])
        return
    assert torch.equal(criterion(narrow), stays)
    assert torch.equal(SampleFilter(criterion=criterion)(narrow)["headrace", "in_loss"], stays)


def test_without_a_token_in_the_loss_no_fraction_is_kept():
    batch = two_policies(6, 5)
    batch[MASK][:] = False
    found = alone(TokenFilter(criterion=lambda rows: rows[MASK]), batch).metrics
    assert (found["kept"], found["fraction_kept"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        # Both rows have μ / π_old = 2 or 1 at every token. A bound may be equal to the ratio or to the other.
        ({"estimator": "k1", "high": 1.0}, [False, True]),
        ({"estimator": "k1", "low": 2.0, "high": 2.0}, [True, False]),
        ({"estimator": "k1", "low": 2.0, "high": None}, [True, False]),
        ({"estimator": "k1", "low": 0.0, "high": 1.5}, [False, True]),
        ({"estimator": "k1", "low": 0.0, "high": None}, [True, True]),
        ({"estimator": "k2", "high": 1e-300}, [False, True]),
    ],
)
@pytest.mark.parametrize("level", ["mean", "max", "every"])
def test_bounds_may_be_equal_or_0(options, stays, level):
    zero = torch.zeros(2, 3, dtype=torch.float64)
    sampler = torch.tensor([[math.log(2.0)], [0.0]], dtype=torch.float64).expand(2, 3)
    batch = TensorDict({OLD: zero, SAMPLER: sampler, MASK: zero == 0}, [2])
    assert Diverged(level=level, **options)(batch).tolist() == stays


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"estimator": "k1", "high": 0.9},
            "k1 with only high sets low = 1 / high, so high must be ≥ 1; got 0.9",
        ),
        ({"estimator": "k1", "high": None}, "k1 needs low or high, bounds of μ / π_old"),
        ({"estimator": "k1", "low": 2.5, "high": 2.0}, "low must be ≤ high; got 2.5 and 2.0"),
        ({"estimator": "k1", "low": -0.1, "high": 2.0}, "high > 0, or None; got -0.1 and 2.0"),
        ({"estimator": "k1", "low": 0.5, "high": 0.0}, "high > 0, or None; got 0.5 and 0.0"),
        ({"estimator": "k3", "high": 0.0}, "k3 needs high > 0 and has no low; got None and 0.0"),
        ({"estimator": "k2", "low": 0.0, "high": 1.0}, "k2 needs high > 0 and has no low; got 0.0 and 1.0"),
        (
            {"level": "token", "high": 1.0, "unit": "rollout"},
            "level='token' needs unit='sample'; unit='rollout'",
        ),
    ],
)
def test_bounds_that_no_divergence_can_meet_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Diverged(**options)


# -- metrics ----------------------------------------------------------------------------------------------


def test_metrics_equal_those_of_a_loop():
    for level, bound in itertools.product(LEVELS, BOUNDS):
        with of(f"{level} {bound}"):
            check_metrics(level, bound)


def check_metrics(level, bound) -> None:
    batch = two_policies(9, 6, 7)
    logs = log_ratios(batch)
    weights = stated_weights(logs, level, bound, 0.5, 2.0)
    ratios = stated_weights(logs, level, "none", None, None)
    found = alone(
        RolloutCorrection(level=level, bound=bound, low=0.5, high=2.0, least_ess=None), batch
    ).metrics
    tokens = [w for row in weights for w in row]
    rows = [math.fsum(row) / len(row) for row in weights if row]
    out = [[not 0.5 <= r <= 2.0 for r in row] for row in ratios]
    of_tokens = [-min(max(log, -20), 20) for row in logs for log in row]
    of_rows = [-min(max(math.fsum(row), -20), 20) for row in logs if row]
    expected = {}
    for by, values, d in (("token", tokens, of_tokens), ("sequence", rows, of_rows)):
        squares = math.fsum(v * v for v in values)
        expected |= {
            f"weight_mean_{by}": math.fsum(values) / len(values),
            f"weight_max_{by}": max(values),
            f"ess_{by}": math.fsum(values) ** 2 / (len(values) * squares) if squares else 0.0,
            f"kl_k1_{by}": math.fsum(d) / len(d),
            f"kl_k3_{by}": math.fsum(math.exp(-x) - 1 + x for x in d) / len(d),
            f"chi2_{by}": math.fsum(math.exp(-2 * x) for x in d) / len(d) - 1,
        }
    expected["out_of_bounds_token"] = sum(map(sum, out)) / len(tokens)
    expected["out_of_bounds_sequence"] = math.fsum(sum(row) / len(row) for row in out if row) / len(rows)
    assert found == pytest.approx(expected, rel=1e-12)
    least = alone(RolloutCorrection(level=level, bound=bound, low=0.5, high=2.0), batch).metrics
    assert least == found | {"least_ess": 0.5}


@pytest.mark.parametrize("unit", ["sample", "rollout"])
def test_divergences_are_measured_before_rejection(unit):
    batch = two_policies(8, 5)
    expected = alone(RolloutCorrection(unit=unit), batch).metrics
    for stage in (
        SampleFilter(criterion=Diverged(high=0.1, unit=unit), action="drop"),
        TokenFilter(criterion=Diverged(high=0.1, unit=unit)),
    ):
        found = alone(stage, batch).metrics
        names = [f"{name}_{by}" for name in ("kl_k1", "kl_k3", "chi2") for by in ("token", "sequence")]
        assert [found[name] for name in names] == [expected[name] for name in names]
        assert found["fraction_kept"] < 1


@settings(max_examples=15)
@given(st.integers(0, 99), st.floats(0.01, 0.9), st.floats(1.1, 50), st.booleans(), st.booleans())
def test_level_every_removes_a_row_if_a_ratio_is_out_of_bounds(seed, least, most, of_rollout, half):
    """A loop checks ρ = π_old / μ of each token. The options low and high bound the inverse of ρ."""
    batch = two_policies(8, 6, seed, spread=1.5)
    logs = log_ratios(batch)
    inside = [all(math.log(least) <= clamp(log) <= math.log(most) for log in row) for row in logs]
    if half:  # without an upper bound
        inside = [all(math.log(least) <= clamp(log) for log in row) for row in logs]
    if of_rollout:  # two rows are a rollout: both stay, or both leave
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


def test_level_max_bounds_the_largest_token_and_level_every_all_tokens():
    # μ / π_old of the tokens is 0.33 and 1. Only the first is below the bound 1/3.
    logs = torch.tensor([[math.log(3.03), 0.0]], dtype=torch.float64)
    zero = torch.zeros(1, 2, dtype=torch.float64)
    batch = TensorDict({OLD: logs, SAMPLER: zero, MASK: zero == 0}, batch_size=[1])
    assert Diverged(estimator="k1", level="max", low=1 / 3, high=None)(batch).tolist() == [True]
    assert Diverged(estimator="k1", level="every", low=1 / 3, high=None)(batch).tolist() == [False]
    assert Diverged(estimator="k1", level="every", low=1 / 3.1, high=None)(batch).tolist() == [True]
    for estimator in ("k2", "k3"):  # these have only an upper bound
        for high in (0.5, 0.62, 1.0, 3.0):
            levels = [Diverged(estimator=estimator, level=level, high=high) for level in ("max", "every")]
            assert levels[0](batch).tolist() == levels[1](batch).tolist()


def test_divergence_has_no_level_every():
    with pytest.raises(ValueError, match="level must be one of 'token', 'sum', 'mean', 'max'"):
        divergence(*[torch.zeros(1, 1)] * 2, torch.ones(1, 1) > 0, level="every")
