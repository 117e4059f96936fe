"""The rows of one optimiser step, dealt to ranks and micro-batches."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from headrace.transforms.ids import first_row, number_of
from headrace.transforms.options import at_least, one_of, within

from .balance import balance_evenly, balance_within

Balance = Literal["none", "tokens", "attention"]


def deal(
    lengths: Tensor,
    *,
    ranks: int = 1,
    microbatches: int | None = None,
    microbatch_size: int | None = None,
    max_tokens: int | None = None,
    balance: Balance = "none",
    linear: float = 24576.0,
    multiple_of: int = 1,
    tree: Tensor | None = None,
    shared: Tensor | None = None,
) -> list[list[Tensor]]:
    """Deal rows to ranks × micro-batches, every rank as many micro-batches as the others.

    With B micro-batches on all ranks together, and c_i the cost of row i: its length t_i under ``none`` and
    ``tokens``, t_i² + linear · t_i under ``attention``:

    - by count and by size their row counts differ by at most one; ``none`` cuts the order as it is, else
      rows go where the heaviest micro-batch is as light as :func:`balance_evenly` makes it;
    - by `max_tokens` the lengths in each add up to at most that, a longer row being alone; B is as small as
      first-fit-decreasing finds it, and costs are levelled within the budget (:func:`balance_within`).

    The rows of a `tree` are dealt as one, for what their tokens cost without those that are `shared`, which
    are computed once: with s_i of these, under ``attention`` t_i² − s_i² + linear · (t_i − s_i). What is said
    of counts of rows is then said of trees.

    Micro-batches of like cost share a number, and ranks take turns at the heavier one. Rows keep their
    order within a micro-batch. Fewer rows than micro-batches leave some empty.

    Args:
        lengths: (n,) int64 on the CPU, tokens a row, padding left out.
        ranks: R ≥ 1.
        microbatches: per rank, ≥ 1; of the three give at most one. None of them: 1.
        microbatch_size: rows at most, ≥ 1.
        max_tokens: of a micro-batch, ≥ 1.
        balance: ``none``, ``tokens``, ``attention``.
        linear: the price of a token besides attention, in units of token²: 6 × the model's hidden size,
            from 24·h² FLOPs a token for the matrices and 4·h·t² for attention in each layer.
        multiple_of: B/R is a multiple of this.
        tree: (n,) int64, rows with one number go to one micro-batch; None: each goes by itself.
        shared: (n,) int64, the first tokens of each row that another one of its tree has computed; None: 0.

    Returns:
        By rank and micro-batch, the positions (·,) int64 of its rows.

    Example:
        >>> dealt = deal(torch.tensor([9, 1, 1, 9]), ranks=2, balance="tokens")
        >>> [[rows.tolist() for rows in of_rank] for of_rank in dealt]
        [[[0, 2]], [[1, 3]]]
    """
    costs = _costs(lengths, balance, linear)
    if tree is None:
        return _deal(lengths, costs, ranks, microbatches, microbatch_size, max_tokens, balance, multiple_of)
    own = torch.zeros_like(lengths) if shared is None else shared
    number = number_of(first_row(tree))
    tokens, costs = (
        values.new_zeros(int(number.amax()) + 1 if len(number) else 0).index_add_(0, number, values)
        for values in (lengths - own, costs - _costs(own, balance, linear))
    )
    trees = _deal(tokens, costs, ranks, microbatches, microbatch_size, max_tokens, balance, multiple_of)
    return [[torch.isin(number, some).nonzero().flatten() for some in of_rank] for of_rank in trees]


def _costs(lengths: Tensor, balance: Balance, linear: float) -> Tensor:
    """What rows of so many tokens cost."""
    return lengths.double() * (lengths + linear) if balance == "attention" else lengths


def _deal(
    lengths: Tensor,
    costs: Tensor,
    ranks: int,
    microbatches: int | None,
    microbatch_size: int | None,
    max_tokens: int | None,
    balance: Balance,
    multiple_of: int,
) -> list[list[Tensor]]:
    """:func:`deal` of rows, or trees, with these lengths and costs."""
    rows = len(lengths)
    if max_tokens is not None:
        home = balance_within(lengths, max_tokens, multiple_of=ranks * multiple_of, costs=costs)
        bins = max(int(home.max()) + 1 if rows else 0, 1)
        bins += -bins % (ranks * multiple_of)
    else:
        if microbatch_size is not None:
            microbatches = -(-rows // (ranks * microbatch_size)) or 1
        bins = ranks * (microbatches or 1)
        bins += -bins % (ranks * multiple_of)
        if balance == "none":
            return _in_order(rows, ranks, bins)
        home = balance_evenly(costs, bins)
    order = home.sort(stable=True).indices
    microbatch_rows = list(order.split(torch.bincount(home, minlength=bins).tolist()))
    return _level(microbatch_rows, costs.double(), ranks)


def _in_order(rows: int, ranks: int, bins: int) -> list[list[Tensor]]:
    everyone = torch.arange(rows)
    microbatch_rows = everyone.tensor_split(bins) if bins > 1 else [everyone]
    each = bins // ranks
    return [list(microbatch_rows[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def _level(microbatch_rows: list[Tensor], costs: Tensor, ranks: int) -> list[list[Tensor]]:
    """Heaviest first, a round of one a rank at a time, each round to the ranks that have least."""
    load = [float(costs[rows].sum()) for rows in microbatch_rows]
    by_load = sorted(range(len(microbatch_rows)), key=lambda b: -load[b])
    dealt: list[list[Tensor]] = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    for start in range(0, len(microbatch_rows), ranks):
        lightest_first = sorted(range(ranks), key=lambda rank: total[rank])
        for rank, b in zip(lightest_first, by_load[start : start + ranks], strict=True):
            dealt[rank].append(microbatch_rows[b])
            total[rank] += load[b]
    return dealt


def check_deal(
    *,
    ranks: int,
    microbatches: int | None,
    microbatch_size: int | None,
    max_tokens: int | None,
    balance: str,
    linear: float,
) -> None:
    """Check options.

    Raises:
        ValueError: more than one of the three ways to cut, or a number below its least.
    """
    cuts = {"microbatches": microbatches, "microbatch_size": microbatch_size, "max_tokens": max_tokens}
    given = {name: value for name, value in cuts.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"give at most one of {', '.join(cuts)}; got {given}")
    for name, value in {"ranks": ranks, **given}.items():
        at_least(name, value, 1)
    one_of("balance", balance, get_args(Balance))
    within("linear", linear, 0, float("inf"))
