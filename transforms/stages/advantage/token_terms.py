"""Terms per token for :class:`TokenAdvantage`.

A term is a callable. It takes a batch and (N, T) bool, the tokens in the loss, and returns (N, T) numbers.
Only the numbers of tokens in the loss are used. `in_keys` are the columns that a term reads. For ragged rows,
a term gets only these columns, padded on the right. A sum or mean over tokens is over the tokens in the loss
of all ranks that share the batch (:meth:`TokenTerm.over`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from typing_extensions import Unpack

from headrace.transforms.table import BatchError, ColumnNames, Ids, Rows, TakesColumns, as_ids
from headrace.transforms.table.ids import add_up
from headrace.transforms.table.options import above_zero, at_least, describe_options, takes_options, within
from headrace.transforms.table.schema import require
from headrace.transforms.table.tokens import sum_of_tokens, tokens_of_all_ranks

LEAST_ENTROPY = 1e-6  # in nats; avoids a division by 0
OTB_EPS = 1e-8  # as in verl
MOST_SQUARES = 1.01  # Σ π² is at most 1, rounded to half precision
Centre = Literal["none", "batch"]


@takes_options
def directed_weight(log_ratio: Tensor, advantage: Tensor, *, clip: float) -> Tensor:
    """Compute the token weight of RLSD from the log-ratio of teacher and sampler (arXiv:2604.03128).

    With Δ = log π_T − log π_S: ``clip(exp(sign(A) · Δ), 1 − ε, 1 + ε)``.

    Args:
        log_ratio: (N, T) Δ.
        advantage: A, which broadcasts to (N, T); the weight is 1 if A is 0.
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
def staleness_weight(age: Tensor, *, decay: float) -> Tensor:
    """Compute the weight of tokens by the age of their policy: ``γ^age``.

    Args:
        age: integers ≥ 0, the version of the policy that trains minus that of the policy that sampled.
        decay: γ in (0, 1].

    Returns:
        float64, in the shape of `age`.

    Example:
        >>> staleness_weight(torch.tensor([0, 1, 2]), decay=0.5).tolist()
        [1.0, 0.5, 0.25]
    """
    return torch.full_like(age, decay, dtype=torch.float64).pow(age)


@takes_options
def top_share(values: Tensor, trains: Tensor, share: float) -> Tensor:
    """Choose a fraction of the tokens in the loss: those with the largest values.

    The number of chosen tokens is rounded to an integer and is at least 1. Tokens whose value equals the
    smallest chosen value are also chosen.

    Args:
        values: (N, T) float.
        trains: (N, T) bool, True at tokens in the loss.
        share: fraction in (0, 1].

    Returns:
        (N, T) bool, True at chosen tokens.

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
def share_at_place(values: Tensor, trains: Tensor, group_id: Tensor, direction: Tensor) -> Tensor:
    """Compare the entropy of each token with tokens at the same index in rows of its group, as in GTPO.

    For GTPO see arXiv:2508.04349. t is the index of the token among the tokens in the loss of its row. k runs
    over the n rows of the group that have a t-th token with the same sign of `direction`::

        n H_t / Σ_k H_k,t                if the direction is positive
        n (1 / H_t) / Σ_k (1 / H_k,t)    if the direction is negative
        1                                if the direction is 0

    The mean of the results over these n tokens is 1. An H below :data:`LEAST_ENTROPY` counts as this number.

    Args:
        values: (N, T) H, ≥ 0.
        trains: (N, T) bool, True at tokens in the loss.
        group_id: (N,) int64.
        direction: (N, T), such as the advantage; only its sign is used.

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
    over_group, direction = sum_at_place(trains, group_id), direction.expand_as(values)
    # n H / Σ H for positive directions, and n (1/H) / Σ (1/H) for negative ones.
    known, share = values.double().clamp_min(LEAST_ENTROPY), torch.ones_like(values, dtype=torch.float64)
    for way, part in ((direction > 0, known), (direction < 0, known.reciprocal())):
        way = trains & way
        of_all = over_group(torch.where(way, part, 0.0))
        share = torch.where(way, over_group(way.double()) * part / of_all, share)
    return share


def sum_at_place(trains: Tensor, group_id: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that sums (N, T) numbers over the rows of the group, at the same index t: (N, T) float64.

    The index t counts the tokens in the loss of a row. Numbers of other tokens are not read.

    Args:
        trains: (N, T) bool, True at tokens in the loss.
        group_id: (N,) int64.
    """
    groups = Ids(as_ids(group_id, "group_id").cpu())
    # 1. The row indices of each group, (P, G). Smaller groups are filled up with the index N, a row of zeros.
    position = groups.positions()
    member = torch.full((groups.n, len(position.unique())), len(trains))  # the largest group has every one
    member[groups.of, position] = torch.arange(len(trains))
    member, of = member.to(trains.device), groups.of.to(trains.device)
    # 2. The index of each token among the tokens in the loss of its row.
    place = (trains.cumsum(1) - 1).clamp_min(0)
    to = torch.where(trains, place, trains.shape[1])

    def over_group(known: Tensor) -> Tensor:
        by_place = known.new_zeros(len(known) + 1, known.shape[1] + 1)
        by_place[:-1].scatter_(1, to, known)
        sums = sum_of_tokens(by_place[member].movedim(1, -1).sort(-1).values)  # row order changes nothing
        return sums.index_select(0, of).gather(1, place)

    return over_group


@takes_options
def optimal_token_baseline(
    returns: Tensor, log_prob: Tensor, sum_pi_squared: Tensor, trains: Tensor, group_id: Tensor
) -> Tensor:
    """Compute the baseline of least variance for each token, as verl's OTB does.

    t is the index of the token among the tokens in the loss of its row. w is the squared length of the
    gradient of the log-probability with respect to the logits. k runs over the rows of the group that have a
    t-th token::

        w_t = 1 − 2 π_t + Σ π²        W_t = Σ_{s≤t} w_s
        B_t = Σ_k G_k,t W_k,t / (Σ_k W_k,t + 1e-8)
        B_t = 0                                      if no other row of the group has a t-th token

    Source: ``compute_optimal_token_baseline_advantage`` of verl/trainer/ppo/core_algos.py with
    ``handle_zero_tail=True``. There t is the position in the response. The two indices are equal if all
    tokens of a response are in the loss.

    Args:
        returns: G, the return from the token on, such as the reward of the rollout; broadcasts to (N, T).
        log_prob: (N, T) float, log π of the token.
        sum_pi_squared: (N, T) float, Σ π² over the vocabulary.
        trains: (N, T) bool, True at tokens in the loss.
        group_id: (N,) int64.

    Returns:
        (N, T) float64, 0 at tokens out of the loss.

    Example:
        >>> log_prob, ones = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log(), torch.ones(2, 2).bool()
        >>> squares = torch.tensor([[0.25, 0.5], [0.75, 0.5]])
        >>> baseline = optimal_token_baseline(
        ...     torch.tensor([[1.0], [0.0]]), log_prob, squares, ones, torch.tensor([3, 3])
        ... )
        >>> [round(b, 6) for b in baseline[0].tolist()]
        [0.25, 0.375]
    """
    over_group = sum_at_place(trains, group_id)
    energy = 1 - 2 * log_prob.double().exp() + sum_pi_squared.double()
    energy = torch.where(trains, energy, 0.0).cumsum(1)
    baseline = over_group(energy * returns.double()) / (over_group(energy) + OTB_EPS)
    return torch.where(trains & (over_group(trains.double()) > 1), baseline, 0.0)


class TokenTerm(TakesColumns):
    """Base class of terms. Subclasses implement ``over`` or ``__call__``.

    Attributes:
        in_keys: the columns that the term reads.
        within_groups: the number of a token depends only on its group.
        elementwise: the number of a token depends only on the values of the token and of its row, so that
            it can be computed when rows are gathered.
    """

    _kind: ClassVar[str] = "term"
    in_keys: tuple[NestedKey, ...] = ()
    within_groups: bool = False
    elementwise: bool = False

    def __call__(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) float, used where (N, T) bool `trains` is True."""
        if type(self).over is TokenTerm.over:
            raise NotImplementedError(f"{type(self).__name__} must implement over or __call__")
        return self.over(Rows.read(batch).seen_by(self), batch, trains)

    def over(self, rows: Rows, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) float for `batch`. `rows` is the table of all ranks, for terms that compare rows."""
        return self(batch, trains)

    def refused(self, batch: TensorDictBase, trains: Tensor) -> Mapping[str, Tensor]:
        """For each error message: the invalid rows, (B,) bool. ``{found}`` in the message stands for them."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe_options(self)})"

    def _tokens(self, batch: TensorDictBase, trains: Tensor, option: str) -> Tensor:
        """(N, T): the column of an option; a column with one number per row is expanded.

        Raises:
            MissingKeyError: the column is missing.
            BatchError: the column has another shape.
        """
        key, reader = getattr(self, option), type(self).__name__
        column = require(batch, key, reader=reader, option=option)
        if column.numel() == len(batch):
            return column.detach().reshape(-1, 1).expand_as(trains)
        if column.numel() != trains.numel():
            raise BatchError(
                f"{reader} needs one number per token in {{column}}, {tuple(trains.shape)}, or one "
                f"per row; found {tuple(column.shape)}",
                key=key,
                option=option,
            )
        return column.detach().reshape(trains.shape)

    def _log_ratio(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        above = self._tokens(batch, trains, "numerator_key")
        below = self._tokens(batch, trains, "denominator_key")
        return _at_least_float32(above) - _at_least_float32(below)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


class LogRatio(TokenTerm, columns=("numerator", "denominator")):
    """The log-ratio of two policies at each token: ``log π₁ − log π₂``.

    Added to the advantage, the log-ratio of a teacher and the policy that sampled is on-policy distillation.
    The centred log-ratio of the policy that sampled and a reference, with factor −c, is a KL penalty: ``A_t +
    c · (mean KL − KL_t)``.

    Args:
        centre: ``none``; ``batch`` subtracts the mean over the tokens in the loss.
        names: other names of columns, such as `numerator_key` (:class:`ColumnNames`).
    """

    def __init__(self, *, centre: Centre = "none", **names: Unpack[ColumnNames]):
        self.name_columns(names)
        self.centre = centre
        self.within_groups = self.elementwise = centre == "none"
        self.in_keys = (self.numerator_key, self.denominator_key)

    def over(self, rows: Rows, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) float; the mean is over the tokens of all ranks."""
        ratio = self._log_ratio(batch, trains)
        if self.centre == "none":
            return ratio
        sums = sum_of_tokens(torch.where(trains, ratio, 0.0))
        found = rows.measured(sums=sums, tokens=trains.sum(1))
        return ratio.double() - float(add_up(found["sums"]) / found["tokens"].sum().clamp_min(1))


class DirectedWeight(TokenTerm, columns=("numerator", "denominator", "advantage")):
    """The weight of RLSD, from a teacher's log-ratio and the sign of the advantage (:func:`directed_weight`).

    Args:
        clip: ε ≥ 0; weights are in [1 − ε, 1 + ε].
        names: other names of columns, such as `numerator_key` (:class:`ColumnNames`).
    """

    within_groups = True
    elementwise = True

    def __init__(self, *, clip: float, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        self.clip = within("clip", clip, 0, 1)
        self.in_keys = (self.numerator_key, self.denominator_key, self.advantage_key)

    def __call__(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) > 0."""
        credit = self._tokens(batch, trains, "advantage_key")
        return directed_weight(self._log_ratio(batch, trains), _at_least_float32(credit), clip=self.clip)


class StalenessWeight(TokenTerm, columns=("version",)):
    """The weight of each token by the age of the policy that sampled it (:func:`staleness_weight`).

    Args:
        current: version of the policy that trains, or a callable that returns it. In YAML a callable is
            ``{_target_: your.module.version, _partial_: true}``.
        decay: γ in (0, 1], per version.
        names: other names of columns, such as `version_key` (:class:`ColumnNames`).
    """

    within_groups = True

    def __init__(self, *, current: int | Callable[[], int], decay: float, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        self.current = current if callable(current) else at_least("current", current, 0)
        self.decay = above_zero("decay", decay, 1)
        self.in_keys = (self.version_key,)

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """False if `current` is a callable, because the version may change before rows are gathered."""
        return not callable(self.current)

    def refused(self, batch: TensorDictBase, trains: Tensor) -> Mapping[str, Tensor]:
        """Tokens may not be newer than the policy that trains."""
        message = "no token may be newer than the version that trains (current); found newer ones in {found}"
        return {message: (trains & (self._age(batch, trains) < 0)).any(1)}

    def __call__(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) ≥ 0."""
        return staleness_weight(self._age(batch, trains), decay=self.decay)

    def _age(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        current = int(self.current() if callable(self.current) else self.current)
        return current - self._tokens(batch, trains, "version_key").long()


class TopShare(TokenTerm, columns=("value",)):
    """1 at the tokens of the batch with the largest values, such as entropies, else 0 (:func:`top_share`).

    As a factor of the advantage, the term gives 0 to other tokens, which stay in the denominator of the loss.

    Args:
        share: fraction of the tokens in the loss, in (0, 1].
        names: other names of columns, such as `value_key` (:class:`ColumnNames`).
    """

    def __init__(self, *, share: float, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        self.share = above_zero("share", share, 1)
        self.in_keys = (self.value_key,)

    def over(self, rows: Rows, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T), 0 or 1. The fraction is of the tokens of all ranks, which exchange them."""
        values = self._tokens(batch, trains, "value_key")
        everyone, train = tokens_of_all_ranks(rows, values.double(), trains.double())
        return rows.of_this_rank(top_share(everyone, train > 0, self.share))[:, : trains.shape[1]].float()


class EntropyShare(TokenTerm, columns=("value", "advantage", "group")):
    """The relative entropy of each token, compared with its group at the same index (:func:`share_at_place`).

    As a factor of the advantage, the term gives more credit to uncertain tokens of good rollouts, and a
    larger penalty to confident tokens of bad rollouts. Each rollout must be one row, because token indices of
    different segments are not comparable.

    Args:
        names: other names of columns, such as `value_key` (:class:`ColumnNames`).
    """

    within_groups = True

    def __init__(self, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        self.in_keys = (self.value_key, self.advantage_key, self.group_key)

    def refused(self, batch: TensorDictBase, trains: Tensor) -> Mapping[str, Tensor]:
        """Entropies may not be negative."""
        low = (trains & (self._tokens(batch, trains, "value_key") < 0)).any(1)
        return {"entropies must be ≥ 0; found negative ones in {found}": low}

    def over(self, rows: Rows, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) > 0. Groups are those of all ranks, which exchange their tokens."""
        credit = self._tokens(batch, trains, "advantage_key")
        values = self._tokens(batch, trains, "value_key")
        every = tokens_of_all_ranks(rows, values.double(), trains.double(), credit.double())
        share = share_at_place(every[0], every[1] > 0, rows.groups.labels, every[2])
        return rows.of_this_rank(share)[:, : trains.shape[1]]


class OptimalTokenBaseline(TokenTerm, columns=("sampler_log_prob", "sum_pi_squared", "advantage", "group")):
    """Minus the optimal token baseline of each token (:func:`optimal_token_baseline`).

    Added to the reward, which is the advantage of ``baseline="none"``, the term gives ``A_t = R − B_t``. The
    baseline is over the rows in the loss. Each rollout must be one row, because token indices of different
    segments are not comparable.

    Args:
        names: other names of columns, such as `sum_pi_squared_key` (:class:`ColumnNames`).
    """

    within_groups = True

    def __init__(self, **names: Unpack[ColumnNames]):
        self.name_columns(names)
        columns = (self.sampler_log_prob_key, self.sum_pi_squared_key)
        self.in_keys = (*columns, self.advantage_key, self.group_key)

    def refused(self, batch: TensorDictBase, trains: Tensor) -> Mapping[str, Tensor]:
        """Sums of squared probabilities are between 0 and 1."""
        squares = self._tokens(batch, trains, "sum_pi_squared_key")
        wrong = trains & ((squares < 0) | (squares > MOST_SQUARES))
        return {"sums of squared probabilities must be in [0, 1]; found others in {found}": wrong.any(1)}

    def over(self, rows: Rows, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) float64. Groups are those of all ranks, which exchange their tokens."""
        columns = (
            self._tokens(batch, trains, f"{role}_key").double()
            for role in ("advantage", "sampler_log_prob", "sum_pi_squared")
        )
        credit, log_prob, squares, train = tokens_of_all_ranks(rows, *columns, trains.double())
        baseline = optimal_token_baseline(credit, log_prob, squares, train > 0, rows.groups.labels)
        return -rows.of_this_rank(baseline)[:, : trains.shape[1]]
