"""The stage that computes log-probabilities of sampled tokens under the policy that trains."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from typing_extensions import Unpack

from headrace.transforms.table import BatchError, BatchTransform, ColumnNames, Rows
from headrace.transforms.table.options import at_least, describe_options
from headrace.transforms.table.schema import FLOAT, has_key
from headrace.transforms.table.tensordicts import ATTENTION, entries_of, leaves_of, take_rows, write_entry
from headrace.transforms.table.tokens import describe_row, in_loss_there, read_mask, read_tokens

from .packing import TOKEN_KEYS


def passes_of(lengths: Sequence[int], max_rows: int | None = None) -> list[list[int]]:
    """Group rows of similar lengths into forward passes, to reduce padding.

    Args:
        lengths: (N,) tokens per row; rows with 0 are skipped.
        max_rows: largest number of rows of a pass; None: any.

    Returns:
        The row numbers of each pass.

    Example:
        >>> passes_of([9, 2, 0, 3], 2)
        [[1, 3], [0]]
    """
    by_length = sorted((row for row, size in enumerate(lengths) if size), key=lengths.__getitem__)
    size = max_rows or max(len(by_length), 1)
    return [by_length[first : first + size] for first in range(0, len(by_length), size)]


@contextmanager
def evaluating(actor: Any) -> Iterator[None]:
    """Disable gradients and dropout in a block. Restores the mode of each module afterwards."""
    modules = list(actor.modules()) if isinstance(actor, nn.Module) else []
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def log_probs_of(
    actor: Any, rows: TensorDictBase, *, tokens_key: NestedKey, loss_mask_key: NestedKey
) -> Tensor:
    """(n, T): the log-probabilities of tokens in the loss, from an actor; arbitrary for other tokens.

    Args:
        actor: has ``get_dist(rows, logits_key=...)``, as for TorchRL's GRPOLoss. If the method takes a
            `mask_key`, as in TorchRL's wrappers, it gets `loss_mask_key`.
        rows: TensorDict ``[n]``.
        tokens_key: (n, T) int64.
        loss_mask_key: (n, T) bool.

    Raises:
        BatchError: the actor returns another shape.
    """
    takes = inspect.signature(actor.get_dist).parameters
    mask = {"mask_key": loss_mask_key} if "mask_key" in takes else {}
    tokens = rows.get(tokens_key)
    found = actor.get_dist(rows, logits_key="logits", **mask).log_prob(tokens)
    if found.shape != tokens.shape:
        raise BatchError(
            f"an actor must return a log-probability for each token, {tuple(tokens.shape)}; "
            f"{type(actor).__name__} returned {tuple(found.shape)}. For dense rows create TorchRL's wrapper "
            "with input_mode='tokens', input_key=('tokens', 'full'), generate=False, pad_output=True"
        )
    return found


class ScoreRows(
    BatchTransform, columns=("tokens", "attention", "loss_mask", "log_prob", "rollout"), needed=("log_prob",)
):
    """Compute the log-probabilities of sampled tokens under the policy that trains, before the step.

    These are log π_old. GRPOLoss needs the ratio π / π_old of each token. Run the stage before the policy is
    updated. TorchRL's TransformersWrapper writes log-probabilities only for the response, with 0 for its
    first token.

    The log-probabilities of the policy that sampled, log μ, are another column: an inference engine writes
    them. To correct for the difference, keep both, and write π_old to ``("old_log_probs", "full")``. If the
    actor is the policy that sampled, π_old = μ, and every importance weight is 1.

    Only rows with a token in the loss go through the model, so put the stage after the gate and the filters,
    and before the split. Tokens out of the loss get NaN, which GRPOLoss ignores. Existing log-probabilities
    are overwritten. The values are from the model's logits, without a sampling temperature. With FSDP, score
    outside of the pipeline, because ranks would take different numbers of forward passes.

    Reads `tokens_key`, `attention_key`, `loss_mask_key`; writes `log_prob_key`. The actor gets the rows'
    tensors as they were collected, without texts.

    Args:
        actor: the policy that trains, with ``get_dist``, as for GRPOLoss; if YAML creates the stage, set it
            later with ``pipeline.stages["score"].actor = actor``.
        max_rows: largest number of rows per forward pass, ≥ 1; None: any.
        names: other names of columns, such as `tokens_key` (:class:`ColumnNames`).

    Raises:
        ValueError: there is no actor.
        MissingKeyError: a column is missing.
        BatchError: the first token of a row, which has no context, is in the loss; a token in the loss has no
            finite log-probability; or the actor returns another shape.

    Example:
        >>> from headrace.pipeline.reverse import DigitPolicy
        >>> tokens = torch.tensor([[1, 2, 3]])
        >>> masks = {"all_attention_mask": tokens > 0, "all_assistant_mask": tokens > 1}
        >>> batch = TensorDict({"tokens": {"full": tokens}, "masks": masks}, batch_size=[1])
        >>> ScoreRows(actor=DigitPolicy())(batch)["log_probs", "full"].isfinite().tolist()
        [[False, True, True]]
    """

    within_groups = True
    _own_of_rank = ("actor",)
    set_later = ("actor",)

    def __init__(
        self,
        *,
        actor: Any = None,
        max_rows: int | None = None,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        super().__init__([self.tokens_key, self.attention_key, self.loss_mask_key], [self.log_prob_key])
        self.actor = actor
        self.max_rows = at_least("max_rows", max_rows, 1)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "actor":  # not registered as a submodule: its weights are not state of this stage
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        options = describe_options(self, leave_out=("actor",))
        actor = f"actor={type(self.actor).__name__}"
        return f"{type(self).__name__}({actor}{', ' if options else ''}{options})"

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Score the rows in the loss, in several forward passes."""
        if self.actor is None:
            raise ValueError(
                "ScoreRows needs an actor with get_dist, the policy that trains, before the step: set "
                'pipeline.stages["score"].actor = actor'
            )
        left: Any = {"reader": rows.reader, "side": "left"}
        tokens = read_tokens(batch, self.tokens_key, option="tokens_key", **left)
        attention = read_mask(batch, self.attention_key, option="attention_key", **left)
        loss_mask = read_mask(batch, self.loss_mask_key, option="loss_mask_key", **left)
        describe, width = describe_row(rows), tokens.shape[1]

        # 1. Find rows with a token in the loss, and their lengths from the first real token on.
        in_loss = in_loss_there(rows)
        trains = loss_mask if in_loss is None else loss_mask & in_loss[:, None]
        begins = attention & (attention.cumsum(1) == 1)
        found = rows.measured(
            # An argmax of bools is the index of the first True.
            length=torch.where(trains.any(1), width - attention.int().argmax(1), 0),
            early=(trains & (begins | ~attention)).any(1),
        )
        lengths = found["length"].long()
        rows.require(
            found["early"] == 0,
            "the first token of a row has no context to predict it from, and padding is no token; such "
            "entries are in the loss in {found}: remove them from the loss mask",
            describe,
        )

        # 2. Run the actor on rows of similar lengths.
        sizes = rows.of_this_rank(lengths).tolist()
        passes = passes_of(sizes, self.max_rows)
        order = torch.tensor(list(chain(*passes)), dtype=torch.int64, device=tokens.device)
        seen = TensorDict(dict(leaves_of(batch)), batch_size=[len(batch)], device=batch.device)
        for key, column in ((self.tokens_key, tokens), (self.attention_key, attention)):
            seen.set(key, column)
        seen.set(ATTENTION, attention)  # the key that TorchRL's wrappers read
        seen.set(self.loss_mask_key, trains)
        log_probs = torch.full(tokens.shape, torch.nan, dtype=FLOAT, device=tokens.device)
        per_token = dict.fromkeys([self.tokens_key, self.attention_key, self.loss_mask_key, *TOKEN_KEYS])
        with evaluating(self.actor):
            chunks = order.split([len(numbers) for numbers in passes])
            for numbers, chunk_rows in zip(passes, chunks, strict=True):
                first = width - sizes[numbers[-1]]  # the last row of a pass is the longest
                chunk = take_rows(seen, chunk_rows)
                for key in [key for key in per_token if has_key(chunk, key)]:
                    chunk.set(key, chunk.get(key)[:, first:])
                keys = {"tokens_key": self.tokens_key, "loss_mask_key": self.loss_mask_key}
                scored = log_probs_of(self.actor, chunk, **keys)
                log_probs = log_probs.to(scored.dtype)
                log_probs[chunk_rows, first:] = torch.where(chunk.get(self.loss_mask_key), scored, torch.nan)

        # 3. Check that sampled tokens have finite log-probabilities.
        rows.require(
            rows.measured(possible=(~trains | log_probs.isfinite()).all(1))["possible"] == 1,
            "sampled tokens must have finite log-probabilities; found others in {found}. Does the actor have "
            "the tokenizer of the policy that sampled these tokens, and does it mask none of them?",
            describe,
        )
        rows.metric("scored", lengths.count_nonzero())
        if not isinstance(batch, LazyStackedTensorDict):
            return batch.set(self.log_prob_key, log_probs)
        sizes = [len(entry) for entry in entries_of(batch, self.tokens_key) or []]
        for row, own, size in zip(batch.tensordicts, log_probs, sizes, strict=True):
            write_entry(row, self.log_prob_key, own[width - size :])
        return batch
