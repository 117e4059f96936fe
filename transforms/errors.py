"""What can be wrong with a batch, as exceptions that name the offenders."""

from __future__ import annotations

from collections.abc import Iterable


class BatchError(ValueError):
    """Wrong data: the batch cannot be trained on as it is."""


class MissingKeyError(BatchError):
    """A column that a transform reads is not in the batch."""


class IncompleteGroupsError(BatchError):
    """Groups lack rollouts that were dispatched."""


class StreamWarning(UserWarning):
    """Rollouts were lost on their way to an assembler, or do not end."""


class ProcessedTwiceError(BatchError):
    """A pipeline has been over this batch already."""


NUMBER_WORKERS = "Workers number their own by StampIds(worker=…) or RepeatSampler(rank=…)"


def who_stamps(name: str) -> str:
    """What to do where a column is missing, by what it or its option is called; nothing for others.

    >>> who_stamps("rollout_id")[2:17], who_stamps("reward_key")
    ('Ids are stamped', '')
    """
    if name == "old_log_prob_key":
        return '. ScoreRows(log_prob_key=("old_log_probs", "full")) in front of it computes the column'
    if name not in ("group_id", "rollout_id", "unit_id", "group_key", "rollout_key"):
        return ""
    return (
        ". Ids are stamped where rollouts are dispatched: by headrace.pipeline.StampIds in an environment "
        "that draws its prompts itself, else by RepeatSampler.draws()"
    )


def listing(items: Iterable[str], *, most: int = 8) -> str:
    """Join what an error lists, and count what it leaves out.

    >>> listing(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = list(items)
    more = len(shown) - most
    return ", ".join(shown[:most]) + (f" and {more} more" if more > 0 else "")
