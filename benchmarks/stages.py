"""Time each stage alone.

    python benchmarks/stages.py [--rounds 9]

Each stage gets the output of the previous stage. Operator calls are counted by a TorchDispatchMode.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from batches import MINIBATCHES, collected, in_pieces
from results import main
from structure import operator_calls
from tables import Cell, Row, Table
from tensordict import TensorDictBase
from timing import measure, median_ms, ratio

from headrace.pipeline import load_pipeline
from headrace.transforms import (
    BatchWhitening,
    Diverged,
    LengthPenalty,
    LogRatio,
    OverlongPunishment,
    RewardScale,
    RolloutCorrection,
    RunningBaseline,
    ShuffleSplit,
    StateAdvantage,
    TokenAdvantage,
    TokenFilter,
    TreeAdvantage,
    TurnAdvantage,
    take_rows,
)

OF_TOKENS = {
    "correction": RolloutCorrection(),
    "token_filter": TokenFilter(criterion=Diverged(estimator="k1", level="token", high=1.005)),
    "token_advantage": TokenAdvantage(term=LogRatio(numerator_key=("old_log_probs", "full")), factor=0.1),
    "turns": TurnAdvantage(),
    "tree": TreeAdvantage(),
    "states": StateAdvantage(weight=1.0, state_key="turn"),
    "running": RunningBaseline(),
}
GATHER_BY_TOKEN = "gather, by token"
LARGE, SMALL = (4000, 2048), (64, 16)  # rows, tokens of each row
OPERATORS, MILLISECONDS = 400, 3.0
NOTE = """First the stages of the grpo recipe in order, then other stages. "Over a gather" is the time of
the stage, divided by the time of a gather of its batch. The last two columns are for a batch of 64 × 16
tokens. An operator call is a call of a torch operator. In lines with "by token", the batch has an advantage
and a weight for each token.

A pipeline takes less time than the sum of its stages, because it reads the batch and copies the rows only
once."""
FIXED = f"""The grpo recipe on 64 rows of 16 tokens: a loop over {MINIBATCHES} minibatches, and
`pipeline(batch)` in one piece. On a GPU each operator call is a kernel launch."""


def stage_calls(rows: int, tokens: int) -> dict[str, Callable[[], object]]:
    """Calls of each stage on the output of the previous stage. The first entry is a gather of the batch."""
    batch = collected(rows, tokens)
    order = torch.randperm(rows)
    calls: dict[str, Callable[[], object]] = {"gather": lambda batch=batch: take_rows(batch, order)}
    others = {
        "advantage": {"whitening": BatchWhitening()},
        "collapse": {
            "overlong": OverlongPunishment(max_length=tokens, cache=tokens // 4),
            "length_penalty": LengthPenalty(coefficient=1e-4),
            "reward_scale": RewardScale(scale=2.0),
        },
    }
    later: dict[str, Callable[[], object]] = {}
    pipeline = load_pipeline("pipeline=grpo")
    for name in pipeline.order:
        calls[name] = _call(pipeline.stages[name], batch)
        batch = pipeline.stages[name](batch)
        later |= {other: _call(stage, batch) for other, stage in others.get(name, {}).items()}
        if name == "advantage":
            columns = with_token_columns(batch)
            later |= {other: _call(stage, columns) for other, stage in OF_TOKENS.items()}
            weighed = OF_TOKENS["correction"](columns)
            later[GATHER_BY_TOKEN] = lambda weighed=weighed: take_rows(weighed, order)
            later["split, by token"] = _call(ShuffleSplit(minibatches=MINIBATCHES), weighed)
    return calls | later


def with_token_columns(batch: TensorDictBase) -> TensorDictBase:
    """Add columns for stages of tokens and turns: those of a second policy, and four turns with rewards."""
    log_prob = batch["log_probs", "full"]
    rows, tokens = log_prob.shape
    turn = (4 * torch.arange(tokens) // tokens).expand(rows, tokens)
    more = batch.clone(recurse=False)
    more["old_log_probs", "full"] = log_prob + 0.01 * torch.rand_like(log_prob)
    more["headrace", "return"], more["turn"] = more["headrace", "reward"].double(), torch.arange(rows) % 4
    more["turn_index"], more["turn_reward"] = turn.contiguous(), torch.rand(rows, 4)
    return more


def _call(stage: Callable[[Any], Any], batch: Any) -> Callable[[], object]:
    return lambda: stage(batch)


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """Make the tables of stages, and of the whole recipe on a small batch."""
    shape = SMALL if options.quick else LARGE
    large, small = stage_calls(*shape), stage_calls(*SMALL)
    times, fixed = measure(large, options.rounds), measure(small, 20 * options.rounds)
    lines = []
    for name in large:
        over = GATHER_BY_TOKEN if name == "split, by token" else "gather"
        on_large = Cell(median_ms(times, name)), Cell(ratio(times, name, over))
        on_small = Cell(median_ms(fixed, name), ".3f"), Cell(operator_calls(small[name]), "d")
        lines.append(Row(name, [*on_large, *on_small]))
    sizes = [f"{rows:,} × {tokens:,} tokens, ms" for rows, tokens in (shape, SMALL)]
    head = ["stage", sizes[0], "over a gather", sizes[1], "operator calls"]
    yield Table("Time of each stage", NOTE, head, lines)

    batch = collected(*SMALL)
    pipeline = load_pipeline("pipeline=grpo", f"pipeline.stages.split.minibatches={MINIBATCHES}")
    whole = {"minibatches": in_pieces(batch), "one piece": lambda: pipeline(batch)}
    times = measure(whole, 20 * options.rounds)
    lines = []
    for name, function in whole.items():
        calls = Cell(operator_calls(function), ",d", OPERATORS)
        lines.append(Row(name, [calls, Cell(median_ms(times, name), target=MILLISECONDS)]))
    yield Table("Fixed cost of a batch", FIXED, ["rows", "operator calls", "ms"], lines)


if __name__ == "__main__":
    main(tables, __doc__, rounds=(9, 1))
