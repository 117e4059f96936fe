"""Run a recipe on plain columns, for a trainer without TensorDicts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from typing_extensions import Unpack

from headrace.faces import AnswersGuesses
from headrace.pipeline.composing.recipe_names import Recipe
from headrace.pipeline.halves import before_the_split, part_of
from headrace.pipeline.ledger import Ledger
from headrace.pipeline.load import PipelineOptions, load_pipeline, objects_in, shows_options
from headrace.pipeline.pipeline import Pipeline
from headrace.pipeline.run import Run
from headrace.pipeline.tools.report import report_columns
from headrace.spelling import closest, suggest
from headrace.transforms.table import (
    COLUMNS,
    OF_TOKENS,
    BatchError,
    ErrorNames,
    MissingKeyError,
    as_ids,
    as_rewards,
    column_keys,
    label_key,
    labels_said,
    listing,
    stage_parts,
)
from headrace.transforms.table.annotations import fits
from headrace.transforms.table.options import nested_key, takes_options
from headrace.transforms.table.schema import FLOAT, ROW, STATUS_KEYS, Status, has_key
from headrace.transforms.table.tensordicts import (
    ELSEWHERE,
    column_of,
    device_of,
    number_of,
    shallow_copy,
    write_entry,
)
from headrace.transforms.table.tokens import padded

COUNTS = {"tokens": "loss_mask", "length": "length"}  # columns of token counts, and the masks they replace
# (N,) int64, a row's number over all calls. Plain columns have this number as ELSEWHERE instead, so that
# stages expect no tokens.
NUMBER = ("headrace", "number")
IDS = ("group", "rollout", "state", "parent", "baseline")
COMPOSED = 32  # number of recipes that decide() caches
MEANS = {
    "tokens": "the number of tokens of each row in the loss",
    "length": "the number of all tokens of each row",
}
EXAMPLE = "{'group_id': ['a', 'a'], 'rollout_id': [0, 1], 'reward': [1.0, 0.0]}"


class Decision(AnswersGuesses):
    """The outcome of each row, in the order of the input.

    Attributes:
        run: the pipeline's run, with its metrics and report.
        carried: (C,) int64, numbers of the rows that an earlier call of a :class:`Decider` carried over to
            this batch, counted from 0 over all calls. In all results, these rows follow the N rows of this
            call.
        came: the input rows with tokens, if the caller gave a TensorDict; None for plain columns.
        unchecked: reasons that were not checked, each with what the columns lack.
    """

    def __init__(
        self, run: Run, carried: Tensor, came: TensorDictBase | None = None, unchecked: Sequence[str] = ()
    ):
        self.run, self.carried, self.came, self.unchecked = run, carried, came, list(unchecked)

    @cached_property
    def advantage(self) -> Tensor:
        """(N + C,) float64, or (N + C, T) if the recipe gives each token its own; 0 outside the loss.

        Raises:
            BatchError: no stage of the recipe writes an advantage.
        """
        key = self.run.keys.found["advantage"][0]
        if not any(key in getattr(each, "out_keys", ()) for each in self.run.stages.values()):
            raise BatchError(f"no stage writes an advantage; the stages are {', '.join(self.run.stages)}")
        if self.run.rows is None or not len(self.run.batch):  # no row has reached the stage
            return torch.zeros(len(self.keep), dtype=torch.float64)
        if self.came is None:
            found = self.run.of_rank(self.run.rows.table.columns[key])
            return torch.where(self.keep, found.double(), 0.0)
        wide = self._put_back(key).double()
        if wide.shape[1] > 1:
            return torch.where(self.in_loss, _as_wide(wide, self.in_loss), 0.0)
        return torch.where(self.keep.to(wide.device), wide[:, 0], 0.0)

    @cached_property
    def in_loss(self) -> Tensor:
        """(N + C, T) bool, True at tokens that train, if the rows have a loss mask; else :attr:`keep`.

        T is the width of the widest row. Ragged rows have False behind their tokens.

        Raises:
            BatchError: a stage moved tokens between rows, so the caller's rows no longer match.
        """
        key = self.run.keys.loss_mask
        if self.came is None or not has_key(self.came, key):
            return self.keep
        before = _dense(self.came, key)
        if not len(self.run.batch):
            return before.new_zeros((len(self.keep), *before.shape[1:]), dtype=torch.bool)
        mask = self._put_back(key)
        before, mask = _as_wide(before, mask), _as_wide(mask, before)
        # `came` lacks rows of an earlier call. MergeTurns does not merge rows with different NUMBERs.
        new = (mask[: len(before)] & ~before).any(1)
        if rows := new.nonzero().flatten().tolist():
            raise BatchError(
                "the trainer has the tokens of the input rows, but a stage put other tokens into the loss "
                f"at rows {listing(map(str, rows))}. Remove the stage that merges or widens rows"
            )
        return mask & self.keep.to(mask.device).unsqueeze(1)

    def _put_back(self, key: NestedKey) -> Tensor:
        """(N + C, T): put a column of the remaining rows at the input rows; other rows get 0 or False."""
        column, rows = _dense(self.run.batch, key), self.run.batch.get(ROW).flatten()
        wide = column.reshape(len(column), -1)
        whole = wide.new_zeros(len(self.keep) + 1, wide.shape[1])  # the last row is for padding rows
        return whole.index_copy_(0, rows.where(rows >= 0, len(self.keep)), wide)[:-1]

    @cached_property
    def loss_weight(self) -> Tensor:
        """(N + C,) float64: the factor of the loss of each token in a row; 0 for rows that do not train.

        Over the tokens of an optimiser step, Σ weight × token loss is the recipe's mean (`weight.unit`).

        Raises:
            MissingKeyError: the columns have no ``tokens``, or the recipe has no split or no LossWeight.
        """
        if not len(self.run.batch):
            return torch.zeros(len(self.keep), dtype=torch.float64)
        if not self.run.places or "loss_weight" not in self.run.places[0]:
            raise MissingKeyError(
                "loss weights need the number of tokens in the loss of each row, as columns['tokens'], and a "
                "recipe with a split and LossWeight; the stages of this recipe are "
                f"{', '.join(self.run.stages)}"
            )
        return torch.where(self.keep, self.run.of_rank(self.run.places[0]["loss_weight"]), 0.0)

    @cached_property
    def keep(self) -> Tensor:
        """(N + C,) bool, True for rows that train."""
        return self.ledger.reason == 0

    @cached_property
    def compared(self) -> Tensor:
        """(N + C,) int64, number of rollouts that the advantage compared with a row's, which is included.

        0: the row left before the comparison, or has no reward. 1: most recipes give this row the advantage
        0. −1: not known, for example because an earlier batch carried the row over.
        """
        none = np.zeros(len(self.keep), np.int64)
        return torch.from_numpy(self._columns.get("compared", none))

    @cached_property
    def baseline(self) -> Tensor:
        """(N + C,) float64, the number subtracted from the reward; NaN where :attr:`compared` is 0.

        It is also NaN if several rewards are compared one by one, if several stages write the advantage, or
        if a rollout does not have one baseline.
        """
        none = np.full(len(self.keep), np.nan)
        return torch.from_numpy(self._columns.get("baseline", none))

    @cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        return {} if self.run.rows is None else report_columns(self.run)

    @cached_property
    def reason(self) -> list[str]:
        """Why each row does not train, as ``stage/reason``; an empty string for rows that train."""
        names = ["", *self.ledger.names[1:]]
        return [names[code] for code in self.ledger.reason.tolist()]

    @cached_property
    def steps(self) -> list[Tensor]:
        """For each optimiser step: the indices of its rows in the input columns, in the order of training.

        A masked row is part of its step, with weight 0. Skip a step in which no row trains: an optimiser such
        as Adam moves the parameters even with a gradient of 0. Without a split, all rows that train are one
        step.
        """
        if self.run.has_steps:
            return self.run.rows_of_steps()
        return [self.keep.nonzero().flatten()] if bool(self.keep.any()) else []

    @cached_property
    def microbatches(self) -> list[list[Tensor]]:
        """For each of :attr:`steps`, the indices of the rows of each micro-batch."""
        if not (self.run.has_steps and self.steps):
            return [[rows] for rows in self.steps]
        places = self.run.places[0]
        number = self.run.of_rank(places["microbatch"])
        if "rank" in places:
            number = number + self.run.of_rank(places["rank"]) * (number.max() + 1)
        return [[rows[number[rows] == each] for each in number[rows].unique()] for rows in self.steps]

    @property
    def ledger(self) -> Ledger:
        """The outcome of each row, with its ids."""
        return self.run.ledger

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the run (:attr:`Run.metrics`)."""
        return self.run.metrics

    def __repr__(self) -> str:
        blind = f"; not checked: {', '.join(self.unchecked)}" * bool(self.unchecked)
        return f"Decision({self.ledger}{blind})"


def _dense(batch: TensorDictBase, key: NestedKey) -> Tensor:
    """(B, T, ...): a token column; ragged rows are padded on the right."""
    column = column_of(batch, key)
    return padded(column, key) if isinstance(column, list) else column


def _as_wide(column: Tensor, other: Tensor) -> Tensor:
    """(B, max(T, U)): a column (B, T), padded with 0 or False to the width of another column (C, U)."""
    return nn.functional.pad(column, (0, max(0, other.shape[1] - column.shape[1])))


class _PlainNames(ErrorNames):
    """Name plain columns in errors.

    Args:
        columns: the names of the given columns.
        names: the name of each column, by its key in a TensorDict.
        of_tokens: the keys of columns with a number for each token, which the recipe reads.
    """

    def __init__(
        self, columns: Sequence[str], names: Mapping[NestedKey, str], of_tokens: Sequence[NestedKey]
    ):
        self.columns, self.names, self.of_tokens = listing(columns), names, of_tokens

    def say_missing(self, key: NestedKey, option: str, *_: Any, **__: Any) -> str:
        name = self.names.get(key, "")
        if self.of_tokens and (name in COUNTS or key in self.of_tokens):
            return (
                "reads numbers of each token, and plain columns have one number a row: give a TensorDict [N] "
                f"of rows with {listing(map(repr, self.of_tokens))}"
            )
        means = f", {MEANS[name]}" if name in MEANS else ""
        return f"needs the column {self.say_column(key, option)}{means}; {self.say_present()}"

    def say_column(self, key: NestedKey, option: str, **_: Any) -> str:
        return repr(self.names.get(key, key))

    def say_present(self, *_: Any, **__: Any) -> str:
        return f"the columns are {self.columns}"

    def say_stamped(self, *_: Any, **__: Any) -> str:
        return ""

    def say_workers(self, **_: Any) -> str:
        return "Workers need their own ids"


class Decider(AnswersGuesses):
    """Run a recipe on plain columns, batch after batch. Use it for recipes with a state.

    The state is running baselines, the seed of the next permutation, and rows that are carried over.

    Args:
        recipe: the name of a recipe, or a pipeline.
        overrides: see :func:`load_pipeline`.
        options: as for :func:`headrace.pipeline.decide`.

    Raises:
        ConfigError, ValueError: see :func:`load_pipeline`; or options were given with a pipeline.

    Example:
        >>> decider = Decider("rae", group_size=1, minibatches=1)
        >>> columns = {"group_id": [0, 1], "rollout_id": [0, 1], "reward": [1.0, 0.5], "tokens": [5, 5]}
        >>> decider.decide(columns).advantage.tolist()
        [1.0, 0.5]
        >>> decider.decide({**columns, "group_id": [2, 3], "rollout_id": [2, 3]}).advantage.tolist()[0] < 1.0
        True
    """

    @shows_options
    def __init__(
        self,
        recipe: Recipe | str | Pipeline = "grpo",
        *overrides: str,
        **options: Unpack[PipelineOptions],
    ):
        self.pipeline = pipeline_of(recipe, *overrides, **options)
        self.rows = 0  # rows of all calls so far
        stages = [self.pipeline, *self.pipeline.stages.values()]
        self.split = next((stage for stage in stages if hasattr(stage, "restart")), None)
        usual = {role: column.default for role, column in COLUMNS.items() if column.default is not None}
        keys = usual | self.pipeline.columns
        self._keys = {
            key if isinstance(key, str) else key[-1]: nested_key(keys[role])
            for role, key in usual.items()
            if role not in COUNTS.values() and keys[role] is not None
        }
        parts = [part for stage in stages for part in stage_parts(stage)]
        self._ids = {key for part in parts for role, key in column_keys(part).items() if role in IDS}

    @cached_property
    def without_weights(self) -> Pipeline:
        """The pipeline without its LossWeight, for columns without token counts."""
        weight = self.pipeline._keys.weight
        names = [
            name
            for name, stage in self.pipeline.stages.items()
            if weight not in getattr(stage, "out_keys", ())
        ]
        return self.pipeline if names == self.pipeline.order else part_of(self.pipeline, names, None)

    def decide(self, columns: Mapping[str, Any] | TensorDictBase, *, extra: Sequence[str] = ()) -> Decision:
        """Run the recipe on one batch.

        Args:
            columns: see :func:`headrace.pipeline.decide`.
            extra: see :func:`headrace.pipeline.decide`.

        Raises:
            BatchError: see :func:`headrace.pipeline.decide`.
            MissingKeyError: see :func:`headrace.pipeline.decide`.
            ValueError: the recipe does not read one of the columns, or `extra` names one that is missing.
        """
        if isinstance(columns, TensorDictBase):
            if extra:
                raise ValueError(
                    f"extra is for plain columns. A TensorDict may have any column: leave out {extra!r}"
                )
            return self._decide(columns, _rows_of(columns), {})
        refuse_other_arguments(columns)
        if isinstance(extra, str) or not all(isinstance(name, str) for name in extra):
            raise ValueError(f"extra must list names of columns; found {extra!r}")
        if wrong := [name for name in extra if name not in columns or name in (*COUNTS, "next", "headrace")]:
            raise ValueError(
                f"extra must list columns that only a function of yours reads; found {listing(wrong)}, which "
                f"are missing or have a meaning. The columns are {listing(columns)}"
            )
        try:
            return self._decide(None, *self._read(columns, extra))
        except BatchError as err:
            names = {key: name for name, key in self._keys.items()} | {STATUS_KEYS[0]: "status"}
            names |= {mask: count for count in COUNTS for mask in self._masks(count)}
            err.names = _PlainNames(list(columns), names, columns_of_tokens(self.pipeline))
            raise

    def _decide(
        self, came: TensorDictBase | None, batch: TensorDictBase, texts: dict[NestedKey, list[str]]
    ) -> Decision:
        """Run the recipe on a batch. This adds a column to the batch.

        Args:
            came: the rows with tokens; None for plain columns.
            batch: the rows, or the plain columns.
            texts: the texts of ids, by key.
        """
        key = self.pipeline.loss_mask_key
        masked = has_key(batch, number_of(key) if came is None else key)
        pipeline = self.pipeline if masked else self.without_weights
        number = ELSEWHERE if came is None else NUMBER
        if came is None or getattr(self.split, "remainder", "") == "carry":
            batch[number] = torch.arange(self.rows, self.rows + len(batch), device=device_of(batch))
        with labels_said(texts.values):
            run = pipeline.run(batch)
        run.texts |= {label_key(key): text for key, text in texts.items()}
        run.all_taken()
        carried = torch.zeros(0, dtype=torch.int64)
        if run.rows is not None and run.rows.table.carried is not None:
            carried = run.of_rank(run.rows[number])[len(batch) :]
        self.rows += len(batch)
        shown = {
            "failed (no status)": any(has_key(batch, each) for each in STATUS_KEYS),
            "unfinished (no done)": has_key(batch, self._keys["done"]),
            "empty (no tokens)": masked,
        }
        known = {reason for stage in pipeline.stages.values() for reason in getattr(stage, "reasons", ())}
        unchecked = [each for each, there in shown.items() if not there and each.partition(" ")[0] in known]
        return Decision(run, carried, came, unchecked)

    def reads(self, name: str) -> bool:
        """Whether the recipe reads a column of this name."""
        key = self._keys.get(name, name)
        return (
            name in COUNTS
            or key in self.pipeline.asked.columns
            or any(key in getattr(stage, "in_keys", (key,)) for stage in self.pipeline.stages.values())
        )

    def _read(
        self, columns: Mapping[str, Any], extra: Sequence[str]
    ) -> tuple[TensorDict, dict[NestedKey, list[str]]]:
        """Return the columns as a batch, and the texts of ids that are text, by key."""
        if lacking := [name for name, values in columns.items() if values is None]:
            raise BatchError(
                "columns must not be None; found {found}. Leave them out", found=listing(lacking)
            )
        try:
            lengths = {name: len(values) for name, values in columns.items()}
        except TypeError as err:  # a number, or a generator
            kinds = listing(f"{name} ({type(values).__name__})" for name, values in columns.items())
            raise BatchError("columns must be lists, arrays or tensors; found {kinds}", kinds=kinds) from err
        if len(set(lengths.values())) != 1:
            raise BatchError(
                "columns must have one entry for each row; got {found}", found=lengths or "no columns"
            )
        rows = next(iter(lengths.values()))
        batch, texts = TensorDict({}, [rows]), dict[NestedKey, list[str]]()
        unread = []
        for name, given in columns.items():
            values = _plain(given, name)
            if name in COUNTS:
                if not isinstance(values, Tensor) and any(isinstance(each, str) for each in values):
                    raise BatchError(f"{name} must be integers; found texts. {name!r} is {MEANS[name]}")
                of_mask = ": of a mask (N, T), give mask.sum(1)" if getattr(values, "ndim", 1) > 1 else ""
                counts = _as_numbers(values, name, MEANS[name] + of_mask)
                if len(counts) and int(counts.min()) < 0:
                    raise BatchError(
                        f"{name} must be ≥ 0; found {int(counts.min())} at row {counts.argmin()}"
                    )
                for mask in self._masks(name):
                    write_entry(batch, number_of(mask), counts)
                continue
            key = self._keys.get(name, name)
            if not self.reads(name) and name not in extra:
                unread.append(name)
            if key in self._ids:
                ids = _as_numbers(values, name, "one id for each row, an integer or a text")
                write_entry(batch, key, ids)
                if len(values) and isinstance(values[0], str):
                    texts[key] = list(values)
            elif isinstance(values, Tensor):
                write_entry(batch, key, values)
            elif name == "status" and any(isinstance(value, str) for value in values):
                known = [each.name.lower() for each in Status]
                if wrong := sorted({str(value) for value in values} - set(known)):
                    meant = {word: closest(word.lower(), known, most=1, least=0.6) for word in wrong}
                    hints = [
                        f"{word!r} for {' and '.join(repr(each) for each in wrong if meant[each] == [word])}"
                        for word in known
                        if [word] in meant.values()
                    ]
                    raise ValueError(
                        f"status must be one of {', '.join(known)}, or its number; found {listing(wrong)}"
                        + f". Give {', '.join(hints)}" * bool(hints)
                    )
                batch[key] = torch.tensor([Status[value.upper()] for value in values])
            else:
                try:
                    found = np.asarray(values)
                    if found.dtype.kind in "cmM":
                        raise ValueError(f"found {found.dtype}")
                    if name == "reward":
                        for each in found.flat if found.dtype.kind in "OU" else ():
                            if isinstance(each, str):
                                raise ValueError(f"found the text {str(each)!r:.60}")
                        if found.dtype.kind in "iu" and found.dtype.itemsize == 8:
                            as_rewards(
                                found.reshape(-1).tolist()
                            )  # refuses integers that a float cannot hold
                        found = np.asarray(values, dtype=float)
                    if not found.flags.writeable:  # such as arrays of pandas
                        found = found.copy()
                except (TypeError, ValueError) as err:
                    message, why = (
                        "{column_name} must be one number for each row, or K of them: {why}",
                        str(err),
                    )
                    raise BatchError(message, column_name=name, why=why) from err
                batch[key] = torch.from_numpy(found) if found.dtype.kind in "biuf" else list(values)
        if unread:
            of_tokens = {*columns_of_tokens(self.pipeline), self.pipeline.log_prob_key}
            readable = [
                *COUNTS,
                *(name for name in ("status",) if self.reads(name)),  # `status` has no default key
                *(n for n, key in self._keys.items() if self.reads(n) and key not in of_tokens),
            ]
            raise ValueError(
                f"the recipe does not read the columns {listing(unread)}{suggest(unread[0], readable)}; "
                f"it can read {', '.join(sorted(readable))}. Leave out the others, or name those that a "
                "function of yours reads in extra=(...)"
            )
        return batch, texts

    def _masks(self, name: str) -> set[NestedKey]:
        """The masks that the column ``tokens`` or ``length`` replaces."""
        asked = {self.pipeline.loss_mask_key, *(count.mask for count in self.pipeline.asked.counts)}
        return {mask for mask in asked if (mask == self.pipeline.loss_mask_key) == (name == "tokens")}

    def state_dict(self) -> dict[str, Any]:
        """Return the pipeline's state and the number of rows so far."""
        return {"pipeline": self.pipeline.state_dict(), "rows": self.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`.

        Raises:
            ValueError: the state is not that of a Decider.
        """
        if not {"pipeline", "rows"} <= state.keys():
            raise ValueError(f"the state must be that of a Decider's state_dict(); it has {listing(state)}")
        self.pipeline.load_state_dict(state["pipeline"])
        self.rows = int(state["rows"])

    def __repr__(self) -> str:
        return f"Decider({', '.join(self.pipeline.order)})"


def refuse_other_arguments(*given: Any) -> None:
    """Refuse arguments that are not columns, or columns and then the name of a recipe.

    Raises:
        ValueError: there are other arguments; the message says what each looks like, in order.
    """
    kinds: list[Any] = [(Mapping, TensorDictBase), str]
    if all(isinstance(each, kind) for each, kind in zip(given, kinds, strict=False)):
        return

    def looks(each: Any) -> str:
        if isinstance(each, str):
            return repr(each)
        if isinstance(each, Mapping | TensorDictBase):
            return "columns"
        try:
            kind = np.asarray(each).dtype.kind
        except (TypeError, ValueError):  # on another device, or ragged
            kind = ""
        return {"f": "numbers like rewards", "i": "whole numbers", "U": "texts like ids"}.get(
            kind, f"a {type(each).__name__}"
        )

    found = [given[0], *(each for each in given[1:] if not isinstance(each, str))]  # without names of recipes
    raise ValueError(
        f"columns must be one mapping of names, such as {EXAMPLE}, or a TensorDict; the name of a recipe "
        f"comes behind it. Found {', then '.join(looks(each) for each in found)}"
    )


def _plain(values: Any, name: str) -> Any:
    """Return a column as a list, an array or a tensor. Missing rewards become NaN.

    Raises:
        BatchError: another value is missing.
    """
    if isinstance(values, np.ma.MaskedArray):
        rows = np.flatnonzero(np.ma.getmaskarray(values).reshape(len(values), -1).any(1)).tolist()
        if name == "reward":
            return values.astype(float).filled(np.nan)
        if rows:
            raise BatchError(
                "{column_name} must have a value for each row; found masked ones at rows {found}",
                column_name=name,
                found=listing(map(str, rows)),
            )
        return values.data
    # A pandas Series is indexed by its labels, and not by row.
    return values.to_numpy() if hasattr(values, "to_numpy") and hasattr(values, "iloc") else values


def _as_numbers(values: Any, name: str, means: str) -> Tensor:
    """Convert a column to (N,) int64 (:func:`as_ids`). Errors say what the column is."""
    try:
        return as_ids(values, name)
    except BatchError as err:
        err.more = f". {name!r} is {means}"
        raise


def _rows_of(batch: TensorDictBase) -> TensorDictBase:
    """Return a shallow copy of a batch [N], to which columns can be added."""
    if batch.ndim != 1:
        raise BatchError(f"a batch of shape [N] is required; got {[*batch.shape]}")
    return shallow_copy(batch)


def pipeline_of(
    recipe: Recipe | str | Pipeline, /, *overrides: str, **options: Unpack[PipelineOptions]
) -> Pipeline:
    """Return a pipeline unchanged, or load a recipe by its name.

    Raises:
        ConfigError: see :func:`load_pipeline`.
        ValueError: see :func:`load_pipeline`; or options were given with a pipeline.
    """
    if not isinstance(recipe, Pipeline):
        return load_pipeline(recipe, *overrides, **options)
    if overrides or options:
        raise ValueError(
            f"options must not be given with a pipeline; got {[*overrides, *options]}. Set them in "
            "load_pipeline"
        )
    return recipe


_composed: OrderedDict[str, Decider] = OrderedDict()
_lock = Lock()


@shows_options
def decide(
    data: Mapping[str, Any] | TensorDictBase,
    /,
    recipe: Recipe | str = "grpo",
    *overrides: str,
    extra: Sequence[str] = (),
    **options: Unpack[PipelineOptions],
) -> Decision:
    """Decide which rows train, with which advantage and loss weight, from a few plain columns.

    Use it in a trainer without TensorDicts. It moves no batch and keeps no state between calls.

    Args:
        data: columns by name: lists, arrays or tensors with one entry for each row. ``group_id`` and
            ``rollout_id``, numbers or text; ``reward``, (N,) or (N, K); ``tokens``, (N,) int, the number of
            tokens of each row in the loss, needed for loss weights; and the other columns that the recipe
            reads: ``status``, ``policy_version``, ``expected_rollouts``, ``length`` (the number of all
            tokens of each row), …. If the recipe reads numbers of each token: a TensorDict ``[N]`` of rows,
            as for a pipeline.
        recipe: the name of the recipe.
        overrides: see :func:`load_pipeline`.
        extra: names of further columns, which only a function of yours reads, such as a criterion. This
            function gets a TensorDict with the columns under these names.
        options: keywords of :func:`load_pipeline`, which explains them. `stages` has all other options of
            stages, such as ``{"advantage": {"clip": [-5, 5]}, "filter": None}``. `seed` is 0 if you leave it
            out. Composed recipes are cached.

    Returns:
        A :class:`Decision` with tensors in the order of the rows.

    Raises:
        BatchError: a stage of the recipe refused rows, whose ids are listed, or columns differ in length.
        MissingKeyError: the recipe reads a column that is missing; the message names it.
        ValueError: the recipe does not read a column; the recipe has a state, and needs a
            :class:`Decider`; or an argument is neither columns nor the name of a recipe.

    Example:
        >>> found = decide(
        ...     {"group_id": ["a", "a", "b", "b"], "rollout_id": [0, 1, 2, 3], "reward": [1.0, 0.0, 1.0, 1.0],
        ...      "tokens": [3, 2, 4, 1]}, "dr_grpo", group_size=2, minibatches=1)
        >>> found.advantage.tolist(), found.reason[2]
        ([0.5, -0.5, 0.0, 0.0], 'filter/zero_variance')
    """
    refuse_other_arguments(data, recipe, *overrides)
    seed: Any = options.pop("seed", ...)
    seed = 0 if seed is ... else seed
    if not fits(seed, int):
        raise ValueError(f"seed must be an integer; got {seed!r}")
    # The key has the ids of objects, because objects may look alike. A cached recipe keeps its objects alive,
    # so no id is used twice.
    known = f"{recipe!r} {overrides!r} {sorted(options.items())!r} {[*map(id, objects_in(options))]}"
    with _lock:
        if (decider := _composed.pop(known, None)) is None:
            decider = Decider(recipe, *overrides, **options)
            refuse_state(decider.pipeline)
        _composed[known] = decider
        if len(_composed) > COMPOSED:
            _composed.popitem(last=False)
        if decider.split is not None:
            decider.split.restart(seed)
        return decider.decide(data, extra=extra)


def columns_of_tokens(pipeline: Pipeline) -> list[NestedKey]:
    """The token columns that the stages read, other than the loss mask."""
    roles = {*OF_TOKENS, "tokens", "turn_index", "turn_reward"} - {"log_prob", "importance"}
    found = [
        key
        for stage in pipeline.stages.values()
        for part in stage_parts(stage)
        for role, key in column_keys(part).items()
        if role in roles and key in {*getattr(stage, "in_keys", ()), *getattr(part, "in_keys", ())}
    ]
    return list(dict.fromkeys(found))


def refuse_state(pipeline: Pipeline) -> None:
    """Refuse stages that keep a state from batch to batch, other than the seed of the next permutation.

    Raises:
        ValueError: there are such stages; the message names them.
    """
    found = [
        name
        for name, stage in pipeline.stages.items()
        if getattr(stage, "stateful", False) and getattr(stage, "remainder", "carry") == "carry"
    ]
    carries = any(getattr(pipeline.stages[name], "remainder", "") == "carry" for name in found)
    if found:
        raise ValueError(
            f"the state of the stage{'s' * (len(found) > 1)} {listing(found)} lasts from one batch to the "
            "next, and decide() keeps none. Make one headrace.Decider(recipe, **options), call its "
            "decide(columns) for each batch, and save its state_dict()"
            + ". Its ids must be unique over batches"
            * carries
        )


class RowAdvantages(NamedTuple):
    """Advantage and mask of each input row, in the order of the input."""

    advantage: Tensor
    """(N, 1) float32, or (N, T) if each token has its own; 0 outside the loss."""
    in_loss: Tensor
    """(N, 1), or (N, T) if the batch has a loss mask; bool, True trains."""
    run: Run
    """The run, with ledger, metrics and report."""


@takes_options
def advantages_of(pipeline: Pipeline, batch: TensorDictBase) -> RowAdvantages:
    """Run the stages before the split, and return advantages and masks for all rows in input order.

    Use it in a trainer that makes minibatches and loss weights itself. A row that a stage drops or masks has
    advantage 0 and is out of the loss: leave it out of means over tokens or rows. The tensors are on the
    batch's device. If the batch has a loss mask, this reads the device once, in addition to the stages.

    Args:
        pipeline: the pipeline. Its split and its weight are not used.
        batch: TensorDict ``[N]`` with ids, rewards, and the other columns that the recipe reads.

    Returns:
        A :class:`RowAdvantages`.

    Raises:
        BatchError: a stage refused the batch, or moved tokens between rows, so the trainer's rows no longer
            match.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.pipeline import load_pipeline
        >>> batch = TensorDict(
        ...     {"group_id": [7, 4, 7, 4], "rollout_id": [0, 1, 2, 3], ("next", "reward"): [1.0, 2, 3, 2]},
        ...     batch_size=[4],
        ... )
        >>> words = "pipeline.stages.gate.group_size=2", "pipeline.stages.filter.action=drop"
        >>> pipeline = load_pipeline("pipeline=dr_grpo", *words)
        >>> found = advantages_of(pipeline, batch)
        >>> found.advantage.flatten().tolist(), found.in_loss.flatten().tolist()
        ([-1.0, 0.0, 1.0, 0.0], [True, False, True, False])
    """
    decision, device = Decider(before_the_split(pipeline)).decide(batch), device_of(batch)
    advantage, in_loss = [
        (each.unsqueeze(1) if each.ndim == 1 else each).to(device)
        for each in (decision.advantage, decision.in_loss)
    ]
    return RowAdvantages(advantage.to(FLOAT), in_loss, decision.run)
