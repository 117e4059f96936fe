"""Credit from a critic: generalised advantage estimates over the tokens, or the turns, of rollouts."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.installed import import_extra
from headrace.transforms.table import (
    BatchError,
    BatchTransform,
    ColumnNames,
    Rows,
    as_rewards,
    require_rewards,
)
from headrace.transforms.table.checks import require_turns
from headrace.transforms.table.ids import add_up
from headrace.transforms.table.options import takes_options, within
from headrace.transforms.table.schema import COUNTED, LENGTH, REWARD
from headrace.transforms.table.tensordicts import count_true
from headrace.transforms.table.tokens import (
    check_lengths,
    describe_row,
    in_blocks,
    plain_sum,
    read_mask,
    read_tokens,
    same_width,
    whole_numbers,
    write_tokens,
)

from .by_token import require_finite
from .by_turn import dtype_of_reward

StepUnit = Literal["token", "turn"]


@takes_options
def generalized_advantage(
    value: Tensor,
    sampled: Tensor,
    reward: Tensor,
    rollout_id: Tensor | None = None,
    turn: Tensor | None = None,
    *,
    step: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates (arXiv:1506.02438, eq. 16) of the sampled tokens of rollouts.

    The sampled tokens of a rollout are its steps k = 0 … K − 1: those of its first row, then those of its
    second, and so on. Tokens in between, such as the output of a tool, are not steps. With V_K = 0, and the
    reward R of the rollout at its last step::

        δ_k = r_k + γ V_{k+1} − V_k          r_{K−1} = R, else 0
        A_k = δ_k + γ λ A_{k+1}
        target_k = A_k + V_k

    With λ = 1, A_k is γ^{K−1−k} R − V_k. Each row is computed by TorchRL's ``generalized_advantage_estimate``
    as if nothing came after the row. Later rows add c (γλ)^k' to the step that is k' steps before the last
    step of the row. There c is R in the last row of a rollout, else γ V + γ λ A of the first step of the next
    row. Results are computed in float64 and rounded once.

    Args:
        value: (N, T) float, V before the token is sampled; read at sampled tokens only.
        sampled: (N, T) bool, True at tokens that the policy sampled.
        reward: (N,) float, R, equal on all rows of a rollout.
        rollout_id: (N,) integers ≥ 0; rows with the same id are one rollout. None: each row is a rollout.
        turn: (N,) integers, the order of a rollout's rows, without ties; None: the order of the rows.
        step: (N, T) integers; neighbouring sampled tokens with equal numbers are one step. A step
            has the value of its first token. All its tokens get the same advantage and target. None: each
            token is a step.
        gamma: γ in [0, 1], per step.
        lam: λ in [0, 1].

    Returns:
        Advantage and target, (N, T) each, in the dtype of `value`, 0 at other tokens.

    Raises:
        BatchError: an id is negative, a reward is not finite, or rows of a rollout have different rewards or
            the same turn.
        MissingPackageError: TorchRL is not installed.

    Example:
        >>> value, sampled = torch.tensor([[0.5, 9.0, 0.25]]), torch.tensor([[True, False, True]])
        >>> advantage, target = generalized_advantage(value, sampled, torch.tensor([1.0]), lam=0.5)
        >>> advantage.tolist(), target.tolist()
        ([[0.125, 0.0, 0.75]], [[0.625, 0.0, 1.0]])
    """
    within("gamma", gamma, 0, 1), within("lam", lam, 0, 1)
    same_width(value, sampled, "value and sampled")
    rows = Rows.of(rollout=rollout_id, turn=turn, reward=as_rewards(reward))
    ends = rows.measured(**row_ends(value, sampled, step, gamma, lam))
    carry = rows.of_this_rank(carried(rows, rows["reward"], ends, gamma, lam)).to(value.device)
    made = spread_credit(value, sampled, step, carry, gamma, lam)
    return made["advantage"].to(value.dtype), made["target"].to(value.dtype)


def steps_of(sampled: Tensor, step: Tensor | None) -> tuple[Tensor, Tensor]:
    """(B, T) bool, the first token of each step, and (B, T) int64, the number of the token's step, from 0.

    Tokens that were not sampled have the number of the step before them, or −1.
    """
    begins = sampled
    if step is not None:
        place = torch.arange(sampled.shape[1], device=sampled.device).expand_as(sampled)
        at = torch.where(sampled, place, -1).cummax(1).values  # the last sampled token up to here
        before = torch.nn.functional.pad(at, (1, 0), value=-1)[:, :-1]
        begins = sampled & ((before < 0) | (step != step.gather(1, before.clamp_min(0))))
    return begins, begins.cumsum(1) - 1


def of_rows(value: Tensor, begins: Tensor, number: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """(B, K) float64, the values of each row's steps, and their advantages if nothing came after the row."""
    estimate = import_extra("torchrl.objectives.value.functional", "GAE").generalized_advantage_estimate
    count = count_true(begins)
    most = int(count.max()) if len(count) else 0
    steps = torch.zeros(len(value), most + 1, dtype=torch.float64, device=value.device)
    # Tokens that begin no step are written to the last column, which is cut off.
    steps.scatter_(1, torch.where(begins, number, most), torch.where(begins, value.double(), 0.0))
    steps = steps[:, :most]
    if not steps.numel():
        return steps, steps
    last = torch.arange(most, device=value.device) >= count[:, None] - 1
    after = torch.nn.functional.pad(steps[:, 1:], (0, 1))
    columns = (steps, after, torch.zeros_like(steps), last)
    # TorchRL multiplies γ by integers, which makes float32 of a Python number.
    options = (steps.new_tensor(option) for option in (gamma, lam))
    own, _ = estimate(*options, *(column[:, :, None] for column in columns))
    return steps, own[:, :, 0]


def row_ends(
    value: Tensor, sampled: Tensor, step: Tensor | None, gamma: float, lam: float
) -> dict[str, Tensor]:
    """(B,) each: the number of a row's steps, and its first step's value and advantage without later rows."""

    def of_some(value: Tensor, sampled: Tensor, step: Tensor | None) -> dict[str, Tensor]:
        begins, number = steps_of(sampled, step)
        steps, own = of_rows(value, begins, number, gamma, lam)
        none = steps.new_zeros(len(steps), 1)  # a row without a step
        first, own = (torch.cat([each[:, :1], none], 1)[:, 0] for each in (steps, own))
        return {"count": count_true(begins), "value": first, "own": own}

    return in_blocks(of_some, value, sampled, step)


def carried(rows: Rows, reward: Tensor, ends: dict[str, Tensor], gamma: float, lam: float) -> Tensor:
    """Check the rows and compute what comes after each row: (M,) float64, c of :func:`generalized_advantage`.

    Args:
        rows: M rows with ids, and with the column `turn_key` if it is set. Excluded rows are skipped.
        reward: (M,) float64.
        ends: (M,) each, the results of :func:`row_ends`.
        gamma: γ.
        lam: λ.

    Raises:
        BatchError: as the function.
    """
    require_rewards(rows, reward, siblings_agree=True)
    turn = None
    if rows.key("turn") is not None:
        turn = rows.integers("turn", "turn")
        require_turns(rows, turn)
    rollouts = rows.rollouts
    if not len(rows):
        return reward
    place = rollouts.positions(turn)
    count = ends["count"] if rows.counted is None else ends["count"] * rows.counted
    shape = rollouts.n, int(place.max()) + 1
    tables = [torch.zeros(shape, dtype=torch.float64) for _ in range(4)]
    counts, values, own, carry = tables
    for table, column in zip(tables, (count, ends["value"], ends["own"], count), strict=True):
        table[rollouts.of, place] = column
    after, decay = reward[rollouts.first], gamma * lam
    for column in range(shape[1] - 1, -1, -1):
        carry[:, column] = after
        has = counts[:, column] > 0
        first = own[:, column] + decay ** (counts[:, column] - 1) * after  # not read without a step
        after = torch.where(has, gamma * values[:, column] + decay * first, after)
    return carry[rollouts.of, place]


def spread_credit(
    value: Tensor, sampled: Tensor, step: Tensor | None, carry: Tensor, gamma: float, lam: float
) -> dict[str, Tensor]:
    """(B, T) float64 each: ``advantage`` and ``target`` of each token, 0 at tokens that were not sampled."""

    def of_some(value: Tensor, sampled: Tensor, step: Tensor | None, carry: Tensor) -> dict[str, Tensor]:
        begins, number = steps_of(sampled, step)
        steps, own = of_rows(value, begins, number, gamma, lam)
        if not steps.numel():
            nothing = torch.zeros_like(value, dtype=torch.float64)
            return {"advantage": nothing, "target": nothing}
        to_go = count_true(begins)[:, None] - 1 - torch.arange(steps.shape[1], device=value.device)
        credit = own + carry[:, None] * (gamma * lam) ** to_go.double()  # no token is at a negative power
        at = number.clamp_min(0)
        made = {"advantage": credit, "target": credit + steps}
        return {name: torch.where(sampled, of.gather(1, at), 0.0) for name, of in made.items()}

    return in_blocks(of_some, value, sampled, step, carry)


class GAE(
    BatchTransform,
    columns=(
        *("critic", "loss_mask", "turn_index", "turn", "reward", "rollout"),
        *("advantage", "value_target"),
    ),
):
    """Write the advantage of each token from the values of a critic (:func:`generalized_advantage`).

    The steps are the tokens of the loss mask as the row arrived, even if the row is masked now. The last step
    of a rollout gets the reward of the rollout. The rows of a rollout follow each other in the order of
    `turn_key`, or in that of the batch. A row that was dropped or excluded before is skipped: the step before
    this row is followed by the step after this row. So exclude whole rollouts (``unit="rollout"``) if the
    critic should see each step. Tokens that are not steps, and excluded rows, get 0.

    No rollout is compared with another. A group may be one rollout.

    Reads `critic_key`, `loss_mask_key`, `rollout_key`, `turn_key` if it is set, `turn_index_key` with
    ``unit="turn"``, and ``("headrace", "reward")`` if it exists, else `reward_key`. Writes `advantage_key`
    and `value_target_key`, (N, T, 1) each. The target is for the loss of the critic, as in TorchRL's PPOLoss.

    Args:
        gamma: γ in [0, 1], per step.
        lam: λ in [0, 1].
        unit: what a step is: each ``token``, or each ``turn``, whose tokens share its advantage and target.
            Turns are inside rows, by `turn_index_key`; with ``turn_index_key=None`` each row is a turn.
        names: other names of columns, such as `critic_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: as the function; also if a value is not finite at a token of the loss mask, or such a
            token has no turn.
        MissingPackageError: TorchRL is not installed.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"rollout_id": [7], ("next", "reward"): [1.0]}, batch_size=[1])
        >>> td["masks", "all_assistant_mask"] = torch.tensor([[True, False, True]])
        >>> td["values", "full"] = torch.tensor([[0.5, 9.0, 0.25]])
        >>> GAE(lam=0.5)(td)["advantage"].squeeze(-1).tolist()
        [[0.125, 0.0, 0.75]]
    """

    within_groups = True

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        lam: float = 1.0,
        unit: StepUnit = "token",
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        built_on = (self.reward_key, REWARD, COUNTED, self.rollout_key, self.turn_key, self.critic_key)
        turns = self.turn_index_key if unit == "turn" else None
        outs = [self.advantage_key, self.value_target_key]
        super().__init__([*built_on, self.loss_mask_key, turns], outs)
        self.final_keys = tuple(key for key in self.in_keys if key != self.loss_mask_key)
        self.gamma, self.lam = within("gamma", gamma, 0, 1), within("lam", lam, 0, 1)
        self.unit = unit

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Compute and write the advantage and the target."""
        if rows.table.find(LENGTH) is not None and bool((rows[LENGTH] >= 0).any()):
            raise BatchError(
                "GAE reads the loss mask as the rows arrived, and a stage that ran alone has masked some of "
                "them: put both stages into one pipeline"
            )
        # 1. The values and steps of the tokens.
        reader, like = type(self).__name__, self.loss_mask_key
        sampled = read_mask(batch, like, reader=reader, option="loss_mask_key")
        value = self._of_tokens(batch, self.critic_key, "critic_key", sampled)
        step = self._steps(batch, sampled)
        if rows.counted is not None:
            sampled = sampled & rows.to_batch(rows.counted)[:, None]
        require_finite(rows, {"the value": value}, sampled)
        placed = rows.measured(unplaced=count_true(sampled & (step < 0))) if step is not None else {}
        for found in placed.values():
            rows.require(
                found == 0,
                "every token in the loss needs a turn index ≥ 0; found others in {found}. Write turn_index "
                "where turns are generated, or set {unit=token}",
                describe_row(rows),
            )
        # 2. What comes after each row: the reward, or the next row of the rollout.
        ends = rows.measured(**row_ends(value, sampled, step, self.gamma, self.lam))
        carry = rows.to_batch(carried(rows, rows.reward, ends, self.gamma, self.lam))
        # 3. Write.
        made, dtype = spread_credit(value, sampled, step, carry, self.gamma, self.lam), dtype_of_reward(rows)
        for key, name in ((self.advantage_key, "advantage"), (self.value_target_key, "target")):
            write_tokens(batch, key, made[name].to(dtype).unsqueeze(-1), like)
        found = rows.measured(size=plain_sum(made["advantage"].abs()), tokens=count_true(sampled))
        rows.metric("abs_mean", add_up(found["size"]) / found["tokens"].sum().clamp_min(1))
        return batch

    def _steps(self, batch: TensorDictBase, sampled: Tensor) -> Tensor | None:
        """(B, T) int64, the turn of each token; None: each token is a step."""
        if self.unit == "token":
            return None
        if self.turn_index_key is None:
            return torch.zeros_like(sampled, dtype=torch.int64)
        turn = self._of_tokens(batch, self.turn_index_key, "turn_index_key", sampled, fill=-1)
        return whole_numbers(turn, self.turn_index_key, "turn_index_key")

    def _of_tokens(
        self, batch: TensorDictBase, key: NestedKey, option: str, sampled: Tensor, fill: float = 0
    ) -> Tensor:
        """(B, T): a column with one entry for each token of the loss mask."""
        reader = type(self).__name__
        column = read_tokens(batch, key, reader=reader, option=option, fill=fill)
        check_lengths(batch, [key], self.loss_mask_key, reader=reader, or_of_rows=False)
        same_width(column, sampled, f"{option} and loss_mask_key")
        return column
