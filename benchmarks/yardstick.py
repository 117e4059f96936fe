"""Time the whole recipe, relative to plain NumPy.

    python benchmarks/yardstick.py [--rounds 9] [--huge 1]

`--huge 1` adds ten million rows, which take two minutes and some gigabytes. `ranks.py` measures ranks,
`pipeline.py` the gather and the memory of long rows, and `structure.py` counts calls and lines.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from batches import MINIBATCHES, collected, in_pieces
from numpy_grpo import LOG_PROB, MASK, NUMBERS, grpo
from results import main
from stream import GROUP_SIZE, dense_rows
from tables import Cell, Row, Table
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from timing import Times, median_ms, ratio
from timing import measure as measure_by

from headrace.transforms import GroupAssembler

TOKENS = 100
SMALL, LARGE, HUGE = (64, 512), (100_000, 1_000_000), 10_000_000  # rows
RAGGED, STREAMED, WAITING = 512, 512, (700, 100_000)
GROWTH = 13  # target: at most this many times the time, for ten times as many rows
NOTE = f"""A is the time of headrace. B is the time of other code that does the same work without
checks:

- over NumPy: the grpo recipe with 8 minibatches, written in NumPy (`benchmarks/numpy_grpo.py`)
- over reading once: read each column of the ragged rows once, and index them for the minibatches
- over a dict of lists: append each row to a list for its group, and concatenate a group when it is whole

In the other lines, B is headrace with fewer rows. Rows have {TOKENS} tokens, or 2 tokens in lines with
100,000 rows and more. In the last two lines, rows come to an assembler one by one."""
HEAD = ["A over B", "A, ms", "B, ms", "A / B"]

measure = partial(measure_by, clock=time.thread_time)


def line(name: str, times: Times, what: str, over: str, goal: float) -> Row:
    """Make the line of one measure."""
    milliseconds = (Cell(median_ms(times, each), ",.2f") for each in (what, over))
    return Row(name, [*milliseconds, Cell(ratio(times, what, over), target=goal)])


def not_measured(name: str) -> Row:
    """Make a line that was not measured."""
    return Row(name, [Cell(None)] * 3)


# -- whole batches ----------------------------------------------------------------------------------------


def numpy_loop(batch: TensorDict) -> Callable[[], None]:
    """Make a loop over the minibatches in plain NumPy."""

    def run() -> None:
        for minibatch in grpo(batch, MINIBATCHES):
            del minibatch

    return run


def small_batches(sizes: Sequence[int], rounds: int) -> Iterator[Row]:
    """Measure batches that are so small that calls are their only cost."""
    for rows in sizes:
        batch = collected(rows, TOKENS)
        times = measure({"pipeline": in_pieces(batch), "NumPy": numpy_loop(batch)}, rounds)
        yield line(f"{rows:,} rows over NumPy", times, "pipeline", "NumPy", 2.0)


def large_batches(sizes: Sequence[int], rounds: int) -> Iterator[Row]:
    """Measure batches whose cost comes from their rows, and the growth from the first size to the second."""
    functions, goals = {}, {}
    for rows in sizes:
        batch = collected(rows, 2)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
        for kind, each, goal in (("rows", batch, 1.3), ("shuffled rows", batch[order], 1.2)):
            name = f"{rows:,} {kind}"
            functions |= {name: in_pieces(each), f"{name} over NumPy": numpy_loop(each)}
            goals[name] = goal
    times = measure(functions, rounds)
    for name, goal in goals.items():
        yield line(f"{name} over NumPy", times, name, f"{name} over NumPy", goal)
    few, many = sizes
    yield line(growth(few, many), times, f"{many:,} rows", f"{few:,} rows", GROWTH)


def huge_batch(rows: int, rounds: int) -> Row:
    """Measure the growth of the time from a tenth of the rows to all of them."""
    few, many = (in_pieces(collected(count, 2)) for count in (rows // 10, rows))
    times = measure({"few": few, "many": many}, rounds)
    return line(growth(rows // 10, rows), times, "many", "few", GROWTH)


def growth(few: int, many: int) -> str:
    """The name of a measure of growth."""
    return f"{many:,} rows over {few:,} rows"


# -- ragged rows ------------------------------------------------------------------------------------------


def ragged(rows: int) -> LazyStackedTensorDict:
    """Make a lazy stack of rows without padding."""
    batch = collected(rows, TOKENS)
    lengths = batch["masks", "all_attention_mask"].sum(-1).tolist()
    singles = [row.clone() for row in batch.unbind(0)]
    for row, length in zip(singles, lengths, strict=True):
        for key in (("tokens", "full"), MASK, ("masks", "all_attention_mask"), LOG_PROB):
            row[key] = row[key][-length:].clone()
    return lazy_stack(singles)


def read_and_index(batch: LazyStackedTensorDict) -> Callable[[], None]:
    """Read each column that the recipe needs once, count tokens, and index the stack for each minibatch."""
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        for key in NUMBERS:
            batch.get(key)
        masks, log_probs = (batch.get(key, as_list=True) for key in (MASK, LOG_PROB))
        in_loss = torch.cat(masks).numpy() & np.isfinite(torch.cat(log_probs).numpy())
        np.add.reduceat(in_loss, np.cumsum([0, *map(len, masks[:-1])]), dtype=np.int64)
        for rows in order.chunk(MINIBATCHES):
            batch[rows]

    return run


def ragged_batch(rows: int, rounds: int) -> Row:
    """Measure a lazy stack of ragged rows."""
    batch = ragged(rows)
    times = measure({"pipeline": in_pieces(batch), "reading": read_and_index(batch)}, rounds)
    return line(f"{rows:,} ragged rows over reading once", times, "pipeline", "reading", 3)


# -- a stream ---------------------------------------------------------------------------------------------


def assemble(rows: TensorDict) -> int:
    """Put rows into a GroupAssembler, and count the rows that come out."""
    assembler, out = GroupAssembler(), 0
    for number in range(len(rows)):
        assembler.put(rows[number : number + 1])
        while (batch := assembler.take()) is not None:
            out += len(batch)
    return out


def put_into_lists(rows: TensorDict) -> int:
    """Put finished rollouts into a dict of lists, and count the rows that come out."""
    waiting: dict[int, dict[int, TensorDict]] = defaultdict(dict)
    out = 0
    for number in range(len(rows)):
        row = rows[number : number + 1]
        group, rollout = int(row["group_id"]), int(row["rollout_id"])
        if not row["next", "done"] or rollout in waiting[group]:
            raise ValueError(f"rollout {rollout} is not finished, or came before")
        waiting[group][rollout] = row
        if len(waiting[group]) == int(row["expected_rollouts"]):
            rollouts = waiting.pop(group)
            out += len(torch.cat([rollouts[each] for each in sorted(rollouts)]))
    return out


def one_by_one(count: int, rounds: int) -> Row:
    """Measure rows that come one by one, as from the workers of a language model."""
    rows = dense_rows(count)
    if (found := {assemble(rows), put_into_lists(rows)}) != {count}:
        raise RuntimeError(f"{count} rows went in, and {found} came out")
    times = measure({"assembler": lambda: assemble(rows), "lists": lambda: put_into_lists(rows)}, rounds)
    return line(f"{count:,} rows, one by one, over a dict of lists", times, "assembler", "lists", 4)


def put_while_others_wait(waiting: int, puts: int) -> Callable[[], None]:
    """Make a call that puts one row while other rows wait for the last rollouts of their groups."""
    rows = dense_rows(2 * waiting + 2 * GROUP_SIZE * puts)
    rows = rows[rows["rollout_id"].view(-1).argsort()]
    rows = rows[rows["rollout_id"].view(-1) % GROUP_SIZE > 0]
    assembler, further = (
        GroupAssembler(max_idle=waiting + puts),
        iter(rows[waiting : waiting + puts].split(1)),
    )
    assembler.put(rows[:waiting])
    return lambda: assembler.put(next(further))


def waiting_rows(sizes: Sequence[int], rounds: int) -> Row:
    """Check that waiting rows are not read again."""
    few, many = (put_while_others_wait(rows, rounds + 1) for rows in sizes)
    times = measure({"few": few, "many": many}, rounds)
    return line(
        f"a row while {sizes[1]:,} rows wait, over a row while {sizes[0]:,} wait", times, "many", "few", 1.5
    )


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """Make the table."""
    few, many = (8, 100) if options.quick else (1, 1)  # divisors of the numbers of rows
    rounds, huge = options.rounds, HUGE // many
    lines = [
        *small_batches(SMALL, 10 * rounds),
        *large_batches([rows // many for rows in LARGE], rounds),
        huge_batch(huge, max(rounds // 3, 1)) if options.huge else not_measured(growth(huge // 10, huge)),
        ragged_batch(RAGGED // few, rounds),
        one_by_one(STREAMED // few, rounds),
        waiting_rows([rows // many for rows in WAITING], 10 * rounds),
    ]
    yield Table("Over plain Python and NumPy", NOTE, HEAD, lines)


if __name__ == "__main__":
    main(tables, __doc__, rounds=(9, 1), huge=(0, 1))
