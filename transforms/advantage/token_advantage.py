"""The advantage by token: a term added to that of the row, or multiplied with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from headrace.transforms.base import BatchTransform, Outcome
from headrace.transforms.checks import Rule
from headrace.transforms.errors import BatchError
from headrace.transforms.options import nested_key, one_of, within
from headrace.transforms.rows import device_of
from headrace.transforms.schema import REWARD, has_key
from headrace.transforms.tokens import (
    check_lengths,
    in_blocks,
    padded,
    read_advantage,
    read_loss_mask,
    write_tokens,
)

How = Literal["add", "multiply"]


def token_advantage(
    advantage: Tensor, term: Tensor, trains: Tensor, *, factor: float = 1.0, how: How = "add"
) -> Tensor:
    """Give each token in the loss an advantage of its own.

    With A the row's advantage or the token's, and x the token's term::

        add       A + c x
        multiply  A (1 + c (x − 1)),  which is A x for c = 1

    A factor of 0 changes nothing. Tokens out of the loss keep A, and their terms are not read.

    Args:
        advantage: (N, 1) or (N, T) float.
        term: (N, T) float.
        trains: (N, T) bool, the tokens in the loss.
        factor: c.
        how: ``add``, ``multiply``.

    Returns:
        (N, T) in the dtype of `advantage`, computed in that of the more precise of the two, at least float32.

    Example:
        >>> credit, term = torch.tensor([[2.0]]), torch.tensor([[0.5, 3.0]])
        >>> trains = torch.tensor([[True, False]])
        >>> token_advantage(credit, term, trains, factor=0.1).tolist()
        [[2.049999952316284, 2.0]]
        >>> token_advantage(credit, term, trains, how="multiply").tolist()
        [[1.0, 2.0]]
    """
    one_of("how", how, get_args(How))
    precise = torch.promote_types(torch.promote_types(advantage.dtype, term.dtype), torch.float32)
    credit, term = advantage.detach().to(precise), term.detach().to(precise)
    changed = credit + factor * term if how == "add" else credit * (1 + factor * (term - 1))
    return torch.where(trains, changed, credit).to(advantage.dtype)


class TokenAdvantage(BatchTransform):
    """Add a term to the advantage of each token, or multiply it (:func:`token_advantage`).

    It stands after the advantage, and several may stand one after the other. What the term reads is recorded
    data: its columns must be finite for every token in the loss. Of a row that is out of the loss, or has no
    reward, no token is read, and it keeps its advantage. Measures the share of tokens that it ``changed``, by
    how much (``abs_mean``), and ``term_mean``: of LogRatio that is an estimate of −KL. No device read.

    Reads `loss_mask_key`, ``("headrace", "in_loss")`` and ``("headrace", "reward")`` if there, and what the
    term reads; reads and writes `advantage_key`, (N, T, 1) from then on.

    Args:
        term: batch and (N, T) bool tokens in the loss → (N, T) float; see
            :mod:`headrace.transforms.advantage.token_terms`.
        factor: c, or a callable that returns it, for one that changes over the training.
        how: ``add``, ``multiply``.
        advantage_key: (N,) or (N, 1, 1), or (N, T, 1) float.
        loss_mask_key: (N, T) bool, True trains.

    Raises:
        MissingKeyError: a column is not there.
        BatchError: a number is not finite, or what the term says of its columns; a term of another shape;
            rows are ragged and the term has no `in_keys`.

    Example:
        >>> from headrace.transforms import LogRatio
        >>> log_probs = {"log_probs": {"full": [[-1.0, -2.0]]}, "teacher_log_probs": {"full": [[-0.5, -4.0]]}}
        >>> masks = {"all_assistant_mask": torch.tensor([[True, True]])}
        >>> batch = TensorDict({"advantage": [[[1.0]]], "masks": masks} | log_probs, batch_size=[1])
        >>> TokenAdvantage(term=LogRatio(), factor=0.5)(batch)["advantage"].tolist()
        [[[1.25], [0.0]]]
    """

    keeps_rows = True
    asks_in_loss = True
    spans_ranks = True

    def __init__(
        self,
        *,
        term: Callable[[TensorDictBase, Tensor], Tensor],
        factor: float | Callable[[], float] = 1.0,
        how: How = "add",
        advantage_key: NestedKey = "advantage",
        loss_mask_key: NestedKey = ("masks", "all_assistant_mask"),
    ):
        if not callable(term):
            raise ValueError(
                f"term must be a callable from a batch and (N, T) bool to (N, T) numbers; got {term!r}"
            )
        self.advantage_key, self.loss_mask_key = nested_key(advantage_key), nested_key(loss_mask_key)
        self._term_keys = [nested_key(key) for key in getattr(term, "in_keys", ())]
        reads = [self.advantage_key, self.loss_mask_key, REWARD, *self._term_keys]
        super().__init__(reads, [self.advantage_key])
        self.final_keys = tuple(key for key in self._term_keys if key != self.advantage_key)
        self.term, self.how = term, one_of("how", how, get_args(How))
        self.factor = factor if callable(factor) else within("factor", factor, -math.inf, math.inf)

    @property
    def within_groups(self) -> bool:  # type: ignore[override]
        """Where its term says so."""
        return getattr(self.term, "within_groups", False)

    def apply(self, batch: TensorDictBase) -> Outcome:
        """Rewrite the advantage."""
        reader = type(self).__name__
        trains = read_loss_mask(batch, self.loss_mask_key, reader=reader)
        if has_key(batch, REWARD):  # who has none has no advantage, and is in no statistic
            trains = trains & ~batch.get(REWARD).isnan()[:, None]
        before = read_advantage(batch, self.advantage_key, trains.shape[1], reader=reader)
        seen = self._seen(batch)
        term = self.term(seen, trains)
        if not isinstance(term, Tensor) or term.shape != trains.shape:
            found = tuple(term.shape) if isinstance(term, Tensor) else type(term).__name__
            raise BatchError(
                f"a term returns one number a token, {tuple(trains.shape)}; {self.term!r} gave {found}"
            )
        factor = float(self.factor() if callable(self.factor) else self.factor)

        def changed(term: Tensor, before: Tensor, trains: Tensor) -> dict[str, Tensor]:
            after = token_advantage(before, term, trains, factor=factor, how=self.how)
            change = torch.where(trains, after.double() - before.double(), 0.0).abs()
            sums = {"changed": change != 0, "change": change, "term": torch.where(trains, term.double(), 0.0)}
            return {"after": after} | {name: values.sum(-1) for name, values in sums.items()}

        check_lengths(batch, [self.advantage_key], self.loss_mask_key, reader=reader)
        made, tokens = in_blocks(changed, term, before, trains), trains.sum().clamp_min(1)
        write_tokens(batch, self.advantage_key, made["after"].unsqueeze(-1), self.loss_mask_key)
        read = {"the term": term, "the advantage": made["after"]}
        names = {"changed": "changed", "abs_mean": "change", "term_mean": "term"}
        measured = {name: made[key].sum() / tokens for name, key in names.items()}
        return Outcome(batch, measured=measured, rules=self._rules(seen, trains, read))

    def _seen(self, batch: TensorDictBase) -> TensorDictBase:
        """The columns as the term sees them: of ragged rows those of its `in_keys`, padded."""
        if not isinstance(batch, LazyStackedTensorDict):
            return batch
        if not hasattr(self.term, "in_keys"):
            raise BatchError(
                f"of ragged rows a term sees the columns of its in_keys, padded; {self.term!r} has none"
            )
        seen = TensorDict({}, batch_size=batch.batch_size, device=device_of(batch))
        for key in dict.fromkeys([*self._term_keys, self.advantage_key, self.loss_mask_key]):
            if has_key(batch, key):
                seen.set(key, padded(batch, key))
        by_token = [key for key in self._term_keys if has_key(seen, key) and seen.get(key).ndim > 1]
        check_lengths(batch, by_token, self.loss_mask_key, reader=type(self).__name__)
        return seen

    def _id_keys(self) -> list[NestedKey]:
        """The term's, too."""
        own = getattr(self.term, "group_key", None)
        return [*super()._id_keys(), *([] if own is None else [own])]

    def _rules(self, seen: TensorDictBase, trains: Tensor, made: dict[str, Tensor]) -> list[Rule]:
        """What is read of tokens in the loss is finite; then what the term says of its columns."""
        read = {repr(key): seen.get(key) for key in self._term_keys} | made
        rules = [
            _finite(name, column.reshape(len(trains), -1).expand(trains.shape), trains)
            for name, column in read.items()
            if column.is_floating_point() and len(trains) and column.numel() in (trains.numel(), len(trains))
        ]
        return [*rules, *getattr(self.term, "rules", lambda *_: ())(seen, trains)]


def _finite(name: str, column: Tensor, trains: Tensor) -> Rule:
    """What is read of tokens in the loss is a finite number."""
    bad = trains & ~column.isfinite()

    def describe(row: int) -> str:
        place = int(bad[row].nonzero()[0])
        return f"{float(column[row, place])} at row {row}, token {place}"

    message = f"{name} must be finite for every token in the loss; found {{found}}"
    return Rule(bad.any(1), describe, message)
