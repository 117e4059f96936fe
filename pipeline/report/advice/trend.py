"""Whether a number that one wants to be large rises over the steps, by a rule that can be looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

MIN_STEPS = 12
SMALL = 0.02  # of the range: less is no move
ROUNDED = 1e-9  # of the greatest: means of the same rewards differ by their rounding
AT_THE_TOP = 0.1  # of the range below the greatest: there is little left to rise


class Trend(NamedTuple):
    """How a number went."""

    kind: Literal["short", "rose", "flat", "fell", "stalled"]
    steps: int
    last: float
    words: str
    """As it follows "the reward"."""


def trend_of(values: Sequence[float], *, low: float, high: float) -> Trend:
    """How a number went over its steps.

    With the range high − low, and the quarters Q₁ … Q₄ of the steps (those over go to neither end)::

        short     fewer than 12 steps
        fell      mean(Q₄) − mean(Q₁) < −0.02 · range
        flat      |mean(Q₄) − mean(Q₁)| ≤ 0.02 · range
        stalled   mean(Q₄) − mean(Q₃) ≤ 0.02 · range, and high − mean(Q₄) > 0.1 · range
        rose      else

    where the first that is so counts. What is near its top, high − mean(Q₄) ≤ 0.1 · range, is not flat; and
    1e-9 of the greatest is no move, which rounding may make.

    Args:
        values: one a step, at least one.
        low: least that was seen, of any rollout say.
        high: greatest.

    Example:
        >>> trend_of([0.0] * 4 + [0.5] * 8, low=0.0, high=1.0).words
        'rose from 0 to 0.5, and no longer rises: 0.5 in the last 3 steps, 0.5 in the 3 before'
    """
    steps, ends = len(values), f"{values[0]:.3g} to {values[-1]:.3g}"
    if steps < MIN_STEPS:
        return Trend("short", steps, values[-1], f"went from {ends}")
    size = steps // 4
    first, before, last = mean(values[:size]), mean(values[-2 * size : -size]), mean(values[-size:])
    small = max(SMALL * (high - low), ROUNDED * max(abs(low), abs(high)))
    at_top = high - last <= AT_THE_TOP * (high - low)
    if last - first < -small:
        return Trend("fell", steps, values[-1], f"fell from {first:.3g} to {last:.3g}")
    if last - first <= small and not (at_top and high > low):
        return Trend("flat", steps, values[-1], f"is flat at {last:.3g}")
    if last - before <= small and not at_top:
        words = (
            f"rose from {first:.3g} to {last:.3g}, and no longer rises: {last:.3g} in the last {size} steps"
        )
        return Trend("stalled", steps, values[-1], f"{words}, {before:.3g} in the {size} before")
    if last - first <= small:
        return Trend("rose", steps, values[-1], f"stays at {last:.3g}, near the greatest seen,")
    if values[-1] <= values[0]:  # of single steps, which chance moves more than quarters
        ends = f"{first:.3g} to {last:.3g}"
    return Trend("rose", steps, values[-1], f"rose from {ends}")


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one number."""
    return sum(values) / len(values)
