"""Read columns of text: prompts, responses, labels of ids, and conversations as ``role: content`` lines.

Only :func:`message_parts` decides which parts of a message the policy sampled, and what texts they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from headrace.transforms.table.tensordicts import listed

__all__ = [
    "Part",
    "as_messages",
    "labels_of_ids",
    "message_lines",
    "message_parts",
    "message_text",
    "sampled_once",
    "strings",
]

TEXT_TYPES = ("text", "output_text", "input_text", "refusal", "summary_text", "reasoning_text")
THOUGHTS = ("thinking", "reasoning", "redacted_thinking")
CALLS = (
    "function_call",
    "tool_use",
    "tool_call",
    "tool-call",
    "server_tool_use",
    "custom_tool_call",
    "mcp_call",
)
RESULTS = ("function_call_output", "custom_tool_call_output")  # items of a response that a tool wrote
MEDIA = ("image", "audio", "video", "file", "document")
REASONING = ("reasoning_content", "reasoning", "thinking", "thinking_blocks", "reasoning_details")
ASSISTANTS = ("assistant", "ai", "gpt", "model", "bot", "chatbot")
OTHER_FIELDS = ("text", "value", "parts", "message", "output", "response", "completion")
# The marks with which models begin calls in a text: <tool_call>, <function=f>, <invoke name="f">, and others.
CALL_BEGINS = (
    r"<tool_call>|<function=|<invoke |\[TOOL_CALLS\]|<\|python_tag\|>"
    r"|<\|tool_call_begin\|>|<｜tool▁call▁begin｜>"
)
CALL_ENDS = r"</tool_call>|</function>|</invoke>|<\|tool_call_end\|>|<｜tool▁call▁end｜>"
RAW_CALL = re.compile(rf"(?:{CALL_BEGINS})(.*?)(?={CALL_BEGINS}|{CALL_ENDS}|\Z)", re.DOTALL)
ONLY_CALLS = re.compile(r"\s*(\{.*\}|\[.*\])\s*", re.DOTALL)  # a content that is JSON, or [f(a=1), g()]
THOUGHT_BEGINS = re.compile(r"<(?:seed:)?think(?:ing)?>|\[THINK\]|<\|channel\|>analysis<\|message\|>")
THOUGHT_ENDS = re.compile(r"</(?:seed:)?think(?:ing)?>|\[/THINK\]|<\|end\|>")


class Part(NamedTuple):
    """A part of a message."""

    kind: Literal["text", "reasoning", "call", "shown"]
    """``shown`` is a part that the policy did not sample as text: an image, or what a tool returned."""
    texts: tuple[str, ...]
    """One text. For a call: the name of the tool, and the arguments."""

    def __str__(self) -> str:
        if self.kind == "reasoning":
            return f"<think>\n{self.texts[0]}\n</think>"
        if self.kind == "call":
            return f"<tool_call>\n{self.texts[0]}({self.texts[1]})\n</tool_call>"
        return self.texts[0]


def message_parts(message: Mapping[str, Any]) -> list[Part]:
    r"""Return the parts of a message, in the order in which a policy samples them.

    The parts are its reasoning, its content and its tool calls, in any of the fields below. A text that is in
    two fields is one part. A server may keep the sampled text as the content, with reasoning before
    ``</think>`` and calls in ``<tool_call>``, and copy this reasoning and these calls into their own fields.
    Then only the content is read. If the role is ``assistant``, the policy sampled the texts of all parts
    that are not ``shown``. It sampled no text of other roles.

    ==================================================== ================================================
    field                                                 read as
    ==================================================== ================================================
    ``reasoning_content``, ``reasoning``, ``thinking``,   reasoning: a text, or a list of parts
    ``thinking_blocks``, ``reasoning_details``
    ``content``                                           a text, null, or a list of typed parts: texts,
                                                          thinking, calls, images and other media
    ``tool_calls``, ``function_call``                     calls: name and arguments, which may be a
                                                          string or an object; a call may be JSON
    ==================================================== ================================================

    Args:
        message: with a ``role``, as in the chat API.

    Raises:
        ValueError: a field has another form, so what was sampled is not known.

    Example:
        >>> call = {"function": {"name": "add", "arguments": {"a": 1}}}
        >>> message_parts({"role": "assistant", "content": None, "tool_calls": [call]})
        [Part(kind='call', texts=('add', '{"a": 1}'))]
    """
    content, thoughts, calls = _read(message)
    before = [Part("reasoning", (text,)) for text, _ in thoughts.values() if text]
    return [*before, *content, *(call for _, call, _ in calls if call is not None)]


def sampled_once(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message without fields of reasoning and calls that its content repeats as text.

    A chat template would write such reasoning and calls twice.

    Raises:
        ValueError: as :func:`message_parts`.

    Example:
        >>> sampled_once({"role": "assistant", "content": "Two.</think>2", "reasoning_content": "Two."})
        {'role': 'assistant', 'content': 'Two.</think>2'}
    """
    _, thoughts, calls = _read(message)
    copied = {name for name, (_, in_text) in thoughts.items() if in_text}
    once = {key: value for key, value in message.items() if key not in copied}
    if any(in_text for _, _, in_text in calls):
        once.pop("function_call", None)
        once.pop("tool_calls", None)
        if kept := [given for given, _, in_text in calls if not in_text]:
            once["tool_calls"] = kept
    return once


Thoughts = dict[str, tuple[str, bool]]
Calls = list[tuple[Any, Part | None, bool]]


def _read(message: Mapping[str, Any]) -> tuple[list[Part], Thoughts, Calls]:
    """Read the parts of the content, the text of each reasoning field, and each call with its part.

    If a field of reasoning copies another text of the message, the text of the field is empty. If a call
    copies another call, its part is None. The last value of both says whether the content has the original.
    """
    _refuse_unknown(message)
    content = list(_content(message.get("content"), sampled=message.get("role") == "assistant"))
    texts = "".join(text for part in content if part.kind == "text" for text in part.texts)
    parts = [text for part in content if part.kind == "reasoning" for text in part.texts]
    known = {_bare(text) for text in (*parts, "".join(parts))}
    in_text = set(map(_bare, _thoughts_of(texts)))
    thoughts: Thoughts = {}
    for name in REASONING:
        text = _joined(message.get(name), name)
        copied = bool(text) and _bare(text) in in_text
        thoughts[name] = ("" if copied or _bare(text) in known else text, copied)
        known.add(_bare(text))
    given = message.get("tool_calls")
    if isinstance(given, str):
        given = _decoded(given, "tool_calls")
    if not given and message.get("function_call"):
        given = [message["function_call"]]
    if given is not None and not isinstance(given, list | tuple):
        raise ValueError(f"'tool_calls' must be a list; found {type(given).__name__}")
    typed: list[Part | str] = [part for part in content if part.kind == "call"]
    raw: list[Part | str] = []
    if given or typed:
        blocks = RAW_CALL.findall(texts) or [texts] * bool(ONLY_CALLS.fullmatch(texts))
        raw = [call for block in blocks for call in _calls_of(block)]
    content = [part for part in content if part.kind != "call" or not _take(part, raw)]
    calls: Calls = []
    for each in given or ():
        call = _call(_decoded(each, "tool_calls"))
        other = _take(call, typed)
        copied = not other and _take(call, raw)
        calls.append((each, None if copied or other else call, copied))
    return content, thoughts, calls


def _bare(text: str) -> str:
    """A text without white space, which servers strip. Text of only white space is unchanged."""
    return "".join(text.split()) or text


def _thoughts_of(texts: str) -> list[str]:
    """Each reasoning block of a text, and then all blocks joined. The last block may be cut off."""
    *closed, last = THOUGHT_ENDS.split(texts)
    found = [THOUGHT_BEGINS.split(text)[-1] for text in closed]
    found += THOUGHT_BEGINS.split(last)[1:]
    return [*found, "".join(found)] if found else []


def _calls_of(block: str) -> list[Part | str]:
    """The calls in a block of text: as parts if the block is JSON, else the block itself."""
    try:
        value = json.loads(block)
        return [_call(each) for each in (value if isinstance(value, list) else [value])]
    except (ValueError, RecursionError):
        return [block]


def _take(call: Part, others: list[Part | str]) -> bool:
    """Whether a call is in `others`. If so, remove its entry, because each entry stands for one call."""
    for at, other in enumerate(others):
        if _is_in(call, other):
            del others[at]
            return True
    return False


def _is_in(call: Part, other: Part | str) -> bool:
    """Whether a call equals a part, or a text contains the call's name and all its keys and values."""
    name, arguments = call.texts[0], _plain(call.texts[1])
    if isinstance(other, Part):
        return name == other.texts[0] and arguments == _plain(other.texts[1])
    return all(
        any(
            re.search(rf"(?<!\w){re.escape(form)}(?!\w)", other)
            for form in (leaf.strip(), _json(leaf)[1:-1], json.dumps(leaf)[1:-1])
        )
        for leaf in (name, *_leaves(arguments))
    )


def _plain(arguments: str) -> Any:
    """Arguments with all values as texts, without nulls: servers convert types and reformat numbers."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(each) for key, each in value.items() if each is not None}
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return value if isinstance(value, str) else _json(value)

    try:
        return plain(json.loads(arguments or "{}"))
    except (ValueError, RecursionError):
        return arguments


def _leaves(value: Any) -> Iterator[str]:
    """The keys and values of nested arguments (:func:`_plain`) that are not empty."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif value:
        yield value


def _refuse_unknown(message: Mapping[str, Any]) -> None:
    """Refuse a message whose sampled texts would be overlooked.

    Raises:
        ValueError: the role is another word for the assistant, or the text is in an unknown field.
    """
    role = str(message.get("role"))
    if role != "assistant" and role.lower() in ASSISTANTS:
        raise ValueError(f"what the policy sampled must have the role 'assistant'; found {role!r}")
    known = message.keys() & {"content", "tool_calls", "function_call", *REASONING}
    others = [key for key in OTHER_FIELDS if message.get(key)]
    if role == "assistant" and others and not known:
        raise ValueError(f"an assistant's text must be in 'content'; found it in {others[0]!r}")


def _content(content: Any, *, sampled: bool) -> Iterator[Part]:
    if content is None:
        return
    if isinstance(content, str):
        if content:
            yield Part("text", (content,))
        return
    if not isinstance(content, list | tuple):
        raise ValueError(f"'content' must be a string or a list of parts; found {type(content).__name__}")
    for each in content:
        if isinstance(each, str):
            yield Part("text", (each,))
            continue
        if not isinstance(each, Mapping):
            raise ValueError(f"a part of 'content' must be an object or a text; found {type(each).__name__}")
        kind = each.get("type")
        named = str(kind or "")
        if named in THOUGHTS:
            text = _joined(each, named)
            yield Part("reasoning", (text,)) if text else Part("shown", (f"[{named}]",))
        elif named in CALLS:
            yield _call(each)
        elif named in RESULTS or named.endswith(("tool_result", "tool-result")):
            value = each.get("content", each.get("output"))
            yield Part("shown", (value if isinstance(value, str) else _json(value),))
        elif any(word in named for word in MEDIA):
            yield Part("shown", (f"[{named}]",))
        elif kind is None or named in TEXT_TYPES or isinstance(each.get("text"), str):
            text = each.get("text", each.get("refusal"))
            if text is not None and not isinstance(text, str):
                raise ValueError(f"'text' of a part must be a string; found {type(text).__name__}")
            if text:
                yield Part("text", (text,))
        elif sampled:
            raise ValueError(f"a part of an assistant's 'content' must have a known type; found {named!r}")
        else:
            yield Part("shown", (f"[{named}]",))


def _joined(value: Any, name: str) -> str:
    """The text of a field of reasoning."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list | tuple):
        return "".join(_joined(each, name) for each in value)
    if not isinstance(value, Mapping):
        raise ValueError(f"{name!r} must be a text or a list of parts; found {type(value).__name__}")
    keys = ("thinking", "reasoning", "text", "content", "summary")
    return next((text for key in keys if (text := _joined(value.get(key), key))), "")


def _call(value: Any) -> Part:
    if not isinstance(value, Mapping):
        raise ValueError(f"a tool call must be an object; found {type(value).__name__}")
    function = value.get("function") or value.get("custom") or value
    function = function if isinstance(function, Mapping) else {**value, "name": function}
    name = next((function[key] for key in ("name", "toolName") if isinstance(function.get(key), str)), None)
    if name is None:
        raise ValueError(
            f"a tool call must have the 'name' of its tool; found the keys {sorted(map(str, value))}"
        )
    arguments = next(
        (
            function[key]
            for key in ("arguments", "input", "args", "parameters")
            if function.get(key) is not None
        ),
        "",
    )
    return Part("call", (name, arguments if isinstance(arguments, str) else _json(arguments)))


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"a value must be one that JSON can hold; found {type(value).__name__}") from None


def _decoded(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"a string in {name!r} must be JSON") from None


def message_text(message: Mapping[str, Any]) -> str:
    r"""Return all parts of a message as one text.

    Reasoning is within ``<think>``, and each call within ``<tool_call>``.

    Raises:
        ValueError: as :func:`message_parts`.

    Example:
        >>> message_text({"role": "assistant", "reasoning_content": "Two.", "content": "2"})
        '<think>\nTwo.\n</think>\n2'
    """
    text, last = "", ""
    for part in message_parts(message):
        joined = {part.kind, last} <= {"text", "shown"}  # the parts of one content
        text, last = text + ("\n" if text and not joined else "") + str(part), part.kind
    return text


def as_messages(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with a role, made of messages and of items of the Responses API.

    Consecutive items of the assistant, such as ``reasoning``, ``function_call`` and a ``message``, become one
    message. A ``function_call_output`` is a message of a tool.

    Raises:
        ValueError: an item has no role and an unknown type.

    Example:
        >>> call = {"type": "function_call", "name": "add", "arguments": "{}"}
        >>> [each["role"] for each in as_messages([call, {"type": "function_call_output", "output": "0"}])]
        ['assistant', 'tool']
    """
    found: list[Mapping[str, Any]] = []
    open_turn = False  # whether the last message takes further items
    for item in items:
        kind, role = item.get("type"), item.get("role")
        if kind in RESULTS:
            found.append({"role": "tool", "content": item.get("output")})
            open_turn = False
        elif kind in ("reasoning", *CALLS) or (kind == "message" and role == "assistant"):
            content = item.get("content")
            last = found[-1] if open_turn else {"role": "assistant", "content": []}
            if not open_turn:
                found.append(last)
            if kind == "reasoning":
                text = _joined(content, "content") or _joined(item.get("summary"), "summary")
                merged: dict[str, Any] = {
                    "reasoning_content": str(last.get("reasoning_content") or "") + text
                }
            elif kind == "message":
                parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
                merged = {"content": [*last["content"], *(parts or ())]}
            else:
                name, arguments = _call(item).texts
                call = {"type": "function", "function": {"name": name, "arguments": arguments}}
                merged = {"tool_calls": [*last.get("tool_calls", ()), call]}
            found[-1] = {**last, **merged}
            open_turn = True
        elif isinstance(role, str):
            found.append(item)
            open_turn = False
        else:
            raise ValueError(f"a message must have a 'role', or a known type; found {kind!r}")
    return found


def message_lines(messages: Any) -> str | None:
    r"""Return the text of a conversation; None if the value is not a conversation.

    A single message of the assistant is returned without its role.

    Args:
        messages: a list of messages with a ``role`` (:func:`message_text`), or TorchRL's ``History`` of one
            row.

    Example:
        >>> message_lines([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
        'user: 2+2?\nassistant: 4'
    """
    if isinstance(messages, list | tuple):
        if not messages or not all(isinstance(each, Mapping) and "role" in each for each in messages):
            return None
    elif getattr(messages, "batch_dims", None) == 1 and hasattr(messages, "role"):  # a History
        columns = [listed(messages.role), listed(messages.content)]
        calls = getattr(messages, "tool_calls", None)
        columns.append([None] * len(columns[0]) if calls is None else listed(calls))
        names = ("role", "content", "tool_calls")
        messages = [dict(zip(names, each, strict=True)) for each in zip(*columns, strict=True)]
    else:
        return None
    pairs = [(each["role"], _shown(each)) for each in messages]
    if [role for role, _ in pairs] == ["assistant"]:
        return pairs[0][1]
    return "\n".join(f"{role}: {text}" for role, text in pairs)


def _shown(message: Mapping[str, Any]) -> str:
    """The text of a message of a live batch. Any form is allowed, because the text is only shown."""
    try:
        return message_text(message)
    except ValueError:
        return str(message.get("content") or message)


def strings(texts: Any, rows: int) -> Sequence[str] | None:
    """Return a column of texts or conversations as strings; None if the column has other values."""
    values = [texts[row] for row in range(len(texts))] if hasattr(texts, "role") else listed(texts)
    flat = [_string(value) for value in values]
    return flat if len(flat) == rows and None not in flat else None  # type: ignore[return-value]


def _string(value: Any) -> str | None:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    return value if isinstance(value, str) else message_lines(value)


def labels_of_ids(texts: Any, ids: Sequence[int]) -> Sequence[str] | None:
    """Return a label for each of N ids; None if labels are no texts, equal the ids, or are not one per id.

    Example:
        >>> labels_of_ids(["a", "b", "a"], [5, 7, 5]), labels_of_ids(["5", "7"], [5, 7])
        (['a', 'b', 'a'], None)
    """
    labels = strings(texts, len(ids))
    pairs = set(zip(ids, labels or (), strict=False))
    one_each = len({number for number, _ in pairs}) == len(pairs) == len({label for _, label in pairs})
    return labels if one_each and any(str(number) != label for number, label in pairs) else None
