"""The advantage per token: a term per token is added to the advantage of the row, or multiplies it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import BatchError, BatchTransform, ColumnNames, Rows, check_kind
from headrace.transforms.table.ids import add_up
from headrace.transforms.table.options import nested_key, takes_options
from headrace.transforms.table.schema import REWARD, has_key
from headrace.transforms.table.tensordicts import column_of, count_true, device_of, flat_rows, shallow_copy
from headrace.transforms.table.tokens import (
    check_lengths,
    finite_inside,
    first_token,
    in_blocks,
    padded,
    plain_sum,
    read_advantage,
    read_loss_mask,
    write_tokens,
    zero_outside,
)

from .token_terms import TokenTerm

How = Literal["add", "multiply"]


@takes_options
def token_advantage(
    advantage: Tensor, term: Tensor, trains: Tensor, *, factor: float = 1.0, how: How = "add"
) -> Tensor:
    """Compute an advantage for each token in the loss.

    With the advantage A of the row or token, and the term x of the token::

        add       A + c x
        multiply  A (1 + c (x − 1)),  which is A x for c = 1

    With c = 0 nothing changes. Tokens out of the loss keep A, and their terms are not read.

    Args:
        advantage: (N, 1) or (N, T) float.
        term: (N, T) float.
        trains: (N, T) bool, True at tokens in the loss.
        factor: c.
        how: ``add``, ``multiply``.

    Returns:
        (N, T) in the dtype of `advantage`, computed in the more precise dtype of the two, at least float32.

    Example:
        >>> credit, term = torch.tensor([[2.0]]), torch.tensor([[0.5, 3.0]])
        >>> trains = torch.tensor([[True, False]])
        >>> token_advantage(credit, term, trains, factor=0.1).tolist()
        [[2.049999952316284, 2.0]]
        >>> token_advantage(credit, term, trains, how="multiply").tolist()
        [[1.0, 2.0]]
    """
    return changed(advantage.detach(), term.detach(), trains, factor, how)


def changed(advantage: Tensor, term: Tensor, trains: Tensor | None, factor: float, how: How) -> Tensor:
    """Compute :func:`token_advantage`; `trains` None means all tokens."""
    precise = torch.promote_types(torch.promote_types(advantage.dtype, term.dtype), torch.float32)
    credit, term = advantage.to(precise), term.to(precise)
    change = term if how == "add" else term - 1
    if trains is not None:
        change = zero_outside(change.clone(), trains)
    if how == "add":
        return torch.add(credit, change, alpha=factor).to(advantage.dtype)
    return (change * factor).add_(1).mul_(credit).to(advantage.dtype)


class TokenAdvantage(BatchTransform, columns=("advantage", "loss_mask")):
    """Add a term to each token's advantage, or multiply the advantage by it (:func:`token_advantage`).

    Put this stage after the advantage. A pipeline can have several. The columns that the term reads must be
    finite at all tokens in the loss. Rows that are out of the loss, or have no reward, keep their advantage,
    and their tokens are not read. Measures the fraction of tokens that ``changed``, the mean absolute change
    (``abs_mean``), and ``term_mean``, which for LogRatio estimates −KL.

    Reads `loss_mask_key`, ``("headrace", "in_loss")`` and ``("headrace", "reward")`` if they exist, and the
    columns of the term. Reads and writes `advantage_key`, which becomes (N, T, 1).

    Args:
        term: a function of the batch and (N, T) bool tokens in the loss, that returns (N, T) float; see
            :mod:`headrace.transforms.stages.advantage.token_terms`.
        factor: c, or a callable that returns c, which may change during training.
        how: ``add``, ``multiply``.
        names: other names of columns, such as `advantage_key` (:class:`ColumnNames`).

    Raises:
        MissingKeyError: a column is missing.
        BatchError: a number is not finite, the term refuses its columns, the term has another shape, or rows
            are ragged and the term has no `in_keys`.

    Example:
        >>> from headrace.transforms import LogRatio
        >>> log_probs = {"log_probs": {"full": [[-1.0, -2.0]]}, "teacher_log_probs": {"full": [[-0.5, -4.0]]}}
        >>> masks = {"all_assistant_mask": torch.tensor([[True, True]])}
        >>> batch = TensorDict({"advantage": [[[1.0]]], "masks": masks} | log_probs, batch_size=[1])
        >>> TokenAdvantage(term=LogRatio(), factor=0.5)(batch)["advantage"].tolist()
        [[[1.25], [0.0]]]
    """

    def __init__(
        self,
        *,
        term: Callable[[TensorDictBase, Tensor], Tensor],
        factor: float | Callable[[], float] = 1.0,
        how: How = "add",
        **names: Unpack[ColumnNames],
    ):
        check_kind(term, "term")
        self.name_columns(names)
        self._term_keys = [nested_key(key) for key in getattr(term, "in_keys", ())]
        reads = [self.advantage_key, self.loss_mask_key, REWARD, *self._term_keys]
        super().__init__(reads, [self.advantage_key])
        self.final_keys = tuple(key for key in self._term_keys if key != self.advantage_key)
        self.term, self.how = term, how
        self.factor = factor

    @property
    def within_groups(self) -> bool:  # type: ignore[override]
        """Whether the term compares tokens within groups only."""
        return getattr(self.term, "within_groups", False)

    def apply(self, batch: TensorDictBase, rows: Rows) -> TensorDictBase:  # type: ignore[override]
        """Rewrite the advantage now or, if the term is elementwise, when rows are gathered."""
        key, reader = self.advantage_key, type(self).__name__
        known = rows.in_loss
        if rows.has(REWARD):  # rows without a reward are excluded and have no advantage
            known = known & ~rows[REWARD].isnan()
        trains = read_loss_mask(batch, self.loss_mask_key, rows.to_batch(known), reader=reader)
        before = read_advantage(batch, key, trains, self.loss_mask_key, reader=reader, rows=rows)
        seen = self._seen(rows.table.with_written(shallow_copy(batch)))
        if isinstance(self.term, TokenTerm):
            term = self.term.over(rows.seen_by(self.term, rows.stage), seen, trains)
        else:  # a user's term may not expect a rank without rows
            term = self.term(seen, trains) if len(trains) else trains.double()
        if not isinstance(term, Tensor) or term.shape != trains.shape:
            shape = tuple(term.shape) if isinstance(term, Tensor) else type(term).__name__
            raise BatchError(
                f"a term must return one number per token, {tuple(trains.shape)}; {{term}} gave {shape}",
                term=repr(self.term),
            )
        factor = float(self.factor() if callable(self.factor) else self.factor)
        late = getattr(self.term, "elementwise", False)
        read = {repr(each): flat_rows(seen.get(each)) for each in self._term_keys}
        read = {n: c for n, c in read.items() if c.is_floating_point() and c.shape[1] in (1, term.shape[1])}

        def change(term: Tensor, before: Tensor, trains: Tensor) -> dict[str, Tensor]:
            after = changed(before, term, None if late else trains, factor, self.how)
            known = finite_inside(after, trains)  # if the result is finite, so is the term
            return {"known": known} if late else {"known": known, "after": after}

        made = in_blocks(change, term, before, trains)
        after = made.pop("after", None)
        for column in read.values():
            made["known"] &= finite_inside(column.expand(trains.shape), trains)
        refused: Mapping[str, Tensor] = getattr(self.term, "refused", lambda *_: {})(seen, trains)
        found = rows.measured(**made, **refused)
        if not bool(found["known"].all()):
            every = token_advantage(before, term, trains, factor=factor, how=self.how)
            require_finite(rows, read | {"the term": term, "the advantage": every}, trains)
        for message in refused:
            rows.require(found[message] == 0, message)

        def measure(term: Tensor) -> dict[str, Tensor]:
            of_some = partial(how_much_changes, factor=factor, how=self.how)
            return in_blocks(of_some, term, before, trains)

        found = rows.measured(**measure(term))
        for name in ("changed", "abs_mean", "term_mean"):
            rows.metric(name, add_up(found[name]) / found["tokens"].sum().clamp_min(1))
        if after is None:
            rows.when_gathered(partial(self._change, factor=factor), [key], known=known)
        else:
            write_tokens(batch, key, after.unsqueeze(-1), self.loss_mask_key)
        return batch

    def _change(self, batch: TensorDictBase, numbers: dict[str, Tensor], factor: float) -> None:
        """Rewrite the advantage of gathered rows."""
        reader, like = type(self).__name__, self.loss_mask_key
        trains = read_loss_mask(batch, like, numbers["known"], reader=reader)
        before = read_advantage(batch, self.advantage_key, trains, like, reader=reader)
        term = self.term(self._seen(batch), trains)

        def changed(term: Tensor, before: Tensor, trains: Tensor) -> dict[str, Tensor]:
            return {"after": token_advantage(before, term, trains, factor=factor, how=self.how)}

        after = in_blocks(changed, term, before, trains)["after"]
        write_tokens(batch, self.advantage_key, after.unsqueeze(-1), like)

    def _seen(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch that the term gets; for ragged rows only the columns of its `in_keys`, padded."""
        if not isinstance(batch, LazyStackedTensorDict):
            return batch
        if not hasattr(self.term, "in_keys"):
            raise BatchError(
                "for ragged rows a term needs in_keys, the columns that are padded for it; {term} has none",
                term=repr(self.term),
            )
        seen = TensorDict({}, batch_size=batch.batch_size, device=device_of(batch))
        for key in dict.fromkeys([*self._term_keys, self.advantage_key, self.loss_mask_key]):
            column = column_of(batch, key)
            if column is not None:
                seen.set(key, padded(column, key) if isinstance(column, list) else column)
        by_token = [key for key in self._term_keys if has_key(seen, key) and seen.get(key).ndim > 1]
        check_lengths(batch, by_token, self.loss_mask_key, reader=type(self).__name__)
        return seen

    def _id_keys(self) -> list[NestedKey]:
        """The id columns of the stage and of its term."""
        own = getattr(self.term, "group_key", None)
        return [*super()._id_keys(), *([] if own is None else [own])]


def how_much_changes(
    term: Tensor, before: Tensor, trains: Tensor, *, factor: float, how: How
) -> dict[str, Tensor]:
    """(B,) each: number of tokens in the loss, number of changed tokens, Σ |change|, and Σ of the terms."""
    after = token_advantage(before, term, trains, factor=factor, how=how)
    change = zero_outside(after.double() - before.double(), trains).abs_()
    return {
        "tokens": count_true(trains),
        "changed": count_true(change.bool()),
        "abs_mean": plain_sum(change),
        "term_mean": plain_sum(zero_outside(term.to(torch.float64, copy=True), trains)),
    }


def require_finite(rows: Rows, columns: Mapping[str, Tensor], trains: Tensor) -> None:
    """Require finite numbers at all tokens in the loss.

    Args:
        rows: rows of the tokens.
        columns: by name, (B, T) or (B, 1) each.
        trains: (B, T) bool, True at tokens in the loss.

    Raises:
        BatchError: a number is not finite; the message names the column, its rows, and the first token of
            each row.
    """
    for name, column in columns.items():
        pair = first_token(trains & ~column.isfinite(), column)
        found = rows.measured(place=pair[0], value=pair[1])
        rows.require(
            found["place"] < 0,
            f"{name} must be finite for every token in the loss; found {{found}}",
            lambda row, found=found: (  # type: ignore[misc]
                f"{float(found['value'][row])} at row {rows.at(row)}, token {int(found['place'][row])}"
            ),
        )
