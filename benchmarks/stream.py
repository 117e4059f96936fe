"""Assembling groups out of a stream against TorchRL's MCAdvantage on the same rows, as CPU time in one run.

    python benchmarks/stream.py [--rounds 3] [--rows 100000]

Rows come in pieces of 1,000, each within 4,000 rows of its place, and groups of 8 go out: as dense batches,
and as the lazy stacks of ragged rows that LLMCollector yields, a tenth as many. MCAdvantage also computes an
advantage, which costs little; it knows no failed, late, repeated or missing rollouts, and no state.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict, TensorDictBase, lazy_stack
from timing import measure
from torchrl.objectives.llm import MCAdvantage

from headrace.transforms import GroupAssembler

GROUP_SIZE, PIECE, NEAR = 8, 1000, 4000
TARGETS = {"dense": "≥ 50", "ragged": ""}  # a ragged row is a TensorDict of its own: its copy costs most


def dense_rows(count: int) -> TensorDict:
    """Finished rollouts of one row, each within NEAR of its place."""
    generator = torch.Generator().manual_seed(0)
    number = torch.arange(count).unsqueeze(-1)
    columns = {
        "group_id": number // GROUP_SIZE,
        "rollout_id": number,
        "expected_rollouts": torch.full_like(number, GROUP_SIZE),
        ("next", "reward"): torch.rand(count, 1, generator=generator),
        ("next", "done"): torch.ones(count, 1, dtype=torch.bool),
        ("tokens", "full"): torch.randint(0, 99, (count, 16), generator=generator),
    }
    place = torch.arange(count) + torch.rand(count, generator=generator) * NEAR
    return TensorDict(columns, batch_size=[count])[place.argsort()]


def ragged(rows: TensorDict) -> TensorDictBase:
    """The same with 8 to 15 tokens a row, in a lazy stack."""
    singles = [row.clone() for row in rows.unbind(0)]
    for number, row in enumerate(singles):
        row["tokens", "full"] = row["tokens", "full"][: 8 + number % 8]
    return lazy_stack(singles)


def assemble(pieces: Sequence[TensorDictBase]) -> int:
    """Rows that come out, 128 groups at a time."""
    assembler, out = GroupAssembler(groups=128), 0
    for piece in pieces:
        assembler.put(piece)
        while (batch := assembler.take()) is not None:
            out += len(batch)
    rest = assembler.take_rest()
    return out if rest is None else out + len(rest)


def queue(pieces: Sequence[TensorDictBase]) -> int:
    """The same by MCAdvantage, which hands out what has become whole."""
    advantage, out = MCAdvantage(grpo_size=GROUP_SIZE, prompt_key="group_id"), 0
    for piece in pieces:
        batch = advantage.inv(piece.clone(recurse=False))
        out += 0 if batch is None else len(batch)
    return out


def compare(rows: TensorDictBase, rounds: int) -> tuple[float, float]:
    """CPU seconds of MCAdvantage, and how many times those of the assembler they are."""
    pieces, found = rows.split(PIECE), set()

    def counted(function: Callable[[Sequence[TensorDictBase]], int]) -> Callable[[], None]:
        return lambda: found.add(function(pieces))

    times = measure({"MCAdvantage": counted(queue), "assembler": counted(assemble)}, rounds)
    if found != {len(rows)}:
        raise RuntimeError(f"{len(rows)} rows went in, and {found} came out")
    ratios = [slow / fast for slow, fast in zip(times["MCAdvantage"], times["assembler"], strict=True)]
    return statistics.median(times["MCAdvantage"]), statistics.median(ratios)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=100_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"Groups of {GROUP_SIZE} out of rows within {NEAR:,} of their place, one thread")
    for name in ("rows", "number", "MCAdvantage, s", "over the assembler", "target"):
        table.add_column(name, justify="right")
    for name, rows in (
        ("dense", dense_rows(options.rows)),
        ("ragged", ragged(dense_rows(options.rows // 10))),
    ):
        seconds, ratio = compare(rows, options.rounds)
        table.add_row(name, f"{len(rows):,}", f"{seconds:.1f}", f"{ratio:.0f}", TARGETS[name])
    Console().print(table)


if __name__ == "__main__":
    main()
