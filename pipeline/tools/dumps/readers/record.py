"""Read a record of a dump field by field. A value of a wrong type raises an error with its file and line."""

from __future__ import annotations

import itertools
import json
import math
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from headrace.pipeline.conversations import as_messages, message_parts, message_text
from headrace.pipeline.wording import printable
from headrace.spelling import suggest

MAX_MESSAGE = 2000  # characters, of four bytes at most


class SourceError(ValueError):
    r"""A dump does not follow its format. The message begins with the file and the line or row, or the step.

    A message quotes names, keys and values of the file. Characters that a terminal would act on are escaped,
    and the middle of a long message is omitted. The traceback does not show the decoder's error, whose text
    is not escaped.

    Args:
        message: the message.
        to_type: overrides to type, on a line of their own below the message.

    Attributes:
        step: the step that the error is about, if it is about more than one record.

    Example:
        >>> print(SourceError("a.jsonl:3: found \x1b[2J"))
        a.jsonl:3: found \x1b[2J
    """

    def __init__(self, message: str, to_type: str = ""):
        super().__init__(_cut(printable(_cut(message))) + f"\n{to_type}" * bool(to_type))
        self.step: int | None = None
        self.__suppress_context__ = True

    def __str__(self) -> str:
        return str(self.args[0]) if self.step is None else f"step {self.step}: {self.args[0]}"


def _cut(text: str) -> str:
    if len(text) <= MAX_MESSAGE:
        return text
    half = MAX_MESSAGE // 2 - 2
    return f"{text[:half]} … {text[-half:]}"


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense and on the CPU, with one stored number for each item."""
    here = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return here and not tensor.is_nested and not tensor.is_quantized


class _Short(reprlib.Repr):
    """Make short reprs without formatting the whole value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxstring = self.maxother = self.maxlong = 60
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 4

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, torch.Tensor):
            if not is_plain(x):
                return "a tensor that is nested, sparse, quantized or not on the CPU"
            return f"a tensor {tuple(x.shape)} of {x.dtype} in {x.untyped_storage().nbytes()} bytes"
        if isinstance(x, dict):  # an OrderedDict in an OrderedDict, say
            return self.repr_dict(x, level)
        return super().repr_instance(x, level)


_short = _Short()


def quote(value: Any) -> str:
    """Shorten the repr of a value of any type and size to at most 200 characters.

    >>> quote(list(range(1000)))
    '[0, 1, 2, 3, ...]'
    """
    try:
        return _short.repr(value)[:200]
    except Exception:  # an integer of thousands of digits, or an object whose repr fails
        return f"a value of type {type(value).__name__} that cannot be printed"


def quote_some(values: Collection[Any], most: int = 8) -> str:
    """Quote the first values, and count the others.

    >>> quote_some({"reward": 1, "step": 2}), quote_some(range(300_000), most=2)
    ("'reward', 'step'", '0, 1 and 299998 more')
    """
    more = len(values) - most
    shown = ", ".join(map(quote, itertools.islice(values, most)))
    return f"{shown} and {more} more" if more > 0 else shown


def first_line(error: Exception) -> str:
    """The first 200 characters of the first line of a message; the type of an error without a message.

    >>> first_line(ValueError("no footer\\nat byte 12")), first_line(KeyError())
    ('no footer', 'KeyError')
    """
    lines = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip().splitlines()  # torch writes in bold
    return lines[0][:200] if lines else type(error).__name__


T = TypeVar("T")
INT64 = 2**63
FLOAT32_MAX = torch.finfo(torch.float32).max
MAX_OTHER = 1000  # characters of a text that is only shown


def as_text(value: Any) -> str | None:
    """Return the value if it is a string that UTF-8 can encode, else None."""
    if type(value) is not str:
        return None
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which could not be printed later
        return None
    return value


def as_number(value: Any) -> float | None:
    """Return the value as a float if it is a number within float32, else None."""
    if type(value) not in (int, float) or not -FLOAT32_MAX <= value <= FLOAT32_MAX:
        return None
    return float(value)


def as_whole(value: Any) -> int | None:
    """Return the value if it is an integer ≥ 0 that fits into int64, else None."""
    return value if type(value) is int and 0 <= value < INT64 else None


def as_wholes(value: Any) -> list[int] | None:
    """Return the value as a list of integers ≥ 0, else None."""
    values = _as_list(value)
    if values is None or not all(type(item) is int for item in values):
        return None
    return values if not values or (min(values) >= 0 and max(values) < INT64) else None


def as_numbers(value: Any) -> list[float] | None:
    """Return the value as a list of floats, else None."""
    values = _as_list(value)
    if values is None or not all(type(item) in (int, float) for item in values):
        return None
    inside = all(-FLOAT32_MAX <= item <= FLOAT32_MAX for item in values)  # NaN compares as False
    return [float(item) for item in values] if inside else None


def as_bits(value: Any) -> list[int] | None:
    """Return the value as a list of 0 and 1, else None."""
    values = _as_list(value)
    if values is None or not all(type(item) in (bool, int, float) and item in (0, 1) for item in values):
        return None
    return [int(item) for item in values]


def as_number_or_gap(value: Any) -> float | None:
    """Like :func:`as_number`, but return NaN for null and NaN, which tables have for a missing reward."""
    if value is None or (type(value) is float and math.isnan(value)):
        return math.nan
    return as_number(value)


def _as_list(value: Any) -> list[Any] | None:
    if isinstance(value, torch.Tensor):
        if not is_plain(value) or value.dim() != 1:
            return None
        # An expanded tensor has more items than it stores.
        holds = value.numel() * value.element_size() <= value.untyped_storage().nbytes()
        return value.detach().tolist() if holds else None
    return value if type(value) is list else None


def _reader(convert: Callable[[Any], Any], what: str) -> Callable[..., Any]:
    """Make a method of :class:`Record` that reads a value, and raises if `convert` returns None."""

    def read(record: Record, key: str, *, optional: bool = False) -> Any:
        value = record.get(key, optional=optional)
        if value is None:
            return None
        converted = convert(value)
        if converted is None:
            raise record.fail(f"{key!r} must be {what}", value)
        return converted

    return read


class Record:
    """One record of a dump, with its file and line.

    Each method that reads a value raises :class:`SourceError` if the key is missing or the value has another
    type. With ``optional=True`` the method returns None for a missing key or a null. A bool is not a number.

    Args:
        data: the keys and values of the record.
        where: ``file:line``.
        line: number of the record in its file, from 1.

    Example:
        >>> Record({"reward": 1}, "a.jsonl:7", 7).number("reward")
        1.0
    """

    __slots__ = ("data", "line", "read", "where")

    def __init__(self, data: dict[Any, Any], where: str, line: int = 0):
        self.data, self.where, self.line = data, where, line
        self.read: set[str] = set()  # the keys that were read

    def fail(self, required: str, found: Any) -> SourceError:
        """Make an error that says where it is, what is required and what was found."""
        return SourceError(f"{self.where}: {required}; found {quote(found)}")

    def get(self, key: str, *, optional: bool = False) -> Any:
        """The value under a key, of any type."""
        self.read.add(key)
        value = self.data.get(key)
        if value is None and not optional:
            if key in self.data:
                raise self.fail(f"{key!r} must be set", None)
            keys = quote_some(self.data)
            meant = suggest(key, map(str, self.data))
            raise SourceError(f"{self.where}: the key {key!r} is required; found the keys {keys}{meant}")
        return value

    text = _reader(as_text, "a string of valid Unicode")
    number = _reader(as_number, "a finite number")
    whole = _reader(as_whole, "an integer from 0 to 2**63 - 1")
    label = _reader(
        lambda each: as_whole(each) if type(each) is int else as_text(each),
        "an id, a string or an integer ≥ 0",
    )
    wholes = _reader(as_wholes, "a list of integers from 0 to 2**63 - 1")  # for example, tokens
    numbers = _reader(as_numbers, "a list of finite numbers")
    bits = _reader(as_bits, "a list of 0 and 1")  # booleans are read, too

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """The value of a key that must be true or false."""
        value = self.get(key, optional=default is not None)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"{key!r} must be true or false", value)
        return value

    def says(self, key: str) -> bool:
        """Whether a key, such as ``error``, has a value that is not null, false or empty."""
        return bool(self.get(key, optional=True))

    def choice(self, key: str, known: Mapping[str, T]) -> T:
        """The entry of `known` for the word under a key."""
        word = self.text(key)
        if word not in known:
            raise self.fail(f"{key!r} must be one of {', '.join(known)}", word)
        return known[word]

    def record(self, key: str, *, optional: bool = False) -> Any:
        """A nested record."""
        value = self.get(key, optional=optional)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(f"{key!r} must be an object", value)
        return Record(value, f"{self.where}, {key}", self.line)

    def records(self, key: str, *, optional: bool = False) -> list[Record]:
        """A list of nested records; empty if it is optional and missing."""
        values = self.get(key, optional=optional)
        if values is None:
            return []
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise self.fail(f"{key!r} must be a list of objects", values)
        return [Record(value, f"{self.where}, {key}[{i}]", self.line) for i, value in enumerate(values)]

    def other_columns(self) -> str:
        """The texts, numbers and booleans under keys that were not read, as a JSON object; empty if none.

        Example:
            >>> record = Record({"score": 1, "acc": True, "pred": "4", "ids": [1, 2]}, "1.jsonl:1")
            >>> record.number("score"), record.other_columns()
            (1.0, '{"acc": true, "pred": "4"}')
        """
        kept = {}
        for key, value in self.data.items():
            if key in self.read or type(key) is not str or type(value) not in (str, bool, int, float):
                continue
            if type(value) is str:
                value = value[:MAX_OTHER] + "…" * (len(value) > MAX_OTHER)
            elif not math.isfinite(value) or abs(value) > FLOAT32_MAX:
                continue
            kept[key] = value
        return json.dumps(kept, allow_nan=False) if kept else ""


def read_messages(record: Record, key: str, *, optional: bool = False) -> list[Mapping[str, Any]] | None:
    """The messages of a conversation (:func:`~headrace.pipeline.conversations.as_messages`); None for text.

    Raises:
        SourceError: the value is neither a string nor messages, or a message does not show which of its parts
            were sampled.

    Example:
        >>> read_messages(Record({"prompt": [{"role": "user", "content": "2+2?"}]}, "a:1"), "prompt")
        [{'role': 'user', 'content': '2+2?'}]
    """
    value = record.get(key, optional=optional)
    if value is None or isinstance(value, str):
        return None
    given = record.records(key)
    try:
        messages = as_messages([each.data for each in given])
        for message in messages:
            text = message_text(message)
            if as_text(message["role"]) is None or as_text(text) is None:
                raise record.fail(f"{key!r} must have messages of valid Unicode", text)
    except ValueError as err:
        raise err if isinstance(err, SourceError) else SourceError(f"{record.where}, {key}: {err}") from None
    return messages


def with_decoded_messages(record: Record, *keys: str) -> Record:
    """Return the record. If the text under one of `keys` is messages as JSON, they are decoded.

    Example:
        >>> text = '[{"role": "user", "content": "2+2?"}]'
        >>> with_decoded_messages(Record({"prompt": text}, "a:1"), "prompt").data
        {'prompt': [{'role': 'user', 'content': '2+2?'}]}
    """
    decoded = {}
    for key in keys:
        value = record.data.get(key)
        if isinstance(value, str) and value.lstrip().startswith("[") and '"role"' in value:
            with suppress(ValueError, RecursionError):  # otherwise the text only looks like JSON
                found = json.loads(value)
                if found and all(isinstance(each, dict) and "role" in each for each in found):
                    decoded[key] = found
    if not decoded:
        return record
    read = Record({**record.data, **decoded}, record.where, record.line)
    read.read = record.read  # for the reader of other columns
    return read


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Join messages to lines of ``role: text``."""
    return "\n".join(f"{each['role']}: {message_text(each)}" for each in messages)


def read_text(record: Record, key: str, *, optional: bool = False) -> str | None:
    """Return a string unchanged, and messages as lines of ``role: text``.

    Raises:
        SourceError: the value is neither a string nor messages.

    Example:
        >>> read_text(Record({"prompt": [{"role": "user", "content": "2+2?"}]}, "a:1"), "prompt")
        'user: 2+2?'
    """
    messages = read_messages(record, key, optional=optional)
    return record.text(key, optional=optional) if messages is None else text_of(messages)


def sampled_texts(message: Mapping[str, Any], *, sampled: bool) -> list[tuple[bool, str]]:
    """The texts of a message, as pairs of a boolean, whether the policy sampled the text, and the text.

    Args:
        message: a message of a conversation.
        sampled: whether the policy sampled the message. Results of tools within it never count as sampled.

    Example:
        >>> calls = [{"name": "add", "arguments": "{}"}]
        >>> sampled_texts({"role": "assistant", "content": "Let us add.", "tool_calls": calls}, sampled=True)
        [(True, 'Let us add.'), (True, 'add'), (True, '{}')]
    """
    if not sampled:
        return [(False, message_text(message))]
    parts = message_parts(message)
    return [(part.kind != "shown", text) for part in parts for text in part.texts if text]


def read_texts(record: Record, prompt: str, response: str, *, optional: bool = False) -> dict[str, Any]:
    """The fields `prompt`, `response`, `response_parts` and `chat` of a sample (:class:`Sample`).

    Args:
        record: the record with the texts, as strings or messages.
        prompt: the key of the prompt.
        response: the key of the response.
        optional: whether the record may lack the texts.

    Raises:
        SourceError: :func:`read_messages` raises it.

    Example:
        >>> rows = {"prompt": "2+2?", "completion": [{"role": "tool", "content": "4"}]}
        >>> read_texts(Record(rows, "a:1"), "prompt", "completion")["response_parts"]
        [(False, '4')]
    """
    asked = read_messages(record, prompt, optional=optional)
    answered = read_messages(record, response, optional=optional)
    found: dict[str, Any] = {
        "prompt": record.text(prompt, optional=optional) if asked is None else text_of(asked),
        "response": record.text(response, optional=optional) if answered is None else text_of(answered),
    }
    return found if answered is None else {**found, **conversation(asked, answered)}


def conversation(
    asked: Sequence[Mapping[str, Any]] | None, answered: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The fields `response_parts` and `chat` of a sample whose response is messages.

    Args:
        asked: the messages of the prompt, which were not sampled in this rollout. None: the prompt is a text.
        answered: the messages of the response.
    """
    own = [(each["role"] == "assistant", each) for each in answered]
    chat = None if asked is None else [(False, each) for each in asked] + own
    parts = [text for sampled, each in own for text in sampled_texts(each, sampled=sampled)]
    return {"response_parts": parts, "chat": chat}


def read_json(record: Record, key: str) -> str | None:
    """Return a string unchanged, and any other value as JSON; None if there is no value.

    Raises:
        SourceError: a string is not valid Unicode, or JSON cannot hold the value.

    Example:
        >>> read_json(Record({"gts": ["4"]}, "a:1"), "gts"), read_json(Record({"gts": "4"}, "a:1"), "gts")
        ('["4"]', '4')
    """
    value = record.get(key, optional=True)
    if value is None or isinstance(value, str):
        return record.text(key, optional=True)
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise record.fail(f"{key!r} must be text, or what JSON can hold", value) from None
