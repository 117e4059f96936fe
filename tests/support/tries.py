"""Prefix trees built by loops, and rows that share tokens."""

from __future__ import annotations

import torch
from batches import cut_rows
from tensordict import TensorDict

FULL, ATTENTION = ("tokens", "full"), ("masks", "all_attention_mask")
LOSS, LOG_PROBS = ("masks", "all_assistant_mask"), ("log_probs", "full")


def dense(rows: list[list[int]], width: int | None = None, side: str = "right") -> TensorDict:
    """Rows of tokens, padded with 0. Token 0 is also sampled. About the second half of each row trains.

    Args:
        rows: the tokens of each row.
        width: number of columns.
        side: where the padding is; ``holes`` is ``right`` with padding in the middle of most rows, too.
    """
    width = width or max(map(len, rows))
    batch = TensorDict({}, batch_size=[len(rows)])
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    there = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        begin = width - len(row) if side == "left" else 0
        hole = 1 + number % max(len(row) - 1, 1) if side == "holes" else len(row)
        at = [begin + place + (place >= hole) for place in range(len(row))]
        tokens[number, at], there[number, at] = torch.tensor(row), True
    batch[FULL], batch[ATTENTION] = tokens, there
    place = there.long().cumsum(1) - 1
    batch[LOSS] = there & (place > 0) & (place >= there.sum(1, keepdim=True) // 2)
    batch[LOG_PROBS] = torch.where(batch[LOSS], -1.0 - tokens / 7, 0.0).double()
    batch["advantage"] = torch.linspace(-1, 1.5, len(rows), dtype=torch.float64).view(-1, 1, 1)
    batch["loss_weight"] = torch.linspace(0.5, 1.5, len(rows), dtype=torch.float64)
    return batch


def ragged(rows: list[list[int]]) -> TensorDict:
    """The same rows as a lazy stack without padding."""
    return cut_rows(dense(rows), [slice(len(row)) for row in rows], (FULL, ATTENTION, LOSS, LOG_PROBS))


class Trie:
    """A trie, as the set of its paths."""

    def __init__(self, rows: list[list]):
        self.paths: set[tuple] = set()
        for row in rows:
            self.paths |= {tuple(row[:length]) for length in range(1, len(row) + 1)}

    @staticmethod
    def sees(query: tuple, key: tuple) -> bool:
        """Whether one token sees another. A token sees the tokens on its path."""
        return query[: len(key)] == key


GROUP, TURNS, FORKS = "groups with one prompt", "turns as rows", "forks anywhere"


def scenes(seed: int = 0, tokens: int = 50) -> dict[str, list[list[int]]]:
    """Batches of rows of each kind, by name."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(1, tokens, (length,), generator=generator).tolist()

    def below(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    prompts = [draw(9), draw(5)]
    groups = [prompt + draw(2 + below(6)) for prompt in prompts for _ in range(3)]
    turn, turns = draw(4), []
    for _ in range(5):
        turn = turn + draw(1 + below(4))
        turns.append(turn)
    forks = [draw(12)]
    for _ in range(6):
        stem = forks[below(len(forks))]
        forks.append(stem[: 1 + below(len(stem))] + draw(1 + below(5)))
    return {
        GROUP: groups,
        TURNS: turns,
        FORKS: forks,
        "duplicates": [groups[0], groups[1], groups[0], groups[0]],
        "rows that are prefixes of others": [forks[0], forks[0][:6], forks[0][:2] + draw(3), forks[0][:9]],
        "one row": [groups[0]],
        "nothing shared": [[number + 1, *draw(3)] for number in range(4)],
    }
