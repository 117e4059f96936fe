"""Empty rollouts, which arrived without a token that trains."""

from __future__ import annotations

from typing import Literal

from .rows import Rows
from .table import TokenCount

Empty = Literal["exclude", "count", "raise"]


def take_empty_out(rows: Rows, empty: Empty) -> None:
    """Exclude a rollout if none of its rows arrived with a finite log-probability in the loss mask.

    If the batch does not say which tokens train, no rollout is empty.

    Raises:
        BatchError: `empty` is ``raise`` and a rollout is empty. The message lists the rollouts.
    """
    table, count = rows.table, TokenCount(rows.key("loss_mask"), rows.key("log_prob"))
    if empty == "count":
        table.fates.excludes = True  # a later stage that runs alone must not exclude them again
        return
    table.load(tokens=[count])
    if count not in table.columns:
        return
    nothing = rows.count("loss_mask", finite=True, arrived=True) == 0
    if (votes_only := rows.votes_only) is not None:  # a rollout that votes only needs no token
        nothing = nothing & ~votes_only
    if bool(nothing.any()):
        if rows.has("rollout"):  # else each row is a rollout
            rollouts = rows.with_excluded.ids("rollout", checked=False)
            nothing = rollouts.spread(rollouts.all(nothing))
        nothing = nothing & rows.from_arrival(table.fates.here)
    if empty == "raise":
        rows.require(
            ~nothing,
            "each rollout needs at least one token in the loss; found none in {found}. Its reward would "
            "change the baseline of its group, but the rollout would not train. Was its response cut off "
            "or masked? Set {empty=exclude} to leave it out of the statistics",
            lambda row: f"rollout {rows.name('rollout', row)}",
        )
    rows.leave(nothing, "empty", "excluded", mask_tokens=False)
