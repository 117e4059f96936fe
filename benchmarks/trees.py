"""Time prefix trees.

    python benchmarks/trees.py [--rounds 5]

The model is a transformer in float32. Attention is computed for each packed row separately, as in
variable-length kernels. A tree has a dense attention mask, and masked blocks are not skipped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from results import main
from tables import Cell, Row, Table
from tensordict import TensorDict
from timing import measure, median_ms, ratio
from torch import Tensor, nn

from headrace.transforms import pack, tree_mask

VOCABULARY = 32_000
WIDTH = 512
NOTE = f"""In a prefix tree, a token that several rows share is one node, and is computed once. "Times
fewer" is tokens divided by nodes. The next columns are wall times of a forward and a backward pass of a
transformer with 4 layers of width {WIDTH}: for padded rows, for packed rows, and for the tree."""
Rows = list[list[int]]


def draw(length: int) -> list[int]:
    """Random tokens."""
    return torch.randint(1, VOCABULARY, (length,)).tolist()


def answers(prompts: int, prompt: int, count: int, length: int) -> Rows:
    """Groups of answers. The answers of a group have one prompt."""
    stems = [draw(prompt) for _ in range(prompts)]
    return [stem + draw(length) for stem in stems for _ in range(count)]


def turns(rollouts: int, prompt: int, count: int, length: int) -> Rows:
    """One group. Its rollouts have a row for each turn, with all earlier turns as the prompt."""
    stem = draw(prompt)
    wholes = [stem + draw(count * length) for _ in range(rollouts)]
    return [whole[: prompt + length * (turn + 1)] for whole in wholes for turn in range(count)]


def batch_of(rows: Rows) -> TensorDict:
    """Make a batch of rows of tokens, padded on the left."""
    width = max(map(len, rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        tokens[number, width - len(row) :] = torch.tensor(row)
    columns = {"tokens": {"full": tokens}, "masks": {"all_attention_mask": tokens > 0}}
    return TensorDict(columns, batch_size=[len(rows)])


class Transformer(nn.Module):
    """A transformer of pre-norm layers with learned positions."""

    def __init__(self, width: int, layers: int, places: int):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(places, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))

    def forward(self, tokens: Tensor, place: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Return the output for all tokens, (B, T, width)."""
        x = self.token(tokens) + self.place(place)
        for qkv, mix, up, down in zip(self.qkv, self.mix, self.up, self.down, strict=True):
            each = qkv(F.layer_norm(x, x.shape[-1:])).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
            seen = attend(*each)
            x = x + mix(seen.transpose(1, 2).reshape(x.shape))
            x = x + down(F.gelu(up(F.layer_norm(x, x.shape[-1:]))))
        return x


def ways(batch: TensorDict, model: Transformer) -> dict[str, Callable[[], None]]:
    """Forward and backward passes for padded rows, packed rows, and a tree; the packing is included."""

    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    tokens = batch["tokens", "full"]

    def padded() -> None:
        model(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape), causal).sum().backward()

    def packed() -> None:
        rows = pack(batch)
        sizes = rows["cu_seqlens"][0].diff().tolist()

        def attend(*each: Tensor) -> Tensor:
            return torch.cat(
                [causal(*own) for own in zip(*(x.split(sizes, 2) for x in each), strict=True)], 2
            )

        model(rows["input_ids"], rows["position_ids"], attend).sum().backward()

    def tree() -> None:
        rows = pack(batch, tree=True)
        attend = partial(F.scaled_dot_product_attention, attn_mask=tree_mask(rows))
        model(rows["input_ids"], rows["position_ids"], attend).sum().backward()

    return {"padded": padded, "packed": packed, "tree": tree}


def saved(name: str, rows: Rows, target: float, options: argparse.Namespace) -> Row:
    """Measure a line of the table of savings."""
    batch = batch_of(rows)
    plain, nodes = (pack(batch, tree=tree)["input_ids"].shape[1] for tree in (False, True))
    model = Transformer(options.width, 4, batch["tokens", "full"].shape[1])
    times = measure(ways(batch, model), options.rounds, time.perf_counter)
    return Row(
        name,
        [
            Cell(plain, ",d"),
            Cell(nodes, ",d"),
            Cell(plain / nodes, ".1f", target, at_least=True),
            *(Cell(median_ms(times, way), ".0f") for way in ("padded", "packed", "tree")),
            Cell(ratio(times, "packed", "tree"), ".1f"),
        ],
    )


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """Make the table of savings."""
    torch.manual_seed(0)
    scenes = {
        "4 prompts of 64 tokens, 8 answers of 32": (answers(4, 64, 8, 32), 2.4),
        "2 prompts of 192, 8 answers of 32": (answers(2, 192, 8, 32), 4.0),
        "8 turns of 4 rollouts as rows": (turns(4, 16, 8, 12), 5.6),
    }
    head = ["rows", "tokens", "nodes", "times fewer", "padded, ms", "packed, ms", "tree, ms", "packed / tree"]
    lines = [saved(name, rows, target, options) for name, (rows, target) in scenes.items()]
    yield Table("Shared tokens computed once", NOTE, head, lines)


if __name__ == "__main__":
    main(tables, __doc__, rounds=(5, 1), width=(WIDTH, 16))
