"""Take means and sums of numbers over several steps, and say which steps these are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Numbers = Mapping[str, float]
RECENT = 5  # number of steps of a mean over recent steps
MIN_STEPS = 12  # shorter runs have no quarters
UNITS = ("rows", "rollouts", "groups")


class StepMean(NamedTuple):
    """The arithmetic mean of a number over steps."""

    value: float
    steps: tuple[int, ...]
    """The steps that have the number, in order."""

    @property
    def window(self) -> str:
        """``step 3``, or ``steps 3 to 7``."""
        return window_of(self.steps)


def window_of(steps: Sequence[int]) -> str:
    """The window of some steps, in words.

    Example:
        >>> window_of([3]), window_of([995, 1004])
        ('step 3', 'steps 995 to 1,004')
    """
    first, last = steps[0], steps[-1]
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def mean_over(points: Sequence[tuple[int, float]]) -> StepMean:
    """Take the mean of (step, value) pairs, at least one."""
    return StepMean(sum(value for _, value in points) / len(points), tuple(step for step, _ in points))


def quarter_means(points: Sequence[tuple[int, float]]) -> list[StepMean]:
    """Take the means of the first, the third and the last quarter of the steps.

    A quarter is ⌊n / 4⌋ of n steps; the first counts from the beginning, the others from the end. With fewer
    than 12 steps, each mean is of one step: the first, the second to last, and the last.

    Example:
        >>> [each.window for each in quarter_means([(step, 0.5) for step in range(14)])]
        ['steps 0 to 2', 'steps 8 to 10', 'steps 11 to 13']
    """
    size = len(points) // 4 if len(points) >= MIN_STEPS else 1
    before = points[-2 * size : -size] or points[:1]
    return [mean_over(points[:size]), mean_over(before), mean_over(points[-size:])]


def totals_over(steps: Iterable[Numbers]) -> dict[str, float]:
    """Add up collected and trained rows over steps: ``rows/in``, ``rows/trained``, and other units.

    Example:
        >>> totals_over([{"rows/in": 8.0, "rows/trained": 4.0}, {"rows/in": 8.0, "rows/trained": 2.0}])
        {'rows/in': 16.0, 'rows/trained': 6.0}
    """
    found: dict[str, float] = {}
    for numbers in steps:
        for name in (f"{unit}/{which}" for unit in UNITS for which in ("in", "trained")):
            if name in numbers:
                found[name] = found.get(name, 0.0) + numbers[name]
    return found


def percent(share: float) -> str:
    """Format a share as a percentage, without decimals unless it is close to 0 or 1.

    Example:
        >>> percent(0.5), percent(0.004), percent(0.999)
        ('50 %', '0.4 %', '99.9 %')
    """
    digits = 0 if 0.01 <= share <= 0.99 or share in (0, 1) else 1
    rounded = math.floor(100 * share * 10**digits + 0.5) / 10**digits  # rounds a half up, like the page
    return f"{rounded:.{digits}f} %"
