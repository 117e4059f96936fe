"""A rollout's reward, measured against those of its group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import BatchTransform, has_key, nested_key, one_of
from .chunks import chunk_groups
from .collapse import as_rewards, explain_fan_out, same_length
from .columns import COUNTED, REWARD
from .counted import over_counted
from .errors import BatchError, listing
from .grouping import ById, Grouping, squares_fit
from .ids import as_ids, first_row, is_first
from .layout import ascending_blocks, gather_blocks, read_facts

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["group", "batch", "none"]
Singleton = Literal["zero", "raw", "raise"]
WithoutIds = Literal["raise", "chunks", "rigid_or_global"]

# The reward less its baseline. Leaving oneself out is the deviation times n / (n − 1).
BASELINES: dict[str, Callable[[Grouping], Tensor]] = {
    "mean": lambda g: g.deviation,
    "leave_one_out": lambda g: g.deviation * (g.count / (g.count - 1).clamp_min(1)),
}
SCALES: dict[str, Callable[[Grouping, int], Tensor] | None] = {
    "group": lambda g, ddof: g.std(ddof),
    "batch": lambda g, ddof: g.batch_std(ddof),
    "none": None,
}
SINGLETONS = ("zero", "raw", "raise")


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
) -> Tensor:
    """Measure each rollout's reward against its group, and give every segment its rollout's advantage.

    For rollout i of a group g with n rollouts (DeepSeekMath, arXiv:2402.03300, section 4.1.2)::

        A_i = (R_i − b_i) / s

        baseline  mean           b_i = Σ_{j∈g} R_j / n
                  leave_one_out  b_i = Σ_{j∈g, j≠i} R_j / (n − 1)       (RLOO, arXiv:2402.14740)
        scale     group          s = std(R_j, j ∈ g) + ε
                  batch          s = std(R_j, all rollouts) + ε         (Lite PPO, arXiv:2508.08221)
                  none           s = 1                                  (Dr. GRPO, arXiv:2503.20783)
                  std with the divisor n − ddof

    A group whose rewards are all equal has an advantage of exactly 0: float32 round-off would leave up to
    0.9 there. Where groups of one size lie in contiguous rows, fan-out or not, the result is bit-equal to
    the reshape formula ``x = r.view(P, G); x -= x.mean(-1); x / (x.std(-1) + eps)``; every other layout
    accumulates in float64 and rounds once. One device read, for the checks and the layout.

    Args:
        reward: (N,) floats, one a row; the segments of a rollout must agree.
        group_id: (N,) integers ≥ 0 in any order: which rollouts are compared.
        rollout_id: (N,) integers ≥ 0 in any order: which rows are one rollout. None: each row is one.
        baseline: what an advantage is measured from.
        scale: what it is divided by.
        ddof: 1 or 0, taken off the count in the std.
        eps: ε ≥ 0, added to the std, in units of the reward.
        singleton: what a group with one rollout gets: ``zero``, its reward as it is (``raw``), or an error.

    Returns:
        (N,) in the dtype of `reward`.

    Raises:
        BatchError: a negative or missing id, a rollout in two groups, a reward that is not finite or too
            large to square, siblings that disagree, a group of one under ``raise``. Each names the ids.

    Example:
        >>> group_relative_advantage([1., 3., 3., 5., 11.], [0, 0, 0, 1, 1], [0, 1, 1, 2, 3], scale="none")
        tensor([-1.,  1.,  1., -3.,  3.])
    """
    check_options(baseline, scale, ddof, eps, singleton)
    reward = as_rewards(reward)
    groups = as_ids(group_id, "group_id", device=reward.device)
    rollouts = None if rollout_id is None else as_ids(rollout_id, "rollout_id", device=reward.device)
    same_length(reward=reward, group_id=groups, rollout_id=rollouts)
    if len(reward) == 0:
        return reward

    def advantage(grouping: Grouping) -> Tensor:
        return advantage_in_groups(grouping, baseline, scale, ddof, eps, singleton)

    seen = ascending_blocks(reward, groups, rollouts) if reward.device.type == "cpu" else None
    if seen is not None:
        blocks, segments = seen
        credit = advantage(blocks).view(-1)
        return credit.repeat_interleave(segments, output_size=len(reward)) if len(segments) else credit

    if rollouts is None:
        rollouts = torch.arange(len(reward), device=reward.device)
    first, group_first = first_row(rollouts), first_row(groups)
    facts = read_facts(reward, groups, rollouts, first, group_first)
    if facts.problem:
        explain_fan_out(reward, rollouts, groups, siblings_agree=True)
    if singleton == "raise" and facts.smallest_group == 1:
        _raise_lone(groups, rollouts)
    size, dtype = facts.largest_group, reward.dtype
    uniform = facts.contiguous and facts.smallest_group == size > 1
    if uniform and squares_fit(facts.peak, size, dtype):
        blocks, number = gather_blocks(reward, first, facts)
        return advantage(blocks).view(-1).index_select(0, number)
    if not squares_fit(facts.peak, len(reward), torch.float64):
        raise BatchError(f"rewards must be small enough to square in float64; found {facts.peak:.3g}")
    by_id = ById(reward.double(), group_first, is_first(first))
    return advantage(by_id).to(dtype)


def advantage_in_groups(
    grouping: Grouping, baseline: str, scale: str, ddof: int, eps: float, singleton: str
) -> Tensor:
    """The formula of :func:`group_relative_advantage`, in whatever layout; no device read."""
    credit = BASELINES[baseline](grouping)
    nothing = grouping.equal()
    if (spread := SCALES[scale]) is not None:
        divisor = spread(grouping, ddof) + eps
        nothing = nothing | (divisor == 0)
        credit = credit / divisor
    credit = credit.masked_fill_(nothing, 0.0)  # in place: at a million rows an allocation costs as much
    if singleton == "raw":
        credit = torch.where(grouping.count == 1, grouping.reward, credit)
    return credit


def check_options(baseline: str, scale: str, ddof: int, eps: float, singleton: str) -> None:
    """Raise ValueError for an option that is none."""
    one_of("baseline", baseline, tuple(BASELINES))
    one_of("scale", scale, tuple(SCALES))
    one_of("ddof", ddof, (0, 1))
    one_of("singleton", singleton, SINGLETONS)
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be finite and ≥ 0; got {eps!r}")


def _raise_lone(groups: Tensor, rollouts: Tensor) -> None:
    members: dict[int, set[int]] = {}
    for group, rollout in zip(groups.tolist(), rollouts.tolist(), strict=True):
        members.setdefault(group, set()).add(rollout)
    lone = [f"group {g} (rollout {next(iter(m))})" for g, m in members.items() if len(m) == 1]
    raise BatchError(
        f"a group needs at least two rollouts to compare; found one in {listing(lone)}. "
        "Gate incomplete groups before, or set singleton='zero' or 'raw'"
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
        baseline: ``mean``, ``leave_one_out``.
        scale: ``group``, ``batch``, ``none``.
        ddof: 1 or 0.
        eps: ε ≥ 0, added to the std.
        singleton: ``zero``, ``raw``, ``raise``.
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
        singleton: Singleton = "zero",
        without_ids: WithoutIds = "raise",
        group_size: int | None = None,
        groups_per_batch: int | None = None,
        ndim: int = 3,
        reward_key: NestedKey = ("next", "reward"),
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey | None = "rollout_id",
        advantage_key: NestedKey = "advantage",
    ):
        check_options(baseline, scale, ddof, eps, singleton)
        keys = [nested_key(k) for k in (reward_key, group_key, rollout_key, advantage_key)]
        super().__init__([k for k in (*keys[:3], REWARD, COUNTED) if k is not None], [keys[3]])
        self.reward_key, self.group_key, self.rollout_key, self.advantage_key = keys
        self.baseline, self.scale, self.ddof, self.eps = baseline, scale, ddof, eps
        self.singleton = singleton
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
        columns = [reward, self._groups(batch, reward)]
        if self.rollout_key is not None:
            columns.append(self.column(batch, "rollout_key"))
            if not collapsed:
                _one_row_each(columns[2])
        credit = over_counted(batch, lambda *c: [self._advantage(*c)], *columns)[0]
        batch.set(self.advantage_key, credit.view(-1, *[1] * (self.ndim - 1)))
        self.measured = {"abs_mean": credit.abs().mean(), "zero": (credit == 0).double().mean()}
        return batch

    def _advantage(self, reward: Tensor, groups: Tensor, rollouts: Tensor | None = None) -> Tensor:
        return group_relative_advantage(
            reward,
            groups,
            rollouts,
            baseline=self.baseline,
            scale=self.scale,
            ddof=self.ddof,
            eps=self.eps,
            singleton=self.singleton,
        )

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
    if bool(is_first(first_row(rollouts)).all()):
        return
    ids, counts = (x.tolist() for x in rollouts.unique(return_counts=True))
    found = [f"rollout {i} in {n} rows" for i, n in zip(ids, counts, strict=True) if n > 1]
    raise BatchError(
        f"each rollout must be one row; found {listing(found)}. They would be counted once per row: "
        "put FanOutCollapse before GroupRelativeAdvantage"
    )
