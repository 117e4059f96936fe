"""The weighted sum over any cut equals the mean that `unit` names."""

from __future__ import annotations

import pytest
import torch
from alone import said_by
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    LossWeight,
    MissingKeyError,
    Rows,
    ShuffleSplit,
    loss_weight,
    split_microbatches,
    split_minibatches,
    weighted_loss,
)
from headrace.transforms.table.schema import FOLDED_WEIGHT, IN_LOSS, MICROBATCH, MINIBATCH, RANK, STEP_WEIGHT

MASK, WEIGHT = ("masks", "all_assistant_mask"), "loss_weight"
MEANS = ("token", "sample", "rollout", "group", "constant", "inverse_length")


POWER = 0.75  # the power of inverse_length
ONE = torch.tensor([1])


def power_of(unit: str) -> float | None:
    return POWER if unit == "inverse_length" else None


def batch_of(loss, mask=None, **ids) -> TensorDict:
    loss = torch.tensor(loss, dtype=torch.float64)
    mask = torch.ones_like(loss, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    columns = {name: torch.tensor(values) for name, values in ids.items()}
    return TensorDict({"loss": loss, MASK: mask, **columns}, batch_size=[len(loss)])


def summed(batch: TensorDict) -> float:
    return float((batch[WEIGHT].unsqueeze(-1) * batch[MASK] * batch["loss"]).sum())


# -- golden numbers ---------------------------------------------------------------------------------

NINE = [[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]
TWELVE = [*NINE, [10.0, 11, 12]]


# -- laws -------------------------------------------------------------------------------------------


def named_mean(unit, loss, mask, rollouts, groups, length) -> float:
    """Compute the mean by its definition, in a loop."""
    rows = [i for i in range(len(loss)) if mask[i].any()]
    label = {"sample": range(len(loss)), "rollout": rollouts, "group": groups}
    if unit == "token":
        return float(loss[mask].mean()) if rows else 0.0
    if unit == "constant":
        return float(loss[mask].sum()) / (len({rollouts[i] for i in rows}) * length) if rows else 0.0
    if unit == "inverse_length":
        whose = {rollouts[i]: [j for j in rows if rollouts[j] == rollouts[i]] for i in rows}
        shares = {u: int(mask[own].sum()) ** -POWER for u, own in whose.items()}
        sums = [shares[u] * float(loss[own][mask[own]].sum()) for u, own in whose.items()]
        return sum(sums) / sum(shares.values()) if rows else 0.0
    units = {label[unit][i] for i in rows}
    means = []
    for u in units:
        mine = [i for i in rows if label[unit][i] == u]
        means.append(float(loss[mine][mask[mine]].mean()))
    return sum(means) / len(means) if means else 0.0


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(0, 4), min_size=n, max_size=n),
            st.lists(st.integers(0, 2), min_size=n, max_size=n),
            # Most optimiser steps have no row of this batch if one of them has the number 90.
            st.lists(st.sampled_from([-1, 0, 1, 2, 90]), min_size=n, max_size=n),
            st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=n, max_size=n),
        )
    ),
    st.sampled_from(MEANS),
)
def test_the_weighted_sum_of_an_optimiser_step_is_its_mean(columns, unit):
    rollouts, groups, steps, mask = columns
    loss = torch.arange(1.0, 3 * len(mask) + 1, dtype=torch.float64).view(-1, 3) ** 1.5
    batch = TensorDict(
        {
            "loss": loss,
            MASK: torch.tensor(mask),
            "rollout_id": torch.tensor(rollouts),
            "group_id": torch.tensor(groups),
            MINIBATCH: torch.tensor(steps),
        },
        batch_size=[len(mask)],
    )
    length = 7 if unit == "constant" else None
    out = LossWeight(unit=unit, length=length, power=power_of(unit), dtype="float64")(batch)
    assert out[WEIGHT].isfinite().all()
    for step in set(steps):
        rows = [i for i in range(len(steps)) if steps[i] == step]
        own = batch[MASK][rows], [rollouts[i] for i in rows], [groups[i] for i in rows], 7
        expected = named_mean(unit, loss[rows], *own)
        assert summed(out[rows]) == pytest.approx(expected if step >= 0 else 0.0, rel=1e-12)
        total = named_mean(unit, torch.ones(len(rows), 3), *own) if step >= 0 else 0.0
        assert out[STEP_WEIGHT][rows].tolist() == pytest.approx([total] * len(rows), rel=1e-12)
        tokens = int(batch[MASK][rows].sum())
        assert out["num_tokens"][rows].tolist() == [tokens if step >= 0 else 0] * len(rows)
        speaking = [i for i in rows if any(mask[i])] if step >= 0 else []
        assert out["num_samples"][rows].tolist() == [len(speaking)] * len(rows)
        assert out["num_rollouts"][rows].tolist() == [len({rollouts[i] for i in speaking})] * len(rows)
        assert out["num_groups"][rows].tolist() == [len({groups[i] for i in speaking})] * len(rows)


def test_power_0_weighs_tokens_equally_and_power_1_rollouts():
    """Rollouts have 4 and 2 tokens. With power 1, a token weighs ¼ / (¼ + ½) = ⅓ or ½ / (¼ + ½) = ⅔."""
    batch = batch_of([[1.0, 1, 1], [1, 0, 0], [1, 1, 0]], rollout_id=[5, 5, 9])
    batch[MASK] = batch["loss"] > 0
    for power, expected in ((0.0, [1 / 2, 1 / 2, 1 / 2]), (1.0, [1 / 3, 1 / 3, 2 / 3])):
        out = LossWeight(unit="inverse_length", power=power, dtype="float64")(batch)
        assert out[WEIGHT].tolist() == pytest.approx(expected)
        assert out[STEP_WEIGHT].tolist() == pytest.approx([4 * expected[0] + 2 * expected[2]] * 3)


def test_the_order_of_the_rows_changes_no_bit_of_a_weight():
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(40, 9, generator=generator) < 0.5
    ids = torch.randint(0, 12, (40,), generator=generator)
    batch = TensorDict({MASK: mask, "rollout_id": ids, MINIBATCH: ids % 2}, batch_size=[40])
    weight, order = LossWeight(unit="inverse_length", power=POWER, dtype="float64"), torch.randperm(40)
    for key in (WEIGHT, STEP_WEIGHT):
        assert torch.equal(weight(batch)[key][order], weight(batch[order])[key])


def test_the_metrics_are_counts_of_the_rows_in_the_loss():
    batch = batch_of(NINE, [[1, 1, 0], [0, 0, 0], [1, 1, 1]], rollout_id=[0, 1, 2])
    found = said_by(LossWeight(unit="constant", length=7), batch).metrics
    assert (found["tokens"], found["samples"], found["divisor"]) == (5, 2, 7)


def test_masked_rows_are_in_no_denominator():
    batch = batch_of(NINE, rollout_id=[0, 1, 2], group_id=[0, 0, 1])
    batch[IN_LOSS] = torch.tensor([True, True, False])
    batch["log_probs", "full"] = torch.zeros(3, 3)
    batch["log_probs", "full"][1, 0] = float("nan")  # GRPOLoss leaves such a token out
    for unit, expected in {  # of the tokens 1, 2, 3 of row 0, and 5, 6 of row 1
        "token": 17 / 5,
        "sample": (2 + 5.5) / 2,
        "rollout": 3.75,
        "group": 17 / 5,
    }.items():
        out = LossWeight(unit=unit, dtype="float64")(batch)
        inside = batch[MASK] & batch["log_probs", "full"].isfinite()
        found = float((out[WEIGHT].unsqueeze(-1) * inside * batch["loss"]).sum())
        assert found == pytest.approx(expected, rel=1e-12)
        assert out[WEIGHT][2] == 0


def test_folding_into_a_token_mean_cancels_its_denominator():
    batch = batch_of(TWELVE, rollout_id=[3, 3, 3, 8])
    batch["advantage"] = torch.ones(4, 1, 1, dtype=torch.float64)
    # The rollouts have the means 5 and 11; in two optimiser steps, 3.5, and 8 and 11.
    for columns, expected in (
        ({}, 8),
        ({MICROBATCH: [0, 0, 1, 1]}, 8),
        ({MICROBATCH: [0, 1, 0, 1], RANK: [0, 0, 1, 1]}, 8),
        ({MINIBATCH: [0, 0, 1, 1], MICROBATCH: [0, 0, 0, 0]}, 3.5 + 9.5),
    ):
        cut = batch.clone()
        for key, values in columns.items():
            cut[key] = torch.tensor(values)
        out = LossWeight(unit="rollout", fold="token_mean")(cut)
        assert WEIGHT not in out.keys()
        assert torch.equal(out[FOLDED_WEIGHT], LossWeight(unit="rollout")(cut)[WEIGHT])
        passes = torch.stack([torch.tensor(v) for v in columns.values()] or [torch.zeros(4)]).T.tolist()
        total = 0.0
        for each in {tuple(p) for p in passes}:
            rows = [i for i, p in enumerate(passes) if tuple(p) == each]
            total += float((out["advantage"][rows].squeeze(-1) * batch["loss"][rows]).mean())
        assert total == pytest.approx(expected, rel=1e-12)
    summing = LossWeight(unit="rollout", fold="sum")(batch)
    assert float((summing["advantage"].squeeze(-1) * batch["loss"]).sum()) == pytest.approx(8, rel=1e-12)


def test_folding_twice_or_into_integers_is_refused():
    batch = batch_of(NINE)
    batch["advantage"] = torch.ones(3, 1, 1)
    once = LossWeight(fold="sum")(batch)
    with pytest.raises(BatchError, match="a second fold would apply weights twice"):
        LossWeight(fold="sum")(once)
    batch["advantage"] = torch.ones(3, 1, 1, dtype=torch.int64)
    with pytest.raises(BatchError, match=r"must be floating-point; found torch.int64"):
        LossWeight(fold="sum")(batch)


def test_ragged_advantages_per_token_are_folded_row_by_row():
    rows = [TensorDict({MASK: torch.ones(n).bool(), "advantage": torch.ones(n, 1)}) for n in (1, 3)]
    stack = lazy_stack(rows)
    out = LossWeight(fold="sum")(stack)
    assert [a.flatten().tolist() for a in out.get("advantage", as_list=True)] == [[0.25], [0.25] * 3]
    assert [a.flatten().tolist() for a in stack.get("advantage", as_list=True)] == [[1.0], [1.0] * 3]


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_folded_advantage_of_dense_or_ragged_rows_is_at_least_float32(tokens):
    batch = batch_of(NINE)
    batch["advantage"] = torch.full((3, tokens, 1), 1.5, dtype=torch.bfloat16)
    dense = LossWeight(fold="sum")(batch)["advantage"]
    assert dense.dtype is torch.float32
    assert torch.equal(dense, LossWeight(fold="sum")(lazy_stack(list(batch.unbind(0))))["advantage"])


def test_averaged_gradients_need_the_number_of_ranks():
    batch = batch_of(NINE)
    batch[RANK] = torch.tensor([0, 1, 1])
    with pytest.raises(BatchError, match="set ranks of LossWeight"):
        LossWeight(gradients="mean")(batch)


def test_averaged_gradients_multiply_weights_by_the_number_of_ranks():
    batch = batch_of(NINE)
    for key in (WEIGHT, STEP_WEIGHT):
        once = LossWeight(dtype="float64")(batch)[key]
        assert torch.equal(LossWeight(dtype="float64", gradients="mean", ranks=4)(batch)[key], 4 * once)
        assert torch.equal(LossWeight(dtype="float64", ranks=4)(batch)[key], once)


def test_averaged_gradients_multiply_weights_by_the_ranks_of_the_process_group():
    stage, batch = LossWeight(dtype="float64", gradients="mean"), batch_of(NINE)
    rows = Rows.read(stage.enter(batch), keys=stage.in_keys, tokens=stage.tokens_counted)
    rows.table.ranks.size = 3
    stage.decide(rows.seen_by(stage))
    for key in (WEIGHT, STEP_WEIGHT):
        assert torch.equal(rows.write()[key], 3 * LossWeight(dtype="float64")(batch)[key])


def test_weights_have_the_dtype_of_the_advantage_and_at_least_float32():
    batch = batch_of(NINE)
    for given_, found in (("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")):
        batch["advantage"] = torch.zeros(3, 1, 1, dtype=getattr(torch, given_))
        assert LossWeight()(batch)[WEIGHT].dtype == getattr(torch, found)
    assert LossWeight(dtype="float16")(batch)[WEIGHT].dtype == torch.float16


def test_ragged_rows_have_the_weights_of_dense_rows():
    dense = batch_of(NINE, [[1, 1, 0], [1, 1, 1], [1, 0, 0]], rollout_id=[0, 0, 1])
    rows = []
    for row, length in zip(dense.unbind(0), (2, 3, 1), strict=True):
        row = row.clone()
        row[MASK], row["loss"] = row[MASK][:length], row["loss"][:length]
        rows.append(row)
    found = LossWeight(unit="rollout")(lazy_stack(rows))
    assert torch.equal(found[WEIGHT], LossWeight(unit="rollout")(dense)[WEIGHT])


# -- through the split ------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", MEANS)
def test_each_minibatch_has_its_own_mean_for_any_cut(unit, make_batch):
    batch = make_batch([0.0] * 12, [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3], [0, 0, 1, 2, 3, 4, 5, 6, 6, 6, 7, 8])
    batch["loss"] = torch.rand(12, 4, dtype=torch.float64)
    length = 5 if unit == "constant" else None
    split = {"minibatches": 3, "seed": 3, "remainder": "pad"}
    wholes = None
    for cut in ({}, {"microbatches": 2}, {"max_tokens": 9}, {"microbatches": 4, "balance": "attention"}):

        def pipeline(cut=cut):
            weight = LossWeight(unit=unit, length=length, power=power_of(unit), dtype="float64")
            return Pipeline({"split": ShuffleSplit(**split, **cut), "weight": weight})

        parts = list(pipeline().minibatches(batch))
        sums = [sum(map(summed, split_microbatches(part))) for part in parts]
        ordered = pipeline()(batch)
        assert [len(part) for part in split_minibatches(ordered)] == [len(part) for part in parts]
        for part, total in zip(parts, sums, strict=True):
            real = part[~part.get(("headrace", "padding"), torch.zeros(len(part)).bool())]
            expected = named_mean(
                unit, real["loss"], real[MASK], real["rollout_id"].tolist(), real["group_id"].tolist(), 5
            )
            assert total == pytest.approx(expected, rel=1e-12)
        wholes = wholes or sums
        assert sums == pytest.approx(wholes, rel=1e-12)


# -- wrong data -------------------------------------------------------------------------------------


def test_a_batch_without_a_loss_mask_or_a_response_is_refused():
    with pytest.raises(MissingKeyError, match=r"\(loss_mask_key\), or of a response.*Write the mask"):
        LossWeight()(TensorDict({"x": torch.zeros(2)}, batch_size=[2]))


@pytest.mark.parametrize(
    ("unit", "ids", "needed"),
    [
        ("rollout", {}, "rollout_id"),
        ("constant", {"length": 5}, "rollout_id"),
        ("inverse_length", {"power": 1.0, "group_id": ONE}, "rollout_id"),
        ("group", {"rollout_id": ONE}, "group_id"),
        ("turn", {"rollout_id": ONE}, "rollout_id and turn"),
        ("turn", {"turn": ONE}, "rollout_id and turn"),
    ],
)
def test_the_function_names_the_ids_that_a_unit_needs(unit, ids, needed):
    with pytest.raises(ValueError, match=rf"^unit='{unit}' needs {needed}$"):
        loss_weight(ONE, unit, **ids)


def test_the_function_needs_no_ids_for_tokens_and_samples():
    tokens = torch.tensor([1, 3, 0])
    assert loss_weight(tokens).weight.tolist() == [0.25, 0.25, 0.0]
    assert loss_weight(tokens, "sample").weight.tolist() == pytest.approx([1 / 2, 1 / 6, 0.0])
    made = loss_weight(tokens, "sample", minibatch=torch.tensor([2, 0, -1]), dtype=torch.float64)
    assert made.weight.tolist() == pytest.approx([1, 1 / 3, 0])
    assert (made.tokens.tolist(), made.samples.tolist(), made.total.tolist()) == (
        [1, 3, 0],
        [1, 1, 0],
        [1, 1, 0],
    )
    assert made.rollouts is made.groups is None
    for step, weight in ((-ONE, [0.0]), (ONE, [1.0]), (ONE[:0], [])):
        assert loss_weight(ONE[: len(step)], minibatch=step).weight.tolist() == weight


def test_an_unset_id_is_refused_only_in_the_loss():
    batch = batch_of(NINE, [[1, 1, 1], [0, 1, 0], [1, 1, 1]], rollout_id=[0, -1, 2])
    with pytest.raises(BatchError, match="rollout_id ≥ 0; found -1 at row 1"):
        LossWeight(unit="rollout")(batch)
    batch[IN_LOSS] = torch.tensor([True, False, True])
    assert LossWeight(unit="rollout")(batch)["num_rollouts"].tolist() == [2, 2, 2]


PER_TOKEN = (
    r"needs per-token terms, \(3, T\) or \(3, T, 1\); 'loss_kl_to_ref' is \(\)\. "
    r"Set aggregation='none' on GRPOLoss\. .*TokenGRPOLoss"
)


def test_weights_need_terms_per_token():
    batch = LossWeight()(batch_of(NINE))
    with pytest.raises(BatchError, match=PER_TOKEN):
        weighted_loss(TensorDict({"loss_kl_to_ref": torch.zeros(())}), batch)
    with pytest.raises(BatchError, match=r"must return a TensorDict with entries loss_.*; got a Tensor"):
        weighted_loss(torch.zeros(3, 3), batch)
    with pytest.raises(BatchError, match=r"entries named loss_\*; found \['objective'\]"):
        weighted_loss(TensorDict({"objective": torch.zeros(3, 3)}), batch)
    message = (
        r"needs the key 'loss_weight' \(weight_key\), .* has \[\('masks', 'all_assistant_mask'\), 'loss'\]"
    )
    with pytest.raises(MissingKeyError, match=message):
        weighted_loss(TensorDict({"loss_objective": torch.zeros(3, 3)}), batch_of(NINE))


@pytest.mark.parametrize("name", ["loss_weight", "w"])
def test_a_row_of_weight_0_does_not_train_for_any_weight_key(make_batch, name):
    batch = make_batch([1.0, 2, 3, 4], [0, 0, 1, 1])
    batch["log_probs", "full"][0] = float("nan")
    pipeline = Pipeline({"split": ShuffleSplit(minibatches=1), "weight": LossWeight(weight_key=name)})
    assert pipeline.run(batch).metrics["rows/trained"] == 3
    assert pipeline.weighs
    assert not Pipeline({"weight": LossWeight(weight_key=name, fold="sum")}).weighs


def test_weights_in_the_input_are_ignored(make_batch):
    batch = make_batch([1.0, 2], [0, 0])
    batch["loss_weight"] = torch.zeros(2)
    batch["advantage"] = torch.ones(2, 1, 1)
    assert Pipeline({"weight": LossWeight(fold="sum")}).run(batch).metrics["rows/trained"] == 2
    assert Pipeline({"weight": LossWeight()}).run(batch).metrics["rows/trained"] == 2
