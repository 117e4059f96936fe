"""Token columns: read as (B, T), written dense or ragged, and summed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor, nn

from .errors import BatchError, listing
from .rows import Rows, no_loss_mask
from .schema import LENGTH, facts_of, has_key, require
from .tensordicts import (
    check_mask,
    column_of,
    count_in_loss,
    entries_of,
    flat_rows,
    loss_mask_of,
    write_entry,
)

__all__ = [
    "advantage_dtype",
    "advantage_is_per_row",
    "change_advantage",
    "check_lengths",
    "check_mask",
    "describe_row",
    "finite_inside",
    "first_token",
    "has_versions_of_tokens",
    "in_blocks",
    "in_loss_there",
    "loss_tokens",
    "mask_tokens",
    "nan_inside",
    "no_token",
    "padded",
    "plain_sum",
    "read_advantage",
    "read_loss_mask",
    "read_mask",
    "read_tokens",
    "same_width",
    "sum_of_tokens",
    "tokens_in_loss",
    "tokens_of_all_ranks",
    "unless_all",
    "version_range",
    "versions_of_rows",
    "versions_of_tokens",
    "whole_numbers",
    "write_tokens",
    "zero_outside",
]

Side = Literal["left", "right"]
AT_ONCE = 2**17  # tokens per block: 1 MiB of float64 per column, which fits into the processor's cache


def loss_tokens(batch: TensorDictBase, loss_mask_key: NestedKey, log_prob_key: NestedKey | None) -> Tensor:
    """(N,) int64: tokens in the loss mask with a finite log-probability, as TorchRL's GRPOLoss counts them.

    Without a mask, the tokens of the response train, if the batch marks them
    (:func:`.tensordicts.loss_mask_of`).

    Raises:
        MissingKeyError: the batch has neither a mask nor a marked response.
        BatchError: the mask is not bool, or its shape differs from that of the log-probabilities.
    """
    tokens = count_in_loss(batch, loss_mask_key, log_prob_key)[1]
    if tokens is None:
        raise no_loss_mask(batch, loss_mask_key)
    return tokens


def tokens_in_loss(batch: TensorDictBase, loss_mask_key: NestedKey, log_prob_key: NestedKey | None) -> Tensor:
    """(B, T) bool: the tokens that :func:`loss_tokens` counts. Ragged rows are padded on the right.

    Call :func:`loss_tokens` first, which checks the columns.
    """
    columns = [(loss_mask_key, loss_mask_of(batch, loss_mask_key))]
    if log_prob_key is not None and (log_prob := column_of(batch, log_prob_key)) is not None:
        columns.append((log_prob_key, log_prob))
    mask, *rest = (flat_rows(padded(each, key) if isinstance(each, list) else each) for key, each in columns)
    return mask & rest[0].isfinite() if rest else mask


def read_tokens(
    batch: TensorDictBase, key: NestedKey, *, reader: str, option: str, fill: float = 0, side: Side = "right"
) -> Tensor:
    """Read a column of one number per token, (B, T) or (B, T, 1), as (B, T). Ragged rows are padded.

    Raises:
        MissingKeyError: the column is missing.
        BatchError: the column has another shape.
    """
    column = _dense(batch, key, reader, option, fill, side)
    if isinstance(column, Tensor) and column.ndim == 3 and column.shape[-1] == 1:
        column = column.squeeze(-1)
    if not isinstance(column, Tensor) or column.ndim != 2:
        found = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
        message = f"{reader} needs one number per token, (N, T), in {{column}}; found {found}"
        raise BatchError(message, key=key, option=option)
    return column.detach()


def read_mask(
    batch: TensorDictBase, key: NestedKey, *, reader: str, option: str, side: Side = "right"
) -> Tensor:
    """Read a token mask, (B, T) bool, by :func:`read_tokens`.

    Raises:
        MissingKeyError: the mask is missing.
        BatchError: the mask is not bool, or has another shape.
    """
    mask = read_tokens(batch, key, reader=reader, option=option, side=side)
    check_mask(batch, key)
    return mask


def _dense(
    batch: TensorDictBase, key: NestedKey, reader: str, option: str, fill: float = 0, side: Side = "right"
) -> Any:
    column = column_of(batch, key)
    if column is None:
        return require(batch, key, reader=reader, option=option)
    return padded(column, key, fill, side) if isinstance(column, list) else column


def padded(rows: Sequence[Tensor], key: NestedKey, fill: float | None = 0, side: Side = "right") -> Tensor:
    """Pad ragged rows on one side with `fill`: (B, T, ...). None pads floats with NaN, and others with 0.

    Raises:
        BatchError: rows differ in dtype or width.

    Example:
        >>> padded([torch.tensor([7]), torch.tensor([8, 9])], "tokens", side="left").tolist()
        [[0, 7], [8, 9]]
    """
    kinds = {(row.dtype, row.shape[1:]) if isinstance(row, Tensor) else type(row) for row in rows}
    if len(kinds) > 1 or not all(isinstance(row, Tensor) for row in rows[:1]):
        raise BatchError(
            f"rows of {key!r} must be tensors of one dtype and width; found {sorted(map(str, kinds))}"
        )
    fill = no_token(rows[0]) if fill is None else fill
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=fill, padding_side=side)


def no_token(column: Tensor) -> float:
    """The value of padding in a column: NaN for floats, else 0."""
    return float("nan") if column.is_floating_point() else 0


def write_tokens(batch: TensorDictBase, key: NestedKey, values: Tensor, like: NestedKey) -> None:
    """Write (B, T, ...) values. A ragged row gets only as many as it has entries in the column `like`."""
    if not isinstance(batch, LazyStackedTensorDict):
        batch.set(key, values)
        return
    for row, own, entry in zip(batch.tensordicts, values, entries_of(batch, like) or [], strict=True):
        write_entry(row, key, own[: len(entry)])


def check_lengths(
    batch: TensorDictBase, keys: Iterable[NestedKey], like: NestedKey, *, reader: str, or_of_rows: bool = True
) -> None:
    """Refuse ragged rows if a column has another number of entries than the row has tokens in `like`.

    Padding would turn missing entries into zeros. With `or_of_rows`, a column with one entry in each row is
    accepted as a number per row.

    Raises:
        BatchError: the lengths differ; the message names the column and the rows.
    """
    if not isinstance(batch, LazyStackedTensorDict):
        return

    def sizes(key: NestedKey) -> list[int]:
        entries = entries_of(batch, key) or []
        return [len(entry) if entry.ndim else int(or_of_rows) for entry in entries]

    tokens = sizes(like)
    for key in keys:
        found = sizes(key)
        if found == tokens or (or_of_rows and set(found) == {1}):
            continue
        pairs = enumerate(zip(found, tokens, strict=True))
        wrong = [f"row {row} has {own} for {size} tokens" for row, (own, size) in pairs if own != size]
        raise BatchError(
            f"{reader} needs one entry per token in {key!r}, as many as {like!r} has; {listing(wrong)}. Were "
            f"tokens cut off after {key!r} was written? If it has one entry per row, remove it with "
            "batch.exclude"
        )


def whole_numbers(column: Tensor, key: NestedKey, option: str) -> Tensor:
    """Convert an integer column to int64.

    Raises:
        BatchError: the column's dtype is not an integer.
    """
    if column.is_floating_point() or column.is_complex() or column.dtype is torch.bool:
        raise BatchError(f"{{column}} must hold integers; found {column.dtype}", key=key, option=option)
    return column.long()


def has_versions_of_tokens(batch: TensorDictBase, key: NestedKey) -> bool:
    """Whether a column of policy versions has one version per token. False if each row has only one token."""
    column = column_of(batch, key)
    if isinstance(column, list):
        return any(isinstance(entry, Tensor) and entry.numel() != 1 for entry in column)
    return isinstance(column, Tensor) and column.numel() != len(batch)


def versions_of_tokens(
    batch: TensorDictBase, key: NestedKey, loss_mask_key: NestedKey, *, reader: str
) -> tuple[Tensor, Tensor]:
    """Read the policy version of each token: (B, T) int64; and (B, T) bool, True at sampled tokens.

    Sampled tokens are the tokens in the loss mask or, without a mask, in TorchRL's response. The versions of
    other tokens and of padding have no meaning.

    Raises:
        MissingKeyError: the versions are missing, or nothing says which tokens were sampled.
        BatchError: the versions are not integers, or not one for each token.
    """
    versions = read_tokens(batch, key, reader=reader, option="version_key")
    sampled = loss_mask_of(batch, loss_mask_key)
    if sampled is None:
        raise no_loss_mask(batch, loss_mask_key)
    sampled = flat_rows(padded(sampled, loss_mask_key) if isinstance(sampled, list) else sampled)
    check_lengths(batch, [key], loss_mask_key, reader=reader, or_of_rows=False)
    same_width(versions, sampled, "version_key and loss_mask_key")
    return whole_numbers(versions, key, "version_key"), sampled


def version_range(versions: Tensor, sampled: Tensor, none: int = -1) -> Tensor:
    """Find the oldest and the newest version of the sampled tokens of each row: (B, 2) int64.

    Args:
        versions: (B, T) int64.
        sampled: (B, T) bool.
        none: both versions of a row without a sampled token.

    Example:
        >>> sampled = torch.tensor([[True, True, False], [False, False, False]])
        >>> version_range(torch.tensor([[4, 3, 0], [7, 7, 7]]), sampled).tolist()
        [[3, 4], [-1, -1]]
    """
    if not versions.shape[1]:
        return versions.new_full((len(versions), 2), none)
    most = torch.iinfo(torch.int64)
    oldest = versions.masked_fill(~sampled, most.max).amin(1)
    newest = versions.masked_fill(~sampled, most.min).amax(1)
    return torch.stack([oldest, newest], 1).masked_fill_(~sampled.any(1, keepdim=True), none)


def versions_of_rows(rows: Rows, key: NestedKey, loss_mask_key: NestedKey) -> Tensor | None:
    """The oldest and the newest version of each row's sampled tokens, their sum and their number.

    Returns:
        (M, 4) int64; −1, −1, 0, 0 for a row without a sampled token. None: the table has one version per row.

    Raises:
        MissingKeyError, BatchError: as :func:`versions_of_tokens`.
    """
    # All ranks decide alike, because the table is the same on all ranks.
    if (column := rows.table.columns.get(key)) is not None and column.ndim == 1:
        return None
    versions, sampled = versions_of_tokens(rows.table.batch, key, loss_mask_key, reader=rows.reader)
    total = versions.masked_fill(~sampled, 0).sum(1)
    found = torch.stack([*version_range(versions, sampled).unbind(1), total, sampled.sum(1)], 1)
    return rows.measured(versions=found)["versions"].long()


def same_width(one: Tensor, other: Tensor, names: str) -> None:
    """Require that two columns have the same number of tokens per row.

    Raises:
        BatchError: the numbers differ.
    """
    if one.shape[1] != other.shape[1]:
        raise BatchError(
            f"{names} must have one number for each token of a row; found {one.shape[1]} and "
            f"{other.shape[1]} tokens"
        )


def tokens_of_all_ranks(rows: Rows, *columns: Tensor, fill: float = 0) -> list[Tensor]:
    """Exchange (B, T) columns between ranks: (M, T') for the rows of all ranks. Alone, change nothing.

    Args:
        rows: all rows that have not left.
        columns: (B, T) each, of one dtype.
        fill: padding of ranks whose rows are shorter.
    """
    if rows.table.ranks.size == 1:
        return list(columns)
    width = columns[0].shape[1]
    widest = int(rows.measured(width=torch.full((len(columns[0]),), width))["width"].max())
    wide = [nn.functional.pad(column, (0, widest - width), value=fill) for column in columns]
    every = rows.from_batch(torch.cat(wide, 1)).to(columns[0].device)
    return list(every.split(widest, 1)) if widest else list(columns)


def describe_row(rows: Rows) -> Callable[[int], str]:
    """A function that describes row i of a view: its row number, and its rollout id if there is one."""

    def describe(row: int) -> str:
        known = rows.key("rollout") is not None and rows.has("rollout")
        return f"row {rows.at(row)}" + (f" (rollout {rows.name('rollout', row)})" if known else "")

    return describe


def in_loss_there(rows: Rows) -> Tensor | None:
    """(B,) bool, rows in the loss, copied to the device of the batch; None if all rows are in the loss."""
    in_loss = rows.in_loss
    return None if bool(in_loss.all()) else rows.to_batch(in_loss).clone()


def unless_all(in_loss: Tensor | None) -> Tensor | None:
    """(B,) bool, rows in the loss; None if all rows are, as far as this is known without a device read."""
    everyone = in_loss is None or (in_loss.device.type == "cpu" and bool(in_loss.all()))
    return None if everyone else in_loss


def read_loss_mask(batch: TensorDictBase, key: NestedKey, in_loss: Tensor | None, *, reader: str) -> Tensor:
    """Read the loss mask: (B, T) bool, False in rows that are out of the loss.

    Args:
        batch: TensorDict ``[B]``.
        key: key of the loss mask.
        in_loss: (B,) bool, rows in the loss; None: all rows.
        reader: class name of the stage, for messages.

    Raises:
        MissingKeyError: the mask is missing.
        BatchError: the mask is not bool.
    """
    mask, in_loss = read_mask(batch, key, reader=reader, option="loss_mask_key"), unless_all(in_loss)
    return mask if in_loss is None else mask & in_loss.unsqueeze(-1)


def mask_tokens(rows: Rows, batch: TensorDictBase, out: Tensor, *, tokens: Tensor, taken: Tensor) -> None:
    """Take single tokens out of the loss: their loss mask becomes False, and their log-probability NaN.

    Under ``masked_log_prob="keep"`` only the loss mask changes. Later stages still see the row's length.

    Args:
        rows: the view of the stage.
        batch: TensorDict ``[B]`` that the stage returns.
        out: (B, T) bool, the tokens.
        tokens: (M,) how many tokens each row has in the loss mask, before `out` is taken out.
        taken: (M,) how many of them are `out`.
    """
    reader, mask_key, log_prob_key = rows.reader, rows.key("loss_mask"), rows.key("log_prob")
    before = rows[LENGTH] if rows.has(LENGTH) else torch.full((len(rows),), -1)
    shorter = (before < 0) & (taken > 0)
    rows.put(LENGTH, torch.where(shorter, tokens.long(), before), ndim=1, fill=-1)
    keeps_log_prob = rows.table.masking.kept_finite is not None
    if not keeps_log_prob and log_prob_key is not None and has_key(batch, log_prob_key):
        log_prob = read_tokens(batch, log_prob_key, reader=reader, option="log_prob_key")
        write_tokens(batch, log_prob_key, nan_inside(log_prob, out), mask_key)
    # Rows out of the loss are masked later, when they are gathered. So keep their mask here.
    whole = read_tokens(batch, mask_key, reader=reader, option="loss_mask_key")
    write_tokens(batch, mask_key, whole & ~out, mask_key)


def read_advantage(
    batch: TensorDictBase,
    key: NestedKey,
    mask: Tensor,
    mask_key: NestedKey,
    *,
    reader: str,
    rows: Rows | None = None,
) -> Tensor:
    """Read the advantage: (B, 1) if it has one number per row, or (B, T) if it has one per token.

    Args:
        batch: TensorDict ``[B]``.
        key: key of the advantage.
        mask: (B, T) bool, the loss mask.
        mask_key: key of the loss mask.
        reader: class name of the stage, for messages.
        rows: the table, which may have an advantage that is not in the batch yet; None: read the batch.

    Raises:
        MissingKeyError: the advantage is missing.
        BatchError: the advantage is not floating-point, or differs in length from the mask.
    """
    if rows is not None and key in rows.table.written:
        credit = rows.to_batch(rows[key].to(rows.dtype(key)))  # rounded as it will be in the batch
    else:
        credit = _dense(batch, key, reader, "advantage_key")
        check_lengths(batch, [key], mask_key, reader=reader)
    size, tokens = mask.shape
    if not credit.is_floating_point() or credit.numel() not in (size, size * tokens):
        raise BatchError(
            f"the advantage must be floating-point, per row, (N, 1, 1), or per token, (N, {tokens}, 1); "
            f"{{reader}} found {{column}} {credit.dtype} {tuple(credit.shape)}",
            **facts_of(batch, key, "advantage_key", reader),
        )
    return credit.detach().reshape(size, -1) if size else credit.new_zeros(0, tokens)


def change_advantage(
    rows: Rows, how: Callable[..., Tensor], *, at_least: torch.dtype | None = None, **numbers: Tensor
) -> None:
    """Change the advantage element by element.

    An advantage per row changes in the table, now. An advantage per token changes when rows are gathered.

    Args:
        rows: the view of a stage.
        how: a function ``how(advantage, **numbers)``. The advantage is float64 per row, or at least
            float32 per token. The numbers broadcast to it.
        at_least: the advantage keeps its dtype, or is promoted to this one.
        numbers: by name, (M,) float for the rows of the view.

    Raises:
        MissingKeyError: the batch has no advantage.
        BatchError: the advantage is not floating-point.
    """
    key, dtype = rows.key("advantage"), advantage_dtype(rows)
    if dtype is None:
        raise rows.missing("advantage")
    if not dtype.is_floating_point:
        raise BatchError(f"the advantage must be floating-point; found {dtype}")
    if advantage_is_per_row(rows):
        changed = how(rows["advantage"], **numbers)
        rows.put("advantage", changed, dtype=torch.promote_types(dtype, at_least or dtype))
        return

    def change(batch: TensorDictBase, numbers: dict[str, Tensor]) -> None:
        parts = batch.tensordicts if isinstance(batch, LazyStackedTensorDict) else [batch]
        for number, part in enumerate(parts):
            advantage = part.get(key)
            wide = advantage.to(torch.promote_types(advantage.dtype, torch.float32))
            own = {name: each.to(wide.dtype) for name, each in numbers.items()}
            if part is batch:
                own = {name: each.view(-1, *[1] * (wide.ndim - 1)) for name, each in own.items()}
            else:
                own = {name: each[number] for name, each in own.items()}
            kept = torch.promote_types(advantage.dtype, at_least or advantage.dtype)
            part.set(key, how(wide, **own).to(kept))

    rows.when_gathered(change, [key], **numbers)


def advantage_is_per_row(rows: Rows) -> bool:
    """Whether the advantage is one number per row, which the table has; else it is one per token.

    All ranks decide alike, because the table is the same on all ranks. The widths of rows may differ.
    """
    table, key = rows.table, rows.key("advantage")
    column = table.columns.get(key)
    per_row = key in table.written or (column is not None and column.ndim == 1)
    return per_row and not table.is_late(key)


def advantage_dtype(rows: Rows) -> torch.dtype | None:
    """The dtype of the advantage, per row or per token; None: the batch has no advantage."""
    table, key = rows.table, rows.key("advantage")
    batch = table.batch
    if table.is_late(key):  # compute one row: the others will have the same dtype
        table.compact()
        batch = table.decided_between(slice(1))
    elif key in table.columns:
        return rows.dtype("advantage")
    column = column_of(batch, key)
    if column is None:
        return None
    return column[0].dtype if isinstance(column, list) else column.dtype


def first_token(chosen: Tensor, *columns: Tensor) -> list[Tensor]:
    """Find the first chosen token of each row: (B,) int64, −1 if none is chosen; and its values in `columns`.

    Args:
        chosen: (B, T) bool.
        columns: (B, T) or (B, 1) each.

    Example:
        >>> first_token(torch.tensor([[False, True]]), torch.tensor([[0.5, 0.25]]))
        [tensor([1]), tensor([0.2500])]
    """
    if chosen.shape[1] == 0:
        return [chosen.sum(1) - 1] * (1 + len(columns))
    first = chosen.view(torch.uint8).argmax(1, keepdim=True)  # index of the first True
    values = [column.expand(chosen.shape).gather(1, first).squeeze(1) for column in columns]
    return [torch.where(chosen.any(1), first.squeeze(1), -1), *values]


def finite_inside(values: Tensor, mask: Tensor) -> Tensor:
    """(B,) bool: True if all (B, T) numbers of a row in the mask are finite; False if one may not be.

    It tests the sum of the row, which is ten times cheaper than a test of each number. A sum is finite only
    if all of its terms are.
    """
    known = values.sum(-1).isfinite()
    if values.device.type == "cpu":
        odd = (~known).nonzero().flatten()  # a number that is not finite may be out of the mask
        if len(odd):
            known[odd] = zero_outside(values[odd], mask[odd]).sum(-1).isfinite()
        return known
    return zero_outside(values.clone(), mask).sum(-1).isfinite()


def in_blocks(
    function: Callable[..., Mapping[str, Tensor]],
    tokens: Tensor,
    *more: Tensor | None,
    at_once: int = AT_ONCE,
) -> dict[str, Tensor]:
    """Apply a function to blocks of rows on the CPU, and join the results. On a GPU, apply it to all rows.

    Args:
        function: a function of these columns that returns tensors by name, with a row for each row of
            `tokens`. The result of a row must depend on that row alone.
        tokens: (B, T).
        more: (B, ...) each; None is passed on.
        at_once: tokens per block; use a lower number if the function needs much memory per token.

    Example:
        >>> table = torch.arange(6.0).view(3, 2)
        >>> in_blocks(lambda some: {"sum": some.sum(-1)}, table)["sum"].tolist()
        [1.0, 5.0, 9.0]
    """
    given = tokens, *more
    rows, some = len(tokens), max(at_once // max(tokens.shape[-1], 1), 1)
    if tokens.device.type != "cpu" or rows <= some:
        return dict(function(*given))
    made: dict[str, Tensor] = {}
    for start in range(0, rows, some):
        here = slice(start, start + some)
        part = function(*(None if column is None else column[here] for column in given))
        made = made or {name: value.new_empty(rows, *value.shape[1:]) for name, value in part.items()}
        for name, value in part.items():
            made[name][here] = value
    return made


def sum_of_tokens(values: Tensor) -> Tensor:
    """Sum (..., T) values over tokens, one after the other: (...) float64. On a CPU, padding changes no bit.

    Example:
        >>> values = torch.tensor([[0.1, 0.2, 0.3]])
        >>> bool(sum_of_tokens(values) == sum_of_tokens(nn.functional.pad(values, (5, 70))))
        True
    """
    values = values.double()
    return values.cumsum(-1)[..., -1] if values.shape[-1] else values.sum(-1)


def plain_sum(values: Tensor) -> Tensor:
    """Sum (B, T) values over tokens with torch: (B,). Use it for metrics only.

    It is ten times faster than :func:`sum_of_tokens`. Padding changes its rounding. Other rows and their
    order do not.
    """
    # torch splits a single long row between threads, which rounds differently than several rows do.
    return (values.expand(2, -1) if len(values) == 1 else values).sum(-1)[: len(values)]


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """Set (B, T) float `values` to 0 in place where the mask is False, even if they are NaN.

    It uses bit operations, because `torch.where` is ten times slower if True and False alternate.

    Example:
        >>> zero_outside(torch.tensor([1.0, float("nan")]), torch.tensor([True, False])).tolist()
        [1.0, 0.0]
    """
    values.view(_INTEGERS[values.element_size()]).bitwise_and_(bits_of_mask(mask, values.element_size()))
    return values


def nan_inside(values: Tensor, mask: Tensor) -> Tensor:
    """A copy of (B, T) float `values` with NaN where the mask is True.

    Example:
        >>> nan_inside(torch.tensor([1.0, 2.0]), torch.tensor([True, False])).tolist()
        [nan, 2.0]
    """
    bits = bits_of_mask(mask, values.element_size())  # all bits set is a NaN
    return bits.bitwise_or_(values.view(bits.dtype)).view(values.dtype)


def bits_of_mask(mask: Tensor, size: int) -> Tensor:
    """Integers of `size` bytes: all bits set where the mask is True, else 0."""
    one = mask.view(torch.uint8).clamp_max(1).view(torch.int8)  # True may be stored as any byte but 0
    return one.neg_().to(_INTEGERS[size])


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
