"""Read the rows that a run keeps next to its page: those that are shown, and columns by which to find them.

Files are not trusted. A file is opened only if it is a plain file in the folder of the run, and not a link.
Only columns of numbers and texts are read. No code in a file is run, and no extension type is made.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.pipeline.composing.compose import ConfigError
from headrace.pipeline.tools.dumps.paths import newest_run
from headrace.pipeline.tools.report import FAILED, FailedStep, prompt_label, read_failed, read_recipe
from headrace.pipeline.wording import printable

FILE = re.compile(r"step_(\d{1,18})\.parquet")
END = 80  # characters of the end of a longer text
EXCERPT = 600  # characters of a text in a list of rows; the whole text is read on request
MAX_STEP_ROWS = 2**22  # a step has at most this many rows, as in dumps
MAX_STEP_BYTES = 2**33  # a step has at most this many uncompressed bytes, by the metadata of its file
LABEL = 80  # at most this many characters of the name of a recipe are shown
MOST_DOTS = 200  # at most this many rollouts of a prompt are drawn for one step
EXACT = 2**53  # JavaScript rounds greater integers
SAME = ("prompt", "prompt_id", "group_label", "group_id")  # columns that identify prompts
LABELS = {"group_id": "group_label", "rollout_id": "rollout_label"}
REWARDS = ("rollout_reward", "reward")  # the reward of a row's rollout, else the row's own
TEACHES = "teaches"  # the order by the range of a group's rewards in the loss


REPLAYED = (
    "For its rows: headrace task=replay source.path=DUMP hydra.run.dir=FOLDER, then headrace view FOLDER"
)
OF_TASKS = {  # contents of the folders of other tasks, and what to do, by a file in the folder
    "compare.json": (
        "a comparison of two recipes",
        f"Open report.html in a browser: it has both advantages of each row that it shows. {REPLAYED}, for "
        "each recipe; headrace view FOLDER FOLDER2 shows both side by side",
    ),
    "plan.json": ("the numbers of task=plan", f"It has no page: task=plan prints the table. {REPLAYED}"),
    "audit.json": ("the findings of an audit", f"Open report.html in a browser. {REPLAYED}"),
}


class UnreadableRows(ValueError):
    """A file, a step or a column that cannot be shown; the message says why."""


class PromptInStep(NamedTuple):
    """The rollouts of a prompt in a step, and their rewards."""

    groups: int
    rollouts: int
    reward: float | None  # mean over its rollouts with a reward
    scored: int  # number of rollouts with a reward


@dataclass(frozen=True)
class StoredStep:
    """The description of a file of rows, from its footer.

    Attributes:
        step: number of the step.
        path: the path of the file.
        stamp: time and size of the file when it was read.
        rows: number of rows in the file.
        kinds: the kind of each column that can be shown: ``number``, ``integer``, ``numbers`` (a list) or
            ``text``.
        funnel: the funnel of the step, in the form of the page.
        numbers: the numbers of the step, in the form of the page.
        prompts: for each column that can identify prompts, the prompts of this step; filled at the first
            request.
    """

    step: int
    path: Path
    stamp: tuple[int, int]
    rows: int
    kinds: Mapping[str, str]
    funnel: Sequence[Mapping[str, Any]]
    numbers: Mapping[str, float | None]
    prompts: dict[str, dict[str, PromptInStep]] = field(default_factory=dict)


class StoredRun:
    """The rows of a run, in ``rollouts/`` of its folder.

    Args:
        folder: the folder of the run, or its folder ``rollouts``.

    Raises:
        ConfigError: there is no such folder, or it has no rows.
    """

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        if not folder.is_dir():
            why, todo = "does not exist", "Give the folder of a run, which has report.html"
            if folder.exists():
                why = "is a file"
                todo = f"headrace view {folder.parent}" if (folder.parent / "rollouts").is_dir() else todo
            raise ConfigError(f"{folder} {why}. {todo}")
        inner = self.folder / "rollouts"
        self.rows_folder = inner if inner.is_dir() else self.folder
        if self.rows_folder.resolve() != self.rows_folder:
            raise ConfigError(
                f"{inner} is a link to another folder, and nothing outside {folder} is read. Give that "
                f"folder: headrace view {inner.resolve()}"
            )
        self.name = self.folder.parent.name if self.folder.name == "rollouts" else self.folder.name
        self.recipe = printable(read_recipe(self.rows_folder))[:LABEL]
        self.labels: dict[str, str] = {}  # labels of prompts, by their keys
        self._steps: dict[int, StoredStep] = {}
        self._problems: list[str] = []
        self._failed: list[FailedStep] = []
        self._lock = Lock()
        if not self.steps():
            raise ConfigError(self._why_empty(folder))

    # -- steps and columns ---------------------------------------------------------------------------------

    def steps(self) -> dict[int, StoredStep]:
        """The steps by number. Files that were added or changed since the last call are read again."""
        with self._lock:
            found: dict[int, StoredStep] = {}
            problems = []
            for path in sorted(self.rows_folder.iterdir()):
                if (match := FILE.fullmatch(path.name)) is None:
                    continue
                step, known = int(match[1]), self._steps.get(int(match[1]))
                try:
                    if step in found:
                        raise UnreadableRows(f"step {step} has two files; {found[step].path.name} is shown")
                    is_known = known is not None and known.path == path and known.stamp == stamp_of(path)
                    found[step] = known if known is not None and is_known else read_footer(path, step)
                except UnreadableRows as err:
                    problems.append(printable(f"{path.name}: {err}"))
            try:
                self._failed = [
                    FailedStep(step, printable(why)) for step, why in read_failed(self.rows_folder)
                ]
            except (OSError, ValueError, RecursionError) as err:
                self._failed = []
                problems.append(printable(f"{FAILED}: {err}"))
            self._steps, self._problems = dict(sorted(found.items())), problems
            return self._steps

    def failed(self) -> list[FailedStep]:
        """The steps that failed and have no rows, each with the reason."""
        return self._failed

    def problems(self) -> list[str]:
        """The files that could not be shown when the folder was last read, with the reasons."""
        return self._problems

    def kinds(self) -> Mapping[str, str]:
        """The columns of the first step, and the kind of each."""
        first = next(iter(self._steps.values()), None)
        return {} if first is None else first.kinds

    def step(self, number: int) -> StoredStep:
        """Return a step.

        Raises:
            UnreadableRows: the run has no step of this number.
        """
        if number not in self._steps:
            raise UnreadableRows(f"the run {self.name} has no step {number}")
        return self._steps[number]

    def _why_empty(self, folder: Path) -> str:
        if self._failed:
            step, why = self._failed[0]
            return f"{folder} has no rows: all steps failed. {f'Step {step}' if step else 'The first'}: {why}"
        if self._problems:
            some = "; ".join(self._problems[:3])
            return f"{folder}: no file of rows can be read. {some}"
        for name, (holds, then) in OF_TASKS.items():
            if (self.folder / name).is_file():
                return f"{folder} holds {holds}, {name}, and no rows. {then}"
        if newest := newest_run(folder, "step_*.parquet"):
            words = ["headrace", "view", str(newest)]
            return f"{folder} is no run, but has runs in it. The newest: {shlex.join(words)}"
        words = ["headrace", "task=replay", f"source.path={folder}", "hydra.run.dir=FOLDER"]
        return (
            f"{folder} has no rows of a run, rollouts/step_*.parquet, which a run with report.dump=parquet "
            f"keeps. For a dump of another trainer: {shlex.join(words)}, then headrace view FOLDER"
        )

    # -- rows of a step ------------------------------------------------------------------------------------

    def rows(
        self,
        number: int,
        *,
        sort: str = "",
        descending: bool = False,
        reason: str = "",
        group: str = "",
        text: str = "",
        prompt: str = "",
        same: str = "prompt",
        offset: int = 0,
        count: int = 50,
    ) -> dict[str, Any]:
        """Return some rows of a step, with all their columns. Long texts are cut.

        Args:
            number: number of the step.
            sort: a column of numbers; ``reward`` is the reward of the rollout. Rows without a number come
                last. If it is empty or ``teaches``, groups whose rewards in the loss have the greatest range
                come first. Then the rows of a group stay together, sorted by reward.
            descending: whether the greatest number, or the highest reward within a group, comes first.
            reason: only rows with this reason; ``left``: only rows that are not trained.
            group: only rows with this group id or label; if there are none, rows whose group id or label
                contains this text.
            text: only rows with a text that contains this text, in upper or lower case.
            prompt: only rows of the prompt with this key (:func:`key_of`).
            same: the column to which the key `prompt` belongs.
            offset: number of rows to leave out at the beginning.
            count: at most this many rows are returned.

        Returns:
            ``columns``: [name, kind] pairs. ``rows``: for each row a list, its index in the file and its
                values in the order of `columns`. ``keys``: the key of each row's prompt (empty: unknown).
                ``found``: number of rows that match. ``of``: number of rows of the step. A text is
                ``{"start", "characters"}``; a long text also has its ``end``.

        Raises:
            UnreadableRows: there is no such step or column, or a file cannot be read.
        """
        stored = self.step(number)
        reward = next((name for name in REWARDS if name in stored.kinds), "row")
        teaches = sort in ("", TEACHES) and {"group_id", "reason"} <= set(stored.kinds)
        sort = reward if sort in ("", TEACHES, "reward") else sort
        if stored.kinds.get(sort) not in ("number", "integer"):
            raise UnreadableRows(f"rows are sorted by a column of numbers; step {number} has no {sort!r}")
        with opened(stored.path) as file:
            order = self._matching(file, stored, reason, group, text, prompt, same)
            ranks, unknown = ranked(file.read([sort])[sort])
            ranks = -ranks if descending else ranks
            keys = [ranks, unknown]
            if teaches:
                keys += by_teaching(file.read(["group_id", "reason", reward]), reward)
            order = order[np.lexsort([key[order] for key in keys])]
            chosen = order[offset : offset + count]
            names = list(stored.kinds)
            rows = cells_at(file, stored, names, chosen)
            prompts = [key_of(value) for [value] in values_at(file, [same], chosen)] if same in names else []
        columns = [[printable(name), stored.kinds[name]] for name in names]
        return {"columns": columns, "rows": rows, "keys": prompts, "found": len(order), "of": stored.rows}

    def text(self, number: int, place: int, column: str) -> str:
        """Return a whole text of one row.

        Args:
            number: number of the step.
            place: index of the row in its file.
            column: a column of texts.

        Raises:
            UnreadableRows: there is no such step, row or column, or a file cannot be read.
        """
        stored = self.step(number)
        if stored.kinds.get(column) != "text" or not 0 <= place < stored.rows:
            raise UnreadableRows(f"step {number} has no text {column!r} of a row {place}")
        with opened(stored.path) as file:
            [[value]] = values_at(file, [column], np.array([place]))
        return printable(value or "", keep="\n\t")

    def _matching(
        self,
        file: pq.ParquetFile,
        stored: StoredStep,
        reason: str,
        group: str,
        text: str,
        prompt: str,
        same: str,
    ) -> np.ndarray:
        """The indices of the rows that match, in the order of the file."""
        keep = np.ones(stored.rows, bool)
        if reason and "reason" in stored.kinds:
            reasons = file.read(["reason"])["reason"]
            found = pc.not_equal(reasons, "trained") if reason == "left" else pc.equal(reasons, reason)
            keep &= as_mask(found)
        if group:
            names = [name for name in ("group_id", "group_label") if name in stored.kinds]
            columns = [file.read([name])[name].cast(pa.string()) for name in names]
            found = [as_mask(pc.equal(column, group)) for column in columns]
            if not any(mask.any() for mask in found):  # no group has exactly this name
                found = [as_mask(pc.match_substring(column, group)) for column in columns]
            keep &= np.logical_or.reduce(found) if found else False
        if prompt:
            codes, values = coded(stored, same)
            wanted = [at for at, value in enumerate(values) if key_of(value) == prompt]
            keep &= np.isin(codes, wanted)
        if text:
            columns = [name for name, kind in stored.kinds.items() if kind == "text"]
            found = []
            for part in file.iter_batches(batch_size=256, columns=columns):
                has = [as_mask(pc.match_substring(each, text, ignore_case=True)) for each in part.columns]
                found.append(np.logical_or.reduce(has) if has else np.zeros(len(part), bool))
            keep &= np.concatenate(found) if found else False
        return np.flatnonzero(keep)

    # -- prompts over the steps ----------------------------------------------------------------------------

    def prompts(self, same: str, text: str = "") -> dict[str, dict[int, PromptInStep]]:
        """Return each prompt in each of its steps, by its key. The first call reads a column of all files.

        Args:
            same: the column whose equal values are one prompt.
            text: only prompts that contain this text, in upper or lower case.

        Raises:
            UnreadableRows: a file cannot be read.
        """
        found: dict[str, dict[int, PromptInStep]] = {}
        with self._lock:
            for number, stored in self._steps.items():
                if same not in stored.kinds:
                    continue
                if same not in stored.prompts:
                    stored.prompts[same] = self._read_prompts(stored, same)
                keys = list(stored.prompts[same])
                if text:
                    _, values = coded(stored, same)
                    wanted = text.casefold()
                    keys = [key_of(value) for value in values if wanted in str(value).casefold()]
                for key in keys:
                    found.setdefault(key, {})[number] = stored.prompts[same][key]
        return found

    def prompt_text(self, key: str, same: str) -> str | None:
        """The whole prompt of a key; None: no row of the run has it."""
        for stored in self._steps.values():
            if key in stored.prompts.get(same, ()):
                _, values = coded(stored, same)
                code = next(at for at, value in enumerate(values) if key_of(value) == key)
                return printable(str(values[code]), keep="\n\t")
        return None

    def rollouts_of(self, key: str, same: str) -> dict[int, list[list[float | None]]]:
        """The reward and the advantage of a prompt's rollouts, by step. In a step, at most 200 are returned.

        Args:
            key: the key of the prompt (:func:`key_of`).
            same: the column to which the key belongs.

        Raises:
            UnreadableRows: a file cannot be read.
        """
        found = {}
        for number in self.prompts(same).get(key, ()):
            stored = self._steps[number]
            codes, values = coded(stored, same)
            code = next(at for at, value in enumerate(values) if key_of(value) == key)
            reward = next((name for name in REWARDS if name in stored.kinds), None)
            names = [name for name in ("rollout_id", reward, "advantage") if name in stored.kinds]
            with opened(stored.path) as file:
                table = file.read(names)
            of = {name: table[name].to_numpy(zero_copy_only=False) for name in names}
            places = np.flatnonzero(codes == code)
            ids = of["rollout_id"][places] if "rollout_id" in of else places
            first = places[np.unique(ids, return_index=True)[1]][:MOST_DOTS]
            absent = np.full(len(codes), np.nan)
            pairs = zip(of.get(reward, absent)[first], of.get("advantage", absent)[first], strict=True)
            found[number] = [[cell_of(float(value), "number") for value in pair] for pair in pairs]
        return found

    def _read_prompts(self, stored: StoredStep, same: str) -> dict[str, PromptInStep]:
        numbers = [name for name in ("group_id", "rollout_id", *REWARDS) if name in stored.kinds]
        with opened(stored.path, texts=[same] if stored.kinds[same] == "text" else []) as file:
            table = file.read(list({same, *numbers}))
        codes, values = as_codes(table[same])
        of = {name: table[name].to_numpy(zero_copy_only=False) for name in numbers}
        rows = np.arange(len(codes))
        first = np.unique(of.get("rollout_id", rows), return_index=True)[1]  # first row of each rollout
        reward = next((of[name] for name in REWARDS if name in of), np.full(len(codes), np.nan))[first]
        code, group = codes[first], of.get("group_id", rows)[first]
        known = np.isfinite(reward)
        count = np.bincount(code[known], minlength=len(values))
        total = np.bincount(code[known], reward[known], minlength=len(values))
        rollouts = np.bincount(code, minlength=len(values))
        groups = np.bincount(np.unique(np.stack([code, group]), axis=1)[0], minlength=len(values))
        found = {}
        for at, value in enumerate(values):
            key = key_of(value)
            self.labels.setdefault(key, prompt_label(value))
            mean = float(total[at] / count[at]) if count[at] else None
            found[key] = PromptInStep(int(groups[at]), int(rollouts[at]), mean, int(count[at]))
        return found


# -- files ---------------------------------------------------------------------------------------------------


def stamp_of(path: Path) -> tuple[int, int]:
    """Time of the last change and size of a file.

    Raises:
        UnreadableRows: the file is gone.
    """
    try:
        found = path.lstat()
    except OSError as err:
        raise UnreadableRows(f"it cannot be read: {err.strerror}") from None
    return found.st_mtime_ns, found.st_size


@contextmanager
def opened(path: Path, texts: Sequence[str] = ()) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file, if it is a plain file and not a link.

    Args:
        path: the path of the file.
        texts: columns to read as codes of a dictionary.

    Raises:
        UnreadableRows: the path is another kind of file, or the file is damaged.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as raw:
            if not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
                raise UnreadableRows("it is no plain file")
            with pq.ParquetFile(raw, read_dictionary=list(texts)) as file:
                yield file
    except UnreadableRows:
        raise
    except OSError as err:
        why = "it is a link, which is not followed" if path.is_symlink() else err.strerror or str(err)
        raise UnreadableRows(f"it cannot be read: {why}") from None
    except Exception as err:  # a damaged file makes the decoder raise anything
        raise UnreadableRows(f"it cannot be read as Parquet: {str(err).splitlines()[0][:200]}") from None


def read_footer(path: Path, number: int) -> StoredStep:
    """Read the footer of a file, which describes its rows. No row is read.

    Raises:
        UnreadableRows: it is not a file of rows, or claims too many rows or bytes.
    """
    stamp = stamp_of(path)
    with opened(path) as file:
        metadata, schema = file.metadata, file.schema_arrow
        groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
        size = sum(group.total_byte_size for group in groups)
        if metadata.num_rows > MAX_STEP_ROWS or size > MAX_STEP_BYTES:
            raise UnreadableRows(
                f"a step has at most {MAX_STEP_ROWS:,} rows and {MAX_STEP_BYTES:,} bytes; found "
                f"{metadata.num_rows:,} rows and {size:,} bytes"
            )
        of_step = plain_json(metadata.metadata or {}, "headrace.step")
    kinds = {field.name: kind for field in schema if (kind := kind_of(field.type)) is not None}
    kinds.pop("step", None)  # the step is in the file's name
    of_step = of_step if isinstance(of_step, dict) else {}
    described = {"funnel": of_step.get("funnel", []), "numbers": of_step.get("numbers", {})}
    return StoredStep(number, path, stamp, metadata.num_rows, kinds, **described)


def plain_json(metadata: Mapping[bytes, bytes], key: str) -> Any:
    """A value of a file's metadata; None if it is missing or cannot be read."""
    try:
        return json.loads(metadata.get(key.encode(), b"null"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def kind_of(type: pa.DataType) -> str | None:
    """The kind as which a column is shown; None: it is not shown."""
    if pa.types.is_string(type) or pa.types.is_large_string(type):
        return "text"
    if pa.types.is_integer(type) or pa.types.is_boolean(type):
        return "integer"
    if pa.types.is_floating(type):
        return "number"
    if pa.types.is_list(type) or pa.types.is_fixed_size_list(type):
        return "numbers" if pa.types.is_floating(type.value_type) else None
    return None


# -- values --------------------------------------------------------------------------------------------------


def values_at(file: pq.ParquetFile, names: Sequence[str], places: np.ndarray) -> list[list[Any]]:
    """The values of some rows, by row. One row group is in memory at a time."""
    found: dict[int, list[Any]] = {}
    start = 0
    for at in range(file.num_row_groups):
        size = file.metadata.row_group(at).num_rows
        here = places[(places >= start) & (places < start + size)]
        if len(here):
            table = file.read_row_group(at, columns=list(names)).take(pa.array(here - start))
            columns = [table[name].to_pylist() for name in names]
            found |= dict(zip(here.tolist(), map(list, zip(*columns, strict=True)), strict=True))
        start += size
    return [found[place] for place in places.tolist()]


def cells_at(
    file: pq.ParquetFile, stored: StoredStep, names: Sequence[str], places: np.ndarray
) -> list[list[Any]]:
    """The index of some rows in the file, and their values in a form that JSON can hold."""
    kinds = [stored.kinds[name] for name in names]
    rows = values_at(file, names, places)
    return [[place, *map(cell_of, row, kinds)] for place, row in zip(places.tolist(), rows, strict=True)]


def cell_of(value: Any, kind: str) -> Any:
    """Convert a value so that JSON can hold it and JavaScript reads it without loss.

    Example:
        >>> cell_of(2**60, "integer"), cell_of(float("nan"), "number")
        ('1152921504606846976', None)
        >>> cell_of("a" * 700, "text")["characters"]
        700
    """
    if value is None:
        return None
    if kind == "text":
        end = {"end": printable(value[-END:], keep="\n\t")} if len(value) > EXCERPT else {}
        return {"start": printable(value[:EXCERPT], keep="\n\t"), "characters": len(value)} | end
    if kind == "numbers":
        return [each if each is not None and math.isfinite(each) else None for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if abs(value) > EXACT else value


def as_mask(found: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """(N,) bool of an Arrow column of booleans; null is False."""
    return np.asarray(pc.fill_null(found, False).to_numpy(zero_copy_only=False), bool)


def ranked(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """(N,) ranks of a column of numbers, equal for equal numbers; and (N,) bool, True for missing numbers.

    64-bit integers are compared as integers, because as floats different ids of texts could be equal.

    Example:
        >>> ranks, unknown = ranked(pa.chunked_array([[2**60 + 1, None, 2**60]]))
        >>> ranks.tolist(), unknown.tolist()
        ([2, 0, 1], [False, True, False])
    """
    unknown = as_mask(pc.is_null(column, nan_is_null=True))
    whole = pa.types.is_integer(column.type)
    values = pc.fill_null(column, 0) if whole else column.cast(pa.float64())
    known = np.where(unknown, 0, values.to_numpy(zero_copy_only=False))
    return np.unique(known, return_inverse=True)[1], unknown


def by_teaching(table: pa.Table, reward: str) -> list[np.ndarray]:
    """Two keys for :func:`numpy.lexsort`: groups with the greatest range of rewards in the loss come first.

    Args:
        table: (N,) `group_id`, `reason` and the reward.
        reward: name of the column of rewards.

    Example:
        >>> rows = {"group_id": [7, 7, 8, 8], "reason": ["trained"] * 4, "reward": [1.0, 1.0, 0.0, 1.0]}
        >>> order = np.lexsort(by_teaching(pa.table(rows), "reward"))
        >>> order.tolist()
        [2, 3, 0, 1]
    """
    groups, group = np.unique(table["group_id"].to_numpy(zero_copy_only=False), return_inverse=True)
    values = table[reward].cast(pa.float64()).to_numpy(zero_copy_only=False)
    counts = as_mask(pc.equal(table["reason"], "trained")) & np.isfinite(values)
    low, high = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
    np.minimum.at(low, group[counts], values[counts])
    np.maximum.at(high, group[counts], values[counts])
    spread = np.where(high >= low, high - low, -1.0)[group]  # −1: no row of the group is in the loss
    return [group, -spread]


def coded(stored: StoredStep, name: str) -> tuple[np.ndarray, list[Any]]:
    """A column as (N,) codes, and the value of each code.

    Raises:
        UnreadableRows: there is no such column, or a file cannot be read.
    """
    if name not in stored.kinds:
        raise UnreadableRows(f"step {stored.step} has no column {name!r}")
    with opened(stored.path, texts=[name] if stored.kinds[name] == "text" else []) as file:
        return as_codes(file.read([name])[name])


def as_codes(column: pa.ChunkedArray) -> tuple[np.ndarray, list[Any]]:
    """(N,) codes of a column, and the value of each code. Null is a value, too.

    Example:
        >>> codes, values = as_codes(pa.chunked_array([["a", None], ["b", "a"]]))
        >>> codes.tolist(), values
        ([0, 2, 1, 0], ['a', 'b', None])
    """
    if not pa.types.is_dictionary(column.type):
        column = pc.dictionary_encode(column)
    column = column.unify_dictionaries()
    if not column.num_chunks:
        return np.empty(0, np.int64), []
    codes = pc.fill_null(pa.chunked_array([chunk.indices for chunk in column.chunks]), -1).to_numpy()
    codes, values = codes.astype(np.int64), column.chunk(0).dictionary.to_pylist()
    if (codes < 0).any():
        codes, values = np.where(codes < 0, len(values), codes), [*values, None]
    return codes, values


def key_of(value: Any) -> str:
    """A short name for a prompt, the same in every run: 128 bits of a hash of its text or id."""
    text = "" if value is None else str(value)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()
