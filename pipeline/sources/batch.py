"""From samples to a dense batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from headrace.transforms.errors import listing

from .malformed import SourceError, quote
from .sample import Sample


def to_batch(samples: Iterable[Sample]) -> TensorDict:
    """Make a dense batch of the samples of one step.

    A column is on all rows or on none; only rows that failed or were aborted may lack one, and have NaN, -1,
    no tokens or an empty text there. Tokens are padded on the left, to the longest of T.

    ====================================== ================= =============================================
    column                                  shape, dtype      where
    ====================================== ================= =============================================
    ``group_id``, ``rollout_id``            (N,) int64        numbers of the labels, by first appearance
    ``group_label``, ``rollout_label``      N strings         the labels
    ``("next", "reward")``                  (N, 1) float32    NaN where a lost row has none; (N, K) of several
    ``reward_names``                        K strings         of several rewards, in order of the columns
    ``status``                              (N,) int64        :class:`~headrace.transforms.Status`
    ``("masks", "all_assistant_mask")``     (N, T) bool       tokens that train; T = 1 for texts of no length
    ``("tokens", "full")``                  (N, T) int64      rows have tokens; 0 is padding
    ``("masks", "all_attention_mask")``     (N, T) bool       with the tokens
    ``("log_probs", "full")``               (N, T) float32    rows have them; NaN outside of the response
    ``("next", "policy_version")``          (N,) int64        rows have it
    ``expected_rollouts``                   (N,) int64        rows have it
    ``advantage_logged``                    (N,) float32      rows have it
    ``prompt_text``, ``response_text``      N strings         rows have them
    ====================================== ================= =============================================

    Args:
        samples: of one step, at least one.

    Raises:
        SourceError: no samples; a column on some rows only; a rollout in two groups; more rollouts in a group
            than expected; what :meth:`Sample.check` refuses. The message names the rows.

    Example:
        >>> batch = to_batch([Sample("a", 0, 1.0, response="yes"), Sample("b", 1, 0.0, response="no")])
        >>> batch["group_id"].tolist(), batch["next", "reward"].flatten().tolist()
        ([0, 1], [1.0, 0.0])
    """
    rows = [sample.check() for sample in samples]
    if not rows:
        raise SourceError("a batch has at least one sample; found none")
    check_groups(rows)
    batch = TensorDict({}, batch_size=[len(rows)])
    for name in ("group", "rollout"):
        labels = [getattr(row, name) for row in rows]
        number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
        batch[f"{name}_id"] = torch.tensor([number[label] for label in labels])
        batch[f"{name}_label"] = [str(label) for label in labels]
    batch["status"] = torch.tensor([int(row.status) for row in rows])
    _add_rewards(batch, rows)
    _add_tokens(batch, rows)
    _add_rest(batch, rows)
    return batch


def check_groups(rows: Sequence[Sample]) -> None:
    """A rollout is in one group, and a group has no more rollouts than it was dispatched with.

    Raises:
        SourceError: one that is not.
    """
    home: dict[str | int, Sample] = {}
    members: dict[str | int, dict[str | int, Sample]] = {}
    for row in rows:
        first = home.setdefault(row.rollout, row)
        if first.group != row.group:
            raise SourceError(
                f"{row.where}: a rollout belongs to one group; found the rollout {quote(row.rollout)} in "
                f"{quote(row.group)}, and at {first.where} in {quote(first.group)}"
            )
        members.setdefault(row.group, {})[row.rollout] = row
    for row in rows:
        have = members[row.group]
        if row.expected is not None and len(have) > row.expected:
            where = listing([other.where for other in have.values()])
            raise SourceError(
                f"{row.where}: the group {quote(row.group)} was dispatched with {row.expected} rollouts; "
                f"found {len(have)}: {where}. Was its prompt drawn twice, or is group_size another?"
            )


def column(rows: Sequence[Sample], name: str, *, default: Any) -> list[Any] | None:
    """One field of all rows, `default` where a lost row has none; None if no row has it.

    Raises:
        SourceError: only some rows have it.
    """
    values = [getattr(row, name) for row in rows]
    if all(value is None for value in values):
        return None
    lacking = [
        row.where
        for row, value in zip(rows, values, strict=True)
        if value is None and (not row.lost or name == "expected")
    ]
    if lacking:
        raise SourceError(
            f"{name} must be on all samples of a step or on none; {len(lacking)} of {len(rows)} have none: "
            f"{listing(lacking)}"
        )
    return [default if value is None else value for value in values]


def _add_rewards(batch: TensorDict, rows: Sequence[Sample]) -> None:
    several = column(rows, "rewards", default={})
    if several is None or not any(several):
        rewards = [[math.nan if row.reward is None else row.reward] for row in rows]
    else:
        names = list(next(names for names in several if names))
        for row, named in zip(rows, several, strict=True):
            if named and set(named) != set(names):
                raise SourceError(
                    f"{row.where}: all samples have the same rewards ({listing(names)}); "
                    f"found {listing(named)}"
                )
        rewards = [[named.get(name, math.nan) for name in names] for named in several]
        batch["reward_names"] = NonTensorData(names, batch_size=batch.batch_size)
    batch["next", "reward"] = torch.tensor(rewards, dtype=torch.float32)


def _add_tokens(batch: TensorDict, rows: Sequence[Sample]) -> None:
    column(rows, "response_length", default=0)
    tokens = column(rows, "tokens", default=[])
    log_probs = column(rows, "log_probs", default=[])
    known = tokens is not None or any(row.response_length is not None for row in rows)
    bare = [row.lost and known and row.tokens is None and row.response_length is None for row in rows]
    extents = [(0, 0) if b else row.extent() for b, row in zip(bare, rows, strict=True)]
    width = max(1, *(length for length, _ in extents))
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
        spread = torch.full((len(rows), width), math.nan)
        for i, values in enumerate(log_probs):
            put_right(spread[i], values if not bare[i] else [])
        batch["log_probs", "full"] = spread


def put_right(row: Tensor, values: Sequence[float]) -> None:
    """Write values at the end of a (T,) row, in place."""
    row[len(row) - len(values) :] = torch.tensor(values, dtype=row.dtype)


def _add_rest(batch: TensorDict, rows: Sequence[Sample]) -> None:
    if (version := column(rows, "policy_version", default=-1)) is not None:
        batch["next", "policy_version"] = torch.tensor(version)
    if (expected := column(rows, "expected", default=None)) is not None:
        batch["expected_rollouts"] = torch.tensor(expected)
    if (advantage := column(rows, "advantage", default=math.nan)) is not None:
        batch["advantage_logged"] = torch.tensor(advantage, dtype=torch.float32)
    for name in ("prompt", "response"):
        if (text := column(rows, name, default="")) is not None:
            batch[f"{name}_text"] = text
