"""The steps of a run: how old groups are, how many may be dispatched, and whether a step may begin.

A step trains G groups, and updates the policy. v is the number of steps that have ended. A group is **born**
at the step at which it is announced. Its deadline is k = `max_staleness` steps later. It is **outstanding**
until it has left, was rejected, or the step that trains it has ended. With a = `steps_ahead` ≤ k:

1. At most (a + 1) · G groups are outstanding after a dispatch.
2. A step trains the whole groups with the earliest deadlines.
3. A step begins only if, for every b ≥ v − k, it leaves at most (b + k − v) · G of the groups that were born
   at or before b.

Then no group is dropped for its age, none is trained after its deadline, and no step waits for ever. Proof:
before each step, at most (b + k − v + 1) · G of the outstanding groups were born at or before b. A dispatch
adds groups only at b = v, where this bound is (k + 1) · G, and rule 1 allows no more than (a + 1) · G. A step
keeps this bound, by rule 3. If all outstanding groups are whole, rule 3 holds, because the step takes the G
groups with the earliest deadlines.

A row may be one version older than its announcement, if its worker got the weights late. Then it may be
trained at the age k + 1. After a step that took fewer than G groups, groups may be past their deadline. They
are trained first, and no step waits for them.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from headrace.transforms.table import StreamWarning

from .open_groups import Group

MOST_VERSIONS = 64  # versions whose first step is remembered; each older version counts as one step


class Steps:
    """Counts the steps, and which policy version each began with.

    A step ends when the policy version changes, or when groups of the next step are asked for. So a
    version may advance by any number, and only every few steps.
    """

    def __init__(self) -> None:
        self.over = 0
        """v, the number of steps that have ended."""
        self.taken = 0
        """Number of groups that the current step has taken, without rejected ones."""
        self.began: list[tuple[int, int]] = [(0, 0)]
        """Policy versions, ascending, and the step at which each began."""
        self.ages: Counter[int] = Counter()
        """Number of groups that were taken at each age, in steps."""

    def end(self) -> None:
        """End the current step."""
        self.over, self.taken = self.over + 1, 0

    def begin(self, version: int) -> None:
        """Note that the policy has this version from now on."""
        known = [each for each in self.began if each[0] <= version and (self.over or self.ages)]
        if [step for _, step in known[-2:]] == [self.over, self.over]:
            del known[-1]  # of the versions of one step, the first and the last are enough
        if not known or known[-1][0] < version:
            known.append((version, self.over))
        self.began = known[-MOST_VERSIONS:]

    def of(self, version: int) -> int:
        """The last step at which a version was the newest. Unknown versions count as one step each."""
        after = bisect_right(self.began, version, key=lambda each: each[0])
        if after == len(self.began):
            return self.over
        later, step = self.began[after]
        return max(step - 1, self.began[after - 1][1]) if after else step - (later - version)

    def oldest(self, group: Group) -> int:
        """The step of the group's oldest row."""
        return self.of(group.oldest)

    def left(self, version: int, options: Any) -> int:
        """For how many steps after this one a row of a version may wait, with a GroupAssembler's options."""
        return options.max_staleness - self.over + self.of(version)

    def born(self, group: Group) -> int:
        """The step at which a group was born: the step of its announcement.

        If all rows of a whole group are newer, because the prompt waited for a worker, it is the step of the
        oldest row. A refilled group keeps its birth.
        """
        return max(group.born, self.oldest(group)) if group.is_ready and not group.refills else group.born

    def in_order(self, groups: Iterable[Group]) -> list[Group]:
        """Groups by deadline. Groups that were never announced come last, as they became whole."""
        return sorted(
            groups, key=lambda group: (self.born(group) if group.announced else math.inf, group.order)
        )

    def take(self, oldest: Collection[int | None]) -> None:
        """Count the groups that the current step takes, by their age.

        Args:
            oldest: for each group the oldest policy version of its rows; None: not read.
        """
        self.taken += len(oldest)
        self.ages.update(self.over - self.of(version) for version in oldest if version is not None)

    def to_plain(self) -> dict[str, Any]:
        """The state, as dicts and lists."""
        return {**vars(self), "began": list(self.began), "ages": dict(self.ages)}

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> Steps:
        """Restore the output of :meth:`to_plain`."""
        steps = cls()
        vars(steps).update(state, ages=Counter(state["ages"]))
        return steps


def warn_of_no_slack(options: Any) -> None:
    """Warn that each step waits for the slowest of the groups that were dispatched for it."""
    if options.waits and 0 < options.max_staleness == options.ahead:
        warnings.warn(
            f"no group may take longer than others: steps_ahead and max_staleness are both {options.ahead}, "
            "so each step waits for the slowest of the groups that were dispatched for it. This costs a "
            "third of the speed or more. Set max_staleness to steps_ahead + the latency of the slowest "
            "group divided by the time of a step. If such rows are too old, set steps_ahead to less",
            StreamWarning,
            stacklevel=3,  # the caller of announce()
        )


def waits_for(
    steps: Steps, whole: Iterable[Group], waiting: Iterable[Group], size: int, options: Any
) -> list[Group] | None:
    """The groups that a step waits for, by rule 3 or because too few are whole.

    None: the step may begin, or has begun.

    Args:
        steps: the steps so far.
        whole: the groups that can be taken.
        waiting: the other outstanding groups.
        size: G, or more if the step takes more.
        options: the GroupAssembler.
    """
    if steps.taken:
        return None
    first = steps.over - options.max_staleness  # groups that were born earlier are late in any case
    whole = steps.in_order(whole)
    unfinished = steps.in_order(group for group in waiting if group.announced)
    if len(whole) < size:
        return unfinished[: size - len(whole)]
    taken, left = whole[:size], whole[size:] + unfinished
    born_taken, born_left = (
        sorted(born for group in groups if group.announced and (born := steps.born(group)) >= first)
        for groups in (taken, left)
    )
    late = sum(group.announced for group in taken) - len(born_taken)
    for number, born in enumerate(range(first, steps.over + 1)):
        over = bisect_right(born_left, born) - number * options.groups  # left, and too old to train
        at_best = over + bisect_right(born_taken, born) - (size - late)  # if all groups were whole
        if over > max(0, at_best):
            return [group for group in unfinished if first <= steps.born(group) <= born]
    return None
