"""A model that is a table of logits, and what a gradient of it says of each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.modules.distributions import LLMMaskedCategorical

from headrace.transforms import logits_of_tokens
from headrace.transforms.errors import BatchError, listing
from headrace.transforms.options import takes_options

TOKENS: NestedKey = ("tokens", "full")
REAL: NestedKey = ("masks", "all_attention_mask")
LOSS: NestedKey = ("masks", "all_assistant_mask")
EXACT = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest gradient: what no token explains


@takes_options
class TokenTable(TensorDictModuleBase):
    """A language model that knows the last token alone: ``logits = table[token]``, at first all zero.

    At zero logits each token has the log-probability −log V. It is also an actor of TorchRL's ``GRPOLoss``
    (``masking_strategy="generic"``), of packed rows and prefix trees, too.

    Args:
        vocabulary: V, ≥ 3.
        dtype: of the table.
        seed: of logits that are drawn from a normal distribution. None: they are zero.

    Raises:
        ValueError: a smaller vocabulary.

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
        """A table for a batch of :func:`xray_batch`, which was made with the smallest vocabulary."""
        tokens, real = tokens_of(batch)[:2]
        return cls(int(torch.where(real, tokens, 0).max()) + 3, dtype, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T, V) logits of the next token of (N, T)."""
        return nn.functional.embedding(tokens, self.table)

    def get_dist(self, batch: TensorDictBase, **_: Any) -> LLMMaskedCategorical:
        """The distribution of each token given the one before it, masked to the tokens in the loss."""
        if "packed_node" in batch.keys():
            shifted = logits_of_tokens(self(batch["input_ids"]), batch)
        else:
            logits = self(batch[TOKENS])
            shifted = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)
        return LLMMaskedCategorical(logits=shifted, mask=batch[LOSS])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vocabulary})"


def token_weights(model: nn.Module, batch: TensorDictBase, *, reference: TokenTable | None = None) -> Tensor:
    """The coefficient of each token's log-probability in minus the loss, after ``backward()``.

    A token n that follows p with the coefficient c has −∂L/∂table[p, k] = c (δ_kn − π(k | p)). An entry u
    that no token uses shows C = Σ c over the tokens that follow p: (∂L/∂table[p, u]) / π(u | p). So::

        c = π(n | p) C − ∂L/∂table[p, n]

    Padding, masks, packing, accumulation, ranks and mixed precision all change the gradient, so they are all
    measured. An entropy bonus has no gradient where logits are equal.

    Args:
        model: a :class:`TokenTable`, or a module around one.
        batch: as :func:`xray_batch` makes it, with all rows of the step.
        reference: the policy of a KL term over the whole vocabulary, which is measured apart
            (:func:`kl_weights`). An entropy bonus is such a term, to the uniform ``TokenTable(V)``.

    Returns:
        (N, T) float64, 0 for tokens outside the loss mask. N × T as the batch is padded on the right where it
        is ragged.

    Raises:
        BatchError: a pair of tokens occurs twice; the gradient has parts that no token in the loss explains,
            with the first of them: a token outside the mask is in the loss, a shifted mask, padding, a KL
            term to a policy that `reference` does not name.
        ValueError: there is no table, or there is dropout; no gradient has reached the table, it is 0
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
            f"is outside the mask and has a coefficient of {float(outside[row, place]):.3g}. Is the mask "
            "shifted by one, or is the loss taken over prompts?"
        )
    if found.padding > found.exact:
        raise BatchError(
            "the gradient has parts that no token in the loss mask explains: padding has coefficients of "
            f"up to {found.padding:.3g}. Is padding in the loss, or is the mask shifted "
            "by one?"
        )
    return torch.where(inside, found.weights, 0.0)


def kl_weights(model: nn.Module, batch: TensorDictBase, reference: TokenTable) -> Tensor:
    """The coefficient in the loss of KL(π ‖ reference) over the whole vocabulary, by the previous token.

    With KL_p = Σ_k π(k | p) log(π(k | p) / ref(k | p)), the term κ_p KL_p of the loss has the gradient
    ∂/∂table[p, k] = κ_p π(k | p) (log π(k | p) − log ref(k | p) − KL_p). Entries that no token uses show it.

    A KL estimate from the sampled token alone (k1, k2, k3) is part of that token's own coefficient instead.

    Args:
        model: as of :func:`token_weights`.
        batch: as of :func:`token_weights`.
        reference: the policy that the term pulls towards; the uniform ``TokenTable(V)`` for an entropy bonus.

    Returns:
        (V,) float64: the sum of κ over all tokens that follow each token of the vocabulary; 0 where both
        policies are equal.

    Raises:
        BatchError, ValueError: as :func:`token_weights`.

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
    """The gradient of a table, as a sum over the tokens of a batch.

    Attributes:
        weights: (N, T) float64, the coefficient of each token, in or outside the loss mask.
        padding: the greatest coefficient of padding, or of what comes after it, in size.
        kl: (V,) float64, by :func:`kl_weights`; 0 without a reference.
        exact: below this a coefficient is rounding.
    """

    weights: Tensor
    padding: float
    kl: Tensor
    exact: float


def explain_gradient(
    model: nn.Module, batch: TensorDictBase, reference: TokenTable | None = None
) -> ExplainedGradient:
    """The coefficients of all tokens, of padding, and of a KL term.

    Raises:
        BatchError, ValueError: as :func:`token_weights`, but for tokens outside the loss mask and padding.
    """
    table = table_of(model).table
    gradient = table.grad
    if gradient is None:
        raise ValueError("no gradient has reached the table: does the loss use this model, with backward()?")
    gradient = gradient.detach().double()
    if not bool(gradient.isfinite().all()):
        raise ValueError("the gradient of the table is not finite: is a reward or a log-probability NaN?")
    if not bool(gradient.any()):
        raise ValueError(
            "the gradient of the table is 0 everywhere: has zero_grad() been called since, or are all "
            "advantages 0?"
        )
    tokens, real, inside = tokens_of(batch)
    before, after = tokens[:, :-1], tokens[:, 1:]
    pairs = real[:, :-1] & real[:, 1:]
    size = table.shape[0]
    padding, unused = size - 2, size - 1
    if bool((inside[:, :1]).any()):
        raise BatchError("the first token of a row follows no other, and is in the loss mask: add a prompt")
    codes, counts = (before * size + after)[pairs].unique(return_counts=True)
    if bool((counts > 1).any()) or bool((after[pairs] >= padding).any()):
        twice = [f"{int(c) // size} then {int(c) % size}" for c in codes[counts > 1]]
        raise BatchError(
            f"each pair of tokens occurs once, and tokens {padding} and {unused} never, as in xray_batch(); "
            f"found {listing(twice) or f'token {int(after[pairs].max())}'}"
        )
    policy = table.detach().double().log_softmax(-1)
    share = policy.exp()
    used = torch.zeros(size, size, dtype=torch.bool)
    used[before[pairs], after[pairs]] = True
    if reference is None:
        kl, toward = gradient.new_zeros(size), torch.zeros_like(share)
        total = gradient[:, unused] / share[:, unused]
    else:
        # Of the entries that no token uses: gradient = π C + κ d, two numbers for each previous token.
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
            f"{float(rest[first, second]):.3g}, for token {second} after token {first}, where tokens of the "
            f"batch have up to {float(torch.where(used, coefficient, 0.0).abs().max()):.3g}. A KL term over "
            "the vocabulary has such a gradient (give its policy as reference=), an entropy bonus where "
            "logits differ (reference=TokenTable(V)), rows that are packed without a boundary, padding with "
            "another token, and noise in the model"
        )
    weights = torch.where(pairs, coefficient[before, after], 0.0)
    filler = max(float(coefficient[:, padding].abs().max()), float(coefficient[padding].abs().max()))
    return ExplainedGradient(torch.nn.functional.pad(weights, (1, 0)), filler, kl, exact)


def table_of(model: nn.Module) -> TokenTable:
    """The table in a module.

    Raises:
        ValueError: there is none, or more than one; dropout would change what the gradient says.
    """
    if any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p
        for module in model.modules()
    ):
        raise ValueError("the model has dropout, which is random: set its p to 0, or call model.eval()")
    tables = [module for module in model.modules() if isinstance(module, TokenTable)]
    if len(tables) != 1:
        raise ValueError(f"the model is a TokenTable, or has one in it; found {len(tables)} in {type(model)}")
    return tables[0]


def tokens_of(batch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
    """(N, T) each: the tokens, which of them are no padding, and which are in the loss mask."""
    tokens, real, inside = (padded_column(batch, key) for key in (TOKENS, REAL, LOSS))
    return tokens, real.bool(), inside.bool()


def padded_column(batch: TensorDictBase, key: NestedKey) -> Tensor:
    """(N, T, …) a column; ragged rows are filled up with 0 on the right."""
    if isinstance(batch, LazyStackedTensorDict):
        return batch.get(key, as_padded_tensor=True, padding_value=0)
    return batch.get(key)
