"""Laws of the group-relative advantage for any rewards, sizes and order of rows."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from fractions import Fraction
from typing import get_args, get_type_hints

import pytest
import torch
from alone import said_by
from batches import batch_of
from hypothesis import given
from hypothesis import strategies as st

from headrace.transforms import BatchError, FanOutCollapse, GroupRelativeAdvantage, group_relative_advantage
from headrace.transforms.table.schema import COUNTED, REWARD

REWARDS = st.one_of(
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 10).map(lambda x: x / 10),
    st.integers(-1000, 1000).map(lambda x: x / 100),
    st.integers(-3, 3).map(lambda x: 1e4 + x / 100),
    st.floats(-32000, 32000, width=16),
)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


HINTS = get_type_hints(group_relative_advantage)
# Other laws cover the baselines that need lengths, k or a column, and the scale that needs rewards ≥ 0.
OF_MORE = ("length_weighted", "best_of_k", "column")
BASELINES = [name for name in get_args(HINTS["baseline"]) if name not in OF_MORE]
SCALES = [name for name in get_args(HINTS["scale"]) if name != "mean"]


def go_together(options):
    """The options. They get ``skip`` if the scale may be 0 although the rewards of a group differ."""
    return options | ({"eps_mode": "skip"} if options["scale"] in ("leave_one_out", "mad") else {})


OPTIONS = st.fixed_dictionaries(
    {
        "baseline": st.sampled_from(BASELINES),
        "scale": st.sampled_from(SCALES),
        "shift": st.sampled_from([0.0, 0.0, -0.1, 0.5]),
        "eps_mode": st.sampled_from(["add", "clamp", "skip"]),
        "ddof": st.sampled_from([0, 1]),
        "eps": st.sampled_from([0.0, 1e-6, 1e-4, 0.5]),
        "singleton": st.sampled_from(["zero", "raw"]),
    }
).map(go_together)


@st.composite
def batches(draw, *, least_segments=1):
    """The reward, group id and rollout id of each row. Ids have any order and any gaps."""
    rollouts = draw(
        st.lists(
            st.tuples(st.integers(0, 4), REWARDS, st.integers(least_segments, 3)), min_size=1, max_size=14
        )
    )
    labels = draw(
        st.lists(st.integers(0, 2**61), min_size=len(rollouts), max_size=len(rollouts), unique=True)
    )
    spread = draw(st.sampled_from([1, 7, 2**40]))
    rows = [
        (reward, group * spread, label)
        for (group, reward, segments), label in zip(rollouts, labels, strict=True)
        for _ in range(segments)
    ]
    if draw(st.booleans()):
        rows = draw(st.permutations(rows))
    else:  # as collectors write them: ascending ids
        labels.sort()
        ascending = sorted(rollouts, key=lambda rollout: rollout[0])
        rows = [(r, g * spread, labels[i]) for i, (g, r, n) in enumerate(ascending) for _ in range(n)]
    rewards, groups, ids = (list(column) for column in zip(*rows, strict=True))
    reward = torch.tensor(rewards, dtype=torch.float64).to(draw(DTYPES))
    return reward, torch.tensor(groups), torch.tensor(ids)


def log_mean_exp(values):
    best = max(values)
    return best + math.log(statistics.fmean(math.exp(x - best) for x in values))


def mad(values):
    middle = statistics.median(values)
    return statistics.median(abs(x - middle) for x in values)


def by_loops(reward, groups, ids, *, baseline, scale, ddof, eps, eps_mode, singleton, shift, clip=None):
    """The advantage by its definition, one rollout after another, in float64 with the standard library."""
    low, high = clip or (None, None)
    rollouts = {r: (g, x) for x, g, r in zip(reward.tolist(), groups.tolist(), ids.tolist(), strict=True)}
    everyone = [x for _, x in rollouts.values()]

    def std(values):
        if len(set(values)) < 2:
            return 0.0
        mean = statistics.fmean(values)
        return (sum((x - mean) ** 2 for x in values) / max(len(values) - ddof, 1)) ** 0.5

    def one(rollout):
        group, x = rollouts[rollout]
        others = [y for r, (g, y) in rollouts.items() if g == group and r != rollout]
        members = [x, *others]
        if baseline not in ("batch", "none") or scale in ("group", "leave_one_out", "mad"):
            if not others:
                return x if singleton == "raw" else 0.0
            if len(set(members)) == 1 and (not shift or scale in ("group", "leave_one_out", "mad")):
                return 0.0
        base = {
            "mean": lambda: statistics.fmean(members),
            "leave_one_out": lambda: statistics.fmean(others),
            "median": lambda: statistics.median(members),
            "log_mean_exp": lambda: log_mean_exp(members),
            "best_other": lambda: max(others),
            "batch": lambda: statistics.fmean(everyone),
            "none": lambda: 0.0,
        }[baseline]() + shift
        if scale == "none":
            return x - base
        spread = {
            "group": lambda: std(members),
            "leave_one_out": lambda: std(others),
            "mad": lambda: mad(members),
            "batch": lambda: std(everyone),
            "nonzero": lambda: sum(y != 0 for y in everyone) / len(everyone),
            "mean": lambda: statistics.fmean(members),
        }[scale]()
        if scale == "mean" and not spread and eps_mode != "skip":
            return 0.0
        divisor = {
            "add": lambda: spread + eps,
            "clamp": lambda: max(spread, eps),
            "skip": lambda: spread + eps if spread > 0 else 1.0,
        }[eps_mode]()
        return (x - base) / divisor if divisor else 0.0

    def clipped(credit):
        credit = credit if low is None else max(credit, low)
        return credit if high is None else min(credit, high)

    return torch.tensor([clipped(one(r)) for r in ids.tolist()], dtype=torch.float64)


def credit_or_refusal(batch, options):
    """The advantage, or None if a small dtype cannot hold the rewards or the result."""
    try:
        return group_relative_advantage(*batch, **options)
    except BatchError as err:
        if "must fit into" in str(err):
            return None
        raise


@given(batches(), OPTIONS)
def test_advantage_equals_the_definition_rounded_once(batch, options):
    expected = by_loops(*batch, **options)
    found = credit_or_refusal(batch, options)
    if found is None:
        return
    assert found.dtype == torch.promote_types(batch[0].dtype, torch.float32)
    rounding = max(torch.finfo(found.dtype).eps / 2, 1e-9)
    # The tolerance grows with the rewards, because digits cancel in their differences.
    slack = 1e-10 * max(1.0, float(batch[0].abs().max())) / (options["eps"] or 1e-4)
    slack = slack if options["scale"] not in ("none", "nonzero") else 1e-9
    slack += (
        torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps
    )  # the smallest positive number
    torch.testing.assert_close(found.double(), expected, rtol=rounding * 1.001, atol=slack)


@given(batches(), OPTIONS, st.randoms())
def test_permuting_rows_permutes_the_bits(batch, options, random):
    order = list(range(len(batch[0])))
    random.shuffle(order)
    before = credit_or_refusal(batch, options)
    after = credit_or_refusal([column[order] for column in batch], options)
    assert (before is None) == (after is None)
    assert before is None or torch.equal(after, before[order])


@given(batches(), OPTIONS, st.data())
def test_splitting_a_rollout_into_more_segments_changes_no_bit(batch, options, data):
    row = data.draw(st.integers(0, len(batch[0]) - 1))
    at = data.draw(st.integers(0, len(batch[0])))
    longer = [torch.cat([column[:at], column[row : row + 1], column[at:]]) for column in batch]
    before, after = credit_or_refusal(batch, options), credit_or_refusal(longer, options)
    if before is not None:
        assert after[at] == before[row]
        assert torch.equal(torch.cat([after[:at], after[at + 1 :]]), before)


@given(batches(), batches(), OPTIONS)
def test_other_groups_change_no_bit_of_a_group(batch, company, options):
    if options["baseline"] == "batch" or options["scale"] in ("batch", "nonzero"):
        return
    others = (company[0].to(batch[0].dtype), company[1] + 2**60, company[2] + 2**62)
    alone = credit_or_refusal(batch, options)
    together = credit_or_refusal([torch.cat(pair) for pair in zip(batch, others, strict=True)], options)
    if alone is not None and together is not None:
        assert torch.equal(together[: len(alone)], alone)


@given(st.lists(st.tuples(REWARDS, st.integers(2, 11)), min_size=1, max_size=8), OPTIONS, st.booleans())
def test_equal_rewards_have_an_advantage_of_exactly_0(groups, options, double):
    rewards, sizes = zip(*groups, strict=True)
    reward = torch.tensor(rewards, dtype=torch.float64 if double else torch.float32)
    reward = reward.repeat_interleave(torch.tensor(sizes))
    group_id = torch.arange(len(groups)).repeat_interleave(torch.tensor(sizes))
    of_the_group = options["scale"] in ("group", "leave_one_out", "mad")
    if of_the_group or (options["baseline"] not in ("batch", "none") and not options["shift"]):
        assert (group_relative_advantage(reward, group_id, **options) == 0).all()


FORMULAS = {
    "eps": [0.0, 0.5],
    "eps_mode": ["add", "clamp", "skip"],
    "ddof": [0, 1],
    "singleton": ["zero", "raw"],
    "shift": [0.0, 0.25],
    "clip": [None, [-0.5, 0.125], [None, 0.5]],
}


@pytest.mark.parametrize("scale", get_args(HINTS["scale"]))
def test_every_scale_equals_its_definition_in_small_batches(scale):
    """The groups are a single rollout, two different ones, ties, equal rewards, and no success."""
    rewards = [[-1.0], [0.0, 2.0], [0.0, 0.0, -2.0, 3.0], [1.0, 1.0, 1.0], [0.0, 0.0]]
    reward = torch.tensor([*itertools.chain(*rewards)], dtype=torch.float64)
    reward = reward.abs() if scale == "mean" else reward
    group = torch.tensor([number for number, own in enumerate(rewards) for _ in own])
    baselines, sizes = itertools.cycle(BASELINES), itertools.cycle([12, 1, 2, 3])
    for values in itertools.product(*FORMULAS.values()):
        options = go_together(dict(zip(FORMULAS, values, strict=True)) | {"scale": scale})
        options["baseline"], size = next(baselines), next(sizes)
        some = reward[:size], group[:size], torch.arange(size)
        found = group_relative_advantage(*some, **options)
        expected = by_loops(*some, **options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=f"{size} {options}")


@given(
    st.integers(1, 6),
    st.integers(2, 9),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.sampled_from(["group", "none"]),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_dtype_of_the_rewards_gives_the_bits_of_the_reshape_formula(
    prompts, size, segments, dtype, scale, seed, scattered_ids
):
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randn(prompts * size, generator=generator, dtype=torch.float64).to(dtype)
    group_id = torch.randperm(prompts, generator=generator).repeat_interleave(size) * 1000
    rollout_id = torch.arange(prompts * size)
    if scattered_ids:
        rollout_id = torch.randperm(prompts * size, generator=generator) * 10**12
    x = reward.view(prompts, size)
    x = x - x.mean(-1, keepdim=True)
    if scale == "group":
        x = x / (x.std(-1, keepdim=True) + 1e-6)
    equal = (reward.view(prompts, size) == reward.view(prompts, size)[:, :1]).all(-1, keepdim=True)
    expected = torch.where(equal, 0.0, x).flatten().repeat_interleave(segments)
    found = group_relative_advantage(
        reward.repeat_interleave(segments),
        group_id.repeat_interleave(segments),
        rollout_id.repeat_interleave(segments),
        scale=scale,
        dtype=dtype,
    )
    if dtype is torch.float64:  # `reshape_formula` is not used
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        return
    assert found.dtype == torch.float32
    assert torch.equal(found, expected.to(dtype).float())


@pytest.mark.parametrize(
    "groups",
    [
        [0, 0, 0, 5, 5, 5],  # contiguous and of one size: the reshape formula applies
        [5, 5, 5, 0, 0, 0],
        [0, 5, 0, 5, 0, 5],
        [0, 5, 5, 5, 0, 0],
        [0, 0, 5, 5, 5, 5],
        [0, 0, 0, 0, 5, 5],
        [0, 0, 0, 0, 0, 0],
        [0, 1, 2, 3, 4, 5],
    ],
)
def test_a_smaller_dtype_changes_only_the_rounding(groups):
    """Other equations than that of the reshape formula keep the bits of float64, rounded once."""
    reward = torch.tensor([0.1, 0.7, 0.7, 0.3, 0.3, 0.3])
    formulas = itertools.cycle(
        [
            {"scale": "group"},
            {"scale": "none"},
            {"scale": "group", "shift": 0.25},
            {"scale": "group", "baseline": "leave_one_out"},
            {"scale": "batch"},
        ]
    )
    for eps, eps_mode, ddof, clip in itertools.product(
        [0.0, 0.5, 1.0], ["add", "clamp", "skip"], [0, 1], [None, [-0.5, 0.125]]
    ):
        options = {"eps": eps, "eps_mode": eps_mode, "ddof": ddof, "clip": clip} | next(formulas)
        exact, rounded = (
            group_relative_advantage(reward, groups, dtype=dtype, **options)
            for dtype in (None, torch.float32)
        )
        torch.testing.assert_close(rounded, exact, rtol=1e-5, atol=1e-6, msg=str(options))
        if "shift" in options or "baseline" in options or options["scale"] == "batch":
            assert torch.equal(rounded, exact), options


def test_the_least_length_that_a_mean_is_divided_by_is_1():
    """With lengths of 1 and 0, the length-weighted mean is the first reward; with 0 and 0, the plain mean."""
    for length, expected in (([1, 0], [0.0, 2.0]), ([0, 0], [-1.0, 1.0])):
        weighed = {"length": length, "baseline": "length_weighted", "scale": "none"}
        assert group_relative_advantage([3.0, 5.0], [0, 0], **weighed).tolist() == expected


def test_rewards_may_be_lists_or_column_vectors():
    as_lists = group_relative_advantage([1, 3, 5], [4, 4, 4], [7, 8, 9])
    as_columns = group_relative_advantage(
        torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([[4], [4], [4]]), torch.tensor([[7], [8], [9]])
    )
    assert torch.equal(as_lists, as_columns)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_id": [0, None, 0]}, r"group_id; None at rows 1 of 3"),
        ({"rollout_id": [None, 1, None]}, r"rollout_id; None at rows 0, 2 of 3"),
        ({"reward": [1.0, None, 2.0]}, r"reward; None at rows 1"),
        ({"group_id": [0, -1, 0]}, r"group_id ≥ 0; found -1 at row 1"),
        ({"rollout_id": [0, 1, -7]}, r"rollout_id ≥ 0; found -7 at row 2"),
        ({"reward": [1.0, float("nan"), 2.0]}, r"finite; found nan at row 1 \(rollout 1\)"),
        ({"reward": [1.0, 2.0, float("-inf")]}, r"finite; found -inf at row 2 \(rollout 2\)"),
        ({"rollout_id": [5, 5, 6]}, r"rollout 5 \(rows \[0, 1\]: \[1.0, 2.0\]\)"),
        ({"rollout_id": [5, 6, 5], "group_id": [0, 0, 3]}, r"rollout 5 in groups \[0, 3\] \(rows \[0, 2\]\)"),
        ({"group_id": [0, 0]}, r"same length.*reward 3 .*group_id 2"),
        (
            {"group_id": torch.tensor([0.0, 0.0, 0.0])},
            r"group_id must be integers, got torch.float32.*\.long\(\)",
        ),
        ({"group_id": torch.zeros(3, 2, dtype=torch.int64)}, r"one integer per row.*\(3, 2\)"),
        ({"reward": torch.zeros(3, 4)}, r"each row needs one reward.*\(3, 4\)"),
        ({"group_id": [0, 0, 2**70]}, r"group_id must be integers, at most 63 bits"),
    ],
)
def test_invalid_data_are_refused_with_row_ids(changes, message):
    sound = {"reward": [1.0, 2.0, 3.0], "group_id": [0, 0, 0], "rollout_id": [0, 1, 2]}
    with pytest.raises(BatchError, match=message):
        group_relative_advantage(**(sound | changes))


def test_singleton_raise_refuses_a_group_of_one_rollout():
    message = (
        r"^each group needs at least two rollouts; found one in group 9 \(rollout 4\), "
        r"group 2 \(rollout 3\)\. Gate incomplete groups, or set singleton='zero'$"
    )
    with pytest.raises(BatchError, match=message):
        group_relative_advantage([1.0, 2, 3, 3, 5], [0, 0, 9, 9, 2], [1, 2, 4, 4, 3], singleton="raise")


def test_rewards_whose_square_overflows_raise():
    bound = (torch.finfo(torch.float64).max / 4) ** 0.5 / 16
    rewards = torch.tensor([0, 1e200, bound, -1e200], dtype=torch.float64)
    found = r"found 1e\+200 at row 1 \(rollout 1\), -1e\+200 at row 3 \(rollout 3\)$"
    with pytest.raises(BatchError, match=r"must be at most 4\.2e\+152, so that the sum of .*; " + found):
        group_relative_advantage(rewards, [0, 0, 1, 1])
    rewards[[1, 3]] = 0.0
    found = group_relative_advantage(rewards, [0, 1, 0, 1])
    assert found.tolist() == pytest.approx([-(0.5**0.5), 0, 0.5**0.5, 0])


def test_differences_of_rewards_may_exceed_their_dtype():
    # 3e38 − (−3e38) is beyond 3.4e38, the largest float32. By hand: ±3e38 over a std of 4.24e38.
    reward = torch.tensor([3e38, -3e38])
    assert group_relative_advantage(reward, [0, 0]).tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)
    found = r"an advantage must fit into torch.float32; found 6e\+38 at row 0, -6e\+38 at row 1\. Scale"
    with pytest.raises(BatchError, match=found):
        group_relative_advantage(reward, [0, 0], baseline="leave_one_out", scale="none")


def test_squares_of_rewards_beyond_float32_use_float64():
    rewards = torch.tensor([1e30, -1e30, 1e30, 0.0])
    for dtype in (None, torch.float32):
        found = group_relative_advantage(rewards, [0, 0, 1, 1], dtype=dtype)
        assert found.tolist() == pytest.approx([0.7071068, -0.7071068, 0.7071068, -0.7071068])


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
@pytest.mark.parametrize("outlier", [100.0, 1e6, 1e9])
def test_an_outlier_is_scaled_by_the_std_of_the_others(order, outlier):
    # By hand: the others of the outlier are .01, .02, .03, with mean .02 and std .01.
    reward = torch.tensor([outlier, 0.01, 0.02, 0.03], dtype=torch.float64)[order]
    found = group_relative_advantage(
        reward, [0] * 4, baseline="leave_one_out", scale="leave_one_out", eps_mode="skip", eps=0.0
    )
    assert float(found[order.index(0)]) == pytest.approx((outlier - 0.02) / 0.01, rel=1e-6)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=12), st.sampled_from([0.0, -7.0, 1e3, 1e6, 1e12]))
def test_rewards_far_from_0_lose_no_digits(tenths, level):
    """The float64 mean of 1,000,000.1 and 1,000,000.2 has fewer exact decimals than their difference."""
    rewards = [level + tenth / 10 for tenth in tenths]
    exact = [Fraction(reward) - sum(map(Fraction, rewards)) / len(rewards) for reward in rewards]
    groups = torch.zeros(len(rewards), dtype=torch.int64)
    found = group_relative_advantage(torch.tensor(rewards, dtype=torch.float64), groups, scale="none")
    most = 4 * math.ulp(max(abs(float(each)) for each in exact))
    assert [float(Fraction(one) - other) for one, other in zip(found.tolist(), exact, strict=True)] == (
        pytest.approx([0.0] * len(exact), abs=most)
    )


def test_rewards_far_from_0_have_the_same_std_of_the_others():
    rewards = torch.tensor([0, 0.0625, 0.25, 0.3125, 3], dtype=torch.float64)
    near, far = (
        group_relative_advantage(each, [0] * 5, scale="leave_one_out", eps_mode="skip")
        for each in (rewards, rewards + 2**48)
    )
    assert far.tolist() == pytest.approx(near.tolist(), rel=1e-12)


def test_integer_rewards_above_2_24_stay_distinct():
    for rewards in ([2**24, 2**24 + 1], torch.tensor([2**24, 2**24 + 1])):
        found = group_relative_advantage(rewards, [0, 0], scale="none")
        assert found.dtype is torch.float32
        assert found.tolist() == [-0.5, 0.5]


def test_counts_may_exceed_the_range_of_float16():
    rewards = torch.tensor([0.0, 1.0] * 40_000, dtype=torch.float16)
    for options in ({}, {"dtype": torch.float16}, {"scale": "batch"}):
        found = group_relative_advantage(rewards, torch.arange(80_000) // 8, **options)
        # ½ is divided by the std of a group, √(2/7), or by that of the batch, ½
        assert float(found[1]) == pytest.approx(7**0.5 / 8**0.5 if "scale" not in options else 1.0, rel=1e-3)


def test_an_advantage_beyond_its_dtype_raises():
    most = torch.tensor([torch.finfo(torch.float32).max])
    assert torch.equal(group_relative_advantage(most, [0], baseline="none", scale="none"), most)
    with pytest.raises(BatchError, match=r"must fit into torch.float32; found 2.9997e\+40 at row 0"):
        group_relative_advantage(
            torch.tensor([3e38, 0, 0.01, 0.02]),  # 3e38 / (0.01 + ε)
            [0] * 4,
            baseline="leave_one_out",
            scale="leave_one_out",
            eps_mode="skip",
        )


@st.composite
def groups_of_at_least(draw, k):
    sizes = draw(st.lists(st.integers(k, 6), min_size=1, max_size=3))
    rewards = [draw(REWARDS) for _ in range(sum(sizes))]
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    return torch.tensor(rewards, dtype=torch.float64), groups


@given(st.integers(2, 5).flatmap(lambda k: st.tuples(st.just(k), groups_of_at_least(k))), st.randoms())
def test_best_of_k_equals_the_mean_over_all_sets_of_others(drawn, random):
    """The gain over the best of k − 1 others is averaged over all sets of others (PKPO, arXiv:2505.15201)."""
    k, (reward, groups) = drawn
    order = list(range(len(groups)))
    random.shuffle(order)
    options = {"baseline": "best_of_k", "k": k, "scale": "none"}
    found = group_relative_advantage(reward, groups, **options)
    for row, group in enumerate(groups):
        others = [float(reward[i]) for i, g in enumerate(groups) if g == group and i != row]
        sets = list(itertools.combinations(others, k - 1))
        expected = math.fsum(max(float(reward[row]) - max(some), 0.0) for some in sets) / len(sets)
        assert float(found[row]) == pytest.approx(expected, rel=1e-12, abs=1e-9)
    shuffled = group_relative_advantage(reward[order], [groups[i] for i in order], **options)
    assert torch.equal(shuffled, found[order])
    twice = group_relative_advantage(
        torch.cat([reward, reward]), groups * 2, list(range(len(groups))) * 2, **options
    )
    assert torch.equal(twice, torch.cat([found, found]))


def test_best_of_k_is_an_unbiased_gradient_estimate():
    """For a coin with P(1) = p and n = 4, the mean over all 16 outcomes is (d/dp of 1 − (1 − p)^k) / k."""
    p, n = 0.3, 4
    for k in (2, 3, 4):
        total = 0.0
        for outcome in itertools.product([0.0, 1.0], repeat=n):
            credit = group_relative_advantage(
                torch.tensor(outcome, dtype=torch.float64), [0] * n, baseline="best_of_k", k=k, scale="none"
            ).tolist()
            chance = math.prod(p if x else 1 - p for x in outcome)
            score = [1 / p if x else -1 / (1 - p) for x in outcome]
            total += chance * sum(a * s for a, s in zip(credit, score, strict=True)) / n
        assert total == pytest.approx((1 - p) ** (k - 1), rel=1e-12)


def test_a_group_smaller_than_k_raises_with_its_ids():
    for rollouts, name in ((None, 3), ([5, 6, 7, 9], 9)):
        message = (
            rf"^each group needs at least k=3 rollouts; found fewer in group 7 \(rollout {name}\)\. "
            "Gate incomplete groups, or lower k$"
        )
        with pytest.raises(BatchError, match=message):
            group_relative_advantage(
                [1.0, 2, 3, 4], [0, 0, 0, 7], rollouts, baseline="best_of_k", k=3, scale="none"
            )


def test_votes_only_rollouts_alone_can_give_the_baseline():
    """In ReMax, the advantage is R − R(greedy). In A*-PO, V* is ½ log((e^(2·0) + e^(2·1)) / 2)."""
    reward, group, votes = [1.0, 0.0, 0.5, 1.0, 0.0], [0, 0, 0, 7, 7], [False, False, True, True, True]
    options = {"scale": "none", "baseline_of": "votes_only", "votes_only": votes}
    reward = torch.tensor(reward, dtype=torch.float64)
    of_mean = group_relative_advantage(reward, group, **options)
    assert of_mean.tolist() == [0.5, -0.5, 0.0, 0.5, -0.5]
    rounded = group_relative_advantage(reward, group, dtype=torch.float32, **options)
    assert rounded.tolist() == of_mean.tolist()  # the reshape formula would subtract the group's mean
    soft = group_relative_advantage(reward, group, baseline="log_mean_exp", temperature=0.5, **options)
    value = 0.5 * math.log((1 + math.e**2) / 2)
    torch.testing.assert_close(
        soft, reward - torch.tensor([0.5] * 3 + [value] * 2, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_a_baseline_of_a_column_is_subtracted_from_each_rollout():
    reward = torch.tensor([1.0, 0.0, 2.0, 2.0], dtype=torch.float64)
    options = {"baseline": "column", "scale": "none"}
    found = group_relative_advantage(
        reward, [0, 0, 3, 3], [0, 1, 2, 2], baseline_value=[0.25, 1, 2, 2], **options
    )
    assert found.tolist() == [0.75, -1.0, 0.0, 0.0]  # group 3 has one rollout
    for values, bad in (
        ([0.25, 1, 2, 3], r"3\.0 at row 3 \(rollout 2\)"),
        ([math.nan, 1, 2, 2], "nan at row 0"),
    ):
        with pytest.raises(BatchError, match=rf"one finite baseline in .*{bad}"):
            group_relative_advantage(reward, [0, 0, 3, 3], [0, 1, 2, 2], baseline_value=values, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "column"}, "baseline='column' needs baseline_value, and no other value"),
        ({"baseline_value": [0.0, 1.0]}, "baseline='column' needs baseline_value, and no other value"),
        ({"baseline": "length_weighted"}, "baseline='length_weighted' needs length, and no other value"),
        ({"length": [2, 3]}, "baseline='length_weighted' needs length, and no other value"),
        ({"baseline_of": "votes_only"}, "baseline_of='votes_only' needs votes_only, and no other value"),
        ({"votes_only": [True, False]}, "baseline_of='votes_only' needs votes_only, and no other value"),
        (
            {"baseline_of": "votes_only", "baseline": "best_other"},
            "needs a baseline of mean, median, log_mean_exp; got baseline='best_other'",
        ),
        (
            {"temperature": 0.5},
            "only baseline='log_mean_exp' reads temperature; got temperature=0.5 with baseline='mean'",
        ),
        ({"temperature": 0.0, "baseline": "log_mean_exp"}, "temperature must be finite and > 0; got 0.0"),
        ({"clip": [2.0, 1.0]}, "clip must be [low, high], one of which may be None; got [2.0, 1.0]"),
        ({"clip": [None, None]}, "clip must be [low, high], one of which may be None; got [None, None]"),
        ({"clip": [1.0]}, "clip must be [low, high], one of which may be None; got [1.0]"),
        (
            {"clip": [1.0, 2.0, 3.0]},
            "clip must be [low, high], one of which may be None; got [1.0, 2.0, 3.0]",
        ),
        ({"eps": -1e-9}, "eps must be finite and ≥ 0; got -1e-09"),
        (
            {"k": 2},
            "baseline='best_of_k' needs k, and no other baseline reads it; got k=2 with baseline='mean'",
        ),
        ({"baseline": "best_of_k"}, "no other baseline reads it; got k=None with baseline='best_of_k'"),
        ({"baseline": "best_of_k", "k": 1}, "k must be an integer ≥ 2; got 1"),
        ({"scale": "mad"}, "scale='mad' needs eps_mode='skip'; got eps_mode='add'. This scale is often 0"),
        (
            {"scale": "leave_one_out", "eps_mode": "clamp"},
            "scale='leave_one_out' needs eps_mode='skip'; got eps_mode='clamp'. This scale is often 0",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        group_relative_advantage([0.0, 1.0], [0, 0], **options)


def test_a_stage_refuses_a_column_of_one_number_for_several_rewards():
    with pytest.raises(ValueError, match="several='decoupled' compares each"):
        GroupRelativeAdvantage(baseline="column", several="decoupled")


def test_options_at_their_bounds_are_accepted():
    """Both bounds of `clip` may be equal, and a group may have exactly k rollouts."""
    clipped = group_relative_advantage([0.0, 1.0], [0, 0], scale="none", clip=[0.25, 0.25])
    assert clipped.tolist() == [0.25, 0.25]
    best = group_relative_advantage([0.0, 1.0], [0, 0], scale="none", eps=0.0, baseline="best_of_k", k=2)
    assert best.tolist() == [0.0, 1.0]
    # The error of singleton="raise" is for groups that are compared.
    alone = group_relative_advantage([1.0, 3.0], [0, 7], scale="none", baseline="batch", singleton="raise")
    assert alone.tolist() == [-1.0, 1.0]
    two = group_relative_advantage([1.0, 3.0], [0, 0], scale="none", singleton="raise")
    assert two.tolist() == [-1.0, 1.0]


def test_a_group_needs_a_rollout_that_votes_only():
    wrong = {"baseline_of": "votes_only", "votes_only": [True, False, False, False]}
    message = (
        r"baseline_of='votes_only' needs a rollout that votes only in each group; found none in group 7, "
        r"group 9\. Mark a rollout in '?votes_only"
    )
    with pytest.raises(BatchError, match=message):
        group_relative_advantage([0.0, 1.0, 2.0, 2.0], [0, 7, 9, 7], **wrong)


def test_the_metrics_count_rollouts_with_a_reward_and_the_advantage_0():
    """The advantages are −1, 1, 0, 0, and 0 for a missing reward. The last row is excluded."""
    batch = batch_of([0.0, 2, 5, 5, math.nan, 9], [0, 0, 1, 1, 1, 0])
    batch[COUNTED] = torch.tensor([True] * 5 + [False])
    said = said_by(GroupRelativeAdvantage(scale="none", missing="skip"), batch)
    assert said.batch["advantage"].flatten().tolist() == [-1, 1, 0, 0, 0, 0]
    assert said.metrics == pytest.approx({"abs_mean": 2 / 5, "zero": 3 / 5, "unscorable": 1})
    assert "unscorable" not in said_by(GroupRelativeAdvantage(), batch_of([0.0, 2], [0, 0])).metrics


@pytest.mark.parametrize(
    ("collected", "kept"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float64),
    ],
)
def test_a_stage_that_skips_rewards_writes_those_that_it_read(collected, kept):
    batch = batch_of([0.0, 2.0], [0, 0])
    batch["next", "reward"] = batch["next", "reward"].to(collected)
    written = GroupRelativeAdvantage(missing="skip")(batch)[REWARD]
    assert written.dtype is kept
    assert written.tolist() == [0.0, 2.0]


@pytest.mark.parametrize("collapse", [None, FanOutCollapse()])
def test_one_reward_is_compared_alike_with_and_without_decoupling(collapse):
    batch = batch_of([0.0, 2.0, 1.0], [0, 0, 0])
    batch = batch if collapse is None else collapse(batch)
    expected = GroupRelativeAdvantage()(batch)["advantage"]
    assert torch.equal(GroupRelativeAdvantage(several="decoupled")(batch)["advantage"], expected)
    with pytest.raises(
        BatchError, match="found 2 in place of 6 for rollout 1, 1 in place of 3 for rollout 2"
    ):
        GroupRelativeAdvantage(several="decoupled", weights=[3.0])(batch)


def test_the_advantage_by_row_needs_only_rewards_and_group_ids():
    reward, group = torch.tensor([1.0, 3.0]), torch.tensor([0, 0])
    assert GroupRelativeAdvantage(scale="none").advantage_by_row(reward, group).tolist() == [-1.0, 1.0]
    for options in (
        {"baseline": "length_weighted"},
        {"baseline": "column"},
        {"baseline_of": "votes_only"},
        {"several": "decoupled"},
    ):
        assert GroupRelativeAdvantage(**options).advantage_by_row(reward, group) is None
