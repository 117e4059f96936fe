"""The advantage per turn: the return from a turn on, compared with other rollouts' returns at that turn."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from tensordict import TensorDictBase
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
    places_on_arrival,
    require_identity,
    require_rewards,
)
from headrace.transforms.table.options import takes_options, within
from headrace.transforms.table.schema import COUNTED, REWARD, SEGMENTS, has_key
from headrace.transforms.table.tensordicts import count_true
from headrace.transforms.table.tokens import (
    describe_row,
    in_blocks,
    read_mask,
    read_tokens,
    same_width,
    whole_numbers,
    write_tokens,
)

from .baselines import Formula, Grouped, advantage_in_groups
from .group_relative import require_fit
from .turns import returns_from

TurnRewards = Literal["none", "turn", "token"]


@takes_options
def turn_advantage(
    reward: Tensor,
    has_turn: Tensor,
    group_id: Tensor,
    rollout_id: Tensor | None = None,
    *,
    outcome: Tensor | None = None,
    discount: float = 1.0,
) -> Tensor:
    """Compare the return from each turn on with that of the group's other rollouts from the same turn on.

    For turn k of rollout i, and the m rollouts of the group that have a turn k::

        G_ik = Σ_{l≥k} γ^{l−k} r_il

        A_ik = G_ik − Σ_{j≠i} G_jk / (m − 1)
        A_ik = G_ik                             if no other rollout has a turn k

    The returns of the others do not depend on the actions of rollout i, so the advantage is unbiased for any
    number of turns. Statistics are float64 and rounded once. Sums do not depend on the row order.

    Args:
        reward: (N, K) float, r of each turn that a row has; other entries are not read.
        has_turn: (N, K) bool; each turn of a rollout is on one of its rows.
        group_id: (N,) integers ≥ 0; rollouts with the same id are compared.
        rollout_id: (N,) integers ≥ 0; rows with the same id are one rollout. None: each row is a rollout.
        outcome: (N,) float, a reward at the last turn of the rollout, equal on all its rows. None: no such
            reward.
        discount: γ in [0, 1], per turn.

    Returns:
        (N, K) in the dtype of `reward`, 0 where a row does not have the turn.

    Raises:
        BatchError: an id is negative, a rollout is in two groups, a turn is on two rows, or a number is not
            finite.

    Example:
        >>> reward = torch.tensor([[0.0, 4.0], [0.0, 2.0], [3.0, 0.0]])
        >>> has_turn = torch.tensor([[True, True], [True, True], [True, False]])
        >>> turn_advantage(reward, has_turn, torch.tensor([0, 0, 0])).tolist()
        [[1.5, 2.0], [-1.5, -2.0], [0.0, 0.0]]
    """
    within("discount", discount, 0, 1)
    paid = None if outcome is None else as_rewards(outcome)
    rows = Rows.of(has_turn=has_turn, group=group_id, rollout=rollout_id, reward=paid)
    if reward.shape != has_turn.shape:
        raise BatchError(
            f"reward and has_turn must be (N, K); found {tuple(reward.shape)} and {tuple(has_turn.shape)}"
        )
    if has_turn.numel() == 0:
        return reward.to(credit_dtype(reward))
    own = rows.from_batch(reward.detach().double())
    credit = credit_of_turns(rows, own, rows["has_turn"], None if paid is None else rows["reward"], discount)
    require_fit(rows, credit.abs().amax(1), credit_dtype(reward))
    return credit.to(credit_dtype(reward)).to(reward.device)


def credit_of_turns(
    rows: Rows,
    reward: Tensor,
    has_turn: Tensor,
    outcome: Tensor | None,
    discount: float,
) -> Tensor:
    """Check the rows and compute :func:`turn_advantage`: (M, K) float64.

    Args:
        rows: M rows, none of which is excluded.
        reward: (M, K) float64.
        has_turn: (M, K) bool.
        outcome: (M,) float64, reward at the last turn; None: none.
        discount: γ.

    Raises:
        BatchError: as the function.
    """
    rollouts, reward = rows.rollouts, reward.masked_fill(~has_turn, 0.0)
    require_identity(rows)
    number = torch.arange(has_turn.shape[1])
    rows.require(
        reward.isfinite().all(1),
        "the reward of every turn must be finite; found {found}. Score these turns, or take the rollouts out "
        "before this stage with SampleFilter(action='exclude')",
        lambda row: f"{reward[row].tolist()} at row {rows.at(row)} (rollout {rows.name('rollout', row)})",
    )
    # 1. The number of rows that have each turn of each rollout, (n, K): 0 or 1.
    times = torch.zeros(rollouts.n, len(number), dtype=torch.int64)
    times.index_add_(0, rollouts.of, has_turn.long())
    twice = has_turn & (rollouts.spread(times) > 1)
    rows.require(
        ~twice.any(1),
        "each turn of a rollout must be on one row; found {found}. If a row repeats tokens of an earlier "
        "turn as context, set their turn index to -1",
        lambda row: (
            f"turn {int(twice[row].int().argmax())} of rollout {rows.name('rollout', row)} on row "
            f"{rows.at(row)} and on another row"
        ),
    )
    returns = torch.zeros(times.shape, dtype=torch.float64).index_add_(0, rollouts.of, reward)
    has = times > 0
    # 2. The return from each turn on: G_k = r_k + γ G_{k+1}.
    if outcome is not None:
        require_rewards(rows, outcome, siblings_agree=True)
        last = torch.where(has, number, -1).amax(1)
        returns += torch.where(has & (number == last[:, None]), outcome[rollouts.first][:, None], 0.0)
    returns = returns_from(returns, discount)
    # 3. Compare within each pair of group and turn.
    pair = rows.groups.of[rollouts.first][:, None] * len(number) + number
    formula = Formula("leave_one_out", "none", singleton="raw")
    g = Grouped(returns[has], Ids(pair[has]))
    credit = torch.zeros_like(returns)
    credit[has] = g.unsorted(advantage_in_groups(g, formula))
    return rollouts.spread(credit).masked_fill(~has_turn, 0.0)


class TurnAdvantage(
    BatchTransform,
    columns=("turn_index", "turn_reward", "turn", "reward", "group", "rollout", "loss_mask", "advantage"),
):
    """Write the advantage of each turn over the same turn of other rollouts (:func:`turn_advantage`).

    By default turns are inside rows, and each token has the number of its turn. With ``turn_index_key=None``
    each row is a turn with its own reward, as for RewardsToGo. Excluded rows and tokens without a turn get 0.

    Reads `turn_index_key`, `group_key`, `rollout_key`, and `loss_mask_key` if it exists. Reads
    `turn_reward_key` unless `turn_rewards` is ``none``, and ``("headrace", "reward")`` if it exists, else
    `reward_key`. Writes `advantage_key`: (N, T, 1), or (N, 1, 1) if rows are turns.

    Args:
        discount: γ in [0, 1], per turn.
        turn_rewards: rewards of turns in `turn_reward_key`, besides the reward of the rollout, which
            counts at its last turn: ``none``; one per ``turn``, (N, K); or one per ``token``, (N, T),
            which are added up over the tokens of a turn.
        missing: what happens to a missing reward of a rollout (NaN): ``raise`` an error, or ``skip``,
            which excludes the rollout. ``mask`` equals ``raise``; use it after
            ``FanOutCollapse(missing="mask")``, which masks the rollout.
        names: other names of columns, such as `turn_index_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: as the function; also if a token in the loss, or with a reward, has no turn.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"group_id": [0, 0], "rollout_id": [0, 1], ("next", "reward"): [1.0, 3.0]}, [2])
        >>> td["turn_index"] = torch.tensor([[-1, 0, 0, 1], [-1, 0, -1, -1]])
        >>> TurnAdvantage()(td)["advantage"].squeeze(-1).tolist()
        [[0.0, -2.0, -2.0, 1.0], [0.0, 2.0, 0.0, 0.0]]
    """

    within_groups = True

    def __init__(
        self,
        *,
        discount: float = 1.0,
        turn_rewards: TurnRewards = "none",
        missing: Missing = "raise",
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.turn_rewards = turn_rewards
        self.missing = missing
        rows_are_turns = self.turn_index_key is None
        if rows_are_turns and (turn_rewards != "none" or missing == "skip"):
            raise ValueError(
                "if rows are turns (turn_index_key=None) each has its own reward: leave turn_rewards="
                f"'none', missing='raise'; got {turn_rewards!r}, {missing!r}"
            )
        if not rows_are_turns and self.turn_key is not None:
            raise ValueError("turn_key is only read if rows are turns: set turn_index_key=None")
        process = None if turn_rewards == "none" else self.turn_reward_key
        paid = (self.reward_key, None if rows_are_turns else REWARD)
        columns = (self.group_key, self.rollout_key, self.turn_index_key, self.turn_key, process, *paid)
        places = SEGMENTS if rows_are_turns else None
        super().__init__([*columns, places, COUNTED], [self.advantage_key])
        self.final_keys = tuple(self.in_keys)
        self.discount = within("discount", discount, 0, 1)

    @property
    def of_whole_rollouts(self) -> Literal["", "rewards", "places"]:  # type: ignore[override]
        """``places`` if rows are turns, because turns are then numbered by their index in the rollout."""
        return "places" if self.turn_index_key is None else ""

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Compute the advantage. Advantages of tokens are written when rows are gathered."""
        if self.turn_index_key is None:
            self._of_rows(rows)
            return batch
        reader, turn = type(self).__name__, self._turns_in(batch)
        process, size = None, torch.zeros(len(turn), dtype=torch.int64, device=turn.device)
        if self.turn_rewards != "none":
            process = read_tokens(batch, self.turn_reward_key, reader=reader, option="turn_reward_key")
        if process is not None and self.turn_rewards == "turn":
            size = size + process.shape[1]
        elif turn.shape[1]:
            size = turn.amax(1) + 1
        # 1. The largest number of turns of a row, over all ranks.
        sizes = rows.measured(turns=size)["turns"]
        turns = int(sizes.max()) if len(sizes) else 0
        # 2. For each row and turn: whether the row has the turn, and the reward of the turn. Also find tokens
        # and rewards without a turn.
        mask = None
        if has_key(batch, self.loss_mask_key):
            mask = read_mask(batch, self.loss_mask_key, reader=reader, option="loss_mask_key")
            same_width(turn, mask, "turn_index_key and loss_mask_key")
        of_token = process if self.turn_rewards == "token" else None
        if of_token is not None:
            same_width(turn, of_token, "turn_index_key and turn_reward_key")

        def of_some(turn: Tensor, mask: Tensor | None, of_token: Tensor | None) -> dict[str, Tensor]:
            place = turn.clamp(-1, turns).add_(1)  # 0: no turn; turns + 1: an index that is too large
            has = torch.zeros(len(turn), turns + 2, dtype=torch.bool, device=turn.device)
            has.scatter_(1, place, True)
            made = {"has_turn": has[:, 1:-1], "unplaced": has[:, -1]}
            if mask is not None:
                made["unplaced"] = made["unplaced"] | (count_true(mask & (turn < 0)) > 0)
            if of_token is not None:
                made["misplaced"] = count_true((of_token != 0) & (turn < 0)) > 0
            return made

        made = in_blocks(of_some, turn, mask, of_token)
        reward = torch.zeros_like(made["has_turn"], dtype=torch.float64)
        if of_token is not None:
            reward = _sum_by_turn(of_token, turn, turns)
        elif process is not None:
            reward[:, : process.shape[1]] = process.double()
            made["misplaced"] = ((reward != 0) & ~made["has_turn"]).any(1)
        found = rows.measured(reward=reward, **{"misplaced": torch.zeros_like(made["unplaced"])} | made)
        # 3. The advantage; excluded rows get 0.
        chosen = torch.ones(len(rows), dtype=torch.bool) if rows.counted is None else rows.counted
        outcome, dtype = rows.reward, dtype_of_reward(rows)
        chosen = chosen & ~outcome.isnan() if self.missing == "skip" else chosen
        some, credit = rows.where(chosen), torch.zeros_like(found["reward"])
        if turns and len(some):
            columns = found["reward"][chosen], found["has_turn"][chosen].bool(), outcome[chosen]
            credit[chosen] = credit_of_turns(some, *columns, self.discount)
        some.require(
            found["unplaced"][chosen] == 0,
            "every token in the loss needs a turn index ≥ 0 and below the number of rewards; found others in "
            "{found}. Write turn_index where turns are generated",
            describe_row(some),
        )
        some.require(
            found["misplaced"][chosen] == 0,
            "every reward that is not 0 must belong to a turn of its row; found others in {found}. Write "
            "the reward on a token of its turn, or into the column of its turn",
            describe_row(some),
        )
        if turns:
            require_fit(rows, credit.abs().amax(1), dtype)
        rows.when_gathered(partial(self._write, dtype=dtype), [self.advantage_key], credit=credit)
        return batch

    def _of_rows(self, rows: Rows) -> None:
        """Compute the advantage if rows are turns. An excluded row still counts as a turn."""
        reward, dtype = rows.exactly(rows.number("reward")), dtype_of_reward(rows)
        _, place = places_on_arrival(rows)
        some = rows.where(rows.counted)
        reward, place = some.from_arrival(rows.to_arrival(reward)), some.from_arrival(place)
        credit = torch.zeros_like(reward)
        if len(some):
            has_turn = place[:, None] == torch.arange(int(place.max()) + 1)
            expanded = reward[:, None].expand(has_turn.shape)
            table = credit_of_turns(some, expanded, has_turn, None, self.discount)
            credit = table.gather(1, place[:, None]).squeeze(1)
        require_fit(some, credit, dtype)
        rows.put("advantage", rows.from_arrival(some.to_arrival(credit)), dtype=dtype, ndim=3)

    def _write(self, batch: TensorDictBase, numbers: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Write the advantage of gathered rows: each token gets that of its turn, else 0."""
        turn, credit = self._turns_in(batch), numbers["credit"].to(dtype)
        credit = torch.cat([credit.new_zeros(len(credit), 1), credit], 1)  # column 0: tokens without a turn
        last = credit.shape[1] - 2

        def of_some(turn: Tensor, credit: Tensor) -> dict[str, Tensor]:
            return {"of_token": credit.gather(1, turn.clamp(-1, last).add_(1))}

        of_token = in_blocks(of_some, turn, credit)["of_token"]
        write_tokens(batch, self.advantage_key, of_token.unsqueeze(-1), self.turn_index_key)

    def _turns_in(self, batch: TensorDictBase) -> Tensor:
        """(B, T) int64: turn of each token, −1 without a turn."""
        key, reader = self.turn_index_key, type(self).__name__
        turn = read_tokens(batch, key, fill=-1, reader=reader, option="turn_index_key")
        return whole_numbers(turn, key, "turn_index_key")


def dtype_of_reward(rows: Rows) -> torch.dtype:
    """The dtype of the advantage (:func:`credit_dtype` of the collected reward)."""
    return credit_dtype(rows.dtype("reward" if rows.has("reward") else REWARD))


def _sum_by_turn(reward: Tensor, turn: Tensor, turns: int) -> Tensor:
    """(B, K) float64: the sum of the rewards of each turn's tokens, added in sorted order."""
    # On the CPU, because CUDA's bincount adds in no fixed order.
    row, token = ((reward != 0) & (turn >= 0)).nonzero().unbind(1)
    values, place = reward[row, token].double().cpu(), (row * turns + turn[row, token]).cpu()
    order = values.argsort()
    sums = torch.bincount(place[order], weights=values[order], minlength=len(turn) * turns)
    return sums.view(len(turn), turns).to(turn.device)
