"""Counts of the groups that a stream trains and loses, by their latency, turns, length and reward.

The **latency** of a group is the time from its announcement, or its first row, until it is whole. Slow groups
are those with long rollouts, which are often the hard ones. If a stream loses more of them than of others, it
trains on a biased selection of its prompts.

The length and the turns of a group are those of its longest rollout. This rollout decides whether the group
is late, because a group is whole when its last rollout has ended. While rollouts are missing, the greatest
length so far is a lower bound; the mean length would not be one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from .open_groups import Group, Key

BINS = 8  # bins for each factor of two, each 9 % wide
LEAST = 2**-10  # smaller values count as this
NONE = math.floor(BINS * math.log2(LEAST)) - 1  # the bin below that of LEAST
LONG = ("latency", "turns", "length")  # values that are large for slow groups
TENTHS = 10
TRAINED = "trained"
NOT_OVER = ("unfinished", "undone")  # reasons that end no group: the run stopped, or went back


def bin_of(value: float) -> int:
    """The bin of a latency, a length or a number of turns: ⌊8 · log₂ value⌋."""
    return math.floor(BINS * math.log2(max(value, LEAST)))


def least_of(number: int) -> float:
    """The least value of a bin."""
    return 2.0 ** (number / BINS)


def signed_bin_of(value: float) -> int:
    """The bin of a reward: 0 below 2⁻¹⁰ in absolute value, ±1 from there on, and so on by :func:`bin_of`."""
    return 0 if abs(value) < LEAST else int(math.copysign(bin_of(abs(value)) - NONE, value))


def signed_least_of(number: int) -> float:
    """The least value of a bin of rewards."""
    return least_of(number + NONE) if number > 0 else -least_of(1 - number + NONE)


def slow_loss(trained: Sequence[int], lost: Sequence[int]) -> tuple[float, int]:
    """Whether parts with large values are lost more often, and from which part on the difference is clearest.

    Let N groups be in K + 1 parts by their value, and n of them be trained. Part k and later parts have the
    share m of all groups, the share a of the trained groups, and the share b of the lost groups. The maximum
    is over the k with b > m. With the divergence D(a, m) = a · ln(a / m) + (1 − a) · ln((1 − a) / (1 − m))::

        z = −√(2 · max(0, max over k of max(n · D(a, m), (N − n) · D(b, m)) − ln K))

    If the lost groups are drawn at random, P(z < −x) ≤ exp(−x² / 2) for x > 0, for any N and n: Hoeffding
    (1963) bounds the tail of each k, and ln K accounts for the choice of k. So z < −4 has at most one chance
    in 2,980.

    Args:
        trained: groups of each part, K + 1 numbers, in the order of their values.
        lost: lost groups of each part, in the same order.

    Returns:
        z, and the k of the maximum, which is 0 if z is 0.

    Example:
        >>> z, part = slow_loss([60, 20, 0], [0, 0, 20])  # b = 1, m = 0.2: −√(2 · (20 · ln 5 − ln 2))
        >>> round(z, 2), part
        (-7.94, 2)
    """
    n, others = sum(trained), sum(lost)
    best, part = math.log(max(1, len(trained) - 1)), 0
    chosen = best
    for k in range(1, len(trained)):
        above, lost_above = sum(trained[k:]), sum(lost[k:])
        if lost_above * n > above * others:  # b > a
            m = (above + lost_above) / (n + others)
            evidence = max(n * _divergence(above / n, m), others * _divergence(lost_above / others, m))
            best, part = max((best, part), (evidence, k))
    return -math.sqrt(2 * (best - chosen)) if part else 0.0, part


def _divergence(a: float, m: float) -> float:
    """The divergence D(a, m) of two shares, in nats."""
    return sum(x * math.log(x / y) for x, y in ((a, m), (1 - a, 1 - m)) if x > 0)


class Tenth(NamedTuple):
    """About a tenth of the groups that have left: those with neighbouring values."""

    least: float
    """The least value. A group that left early has its lower bound."""
    below: float
    """The values are less than this."""
    trained: int
    lost: dict[str, int]
    """Groups that were not trained, by reason."""
    early: int
    """The part of `lost` that left before the value was known."""

    @property
    def left(self) -> int:
        """Groups, trained or lost."""
        return self.trained + sum(self.lost.values())


@dataclass(frozen=True)
class Survivors:
    """Which groups a stream has trained and lost, by their latency, turns, length and reward.

    Args:
        fates: for ``latency``, ``turns``, ``length`` and ``reward``, the number of groups by their fate
            (``trained``, or a reason), by whether the value is known (False: it is a lower bound), and by the
            bin of the value. The latency is in seconds. Turns are the rows of the longest rollout, and the
            length is its tokens in the loss mask. The reward is the mean of the rollouts that have ended. It
            has no lower bound: a group that left before its reward was known has none. A group whose rows
            lack the column has no length or no reward either.
        outstanding: groups that have not left. No other number counts them.

    Example:
        >>> fates = {("trained", True, 0): 80, ("stale", True, 8): 20}
        >>> found = Survivors({"latency": fates}, outstanding=1).numbers()
        >>> found["survivors/latency/slow"], found["survivors/latency/slow_trained"]
        (2.0, 0.0)
    """

    fates: Mapping[str, Mapping[tuple[str, bool, int], int]]
    outstanding: int

    def tenths(self, value: str) -> list[Tenth]:
        """The groups in at most ten parts of about the same size. Equal values are in one part."""
        every: Counter[int] = Counter()
        for (_, _, number), groups in self.fates[value].items():
            every[number] += groups
        bins = sorted(every)
        middles = {
            b: upto - every[b] / 2 for b, upto in zip(bins, accumulate(every[b] for b in bins), strict=True)
        }
        parts: dict[int, list[int]] = {}
        for number in bins:
            parts.setdefault(int(TENTHS * middles[number] / every.total()), []).append(number)
        found = []
        for part in parts.values():
            lost: Counter[str] = Counter()
            early = 0
            for (fate, known, number), groups in self.fates[value].items():
                if number in part:
                    lost[fate] += groups
                    early += 0 if known else groups
            trained = lost.pop(TRAINED, 0)
            least = signed_least_of if value == "reward" else least_of
            found.append(Tenth(least(part[0]), least(part[-1] + 1), trained, dict(lost), early))
        return found

    def lacking(self, value: str) -> int:
        """Groups that have left and do not have a value."""
        return sum(self.fates["latency"].values()) - sum(self.fates[value].values())

    def numbers(self) -> dict[str, float]:
        """``survivors/…`` for loggers; empty before a group has left.

        ``trained`` is the share of the groups that have left. ``lost/<reason>``, ``early`` and
        ``outstanding`` count groups. ``latency/z`` is the z of :func:`slow_loss`. If it is below 0,
        ``latency/slow`` is the latency, in seconds, at which the difference is clearest,
        ``latency/slow_trained`` the trained share of the groups that took at least that long, and
        ``latency/others_trained`` the trained share of the others. ``turns`` and ``length`` have the same
        numbers if groups differ in them. Rewards have no z: long groups often have small rewards, so a loss
        of groups with small rewards is not a fault by itself.
        """
        found: dict[str, float] = {}
        for value in self.fates:
            tenths = self.tenths(value)
            if value == "latency" and tenths:
                reasons = sum((Counter(tenth.lost) for tenth in tenths), Counter[str]())
                trained = sum(tenth.trained for tenth in tenths)
                found["survivors/trained"] = trained / (trained + reasons.total())
                found |= {f"survivors/lost/{reason}": groups for reason, groups in reasons.items()}
                found["survivors/early"] = sum(tenth.early for tenth in tenths)
                found["survivors/outstanding"] = self.outstanding
            elif len(tenths) < 2 or value not in LONG:
                continue
            z, part = slow_loss(
                [each.trained for each in tenths], [each.left - each.trained for each in tenths]
            )
            found[f"survivors/{value}/z"] = z
            if z < 0:
                found[f"survivors/{value}/slow"] = tenths[part].least
                for name, some in ("slow", tenths[part:]), ("others", tenths[:part]):
                    share = sum(each.trained for each in some) / sum(each.left for each in some)
                    found[f"survivors/{value}/{name}_trained"] = share
        return {name: float(number) for name, number in found.items()}


class Survival:
    """Counts the groups of a stream as they leave. Its memory does not grow with their number.

    Counting begins anew at a restart, because the latency of groups in flight is not known.

    Args:
        before: groups from before the restart, which are not counted.
    """

    def __init__(self, before: Iterable[Key] = ()):
        self._since: dict[Key, float | None] = dict.fromkeys(before)  # time of announcement or first row
        self._took: dict[Key, float] = {}  # the latency of groups that are, or were, whole
        self._fates: dict[str, Counter[tuple[str, bool, int]]] = {
            value: Counter() for value in (*LONG, "reward")
        }

    def begin(self, groups: Iterable[Key], now: float) -> None:
        """Note that groups were announced or have new rows."""
        for key in groups:
            self._since.setdefault(key, now)

    def end(self, group: Group, now: float) -> None:
        """Note that no further rollout of a group is awaited."""
        since = self._since.get(group.key)
        if since is not None:
            self._took.setdefault(group.key, now - since)

    def leave(
        self, groups: Iterable[Group], reason: str, now: float = math.nan, stale: Collection[Key] = ()
    ) -> None:
        """Count groups that leave and still have their rows.

        Args:
            groups: the groups that leave.
            reason: why the groups leave; empty: they are trained.
            now: seconds, if the groups are not whole.
            stale: groups that are trained without their old rows. They count as stale.
        """
        for group in groups:
            key = group.key
            since, took = self._since.pop(key, None), self._took.pop(key, None)
            if since is None or reason in NOT_OVER:
                continue
            fate, known = "stale" if key in stale else reason or TRAINED, took is not None
            values = {"latency": now - since if took is None else took, **group.measures()}
            for value, number in values.items():
                if value in LONG:
                    self._fates[value][fate, known, bin_of(number)] += 1
                elif known:
                    self._fates[value][fate, known, signed_bin_of(number)] += 1

    def so_far(self) -> Survivors:
        """Return the counts so far."""
        return Survivors({value: dict(fates) for value, fates in self._fates.items()}, len(self._since))
