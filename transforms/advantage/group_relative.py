"""A rollout's reward, measured against those of its group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Literal, get_args

import torch
from tensordict import NestedKey
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.columns import ColumnNames
from headrace.transforms.errors import BatchError
from headrace.transforms.ids import mean_of
from headrace.transforms.options import as_dtype, at_least, has_effect, one_of, takes_options
from headrace.transforms.required import require_identity, require_rewards
from headrace.transforms.rewards import Missing, as_rewards, credit_dtype, factors_of, weighted_reward
from headrace.transforms.rows import Rows
from headrace.transforms.schema import COUNTED, FLOAT, REWARD, REWARDS
from headrace.transforms.stage import BatchTransform

from .baselines import (
    Baseline,
    Clip,
    EpsMode,
    Formula,
    Grouped,
    Scale,
    Singleton,
    advantage_in_groups,
    largest_that_fits,
)
from .reshape_formula import reshaped

Several = Literal["sum", "decoupled"]
WithoutIds = Literal["raise", "chunks", "rigid_or_global"]


@takes_options
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
        δ is `shift`, τ `temperature`; equal rewards are 0 under a spread of the group's own (group,
    leave_one_out, mad) all the same, and rewards of 0 under their mean, but for skip

    With ``best_of_k`` the mean of A_i ∇ log π over the group is 1/k of an unbiased estimate of the gradient
    of what the best of k is expected to get, for any k ≤ n. With k = n it is ``best_other`` clipped at 0.

    Where the baseline or the spread is the group's own, a group whose rewards are all equal has an advantage
    of exactly 0, where rounding would leave a rest that a small ε blows up. Statistics are float64, by sums
    that do not depend on the order of their terms, and rounded once: to the last bit an advantage follows
    from the rewards of its group, however rows lie and whatever else is in the batch.

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
        dtype: None or float64: as said above. A smaller one asks for the bits of the reshape formula in that
            dtype, where rows lie as it needs them (:func:`.reshape_formula.reshaped`).
        length: (N,) tokens of each row, for ``length_weighted``; a rollout's are those of its segments.

    Returns:
        (N,) in the dtype of `reward`; float32 where that is no floating-point one.

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
    rows = Rows.of(reward=reward, group=group_id, rollout=rollout_id, length=length)
    if len(reward) == 0:
        return reward.to(result_dtype)
    tokens = rows["length"] if rows.has("length") else None
    credit = advantage_of(rows, rows["reward"], formula, low=dtype, length=tokens)
    require_fit(rows, credit, result_dtype)
    return credit.to(result_dtype).to(reward.device)


def advantage_of(
    rows: Rows,
    reward: Tensor,
    formula: Formula,
    *,
    low: torch.dtype | None = None,
    length: Tensor | None = None,
) -> Tensor:
    """(M,) float64: the advantage of (M,) rewards, one a rollout, on all rows of each; with its checks.

    Args:
        rows: of which those in the statistics are compared.
        reward: float64, that the segments of a rollout share.
        formula: baseline, scale and the rest.
        low: the dtype of the reshape formula, if its bits are asked for.
        length: (M,) int64, tokens of each row, for ``length_weighted``.

    Raises:
        BatchError: as :func:`group_relative_advantage`.
    """
    counted = rows.statistics
    chosen = reward if counted is rows else reward[rows.counted]
    require_identity(counted)
    require_rewards(counted, chosen, siblings_agree=True)
    if len(counted) == 0:
        return torch.zeros_like(reward)
    voters = rows.voters
    one_each = reward if voters is rows else reward[rows.rollouts.is_first]
    groups = voters.groups

    def rollout(row: int) -> str:
        return f"(rollout {voters.name('rollout', row)})"

    if formula.least_group > 1:
        needs = (
            "at least two rollouts to compare; found one in {found}. Gate incomplete groups before, or set "
        )
        needs += "singleton='zero' or 'raw'"
        if formula.k is not None:
            needs = f"at least k={formula.k} rollouts, of which the best is taken; found less in {{found}}. "
            needs += "Gate incomplete groups before, or set a smaller k"
        voters.require(
            groups.spread(groups.count >= formula.least_group),
            f"a group needs {needs}",
            lambda row: f"group {voters.name('group', row)} {rollout(row)}",
        )
    require_room(voters, one_each, formula, rows.table.dtypes.get(rows.key("reward"), torch.float64))
    credit = None if low in (None, torch.float64) else reshaped(one_each, groups, formula, low)
    if credit is None:
        tokens = None
        if length is not None:
            tokens = rows.rollouts.sum(length)[rows.rollouts.of[rows.rollouts.is_first]]
        g = Grouped(one_each, groups, tokens)
        credit = g.unsorted(advantage_in_groups(g, formula))
    return rows.from_voters(credit)


def require_room(rows: Rows, reward: Tensor, formula: Formula, dtype: torch.dtype) -> None:
    """Differences of rewards fit into their dtype, squares into float64, and MaxRL has none below 0.

    Raises:
        BatchError: some do not; with the rows.
    """
    if formula.scale == "mean":
        rows.require(
            reward >= 0,
            "scale='mean' divides by the group's mean, which needs rewards ≥ 0; found {found}",
            lambda row: f"{float(reward[row])} at row {rows.at(row)} (rollout {rows.name('rollout', row)})",
        )
    dtype = dtype if dtype.is_floating_point else torch.float64
    rows.require(
        reward.abs() <= largest_that_fits(len(reward), dtype),
        f"rewards must leave room for differences in {dtype}, and for squares in float64; found {{found}}",
        lambda row: f"{float(reward[row]):.3g} at row {rows.at(row)} (rollout {rows.name('rollout', row)})",
    )


def require_fit(rows: Rows, credit: Tensor, dtype: torch.dtype) -> None:
    """An advantage fits into the dtype that it is rounded to.

    Raises:
        BatchError: one does not, or is NaN; with the rows.
    """
    rows.require(
        credit.abs() <= torch.finfo(dtype).max,
        f"an advantage must fit into {dtype}; found {{found}}. Scale the rewards, set clip, or give rewards "
        "of a larger dtype",
        lambda row: f"{float(credit[row]):g} at row {rows.at(row)}",
    )


class GroupRelativeAdvantage(
    BatchTransform, columns=("reward", "group", "rollout", "advantage", "loss_mask")
):
    """Write each row's advantage (:func:`group_relative_advantage`).

    After :class:`FanOutCollapse` it reads the reward that this has written; without it, a rollout_id on two
    rows is an error. Rows that are out of the statistics get 0.

    Reads ``("headrace", "reward")`` if there, else `reward_key`; ``("headrace", "rewards")`` where each is
    compared or there are `weights`; `group_key`, `rollout_key`. Writes `advantage_key`, (N,) with as many
    trailing ones as `ndim` asks for, and `group_key` where it made the groups.

    Args:
        baseline: ``mean``, ``leave_one_out``, ``median``, ``length_weighted``, ``best_other``, ``best_of_k``,
            ``log_mean_exp``, ``batch``, ``none``.
        scale: ``group``, ``leave_one_out``, ``mad``, ``batch``, ``mean``, ``nonzero``, ``none``.
        ddof: 1 or 0.
        eps: ε ≥ 0.
        eps_mode: ``add``, ``clamp``, ``skip``.
        singleton: ``zero``, ``raw``, ``raise``.
        clip: [low, high] for the result, one of which may be null; of several rewards for the sum of their
            advantages.
        shift: δ, added to the baseline, in units of the reward.
        temperature: τ > 0 of ``log_mean_exp``, in units of the reward.
        k: how many the best is of, for ``best_of_k``, ≥ 2.
        dtype: of the statistics; None: float64. ``float32`` asks for the bits of the reshape formula where
            groups of one size are contiguous, as the function says.
        several: how the rewards of ``FanOutCollapse(columns=K)`` become one advantage: the rollout's reward
            is compared, their weighted ``sum``; or each is (``decoupled``), and the advantages are added up.
        weights: of the columns where each is compared, the same as FanOutCollapse's; None: all 1.
        missing: what a NaN reward does: ``raise``, or ``skip``, which takes it out of the statistics, of its
            own column where each is compared; a rollout with no reward at all gets 0.
        without_ids: what follows where no row has a group id. ``raise``; ``chunks``: consecutive
            `group_size` rollouts, the last group may be short; ``rigid_or_global``: chunks if there are
            exactly `group_size` × `groups_per_batch` rollouts, else one global group (what miles does).
        group_size: rollouts per group, for `without_ids`.
        groups_per_batch: groups per batch, for ``rigid_or_global``.
        ndim: dimensions of the advantage; 3 is (N, 1, 1), as GRPOLoss takes it.
        names: other names of columns, such as `reward_key` (:class:`ColumnNames`).

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
        shift: float = 0.0,
        temperature: float = 1.0,
        k: int | None = None,
        dtype: torch.dtype | str | None = None,
        several: Several = "sum",
        weights: Sequence[float] | None = None,
        missing: Missing = "raise",
        without_ids: WithoutIds = "raise",
        group_size: int | None = None,
        groups_per_batch: int | None = None,
        ndim: int = 3,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        lengths = self.loss_mask_key if baseline == "length_weighted" else None
        reads = [self.reward_key, self.group_key, self.rollout_key, REWARD, REWARDS, COUNTED, lengths]
        super().__init__(reads, [self.advantage_key])
        self.final_keys = tuple(self.in_keys)
        self.baseline, self.scale, self.ddof, self.eps = baseline, scale, ddof, eps
        self.eps_mode, self.singleton, self.clip = eps_mode, singleton, clip
        self.shift, self.temperature, self.k = shift, temperature, k
        _ = self.formula  # checks its options
        self.dtype = as_dtype(dtype)
        self.several, self.weights = one_of("several", several, get_args(Several)), weights
        self.missing = one_of("missing", missing, get_args(Missing))
        self.without_ids = one_of("without_ids", without_ids, get_args(WithoutIds))
        self.group_size = at_least("group_size", group_size, 1)
        self.groups_per_batch = at_least("groups_per_batch", groups_per_batch, 1)
        if without_ids != "raise" and group_size is None:
            raise ValueError(f"without_ids={without_ids!r} needs group_size, the rollouts per group")
        if without_ids == "rigid_or_global" and groups_per_batch is None:
            raise ValueError("without_ids='rigid_or_global' needs groups_per_batch")
        made = without_ids != "raise"
        has_effect(GroupRelativeAdvantage, "group_size", group_size, made, "without_ids")
        globally = without_ids == "rigid_or_global"
        needed = "without_ids='rigid_or_global'"
        has_effect(GroupRelativeAdvantage, "groups_per_batch", groups_per_batch, globally, needed)
        self.ndim = one_of("ndim", ndim, (1, 2, 3))

    @property
    def formula(self) -> Formula:
        """The options that are the formula's, checked."""
        return Formula(*(getattr(self, option.name) for option in fields(Formula)))

    @property
    def within_groups(self) -> bool:  # type: ignore[override]
        """Unless baseline or scale are of the batch, or groups are made of positions in it."""
        return self.formula.within_groups and self.without_ids == "raise"

    @property
    def tokens_counted(self) -> list[tuple[NestedKey, NestedKey | None]]:
        """Those of ``length_weighted``."""
        return [(self.loss_mask_key, None)] if self.baseline == "length_weighted" else []

    def decide(self, rows: Rows) -> None:
        """Write the advantage."""
        self._make_groups(rows)
        reward = rows.reward
        if not rows.has(REWARD):
            rollouts = rows.rollouts
            rows.statistics.require(
                rows.statistics.rollouts.is_first,
                "each rollout must be one row; found {found}. They would be counted once per row: put "
                "FanOutCollapse before GroupRelativeAdvantage",
                lambda row: (
                    f"rollout {rows.statistics.name('rollout', row)} in "
                    f"{int((rollouts.labels == rows.statistics.rollouts.labels[row]).sum())} rows"
                ),
            )
        rewards = rows[REWARDS] if rows.has(REWARDS) else reward[:, None]
        if self.several == "decoupled" or self.weights is not None:
            self._require_weighed(rows, reward, rewards)
        length = rows.lengths if self.baseline == "length_weighted" else None
        if self.several == "decoupled":
            factors, each = factors_of(self.weights, rewards.shape[1]), replace(self.formula, clip=None)
            credits = [
                factor * self._among_known(rows, column, each, length)
                for factor, column in zip(factors, rewards.unbind(1), strict=True)
            ]
            credit = torch.stack(credits).sum(0)
            if self.clip is not None:  # what is clipped is the result; who has no reward keeps 0
                scored = ~reward.isnan() if rows.counted is None else ~reward.isnan() & rows.counted
                credit = torch.where(scored, credit.clamp(*self.clip), credit)
        else:
            credit = self._among_known(rows, reward, self.formula, length)
        dtype = rows.table.dtypes.get(
            self.reward_key, rows.dtype(REWARD) if rows.has(REWARD) else torch.float64
        )
        dtype = dtype if dtype.is_floating_point else FLOAT
        require_fit(rows, credit, dtype)
        rows.put("advantage", credit, dtype=dtype, ndim=self.ndim)
        for view in rows.of_each_rank():
            own = view.of_rank(credit)
            view.metric("abs_mean", mean_of(own.abs()))
            view.metric("zero", mean_of(own == 0))
            if self.missing == "skip":
                view.metric("unscorable", view.of_rank(reward).isnan().sum())
        if self.missing == "skip":
            rows.put(REWARD, reward, dtype=torch.promote_types(dtype, torch.float32), ndim=1)

    def _among_known(self, rows: Rows, reward: Tensor, formula: Formula, length: Tensor | None) -> Tensor:
        """(M,) the advantage of (M,) rewards; under ``skip`` a rollout without one is in no statistic."""
        known = None if self.missing == "raise" else ~reward.isnan()
        if known is None or bool(known.all()):
            return advantage_of(rows, reward, formula, low=self.dtype, length=length)
        some = rows.where(known)
        credit = torch.zeros_like(reward)
        if len(some):
            tokens = None if length is None else length[known]
            credit[known] = advantage_of(some, reward[known], formula, low=self.dtype, length=tokens)
        return credit

    def _require_weighed(self, rows: Rows, reward: Tensor, rewards: Tensor) -> None:
        """The rollout's one reward is what the weights make of its rewards, bit by bit.

        Else filters, shaping and the report would go by another reward than the one that is trained.
        """
        dtype = rows.dtype(REWARDS if rows.has(REWARDS) else REWARD if rows.has(REWARD) else "reward")
        expected = weighted_reward(rewards.to(dtype), self.weights).double()
        todo = {
            "sum": "Give the weights to FanOutCollapse, and none to the advantage",
            "decoupled": "Set the weights once, pipeline.stages.advantage.weights, which the collapse of gdpo"
            " follows (in Python give FanOutCollapse the same), and shape no reward where each is compared "
            "by itself: what a stage adds to their sum would be lost",
        }
        ok = (reward == expected) | (reward.isnan() & expected.isnan())
        rows.require(
            ok if rows.counted is None else ok | ~rows.counted,
            "a rollout's reward, which filters and the report go by, must be its rewards by the weights of "
            f"the advantage; found {{found}}. {todo[self.several]}",
            lambda row: (
                f"{float(reward[row]):g} in place of {float(expected[row]):g} for rollout "
                f"{rows.name('rollout', row)}"
            ),
        )

    def _make_groups(self, rows: Rows) -> None:
        """Write group ids by position, where an option asks for it and no row has one."""
        if self.without_ids == "raise":
            return
        if rows.table.ranks is not None:
            raise BatchError(
                f"without_ids={self.without_ids!r} makes groups of positions, which say nothing over ranks: "
                "give rows their group_id where they are dispatched"
            )
        # All rows unset is a batch without ids; some rows unset is wrong data, which is refused later.
        if rows.has("group") and bool((rows["group"] >= 0).any()):
            return
        rollouts = rows.on_arrival.ids("rollout", checked=False).everyone
        size = self.group_size or 1
        number = rollouts.spread((rollouts.is_first.cumsum(0) - 1)[rollouts.first])  # by first rows
        if self.without_ids == "rigid_or_global" and rollouts.n != size * (self.groups_per_batch or 1):
            number = torch.zeros_like(number)
        rows.put("group", rows.from_arrival(number // size), dtype=torch.int64, ndim=1, fill=-1)

    def advantage_by_row(self, reward: Tensor, group_id: Tensor) -> Tensor | None:
        """What each row would get if it were a rollout of its own: the bias that a fan-out would bring.

        Args:
            reward: (N,) float, the rollouts' rewards by row.
            group_id: (N,) int.

        Returns:
            (N,), or None where it cannot be said: under ``length_weighted`` and ``decoupled``, and where the
            rewards cannot be compared.
        """
        if self.baseline == "length_weighted" or self.several != "sum":
            return None
        singleton: Singleton = "zero" if self.singleton == "raise" else self.singleton
        rows = Rows.of(reward=reward, group=group_id, rollout=None)
        try:
            return advantage_of(rows, rows["reward"], replace(self.formula, singleton=singleton))
        except BatchError:
            return None
