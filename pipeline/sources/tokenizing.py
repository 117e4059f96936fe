"""Tokens of a dump of texts, by the tokenizer of its model: ``source.tokenizer``.

The response is encoded by itself, behind its prompt, without special tokens. A framework that decoded what it
had sampled may have left special tokens out, and a text may have more than one encoding: so lengths may be a
few tokens off. Of messages their contents are encoded one by one: what an assistant wrote is in the loss,
what a tool or user wrote in between is not, and what a chat template puts around them is not there.
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
    """A function from texts to their token ids. Nothing is downloaded, and no code of the folder is run.

    Args:
        path: a ``tokenizer.json``, or a folder that ``transformers`` has saved.

    Raises:
        ValueError: there is no such file or folder, a package is missing, or it cannot be read.
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
    """Give samples of texts their tokens, in place. Those that have tokens, or their number, are left alone.

    Args:
        samples: of one step.
        encode: from texts to token ids (:func:`load_tokenizer`).

    Raises:
        SourceError: a sample has neither tokens nor a text.

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
    """The tokens of a response, and for each 1 where the policy wrote it."""
    tokens: list[int] = []
    mask: list[int] = []
    for trains, ids in parts:
        tokens += ids
        mask += [int(trains)] * len(ids)
    return tokens, mask
