"""A model that is a table of logits, and what a gradient of it says of each token."""

from __future__ import annotations

from collections.abc import Mapping
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
EXACT = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest coefficient: what no token explains


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


def token_weights(model: nn.Module, batch: TensorDictBase) -> Tensor:
    """The coefficient of each token's log-probability in minus the loss, after ``backward()``.

    A token n that follows p with the coefficient c has −∂L/∂table[p, k] = c (δ_kn − π(k | p)). An entry u
    that no token uses shows C = Σ c over the tokens that follow p: (∂L/∂table[p, u]) / π(u | p). So::

        c = π(n | p) C − ∂L/∂table[p, n]

    Whatever lies between the loss and the gradient is in it: padding, masks, packing, accumulation, ranks and
    mixed precision. An entropy bonus has no gradient where logits are equal.

    Args:
        model: a :class:`TokenTable`, or a module around one.
        batch: as :func:`xray_batch` makes it, with all rows of the step.

    Returns:
        (N, T) float64, 0 for tokens out of the loss mask. N × T as the batch is padded on the right where it
        is ragged.

    Raises:
        BatchError: a pair of tokens occurs twice; the gradient has parts that no token in the loss explains,
            with the first of them: a token out of the mask is in the loss, a shifted mask, a KL term to
            another policy.
        ValueError: there is no table; no gradient has reached it, it is 0 everywhere, or not finite.

    Example:
        >>> from headrace.pipeline import xray_batch
        >>> batch = xray_batch([1, 2], [0.0, 1.0], group_size=2, prompts=1)
        >>> model = TokenTable.of(batch)
        >>> log_probs = model.get_dist(batch).log_prob(batch["tokens", "full"])
        >>> (log_probs * torch.tensor([[0.0, 5, 0], [0, 7, 8]])).sum().neg().backward()
        >>> token_weights(model, batch).tolist()
        [[0.0, 5.0, 0.0], [0.0, 7.0, 8.0]]
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
    last = table.shape[0] - 1
    if bool((inside[:, :1]).any()):
        raise BatchError("the first token of a row follows no other, and is in the loss mask: add a prompt")
    codes, counts = (before * table.shape[0] + after)[pairs].unique(return_counts=True)
    if bool((counts > 1).any()) or bool((after[pairs] == last).any()):
        twice = [f"{int(c) // table.shape[0]} then {int(c) % table.shape[0]}" for c in codes[counts > 1]]
        raise BatchError(
            f"each pair of tokens occurs once, and token {last} never, as in xray_batch(); found "
            f"{listing(twice) or f'token {last}'}"
        )
    share = table.detach().double().softmax(-1)
    total = gradient[:, last] / share[:, last]
    coefficient = share * total[:, None] - gradient  # by pair; those that no token explains are to be 0
    found = torch.where(pairs, coefficient[before, after], 0.0)
    weights = torch.where(inside[:, 1:], found, 0.0)
    most = float(weights.abs().max())
    rest = coefficient.clone()
    rest[before[inside[:, 1:]], after[inside[:, 1:]]] = 0.0
    exact = EXACT.get(table.dtype, 0.05)
    if float(rest.abs().max()) > exact * max(most, float(coefficient.abs().max())):
        raise BatchError(_unexplained(rest, before, after, pairs, most))
    return torch.nn.functional.pad(weights, (1, 0))


def _unexplained(rest: Tensor, before: Tensor, after: Tensor, pairs: Tensor, most: float) -> str:
    code = int(rest.abs().argmax())
    first, second = divmod(code, rest.shape[0])
    size = f"{float(rest[first, second]):.3g}, where the largest coefficient in the mask is {most:.3g}"
    rows = (pairs & (before == first) & (after == second)).nonzero()
    if len(rows):
        row, place = rows[0].tolist()
        return (
            f"the gradient has parts that no token in the loss mask explains: token {place + 1} of row {row} "
            f"is out of the mask and has a coefficient of {size}. Is the mask shifted by one, or is the loss "
            "taken over prompts?"
        )
    return (
        f"the gradient has parts that no token explains: {size}, for token {second} after {first}, which "
        "does not occur. A KL term to another policy has such a gradient, padding in the loss, or dropout"
    )


def table_of(model: nn.Module) -> TokenTable:
    """The table in a module.

    Raises:
        ValueError: there is none, or more than one.
    """
    tables = [module for module in model.modules() if isinstance(module, TokenTable)]
    if len(tables) != 1:
        raise ValueError(f"the model is a TokenTable, or has one in it; found {len(tables)} in {type(model)}")
    return tables[0]


def tokens_of(batch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
    """(N, T) each: the tokens, which of them are no padding, and which are in the loss mask."""
    if isinstance(batch, LazyStackedTensorDict):
        fill: Mapping[str, Any] = {"as_padded_tensor": True, "padding_value": 0}
        tokens, real, inside = (batch.get(key, **fill) for key in (TOKENS, REAL, LOSS))
    else:
        tokens, real, inside = (batch.get(key) for key in (TOKENS, REAL, LOSS))
    return tokens, real.bool(), inside.bool()
