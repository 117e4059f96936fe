"""Log-probabilities of what was sampled, under the policy that sampled it."""

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

from headrace.transforms.columns import ColumnNames
from headrace.transforms.errors import BatchError
from headrace.transforms.options import at_least, describe_options
from headrace.transforms.rows import Rows
from headrace.transforms.schema import FLOAT, has_key
from headrace.transforms.stage import BatchTransform
from headrace.transforms.tensordicts import entries_of, leaves_of, take_rows, write_entry
from headrace.transforms.tokens import ATTENTION, describe_row, in_loss_there, read_mask, read_tokens

from .packing import TOKEN_KEYS


def passes_of(
    lengths: Sequence[int], *, max_rows: int | None = None, max_tokens: int | None = None
) -> list[list[int]]:
    """Which rows go through a model together: short ones with short ones, so that little is padding.

    Args:
        lengths: (N,) tokens of the rows, at most `max_tokens` each; 0 where a row is not to go through.
        max_rows: of a pass. None: any number.
        max_tokens: of a pass, padding included. None: any number.

    Returns:
        Row numbers by pass, each row that has tokens once.

    Example:
        >>> passes_of([9, 2, 0, 3], max_tokens=9)
        [[1, 3], [0]]
    """
    passes: list[list[int]] = []
    for row in sorted((row for row, size in enumerate(lengths) if size), key=lengths.__getitem__):
        fits = bool(passes) and (max_rows is None or len(passes[-1]) < max_rows)
        if fits and (max_tokens is None or (len(passes[-1]) + 1) * lengths[row] <= max_tokens):
            passes[-1].append(row)
        else:
            passes.append([row])
    return passes


@contextmanager
def evaluating(actor: Any) -> Iterator[None]:
    """No gradients and no dropout inside; afterwards each module is in the mode that it was in."""
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
    """(n, T): what an actor's ``get_dist`` says of the tokens in the loss; of the others, anything.

    Args:
        actor: with ``get_dist(rows, logits_key=...)``, as TorchRL's GRPOLoss calls it. One that takes a
            `mask_key`, as TorchRL's wrappers do, is given it, too.
        rows: TensorDict ``[n]``.
        tokens_key: (n, T) int64.
        loss_mask_key: (n, T) bool.

    Raises:
        BatchError: it speaks of other tokens than these.
    """
    takes = inspect.signature(actor.get_dist).parameters
    mask = {"mask_key": loss_mask_key} if "mask_key" in takes else {}
    tokens = rows.get(tokens_key)
    found = actor.get_dist(rows, logits_key="logits", **mask).log_prob(tokens)
    if found.shape != tokens.shape:
        raise BatchError(
            f"an actor has a log-probability for each token, {tuple(tokens.shape)}; {type(actor).__name__} "
            f"gave {tuple(found.shape)}. A wrapper of TorchRL takes dense rows with input_mode='tokens', "
            "input_key=('tokens', 'full'), generate=False, pad_output=True"
        )
    return found


class ScoreRows(
    BatchTransform, columns=("tokens", "attention", "loss_mask", "log_prob", "rollout"), needed=("log_prob",)
):
    """Add the log-probabilities of sampled tokens under the policy that sampled them, while it is unchanged.

    GRPOLoss weighs each token by the ratio of its probabilities now and then. TorchRL's TransformersWrapper
    writes those of then with 0 for the first token of each response, and not for the whole row.

    Only rows with a token in the loss cost a forward pass: put it behind the gate and the filters, before the
    rows are cut. What is not in the loss has NaN, which GRPOLoss leaves out. Log-probabilities that the rows
    came with are written over. Those are of the model's logits: a temperature with which was sampled is
    not in them. Under FSDP, where ranks go through the model together, score outside of the pipeline: ranks
    take different numbers of passes.

    Reads `tokens_key`, `attention_key`, `loss_mask_key`; writes `log_prob_key`. The actor sees the rows'
    tensors as they were collected, and no texts.

    Args:
        actor: with ``get_dist``, as GRPOLoss takes it; where YAML makes the stage it is set afterwards,
            ``pipeline.stages["score"].actor = actor``.
        max_rows: rows of a forward pass, ≥ 1. None: any number.
        max_tokens: tokens of a forward pass with its padding, ≥ 1. None: any number.
        names: other names of columns, such as `tokens_key` (:class:`ColumnNames`).

    Raises:
        ValueError: there is no actor.
        MissingKeyError: a column is not there.
        BatchError: a row's first token is in the loss, with nothing before it to predict it from; a token
            that trains has no finite log-probability; a row is longer than `max_tokens`; the actor speaks of
            other tokens.

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

    def __init__(
        self,
        *,
        actor: Any = None,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        super().__init__([self.tokens_key, self.attention_key, self.loss_mask_key], [self.log_prob_key])
        self.actor = actor
        self.max_rows = at_least("max_rows", max_rows, 1)
        self.max_tokens = at_least("max_tokens", max_tokens, 1)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "actor":  # the policy is somebody else's: its weights are no state of this stage
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        options = describe_options(self, leave_out=("actor",))
        actor = f"actor={type(self.actor).__name__}"
        return f"{type(self).__name__}({actor}{', ' if options else ''}{options})"

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Score the rows that train, a pass after another."""
        if self.actor is None:
            raise ValueError(
                "ScoreRows needs the policy that sampled the rows, an actor with get_dist: "
                'pipeline.stages["score"].actor = actor'
            )
        left: Any = {"reader": rows.reader, "side": "left"}
        tokens = read_tokens(batch, self.tokens_key, option="tokens_key", **left)
        attention = read_mask(batch, self.attention_key, option="attention_key", **left)
        loss_mask = read_mask(batch, self.loss_mask_key, option="loss_mask_key", **left)
        describe, width = describe_row(rows), tokens.shape[1]

        # 1. Rows with a token in the loss, and how long they are: from their first real token on.
        in_loss = in_loss_there(rows)
        trains = loss_mask if in_loss is None else loss_mask & in_loss[:, None]
        begins = attention & (attention.cumsum(1) == 1)
        found = rows.measured(
            # An argmax of bools is their first True.
            length=torch.where(trains.any(1), width - attention.int().argmax(1), 0),
            early=(trains & (begins | ~attention)).any(1),
        )
        lengths = found["length"].long()
        rows.require(
            found["early"] == 0,
            "a row's first token has nothing before it to predict it from, and padding is no token; they are "
            "in the loss in {found}: take them out of the loss mask",
            describe,
        )
        if self.max_tokens is not None:
            rows.require(
                lengths <= self.max_tokens,
                f"no row has more tokens than a pass, max_tokens={self.max_tokens}; found {{found}}",
                lambda row: f"{int(lengths[row])} in {describe(row)}",
            )

        # 2. Through the actor, short rows with short ones.
        sizes = rows.of_rank(lengths).tolist()
        passes = passes_of(sizes, max_rows=self.max_rows, max_tokens=self.max_tokens)
        order = torch.tensor(list(chain(*passes)), dtype=torch.int64, device=tokens.device)
        seen = TensorDict(dict(leaves_of(batch)), batch_size=[len(batch)], device=batch.device)
        for key, column in ((self.tokens_key, tokens), (self.attention_key, attention)):
            seen.set(key, column)
        seen.set(ATTENTION, attention)  # where wrappers of TorchRL look
        seen.set(self.loss_mask_key, trains)
        log_probs = torch.full(tokens.shape, torch.nan, dtype=FLOAT, device=tokens.device)
        per_token = dict.fromkeys([self.tokens_key, self.attention_key, self.loss_mask_key, *TOKEN_KEYS])
        with evaluating(self.actor):
            for numbers, some in zip(passes, order.split([len(each) for each in passes]), strict=True):
                first = width - sizes[numbers[-1]]  # the longest is the last
                chunk = take_rows(seen, some)
                for key in [key for key in per_token if has_key(chunk, key)]:
                    chunk.set(key, chunk.get(key)[:, first:])
                keys = {"tokens_key": self.tokens_key, "loss_mask_key": self.loss_mask_key}
                said = log_probs_of(self.actor, chunk, **keys)
                log_probs = log_probs.to(said.dtype)
                log_probs[some, first:] = torch.where(chunk.get(self.loss_mask_key), said, torch.nan)

        # 3. What was sampled was possible.
        rows.require(
            rows.measured(possible=(~trains | log_probs.isfinite()).all(1))["possible"] == 1,
            "a token that was sampled has a finite log-probability; found others in {found}. Is the actor "
            "the policy that sampled them?",
            describe,
        )
        rows.metric("scored", len(order))
        if not isinstance(batch, LazyStackedTensorDict):
            return batch.set(self.log_prob_key, log_probs)
        sizes = [len(entry) for entry in entries_of(batch, self.tokens_key) or []]
        for row, own, size in zip(batch.tensordicts, log_probs, sizes, strict=True):
            write_entry(row, self.log_prob_key, own[width - size :])
        return batch
