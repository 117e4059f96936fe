"""Define the part of a simulation that all systems share: prompts with latencies, engine and trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, log, sqrt
from random import Random
from statistics import NormalDist, fmean

NORMAL = NormalDist()
SEEN = 128
LEAST, MEAN, MOST = 515, 14377, 242470
"""Tokens of the shortest, the mean and the longest of 128 trajectories of one training step."""
TOKENS_PER_SECOND = 40.5
"""Tokens per second: the longest trajectory of that step, divided by the 5,985 s that the trainer waited."""
BETWEEN = 0.75
"""Share of the variance of log(tokens) that is between prompts. The rest is within prompts."""


def lognormal(spread: float, noise: float) -> Callable[[float, Random], float]:
    """Lognormal latencies with a median of 20 ticks, and these deviations between and within prompts."""
    return lambda z, dice: 20 * exp(spread * z + noise * dice.gauss(0, 1))


def two_classes(quick: int, slow: int) -> Callable[[float, Random], float]:
    """Latencies of two classes: half of the prompts take `quick` ticks, and half `slow` ticks."""
    return lambda z, dice: slow if z >= 0 else quick


def published_tokens(z: float, dice: Random) -> float:
    """Draw the tokens of a rollout. The shortest, mean and longest of 128 rollouts are the published ones.

    The distribution is lognormal, with one deviation below the median and another above it. No rollout is
    longer than the published longest.
    """
    x = sqrt(BETWEEN) * z + sqrt(1 - BETWEEN) * dice.gauss(0, 1)
    return min(MEDIAN * exp(x * (ABOVE if x > 0 else BELOW)), MOST)


def _deviations(median: float) -> tuple[float, float]:
    """The deviations below and above the median with which 128 rollouts have the published extremes."""
    most = NORMAL.inv_cdf((SEEN - 0.375) / (SEEN + 0.25))  # Blom's approximation
    return log(median / LEAST) / most, log(MOST / median) / most


def _fitted_median() -> float:
    """The median for which the mean is the published one."""
    low, high = float(LEAST), float(MEAN)
    at = [NORMAL.inv_cdf((n + 0.5) / 2000) for n in range(2000)]
    for _ in range(40):
        middle = (low + high) / 2
        below, above = _deviations(middle)
        mean = fmean(min(middle * exp(x * (above if x > 0 else below)), MOST) for x in at)
        low, high = (low, middle) if mean > MEAN else (middle, high)
    return low


MEDIAN = _fitted_median()
BELOW, ABOVE = _deviations(MEDIAN)


@dataclass(eq=False)
class Group:
    """A prompt that was drawn, and its fate."""

    number: int
    """Number of the prompt."""
    decile: int
    """The tenth of the prompt by its latency; 9 is the slowest."""
    ticks: list[int]
    """Latency of each rollout, in ticks."""
    fails: list[bool]
    begun: int = -1
    """The tick at which the group was dispatched."""
    drawn: int = -1
    """The policy version at its dispatch."""
    born: int = -1
    """The policy version when its first rollout began."""
    started: int = 0
    """Number of rollouts that the engine has begun."""
    ended: int = 0
    """Number of rollouts that have ended or failed."""
    spent: int = 0
    """Ticks in which its rollouts were generated, each of which makes a token."""
    fate: str = ""
    """``trained``, or the reason why the group is not trained. Empty while the group is outstanding."""
    age: int = -1
    """Steps between the policy that generated the group and the policy that trained it."""


@dataclass(frozen=True)
class World:
    """The options of a simulation. Time is in ticks, and a rollout makes one token per tick."""

    latency: Callable[[float, Random], float] = field(default_factory=lambda: lognormal(0.9, 0.3))
    seed: int = 0
    slots: int = 64
    """Number of rollouts that are generated at once."""
    size: int = 4
    """Number of rollouts of a group."""
    groups: int = 8
    """Number of groups that a step trains."""
    step: int = 20
    """Number of ticks of a step."""
    ticks: int = 2400
    failing: float = 0.0
    """Share of the rollouts that fail."""
    prompts: int | None = None
    """None: rollouts do not fail."""
    hangs: int | None = None
    """A prompt whose first rollout never ends."""

    def group(self, number: int, attempt: int = 0) -> Group:
        """Make a prompt with its latencies, which are the same for every system."""
        dice = Random(f"{self.seed} {number}")
        quantile = min(max(dice.random(), 1e-6), 1 - 1e-6)
        z = NORMAL.inv_cdf(quantile)
        ticks = [max(1, round(self.latency(z, dice))) for _ in range(self.size)]
        fails = [dice.random() < self.failing and not attempt for _ in range(self.size)]
        return Group(number, int(10 * quantile), ticks, fails)

    def most_steps(self) -> float:
        """An upper bound of the number of steps, for a trainer or for slots that are always busy."""
        some = [self.group(number) for number in range(2000)]
        useful = fmean(not any(group.fails) for group in some)
        work = fmean(sum(group.ticks) for group in some) / useful
        return min(self.ticks / self.step, self.ticks * self.slots / (self.groups * work))
