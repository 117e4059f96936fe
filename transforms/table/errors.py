"""The exceptions for invalid batches. Their messages list the row ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple

from tensordict import NestedKey

FIELD = re.compile(r"\{(?:(\w+)/)?(\w+)(?:=(\w*))?\}")  # {fact}, {option=value}, {stage/option=value}


class ColumnFact(NamedTuple):
    """A column, for a text that names several columns (:meth:`ErrorNames.say_column`)."""

    key: NestedKey | None
    option: str
    """Name of the option that holds the key."""


class ErrorNames:
    """The names of columns and options in errors, as Python spells them. Subclasses spell them otherwise."""

    def option(self, stage: str, name: str, value: str, *, other: bool) -> str:
        """Name an option to set, and its value, which may be empty. With `other`, it is of another stage."""
        said = f"{name}={value if value.isdigit() else repr(value)}" if value else name
        return f"pipeline.stages.{stage}.{name}={value} (in Python {said})" if other else said

    def say_missing(
        self,
        key: NestedKey,
        option: str,
        batch: Sequence[NestedKey],
        reader: str = "",
        role: str = "",
        **_: Any,
    ) -> str:
        """Say that a batch lacks the column of a role. Without an `option`, the reader cannot rename it."""
        said = f"needs the key {self.say_column(key, option)}; the batch has {batch}"
        if not (option or role):
            return said
        declare = "" if option else f"add {role!r} to the `columns` of {reader}, and "
        option = option or f"{role}_key"
        return f"{said}. If it goes by another name, {declare}set {option}{who_stamps(option)}"

    def say_column(self, key: NestedKey | None, option: str, **_: Any) -> str:
        """Name a column, and the option that names it, if there is one."""
        return f"{key!r} ({option})" if option else repr(key)

    def say_present(self, batch: Sequence[NestedKey], **_: Any) -> str:
        """List the columns of a batch."""
        return f"it has {batch}"

    def say_stamped(self, ids: str, **_: Any) -> str:
        """Say where ids of this name are stamped."""
        return who_stamps(ids)

    def say_workers(self, **_: Any) -> str:
        """Say how workers get ids of their own."""
        return "Workers need their own ids: set StampIds(worker=…) or RepeatSampler(rank=…)"

    def say_infinite(self, **_: Any) -> str:
        """Say how infinite rewards are left out."""
        return ", for infinity SampleFilter(criterion=Finite(), action='exclude') before the collapse"


class BatchError(ValueError):
    """The batch is invalid and cannot be trained on.

    Args:
        text: what is required, what was found and what to do. A field in braces is a fact, or what
            :class:`ErrorNames` says of the facts. ``{action=drop}`` is an option of the stage to set. Without
            facts, all other braces are shown as they are.
        facts: what the text says, by name. Pass data only as a fact, whose braces are shown as they are.

    Raises:
        KeyError: a field of the text is not among the facts.

    Attributes:
        stage: name of the stage that refused the batch; empty if no pipeline ran it.
        made_by: that stage with its options.
        step: number of the batch's step, if it is known.
        recipe: name of the recipe that refused the batch, if there are several.
        more: what follows the text.
        labels: the text of each id in the batch, by its number.
        names: how the text names columns and options.

    Example:
        >>> error = BatchError("group {group} is incomplete: set {on_incomplete=drop}", group=7)
        >>> error.stage, error.made_by = "gate", "CompletenessGate()"
        >>> str(error)
        "stage 'gate', CompletenessGate(): group 7 is incomplete: set on_incomplete='drop'"
    """

    def __init__(self, text: str = "", /, **facts: Any):
        super().__init__(text)
        for field in FIELD.finditer(text) if facts else ():
            if field[3] is None and not _is_known(field[2], facts):
                raise KeyError(f"{field[0]} of {text!r} is not among the facts {[*facts]}")
        self.facts, self.names, self.labels = facts, ErrorNames(), dict[str, str]()
        self.stage = self.made_by = self.recipe = self.more = ""
        self.step: int | None = None

    def __str__(self) -> str:
        return self.said(self.names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def said(self, names: ErrorNames) -> str:
        """The text, with these names of columns and options."""

        def field(found: re.Match[str]) -> str:
            stage, name, value = found.groups()
            if value is not None:
                return names.option(stage or self.stage, name, value, other=stage is not None)
            if name in self.facts or not self.facts:
                fact = self.facts.get(name, found[0])
                return names.say_column(*fact) if isinstance(fact, ColumnFact) else str(fact)
            return str(getattr(names, f"say_{name}")(**self.facts))

        (text,) = self.args
        text = re.sub(r"\d+", lambda id: self.labels.get(id[0], id[0]), FIELD.sub(field, text))
        step = "" if self.step is None else f"step {self.step}: "
        recipe = f"{self.recipe} refuses it: " if self.recipe else ""
        stage = f"stage {self.stage!r}, {self.made_by}: " if self.stage else ""
        name = self.made_by.partition("(")[0]
        if stage and text.startswith(f"{name} "):  # the text begins with the stage, which is named already
            stage, text = stage.removesuffix(": "), text.removeprefix(name)
        return f"{step}{recipe}{stage}{text}{self.more}"

    @property
    def options(self) -> list[tuple[str, str, str]]:
        """The options that the text says to set: the stage, the option, and the value, which may be empty."""
        (text,) = self.args
        found = [field.groups() for field in FIELD.finditer(text)]
        return [(stage or self.stage, name, value) for stage, name, value in found if value is not None]


def _is_known(name: str, facts: Mapping[str, Any]) -> bool:
    """Whether a field is a fact, or :class:`ErrorNames` can make it from the facts."""
    say = getattr(ErrorNames, f"say_{name}", None)
    if name in facts or say is None:
        return name in facts
    _, *arguments = signature(say).parameters.values()  # without self
    needed = {each.name for each in arguments if each.default is each.empty}
    needed -= {each.name for each in arguments if each.kind is Parameter.VAR_KEYWORD}
    return needed <= facts.keys()


class MissingKeyError(BatchError):
    """A column that a transform reads is missing."""


class IncompleteGroupsError(BatchError):
    """Groups lack rollouts that were dispatched for them."""


class OtherRankError(BatchError):
    """Another rank raised an error, did something else, or did not arrive in time."""


class StreamWarning(UserWarning):
    """Rollouts were lost on their way to an assembler, or do not end."""


class ProcessedTwiceError(BatchError):
    """A pipeline has already processed this batch."""


LISTED = 8  # a message lists at most this many items


def who_stamps(name: str) -> str:
    """Say where a missing column comes from, at the end of a message; empty if headrace does not know it.

    Args:
        name: name of the column, or of its option.

    >>> who_stamps("rollout_id")[2:17], who_stamps("reward_key")
    ('Ids are stamped', '')
    """
    if name == "old_log_prob_key":
        return '. ScoreRows(log_prob_key=("old_log_probs", "full")) in front of it computes the column'
    if name == "version_key":
        return (
            ". It is the version of the policy that sampled the row: the workers write it on each row, and "
            "the trainer counts it up in stream.version (or assembler.version)"
        )
    if name not in ("group_id", "rollout_id", "unit_id", "group_key", "rollout_key"):
        return ""
    return (
        ". Ids are stamped where rollouts are dispatched: by headrace.pipeline.StampIds if the environment "
        "draws its own prompts, else by RepeatSampler.draws()"
    )


def count_of(count: int, noun: str) -> str:
    """A number of things, for a message.

    >>> count_of(1, "row"), count_of(2000, "row"), count_of(0, "batch")
    ('1 row', '2,000 rows', '0 batches')
    """
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def listing(items: Iterable[str], *, most: int = LISTED, of: int | None = None) -> str:
    """Join the first `most` items for a message, and count the others.

    Args:
        items: what is listed.
        most: number of items that are shown.
        of: number of all items, if `items` has only the first.

    >>> listing(["a", "b", "c"], most=2), listing(["a", "b"], of=9)
    ('a, b and 1 more', 'a, b and 7 more')
    """
    shown = list(items)
    most = min(most, len(shown))
    more = (len(shown) if of is None else of) - most
    return ", ".join(shown[:most]) + (f" and {more} more" if more > 0 else "")
