"""The advantage alone, against other frameworks.

    python benchmarks/peers.py [--rounds 3]

The implementations of TRL and verl are our own, from their documentation, with the containers
that they use. No code is copied. Their other work (tokens, masks, metrics, device copies) is left out,
which makes them faster. The sources are:

- TRL, `trl/trainer/grpo_trainer.py` at d2b69d769dab6f77acbfd33252bcd7d22765571b;
- verl, its estimator `grpo_vectorized` in `verl/trainer/ppo/core_algos.py` and `verl/utils/groupwise.py` at
  10a25d6334ddcc9a678b2f297c423acd29da644f.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np
import torch
from results import main
from tables import Cell, Row, Table
from timing import measure, median_ms, ratio
from torch import Tensor

from headrace.transforms import group_relative_advantage

GROUP_SIZE, EPS = 8, 1e-6
NOTE = """The first line has the time of `group_relative_advantage` with ids and all checks. The other lines
have the times of other code, divided by this time. So 2 means twice as slow as headrace, and 0.5 twice as
fast. The rows are shuffled, one for each rollout, in groups of 8. All lines give the same advantages.

- TRL: a reshape. The rows must be in the order of their groups, and all groups of one size.
- verl, vectorised: sums for each uid, which is verl's id of a group. verl's own trainer uses texts as uids.

We wrote the other lines from the documentation of each framework, and they check nothing."""


def trl(rewards: Tensor) -> Tensor:
    """Rewards that lie in the order of their groups, less the mean of each, over its std."""
    groups = rewards.view(-1, GROUP_SIZE)
    mean, std = (by_group.repeat_interleave(GROUP_SIZE) for by_group in (groups.mean(1), groups.std(1)))
    return (rewards - mean) / (std + EPS)


def verl_vectorised(scores: Tensor, uids: np.ndarray) -> Tensor:
    """Counts, sums and sums of squares by uid, without a loop; of one score the mean is 0 and the std 1.

    Integers are used as they are, and other uids numbered in their order.
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


def shuffled(rows: int) -> Tensor:
    """(N,) the number of the rollout of each row; groups have consecutive ones."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(0))


def candidates(rows: int) -> dict[str, Callable[[], object]]:
    """Each with its own containers, which are filled before."""
    order = shuffled(rows)
    group, reward = order // GROUP_SIZE, torch.rand(rows, generator=torch.Generator().manual_seed(1))
    in_order, numbers = reward[order.argsort()], group.numpy()
    texts = np.array([f"prompt {number}" for number in group.tolist()], dtype=object)
    return {
        "headrace": lambda: group_relative_advantage(reward, group, order),
        "TRL": lambda: trl(in_order),
        "verl, vectorised, integer uids": lambda: verl_vectorised(reward, numbers),
        "verl, vectorised, text uids": lambda: verl_vectorised(reward, texts),
    }


def check(functions: dict[str, Callable[[], object]]) -> None:
    """All give the same numbers, but for TRL's order: else times mean nothing."""
    ours = functions["headrace"]()
    for name, function in functions.items():
        theirs = function()
        if name == "TRL":
            theirs = theirs[shuffled(len(theirs))]
        torch.testing.assert_close(
            theirs, ours, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """The one table."""
    sizes, times = (64, 128) if options.quick else (8_192, 131_072), []
    for size in sizes:
        functions = candidates(size)
        check(functions)
        times.append(measure(functions, options.rounds))
    rows = [Row("headrace, ms", [Cell(median_ms(each, "headrace")) for each in times])]
    for name in list(times[0])[1:]:
        rows.append(Row(name, [Cell(ratio(each, name, "headrace"), ",.2f") for each in times]))
    yield Table(
        "Advantages of other frameworks, over headrace",
        NOTE,
        ["rows", *(f"{size:,}" for size in sizes)],
        rows,
    )


if __name__ == "__main__":
    main(tables, __doc__, rounds=(3, 1))
