"""Time the assembly of groups from many workers.

    python benchmarks/stream.py [--rounds 1] [--rows 100000]

Rows arrive in pieces of 1,000, each row within 4,000 rows of its original position, and leave in groups of 8.
The rows are dense batches. A second line has a tenth of the rows as lazy stacks of ragged rows, like those of
LLMCollector. MCAdvantage also computes an advantage, which costs little. It does not handle failed, late,
repeated or missing rollouts, and has no saved state.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence

import torch
from batches import GROUP_SIZE, finished
from results import main
from tables import Cell, Row, Table
from tensordict import TensorDict, TensorDictBase, lazy_stack
from timing import measure, median_ms, ratio
from torchrl.objectives.llm import MCAdvantage

from headrace.transforms import GroupAssembler

PIECE, NEAR = 1000, 4000
TARGET = 50  # for dense rows only: copying ragged rows, which are TensorDicts, costs most
NOTE = f"""Rows arrive in pieces of {PIECE:,}. Each row is at most {NEAR:,} rows away from its original
position. The ratio is the time of TorchRL's MCAdvantage, divided by that of `GroupAssembler`. MCAdvantage
also computes an advantage, which takes little time."""


JOURNAL_NOTE = """A journal is a file from which the assembler continues after a crash. The table has the rows
per second of CPU time through `GroupAssembler`, without and with a `journal`. The rows come out in batches of
128 groups. `commit` is called after each batch."""


def dense_rows(count: int) -> TensorDict:
    """Finished rollouts with one row each. A row is within NEAR rows of its original position."""
    generator = torch.Generator().manual_seed(1)
    place = torch.arange(count) + torch.rand(count, generator=generator) * NEAR
    return finished(count)[place.argsort()]


def ragged(rows: TensorDict) -> TensorDictBase:
    """Make a lazy stack of these rows, with 8 to 15 tokens each."""
    singles = [row.clone() for row in rows.unbind(0)]
    for number, row in enumerate(singles):
        row["tokens", "full"] = row["tokens", "full"][: 8 + number % 8]
    return lazy_stack(singles)


def assemble(pieces: Sequence[TensorDictBase], journal: str | None = None) -> int:
    """Assemble the pieces, and count the rows that come out, 128 groups at a time."""
    assembler, out = GroupAssembler(groups=128, journal=journal), 0
    for piece in pieces:
        assembler.put(piece)
        while (batch := assembler.take()) is not None:
            out += len(batch)
            if journal is not None:
                assembler.commit()
    rest = assembler.take_rest()
    return out if rest is None else out + len(rest)


def queue(pieces: Sequence[TensorDictBase]) -> int:
    """Assemble the pieces with MCAdvantage, which returns groups that have become whole."""
    advantage, out = MCAdvantage(grpo_size=GROUP_SIZE, prompt_key="group_id"), 0
    for piece in pieces:
        batch = advantage.inv(piece.clone(recurse=False))
        out += 0 if batch is None else len(batch)
    return out


def compare(rows: TensorDictBase, rounds: int, target: float | None) -> list[Cell]:
    """Measure a line of the table."""
    pieces, found = rows.split(PIECE), set()

    def counted(function: Callable[[Sequence[TensorDictBase]], int]) -> Callable[[], None]:
        return lambda: found.add(function(pieces))

    times = measure({"MCAdvantage": counted(queue), "assembler": counted(assemble)}, rounds)
    if found != {len(rows)}:
        raise RuntimeError(f"{len(rows)} rows went in, and {found} came out")
    cell = Cell(ratio(times, "MCAdvantage", "assembler"), ".1f", target, at_least=True)
    return [Cell(median_ms(times, "MCAdvantage"), ",.0f"), Cell(median_ms(times, "assembler"), ",.0f"), cell]


def assemble_durably(pieces: Sequence[TensorDictBase]) -> int:
    """Assemble the pieces with a journal."""
    with tempfile.TemporaryDirectory() as folder:
        return assemble(pieces, f"{folder}/rows.journal")


def cost(rows: TensorDictBase, rounds: int) -> list[Cell]:
    """Measure a line of the table of journals."""
    pieces = rows.split(PIECE)
    functions = {"without": lambda: assemble(pieces), "with": lambda: assemble_durably(pieces)}
    times = measure(functions, rounds)
    speeds = [Cell(1e3 * len(rows) / median_ms(times, name), ",.0f") for name in functions]
    return [*speeds, Cell(ratio(times, "with", "without"))]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """Make both tables."""
    kinds = {
        "dense": (dense_rows(options.rows), TARGET),
        "ragged": (ragged(dense_rows(options.rows // 10)), None),
    }
    rows = [
        Row(f"{len(each):,} {kind}", compare(each, options.rounds, target))
        for kind, (each, target) in kinds.items()
    ]
    head = ["rows", "MCAdvantage, ms", "assembler, ms", "ratio"]
    yield Table(f"Groups of {GROUP_SIZE} out of a stream", NOTE, head, rows)
    costs = [
        Row(f"{len(each):,} {kind}", cost(each, options.rounds + 2)) for kind, (each, _) in kinds.items()
    ]
    head = ["rows", "rows a second", "with a journal", "time with / without"]
    yield Table("The cost of a journal", JOURNAL_NOTE, head, costs)


if __name__ == "__main__":
    main(tables, __doc__, rounds=(1, 1), rows=(100_000, 640))
