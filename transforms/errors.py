"""The exceptions for invalid batches. Their messages list the row ids."""

from __future__ import annotations

from collections.abc import Iterable


class BatchError(ValueError):
    """The batch is invalid and cannot be trained on."""


class MissingKeyError(BatchError):
    """A column that a transform reads is missing."""


class IncompleteGroupsError(BatchError):
    """Groups have missing rollouts that were dispatched."""


class StreamWarning(UserWarning):
    """Rollouts were lost on their way to an assembler, or do not end."""


class ProcessedTwiceError(BatchError):
    """A pipeline has already processed this batch."""


NUMBER_WORKERS = "Workers need their own ids: set StampIds(worker=…) or RepeatSampler(rank=…)"


def who_stamps(name: str) -> str:
    """The end of the message for a missing column, by the name of the column or its option; else empty.

    >>> who_stamps("rollout_id")[2:17], who_stamps("reward_key")
    ('Ids are stamped', '')
    """
    if name == "old_log_prob_key":
        return '. ScoreRows(log_prob_key=("old_log_probs", "full")) in front of it computes the column'
    if name not in ("group_id", "rollout_id", "unit_id", "group_key", "rollout_key"):
        return ""
    return (
        ". Ids are stamped where rollouts are dispatched: by headrace.pipeline.StampIds if the environment "
        "draws its own prompts, else by RepeatSampler.draws()"
    )


def listing(items: Iterable[str], *, most: int = 8) -> str:
    """Join the first `most` items for a message, and count the others.

    >>> listing(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = list(items)
    more = len(shown) - most
    return ", ".join(shown[:most]) + (f" and {more} more" if more > 0 else "")
