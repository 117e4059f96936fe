"""The stage that makes one dense batch of ragged rows, with masks that say which tokens are which."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import LazyStackedTensorDict, NestedKey, NonTensorData, TensorDict, TensorDictBase
from torch import Tensor, nn
from typing_extensions import Unpack

from headrace.transforms.columns import ColumnNames
from headrace.transforms.errors import BatchError, MissingKeyError, listing
from headrace.transforms.options import at_least
from headrace.transforms.rows import Rows
from headrace.transforms.schema import has_key, key_names, require
from headrace.transforms.stage import BatchTransform
from headrace.transforms.tensordicts import columns_by_row, entries_of, shallow_copy, stack_of_texts
from headrace.transforms.tokens import (
    PROMPT,
    RESPONSE,
    check_lengths,
    check_mask,
    describe_row,
    in_loss_there,
    no_token,
    padded,
)

from .packing import TOKEN_KEYS

# What wrappers of TorchRL write beside the whole, and how it lies there.
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
    """Make one dense batch of ragged rows, such as LLMCollector's: tokens padded once, on the left.

    A row is a turn, and of its tokens those train that the policy wrote in this turn: its response, at the
    end. A loss mask that rows bring along is kept instead. Rows that are dense already have their padding on
    the left, or lie as TorchRL's wrappers write them with ``pad_output=True``, prompts padded on the left and
    responses on the right: those are moved. Silent rows stay silent.

    Reads `tokens_key` and ``("tokens", "response")``, ``("tokens", "prompt")``, or `loss_mask_key`; writes
    `tokens_key`, `attention_key`, `loss_mask_key`, and `log_prob_key` if it is there, (N, T) each. Ragged
    columns that are as long as the tokens in every row are padded like them: by 0, False or NaN; of
    log-probabilities as long as the response, under `log_prob_key` or ``("log_probs", "response")``, the
    prompt has NaN. Those of TransformersWrapper, which has 0 for every first token, are none. All other
    columns are kept, texts and histories too, but for the parts of the whole: ``prompt`` and ``response`` of
    tokens and log-probabilities, by whose width GRPOLoss's masking strategy ``sft`` would take a wrong mask.

    Args:
        pad_id: the token that stands for padding: the tokenizer's `pad_token_id`.
        width: tokens of a row with its padding, T, where batches must have one width. None: those of the
            longest.
        names: other names of columns, such as `tokens_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: tokens, or what says which of them train, are not there.
        BatchError: prompt and response are not the whole; a row's columns differ in length; `pad_id` is a
            real token; a hole between tokens, or padding behind them; no row has a response; a row is longer
            than `width`.

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

    def __init__(
        self,
        *,
        pad_id: int,
        width: int | None = None,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        writes = [self.tokens_key, self.attention_key, self.loss_mask_key, self.log_prob_key]
        super().__init__([self.tokens_key, PROMPT, RESPONSE], writes)
        if pad_id is None:
            raise ValueError("pad_id must be an integer ≥ 0; got None. Give the tokenizer a padding token")
        self.pad_id, self.width = at_least("pad_id", pad_id, 0), at_least("width", width, 1)

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Pad what is per token, and stack everything else beside it."""
        # 1. What is per token is padded to one width, and all else is stacked.
        if isinstance(batch, LazyStackedTensorDict):
            rest, columns = self._padded(batch)
        else:
            require(batch, self.tokens_key, reader=rows.reader, option="tokens_key")
            keys = dict.fromkeys([*self.out_keys, *TOKEN_KEYS])
            rest = batch.exclude(*PARTS)
            columns = {key: batch.get(key) for key in keys if has_key(batch, key)}
            if len(batch):  # ragged rows, which another rank may have, need not say it
                require(batch, self.attention_key, reader=rows.reader, option="attention_key")
            else:
                columns.setdefault(self.attention_key, torch.ones_like(columns[self.tokens_key]).bool())
        for key in (self.attention_key, self.loss_mask_key):
            if key in columns and columns[key].dtype is not torch.bool:
                check_mask(batch, key)
        tokens, attention = columns[self.tokens_key], columns[self.attention_key]

        # 2. Of a row's tokens its response trains, unless it says otherwise.
        has_response = is_whole = torch.ones(len(batch), dtype=torch.bool, device=tokens.device)
        if self.loss_mask_key not in columns:
            if not has_key(batch, RESPONSE):
                raise MissingKeyError(
                    f"{rows.reader} needs the key {self.loss_mask_key!r} (loss_mask_key), True where a token "
                    f"trains, or {RESPONSE!r}, which does; the batch has {key_names(batch)}"
                )
            response = last_entries(lengths_of(batch, RESPONSE), tokens) & attention
            has_response = response.any(1)
            in_loss = in_loss_there(rows)
            columns[self.loss_mask_key] = response if in_loss is None else response & in_loss[:, None]

        # 3. A response that a wrapper has padded on the right is moved to the end of its row.
        if has_key(batch, RESPONSE):
            is_whole = self._is_whole(batch, tokens)
            behind = entries_behind(attention)
            if bool(behind.any()):
                width = tokens.shape[1]
                items = rest.exclude(*columns).items(include_nested=True, leaves_only=True)
                if width > 1 and (odd := [key for key, each in items if each.shape[1:2] == (width,)]):
                    raise BatchError(
                        f"the tokens of these rows are moved to their ends, and {listing(map(repr, odd))} as "
                        "wide as they would stay: pad on the left, or leave them out (batch.exclude)"
                    )
                columns = {key: turn_right(column, behind) for key, column in columns.items()}
                tokens, attention = columns[self.tokens_key], columns[self.attention_key]

        # 4. What must hold of each row. One copy tells the table all of it.
        width = tokens.shape[1] if self.width is None else self.width
        found = rows.measured(
            has_response=has_response,
            is_whole=is_whole,
            has_tokens=attention.any(1),
            together=~(attention[:, :-1] & ~attention[:, 1:]).any(1),
            no_padding=~(attention & (tokens == self.pad_id)).any(1),
            real_in_loss=~(columns[self.loss_mask_key] & ~attention).any(1),
            fits=~attention[:, : max(attention.shape[1] - width, 0)].any(1),
        )
        found["has_response"] = (found["has_response"] == 1).any().expand(len(rows))
        messages = {
            "has_response": "some row needs a response; all are empty in {found}. Is the padding token what "
            "ends them?",
            "is_whole": "prompt and response, end to end, are the whole; they are not in {found}. Were "
            "tokens cut off, or is `full` of another turn?",
            "has_tokens": "every row needs a token; found none in {found}",
            "together": "the tokens of a row lie together at its end, behind the padding; the attention mask "
            "is False behind or between some in {found}. Pad on the left. A hole is a sampled padding token, "
            "which wrappers of TorchRL take for padding wherever it stands: keep it from being sampled, "
            "generate_kwargs={{'bad_words_ids': [[pad_id]]}}",
            "no_padding": f"padding is told from tokens by pad_id={self.pad_id}, which is a real token in "
            "{found}. Give the tokenizer a padding token of its own: one that also ends responses is cut off "
            "their ends",
            "real_in_loss": "a token in the loss is a real one; the loss mask is True on padding in {found}",
            "fits": f"no row has more tokens than width={width}; found more in {{found}}",
        }
        for law, message in messages.items():
            rows.require(found[law] == 1, message, describe_row(rows))

        # 5. The same rows, with other columns.
        rows.stored_as(rest)
        dense = shallow_copy(rest)
        for key, column in columns.items():
            fill = self.pad_id if key == self.tokens_key else None
            dense.set(key, column if self.width is None else fit_width(column, width, fill))
        return dense

    def _padded(self, batch: LazyStackedTensorDict) -> tuple[TensorDict, dict[NestedKey, Tensor]]:
        """What is not per token, stacked; and what is, (N, T, ...), padded on the left.

        Raises:
            MissingKeyError: there are no tokens.
            BatchError: a column is on some rows only; a ragged one is not per token.
        """
        by_row = columns_by_row(batch, PARTS)
        if self.tokens_key not in by_row:
            require(batch, self.tokens_key, reader=type(self).__name__, option="tokens_key")
        lengths = [len(row) for row in by_row[self.tokens_key]]
        own = self._of_response(batch, lengths)
        if own is not None:
            by_row.pop(self.log_prob_key, None)
        rest = TensorDict({}, batch_size=[len(batch)], device=batch.device)
        columns: dict[NestedKey, Tensor] = {}
        for key, entries in by_row.items():
            if type(entries[0]) is NonTensorData:
                rest.set(key, stack_of_texts(*entries))
            elif not isinstance(entries[0], Tensor):
                rest.set(key, batch.get(key))
            elif key in self.out_keys or key in TOKEN_KEYS or len({row.shape for row in entries}) > 1:
                check_lengths(batch, [key], self.tokens_key, reader="DenseRows", or_of_rows=False)
                fill = self.pad_id if key == self.tokens_key else None
                columns[key] = padded(entries, key, fill, "left")
            else:
                rest.set(key, torch.stack(entries))
        tokens = columns[self.tokens_key]
        if own is not None:
            columns[self.log_prob_key] = fit_width(own, tokens.shape[1])
        if self.attention_key not in columns:
            columns[self.attention_key] = last_entries(lengths, tokens)
        return rest, columns

    def _of_response(self, batch: LazyStackedTensorDict, lengths: list[int]) -> Tensor | None:
        """(N, R): log-probabilities that are as long as the responses, which engines alone have written."""
        key = self.log_prob_key if has_key(batch, self.log_prob_key) else OF_RESPONSE
        entries, responses = entries_of(batch, key), entries_of(batch, RESPONSE)
        if entries is None or responses is None:
            return None
        found = [len(row) for row in entries]
        if found != [len(row) for row in responses] or found == lengths:
            return None
        log_probs = [row.float() for row in entries]
        if key == OF_RESPONSE and all(len(row) and not row[0] for row in log_probs):
            return None  # as TransformersWrapper's generate writes for first tokens (TorchRL 0.14.1)
        return padded(log_probs, key, None, "left")

    def _is_whole(self, batch: TensorDictBase, tokens: Tensor) -> Tensor:
        """(N,) bool: prompt and response, end to end, are the tokens; or the response is the end of them."""
        parts = [key for key in (PROMPT, RESPONSE) if has_key(batch, key)]
        if isinstance(batch, LazyStackedTensorDict):
            by_row = zip(*(entries_of(batch, key) or [] for key in parts), strict=True)
            joined = padded([torch.cat(row) for row in by_row], RESPONSE, self.pad_id, "left")
        else:
            joined = torch.cat([batch.get(key) for key in parts], 1)
        width = max(joined.shape[1], tokens.shape[1])
        joined, whole = (fit_width(each, width, self.pad_id) for each in (joined, tokens))
        same = joined == whole
        return (same if len(parts) == 2 else same | ~last_entries(lengths_of(batch, RESPONSE), joined)).all(1)


def lengths_of(batch: TensorDictBase, key: NestedKey) -> list[int]:
    """Entries of a column in each row, padding included."""
    if isinstance(batch, LazyStackedTensorDict):
        return [len(row) for row in entries_of(batch, key) or []]
    return [batch.get(key).shape[1]] * len(batch)


def last_entries(lengths: Sequence[int], like: Tensor) -> Tensor:
    """(N, T) bool: the last entries of each row, as many as `lengths` says, which are not copied to a device.

    Args:
        lengths: N numbers.
        like: (N, T, ...), whose rows they are.

    Example:
        >>> last_entries([1, 2], torch.zeros(2, 3)).int().tolist()
        [[0, 0, 1], [0, 1, 1]]
    """
    places = torch.arange(like.shape[1], 0, -1, device=like.device)
    rows = {length: places <= length for length in set(lengths)}
    if not rows:
        return places.new_zeros(0, len(places)).bool()
    return torch.stack([rows[length] for length in lengths])


def entries_behind(attention: Tensor) -> Tensor:
    """(N,) int64: the entries behind the last real token of each row.

    Args:
        attention: (N, T) bool, True at real tokens.

    Example:
        >>> entries_behind(torch.tensor([[False, True, False, False], [True, False, True, True]])).tolist()
        [2, 0]
    """
    return (attention.flip(1).long().cumsum(1) == 0).sum(1)


def turn_right(column: Tensor, by: Tensor) -> Tensor:
    """Move each row by some places to the right; what falls off comes in again on the left.

    Args:
        column: (N, T, ...).
        by: (N,) int64.

    Example:
        >>> turn_right(torch.tensor([[0, 5, 6, 0, 0]]), torch.tensor([2])).tolist()
        [[0, 0, 0, 5, 6]]
    """
    rows, width = column.shape[:2]
    places = (torch.arange(width, device=by.device) - by[:, None]) % max(width, 1)
    return column[torch.arange(rows, device=by.device)[:, None], places]


def fit_width(column: Tensor, width: int, value: float | None = None) -> Tensor:
    """Give rows one width, on the left: more padding, or less.

    Args:
        column: (N, T, ...).
        width: entries of a row that comes out; what is cut off was padding.
        value: what padding is. None: as :func:`.tokens.padded`.

    Example:
        >>> fit_width(torch.tensor([[0, 7]]), 3).tolist(), fit_width(torch.tensor([[0, 7]]), 1).tolist()
        ([[0, 0, 7]], [[7]])
    """
    fill = no_token(column) if value is None else value
    beside = (0, 0) * (column.ndim - 2)  # dimensions behind the tokens
    return nn.functional.pad(column, (*beside, width - column.shape[1], 0), value=fill)
