"""The advantage as a stage: which columns, which groups, how many rewards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import BatchTransform, as_dtype, has_key, nested_key, one_of
from .chunks import chunk_groups
from .collapse import as_rewards
from .columns import COUNTED, REWARD
from .counted import over_counted
from .criteria import count_tokens
from .formula import Baseline, Clip, EpsMode, Scale, Singleton, check_options
from .ids import first_row, is_first, sum_by
from .relative import group_relative_advantage
from .rules import Rule, explain
from .several import MISSING, SEVERAL, Missing, Several, advantage_of_several

WithoutIds = Literal["raise", "chunks", "rigid_or_global"]


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
            one_row_each(columns["rollout_id"])
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


def one_row_each(rollouts: Tensor) -> None:
    """Raise if a rollout is in several rows. One device read.

    Raises:
        BatchError: naming the rollouts.
    """
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
