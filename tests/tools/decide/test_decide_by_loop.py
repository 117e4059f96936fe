"""`decide` equals a plain loop on batches with failed, missing and empty rollouts."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any, NamedTuple

import pytest

from headrace import Decider, decide

NAN = float("nan")
REDUCED = {
    "shared": lambda values: values[0],
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
    "sum": math.fsum,
    "mean": statistics.fmean,
    "max": max,
}


class Line(NamedTuple):
    """One row."""

    group: int
    rollout: int
    reward: float
    tokens: int
    status: str


def drawn_options(rng: random.Random) -> dict[str, Any]:
    options = {
        "group_size": rng.choice([3, 4]),
        "missing": rng.choice(["skip", "mask"]),
        "reward": rng.choice([*REDUCED]),
        "minibatches": rng.choice([1, 2]),
        "loss_unit": rng.choice(["token", "sample", "rollout", "group"]),
    }
    on_incomplete = rng.choice([{"on_incomplete": "drop"}, {"on_incomplete": "keep", "min_rollouts": 2}])
    stages = {"split": {"remainder": "uneven"}} | ({} if rng.random() < 0.6 else {"filter": None})
    return options | on_incomplete | {"stages": stages}


def drawn_lines(rng: random.Random, options: dict[str, Any]) -> list[Line]:
    """Groups that may lack rollouts, with rollouts that failed or lack a reward or tokens in the loss."""
    lines, rollout = [], 0
    for group in rng.sample(range(1000), rng.randint(1, 6)):
        for _ in range(rng.randint(1, options["group_size"])):
            rollout += rng.randint(1, 9)
            ends = rng.choices(["completed", "truncated", "failed", "aborted"], [80, 8, 8, 4])[0]
            scored, empty, same = rng.random() < 0.75, rng.random() < 0.1, rng.randint(-4, 4) / 4
            for last in [False] * rng.choice([0, 0, 1, 2]) + [True]:
                reward = same if options["reward"] == "shared" else rng.randint(-4, 4) / 4
                tokens = 0 if empty or rng.random() < 0.1 else rng.randint(1, 6)
                status = ends if last or rng.random() < 0.5 else "completed"
                lines.append(Line(group, rollout, reward if scored else NAN, tokens, status))
    rng.shuffle(lines)
    return lines


def columns_of(lines: list[Line]) -> dict[str, list]:
    names = ("group_id", "rollout_id", "reward", "tokens", "status")
    return {name: list(column) for name, column in zip(names, zip(*lines, strict=True), strict=True)}


def looped(lines: list[Line], options: dict[str, Any]) -> tuple[list[str], list[float], list[bool]]:
    """For each row: its reason, its RLOO advantage, and whether it stays in the batch."""
    of = {line.rollout: [each for each in lines if each.rollout == line.rollout] for line in lines}
    group = {rollout: own[0].group for rollout, own in of.items()}
    why, reward = {}, {}
    lost = {r for r, own in of.items() if {each.status for each in own} & {"failed", "aborted"}}
    for rollout, own in of.items():
        have = sum(group[other] == group[rollout] for other in of.keys() - lost)
        enough = options.get("min_rollouts", options["group_size"])
        values = [each.reward for each in own]
        if rollout in lost:
            why[rollout] = "gate/failed"
        elif have < enough:
            why[rollout] = "gate/incomplete"
        elif not any(each.tokens for each in own):
            why[rollout] = "gate/empty"
        elif not any(map(math.isnan, values)):
            reward[rollout] = REDUCED[options["reward"]](values)
        elif options["missing"] == "mask":
            why[rollout] = "collapse/no_reward"
    stays = {rollout for rollout in of if why.get(rollout) not in ("gate/failed", "gate/incomplete")}
    credit = dict.fromkeys(of, 0.0)
    for rollout in of.keys() - why.keys():
        peers = {other: value for other, value in reward.items() if group[other] == group[rollout]}
        others = [value for other, value in peers.items() if other != rollout]
        if rollout in reward and others:
            credit[rollout] = reward[rollout] - statistics.fmean(others)
        if "filter" not in options["stages"] and len({*peers.values()}) < 2:
            why[rollout] = "filter/zero_variance"
    reasons = [why.get(line.rollout, "" if line.tokens else "pipeline/no_loss_tokens") for line in lines]
    advantages = [
        0.0 if reason else credit[line.rollout] for line, reason in zip(lines, reasons, strict=True)
    ]
    return reasons, advantages, [line.rollout in stays for line in lines]


def weights_of_step(lines: list[Line], unit: str) -> list[float]:
    """The loss weights of the rows that train in one optimiser step."""
    if unit == "sample":
        return [1 / len(lines) / line.tokens for line in lines]
    units = [0 if unit == "token" else getattr(line, unit) for line in lines]
    tokens = dict.fromkeys(units, 0)
    for own, line in zip(units, lines, strict=True):
        tokens[own] += line.tokens
    return [1 / len(tokens) / tokens[own] for own in units]


@pytest.mark.slow
def test_reasons_advantages_and_weights_equal_a_loop():
    seen = set()
    for seed in range(24):
        rng = random.Random(seed)
        options = drawn_options(rng)
        lines = drawn_lines(rng, options)
        reasons, advantages, stays = looped(lines, options)
        found = decide(columns_of(lines), "rloo", seed=seed, **options)
        assert found.reason == reasons, seed
        assert found.advantage.tolist() == pytest.approx(advantages, abs=1e-12), seed
        weight = [0.0] * len(lines)
        for step in found.steps:
            rows = [row for row in step.tolist() if not reasons[row]]
            weights = weights_of_step([lines[row] for row in rows], options["loss_unit"])
            weight = [dict(zip(rows, weights, strict=True)).get(row, old) for row, old in enumerate(weight)]
        assert found.loss_weight.tolist() == pytest.approx(weight, abs=1e-12), seed
        trained = [row for step in found.steps for row in step.tolist()]
        assert sorted(trained) == [row for row, stay in enumerate(stays) if stay], seed
        seen |= {*reasons}
    assert seen == {
        *("", "gate/failed", "gate/incomplete", "gate/empty", "collapse/no_reward"),
        *("filter/zero_variance", "pipeline/no_loss_tokens"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["skip", "mask"])
def test_carried_rows_are_trained_once_with_the_advantage_of_their_batch(missing):
    """Some rows have no reward, and the Decider continues from a saved state after each batch."""
    split = {"minibatch_size": 3, "remainder": "carry"}
    options = {"group_size": 2, "missing": missing, "reward": "sum", "minibatches": None}
    options |= {"stages": {"split": split, "filter": None}}
    decider, other = Decider("rloo", **options), Decider("rloo", **options)
    fresh = decider.state_dict()
    for seed in range(6):
        rng, every, expected, trained = random.Random(seed), [], [], []
        decider.load_state_dict(fresh)
        for call in range(4):
            lines = [
                line._replace(
                    group=line.group + 1000 * call, rollout=line.rollout + 1000 * call, status="completed"
                )
                for line in drawn_lines(rng, options)
            ]
            pairs = {(line.group, line.rollout) for line in lines}
            sizes = [group for group, _ in pairs]
            lines = [line for line in lines if sizes.count(line.group) == 2]
            if not lines:
                continue
            reasons, advantages, _ = looped(lines, options)
            begins = len(every)
            every, expected = every + lines, expected + list(zip(reasons, advantages, strict=True))
            found = decider.decide(columns_of(lines))
            number = [*range(begins, len(every)), *found.carried.tolist()]
            for step in found.steps:
                rows = [row for row in step.tolist() if not expected[number[row]][0]]
                weights = weights_of_step([every[number[row]] for row in rows], "token")
                assert found.loss_weight[rows].tolist() == pytest.approx(weights)
                assert found.advantage[step].tolist() == pytest.approx([expected[number[r]][1] for r in step])
                trained += [number[row] for row in step.tolist()]
            other.load_state_dict(decider.state_dict())
            decider, other = other, decider
        assert len(trained) == len({*trained})
        assert len(every) - len(trained) <= 6  # two rollouts of up to 3 rows may be carried at the end
