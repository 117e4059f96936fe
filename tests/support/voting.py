"""Batches in which some rollouts vote only, with results of loops and of the stages."""

from __future__ import annotations

import math
import random
import statistics

import torch
from tensordict import TensorDict

from headrace.pipeline import Pipeline
from headrace.transforms import (
    CompletenessGate,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LossWeight,
    NotTruncated,
    RewardsVary,
    SampleFilter,
    ShuffleSplit,
    Status,
)

MASK = ("masks", "all_assistant_mask")
NAN = float("nan")
VOTED = {"baseline_of": "votes_only", "scale": "none"}
# The baseline is of all rollouts, of those that vote only, or a column. With "decoupled", there are two
# rewards.
ADVANTAGES = (
    {"scale": "none"},
    {},
    {"baseline": "leave_one_out", "scale": "none"},
    VOTED,
    VOTED | {"baseline": "median"},
    VOTED | {"baseline": "log_mean_exp", "temperature": 0.5},
    {"baseline": "column", "scale": "none"},
    {"scale": "none", "several": "decoupled"},
    VOTED | {"several": "decoupled"},
)
COLUMNS = 2  # rewards of a row


def options_of(seed: int) -> tuple[dict, str, str]:
    """The options of the advantage, the action of the filter, and the mean of the loss."""
    return (
        ADVANTAGES[seed % len(ADVANTAGES)],
        ("mask", "drop", "exclude")[seed % 3],
        ("token", "rollout")[seed // 2 % 2],
    )


def drawn(seed: int) -> TensorDict:
    """Shuffled rows, one to three per rollout; some rollouts are empty, truncated or without a reward."""
    draw = random.Random(seed)
    rows = []
    for group in range(draw.randint(1, 5)):
        size = draw.randint(2, 6)
        equal = draw.random() < 0.2
        missing = draw.random() < 0.2  # one rollout of the group has no row
        for number in range(size):
            first, votes = number == 0, number == 0 or draw.random() < 0.2
            reward = (
                [0.5, 0.25] if equal else [draw.choice([0.0, 1.0, draw.random()]) for _ in range(COLUMNS)]
            )
            if not votes and draw.random() < 0.1:
                reward = draw.choice([[NAN, NAN], [NAN, reward[1]]])
            lost = not first and draw.random() < 0.15
            empty = draw.random() < 0.2
            value = draw.random()
            for _ in range(draw.randint(1, 3)):
                tokens = 0 if empty else draw.randint(0, 4)
                rows.append(
                    (group * 7, group * 100 + number, reward, votes, lost, tokens, value, size + missing)
                )
    draw.shuffle(rows)
    groups, rollouts, rewards, votes, lost, tokens, values, sizes = (list(c) for c in zip(*rows, strict=True))
    columns = {
        "number": torch.arange(len(rows)),
        "group_id": torch.tensor(groups),
        "rollout_id": torch.tensor(rollouts),
        ("next", "reward"): torch.tensor(rewards, dtype=torch.float64),
        "votes_only": torch.tensor(votes),
        "status": torch.tensor([Status.TRUNCATED if each else Status.COMPLETED for each in lost]),
        "baseline_value": torch.tensor(values, dtype=torch.float64),
        "expected_rollouts": torch.tensor(sizes),
        MASK: torch.arange(4) < torch.tensor(tokens)[:, None],
    }
    return TensorDict(columns, batch_size=[len(rows)])


def pipeline_of(seed: int, **pipeline) -> Pipeline:
    """A pipeline with every reason for a rollout to leave, and one of the advantages."""
    advantage, action, unit = options_of(seed)
    several = advantage.get("several") == "decoupled"
    vary = SampleFilter(criterion=RewardsVary(), action=action)
    stages = {
        "gate": CompletenessGate(on_incomplete="drop"),
        "collapse": FanOutCollapse(columns=COLUMNS, missing="mask"),
        "lost": SampleFilter(criterion=NotTruncated(), action="exclude", unit="rollout"),
        "filter": None if several else vary,
        "advantage": GroupRelativeAdvantage(**advantage, missing="mask"),
        "split": ShuffleSplit(
            minibatches=1 if pipeline else 1 + seed % 2, remainder="uneven", microbatches=2 - bool(pipeline)
        ),
        "weight": LossWeight(unit=unit),
    }
    return Pipeline(stages, **pipeline)


def baseline_by_loops(rewards: dict, votes: dict, values: dict, rollout: int, options: dict) -> float:
    """The baseline of a rollout, from the rewards in its group."""
    name = options.get("baseline", "mean")
    if options.get("baseline_of") == "votes_only":
        rewards = {each: reward for each, reward in rewards.items() if votes[each]}
    if name == "leave_one_out":
        others = [reward for each, reward in rewards.items() if each != rollout]
        return statistics.fmean(others) if others else rewards[rollout]
    if name == "log_mean_exp":
        t = options["temperature"]
        return t * math.log(statistics.fmean(math.exp(reward / t) for reward in rewards.values()))
    of = {"mean": statistics.fmean, "median": statistics.median, "column": lambda _: values[rollout]}
    return of[name](list(rewards.values()))


def advantages_by_loops(rewards: dict, votes: dict, values: dict, options: dict) -> dict:
    """The advantage of each rollout of a group."""
    credit = {
        each: reward - baseline_by_loops(rewards, votes, values, each, options)
        for each, reward in rewards.items()
    }
    relative = options.get("baseline") != "column"
    if relative and len(rewards) == 1:
        return dict.fromkeys(credit, 0.0)
    if "scale" not in options and rewards:
        mean = statistics.fmean(rewards.values())
        squares = sum((reward - mean) ** 2 for reward in rewards.values())
        std = (squares / (len(rewards) - 1)) ** 0.5
        credit = {each: 0.0 if std == 0 else value / (std + 1e-6) for each, value in credit.items()}
    return credit


def by_loops(batch: TensorDict, seed: int) -> tuple[dict, dict]:
    """The advantage of each row that trains, and the reason of each rollout that does not train."""
    options, _, _ = options_of(seed)
    several = options.get("several") == "decoupled"
    rows = list(zip(*(batch[key].tolist() for key in ("group_id", "rollout_id")), strict=True))
    tokens, paid = batch[MASK].sum(1).tolist(), batch["next", "reward"].tolist()
    votes = dict(zip(batch["rollout_id"].tolist(), batch["votes_only"].tolist(), strict=True))
    values = dict(zip(batch["rollout_id"].tolist(), batch["baseline_value"].tolist(), strict=True))
    advantage, reasons = dict[int, float](), dict[int, str]()
    for group in {g for g, _ in rows}:
        members = {r: [i for i, row in enumerate(rows) if row == (group, r)] for g, r in rows if g == group}
        rewards = dict[int, list[float]]()
        for rollout, own in members.items():
            total = [each for each in paid[own[0]] if not math.isnan(each)]
            is_empty = not sum(tokens[i] for i in own) and not votes[rollout]
            if len(members) < int(batch["expected_rollouts"][own[0]]):
                reasons[rollout] = "gate/incomplete"
            elif is_empty:
                reasons[rollout] = "gate/empty"
            elif not total:
                reasons[rollout] = "collapse/no_reward"
            elif int(batch["status"][own[0]]) == Status.TRUNCATED:
                reasons[rollout] = "lost/truncated"
            else:
                rewards[rollout] = paid[own[0]] if several else [sum(total)]
            if votes[rollout]:
                reasons[rollout] = "pipeline/votes_only"
        varies = len({tuple(each) for each in rewards.values()}) > 1
        credit = dict.fromkeys(rewards, 0.0)
        for column in range(COLUMNS if several else 1):
            known = {r: each[column] for r, each in rewards.items() if not math.isnan(each[column])}
            for rollout, value in advantages_by_loops(known, votes, values, options).items():
                credit[rollout] += value
        for rollout in rewards:
            if not several and not varies and rollout not in reasons:
                reasons[rollout] = "filter/zero_variance"
            if rollout not in reasons:
                advantage |= {i: credit[rollout] for i in members[rollout] if tokens[i]}
    return advantage, reasons


def weights_by_loops(batch: TensorDict, rows: list[int], unit: str) -> dict[int, float]:
    """The token weight in each of these rows, which are the training rows of an optimiser step."""
    tokens, rollouts = batch[MASK].sum(1).tolist(), batch["rollout_id"].tolist()
    total = sum(tokens[row] for row in rows)
    if unit == "token":
        return dict.fromkeys(rows, 1 / total if total else 0.0)
    number = len({rollouts[row] for row in rows})
    return {row: 1 / number / sum(tokens[i] for i in rows if rollouts[i] == rollouts[row]) for row in rows}


def found_in(run) -> tuple[dict, dict, list[list[int]]]:
    """The advantage and weight of each row by its number, and the row numbers of each minibatch."""
    advantage, weight, steps = dict[int, float](), dict[int, float](), []
    for part in run.minibatches():
        numbers = part["number"].tolist()
        advantage |= dict(zip(numbers, part["advantage"].flatten().tolist(), strict=True))
        weight |= dict(zip(numbers, part["loss_weight"].tolist(), strict=True))
        steps.append(numbers)
    return advantage, weight, steps


def vote_on_ranks(rank: int, world: int, seeds: range) -> list:
    """For each batch: the advantages, weights and reasons of the rows of this rank."""
    found = []
    for seed in seeds:
        batch = drawn(seed)
        home = torch.randint(0, world, (len(batch),), generator=torch.Generator().manual_seed(seed))
        mine = batch[home == rank]
        run = pipeline_of(seed, process_group="world", shared_ids="same", patience=60.0).run(mine)
        advantage, weight, _ = found_in(run)
        reasons = [run.ledger.names[code] for code in run.ledger.reason.tolist()]
        found.append((advantage, weight, dict(zip(mine["number"].tolist(), reasons, strict=True))))
    return found
