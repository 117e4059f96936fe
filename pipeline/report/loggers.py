"""Reports in experiment trackers, through TorchRL's loggers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .step import StepReport


def log_report(logger: Any, report: StepReport, *, prefix: str = "", table: bool = False) -> None:
    """Log all numbers of a report, and where the tracker has tables, its groups.

    Args:
        logger: TorchRL's ``CSVLogger``, ``TensorboardLogger``, ``WandbLogger``, ``MLFlowLogger``,
            ``TrackioLogger``, or anything with ``log_scalar(name, value, step=...)``.
        report: of the step, whose number is logged with them.
        prefix: before each name, ``"pipeline/"`` say.
        table: log the table of groups too, where the tracker has tables (wandb, trackio, mlflow); others
            get the numbers alone.

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
        _log_table(logger, f"{prefix}groups", report)


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
    prompts = report.texts.get("prompt")
    if prompts is not None:
        names.insert(1, "prompt")
        columns.insert(1, [prompts[row] for row in groups["row"]])
    return names, [list(row) for row in zip(*columns, strict=True)]


def _log_table(logger: Any, name: str, report: StepReport) -> None:
    kinds = {kind.__name__ for kind in type(logger).__mro__}
    names, rows = group_rows(report)
    if "WandbLogger" in kinds:
        import wandb

        table = wandb.Table(columns=list[str | int](names), data=rows)
        logger.experiment.log({name: table})  # without a step: wandb has advanced its own past this one
    elif "TrackioLogger" in kinds:
        import trackio
        from pandas import DataFrame

        logger.experiment.log(
            {name: trackio.Table(dataframe=DataFrame(rows, columns=names))}, step=report.step
        )
    elif "MLFlowLogger" in kinds:
        import mlflow

        columns = {column: [row[i] for row in rows] for i, column in enumerate(names)}
        mlflow.log_table(columns, f"{name}_{report.step}.json")
