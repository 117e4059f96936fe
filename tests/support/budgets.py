"""Ranks with their own rows and a token budget, each in its own thread."""

from __future__ import annotations

import torch
from cutting import cut_alone
from tensordict import TensorDict

from headrace.transforms import BatchError, ShuffleSplit
from headrace.transforms.table.schema import MICROBATCH, MINIBATCH

ATTENTION = ("masks", "all_attention_mask")
# The rows of each rank by case, as (rollout, tokens).
CASES = {
    "equal counts": [[(0, 4), (1, 4), (2, 4)], [(3, 4), (4, 4), (5, 4)]],
    "one has few rows": [[(0, 9), (1, 9), (2, 9), (3, 9), (4, 2)], [(5, 1), (6, 1)]],
    "one has long rollouts": [[(0, 5), (0, 5), (0, 5), (1, 5), (1, 5), (1, 5)], [(2, 9), (3, 9)]],
    "all rows would be dropped": [[(0, 9), (0, 9), (0, 9)], [(1, 1), (2, 1)]],
}


def batch_of(rows) -> TensorDict:
    lengths = torch.tensor([tokens for _, tokens in rows])
    return TensorDict(
        {
            "rollout_id": torch.tensor([rollout for rollout, _ in rows]),
            "length": lengths,
            ATTENTION: torch.arange(9) < lengths[:, None],
        },
        batch_size=[len(rows)],
    )


def run_budget(rank: int, world: int) -> dict:
    """For each case, the error, or the kept rows with minibatch and micro-batch, and the left-out rows."""
    found = {}
    for name, by_rank in CASES.items():
        split = ShuffleSplit(
            minibatches=1, max_tokens=10, shuffle=False, remainder="drop", process_group="world"
        )
        try:
            out, verdict, *_ = cut_alone(split, batch_of(by_rank[rank]))
            columns = ("rollout_id", "length", MINIBATCH, MICROBATCH)
            found[name] = [out[column].tolist() for column in columns], verdict.tolist()
        except BatchError as err:
            found[name] = str(err)
    return found
