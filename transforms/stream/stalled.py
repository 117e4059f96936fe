"""What is raised where rollouts come, or do not, and no group becomes whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.transforms.errors import listing


class StalledError(RuntimeError):
    """Nothing comes out, and nothing says that it will: the groups that wait longest, and where rows went."""


def stalled(why: str, waiting: Sequence[str], rows: Mapping[str, int]) -> StalledError:
    """The error in words.

    Args:
        why: what happened.
        waiting: the groups that wait, in words, the oldest first.
        rows: rows by what became of them.

    Example:
        >>> error = stalled("3 puts made no group whole", ["group 7 has 1 of 2"], {"held": 1, "late": 4})
        >>> str(error).partition(" Do all")[0]
        '3 puts made no group whole. Waiting: group 7 has 1 of 2. Rows: 1 held, 4 late.'
    """
    counts = ", ".join(f"{number} {name}" for name, number in rows.items() if number) or "none came"
    advice = (
        " Do all rollouts of a group come here, with done on their last rows? Set timeout or "
        "max_pending_groups to go on without those that do not"
    )
    return StalledError(
        f"{why}. Waiting: {listing(waiting) or 'no group'}. Rows: {counts}.{advice if waiting else ''}"
    )
