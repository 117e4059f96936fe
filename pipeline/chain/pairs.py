"""Two stages in an order that would run, and be silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.transforms.schema import COUNTED, MINIBATCH


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
    return bool(one.has("compares") or one.has("among_others") or COUNTED in one.keys("final_keys"))


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
    silenced, read = one.has("silenced_tokens"), other.has("log_prob_key")
    behind_cut = other.has("cuts") or MINIBATCH in other.keys("in_keys")
    if not behind_cut or silenced is None or read is None or silenced == read:
        return None
    return (
        f"stage {one.name!r} takes tokens out by NaN in {silenced!r}, and {other.name!r} says that the loss "
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
