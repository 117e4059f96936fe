"""A stage of a pipeline: a transform, or any callable from batch to batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from headrace.transforms.table import BatchTransform

__all__ = ["StageError"]


class StageError(RuntimeError):
    """A stage raised an error other than BatchError; ``__cause__`` is that error."""


class CallableStage(nn.Module):
    """A stage made from a plain callable."""

    def __init__(self, function: Callable[[TensorDictBase], TensorDictBase]):
        super().__init__()
        self.function = function

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Call the function."""
        return self.function(batch)

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


def as_module(stage: Any) -> nn.Module:
    """Return a stage as a module, so that the pipeline's state_dict has its state.

    Raises:
        ValueError: a transform overrides ``forward`` or has hooks, which a pipeline would not call.
    """
    if isinstance(stage, BatchTransform):
        own = type(stage).forward is not BatchTransform.forward
        if own or stage._forward_hooks or stage._forward_pre_hooks:
            raise ValueError(
                "a pipeline calls a stage's `decide` or `apply`, never its `forward` or hooks. Move the code "
                f"of {type(stage).__name__}.forward, or of its hooks, into `apply` or into another stage"
            )
    return stage if isinstance(stage, nn.Module) else CallableStage(stage)
