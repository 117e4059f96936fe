"""Log reports to experiment trackers, through TorchRL's loggers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .page_contents import or_none, shortened
from .step import StepReport, rows_to_read

ROLLOUTS = 200  # a table has at most this many rollouts, because trackers keep a table of every step
COLUMNS = ["group", "rollout", "prompt", "response", "reward", "advantage", "length", "status", "reason"]


def log_report(logger: Any, report: StepReport, *, prefix: str = "", table: bool = False) -> None:
    """Log all numbers of a report and, with `table`, its groups and rollouts.

    Args:
        logger: TorchRL's ``CSVLogger``, ``TensorboardLogger``, ``WandbLogger``, ``MLFlowLogger``,
            ``TrackioLogger``, or anything with ``log_scalar(name, value, step=...)``.
        report: the report of the step. Its step number is logged, too.
        prefix: text before each name, such as ``"pipeline/"``.
        table: whether to also log the tables ``groups`` and ``rollouts`` (:func:`rollout_rows`), to trackers
            that have tables (wandb, trackio, mlflow). Other trackers get only the numbers.

    Example:
        >>> from tensordict import TensorDict
        >>> from headrace.pipeline import Pipeline, make_report
        >>> pipeline = Pipeline({})
        >>> _ = pipeline(TensorDict({"rollout_id": [4, 5]}, batch_size=[2]))
        >>> class Printer:
        ...     def log_scalar(self, name, value, step):
        ...         print(step, name, value) if name == "rollouts/in" else None
        >>> log_report(Printer(), make_report(pipeline, step=3))
        3 rollouts/in 2.0
    """
    for name, value in report.numbers.items():
        logger.log_scalar(f"{prefix}{name}", value, step=report.step)
    if table:
        for name, (columns, rows) in {"groups": group_rows(report), "rollouts": rollout_rows(report)}.items():
            _log_table(logger, f"{prefix}{name}", report.step, columns, rows)


def group_rows(report: StepReport) -> tuple[list[str], list[list[Any]]]:
    """The table of groups: the names of its columns, and a list of Python values per group."""
    groups = report.groups
    if not groups:
        return ["group"], []
    names = ["group", *(name for name in groups if name not in ("id", "row"))]
    columns: list[Sequence[Any]] = [
        report.ids("group", groups["row"]),
        *(groups[name].tolist() for name in names[1:]),
    ]
    if "prompt" in report.texts:
        names.insert(1, "prompt")
        columns.insert(1, [report.asked(row) for row in groups["row"]])
    return names, [list(row) for row in zip(*columns, strict=True)]


def rollout_rows(report: StepReport) -> tuple[list[str], list[list[Any]]]:
    """The table of rollouts: the names of its columns, and a list of Python values per rollout.

    The columns are ``group``, ``rollout``, ``prompt`` (its last user turn), ``response`` (its segments one
    after the other), ``reward``, ``advantage``, ``length`` (tokens in the loss mask), ``status``, and
    ``reason``, which is ``trained`` or ``stage/reason``. At most 200 rollouts are listed, chosen as for the
    page (:func:`rows_to_read`) and sorted by group. Texts have at most 4,000 characters.
    """
    each, statuses, responses = report.rollouts, report.statuses, report.texts.get("response")
    columns = report.columns
    ids = columns.get("rollout_id", columns["row"]).tolist()
    rows_of: dict[int, list[int]] = {}
    for row in rows_to_read(report).tolist():
        rows_of.setdefault(ids[row], []).append(row)
    place = {rollout: at for at, rollout in enumerate(each["rollout"].tolist())}
    group, names = (
        report.ids(unit, each["row"]) if f"{unit}_id" in columns else each[unit].tolist()
        for unit in ("group", "rollout")
    )
    reward, advantage = or_none(each["reward"]), or_none(each["advantage"])
    table, chosen = [], list(rows_of.items())[:ROLLOUTS]
    first_come = {each["group"][place[rollout]]: at for at, (rollout, _) in reversed([*enumerate(chosen)])}
    for rollout, rows in sorted(chosen, key=lambda one: first_come[each["group"][place[one[0]]]]):
        at, asked = place[rollout], report.asked(rows[0])
        line: list[Any] = [group[at], names[at], None if asked is None else shortened(asked)]
        line.append(None if responses is None else shortened("\n\n".join(responses[row] for row in rows)))
        line += [reward[at], advantage[at]]
        line.append(int(columns["tokens"][rows].sum()) if "tokens" in columns else None)
        line.append(None if statuses is None else statuses[rows[-1]])
        table.append([*line, report.names[each["reason"][at]]])
    return COLUMNS, table


def _log_table(logger: Any, name: str, step: int, names: list[str], rows: list[list[Any]]) -> None:
    kinds = {kind.__name__ for kind in type(logger).__mro__}
    if "WandbLogger" in kinds:
        import wandb

        table = wandb.Table(columns=list[str | int](names), data=rows)
        logger.experiment.log({name: table})  # without a step, because wandb's own step is greater
    elif "TrackioLogger" in kinds:
        import trackio
        from pandas import DataFrame

        logger.experiment.log({name: trackio.Table(dataframe=DataFrame(rows, columns=names))}, step=step)
    elif "MLFlowLogger" in kinds:
        import mlflow

        columns = {column: [row[i] for row in rows] for i, column in enumerate(names)}
        mlflow.log_table(columns, f"{name}_{step}.json")
