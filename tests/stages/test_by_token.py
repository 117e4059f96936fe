"""Token terms equal their formulas, computed in loops over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from alone import said_by
from batches import batch_of
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import lazy_stack

from headrace.transforms import (
    BatchError,
    DirectedWeight,
    EntropyShare,
    LogRatio,
    OptimalTokenBaseline,
    StalenessWeight,
    TokenAdvantage,
    TokenTerm,
    TopShare,
    share_at_place,
    top_share,
)

MASK, LOG_PROBS = ("masks", "all_assistant_mask"), ("log_probs", "full")
TEACHER, ENTROPY = ("teacher_log_probs", "full"), ("entropy", "full")
SQUARES = ("sum_pi_squared", "full")
TERMS = {
    "teacher": lambda: {"term": LogRatio(), "factor": 0.3},
    "centred": lambda: {"term": LogRatio(centre="batch"), "factor": -0.2},
    "directed": lambda: {"term": DirectedWeight(clip=0.1), "factor": 0.5, "how": "multiply"},
    "entropy": lambda: {"term": TopShare(share=0.3), "how": "multiply"},
    "share": lambda: {"term": EntropyShare(), "factor": 0.4, "how": "multiply"},
    "otb": lambda: {"term": OptimalTokenBaseline(), "factor": 0.5},
    "stale": lambda: {
        "term": StalenessWeight(current=9, decay=0.5, version_key="version"),
        "how": "multiply",
    },
}
every = pytest.mark.parametrize("name", TERMS)


@pytest.fixture
def batch():
    return drawn_batch()


def drawn_batch(rows=6, tokens=7):
    batch = batch_of([0.0] * rows, [row % 2 for row in range(rows)], tokens=tokens)
    batch["advantage"] = torch.linspace(-2, 2, rows).view(rows, 1, 1)
    batch["version"] = torch.arange(rows * tokens).view(rows, tokens) % 5 + 5
    return batch


def stated(batch, name) -> dict[tuple[int, int], float]:
    """The advantage of each (row, token) in the loss, by the equation in the docstring of the term."""
    mask = batch[MASK].tolist()
    places = [(n, t) for n, row in enumerate(mask) for t, trains in enumerate(row) if trains]
    credit = {n: float(batch["advantage"].flatten()[n]) for n in range(len(batch))}
    ratio = {place: float(batch[TEACHER][place]) - float(batch[LOG_PROBS][place]) for place in places}
    mean = sum(ratio.values()) / max(len(ratio), 1)
    entropy = sorted((float(batch[ENTROPY][place]) for place in places), reverse=True)
    number = max(round(0.3 * len(places)), 1)

    def share(place, sign):
        row, group = place[0], batch["group_id"].tolist()
        count = {p: sum(mask[p[0]][: p[1] + 1]) for p in places}
        same = [
            p
            for p in places
            if group[p[0]] == group[row] and count[p] == count[place] and credit[p[0]] * sign > 0
        ]
        known = {p: float(batch[ENTROPY][p]) ** sign for p in same}
        return len(same) * known[place] / sum(known.values()) if same else 1.0

    def energy(place):
        """Σ (1 − 2 π + Σ π²) over the tokens in the loss up to this one."""
        before = [(place[0], t) for t in range(place[1] + 1) if mask[place[0]][t]]
        return sum(
            1 - 2 * math.exp(float(batch[LOG_PROBS][one])) + float(batch[SQUARES][one]) for one in before
        )

    def optimal(place):
        group, count = batch["group_id"].tolist(), {p: sum(mask[p[0]][: p[1] + 1]) for p in places}
        same = [p for p in places if group[p[0]] == group[place[0]] and count[p] == count[place]]
        if len(same) == 1:
            return 0.0
        return sum(credit[p[0]] * energy(p) for p in same) / (sum(map(energy, same)) + 1e-8)

    def term(place):
        a, sign = credit[place[0]], (credit[place[0]] > 0) - (credit[place[0]] < 0)
        age = 9 - int(batch["version"][place]) if name == "stale" else 0
        weight = min(max(math.exp(sign * ratio[place]), 0.9), 1.1)
        return {
            "teacher": lambda: a + 0.3 * ratio[place],
            "centred": lambda: a + 0.2 * (mean - ratio[place]),
            "directed": lambda: a * (0.5 + 0.5 * weight),
            "entropy": lambda: a if float(batch[ENTROPY][place]) >= entropy[number - 1] else 0.0,
            "share": lambda: a * (0.6 + 0.4 * share(place, sign)),
            "otb": lambda: a - 0.5 * optimal(place),
            "stale": lambda: a * 0.5**age,
        }[name]()

    return {place: term(place) for place in places}


@every
@settings(max_examples=25)
@given(data=st.data())
def test_a_term_equals_its_formula_token_by_token(name, data):
    rows, tokens = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    batch = drawn_batch(rows, tokens)
    flat = data.draw(st.lists(st.booleans(), min_size=rows * tokens, max_size=rows * tokens))
    batch[MASK] = torch.tensor(flat).view(rows, tokens)
    said = said_by(TokenAdvantage(**TERMS[name]()), batch)
    out, known = said.batch["advantage"], stated(batch, name)
    assert out.shape == (rows, tokens, 1)
    for place, expected in known.items():
        assert float(out[place]) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    change = [abs(each - float(batch["advantage"][place[0]])) for place, each in known.items()]
    number = max(len(known), 1)
    assert said.metrics["abs_mean"] == pytest.approx(sum(change) / number, rel=1e-5, abs=1e-6)
    assert (
        said.metrics["changed"]
        == sum(float(out[place]) != batch["advantage"][place[0]] for place in known) / number
    )
    same = batch["advantage"].expand(rows, tokens, 1)
    assert torch.equal(out[~batch[MASK]], same[~batch[MASK]])


PI = [
    [0.5, 0.9, 0.2, 0.7, 0.6],
    [0.8, 0.4, 0.3, 0.6, 0.5],
    [0.1, 0.7, 0.9, 0.5, 0.2],
    [0.6, 0.6, 0.4, 0.3, 0.9],
]
SUMS = [
    [0.4, 0.85, 0.2, 0.55, 0.5],
    [0.7, 0.3, 0.25, 0.5, 0.4],
    [0.15, 0.6, 0.82, 0.45, 0.3],
    [0.5, 0.45, 0.3, 0.2, 0.83],
]
# For the rewards 1, 0, 0.5, 0.25 and responses of 5, 3, 2 and 4 tokens: the advantages that
# compute_optimal_token_baseline_advantage of verl/trainer/ppo/core_algos.py gives in float64. Computed by
# running verl-project/verl at 1dda039b9c (2026-08-22), with handle_zero_tail=True, its default.
OF_VERL = {
    (0, 0, 0, 0): [
        [0.45714286, 0.577272729, 0.573943663, 0.405737707, 1.0],
        [-0.54285714, -0.422727271, -0.426056337],
        [-0.04285714, 0.077272729],
        [-0.29285714, -0.172727271, -0.176056337, -0.344262293],
    ],
    (0, 0, 0, 1): [
        [0.396551728, 0.534090911, 0.500000002, 1.0, 1.0],
        [-0.603448272, -0.465909089, -0.499999998],
        [-0.103448272, 0.034090911],
        [0.25, 0.25, 0.25, 0.25],
    ],
}


@pytest.mark.parametrize("groups", OF_VERL)
@pytest.mark.parametrize("shift", [0, 2])
def test_the_optimal_token_baseline_is_that_of_verl(groups, shift):
    """With `shift`, prompts differ in length. Tokens before the response are not in the loss."""
    expected = OF_VERL[groups]
    batch = batch_of([1.0, 0.0, 0.5, 0.25], groups, tokens=5 + shift)
    batch["next", "reward"] = batch["next", "reward"].double()
    for key, values in ((LOG_PROBS, torch.tensor(PI).double().log()), (SQUARES, torch.tensor(SUMS).double())):
        batch[key] = torch.full((4, 5 + shift), 0.25, dtype=torch.float64)
        for row in range(4):
            batch[key][row, row % (shift + 1) :][:5] = values[row]
    batch[MASK][:] = False
    for row, own in enumerate(expected):
        batch[MASK][row, row % (shift + 1) :][: len(own)] = True
    out = composed("pipeline=otb", "pipeline.stages.gate=null").run(batch).batch  # permutes the rows
    found = out["advantage"].squeeze(-1)[out["rollout_id"].argsort()]
    for row, own in enumerate(expected):
        assert found[row][batch[MASK][row]].tolist() == pytest.approx(own, abs=1e-6)


def test_the_mean_of_a_term_is_measured_over_the_tokens_in_the_loss():
    """The log-ratios are 0.5, −2 and, out of the loss, 100. In half of the rows there is no token."""
    batch = drawn_batch(2, 3)
    batch[MASK] = torch.tensor([[True, True, False], [False] * 3])
    batch[LOG_PROBS], batch[TEACHER] = torch.zeros(2, 3), torch.tensor([[0.5, -2.0, 100], [7.0, 7, 7]])
    found = said_by(TokenAdvantage(term=LogRatio(), factor=0.5), batch).metrics
    assert found == {"term_mean": -0.75, "abs_mean": 0.625, "changed": 1.0}
    batch[TEACHER][0, 1] = 0.0
    assert said_by(TokenAdvantage(term=LogRatio(), factor=0.5), batch).metrics["changed"] == 0.5
    batch[MASK][:] = False
    assert set(said_by(TokenAdvantage(term=LogRatio()), batch).metrics.values()) == {0.0}


@every
def test_a_factor_of_0_changes_nothing(batch, name):
    out = TokenAdvantage(**TERMS[name]() | {"factor": 0.0})(batch)["advantage"]
    assert torch.equal(out, batch["advantage"].expand(6, 7, 1))


@pytest.mark.parametrize(
    ("name", "key"),
    [("teacher", TEACHER), ("centred", LOG_PROBS), ("directed", TEACHER), ("entropy", ENTROPY)],
)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_named(batch, name, key, wrong):
    batch[MASK][2, 4] = True
    batch[key][2, 4] = wrong
    found = f"must be finite for every token in the loss; found -?{wrong} at row 2, token 4"
    with pytest.raises(BatchError, match=found):
        TokenAdvantage(**TERMS[name]())(batch)


NEWER = "no token may be newer than the version that trains (current); found newer ones in row 3"
NEGATIVE = "entropies must be ≥ 0; found negative ones in row 3"
NOT_SQUARES = "sums of squared probabilities must be in [0, 1]; found others in row 3"


@pytest.mark.parametrize(
    ("name", "key", "taken", "refused", "said"),
    [
        ("stale", "version", [9], [10], NEWER),
        ("share", ENTROPY, [0], [-0.5], NEGATIVE),
        ("otb", SQUARES, [0, 1, 1.01], [1.02, -0.01], NOT_SQUARES),
    ],
)
def test_a_value_out_of_the_bounds_of_a_term_is_refused_with_its_row(batch, name, key, taken, refused, said):
    """Sums of squares may be rounded. Tokens out of the loss may have any value."""
    stage = TokenAdvantage(**TERMS[name]())
    batch[MASK][3, 1], batch[MASK][4, 2], batch[key][4, 2] = True, False, refused[0]
    for value in taken:
        batch[key][3, 1] = value
        stage(batch)
    for value in refused:
        batch[key][3, 1] = value
        with pytest.raises(BatchError) as caught:
            stage(batch)
        assert str(caught.value) == said


def test_tokens_are_compared_within_groups_whose_ids_may_be_texts(batch):
    stage, groups = TokenAdvantage(**TERMS["share"]()), [0, 1, 0, 1, 0, 1]
    batch["group_id"] = [f"group {number}" for number in groups]
    labelled = stage(batch)["advantage"]
    batch["group_id"] = torch.tensor(groups)
    assert torch.equal(stage(batch)["advantage"], labelled)
    batch["group_id"][2] = -1
    with pytest.raises(BatchError, match="group_id ≥ 0; found -1 at row 2"):
        stage(batch)


def test_versions_per_row_and_a_callable_version_are_accepted(batch):
    batch["version"] = torch.tensor([9, 8, 7, 6, 9, 8]).view(6, 1)
    term = StalenessWeight(current=lambda: 9, decay=0.5, version_key="version")
    out = TokenAdvantage(term=term, how="multiply")(batch)["advantage"]
    factors = torch.tensor([1, 0.5, 0.25, 0.125, 1, 0.5]).view(6, 1, 1)
    expected = torch.where(batch[MASK][..., None], batch["advantage"] * factors, batch["advantage"])
    assert torch.equal(out, expected)


def test_a_callable_factor_is_called_for_each_batch(batch):
    factors = iter([0.0, 0.3])
    stage = TokenAdvantage(term=LogRatio(), factor=lambda: next(factors))
    assert torch.equal(stage(batch)["advantage"], batch["advantage"].expand(6, 7, 1))
    assert torch.equal(stage(batch)["advantage"], TokenAdvantage(**TERMS["teacher"]())(batch)["advantage"])


def test_rows_without_a_reward_are_in_no_statistic_and_keep_their_advantage(batch):
    batch["headrace", "reward"] = torch.tensor([0.0, float("nan"), 0, 0, float("nan"), 0])
    rows = torch.tensor([0, 2, 3, 5])
    stage = TokenAdvantage(term=LogRatio(centre="batch"))
    assert torch.equal(stage(batch)["advantage"][rows], stage(batch[rows])["advantage"])
    assert torch.equal(stage(batch)["advantage"][1], batch["advantage"][1].expand(7, 1))


def test_an_entropy_of_0_counts_as_a_millionth():
    """Rows 0 and 1 are compared: 0 as 1e-6, with 3e-6. Row 2 is in another group."""
    values, ones = torch.tensor([[0.0], [3e-6], [0.0]], dtype=torch.float64), torch.ones(3, 1)
    group = torch.tensor([4, 4, 5])
    found = share_at_place(values, ones > 0, group, ones)
    assert found.flatten().tolist() == pytest.approx([0.5, 1.5, 1.0])
    found = share_at_place(values, ones > 0, group, -ones)
    assert found.flatten().tolist() == pytest.approx([1.5, 0.5, 1.0])


def test_tokens_with_equal_entropies_are_all_in_the_top_share(batch):
    batch[ENTROPY] = torch.ones(6, 7)
    assert torch.equal(top_share(batch[ENTROPY], batch[MASK], 0.2), batch[MASK])


def test_a_term_without_a_formula_is_refused(batch):
    class Empty(TokenTerm):
        pass

    with pytest.raises(NotImplementedError, match=r"^Empty must implement over or __call__$"):
        TokenAdvantage(term=Empty())(batch)


def of_turn(batch, trains):
    """A term that gives each token the reward of its turn, from a column (N, K)."""
    return batch["turn_reward"].gather(1, batch["turn_index"].clamp_min(0))


def test_a_term_may_add_the_reward_of_a_turn_to_its_tokens():
    batch = drawn_batch()
    batch["turn_index"] = torch.tensor([[-1, 0, 0, 1, -1, 2, 2]]).expand(6, 7).contiguous()
    batch["turn_reward"] = torch.arange(18.0).view(6, 3)
    batch[MASK] &= batch["turn_index"] >= 0
    out = TokenAdvantage(term=of_turn, factor=0.5)(batch)["advantage"]
    for row, turns in enumerate(batch["turn_index"].tolist()):
        for token, turn in enumerate(turns):
            added = 0.5 * (3 * row + turn) if batch[MASK][row, token] else 0.0
            assert float(out[row, token]) == pytest.approx(float(batch["advantage"][row]) + added)


@pytest.mark.parametrize(
    ("term", "found"),
    [
        (lambda batch, trains: batch["advantage"], r"\(6, 7\); .* gave \(6, 1, 1\)"),
        (lambda batch, trains: 1.0, "gave float"),
    ],
)
def test_a_term_of_another_shape_is_refused(batch, term, found):
    with pytest.raises(BatchError, match=found):
        TokenAdvantage(term=term)(batch)


def test_for_ragged_rows_a_term_must_declare_its_columns(batch):
    with pytest.raises(BatchError, match="needs in_keys, the columns that are padded"):
        TokenAdvantage(term=lambda batch, trains: trains)(lazy_stack(list(batch.unbind(0))))


def test_row_values_that_a_term_reads_must_be_finite(batch):
    batch["difficulty"] = torch.tensor([1.0, float("nan"), 3, 4, 5, 6])
    term = TopShare(share=0.5, value_key="difficulty")
    with pytest.raises(BatchError, match=r"'difficulty' must be finite for every token.*nan at row 1"):
        TokenAdvantage(term=term, how="multiply")(batch)


def test_a_column_of_another_shape_is_refused(batch):
    for width in (5, 8):
        batch[TEACHER] = torch.zeros(6, width)
        found = rf"one number per token in .*\(numerator_key\), \(6, 7\), .*; found \(6, {width}\)$"
        with pytest.raises(BatchError, match=found):
            TokenAdvantage(term=LogRatio())(batch)
    batch["advantage"] = torch.zeros(6, 3, 1)
    with pytest.raises(BatchError, match=r"'advantage' \(advantage_key\) torch.float32 \(6, 3, 1\)"):
        TokenAdvantage(term=TopShare(share=0.2))(batch)
