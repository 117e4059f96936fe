"""Give advice from the numbers of a step and of earlier steps, and say whether the reward rises."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from omegaconf import DictConfig, OmegaConf

from headrace.pipeline.composing.compose import compose_config, for_hydra
from headrace.pipeline.composing.nodes import complete_stages
from headrace.pipeline.wording import shown_reason
from headrace.transforms.table import listing

from .over_steps import MIN_STEPS, RECENT, UNITS, Numbers, StepMean, mean_over, percent, quarter_means
from .survivors import lost_groups

History = Sequence[tuple[int, Numbers]]
REWARD = "reward/all/mean"
LENGTH = "response_length/mean"
ABSENT = object()
LENGTH_UNITS = {LENGTH: "tokens", "response_characters/mean": "characters"}  # a step has one of these
LENGTHS = 2.0  # if responses grow to more than this many times their first length, they are too long
LONGEST = "response_length/max"
DIVISOR = 10  # a divisor above this many times the longest response is too large
SMALL = 0.02  # changes below this share of the range do not count
ROUNDED = 1e-9  # means of equal rewards may differ by this share of the greatest value, by rounding
AT_THE_TOP = 0.1  # a number within this share of the range from the greatest value can hardly rise


class Advisory(NamedTuple):
    """The result of a rule that the numbers break."""

    name: str
    """Name of the symptom, as in docs/symptoms.md."""
    text: str
    """The sentence, with the number."""
    number: str
    """Name of the number that is judged."""
    steps: tuple[int, ...]
    """The steps whose own number breaks the rule; empty if the rule is not about single steps."""


class Advice(NamedTuple):
    """The advice at a step, from the numbers of all steps up to it."""

    verdict: str
    advisories: list[Advisory]
    """The rules that the numbers break, most urgent first."""
    unchecked: list[str]
    """Names of symptoms that cannot be checked, for lack of data."""


class Bound(NamedTuple):
    """A rule of one number. A mean over the last five steps above the bound, or of exactly 0, breaks it."""

    name: str
    """Name of the symptom. This is its ``bound`` in symptoms.yaml."""
    number: str
    says: str
    """The sentence, with ``{share}`` or ``{value}`` for the mean."""
    above: float = math.inf
    zero: bool = False
    """Whether exactly 0 breaks the rule, for a number that is never negative."""
    also: str = ""
    """A further sentence, if groups are solved by all of their rollouts, or by none."""
    cases: Mapping[str, str] = {}
    """Other symptoms, by number. Such a symptom is named if its number is above half of the rule's number."""
    least_groups: int = 0
    """Least number of groups of a step. Steps with fewer groups are not judged."""

    def holds(self, numbers: Numbers) -> bool:
        """Whether the rule applies to a step with these numbers."""
        return self.number in numbers and numbers.get("groups/in", 0.0) >= self.least_groups

    def fires(self, value: float) -> bool:
        """Whether a value breaks the rule."""
        return value > self.above or (self.zero and value == 0)


@cache
def bounds() -> list[Bound]:
    """The rules of one number, most urgent first."""
    nodes = _symptom_nodes().items()
    return [Bound(str(name), **node.bound) for name, node in nodes if "bound" in node]


@cache
def numbers_read() -> list[str]:
    """The names of the numbers that rules read from earlier steps."""
    counts = [f"{unit}/{which}" for unit in UNITS for which in ("in", "trained")]
    judged = [rule.number for rule in bounds()]
    rewards = (REWARD, "reward/all/min", "reward/all/max")
    return [*counts, "solve_all", "solve_none", *rewards, *LENGTH_UNITS, *judged]


def advise(numbers: Numbers, history: History = ()) -> list[Advisory]:
    """List what you should look at after a step, most urgent first.

    ========================= ===============================================================================
    ``nothing-trains``        no row was trained at this step, or at an earlier step
    a zero                    the number is exactly 0 at each of the last five steps: `learning-rate-zero`,
                              `gradient-zero`
    a bound                   the mean of the number over the last five steps is above its bound:
                              `advantage-all-zero` ½ of ``frac_reward_zero_std`` (`groups-solved`, or
                              `groups-unsolved`, if most of these groups are), `rollouts-truncated` ¼,
                              `rollouts-failed`, `rollouts-empty`, `rewards-missing` and
                              `groups-incomplete` a tenth,
                              `trained-without-reward` 0 rollouts, `tokens-trained-again` 0 tokens,
                              `gradient-spikes` ½ of the gradient in one of four groups or more,
                              `stale` 2 versions in the mean
    `off-policy`              a number of a stage is below the stage's own bound: ``<stage>/ess_token``
                              below ``<stage>/least_ess``, and so for every option ``least_<name>``
    `slow-groups-lost`        a stream lost groups that take long, or have many turns, more often than others
                              (:func:`lost_groups`)
    `penalty-unused`          a stage that punishes length changed no reward; the longest response is at
                              most half as long as the shortest punished one
    `divisor-unused`          the longest response has less than a tenth of the tokens by which `LossWeight`
                              divides (``constant``)
    `reward-flat`, `stalled`  the reward does not move (:func:`trend_of`)
    `lengths-explode`         with at least 12 steps, the mean response length of the last quarter is more
                              than twice that of the first quarter
    ========================= ===============================================================================

    Args:
        numbers: the numbers of the step.
        history: (step, numbers) of the earlier steps and of this one; empty: there are no others.

    Example:
        >>> for advisory in advise({"rows/in": 8.0, "rows/trained": 4.0, "rollouts/truncated": 0.5}):
        ...     print(f"{advisory.name}: {advisory.text}")
        rollouts-truncated: 50 % of the rollouts were truncated.
    """
    history = history or [(0, numbers)]
    found = []
    if steps := [step for step, each in history if each.get("rows/trained") == 0]:
        at = f" at step{'s' * (len(steps) > 1)} {listing(map(str, steps))}" if len(history) > 1 else ""
        text = f"Nothing was trained{at}."
        left = {key: value for key, value in numbers.items() if key.startswith("out/")}
        if numbers.get("rows/trained") == 0 and any(left.values()):
            _, stage, reason = max(left, key=lambda key: left[key]).split("/")
            text += f" Most rows left at {shown_reason(stage, reason)}."
        found = [Advisory("nothing-trains", text, "rows/trained", tuple(steps))]
    found += [each for rule in bounds() if (each := _bound(rule, history)) is not None]
    if (lost := lost_groups(numbers)) is not None:
        found.append(Advisory("slow-groups-lost", lost.text, lost.number, ()))
    return [*found, *_least(numbers), *_unused(numbers), *_trends(history)]


def unchecked(history: History) -> list[str]:
    """The names of symptoms that cannot be checked, because the history lacks the data that they need.

    :attr:`Symptom.needs` names this data.

    Args:
        history: as for :func:`advise`.

    Example:
        >>> "nothing-trains" in unchecked([(0, {"rows/trained": 4.0})]), "stale" in unchecked([(0, {})])
        (False, True)
    """
    last = history[-1][1] if history else {}
    judged = {rule.name: any(rule.holds(each) for _, each in history[-RECENT:]) for rule in bounds()}
    rewards, *lengths = (len(_points(history, name)) >= MIN_STEPS for name in (REWARD, *LENGTH_UNITS))
    judged |= {"reward-flat": rewards, "stalled": rewards, "lengths-explode": any(lengths)}
    judged |= {
        "nothing-trains": "rows/trained" in last,
        "off-policy": any("/least_" in name for name in last),
        "slow-groups-lost": "survivors/latency/z" in last,
        "penalty-unused": LONGEST in last,
        "divisor-unused": LONGEST in last,
    }
    return [name for name in symptoms() if not judged.get(name, True)]  # some share a rule


def verdict(numbers: Numbers, history: History = ()) -> str:
    """Say in a sentence whether the reward rises. If it does not, add the most urgent advisory.

    Args:
        numbers: as for :func:`advise`.
        history: as for :func:`advise`.

    Example:
        >>> verdict({"reward/all/mean": 0.5})
        'The mean reward is 0.5.'
    """
    return advice_at(numbers, history).verdict


def advice_at(numbers: Numbers, history: History = ()) -> Advice:
    """Return :func:`verdict` and :func:`advise` for the same arguments."""
    history = history or [(0, numbers)]
    advisories = advise(numbers, history)
    return Advice(_verdict(history, advisories), advisories, unchecked(history))


def _verdict(history: History, advisories: Sequence[Advisory]) -> str:
    trend = _reward_trend(history)
    if trend is None:
        return "No reward was recorded."
    if trend.steps == 1:
        return f"The mean reward is {trend.last:.3g}."
    words = f"The mean reward {trend.predicate}"
    if trend.kind == "short":
        return f"{words}: {trend.steps} steps are too few to say whether it learns."
    others = [each.text for each in advisories if each.name not in ("reward-flat", "stalled")]
    if trend.kind == "rose" or not others:
        return f"{words}."
    return f"{words}. {others[0]}"


def _points(history: History, name: str) -> list[tuple[int, float]]:
    """(step, value) for each step whose number exists and is finite."""
    known = ((step, numbers[name]) for step, numbers in history if name in numbers)
    return [(step, value) for step, value in known if math.isfinite(value)]


def _bound(rule: Bound, history: History) -> Advisory | None:
    recent = [(step, each) for step, each in history[-RECENT:] if rule.holds(each)]
    points = _points(recent, rule.number)
    if not points or not rule.fires(value := mean_over(points).value):
        return None
    text = rule.says.format(share=percent(value), value=f"{value:.3g}")
    if len(history) > 1:
        text += f" ({'' if rule.zero or len(points) == 1 else 'mean of '}{mean_over(points).window})"
    solved = {key: _points(recent, key) for key in ("solve_all", "solve_none")}
    shares = {key: mean_over(points).value if points else 0.0 for key, points in solved.items()}
    if rule.also and any(shares.values()):
        text += f". {rule.also.format(**{key: percent(share) for key, share in shares.items()})}"
    name = next((case for key, case in rule.cases.items() if shares[key] > value / 2), rule.name)
    steps = [step for step, each in history if rule.holds(each) and rule.fires(each[rule.number])]
    return Advisory(name, f"{text}.", rule.number, tuple(steps))


def _least(numbers: Numbers) -> list[Advisory]:
    """Check numbers ``<name>_…`` of stages that also record their option ``least_<name>``."""
    found = []
    for bound, least in numbers.items():
        stage, _, option = bound.partition("/least_")
        for key, value in numbers.items() if option else ():
            if key.startswith(f"{stage}/{option}_") and value < least:
                words = f"{stage}: {key.removeprefix(f'{stage}/')} is {value:.3g}, below {least:g}"
                found.append(Advisory("off-policy", f"{words} (least_{option}).", key, ()))
    return found


def _unused(numbers: Numbers) -> list[Advisory]:
    """Find length penalties, and fixed divisors of the loss, that are far above the longest response."""
    found = []
    longest = numbers.get(LONGEST, math.inf)
    for name, free in numbers.items():
        stage, _, last = name.rpartition("/")
        if last == "unpunished" and numbers.get(f"{stage}/reward_changed") == 0 and 2 * longest <= free:
            words = f"{stage} changed 0 rewards: the longest response has {longest:,.0f} tokens"
            words += f", and the stage punishes responses above {free:,.0f}."
            found.append(Advisory("penalty-unused", words, name, ()))
        if last == "divisor" and DIVISOR * longest < free:
            words = (
                f"{stage} divides the loss of a rollout by {free:,.0f} tokens, and the longest response has"
            )
            found.append(Advisory("divisor-unused", f"{words} {longest:,.0f}.", name, ()))
    return found


def _reward_trend(history: History) -> Trend | None:
    points = _points(history, REWARD)
    if not points:
        return None
    known = [numbers for _, numbers in history if math.isfinite(numbers.get(REWARD, math.nan))]
    low = min(numbers.get("reward/all/min", numbers[REWARD]) for numbers in known)
    high = max(numbers.get("reward/all/max", numbers[REWARD]) for numbers in known)
    return trend_of(points, low=low, high=high)


def _trends(history: History) -> list[Advisory]:
    """Check the rules that need several steps."""
    found = []
    trend = _reward_trend(history)
    if trend is not None and trend.kind in ("flat", "stalled", "fell"):
        name = "stalled" if trend.kind == "stalled" else "reward-flat"
        found.append(Advisory(name, f"The mean reward {trend.predicate}.", REWARD, ()))
    for number, unit in LENGTH_UNITS.items():
        lengths = _points(history, number)
        first, _, last = quarter_means(lengths) if len(lengths) >= MIN_STEPS else [StepMean(0.0, ())] * 3
        if last.value > LENGTHS * first.value:
            words = f"Responses grew from {_said(first, ',.3g')} to {_said(last, ',.3g')} {unit} on average"
            found.append(Advisory("lengths-explode", f"{words}.", number, ()))
    return found


def _said(mean: StepMean, digits: str = ".3g") -> str:
    return f"{mean.value:{digits}} ({mean.window})"


# -- whether a number rises over the steps ------------------------------------------------------------------


class Trend(NamedTuple):
    """How a number changed over its steps."""

    kind: Literal["short", "rose", "flat", "fell", "stalled"]
    steps: int
    last: float
    predicate: str
    """The predicate of a sentence whose subject is the number."""


def trend_of(points: Sequence[tuple[int, float]], *, low: float, high: float) -> Trend:
    """Say how a number changed over its steps.

    The rule uses range = high − low, the means of quarters of the steps (:func:`quarter_means`), and the
    variances s² of the n values of a quarter (divisor n − 1). √(s₁²/n + s₄²/n) is the standard error of a
    difference of means. With small = max(0.02 · range, 2 · √(s₁²/n + s₄²/n))::

        short     fewer than 12 steps
        fell      mean(Q₄) − mean(Q₁) < −small
        flat      |mean(Q₄) − mean(Q₁)| ≤ small
        stalled   mean(Q₄) − mean(Q₃) ≤ 0.02 · range, and high − mean(Q₄) > 0.1 · range
        rose      else

    The first line that holds counts. A number near its top, high − mean(Q₄) ≤ 0.1 · range, is not flat. A
    change of 1e-9 of the greatest value does not count, because rounding may cause it.

    Args:
        points: (step, value), at least one.
        low: the least value seen, for example of any rollout.
        high: the greatest value seen.

    Example:
        >>> trend_of(list(enumerate([0.0] * 4 + [0.5] * 8)), low=0.0, high=1.0).predicate
        'rose from 0 (steps 0 to 2) to 0.5 (steps 9 to 11) and no longer rises: it was 0.5 in steps 6 to 8'
    """
    steps, (first, before, last) = len(points), quarter_means(points)
    ends = f"from {_said(first)} to {_said(last)}"
    if steps < MIN_STEPS:
        return Trend("short", steps, last.value, f"went {ends}")
    rise, late = last.value - first.value, last.value - before.value
    small = max(SMALL * (high - low), ROUNDED * max(abs(low), abs(high)))
    noise = 2 * math.sqrt(_squared_error(points[: steps // 4]) + _squared_error(points[-(steps // 4) :]))
    at_top = high - last.value <= AT_THE_TOP * (high - low)
    stays = f"{first.value:.3g} in {first.window}, {last.value:.3g} in {last.window}"
    if small < abs(rise) <= noise:
        stays += f", which is within two standard errors, {noise:.2g}"
    if rise < -max(small, noise):
        return Trend("fell", steps, last.value, f"fell {ends}")
    if rise <= max(small, noise) and not (at_top and high > low):
        return Trend("flat", steps, last.value, f"is flat: {stays}")
    if late <= small and not at_top:
        words = f"rose {ends} and no longer rises: it was {before.value:.3g} in {before.window}"
        return Trend("stalled", steps, last.value, words)
    if rise <= max(small, noise):
        return Trend("rose", steps, last.value, f"stays near the greatest seen: {stays}")
    return Trend("rose", steps, last.value, f"rose {ends}")


def _squared_error(points: Sequence[tuple[int, float]]) -> float:
    """The square of the standard error of the mean of three points or more."""
    mean = mean_over(points).value
    return sum((value - mean) ** 2 for _, value in points) / (len(points) - 1) / len(points)


# -- from a symptom to the number that shows it, what it means, and the overrides that change it -----------


class Setup(NamedTuple):
    """How a run of the command was set up. This decides which remedies the run can use."""

    config: DictConfig
    """Composed."""
    overrides: Sequence[str] = ()
    """The overrides that were typed."""


class Remedy(NamedTuple):
    """Something to do about a symptom."""

    text: str
    overrides: str
    """The overrides to type after ``headrace``; empty: the remedy needs none."""

    def under(self, setup: Setup | None) -> Remedy | None:
        """Leave the overrides out if the run lacks their options. None: the run has all values or parts.

        Args:
            setup: the setup of the run. None (in Python): the remedy stays unchanged.

        Example:
            >>> setup = Setup(OmegaConf.create({"pipeline": {"stages": {"filter": {"action": "mask"}}}}))
            >>> Remedy("Drop them", "pipeline.stages.filter.action=drop").under(setup).overrides
            'pipeline.stages.filter.action=drop'
            >>> Remedy("Sample more rollouts", "group_size=16").under(setup)
            Remedy(text='Sample more rollouts', overrides='')
        """
        if setup is None or not self.overrides:
            return self
        asked = {each: OmegaConf.from_dotlist([each]) for each in self.overrides.split()}
        paths = {each: each.partition("=")[0] for each in asked}
        if all(
            each in setup.overrides
            or OmegaConf.select(setup.config, path, default=ABSENT) == OmegaConf.select(asked[each], path)
            for each, path in paths.items()
        ):
            return None
        if (added := added_parts(self.overrides)) and added <= part_words(setup.config):
            return None
        if {"task", "pipeline"} & {*paths.values()}:
            return self
        known = all(
            OmegaConf.select(setup.config, path, default=ABSENT) is not ABSENT for path in paths.values()
        )
        return self if known else self._replace(overrides="")


@cache
def added_parts(overrides: str) -> frozenset[tuple[str, str, str]]:
    """The words of the parts that ``grpo`` has not; of a recipe without such parts, all its own words.

    Example:
        >>> sorted(added_parts("pipeline.stages.filter.also=not_truncated"))
        [('headrace.transforms.NotTruncated', '_target_', 'headrace.transforms.NotTruncated')]
        >>> added_parts("pipeline.stages.filter.action=drop")  # an option of a part that grpo has
        frozenset()
    """
    typed = [each for each in overrides.split() if each.startswith("pipeline")]
    if not typed:
        return frozenset()
    added = part_words(compose_config("load", *for_hydra(typed))) - part_words(compose_config("load"))
    new = {word for word in added if (word[0], "_target_", word[0]) in added}
    return frozenset(new or (added if overrides.startswith("pipeline=") else ()))


def part_words(config: DictConfig) -> set[tuple[str, str, str]]:
    """The options of all stages, criteria and terms that are words: class, option and value of each."""
    stages = OmegaConf.select(config, "pipeline.stages")
    complete_stages(pipeline := OmegaConf.create({"stages": stages}))

    def words(node: Any) -> Iterator[tuple[str, str, str]]:
        for key, value in node.items() if isinstance(node, dict) else ():
            yield from words(value)
            if isinstance(value, str) and "_target_" in node and "${" not in value:
                yield node["_target_"], key, value

    return set(words(OmegaConf.to_container(pipeline)))


class Symptom(NamedTuple):
    """Something that goes wrong, and how a report shows it."""

    name: str
    """The name that advisories and links use."""
    title: str
    shows: str
    """The number of the report that shows the symptom, and the rule by which it becomes an advisory."""
    means: str
    needs: str
    """The data that the check needs."""
    remedies: tuple[Remedy, ...]


@cache
def symptoms() -> dict[str, Symptom]:
    """All symptoms by name, most urgent first.

    Example:
        >>> symptoms()["stalled"].title
        'The reward has stopped rising'
    """
    return {
        str(name): Symptom(
            str(name),
            node.title,
            node.shows,
            node.means,
            node.needs,
            tuple(Remedy(**{"overrides": "", **each}) for each in node.remedies),
        )
        for name, node in _symptom_nodes().items()
    }


@cache
def _symptom_nodes() -> DictConfig:
    return DictConfig(OmegaConf.create((files(__package__) / "symptoms.yaml").read_text(encoding="utf-8")))
