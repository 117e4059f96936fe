"""Columns with a number for each token: read as (B, T), written dense or ragged, and added up."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor, nn

from .errors import BatchError, MissingKeyError, listing
from .rows import Rows
from .schema import key_names, require
from .tensordicts import (
    ATTENTION,
    PROMPT,
    RESPONSE,
    check_mask,
    column_of,
    count_in_loss,
    entries_of,
    flat_rows,
    loss_mask_of,
    write_entry,
)

Side = Literal["left", "right"]
AT_ONCE = 2**17  # tokens: 1 MiB of float64 a column, which stays in the processor's cache


def loss_tokens(batch: TensorDictBase, loss_mask_key: NestedKey, log_prob_key: NestedKey | None) -> Tensor:
    """(N,) int64: tokens in the loss, as TorchRL's GRPOLoss counts them: masked in, with a finite log-prob.

    Where there is no mask, the response is what trains, if the batch says where it is
    (:func:`.tensordicts.loss_mask_of`).

    Raises:
        MissingKeyError: nothing says which tokens train.
        BatchError: the mask is not bool; it differs in shape from the log-probabilities.
    """
    tokens = count_in_loss(batch, loss_mask_key, log_prob_key)[1]
    if tokens is None:
        raise MissingKeyError(
            f"tokens in the loss are those of the mask {loss_mask_key!r} (loss_mask_key), or of a response "
            f"behind its prompt: {PROMPT!r} and {RESPONSE!r}, as wide together as {ATTENTION!r}. Finite "
            "log-probabilities do not say which tokens train: those of a scored prompt are finite, too. The "
            f"batch has {key_names(batch)}: write the mask, True where a token trains"
        )
    return tokens


def tokens_in_loss(batch: TensorDictBase, loss_mask_key: NestedKey, log_prob_key: NestedKey | None) -> Tensor:
    """(B, T) bool: the tokens that :func:`loss_tokens` counts, ragged rows filled up on the right.

    That has checked the columns before.
    """
    columns = [(loss_mask_key, loss_mask_of(batch, loss_mask_key))]
    if log_prob_key is not None and (log_prob := column_of(batch, log_prob_key)) is not None:
        columns.append((log_prob_key, log_prob))
    mask, *rest = (flat_rows(padded(each, key) if isinstance(each, list) else each) for key, each in columns)
    return mask & rest[0].isfinite() if rest else mask


def read_tokens(
    batch: TensorDictBase,
    key: NestedKey,
    *,
    reader: str,
    option: str,
    fill: float = 0,
    side: Side = "right",
) -> Tensor:
    """Read one number a token: (B, T) or (B, T, 1) comes back as (B, T), ragged rows filled up on a side.

    Raises:
        MissingKeyError: the column is not there.
        BatchError: it has another shape.
    """
    column = _dense(batch, key, reader, option, fill, side)
    if isinstance(column, Tensor) and column.ndim == 3 and column.shape[-1] == 1:
        column = column.squeeze(-1)
    if not isinstance(column, Tensor) or column.ndim != 2:
        found = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
        raise BatchError(f"{reader} needs one number a token, (N, T), in {key!r} ({option}); found {found}")
    return column.detach()


def read_mask(
    batch: TensorDictBase, key: NestedKey, *, reader: str, option: str, side: Side = "right"
) -> Tensor:
    """:func:`read_tokens` of a mask: (B, T) bool.

    Raises:
        MissingKeyError: it is not there.
        BatchError: it is not bool, or has another shape.
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
    """(B, T, ...) of ragged rows, filled up on a side: by a number; None: by NaN among floats, else 0.

    Raises:
        BatchError: rows differ in more than their length.

    Example:
        >>> padded([torch.tensor([7]), torch.tensor([8, 9])], "tokens", side="left").tolist()
        [[0, 7], [8, 9]]
    """
    kinds = {(row.dtype, row.shape[1:]) if isinstance(row, Tensor) else type(row) for row in rows}
    if len(kinds) > 1 or not all(isinstance(row, Tensor) for row in rows[:1]):
        raise BatchError(
            f"rows of {key!r} are tensors of one dtype and width; found {sorted(map(str, kinds))}"
        )
    fill = no_token(rows[0]) if fill is None else fill
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=fill, padding_side=side)


def no_token(column: Tensor) -> float:
    """What stands in a column where there is no token: False, 0, or NaN among floats."""
    return float("nan") if column.is_floating_point() else 0


def write_tokens(batch: TensorDictBase, key: NestedKey, values: Tensor, like: NestedKey) -> None:
    """Write (B, T, ...) values, to ragged rows as many as the row has of `like`."""
    if not isinstance(batch, LazyStackedTensorDict):
        batch.set(key, values)
        return
    for row, own, entry in zip(batch.tensordicts, values, entries_of(batch, like) or [], strict=True):
        write_entry(row, key, own[: len(entry)])


def check_lengths(
    batch: TensorDictBase,
    keys: Iterable[NestedKey],
    like: NestedKey,
    *,
    reader: str,
    or_of_rows: bool = True,
) -> None:
    """Refuse ragged rows of which a column has not as many entries as the row has tokens in `like`.

    Filled up, what is missing would be read as zeros. A column of one entry in every row may be of rows.

    Raises:
        BatchError: naming the column and the rows.
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
            f"{reader} needs one entry a token in {key!r}, as many as {like!r} has; {listing(wrong)}. Were "
            "tokens cut off after it was written? Leave it out (batch.exclude) if it is of rows"
        )


def whole_numbers(column: Tensor, key: NestedKey, option: str) -> Tensor:
    """The column as int64.

    Raises:
        BatchError: its numbers are no integers.
    """
    if column.is_floating_point() or column.is_complex() or column.dtype is torch.bool:
        raise BatchError(f"{key!r} ({option}) holds integers; found {column.dtype}")
    return column.long()


def same_width(one: Tensor, other: Tensor, names: str) -> None:
    """Check that two columns have as many tokens a row.

    Raises:
        BatchError: they have not.
    """
    if one.shape[1] != other.shape[1]:
        raise BatchError(
            f"{names} must have one number for each token of a row; found {one.shape[1]} and "
            f"{other.shape[1]} tokens"
        )


def tokens_of_all_ranks(rows: Rows, *columns: Tensor, fill: float = 0) -> list[Tensor]:
    """(B, T) of this rank's rows → (M, T') of those of all ranks, where they are; without ranks the same.

    Args:
        rows: all that are here.
        columns: (B, T) each, of one dtype.
        fill: what stands behind the tokens of ranks whose rows are shorter.
    """
    if rows.table.ranks is None:
        return list(columns)
    width = columns[0].shape[1]
    widest = int(rows.measured(width=torch.full((len(columns[0]),), width))["width"].max())
    wide = [nn.functional.pad(column, (0, widest - width), value=fill) for column in columns]
    every = rows.of_all_ranks(torch.cat(wide, 1)).to(columns[0].device)
    return list(every.split(widest, 1)) if widest else list(columns)


def describe_row(rows: Rows) -> Callable[[int], str]:
    """What describes row i of a view: its number, and its rollout where the batch says."""

    def describe(row: int) -> str:
        known = rows.key("rollout") is not None and rows.has("rollout")
        return f"row {rows.at(row)}" + (f" (rollout {rows.name('rollout', row)})" if known else "")

    return describe


def in_loss_there(rows: Rows) -> Tensor | None:
    """(B,) bool, on the device of the batch: rows in the loss now; None: all are, and nothing is copied."""
    in_loss = rows.in_loss
    return None if bool(in_loss.all()) else rows.there(in_loss).clone()


def unless_all(in_loss: Tensor | None) -> Tensor | None:
    """(B,) bool: rows in the loss; None where all are, as far as that is known without a device read."""
    everyone = in_loss is None or (in_loss.device.type == "cpu" and bool(in_loss.all()))
    return None if everyone else in_loss


def read_loss_mask(batch: TensorDictBase, key: NestedKey, in_loss: Tensor | None, *, reader: str) -> Tensor:
    """(B, T) bool: tokens in the loss, of rows that are in it.

    Args:
        batch: TensorDict ``[B]``.
        key: of the loss mask.
        in_loss: (B,) bool; None: all rows are.
        reader: who it is, for messages.

    Raises:
        MissingKeyError: the mask is not there.
        BatchError: it is not bool.
    """
    mask, in_loss = read_mask(batch, key, reader=reader, option="loss_mask_key"), unless_all(in_loss)
    return mask if in_loss is None else mask & in_loss.unsqueeze(-1)


def read_advantage(
    batch: TensorDictBase,
    key: NestedKey,
    mask: Tensor,
    mask_key: NestedKey,
    *,
    reader: str,
    rows: Rows | None = None,
) -> Tensor:
    """(B, 1) of rows, or (B, T) of tokens, of (B,) or (B, 1, 1), or (B, T, 1).

    Args:
        batch: TensorDict ``[B]``.
        key: of the advantage.
        mask: (B, T) bool, the loss mask.
        mask_key: its key.
        reader: who it is, for messages.
        rows: the table, which may have one that is not in the batch yet; None: the batch has it.

    Raises:
        MissingKeyError: it is not there.
        BatchError: it is neither, or no float; rows are ragged, and not as long as their mask.
    """
    if rows is not None and key in rows.table.written:
        credit = rows.there(rows[key].to(rows.dtype(key)))  # as the batch will have it
    else:
        credit = _dense(batch, key, reader, "advantage_key")
        check_lengths(batch, [key], mask_key, reader=reader)
    size, tokens = mask.shape
    if not credit.is_floating_point() or credit.numel() not in (size, size * tokens):
        raise BatchError(
            f"an advantage is a floating-point number a row, (N, 1, 1), or a token, (N, {tokens}, 1); "
            f"{reader} found {key!r} (advantage_key) {credit.dtype} {tuple(credit.shape)}"
        )
    return credit.detach().reshape(size, -1) if size else credit.new_zeros(0, tokens)


def first_token(chosen: Tensor, *columns: Tensor) -> list[Tensor]:
    """(B,) int64: the first token of each row that is chosen, −1 where none is; and what columns say of it.

    Args:
        chosen: (B, T) bool.
        columns: (B, T) or (B, 1) each.

    Example:
        >>> first_token(torch.tensor([[False, True]]), torch.tensor([[0.5, 0.25]]))
        [tensor([1]), tensor([0.2500])]
    """
    if chosen.shape[1] == 0:
        return [chosen.sum(1) - 1] * (1 + len(columns))
    first = chosen.view(torch.uint8).argmax(1, keepdim=True)  # the first of the largest
    said = [column.expand(chosen.shape).gather(1, first).squeeze(1) for column in columns]
    return [torch.where(chosen.any(1), first.squeeze(1), -1), *said]


def finite_inside(values: Tensor, mask: Tensor) -> Tensor:
    """(B,) bool: True where all (B, T) numbers of a row in the mask are finite; False where one may not be.

    A sum is finite only where all of it is: a tenth of the cost of looking at every number.
    """
    known = values.sum(-1).isfinite()
    if values.device.type == "cpu":
        odd = (~known).nonzero().flatten()  # out of the mask, maybe
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
    """Run a function over some rows at a time, and join what it returns; on a device, over all at once.

    Args:
        function: of these columns → tensors by name, with as many rows, each of which follows from itself.
        tokens: (B, T).
        more: (B, ...) each; None is handed on.
        at_once: so many tokens; fewer where the function needs much memory for each.

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
    """(..., T) → (...) float64: the sum over tokens, with the same bits in any order and with any padding.

    Each number is divided by a power of two above the largest of its row, and rounded to a multiple of 2⁻⁵⁰;
    what that leaves, to one of 2⁻¹⁰⁰. Multiples are added up as integers, which loses nothing. So twice as
    many digits are kept as a float64 has. Of log-probabilities nothing is lost: the sum is the exact one,
    rounded once.

    Args:
        values: finite; where one is not, the sum is NaN.

    Example:
        >>> values = torch.tensor([[0.1, 0.2, 0.3, -0.6]], dtype=torch.float64)
        >>> bool(sum_of_tokens(values) == sum_of_tokens(values.flip(1))), bool(values.sum() == 0)
        (True, False)
    """
    values = values.double()
    if values.shape[-1] == 0:
        return values.sum(-1)
    largest = torch.maximum(values.amax(-1), -values.amin(-1)).clamp_min_(2.0**-900).unsqueeze(-1)
    scale = largest.frexp().mantissa / largest  # a power of two, exactly
    coarse, fine = [], []
    for part in (values * scale).split(AT_MOST, -1):
        near = part + COARSE
        coarse.append(_steps(near, COARSE))
        fine.append(_steps(part.sub_(near.sub_(COARSE)).add_(FINE), FINE))
    high, low = _joined(coarse)
    low = low + sum(_joined(fine)) * STEP
    return (high + low) * STEP / scale.squeeze(-1)


STEP = 2.0**-50
COARSE, FINE = 6.0, 6.0 * STEP  # around which a float64 has steps of 2⁻⁵⁰ and of 2⁻¹⁰⁰
AT_MOST = 2**12  # so many tokens have less than 2⁶³ steps


def _steps(values: Tensor, around: float) -> Tensor:
    """(...) int64: by how many steps (..., T) `values` are above a number near to them, added up."""
    at = struct.unpack("q", struct.pack("d", around))[0] * values.shape[-1]
    return values.view(torch.int64).sum(-1) - ((at + 2**63) % 2**64 - 2**63)  # which wraps around, and back


def _joined(steps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(...) float64 each: the multiple of 2³² in the sum of (...) integers, and the rest, both exactly."""
    low = torch.stack([each & 0xFFFFFFFF for each in steps]).sum(0)
    high = torch.stack([each >> 32 for each in steps]).sum(0) + (low >> 32)
    return high.double() * 2.0**32, (low & 0xFFFFFFFF).double()


def plain_sum(values: Tensor) -> Tensor:
    """(B, T) → (B,): the sum over tokens as torch adds them, for numbers by which nothing is decided.

    It takes a thirtieth of the time of :func:`sum_of_tokens`. Padding changes how it is rounded; other rows
    and their order do not.
    """
    # Of a long row by itself each thread would add up a part, which rounds otherwise than among other rows.
    return (values.expand(2, -1) if len(values) == 1 else values).sum(-1)[: len(values)]


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """Let (B, T) float `values` be 0 where the mask is False, whatever stands there; in place.

    By bits: `torch.where` takes ten times as long where True and False take turns.

    Example:
        >>> zero_outside(torch.tensor([1.0, float("nan")]), torch.tensor([True, False])).tolist()
        [1.0, 0.0]
    """
    values.view(_INTEGERS[values.element_size()]).bitwise_and_(bits_of_mask(mask, values.element_size()))
    return values


def nan_inside(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) float `values` with NaN where the mask is True.

    Example:
        >>> nan_inside(torch.tensor([1.0, 2.0]), torch.tensor([True, False])).tolist()
        [nan, 2.0]
    """
    bits = bits_of_mask(mask, values.element_size())  # all of them: NaN
    return bits.bitwise_or_(values.view(bits.dtype)).view(values.dtype)


def bits_of_mask(mask: Tensor, size: int) -> Tensor:
    """Integers of so many bytes: of a True all bits, else none."""
    one = mask.view(torch.uint8).clamp_max(1).view(torch.int8)  # a True may be any byte but 0
    return one.neg_().to(_INTEGERS[size])


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
