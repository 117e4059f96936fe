"""One stage with options of its own for each value of a column, such as the environment of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor

from headrace.transforms.table import BatchTransform, Rows, as_ids, check_kind, column_keys, listing
from headrace.transforms.table.options import nested_key
from headrace.transforms.table.schema import COMPARED, MINIBATCH, REWARD

OF_ALL = ("final_keys", "weighed_keys", "before_baseline", "of_whole_rollouts")  # order checks read these


class ByColumn(BatchTransform):
    """Run one kind of stage with other options for each value of a column.

    A batch may have rollouts of several environments, each with its own baseline, scale, criterion or
    penalty. For each value, its stage sees the rows with that value and no others, and decides as if the
    batch had only these rows. So no statistic is over several values.

    In YAML, `by_column` names the column. `values` has, for each value, the options that replace others:

    .. code-block:: yaml

        stages:
          advantage:
            scale: group
            by_column: environment
            values:
              math: {}
              code: {baseline: leave_one_out, scale: none}

    Reads `column`, and what the stages read. Writes what the stages write. Metrics are recorded as
    ``<stage>/<value>/<name>``. Rows leave for the reasons of the stages.

    Args:
        column: (N,) or (N, 1) int ≥ 0, or N strings. All rows of a group have the same value.
        stages: by value, stages of one class that decide on the table. They name the same columns.

    Raises:
        ValueError: at construction. The stages are not of one class, name different columns, keep a state,
            need tokens or the whole batch, or take rows out for one reason with different effects.
        MissingKeyError: the column is missing.
        BatchError: a value, even of an excluded row, has no stage; rows of a group have different values; or
            a stage refuses its rows.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.transforms import RewardScale
        >>> stage = ByColumn(column="env", stages={"math": RewardScale(), "code": RewardScale(scale=0.5)})
        >>> reward = ("headrace", "reward")
        >>> ids = {"group_id": [0, 1], "rollout_id": [0, 1]}
        >>> td = TensorDict({reward: [1.0, 1.0], "env": ["math", "code"], **ids}, batch_size=[2])
        >>> stage(td)[reward].tolist()
        [1.0, 0.5]
    """

    def __init__(self, *, column: NestedKey, stages: Mapping[Any, BatchTransform]):
        self.column, self.stages = nested_key(column), dict(stages)
        found = [*self.stages.values()]
        for stage in found:
            check_kind(stage, "stage")
        kinds = sorted({type(stage).__name__ for stage in found})
        if len({type(stage) for stage in found}) != 1:
            raise ValueError(
                f"stages must be of one class, with other options; got {listing(kinds) or 'none'}"
            )
        if odd := [
            value for value in self.stages if isinstance(value, bool) or not isinstance(value, int | str)
        ]:
            raise ValueError(f"values must be whole numbers or texts; got {odd[0]!r}")
        if why := _no_reason(found):
            raise ValueError(f"stages must decide on the table of one batch; {kinds[0]} {why}")
        for option, key in column_keys(found[0]).items():
            if any(column_keys(stage)[option] != key for stage in found):
                raise ValueError(f"stages must name the same columns; they differ in {option}_key")
            setattr(self, f"{option}_key", key)
        effects = [item for stage in found for item in stage.reasons.items()]
        self.reasons = dict(effects)
        if twice := sorted({reason for reason, effect in effects if effect != self.reasons[reason]}):
            raise ValueError(
                f"rows must leave for {twice[0]!r} in one way, and the stages differ in action. Use the same "
                "action, or another criterion"
            )
        self.within_groups = all(stage.within_groups for stage in found)
        for trait in OF_ALL:  # an attribute that one of the stages has
            setattr(self, trait, max((getattr(stage, trait) for stage in found), key=bool))
        reads = [self.column, *(key for stage in found for key in stage.in_keys)]
        writes = [key for stage in found for key in stage.out_keys]
        super().__init__(list(dict.fromkeys(reads)), list(dict.fromkeys(writes)))

    @property
    def of_values(self) -> dict[Any, BatchTransform]:
        """The stages by value. A stage without this attribute is for all values."""
        return self.stages

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that is equal in all stages, such as `clip` of an advantage."""
        if name.startswith("_") or "stages" not in self.__dict__:
            return super().__getattr__(name)
        first, *others = (getattr(stage, name) for stage in self.stages.values())
        if any(other is not first and other != first for other in others):
            raise AttributeError(f"the stages of {listing(map(str, self.stages))} differ in {name}")
        return first

    @property
    def tokens_counted(self) -> list[Any]:
        """Token counts that the stages read."""
        return [tokens for stage in self.stages.values() for tokens in stage.tokens_counted]

    def _id_keys(self) -> list[NestedKey]:
        return [*super()._id_keys(), self.column]

    def decide(self, rows: Rows) -> None:
        """Let the stage of each value decide about its rows."""
        key = (self.column,) if isinstance(self.column, str) else self.column  # a tuple is never a role
        if not rows.has(key):
            raise rows.missing(key, "column")
        name = str(self.column if isinstance(self.column, str) else self.column[-1])
        found, known = rows.integers(key, name), as_ids([*self.stages], name)
        every = rows.with_excluded  # no stage would see an excluded row without an entry
        every.require_set(found, name, "rows without a value would have no options")
        every.require(
            torch.isin(found, known),
            "each value of {column} needs an entry; {found} has none. Add one, which may be empty; the "
            "entries are {entries}",
            lambda row: str(int(found[row])),
            role=key,
            entries=listing(map(repr, self.stages)),
        )
        if rows.has("group"):
            groups = rows.seen_by(self, rows.stage).ids(
                "group", checked=False
            )  # also where no stage reads them
            rows.require(
                found == found[groups.spread(groups.first)],
                "all rows of a group need the same value of {column}; it differs in {found}",
                lambda row: f"group {rows.name('group', row)}",
                role=key,
                unit=groups,
            )
        before = torch.arange(rows.table.size) if rows.index is None else rows.index
        notes, compared = rows.table.notes, list[tuple[Tensor, Callable[[int], Tensor]]]()
        for (value, stage), number in zip(self.stages.items(), known.tolist(), strict=True):
            own = before[found == number]
            if len(own):
                stage.decide(_Part.seeing(rows, own, str(value), stage).only_declared(stage))
                compared += [(own, notes.pop(COMPARED))] if COMPARED in notes else []
        if compared:
            notes[COMPARED] = partial(_of_parts, compared)


def _no_reason(stages: Sequence[BatchTransform]) -> str:
    """Why stages cannot decide about parts of a batch; empty if they can."""
    first = stages[0]
    if first.stateful:
        return "keeps a state"
    if type(first).decide is BatchTransform.decide:
        return "gives each token its own number"
    if MINIBATCH in (*first.in_keys, *first.out_keys):
        return "needs all rows of an optimiser step"
    if any(getattr(stage, "expected_groups", None) is not None for stage in stages):
        return "has expected_groups, which are those of the whole batch"
    if REWARD in first.out_keys and len({repr(getattr(stage, "weights", None)) for stage in stages}) > 1:
        return "weighs several rewards, and a report has one weighted sum: give all values the same weights"
    return ""


def _of_parts(parts: Sequence[tuple[Tensor, Callable[[int], Tensor]]], size: int) -> Tensor:
    """Join the notes :data:`COMPARED` of the stages: (N, ·), where each row has the note of its own stage."""
    whole = parts[0][1](size)
    for own, compared in parts[1:]:
        whole = whole.index_copy(0, own, compared(size)[own])
    return whole


class _Part(Rows):
    """The rows of one value, as the stage of this value and its criterion see them."""

    value: str
    _own = (*Rows._own, "value")

    @classmethod
    def seeing(cls, rows: Rows, index: Tensor, value: str, stage: Any, name: str = "") -> _Part:
        """The rows at `index`, (M,) int64, with the column names of a stage."""
        own = column_keys(stage)
        part = cls(rows.table, {**rows.names, **own}, type(stage).__name__, name or rows.stage, index, own)
        part.value = value
        return part

    def seen_by(self, stage: Any, name: str = "") -> Rows:
        return self.seeing(self, self.index, self.value, stage, name)

    def metric(self, name: str, value: Any) -> None:
        super().metric(f"{self.value}/{name}", value)

    def _view(self, index: Tensor | None, all_count: bool) -> Rows:
        part = _Part(self.table, self.names, self.reader, self.stage, index, self.declared, all_count)
        part.value, part.reads = self.value, self.reads
        return part

    def when_gathered(self, *_: Any, **__: Any) -> None:
        raise TypeError(
            f"{self.reader} changes numbers of tokens here, and options by column are for numbers of rows: "
            "put this stage before those that give each token its own advantage"
        )
