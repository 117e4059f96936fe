"""Define the data of the page: every key, its type and its meaning.

`page_data` makes the data, `render_page` checks it, and the modules of `page/` read it. A table is a set of
columns of one length. Entry i of all columns is one line. None is an unknown value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, TypeVar, cast, get_args, get_origin, get_type_hints, is_typeddict

Shape = TypeVar("Shape")


class RecipeStage(TypedDict):
    """A stage of the recipe."""

    name: str  # its name in the pipeline
    text: str  # the transform and its options


class PageLeft(TypedDict):
    """Counts of what left the loss at a stage for one reason. A rollout or group leaves with its last row."""

    reason: str  # the reason
    action: str  # what became of the rows: dropped, masked, excluded or carried
    rows: int  # rows that left
    rollouts: int | None  # rollouts whose last row left
    groups: int | None  # groups whose last row left
    tokens: int | None  # tokens of the rows that left
    rollouts_in_part: int | None  # other rollouts that lost rows; they stay, or count under another reason
    groups_in_part: int | None  # the same for groups


class PageLevel(TypedDict):
    """A level of the funnel: the counts in the loss after a stage."""

    name: str  # name of the stage, or `collected` for the first level
    rows: int  # rows in the loss
    rollouts: int | None  # rollouts with a row in the loss
    groups: int | None  # groups with a row in the loss
    tokens: int | None  # tokens of the rows in the loss
    out: list[PageLeft]  # what left at this stage


class Shown(TypedDict):
    """The number of groups of a large step that its tables show."""

    groups: int  # groups in the tables
    of: int  # groups in the step


class PageText(TypedDict):
    """A text, or its beginning and its end."""

    start: str  # the whole text, or its beginning
    missing: int  # number of characters left out after `start`
    end: str  # the text after the gap


class PageTokens(TypedDict):
    """A response token by token, from the first token in the loss to the last; a long one is cut."""

    texts: list[str] | None  # the text of each token
    values: dict[str, list[float | None]]  # numbers of each token, by name
    at: int  # number of tokens before the gap
    missing: int  # number of tokens left out


class Groups(TypedDict):
    """The table of groups."""

    id: list[int | str]  # the group; its label, if it has one
    label: list[str | None]  # the last user turn of its prompt, cut
    asked: list[PageText | None]  # the last user turn, if the page has room for it
    prompt: list[PageText | None]  # the whole prompt, if it is more than that turn
    rollouts: list[int]  # its rollouts that neither failed nor were aborted
    expected: list[int | None]  # number of rollouts that were dispatched for it
    compared: list[int | None]  # rollouts that the advantage compared
    baseline: list[float | None]  # their baseline, if they share one
    reward_mean: list[float | None]  # over its rollouts
    reward_std: list[float | None]  # over its rollouts, divisor n − 1
    zero_variance: list[bool]  # whether all its rewards are equal
    complete: list[bool]  # whether it has all expected rollouts
    staleness: list[int | None]  # the greatest staleness of its rows


class ShownRows(TypedDict):
    """The table of rows."""

    row: list[int]  # the row's index in the batch
    group: list[int | str]  # its group, as in the table of groups
    rollout: list[int | str]  # its rollout; its label, if it has one
    reward: list[float | None]  # the reward of its rollout
    rewards: list[list[float | None] | None]  # several rewards, which the reward adds up; None: only one
    compared: list[int | None]  # rollouts that the advantage compared with its rollout, which is included
    advantage: list[float | None]  # as trained; a mean over tokens, if it is per token
    advantage_by_row: list[float | None]  # if rows were rollouts, or under the other recipe of `versus`
    tokens: list[int | None]  # tokens in the loss mask
    weight: list[float | None]  # loss weight
    share: list[float | None]  # share of the gradient: |advantage| · loss weight · tokens, over the sum
    other_share: list[float | None]  # the share under the other recipe of `versus`
    status: list[str | None]  # how its rollout ended
    reason: list[str]  # `stage/reason` if it left the loss, else empty
    staleness: list[int | None]  # policy versions behind the trainer, or the newest row
    minibatch: list[int | None]  # index
    microbatch: list[int | None]  # index within its minibatch and rank
    rank: list[int | None]  # index
    response: list[PageText | None]  # as text, if the page has room for it
    by_token: list[PageTokens | None]  # the response with numbers, if tokens have numbers
    beside: list[dict[str, Any] | None]  # ground truth and other columns of its dump, if there is room


class PageTable(TypedDict):
    """A table of texts."""

    name: str  # what it shows
    head: list[str]  # names of the columns
    lines: list[list[str]]  # cells
    note: str  # text below the table; empty: none


class PageAdvisory(TypedDict):
    """Something to look at after a step."""

    name: str  # name of its symptom
    text: str  # a sentence, with the number


class PageRemedy(TypedDict):
    """Something to do about a symptom."""

    text: str  # what to do
    overrides: str  # overrides to type; empty: none


class PageSymptom(TypedDict):
    """A symptom and its remedies."""

    name: str  # the name that advisories use
    title: str  # the symptom in words
    shows: str  # the number that shows it
    means: str  # the cause
    remedies: list[PageRemedy]  # what to do


class PageRun(TypedDict):
    """The run that the page shows."""

    began: str  # UTC, ISO 8601
    written: str  # when the page was written, in the same form
    live: float | None  # seconds after which there may be a newer page; None: the run has ended
    restarts: list[int]  # the first step after each restart
    versions: dict[str, str]  # of headrace and its packages, by name
    overrides: list[str]  # the overrides that were typed
    config: str | None  # the resolved configuration, as YAML


class Step(TypedDict):
    """A step that can be chosen on the page."""

    step: int  # its number
    funnel: list[PageLevel]  # for all its rows: a level for the collected rows, then one for each stage
    shown: Shown  # number of its groups that the tables show
    groups: Groups  # the groups that are shown
    rows: ShownRows  # rows of these groups
    numbers: dict[str, float]  # metrics over all its rows, by name
    survivors: list[PageTable]  # groups that were lost so far, by latency, turns, length and reward
    verdict: str  # a sentence: whether the reward rises, up to this step
    advisories: list[PageAdvisory]  # most urgent first
    unchecked: list[str]  # symptoms that cannot be checked, each with the data that it needs


class PageJudgement(TypedDict):
    """The expectation of a gradient, compared with the true gradient."""

    ratio: list[float | None]  # expected / true gradient, for each parameter
    relative_bias: float | None  # length of their difference / length of the true gradient
    cosine: float | None  # cosine of the angle between the two gradients
    variance: float | None  # trace of the covariance, for one group
    scale: float | None  # length of the expected gradient along the true gradient, relative to the latter


class PageCertificate(TypedDict):
    """The certificate of one recipe on one task, or the reason why there is none."""

    recipe: str  # name of the recipe
    task: str  # name of the task
    group_size: int  # rollouts of a group
    outcomes: int  # number of outcomes of a group; all were computed
    refused: str  # why there are no numbers; empty if there are numbers
    advantage: PageJudgement  # for the advantage alone
    loss: PageJudgement  # with the recipe's own loss weights


class PageFailed(TypedDict):
    """Failed steps, which no number of the page includes."""

    said: str  # a sentence that names them
    reasons: list[str]  # why each of them failed


class PageDataRequired(TypedDict):
    """The keys that every page has."""

    title: str  # title of the page
    recipe: list[RecipeStage]  # its stages, in order
    steps: list[Step]  # in order
    curve_steps: list[int]  # the steps over which the curves are drawn
    # Metrics by name, with one value for each of `curve_steps`; `second/…` is for the second recipe of
    # `versus`.
    curves: dict[str, list[float | None]]


class PageData(PageDataRequired, total=False):
    """The data of the page of a training, a replay, a comparison or certificates."""

    symptoms: list[PageSymptom]  # the symptoms of the advisories
    failed: PageFailed  # the failed steps, if there are any
    notices: list[str]  # sentences about what the page lacks
    unsaid: list[str]  # names of numbers of tiles that the dump cannot have
    rows_kept: bool  # whether files have the rows of all steps, for `headrace view FOLDER`
    recorded: int  # number of steps of the run; `curve_steps` are all or some of them
    totals: dict[str, float]  # sums over all steps: `rows/in`, `rows/trained`, and other units
    run: PageRun  # when and how the run began
    versus: list[str]  # two recipes: that of `advantage`, and that of `advantage_by_row`
    difference: str  # a sentence that says how the two recipes differ
    certificates: list[PageCertificate]  # for a page of certificates, which has no steps


def shown_as(schema: type[Shape], value: Any) -> Shape:
    """Convert an object, and the objects in its lists, to a mapping with the keys of a schema.

    Args:
        schema: a TypedDict of this module.
        value: an object with attributes of these names, such as a NamedTuple. Other attributes are left out.
    """
    found = {}
    for key, hint in get_type_hints(schema).items():
        item = _schema_in(get_args(hint)[0]) if get_origin(hint) is list else None
        entry = getattr(value, key)
        found[key] = entry if item is None else [shown_as(item, each) for each in entry]
    return cast(Shape, found)


def check_keys(value: Mapping[str, Any], schema: type, where: str) -> None:
    """Check that a value and all values within it have the keys of their schema, and no others.

    Args:
        value: data of the page.
        schema: the TypedDict of this module that describes it.
        where: the name of the value in messages.

    Raises:
        ValueError: a key is missing, or is not in the schema.

    Example:
        >>> check_keys({"groups": 2, "off": 3}, Shown, "page.steps[0].shown")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: page.steps[0].shown must have the keys groups, of; missing: of; unknown: off. ...
    """
    hints = get_type_hints(schema)
    required = [key for key in hints if key in schema.__required_keys__]  # type: ignore[attr-defined]
    missing = [key for key in required if key not in value]
    unknown = [str(key) for key in value if key not in hints]
    if missing or unknown:
        optional = [key for key in hints if key not in required]
        raise ValueError(
            f"{where} must have the keys {', '.join(required)}"
            + (f" and may have {', '.join(optional)}" if optional else "")
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; unknown: {', '.join(unknown)}" if unknown else "")
            + f". Build it with page_data, or as {__name__}.{schema.__name__} describes it"
        )
    for key, hint in hints.items():
        if key not in value:
            continue
        if is_typeddict(hint):
            check_keys(value[key], hint, f"{where}.{key}")
        elif get_origin(hint) is list and (item := _schema_in(get_args(hint)[0])):
            for index, entry in enumerate(value[key]):
                if entry is not None or item is get_args(hint)[0]:
                    check_keys(entry, item, f"{where}.{key}[{index}]")


def _schema_in(hint: Any) -> type | None:
    """The TypedDict in a list, even if the list may also contain None."""
    return next((each for each in (hint, *get_args(hint)) if is_typeddict(each)), None)
