"""Check the order of a pipeline's stages at construction, before any rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from headrace.spelling import suggest
from headrace.transforms.table import COLUMNS, column_keys, stage_parts, stages_of_values
from headrace.transforms.table.options import nested_key
from headrace.transforms.table.schema import COUNTED, IN_LOSS, MINIBATCH, REWARD

__all__ = ["index_of_split"]


Places = Mapping[str, str | None]


def with_places(
    stages: Sequence[str], order: Sequence[str] | None, after: Places | None, before: Places | None
) -> Sequence[str] | None:
    """Insert stages into an order, each directly after or directly before another stage.

    If several stages are placed after one stage, or before one, they keep the order of the mapping.

    Args:
        stages: names of all stages.
        order: the stages that are not placed, in order; None: in the order of `stages`.
        after: for each placed stage, the stage that it comes directly after. A stage with None is not placed.
        before: the same, for the stage that it comes directly before.

    Raises:
        ValueError: a name is unknown, or a stage has no position or two positions.

    Example:
        >>> with_places([*"abxy"], ["a", "b"], {"x": "a"}, {"y": "b"})
        ['a', 'x', 'y', 'b']
    """
    after, before = (
        {name: other for name, other in (places or {}).items() if other is not None}
        for places in (after, before)
    )
    for option, name, other in [
        *(("after", *place) for place in after.items()),
        *(("before", *place) for place in before.items()),
    ]:
        if unknown := [each for each in (name, other) if each not in stages]:
            raise ValueError(
                f"{option}.{name}={other} names the unknown stage {unknown[0]!r}"
                f"{suggest(str(unknown[0]), stages)}. The stages are {', '.join(stages)}"
            )
        if name in (order or ()):
            raise ValueError(
                f"{option}.{name}={other} places a stage that pipeline.order names, too. Take {name!r} "
                f"out of the order, or set pipeline.{option}.{name}=null"
            )
    if twice := [name for name in before if name in after]:
        name = twice[0]
        raise ValueError(
            f"{name!r} has two places, after.{name}={after[name]} and before.{name}={before[name]}. Keep one "
            f"of them: set pipeline.after.{name}=null or pipeline.before.{name}=null (in Python None)"
        )
    placed = before | after
    if not placed:
        return order

    def around(name: str) -> list[str]:
        ahead = [each for each, other in before.items() if other == name]
        behind = [each for each, other in after.items() if other == name]
        return [*chain(*map(around, ahead)), name, *chain(*map(around, behind))]

    unplaced = [name for name in stages if name not in placed] if order is None else order
    found = [each for name in unplaced for each in around(name)]
    if lost := [name for name in placed if name not in found]:
        raise ValueError(
            f"after and before give {', '.join(map(repr, lost))} no place: each is next to another of them, "
            "or next to a stage that pipeline.order lacks"
        )
    return found


def arrange(
    stages: Mapping[str, Any],
    order: Sequence[str] | None,
    after: Places | None = None,
    before: Places | None = None,
) -> dict[str, Any]:
    """Return the stages in the given order (:func:`with_places`), without those that are None.

    Raises:
        ValueError: a stage has a name that is not allowed; or the order lacks a stage, names it twice, or
            names an unknown stage.
    """
    present = {name: stage for name, stage in stages.items() if stage is not None}
    if odd := [name for name in present if not str(name).isidentifier() or name == "pipeline"]:
        raise ValueError(
            "a stage's name must consist of letters, digits and '_', for Hydra overrides, and must not be "
            f"'pipeline'; got {odd}"
        )
    if kept := [name for name in present if hasattr(nn.ModuleDict, name)]:
        raise ValueError(
            "a stage must not have the name of an attribute of torch's ModuleDict; got "
            f"{', '.join(map(repr, kept))}. Rename it"
        )
    order = with_places([*stages], order, after, before)
    if order is None:
        return present
    if unknown := [name for name in order if name not in stages]:
        hints = "; ".join(f"{name!r}{suggest(name, present)}" for name in unknown)
        raise ValueError(
            f"order names unknown stages: {hints}. The stages are {list(present)}. To remove a "
            "stage that a recipe's order names, set pipeline.stages.NAME=null (in Python None)"
        )
    named = [name for name in order if name in present]
    if twice := sorted({name for name in named if named.count(name) > 1}):
        raise ValueError(f"order must name each stage once; it names {', '.join(twice)} more than once")
    if lacking := [name for name in present if name not in named]:
        place = _first_place(lacking[0], present, named)
        raise ValueError(
            f"order must name each stage once; it lacks {', '.join(map(repr, lacking))}"
            f"{suggest(lacking[0], named)}. Place it, as in pipeline.after.{lacking[0]}={place} (in Python "
            f"after={{{lacking[0]!r}: {place!r}}}), or add it to pipeline.order=[{','.join(map(str, named))}]"
        )
    return {name: present[name] for name in named}


def check_column_names(stages: Mapping[str, Any], columns: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a stage that reads a column by its default name although the pipeline gives it another name.

    Args:
        stages: the stages, by name.
        columns: the pipeline's `columns`: names of columns, by role.
        own: names of columns that are options of the pipeline, such as `group_key`.

    Raises:
        ValueError: a stage lacks a name (the message names the stage, the column and the option), a role is
            unknown, or one column has two names.
    """
    if unknown := sorted(set(columns) - set(COLUMNS)):
        raise ValueError(
            f"unknown column {unknown[0]!r} in pipeline.columns{suggest(unknown[0], COLUMNS)}; the "
            f"columns are {', '.join(COLUMNS)}"
        )
    renamed = {role: nested_key(key) for role, key in columns.items()}
    renamed = {role: key for role, key in renamed.items() if key != COLUMNS[role].default}
    for role, key in renamed.items():
        if nested_key(own.get(f"{role}_key", key)) != key:
            raise ValueError(
                f"the column {role!r} has two names: pipeline.columns has {key!r}, pipeline.{role}_key is "
                f"{own[f'{role}_key']!r}. Set one of them"
            )
    for name, stage in stages.items():
        for part in stage_parts(stage):
            keys: dict[str, Any] = column_keys(part)
            reads = set() if keys else set(getattr(part, "in_keys", ()))  # a stage without <role>_key
            keys |= {role: COLUMNS[role].default for role in renamed if COLUMNS[role].default in reads}
            for role, key in renamed.items():
                found = keys.get(role, key)
                if found == COLUMNS[role].default and (role, found) != OF_THE_SAMPLER:
                    raise ValueError(
                        f"stage {name!r} reads the column {role!r} by its default name, {found!r}, but "
                        f"pipeline.columns has {key!r}. Give {type(part).__name__} {role}_key={key!r}"
                    )


def check_advantage(stages: Mapping[str, Any], key: Any) -> None:
    """Refuse a stage named ``advantage`` that declares its columns without the advantage.

    The loss would read another advantage, such as one that came with the batch, or none.

    Raises:
        ValueError: there is such a stage; the message names its columns.
    """
    stage = stages.get("advantage")
    if key not in (written := getattr(stage, "out_keys", [key])):
        raise ValueError(
            f"the stage 'advantage' must write the column {key!r}, which the loss reads; its out_keys are "
            f"{[*written]}. If the batch brings its advantages, or your loss reads none, remove the stage "
            "(pipeline.stages.advantage=null, in Python stages={'advantage': None}), and add yours under "
            "another name"
        )


OF_THE_SAMPLER = ("log_prob", ("log_probs", "full"))  # stages may read it, also if the loss does not


def check_comparison(stages: Mapping[str, Any]) -> None:
    """Refuse a filter that does not judge the reward that the advantage compares.

    Raises:
        ValueError: there is such a filter; the message names the stages and the option.
    """
    pairs = [
        (name, other, own, compares)
        for name, stage in stages.items()
        for value, own in stages_of_values(stage).items()
        for other, behind in stages.items()
        for of, compares in stages_of_values(behind).items()
        if hasattr(compares, "several") and (value == of or None in (value, of))
    ]
    for name, other, own, compares in pairs:
        for part in stage_parts(own)[1:]:
            by_sum, meant = getattr(part, "by", "") == "variance", compares.several
            judges = "sum" if by_sum else getattr(part, "several", None)
            if judges not in (None, meant):
                todo = (
                    "Under several='decoupled' each reward has an advantage of its own: keep rollouts by "
                    "another measure than the variance of the sum"
                    if by_sum
                    else f"Set {type(part).__name__}(several={meant!r})"
                )
                raise ValueError(
                    f"stage {name!r} judges groups by several={judges!r}, and {other!r} compares them by "
                    f"several={meant!r}, so groups with an advantage would leave, or others stay. {todo}"
                )


def _first_place(name: str, stages: Mapping[str, Any], order: Sequence[str]) -> str:
    """The first stage of an order after which a new stage may come; ``advantage`` if it may come anywhere."""
    fits = []
    for at, other in enumerate(order, 1):
        with suppress(ValueError):
            check_order({each: stages[each] for each in (*order[:at], name, *order[at:])})
            fits.append(other)
    return "advantage" if "advantage" in fits and fits[0] == order[0] else fits[0] if fits else "NAME"


def check_order(stages: Mapping[str, Callable]) -> None:
    """Refuse an order of stages that would run but give wrong results.

    These orders are refused:

    - a stage after the split that does not read ``minibatch``, or that drops rows;
    - a stage that reads a column which only a later stage creates;
    - a stage that changes a column which an earlier stage has used as final (`final_keys`; the advantage uses
      rewards and groups);
    - a stage that writes the loss mask after another stage has masked rows in it;
    - a pair of stages that a function of :data:`WRONG` refuses;
    - a stage whose output is overwritten before a stage reads it, or whose reward no advantage reads.

    Several stages may change one column, one after the other.

    Raises:
        ValueError: the order is refused; the message names the two stages and the column.
    """
    names = list(stages)
    made: set = set()
    for i, name in enumerate(names):
        reads, writes, final = _keys(stages[name])
        for later in names[i + 1 :]:
            later_reads, later_writes, _ = _keys(stages[later])
            takes_out = bool(getattr(stages[later], "reasons", ()))
            if MINIBATCH in _keys(stages[name])[1] and (MINIBATCH not in later_reads or takes_out):
                raise ValueError(
                    f"stage {later!r} comes after {name!r}, which cuts the batch into minibatches. A stage "
                    f"after the split must read {MINIBATCH!r} (in its in_keys) and must not drop or mask "
                    f"rows. Put {later!r} before {name!r}"
                )
            in_turn = writes & later_reads  # both change the column, one after the other
            masked = _masked(stages[name]) - later_reads  # a new mask would lose the masked rows
            if late := later_writes & ((reads - made - in_turn) | final | masked):
                columns = ", ".join(repr(key) for key in sorted(late, key=str))
                todo = f"Put {later!r} before {name!r}, or remove it"
                if COUNTED in late and not getattr(stages[later], "before_baseline", True):
                    todo = f"Put {later!r} before {name!r}; after {name!r}, use action='mask' or 'drop'"
                if REWARD in writes - reads and late <= reads:  # the collapse has read the reward
                    todo = (
                        f"The advantage compares {REWARD!r}, the reward of each rollout: to change it, make "
                        f"{later!r} a headrace.RewardShaping, and put it between {name!r} and the advantage. "
                        f"To change the rewards of rows, put {later!r} before {name!r}"
                    )
                raise ValueError(
                    f"stage {name!r} reads {columns}, which {later!r} writes later. That change would have "
                    f"no effect on {name!r}. {todo}"
                )
            for value, own in stages_of_values(stages[name]).items():
                for of, behind in stages_of_values(stages[later]).items():
                    same = value == of or None in (value, of)
                    if same and (wrong := wrong_pair(name, own, later, behind)):
                        raise ValueError(wrong)
        _check_effect(name, stages[name], {each: stages[each] for each in names[i + 1 :]})
        made |= writes


def _check_effect(name: str, stage: Callable, behind: Mapping[str, Callable]) -> None:
    """Refuse a stage whose output is overwritten before it is read, or whose reward no advantage reads.

    Raises:
        ValueError: there is such a stage; the message names the stages.
    """
    _, writes, _ = _keys(stage)
    takes_out = bool(getattr(stage, "reasons", ()))
    # Removing rows is an effect, too. It is not known what a plain callable reads.
    if takes_out or not writes or not all(hasattr(each, "in_keys") for each in behind.values()):
        return
    left = set(writes)
    for later, each in behind.items():
        later_reads, later_writes, _ = _keys(each)
        if left & later_reads:
            return
        left -= later_writes
        if not left:
            raise ValueError(
                f"stage {later!r} overwrites the columns that {name!r} writes, and no stage reads them in "
                f"between, so {name!r} would have no effect. Remove one of them"
            )
    if writes == {REWARD} and any(
        among_others(own) for each in behind.values() for own in stages_of_values(each).values()
    ):
        raise ValueError(
            f"stage {name!r} changes the rollout's reward, and no later stage reads that reward, so it would "
            "have no effect on any advantage. Remove it, or use an advantage that compares rollouts"
        )


def index_of_split(stages: Mapping[str, Any]) -> int | None:
    """The index of the first stage that cuts the batch into minibatches; None if no stage does."""
    return next(
        (at for at, stage in enumerate(stages.values()) if MINIBATCH in getattr(stage, "out_keys", ())), None
    )


def _keys(stage: Callable) -> tuple[set, set, set]:
    """The `in_keys`, `out_keys` and `final_keys` of a stage; empty sets for a plain callable."""
    reads, writes, final = (set(getattr(stage, name, ())) for name in ("in_keys", "out_keys", "final_keys"))
    return reads, writes, final


def _masked(stage: Callable) -> set:
    """The key of the loss mask that a stage changes; empty for a stage that masks nothing."""
    masks = IN_LOSS in getattr(stage, "out_keys", ()) or "masked" in getattr(stage, "reasons", {}).values()
    return {getattr(stage, "loss_mask_key", None)} if masks else set()


# -- pairs of stages that would give wrong results without an error -----------------------------------------


class Named(NamedTuple):
    """A stage and its name."""

    name: str
    stage: Callable

    def has(self, trait: str) -> Any:
        """The value of a trait that the stage declares; None if the stage does not declare it."""
        return getattr(self.stage, trait, None)

    def keys(self, trait: str) -> set:
        """The columns of a trait that the stage declares."""
        return set(getattr(self.stage, trait, ()))


def wrong_pair(name: str, stage: Callable, later: str, behind: Callable) -> str | None:
    """The error message for a pair of stages in this order; None if the pair is not known to be wrong."""
    pair = Named(name, stage), Named(later, behind)
    return next(filter(None, (wrong(*pair) for wrong in WRONG)), None)


def among_others(stage: Callable) -> bool:
    """Whether a stage compares rows with one another, as a baseline does."""
    one = Named("", stage)
    shapes = REWARD in one.keys("in_keys") & one.keys("out_keys") and one.has("group_key") in one.keys(
        "in_keys"
    )
    return hasattr(stage, "advantage_by_row") or shapes or COUNTED in one.keys("final_keys")


def _adds_to_weighed(one: Named, other: Named) -> str | None:
    unweighed = one.keys("weighed_keys") & other.keys("out_keys") - other.keys("weighed_keys")
    if not unweighed or MINIBATCH in other.keys("in_keys"):
        return None
    columns = ", ".join(repr(key) for key in sorted(unweighed, key=str))
    return (
        f"stage {one.name!r} multiplies {columns} by weights, and {other.name!r} adds to it later without "
        f"weights. Put {other.name!r} before {one.name!r}"
    )


def _corrects_twice(one: Named, other: Named) -> str | None:
    policies = one.has("corrects")
    if policies is None or policies != other.has("corrects"):
        return None
    sampler, trainer = policies
    return (
        f"stages {one.name!r} and {other.name!r} both apply the importance weight of {trainer!r} over "
        f"{sampler!r}, which would weight rows twice. Remove {other.name!r}"
    )


def _silences_elsewhere(one: Named, other: Named) -> str | None:
    masked, read = one.has("masked_tokens_key"), other.has("log_prob_key")
    behind_cut = MINIBATCH in other.keys("out_keys") or MINIBATCH in other.keys("in_keys")
    if not behind_cut or masked is None or read is None or masked == read:
        return None
    return (
        f"stage {one.name!r} masks tokens by NaN in {masked!r}, but the log_prob_key of {other.name!r} says "
        f"that the loss reads {read!r}, so they would still train. Set log_prob_key={read!r} on {one.name!r}"
    )


def _rejects_too_late(one: Named, other: Named) -> str | None:
    if not among_others(one.stage) or not other.has("before_baseline"):
        return None
    return (
        f"stage {other.name!r} rejects rows after {one.name!r} has compared their rewards, so a rejected "
        f"reward would stay in the baseline of the other rows. Put {other.name!r} before {one.name!r}, with "
        "action='exclude' or 'drop'. To keep the reward in the baseline, set action='mask' there"
    )


def _takes_parts(one: Named, other: Named) -> str | None:
    taken, whole = one.has("takes_rows"), other.has("of_whole_rollouts")
    drops_places = taken == "drop" and whole == "places"
    if not drops_places and not (taken and whole == "rewards" and one.has("before_baseline")):
        return None
    return (
        f"stage {one.name!r} rejects single rows of rollouts before {other.name!r}, which needs all rows of "
        f"each rollout. Put {other.name!r} before {one.name!r}, or set unit='rollout' on {one.name!r}"
    )


def _takes_kept_tokens(one: Named, other: Named) -> str | None:
    zeroes = other.has("corrects") is not None and other.has("bound") == "zero"
    if not one.has("after_filters") or not (zeroes or other.has("criterion") is not None):
        return None
    return (
        f"stage {one.name!r} trains tokens that several rows share in one of them, and {other.name!r} may "
        f"take out this row or these tokens later, so no row would train them. Put {other.name!r} before "
        f"{one.name!r}"
    )


WRONG = (
    _adds_to_weighed,
    _corrects_twice,
    _silences_elsewhere,
    _rejects_too_late,
    _takes_parts,
    _takes_kept_tokens,
)
