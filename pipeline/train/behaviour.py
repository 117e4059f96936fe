"""From which policy a loss measures its ratio, where importance weights were taken from another."""

from __future__ import annotations

from collections.abc import Callable

from tensordict import TensorDictBase

from headrace.transforms import BatchError
from headrace.transforms.options import nested_key
from headrace.transforms.schema import has_key

SAMPLER, OLD, WEIGHTS = ("log_probs", "full"), ("old_log_probs", "full"), "importance_weight"


def check_behaviour(loss: Callable, minibatch: TensorDictBase) -> None:
    """Refuse a loss that corrects for the sampler a second time.

    An advantage that RolloutCorrection has weighed by π_old / μ is for a ratio π / π_old. TorchRL's losses
    say where they read its denominator, in `tensor_keys`, and by default that is μ. Of other losses, and of
    columns that go by other names than the default, nothing is known here.

    Raises:
        BatchError: the loss reads μ, and the rows carry importance weights and π_old.
    """
    key = getattr(getattr(loss, "tensor_keys", None), "sample_log_prob", None)
    if nested_key(key) == SAMPLER and has_key(minibatch, WEIGHTS) and has_key(minibatch, OLD):
        raise BatchError(
            f"the advantage is weighed by {WEIGHTS!r}, π_old / μ, and the loss measures its ratio from μ, "
            f"{SAMPLER!r}: the correction would count twice. Let it read π_old: "
            f"loss.set_keys(sample_log_prob={OLD!r})"
        )
