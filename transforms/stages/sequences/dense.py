"""The stage that pads ragged rows to one dense batch with an attention mask and a loss mask."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NestedKey, NonTensorData, TensorDict, TensorDictBase
from torch import Tensor, nn
from typing_extensions import Unpack

from headrace.transforms.table import BatchError, BatchTransform, ColumnNames, MissingKeyError, Rows, listing
from headrace.transforms.table.options import at_least
from headrace.transforms.table.schema import facts_of, has_key, require
from headrace.transforms.table.tensordicts import (
    PROMPT,
    RESPONSE,
    column_of,
    count_true,
    device_of,
    entries_of,
    is_nested,
    send_packed,
    shallow_copy,
    stack_of_texts,
)
from headrace.transforms.table.tokens import (
    check_lengths,
    check_mask,
    describe_row,
    in_loss_there,
    no_token,
    padded,
)

from .packing import TOKEN_KEYS

# Columns that TorchRL's wrappers write in addition to the full sequences.
PARTS: tuple[NestedKey, ...] = (
    PROMPT,
    RESPONSE,
    ("log_probs", "prompt"),
    ("log_probs", "response"),
    *((column, "padded") for column in ("tokens", "masks", "log_probs")),
)
OF_RESPONSE = ("log_probs", "response")


class DenseRows(
    BatchTransform, columns=("tokens", "attention", "loss_mask", "log_prob", "rollout"), needed=("log_prob",)
):
    """Pad ragged rows, such as LLMCollector's, on the left to one dense batch.

    A row is a turn: a prompt and, at its end, the response of the policy. The loss mask covers the response,
    unless the rows have a loss mask already. Dense rows must be padded on the left, or as TorchRL's wrappers
    do with ``pad_output=True``: prompts on the left and responses on the right. The stage then moves the
    responses to the end of their rows. Masked rows stay masked.

    Reads `tokens_key`, and `loss_mask_key` or ``("tokens", "response")`` and ``("tokens", "prompt")``. Writes
    `tokens_key`, `attention_key`, `loss_mask_key`, and `log_prob_key` if the rows have it, (N, T) each.

    - Ragged columns with one entry per token are padded, with 0, False or NaN.
    - Log-probabilities of only the response, under `log_prob_key` or ``("log_probs", "response")``, get NaN
      for the prompt. TransformersWrapper writes 0 for each first token, so its log-probabilities are ignored.
    - The ``prompt`` and ``response`` of tokens and log-probabilities are removed: GRPOLoss's masking strategy
      ``sft`` would make a wrong mask of their width. All other columns are kept.

    Args:
        pad_id: the padding token, which is the tokenizer's `pad_token_id`.
        names: other names of columns, such as `tokens_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: the tokens are missing, or both the loss mask and the response.
        BatchError: prompt and response are not the full sequence; columns of a row differ in length; `pad_id`
            is a real token; padding is between or after tokens; or no row has a response.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> def row(prompt, response):
        ...     parts = {"prompt": prompt, "response": response, "full": prompt + response}
        ...     return TensorDict({"tokens": {key: torch.tensor(part) for key, part in parts.items()}})
        >>> dense = DenseRows(pad_id=0)(lazy_stack([row([5, 6], [7]), row([5], [8])]))
        >>> dense["tokens", "full"].tolist(), dense["masks", "all_assistant_mask"].int().tolist()
        ([[5, 6, 7], [0, 5, 8]], [[0, 0, 1], [0, 0, 1]])
    """

    within_groups = True

    def __init__(self, *, pad_id: int, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        writes = [self.tokens_key, self.attention_key, self.loss_mask_key, self.log_prob_key]
        super().__init__([self.tokens_key, PROMPT, RESPONSE], writes)
        if pad_id is None:
            raise ValueError("pad_id must be an integer ≥ 0; got None. Add a padding token to the tokenizer")
        self.pad_id = at_least("pad_id", pad_id, 0)

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Pad the rows, check them, and make the dense batch."""
        # 1. Pad columns per token to one width, and stack all others.
        if isinstance(batch, LazyStackedTensorDict):
            rest, columns, parts = self._padded(batch)
        else:
            require(batch, self.tokens_key, reader=rows.reader, option="tokens_key")
            keys = dict.fromkeys([*self.out_keys, *TOKEN_KEYS])
            rest = batch.exclude(*PARTS)
            columns = {key: batch.get(key) for key in keys if has_key(batch, key)}
            if len(batch):  # an empty batch may belong to ranks with ragged rows, which need no mask
                require(batch, self.attention_key, reader=rows.reader, option="attention_key")
            else:
                columns.setdefault(self.attention_key, torch.ones_like(columns[self.tokens_key]).bool())
            parts = self._parts(batch, columns[self.tokens_key])
        for key in (self.attention_key, self.loss_mask_key):
            if key in columns and columns[key].dtype is not torch.bool:
                check_mask(batch, key)
        tokens, attention = columns[self.tokens_key], columns[self.attention_key]

        # 2. Without a loss mask, the response of each row is in the loss.
        has_response = is_whole = torch.ones(len(batch), dtype=torch.bool, device=tokens.device)
        if self.loss_mask_key not in columns:
            if parts is None:
                raise MissingKeyError(
                    "{reader} needs a batch with the column {column}, True at tokens in the loss, "
                    f"or the column {RESPONSE!r}; {{present}}",
                    **facts_of(batch, self.loss_mask_key, "loss_mask_key", rows.reader),
                )
            response = parts.response & attention
            has_response = count_true(response) > 0
            in_loss = in_loss_there(rows)
            columns[self.loss_mask_key] = response if in_loss is None else response & in_loss[:, None]

        # 3. Move a response that a wrapper has padded on the right to the end of its row.
        if parts is not None:
            if parts.joined is not tokens:
                width = max(parts.joined.shape[1], tokens.shape[1])
                joined, whole = (fit_width(each, width, self.pad_id) for each in (parts.joined, tokens))
                other = joined != whole
                other = other if parts.known is None else other & fit_width(parts.known, width, 0)
                is_whole = count_true(other) == 0
            if not bool(attention[:, -1:].all()):
                behind, width = entries_behind(attention), tokens.shape[1]
                items = rest.exclude(*columns).items(include_nested=True)
                if width > 1 and (odd := [key for key, each in items if each.shape[1:2] == (width,)]):
                    raise BatchError(
                        "the tokens of these rows must be moved to the end of the rows, and columns of the "
                        f"same width would not be moved: {listing(map(repr, odd))}. Pad on the left, or "
                        "remove these columns (batch.exclude)"
                    )
                columns = {key: turn_right(column, behind) for key, column in columns.items()}
                tokens, attention = columns[self.tokens_key], columns[self.attention_key]

        # 4. Check each row, with one copy to the table.
        found = rows.measured(
            has_response=has_response,
            is_whole=is_whole,
            has_tokens=count_true(attention) > 0,
            together=count_true(attention[:, :-1] > attention[:, 1:]) == 0,
            no_padding=count_true(attention & (tokens == self.pad_id)) == 0,
            real_in_loss=count_true(columns[self.loss_mask_key] > attention) == 0,
        )
        # This is a check of the batch, over all ranks: single rows may have no response.
        found["has_response"] = (found["has_response"] == 1).any().expand(len(rows))
        messages = {
            "has_response": "at least one row needs a response; all are empty in {found}. Is the padding "
            "token also the end-of-sequence token?",
            "is_whole": "prompt and response together must be the full sequence; they are not in {found}. "
            "Were tokens cut off, or is `full` from another turn?",
            "has_tokens": "every row needs a token; found none in {found}",
            "together": "the tokens of a row must be together at its end, after the padding; the attention "
            "mask is False after or between tokens in {found}. Pad on the left. TorchRL's wrappers treat a "
            "sampled padding token as padding: prevent its sampling with "
            "generate_kwargs={'bad_words_ids': [[pad_id]]}",
            "no_padding": f"pad_id={self.pad_id} must be used only for padding; it is a real token in "
            "{found}. If this token also ends responses, give the tokenizer its own padding token",
            "real_in_loss": "tokens in the loss must be real; the loss mask is True on padding in {found}",
        }
        for law, message in messages.items():
            rows.require(found[law] == 1, message, describe_row(rows))

        # 5. Build the dense batch of the same rows.
        rows.table.batch = rest
        dense = shallow_copy(rest)
        for key, column in columns.items():
            dense.set(key, column)
        return dense

    def _parts(self, batch: TensorDictBase, tokens: Tensor) -> Parts | None:
        """The :class:`Parts` of dense rows."""
        columns = [batch.get(key) for key in (PROMPT, RESPONSE) if has_key(batch, key)]
        if not has_key(batch, RESPONSE):
            return None
        joined, known = torch.cat(columns, 1), None
        if len(columns) == 1:
            known = torch.ones_like(joined, dtype=torch.bool)
        place = torch.arange(tokens.shape[1], 0, -1, device=tokens.device)
        response = (place <= columns[-1].shape[1]).expand(len(tokens), -1)
        return Parts(joined, known, response)

    def _padded(
        self, batch: LazyStackedTensorDict
    ) -> tuple[TensorDict, dict[NestedKey, Tensor], Parts | None]:
        """The stacked columns; the columns per token, (N, T, ...) padded on the left; and the :class:`Parts`.

        Raises:
            MissingKeyError: the tokens are missing.
            BatchError: only some rows have a column; or a ragged column is not per token.
        """
        by_row = columns_by_row(batch, [key for key in PARTS if key not in (PROMPT, RESPONSE)])
        if self.tokens_key not in by_row:
            require(batch, self.tokens_key, reader=type(self).__name__, option="tokens_key")
        parts = {key: by_row.pop(key) for key in (PROMPT, RESPONSE) if key in by_row}
        sizes, response = sizes_of(by_row[self.tokens_key]), parts.get(RESPONSE)
        lay = Layout(device_of(batch), *([sizes] if response is None else [sizes, sizes_of(response)]))
        width = max(sizes)
        columns: dict[NestedKey, Tensor] = {}
        if response is not None:
            key = self.log_prob_key if self.log_prob_key in by_row else OF_RESPONSE
            own = self._of_response(by_row.get(key) or entries_of(batch, key), key, sizes_of(response), sizes)
            if own is not None:
                by_row.pop(self.log_prob_key, None)
                columns[self.log_prob_key] = lay.rows(own, sizes_of(response), width)
        rest = TensorDict({}, batch_size=[len(batch)], device=batch.device)
        for key, entries in by_row.items():
            if type(entries[0]) is NonTensorData:
                rest.set(key, stack_of_texts(*entries))
            elif not isinstance(entries[0], Tensor):
                rest.set(key, batch.get(key))
            elif key in self.out_keys or key in TOKEN_KEYS or not of_one_shape(entries):
                if (found := sizes_of(entries)) != sizes:
                    check_lengths(batch, [key], self.tokens_key, reader="DenseRows", or_of_rows=False)
                fill = self.pad_id if key == self.tokens_key else None
                columns[key] = lay.rows(end_to_end(entries, key), found, width, fill)
            else:
                rest.set(key, torch.stack(entries))
        columns.setdefault(self.attention_key, lay.places(sizes, width))
        if response is None:
            return rest, columns, None
        joined = [part for row in zip(*parts.values(), strict=True) for part in row]
        if PROMPT in parts:
            both = [own + other for own, other in zip(*map(sizes_of, parts.values()), strict=True)]
        else:
            both = sizes_of(response)
        flat, whole = end_to_end(joined, RESPONSE), columns[self.tokens_key]
        same = both == sizes and flat.device.type == "cpu" and flat.equal(torch.cat(by_row[self.tokens_key]))
        if not same:
            whole = lay.rows(flat, both, max(both), self.pad_id)
        known = None if PROMPT in parts else lay.places(both, max(both))
        return rest, columns, Parts(whole, known, lay.places(sizes_of(response), width))

    def _of_response(
        self, entries: list[Tensor] | None, key: NestedKey, responses: list[int], sizes: list[int]
    ) -> Tensor | None:
        """Join log-probabilities of responses alone, as inference engines write them, if there are any."""
        if entries is None or sizes_of(entries) != responses or responses == sizes:
            return None
        log_probs = torch.cat(entries).float()
        if key == OF_RESPONSE:
            begins = [end - size for size, end in zip(responses, accumulate(responses), strict=True) if size]
            if not log_probs[begins].any():
                return None  # TransformersWrapper writes 0 for first tokens (TorchRL 0.14.1)
        return log_probs


class Parts(NamedTuple):
    """Prompts and responses joined, padded on the left."""

    joined: Tensor
    """(N, P); the tokens tensor itself if it is known to be equal."""
    known: Tensor | None
    """(N, P) bool, True where `joined` can be compared with the tokens; None: everywhere."""
    response: Tensor
    """(N, T) bool, True at the response."""


class Layout:
    """Lays out ragged rows as dense rows, padded on the left.

    All rows are laid out together, without a call for each row.

    Args:
        device: the device of the rows.
        known: lengths of the rows, for each kind of column. They are sent to the device together.
    """

    def __init__(self, device: torch.device, *known: list[int]):
        self.device, self._known = device, dict[tuple[int, ...], Tensor]()
        lengths = send_packed([torch.tensor(sizes) for sizes in known], device)
        self._lengths = {tuple(sizes): each for sizes, each in zip(known, lengths, strict=True)}

    def places(self, sizes: list[int], width: int) -> Tensor:
        """(N, T) bool, True at the last entries of each row; `sizes` has their number."""
        key = (width, *sizes)
        if key not in self._known:
            lengths = self._lengths.get(key[1:])
            if lengths is None:
                lengths = torch.tensor(sizes, device=self.device)
            self._known[key] = torch.arange(width, device=self.device) >= width - lengths[:, None]
        return self._known[key]

    def rows(self, flat: Tensor, sizes: list[int], width: int, fill: float | None = None) -> Tensor:
        """Lay out joined entries as (N, T, ...). For `fill` see :func:`.tokens.padded`."""
        places = self.places(sizes, width)
        made = flat.new_full((*places.shape, *flat.shape[1:]), no_token(flat) if fill is None else fill)
        return made.masked_scatter_(places.view(*places.shape, *[1] * (flat.ndim - 1)), flat)


def end_to_end(rows: Sequence[Tensor], key: NestedKey) -> Tensor:
    """Join ragged rows, which must have equal dtypes and shapes per token, to (L, ...)."""
    if len({(row.dtype, row.shape[1:]) for row in rows}) > 1:
        padded(rows, key)  # raises
    return torch.cat(rows)


def sizes_of(rows: Sequence[Tensor]) -> list[int]:
    """The number of entries of each row; 0 for a scalar."""
    return [shape[0] if shape else 0 for shape in [row.shape for row in rows]]


def of_one_shape(rows: Sequence[Tensor]) -> bool:
    """Whether all rows have the same shape."""
    shape = rows[0].shape
    return all(row.shape == shape for row in rows)


def entries_behind(attention: Tensor) -> Tensor:
    """(N,) int64: the number of entries after the last real token of each row; 0 if it has none.

    Args:
        attention: (N, T) bool, True at real tokens.

    Example:
        >>> entries_behind(torch.tensor([[False, True, False, False], [True, False, True, True]])).tolist()
        [2, 0]
    """
    if attention.shape[1] == 0:
        return attention.sum(1)
    return attention.flip(1).max(1).indices  # of equal values, max returns the first


def turn_right(column: Tensor, by: Tensor) -> Tensor:
    """Rotate each row to the right.

    Args:
        column: (N, T, ...).
        by: (N,) int64, the number of positions.

    Example:
        >>> turn_right(torch.tensor([[0, 5, 6, 0, 0]]), torch.tensor([2])).tolist()
        [[0, 0, 0, 5, 6]]
    """
    rows, width = column.shape[:2]
    places = (torch.arange(width, device=by.device) - by[:, None]) % width
    return column[torch.arange(rows, device=by.device)[:, None], places]


def fit_width(column: Tensor, width: int, value: float = 0) -> Tensor:
    """Add or remove padding on the left.

    Args:
        column: (N, T).
        width: new number of entries per row. Only padding may be cut off.
        value: the padding.

    Example:
        >>> fit_width(torch.tensor([[0, 7]]), 3).tolist(), fit_width(torch.tensor([[0, 7]]), 1).tolist()
        ([[0, 0, 7]], [[7]])
    """
    if column.shape[1] == width:
        return column
    return nn.functional.pad(column, (width - column.shape[1], 0), value=value)


def columns_by_row(
    batch: LazyStackedTensorDict, skip: Collection[NestedKey] = ()
) -> dict[NestedKey, list[Any]]:
    """All columns of a lazy stack, each as a list of its rows' entries, in the order of the first row.

    Args:
        batch: TensorDict ``[N]``.
        skip: columns that are left out.

    Returns:
        Tensors and texts by key. An object without tensors, such as a history, is one entry.

    Raises:
        BatchError: only some rows have a column.
    """
    found: dict[NestedKey, list[Any]] = {}

    def walk(holders: Sequence[Any], path: tuple[str, ...]) -> None:
        plain = all(type(holder) is TensorDict for holder in holders)  # a tenth of the cost of column_of
        held = [holder._tensordict if plain else holder for holder in holders if holder is not None]
        for name in dict.fromkeys(name for holder in held for name in holder.keys()):
            key = (*path, name) if path else name
            if key in skip:
                continue
            inside = (
                [each.get(name) for each in held] if plain else [column_of(each, name) for each in holders]
            )
            first = next(each for each in inside if each is not None)
            if type(first) is TensorDict or (is_nested(first) and any(True for _ in first.keys(True, True))):
                walk(inside, (*path, name))
            elif plain and all(each is not None for each in inside):
                found[key] = inside
            else:
                found[key] = entries_of(batch, key) or []

    walk(batch.tensordicts, ())
    return found
