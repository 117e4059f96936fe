"""Credit for the turns of a rollout, inside its rows or row by row."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import Rule, as_rewards, at_least_float32, credit_dtype, turn_rules
from headrace.transforms.distributed import population_of
from headrace.transforms.ids import as_ids, first_row, places_by_turn
from headrace.transforms.options import nested_key, one_of
from headrace.transforms.rewards import Missing
from headrace.transforms.schema import COUNTED, REWARD, has_key
from headrace.transforms.sums import sum_in_any_order
from headrace.transforms.tokens import read_tokens, write_tokens

from .by_turn import Alone, TurnBaseline, TurnFormula, fits_rule
from .token_columns import places_of_all, population_with_reward, same_width, whole_numbers, widest

TurnRewards = Literal["none", "turn", "token"]
Outcomes = Literal["last", "none"]


class TurnAdvantage(BatchTransform):
    """Write each turn's advantage against the same turn of the others in its group (:func:`turn_advantage`).

    Turns are inside rows, each token with the number of its turn; or with ``turn_index_key=None`` each row is
    a turn with a reward of its own, as RewardsToGo takes it. Rows that are out of the statistics get 0, and
    tokens without a turn. Two device reads, for the number of turns and the checks, the second alone with
    `turn_rewards` ``turn``; one more where rows are excluded. Over ranks an exchange more.

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
        turn_index_key: (N, T) int, from 0; -1 where a token is of no turn, as prompt, padding and repeated
            context; None: each row is a turn.
        turn_reward_key: float, as `turn_rewards` says.
        turn_key: (N,) or (N, 1) int that orders a rollout's rows where each is a turn; None: the order of the
            rows.
        reward_key: (N,), (N, 1) or (N, 1, 1) float: the rollout's; where rows are turns, the row's.
        group_key: (N,) or (N, 1) int ≥ 0.
        rollout_key: (N,) or (N, 1) int ≥ 0; None: each row is a rollout.
        loss_mask_key: (N, T) bool, whose tokens must have a turn.
        advantage_key: where the result goes.

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

    keeps_rows = True
    asks_in_loss = True
    spans_ranks = True
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
        turn_index_key: NestedKey | None = "turn_index",
        turn_reward_key: NestedKey = "turn_reward",
        turn_key: NestedKey | None = None,
        reward_key: NestedKey = ("next", "reward"),
        group_key: NestedKey = "group_id",
        rollout_key: NestedKey | None = "rollout_id",
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        advantage_key: NestedKey = "advantage",
    ):
        self.turn_index_key, self.turn_reward_key = nested_key(turn_index_key), nested_key(turn_reward_key)
        self.turn_key, self.reward_key = nested_key(turn_key), nested_key(reward_key)
        self.group_key, self.rollout_key = nested_key(group_key), nested_key(rollout_key)
        self.loss_mask_key, self.advantage_key = nested_key(loss_mask_key), nested_key(advantage_key)
        self.turn_rewards = one_of("turn_rewards", turn_rewards, get_args(TurnRewards))
        self.outcome = one_of("outcome", outcome, get_args(Outcomes))
        self.missing = one_of("missing", missing, get_args(Missing))
        rows_are_turns = turn_index_key is None
        if rows_are_turns and (turn_rewards, outcome, missing) != ("none", "last", "raise"):
            raise ValueError(
                "where rows are turns (turn_index_key=None) each brings its own reward: leave turn_rewards="
                f"'none', outcome='last', missing='raise'; got {turn_rewards!r}, {outcome!r}, {missing!r}"
            )
        if not rows_are_turns and turn_key is not None:
            raise ValueError("turn_key is for rows that are turns: set turn_index_key=None")
        if (turn_rewards, outcome) == ("none", "none"):
            raise ValueError("without turn_rewards and outcome there is no reward: set one of them")
        process = None if turn_rewards == "none" else self.turn_reward_key
        paid = (self.reward_key, None if rows_are_turns else REWARD) if outcome == "last" else ()
        columns = (self.group_key, self.rollout_key, self.turn_index_key, self.turn_key, process, *paid)
        super().__init__([*columns, COUNTED], [self.advantage_key])
        self.final_keys = tuple(self.in_keys)
        self.formula = TurnFormula(discount, baseline, alone)
        self.discount, self.baseline, self.alone = discount, baseline, alone

    @property
    def of_whole_rollouts(self) -> Literal["", "rewards", "places"]:  # type: ignore[override]
        """Where rows are turns, by their places."""
        return "places" if self.turn_index_key is None else ""

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Add the advantage."""
        if self.turn_index_key is None:
            return self._of_rows(batch)
        name = type(self).__name__
        turn = read_tokens(batch, self.turn_index_key, fill=-1, reader=name, option="turn_index_key")
        turn = whole_numbers(turn, self.turn_index_key, "turn_index_key")
        process, tables = self._tables(batch, turn)
        dtypes = [] if process is None else [credit_dtype(process)]
        if self.outcome == "last":
            paid = self.column(batch, "reward_key") if not has_key(batch, REWARD) else batch.get(REWARD)
            tables["outcome"] = at_least_float32(as_rewards(paid))
            dtypes.append(credit_dtype(batch.get(self.reward_key, paid)))
        people = population_with_reward(batch, tables.get("outcome"), self.missing)
        everyone = people.take(tables, self._ids(batch))
        unplaced, misplaced = everyone.pop("unplaced"), everyone.pop("misplaced")
        credit, rules = self.formula(
            everyone["reward"],
            everyone["has_turn"],
            everyone["groups"],
            everyone["rollouts"],
            everyone.get("outcome"),
        )
        rules += _placed(unplaced, misplaced, everyone["rollouts"])
        rules.append(fits_rule(credit, dtypes[-1], everyone["rollouts"]))
        own = people.put_back(credit).to(dtypes[-1])
        none = own.new_zeros(len(own), 1)  # what a token without a turn gets
        per_token = torch.cat([none, own], 1).gather(1, turn.clamp(-1, own.shape[1] - 1) + 1)
        write_tokens(batch, self.advantage_key, per_token.unsqueeze(-1), self.turn_index_key)
        return Outcome(batch, rules=people.rules(rules))

    def _of_rows(self, batch: TensorDictBase) -> Outcome:
        """Rows are turns."""
        collected = as_rewards(self.column(batch, "reward_key"))
        columns = {"reward": at_least_float32(collected)}
        if self.turn_key is not None:
            columns["turn"] = as_ids(self.column(batch, "turn_key"), "turn")
        if has_key(batch, COUNTED):  # a turn that is out of the statistics is no reason to count others anew
            columns["place"] = places_of_all(batch, self.ids(batch, "rollout"), columns.get("turn"))
        people = population_of(batch)
        everyone = people.take(columns, self._ids(batch))
        reward, rollouts, turn = everyone["reward"], everyone["rollouts"], everyone.get("turn")
        first = first_row(rollouts)
        place = everyone["place"] if "place" in everyone else places_by_turn(first, turn).place
        turns = int(place.amax()) + 1 if len(place) else 0
        has_turn = place[:, None] == torch.arange(turns, device=place.device)
        credit, rules = self.formula(
            reward[:, None].expand(-1, turns), has_turn, everyone["groups"], rollouts, None
        )
        rules += [*turn_rules(rollouts, first, turn), fits_rule(credit, credit_dtype(collected), rollouts)]
        own = people.put_back(credit.gather(1, place[:, None])) if turns else people.put_back(reward[:, None])
        batch.set(self.advantage_key, own.to(credit_dtype(collected)).view(-1, 1, 1))
        return Outcome(batch, rules=people.rules(rules))

    def _ids(self, batch: TensorDictBase) -> dict[str, Tensor]:
        return {"rollouts": self.ids(batch, "rollout"), "groups": self.ids(batch, "group")}

    def _tables(self, batch: TensorDictBase, turn: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The rewards as collected; by row and turn, rewards and which there are; what is out of place."""
        name, process = type(self).__name__, None
        if self.turn_rewards != "none":
            process = read_tokens(batch, self.turn_reward_key, fill=0, reader=name, option="turn_reward_key")
        if process is not None and self.turn_rewards == "turn":
            turns = process.shape[1]
        else:
            turns = widest(int(turn.amax()) + 1 if turn.numel() else 0)
        beyond = torch.where((turn < 0) | (turn >= turns), turns, turn)
        has_turn = torch.zeros(len(turn), turns + 1, dtype=torch.bool, device=turn.device)
        has_turn = has_turn.scatter_(1, beyond, True)[:, :turns]
        unplaced = turn >= turns
        if has_key(batch, self.loss_mask_key):
            mask = read_tokens(batch, self.loss_mask_key, fill=0, reader=name, option="loss_mask_key")
            same_width(turn, mask, "turn_index_key and loss_mask_key")
            unplaced = unplaced | ((mask != 0) & (turn < 0))
        reward, misplaced = torch.zeros_like(has_turn, dtype=torch.float64), torch.zeros_like(has_turn[:, :1])
        if process is not None and self.turn_rewards == "turn":
            reward, misplaced = process.double(), (process != 0) & ~has_turn
        elif process is not None:
            same_width(turn, process, "turn_index_key and turn_reward_key")
            reward, misplaced = _sum_by_turn(process, beyond, turns), (process != 0) & (turn < 0)
        tables = {"reward": reward, "has_turn": has_turn}
        return process, tables | {"unplaced": unplaced.any(1), "misplaced": misplaced.any(1)}


def _sum_by_turn(reward: Tensor, turn: Tensor, turns: int) -> Tensor:
    """(N, K) float64: the rewards of each turn's tokens, added up; not finite where one of them is not."""
    values, table = reward.double(), reward.new_zeros(len(reward), turns + 1, dtype=torch.float64)
    if values.numel() == 0:
        return table[:, :turns]
    broken = ~values.isfinite()
    values = values.masked_fill(broken, 0.0)
    sums = sum_in_any_order(
        values,
        lambda part: torch.zeros_like(table).scatter_add_(1, turn, part),
        peak=lambda: values.abs().amax(1, keepdim=True),
        terms=(values != 0).sum(1, keepdim=True).double(),
    )
    nan = torch.zeros_like(table, dtype=torch.int64).scatter_add_(1, turn, broken.long()) > 0
    return sums.masked_fill(nan, float("nan"))[:, :turns]


def _placed(unplaced: Tensor, misplaced: Tensor, rollouts: Tensor) -> list[Rule]:
    """What trains and what is paid belongs to a turn."""

    def describe(row: int) -> str:
        return f"row {row} (rollout {int(rollouts[row])})"

    return [
        Rule(
            unplaced,
            describe,
            "every token in the loss needs a turn, from 0 on and below the number of rewards; found others "
            "in {found}. Write turn_index where turns are generated",
        ),
        Rule(
            misplaced,
            describe,
            "a reward belongs to a turn of its row; found others, that are not 0, in {found}. Write it on a "
            "token of the turn that it is for, or into the column of that turn",
        ),
    ]
