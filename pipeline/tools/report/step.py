"""Make the report of one processed batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase

from headrace.faces import AnswersGuesses
from headrace.pipeline.account_keys import TEXTS
from headrace.pipeline.conversations import labels_of_ids, strings
from headrace.pipeline.wording import printable
from headrace.spelling import suggest
from headrace.transforms import Status
from headrace.transforms.table import enter_rows, stages_of_values
from headrace.transforms.table.options import takes_options
from headrace.transforms.table.schema import FINISHED

from .advice import Advisory, advise
from .funnel import Level, funnel, funnel_table, left_numbers
from .groups import compared_ids, groups_of, reading_order, rollouts_of, staleness_of
from .notebook import ColumnTable, shown_value
from .numbers import numbers_of
from .over_steps import Numbers
from .row_columns import report_columns
from .shared_tokens import count_shared_tokens, count_trained_again
from .tables import FittedColumn, FittedTable
from .texts import Decode, TokenValues, row_numbers, texts_of_tokens, values_by_token
from .user_turn import last_user_turn

if TYPE_CHECKING:
    from headrace.pipeline.pipeline import Pipeline
    from headrace.pipeline.run import Run
    from headrace.transforms.streams import Survivors

BY_TOKEN = ("advantage", "importance_weight", "loss_weight")
TOKENS_READ = 50_000  # a report has numbers of at most this many tokens; a page of many steps shows fewer


@dataclass(frozen=True)
class StepReport(AnswersGuesses):
    """What happened to one batch between the collector and the loss. It is on the CPU and keeps no pipeline.

    Attributes:
        step: number of the step.
        recipe: (name, text) of each stage, in order.
        columns: (N,) NumPy arrays by name, one entry per row of the batch. There is always `row`, and
            `reason`, a code in `names`. If the batch had them, there are also `rollout_id`, `group_id`,
            `collected_reward` (the row's own), `reward` (the rollout's, as the advantage saw it), `advantage`
            (a mean over tokens, if it is per token), `advantage_by_row` (the advantage if each row were a
            rollout), `loss_weight` (even if it was folded into the advantage; `advantage` does not include
            it), `tokens` (in the loss, as collected), `trained_tokens` (after all stages), `status`,
            `policy_version` (of the oldest sampled token, if versions are per token; then also
            `newest_version`, and the sum and number of the versions of sampled tokens, `version_sum` and
            `version_tokens`), `expected_rollouts`, `minibatch`, `microbatch`, `rank`, `empty` (1: the row
            arrived without a token in the loss, and is in no statistic), `logged_advantage` (the dump's),
            `compared` (number of rollouts that the advantage compared with the row's, which is included),
            `baseline` (the number that was subtracted from its reward), `peers` (ids of the rows that the
            advantage compares, if these are not a group). An unknown float is NaN, an unknown integer -1.
        names: ``stage/reason`` by code; 0 is ``trained``.
        actions: what happened to rows with a reason, by code.
        texts: N strings by name: ``prompt``, ``response``, ``ground_truth``; ``response_parts``, the parts of
            a response without tokens, as JSON, with whether each was sampled; ``other_columns``, a dump's
            other columns, as JSON objects; ``group_label`` and ``rollout_label``, if ids have labels that
            differ from the ids.
        by_token: the numbers of each token, for some rows: the first of :func:`rows_to_read`.
        group_size: number of rollouts that were dispatched for each group, if the gate has this option.
        solved: least reward of a solved rollout.
        each_reward: whether several rewards are compared one by one, instead of their sum.
        metrics: the metrics of the pipeline.
        survivors: counts of the groups that the stream has trained and lost so far.
    """

    step: int
    recipe: tuple[tuple[str, str], ...]
    columns: Mapping[str, np.ndarray]
    names: Sequence[str]
    actions: Sequence[str]
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    group_size: int | None = None
    solved: float = 1.0
    each_reward: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)
    by_token: Mapping[int, TokenValues] = field(default_factory=dict)
    survivors: Survivors | None = None

    def __len__(self) -> int:
        return len(self.columns["reason"])

    def __repr__(self) -> str:
        trained = int((self.columns["reason"] == 0).sum())
        return f"StepReport(step={self.step}, {trained} of {len(self)} rows trained)"

    def _repr_html_(self) -> str:
        numbers = FittedTable([FittedColumn("number"), FittedColumn("value", right=True)])
        for name, value in self.numbers.items():
            numbers.add(name, shown_value(value))
        parts = [funnel_table(f"step {self.step}", self.funnel)._repr_html_()]
        parts += [f"<p>{escape(printable(each.text))}</p>" for each in self.advisories]
        parts += [ColumnTable(self.groups)._repr_html_("Groups")] if self.groups else []
        counted = f"<summary>{len(numbers.rows)} numbers</summary>"
        return "".join([*parts, f"<details>{counted}{numbers._repr_html_()}</details>"])

    def ids(self, unit: Literal["group", "rollout"], rows: np.ndarray) -> list[int] | list[str]:
        """The ids of rows as users know them: their labels if the batch had labels, else the numbers."""
        labels = self.texts.get(f"{unit}_label")
        return self.columns[f"{unit}_id"][rows].tolist() if labels is None else [labels[row] for row in rows]

    @cached_property
    def funnel(self) -> list[Level]:
        """For each stage, the counts in the loss after the stage, and of what left there, by reason."""
        return funnel(self.columns, [name for name, _ in self.recipe], self.names, self.actions)

    @cached_property
    def rollouts(self) -> dict[str, np.ndarray]:
        """One entry per rollout."""
        return ColumnTable(rollouts_of(self.columns))

    @cached_property
    def groups(self) -> dict[str, np.ndarray]:
        """One entry per group; empty if the batch has no groups."""
        return ColumnTable(groups_of(self.columns, self.group_size, each_reward=self.each_reward))

    @cached_property
    def as_compared(self) -> StepReport:
        """The report with other groups: rollouts that the advantage compares, such as those of one role."""
        if not self.groups or "peers" not in self.columns:
            return self
        ids = compared_ids(self.columns)
        return replace(self, columns={**self.columns, "group_id": ids}, group_size=None)

    def asked(self, row: int) -> str | None:
        """The last user turn in the prompt of a row (:func:`last_user_turn`); None: not known."""
        prompts = self.texts.get("prompt")
        return None if prompts is None else last_user_turn(prompts[row])

    def first_of_group(self, row: int) -> int | None:
        """The first row of a row's group; None if the batch has no groups."""
        return self._first_rows.get(int(self.columns["group_id"][row])) if self.groups else None

    @cached_property
    def _first_rows(self) -> dict[int, int]:
        return dict(zip(self.groups["id"].tolist(), self.groups["row"].tolist(), strict=True))

    @cached_property
    def staleness(self) -> np.ndarray:
        """(N,) number of versions behind the trainer, or behind the newest row (:func:`staleness_of`)."""
        return staleness_of(self.columns)

    @cached_property
    def statuses(self) -> list[str | None] | None:
        """N names of :class:`~headrace.transforms.Status` in lower case; None if the batch had no statuses.

        If the status of one row is not known, its name is None.
        """
        if "status" not in self.columns:
            return None
        names = {int(status): status.name.lower() for status in Status} | {-1: None}
        return [names.get(value, str(value)) for value in self.columns["status"].tolist()]

    @cached_property
    def advisories(self) -> list[Advisory]:
        """The advice from the numbers of this step alone (:func:`advise`)."""
        return advise(self.numbers)

    @cached_property
    def numbers(self) -> dict[str, float]:
        """The pipeline's metrics, and the statistics of a step (:func:`numbers_of`)."""
        left = left_numbers(self.funnel, self.names)
        compared = self.as_compared.groups
        return {
            **self.metrics,
            **left,
            **self._characters(),
            **numbers_of(self.columns, self.rollouts, self.groups, self.solved, compared=compared),
        }

    @property
    def unsaid(self) -> list[str]:
        """Names of numbers that a page shows first but that this batch cannot have, such as lengths."""
        found = ["response_length/mean"] if "no_lengths" in self.columns else []
        known = "status" in self.columns and bool((self.columns["status"] >= 0).all())
        return found if known else [*found, "rollouts/truncated"]

    def _characters(self) -> dict[str, float]:
        """The numbers of characters of responses, if their tokens are not known."""
        responses = self.texts.get("response")
        if responses is None or "no_lengths" not in self.columns or not len(self):
            return {}
        rollouts = self.columns.get("rollout_id", self.columns["row"])
        _, of = np.unique(rollouts, return_inverse=True)
        characters = np.bincount(of.reshape(-1), [len(text) for text in responses])
        numbers = {"mean": characters.mean(), "max": characters.max()}
        return {f"response_characters/{name}": float(value) for name, value in numbers.items()}


class Decided(Protocol):
    """What reports need of a :class:`~headrace.pipeline.Decision`, a class that they cannot import."""

    run: Run


@takes_options
def make_report(
    processed: Run | Pipeline | Decided,
    *,
    step: int | None = None,
    solved: float = 1.0,
    batch: TensorDictBase | None = None,
    parameters: float | None = None,
    decode: Decode | None = None,
    numbers: Numbers | None = None,
    texts: Mapping[str, Sequence[str]] | None = None,
    survivors: Survivors | None = None,
) -> StepReport:
    """Make the report of a run, or of the last batch of a pipeline.

    If the recipe writes advantages or weights per token, the report of a run also has these, for the rows
    that differ most, with at most 50,000 tokens in all. Reading them, and making texts of tokens, takes a few
    more device reads.

    Args:
        processed: a :class:`Run`, a `Decision`, or a :class:`Pipeline` after a batch.
        step: number of the step; None: the run's number, which is 0 unless an adapter has set it.
        solved: least reward of a solved rollout.
        batch: the input of the pipeline. If it has tokens, the report says what its rows would cost as trees
            (:class:`SharedTokens`). None: the cost is left out.
        parameters: number of the model's parameters, for FLOPs. None: FLOPs are relative.
        decode: makes one string of each token id, such as ``lambda ids: [tokenizer.decode([id]) for id in
            ids]``. It is used if the rows have tokens and no texts. None: such rows have no texts.
        numbers: numbers of your trainer, by name, as floats or tensors with one element. The report knows
            ``optimiser/lr``, ``optimiser/loss``, ``optimiser/grad_norm``, ``optimiser/entropy`` and the other
            numbers of an :class:`OptimiserRecord`. It also shows all others.
        texts: N texts for each of ``prompt``, ``response`` and ``ground_truth``, one for each input row, if
            the run has none. ``other_columns``: anything else about a row, as a JSON object.
        survivors: counts of trained and lost groups: :attr:`RolloutStream.survivors` or
            :attr:`GroupAssembler.survivors`.

    Raises:
        RuntimeError: there was no batch, or a stage refused it.
        TypeError: `processed` is something else.
        ValueError: a value of `numbers` is not a number, or the report has another number with its name; a
            name in `texts` is unknown, or does not have one text for each row.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.pipeline import Pipeline
        >>> run = Pipeline({}).run(TensorDict({"rollout_id": [4, 5]}, batch_size=[2]))
        >>> make_report(run, step=7)
        StepReport(step=7, 2 of 2 rows trained)
    """
    inner: Any = getattr(processed, "run", None)  # a pipeline's `run` is a method
    one: Any = inner if hasattr(inner, "ledger") else processed
    run: Run | None = one.last_run if hasattr(one, "last_run") else one
    if run is None:
        raise RuntimeError(
            "there is no batch to report on: run the pipeline on a batch. A refused batch has no report. If "
            "a copy of the pipeline ran, for example in a worker process, report from this copy"
        )
    if not hasattr(run, "ledger"):
        raise TypeError(f"make_report takes a run, a decision or a pipeline; got {type(processed).__name__}")
    step = run.step if step is None else step
    recipe = tuple((name, repr(stage)) for name, stage in run.stages.items())
    metrics = run.metrics | ({} if survivors is None else survivors.numbers())
    if run.rows is None:
        nothing = dict.fromkeys(("row", "reason", "group_id", "rollout_id"), np.empty(0, dtype=np.int64))
        nothing |= {"collected_reward": np.empty(0)}
        names = tuple(run.ledger.names)
        return StepReport(step, recipe, nothing, names, names, metrics=metrics, survivors=survivors)
    columns = {**report_columns(run), "reason": run.ledger.reason.numpy()}
    columns["row"] = np.arange(len(columns["reason"]))
    comparing = [stage for stage in run.stages.values() if hasattr(stage, "advantage_by_row")]
    of_values = [own for stage in run.stages.values() for own in stages_of_values(stage).values()]
    several = {getattr(own, "several", "sum") for own in of_values if hasattr(own, "advantage_by_row")}
    if (
        comparing and run.rows.table.ranks.size == 1
    ):  # if groups are spread over ranks, a part of a group has no meaning
        by_row = _advantage_by_row(comparing[0], columns)
        columns |= {} if by_row is None else {"advantage_by_row": by_row}
    there = run.ungathered if run is one and run.has_batch else None
    own = {name.replace("optimizer/", "optimiser/"): value for name, value in (numbers or {}).items()}
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            own[name] = value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"numbers must have a number under each name; got {name}={value!r}")
    if batch is not None:
        batch = enter_rows(batch, [], reader="make_report")
        ids: dict[str, Any] = {
            name: columns[name][: len(batch)] for name in ("group_id", "rollout_id") if name in columns
        }
        counts = count_shared_tokens(batch, ids, ~run.ledger.left.numpy()[: len(batch)])
        metrics |= counts.numbers(parameters=parameters)
    if there is not None and "rollout_id" in columns:
        rollouts = columns["rollout_id"][row_numbers(there)]
        again = count_trained_again(there, rollouts, run.keys.loss_mask, run.keys.log_prob)
        metrics |= {} if again is None else {"tokens/trained_again": again}
    if unknown := [name for name in texts or {} if name not in TEXTS]:
        raise ValueError(
            f"texts has no {unknown[0]!r}{suggest(unknown[0], TEXTS)}; its names are {', '.join(TEXTS)}"
        )
    given = {name: [str(text) for text in each] for name, each in (texts or {}).items()}
    if wrong := {name: len(each) for name, each in given.items() if len(each) != len(columns["row"])}:
        raise ValueError(f"texts must have one text for each of {len(columns['row'])} rows; found {wrong}")
    by_token: dict[int, TokenValues] = {}
    gates = [stage.group_size for stage in run.stages.values() if FINISHED in getattr(stage, "out_keys", ())]
    report = StepReport(
        step=step,
        recipe=recipe,
        columns=columns,
        names=tuple(run.ledger.names),
        actions=tuple(run.ledger.actions),
        texts=_texts(run, columns, there if batch is None else batch, decode) | given,
        group_size=gates[0] if gates else None,
        solved=solved,
        each_reward=several != {"sum"},
        metrics=metrics,
        by_token=by_token,
        survivors=survivors,
    )
    if own:
        if twice := sorted({*report.numbers} & {*own}):
            raise ValueError(
                f"numbers must have names that the report does not have; found {', '.join(twice)}"
            )
        metrics |= own  # the report holds this dict, so the statistics in it are not computed again
        report.numbers.update(own)

    def rows_read() -> Iterator[int]:
        """Yield the rows to read. This takes long, so it is done only if a recipe writes numbers by token."""
        rows = rows_to_read(report)
        tokens = columns.get("tokens", np.zeros(len(report), np.int64))
        yield from rows[np.cumsum(tokens[rows]) <= TOKENS_READ].tolist()

    if there is not None:
        keys = {name: run.keys.found[name][0] for name in BY_TOKEN}
        by_token |= values_by_token(there, keys, rows_read(), run.keys.loss_mask, decode)
    return report


def _texts(
    run: Run, columns: Mapping[str, np.ndarray], batch: TensorDictBase | None, decode: Decode | None
) -> dict[str, Sequence[str]]:
    """The texts of all rows, and the labels of their ids. Missing texts are made from tokens."""
    rows = len(columns["reason"])
    found = {name: strings(text, rows) for name, text in run.texts.items()}
    for unit in ("group", "rollout"):
        if found.get(f"{unit}_label") is not None:
            ids = columns.get(f"{unit}_id", np.empty(0)).tolist()
            found[f"{unit}_label"] = labels_of_ids(found[f"{unit}_label"], ids)
    texts = {name: text for name, text in found.items() if text is not None}
    if decode is None or batch is None or {"prompt", "response"} <= set(texts):
        return texts
    return texts_of_tokens(batch, rows, decode, run.keys.loss_mask) | texts


def rows_to_read(report: StepReport) -> np.ndarray:
    """(N,) row numbers in the order in which to read them.

    First come the worst and the best rollout of each group, or one rollout if rewards are equal; then all
    other rollouts. Both parts follow :func:`reading_order`. So if there is room for only some rows, many
    groups have a response, including groups with equal rewards.

    Example:
        >>> columns = {"group_id": np.array([4, 5, 5, 4, 5]), "reward": np.array([1.0, 0, 1, 1, 0.5])}
        >>> columns["reason"], columns["rollout_id"] = np.zeros(5, int), np.arange(5)
        >>> rows_to_read(StepReport(0, (), columns, ("trained",), ("trained",))).tolist()
        [1, 2, 0, 4, 3]
    """
    if not report.groups:
        return np.arange(len(report))
    groups, each = report.groups, report.rollouts
    order = reading_order(groups)
    place = {group: at for at, group in enumerate(groups["id"][order].tolist())}
    group = np.array([place[id] for id in each["group"].tolist()])  # (R,)
    # A rollout without a reward is neither the worst nor the best of its group.
    reward = np.where(np.isfinite(each["reward"]), each["reward"], groups["reward_mean"][order][group])
    by_reward = np.lexsort((each["row"], reward, group))
    size = np.bincount(group)
    rank = np.arange(len(group)) - (np.cumsum(size) - size)[group[by_reward]]  # within the group
    differ = ~groups["zero_variance"][order][group[by_reward]]
    best = differ & (rank == size[group[by_reward]] - 1)
    rollouts = by_reward[np.argsort((rank > 0) & ~best, kind="stable")]
    turn = {rollout: at for at, rollout in enumerate(each["rollout"][rollouts].tolist())}
    ids = report.columns.get("rollout_id", np.arange(len(report)))
    return np.argsort([turn[rollout] for rollout in ids.tolist()], kind="stable")


def _advantage_by_row(stage: Any, columns: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """(N,) the advantage that each row would have if it were a rollout."""
    if not {"reward", "advantage", "group_id"} <= set(columns):
        return None
    rows = np.isfinite(columns["advantage"]) & np.isfinite(columns["reward"]) & (columns["group_id"] >= 0)
    rows &= columns["compared"] != 0
    if not rows.any():
        return None
    reward, groups = (torch.from_numpy(each[rows]) for each in (columns["reward"], compared_ids(columns)))
    credit = stage.advantage_by_row(reward, groups)
    if credit is None:
        return None
    result = np.full(len(rows), np.nan)
    result[rows] = credit.numpy()
    return result
