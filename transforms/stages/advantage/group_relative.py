"""The group-relative advantage: the reward of a rollout compared with the rewards of its group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from tensordict import NestedKey
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import (
    BatchError,
    BatchTransform,
    ColumnNames,
    Ids,
    Missing,
    Rows,
    as_rewards,
    credit_dtype,
    require_identity,
    require_rewards,
    weighted_reward,
)
from headrace.transforms.table.ids import mean_of
from headrace.transforms.table.options import as_dtype, takes_options
from headrace.transforms.table.rewards import Several, factors_of
from headrace.transforms.table.schema import COMPARED, COUNTED, REWARD, REWARDS
from headrace.transforms.table.votes import note_votes_only

from .baselines import (
    Baseline,
    BaselineOf,
    Clip,
    Ddof,
    EpsMode,
    Formula,
    Grouped,
    Scale,
    Singleton,
    advantage_in_groups,
    baseline_in_groups,
    largest_to_square,
)
from .reshape_formula import reshaped

Compared = Callable[[int], Tensor]
"""See :data:`COMPARED`."""


@takes_options
def group_relative_advantage(
    reward: Tensor | Sequence[float],
    group_id: Tensor | Sequence[int],
    rollout_id: Tensor | Sequence[int] | None = None,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    ddof: Ddof = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    eps_mode: EpsMode = "add",
    clip: Clip | None = None,
    shift: float = 0.0,
    k: int | None = None,
    baseline_of: BaselineOf = "group",
    temperature: float = 1.0,
    dtype: torch.dtype | None = None,
    length: Tensor | Sequence[int] | None = None,
    baseline_value: Tensor | Sequence[float] | None = None,
    votes_only: Tensor | Sequence[bool] | None = None,
) -> Tensor:
    """Compute the advantage of each rollout within its group. All its segments get this advantage.

    For rollout i of a group g with n rollouts (DeepSeekMath, arXiv:2402.03300, section 4.1.2)::

        A_i = (R_i − b_i − δ) / s_i

        baseline  mean             b_i = Σ_{j∈g} R_j / n
                  leave_one_out    b_i = Σ_{j∈g, j≠i} R_j / (n − 1)         (RLOO, arXiv:2402.14740)
                  median           b_i = median(R_j, j ∈ g)                 (MC-GRPO, arXiv:2601.22582)
                  length_weighted  b_i = Σ_{j∈g} L_j R_j / Σ_{j∈g} L_j      (OPO, arXiv:2505.23585)
                  best_other       b_i = max_{j∈g, j≠i} R_j                 (pass@k, arXiv:2503.19595)
                  best_of_k        b_i = R_i − mean_K max(R_i − max_{j∈K} R_j, 0), over all sets K of
                                   k − 1 other rollouts                     (PKPO, arXiv:2505.15201)
                  log_mean_exp     b_i = τ log(Σ_{j∈g} exp(R_j/τ) / n)      (OPMD of Trinity-RFT)
                  batch            b_i = Σ_j R_j / N over all N rollouts
                  column           b_i = `baseline_value` of the rollout, such as the value of a model
                  none             b_i = 0
        scale     group            s = std(R_j, j ∈ g)
                  leave_one_out    s_i = std(R_j, j ∈ g, j ≠ i)
                  mad              s = median(|R_j − median(R_j)|)          (MC-GRPO, arXiv:2601.22582)
                  batch            s = std(R_j, all rollouts)               (Lite PPO, arXiv:2508.08221)
                  mean             s = Σ_{j∈g} R_j / n, for rewards ≥ 0     (MaxRL)
                  nonzero          s = fraction of rewards that are not 0   (GPG, arXiv:2504.02546)
                  none             s = 1, without ε                         (Dr. GRPO, arXiv:2503.20783)
        eps_mode  add              s + ε
                  clamp            max(s, ε)
                  skip             s + ε if s > 0, else 1                   (NeMo RL)

    δ is `shift`, τ is `temperature`. std has the divisor max(n − ddof, 1).

    With ``baseline_of="votes_only"``, b_i is the ``mean``, ``median`` or ``log_mean_exp`` of those n rollouts
    of the group that vote and do not train. With one greedy rollout in each group this is ReMax
    (arXiv:2310.10505), and with ``log_mean_exp`` the estimate of V* of A*-PO (arXiv:2505.20686).

    With ``best_of_k``, the mean of A_i ∇ log π over the group is 1/k times an unbiased estimate of the
    gradient of the expected best reward of k rollouts, for any k ≤ n. With k = n the advantage is that of
    ``best_other``, clipped below at 0.

    A group with equal rewards has an advantage of exactly 0 under the scales ``group``, ``leave_one_out`` and
    ``mad``. Under the other scales it is 0 if the baseline is computed per group and `shift` is 0. Rewards
    that are all 0 get 0 under ``scale="mean"``, except with ``skip``. A small ε never amplifies rounding
    errors.

    Statistics are float64 and rounded once. Sums do not depend on the order of their terms. If no statistic
    is over the batch, the advantage depends bit for bit only on the rewards of the group. The order of the
    rows and the other groups of the batch do not change it.

    Args:
        reward: (N,) floats, one per row; all segments of a rollout must have the same reward.
        group_id: (N,) integers ≥ 0 in any order; rollouts with the same id are compared.
        rollout_id: (N,) integers ≥ 0 in any order; rows with the same id are one rollout. None: each row is a
            rollout.
        baseline: b in the equation.
        scale: s in the equation.
        ddof: 1 or 0, subtracted from the count in the std.
        eps: ε ≥ 0, in units of the scale.
        singleton: the advantage of a group with one rollout, if the baseline or the scale needs the group.
            ``zero``; ``raw``, its reward; or ``raise`` an error.
        eps_mode: how ε is added to the scale.
        clip: [low, high], bounds of the advantage; one of them may be None.
        shift: δ, in units of the reward. δ < 0 gives more weight to successes, and δ > 0 to failures. With
            off-policy samples δ changes the expected gradient (AsymRE, arXiv:2506.20520). A group with equal
            rewards then has the advantage −δ under ``scale="none"``.
        k: for ``best_of_k``, from 2 to the size of the smallest group.
        baseline_of: the rollouts that b is computed from: all of the ``group``, or those that vote only.
        temperature: τ > 0, for ``log_mean_exp``, in units of the reward.
        dtype: dtype of the computation. None: float64. A smaller dtype gives the same bits as the reshape
            formula in that dtype, if groups of one size are contiguous (:func:`.reshape_formula.reshaped`).
        length: (N,) tokens per row, for ``length_weighted``; the length of a rollout is the sum over its
            rows.
        baseline_value: (N,) floats, b for ``column``; equal on all segments of a rollout.
        votes_only: (N,) bools, rollouts that vote and do not train, for ``baseline_of="votes_only"``.

    Returns:
        (N,) in the dtype of `reward`, at least float32.

    Raises:
        BatchError: an id is negative or missing, a rollout is in two groups, a reward is not finite or too
            large to square, the segments of a rollout have different rewards, a group has one rollout under
            ``raise`` or fewer than k, a reward is negative under ``scale="mean"``, a group has no rollout
            that votes only, or a given baseline is not finite or differs in a rollout. The message lists ids.
        ValueError: an option has an unknown value, or two options exclude each other.

    Example:
        >>> group_relative_advantage([1., 3., 3., 5., 11.], [0, 0, 0, 1, 1], [0, 1, 1, 2, 3], scale="none")
        tensor([-1.,  1.,  1., -3.,  3.])
    """
    formula = Formula(
        baseline, scale, ddof, eps, eps_mode, singleton, clip, shift, k, baseline_of, temperature
    )
    for option, column, is_read in (
        ("baseline='length_weighted' needs length", length, baseline == "length_weighted"),
        ("baseline='column' needs baseline_value", baseline_value, baseline == "column"),
        ("baseline_of='votes_only' needs votes_only", votes_only, baseline_of == "votes_only"),
    ):
        if (column is None) == is_read:
            raise ValueError(f"{option}, and no other value of the option reads it")
    result_dtype, reward = credit_dtype(reward), as_rewards(reward)
    rows = Rows.of(
        reward=reward,
        group=group_id,
        rollout=rollout_id,
        length=length,
        baseline_value=None if baseline_value is None else as_rewards(baseline_value).to(reward.device),
        votes_only=None if votes_only is None else torch.as_tensor(votes_only, device=reward.device),
    )
    if len(reward) == 0:
        return reward.to(result_dtype)
    if votes_only is not None:
        note_votes_only(rows)
    length, value = (rows[role] if rows.has(role) else None for role in ("length", "baseline_value"))
    credit, _ = advantage_of(rows, rows["reward"], formula, dtype=dtype, length=length, value=value)
    require_fit(rows, credit, result_dtype)
    return credit.to(result_dtype).to(reward.device)


def advantage_of(
    rows: Rows,
    reward: Tensor,
    formula: Formula,
    *,
    dtype: torch.dtype | None = None,
    length: Tensor | None = None,
    value: Tensor | None = None,
) -> tuple[Tensor, Compared]:
    """Check rewards and compute the advantage of each row.

    Args:
        rows: the rows; excluded ones get 0 and do not enter the statistics.
        reward: (M,) float64, equal on all segments of a rollout.
        formula: baseline, scale and the other options.
        dtype: below float64, the advantage has the bits of the reshape formula in this dtype, where that
            formula applies (:func:`.reshape_formula.reshaped`). None: float64.
        length: (M,) int64, tokens per row, for ``length_weighted``.
        value: (M,) float64, the baseline of each row's rollout, for ``column``.

    Returns:
        (M,) float64, the advantage; and a function that returns what each row was compared with, for reports.

    Raises:
        BatchError: as :func:`group_relative_advantage`.
    """
    require_identity(rows)
    require_rewards(rows, reward, siblings_agree=True)
    if value is not None:
        require_baselines(rows, value)
    voters, per_rollout = rows.voters, rows.to_voters(reward)
    if len(voters) == 0:
        return torch.zeros_like(reward), none_compared
    groups = voters.groups
    if formula.least_group > 1:
        needs = "at least two rollouts; found one in {found}. Gate incomplete groups, or set {singleton=zero}"
        if formula.k is not None:
            needs = f"at least k={formula.k} rollouts; found fewer in {{found}}. "
            needs += "Gate incomplete groups, or lower k"
        voters.require(
            groups.spread(groups.count >= formula.least_group),
            f"each group needs {needs}",
            lambda row: f"group {voters.name('group', row)} (rollout {voters.name('rollout', row)})",
        )
    votes_only = None
    if formula.baseline_of == "votes_only":
        if (votes_only := voters.votes_only) is None:
            raise voters.missing("votes_only")
        voters.require(
            groups.spread(groups.any(votes_only)),
            "baseline_of='votes_only' needs a rollout that votes only in each group; found none in {found}. "
            "Mark a rollout in {column}, or drop these groups",
            lambda row: f"group {voters.name('group', row)}",
            role="votes_only",
            unit=groups,
        )
    require_range(voters, per_rollout, formula)
    tokens = None if length is None else rows.to_voters(rows.rollouts.spread(rows.rollouts.sum(length)))
    advantage = None if dtype in (None, torch.float64) else reshaped(per_rollout, groups, formula, dtype)
    given = None if value is None else rows.to_voters(value)
    grouped = partial(Grouped, per_rollout, groups, tokens, given, votes_only)
    if advantage is None:
        g = grouped()
        advantage = g.unsorted(advantage_in_groups(g, formula))
    # The function does not hold the view of the table. A view would keep the batch in memory until the
    # report is read.
    compared = partial(compared_by_row, grouped, rows.rollouts, rows.index, formula)
    return rows.from_voters(advantage), compared


def none_compared(size: int) -> Tensor:
    """:data:`Compared` for rows that are compared with nothing."""
    return torch.tensor([0, torch.nan], dtype=torch.float64).repeat(size, 1)


def compared_by_row(
    grouped: Callable[[], Grouped], rollouts: Ids, index: Tensor | None, formula: Formula, size: int
) -> Tensor:
    """:data:`Compared` for rows at an `index` of the table, whose rollouts voted."""
    g = grouped()
    number = g.spread(g.count) if formula.is_relative else torch.full_like(g.reward, len(g.reward))
    if g.votes_only is not None:
        number = g.spread(g.of_votes_only.count) + ~g.votes_only
    level = torch.stack([g.unsorted(number), g.unsorted(baseline_in_groups(g, formula))], 1)
    of_rollouts = none_compared(rollouts.n)
    of_rollouts[rollouts.of[rollouts.is_first]] = level  # rollouts that vote
    each = rollouts.spread(of_rollouts)
    if rollouts.counts is not None:
        each = torch.where(rollouts.counts[:, None], each, none_compared(len(each)))
    index = torch.arange(len(each)) if index is None else index
    return none_compared(size).index_copy_(0, index, each)


def compared_by_reward(by_reward: Sequence[Compared], size: int) -> Tensor:
    """:data:`Compared` for rewards that are compared one by one: the largest number, and no baseline."""
    number = torch.stack([compared(size)[:, 0] for compared in by_reward]).amax(0)
    return torch.stack([number, torch.full_like(number, torch.nan)], 1)


def require_baselines(rows: Rows, value: Tensor) -> None:
    """Require finite baselines (M,), equal on all rows of a rollout.

    Raises:
        BatchError: a baseline is not finite, or differs within a rollout; the message lists the rows.
    """
    first = rows.rollouts.spread(value[rows.rollouts.first])
    rows.require(
        value.isfinite() & (first == value),
        "every rollout needs one finite baseline in {column}; found {found}",
        lambda row: f"{float(value[row])} at row {rows.at(row)} (rollout {rows.name('rollout', row)})",
        role="baseline_value",
    )


def require_range(rows: Rows, reward: Tensor, formula: Formula) -> None:
    """Require rewards whose squares fit into float64, the dtype of the statistics.

    ``scale="mean"`` also requires rewards ≥ 0.

    Raises:
        BatchError: a reward is too large or negative; the message lists the rows.
    """
    if formula.scale == "mean":
        rows.require(
            reward >= 0,
            "scale='mean' divides by the group's mean, which needs rewards ≥ 0; found {found}",
            lambda row: f"{float(reward[row])} at row {rows.at(row)} (rollout {rows.name('rollout', row)})",
        )
    largest = largest_to_square(len(reward), torch.float64)
    rows.require(
        reward.abs() <= largest,
        f"rewards must be at most {largest:.2g}, so that the sum of their squares fits into float64; found "
        "{found}",
        lambda row: f"{float(reward[row]):.3g} at row {rows.at(row)} (rollout {rows.name('rollout', row)})",
    )


def require_fit(rows: Rows, credit: Tensor, dtype: torch.dtype) -> None:
    """Require advantages that fit into the dtype that they will be rounded to.

    Raises:
        BatchError: an advantage is too large or NaN; the message lists the rows.
    """
    rows.require(
        credit.abs() <= torch.finfo(dtype).max,
        f"an advantage must fit into {dtype}; found {{found}}. Scale the rewards, set clip, or give rewards "
        "of a larger dtype",
        lambda row: f"{float(credit[row]):g} at row {rows.at(row)}",
    )


class GroupRelativeAdvantage(
    BatchTransform,
    columns=("reward", "group", "rollout", "advantage", "loss_mask", "baseline_value"),
):
    """Compute the advantage of each row within its group (:func:`group_relative_advantage`).

    After :class:`FanOutCollapse` the stage reads the reward that FanOutCollapse wrote. Without
    FanOutCollapse, two rows with the same rollout id are an error. Excluded rows get 0.

    Reads `group_key`, `rollout_key`, and ``("headrace", "reward")`` if it exists, else `reward_key`. Reads
    ``("headrace", "rewards")`` with ``several="decoupled"`` or `weights`, `loss_mask_key` with
    ``baseline="length_weighted"``, `baseline_value_key` with ``baseline="column"``, and the column
    ``votes_only`` with ``baseline_of="votes_only"``. Writes `advantage_key`, (N, 1, 1), as GRPOLoss reads it,
    and `group_key` if `without_ids` made the groups.

    Args:
        baseline: ``mean``, ``leave_one_out``, ``median``, ``length_weighted``, ``best_other``, ``best_of_k``,
            ``log_mean_exp``, ``batch``, ``column``, ``none``. A ``column`` has one number for each rollout,
            such as the value of a model. Groups with equal rewards then train, so do not filter them.
        scale: ``group``, ``leave_one_out``, ``mad``, ``batch``, ``mean``, ``nonzero``, ``none``.
        ddof: 1 or 0, subtracted from the count in the std.
        eps: ε ≥ 0, added to the scale.
        eps_mode: ``add``, ``clamp``, ``skip``.
        singleton: ``zero``, ``raw``, ``raise``.
        clip: [low, high], bounds of the advantage; one of them may be null. With several rewards, they
            are bounds of the sum of the advantages.
        shift: δ, added to the baseline, in units of the reward.
        k: number of rollouts, for ``best_of_k``, ≥ 2.
        baseline_of: ``group``, ``votes_only``: the rollouts of the group that the baseline is computed from.
        temperature: τ > 0, for ``log_mean_exp``, in units of the reward.
        dtype: dtype of the statistics; None: float64. ``float32`` gives the bits of the reshape formula if
            groups of one size are contiguous, as the function describes.
        several: how the K rewards of ``FanOutCollapse(columns=K)`` become one advantage. ``sum`` compares
            their weighted sum. ``decoupled`` compares each reward and adds up the weighted advantages.
        weights: weights of the rewards for ``decoupled``, equal to those of FanOutCollapse; None: all 1.
        missing: what happens to a missing reward (NaN). ``raise`` an error. ``skip`` leaves the reward out
            of the statistics; under ``decoupled``, of the statistics of its column. A rollout without any
            reward gets the advantage 0. ``mask`` equals ``skip``; use it after
            ``FanOutCollapse(missing="mask")``, so that each rollout without any reward is masked.
        without_ids: [P, G] makes groups as miles does, if no row has a group id. If there are exactly P · G
            rollouts, each G consecutive ones are a group; else all are one group. None: rows need ids.
        names: other names of columns, such as `reward_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: as the function; also if a rollout id is on two rows without FanOutCollapse.

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
        ddof: Ddof = 1,
        eps: float = 1e-6,
        eps_mode: EpsMode = "add",
        singleton: Singleton = "zero",
        clip: Clip | None = None,
        shift: float = 0.0,
        k: int | None = None,
        baseline_of: BaselineOf = "group",
        temperature: float = 1.0,
        dtype: torch.dtype | str | None = None,
        several: Several = "sum",
        weights: Sequence[float] | None = None,
        missing: Missing = "raise",
        without_ids: Sequence[int] | None = None,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        lengths = self.loss_mask_key if baseline == "length_weighted" else None
        values = self.baseline_value_key if baseline == "column" else None
        reads = [self.reward_key, self.group_key, self.rollout_key, REWARD, REWARDS, COUNTED, lengths, values]
        super().__init__(reads, [self.advantage_key])
        self.final_keys = tuple(self.in_keys)
        self.baseline, self.scale, self.ddof, self.eps = baseline, scale, ddof, eps
        self.eps_mode, self.singleton, self.clip = eps_mode, singleton, clip
        self.shift, self.k, self.baseline_of, self.temperature = shift, k, baseline_of, temperature
        self.formula = Formula(
            baseline, scale, ddof, eps, eps_mode, singleton, clip, shift, k, baseline_of, temperature
        )
        self.dtype = as_dtype(dtype)
        self.several, self.weights = several, weights
        if several == "decoupled" and baseline == "column":
            raise ValueError(
                "baseline='column' has one number for each rollout, and several='decoupled' compares each of "
                "its rewards: set several='sum', or another baseline"
            )
        self.missing = missing
        self.without_ids = without_ids
        if without_ids is not None and (len(without_ids) != 2 or min(without_ids) < 1):
            raise ValueError(
                "without_ids must be [P, G], the number of groups per batch and of rollouts per group, both "
                f"≥ 1; got {without_ids!r}"
            )

    @property
    def within_groups(self) -> bool:  # type: ignore[override]
        """False if baseline or scale use the whole batch, or if groups are made from row positions."""
        return self.formula.within_groups and self.without_ids is None

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """Tokens in the loss mask, for ``length_weighted``."""
        return [(self.loss_mask_key, None)] if self.baseline == "length_weighted" else []

    def decide(self, rows: Rows) -> None:
        """Write the advantage."""
        # 1. One reward for each rollout, on all its rows.
        if self.without_ids is not None:
            self._make_groups(rows, *self.without_ids)
        reward = rows.reward
        if not rows.has(REWARD):
            rollouts = rows.rollouts
            rows.require(
                rollouts.is_first,
                "each rollout must be one row; found {found}. Its reward would be counted once per row: put "
                "FanOutCollapse before GroupRelativeAdvantage",
                lambda row: (
                    f"rollout {rows.name('rollout', row)} in "
                    f"{int((rollouts.labels == rollouts.labels[row]).sum())} rows"
                ),
            )
        if self.several == "decoupled" or self.weights is not None:
            rewards = rows[REWARDS] if rows.has(REWARDS) else reward[:, None]
            self._require_weighed(rows, reward, rewards)
        if self.missing == "mask":
            require_rewards(rows, reward, siblings_agree=False)
        # 2. Compare the reward within the group: each column by itself, or the weighted sum.
        length = rows.lengths if self.baseline == "length_weighted" else None
        value = rows.number("baseline_value").double() if self.baseline == "column" else None
        if self.several == "decoupled":
            factors, each = factors_of(self.weights, rewards.shape[1]), replace(self.formula, clip=None)
            of_columns = [self._among_known(rows, column, each, length, None) for column in rewards.unbind(1)]
            credits, by_reward = zip(*of_columns, strict=True)
            credit = torch.stack([w * of_one for w, of_one in zip(factors, credits, strict=True)]).sum(0)
            compared: Compared = partial(compared_by_reward, by_reward)
            if self.clip is not None:  # rows without a reward, and excluded rows, keep 0
                scored = ~reward.isnan() if rows.counted is None else ~reward.isnan() & rows.counted
                credit = torch.where(scored, credit.clamp(*self.clip), credit)
        else:
            credit, compared = self._among_known(rows, reward, self.formula, length, value)
        rows.table.notes[COMPARED] = compared
        # 3. Write the advantage in the dtype of the collected reward.
        collected = rows.table.dtypes.get(
            self.reward_key, rows.dtype(REWARD) if rows.has(REWARD) else torch.float64
        )
        dtype = credit_dtype(collected)
        require_fit(rows, credit, dtype)
        rows.put("advantage", credit, dtype=dtype, ndim=3)
        if self.missing == "skip" and not rows.has(REWARD):
            kept = collected if collected.is_floating_point else torch.float64
            rows.put(REWARD, reward, dtype=torch.promote_types(kept, torch.float32), ndim=1)
        # 4. Record the metrics.
        among = credit if rows.counted is None else credit[rows.counted]
        rows.metric("abs_mean", mean_of(among.abs()))
        rows.metric("zero", mean_of(among == 0))
        if self.missing == "skip":
            rows.metric("unscorable", reward.isnan().sum())

    def _among_known(
        self, rows: Rows, reward: Tensor, formula: Formula, length: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Compared]:
        """Compute :func:`advantage_of`. Missing rewards are excluded and get 0, or raise an error."""
        known = None if self.missing == "raise" else ~reward.isnan()
        if known is None or bool(known.all()):
            return advantage_of(rows, reward, formula, dtype=self.dtype, length=length, value=value)
        tokens, values = (None if column is None else column[known] for column in (length, value))
        found, compared = advantage_of(
            rows.where(known), reward[known], formula, dtype=self.dtype, length=tokens, value=values
        )
        return torch.zeros_like(reward).masked_scatter_(known, found), compared

    def _require_weighed(self, rows: Rows, reward: Tensor, rewards: Tensor) -> None:
        """Require that each rollout's reward is exactly the weighted sum of its rewards.

        Otherwise filters, shaping and the report would use another reward than the advantage.
        """
        dtype = rows.dtype(REWARDS if rows.has(REWARDS) else REWARD if rows.has(REWARD) else "reward")
        expected = weighted_reward(rewards.to(dtype), self.weights).double()
        todo = {
            "sum": "Give the weights to FanOutCollapse, and none to the advantage",
            "decoupled": "Set the weights once, pipeline.stages.advantage.weights, which the collapse of gdpo"
            " follows (in Python give FanOutCollapse the same), and use no stage that changes the reward: "
            "several='decoupled' would ignore the change",
        }
        ok = (reward == expected) | (reward.isnan() & expected.isnan())
        rows.require(
            ok,
            "a rollout's reward, which filters and the report read, must be the sum of its rewards with the "
            f"weights of the advantage; found {{found}}. {todo[self.several]}",
            lambda row: (
                f"{float(reward[row]):g} in place of {float(expected[row]):g} for rollout "
                f"{rows.name('rollout', row)}"
            ),
        )

    def _make_groups(self, rows: Rows, number: int, size: int) -> None:
        """Write group ids from row positions, if no row has a group id."""
        if rows.table.ranks.size > 1:
            raise BatchError(
                f"without_ids={self.without_ids!r} makes groups from row positions, which are not known "
                "across ranks: stamp group_id where prompts are dispatched"
            )
        # If only some rows have no id, the batch is invalid and is refused later.
        if rows.has("group") and bool((rows["group"] >= 0).any()):
            return
        rollouts = rows.on_arrival.ids("rollout", checked=False)
        place = rollouts.spread((rollouts.is_first.cumsum(0) - 1)[rollouts.first])  # in order of first rows
        group = place // size if rollouts.n == number * size else torch.zeros_like(place)
        rows.put("group", rows.from_arrival(group), dtype=torch.int64, ndim=1, fill=-1)

    def advantage_by_row(self, reward: Tensor, group_id: Tensor) -> Tensor | None:
        """Compute the advantage with each row as a rollout of its own, to show the bias of a fan-out.

        Args:
            reward: (N,) float, the reward of each row's rollout.
            group_id: (N,) int.

        Returns:
            (N,), or None if the equation needs other columns or the rewards are invalid.
        """
        of_rewards = self.baseline not in ("length_weighted", "column") and self.baseline_of == "group"
        if not of_rewards or self.several != "sum":
            return None
        singleton: Singleton = "zero" if self.singleton == "raise" else self.singleton
        rows = Rows.of(reward=reward, group=group_id, rollout=None)
        try:
            return advantage_of(rows, rows["reward"], replace(self.formula, singleton=singleton))[0]
        except BatchError:
            return None
