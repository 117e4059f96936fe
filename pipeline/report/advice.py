"""What the numbers of a step, and of those before it, advise to look at; and whether the reward rises."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from omegaconf import DictConfig, OmegaConf

from headrace.pipeline.composing.compose import leaves

from .over_steps import MIN_STEPS, RECENT, UNITS, Numbers, StepMean, mean_over, percent, quarter_means

History = Sequence[tuple[int, Numbers]]
REWARD, LENGTH = "reward/all/mean", "response_length/mean"
LENGTH_UNITS = {LENGTH: "tokens", "response_characters/mean": "characters"}  # a step has one of them
LENGTHS = 2.0  # times as long as in the beginning is too long
NAMED = 6  # steps that a sentence names
LONGEST = "response_length/max"
DIVISOR = 10  # times as long as the longest response is too long
PYTHON = "In Python"  # begins a remedy for who has a loop of their own
LEFT = {  # why most rows left, where none was trained: by the number that counts them
    "out/gate/incomplete": "incomplete",
    "out/filter/zero_variance": "equal_rewards",
    "out/split/remainder": "remainder",
    "out/gate/empty": "no_tokens",
    "out/pipeline/no_loss_tokens": "no_tokens",
}
SAID_OF_CAUSE = {  # behind "Nothing was trained"
    "": "",
    "incomplete": ": most rows were in incomplete groups",
    "equal_rewards": ": most rows were in groups with equal rewards",
    "remainder": ": there were too few rollouts for the minibatches",
    "no_tokens": ": most rows had no token in the loss",
}
COUNTED = re.compile(r"\{share\} of the (rollouts|groups) ")  # begins what is said of a share of them
BEYOND = " It is "  # begins the sentence that says at which steps
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
    cause: str = ""
    """Why, where that is known: ``solve_none`` or ``solve_all``; where nothing trains, why most rows left
    (``incomplete``, ``equal_rewards``, ``remainder``, ``no_tokens``). Remedies for others are left out."""
    because: str = ""
    """The symptom that causes it, which comes before it; empty: none of those that are found."""
    certain: bool = False
    """Whether that symptom leaves no gradient at any step; else it is probably a cause among others."""
    share: float = 0.0
    """Of the rollouts or groups that it concerns, from 0 to 1; 0 if it is not about some of them."""

    @property
    def reason(self) -> str:
        """``Because of …``, and whether that is certain; empty: no cause is known."""
        words = "Because" if self.certain else "Probably, in part, because"
        return f"{words} of {self.because}." if self.because else ""


class Advice(NamedTuple):
    """What the numbers up to a step say."""

    verdict: str
    advisories: list[Advisory]
    """What is worth a look, most urgent first."""
    unchecked: list[str]
    """Names of symptoms that nobody can tell, for lack of data."""


class Bound(NamedTuple):
    """A rule of one number: its mean over the last five steps is above the bound, or exactly 0."""

    name: str
    """Of the symptom, whose ``bound`` in symptoms.yaml this is."""
    number: str
    says: str
    """The sentence, with ``{share}`` or ``{value}`` for the mean."""
    above: float = math.inf
    zero: bool = False
    """Whether exactly 0 is worth a sentence, of a number that is never below."""
    also: str = ""
    """A sentence behind it, where a group is solved by all of its rollouts, or by none."""
    solve_none: str = ""
    """In place of ``also``, where groups that no rollout solves are at least half of the number."""
    solve_all: str = ""
    """In place of ``also``, where groups that every rollout solves are at least half of it."""
    each_step: bool = False
    """Whether each step is judged by itself, this one and those before; not the mean of the last five."""
    least_groups: int = 0
    """Steps of fewer groups are not judged."""

    def holds(self, numbers: Numbers) -> bool:
        """Whether a step is judged by it."""
        return self.number in numbers and numbers.get("groups/in", 0.0) >= self.least_groups

    def fires(self, value: float) -> bool:
        """Whether a value is worth the sentence."""
        return value > self.above or (self.zero and value == 0)

    def concerns(self, value: float, history: History) -> float:
        """The share of rollouts or groups that a value of the number is about; 0: not of some of them."""
        if self.zero or COUNTED.match(self.says):
            return 1.0 if self.zero else value
        rollouts = _points(history, "rollouts/in") if self.number == "rollouts/no_reward" else []
        return value / max(mean_over(rollouts).value, 1.0) if rollouts else 0.0

    @property
    def limit(self) -> str:
        """The bound as a sentence names it."""
        return "0" if self.zero else f"above {percent(self.above) if '{share}' in self.says else self.above}"


@cache
def bounds() -> list[Bound]:
    """The rules of one number, most urgent first."""
    nodes = _symptom_nodes().items()
    return [Bound(str(name), **node.bound) for name, node in nodes if "bound" in node]


@cache
def numbers_read() -> list[str]:
    """The names of the numbers of steps before that rules read."""
    counts = [
        LONGEST,
        *(f"{unit}/{which}" for unit in UNITS for which in ("in", "trained")),
        "solve_all",
        "solve_none",
    ]
    causes = [number for node in _symptom_nodes().values() for number in node.get("because", {}).values()]
    judged = [*(rule.number for rule in bounds()), *(number for number in causes if number)]
    return [*counts, *LEFT, REWARD, "reward/all/min", "reward/all/max", *LENGTH_UNITS, *judged]


def advise(numbers: Numbers, history: History = ()) -> list[Advisory]:
    """What is worth a look at a step.

    First, what stops all training; then, what concerns the greatest share of rollouts or groups; then, what
    is not about some of them. A cause comes before its effects.

    ========================= ===============================================================================
    ``nothing-trains``        no row was trained at this step, or at one before
    a zero                    the number is exactly 0 at each of the last five steps: `learning-rate-zero`,
                              `gradient-zero`
    a bound                   the mean of the number over the last five steps is above its bound:
                              `advantage-all-zero` ½ of ``frac_reward_zero_std``, `rollouts-truncated` ¼,
                              `rollouts-failed`, `rollouts-empty` and `groups-incomplete` a tenth,
                              `trained-without-reward` 0 rollouts,
                              `gradient-spikes` ½ of the gradient in one of four groups or more,
                              `stale` 2 versions in the mean
    `off-policy`              a stage's number is below what it was told to warn of: ``<stage>/ess_token``
                              below ``<stage>/least_ess``, and so for every option ``least_<name>``
    `penalty-unused`          a stage that punishes length changed no reward, and the longest response is at
                              most half as long as what it punishes
    `divisor-unused`          the longest response has less than a tenth of the tokens by which `LossWeight`
                              divides (``constant``)
    `reward-flat`, `stalled`  the reward does not move (:func:`trend_of`)
    each step                 the number is above its bound at this step or at one before: `rewards-missing`
    `lengths-explode`         over at least 12 steps: the mean response length of their last quarter is more
                              than twice that of the first
    ========================= ===============================================================================

    Args:
        numbers: of the step.
        history: (step, numbers) of the steps before it and of itself; empty: of no others.

    Example:
        >>> for advisory in advise({"rows/in": 8.0, "rows/trained": 4.0, "rollouts/truncated": 0.5}):
        ...     print(f"{advisory.name}: {advisory.text}")
        rollouts-truncated: 50 % of the rollouts were truncated.
    """
    history = history or [(0, numbers)]
    found = []
    if steps := [step for step, each in history if each.get("rows/trained") == 0]:
        at, cause = f" {said_at(steps, len(history))}" if len(history) > 1 else "", _why_left(history)
        said = f"Nothing was trained{at}{SAID_OF_CAUSE[cause]}."
        found = [Advisory("nothing-trains", said, "rows/trained", tuple(steps), cause, share=1.0)]
    found += [each for rule in bounds() if (each := _bound(rule, history)) is not None]
    found += [*_least(numbers), *_trends(history), *_unused(numbers)]
    return _causes_first(sorted(found, key=lambda each: -each.share), history)


def _why_left(history: History) -> str:
    """Why most rows left at the steps that trained none; empty: for another reason, or nobody knows."""
    left: dict[str, float] = {}
    for _, each in history:
        if each.get("rows/trained") == 0:
            for number, why in LEFT.items():
                left[why] = left.get(why, 0.0) + each.get(number, 0.0)
    return max(left, key=lambda why: left[why]) if any(left.values()) else ""


def _causes_first(found: Sequence[Advisory], history: History) -> list[Advisory]:
    """The advisories, each behind the one that causes it (``because`` in symptoms.yaml)."""
    recent = [each for _, each in history[-RECENT:]]
    no_gradient = {"rows/trained", *(rule.number for rule in bounds() if rule.zero)}
    ordered: list[Advisory] = []
    for each in found:
        for name, number in _symptom_nodes().get(each.name, {}).get("because", {}).items():
            part, whole = (sum(numbers.get(key, 0.0) for numbers in recent) for key in (number, each.number))
            other = next((other for other in found if other.name == name), None)
            if other is not None and (number is None or 2 * part >= whole):
                always = other.number in no_gradient and len(other.steps) == len(history)
                each = each._replace(because=str(name), certain=always)
                break
        ordered.append(each)
    for each in [*ordered]:
        if each.because:
            at = next(i for i, other in enumerate(ordered) if other.name == each.because)
            if at > ordered.index(each):
                ordered.insert(ordered.index(each), ordered.pop(at))
    return ordered


def broken_by(numbers: Numbers) -> list[str]:
    """The names of the rules of one number that a step breaks by itself."""
    nothing = ["nothing-trains"] if numbers.get("rows/trained") == 0 else []
    return [
        *nothing,
        *(rule.name for rule in bounds() if rule.holds(numbers) and rule.fires(numbers[rule.number])),
    ]


def unchecked(history: History) -> list[str]:
    """The names of the symptoms that cannot be told, because the history lacks the data that they need.

    :attr:`Symptom.needs` says which data that is.

    Args:
        history: as for :func:`advise`.

    Example:
        >>> sorted(set(symptoms()) - set(unchecked([(0, {"rows/trained": 4.0})])))
        ['nothing-trains']
    """
    last = history[-1][1] if history else {}
    judged = {rule.name: any(rule.holds(each) for _, each in history[-RECENT:]) for rule in bounds()}
    rewards, *lengths = (len(_points(history, name)) >= MIN_STEPS for name in (REWARD, *LENGTH_UNITS))
    judged |= {"reward-flat": rewards, "stalled": rewards, "lengths-explode": any(lengths)}
    judged |= {
        "nothing-trains": "rows/trained" in last,
        "off-policy": any("/least_" in name for name in last),
        "penalty-unused": LONGEST in last,
        "divisor-unused": LONGEST in last,
    }
    return [name for name in symptoms() if not judged[name]]


def verdict(numbers: Numbers, history: History = ()) -> str:
    """Whether the reward rises, in a sentence; and where it does not, the most urgent advisory.

    Args:
        numbers: as for :func:`advise`.
        history: as for :func:`advise`.

    Example:
        >>> verdict({"reward/all/mean": 0.5})
        'The mean reward is 0.5.'
    """
    return advice_at(numbers, history).verdict


def advice_at(numbers: Numbers, history: History = ()) -> Advice:
    """The :func:`verdict` and what :func:`advise` says, of the same arguments."""
    history = history or [(0, numbers)]
    advisories = advise(numbers, history)
    said = _verdict(history, advisories) + _shaped(numbers)
    return Advice(said, advisories, unchecked(history))


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
    return f"{words}. {others[0].partition(BEYOND)[0]}"  # at which steps, the advisory says


def _shaped(numbers: Numbers) -> str:
    """Which stages have changed the reward, and the mean before; empty: none."""
    stages = [
        name.removesuffix("/reward_changed")
        for name, share in numbers.items()
        if name.endswith("/reward_changed") and share
    ]
    if not stages or REWARD not in numbers:
        return ""
    graded = [value for name, value in numbers.items() if name.endswith("/reward_mean")]
    before = f", and {graded[0]:.3g} as graded" if graded else ""
    return f" At this step it is {numbers[REWARD]:.3g} after {' and '.join(stages)}{before}."


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


def _points(history: History, name: str) -> list[tuple[int, float]]:
    """(step, value) of the steps that have the number, where it is finite."""
    known = ((step, numbers[name]) for step, numbers in history if name in numbers)
    return [(step, value) for step, value in known if math.isfinite(value)]


def _at_each(rule: Bound, history: History) -> Advisory | None:
    """A rule that no mean hides: each step that breaks it is named, however long ago."""
    found = {step: each[rule.number] for step, each in history if rule.holds(each)}
    found = {step: value for step, value in found.items() if rule.fires(value)}
    if not found:
        return None
    where, most = said_at([*found], len(history)), max(found, key=lambda step: found[step])
    text = rule.says.format(share=percent(found[most]), value=f"{found[most]:.3g}")
    if len(set(found.values())) > 1:
        text = f"Up to {text} (step {most:,}).{BEYOND}{rule.limit}"
    share = rule.concerns(found[most], history)
    return Advisory(rule.name, f"{text} {where}".strip() + ".", rule.number, tuple(found), share=share)


def _bound(rule: Bound, history: History) -> Advisory | None:
    if rule.each_step:
        return _at_each(rule, history)
    judged = [(step, each) for step, each in history if rule.holds(each)]
    recent = [(step, each) for step, each in judged if step >= history[-RECENT:][0][0]]
    means = {
        key: mean_over(points)
        for key in (rule.number, "solve_all", "solve_none")
        if (points := _points(recent, key))
    }
    if rule.number not in means or not rule.fires(means[rule.number].value):
        return None
    value = means[rule.number].value
    longer = {} if rule.zero or len(history) <= RECENT else {key: _points(judged, key) for key in means}
    whole = {key: mean_over(points).value for key, points in longer.items()}
    window, all_steps = "", ""
    if len(history) > 1:
        window = means[rule.number].window
        window = window if rule.zero or len(recent) == 1 else f"mean of {window}"
        if whole:
            all_steps = f"over all {len(longer[rule.number]):,} steps"
            said, all_said = (
                percent(each) if "{share}" in rule.says else f"{each:.3g}"
                for each in (value, whole[rule.number])
            )
            window += f"; {all_steps} {all_said}" if all_said != said else f", and {all_steps}"
        window = f" ({window})"
    steps = [step for step, each in judged if rule.fires(each[rule.number])]
    text = f"{rule.says.format(share=percent(value), value=f'{value:.3g}')}{window}."
    if where := said_at(steps, len(judged)):
        text += f"{BEYOND}{rule.limit} {where}."
    solved = {key: means[key].value if key in means else 0.0 for key in ("solve_all", "solve_none")}
    cause = ""
    if rule.also and any(solved.values()):
        cause = _solved_by(solved, value)
        if whole and cause != _solved_by(whole, whole[rule.number]):
            cause = ""  # of these steps alone
        words = {"solve_none": rule.solve_none, "solve_all": rule.solve_all}.get(cause, rule.also)
        shares = {
            key: said + (f" ({all_steps} {all_said})" if all_said not in ("", said) else "")
            for key, share in solved.items()
            for said, all_said in [(percent(share), percent(whole[key]) if key in whole else "")]
        }
        text += f" {words.format(**shares)}."
    return Advisory(rule.name, text, rule.number, tuple(steps), cause, share=rule.concerns(value, recent))


def _solved_by(shares: Numbers, equal: float) -> str:
    """``solve_none`` or ``solve_all``, which is greater, if it is half of the groups of equal rewards."""
    none, every = (shares.get(key, 0.0) for key in ("solve_none", "solve_all"))
    cause = "solve_none" if none > every else "solve_all"
    return cause if none != every and 2 * max(none, every) >= equal else ""


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


def _unused(numbers: Numbers) -> list[Advisory]:
    """A penalty of length begins far above the longest response; or a fixed divisor of the loss is."""
    found = []
    longest = numbers.get(LONGEST, math.inf)
    for name, free in numbers.items():
        stage, _, last = name.rpartition("/")
        if last == "unpunished" and numbers.get(f"{stage}/reward_changed") == 0 and 2 * longest <= free:
            words = f"{stage} changed 0 rewards: the longest response has {longest:,.0f} tokens"
            words += f", and it punishes those above {free:,.0f}."
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
    """What only several steps can say."""
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
            step, before, after = jump_of(lengths)
            if after - before >= (last.value - first.value) / 2:
                words += f". They jump at step {step:,}, from {before:,.3g} to {after:,.3g}"
            else:
                words += f". They rise most around step {step:,}"
            found.append(Advisory("lengths-explode", f"{words}.", number, (step,)))
    return found


def jump_of(points: Sequence[tuple[int, float]]) -> tuple[int, float, float]:
    """The step at which a number rises to another level, and its values at the step before and there.

    Of all cuts into steps before and from a step on, the one that leaves the least squared error.

    Example:
        >>> jump_of([(0, 2.0), (1, 3.0), (2, 8.0), (3, 9.0)])
        (2, 3.0, 8.0)
    """
    values = [value for _, value in points]
    total, before, best = sum(values), 0.0, (-math.inf, -1)
    for at in range(1, len(values)):
        before += values[at - 1]
        apart = (total - before) / (len(values) - at) - before / at
        best = max(
            best, (math.copysign(apart**2, apart) * at * (len(values) - at), at), key=lambda each: each[0]
        )
    at = best[1]
    return points[at][0], values[at - 1], values[at]


def _said(mean: StepMean, digits: str = ".3g") -> str:
    return f"{mean.value:{digits}} ({mean.window})"


# -- whether a number rises over the steps, by a rule that can be looked up ---------------------------------


class Trend(NamedTuple):
    """How a number went."""

    kind: Literal["short", "rose", "flat", "fell", "stalled"]
    steps: int
    last: float
    predicate: str
    """Of the sentence whose subject is the number."""


def trend_of(points: Sequence[tuple[int, float]], *, low: float, high: float) -> Trend:
    """How a number went over its steps.

    With the range high − low, the means of quarters of the steps (:func:`quarter_means`), the variances s² of
    their n values (divisor n − 1) and the standard error of a difference of means, and
    small = max(0.02 · range, 2 · √(s₁²/n + s₄²/n))::

        short     fewer than 12 steps
        fell      mean(Q₄) − mean(Q₁) < −small
        flat      |mean(Q₄) − mean(Q₁)| ≤ small
        stalled   mean(Q₄) − mean(Q₃) ≤ 0.02 · range, and high − mean(Q₄) > 0.1 · range
        rose      else

    where the first that is so counts. What is near its top, high − mean(Q₄) ≤ 0.1 · range, is not flat; and
    1e-9 of the greatest is no move, which rounding may make.

    Args:
        points: (step, value), at least one.
        low: least that was seen, of any rollout say.
        high: greatest.

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
    """How a run was set up, by which it is known which remedies it can take."""

    config: DictConfig
    """Composed; of a run in Python it has no task (:func:`setup_in_python`)."""
    overrides: Sequence[str] = ()
    """That were typed."""


class Remedy(NamedTuple):
    """Something to do."""

    text: str
    overrides: str
    """To type behind ``headrace``; empty: it is done elsewhere."""
    elsewhere: str = ""
    """Where to do it, if the task or its recipe does not have these options."""
    when: str = ""
    """The cause that it is against; empty: any."""
    unless: str = ""
    """The cause that it does not help against."""

    def fits(self, cause: str) -> bool:
        """Whether it helps against a cause (:attr:`Advisory.cause`)."""
        return self.when in ("", cause) and self.unless != (cause or None)

    def under(self, setup: Setup | None) -> Remedy | None:
        """The remedy as a run of this setup can take it; None where there is nothing to say.

        A remedy that the run follows already is left out, and so is one in Python, except for a run in
        Python: there, options are those of Python (:func:`in_python`). Options that it does not have are not
        shown: what to do elsewhere is said in words.

        Another task over the same dump is the whole command, with the other overrides that were typed.

        Args:
            setup: of the run; None: every option is shown.
        """
        if setup is None:
            return self
        config, typed = setup.config, self.overrides.split()
        if self.overrides.startswith("task="):
            if "source" in config and setup.overrides:
                typed = [typed[0], *(each for each in setup.overrides if not each.startswith("task="))]
            return self._replace(overrides=f"headrace {shlex.join(typed)}")
        python = "task" not in config
        if follows(config, self.overrides) or (self.text.startswith(PYTHON) and not python):
            return None
        if has_options(config, self.overrides):
            return self._replace(overrides=in_python(self.overrides)) if python else self
        if not self.elsewhere:
            return None
        return self._replace(text=f"{self.text}: {self.elsewhere}", overrides="", elsewhere="")


def remedy_of(
    advisory: Advisory, setup: Setup | None = None, given: Collection[Remedy] = ()
) -> Remedy | None:
    """The first thing to do about an advisory: an option to set, where there is one.

    Args:
        advisory: of a symptom.
        setup: as for :meth:`Remedy.under`.
        given: remedies that were said before, which are not said again.

    Example:
        >>> remedy_of(Advisory("lengths-explode", "", "", ())).overrides
        'pipeline.stages.weight.unit=token'
    """
    symptom = symptoms().get(advisory.name)
    fitting = [
        remedy
        for each in (symptom.remedies if symptom else ())
        if each.fits(advisory.cause)
        and (remedy := each.under(setup)) is not None
        and not any((remedy.overrides or remedy.text) == (other.overrides or other.text) for other in given)
    ]
    return next((remedy for remedy in fitting if remedy.overrides), fitting[0] if fitting else None)


def has_options(config: DictConfig, overrides: str) -> bool:
    """Whether a composed configuration takes these overrides.

    Another task, or another recipe, has options of its own.

    Example:
        >>> config = OmegaConf.create({"task": "replay", "pipeline": {"stages": {"gate": {"empty": 1}}}})
        >>> has_options(config, "pipeline.stages.gate.empty=exclude"), has_options(config, "group_size=16")
        (True, False)
    """
    paths = [each.partition("=")[0] for each in overrides.split()]
    if "task" in paths:
        return True
    if "pipeline" in paths:
        return all(path.partition(".")[0] == "pipeline" for path in paths)
    chosen = [path.partition("@")[2] for path in paths if "@" in path]
    return all(
        _has(config, path.partition("@")[2] or path)
        or any(path.removeprefix("+").startswith(f"{each}.") for each in chosen)
        for path in paths
    )


def setup_in_python(options: Mapping[str, Mapping[str, Any]]) -> Setup | None:
    """The setup of a run in Python, for :meth:`Remedy.under`; None if its options are not known.

    Args:
        options: by stage, those of the pipeline under the name ``""``; empty: nobody knows them.

    Example:
        >>> setup = setup_in_python({"filter": {"action": "drop"}})
        >>> follows(setup.config, "pipeline.stages.filter.action=drop")
        True
    """
    if not options:
        return None
    plain = {
        stage: {
            name: value if _is_plain(value) else {"_target_": type(value).__name__}
            for name, value in own.items()
        }
        for stage, own in options.items()
    }
    of_pipeline = plain.pop("", {})
    return Setup(OmegaConf.create({"pipeline": of_pipeline | {"stages": plain}}))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def in_python(overrides: str) -> str:
    """Overrides as arguments of :func:`headrace.decide` and :func:`headrace.load_pipeline`.

    Example:
        >>> in_python("pipeline=dapo pipeline.stages.overlong.cache=1024")
        'recipe="dapo", stages={"overlong": {"cache": 1024}}'
        >>> in_python("pipeline=tis +criterion@pipeline.stages.filter.also=fresh")
        'load_pipeline("tis", "+criterion@pipeline.stages.filter.also=fresh")'
    """
    recipe = [f'"{each[9:]}"' for each in overrides.split() if each.startswith("pipeline=")]
    typed = [each for each in overrides.split() if not each.startswith("pipeline=")]
    if any("@" in each or each.startswith("+") for each in typed):
        given = [*(recipe or ["recipe"]), *(f'"{each}"' for each in typed)]
        return f"load_pipeline({', '.join(given)})"
    rest = OmegaConf.from_dotlist(typed)
    options: Any = OmegaConf.to_container(rest.get("pipeline", OmegaConf.create({})))
    given = [f"{name}={value!r}".replace("'", '"') for name, value in options.items()]
    return ", ".join([*(f"recipe={name}" for name in recipe), *given])


def follows(config: DictConfig, overrides: str) -> bool:
    """Whether a composed configuration has the values of all of these overrides already.

    A recipe (``pipeline=NAME``) is there if all stages that its file adds are, and each option that it sets
    to a word or to null: those choose how to compute, and numbers may be tuned.

    Example:
        >>> stages = {"filter": None, "advantage": {"scale": "mean"}}
        >>> config = OmegaConf.create({"pipeline": {"stages": stages}})
        >>> follows(config, "pipeline.stages.filter=null"), follows(config, "pipeline.stages.filter=1")
        (True, False)
        >>> follows(config, "pipeline=maxrl"), follows(config, "pipeline=mgpo")
        (True, False)
    """
    typed = overrides.split()
    return bool(typed) and all(
        has_recipe(config, asked[path])
        if path == "pipeline"
        else _has(config, path) and OmegaConf.select(config, path) == OmegaConf.select(asked, path)
        for path, asked in ((each.partition("=")[0], OmegaConf.from_dotlist([each])) for each in typed)
    )


def has_recipe(config: DictConfig, name: str) -> bool:
    """Whether a composed configuration has what the file of a recipe adds to its base."""
    own: Any = OmegaConf.to_container(_conf_file("pipeline", name))
    entries = [each for entry in own.pop("defaults") if isinstance(entry, dict) for each in entry.items()]
    for entry, choice in entries:
        found = re.match(r"(?:override )?/(stage|criterion|term)@(stages\.[\w.]+)$", entry)
        part: Any = OmegaConf.select(config, f"pipeline.{found[2]}") if found else None
        if found and part is None:
            return False
        if found and found[1] != "stage":  # of a run in Python, only the name of the class is known
            target = _conf_file(found[1], choice)["_target_"].rpartition(".")[2]
            if not OmegaConf.is_dict(part) or str(part.get("_target_")).rpartition(".")[2] != target:
                return False
    return all(
        OmegaConf.select(config, f"pipeline.{path}") == value
        for path, value in leaves(own).items()
        if value is None or isinstance(value, str)
    )


@cache
def _conf_file(folder: str, name: str) -> DictConfig:
    text = (files("headrace.conf") / folder / f"{name}.yaml").read_text(encoding="utf-8")
    return DictConfig(OmegaConf.create(text))


def _has(config: DictConfig, path: str) -> bool:
    parent, _, name = path.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    return OmegaConf.is_dict(node) and name in node


class Symptom(NamedTuple):
    """Something that goes wrong, as it looks in a report."""

    name: str
    """By which advisories and links call it."""
    title: str
    shows: str
    """The number of the report that shows it, and the rule by which it becomes an advisory."""
    means: str
    needs: str
    """The data without which nobody can tell."""
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
