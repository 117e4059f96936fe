"""Open a dump, find its files and format, and read it as batches, one step at a time."""

from __future__ import annotations

import glob
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from tensordict import TensorDictBase

from headrace.pipeline.tools.dumps.paths import missing_path, newest_run
from headrace.pipeline.wording import for_python, said_in_python
from headrace.transforms.table.options import at_least, takes_options

from .batch import MAX_ROWS, Draws, Sample, group_by_order, separate_draws, to_batch
from .file_kinds import Format, NoGroupError, Reading, read_lines, read_schema, refuse_pointers
from .record import SourceError, quote_some
from .regrading import Grade, Regraded, regrade
from .table_dump import check_columns, said_of_columns
from .tokenizing import load_tokenizer

LARGE_GROUP = 128  # rollouts; if a step is one larger group, its prompts may only look equal
SUFFIXES = (".pt", ".parquet", ".jsonl", ".jsonl.gz")
NO_FILE = "no file of JSON Lines (.jsonl, .jsonl.gz), Parquet (.parquet) or torch.save (.pt)"
OWN_FILE = "'source.columns={group: ID, reward: NUMBER, response: TEXT}' source.group_size=ROLLOUTS"
IN_PYTHON = {
    "tasks": "source={'columns': {'group': ID, 'reward': NUMBER, 'response': TEXT}, 'group_size': ROLLOUTS}",
    "open_dump": "columns={'group': ID, 'reward': NUMBER, 'response': TEXT}, group_size=ROLLOUTS",
}
USUAL = {  # common names of the columns that OWN_FILE asks for
    "ID": ("group_id", "prompt_id", "uid", "prompt", "question", "problem"),
    "NUMBER": ("reward", "score"),
    "TEXT": ("response", "completion", "output"),
}


# A module of this package that has a FORMAT reads the format with the name of the module, without `_dump`.
READERS: dict[str, Format] = {
    name.removesuffix("_dump"): module.FORMAT
    for _, name, _ in pkgutil.iter_modules([str(Path(__file__).parent)])
    if name != "open" and hasattr(module := import_module(f".{name}", __package__), "FORMAT")
}


@said_in_python("open_dump")
@takes_options
def open_dump(
    path: str | Path,
    format: str = "auto",
    *,
    skip_bad: bool = False,
    reward_key: str | Sequence[str] | None = None,
    group_by: Literal["prompt", "uid", "order"] | None = None,
    group_size: int | None = None,
    columns: Mapping[str, str] | None = None,
    tokenizer: str | Path | None = None,
    regrade: Grade | None = None,
) -> Source:
    """Open training rollouts that a framework has dumped.

    Args:
        path: a file, a folder or a glob pattern.
        format: a name in :data:`READERS`, or ``auto``: recognised by the suffix and the keys of the first
            record.
        skip_bad: skip and count malformed records, and steps that cannot be read, instead of raising.
        reward_key: name of the reward to read, in formats with several rewards. TRL also takes several names.
        group_by: ``prompt`` makes equal prompts of a step one group, in formats without ids of groups.
            ``uid`` reads verl's uid as the id of the group, and each row as one rollout. ``order`` makes a
            group of every `group_size` consecutive rollouts of the file, in formats without ids of groups.
        group_size: number of rollouts that were dispatched for each group, the column ``expected_rollouts``.
            A group with more rollouts is split if its prompt was drawn several times in the step
            (:func:`~headrace.pipeline.tools.dumps.readers.separate_draws`). Otherwise it is an error.
        columns: the meaning of the columns of a file of your own (:mod:`~readers.table_dump`).
        tokenizer: a ``tokenizer.json``, or a folder that ``transformers`` has saved. It makes tokens of the
            texts, if the dump has no lengths in tokens (:mod:`~readers.tokenizing`).
            Nothing is downloaded.
        regrade: a function that grades each rollout by its texts (:func:`regrade`).
            Its rewards replace those of the dump. The rows of a rollout share its reward.

    Returns:
        An iterable of ``(step, TensorDict [N])``, with the columns of :func:`to_batch`.

    Raises:
        ValueError: an option has an invalid value, or the format does not read it.
        SourceError: there is no file, or the format cannot be recognised.

    Example:
        >>> import json, tempfile
        >>> rows = [{"input": "1+1?", "output": o, "gts": "2", "score": s, "step": 7, "uid": f"a_{i}_0"}
        ...         for i, (o, s) in enumerate([("2", 1.0), ("3", 0.0)])]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "7.jsonl").write_text("\\n".join(map(json.dumps, rows)))
        ...     [(step, batch["next", "reward"].flatten().tolist()) for step, batch in open_dump(folder)]
        [(7, [1.0, 0.0])]
    """
    if format != "auto" and format not in READERS:
        raise ValueError(f"format must be auto or one of {', '.join(READERS)}; got {format!r}")
    at_least("group_size", group_size, 1)
    if columns and format == "auto":
        format = "table"
    name = recognise(path, skip_bad=skip_bad) if format == "auto" else format
    kind = READERS[name]
    given = {
        "reward_key": reward_key,
        "group_by": group_by,
        "group_size": group_size,
        "columns": columns or None,
        "tokenizer": tokenizer,
    }
    for option, value in given.items():
        if value is not None and option not in kind.options:
            known = ", ".join(kind.options) or "none"
            raise ValueError(
                f"the format {name} does not read {option}; it reads {known}. Leave {option} out"
            )
    keys = (reward_key,) if isinstance(reward_key, str) else tuple(reward_key or ())
    if len(keys) > 1 and kind.reward_keys == "one":
        raise ValueError(f"the format {name} takes one reward_key; got {list(keys)}")
    if unknown := [key for key in keys if kind.rewards and key not in kind.rewards]:
        raise ValueError(f"reward_key must be one of {', '.join(kind.rewards)}; got {unknown[0]!r}")
    if group_by == "uid" and name != "verl":
        raise ValueError(f"group_by='uid' is for the format verl; this is {name}")
    if name == "table" and group_by is not None and "group" in (columns or {}):
        raise ValueError(f"columns.group has the group of each row; leave out group_by, got {group_by!r}")
    if group_by == "order" and group_size is None:
        raise ValueError(
            "group_by='order' makes a group of each group_size rollouts in the order of the file, so "
            "group_size is required; got None"
        )
    if group_by == "order" and skip_bad:
        raise ValueError(
            "group_by='order' needs every record, because groups after a skipped record would be wrong; got "
            "skip_bad=True"
        )
    options = Reading(
        reward_keys=keys,
        group_by=group_by,
        group_size=group_size,
        columns=check_columns(columns) if name == "table" else {},
        tokenizer=None if tokenizer is None else load_tokenizer(tokenizer),
        skip_bad=skip_bad,
    )
    files = find_files(path, kind)
    refuse_pointers(files)
    return Source(name, files, options, regrade)


open_in_words: Any = open_dump.__wrapped__  # type: ignore[attr-defined]
"""As :func:`open_dump`, with errors in the words of the command or task that calls it."""


class Source:
    """A dump that :func:`open_dump` opened. Each ``iter()`` is a new pass over all files.

    Attributes:
        format: name of the format.
        files: the files, in the order of reading.
        total_bytes: size of all files on disk.
        regraded: the changes by `regrade` in this pass; None without `regrade`.
        draws: for each step of this pass, the prompts that were drawn several times in it.
        one_group: the steps of this pass that are one group of more than :data:`LARGE_GROUP` rollouts, each
            with the number of its rollouts.
        keeps_oversized: whether groups that are too large stay if their draws cannot be told apart, as the
            audit needs. False: they are left out or refused.
        skipped_steps: the steps of this pass that `skip_bad` has skipped, and the reasons.
        advice: the text that follows the error if a recipe refuses all steps.
    """

    def __init__(self, format: str, files: list[Path], options: Reading, grade: Grade | None = None):
        self.format, self.files, self._options, self._grade = format, files, options, grade
        self.regraded: Regraded | None = None
        self.draws: dict[int, Draws] = {}
        self.one_group: dict[int, int] = {}
        self.keeps_oversized, self.advice = False, ""
        self.skipped_steps: list[tuple[int | None, str]] = []
        self.total_bytes = sum(file.stat().st_size for file in files)
        self._pass = options

    def __repr__(self) -> str:
        more = f" and {len(self.files) - 1:,} more" if len(self.files) > 1 else ""
        return f"Source({self.format}: {self.files[0]}{more})"

    @property
    def unsaid(self) -> frozenset[str]:
        """What the dump does not contain: ``rollouts``, ``masks``, ``tokens`` (:class:`Format`)."""
        each_row = {"rollouts"} if self.format == "verl" and self._options.group_by else set()
        return frozenset(READERS[self.format].unsaid) | each_row

    @property
    def read_bytes(self) -> int:
        """Number of bytes on disk that were read in this pass. A ``.pt`` file counts after it is read."""
        return self._pass.done_bytes + self._pass.position

    @property
    def skipped(self) -> int:
        """Number of malformed records that were skipped in this pass."""
        return self._pass.skipped if self.skips else 0

    @property
    def skips(self) -> bool:
        """Whether malformed records, and steps that cannot be read, are skipped."""
        return self._options.skip_bad

    @property
    def sized(self) -> bool:
        """Whether `group_size` gives the number of rollouts that were dispatched for each group."""
        return self._options.group_size is not None

    @property
    def messages(self) -> list[str]:
        """The errors of the first few skipped records."""
        return list(self._pass.messages)

    def lacking(self) -> dict[str, Any]:
        """The options that the first step needs and that are not set, with values that fit it.

        ``group_by`` is lacking if a record has no group. ``group_size`` is lacking if the dump does not have
        it. Its value is the most frequent number of rollouts of a group. ``reward_key`` is lacking if there
        are several rewards, which few recipes take. Its value is the list of their names. The result is empty
        if nothing is lacking, or if the step cannot be read.
        """
        found: dict[str, Any] = {}
        rows, first = self._first_step(self._options)
        if isinstance(first, NoGroupError):
            found["group_by"] = "prompt"
            rows, first = self._first_step(replace(self._options, group_by="prompt"))
        if first is None and "group_size" in READERS[self.format].options:
            rollouts = Counter(group for group, _ in {(row.group, row.rollout) for row in rows})
            if rollouts and rows[0].expected_rollouts is None:
                [(size, _)] = Counter(rollouts.values()).most_common(1)
                found["group_size"] = size
        if first is None and (rewards := next((row.rewards for row in rows if row.rewards), None)):
            found["reward_key"] = [*rewards]
        return found

    def _first_step(self, options: Reading) -> tuple[list[Sample], SourceError | None]:
        """The samples of the first step, and its first error."""
        rows: list[Sample] = []
        for step, item, _ in self._items(replace(options.restarted(), skip_bad=False)):
            if isinstance(item, SourceError):
                return rows, item
            if not isinstance(item, Sample) or (rows and step != (rows[0].step or 0)):
                break
            rows.append(item)
        return rows, None

    def __iter__(self) -> Iterator[tuple[int, TensorDictBase]]:
        """Yield ``(step, batch)``. The steps ascend, and one step is in memory at a time.

        Raises:
            SourceError: without `skip_bad`, a record is malformed or a step cannot be read; or
                :meth:`outcomes` raised.
        """
        for step, found in self.outcomes():
            if isinstance(found, SourceError):
                if not self.skips:
                    raise found
                self.skipped_steps.append((step, str(found)))
            elif step is not None:
                yield step, found

    def outcomes(self) -> Iterator[tuple[int | None, TensorDictBase | SourceError]]:
        """Yield each step with its batch or its error. After an error, reading goes on with the next step.

        Errors of a step are: a malformed record without `skip_bad`, columns that do not agree, a rollout in
        two groups, and rewards of `regrade` that are not finite or not one for each rollout. The step is None
        if a file does not name it.

        Raises:
            SourceError: steps do not ascend; a step continues in another file, or has too many rows; or there
                are no records.
        """
        self.regraded = None if self._grade is None else Regraded()
        self._pass, self.draws, self.one_group = self._options.restarted(), {}, {}
        self.skipped_steps = []
        last, file, bad = -1, self.files[0], False
        for step, items in groupby(self._items(self._pass), key=itemgetter(0)):
            rows: list[Any] = []  # samples, or the batch of a file
            fault: SourceError | None = None
            for _, item, path in items:
                if isinstance(item, SourceError):
                    fault = fault or item
                    continue
                if rows and path != file:
                    raise SourceError(f"{path}: a step is in one file; found step {step} in {file}, too")
                if step <= last or (rows and not isinstance(item, Sample)):
                    raise SourceError(
                        f"{path}: steps ascend and stay together; found step {step} after step "
                        f"{step if rows else last}, in {file}. Was the training resumed, or are files of two "
                        "trainings mixed? Read them one at a time"
                    )
                if len(rows) == MAX_ROWS:
                    raise SourceError(f"{path}: a step has at most {MAX_ROWS} rows; step {step} has more")
                rows.append(item)
                file = path
            if fault is None:
                try:
                    found: TensorDictBase | SourceError = self._batch(step, rows)
                except SourceError as err:
                    fault = err
            rows = []
            bad = bad or fault is not None
            yield step, found if fault is None else fault
            last = last if step is None else max(step, last)
        if last < 0 and not bad:
            place = self.files[0].parent if len(self.files) > 1 else self.files[0]
            skipped = f" ({self.skipped} were skipped: {self.messages[0]})" if self.skipped else ""
            raise SourceError(f"{place}: a dump has at least one record; found none{skipped}")

    def _items(self, reading: Reading) -> Iterator[tuple[Any, Sample | TensorDictBase | SourceError, Path]]:
        """Samples, batches and errors, each with its step and its file."""
        greatest = -1  # greatest step so far
        for number, path in enumerate(self.files):
            reading.file = number
            last: int | None = None  # last step of this file
            try:
                for item in READERS[self.format].read(path, reading):
                    step, item = item if isinstance(item, tuple) else (item.step or 0, item)
                    for named, fault in reading.take(last, step):
                        yield named, fault, path
                    yield step, item, path
                    last, greatest = step, max(step, greatest)
            except SourceError as err:  # about the file, not about one of its records
                reading.note(err)
            name = path.name.partition(".")[0]  # 41.jsonl is of step 41, even if it has no record
            of_name = int(name) if last is None and re.fullmatch(r"\d{1,18}", name, re.ASCII) else -1
            for named, fault in reading.take(last, of_name if of_name > greatest else None):
                yield named, fault, path
            reading.done_bytes += path.stat().st_size
            reading.position = 0

    def _batch(self, step: int, rows: list[Any]) -> TensorDictBase:
        """The batch of a step, after `regrade`."""
        try:
            if isinstance(rows[0], Sample):
                if self._options.group_by == "order":
                    rows = group_by_order(rows, self._options.group_size or 1)
                by_prompt = self._options.group_by == "prompt"
                rows, draws = separate_draws(rows, by_prompt=by_prompt, leave_out=not self.keeps_oversized)
                if draws.drawn:
                    self.draws[step] = draws
                if self.keeps_oversized and self._options.group_size:  # `to_batch` would refuse them
                    rows = [replace(row, expected_rollouts=None) for row in rows]
                if self._options.group_by and len({row.rollout for row in rows}) > LARGE_GROUP:
                    self._note_one_prompt(step, rows)
                self._pass.add_tokens(rows)
            batch = to_batch(rows) if isinstance(rows[0], Sample) else rows[0]
            if self._grade is not None:
                batch, changed = regrade(batch, self._grade)
                self.regraded = (self.regraded or Regraded()).with_step(changed)
        except SourceError as err:
            err.step = step
            raise
        return batch

    def _note_one_prompt(self, step: int, rows: list[Sample]) -> None:
        """Record a step if all of its rollouts have one group."""
        if len({row.group for row in rows}) == 1:
            self.one_group.setdefault(step, len({row.rollout for row in rows}))

    @property
    def notices(self) -> list[str]:
        """Sentences about this pass for readers of its numbers: where groups and tokens come from."""
        said = said_of_columns(self._pass)
        if self._options.group_by == "order":
            said.append(
                f"Groups come from the order of the rows: each {self._options.group_size} rollouts next to "
                "one another are a group (source.group_by=order). The dump itself does not say which "
                "rollouts are a group."
            )
        if self.one_group:
            step, rollouts = next(iter(self.one_group.items()))
            more = len(self.one_group) - 1
            others = f" So do {more:,} other steps." if more > 1 else " So does 1 other step." * more
            said.append(
                f"In step {step}, all {rollouts:,} rollouts have one prompt text, and are one group.{others} "
                "This is suspicious: were images, or another part of the prompts, not dumped? If the "
                "rollouts of each prompt are next to one another, set source.group_by=order, and "
                "source.group_size to the rollouts of one prompt."
            )
        return said + self._pass.counted.said


def find_files(path: str | Path, format: Format) -> list[Path]:
    """Find the files of a path, and sort them by the numbers in their names.

    Raises:
        SourceError: there is no file.
    """
    root, patterns = Path(path), format.files
    if root.is_file():
        return [root]
    if root.is_dir():
        matched: list[Path] = []
        for place in format.files:  # the first pattern that matches a file
            names = place.split("|")
            names += [f"{name}.gz" for name in names if name.endswith(".jsonl")]
            matched = matched or [file for name in names for file in root.glob(name)]
            if format.ignored:
                matched = [file for file in matched if not re.fullmatch(format.ignored, file.name)]
    elif glob.has_magic(str(path)):
        matched = [Path(name) for name in glob.glob(str(path), recursive=True)]
        patterns = (str(path),)
    else:
        raise SourceError(f"{path}: there is no such file or folder")

    def by_number(file: Path) -> list[tuple[int, int, str]]:  # step_9 comes before step_10
        pieces = re.split(r"(\d+)", file.as_posix())
        return [(0, int(p), "") if p.isdecimal() and len(p) < 1000 else (1, 0, p) for p in pieces]

    files = sorted({file for file in matched if file.is_file()}, key=by_number)
    if not files:
        raise SourceError(
            f"{path}: a file, or a folder with {' or '.join(patterns).replace('|', ' or ')}, is required; "
            "found none"
        )
    return files


def recognise(path: str | Path, *, skip_bad: bool = False) -> str:
    """Recognise the format of a file, folder or glob by the suffix and the keys of the first record.

    Raises:
        SourceError: no format fits, or more than one.
    """
    if wrong := missing_path(path):
        raise SourceError(wrong)
    if Path(path).is_dir() and any(Path(path, "rollouts").glob("step_*.*")):  # a run of headrace
        return "headrace"
    fitting, seen, nearest = [], "", dict[str, set[str]]()
    keys_of: dict[Path, set[str]] = {}
    for name, format in READERS.items():
        if format.keys is None:
            continue
        try:
            first = find_files(path, format)[0]
        except SourceError:
            continue
        suffix = next((s for s in SUFFIXES if first.name.endswith(s)), "")
        patterns = [pattern for place in format.files for pattern in place.split("|")]
        if not suffix or not any(pattern.endswith(suffix.removesuffix(".gz")) for pattern in patterns):
            continue
        if format.keys and first not in keys_of:
            refuse_pointers([first])
            if suffix == ".parquet":
                keys_of[first] = set(read_schema(first).names)
            else:
                reading = Reading(skip_bad=skip_bad)
                keys_of[first] = next((set(record.data) for record in read_lines(first, reading)), set())
                for _, fault in reading.take(None, None):
                    raise fault
            seen = f"{first} with {quote_some(sorted(keys_of[first]), most=20)}"
        if not format.keys or not format.lacking(keys_of[first]):
            fitting.append(name)
        elif format.keys & keys_of[first]:
            nearest[name] = set(format.keys - keys_of[first])
    # If a format needs all keys of another format and more keys, it fits better.
    needed = {name: READERS[name].keys or frozenset() for name in fitting}
    fitting = [name for name in fitting if not any(needed[name] < keys for keys in needed.values())]
    if not (fitting or seen) and (newest := newest_run(path)):
        raise SourceError(f"{path} is no run, and holds some. The newest is {newest}")
    if len(fitting) != 1:
        said = ""
        if nearest and not fitting:
            name = min(nearest, key=lambda each: len(nearest[each]) / len(READERS[each].keys or ()))
            said = (
                f" The nearest format is {name}, which has the "
                f"key{'s' * (len(nearest[name]) > 1)} {quote_some(sorted(nearest[name]))}, too."
            )
        own = IN_PYTHON.get(for_python(), OWN_FILE) if seen and not fitting else ""
        for word, names in USUAL.items():
            for name in [each for each in names if any(each in keys for keys in keys_of.values())][:1]:
                own = own.replace(word, repr(name) if for_python() else name)
        raise SourceError(
            f"{path}: the format must be clear from the suffix and the first record; found "
            f"{' and '.join(fitting) if fitting else seen or NO_FILE}.{said} Set "
            f"{'' if for_python() else 'source.'}format to one of {', '.join(READERS)}"
            + ". For a file of your own, add options with the names of its columns, such as:"
            * bool(own),
            to_type=own,
        )
    return fitting[0]
