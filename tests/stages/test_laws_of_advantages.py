"""Laws of every stage that writes an advantage."""

from __future__ import annotations

import inspect
from functools import cache

import pytest
import torch
from batches import batch_of
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import MASK, OLD, SAMPLER
from recipes import of
from tensordict import TensorDictBase, lazy_stack

from headrace import transforms
from headrace.transforms import (
    GAE,
    BatchWhitening,
    CompletenessGate,
    DifficultyWeight,
    DirectedWeight,
    Diverged,
    EntropyShare,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LengthPenalty,
    LogRatio,
    LossWeight,
    OptimalTokenBaseline,
    RelativeLength,
    RewardsToGo,
    RolloutCorrection,
    RunningBaseline,
    SignFactors,
    StalenessWeight,
    StateAdvantage,
    TokenAdvantage,
    TokenFilter,
    TopShare,
    TreeAdvantage,
    TurnAdvantage,
    TurnDiscount,
    turn_advantage,
)
from headrace.transforms.table.schema import COUNTED, RETURN, REWARD, REWARDS, SEGMENTS

TEACHER, ENTROPY = ("teacher_log_probs", "full"), ("entropy", "full")
SQUARES = ("sum_pi_squared", "full")
TOKENS, REAL = ("tokens", "full"), ("masks", "all_attention_mask")
BY_TOKEN = (MASK, REAL, TOKENS, OLD, SAMPLER, TEACHER, ENTROPY, SQUARES)
BY_TOKEN += ("version", "turn_index", "turn_reward")
FLOATS = (OLD, SAMPLER, TEACHER, ENTROPY, SQUARES, "turn_reward", "advantage", REWARD, RETURN)
FLOATS += (("next", "reward"),)
FIRST = {
    "group": GroupRelativeAdvantage,
    "others": lambda: GroupRelativeAdvantage(baseline="leave_one_out", scale="none"),
    "median": lambda: GroupRelativeAdvantage(baseline="median", scale="mad", eps_mode="skip"),
    "batch": lambda: GroupRelativeAdvantage(baseline="batch", scale="batch"),
    "length": lambda: GroupRelativeAdvantage(baseline="length_weighted", scale="none"),
    "nonzero": lambda: GroupRelativeAdvantage(scale="nonzero"),
    "turns": lambda: TurnAdvantage(turn_rewards="token"),
    "rows as turns": lambda: TurnAdvantage(turn_index_key=None, rollout_key=None),
    "tree": TreeAdvantage,
    "tree against the others": lambda: TreeAdvantage(baseline="leave_one_out"),
}
SECOND = {  # these change an existing advantage
    "states": lambda: StateAdvantage(weight=1.0, state_key="role"),
    "whitening": BatchWhitening,
    "whitening by sample": lambda: BatchWhitening(per="sample"),
    "whitening by rollout": lambda: BatchWhitening(per="rollout"),
    "discount": lambda: TurnDiscount(discount=0.5),
    "signs": lambda: SignFactors(positive=0.5),
    "difficulty": lambda: DifficultyWeight(),
    "running": lambda: RunningBaseline(baseline_key="group_id"),
    "weight by token": lambda: RolloutCorrection(),
    "weight by row": lambda: RolloutCorrection(level="sequence", high=1e6),
    "weight by rollout": lambda: RolloutCorrection(level="mean", unit="rollout", bound="zero"),
    "ratio": lambda: TokenAdvantage(term=LogRatio(), factor=0.3),
    "centred ratio": lambda: TokenAdvantage(term=LogRatio(centre="batch"), factor=-0.2),
    "directed": lambda: TokenAdvantage(term=DirectedWeight(clip=0.1), factor=0.5, how="multiply"),
    "top": lambda: TokenAdvantage(term=TopShare(share=0.3), how="multiply"),
    "share": lambda: TokenAdvantage(term=EntropyShare(), factor=0.4, how="multiply"),
    "token baseline": lambda: TokenAdvantage(term=OptimalTokenBaseline(), factor=0.5),
    "stale": lambda: TokenAdvantage(
        term=StalenessWeight(current=9, decay=0.5, version_key="version"), how="multiply"
    ),
}
STAGES = FIRST | SECOND


def rows(dtype: torch.dtype = torch.float64) -> TensorDictBase:
    """Eight rollouts of one row, in three groups. With only two token ids, rows fork at any token."""
    size, tokens = 8, 6
    batch = batch_of([0, 1, 0.5, 0.25, 1, 0.75, 0, 0.5], [0, 0, 0, 5, 5, 5, 2, 2], tokens=tokens)
    places = torch.arange(size * tokens).view(size, tokens)
    batch[TOKENS], batch["version"] = batch[TOKENS] % 2, places % 5 + 5
    batch["turn_index"] = (torch.arange(tokens) // 3).repeat(size, 1)
    batch["turn_reward"] = (places % 7 / 8).double()
    batch[OLD] = batch[SAMPLER] + 0.3 * torch.sin(places.float())
    batch["advantage"] = torch.linspace(-2, 2, size).view(size, 1, 1)
    batch[REWARD] = batch[RETURN] = batch["next", "reward"].flatten()
    batch["expected_rollouts"] = torch.tensor([3, 3, 3, 3, 3, 3, 2, 2])
    for key in FLOATS:
        batch[key] = batch[key].to(dtype)
    return batch


def advantage_of(name: str, batch: TensorDictBase) -> torch.Tensor:
    return STAGES[name]()(batch)["advantage"]


@cache
def expected_of(name: str) -> torch.Tensor:
    """The advantages of :func:`rows`."""
    return advantage_of(name, rows())


@settings(max_examples=4)
@given(order=st.permutations(range(8)))
def test_permuting_rows_permutes_the_bits(order):
    batch = rows()
    for name in STAGES:
        with of(name):
            moved = advantage_of(name, batch[torch.tensor(order)])
            assert torch.equal(moved, expected_of(name)[order])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_bit(side):
    batch, wide = rows(), rows()
    for key in BY_TOKEN:
        fill = -1 if key == "turn_index" else 0
        wide[key] = torch.nn.functional.pad(batch[key], (4, 0) if side == "left" else (0, 4), value=fill)
    for name in STAGES:
        with of(name):
            found, expected = advantage_of(name, wide), expected_of(name)
            if expected.shape[1] > 1:
                found = found[:, 4:] if side == "left" else found[:, :-4]
            assert torch.equal(found, expected)


def test_ragged_rows_have_the_bits_of_dense_rows():
    lengths, batch = [1, 6, 3, 5, 2, 6, 4, 3], rows()
    ragged = [row.clone() for row in batch.unbind(0)]
    for row, length in zip(ragged, lengths, strict=True):
        for key in BY_TOKEN:
            row[key] = row[key][:length]
    there = torch.stack([torch.arange(6) < length for length in lengths])
    batch[MASK] &= there
    batch[REAL] &= there
    batch["turn_index"] = batch["turn_index"].masked_fill(~there, -1)
    batch["turn_reward"] = batch["turn_reward"].masked_fill(~there, 0)
    for name in STAGES:
        with of(name):
            found = STAGES[name]()(lazy_stack(ragged)).get("advantage", as_list=True)
            for own, row, length in zip(found, advantage_of(name, batch), lengths, strict=True):
                assert torch.equal(own, row[:length])


def test_nothing_outside_the_loss_mask_is_read():
    batch = rows()
    for key in (OLD, SAMPLER, TEACHER, ENTROPY):
        batch[key] = batch[key].masked_fill(~batch[MASK], torch.nan)
    for name in STAGES:
        with of(name):
            assert torch.equal(advantage_of(name, batch), expected_of(name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_advantage_is_rounded_once_to_its_dtype(dtype):
    """An advantage per row is computed in float64. A stage that changes an advantage keeps its dtype."""
    for name, make in STAGES.items():
        of_tokens = isinstance(make(), TokenAdvantage | RolloutCorrection)
        wide = torch.float32 if of_tokens else torch.float64
        kept = dtype if "advantage" in make().in_keys else torch.float32
        exact = rows(dtype)
        for key in FLOATS:
            exact[key] = exact[key].to(wide)
        with of(name):
            found = advantage_of(name, rows(dtype))
            assert found.dtype == kept
            assert torch.equal(found, advantage_of(name, exact).to(kept))


def test_results_carry_no_gradient_and_inputs_are_unchanged():
    batch = rows()
    for key in (OLD, SAMPLER, TEACHER, ENTROPY):
        batch[key] = batch[key].clone().requires_grad_()
    before = batch.clone()
    for name in STAGES:
        with of(name):
            assert not advantage_of(name, batch).requires_grad
            assert all(torch.equal(batch[key], before[key]) for key in FLOATS)


def test_an_excluded_row_changes_no_other_row_and_has_advantage_0():
    batch, counts = rows(), torch.tensor([row not in (1, 6) for row in range(8)])
    batch[COUNTED] = batch["headrace", "in_loss"] = counts
    for name in STAGES:
        with of(name):
            found = advantage_of(name, batch)
            assert torch.equal(found[counts], advantage_of(name, batch[counts]))
            assert name not in FIRST or not found[~counts].any()


ONE, HERE, ZERO = torch.ones(1, 1), torch.ones(1, 1) > 0, torch.zeros(1, dtype=torch.int64)
FUNCTIONS = {  # with one row of one token
    "difficulty_weight": (ONE[0],),
    "directed_weight": (ONE, ONE),
    "divergence": (ONE, ONE, HERE),
    "group_relative_advantage": (ONE[0], ZERO),
    "importance_weight": (ONE, ONE, HERE),
    "loss_weight": (ZERO,),
    "optimal_token_baseline": (ONE, ONE, ONE, HERE, ZERO),
    "rewards_to_go": (ONE[0], ZERO),
    "share_at_place": (ONE, HERE, ZERO, ONE),
    "staleness_weight": (ZERO,),
    "token_advantage": (ONE, ONE, HERE),
    "top_share": (ONE, HERE, 1.0),
    "turn_advantage": (ONE, HERE, ZERO),
    "whiten": (ONE[0], ONE[0]),
}
OPTIONS = {"directed_weight": {"clip": 0.5}, "staleness_weight": {"decay": 0.5}}


OTHERS = ("assign_rows", "collapse_fan_out", "generalized_advantage", "incomplete_groups", "length_penalty")
OTHERS += ("overlong_punishment", "relative_length", "shuffle_split", "tree_advantage")


@pytest.mark.parametrize("name", [*FUNCTIONS, *OTHERS])
def test_a_function_names_its_options_if_one_is_unknown(name):
    with pytest.raises(TypeError, match=f"^{name} has no option 'nothing'; its options are "):
        getattr(transforms, name)(nothing=0)


ONE_ROLLOUT = {"on_incomplete": "keep", "min_rollouts": 1}
IN_BOUNDS = {  # for each stage or term: other options, and for each option values in and out of its bounds
    BatchWhitening: ({}, {"eps": ([0, 1e9], [-1e-9])}),
    CompletenessGate: (
        ONE_ROLLOUT,
        {"group_size": ([1], [0]), "min_rollouts": ([1], [0]), "min_fraction": ([1e-9, 1], [0, 1.001])},
    ),
    DifficultyWeight: ({}, {"reward": ([0, 7], [-1])}),
    DirectedWeight: ({}, {"clip": ([0, 1], [-1e-9, 1.001])}),
    FanOutCollapse: ({}, {"columns": ([1, 7], [0])}),
    GAE: ({}, {"gamma": ([0, 1], [-1e-9, 1.001]), "lam": ([0, 1], [-1e-9, 1.001])}),
    LengthPenalty: ({}, {"coefficient": ([0, 9], [-1e-9])}),
    LossWeight: ({"unit": "constant"}, {"length": ([1, 9], [0])}),
    RelativeLength: ({}, {"coefficient": ([0, 9], [-1e-9])}),
    RewardsToGo: ({}, {"discount": ([0, 1], [-1e-9, 1.001])}),
    RolloutCorrection: ({}, {"least_ess": ([0, 1], [-1e-9, 1.001]), "low": ([0, 2], [-1e-9, 2.001])}),
    RunningBaseline: (
        {"start_weight": 1e-9},
        {"decay": ([0, 1], [-1e-9, 1.001]), "start_weight": ([1e-9], [0])},
    ),
    SignFactors: ({}, {"positive": ([0, 9], [-1e-9]), "negative": ([0, 9], [-1e-9])}),
    StalenessWeight: ({"current": 0, "decay": 1}, {"current": ([0], [-1]), "decay": ([1e-9, 1], [0, 1.001])}),
    TopShare: ({}, {"share": ([1e-9, 1], [0, 1.001])}),
    TurnAdvantage: ({}, {"discount": ([0, 1], [-1e-9, 1.001])}),
    TurnDiscount: ({}, {"discount": ([0, 1], [-1e-9, 1.001])}),
}


@pytest.mark.parametrize("stage", IN_BOUNDS)
def test_the_bounds_of_an_option_are_values_that_it_may_have(stage):
    more, options = IN_BOUNDS[stage]
    for option, (taken, refused) in options.items():
        for value in taken:
            assert getattr(stage(**more | {option: value}), option) == value
        for value in refused:
            with pytest.raises(ValueError, match=rf"\b{option} .*; got {value}"):
                stage(**more | {option: value})


def test_each_discount_of_a_function_is_from_0_to_1():
    for discount in (0.0, 1.0):
        turn_advantage(*FUNCTIONS["turn_advantage"], discount=discount)
    for discount in (-1e-9, 1.001):
        with pytest.raises(ValueError, match="discount must be in"):
            turn_advantage(*FUNCTIONS["turn_advantage"], discount=discount)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gives_no_numbers_for_no_rows(name):
    function, known = getattr(transforms, name), OPTIONS.get(name, {})
    none, one = (
        function(
            *(each[:size] if isinstance(each, torch.Tensor) else each for each in FUNCTIONS[name]), **known
        )
        for size in (0, 1)
    )
    if name == "loss_weight":
        none, one = none.weight, one.weight
    assert none.shape == (0, *one.shape[1:])
    assert none.dtype is one.dtype


def test_other_groups_change_no_bit_of_a_stage_that_works_within_groups():
    """Each group alone has the bits that it has in the batch if, and only if, the stage says so."""
    batch = rows()
    for name, make in STAGES.items():
        whole = expected_of(name)
        alike = [
            torch.equal(advantage_of(name, batch[own]), whole[own])
            for own in (batch["group_id"] == group for group in (0, 2, 5))
        ]
        with of(name):
            # Earlier batches, which are none here, change a running baseline.
            assert make().within_groups == (all(alike) and name != "running")


@pytest.mark.parametrize(
    ("function", "stage"),
    [
        ("divergence", Diverged),
        ("generalized_advantage", GAE),
        ("group_relative_advantage", GroupRelativeAdvantage),
        ("importance_weight", RolloutCorrection),
        ("loss_weight", LossWeight),
        ("rewards_to_go", RewardsToGo),
        ("token_advantage", TokenAdvantage),
        ("turn_advantage", TurnAdvantage),
        ("whiten", BatchWhitening),
    ],
)
def test_a_function_and_its_stage_have_the_same_defaults(function, stage):
    of_function, of_stage = (
        {name: each.default for name, each in inspect.signature(thing).parameters.items()}
        for thing in (getattr(transforms, function), stage)
    )
    shared = of_function.keys() & of_stage.keys() - {"rollout_id", "turn"}
    if stage is Diverged:  # the stage bounds a number per row
        shared -= {"level"}
    assert shared
    assert {name: of_function[name] for name in shared} == {name: of_stage[name] for name in shared}


IDS, TURN = "rollout_id", "turn_index"
OPTIONAL = {MASK, IDS, TURN, "advantage", SEGMENTS, REWARDS, "turn_reward", "baseline_value"}


@pytest.mark.parametrize(
    ("stage", "options", "keys"),
    [
        (BatchWhitening, {"per": "token"}, {MASK}),
        (BatchWhitening, {"per": "sample"}, set()),
        (BatchWhitening, {"per": "rollout"}, {IDS}),
        (Diverged, {"high": 2.0}, {MASK}),
        (Diverged, {"high": 2.0, "unit": "rollout"}, {MASK, IDS}),
        (Diverged, {"high": 2.0, "judges": "negative"}, {MASK, "advantage"}),
        (GAE, {"unit": "token"}, {MASK, IDS}),
        (GAE, {"unit": "turn"}, {MASK, IDS, TURN}),
        (DifficultyWeight, {}, {IDS, "advantage"}),
        (DifficultyWeight, {"reward": 0}, {IDS, "advantage", REWARDS}),
        (FanOutCollapse, {"reward": "sum"}, {IDS}),
        (FanOutCollapse, {"reward": "first"}, {IDS, SEGMENTS}),
        (FanOutCollapse, {"reward": "last"}, {IDS, SEGMENTS}),
        (GroupRelativeAdvantage, {}, {IDS, REWARDS}),
        (GroupRelativeAdvantage, {"baseline": "length_weighted"}, {IDS, REWARDS, MASK}),
        (GroupRelativeAdvantage, {"baseline": "column"}, {IDS, REWARDS, "baseline_value"}),
        (LossWeight, {"fold": "none"}, set()),
        (LossWeight, {"unit": "rollout", "fold": "sum"}, {IDS, "advantage"}),
        (LossWeight, {"unit": "turn", "turn_index_key": TURN}, {TURN}),
        (RolloutCorrection, {}, {MASK, "advantage"}),
        (RolloutCorrection, {"unit": "rollout"}, {MASK, "advantage", IDS}),
        (TurnAdvantage, {}, {IDS, TURN}),
        (TurnAdvantage, {"turn_rewards": "token"}, {IDS, TURN, "turn_reward"}),
        (TurnAdvantage, {"turn_index_key": None}, {IDS, SEGMENTS}),
        (TokenFilter, {"criterion": abs}, {MASK}),
        (TokenFilter, {"criterion": abs, "denominator": "all"}, {MASK, "advantage"}),
    ],
)
def test_a_stage_reads_a_column_only_if_its_options_need_it(stage, options, keys):
    changes = {"advantage"} if stage is BatchWhitening else set()
    assert OPTIONAL & set(stage(**options).in_keys) == keys | changes
