"""What a loss of TorchRL would make of rows, as far as it says what it reads."""

from __future__ import annotations

from collections.abc import Callable

from tensordict import LazyStackedTensorDict, TensorDictBase

from headrace.transforms import BatchError
from headrace.transforms.options import nested_key
from headrace.transforms.schema import has_key

SAMPLER, OLD, WEIGHTS = ("log_probs", "full"), ("old_log_probs", "full"), "importance_weight"


def check_loss(loss: Callable, rows: TensorDictBase) -> None:
    """Refuse rows that a loss would read wrongly.

    TorchRL's losses say in `tensor_keys` where they read, also within DDP and its like. Of other losses, and
    of columns that go by other names than the default, nothing is known here.

    Raises:
        BatchError: it corrects for the sampler a second time, or takes a token's advantage for another's.
    """
    while not hasattr(loss, "tensor_keys") and hasattr(loss, "module"):
        loss = loss.module
    keys = getattr(loss, "tensor_keys", None)
    _check_behaviour(nested_key(getattr(keys, "sample_log_prob", None)), rows)
    advantage = nested_key(getattr(keys, "advantage", None))
    if advantage is not None and isinstance(rows, LazyStackedTensorDict) and has_key(rows, advantage):
        _check_padding(type(loss).__name__, advantage, rows)


def _check_behaviour(key: object, rows: TensorDictBase) -> None:
    """An advantage that was weighed by π_old / μ is for a ratio π / π_old; most losses measure from μ."""
    if key == SAMPLER and has_key(rows, WEIGHTS) and has_key(rows, OLD):
        raise BatchError(
            f"the advantage is weighed by {WEIGHTS!r}, π_old / μ, and the loss measures its ratio from μ, "
            f"{SAMPLER!r}: the correction would count twice. Let it read π_old: "
            f"loss.set_keys(sample_log_prob={OLD!r})"
        )


def _check_padding(loss: str, key: object, rows: LazyStackedTensorDict) -> None:
    """GRPOLoss pads ragged log-probabilities on the left, and a ragged advantage on the right."""
    if len({row.get(key).shape for row in rows.tensordicts}) > 1:
        raise BatchError(
            f"an advantage by token, {key!r}, is of dense rows: of ragged ones {loss} pads it on the right "
            "and log-probabilities on the left, and each token would get another's. Put DenseRows in front "
            "(rows=llm), or optimise(..., transform=pack)"
        )
