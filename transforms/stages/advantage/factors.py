"""Stages that multiply the advantage: by a factor for its sign, or for the mean reward of its group."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import BatchError, BatchTransform, ColumnNames, Ids, Rows, require_identity
from headrace.transforms.table.ids import mean_of
from headrace.transforms.table.options import at_least, takes_options, within
from headrace.transforms.table.schema import COUNTED, REWARD, REWARDS
from headrace.transforms.table.tokens import change_advantage


@takes_options
def difficulty_weight(mean: Tensor) -> Tensor:
    """Compute the weight of a group from its mean reward p: ``exp(−KL(p ‖ ½))``.

    With rewards of 0 and 1, p is the success rate. KL(p ‖ ½) = p ln 2p + (1 − p) ln 2(1 − p) is its
    distance from ½. The weight is 1 at p = ½, and ½ if all or none succeed (MGPO of VibeThinker,
    arXiv:2511.06221, with λ = 1).

    Args:
        mean: (N,) float in [0, 1].

    Returns:
        (N,) float64 in (0, 1].

    Example:
        >>> difficulty_weight(torch.tensor([0.0, 0.5, 1.0])).tolist()
        [0.5, 1.0, 0.5]
    """
    p = mean.double()
    divergence = torch.xlogy(p, 2 * p) + torch.xlogy(1 - p, 2 * (1 - p))
    return torch.exp(-divergence.clamp_min(0))


class SignFactors(BatchTransform, columns=("advantage",)):
    """Multiply positive and negative advantages by two factors: ``A ← λ₊ max(A, 0) + λ₋ min(A, 0)``.

    W-REINFORCE (arXiv:2506.01347) has λ₊ = 0.1 and λ₋ = 1, and uses rewards of ±1 as the advantage. An
    advantage per token is multiplied token by token. Half precision is multiplied in float32.

    Reads and writes `advantage_key`.

    Args:
        positive: λ₊ ≥ 0.
        negative: λ₋ ≥ 0.
        names: other names of columns, such as `advantage_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"advantage": torch.tensor([[-1.0], [2.0]])}, batch_size=[2])
        >>> SignFactors(positive=0.5)(td)["advantage"].flatten().tolist()
        [-1.0, 1.0]
    """

    within_groups = True

    def __init__(self, *, positive: float = 1.0, negative: float = 1.0, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        super().__init__([self.advantage_key], [self.advantage_key])
        self.positive = within("positive", positive, 0)
        self.negative = within("negative", negative, 0)

    def decide(self, rows: Rows) -> None:
        """Rewrite the advantage."""
        positive, negative = self.positive, self.negative
        change_advantage(rows, lambda a: torch.where(a > 0, a * positive, a * negative))


class DifficultyWeight(BatchTransform, columns=("advantage", "group", "rollout")):
    """Multiply the advantage by :func:`difficulty_weight` of the group's mean reward.

    The mean is over the rollouts that have a reward and are not excluded. The advantage of excluded rows
    becomes 0.

    Reads ``("headrace", "reward")``, `group_key` and `rollout_key`. Reads ``("headrace", "rewards")`` if
    `reward` is set. Reads and writes `advantage_key`.

    Args:
        reward: index, from 0, of the reward that is averaged, one of the K rewards of
            ``FanOutCollapse(columns=K)``; None: their weighted sum. Rollouts that lack this reward are left
            out of its mean.
        names: other names of columns, such as `advantage_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: a reward is outside [0, 1], the index is not below K, or no rollout of a group has the
            reward.

    Example:
        >>> DifficultyWeight(reward=1, group_key="prompt")
        DifficultyWeight(reward=1, group_key='prompt')
    """

    within_groups = True

    def __init__(self, *, reward: int | None = None, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        self.reward = None if reward is None else at_least("reward", reward, 0)
        built_on = (REWARD, None if reward is None else REWARDS, COUNTED, self.group_key, self.rollout_key)
        super().__init__([self.advantage_key, *built_on], [self.advantage_key])
        self.final_keys = tuple(self.in_keys[1:])

    def decide(self, rows: Rows) -> None:
        """Rewrite the advantage."""
        total = rows[REWARD]
        rewards = rows[REWARDS] if rows.has(REWARDS) else total[:, None]
        if self.reward is not None and self.reward >= rewards.shape[1]:
            raise BatchError(
                f"DifficultyWeight(reward={self.reward}) needs {self.reward + 1} rewards per row; found "
                f"{rewards.shape[1]}. Set FanOutCollapse(columns=K), or a smaller index; the first is 0"
            )
        reward = total if self.reward is None else rewards[:, self.reward]
        require_identity(rows)
        counts = ~reward.isnan() if rows.counted is None else ~reward.isnan() & rows.counted
        # RewardScale changes the sum of several rewards, which several='decoupled' refuses.
        if self.reward is not None:
            todo = "Choose another reward, scale this reward where it is computed"
        elif rewards.shape[1] > 1:
            todo = "Set {reward=0}, or the index of another reward that is in [0, 1]"
        else:
            todo = "Put RewardScale after FanOutCollapse"
        rows.require(
            ~counts | ((reward >= 0) & (reward <= 1)),
            "DifficultyWeight needs rewards in [0, 1], whose mean is a success rate; found {found}. "
            + todo
            + ", or remove this stage",
            lambda row: f"{float(reward[row])} at row {rows.at(row)} (rollout {rows.name('rollout', row)})",
        )
        groups = Ids(rows.groups.of, counts & rows.rollouts.is_first)
        if self.reward is not None:  # a group without this reward may have an advantage from others
            rows.require(
                (groups.spread(groups.count) > 0) | total.isnan(),
                f"a group's difficulty is the mean of reward {self.reward}; no rollout has it in {{found}}. "
                "Score one, or take the group out before this stage with SampleFilter(action='exclude')",
                lambda row: f"group {rows.name('group', row)}",
            )
        mean = groups.sum(reward.nan_to_num()) / groups.count.clamp_min(1)
        factor = groups.spread(difficulty_weight(mean))
        if rows.counted is not None:
            factor = factor * rows.counted
        change_advantage(rows, lambda advantage, factor: advantage * factor, factor=factor)
        rows.metric("mean", mean_of(factor[counts]))
