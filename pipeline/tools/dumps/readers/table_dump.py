"""Read rollouts from a file of your own: ``source.columns`` says what its columns mean.

A file is JSON Lines or Parquet. There are three shapes::

    {"problem_id": 7, "score": 1.0, "output": "4"}                               a line is a rollout
    {"prompt": "2+2?", "samples": [{"score": 1.0, "output": "4"}, ...]}          a line has a list of rollouts
    {"prompt": "2+2?", "scores": [1.0, 0.0], "outputs": ["4", "5"]}              a line has lists of values

    columns={group: problem_id, reward: score, response: output}
    columns={rollouts: samples, prompt: prompt, reward: score, response: output}
    columns={prompt: prompt, reward: scores, response: outputs}

================ ===================================================== ===================================
name             value                                                 if it is missing
================ ===================================================== ===================================
``reward``       a number, or true and false                           an error
``response``     a text, or messages; also as JSON                     an error
``rollouts``     a list of objects, one for each rollout of the line   a line is a rollout, or has lists
``group``        id of the group, a text or an integer ≥ 0             the line, if it has several rollouts,
                                                                       else `group_by`
``rollout``      id of the rollout, unique in its group                the line, and the position in it
``prompt``       a text, or messages; also as JSON                     the messages before the first of the
                                                                       assistant in the response
``step``         an integer ≥ 0                                        the number of the file
``advantage``    a number                                              not known
``ground_truth`` anything                                              not known
``status``       ``completed``, ``truncated``, ``failed``,             not known
                 ``aborted``, or a finish reason: ``stop``,
                 ``length``, ...
``truncated``    true or false                                         not known
``length``       number of sampled tokens of the response, or a list   not known without a tokenizer
                 of these tokens
================ ===================================================== ===================================

A name with dots is a path: ``reward: metrics.score``. If a line has a list of rollouts, a column that no
rollout has is taken from the line. A line has lists of values if its reward is a list. Then the response, and
each of rollout, advantage, status, truncated and length, is a list of that length. All rollouts of the line
share the other values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.pipeline.wording import for_python
from headrace.spelling import suggest
from headrace.transforms import Status

from .batch import BY_ORDER, Label, Sample
from .file_kinds import Format, Reading, parse_records, read_lines, read_rows
from .record import (
    Record,
    SourceError,
    as_number,
    conversation,
    quote,
    quote_some,
    read_json,
    read_messages,
    read_texts,
    text_of,
    with_decoded_messages,
)

MAX_PATHS = 1000  # at most this many paths of a record are compared with a misspelt path
REQUIRED = ("reward", "response")
OF_ROLLOUT = (*REQUIRED, "rollout", "advantage", "status", "truncated", "length")
NAMES = (*OF_ROLLOUT, "rollouts", "group", "prompt", "step", "ground_truth")
ENDS = {status.name.lower(): status for status in Status}
ENDS |= dict.fromkeys(
    ("stop", "eos", "end_turn", "stop_sequence", "tool_calls", "tool_use"), Status.COMPLETED
)
ENDS |= dict.fromkeys(("length", "max_tokens", "max_output_tokens", "max_length"), Status.TRUNCATED)
ENDS |= {"error": Status.FAILED, "abort": Status.ABORTED, "cancelled": Status.ABORTED}


def check_columns(columns: Mapping[str, str] | None) -> dict[str, str]:
    """Check the names of columns, and return them.

    Raises:
        ValueError: a name is unknown, a value is not a text, or a required name is missing.

    Example:
        >>> check_columns({"reward": "score", "response": "output"})
        {'reward': 'score', 'response': 'output'}
    """
    given = {str(name): value for name, value in (columns or {}).items() if value is not None}
    for name, value in given.items():
        if name not in NAMES:
            raise ValueError(
                f"columns has no {name!r}{suggest(name, NAMES)}; its names are {', '.join(NAMES)}"
            )
        if not isinstance(value, str) or not value:
            raise ValueError(f"columns.{name} must be the name of a column; got {value!r}")
    if lacking := [name for name in REQUIRED if name not in given]:
        example = "source.columns={group: problem_id, reward: score, response: output}"
        if for_python():
            example = "columns={'group': 'problem_id', 'reward': 'score', 'response': 'output'}"
        raise ValueError(
            f"the format table needs columns.{' and columns.'.join(lacking)}, such as "
            f"{example}; got {given or None}"
        )
    return given


def read_table_rows(path: Path, reading: Reading) -> Iterator[Sample]:
    """Read the samples of one file.

    Raises:
        SourceError: the file is damaged, or a column is missing or of another type.
    """
    read = read_rows if path.suffix == ".parquet" else read_lines
    return parse_records(read(path, reading), reading, parse_row)


def parse_row(record: Record, reading: Reading) -> list[Sample]:
    """Read the samples of one line.

    Raises:
        SourceError: a column is missing, or of another type.
    """
    columns = reading.columns
    rows: list[tuple[dict[str, Any], str, Mapping[Any, Any] | None]]
    if "rollouts" in columns:
        found = _value(record, columns["rollouts"])
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise _fail(record, "rollouts", columns, "a list of objects", found)
        of_line = {name: _value(record, key) for name, key in columns.items()}
        inner = [{name: _find(Record(each, ""), key) for name, key in columns.items()} for each in found]
        own = {name for each in inner for name, (there, _) in each.items() if there}
        inner = [
            {name: each[name][1] if name in own else value for name, value in of_line.items()}
            for each in inner
        ]
        others = [Record(each, "") for each in found]
        for each in others:
            each.read |= {key.split(".")[0] for key in columns.values()} | set(columns.values())
        rows = [(values, each.other_columns(), each.data) for values, each in zip(inner, others, strict=True)]
    else:
        values = {name: _value(record, key) for name, key in columns.items()}
        if not isinstance(values["reward"], list):
            return [_sample(record, reading, values, None, None)]
        size = len(values["reward"])
        for name in OF_ROLLOUT:
            if name in columns and (not isinstance(values[name], list) or len(values[name]) != size):
                raise _fail(
                    record, name, columns, f"a list as long as that of the rewards ({size})", values[name]
                )
        by_name = [(name, value if name in OF_ROLLOUT else [value] * size) for name, value in values.items()]
        rows = [({name: listed[at] for name, listed in by_name}, "", None) for at in range(size)]
    if not rows:
        raise _fail(
            record, "rollouts" if "rollouts" in columns else "reward", columns, "a list with a rollout", []
        )
    samples = [_sample(record, reading, values, at, more, own) for at, (values, more, own) in enumerate(rows)]
    labels = [sample.rollout for sample in samples]
    if twice := [label for at, label in enumerate(labels) if label in labels[:at]]:
        raise record.fail("a rollout must occur once in its group", twice[0])
    return samples


def _value(record: Record, key: str) -> Any:
    """The value of a column, or at a path with dots; None if there is none."""
    return _find(record, key)[1]


def _find(record: Record, key: str) -> tuple[bool, Any]:
    """Whether a column, or a path with dots, exists, and its value."""
    if key in record.data or "." not in key:
        return key in record.data, record.get(key, optional=True)
    record.read.add(key.split(".")[0])
    there, value = _followed(record.data, key)
    return (True, value) if there == key else (False, None)


def _fail(
    record: Record,
    name: str,
    columns: Mapping[str, str],
    required: str,
    found: Any,
    rollout: Mapping[Any, Any] | None = None,
) -> SourceError:
    """An error about a column, with the option that names it. `rollout`: its object in a list, if any."""
    key, of = columns[name], f"{columns[name]!r} (source.columns.{name})"
    if found is not None:
        return record.fail(f"{of} must be {required}", found)
    places = {} if rollout is None else {"of the rollout": rollout}
    places["of the line"] = record.data
    there, node = max((_followed(data, key) for data in places.values()), key=lambda each: len(each[0]))
    if there == key:
        said = f"found {quote(node)}"
    elif there:
        has = f"has the keys {quote_some(node)}" if node and isinstance(node, dict) else f"is {quote(node)}"
        said = f"{there!r} {has}"
    else:
        said = "found none among the keys "
        said += " and ".join(f"{quote_some(data)} {whose}" for whose, data in places.items())
    paths = itertools.islice(itertools.chain(*map(_paths, places.values())), MAX_PATHS)
    below = f"{there}." if there and isinstance(node, dict) else ""
    meant = suggest(key, dict.fromkeys(path for path in paths if path.startswith(below) and path != key))
    return SourceError(f"{record.where}: {of} is required, {required}; {said}{meant}")


def _followed(data: Mapping[Any, Any], key: str) -> tuple[str, Any]:
    """The beginning of a dotted path that exists, and the value at its end."""
    there, node = list[str](), data
    for name in [key] if key in data else key.split("."):
        if not isinstance(node, dict) or name not in node:
            break
        there, node = [*there, name], node[name]
    return ".".join(there), node


def _paths(data: Mapping[Any, Any], before: str = "") -> Iterator[str]:
    """The dotted paths of a nested object."""
    for name, value in data.items():
        yield f"{before}{name}"
        if isinstance(value, dict) and before.count(".") < 3:
            yield from _paths(value, f"{before}{name}.")


def _sample(
    record: Record,
    reading: Reading,
    values: dict[str, Any],
    at: int | None,
    others: str | None,
    own: Mapping[Any, Any] | None = None,
) -> Sample:
    """Make a rollout of its columns. `at`: its position in a line with several; `own`: its object."""
    columns = reading.columns
    reading.first = reading.first or record.data
    reading.found.update(name for name, value in values.items() if value is not None)
    if isinstance(values.get("length"), list):
        values["length"] = len(values["length"])
    where = record.where if at is None else f"{record.where}, rollout {at}"
    row = with_decoded_messages(Record(values, where, record.line), "prompt", "response")
    status = _status(row)
    lost = status in (Status.FAILED, Status.ABORTED)
    placed = Record(record.data, where, record.line)
    reward = values["reward"]
    number = float(reward) if isinstance(reward, bool) else as_number(reward)
    if number is None and not (lost and reward is None):
        raise _fail(placed, "reward", columns, "a finite number, or true or false", reward, own)
    if values["response"] is None and not lost:
        raise _fail(placed, "response", columns, "a text or messages", None, own)
    texts = read_texts(row, "prompt", "response", optional=True) if "prompt" in columns else _split(row)
    group: Label
    if "group" in columns:
        if values["group"] is None:
            raise _fail(placed, "group", columns, "an id, a text or an integer ≥ 0", None, own)
        group = row.label("group")
    elif at is not None and reading.group_by is None:
        group = record.line
    else:
        group = reading.group_of_prompt(values.get("prompt"), where, texts.get("prompt"))
    parts = group if isinstance(group, tuple) else (group,)
    label = row.label("rollout", optional=True)
    rollout: Label = (record.line,) if at is None else (record.line, at)
    if label is not None and group != BY_ORDER:
        rollout = (*parts, label)
    return Sample(
        group=group,
        rollout=rollout,
        reward=number,
        status=status,
        **texts,
        ground_truth=read_json(row, "ground_truth"),
        response_length=row.whole("length", optional=True),
        step=row.whole("step") if "step" in columns else reading.file,
        advantage=row.number("advantage", optional=True),
        other_columns=others,
        record=None if label is None else rollout,
        place=record.line if at is None else None,
    )


def said_of_columns(reading: Reading) -> list[str]:
    """Sentences about names in `columns` that no row had a value for, and about steps that are not read."""
    said = [
        f"No row has a value in the column {key!r} (source.columns.{name}){suggest(key, reading.first)}."
        for name, key in reading.columns.items()
        if name not in reading.found
    ]
    if "step" in reading.first and "step" not in reading.columns:
        said.append(
            "The column 'step' is not read, so each file is one step. To read it, add step: step to "
            "source.columns."
        )
    return said


def _status(row: Record) -> Status | None:
    truncated = row.get("truncated", optional=True)
    cut = truncated is not None and row.flag("truncated")
    status = None if row.get("status", optional=True) is None else row.choice("status", ENDS)
    if cut and status in (None, Status.COMPLETED):
        return Status.TRUNCATED
    return Status.COMPLETED if status is None and truncated is not None else status


def _split(row: Record) -> dict[str, Any]:
    """The texts of a response. Messages before the first one of the assistant are the prompt."""
    messages: Sequence[Mapping[str, Any]] | None = read_messages(row, "response", optional=True)
    if messages is None:
        return {"response": row.text("response", optional=True)}
    first = next((at for at, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
    asked, answered = messages[:first], messages[first:]
    prompt = {"prompt": text_of(asked)} if asked else {}
    return {**prompt, "response": text_of(answered), **conversation(asked, answered)}


FORMAT = Format(
    read_table_rows,
    files=("*.jsonl", "*.parquet"),
    keys=None,
    options=("columns", "group_by", "group_size", "tokenizer"),
    unsaid=("masks", "tokens"),
)
