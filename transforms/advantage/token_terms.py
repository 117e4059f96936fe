"""What the tokens of a rollout are credited with beside its advantage: terms for :class:`TokenAdvantage`.

A term is a callable: a batch and the (N, T) bool tokens in the loss go in, (N, T) numbers come out, of which
those of tokens in the loss are read. `in_keys` are the columns that it reads, dense when it sees them: of
ragged rows it is given these alone, padded on the right. `rules`, from the same two, say what must hold. What
a term measures over tokens is over those in the loss, of all ranks that share the batch. No device read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.checks import Rule, at_least_float32
from headrace.transforms.distributed import Population, present_ranks
from headrace.transforms.errors import BatchError
from headrace.transforms.options import above_zero, at_least, describe_options, nested_key, one_of, within
from headrace.transforms.schema import require
from headrace.transforms.sums import sum_in_any_order

Centre = Literal["none", "batch"]


def mean_of_tokens(values: Tensor, trains: Tensor) -> Tensor:
    """Scalar float64: the mean over tokens in the loss; 0 where there are none.

    Rows are added up first, each in any order, then their sums: it depends neither on padding nor on how rows
    are spread over ranks.

    Args:
        values: (N, T) float.
        trains: (N, T) bool.

    Example:
        >>> mean_of_tokens(torch.tensor([[1.0, 4.0], [9.0, 7.0]]), torch.tensor([[1, 1], [0, 1]]).bool())
        tensor(4., dtype=torch.float64)
    """
    counted, tokens = torch.where(trains, values, 0.0).double(), trains.sum(1)
    everyone = Population(None, present_ranks()).take({"sums": _sum(counted, 1), "tokens": tokens})
    return _sum(everyone["sums"], 0) / everyone["tokens"].sum().clamp_min(1)


def _sum(values: Tensor, dim: int) -> Tensor:
    if values.numel() == 0:
        return values.sum(dim)
    terms = torch.full((), values.shape[dim], device=values.device)
    return sum_in_any_order(values, lambda part: part.sum(dim), peak=lambda: values.abs().amax(), terms=terms)


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


class TokenTerm:
    """A term with declared columns. Subclasses implement ``__call__``."""

    in_keys: tuple[NestedKey, ...] = ()
    within_groups: bool = False  # as a stage's: what a token gets follows from its group alone

    def __call__(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) float; read where `trains`, (N, T) bool."""
        raise NotImplementedError

    def rules(self, batch: TensorDictBase, trains: Tensor) -> Sequence[Rule]:
        """What must hold of the rows for the term to mean anything. Not read here."""
        return ()

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
        above, below = (
            self._tokens(batch, trains, option) for option in ("numerator_key", "denominator_key")
        )
        return at_least_float32(above) - at_least_float32(below)


class LogRatio(TokenTerm):
    """How much likelier one policy finds each token than another: ``log π₁ − log π₂``.

    Added to the advantage, a teacher over the policy that sampled is on-policy distillation, and the policy
    that sampled over a reference, times −c and centred, a KL penalty: ``A_t + c · (mean KL − KL_t)``.

    Args:
        numerator_key: (N, T) log π₁ of the sampled tokens.
        denominator_key: (N, T) log π₂.
        centre: ``none``; ``batch`` subtracts the mean over the tokens in the loss.
    """

    def __init__(
        self,
        *,
        numerator_key: NestedKey = ("teacher_log_probs", "full"),
        denominator_key: NestedKey = ("log_probs", "full"),
        centre: Centre = "none",
    ):
        self.numerator_key, self.denominator_key = nested_key(numerator_key), nested_key(denominator_key)
        self.centre = one_of("centre", centre, get_args(Centre))
        self.within_groups = centre == "none"
        self.in_keys = (self.numerator_key, self.denominator_key)

    def __call__(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T)."""
        ratio = self._log_ratio(batch, trains)
        return ratio if self.centre == "none" else ratio.double() - mean_of_tokens(ratio, trains)


class DirectedWeight(TokenTerm):
    """Credit where a teacher sees it, in the direction that the reward says (:func:`directed_weight`).

    Args:
        clip: ε ≥ 0; weights are in [1 − ε, 1 + ε].
        numerator_key: (N, T) log-probabilities of the sampled tokens under the teacher.
        denominator_key: (N, T) those under the policy that sampled.
        advantage_key: (N, 1, 1) or (N, T, 1) float, of whose sign the direction is.
    """

    within_groups = True

    def __init__(
        self,
        *,
        clip: float = 0.2,
        numerator_key: NestedKey = ("teacher_log_probs", "full"),
        denominator_key: NestedKey = ("log_probs", "full"),
        advantage_key: NestedKey = "advantage",
    ):
        self.clip = within("clip", clip, 0, 1)
        self.numerator_key, self.denominator_key = nested_key(numerator_key), nested_key(denominator_key)
        self.advantage_key = nested_key(advantage_key)
        self.in_keys = (self.numerator_key, self.denominator_key, self.advantage_key)

    def __call__(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) > 0."""
        credit = self._tokens(batch, trains, "advantage_key")
        return directed_weight(self._log_ratio(batch, trains), at_least_float32(credit), clip=self.clip)


class StalenessWeight(TokenTerm):
    """What each token counts by the version of the policy that sampled it (:func:`staleness_weight`).

    Args:
        current: the version that trains, or a callable that returns it; none is guessed from the rows. In
            YAML a callable is ``{_target_: your.module.version, _partial_: true}``.
        decay: γ in (0, 1], per version.
        max_staleness: versions, ≥ 0, beyond which a token counts 0; None: no limit.
        version_key: (N, T), (N,) or (N, 1) int, the version that acted.
    """

    within_groups = True

    def __init__(
        self,
        *,
        current: int | Callable[[], int],
        decay: float = 1.0,
        max_staleness: int | None = None,
        version_key: NestedKey = ("next", "policy_version"),
    ):
        self.current = current if callable(current) else at_least("current", current, 0, required=True)
        self.decay, self.max_staleness = (
            above_zero("decay", decay, 1),
            at_least("max_staleness", max_staleness, 0),
        )
        self.version_key = nested_key(version_key)
        self.in_keys = (self.version_key,)

    def rules(self, batch: TensorDictBase, trains: Tensor) -> Sequence[Rule]:
        """No token is newer than the version that trains."""
        age = self._age(batch, trains)
        message = "no token is newer than the version that trains (current); found newer ones in {found}"
        return [Rule((trains & (age < 0)).any(1), lambda row: f"row {row}", message)]

    def __call__(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        """(N, T) ≥ 0."""
        return staleness_weight(self._age(batch, trains), decay=self.decay, max_staleness=self.max_staleness)

    def _age(self, batch: TensorDictBase, trains: Tensor) -> Tensor:
        current = int(self.current() if callable(self.current) else self.current)
        return current - self._tokens(batch, trains, "version_key").long()
