"""A rollout's reward, measured against those of its group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.transforms.checks import (
    Rule,
    as_rewards,
    credit_dtype,
    enforce,
    identity_rules,
    reward_rules,
    same_length,
)
from headrace.transforms.ids import as_ids, first_row, is_first, sum_by
from headrace.transforms.sums import largest

from .baselines import Baseline, Clip, EpsMode, Formula, Scale, Singleton, advantage_in_groups
from .grouping import Blocks, ById, Grouping, ReshapeFormula, squares_fit
from .layout import Facts, Found, find_groups, fit_rule, gather_blocks, largest_that_fits, read_facts


def group_relative_advantage(
    reward: Tensor | Sequence[float],
    group_id: Tensor | Sequence[int],
    rollout_id: Tensor | Sequence[int] | None = None,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    eps_mode: EpsMode = "add",
    clip: Clip | None = None,
    shift: float = 0.0,
    temperature: float = 1.0,
    k: int | None = None,
    dtype: torch.dtype | None = None,
    length: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Measure each rollout's reward against its group, and give every segment its rollout's advantage.

    For rollout i of a group g with n rollouts (DeepSeekMath, arXiv:2402.03300, section 4.1.2)::

        A_i = (R_i − b_i − δ) / s_i

        baseline  mean             b_i = Σ_{j∈g} R_j / n
                  leave_one_out    b_i = Σ_{j∈g, j≠i} R_j / (n − 1)         (RLOO, arXiv:2402.14740)
                  median           b_i = median(R_j, j ∈ g)                 (MC-GRPO, arXiv:2601.22582)
                  length_weighted  b_i = Σ_{j∈g} L_j R_j / Σ_{j∈g} L_j      (OPO, arXiv:2505.23585)
                  best_other       b_i = max_{j∈g, j≠i} R_j                 (pass@k, arXiv:2503.19595)
                  best_of_k        b_i = R_i − mean_K max(R_i − max_{j∈K} R_j, 0), K the sets of k − 1
                                   others                                   (PKPO, arXiv:2505.15201)
                  log_mean_exp     b_i = τ log(Σ_{j∈g} exp(R_j/τ) / n)      (OPMD of Trinity-RFT)
                  batch            b_i = Σ_j R_j / N over all rollouts
                  none             b_i = 0
        scale     group            s = std(R_j, j ∈ g)
                  leave_one_out    s_i = std(R_j, j ∈ g, j ≠ i)
                  mad              s = median(|R_j − median(R_j)|)          (MC-GRPO, arXiv:2601.22582)
                  batch            s = std(R_j, all rollouts)               (Lite PPO, arXiv:2508.08221)
                  mean             s = Σ_{j∈g} R_j / n, for rewards ≥ 0     (MaxRL)
                  nonzero          s = the share of rewards that are not 0  (GPG, arXiv:2504.02546)
                  none             s = 1, without ε                         (Dr. GRPO, arXiv:2503.20783)
        eps_mode  add              s + ε
                  clamp            max(s, ε)
                  skip             s + ε where s > 0, else undivided        (NeMo RL)
        std has the divisor n − ddof, at least 1
        δ is `shift`, τ `temperature`; equal rewards are 0 under a scale of the group's own all the same

    With ``best_of_k`` the mean of A_i ∇ log π over the group is 1/k of an unbiased estimate of the gradient
    of what the best of k is expected to get, for any k ≤ n. With k = n it is ``best_other`` clipped at 0.

    Where the baseline or the scale is the group's own, a group whose rewards are all equal has an advantage
    of exactly 0, where rounding would leave a rest that a small ε blows up. Statistics are float64, by sums
    that do not depend on the order of their terms, and rounded once: to the last bit an advantage follows
    from the rewards of its group, however rows lie and whatever else is in the batch. One device read, for
    the checks; under a smaller `dtype` another, for the layout.

    Args:
        reward: (N,) floats, one a row; the segments of a rollout must agree.
        group_id: (N,) integers ≥ 0 in any order: which rollouts are compared.
        rollout_id: (N,) integers ≥ 0 in any order: which rows are one rollout. None: each row is one.
        baseline: what an advantage is measured from.
        scale: what it is divided by.
        ddof: 1 or 0, taken off the count in the std.
        eps: ε ≥ 0, in units of the scale.
        singleton: what a group with one rollout gets where the group is needed: ``zero``, its reward as it
            is (``raw``), or an error.
        eps_mode: how ε enters.
        clip: [low, high] for the result, one of which may be None.
        shift: δ, in units of the reward: below 0 it makes more of successes, above of failures, which is no
            matter of variance where samples are off-policy (AsymRE, arXiv:2506.20520). A group of equal
            rewards then has −δ under ``scale="none"``.
        temperature: τ > 0, in units of the reward, for ``log_mean_exp``: near 0 it is the best of the group,
            from above the mean.
        k: for ``best_of_k``, from 2 up to the size of the smallest group.
        dtype: None or float64: as said above. A smaller one, where groups of one size lie in contiguous
            rows, fan-out or not: the bits of ``x = r.view(P, G); x -= x.mean(-1); x / (x.std(-1) + eps)`` in
            that dtype; other layouts are float64 all the same.
        length: (N,) tokens of each row, for ``length_weighted``; a rollout's are those of its segments.

    Returns:
        (N,) in the dtype of `reward`; torch's default where that is no floating-point one.

    Raises:
        BatchError: a negative or missing id, a rollout in two groups, a reward that is not finite or too
            large to square, siblings that disagree, a group of one under ``raise`` or of less than k, a
            negative reward under ``scale="mean"``. Each names the ids.
        ValueError: an option that is none, or two that do not go together.

    Example:
        >>> group_relative_advantage([1., 3., 3., 5., 11.], [0, 0, 0, 1, 1], [0, 1, 1, 2, 3], scale="none")
        tensor([-1.,  1.,  1., -3.,  3.])
    """
    formula = Formula(baseline, scale, ddof, eps, eps_mode, singleton, clip, shift, temperature, k)
    if (length is None) == (baseline == "length_weighted"):
        raise ValueError("length is for baseline='length_weighted', and needed there")
    result_dtype, reward = credit_dtype(reward), as_rewards(reward)
    groups = as_ids(group_id, "group_id", device=reward.device)
    rollouts = None if rollout_id is None else as_ids(rollout_id, "rollout_id", device=reward.device)
    tokens = None if length is None else as_ids(length, "length", device=reward.device)
    same_length(reward=reward, group_id=groups, rollout_id=rollouts, length=tokens)
    credit, rules = compare_in_groups(reward, groups, rollouts, formula=formula, dtype=dtype, length=tokens)
    enforce(rules)
    return credit.to(result_dtype)


def compare_in_groups(
    reward: Tensor,
    groups: Tensor,
    rollouts: Tensor | None = None,
    *,
    formula: Formula,
    dtype: torch.dtype | None = None,
    length: Tensor | None = None,
) -> tuple[Tensor, list[Rule]]:
    """:func:`group_relative_advantage` of checked columns, (N,) each, and what must hold of the rows.

    Returns:
        The advantage, (N,) in the dtype of `reward`, and rules: where one is broken the advantage means
        nothing.
    """
    if len(reward) == 0:
        return reward, []
    low = None if dtype is torch.float64 else dtype  # asks for the bits of the reshape formula
    if reward.device.type == "cpu" and (formula.scale != "mean" or float(reward.amin()) >= 0):
        found = find_groups(reward, groups, rollouts, in_order=low is not None)
        if (
            found is not None
            and (credit := _in_found_groups(reward, found, formula, low, length)) is not None
        ):
            return credit, _range_rules(credit, formula)
    if rollouts is None:
        rollouts = torch.arange(len(reward), device=reward.device)
    first, group_first = first_row(rollouts), first_row(groups)
    rules = _rules(reward, groups, rollouts, first, group_first, formula)
    rules.append(_size_rule(reward, rollouts))
    tokens = None if length is None else sum_by(first, length)
    credit = None if low is None else _as_reshaped(reward, rules, first, group_first, formula, low, tokens)
    if credit is None:
        by_id = ById(reward.double(), group_first, len(reward), is_first(first), tokens)
        credit = advantage_in_groups(by_id, formula).to(reward.dtype)
    return credit, [*rules, *_range_rules(credit, formula)]


def _as_reshaped(
    reward: Tensor,
    rules: Sequence[Rule],
    first: Tensor,
    group_first: Tensor,
    formula: Formula,
    low: torch.dtype,
    tokens: Tensor | None,
) -> Tensor | None:
    """The bits of the reshape formula, where rows lie as it needs them. One device read."""
    facts = read_facts(rules, reward, first, group_first)
    if facts.problem or not _is_uniform(facts, low):
        return None
    columns = [reward] + ([] if tokens is None else [tokens])
    number, blocks = gather_blocks(first, facts, *columns)
    credit = advantage_in_groups(_blocks(low, *blocks), formula).to(reward.dtype)
    return credit.reshape(-1).index_select(0, number)


def _in_found_groups(
    reward: Tensor, found: Found, formula: Formula, low: torch.dtype | None, length: Tensor | None
) -> Tensor | None:
    """The advantage of rows whose groups were found; None where one that is too small is to be named."""
    dtype = reward.dtype
    if found.heads is not None:
        reward = reward.index_select(0, found.heads)
        if length is not None:
            length = torch.zeros_like(found.heads).scatter_add_(0, found.number, length)
    if found.size and (low is None or squares_fit(largest(reward), len(reward), low)):
        columns = [reward] if length is None else [reward, length]
        grouping: Grouping = _blocks(low, *(column.view(-1, found.size) for column in columns))
    else:
        grouping = ById(reward.double(), found.label, found.labels, length=length)
    size = grouping.count
    if formula.least_group > 1 and bool(((size > 0) & (size < formula.least_group)).any()):
        return None
    credit = advantage_in_groups(grouping, formula).to(dtype).reshape(-1)
    return credit if found.number is None else credit.index_select(0, found.number)


def _blocks(low: torch.dtype | None, reward: Tensor, length: Tensor | None = None) -> Blocks:
    if low is None:
        return Blocks(reward.double(), length)
    return ReshapeFormula(reward.to(low), length)


def _is_uniform(facts: Facts, low: torch.dtype) -> bool:
    """Whether groups of one size lie in contiguous rows, with squares that a low dtype can hold."""
    size = facts.largest_group
    uniform = facts.contiguous and facts.smallest_group == size > 1
    return uniform and squares_fit(facts.peak, facts.rollouts, low)


def _range_rules(credit: Tensor, formula: Formula) -> list[Rule]:
    """A quotient may leave the range of a small dtype, and any where the scale is not the group's own std."""
    relative = formula.baseline in ("mean", "leave_one_out") and formula.scale in ("group", "none")
    bounded = relative and not formula.shift and credit.dtype is not torch.float16
    return [] if bounded else [fit_rule(credit, credit.dtype)]


def _rules(
    reward: Tensor,
    groups: Tensor,
    rollouts: Tensor,
    first: Tensor,
    group_first: Tensor,
    formula: Formula,
) -> list[Rule]:
    rules = identity_rules(rollouts, groups, first)
    rules += reward_rules(reward, rollouts, first, siblings_agree=True)
    if formula.least_group > 1:
        rules.append(_small_rule(groups, rollouts, first, group_first, formula))
    if formula.scale == "mean":
        rules.append(_negative_rule(reward, rollouts))
    return rules


def _small_rule(
    groups: Tensor, rollouts: Tensor, first: Tensor, group_first: Tensor, formula: Formula
) -> Rule:
    size = sum_by(group_first, is_first(first).long())
    needs = "at least two rollouts to compare; found one in {found}. Gate incomplete groups before, or set "
    needs += "singleton='zero' or 'raw'"
    if formula.k is not None:
        needs = f"at least k={formula.k} rollouts, of which the best is taken; found less in {{found}}. Gate "
        needs += "incomplete groups before, or set a smaller k"
    return Rule(
        size < formula.least_group,
        lambda row: f"group {int(groups[row])} (rollout {int(rollouts[row])})",
        f"a group needs {needs}",
    )


def _negative_rule(reward: Tensor, rollouts: Tensor) -> Rule:
    return Rule(
        reward < 0,
        lambda row: f"{float(reward[row])} at row {row} (rollout {int(rollouts[row])})",
        "scale='mean' divides by the group's mean, which needs rewards ≥ 0; found {found}",
    )


def _size_rule(reward: Tensor, rollouts: Tensor) -> Rule:
    return Rule(
        ~(reward.abs() <= largest_that_fits(len(reward), reward.dtype)),
        lambda row: f"{float(reward[row]):.3g} at row {row} (rollout {int(rollouts[row])})",
        f"rewards must leave room for differences in {reward.dtype}, and for squares in float64; found "
        "{found}",
    )
