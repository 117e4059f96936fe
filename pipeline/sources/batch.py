"""Samples of one step as a dense batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from headrace.transforms import number_labels
from headrace.transforms.errors import listing
from headrace.transforms.rows import as_texts

from .malformed import SourceError, quote
from .sample import MAX_CELLS, Label, Sample

UNPADDED, PADDING = 2**26, 64  # of rows × the longest: always allowed, and as a multiple of the tokens


def to_batch(samples: Iterable[Sample]) -> TensorDict:
    """Make a dense batch of the samples of one step.

    A column is on all rows or on none. But a lost row, whose rollout failed or was aborted, may lack a value;
    it has NaN, -1, no tokens or an empty text there. So may a row out of the training lack a reward. Tokens
    are padded on the left, to the longest of T.

    ====================================== ================= =============================================
    column                                  shape, dtype      where
    ====================================== ================= =============================================
    ``group_id``, ``rollout_id``            (N,) int64        the dump's own, by :func:`label_ids`
    ``group_label``, ``rollout_label``      N strings         the same as text (:func:`label_text`)
    ``("next", "reward")``                  (N, 1) float64    NaN where a lost row has none; (N, K) of K
    ``reward_names``                        K strings         where there are K, in order of the columns
    ``status``                              (N,) int64        :class:`~headrace.transforms.Status`
    ``("masks", "all_assistant_mask")``     (N, T) bool       tokens that train; T = 1 without lengths
    ``("tokens", "full")``                  (N, T) int64      rows have tokens; 0 is padding
    ``("masks", "all_attention_mask")``     (N, T) bool       with the tokens
    ``("log_probs", "full")``               (N, T) float32    rows have them; NaN outside of the response
    ``("next", "policy_version")``          (N,) int64        rows have it
    ``expected_rollouts``                   (N,) int64        rows have it
    ``logged_advantage``                    (N,) float32      rows have it
    ``prompt_text``, ``response_text``      N strings         rows have them
    ``ground_truth``                        N strings         all rows have it
    ====================================== ================= =============================================

    Args:
        samples: of one step, at least one.

    Raises:
        SourceError: no samples; a column on some rows only; a rollout in two groups; more rollouts in a group
            than expected; what :meth:`Sample.check` refuses. The message names the rows.

    Example:
        >>> batch = to_batch([Sample(3, 0, 1.0, response="yes"), Sample(5, 1, 0.0, response="no")])
        >>> batch["group_id"].tolist(), batch["next", "reward"].flatten().tolist()
        ([3, 5], [1.0, 0.0])
    """
    rows = [sample.check() for sample in samples]
    if not rows:
        raise SourceError("a batch has at least one sample; found none")
    check_groups(rows)
    batch = TensorDict({}, batch_size=[len(rows)])
    for name in ("group", "rollout"):
        batch[f"{name}_id"] = label_ids([getattr(row, name) for row in rows])
    batch["status"] = torch.tensor([int(row.status) for row in rows])
    _add_rewards(batch, rows)
    _add_tokens(batch, rows)
    _add_optional(batch, rows)
    _add_texts(batch, rows)
    return batch


def label_text(label: Label) -> str:
    r"""A label as text; the parts of a tuple are joined by ``/``, and one within a part is ``\/``.

    >>> label_text("a/b"), label_text(("math", 7)), label_text(("a/b", "c")) == label_text(("a", "b/c"))
    ('a/b', 'math/7', False)
    """
    if not isinstance(label, tuple):
        return str(label)
    return "/".join(str(part).replace("\\", r"\\").replace("/", r"\/") for part in label)


def label_ids(labels: Sequence[Label]) -> Tensor:
    """Ids for the labels of a dump, which are the labels themselves where all of them are numbers.

    Others are numbered by :func:`~headrace.transforms.number_labels`, alike in every step; by first
    appearance where two labels are written alike (7 and ``"7"``), or one is empty.

    Args:
        labels: N labels.

    Returns:
        (N,) int64 ≥ 0.

    Example:
        >>> label_ids([12, 7, 12]).tolist(), label_ids(["7", 7]).tolist()
        ([12, 7, 12], [0, 1])
    """
    distinct = list(dict.fromkeys(labels))
    if all(type(label) is int for label in distinct):
        return torch.tensor(labels, dtype=torch.int64)
    texts = [label_text(label) for label in distinct]
    written_alike = len(set(texts)) < len(distinct) or "" in texts
    numbers = range(len(distinct)) if written_alike else number_labels(texts).tolist()
    number = dict(zip(distinct, numbers, strict=True))
    return torch.tensor([number[label] for label in labels])


def check_groups(rows: Sequence[Sample]) -> None:
    """Check that a rollout is in one group, and that no group has more rollouts than it was dispatched with.

    Raises:
        SourceError: a rollout in two groups, or a group with more rollouts.
    """
    first_rows: dict[Label, Sample] = {}
    members: dict[Label, dict[Label, Sample]] = {}
    for row in rows:
        first = first_rows.setdefault(row.rollout, row)
        if first.group != row.group:
            raise SourceError(
                f"{row.where}: a rollout belongs to one group; found the rollout {quote(row.rollout)} in "
                f"{quote(row.group)}, and at {first.where} in {quote(first.group)}"
            )
        members.setdefault(row.group, {})[row.rollout] = row
    for row in rows:
        rollouts = members[row.group]
        if row.expected_rollouts is not None and len(rollouts) > row.expected_rollouts:
            raise SourceError(
                f"{row.where}: the group {quote(row.group)} was dispatched with {row.expected_rollouts} "
                f"rollouts; found {len(rollouts)}: {listing([other.where for other in rollouts.values()])}. "
                "Was its prompt drawn twice, or is group_size another?"
            )


def column(rows: Sequence[Sample], name: str, *, default: Any) -> list[Any] | None:
    """One field of all rows; `default` where a lost row has none. None if no row has it.

    Raises:
        SourceError: some rows have it, and a row that is not lost has none.
    """
    values = [getattr(row, name) for row in rows]
    if all(value is None for value in values):
        return None
    lacking = [
        row.where
        for row, value in zip(rows, values, strict=True)
        if value is None and (not row.lost or name == "expected_rollouts")
    ]
    if lacking:
        raise SourceError(
            f"{name} must be on all samples of a step or on none; {len(lacking)} of {len(rows)} have none: "
            f"{listing(lacking)}"
        )
    return [default if value is None else value for value in values]


def _add_rewards(batch: TensorDict, rows: Sequence[Sample]) -> None:
    by_name = column(rows, "rewards", default={})
    if by_name is None or not any(by_name):
        rewards = [[math.nan if row.reward is None else row.reward] for row in rows]
    else:
        names = list(next(values for values in by_name if values))
        for row, values in zip(rows, by_name, strict=True):
            if values and set(values) != set(names):
                raise SourceError(
                    f"{row.where}: all samples have the same rewards ({listing(names)}); "
                    f"found {listing(values)}"
                )
        rewards = [[values.get(name, math.nan) for name in names] for values in by_name]
        batch["reward_names"] = NonTensorData(names, batch_size=batch.batch_size)
    batch["next", "reward"] = torch.tensor(rewards, dtype=torch.float64)


def _add_tokens(batch: TensorDict, rows: Sequence[Sample]) -> None:
    column(rows, "response_length", default=0)
    tokens = column(rows, "tokens", default=[])
    log_probs = column(rows, "log_probs", default=[])
    known = tokens is not None or any(row.response_length is not None for row in rows)
    empty = [row.lost and known and row.tokens is None and row.response_length is None for row in rows]
    extents = [(0, 0) if none else row.extent() for none, row in zip(empty, rows, strict=True)]
    width = max(1, *(length for length, _ in extents))
    _check_size(len(rows), width, None if tokens is None else sum(map(len, tokens)))
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (row, (_, response)) in enumerate(zip(rows, extents, strict=True)):
        if row.in_loss and response:
            put_right(mask[i], [1] * response if row.loss_mask is None else row.loss_mask)
    batch["masks", "all_assistant_mask"] = mask
    if tokens is not None:
        full = torch.zeros(len(rows), width, dtype=torch.int64)
        attention = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, ids in enumerate(tokens):
            put_right(full[i], ids)
            attention[i, width - len(ids) :] = True
        batch["tokens", "full"], batch["masks", "all_attention_mask"] = full, attention
    if log_probs is not None:
        padded = torch.full((len(rows), width), math.nan)
        for i, values in enumerate(log_probs):
            put_right(padded[i], [] if empty[i] else values)
        batch["log_probs", "full"] = padded


def _check_size(rows: int, width: int, tokens: int | None) -> None:
    """Check how much memory padding takes, before it does; `tokens` in all, where the step has tokens.

    Raises:
        SourceError: rows × the longest is more than :data:`MAX_CELLS`, or with tokens than :data:`PADDING`
            times those.
    """
    most = MAX_CELLS if tokens is None else min(MAX_CELLS, max(UNPADDED, PADDING * tokens))
    if rows * width > most:
        raise SourceError(
            f"a step has at most {most} tokens in rows × the longest, padding included; found {rows} rows "
            f"and {width} tokens in the longest"
        )


def put_right(row: Tensor, values: Sequence[float]) -> None:
    """Write values at the end of a (T,) row, in place."""
    row[len(row) - len(values) :] = torch.tensor(values, dtype=row.dtype)


def _add_optional(batch: TensorDict, rows: Sequence[Sample]) -> None:
    if (version := column(rows, "policy_version", default=-1)) is not None:
        batch["next", "policy_version"] = torch.tensor(version)
    if (expected := column(rows, "expected_rollouts", default=None)) is not None:
        batch["expected_rollouts"] = torch.tensor(expected)
    if (advantage := column(rows, "advantage", default=math.nan)) is not None:
        batch["logged_advantage"] = torch.tensor(advantage, dtype=torch.float32)


def _add_texts(batch: TensorDict, rows: Sequence[Sample]) -> None:
    """Labels and texts, last: they take longer than all else, and a row that is refused need not wait."""
    texts = {f"{name}_text": column(rows, name, default="") for name in ("prompt", "response")}
    if all(row.ground_truth is not None or row.lost for row in rows):  # else only some can be graded by it
        texts["ground_truth"] = column(rows, "ground_truth", default="")
    for name in ("group", "rollout"):
        given = [getattr(row, f"{name}_label") for row in rows]
        labels = [
            label_text(getattr(row, name)) if text is None else text
            for row, text in zip(rows, given, strict=True)
        ]
        batch[f"{name}_label"] = as_texts(labels)
    for key, text in texts.items():
        if text is not None:
            batch[key] = as_texts(text)
