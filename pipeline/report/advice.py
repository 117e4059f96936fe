"""What the numbers of a step, and of those before it, advise to look at; and whether the reward rises."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple

from omegaconf import DictConfig, OmegaConf

Numbers = Mapping[str, float]
History = Sequence[tuple[int, Numbers]]
RECENT = 5  # steps over which a number is judged by its mean
REWARD, LENGTH = "reward/all/mean", "response_length/mean"
LENGTHS = 2.0  # times as long as in the beginning is too long
NAMED = 6  # steps that a sentence names
MIN_STEPS = 12
SMALL = 0.02  # of the range: less is no move
ROUNDED = 1e-9  # of the greatest: means of the same rewards differ by their rounding
AT_THE_TOP = 0.1  # of the range below the greatest: there is little left to rise


class Advisory(NamedTuple):
    """A rule that the numbers break."""

    name: str
    """Of the symptom, as in docs/symptoms.md."""
    text: str
    """A sentence, with the number."""
    number: str
    """The name of the number by which it is judged."""
    steps: tuple[int, ...]
    """At which the number was beyond the bound, by itself."""


Advice = tuple[str, list[Advisory]]  # a verdict, and what else is worth a look


class Bound(NamedTuple):
    """A rule of one number: a mean over the last five steps above the bound is worth a sentence."""

    name: str
    """Of the symptom, whose ``bound`` in symptoms.yaml this is."""
    number: str
    above: float
    says: str
    """The sentence, with ``{share}`` or ``{value}`` for the mean."""
    also: str = ""
    """Behind it, where a group is solved by all of its rollouts, or by none."""
    least_groups: int = 0
    """Steps of fewer groups are not judged."""

    def holds(self, numbers: Numbers) -> bool:
        """Whether a step is judged by it."""
        return self.number in numbers and numbers.get("groups/in", 0.0) >= self.least_groups


def percent(share: float) -> str:
    """A share in words: as a percentage without digits, where it is not next to none or all.

    Example:
        >>> percent(0.5), percent(0.004), percent(0.999)
        ('50 %', '0.4 %', '99.9 %')
    """
    digits = 0 if 0.01 <= share <= 0.99 or share in (0, 1) else 1
    return f"{100 * share:.{digits}f} %"


@cache
def bounds() -> list[Bound]:
    """The rules of one number, most urgent first."""
    nodes = _symptom_nodes().items()
    return [Bound(str(name), **node.bound) for name, node in nodes if "bound" in node]


@cache
def numbers_read() -> list[str]:
    """The names of the numbers of steps before that rules read."""
    counts = ["rows/trained", "groups/in", "solve_all", "solve_none"]
    return [*counts, REWARD, "reward/all/min", "reward/all/max", LENGTH, *(rule.number for rule in bounds())]


def advise(numbers: Numbers, history: History = ()) -> list[Advisory]:
    """What is worth a look at a step, most urgent first.

    ========================= ===============================================================================
    ``nothing-trains``        no row was trained at this step, or at one before
    a bound                   the mean of the number over the last five steps is above its bound:
                              `advantage-all-zero` ½ of ``frac_reward_zero_std``, `rollouts-truncated` ¼,
                              `rollouts-failed`, `rollouts-empty` and `groups-incomplete` a tenth,
                              `gradient-spikes` ½ of the gradient in one of four groups or more,
                              `stale` 2 versions in the mean
    `off-policy`              a stage's number is below what it was told to warn of: ``<stage>/ess_token``
                              below ``<stage>/least_ess``, and so for every option ``least_<name>``
    `reward-flat`, `stalled`  the reward does not move (:func:`trend_of`)
    `lengths-explode`         over at least 12 steps: the mean response length of the last five is more than
                              twice that of the first five
    ========================= ===============================================================================

    Args:
        numbers: of the step.
        history: (step, numbers) of the steps before it and of itself; empty: of no others.

    Example:
        >>> for advisory in advise({"rows/in": 8.0, "rows/trained": 4.0, "rollouts/truncated": 0.5}):
        ...     print(f"{advisory.name}: {advisory.text}")
        rollouts-truncated: 50 % of the rollouts were cut off before their end.
    """
    history = history or [(0, numbers)]
    found = []
    if steps := [step for step, each in history if each.get("rows/trained") == 0]:
        words = "Nothing was trained" + (f" {said_at(steps, len(history))}" if len(history) > 1 else "")
        found = [Advisory("nothing-trains", f"{words}.", "rows/trained", tuple(steps))]
    found += [each for rule in bounds() if (each := _bound(rule, history)) is not None]
    return [*found, *_least(numbers), *_trends(history)]


def unchecked_of(steps: Sequence[Numbers]) -> dict[str, str]:
    """The rules of :func:`advise` that cannot fire: no step has the number that they judge.

    Args:
        steps: numbers of each.

    Returns:
        The number by the name of the symptom.

    Example:
        >>> sorted(unchecked_of([{"frac_reward_zero_std": 0.5, "response_length/mean": 90.0}]))[:2]
        ['gradient-spikes', 'groups-incomplete']
    """
    rules = {rule.name: rule.number for rule in bounds()} | {"lengths-explode": LENGTH}
    return {name: number for name, number in rules.items() if not any(number in step for step in steps)}


def verdict(numbers: Numbers, history: History = ()) -> str:
    """Whether the reward rises, in a sentence; and where it does not, the most urgent advisory.

    Args:
        numbers: as for :func:`advise`.
        history: as for :func:`advise`.

    Example:
        >>> verdict({"reward/all/mean": 0.5})
        'The mean reward is 0.5.'
    """
    return advice_at(numbers, history)[0]


def advice_at(numbers: Numbers, history: History = ()) -> Advice:
    """The :func:`verdict` and what :func:`advise` says, of the same arguments."""
    advisories = advise(numbers, history)
    trend = _reward_trend(history or [(0, numbers)])
    if trend is None:
        return "No reward was recorded.", advisories
    if trend.steps == 1:
        return f"The mean reward is {trend.last:.3g}.", advisories
    words = f"The reward {trend.words} over {trend.steps:,} steps"
    if trend.kind == "short":
        return f"{words}: too few to say whether it learns.", advisories
    others = [each.text for each in advisories if each.name not in ("reward-flat", "stalled")]
    if trend.kind == "rose" or not others:
        return f"{words}.", advisories
    why = others[0].partition(" (at ")[0].removesuffix(".")  # the steps stand in the advisory
    return f"{words}. {why}.", advisories


def said_at(steps: Sequence[int], of: int) -> str:
    """At which steps, in words; empty where it is the only one there is.

    Example:
        >>> said_at([3], 60), said_at([1, 2, 3], 3), said_at([], 1)
        ('at step 3', 'at each of 3 steps', '')
    """
    if of < 2 or not steps:
        return ""
    if len(steps) == of:
        return f"at each of {of:,} steps"
    if len(steps) <= NAMED:
        named = [f"{step:,}" for step in steps]
        listed = ", ".join(named[:-1]) + (" and " if len(named) > 1 else "") + named[-1]
        return f"at step{'s' * (len(named) > 1)} {listed}"
    return f"at {len(steps):,} of {of:,} steps, first at {steps[0]:,} and last at {steps[-1]:,}"


def _bound(rule: Bound, history: History) -> Advisory | None:
    judged = [(step, each) for step, each in history if rule.holds(each)]
    recent = [each for _, each in history[-RECENT:] if rule.holds(each)]
    means = {
        key: mean([each[key] for each in recent if key in each])
        for key in (rule.number, "solve_all", "solve_none")
        if any(key in each for each in recent)
    }
    value = means.get(rule.number, -math.inf)
    if value <= rule.above:
        return None
    words = rule.says.format(share=percent(value), value=f"{value:.3g}")
    solved = {key: means.get(key, 0.0) for key in ("solve_all", "solve_none")}
    if any(solved.values()):
        words += rule.also.format(**{key: percent(share) for key, share in solved.items()})
    steps = [step for step, each in judged if each[rule.number] > rule.above]
    where = said_at(steps, len(history))
    return Advisory(rule.name, f"{words} ({where})." if where else f"{words}.", rule.number, tuple(steps))


def _least(numbers: Numbers) -> list[Advisory]:
    """A stage that measures its option ``least_<name>`` beside ``<name>_…`` asks for it."""
    found = []
    for bound, least in numbers.items():
        stage, _, option = bound.partition("/least_")
        for key, value in numbers.items() if option else ():
            if key.startswith(f"{stage}/{option}_") and value < least:
                words = f"{stage}: {key.removeprefix(f'{stage}/')} is {value:.3g}, below {least:g}"
                found.append(Advisory("off-policy", f"{words} (least_{option}).", key, ()))
    return found


def _reward_trend(history: History) -> Trend | None:
    known = [numbers for _, numbers in history if math.isfinite(numbers.get(REWARD, math.nan))]
    if not known:
        return None
    low = min(numbers.get("reward/all/min", numbers[REWARD]) for numbers in known)
    high = max(numbers.get("reward/all/max", numbers[REWARD]) for numbers in known)
    return trend_of([numbers[REWARD] for numbers in known], low=low, high=high)


def _trends(history: History) -> list[Advisory]:
    """What only several steps can say."""
    found = []
    trend = _reward_trend(history)
    if trend is not None and trend.kind in ("flat", "stalled", "fell"):
        name = "stalled" if trend.kind == "stalled" else "reward-flat"
        found.append(Advisory(name, f"The reward {trend.words}.", REWARD, ()))
    lengths = [numbers[LENGTH] for _, numbers in history if LENGTH in numbers]
    if len(lengths) >= MIN_STEPS:
        first, last = mean(lengths[:RECENT]), mean(lengths[-RECENT:])
        if last > LENGTHS * first:
            words = f"Responses grew from {first:,.3g} to {last:,.3g} tokens"
            found.append(Advisory("lengths-explode", f"{words}.", LENGTH, ()))
    return found


# -- whether a number rises over the steps, by a rule that can be looked up ---------------------------------


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


# -- from a symptom to the number that shows it, what it means, and the words that change it -----------------


class Remedy(NamedTuple):
    """Something to do."""

    text: str
    words: str
    """To type behind ``headrace``; empty: it is done elsewhere."""


class Symptom(NamedTuple):
    """Something that goes wrong, as it looks in a report."""

    name: str
    """By which advisories and links call it."""
    title: str
    shows: str
    """The number of the report that shows it, and the rule by which it becomes an advisory."""
    means: str
    remedies: tuple[Remedy, ...]


@cache
def symptoms() -> dict[str, Symptom]:
    """All symptoms by name, most urgent first.

    Example:
        >>> symptoms()["stalled"].title
        'The reward rose, and no longer does'
    """
    return {
        str(name): Symptom(
            str(name),
            node.title,
            node.shows,
            node.means,
            tuple(Remedy(each.text, each.get("words", "")) for each in node.remedies),
        )
        for name, node in _symptom_nodes().items()
    }


@cache
def _symptom_nodes() -> DictConfig:
    return DictConfig(OmegaConf.create((files(__package__) / "symptoms.yaml").read_text(encoding="utf-8")))
