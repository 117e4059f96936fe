"""The source of a task: opened as configured, read with a progress bar, its errors with their step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from tensordict import TensorDictBase

from headrace.pipeline.load import ConfigError
from headrace.pipeline.sources import Source, SourceError, open_source
from headrace.transforms import BatchError


def open_configured(config: DictConfig) -> Source:
    """Open the dump that ``source:`` of a composed configuration describes.

    Raises:
        ConfigError: no path, or an option with a wrong name or value.
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
    """Yield ``(step, batch)`` under a progress bar; at the end print how many records were skipped.

    Args:
        source: of the batches.
        console: where to show the bar.

    Raises:
        SourceError: a file that cannot be read.
    """
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
            console.print(Text(f"  {message}"), soft_wrap=True)  # no words in it are markup, or emoji


@contextmanager
def at_step(step: int) -> Iterator[None]:
    """Put the step's number before the message of an error about its batch.

    Raises:
        BatchError: as raised inside, of the same type.
    """
    try:
        yield
    except BatchError as err:
        raise type(err)(f"step {step}: {err}") from err
