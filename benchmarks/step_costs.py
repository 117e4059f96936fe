"""Measure other costs of a step: a split under a token budget, a report, and a checkpoint of waiting rows.

Each cost is next to the code that it is compared with. `benchmarks/tokens.py` prints these rows.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from batches import GROUP_SIZE, collected, finished
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as ConsoleTable
from tables import Cell, Row
from tensordict import TensorDict
from timing import measure, median_ms, ratio
from torch import Tensor

from headrace.pipeline import load_pipeline, make_report
from headrace.transforms import GroupAssembler, ShuffleSplit, assign_rows

sys.path.append(
    str(Path(__file__).parent.parent / "tests" / "support")
)  # after benchmarks/, which also has a batches.py
from first_fits import plain_first_fit

MINIBATCHES, PIECE = 8, 64


def split_under_a_budget(rounds: int, *, quick: bool) -> list[Row]:
    """Measure the split stage with a token budget, relative to the stage without a budget."""
    rows, tokens, budget = (400, 16, 128) if quick else (100_000, 64, 1024)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(tokens // 4, tokens + 1, (rows, 1), generator=generator)
    columns = {
        "rollout_id": torch.arange(rows),
        ("tokens", "full"): torch.zeros(rows, tokens, dtype=torch.int64),
        ("masks", "all_attention_mask"): torch.arange(tokens) < lengths,
    }
    batch = TensorDict(columns, batch_size=[rows])
    found = []
    for balance in ("none", "attention"):
        plain = ShuffleSplit(minibatches=MINIBATCHES)
        held = ShuffleSplit(minibatches=MINIBATCHES, max_tokens=budget, balance=balance)
        times = measure({"plain": partial(plain, batch), "held": partial(held, batch)}, rounds)
        name = f"split of {rows:,} rows with max_tokens and balance={balance}, over one without max_tokens"
        cells = [Cell(median_ms(times, "plain"), ".1f"), Cell(ratio(times, "held", "plain"), ".1f", 3.0)]
        found.append(Row(name, cells))
    return found


def more_bins_than_first_fit(*, quick: bool) -> list[Row]:
    """Count how often the split needs more micro-batches than a plain loop over the rows in order."""
    generator, more, draws = torch.Generator().manual_seed(0), 0, 10 if quick else 300
    for _ in range(draws):
        lengths = torch.randint(50, 91, (20,), generator=generator)
        more += len(assign_rows(lengths, max_tokens=300)[0]) > len(plain_first_fit(lengths.tolist(), 300))
    name = f"how many of {draws} batches get more micro-batches than by first-fit bin packing"
    return [Row(name, [Cell(None), Cell(more, "d", 0)])]


def gather(batch: TensorDict, order: Tensor) -> list[Tensor]:
    """Gather the columns of a batch in another order."""
    return [column.index_select(0, order) for column in batch.values(include_nested=True, leaves_only=True)]


def reports(rounds: int, *, quick: bool) -> list[Row]:
    """Measure a report with shared tokens, relative to a gather, and a report of a small step, in ms."""

    def processed(rows: int, tokens: int) -> tuple[TensorDict, object]:
        batch = collected(rows, tokens)
        prompt = tokens // 4  # the response follows; rows are padded on the left
        full, mask = batch["tokens", "full"], batch["masks", "all_assistant_mask"]
        length = (mask.sum(1, keepdim=True) - prompt).clamp_min(1)
        place = torch.arange(tokens) - (tokens - prompt - length)
        asked = full[::GROUP_SIZE, :prompt].repeat_interleave(GROUP_SIZE, 0)
        there = (place >= 0) & (place < prompt)
        full[:] = torch.where(there, asked.gather(1, place.clamp(0, prompt - 1)), full)
        mask[:] = place >= prompt
        batch["masks", "all_attention_mask"][:] = place >= 0
        return batch, load_pipeline("pipeline=grpo").run(batch)

    rows, tokens = (64, 16) if quick else (8192, 256)
    batch, run = processed(rows, tokens)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    calls = {"gather": lambda: gather(batch, order), "report": lambda: make_report(run, batch=batch)}
    times = measure(calls, rounds)
    cells = [Cell(median_ms(times, "gather"), ".1f"), Cell(ratio(times, "report", "gather"), ".1f", 3.5)]
    found = [Row(f"make_report(run, batch=), {rows:,} × {tokens} tokens, over a gather of the batch", cells)]

    rows = 64 if quick else 512
    batch, run = processed(rows, 16)
    console = Console(file=io.StringIO(), width=100, force_terminal=True)

    def one_table() -> None:
        """Print one table with Rich, with as many columns and lines as the table of groups."""
        table = ConsoleTable(box=SIMPLE)
        for name in ("group", "rollouts", "rows", "rewards", "advantages", "left"):
            table.add_column(name)
        for number in range(12):
            table.add_row(str(number), "8", "8", " ".join(["0.123"] * 8), "-1.23 … +1.23", "")
        console.print(table)

    calls = {
        "table": one_table,
        "make": lambda: make_report(run),
        "print": lambda: run.report(console=console),
    }
    times = measure(calls, 10 * rounds)
    return [
        *found,
        Row(
            f"make_report(run), {rows} rows, in ms", [Cell(None), Cell(median_ms(times, "make"), ".2f", 1.0)]
        ),
        Row(
            f"run.report(), {rows} rows, in ms; the formula prints one table with Rich",
            [Cell(median_ms(times, "table"), ".1f"), Cell(median_ms(times, "print"), ".1f", 9.0)],
        ),
    ]


def waiting(rows: int) -> tuple[TensorDict, GroupAssembler]:
    """Finished rollouts with one row each, and an assembler that holds all of them in small pieces."""
    batch, assembler = finished(rows), GroupAssembler(groups=rows)
    for piece in batch.split(PIECE):
        assembler.put(piece)
    return batch, assembler


def checkpoints(rounds: int, *, quick: bool) -> list[Row]:
    """Write and read the state of an assembler, and a plain dict of the same tensors."""
    rows = 640 if quick else 100_000
    batch, assembler = waiting(rows)
    tensors = {str(key): leaf for key, leaf in batch.items(include_nested=True, leaves_only=True)}
    state = assembler.state_dict()
    files = {"plain": io.BytesIO(), "ours": io.BytesIO()}
    torch.save(tensors, files["plain"])
    torch.save(state, files["ours"])
    read = {name: file.getvalue() for name, file in files.items()}
    loaded = torch.load(io.BytesIO(read["ours"]), weights_only=True)
    again = GroupAssembler(groups=rows)

    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "state": (
            lambda: {key: leaf.clone() for key, leaf in tensors.items()},
            assembler.state_dict,
        ),
        "save": (lambda: torch.save(tensors, io.BytesIO()), lambda: torch.save(state, io.BytesIO())),
        "load": (
            lambda: torch.load(io.BytesIO(read["plain"]), weights_only=True),
            lambda: torch.load(io.BytesIO(read["ours"]), weights_only=True),
        ),
        "load_state_dict": (lambda: None, lambda: again.load_state_dict(loaded)),
    }
    names = {"state": "state_dict", "save": "torch.save", "load": "torch.load"}
    targets = {"state": 20.0, "save": 60.0, "load": 80.0}
    what = f"assembler with {rows:,} waiting rows"
    found = []
    for name, (plain, ours) in calls.items():
        times = measure({"plain": plain, "ours": ours}, rounds, time.process_time)
        formula = None if name == "load_state_dict" else median_ms(times, "plain")
        cells = [Cell(formula, ".1f"), Cell(median_ms(times, "ours"), ".0f", targets.get(name))]
        found.append(Row(f"{what}: {names.get(name, name)}, in ms", cells))
    size = Cell(len(read["ours"]) / 1e6, ".1f", 17.0)
    return [*found, Row(f"{what}: size of the file, in MB", [Cell(None), size])]


def step_costs(rounds: int, quick: bool) -> list[Row]:
    """Make all lines: the formula in ms, if there is one, and headrace relative to it or as named."""
    return [
        *split_under_a_budget(rounds, quick=quick),
        *more_bins_than_first_fit(quick=quick),
        *reports(rounds, quick=quick),
        *checkpoints(rounds, quick=quick),
    ]
