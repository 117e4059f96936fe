"""The advantage as a stage: which columns, which groups, how many rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import Rule, as_rewards, broken, credit_dtype
from headrace.transforms.distributed import population_of, present_ranks
from headrace.transforms.errors import BatchError
from headrace.transforms.ids import as_ids, first_row, is_first
from headrace.transforms.options import as_dtype, at_least, nested_key, one_of
from headrace.transforms.rewards import Missing
from headrace.transforms.schema import COUNTED, REWARD, REWARDS, has_key, read_written

from .baselines import Baseline, Clip, EpsMode, Formula, Scale, Singleton
from .group_relative import compare_in_groups
from .layout import fit_rule
from .multi_reward import Several, compare_rewards, weighed_rule
from .positions import chunk_groups

WithoutIds = Literal["raise", "chunks", "rigid_or_global"]


class GroupRelativeAdvantage(BatchTransform):
    """Write each row's advantage (:func:`group_relative_advantage`).

    After :class:`FanOutCollapse` it reads the reward that this has written; without it, a rollout_id on two
    rows is an error. Rows that are out of the statistics get 0. One device read, for the layout; one more
    each where rows are excluded and where `without_ids` is not ``raise``.

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
        clip: [low, high] for the result, one of which may be null.
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
        reward_key: (N,), (N, 1) or (N, 1, 1) float.
        group_key: (N,) or (N, 1) int ≥ 0.
        rollout_key: (N,) or (N, 1) int ≥ 0; None: every row is a rollout of its own.
        advantage_key: where the result goes.
        loss_mask_key: (N, T) bool, whose tokens ``length_weighted`` counts.

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

    keeps_rows = True
    asks_in_loss = True
    spans_ranks = True
    compares = True

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
        reward_key: NestedKey = ("next", "reward"),
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey | None = "rollout_id",
        advantage_key: NestedKey = "advantage",
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
    ):
        self.reward_key, self.group_key = nested_key(reward_key), nested_key(group_key)
        self.rollout_key, self.advantage_key = nested_key(rollout_key), nested_key(advantage_key)
        self.loss_mask_key = nested_key(loss_mask_key)
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
        self.ndim = one_of("ndim", ndim, (1, 2, 3))

    @property
    def formula(self) -> Formula:
        """The options that are the formula's, checked."""
        return Formula(*(getattr(self, option.name) for option in fields(Formula)))

    @property
    def within_groups(self) -> bool:  # type: ignore[override]
        """Unless baseline or scale are of the batch, or groups are made of positions in it."""
        return self.formula.within_groups and self.without_ids == "raise"

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Add the advantage."""
        collapsed = has_key(batch, REWARD)
        reward = self._reward(batch) if collapsed else as_rewards(self.column(batch, "reward_key"))
        people = population_of(batch)
        columns = {"reward": reward}
        if self.baseline == "length_weighted":
            columns["length"] = self.lengths(batch)
        if has_key(batch, REWARDS):
            columns["rewards"] = batch.get(REWARDS)
        everyone = people.take(columns, {"groups": self._groups(batch, reward)} | self._rollouts(batch))
        several, rollouts = everyone.pop("rewards", None), everyone.get("rollouts")
        rules = [] if collapsed or rollouts is None else [_one_row_each(rollouts)]
        if self.several == "decoupled" or self.weights is not None:
            rules.append(
                weighed_rule(
                    everyone["reward"], several, rollouts, weights=self.weights, several=self.several
                )
            )
        credit, reward_rules = self._compare(several=several, **everyone)
        credit = people.put_back(credit)
        dtype = credit_dtype(batch.get(self.reward_key, reward))
        fits = [] if dtype == credit.dtype else [fit_rule(credit, dtype)]
        credit = credit.to(dtype)
        batch.set(self.advantage_key, credit.view(-1, *[1] * (self.ndim - 1)))
        measured = {"abs_mean": credit.abs().mean(), "zero": (credit == 0).double().mean()}
        if self.missing == "skip":
            measured["unscorable"] = reward.isnan().sum()
            batch.set(REWARD, reward)  # for later stages, which are to know who has none
        return Outcome(batch, measured=measured, rules=[*people.rules(rules + reward_rules), *fits])

    def _rollouts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        return {} if self.rollout_key is None else {"rollouts": self.ids(batch, "rollout")}

    def advantage_by_row(self, reward: Tensor, group_id: Tensor) -> Tensor | None:
        """What each row would get if it were a rollout of its own: the bias that a fan-out would bring.

        Args:
            reward: (N,) float, the rollouts' rewards by row.
            group_id: (N,) int.

        Returns:
            (N,), or None where it cannot be said: under ``length_weighted`` and ``decoupled``, and where the
            rewards break a rule.
        """
        if self.baseline == "length_weighted" or self.several != "sum":
            return None
        singleton: Singleton = "zero" if self.singleton == "raise" else self.singleton
        formula = replace(self.formula, singleton=singleton)
        credit, rules = compare_in_groups(reward, as_ids(group_id, "group_id"), formula=formula)
        return None if rules and bool(broken(rules)) else credit

    def _reward(self, batch: TensorDictBase) -> Tensor:
        return read_written(batch, REWARD, reader=type(self).__name__, writer="FanOutCollapse")

    def _compare(
        self, reward: Tensor, several: Tensor | None, **columns: Tensor
    ) -> tuple[Tensor, list[Rule]]:
        compare = partial(compare_in_groups, formula=self.formula, dtype=self.dtype)
        if self.several == "decoupled" and several is not None:
            return compare_rewards(several, compare, weights=self.weights, missing=self.missing, **columns)
        if self.missing == "raise":
            return compare(reward, **columns)
        return compare_rewards(reward[:, None], compare, missing="skip", **columns)

    def _groups(self, batch: TensorDictBase, reward: Tensor) -> Tensor:
        if self.without_ids == "raise":
            return self.ids(batch, "group")
        if present_ranks() is not None:
            raise BatchError(
                f"without_ids={self.without_ids!r} makes groups of positions, which say nothing over ranks: "
                "give rows their group_id where they are dispatched"
            )
        if has_key(batch, self.group_key):
            groups = self.ids(batch, "group")
            # All rows unset is a batch without ids; some rows unset is wrong data, which a rule names.
            if not bool((groups < 0).all()):
                return groups
        rollouts = None if self.rollout_key is None else self.ids(batch, "rollout")
        per_batch = self.groups_per_batch if self.without_ids == "rigid_or_global" else None
        groups = chunk_groups(len(reward), rollouts, self.group_size or 1, per_batch, device=reward.device)
        batch.set(self.group_key, groups)
        return groups


def _one_row_each(rollouts: Tensor) -> Rule:
    """No rollout is in several rows, which would be as many votes."""
    return Rule(
        ~is_first(first_row(rollouts)),
        lambda row: f"rollout {int(rollouts[row])} in {int((rollouts == rollouts[row]).sum())} rows",
        "each rollout must be one row; found {found}. They would be counted once per row: put "
        "FanOutCollapse before GroupRelativeAdvantage",
    )
