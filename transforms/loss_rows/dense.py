"""The stage that makes one dense batch of ragged rows, with masks that say which tokens are which."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import Rule
from headrace.transforms.errors import BatchError, MissingKeyError, listing
from headrace.transforms.options import at_least, nested_key
from headrace.transforms.schema import IN_LOSS, has_key, key_names, require
from headrace.transforms.tokens import ATTENTION, PROMPT, RESPONSE, check_mask

from .describing import describe_row
from .packing import TOKEN_KEYS
from .padding import entries_behind, fit_width, last_entries, pad_left, turn_right
from .stacking import stack_rows

# What wrappers of TorchRL write beside the whole, and how it lies there.
PARTS: tuple[NestedKey, ...] = (
    PROMPT,
    RESPONSE,
    ("log_probs", "prompt"),
    ("log_probs", "response"),
    *((column, "padded") for column in ("tokens", "masks", "log_probs")),
)
OF_RESPONSE = ("log_probs", "response")


def layout_rules(
    tokens: Tensor, attention: Tensor, loss_mask: Tensor, pad_id: int, describe: Callable[[int], str]
) -> list[Rule]:
    """The real tokens of a row lie together at its end, none is padding, and what trains is among them.

    Args:
        tokens: (N, T) int64.
        attention: (N, T) bool, True at real tokens.
        loss_mask: (N, T) bool, True trains.
        pad_id: the token that stands for padding.
        describe: a row in words.
    """
    return [
        Rule(~attention.any(1), describe, "every row needs a token; found none in {found}"),
        Rule(
            (attention[:, :-1] & ~attention[:, 1:]).any(1),
            describe,
            "the tokens of a row lie together at its end, behind the padding; the attention mask is False "
            "behind or between some in {found}. Pad on the left. A hole is a sampled padding token, which "
            "wrappers of TorchRL take for padding wherever it stands: keep it from being sampled, "
            "generate_kwargs={{'bad_words_ids': [[pad_id]]}}",
        ),
        Rule(
            (attention & (tokens == pad_id)).any(1),
            describe,
            f"padding is told from tokens by pad_id={pad_id}, which is a real token in {{found}}. Give the "
            "tokenizer a padding token of its own: one that also ends responses is cut off their ends",
        ),
        Rule(
            (loss_mask & ~attention).any(1),
            describe,
            "a token in the loss is a real one; the loss mask is True on padding in {found}",
        ),
    ]


class DenseRows(BatchTransform):
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
    One device read, where rows have prompts and responses.

    Args:
        pad_id: the token that stands for padding: the tokenizer's `pad_token_id`.
        width: tokens of a row with its padding, T, where batches must have one width. None: those of the
            longest.
        tokens_key: (N, T) int64, or ragged.
        attention_key: (N, T) bool, True at real tokens; ragged rows may lack it.
        loss_mask_key: (N, T) bool, True trains.
        log_prob_key: (N, T) float.
        rollout_key: (N,) or (N, 1) int, for messages; None: messages say row numbers alone.

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

    keeps_rows = True
    within_groups = True

    def __init__(
        self,
        *,
        pad_id: int,
        width: int | None = None,
        tokens_key: NestedKey = ("tokens", "full"),
        attention_key: NestedKey = ATTENTION,
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
        log_prob_key: NestedKey = ("log_probs", "full"),
        rollout_key: NestedKey | None = "rollout_id",
    ):
        self.tokens_key, self.attention_key = nested_key(tokens_key), nested_key(attention_key)
        self.loss_mask_key, self.log_prob_key = nested_key(loss_mask_key), nested_key(log_prob_key)
        self.rollout_key = nested_key(rollout_key)
        writes = [self.tokens_key, self.attention_key, self.loss_mask_key, self.log_prob_key]
        super().__init__([self.tokens_key, PROMPT, RESPONSE], writes)
        if pad_id is None:
            raise ValueError("pad_id must be an integer ≥ 0; got None. Give the tokenizer a padding token")
        self.pad_id, self.width = at_least("pad_id", pad_id, 0), at_least("width", width, 1)

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Pad what is per token, and stack everything else beside it."""
        describe = describe_row(batch, self.rollout_key)
        rest, columns = self._split(batch)
        tokens, attention = columns[self.tokens_key], columns[self.attention_key]
        rules = []
        if self.loss_mask_key not in columns:
            rules = self._response(batch, columns, describe)
        if has_key(batch, RESPONSE):
            rules.append(self._whole(batch, tokens, describe))
            if bool((behind := entries_behind(attention)).any()):
                self._stay(rest.exclude(*columns), tokens.shape[1])
                columns = {key: turn_right(column, behind) for key, column in columns.items()}
        masks = columns[self.attention_key], columns[self.loss_mask_key]
        rules += layout_rules(columns[self.tokens_key], *masks, self.pad_id, describe)
        if self.width is not None:
            rules.append(self._fits(columns[self.attention_key], self.width, describe))
            for key, column in columns.items():
                columns[key] = fit_width(column, self.width, self._padding(key))
        for key, column in columns.items():
            rest.set(key, column)
        return Outcome(rest, rules=rules)

    def _split(self, batch: TensorDictBase) -> tuple[TensorDictBase, dict[NestedKey, Tensor]]:
        """What is not per token, and what is, (N, T, ...), the tokens and the attention mask among it."""
        if not has_key(batch, self.tokens_key):
            require(batch, self.tokens_key, reader=type(self).__name__, option="tokens_key")
        keys = [key for key in dict.fromkeys([*self.out_keys, *TOKEN_KEYS]) if has_key(batch, key)]
        for key in (self.attention_key, self.loss_mask_key):
            if key in keys:
                check_mask(batch, key)
        if not isinstance(batch, LazyStackedTensorDict):
            require(batch, self.attention_key, reader=type(self).__name__, option="attention_key")
            return batch.exclude(*PARTS), {key: batch.get(key) for key in keys}
        lengths, own = _lengths(batch, self.tokens_key), self._of_response(batch)
        skip = PARTS if own is None else (*PARTS, self.log_prob_key)
        rest, columns = stack_rows(batch, lengths, {key: self._padding(key) for key in keys}, skip)
        if own is not None:
            columns[self.log_prob_key] = fit_width(own, columns[self.tokens_key].shape[1])
        if self.attention_key not in columns:
            columns[self.attention_key] = last_entries(lengths, columns[self.tokens_key])
        return rest, columns

    def _of_response(self, batch: TensorDictBase) -> Tensor | None:
        """(N, R): log-probabilities that are as long as the responses, which engines alone have written."""
        key = self.log_prob_key if has_key(batch, self.log_prob_key) else OF_RESPONSE
        if not has_key(batch, key) or not has_key(batch, RESPONSE):
            return None
        found = _lengths(batch, key)
        if found != _lengths(batch, RESPONSE) or found == _lengths(batch, self.tokens_key):
            return None
        rows = [row.float() for row in batch.get(key, as_list=True)]
        if key == OF_RESPONSE and all(len(row) and not row[0] for row in rows):
            return None  # as TransformersWrapper's generate writes for first tokens (TorchRL 0.14.1)
        return pad_left(rows)

    def _response(
        self, batch: TensorDictBase, columns: dict[NestedKey, Tensor], describe: Callable[[int], str]
    ) -> list[Rule]:
        """Write the loss mask: the response, of rows that are in the loss."""
        if not has_key(batch, RESPONSE):
            raise MissingKeyError(
                f"{type(self).__name__} needs the key {self.loss_mask_key!r} (loss_mask_key), True where a "
                f"token trains, or {RESPONSE!r}, which does; the batch has {key_names(batch)}"
            )
        tokens = columns[self.tokens_key]
        response = last_entries(_lengths(batch, RESPONSE), tokens) & columns[self.attention_key]
        silent = ~response.any().expand(len(batch))
        if has_key(batch, IN_LOSS):
            response = response & batch.get(IN_LOSS)[:, None]
        columns[self.loss_mask_key] = response
        message = "some row needs a response; all are empty in {found}. Is the padding token what ends them?"
        return [Rule(silent, describe, message)]

    def _whole(self, batch: TensorDictBase, tokens: Tensor, describe: Callable[[int], str]) -> Rule:
        """Prompt and response, end to end, are the tokens."""
        parts = [key for key in (PROMPT, RESPONSE) if has_key(batch, key)]
        if isinstance(batch, LazyStackedTensorDict):
            rows = zip(*(batch.get(key, as_list=True) for key in parts), strict=True)
            joined = pad_left([torch.cat(row) for row in rows], self.pad_id)
        else:
            joined = torch.cat([batch.get(key) for key in parts], 1)
        width = max(joined.shape[1], tokens.shape[1])
        joined, whole = (fit_width(each, width, self.pad_id) for each in (joined, tokens))
        if len(parts) == 1:  # the end of the whole, at least
            inside = last_entries(_lengths(batch, RESPONSE), joined)
            joined = torch.where(inside, joined, whole)
        message = (
            "prompt and response, end to end, are the whole; they are not in {found}. Were tokens cut off, "
            "or is `full` of another turn?"
        )
        return Rule((joined != whole).any(1), describe, message)

    def _stay(self, rest: TensorDictBase, width: int) -> None:
        """Refuse columns that may be per token and would stay where they are while the tokens move."""
        items = rest.items(include_nested=True, leaves_only=True)
        if width > 1 and (odd := [key for key, column in items if column.shape[1:2] == (width,)]):
            raise BatchError(
                f"the tokens of these rows are moved to their ends, and {listing(map(repr, odd))} as wide as "
                "they would stay: pad on the left, or leave them out (batch.exclude)"
            )

    def _fits(self, attention: Tensor, width: int, describe: Callable[[int], str]) -> Rule:
        over = attention[:, : max(attention.shape[1] - width, 0)].any(1)
        return Rule(over, describe, f"no row has more tokens than width={width}; found more in {{found}}")

    def _padding(self, key: NestedKey) -> float | None:
        return self.pad_id if key == self.tokens_key else None


def _lengths(batch: TensorDictBase, key: NestedKey) -> list[int]:
    """Entries of a column in each row, padding included."""
    if isinstance(batch, LazyStackedTensorDict):
        return [len(row) for row in batch.get(key, as_list=True)]
    return [batch.get(key).shape[1]] * len(batch)
