"""Encode the texts of a dump with the tokenizer of its model (``source.tokenizer``).

Rows whose prompt and response are messages are encoded by the tokenizer's chat template, if it marks the
assistant's tokens with ``{% generation %}``. Marked tokens are in the loss if the policy sampled their
message in this row.

Otherwise texts are encoded one by one. Prompt and response are encoded separately, without special tokens.
So is each text of a message: contents, reasoning, and names and arguments of tool calls. Texts that the
policy sampled in this row are in the loss. The tokens of a chat template around the texts are missing. The
result may differ from the sampled tokens by a few: frameworks may drop special tokens when they decode, and a
text may have several encodings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.pipeline.conversations import sampled_once
from headrace.transforms.table import count_of

from .batch import Sample
from .record import SourceError, first_line

FILE = "tokenizer.json"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # marks in a chat template, around the assistant's text


class Tokenizer(NamedTuple):
    """Two functions that make tokens: of texts, and of messages."""

    encode: Callable[[list[str]], list[list[int]]]
    """Turns texts into token ids, without special tokens."""
    chat: Callable[[list[Mapping[str, Any]]], tuple[list[int], list[int]]] | None = None
    """Turns messages into token ids and a mask: 1 for each token that the template marks, else 0."""


class Counted(NamedTuple):
    """The number of rows that were encoded in each way."""

    by_template: int = 0
    by_text: int = 0

    def plus(self, other: Counted) -> Counted:
        """Add the numbers of other rows."""
        return Counted(self.by_template + other.by_template, self.by_text + other.by_text)

    @property
    def said(self) -> list[str]:
        """Sentences that say how many rows were encoded in each way.

        Example:
            >>> Counted(by_template=8).said
            ["The tokens in the loss of 8 rows were marked by the tokenizer's chat template."]
        """
        said = {
            "were marked by the tokenizer's chat template": self.by_template,
            "were encoded text by text: contents, reasoning, names and arguments of tool calls, without the "
            "tokens of a chat template": self.by_text,
        }
        return [
            f"The tokens in the loss of {count_of(number, 'row')} {how}."
            for how, number in said.items()
            if number
        ]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a ``tokenizer.json``, or from a folder of ``transformers``.

    A folder may have a chat template, and a ``tokenizer.json`` has none. Nothing is downloaded, and no code
    of the folder is run.

    Raises:
        ValueError: there is no such file or folder, it cannot be read, or a package is missing.
    """
    place = Path(path).expanduser()
    file = place / FILE if (place / FILE).is_file() else place
    if not place.exists():
        raise ValueError(
            f"tokenizer must be a {FILE}, or a folder of transformers, on this machine; found neither at "
            f"{path}. Nothing is downloaded: save it there before, with tokenizer.save_pretrained(FOLDER)"
        )
    templated = place.is_dir() and _has_marks(place)
    package = "transformers" if templated or not file.is_file() else "tokenizers"
    try:
        if package == "tokenizers":
            from tokenizers import Tokenizer as Fast

            fast = Fast.from_file(str(file))
            fast.no_truncation()
            fast.no_padding()
            return Tokenizer(
                lambda texts: [each.ids for each in fast.encode_batch_fast(texts, add_special_tokens=False)]
            )
        from transformers import AutoTokenizer

        slow: Any = AutoTokenizer.from_pretrained(str(place), local_files_only=True, trust_remote_code=False)
    except ImportError as err:
        raise ValueError(
            f"tokenizer={str(path)!r} needs the package {package}: pip install 'headrace[llm]'"
        ) from err
    except Exception as err:  # a damaged file makes the packages raise anything
        raise ValueError(
            f"tokenizer must be a {FILE}, or a folder of transformers; {path} cannot be read: "
            f"{first_line(err)}"
        ) from err

    def chat(messages: list[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = slow.apply_chat_template(messages, **how)
        return list(found["input_ids"]), [int(bit) for bit in found["assistant_masks"]]

    return Tokenizer(
        lambda texts: slow(texts, add_special_tokens=False)["input_ids"] if texts else [],
        chat if MARKS.search(str(slow.chat_template or "")) else None,
    )


def _has_marks(folder: Path) -> bool:
    """Whether a chat template in a folder of transformers marks the assistant's tokens."""
    files = (folder / "chat_template.jinja", folder / "tokenizer_config.json")
    return any(file.is_file() and MARKS.search(file.read_text(errors="replace")) for file in files)


def add_tokens(samples: Sequence[Sample], tokenizer: Tokenizer) -> Counted:
    """Write the tokens of samples, in place. Do nothing if a sample has tokens or a length already.

    Returns:
        The number of rows that were encoded in each way.

    Raises:
        SourceError: a sample has no response as text, or the chat template does not take its messages.

    Example:
        >>> sample = Sample("a", 0, 1.0, prompt="1+1?", response="two")
        >>> letters = Tokenizer(lambda texts: [[ord(letter) for letter in text] for text in texts])
        >>> add_tokens([sample], letters), sample.extent()
        (Counted(by_template=0, by_text=1), (7, 3))
    """
    if any(sample.extent() is not None for sample in samples):
        return Counted()  # the dump has tokens or lengths
    without = [sample for sample in samples if sample.response is None and not sample.lost]
    if without:
        raise SourceError(
            f"{without[0].where}: a tokenizer encodes the text of a response; found none. Leave "
            "source.tokenizer out"
        )
    written = [sample for sample in samples if sample.response is not None]
    chats = [] if tokenizer.chat is None else [sample for sample in written if sample.chat]
    for sample in chats:
        _add_tokens_of_chat(sample, sample.chat or [], tokenizer.chat)
    texts = [sample for sample in written if sample.tokens is None]
    prompts = tokenizer.encode([sample.prompt or "" for sample in texts])
    parts = [
        [(True, sample.response or "")] if sample.response_parts is None else sample.response_parts
        for sample in texts
    ]
    pieces = iter(tokenizer.encode([text for each in parts for _, text in each]))
    for sample, prompt, each in zip(texts, prompts, parts, strict=True):
        response, mask = _joined((trains, next(pieces)) for trains, _ in each)
        sample.tokens, sample.response_length = prompt + response, len(response)
        sample.loss_mask = None if all(mask) else mask
    return Counted(len(chats), len(texts))


def _add_tokens_of_chat(sample: Sample, chat: Sequence[tuple[bool, Any]], template: Any) -> None:
    """Add the tokens of messages. Marked tokens are in the loss if the row trains their message.

    It does not train the assistant's messages in the prompt, nor messages that another row trains. The
    template marks one run of tokens for each message of the assistant, in order.
    """
    try:
        tokens, marked = template([sampled_once(message) for _, message in chat])
    except Exception as err:  # a template may raise any error, such as that roles must alternate
        raise SourceError(
            f"{sample.where}: the tokenizer's chat template must take the messages; found {first_line(err)}. "
            "To encode their texts one by one, set source.tokenizer to the file tokenizer.json"
        ) from err
    own = [trains for trains, message in chat if message["role"] == "assistant"]
    if not all(own):
        runs: list[list[int]] = []
        for place, bit in enumerate(marked):
            if bit and (place == 0 or not marked[place - 1]):
                runs.append([])
            if bit:
                runs[-1].append(place)
        if len(runs) != len(own):
            raise SourceError(
                f"{sample.where}: the chat template must mark a run of tokens for each message of the "
                f"assistant ({len(own)}), because this row did not sample all messages; found {len(runs)} "
                "runs. To encode the texts one by one, set source.tokenizer to the file tokenizer.json"
            )
        train = {place for run, trains in zip(runs, own, strict=True) if trains for place in run}
        marked = [int(place in train) for place in range(len(tokens))]
    begin = marked.index(1) if 1 in marked else len(tokens)
    sample.tokens, sample.response_length, sample.loss_mask = tokens, len(tokens) - begin, marked[begin:]


def _joined(parts: Iterable[tuple[bool, list[int]]]) -> tuple[list[int], list[int]]:
    """The tokens of a response, and a mask: 1 for each token that the policy sampled, else 0."""
    tokens: list[int] = []
    mask: list[int] = []
    for trains, ids in parts:
        tokens += ids
        mask += [int(trains)] * len(ids)
    return tokens, mask
