"""A dump as an iterable of batches, a step at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from tensordict import TensorDictBase

from .batch import to_batch
from .files import find_files, recognise
from .malformed import Skipped, SourceError
from .reading import Reading
from .registry import READERS
from .regrading import Grade, Regraded, regrade
from .sample import MAX_ROWS, Sample


class Source:
    """A dump that :func:`open_source` opened. Each ``iter()`` is a new pass over all files.

    Attributes:
        format: the format's name.
        files: in the order in which they are read.
        total_bytes: of all files, on disk.
        regraded: what another grader has changed in this pass; None where there is none.
    """

    def __init__(self, format: str, files: list[Path], options: Reading, grade: Grade | None = None):
        self.format, self.files, self._options, self._grade = format, files, options, grade
        self.regraded: Regraded | None = None
        self.total_bytes = sum(file.stat().st_size for file in files)
        self._pass = options

    @property
    def read_bytes(self) -> int:
        """Bytes read in this pass, on disk; a ``.pt`` file counts when it has been read."""
        return self._pass.done_bytes + self._pass.position

    @property
    def skipped(self) -> int:
        """Malformed records that were skipped in this pass."""
        return self._pass.skipped.count

    @property
    def messages(self) -> list[str]:
        """The errors of the first few skipped records."""
        return list(self._pass.skipped.messages)

    def __iter__(self) -> Iterator[tuple[int, TensorDictBase]]:
        """Yield ``(step, batch)``, steps ascending, one step in memory.

        Raises:
            SourceError: a malformed record where none may be skipped; a step that is smaller than the one
                before, or continues in another file; columns that do not agree; no records at all; rewards
                of another grader that are not one for each rollout, or not finite.
        """
        self.regraded = None if self._grade is None else Regraded()
        for step, batch in self._batches():
            yield (step, batch) if self._grade is None else (step, self._again(step, batch, self._grade))

    def _again(self, step: int, batch: TensorDictBase, grade: Grade) -> TensorDictBase:
        """The batch graded anew."""
        try:
            batch, changed = regrade(batch, grade)
        except SourceError as err:
            raise SourceError(f"step {step}: {err}") from err
        self.regraded = (self.regraded or Regraded()).with_step(changed)
        return batch

    def _batches(self) -> Iterator[tuple[int, TensorDictBase]]:
        """The batches, as the files have them."""
        reading = self._pass = self._options.restarted()
        rows: list[Sample] = []
        last, file = -1, self.files[0]
        for item, path in self._items(reading):
            step = item[0] if isinstance(item, tuple) else item.step or 0
            if step == last and path != file:
                raise SourceError(f"{path}: a step is in one file; found step {step} in {file}, too")
            if not rows or step != last:
                if rows:
                    rows, batch = [], self._batch(rows)
                    yield batch
                if step <= last:
                    raise SourceError(
                        f"{path}: steps ascend and stay together; found step {step} after step {last}, in "
                        f"{file}. Was the training resumed, or are files of two trainings mixed? Read them "
                        "one at a time"
                    )
            last, file = step, path
            if isinstance(item, tuple):
                yield item
            else:
                rows.append(item)
                if len(rows) > MAX_ROWS:
                    raise SourceError(f"{path}: a step has at most {MAX_ROWS} rows; step {step} has more")
        if rows:
            yield self._batch(rows)
        if last < 0:
            place = self.files[0].parent if len(self.files) > 1 else self.files[0]
            skipped = f" ({self.skipped} were skipped: {self.messages[0]})" if self.skipped else ""
            raise SourceError(f"{place}: a dump has at least one record; found none{skipped}")

    def _items(self, reading: Reading) -> Iterator[tuple[Sample | tuple[int, TensorDictBase], Path]]:
        """Samples or batches, each with its file."""
        for number, path in enumerate(self.files):
            reading.file = number
            for item in READERS[self.format].read(path, reading):
                yield item, path
            reading.done_bytes += path.stat().st_size
            reading.position = 0

    def _batch(self, rows: list[Sample]) -> tuple[int, TensorDictBase]:
        step = rows[0].step or 0
        try:
            return step, to_batch(rows)
        except SourceError as err:
            raise SourceError(f"step {step}: {err}") from err


def open_source(
    path: str | Path,
    format: str = "auto",
    *,
    skip_bad: bool = False,
    reward_key: str | Sequence[str] | None = None,
    group_by: Literal["prompt", "uid"] | None = None,
    group_size: int | None = None,
    regrade: Grade | None = None,
) -> Source:
    """Open training rollouts that a framework has dumped.

    Args:
        path: a file, a folder or a glob pattern.
        format: a name in :data:`READERS`, or ``auto``: by the suffix and the keys of the first record.
        skip_bad: skip malformed records and count them, instead of raising.
        reward_key: which reward to read, in formats with more than one; for TRL, a sequence of them.
        group_by: ``prompt`` makes equal prompts of a step one group, in formats that keep no group's id;
            ``uid`` reads verl's uid as the group's id, and each row as one rollout.
        group_size: rollouts that each group was dispatched with; written as ``expected_rollouts``. A group
            with more is an error.
        regrade: grades each rollout by its texts (:func:`headrace.pipeline.sources.regrade`), in place of the
            rewards that the dump has. The rows of a rollout share its reward.

    Returns:
        An iterable of ``(step, TensorDict [N])``, with the columns of :func:`to_batch`.

    Raises:
        ValueError: an option with another value, or one that the format does not read.
        SourceError: no file, or a format that is not clear.

    Example:
        >>> import json, tempfile
        >>> rows = [{"input": "1+1?", "output": o, "gts": "2", "score": s, "step": 7, "uid": f"a_{i}_0"}
        ...         for i, (o, s) in enumerate([("2", 1.0), ("3", 0.0)])]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "7.jsonl").write_text("\\n".join(map(json.dumps, rows)))
        ...     [(step, batch["next", "reward"].flatten().tolist()) for step, batch in open_source(folder)]
        [(7, [1.0, 0.0])]
    """
    if format != "auto" and format not in READERS:
        raise ValueError(f"format must be auto or one of {', '.join(READERS)}; got {format!r}")
    if group_by not in (None, "prompt", "uid"):
        raise ValueError(f"group_by must be None, 'prompt' or 'uid'; got {group_by!r}")
    if group_size is not None and (type(group_size) is not int or group_size < 1):
        raise ValueError(f"group_size must be an integer ≥ 1; got {group_size!r}")
    name = recognise(path, skip_bad=skip_bad) if format == "auto" else format
    given = {"reward_key": reward_key, "group_by": group_by, "group_size": group_size}
    for option, value in given.items():
        if value is not None and option not in READERS[name].options:
            raise ValueError(f"the format {name} does not read {option}; it reads {_options(name)}")
    keys = (reward_key,) if isinstance(reward_key, str) else tuple(reward_key or ())
    _check_reward_keys(name, keys)
    if group_by == "uid" and name != "verl":
        raise ValueError(f"group_by='uid' is for the format verl; this is {name}")
    files = find_files(path, READERS[name])
    skipped = Skipped(allowed=skip_bad)
    return Source(
        name,
        files,
        Reading(reward_keys=keys, group_by=group_by, group_size=group_size, skipped=skipped),
        regrade,
    )


def _check_reward_keys(name: str, keys: tuple[str, ...]) -> None:
    format = READERS[name]
    if len(keys) > 1 and format.reward_keys == "one":
        raise ValueError(f"the format {name} takes one reward_key; got {list(keys)}")
    if unknown := [key for key in keys if format.rewards and key not in format.rewards]:
        raise ValueError(f"reward_key must be one of {', '.join(format.rewards)}; got {unknown[0]!r}")


def _options(name: str) -> str:
    return ", ".join(sorted(READERS[name].options)) or "none"
