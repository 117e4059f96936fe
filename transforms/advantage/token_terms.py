"""What the tokens of a rollout are credited with beside its advantage: terms for :class:`TokenAdvantage`.

A term is a callable: a batch and the (N, T) bool tokens in the loss go in, (N, T) numbers come out, of which
those of tokens in the loss are read. `in_keys` are the columns that it reads, dense when it sees them: of
ragged rows it is given these alone, padded on the right. What a term measures over tokens is over those in
the loss, of all ranks that share the batch (:meth:`TokenTerm.over`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.columns import ColumnNames, TakesColumns
from headrace.transforms.errors import BatchError
from headrace.transforms.ids import Ids, add_up, as_ids
from headrace.transforms.options import above_zero, at_least, describe_options, one_of, takes_options, within
from headrace.transforms.rows import Rows
from headrace.transforms.schema import require
from headrace.transforms.tokens import sum_of_tokens, tokens_of_all_ranks

Centre = Literal["none", "batch"]


@takes_options
def directed_weight(log_ratio: Tensor, advantage: Tensor, *, clip: float) -> Tensor:
    """How much more a teacher believes in a token that was right, or less in one that was wrong.

    RLSD (arXiv:2604.03128), with Δ = log π_T − log π_S: ``clip(exp(sign(A) · Δ), 1 − ε, 1 + ε)``.

    Args:
        log_ratio: (N, T) Δ.
        advantage: A, broadcasts against it; where it is 0 the weight is 1.
        clip: ε ≥ 0.

    Returns:
        (N, T) > 0 for ε < 1.

    Example:
        >>> weight = directed_weight(torch.tensor([[0.1, -3.0]]), torch.tensor([[-1.0]]), clip=0.2)
        >>> [round(w, 4) for w in weight.flatten().tolist()]
        [0.9048, 1.2]
    """
    return (advantage.sign() * log_ratio).exp().clamp(1 - clip, 1 + clip)


@takes_options
def staleness_weight(age: Tensor, *, decay: float = 1.0, max_staleness: int | None = None) -> Tensor:
    """What a token of an older policy counts: ``γ^age``, and 0 beyond the limit.

    Args:
        age: versions between the policy that trains and the one that sampled, ≥ 0; integers.
        decay: γ in (0, 1].
        max_staleness: versions; None: no limit.

    Returns:
        float64, as `age`.

    Example:
        >>> staleness_weight(torch.tensor([0, 1, 2]), decay=0.5, max_staleness=1).tolist()
        [1.0, 0.5, 0.0]
    """
    factor = torch.full_like(age, decay, dtype=torch.float64).pow(age)
    return factor if max_staleness is None else factor.masked_fill(age > max_staleness, 0.0)


@takes_options
def top_share(values: Tensor, trains: Tensor, share: float) -> Tensor:
    """The tokens in the loss with the largest values, a share of them all.

    Their number is the nearest whole one, at least 1; tokens that equal the last of them are taken too.

    Args:
        values: (N, T) float.
        trains: (N, T) bool.
        share: in (0, 1].

    Returns:
        (N, T) bool.

    Example:
        >>> values = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.2, 9.0]])
        >>> top_share(values, torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(), 0.4).int().tolist()
        [[0, 1, 0], [1, 0, 0]]
    """
    if values.numel() == 0:
        return trains
    known = torch.where(trains, values.double(), float("-inf"))
    number = (trains.sum().double() * share).round().long().clamp_min(1)
    least = known.flatten().sort(descending=True).values.index_select(0, number.view(1) - 1)
    return trains & (known >= least)


@takes_options
def share_at_place(
    values: Tensor, trains: Tensor, group_id: Tensor, direction: Tensor, *, floor: float = 1e-6
) -> Tensor:
    """How a token's entropy compares with those of the group's rows at the same place that pull the same way.

    GTPO (arXiv:2508.04349), with t the token's place among those of its row in the loss, and k over the n
    rows of the group that have a t-th token and the same direction::

        n H_t / Σ_k H_k,t                where the direction is positive
        n (1 / H_t) / Σ_k (1 / H_k,t)    where it is negative
        1                                where it is 0

    Their mean is 1: what is given to one is taken from others.

    Args:
        values: (N, T) H, ≥ 0.
        trains: (N, T) bool.
        group_id: (N,) int64.
        direction: (N, T), of which the sign counts, such as the advantage.
        floor: least H, > 0, so that it can be divided by.

    Returns:
        (N, T) float64.

    Example:
        >>> values, ones = torch.tensor([[1.0, 2.0], [3.0, 2.0]]), torch.ones(2, 2)
        >>> group = torch.tensor([5, 5])
        >>> share_at_place(values, ones.bool(), group, ones).tolist()
        [[0.5, 1.0], [1.5, 1.0]]
        >>> share_at_place(values, ones.bool(), group, -ones).tolist()
        [[1.5, 1.0], [0.5, 1.0]]
    """
    groups, direction = Ids(as_ids(group_id, "group_id").cpu()), direction.expand_as(values)
    # 1. The rows of each group, (P, G), by their numbers; one that is not there is behind all.
    member = torch.full((groups.n, int(groups.count.max()) if groups.n else 0), len(trains))
    member[groups.of, groups.positions()] = torch.arange(len(trains))
    member, of = member.to(values.device), groups.of.to(values.device)
    # 2. Where each token is among those of its row in the loss.
    place = (trains.cumsum(1) - 1).clamp_min(0)
    to = torch.where(trains, place, trains.shape[1])

    def over_group(known: Tensor) -> Tensor:
        """(N, T) of tokens → their sum over the rows of the group that have a token at its place."""
        by_place = known.new_zeros(len(known) + 1, known.shape[1] + 1)
        by_place[:-1].scatter_(1, to, known)
        sums = sum_of_tokens(by_place[member].movedim(1, -1))
        return sums.index_select(0, of).gather(1, place)

    # 3. n H / Σ H of the tokens that pull up, and n (1/H) / Σ (1/H) of those that pull down.
    known, share = values.double().clamp_min(floor), torch.ones_like(values, dtype=torch.float64)
    for way, part in ((direction > 0, known), (direction < 0, known.reciprocal())):
        way, part = trains & way, torch.where(way & trains, part, 0.0)
        share = torch.where(way, over_group(way.double()) * part / over_group(part), share)
    return share


class TokenTerm(TakesColumns):
    """A term with declared columns. Subclasses implement ``over``, or ``__call__``.

    Attributes:
        in_keys: the columns that it reads.
        within_groups: as a stage's: what a token gets follows from its group alone.
        elementwise: what a token gets follows from its own numbers and those of its row, so that it can be
            computed where rows are gathered.
    """

    in_keys: tuple[NestedKey, ...] = ()
    within_groups: bool = False
    elementwise: bool = False

    def __call__(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) float; read where `trains`, (N, T) bool."""
        if type(self).over is TokenTerm.over:
            raise NotImplementedError(f"{type(self).__name__} implements over, or __call__")
        return self.over(Rows.read(batch).seen_by(self), batch, trains)

    def over(self, rows: Rows, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """The same where more rows are compared than those of `batch`: all of the table, of all ranks."""
        return self(batch, trains)

    def refused(self, batch: TensorDictBase, trains: Tensor) -> Mapping[str, Tensor]:
        """(B,) bool each, rows for which the term means nothing, by a message with ``{found}`` for them."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"

    def _tokens(self, batch: TensorDictBase, trains: Tensor, option: str) -> Tensor:
        """(N, T): the column of an option, also where it has one number a row.

        Raises:
            MissingKeyError: it is not there.
            BatchError: it has another shape.
        """
        key, reader = getattr(self, option), type(self).__name__
        column = require(batch, key, reader=reader, option=option)
        if column.numel() == len(batch):
            return column.detach().reshape(-1, 1).expand_as(trains)
        if column.numel() != trains.numel():
            raise BatchError(
                f"{reader} needs a number a token in {key!r} ({option}), {tuple(trains.shape)}, or one a "
                f"row; found {tuple(column.shape)}"
            )
        return column.detach().reshape(trains.shape)

    def _log_ratio(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        above = self._tokens(batch, trains, "numerator_key")
        below = self._tokens(batch, trains, "denominator_key")
        return _at_least_float32(above) - _at_least_float32(below)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


class LogRatio(TokenTerm, columns=("numerator", "denominator")):
    """How much likelier one policy finds each token than another: ``log π₁ − log π₂``.

    Added to the advantage, a teacher over the policy that sampled is on-policy distillation, and the policy
    that sampled over a reference, times −c and centred, a KL penalty: ``A_t + c · (mean KL − KL_t)``.

    Args:
        centre: ``none``; ``batch`` subtracts the mean over the tokens in the loss.
        names: other names of columns, such as `numerator_key` (:class:`ColumnNames`).
    """

    def __init__(
        self,
        *,
        centre: Centre = "none",
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.centre = one_of("centre", centre, get_args(Centre))
        self.within_groups = self.elementwise = centre == "none"
        self.in_keys = (self.numerator_key, self.denominator_key)

    def over(self, rows: Rows, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T); the mean is over all rows."""
        ratio = self._log_ratio(batch, trains)
        if self.centre == "none":
            return ratio
        sums = sum_of_tokens(torch.where(trains, ratio, 0.0))
        found = rows.measured(sums=sums, tokens=trains.sum(1))
        return ratio.double() - float(add_up(found["sums"]) / found["tokens"].sum().clamp_min(1))


class DirectedWeight(TokenTerm, columns=("numerator", "denominator", "advantage")):
    """Credit where a teacher sees it, in the direction that the reward says (:func:`directed_weight`).

    Args:
        clip: ε ≥ 0; weights are in [1 − ε, 1 + ε].
        names: other names of columns, such as `numerator_key` (:class:`ColumnNames`).
    """

    within_groups = True
    elementwise = True

    def __init__(
        self,
        *,
        clip: float = 0.2,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.clip = within("clip", clip, 0, 1)
        self.in_keys = (self.numerator_key, self.denominator_key, self.advantage_key)

    def __call__(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) > 0."""
        credit = self._tokens(batch, trains, "advantage_key")
        return directed_weight(self._log_ratio(batch, trains), _at_least_float32(credit), clip=self.clip)


class StalenessWeight(TokenTerm, columns=("version",)):
    """What each token counts by the version of the policy that sampled it (:func:`staleness_weight`).

    Args:
        current: the version that trains, or a callable that returns it; none is guessed from the rows. In
            YAML a callable is ``{_target_: your.module.version, _partial_: true}``.
        decay: γ in (0, 1], per version.
        max_staleness: versions, ≥ 0, beyond which a token counts 0; None: no limit.
        names: other names of columns, such as `version_key` (:class:`ColumnNames`).
    """

    within_groups = True

    def __init__(
        self,
        *,
        current: int | Callable[[], int],
        decay: float = 1.0,
        max_staleness: int | None = None,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.current = current if callable(current) else at_least("current", current, 0)
        self.decay = above_zero("decay", decay, 1)
        self.max_staleness = at_least("max_staleness", max_staleness, 0)
        self.in_keys = (self.version_key,)

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """Unless a callable is to be asked for the version: by the time rows are gathered it is another."""
        return not callable(self.current)

    def refused(self, batch: TensorDictBase, trains: Tensor) -> Mapping[str, Tensor]:
        """No token is newer than the version that trains."""
        message = "no token is newer than the version that trains (current); found newer ones in {found}"
        return {message: (trains & (self._age(batch, trains) < 0)).any(1)}

    def __call__(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) ≥ 0."""
        return staleness_weight(self._age(batch, trains), decay=self.decay, max_staleness=self.max_staleness)

    def _age(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        current = int(self.current() if callable(self.current) else self.current)
        return current - self._tokens(batch, trains, "version_key").long()


class TopShare(TokenTerm, columns=("value",)):
    """1 for the tokens of the batch with the largest values, such as entropies, else 0 (:func:`top_share`).

    Multiplied with the advantage, the others teach nothing and stay in the loss's denominator.

    Args:
        share: of the tokens in the loss, in (0, 1].
        names: other names of columns, such as `value_key` (:class:`ColumnNames`).
    """

    def __init__(self, *, share: float = 0.2, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        self.share = above_zero("share", share, 1)
        self.in_keys = (self.value_key,)

    def over(self, rows: Rows, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T), 0 or 1; the share is of the tokens of all ranks, which exchange them."""
        values = self._tokens(batch, trains, "value_key")
        everyone, train = tokens_of_all_ranks(rows, values.double(), trains.double())
        return rows.of_rank(top_share(everyone, train > 0, self.share))[:, : trains.shape[1]].float()


class EntropyShare(TokenTerm, columns=("value", "advantage", "group")):
    """What a token's entropy is beside those of its group at the same place (:func:`share_at_place`).

    Multiplied with the advantage, hesitation that ended well is credited more, and confidence that did not is
    charged more. A rollout is one row: places in several segments say nothing of one another.

    Args:
        floor: least entropy, > 0, so that it can be divided by.
        names: other names of columns, such as `value_key` (:class:`ColumnNames`).
    """

    within_groups = True

    def __init__(
        self,
        *,
        floor: float = 1e-6,
        **names: Unpack[ColumnNames],
    ):
        self.name_columns(names)
        self.floor = above_zero("floor", floor)
        self.in_keys = (self.value_key, self.advantage_key, self.group_key)

    def refused(self, batch: TensorDictBase, trains: Tensor) -> Mapping[str, Tensor]:
        """No entropy is negative."""
        low = (trains & (self._tokens(batch, trains, "value_key") < 0)).any(1)
        return {"no entropy is negative; found negative ones in {found}": low}

    def over(self, rows: Rows, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) > 0; groups are those of all ranks, which exchange their tokens."""
        credit = self._tokens(batch, trains, "advantage_key")
        values = self._tokens(batch, trains, "value_key")
        every = tokens_of_all_ranks(rows, values.double(), trains.double(), credit.double())
        share = share_at_place(every[0], every[1] > 0, rows.groups.labels, every[2], floor=self.floor)
        return rows.of_rank(share)[:, : trains.shape[1]]
