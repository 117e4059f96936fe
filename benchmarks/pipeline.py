"""The grpo recipe over a plain gather of the batch, as CPU time in one run.

    python benchmarks/pipeline.py [--rounds 9]

Rows of 2,048 tokens with masks and log-probabilities, and a tenth of the groups without variance, which the
filter silences. A gather takes all rows in random order, column by column: who shuffles does no less.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict
from timing import measure, without_page_faults

from headrace.pipeline import load_pipeline
from headrace.transforms import take_rows

GROUP_SIZE, MINIBATCHES = 8, 8


def collected(rows: int, tokens: int, *, texts: bool = False) -> TensorDict:
    """Rollouts of one row each, every tenth group with equal rewards."""
    generator = torch.Generator().manual_seed(0)
    number = torch.arange(rows)
    reward = torch.rand(rows, generator=generator)
    reward.view(-1, GROUP_SIZE)[::10] = 1.0
    length = torch.randint(tokens // 4, tokens, (rows, 1), generator=generator)
    mask = torch.arange(tokens, 0, -1) <= length
    columns = {
        "group_id": number // GROUP_SIZE,
        "rollout_id": number,
        "expected_rollouts": torch.full((rows,), GROUP_SIZE),
        ("next", "reward"): reward.unsqueeze(-1),
        ("tokens", "full"): torch.randint(0, 30_000, (rows, tokens), generator=generator),
        ("masks", "all_assistant_mask"): mask,
        ("masks", "all_attention_mask"): mask.clone(),
        ("log_probs", "full"): -torch.rand(rows, tokens, generator=generator),
    }
    for name in ("prompt", "text") if texts else ():
        columns[name] = [f"{name} {row}" for row in range(rows)]
    return TensorDict(columns, batch_size=[rows])


def in_pieces(batch: TensorDict) -> Callable[[], None]:
    """All minibatches, one in memory at a time."""
    pipeline = load_pipeline("pipeline=grpo", f"pipeline.stages.split.minibatches={MINIBATCHES}")

    def run() -> None:
        for minibatch in pipeline.minibatches(batch):
            del minibatch

    return run


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    without_page_faults()
    torch.set_num_threads(1)
    long, short, spoken = collected(4000, 2048), collected(8192, 16), collected(8192, 16, texts=True)
    pipeline, order = load_pipeline("pipeline=grpo"), torch.randperm(4000)
    times = measure(
        {
            "gather": lambda: take_rows(long, order),
            "pipeline": lambda: pipeline(long),
            "minibatches": in_pieces(long),
            "without texts": lambda: pipeline(short),
            "with texts": lambda: pipeline(spoken),
        },
        rounds,
    )
    table = Table(title="The grpo recipe, one thread")
    for name in ("what", "over", "ratio", "target"):
        table.add_column(name)
    for what, over, target in (
        ("pipeline", "gather", 1.9),
        ("minibatches", "gather", 2.0),
        ("with texts", "without texts", 3.5),
    ):
        ratio = statistics.median(a / b for a, b in zip(times[what], times[over], strict=True))
        table.add_row(what, over, f"{ratio:.2f}", f"≤ {target}")
    Console().print(table)


if __name__ == "__main__":
    main()
