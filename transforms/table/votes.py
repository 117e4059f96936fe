"""Rollouts that vote and do not train, such as a greedy rollout. Their rewards count, their tokens do not."""

from __future__ import annotations

from .checks import describe_rollout
from .ends import read_flags
from .rows import Rows

REASON = "votes_only"


def note_votes_only(rows: Rows) -> None:
    """Mask the rollouts that vote only.

    They stay in the batch and in the statistics until :func:`drop_votes_only`, and their reason is
    ``votes_only`` whatever happens to their group.

    Args:
        rows: all rows, before the first stage, with the column ``votes_only``.

    Raises:
        BatchError: the column is not bool, or the rows of a rollout differ in it. The message lists the
            rollouts.
    """
    table, rows = rows.table, rows.with_excluded
    votes = read_flags(rows, "votes_only")
    if rows.has("rollout"):  # else each row is a rollout
        rollouts = rows.ids("rollout", checked=False)
        rows.require(
            (votes[rollouts.spread(rollouts.first)] == votes) | (rollouts.labels < 0),
            "all rows of a rollout vote only, or none does; {column} differs in {found}. Give all rows of a "
            "rollout the same value",
            lambda row: describe_rollout(rows, row, votes),
            role="votes_only",
            unit=rollouts,
        )
    tokens = [rows.key("loss_mask"), rows.key("log_prob")]
    if table.masking.elsewhere or any(key is not None and table.find(key) is not None for key in tokens):
        rows.mask(votes)  # without a pipeline, no later step drops these rows
        table.fates.masks = True
    table.fates.let_vote(rows.to_arrival(votes), rows.reason_name(REASON))


def drop_votes_only(rows: Rows) -> None:
    """Drop the rollouts that vote only, whose rewards are in the statistics now. The batch must have some."""
    rows.leave(rows.votes_only, REASON, "dropped")
    rows.table.fates.votes_only = None
