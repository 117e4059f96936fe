"""Orders of stages that cannot work are refused before any rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from headrace.pipeline.wording import suggest
from headrace.transforms.columns import COLUMNS
from headrace.transforms.options import nested_key
from headrace.transforms.rows import column_keys
from headrace.transforms.schema import COUNTED, IN_LOSS, MINIBATCH, REWARD


def arrange(stages: Mapping[str, Any], order: Sequence[str] | None) -> dict[str, Any]:
    """Put stages into the order given; a stage that is None is left out.

    Raises:
        ValueError: the order lacks a stage, or names one that there is not; with a hint.
    """
    present = {name: stage for name, stage in stages.items() if stage is not None}
    if odd := [name for name in present if not str(name).isidentifier() or name == "pipeline"]:
        raise ValueError(
            "a stage's name is a word, by which the command line reaches it: letters, digits and '_', and "
            f"not 'pipeline'; got {odd}"
        )
    if kept := [name for name in present if hasattr(nn.ModuleDict, name)]:
        raise ValueError(f"torch keeps {', '.join(map(repr, kept))} for itself: give the stage another name")
    if order is None:
        return present
    if unknown := [name for name in order if name not in stages]:
        hints = "; ".join(f"{name!r}{suggest(name, present)}" for name in unknown)
        raise ValueError(
            f"order names stages that there are not: {hints}. There are {list(present)}. To leave one out of "
            "an order that a recipe gives, set it to null"
        )
    named = [name for name in order if name in present]
    if twice := sorted({name for name in named if named.count(name) > 1}):
        raise ValueError(f"order must name each stage once; it names {', '.join(twice)} more than once")
    if lacking := [name for name in present if name not in named]:
        raise ValueError(
            f"order must name each stage once; it lacks {', '.join(map(repr, lacking))}. Give all of them: "
            f"pipeline.order=[{','.join(map(str, named))}] with {', '.join(map(repr, lacking))} in place"
        )
    return {name: present[name] for name in named}


def check_column_names(stages: Mapping[str, Any], columns: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a stage that finds a column under its usual name, where the pipeline says that it has another.

    Args:
        stages: by name.
        columns: names by role, as the pipeline has them.
        own: names by option, as the pipeline itself has them, such as `group_key`.

    Raises:
        ValueError: naming the stage, the column and what to give it; a role that there is not; two names for
            one column.
    """
    if unknown := sorted(set(columns) - set(COLUMNS)):
        raise ValueError(
            f"there is no column {unknown[0]!r}{suggest(unknown[0], COLUMNS)}; there are {', '.join(COLUMNS)}"
        )
    renamed = {role: nested_key(key) for role, key in columns.items()}
    renamed = {role: key for role, key in renamed.items() if key != COLUMNS[role].default}
    for role, said in renamed.items():
        if nested_key(own.get(f"{role}_key", said)) != said:
            raise ValueError(
                f"the column {role!r} has two names: columns say {said!r}, and {role}_key is "
                f"{own[f'{role}_key']!r}. Say one of them"
            )
    for name, stage in stages.items():
        for part in (stage, getattr(stage, "criterion", None), getattr(stage, "term", None)):
            keys: dict[str, Any] = {} if part is None else column_keys(part)
            reads = set() if keys else set(getattr(part, "in_keys", ()))  # it has no such options
            keys |= {role: COLUMNS[role].default for role in renamed if COLUMNS[role].default in reads}
            for role, said in renamed.items():
                found = keys.get(role, said)
                if found == COLUMNS[role].default and (role, found) != OF_THE_SAMPLER:
                    raise ValueError(
                        f"stage {name!r} reads the column {role!r} under its usual name, {found!r}, and the "
                        f"pipeline's columns say {said!r}: give {type(part).__name__} {role}_key={said!r}"
                    )


OF_THE_SAMPLER = ("log_prob", ("log_probs", "full"))  # it may be read beside those that the loss reads


def check_order(stages: Mapping[str, Callable]) -> None:
    """Refuse what comes after the split without reading it, and a column that is written too late to matter.

    Too late is a column that a stage reads and only a later one makes, one that a stage has built on
    (`final_keys`: the rewards and groups behind an advantage) and a later one changes, and a loss mask that
    is made after rows were masked in it. So are pairs that would be silently wrong (:data:`WRONG`), and
    stages whose work nobody reads. Stages that each change a column in turn are in order.

    Raises:
        ValueError: naming the two stages and the column.
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
                    f"stage {later!r} comes after {name!r}, which cuts the batch into minibatches: only a "
                    f"stage that reads how it was cut, {MINIBATCH!r} in its in_keys, and takes no rows out "
                    f"has a place there; put {later!r} before {name!r}"
                )
            in_turn = writes & later_reads
            masked = _masked(stages[name]) - later_reads
            if late := later_writes & ((reads - made - in_turn) | final | masked):
                columns = ", ".join(repr(key) for key in sorted(late, key=str))
                raise ValueError(
                    f"stage {name!r} reads {columns}, which {later!r} writes after it: {later!r} would have "
                    f"no effect on it. Put {later!r} before {name!r}, or take it out"
                )
            if wrong := wrong_pair(name, stages[name], later, stages[later]):
                raise ValueError(wrong)
        _check_effect(name, stages[name], {each: stages[each] for each in names[i + 1 :]})
        made |= writes


def _check_effect(name: str, stage: Callable, behind: Mapping[str, Callable]) -> None:
    """Refuse what computes for nobody: a credit that is written anew, or a reward that no advantage reads.

    Raises:
        ValueError: naming the stages.
    """
    _, writes, _ = _keys(stage)
    takes_out = bool(getattr(stage, "reasons", ()))
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
                f"stage {later!r} writes anew what {name!r} has written, and nobody reads it in between: "
                f"{name!r} would have no effect. Take one of them out (set it to null)"
            )
    if writes == {REWARD} and any(among_others(each) for each in behind.values()):
        raise ValueError(
            f"stage {name!r} shapes the rollout's reward, and no stage behind it reads that: it would have "
            "no effect on any advantage. Take it out, or compare rollouts"
        )


def place_of_cut(stages: Mapping[str, Any]) -> int | None:
    """Where the first stage that cuts the batch stands; None where none does."""
    return next(
        (at for at, stage in enumerate(stages.values()) if MINIBATCH in getattr(stage, "out_keys", ())), None
    )


def _keys(stage: Callable) -> tuple[set, set, set]:
    """What a stage reads, writes and builds on; nothing is known of a plain callable."""
    reads, writes, final = (set(getattr(stage, name, ())) for name in ("in_keys", "out_keys", "final_keys"))
    return reads, writes, final


def _masked(stage: Callable) -> set:
    """The loss mask in which a stage masks rows; those that a gate finds empty are masked already."""
    masks = IN_LOSS in getattr(stage, "out_keys", ()) or "masked" in getattr(stage, "effects", ())
    return {getattr(stage, "loss_mask_key", None)} if masks else set()


# -- two stages in an order that would run, and be silently wrong -------------------------------------------


class Named(NamedTuple):
    """A stage and its name."""

    name: str
    stage: Callable

    def has(self, trait: str) -> Any:
        """What the stage declares of itself."""
        return getattr(self.stage, trait, None)

    def keys(self, trait: str) -> set:
        """The columns that it declares."""
        return set(getattr(self.stage, trait, ()))


def wrong_pair(name: str, stage: Callable, later: str, behind: Callable) -> str | None:
    """What is wrong with a stage in front of another, in words; None where nothing is known to be."""
    pair = Named(name, stage), Named(later, behind)
    return next(filter(None, (wrong(*pair) for wrong in WRONG)), None)


def among_others(stage: Callable) -> bool:
    """Whether it measures a row by others, as a baseline does: those keep who is in the statistics."""
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
        f"stage {one.name!r} multiplies {columns} by weights, and {other.name!r} writes it after that: "
        f"weights come last, since what is added behind them would not be weighed. Put {other.name!r} before "
        f"{one.name!r}"
    )


def _corrects_twice(one: Named, other: Named) -> str | None:
    policies = one.has("corrects")
    if policies is None or policies != other.has("corrects"):
        return None
    sampler, trainer = policies
    return (
        f"stages {one.name!r} and {other.name!r} both weigh by how likely {trainer!r} makes what {sampler!r} "
        f"sampled: correcting twice would weigh rows twice. Take {other.name!r} out"
    )


def _silences_elsewhere(one: Named, other: Named) -> str | None:
    masked, read = one.has("masked_tokens_key"), other.has("log_prob_key")
    behind_cut = MINIBATCH in other.keys("out_keys") or MINIBATCH in other.keys("in_keys")
    if not behind_cut or masked is None or read is None or masked == read:
        return None
    return (
        f"stage {one.name!r} takes tokens out by NaN in {masked!r}, and {other.name!r} says that the loss "
        f"reads {read!r}, in which they would stay: set log_prob_key={read!r} on {one.name!r}"
    )


def _rejects_too_late(one: Named, other: Named) -> str | None:
    if not among_others(one.stage) or not other.has("before_baseline"):
        return None
    return (
        f"stage {other.name!r} rejects rows after {one.name!r} has compared their rewards: a rejected reward "
        f"would stay in the baseline of the others. Put {other.name!r} before {one.name!r}, with "
        "action='exclude' or 'drop'; action='mask' there leaves the reward in the baseline on purpose"
    )


def _takes_parts(one: Named, other: Named) -> str | None:
    taken, whole = one.has("takes_rows"), other.has("of_whole_rollouts")
    drops_places = taken == "drop" and whole == "places"
    if not drops_places and not (taken and whole == "rewards" and one.has("before_baseline")):
        return None
    return (
        f"stage {one.name!r} takes single rows out of rollouts before {other.name!r} makes one thing of all "
        f"rows of each: the others would have a part of it. Put {other.name!r} before {one.name!r}, or set "
        f"unit='rollout' on {one.name!r}"
    )


WRONG = (_adds_to_weighed, _corrects_twice, _silences_elsewhere, _rejects_too_late, _takes_parts)
