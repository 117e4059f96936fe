"""A rollout's reward, measured against those of its group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import BatchTransform, as_dtype, has_key, nested_key, one_of
from .chunks import chunk_groups
from .collapse import as_rewards, same_length
from .columns import COUNTED, REWARD
from .counted import over_counted
from .criteria import count_tokens
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
from .several import MISSING, SEVERAL, Missing, Several, advantage_of_several

WithoutIds = Literal["raise", "chunks", "rigid_or_global"]


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


class GroupRelativeAdvantage(BatchTransform):
    """Write each row's advantage (:func:`group_relative_advantage`).

    After :class:`FanOutCollapse` it takes the rollout's reward from there; without it a rollout_id that
    repeats is an error. Rows that are out of the statistics get 0. One device read, for the checks; one
    more each without FanOutCollapse, where rows are excluded, and where `without_ids` is not ``raise``.

    Reads ``("headrace", "reward")`` if there, else `reward_key`; `group_key`, `rollout_key`. Writes
    `advantage_key`, (N,) with as many trailing ones as `ndim` asks for, and `group_key` where it made
    the groups.

    Args:
        baseline: ``mean``, ``leave_one_out``, ``length_weighted``, ``best_other``, ``batch``, ``none``.
        scale: ``group``, ``leave_one_out``, ``batch``, ``mean``, ``nonzero``, ``none``.
        ddof: 1 or 0.
        eps: ε ≥ 0.
        eps_mode: ``add``, ``clamp``, ``skip``.
        singleton: ``zero``, ``raw``, ``raise``.
        clip: [low, high] for the result, one of which may be null.
        dtype: of the statistics, such as ``float64``; None: as the function says.
        several: how the columns of ``FanOutCollapse(columns=K)`` become one advantage: the ``sum`` of the
            weighted rewards is compared, or each is (``decoupled``) and the advantages are added up.
        weights: of the columns; None: all 1.
        missing: what a NaN reward does: ``raise``, or ``skip``, which takes it out of its column's
            statistics; a rollout with no reward at all gets 0.
        without_ids: what follows where no row has a group id. ``raise``; ``chunks``: consecutive
            `group_size` rollouts, the last group may be short; ``rigid_or_global``: chunks if there are
            exactly `group_size` × `groups_per_batch` rollouts, else one global group (what miles does).
        group_size: rollouts per group, for `without_ids`.
        groups_per_batch: groups per batch, for ``rigid_or_global``.
        ndim: dimensions of the advantage; 3 is (N, 1, 1), as GRPOLoss takes it.
        reward_key: (N,), (N, 1) or (N, 1, 1) float.
        group_key: (N,) or (N, 1) int ≥ 0.
        rollout_key: (N,) or (N, 1) int ≥ 0; None: every row is a rollout of its own.
        advantage_key: where the result goes.
        mask_key: (N, T) bool, whose tokens ``length_weighted`` counts.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: as the function; a repeated rollout_id without FanOutCollapse.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict(
        ...     {"rollout_id": [0, 1, 2], "group_id": [0, 1, 0], ("next", "reward"): [0.0, 10.0, 2.0]},
        ...     batch_size=[3],
        ... )
        >>> GroupRelativeAdvantage(scale="none")(td)["advantage"].flatten().tolist()
        [-1.0, 0.0, 1.0]
    """

    def __init__(
        self,
        *,
        baseline: Baseline = "mean",
        scale: Scale = "group",
        ddof: int = 1,
        eps: float = 1e-6,
        eps_mode: EpsMode = "add",
        singleton: Singleton = "zero",
        clip: Clip | None = None,
        dtype: torch.dtype | str | None = None,
        several: Several = "sum",
        weights: Sequence[float] | None = None,
        missing: Missing = "raise",
        without_ids: WithoutIds = "raise",
        group_size: int | None = None,
        groups_per_batch: int | None = None,
        ndim: int = 3,
        reward_key: NestedKey = ("next", "reward"),
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey | None = "rollout_id",
        advantage_key: NestedKey = "advantage",
        mask_key: NestedKey = ("masks", "all_assistant_mask"),
    ):
        keys = [nested_key(k) for k in (reward_key, group_key, rollout_key, advantage_key, mask_key)]
        lengths = [keys[4]] if baseline == "length_weighted" else []
        reads = [k for k in (*keys[:3], REWARD, COUNTED, *lengths) if k is not None]
        super().__init__(reads, [keys[3]])
        self.final_keys = tuple(reads)
        self.reward_key, self.group_key, self.rollout_key, self.advantage_key, self.mask_key = keys
        self.baseline, self.scale, self.ddof, self.eps = baseline, scale, ddof, eps
        self.eps_mode, self.singleton, self.clip = eps_mode, singleton, clip
        self.dtype = as_dtype(dtype)
        check_options(**self._options())
        self.several = one_of("several", several, SEVERAL)
        self.weights, self.missing = weights, one_of("missing", missing, MISSING)
        self.without_ids = one_of("without_ids", without_ids, ("raise", "chunks", "rigid_or_global"))
        self.group_size, self.groups_per_batch = group_size, groups_per_batch
        if without_ids != "raise" and not group_size:
            raise ValueError(f"without_ids={without_ids!r} needs group_size, the rollouts per group")
        if without_ids == "rigid_or_global" and not groups_per_batch:
            raise ValueError("without_ids='rigid_or_global' needs groups_per_batch")
        self.ndim = one_of("ndim", ndim, (1, 2, 3))

    def apply(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the advantage."""
        collapsed = has_key(batch, REWARD)
        reward = batch.get(REWARD) if collapsed else as_rewards(self.column(batch, "reward_key"))
        columns = {"reward": reward, "group_id": self._groups(batch, reward)}
        if self.rollout_key is not None:
            columns["rollout_id"] = self.column(batch, "rollout_key")
        if self.baseline == "length_weighted":
            columns["length"] = count_tokens(batch, self.mask_key, reader=type(self).__name__)
        credit = over_counted(batch, self._advantage if collapsed else self._alone, **columns)
        batch.set(self.advantage_key, credit.view(-1, *[1] * (self.ndim - 1)))
        self.measured = {"abs_mean": credit.abs().mean(), "zero": (credit == 0).double().mean()}
        if self.missing == "skip":
            self.measured["unscorable"] = reward.isnan().reshape(len(batch), -1).all(-1).sum()
        return batch

    def _advantage(self, reward: Tensor, **columns: Tensor) -> Tensor:
        one = partial(group_relative_advantage, dtype=self.dtype, **self._options())
        if reward.ndim == 1 and self.missing == "raise":
            return one(reward=reward, **columns)
        return advantage_of_several(
            reward.reshape(len(reward), -1),
            one,
            weights=self.weights,
            several=self.several,
            missing=self.missing,
            **columns,
        )

    def _alone(self, **columns: Tensor) -> Tensor:
        if "rollout_id" in columns:
            _one_row_each(columns["rollout_id"])
        return self._advantage(**columns)

    def _options(self) -> dict[str, Any]:
        names = ("baseline", "scale", "ddof", "eps", "eps_mode", "singleton", "clip")
        return {name: getattr(self, name) for name in names}

    def _groups(self, batch: TensorDictBase, reward: Tensor) -> Tensor:
        if self.without_ids == "raise":
            return self.column(batch, "group_key")
        if has_key(batch, self.group_key):
            groups = self.column(batch, "group_key")
            # All rows unset is a batch without ids; some rows unset is wrong data, for the function to name.
            if not bool((groups < 0).all()):
                return groups
        rollouts = None if self.rollout_key is None else self.column(batch, "rollout_key")
        per_batch = self.groups_per_batch if self.without_ids == "rigid_or_global" else None
        groups = chunk_groups(len(reward), rollouts, self.group_size or 0, per_batch, device=reward.device)
        batch.set(self.group_key, groups)
        return groups


def _one_row_each(rollouts: Tensor) -> None:
    first = first_row(rollouts)
    if not bool(is_first(first).all()):
        counts = sum_by(first, torch.ones_like(first))
        rule = Rule(
            counts > 1,
            lambda row: f"rollout {int(rollouts[row])} in {int(counts[row])} rows",
            "each rollout must be one row; found {found}. They would be counted once per row: put "
            "FanOutCollapse before GroupRelativeAdvantage",
        )
        explain([rule])
