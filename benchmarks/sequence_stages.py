"""Time the stages that change the sequences of rows, relative to their formulas in plain torch.

`tokens.py` prints the results. Each formula is written next to the call of the stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from batches import GROUP_SIZE, collected
from structure import operator_calls
from tables import Cell, Row
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from timing import measure as measure_by
from timing import median_ms, ratio
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headrace.transforms import DenseRows, MergeTurns, TreeAdvantage, pack, unpack

TOKENS, LOG_PROBS = ("tokens", "full"), ("log_probs", "full")
REAL, LOSS = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")
DENSE = DenseRows(pad_id=0)
measure = partial(measure_by, clock=time.thread_time)


def sequence_stages(rounds: int, quick: bool) -> list[Row]:
    """Make a line for each measure: the formula in ms, if there is one, and the number for headrace.

    Args:
        rounds: number of rounds. The table shows their median.
        quick: whether to use tiny sizes, to see that the measures run.
    """
    torch.manual_seed(0)
    return [
        *tree_advantages(*((32, 16, (2, 4)) if quick else (512, 1024, (8, 128))), rounds),
        *packing(*((8, 32) if quick else (512, 2048)), rounds),
        *packing_little(*((8, 8) if quick else (16, 256)), 4 * rounds),
        merged_turns(*((4, 2, 4) if quick else (64, 8, 128)), rounds),
        *(dense_rows(8 if quick else 512, width, rounds) for width in ((8, 16) if quick else (100, 1000))),
        calls_by_row(*((2, 4) if quick else (256, 512))),
    ]


# -- trees ------------------------------------------------------------------------------------------------


def sharing(rows: int, tokens: int, group_size: int) -> TensorDict:
    """Groups whose rows share a quarter of their tokens. Pairs of rows share another quarter. At least half
    of each row is not padding.
    """
    batch = collected(rows, tokens)
    words, part = torch.randint(0, 30_000, (rows, tokens)), tokens // 4
    words[:, :part] = words[::group_size, :part].repeat_interleave(group_size, 0)
    words[1::2, : 2 * part] = words[::2, : 2 * part]
    place = torch.arange(tokens)
    batch[REAL] = place < torch.randint(2 * part + 1, tokens + 1, (rows, 1))
    batch[LOSS] = batch[REAL] & (place >= part)
    batch[TOKENS], batch["group_id"] = words * batch[REAL], torch.arange(rows) // group_size
    batch["advantage"] = torch.randn(rows, 1, 1)
    return batch


def tree_advantages(rows: int, tokens: int, sizes: tuple[int, int], rounds: int) -> list[Row]:
    """Measure the advantages of small groups and of large groups, with the same number of rows."""
    few, many = (sharing(rows, tokens, size) for size in sizes)
    stage = TreeAdvantage()
    times = measure({"few": lambda: stage(few), "many": lambda: stage(many)}, rounds)
    name = f"TreeAdvantage by prefix, {rows} × {tokens:,} tokens, groups of"
    return [
        Row(f"{name} {sizes[0]}, in ms", [Cell(None), Cell(median_ms(times, "few"), ".1f", 15)]),
        Row(
            f"{name} {sizes[1]}, over groups of {sizes[0]}",
            [Cell(None), Cell(ratio(times, "many", "few"), ".1f", 3)],
        ),
    ]


# -- rows end to end --------------------------------------------------------------------------------------


def end_to_end(batch: TensorDict) -> Callable[[], dict]:
    """Make the columns of `pack` in plain torch."""

    def run() -> dict:
        real = batch[REAL]
        at = real.flatten().nonzero().flatten()
        row = at // real.shape[1]
        ends = real.sum(1).cumsum(0)
        begins = torch.cat([ends.new_zeros(1), ends])
        columns: dict = {key: batch[key].flatten()[at] for key in (TOKENS, REAL, LOSS, LOG_PROBS)}
        position = torch.arange(len(at)) - begins[row]
        columns["advantage"] = batch["advantage"].flatten()[row]
        return columns | {"at": at, "row": row, "position": position, "begins": begins.int()}

    return run


def in_rows(packed: TensorDict, rows: int, tokens: int) -> Callable[[], list[Tensor]]:
    """Unpack the same columns to rows, in plain torch."""

    def run() -> list[Tensor]:
        at, out = packed["packed_at"][0], []
        for key in (TOKENS, REAL, LOSS, LOG_PROBS, "advantage"):
            values = packed[key].flatten()
            room = values.new_zeros(rows * tokens)
            room[at] = values
            out.append(room.view(rows, tokens))
        return out

    return run


def packing(rows: int, tokens: int, rounds: int) -> list[Row]:
    """Measure the packing of a million tokens, in time per token."""
    batch = sharing(rows, tokens, GROUP_SIZE)
    packed = pack(batch)
    calls = {
        "pack": lambda: pack(batch),
        "unpack": lambda: unpack(packed),
        "pack as a tree": lambda: pack(batch, tree=True),
        "pack in torch": end_to_end(batch),
        "unpack in torch": in_rows(packed, rows, tokens),
    }
    times = measure(calls, rounds)
    found = []
    for name, goal in (("pack", 18), ("unpack", 15), ("pack as a tree", 90)):
        formula, size = f"{name} in torch", f"{rows:,} × {tokens:,}"
        over = formula if formula in calls else "pack in torch"
        each = Cell(1e6 * median_ms(times, name) / len(packed["packed_at"][0]), ".1f", goal)
        found.append(
            Row(f"{name}, {size} tokens, in ns a token", [Cell(median_ms(times, over), ".1f"), each])
        )
        above = Cell(ratio(times, name, over), ".1f")
        found.append(
            Row(f"{name}, {size} tokens, over the formula", [Cell(median_ms(times, over), ".1f"), above])
        )
    return found


def packing_little(rows: int, tokens: int, rounds: int) -> list[Row]:
    """Measure a micro-batch that is so small that calls are its only cost."""
    batch = sharing(rows, tokens, GROUP_SIZE)
    packed, tree = (partial(pack, batch, tree=tree) for tree in (False, True))
    times = measure({"pack": packed, "tree": tree, "torch": end_to_end(batch)}, rounds)
    formula, count = Cell(median_ms(times, "torch"), ".2f"), int(batch[REAL].sum())
    return [
        Row(f"pack, {count:,} tokens, in µs", [formula, Cell(1e3 * median_ms(times, "pack"), ".0f", 60)]),
        Row(
            f"pack as a tree, {count:,} tokens, in µs",
            [formula, Cell(1e3 * median_ms(times, "tree"), ".0f", 150)],
        ),
    ]


# -- turns as rows, and ragged rows -----------------------------------------------------------------------


def merged_turns(rollouts: int, turns: int, tokens: int, rounds: int) -> Row:
    """Measure rollouts with a row for each turn. The prompt of a row has all earlier turns."""
    rows, width = rollouts * turns, turns * tokens
    batch = collected(rows, width)
    words = torch.randint(0, 30_000, (rollouts, width)).repeat_interleave(turns, 0)
    place, ends = torch.arange(width), (torch.arange(rows) % turns + 1)[:, None] * tokens
    batch["group_id"] = batch["rollout_id"] = torch.arange(rows) // turns
    batch[REAL], batch[TOKENS] = place < ends, words.masked_fill(place >= ends, 0)
    batch[LOSS] = batch[REAL] & (place >= ends - tokens // 2)
    batch["advantage"] = torch.randn(rows, 1, 1)
    batch["next", "reward"] = torch.ones(rows, 1)
    stage, every = MergeTurns(), torch.arange(rows)

    def gather() -> list[Tensor]:
        return [column.index_select(0, every) for column in batch.values(True, True)]

    times = measure({"merge": lambda: stage(batch), "gather": gather}, rounds)
    above = Cell(ratio(times, "merge", "gather"), ".1f", 6)
    return Row(
        f"MergeTurns, {rows} × {width:,} tokens, over a gather",
        [Cell(median_ms(times, "gather"), ".2f"), above],
    )


def ragged(rows: int, tokens: int) -> LazyStackedTensorDict:
    """Rows like those of collectors of language models: a lazy stack of different lengths."""
    batch = collected(rows + -rows % GROUP_SIZE, tokens).exclude("masks")
    made = []
    for row in batch[:rows].unbind(0):
        size, prompt = int(torch.randint(tokens // 4, tokens, (1,))), tokens // 8
        whole = row[TOKENS][:size].clone() + 1
        row = row.clone()
        row["tokens"] = {"full": whole, "prompt": whole[:prompt].clone(), "response": whole[prompt:].clone()}
        row["masks"] = {"all_attention_mask": torch.ones(size, dtype=torch.bool)}
        row[LOG_PROBS] = row[LOG_PROBS][:size].clone()
        made.append(row)
    return lazy_stack(made)


def dense_rows(rows: int, tokens: int, rounds: int) -> Row:
    """Measure how long it takes to pad ragged rows on the left."""
    batch = ragged(rows, tokens)
    per_token = {TOKENS: 0, REAL: False, LOG_PROBS: torch.nan}
    parts = {("tokens", "prompt"), ("tokens", "response")}
    keys = [key for key in batch[0].keys(True, True) if key not in parts]

    def pad_and_stack() -> TensorDict:
        columns = {}
        for key in keys:
            entries = [row.get(key) for row in batch.tensordicts]
            if key in per_token:
                fill = per_token[key]
                columns[key] = pad_sequence(entries, True, padding_value=fill, padding_side="left")
            else:
                columns[key] = torch.stack(entries)
        return TensorDict(columns, batch_size=[rows])

    times = measure({"dense": lambda: DENSE(batch), "torch": pad_and_stack}, rounds)
    above = Cell(ratio(times, "dense", "torch"), target=1.5)
    return Row(
        f"DenseRows, {rows} ragged rows of at most {tokens:,} tokens, over the formula",
        [Cell(median_ms(times, "torch"), ".1f"), above],
    )


def calls_by_row(few: int, many: int) -> Row:
    """Count the operator calls for each further ragged row."""
    more = [operator_calls(partial(DENSE, ragged(rows, 16))) for rows in (few, many)]
    found = Cell((more[1] - more[0]) / (many - few), ".1f", 0)
    return Row("DenseRows, in operator calls for each row", [Cell(None), found])
