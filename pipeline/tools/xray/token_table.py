"""Define a model that is a table of logits, and compute the coefficient of each token from its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Categorical

from headrace.transforms import logits_of_tokens
from headrace.transforms.table import BatchError, listing
from headrace.transforms.table.options import takes_options

TOKENS: NestedKey = ("tokens", "full")
REAL: NestedKey = ("masks", "all_attention_mask")
LOSS: NestedKey = ("masks", "all_assistant_mask")
EXACT = {torch.float64: 1e-9, torch.float32: 1e-4}  # tolerance, relative to the largest gradient


class MaskedTokens(Categorical):
    """The distribution of each token, from (N, T, V) logits. Outside `mask` log-probabilities are 0.

    It has the methods of LLMMaskedCategorical that TorchRL's losses call, and does not need TorchRL.
    """

    def __init__(self, logits: Tensor, mask: Tensor):
        super().__init__(logits=logits, validate_args=False)
        self.mask = mask

    def log_prob(self, value: Tensor) -> Tensor:
        """(N, T) log-probabilities of tokens. Where the mask is False, a token may be any number."""
        return super().log_prob(value.masked_fill(~self.mask, 0)).masked_fill(~self.mask, 0.0)


@takes_options
class TokenTable(TensorDictModuleBase):
    """A language model that depends on the last token alone: ``logits = table[token]``.

    At zero logits each token has the log-probability −log V. The table can be the actor of TorchRL's
    ``GRPOLoss`` (``masking_strategy="generic"``), even for packed rows and prefix trees.

    Args:
        vocabulary: V, the number of tokens, ≥ 3.
        dtype: dtype of the table.
        seed: seed for normally distributed logits. None: zero logits.

    Raises:
        ValueError: the vocabulary has fewer than 3 tokens.

    Example:
        >>> model = TokenTable(5)
        >>> model(torch.tensor([[0, 3]])).shape, model.table.abs().max().item()
        (torch.Size([1, 2, 5]), 0.0)
    """

    def __init__(self, vocabulary: int, dtype: torch.dtype = torch.float64, *, seed: int | None = None):
        super().__init__()
        if vocabulary < 3:
            raise ValueError(f"vocabulary must be ≥ 3, with padding and an unused token; got {vocabulary}")
        self.vocabulary = vocabulary
        self.in_keys, self.out_keys = [TOKENS], [("log_probs", "full")]
        logits = torch.zeros(vocabulary, vocabulary, dtype=dtype)
        if seed is not None:
            logits = torch.randn(logits.shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        self.table = nn.Parameter(logits)

    @classmethod
    def of(cls, batch: TensorDictBase, dtype: torch.dtype = torch.float64, **options: Any) -> TokenTable:
        """Make a table for a batch of :func:`xray_batch` with the smallest vocabulary."""
        tokens, real = tokens_of(batch)[:2]
        return cls(int(torch.where(real, tokens, 0).max()) + 3, dtype, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (N, T, V) logits of the next tokens for (N, T) tokens."""
        return nn.functional.embedding(tokens, self.table)

    def get_dist(self, batch: TensorDictBase, **_: Any) -> MaskedTokens:
        """Return the distribution of each token given the previous one, masked to the tokens in the loss."""
        if "packed_node" in batch.keys():
            shifted = logits_of_tokens(self(batch["input_ids"]), batch)
        else:
            logits = self(batch[TOKENS])
            shifted = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)
        return MaskedTokens(shifted, batch[LOSS])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vocabulary})"


def token_weights(model: nn.Module, batch: TensorDictBase, *, reference: TokenTable | None = None) -> Tensor:
    """Compute the coefficient of each token's log-probability in −loss, after ``backward()``.

    If a token n follows the token p and has the coefficient c, then −∂L/∂table[p, k] = c (δ_kn − π(k | p)).
    An unused token u shows C, the sum of c over all tokens that follow p: C = (∂L/∂table[p, u]) / π(u | p).
    So::

        c = π(n | p) C − ∂L/∂table[p, n]

    Padding, masks, packing, gradient accumulation, ranks and mixed precision all change the gradient, so all
    are measured. An entropy bonus has no gradient at equal logits.

    Args:
        model: a :class:`TokenTable`, or a module that contains one.
        batch: a batch of :func:`xray_batch` with all rows of the step.
        reference: the policy of a KL term over the whole vocabulary. The gradient of this term is separated
            (:func:`kl_weights`). An entropy bonus is such a term, with the uniform ``TokenTable(V)``.

    Returns:
        (N, T) float64, 0 for tokens outside the loss mask. Ragged rows are padded on the right.

    Raises:
        BatchError: a pair of tokens occurs twice; or no token in the loss explains parts of the gradient. The
            cause may be a token outside the mask, a shifted mask, padding, or a KL term to a policy other
            than `reference`. The message names the first such part.
        ValueError: there is no table, or the model has dropout; or the table's gradient is missing, 0
            everywhere, or not finite.

    Example:
        >>> from headrace.pipeline import xray_batch
        >>> batch = xray_batch([1, 2], [0.0, 1.0], group_size=2, prompts=1)
        >>> model = TokenTable.of(batch)
        >>> log_probs = model.get_dist(batch).log_prob(batch["tokens", "full"])
        >>> (log_probs * torch.tensor([[0.0, 5, 0], [0, 7, 8]])).sum().neg().backward()
        >>> token_weights(model, batch).tolist()
        [[0.0, 5.0, 0.0], [0.0, 7.0, 8.0]]
    """
    found = explain_gradient(model, batch, reference)
    inside = tokens_of(batch)[2]
    outside = torch.where(inside, 0.0, found.weights)
    if float(outside.abs().max()) > found.exact:
        row, place = divmod(int(outside.abs().argmax()), outside.shape[1])
        raise BatchError(
            f"the gradient has parts that no token in the loss mask explains: token {place} of row {row} "
            f"is outside the mask and has a coefficient of {float(outside[row, place]):.3g}. Check whether "
            "the mask is shifted by one, or the loss includes prompts"
        )
    if found.padding > found.exact:
        raise BatchError(
            "the gradient has parts that no token in the loss mask explains: padding has coefficients of "
            f"up to {found.padding:.3g}. Check whether padding is in the loss, or the mask is shifted by one"
        )
    return torch.where(inside, found.weights, 0.0)


def kl_weights(model: nn.Module, batch: TensorDictBase, reference: TokenTable) -> Tensor:
    """Compute the coefficient of KL(π ‖ reference) over the whole vocabulary, by previous token.

    With KL_p = Σ_k π(k | p) log(π(k | p) / ref(k | p)), the term κ_p KL_p of the loss has the gradient
    ∂/∂table[p, k] = κ_p π(k | p) (log π(k | p) − log ref(k | p) − KL_p). Unused tokens k show κ_p.

    A KL estimate from the sampled token alone (k1, k2, k3) is part of that token's coefficient, not of κ.

    Args:
        model: see :func:`token_weights`.
        batch: see :func:`token_weights`.
        reference: the reference policy of the KL term; the uniform ``TokenTable(V)`` for an entropy bonus.

    Returns:
        (V,) float64: the sum of κ over all tokens after each token of the vocabulary; 0 where both policies
        are equal.

    Raises:
        BatchError, ValueError: see :func:`token_weights`.

    Example:
        >>> from headrace.pipeline import xray_batch
        >>> batch = xray_batch([2, 2], [0.0, 1.0], group_size=2, prompts=1)
        >>> model, reference = TokenTable.of(batch), TokenTable.of(batch, seed=0)
        >>> policy, other = (m.table.log_softmax(-1) for m in (model, reference))
        >>> (0.1 * (policy.exp() * (policy - other)).sum(-1)[:2].sum()).backward()
        >>> [round(float(weight), 6) for weight in kl_weights(model, batch, reference)]
        [0.1, 0.1, 0.0, 0.0, 0.0]
    """
    return explain_gradient(model, batch, reference).kl


@dataclass(frozen=True)
class ExplainedGradient:
    """The gradient of a table, explained as a sum over the tokens of a batch.

    Attributes:
        weights: (N, T) float64, the coefficient of each token, inside and outside the loss mask.
        padding: the greatest absolute coefficient of padding, or of a token after padding.
        kl: (V,) float64, see :func:`kl_weights`; 0 without a reference.
        exact: coefficients below this number are rounding errors.
    """

    weights: Tensor
    padding: float
    kl: Tensor
    exact: float


def explain_gradient(
    model: nn.Module, batch: TensorDictBase, reference: TokenTable | None = None
) -> ExplainedGradient:
    """Compute the coefficients of all tokens, of padding, and of a KL term.

    Raises:
        BatchError, ValueError: see :func:`token_weights`. But coefficients of padding, or outside the mask,
            raise nothing.
    """
    table = table_of(model).table
    gradient = table.grad
    if gradient is None:
        raise ValueError("the table has no gradient. The loss must use this model, and call backward()")
    gradient = gradient.detach().double()
    if not bool(gradient.isfinite().all()):
        raise ValueError(
            "the gradient of the table is not finite. Check for NaN in rewards and log-probabilities"
        )
    if not bool(gradient.any()):
        raise ValueError(
            "the gradient of the table is 0 everywhere. Check whether zero_grad() was called after "
            "backward(), or all advantages are 0"
        )
    tokens, real, inside = tokens_of(batch)
    before, after = tokens[:, :-1], tokens[:, 1:]
    pairs = real[:, :-1] & real[:, 1:]
    size = table.shape[0]
    padding, unused = size - 2, size - 1
    if bool((inside[:, :1]).any()):
        raise BatchError(
            "the first token of a row must not be in the loss mask, because it has no previous token. Add a "
            "prompt"
        )
    codes, counts = (before * size + after)[pairs].unique(return_counts=True)
    if bool((counts > 1).any()) or bool((after[pairs] >= padding).any()):
        twice = [f"{int(c) // size} then {int(c) % size}" for c in codes[counts > 1]]
        raise BatchError(
            f"each pair of tokens must occur once, and tokens {padding} and {unused} never, as in "
            f"xray_batch(); found {listing(twice) or f'token {int(after[pairs].max())}'}"
        )
    policy = table.detach().double().log_softmax(-1)
    share = policy.exp()
    used = torch.zeros(size, size, dtype=torch.bool)
    used[before[pairs], after[pairs]] = True
    if reference is None:
        kl, toward = gradient.new_zeros(size), torch.zeros_like(share)
        total = gradient[:, unused] / share[:, unused]
    else:
        # For unused entries, gradient = π C + κ d: two unknowns for each previous token.
        apart = policy - table_of(reference).table.detach().double().log_softmax(-1)
        toward = share * (apart - (share * apart).sum(-1, keepdim=True))
        free = (~used).double()
        solved = (
            torch.linalg.pinv(torch.stack([share * free, toward * free], -1)) @ (gradient * free)[..., None]
        )
        total, kl = solved.squeeze(-1).unbind(-1)
    coefficient = share * total[:, None] + toward * kl[:, None] - gradient
    exact = EXACT.get(table.dtype, 0.05) * float(gradient.abs().max())
    rest = torch.where(used, 0.0, coefficient)
    rest[:, padding] = rest[padding] = 0.0
    if float(rest.abs().max()) > exact:
        first, second = divmod(int(rest.abs().argmax()), size)
        rows = int((rest.abs().amax(1) > exact).sum())
        raise BatchError(
            f"the gradient has parts that no token explains, after {rows} of {size} tokens: the largest is "
            f"{float(rest[first, second]):.3g}, for token {second} after token {first}; tokens of the "
            f"batch have up to {float(torch.where(used, coefficient, 0.0).abs().max()):.3g}. Causes may be a "
            "KL term over the vocabulary (give its policy as reference=), an entropy bonus at unequal logits "
            "(reference=TokenTable(V)), rows that are packed without a boundary, another padding token, and "
            "noise in the model"
        )
    weights = torch.where(pairs, coefficient[before, after], 0.0)
    filler = max(float(coefficient[:, padding].abs().max()), float(coefficient[padding].abs().max()))
    return ExplainedGradient(torch.nn.functional.pad(weights, (1, 0)), filler, kl, exact)


def table_of(model: nn.Module) -> TokenTable:
    """Return the table in a module.

    Raises:
        ValueError: there is no table, or more than one; or the model has dropout, which changes the gradient.
    """
    if any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p
        for module in model.modules()
    ):
        raise ValueError("the model has dropout, which is random: set its p to 0, or call model.eval()")
    tables = [module for module in model.modules() if isinstance(module, TokenTable)]
    if len(tables) != 1:
        raise ValueError(f"the model must contain one TokenTable; found {len(tables)} in {type(model)}")
    return tables[0]


def tokens_of(batch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens, the attention mask and the loss mask, each (N, T)."""
    tokens, real, inside = (padded_column(batch, key) for key in (TOKENS, REAL, LOSS))
    return tokens, real.bool(), inside.bool()


def padded_column(batch: TensorDictBase, key: NestedKey) -> Tensor:
    """(N, T, …) a column. Ragged rows are padded with 0 on the right."""
    if isinstance(batch, LazyStackedTensorDict):
        return batch.get(key, as_padded_tensor=True, padding_value=0)
    return batch.get(key)
