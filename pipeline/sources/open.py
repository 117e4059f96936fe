"""A dump as batches, a step at a time."""

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
from .sample import Sample


class Source:
    """What :func:`open_source` returns. Each ``iter()`` is a pass from the start.

    Attributes:
        format: the format's name.
        files: in the order in which they are read.
        total_bytes: of all files, on disk.
    """

    def __init__(self, format: str, files: list[Path], options: Reading):
        self.format, self.files, self._options = format, files, options
        self.total_bytes = sum(file.stat().st_size for file in files)
        self._pass = options

    @property
    def read_bytes(self) -> int:
        """Bytes read in this pass, on disk; a ``.pt`` file counts when it is done."""
        return self._pass.done_bytes + self._pass.position

    @property
    def skipped(self) -> int:
        """Malformed records that were skipped in this pass."""
        return self._pass.skipped.count

    @property
    def messages(self) -> list[str]:
        """What was wrong with the first few of them."""
        return list(self._pass.skipped.messages)

    def __iter__(self) -> Iterator[tuple[int, TensorDictBase]]:
        """Yield ``(step, batch)``, steps ascending, one step in memory.

        Raises:
            SourceError: a malformed record where none may be skipped; a step that comes back or goes on in
                another file; columns that do not agree; no records at all.
        """
        options = self._options
        reading = self._pass = Reading(
            options.reward_key, options.group_by, options.group_size, Skipped(allowed=options.skipped.allowed)
        )
        rows: list[Sample] = []
        last = -1
        for item, path, first in self._items(reading):
            step = item[0] if isinstance(item, tuple) else item.step or 0
            same = bool(rows) and step == (rows[0].step or 0)
            if not same:
                if rows:
                    rows, done = [], self._batch(rows)
                    yield done
                if step <= last:
                    raise SourceError(
                        f"{path}: steps ascend and stay together; found step {step} after step {last}. Was "
                        "the run resumed, or are files of two runs mixed? Read them one at a time"
                    )
            elif first:
                raise SourceError(f"{path}: a step is in one file; found step {step} in the file before, too")
            last = step
            if isinstance(item, tuple):
                yield item
            else:
                rows.append(item)
        if rows:
            yield self._batch(rows)
        if last < 0:
            place = self.files[0].parent if len(self.files) > 1 else self.files[0]
            told = f" ({self.skipped} were skipped: {self.messages[0]})" if self.skipped else ""
            raise SourceError(f"{place}: a dump has at least one record; found none{told}")

    def _items(self, reading: Reading) -> Iterator[tuple[Sample | tuple[int, TensorDictBase], Path, bool]]:
        """What the reader yields, its file, and whether it is the first of it."""
        for number, path in enumerate(self.files):
            reading.file, first = number, True
            for item in READERS[self.format].read(path, reading):
                yield item, path, first
                first = False
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
) -> Source:
    """Open training rollouts that a framework has dumped.

    Args:
        path: a file, a folder or a glob pattern.
        format: a name in :data:`READERS`, or ``auto``: by the suffix and the keys of the first record.
        skip_bad: skip malformed records and count them, instead of raising.
        reward_key: the reward's name, where a format has several; TRL takes a sequence of them.
        group_by: ``prompt`` makes equal prompts of a step one group, in formats that keep no group's id;
            ``uid`` takes verl's uid for the group's, each row being one rollout.
        group_size: rollouts that each group was dispatched with; written as ``expected_rollouts``. A group
            with more is an error.

    Returns:
        An iterable of ``(step, TensorDict [N])``, with the columns of :func:`to_batch`.

    Raises:
        ValueError: an option that is none, or that the format does not read.
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
    keys = (reward_key,) if isinstance(reward_key, str) else None if reward_key is None else tuple(reward_key)
    if group_by == "uid" and name != "verl":
        raise ValueError(f"group_by='uid' is for the format verl; this is {name}")
    files = find_files(path, READERS[name])
    return Source(name, files, Reading(keys, group_by, group_size, Skipped(allowed=skip_bad)))


def _options(name: str) -> str:
    return ", ".join(sorted(READERS[name].options)) or "none"
