"""Encode the texts of a dump with the tokenizer of its model (``source.tokenizer``).

Prompt and response are encoded separately, without special tokens. The result may differ from the sampled
tokens by a few: frameworks may drop special tokens when they decode, and a text may have several encodings.
The contents of messages are encoded one by one. Those of an assistant are in the loss, those of tools and
users are not. The tokens of a chat template around the contents are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .batch import Sample
from .record import SourceError, first_line

Encode = Callable[[list[str]], list[list[int]]]
FILE = "tokenizer.json"


def load_tokenizer(path: str | Path) -> Encode:
    """Load a function from texts to token ids, of a ``tokenizer.json`` or of a folder of ``transformers``.

    It downloads nothing, and runs no code of the folder.

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
    package = "tokenizers" if file.is_file() else "transformers"
    try:
        if file.is_file():
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(file))
            fast.no_truncation()
            fast.no_padding()
            return lambda texts: [
                each.ids for each in fast.encode_batch_fast(texts, add_special_tokens=False)
            ]
        from transformers import AutoTokenizer

        slow: Any = AutoTokenizer.from_pretrained(str(place), local_files_only=True, trust_remote_code=False)
        return lambda texts: slow(texts, add_special_tokens=False)["input_ids"] if texts else []
    except ImportError as err:
        raise ValueError(
            f"tokenizer={str(path)!r} needs the package {package}: pip install 'headrace[llm]'"
        ) from err
    except Exception as err:  # a damaged file makes the packages raise anything
        raise ValueError(
            f"tokenizer must be a {FILE}, or a folder of transformers; {path} cannot be read as one: "
            f"{first_line(err)}"
        ) from err


def add_tokens(samples: Sequence[Sample], encode: Encode) -> None:
    """Write the tokens of samples, in place. Does nothing if a sample has tokens or a length already.

    Raises:
        SourceError: a sample has no response as text.

    Example:
        >>> sample = Sample("a", 0, 1.0, prompt="1+1?", response="two")
        >>> add_tokens([sample], lambda texts: [[ord(letter) for letter in text] for text in texts])
        >>> sample.extent()
        (7, 3)
    """
    if any(sample.extent() is not None for sample in samples):
        return  # the dump has them
    without = [sample for sample in samples if sample.response is None and not sample.lost]
    if without:
        raise SourceError(
            f"{without[0].where}: a tokenizer encodes the text of a response; found none. Leave "
            "source.tokenizer out"
        )
    written = [sample for sample in samples if sample.response is not None]
    prompts = encode([sample.prompt or "" for sample in written])
    parts = [sample.response_parts or [(True, sample.response or "")] for sample in written]
    pieces = iter(encode([text for each in parts for _, text in each]))
    for sample, prompt, each in zip(written, prompts, parts, strict=True):
        response, mask = _joined((trains, next(pieces)) for trains, _ in each)
        sample.tokens, sample.response_length = prompt + response, len(response)
        sample.loss_mask = None if all(mask) else mask


def _joined(parts: Iterable[tuple[bool, list[int]]]) -> tuple[list[int], list[int]]:
    """The tokens of a response, and for each token 1 if the policy wrote it, else 0."""
    tokens: list[int] = []
    mask: list[int] = []
    for trains, ids in parts:
        tokens += ids
        mask += [int(trains)] * len(ids)
    return tokens, mask
