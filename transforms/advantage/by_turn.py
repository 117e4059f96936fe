"""A turn's return, measured against those of the same turn of the others in its group."""

from __future__ import annotations

from functools import partial
from typing import Literal, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.columns import ColumnNames
from headrace.transforms.errors import BatchError
from headrace.transforms.ids import Ids
from headrace.transforms.options import one_of, takes_options, within
from headrace.transforms.places import places_on_arrival
from headrace.transforms.required import require_identity, require_rewards
from headrace.transforms.rewards import Missing, as_rewards, credit_dtype
from headrace.transforms.rows import Rows
from headrace.transforms.schema import COUNTED, FLOAT, REWARD, SEGMENTS, has_key
from headrace.transforms.stage import BatchTransform
from headrace.transforms.tensordicts import count_true
from headrace.transforms.tokens import (
    describe_row,
    in_blocks,
    read_tokens,
    same_width,
    whole_numbers,
    write_tokens,
)

from .baselines import Formula, Grouped, advantage_in_groups
from .group_relative import require_fit
from .turns import returns_from

TurnBaseline = Literal["leave_one_out", "mean"]
Alone = Literal["return", "zero"]
TurnRewards = Literal["none", "turn", "token"]
Outcomes = Literal["last", "none"]


@takes_options
def turn_advantage(
    reward: Tensor,
    has_turn: Tensor,
    group_id: Tensor,
    rollout_id: Tensor | None = None,
    *,
    outcome: Tensor | None = None,
    discount: float = 1.0,
    baseline: TurnBaseline = "leave_one_out",
    alone: Alone = "return",
) -> Tensor:
    """Measure each turn's return against that of the same turn of the others in the group.

    For turn k of rollout i, with m the rollouts of the group that have a turn k::

        G_ik = Σ_{l≥k} γ^{l−k} r_il

        leave_one_out    A_ik = G_ik − Σ_{j≠i} G_jk / (m − 1)
        mean             A_ik = G_ik − Σ_j G_jk / m

    What the others return from turn k on does not depend on what rollout i does there: leave_one_out is
    unbiased, for any number of turns, if a rollout that is alone at a turn keeps its return. In its place 0
    is a bias against going on where others stop. A mean that includes the rollout itself makes its credit
    (m − 1)/m of what it should be, the less the later the turn. Statistics are float64, by sums that do not
    depend on the order of the rows, and rounded once.

    Args:
        reward: (N, K) float, r of each turn that a row has; what else is in it is not read.
        has_turn: (N, K) bool; each turn of a rollout is on one of its rows.
        group_id: (N,) integers ≥ 0: which rollouts are compared.
        rollout_id: (N,) integers ≥ 0: which rows are one rollout. None: each row is one.
        outcome: (N,) float, paid at a rollout's last turn; its rows agree on it. None: nothing is.
        discount: γ in [0, 1], per turn.
        baseline: what a return is measured from.
        alone: what a rollout gets at a turn that no other of its group has: its ``return``, or ``zero``,
            which is a bias.

    Returns:
        (N, K) in the dtype of `reward`, 0 where a row does not have the turn.

    Raises:
        BatchError: a negative id, a rollout in two groups, a turn on two rows, a number that is not finite.

    Example:
        >>> reward = torch.tensor([[0.0, 4.0], [0.0, 2.0], [3.0, 0.0]])
        >>> has_turn = torch.tensor([[True, True], [True, True], [True, False]])
        >>> turn_advantage(reward, has_turn, torch.tensor([0, 0, 0])).tolist()
        [[1.5, 2.0], [-1.5, -2.0], [0.0, 0.0]]
    """
    _checked(discount, baseline, alone)
    paid = None if outcome is None else as_rewards(outcome)
    rows = Rows.of(has_turn=has_turn, group=group_id, rollout=rollout_id, reward=paid)
    if reward.shape != has_turn.shape:
        raise BatchError(
            f"each turn has one reward, (N, K); found {tuple(reward.shape)} for {tuple(has_turn.shape)} turns"
        )
    if has_turn.numel() == 0:
        return reward.to(credit_dtype(reward))
    own = rows.measure("turn_reward", reward.detach().double())
    credit = credit_of_turns(
        rows, own, rows["has_turn"], None if paid is None else rows["reward"], discount, baseline, alone
    )
    require_fit(rows, credit.abs().amax(1), credit_dtype(reward))
    return credit.to(credit_dtype(reward)).to(reward.device)


def _checked(discount: float, baseline: TurnBaseline, alone: Alone) -> tuple[float, TurnBaseline, Alone]:
    one_of("baseline", baseline, get_args(TurnBaseline))
    return within("discount", discount, 0, 1), baseline, one_of("alone", alone, get_args(Alone))


def credit_of_turns(
    rows: Rows,
    reward: Tensor,
    has_turn: Tensor,
    outcome: Tensor | None,
    discount: float,
    baseline: TurnBaseline,
    alone: Alone,
) -> Tensor:
    """(M, K) float64: :func:`turn_advantage` of rows that are all in the statistics; with its checks.

    Args:
        rows: M of them.
        reward: (M, K) float64.
        has_turn: (M, K) bool.
        outcome: (M,) float64; None: nothing is paid at the end.
        discount: γ.
        baseline: as the function has it.
        alone: as the function has it.

    Raises:
        BatchError: as the function.
    """
    rollouts, reward = rows.rollouts, reward.masked_fill(~has_turn, 0.0)
    require_identity(rows)
    number = torch.arange(has_turn.shape[1])
    rows.require(
        reward.isfinite().all(1),
        "every turn's reward must be finite; found {found}. Score those turns, or take the rollouts out "
        "before this stage with SampleFilter(action='exclude')",
        lambda row: f"{reward[row].tolist()} at row {rows.at(row)} (rollout {rows.name('rollout', row)})",
    )
    # 1. The turns of each rollout, (n, K), of which each is on one row.
    times = torch.zeros(rollouts.n, len(number), dtype=torch.int64)
    times.index_add_(0, rollouts.of, has_turn.long())
    twice = has_turn & (rollouts.spread(times) > 1)
    rows.require(
        ~twice.any(1),
        "a turn of a rollout is on one row; found {found}. Tokens of an earlier turn that a row repeats as "
        "context have the turn index -1",
        lambda row: (
            f"turn {int(twice[row].int().argmax())} of rollout {rows.name('rollout', row)} also on a row "
            f"other than {rows.at(row)}"
        ),
    )
    returns = torch.zeros(times.shape, dtype=torch.float64).index_add_(0, rollouts.of, reward)
    there = times > 0
    # 2. The return from each turn on: G_k = r_k + γ G_{k+1}.
    if outcome is not None:
        require_rewards(rows, outcome, siblings_agree=True)
        last = torch.where(there, number, -1).amax(1)
        returns += torch.where(there & (number == last[:, None]), outcome[rollouts.first][:, None], 0.0)
    returns = returns_from(returns, discount)
    # 3. Against the same turn of the others: each pair of group and turn is a group of its own.
    pair = rows.groups.of[rollouts.first][:, None] * len(number) + number
    singleton = "raw" if alone == "return" else "zero"
    formula = Formula(baseline, "none", singleton=singleton)  # type: ignore[arg-type]
    g = Grouped(returns[there], Ids(pair[there]))
    credit = torch.zeros_like(returns)
    credit[there] = g.unsorted(advantage_in_groups(g, formula))
    return rollouts.spread(credit).masked_fill(~has_turn, 0.0)


class TurnAdvantage(
    BatchTransform,
    columns=("turn_index", "turn_reward", "turn", "reward", "group", "rollout", "loss_mask", "advantage"),
):
    """Write each turn's advantage against the same turn of the others in its group (:func:`turn_advantage`).

    Turns are inside rows, each token with the number of its turn; or with ``turn_index_key=None`` each row is
    a turn with a reward of its own, as RewardsToGo takes it. Rows that are out of the statistics get 0, and
    tokens without a turn.

    Reads `turn_index_key` and `loss_mask_key` if there, `turn_reward_key` by `turn_rewards`, by `outcome`
    ``("headrace", "reward")`` if there, else `reward_key`; `group_key`, `rollout_key`. Writes
    `advantage_key`: (N, T, 1), or where rows are turns (N, 1, 1).

    Args:
        discount: γ in [0, 1], per turn.
        baseline: ``leave_one_out``, which is unbiased, or ``mean``, the rollout itself included.
        alone: what a rollout gets at a turn that no other of its group has: its ``return``; or ``zero``,
            which is a bias against turns that few reach.
        turn_rewards: where turns have rewards of their own: ``none``; in `turn_reward_key` one a ``turn``,
            (N, K); or one a ``token``, (N, T), which are added up over the tokens of a turn.
        outcome: whether the rollout's reward is paid at its ``last`` turn, besides; or ``none`` is.
        missing: what an outcome of NaN does: ``raise``, or ``skip``: its rollout is out of the statistics.
        names: other names of columns, such as `turn_index_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is not there.
        BatchError: as the function; a token in the loss, or with a reward, that has no turn.

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
        baseline: TurnBaseline = "leave_one_out",
        alone: Alone = "return",
        turn_rewards: TurnRewards = "none",
        outcome: Outcomes = "last",
        missing: Missing = "raise",
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.turn_rewards = one_of("turn_rewards", turn_rewards, get_args(TurnRewards))
        self.outcome = one_of("outcome", outcome, get_args(Outcomes))
        self.missing = one_of("missing", missing, get_args(Missing))
        rows_are_turns = self.turn_index_key is None
        if rows_are_turns and (turn_rewards, outcome, missing) != ("none", "last", "raise"):
            raise ValueError(
                "where rows are turns (turn_index_key=None) each brings its own reward: leave turn_rewards="
                f"'none', outcome='last', missing='raise'; got {turn_rewards!r}, {outcome!r}, {missing!r}"
            )
        if not rows_are_turns and self.turn_key is not None:
            raise ValueError("turn_key is for rows that are turns: set turn_index_key=None")
        if (turn_rewards, outcome) == ("none", "none"):
            raise ValueError("without turn_rewards and outcome there is no reward: set one of them")
        process = None if turn_rewards == "none" else self.turn_reward_key
        paid = (self.reward_key, None if rows_are_turns else REWARD) if outcome == "last" else ()
        columns = (self.group_key, self.rollout_key, self.turn_index_key, self.turn_key, process, *paid)
        places = SEGMENTS if rows_are_turns else None
        super().__init__([*columns, places, COUNTED], [self.advantage_key])
        self.final_keys = tuple(self.in_keys)
        self.discount, self.baseline, self.alone = _checked(discount, baseline, alone)

    @property
    def of_whole_rollouts(self) -> Literal["", "rewards", "places"]:  # type: ignore[override]
        """Where rows are turns, by their places."""
        return "places" if self.turn_index_key is None else ""

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Add the advantage, to tokens where rows are gathered."""
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
        # 1. How many turns there are at most, in the rows of all ranks.
        sizes = rows.measured(turns=size)["turns"]
        turns = int(sizes.max()) if len(sizes) else 0
        # 2. Of each row and turn whether the row has it, and its reward; and what is out of place.
        mask = None
        if has_key(batch, self.loss_mask_key):
            mask = read_tokens(batch, self.loss_mask_key, reader=reader, option="loss_mask_key")
            same_width(turn, mask, "turn_index_key and loss_mask_key")
        of_token = process if self.turn_rewards == "token" else None
        if of_token is not None:
            same_width(turn, of_token, "turn_index_key and turn_reward_key")

        def of_some(turn: Tensor, mask: Tensor | None, of_token: Tensor | None) -> dict[str, Tensor]:
            place = turn.clamp(-1, turns).add_(1)  # 0 of none, and behind the last of one that is beyond it
            there = torch.zeros(len(turn), turns + 2, dtype=torch.bool, device=turn.device)
            there.scatter_(1, place, True)
            made = {"has_turn": there[:, 1:-1], "unplaced": there[:, -1]}
            if mask is not None:
                inside = mask if mask.dtype is torch.bool else mask != 0
                made["unplaced"] = made["unplaced"] | (count_true(inside & (turn < 0)) > 0)
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
        # 3. The advantage of rows in the statistics, and 0 for the others.
        outcome, chosen = None, torch.ones(len(rows), dtype=torch.bool)
        chosen = chosen if rows.counted is None else rows.counted
        dtype = torch.float64 if process is None else credit_dtype(process)
        if self.outcome == "last":
            outcome, dtype = rows.reward, dtype_of_reward(rows)
            chosen = chosen & ~outcome.isnan() if self.missing == "skip" else chosen
        some, credit = rows.where(chosen), torch.zeros_like(found["reward"])
        if turns and len(some):
            paid = None if outcome is None else outcome[chosen]
            columns = found["reward"][chosen], found["has_turn"][chosen].bool(), paid
            credit[chosen] = credit_of_turns(some, *columns, self.discount, self.baseline, self.alone)
        some.require(
            found["unplaced"][chosen] == 0,
            "every token in the loss needs a turn, from 0 on and below the number of rewards; found others "
            "in {found}. Write turn_index where turns are generated",
            describe_row(some),
        )
        some.require(
            found["misplaced"][chosen] == 0,
            "a reward belongs to a turn of its row; found others, that are not 0, in {found}. Write it on a "
            "token of the turn that it is for, or into the column of that turn",
            describe_row(some),
        )
        if turns:
            require_fit(rows, credit.abs().amax(1), dtype)
        rows.when_gathered(partial(self._write, dtype=dtype), [self.advantage_key], credit=credit)
        return batch

    def _of_rows(self, rows: Rows) -> None:
        """Rows are turns. One that is out of the statistics keeps its place among those of its rollout."""
        reward, dtype = rows.number("reward").double(), dtype_of_reward(rows)
        _, place = places_on_arrival(rows)
        place, some = rows.from_arrival(place), rows.statistics
        if some is not rows:
            reward, place = reward[rows.counted], place[rows.counted]
        credit = torch.zeros_like(reward)
        if len(some):
            has_turn = place[:, None] == torch.arange(int(place.max()) + 1)
            options = self.discount, self.baseline, self.alone
            table = credit_of_turns(some, reward[:, None].expand(has_turn.shape), has_turn, None, *options)
            credit = table.gather(1, place[:, None]).squeeze(1)
        require_fit(some, credit, dtype)
        rows.put("advantage", rows.from_statistics(credit), dtype=dtype, ndim=3)

    def _write(self, batch: TensorDictBase, numbers: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Write the advantage of gathered rows: that of each token's turn, 0 without a turn."""
        turn, credit = self._turns_in(batch), numbers["credit"].to(dtype)
        credit = torch.cat([credit.new_zeros(len(credit), 1), credit], 1)
        last = credit.shape[1] - 2

        def of_some(turn: Tensor, credit: Tensor) -> dict[str, Tensor]:
            return {"of_token": credit.gather(1, turn.clamp(-1, last).add_(1))}

        of_token = in_blocks(of_some, turn, credit)["of_token"]
        write_tokens(batch, self.advantage_key, of_token.unsqueeze(-1), self.turn_index_key)

    def _turns_in(self, batch: TensorDictBase) -> Tensor:
        """(B, T) int64, −1 where a token is of no turn."""
        key, reader = self.turn_index_key, type(self).__name__
        turn = read_tokens(batch, key, fill=-1, reader=reader, option="turn_index_key")
        return whole_numbers(turn, key, "turn_index_key")


def dtype_of_reward(rows: Rows) -> torch.dtype:
    """In which an advantage is written: that of the reward as collected, where it is of floats."""
    dtype = rows.dtype("reward" if rows.has("reward") else REWARD)
    return dtype if dtype.is_floating_point else FLOAT


def _sum_by_turn(reward: Tensor, turn: Tensor, turns: int) -> Tensor:
    """(B, K) float64: the rewards of each turn's tokens, added up in the order of their size."""
    row, token = ((reward != 0) & (turn >= 0)).nonzero().unbind(1)
    values, place = reward[row, token].double().cpu(), (row * turns + turn[row, token]).cpu()
    order = values.argsort()
    sums = torch.bincount(place[order], weights=values[order], minlength=len(turn) * turns)
    return sums.view(len(turn), turns).to(turn.device)
