"""The weights of tokens are measured from the gradient of a training step, and named in a verdict."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from headrace.pipeline import (
    Pipeline,
    TokenTable,
    kl_weights,
    load_pipeline,
    optimise,
    token_weights,
    xray,
    xray_batch,
)
from headrace.pipeline.tools.xray.means import StepTokens, odd_part
from headrace.pipeline.tools.xray.measure import declared
from headrace.transforms import BatchError, LossWeight, TokenAdvantage, TokenFilter

FULL, LOSS = ("tokens", "full"), ("masks", "all_assistant_mask")


def terms(model: torch.nn.Module, part: TensorDictBase) -> torch.Tensor:
    """(n, T) advantage × log-probability of the tokens in the loss."""
    log_probs = model.get_dist(part).log_prob(part[FULL])
    return torch.where(part[LOSS], log_probs * part["advantage"].squeeze(-1), 0.0)


def mean_of_step(model, batch, cut):
    for part in batch.chunk(cut):
        (-terms(model, part).sum() / batch[LOSS].sum()).backward()


def mean_of_micro_batches(model, batch, cut):
    for part in batch.chunk(cut):
        (-terms(model, part).sum() / part[LOSS].sum() / cut).backward()


def mean_of_sequences(model, batch, cut):
    for part in batch.chunk(cut):
        (-(terms(model, part).sum(1) / part[LOSS].sum(1)).sum() / len(batch)).backward()


def mean_of_means(model, batch, cut):
    group = batch["group_id"].flatten()
    for part in batch.chunk(cut):
        for each in group.unique().tolist():
            length = batch[LOSS][group == each].sum()
            (-terms(model, part[part["group_id"].flatten() == each]).sum() / length / 3).backward()


def over_a_constant(model, batch, cut):
    for part in batch.chunk(cut):
        (-terms(model, part).sum() / 1000).backward()


def with_padding(model, batch, cut):
    for part in batch.chunk(cut):
        (-terms(model, part).sum() / part[LOSS].numel() / cut).backward()


def without_the_last(model, batch, cut):
    for part in batch.chunk(cut)[: max(1, cut - 1)]:
        (-terms(model, part).sum() / batch[LOSS].sum()).backward()


def with_the_last_alone(model, batch, cut):
    (-terms(model, batch.chunk(cut)[-1]).sum() / batch[LOSS].sum()).backward()


def twice_for_any_cut(model, batch, cut):
    (-(1 + (cut > 1)) * terms(model, batch).sum() / batch[LOSS].sum()).backward()


def in_the_second_group(factor):
    """The second group, with 23 of 66 tokens, has more weight."""

    def step(model, batch, cut):
        more = torch.where(batch["group_id"] == 1, factor, 1.0)
        (-(more * terms(model, batch)).sum() / batch[LOSS].sum()).backward()

    return step


more_in_a_group, rounded_in_a_group = map(in_the_second_group, (1.5, 1.01))


def with_the_first_twice(model, batch, cut):
    parts = batch.chunk(cut)
    for part in (*parts[: cut > 1], *parts):
        (-terms(model, part).sum() / batch[LOSS].sum()).backward()


def with_the_neighbours_advantage(model, batch, cut):
    mean_of_step(model, batch.clone().set("advantage", batch["advantage"].roll(1, 0)), cut)


def with_a_shifted_mask(model, batch, cut):
    mean_of_step(model, batch.clone().set(LOSS, batch[LOSS].roll(-1, 1)), cut)


def with_a_mask_that_is_late(model, batch, cut):
    late = torch.nn.functional.pad(batch[LOSS], (1, 0))[:, :-1]
    mean_of_step(model, batch.clone().set(LOSS, late), cut)


def with_prompts(model, batch, cut):
    real = batch["masks", "all_attention_mask"]
    mean_of_step(model, batch.clone().set(LOSS, real), cut)


def with_a_late_mask_and_some_prompts(model, batch, cut):
    """The last token of each prompt trains, too, in the six rows with a negative advantage."""
    with_a_mask_that_is_late(model, batch, cut)
    first = batch[LOSS].cumsum(1).roll(-1, 1) == 1
    low = first & ~batch[LOSS] & (batch["advantage"].squeeze(-1) < 0)
    (-terms(model, batch.clone().set(LOSS, low)).sum() / batch[LOSS].sum()).backward()


def up_the_loss(model, batch, cut):
    (terms(model, batch).sum() / batch[LOSS].sum()).backward()


def with_a_bonus(model, batch, cut):
    log_probs = model.get_dist(batch).log_prob(batch[FULL])
    bonus = torch.where(batch["advantage"].squeeze(-1) == 0, log_probs, 0.0)
    (-torch.where(batch[LOSS], bonus, 0.0).sum() / batch[LOSS].sum()).backward()
    mean_of_step(model, batch, cut)


OF_ROWS = "mean over rows of the mean over their tokens of the whole step"
OF_GROUPS = "mean over groups of the mean over their tokens of the whole step"
OF_TOKENS, OF_RECIPE = "mean over the tokens of the whole step", "the weights of the pipeline"
GET, THAN = "micro-batches, tokens get", "times the weight that they get with 1 micro-batch"
VERDICTS = {
    mean_of_step: f"{OF_TOKENS}, in 3 of 3 runs",
    # The micro-batches have 66, then 31 and 35, then 17, 14, 18 and 17 tokens. 66 / (2 * 35) is 0.943.
    mean_of_micro_batches: f"mean over the tokens of each micro-batch: with 2 {GET} 0.943 to 1.06 {THAN}; "
    f"with 4 {GET} 0.917 to 1.18 {THAN}",
    mean_of_sequences: f"{OF_ROWS}, in 3 of 3 runs",
    mean_of_means: f"{OF_GROUPS}, in 3 of 3 runs",
    over_a_constant: "sum over the tokens, over a constant, of the whole step, in 3 of 3 runs",
    with_padding: "mean over all positions, padding included, of the whole step, in 3 of 3 runs",
    without_the_last: f"{OF_TOKENS}: with 2 {GET} 0 to 1 {THAN}; with 4 {GET} 0 to 1 {THAN}; "
    "with 2 micro-batches, micro-batch 1 (from 0) has no gradient; "
    "with 4 micro-batches, micro-batch 3 (from 0) has no gradient",
    with_the_last_alone: f"{OF_TOKENS}: with 2 {GET} 0 to 1 {THAN}; with 4 {GET} 0 to 1 {THAN}; "
    "with 2 micro-batches, micro-batch 0 (from 0) has no gradient; "
    "with 4 micro-batches, micro-batch 0, 1, 2 (from 0) has no gradient",
    with_the_first_twice: f"{OF_TOKENS}: with 2 {GET} 1 to 2 {THAN}; with 4 {GET} 1 to 2 {THAN}; "
    "with 4 micro-batches, micro-batch 0 (from 0) counts 2 times",
    twice_for_any_cut: f"sum over the tokens, over a constant, of the whole step: with 2 {GET} 2 {THAN}; "
    f"with 4 {GET} 2 {THAN}",
    with_a_shifted_mask: "the loss mask is shifted: each token has the weight of the token after it, "
    "in 3 of 3 runs",
    with_a_mask_that_is_late: "the loss mask is shifted: each token has the weight of the token before it, "
    "in 3 of 3 runs",
    with_a_late_mask_and_some_prompts: "6 tokens outside the loss mask and padding have a weight, "
    "in 3 of 3 runs",
    with_prompts: "12 tokens outside the loss mask have a weight, in 3 of 3 runs",
    with_the_neighbours_advantage: "each row has the advantage of the row before it, in 3 of 3 runs",
    more_in_a_group: f"no known mean (the nearest, the {OF_TOKENS}, differs by 0.5), in 3 of 3 runs",
    rounded_in_a_group: f"no known mean (the nearest, the {OF_TOKENS}, differs by 0.01; "
    "a loss in bfloat16 rounds as much), in 3 of 3 runs",
}


@pytest.mark.parametrize("step", VERDICTS)
def test_a_known_training_step_is_named(step):
    """Tokens of tools and padding on the left change only numbers, and padding trains with prompts."""
    assert xray(step).verdict == VERDICTS[step]
    found = xray(step, holes=True, pad=("left",)).verdict.replace(", padding on the left", "")
    texts = [re.sub(r"[\d.]+", "0", each.replace(" and padding", "")) for each in (found, VERDICTS[step])]
    assert texts[0] == texts[1]


def test_a_run_is_described_by_all_that_differs_from_one_micro_batch_with_padding_on_the_right():
    run = xray(mean_of_step, cuts=(1,)).runs[0]
    assert run.where == "1 micro-batch"
    changed = replace(run, cut=2, ranks=2, pad="left", shift=-0.25)
    assert changed.where == (
        "2 micro-batches, 2 ranks, padding on the left, old log-probabilities shifted by -0.25"
    )
    assert replace(run, pad=None, ranks=3).where == "1 micro-batch, 3 ranks, ragged rows"


def test_a_mean_that_depends_on_micro_batches_is_measured_to_1e_9():
    found = xray(mean_of_micro_batches, cuts=(1, 4))
    run = found.runs[1]
    length = run.tokens.inside.sum(1).double()
    of_part = torch.zeros(4, dtype=torch.float64).index_add_(0, run.tokens.micro, length)[run.tokens.micro]
    expected = (1 / of_part / 4)[:, None] * run.advantage * run.tokens.inside
    assert torch.allclose(run.coefficient, expected, rtol=1e-9, atol=1e-15)
    with pytest.raises(AssertionError, match="of each micro-batch"):
        found.assert_uniform()
    xray(mean_of_step).assert_uniform(1e-9)


@pytest.mark.slow
def test_averaged_and_summed_gradients_of_unequal_ranks_are_a_mean_per_rank():
    """The sum over two ranks is twice their average. With several ranks, a single one has a process, too."""
    found = xray(mean_of_step, ranks=(1, 2), cuts=(2,))
    assert "mean over the tokens of each rank: with 2 micro-batches, 2 ranks" in found.verdict
    (alone, last), summed = found.runs, xray(mean_of_step, ranks=(2,), cuts=(1,), gradients="sum").runs[0]
    for run, ranks in ((alone, 1), (last, 2), (summed, 2)):
        length = run.tokens.inside.sum(1).double()
        of_rank = torch.zeros(2, dtype=torch.float64).index_add_(0, run.tokens.rank, length)
        weight = 1 / of_rank[run.tokens.rank] / (1 if run is summed else ranks)
        expected = weight[:, None] * run.advantage * run.tokens.inside
        assert torch.allclose(run.coefficient, expected, rtol=1e-9, atol=1e-15)
        assert run.ranks == ranks
    with pytest.raises(ValueError, match=r"^the step failed on a rank; its error is on stderr, above$"):
        xray(lambda model, batch, cut: batch["no such"], ranks=(2,), cuts=(1,))


# -- steps that a table cannot measure ----------------------------------------------------------------------


def small() -> tuple[TokenTable, TensorDictBase]:
    batch = xray_batch([2, 3, 1, 4], [0.0, 1.0, 1.0, 0.0], group_size=2, prompts=2, holes=True)
    batch["advantage"] = torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=torch.float64)[:, None, None]
    return TokenTable.of(batch), batch


def test_the_coefficient_is_exact_at_any_logits_in_any_dtype():
    for seed, dtype, close in (
        (None, torch.float64, 1e-12),
        (3, torch.float64, 1e-9),
        (None, torch.float32, 1e-5),
    ):
        _, batch = small()
        model = TokenTable.of(batch, dtype, seed=seed)
        weight = torch.rand(batch[FULL].shape, dtype=dtype) + 0.5
        (-(weight * model.get_dist(batch).log_prob(batch[FULL]))[batch[LOSS]].sum()).backward()
        expected = torch.where(batch[LOSS], weight.double(), 0.0)
        assert torch.allclose(token_weights(model, batch), expected, rtol=close, atol=close)


@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_a_batch_may_have_each_pair_of_tokens_once(tokens):
    """A walk over all pairs of n tokens has n² tokens. The vocabulary has two more, which are in no pair."""
    batch = xray_batch([tokens**2 - 1], [0.0], 1, prompts=1)
    walk = batch[FULL][0].tolist()
    assert len({*pairwise(walk)}) == len(walk) - 1 == tokens**2 - 1
    assert TokenTable.of(batch).vocabulary == tokens + 2
    for more in (0, 1):
        least, length = tokens + 2 + more, tokens**2 - 1 + more
        says = f"{length + 1} tokens with unique pairs need a vocabulary of at least {least}; got {least - 1}"
        with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
            xray_batch([length], [0.0], 1, prompts=1, vocabulary=least - 1)


def test_the_columns_of_a_batch_equal_those_by_hand():
    """The first of four rollouts has two rows. With holes, every third token of a response is masked."""
    rewards = [[0.5, 2.0], [1.0, -1.0], [0.0, 0.0], [3.0, 4.0]]
    options = {"prompts": [1, 2, 1, 1, 1], "segments": [2, 1, 1, 1], "holes": True}
    made = {
        pad: xray_batch([2, 1, 3, 1, 1], rewards, 2, pad=pad, old_log_prob_shift=0.25, **options)
        for pad in ("right", "left", None)
    }
    tokens = [[0, 0, 1], [0, 2, 0], [3, 1, 1, 2], [1, 3], [2, 2]]  # of six; 4 is padding, and 5 is not used
    inside = [[0, 1, 1], [0, 0, 1], [0, 1, 1, 0], [0, 1], [0, 1]]
    for pad, batch in made.items():
        for row, (own, trains) in enumerate(zip(tokens, inside, strict=True)):
            score = [0.25 - math.log(6) - (not each) for each in trains]
            columns = {FULL: (own, 4), LOSS: (trains, 0), ("log_probs", "full"): (score, 0.0)}
            columns["masks", "all_attention_mask"] = ([1] * len(own), 0)
            for key, (values, fill) in columns.items():
                filler = [fill] * (0 if pad is None else 4 - len(own))
                filled = filler + values if pad == "left" else values + filler
                assert batch[row][key].tolist() == filled, (pad, row, key)
        units = {"group_id": [0, 0, 0, 1, 1], "rollout_id": [0, 0, 1, 2, 3], "expected_rollouts": [2] * 5}
        for key, values in units.items():
            assert batch[key].tolist() == [[each] for each in values]
        assert batch["next", "done"].tolist() == [[False], [True], [True], [True], [True]]
        assert batch["next", "reward"].tolist() == [rewards[0], *rewards]
    floats = [made["left"][key].dtype for key in (("next", "reward"), ("log_probs", "full"))]
    assert floats == [torch.float64] * 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"lengths": [1, 1, 1]},
            "lengths must have one number for each row: 2 rewards and segments=1 make 2 rows; got 3. The "
            "number of rewards must be a multiple of group_size=2",
        ),
        (
            {"group_size": 3, "segments": [1, 1]},
            "lengths must have one number for each row: 2 rewards and segments=[1, 1] make 2 rows; got 2. "
            "The number of rewards must be a multiple of group_size=3",
        ),
        (
            {"lengths": [1]},
            "lengths must have one number for each row: 2 rewards and segments=1 make 2 rows; got 1. The "
            "number of rewards must be a multiple of group_size=2",
        ),
        ({"prompts": 0}, "prompts must be a number ≥ 1, or 2 of them; got 0"),
        ({"prompts": [1, 2, 3]}, "prompts must be a number ≥ 1, or 2 of them; got [1, 2, 3]"),
        ({"segments": [1, 0]}, "segments must be a number ≥ 1, or 2 of them; got [1, 0]"),
    ],
)
def test_a_batch_of_unequal_numbers_of_rows_is_refused(options, says):
    given = {"lengths": [1, 1], "rewards": [0.0, 1.0], "group_size": 2} | options
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        xray_batch(**given)


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (lambda model, batch: None, ValueError, "the table has no gradient"),
        (lambda model, batch: (terms(model, batch).sum() * 0).backward(), ValueError, "0 everywhere"),
        (lambda model, batch: (terms(model, batch).sum() * torch.nan).backward(), ValueError, "not finite"),
        (lambda model, batch: with_a_shifted_mask(model, batch, 1), BatchError, "mask is shifted by one"),
        (lambda model, batch: model.table[-1, 0].backward(), BatchError, "no token explains"),
    ],
)
def test_a_step_without_token_gradients_is_refused(spoil, error, says):
    model, batch = small()
    spoil(model, batch)
    with pytest.raises(error, match=says):
        token_weights(model, batch)


def test_repeated_pairs_and_models_without_a_table_are_refused():
    model, batch = small()
    mean_of_step(model, batch, 1)
    again = batch.clone().set(FULL, batch[FULL][:1].expand_as(batch[FULL]).clone())
    with pytest.raises(BatchError, match=r"each pair of tokens must occur once.*found \d+ then \d+") as said:
        token_weights(model, again)
    pairs = [*pairwise(batch[FULL][0].tolist())]
    for first, second in re.findall(r"(\d+) then (\d+)", str(said.value)):
        assert (int(first), int(second)) in pairs
    with pytest.raises(ValueError, match=r"vocabulary must be ≥ 3, .*; got 2"):
        TokenTable(2)
    assert TokenTable(3).vocabulary == 3
    with pytest.raises(ValueError, match="must contain one TokenTable; found 0"):
        token_weights(torch.nn.Linear(2, 2), batch)
    shaky = torch.nn.Sequential(model, torch.nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"has dropout.*model.eval\(\)"):
        token_weights(shaky, batch)
    assert torch.equal(token_weights(shaky.eval(), batch), token_weights(model, batch))
    other = batch.clone()
    other[FULL][0, 1] = (padding := model.vocabulary - 2)
    said = (
        f"^each pair of tokens must occur once, and tokens {padding} and {padding + 1} never, as in "
        rf"xray_batch\(\); found token {padding}$"
    )
    with pytest.raises(BatchError, match=said):
        token_weights(model, other)
    first = batch.clone().set(LOSS, torch.ones_like(batch[LOSS]))
    with pytest.raises(
        BatchError, match=r"^the first token of a row must not be in the loss mask, because it"
    ):
        token_weights(model, first)


def test_an_unexplained_part_of_a_gradient_is_named_by_its_tokens():
    """No token follows the last token of the vocabulary. The others share an entry at it."""
    model, batch = small()
    size = model.vocabulary
    (7 * model.table[size - 1, 0] + 0.5 * model.table[3, size - 1]).backward()
    largest = (
        f"^the gradient has parts that no token explains, after 2 of {size} tokens: the largest is -7, for "
        f"token 0 after token {size - 1}; tokens of the batch have up to 0.5. Causes may be "
    )
    with pytest.raises(BatchError, match=largest):
        token_weights(model, batch)
    every = batch.clone().set(LOSS, torch.ones_like(batch[LOSS]))
    log_probs = model.get_dist(every).log_prob(batch[FULL])
    for place, said in (
        ((2, 1), "token 1 of row 2 is outside the mask and has a coefficient of 5"),  # of two in the prompt
        ((2, 4), "padding has coefficients of up to 5"),  # behind two of the prompt and one of the response
    ):
        model.table.grad = None
        (-5 * log_probs[place]).backward(retain_graph=True)
        with pytest.raises(BatchError, match=f"no token in the loss mask explains: {said}. Check whether"):
            token_weights(model, batch)


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.bfloat16, 0.05)]
)
def test_weights_are_equal_up_to_the_rounding_of_the_dtype(dtype, close):
    found = xray(mean_of_step, dtype=dtype, cuts=(1, 2))
    assert found.close == close
    found.assert_uniform()
    if dtype != torch.float64:
        with pytest.raises(AssertionError):
            found.assert_uniform(1e-12)


def test_ragged_rows_have_the_weights_of_padded_rows():
    def step(model, batch, cut):
        padded = {key: batch.get(key, as_padded_tensor=True, padding_value=0) for key in (FULL, LOSS)}
        mean_of_step(model, TensorDict(padded | {"advantage": batch["advantage"]}, [len(batch)]), cut)

    found = xray(step, pad=("right", None), cuts=(1, 2))
    assert found.verdict == f"{OF_TOKENS}, in 4 of 4 runs"
    assert found.runs[-1].where == "2 micro-batches, ragged rows"


def test_one_of_two_micro_batches_is_not_said_to_be_the_odd_one():
    for weights, found in (([1.0, 2.0], None), ([1.0, 2.0, 1.0], (1, 2.0)), ([1.0, 2.0, 3.0], None)):
        rows = torch.arange(len(weights))
        inside = torch.ones(len(rows), 2, dtype=torch.bool)
        tokens = StepTokens(inside, rows, rows, rows, torch.zeros_like(rows))
        assert odd_part(torch.tensor(weights).double()[:, None].expand(-1, 2), tokens) == found


def test_a_micro_batch_may_be_one_row_and_the_table_has_the_least_weight_first():
    xray(mean_of_step, cuts=(1, 12)).assert_uniform()
    found = xray(mean_of_micro_batches, cuts=(1, 2))
    low, high = found.spread["2 micro-batches"]
    assert low < 1 < high
    assert re.search(rf"{low:.6g}\b.*{high:.6g}\b", found._repr_html_(), re.DOTALL)


# -- clipping -----------------------------------------------------------------------------------------------

RATIOS = [math.exp(-shift) for shift in (-1.0, -0.3, -0.15, 0.0, 0.15, 0.3, 1.0)]


def of_torchrl(kind, **options):
    def step(model, batch, cut):
        from torchrl.objectives import llm

        loss = getattr(llm, kind)(
            model, masking_strategy="generic", entropy_bonus=False, aggregation="none", **options
        )
        loss(batch).loss_objective.sum().backward()

    return step


def by_ratio(coefficient):
    """A loss by hand. Its `coefficient` follows from ratio and advantage, and has no gradient."""

    def step(model, batch, cut):
        log_probs = model.get_dist(batch).log_prob(batch[FULL])
        ratio = (log_probs - batch["log_probs", "full"]).exp().detach()
        weight = coefficient(ratio, batch["advantage"].squeeze(-1).expand_as(ratio), batch[LOSS])
        (-(weight * terms(model, batch)).sum()).backward()

    return step


def clipped(low: float, high: float):
    return lambda ratio, up: ratio if (ratio < 1 + high if up else ratio > 1 - low) else 0.0


def gspo(ratio, advantage, mask):
    """The ratio of the whole row, clipped at 0.2 (arXiv:2507.18071)."""
    of_row = ((ratio.log() * mask).sum(1) / mask.sum(1)).exp()[:, None]
    inside = torch.where(advantage > 0, of_row < 1.2, of_row > 0.8)
    return of_row * inside


CURVES = {
    "GRPO": (of_torchrl("GRPOLoss", clip_epsilon=0.2), clipped(0.2, 0.2)),
    "clip higher": (of_torchrl("GRPOLoss", clip_epsilon=(0.2, 0.28)), clipped(0.2, 0.28)),
    "CISPO": (by_ratio(lambda r, a, m: r.clamp(0.8, 1.28)), lambda r, up: min(max(r, 0.8), 1.28)),
    # TorchRL's gradient is 0 where the ratio is clipped. The paper's (arXiv:2506.13585) is not 0 there.
    "TorchRL's CISPO": (
        of_torchrl("CISPOLoss", clip_epsilon=(0.2, 0.28)),
        lambda r, up: r if 0.8 < r < 1.28 else 0.0,
    ),
    "GSPO": (by_ratio(gspo), clipped(0.2, 0.2)),
    "truncated weights": (by_ratio(lambda r, a, m: r.clamp(max=2.0)), lambda r, up: min(r, 2.0)),
    "no ratio": (by_ratio(lambda r, a, m: torch.ones_like(r)), lambda r, up: 1.0),
}
OF_TORCHRL = ("GRPO", "clip higher", "TorchRL's CISPO")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.torchrl if name in OF_TORCHRL else ()) for name in CURVES]
)
def test_the_curve_of_a_loss_equals_its_formula(name):
    step, formula = CURVES[name]
    curve = xray(step, cuts=(1,), shifts=[-math.log(ratio) for ratio in RATIOS]).curve()
    assert list(curve) == pytest.approx(sorted(RATIOS))
    for ratio, (up, down) in curve.items():
        assert up == pytest.approx(formula(ratio, True), rel=1e-9, abs=1e-12), ratio
        assert down == pytest.approx(formula(ratio, False), rel=1e-9, abs=1e-12), ratio


def test_a_ratio_at_which_all_tokens_are_clipped_does_not_depend_on_micro_batches():
    near = by_ratio(lambda ratio, advantage, mask: ratio * (ratio < 2))
    found = xray(near, cuts=(1, 2), shifts=(0.0, -1.0))
    found.assert_uniform()
    assert found.spread["2 micro-batches, old log-probabilities shifted by -1"] == (1.0, 1.0)
    assert found.curve() == {1.0: (1.0, 1.0), math.e: (0.0, 0.0)}


# -- a pipeline that declares other weights -----------------------------------------------------------------


def through(pipeline):
    def step(model, batch, cut):
        def loss(part):
            return TensorDict({"loss_objective": -terms(model, part)})

        optimise(pipeline.minibatches(batch), loss, torch.optim.SGD(model.parameters(), lr=0.0))

    return step


def test_weights_of_another_recipe_and_untrained_rows_are_detected():
    whole = "pipeline.stages.split.minibatches=1"
    says, does = load_pipeline("grpo", whole), load_pipeline("dr_grpo", whole)
    found = xray(through(does), says, cuts=(1,))
    assert re.search("with 1 micro-batch, tokens get .* times the weight of the pipeline", found.verdict)
    some = "pipeline.stages.filter.criterion"
    fewer = load_pipeline(
        "grpo",
        whole,
        f"criterion@{some}=length_within",
        f"{some}.high=6",
        "pipeline.stages.filter.unit=sample",
    )
    found = xray(through(load_pipeline("grpo", whole)), fewer, cuts=(1,))
    assert found.spread["1 micro-batch"][1] == math.inf
    for wrong, words in (
        (xray(through(does), says), "times the weight of the pipeline"),
        (found, "^34 tokens have a weight, although the pipeline gives them none, in 1 of 1 runs"),
    ):
        with pytest.raises(AssertionError, match=words):
            wrong.assert_uniform()


def with_the_next_advantage(model, batch, cut):
    mean_of_step(model, batch.clone().set("advantage", batch["advantage"].roll(-1, 0)), cut)


def with_half_of_the_last(model, batch, cut):
    for number, part in enumerate(batch.chunk(cut)):
        share = 0.5 if 0 < number == cut - 1 else 1.0
        (-share * terms(model, part).sum() / batch[LOSS].sum()).backward()


FAULTS = {
    with_the_neighbours_advantage: "^each row has the advantage of the row before it, in 3 of 3 runs",
    with_the_next_advantage: "^each row has the advantage of the row after it, in 3 of 3 runs",
    up_the_loss: "^the step increases the loss: each weight is negative, in 3 of 3 runs",
    without_the_last: r"with 4 micro-batches, micro-batch 3 \(from 0\) has no gradient",
    with_the_first_twice: r"with 4 micro-batches, micro-batch 0 \(from 0\) counts 2 times",
    with_half_of_the_last: r"with 4 micro-batches, micro-batch 3 \(from 0\) counts 0.5 times",
    with_a_shifted_mask: "^the loss mask is shifted: each token has the weight of the token after it",
    with_a_bonus: "^14 tokens without an advantage have a weight",
    with_prompts: "^10 tokens outside the loss mask have a weight",
}


@pytest.mark.parametrize("step", FAULTS)
def test_a_fault_is_named_with_and_without_a_pipeline(step):
    """Two of twelve rows, with 14 tokens, have the advantage 0. Each row has a prompt of one token."""
    pipeline = load_pipeline("grpo", "pipeline.stages.split.minibatches=1", loss_unit="token")
    rewards = (1.0, 0.0, 0.25, 0.5, 0.0, 1.0, 0.75, 0.1, 0.2, 0.6, 0.4, 0.4)
    xray(mean_of_step, pipeline, rewards=rewards).assert_uniform()
    for says in (None, pipeline):
        found = xray(step, says, rewards=rewards)
        assert re.search(FAULTS[step], found.verdict), found.verdict
        with pytest.raises(AssertionError, match=FAULTS[step]):
            found.assert_uniform()


EQUAL_IN_THE_LAST = (1.0, 0.0, 0.25, 0.5, 0.0, 1.0, 0.75, 0.1, 0.4, 0.4, 0.4, 0.4)


def test_a_micro_batch_without_an_advantage_hides_no_fault_of_another_micro_batch():
    """The last of four micro-batches of three rows has only equal rewards."""
    pipeline = load_pipeline("grpo", "pipeline.stages.split.minibatches=1")
    for says in (None, pipeline):
        found = xray(with_the_first_twice, says, rewards=EQUAL_IN_THE_LAST, cuts=(1, 4))
        assert re.search(r"micro-batch 0 \(from 0\) counts 2 times", found.verdict), found.verdict


@pytest.mark.parametrize("shift", [1, -1], ids=["last", "first"])
@pytest.mark.parametrize("unit", ["token", "sample"])
def test_tokens_without_weight_in_the_pipeline_are_not_a_shifted_mask(unit, shift):
    """A token filter or an advantage of 0 removes the last or the first token of each response."""

    def others(batch):
        mask = batch[LOSS]
        return mask & torch.nn.functional.pad(mask, (1, 1))[:, 1 + shift :][:, : mask.shape[1]]

    for stage in (
        TokenFilter(criterion=others),
        TokenFilter(criterion=others, denominator="all"),
        TokenAdvantage(term=lambda batch, tokens: others(batch).double(), how="multiply"),
    ):
        options = {"stages": {"mine": stage}, "after": {"mine": "advantage"}, "loss_unit": unit}
        pipeline = load_pipeline("grpo", "pipeline.stages.split.minibatches=1", **options)
        found = xray(through(pipeline), pipeline, cuts=(1,))
        assert found.verdict == "the weights of the pipeline, in 1 of 1 runs"
        found.assert_uniform()
        if unit == "token":
            late = xray(with_a_shifted_mask, pipeline, cuts=(1,))
            with pytest.raises(AssertionError):
                late.assert_uniform()


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (lambda part, cut: -1.0, "the step increases the loss: each weight is negative, in 2 of 2 runs"),
        (
            lambda part, cut: 1.0 + (part == 1 < cut),
            f"not {OF_RECIPE}: with 4 {GET} 1 to 2 times the weight of the pipeline; "
            "with 4 micro-batches, micro-batch 1 (from 0) counts 2 times",
        ),
        (
            lambda part, cut: float(not part == 1 < cut),
            f"not {OF_RECIPE}: with 4 {GET} 0 to 1 times the weight of the pipeline; "
            "with 4 micro-batches, micro-batch 1 (from 0) has no gradient",
        ),
        (lambda part, cut: 1.0, f"{OF_RECIPE}, in 2 of 2 runs"),
    ],
)
def test_a_fault_is_named_although_the_pipeline_leaves_tokens_out(factor, says):
    """A token filter leaves out the second token of each response."""
    others = TokenFilter(criterion=lambda batch: batch[LOSS] & (batch[LOSS].cumsum(1) != 2))
    options = {"stages": {"mine": others}, "after": {"mine": "advantage"}}
    pipeline = load_pipeline("grpo", "pipeline.stages.split.minibatches=1", **options)

    def step(model, batch, cut):
        parts = zip(batch.chunk(cut), declared(pipeline, batch).coefficient.chunk(cut), strict=True)
        for number, (part, coefficient) in enumerate(parts):
            log_probs = model.get_dist(part).log_prob(part[FULL])
            (-factor(number, cut) * coefficient * log_probs).sum().backward()

    assert xray(step, pipeline, cuts=(1, 4)).verdict == says


def with_turns_inside_rows(batch: TensorDictBase) -> None:
    """Add turns of two tokens, which are numbered within each row."""
    place = batch[LOSS].cumsum(1) - 1
    row = torch.arange(len(batch))[:, None]  # so that no two rows share the number of a turn
    batch["turn_index"] = torch.where(batch[LOSS], place // 2 + 100 * row, -1)


def mean_of_turns(model, batch, cut):
    """A loop in which all turns have equal weights, and all tokens of a turn."""
    turns = batch["turn_index"]
    numbers = [turn for turn in turns.unique().tolist() if turn >= 0]
    for part in batch.chunk(cut):
        for turn in part["turn_index"].unique().tolist():
            if turn >= 0:
                mine = terms(model, part)[part["turn_index"] == turn]
                (-mine.sum() / (turns == turn).sum() / len(numbers)).backward()


def test_a_mean_over_turns_inside_rows_is_uniform_and_a_mean_over_tokens_is_not():
    """The last turn of a row may have one token, which has twice the weight of others."""
    words = "pipeline.stages.split.minibatches=1", "pipeline.stages.weight.turn_index_key=turn_index"
    pipeline = load_pipeline("grpo", *words, loss_unit="turn")
    options = {"cuts": (1, 3), "prepare": with_turns_inside_rows, "pad": ("right", "left")}
    xray(mean_of_turns, pipeline, **options).assert_uniform()
    with pytest.raises(AssertionError, match="times the weight of the pipeline"):
        xray(mean_of_step, pipeline, **options).assert_uniform()


def whitened_in_place(model, batch, cut):
    batch["advantage"].sub_(0.1)
    mean_of_step(model, batch, cut)


def whitened_by_part(model, batch, cut):
    parts = [part - part.mean() for part in batch["advantage"].chunk(cut)]
    batch["advantage"] = torch.cat(parts)
    mean_of_step(model, batch, cut)


def masked_by_cut(model, batch, cut):
    if cut > 1:
        batch[LOSS] = batch[LOSS] & (torch.arange(len(batch)) > 0)[:, None]
    mean_of_step(model, batch, cut)


def without_the_first_tokens(model, batch, cut):
    first = (batch[LOSS].cumsum(1) == 1) & batch[LOSS]
    (-terms(model, batch)[~first].sum() / 60).backward()


def over_shifted_logits(model, batch, cut):
    for part in batch.chunk(cut):
        (-terms(model, part)[:, 1:].mean() / cut).backward()


def clipped_by_cut(model, batch, cut):
    log_probs = model.get_dist(batch).log_prob(batch[FULL])
    ratio = (log_probs - batch["log_probs", "full"]).exp()
    trains = torch.where(batch[LOSS], ratio.clamp(max=1 + 0.5 * cut) * batch["advantage"].squeeze(-1), 0.0)
    (-trains.sum() / batch[LOSS].sum()).backward()


@pytest.mark.parametrize(
    ("step", "options", "says"),
    [
        (whitened_by_part, {}, r"with 2 micro-batches.*the step's own advantages differ from those with 1"),
        (masked_by_cut, {}, r"63 tokens are in the loss, and with 1 micro-batch 66 are"),
        (without_the_first_tokens, {}, r"^the first token of each response has no weight"),
        (over_shifted_logits, {}, r"mean over all positions but one of each row, padding included"),
        (
            clipped_by_cut,
            {"shifts": (0.0, -0.5)},
            r"with 4 micro-batches, old .* shifted by -0.5, tokens get",
        ),
    ],
)
def test_no_wrong_step_is_called_uniform(step, options, says):
    with pytest.raises(AssertionError, match=says):
        xray(step, **options).assert_uniform()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cuts": ()}, "cuts must be a list of distinct values"),
        ({"cuts": (2, 2)}, "cuts must be a list of distinct values"),
        ({"pad": "left"}, r"pad must be a list \(each one of .*got 'left'"),
        ({"ranks": (1, 4)}, r"each rank needs a group.*3 groups and 12 rows"),
        ({"cuts": (13,)}, "each micro-batch a row"),
    ],
)
def test_invalid_options_of_an_xray_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        xray(mean_of_step, **options)


def test_a_pipeline_without_weights_and_a_step_that_changes_the_table_are_refused():
    with pytest.raises(ValueError, match=r"writes no loss weights \(loss_weight\).*Add LossWeight"):
        xray(mean_of_step, load_pipeline("grpo", "pipeline.stages.weight=null"))

    def moves(model, batch, cut):
        mean_of_step(model, batch, cut)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    with pytest.raises(ValueError, match=r"has changed 'advantage' of the batch in place.*Change a clone"):
        xray(whitened_in_place)
    reorders = Pipeline(
        {"weight": LossWeight(), "mine": lambda batch: batch.set(FULL, batch[FULL].roll(1, 1))}
    )
    with pytest.raises(ValueError, match=r"^the pipeline changes the rows"):
        xray(mean_of_step, reorders)
    with pytest.raises(ValueError, match=r"has changed the table: remove optimizer.step\(\)"):
        xray(moves)


# -- terms that pull towards another policy -----------------------------------------------------------------


def kl_to(model, reference, batch):
    """(N, T) the KL divergence over the vocabulary at each token."""
    policy = model.get_dist(batch).logits.log_softmax(-1)
    other = reference.get_dist(batch).logits.log_softmax(-1).detach()
    return (policy.exp() * (policy - other)).sum(-1)


@pytest.mark.parametrize(("seed", "other"), [(None, 1), (2, None), (None, None)])
def test_a_term_that_pulls_towards_another_policy_is_refused_or_measured_separately(seed, other):
    """An entropy bonus pulls towards the uniform policy. At equal logits it has no gradient."""
    _, batch = small()
    model, reference = (TokenTable.of(batch, seed=each) for each in (seed, other))
    mean_of_step(model, batch, 1)
    alone, term = token_weights(model, batch), kl_to(model, reference, batch)
    if other is None:
        policy = model.get_dist(batch).logits.log_softmax(-1)
        term = (policy.exp() * policy).sum(-1)
    (0.3 * term[batch[LOSS]].sum()).backward()
    if seed == other:
        assert torch.allclose(token_weights(model, batch), alone, atol=1e-12)
    else:
        with pytest.raises(BatchError, match=r"no token explains.*give its policy as reference="):
            token_weights(model, batch)
    assert torch.allclose(token_weights(model, batch, reference=reference), alone, rtol=1e-9, atol=1e-12)
    before = batch[FULL].roll(1, 1)[batch[LOSS]]
    expected = 0.3 * (seed != other) * torch.bincount(before, minlength=model.vocabulary).double()
    assert torch.allclose(kl_weights(model, batch, reference), expected, atol=1e-9)
