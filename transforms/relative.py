"""A rollout's reward, measured against those of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .collapse import as_rewards, same_length
from .errors import BatchError
from .formula import (
    Baseline,
    Clip,
    EpsMode,
    Scale,
    Singleton,
    advantage_in_groups,
    check_options,
    is_relative,
)
from .grouping import Blocks, ById, squares_fit
from .ids import as_ids, first_row, is_first, sum_by
from .layout import ascending_blocks, gather_blocks, read_facts
from .rules import Rule, explain, identity_rules, reward_rules


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
    dtype: torch.dtype | None = None,
    length: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Measure each rollout's reward against its group, and give every segment its rollout's advantage.

    For rollout i of a group g with n rollouts (DeepSeekMath, arXiv:2402.03300, section 4.1.2)::

        A_i = (R_i − b_i) / s_i

        baseline  mean             b_i = Σ_{j∈g} R_j / n
                  leave_one_out    b_i = Σ_{j∈g, j≠i} R_j / (n − 1)         (RLOO, arXiv:2402.14740)
                  length_weighted  b_i = Σ_{j∈g} L_j R_j / Σ_{j∈g} L_j      (OPO, arXiv:2505.23585)
                  best_other       b_i = max_{j∈g, j≠i} R_j                 (pass@k, arXiv:2503.19595)
                  batch            b_i = Σ_j R_j / N over all rollouts
                  none             b_i = 0
        scale     group            s = std(R_j, j ∈ g)
                  leave_one_out    s_i = std(R_j, j ∈ g, j ≠ i)
                  batch            s = std(R_j, all rollouts)               (Lite PPO, arXiv:2508.08221)
                  mean             s = Σ_{j∈g} R_j / n, for rewards ≥ 0     (MaxRL)
                  nonzero          s = the share of rewards that are not 0  (GPG, arXiv:2504.02546)
                  none             s = 1, without ε                         (Dr. GRPO, arXiv:2503.20783)
        eps_mode  add              s + ε
                  clamp            max(s, ε)
                  skip             s + ε where s > 0, else undivided        (NeMo RL)
        std has the divisor n − ddof, at least 1

    Where the baseline or the scale is the group's own, a group whose rewards are all equal has an advantage
    of exactly 0: float32 round-off would leave up to 0.9 there. Where groups of one size lie in contiguous
    rows, fan-out or not, the statistics are taken in the reward's dtype by the reshape formula ``x =
    r.view(P, G); x -= x.mean(-1); x / (x.std(-1) + eps)``, to which the default is bit-equal; every other
    layout accumulates in float64 and rounds once. One device read, for the checks and the layout.

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
        dtype: of the statistics; None: as said above.
        length: (N,) tokens of each row, for ``length_weighted``; a rollout's are those of its segments.

    Returns:
        (N,) in the dtype of `reward`.

    Raises:
        BatchError: a negative or missing id, a rollout in two groups, a reward that is not finite or too
            large to square, siblings that disagree, a group of one under ``raise``, a negative reward under
            ``scale="mean"``. Each names the ids.

    Example:
        >>> group_relative_advantage([1., 3., 3., 5., 11.], [0, 0, 0, 1, 1], [0, 1, 1, 2, 3], scale="none")
        tensor([-1.,  1.,  1., -3.,  3.])
    """
    options: dict[str, Any] = {
        "baseline": baseline,
        "scale": scale,
        "ddof": ddof,
        "eps": eps,
        "eps_mode": eps_mode,
        "singleton": singleton,
        "clip": clip,
    }
    check_options(**options)
    if (length is None) == (baseline == "length_weighted"):
        raise ValueError("length is for baseline='length_weighted', and needed there")
    reward = as_rewards(reward)
    groups = as_ids(group_id, "group_id", device=reward.device)
    rollouts = None if rollout_id is None else as_ids(rollout_id, "rollout_id", device=reward.device)
    tokens = None if length is None else as_ids(length, "length", device=reward.device)
    same_length(reward=reward, group_id=groups, rollout_id=rollouts, length=tokens)
    if len(reward) == 0:
        return reward
    if reward.device.type == "cpu" and tokens is None and scale != "mean":
        seen = ascending_blocks(reward, groups, rollouts)
        if seen is not None:
            block, segments = seen
            credit = advantage_in_groups(Blocks(block.to(dtype or block.dtype)), **options).to(reward.dtype)
            credit = credit.reshape(-1)
            return credit.repeat_interleave(segments, output_size=len(reward)) if len(segments) else credit

    if rollouts is None:
        rollouts = torch.arange(len(reward), device=reward.device)
    first, group_first = first_row(rollouts), first_row(groups)
    rules = identity_rules(rollouts, groups, first)
    rules += reward_rules(reward, rollouts, first, siblings_agree=True)
    facts = read_facts(rules, reward, first, group_first)
    if facts.problem:
        explain(rules)
    room = torch.finfo(reward.dtype).max / 2
    if facts.peak > room or not squares_fit(facts.peak, len(reward), torch.float64):
        raise BatchError(
            f"rewards must leave room for differences in {reward.dtype}, and for squares in float64; found "
            f"{facts.peak:.3g}"
        )
    if singleton == "raise" and facts.smallest_group == 1 and is_relative(baseline, scale):
        explain([_lone_rule(groups, rollouts, first, group_first)])
    if scale == "mean" and facts.lowest < 0:
        explain([_negative_rule(reward, rollouts)])
    if tokens is not None:
        tokens = sum_by(first, tokens)
    size = facts.largest_group
    if facts.contiguous and facts.smallest_group == size > 1 and squares_fit(facts.peak, size, reward.dtype):
        columns = [reward.to(dtype or reward.dtype)] + ([] if tokens is None else [tokens])
        number, blocks = gather_blocks(first, facts, *columns)
        credit = advantage_in_groups(Blocks(*blocks), **options)
        return credit.reshape(-1).index_select(0, number).to(reward.dtype)
    by_id = ById(reward.to(dtype or torch.float64), group_first, is_first(first), tokens)
    return advantage_in_groups(by_id, **options).to(reward.dtype)


def _lone_rule(groups: Tensor, rollouts: Tensor, first: Tensor, group_first: Tensor) -> Rule:
    return Rule(
        sum_by(group_first, is_first(first).long()) == 1,
        lambda row: f"group {int(groups[row])} (rollout {int(rollouts[row])})",
        "a group needs at least two rollouts to compare; found one in {found}. Gate incomplete groups "
        "before, or set singleton='zero' or 'raw'",
    )


def _negative_rule(reward: Tensor, rollouts: Tensor) -> Rule:
    return Rule(
        reward < 0,
        lambda row: f"{float(reward[row])} at row {row} (rollout {int(rollouts[row])})",
        "scale='mean' divides by the group's mean, which needs rewards ≥ 0; found {found}",
    )
