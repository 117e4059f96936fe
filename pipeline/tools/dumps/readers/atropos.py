"""Read groups that Atropos saves: a JSON Lines file with one group per line.

Schema: NousResearch/atropos, ``ScoredDataGroup`` in ``atroposlib/envs/base.py``: ``tokens``, ``masks`` and
``scores``, lists with an entry for each rollout; and ``advantages``, ``inference_logprobs``, ``messages`` and
``overrides``, which are lists or null.

- A line is a group. Lines have no names, so a group that occurs twice looks like two groups.
- A mask has the token itself at a token that trains, and −100 elsewhere. Or it has 1 and 0.
- The response begins at the first token that trains; in messages, at the first message of the assistant.
- Advantages are per token. If they differ within a rollout, its advantage is NaN.
- A rollout with the override ``set_advantage_to_zero`` is out of the loss.
- Steps are not saved. Each file is one step, numbered in the order of the files. Statuses are not saved.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from .batch import Sample, common_advantage
from .file_kinds import Format, Reading, read_jsonl
from .record import Record, as_bits, as_number, conversation, read_messages, text_of

IGNORED = -100  # the label of a token out of the loss


def parse_row(record: Record, reading: Reading) -> list[Sample]:
    """Read the samples of one line: a rollout for each score.

    Raises:
        SourceError: the line is not as documented, or lists have different lengths.
    """
    scores, tokens = _lists(record, "scores"), _lists(record, "tokens")
    masks = _lists(record, "masks")
    more = {
        name: _lists(record, name) if record.get(name, optional=True) is not None else None
        for name in ("advantages", "inference_logprobs", "messages", "overrides")
    }
    if not scores:
        raise record.fail("'scores' must have a score for each rollout", scores)
    for name, values in {"tokens": tokens, "masks": masks, **more}.items():
        if values is not None and len(values) != len(scores):
            raise record.fail(f"{name!r} must have one entry for each score ({len(scores)})", len(values))
    return [
        _sample(
            Record(
                {
                    "score": score,
                    "tokens": tokens[at],
                    "mask": masks[at],
                    **{name: values[at] for name, values in more.items() if values is not None},
                },
                f"{record.where}, rollout {at}",
                record.line,
            ),
            reading,
            at,
        )
        for at, score in enumerate(scores)
    ]


def _sample(row: Record, reading: Reading, at: int) -> Sample:
    tokens = row.wholes("tokens")
    mask = _bits(row, tokens)
    begin = mask.index(1) if 1 in mask else len(mask)
    advantages = row.numbers("advantages", optional=True)
    log_probs = row.numbers("inference_logprobs", optional=True)
    if log_probs is not None and len(log_probs) != len(tokens):
        raise row.fail(f"'inference_logprobs' has one for each token ({len(tokens)})", len(log_probs))
    if advantages is not None and len(advantages) not in (1, len(tokens)):
        raise row.fail(f"'advantages' has one, or one for each token ({len(tokens)})", len(advantages))
    overrides = row.record("overrides", optional=True)
    advantage = None
    if advantages is not None:  # one for each token, or one for the rollout
        advantage = advantages[0] if len(advantages) == 1 else common_advantage(advantages, mask)
    return Sample(
        group=row.line,
        rollout=(row.line, at),
        reward=row.number("score"),
        status=None,
        **_texts(row),
        tokens=tokens,
        loss_mask=mask[begin:],
        response_length=len(tokens) - begin,
        log_probs=None
        if log_probs is None
        else [value if bit else math.nan for value, bit in zip(log_probs, mask, strict=True)][begin:],
        step=reading.file,
        advantage=advantage,
        in_loss=not (overrides is not None and overrides.flag("set_advantage_to_zero", default=False)),
        other_columns="",
    )


def _bits(row: Record, tokens: list[int]) -> list[int]:
    """1 for each token that trains, else 0."""
    given = row.get("mask")
    if not isinstance(given, list) or len(given) != len(tokens):
        raise row.fail(f"'mask' must be a list as long as the tokens ({len(tokens)})", given)
    bits = as_bits(given)
    labels = all(value in (IGNORED, token) for value, token in zip(given, tokens, strict=True))
    if bits is None and labels:
        return [int(value != IGNORED) for value in given]
    if bits is None:
        raise row.fail(f"'mask' must have the token itself or {IGNORED}, or 1 and 0, at each token", given)
    return bits


def _texts(row: Record) -> dict[str, Any]:
    """The text fields of messages, which are split at the first message of the assistant."""
    messages = read_messages(row, "messages", optional=True)
    if messages is None:
        return {"response": row.text("messages", optional=True)}
    first = next((at for at, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
    asked, answered = messages[:first], messages[first:]
    return {"prompt": text_of(asked), "response": text_of(answered), **conversation(asked, answered)}


def _lists(record: Record, key: str) -> list[Any]:
    values: Any = record.get(key)
    if not isinstance(values, list):
        raise record.fail(f"{key!r} must be a list with an entry for each rollout", values)
    if key == "advantages":  # one for each rollout, or for each of its tokens
        return [[value] if as_number(value) is not None else value for value in values]
    return values


FORMAT = Format(
    partial(read_jsonl, parse=parse_row),
    files=("*.jsonl",),
    keys=frozenset({"tokens", "masks", "scores"}),
    options=("group_size",),
)
