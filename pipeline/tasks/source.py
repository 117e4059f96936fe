"""A source with a progress bar, and the errors of its batches with their step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from tensordict import TensorDictBase

from headrace.pipeline.load import ConfigError
from headrace.pipeline.sources import Source, SourceError, open_source
from headrace.transforms import BatchError


def open_configured(config: DictConfig) -> Source:
    """The source that ``source:`` describes.

    Raises:
        ConfigError: no path, or an option that is none.
        SourceError: no file, or a format that is not clear.
    """
    options = OmegaConf.to_container(config.source, resolve=True)
    if not isinstance(options, dict) or not options.get("path"):
        raise ConfigError(
            "a dump to read is required: source.path=FILE, FOLDER or a glob in quotes; got none"
        )
    try:
        return open_source(**{str(name): value for name, value in options.items()})
    except SourceError:
        raise
    except (TypeError, ValueError) as err:
        raise ConfigError(f"source: {err}") from err


def each_step(source: Source, console: Console) -> Iterator[tuple[int, TensorDictBase]]:
    """Its batches, while a bar shows how far the files have been read; then what was skipped."""
    columns = (
        TextColumn("reading"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TextColumn("step {task.fields[step]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=source.total_bytes, step="–")
        for step, batch in source:
            progress.update(task, completed=source.read_bytes, step=step)
            yield step, batch
    if source.skipped:
        console.print(f"[yellow]{source.skipped} malformed records were skipped[/]", highlight=False)
        for message in source.messages:
            console.print(f"  {message}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def at_step(step: int) -> Iterator[None]:
    """Put the step's number before what a stage says of its batch."""
    try:
        yield
    except BatchError as err:
        raise type(err)(f"step {step}: {err}") from err
