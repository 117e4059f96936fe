"""Compare the time of the advantage alone with other frameworks.

    python benchmarks/peers.py [--rounds 3]

We wrote the functions for TRL, verl, miles and rllm from their documentation, with the containers that they
use. No code is copied. Their other work (tokens, masks, metrics, device copies) is left out, so our functions
are faster. MCAdvantage is TorchRL's own code. The sources are:

- TRL, `trl/trainer/grpo_trainer.py` at d2b69d769dab6f77acbfd33252bcd7d22765571b;
- verl, its estimator `grpo_vectorized` in `verl/trainer/ppo/core_algos.py` and `verl/utils/groupwise.py` at
  10a25d6334ddcc9a678b2f297c423acd29da644f.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import torch
from results import main
from tables import Cell, Row, Table
from tensordict import TensorDict
from timing import measure, median_ms, ratio
from torch import Tensor
from torchrl.objectives.llm import MCAdvantage

from headrace.transforms import group_relative_advantage

GROUP_SIZE, EPS = 8, 1e-6
NOTE = """The first line has the time of `group_relative_advantage` with ids and all checks. The other lines
have the times of other code, divided by this time. So 2 means twice as slow as headrace, and 0.5 twice as
fast. The rows are shuffled, one for each rollout, in groups of 8. All lines give the same advantages.

- TRL: a reshape. The rows must be in the order of their groups, and all groups of one size.
- verl, vectorised: sums for each uid, which is verl's id of a group. verl's own trainer uses texts as uids.
- verl, loop; miles; rllm: loops in Python over the groups.
- MCAdvantage: a transform of TorchRL, which also waits until groups are whole.

MCAdvantage is TorchRL's own code. We wrote the other lines from the documentation of each framework, and
they check nothing."""


def trl(rewards: Tensor) -> Tensor:
    """Subtract the mean of each group, and divide by its std. Rewards are in the order of their groups."""
    groups = rewards.view(-1, GROUP_SIZE)
    mean, std = (by_group.repeat_interleave(GROUP_SIZE) for by_group in (groups.mean(1), groups.std(1)))
    return (rewards - mean) / (std + EPS)


def verl_vectorised(scores: Tensor, uids: np.ndarray) -> Tensor:
    """Use counts, sums and sums of squares by uid, without a loop. One score has the mean 0 and the std 1.

    Integers are used as they are. Other uids are numbered in their order.
    """
    number = torch.from_numpy(uids if uids.dtype == np.int64 else np.unique(uids, return_inverse=True)[1])
    columns = torch.stack([torch.ones_like(scores), scores, scores * scores])
    sums = torch.zeros(3, int(number.max()) + 1).index_add_(1, number, columns)
    count, total, squares = sums[0].clamp_min(1), sums[1], sums[2]
    variance = (squares - total * total / count) / (count - 1).clamp_min(1)
    alone = count == 1
    mean = (total / count).masked_fill(alone, 0.0)
    std = variance.clamp_min(EPS).sqrt().masked_fill(alone, 1.0)
    return (scores - mean[number]) / (std[number] + EPS)


def verl(scores: Tensor, uids: list[str]) -> Tensor:
    """Collect rewards by the text of the prompt. For each row, subtract the mean and divide by the std."""
    by_uid: dict[str, list[Tensor]] = defaultdict(list)
    for row, uid in enumerate(uids):
        by_uid[uid].append(scores[row])
    mean, std = {}, {}
    for uid, members in by_uid.items():
        together = torch.stack(members)
        mean[uid], std[uid] = together.mean(), together.std()
    out = torch.empty_like(scores)
    for row, uid in enumerate(uids):
        out[row] = (scores[row] - mean[uid]) / (std[uid] + EPS)
    return out


def miles(rewards: list[float], groups: list[int], rollouts: list[int]) -> list[float]:
    """Collect one reward per rollout by group. For each group, subtract the mean and divide by the std."""
    by_group: dict[int, dict[int, float]] = defaultdict(dict)
    for reward, group, rollout in zip(rewards, groups, rollouts, strict=True):
        by_group[group].setdefault(rollout, reward)
    credit: dict[int, float] = {}
    for members in by_group.values():
        centred = torch.tensor(list(members.values()))
        centred = centred - centred.mean()
        credit |= dict(zip(members, (centred / (centred.std() + EPS)).tolist(), strict=True))
    return [credit[rollout] for rollout in rollouts]


class Trajectory:
    """A rollout, as an object."""

    def __init__(self, reward: float):
        self.reward, self.advantage = reward, 0.0


def rllm(trajectories: list[Trajectory], tasks: list[str]) -> list[float]:
    """Subtract the mean and divide by the std with the divisor n, in NumPy, with trajectories by task."""
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory, task in zip(trajectories, tasks, strict=True):
        by_task[task].append(trajectory)
    for members in by_task.values():
        rewards = np.array([member.reward for member in members])
        for member, advantage in zip(
            members, (rewards - rewards.mean()) / (rewards.std() + EPS), strict=True
        ):
            member.advantage = float(advantage)
    return [trajectory.advantage for trajectory in trajectories]


def shuffled(rows: int) -> Tensor:
    """(N,) the number of each row's rollout, shuffled. The rollouts of a group have consecutive numbers."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(0))


def candidates(rows: int) -> dict[str, Callable[[], object]]:
    """The functions. Each has containers of its own, which are filled before it is measured."""
    order = shuffled(rows)
    group, reward = order // GROUP_SIZE, torch.rand(rows, generator=torch.Generator().manual_seed(1))
    uids, groups, rollouts = [f"prompt {g}" for g in group.tolist()], group.tolist(), order.tolist()
    rewards = reward.tolist()
    trajectories = [Trajectory(each) for each in rewards]
    in_order, numbers, texts = reward[order.argsort()], group.numpy(), np.array(uids, dtype=object)
    return {
        "headrace": lambda: group_relative_advantage(reward, group, order),
        "TRL": lambda: trl(in_order),
        "verl, vectorised, integer uids": lambda: verl_vectorised(reward, numbers),
        "verl, vectorised, text uids": lambda: verl_vectorised(reward, texts),
        "verl, loop": lambda: verl(reward, uids),
        "miles": lambda: miles(rewards, groups, rollouts),
        "rllm": lambda: rllm(trajectories, uids),
    }


def check(functions: dict[str, Callable[[], object]]) -> None:
    """Check that all functions give the same numbers, except for rllm's divisor and TRL's order."""
    ours = functions["headrace"]()
    divisor = {"rllm": ((GROUP_SIZE - 1) / GROUP_SIZE) ** 0.5}
    for name, function in functions.items():
        theirs = torch.as_tensor(function(), dtype=torch.float32) * divisor.get(name, 1.0)
        if name == "TRL":
            theirs = theirs[shuffled(len(theirs))]
        torch.testing.assert_close(
            theirs, ours, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


def torchrl(rows: int) -> Callable[[], None]:
    """A call of MCAdvantage on rows as collectors yield them, group by group."""
    number = torch.arange(rows).unsqueeze(-1)
    columns = {
        "group_id": number // GROUP_SIZE,
        ("next", "reward"): torch.rand(rows, 1),
        ("next", "done"): torch.ones(rows, 1, dtype=torch.bool),
        ("tokens", "full"): torch.zeros(rows, 16, dtype=torch.int64),
    }
    batch = TensorDict(columns, batch_size=[rows])

    def run() -> None:
        out = MCAdvantage(grpo_size=GROUP_SIZE, prompt_key="group_id").inv(batch.clone(recurse=False))
        if len(out) != rows:
            raise RuntimeError(f"{rows} rows went in, and {len(out)} came out")

    return run


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """Make the table."""
    sizes, times = (64, 128) if options.quick else (8_192, 131_072), []
    for size in sizes:
        functions = candidates(size)
        check(functions)
        waited = {"MCAdvantage": torchrl(size)} if size == sizes[0] else {}
        times.append(measure(functions | waited, options.rounds))
    rows = [Row("headrace, ms", [Cell(median_ms(each, "headrace")) for each in times])]
    for name in list(times[0])[1:]:
        ratios = [ratio(each, name, "headrace") if name in each else None for each in times]
        rows.append(Row(name, [Cell(each, ",.2f" if (each or 0) < 10 else ",.0f") for each in ratios]))
    yield Table(
        "Advantages of other frameworks, over headrace",
        NOTE,
        ["rows", *(f"{size:,}" for size in sizes)],
        rows,
    )


if __name__ == "__main__":
    main(tables, __doc__, rounds=(3, 1))
