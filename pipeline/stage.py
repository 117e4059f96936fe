"""A stage of a pipeline: anything that takes a batch and returns one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from headrace.transforms.errors import BatchError
from headrace.transforms.stage import BatchTransform


class StageError(RuntimeError):
    """A stage failed otherwise than by refusing its data; ``__cause__`` is what it raised."""


class CallableStage(nn.Module):
    """A plain callable as a stage."""

    def __init__(self, function: Callable[[TensorDictBase], TensorDictBase]):
        super().__init__()
        self.function = function

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Call it."""
        return self.function(batch)

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


def with_stage(name: str, stage: nn.Module, error: Exception) -> Exception:
    """The error of a stage, with the stage's name and options: of its own class if it refused its data."""
    kind = type(error) if isinstance(error, BatchError) else StageError
    return kind(f"stage {name!r}, {stage!r}: {error}")


def as_module(stage: Any) -> nn.Module:
    """A stage as a module, so that its state is the pipeline's.

    Raises:
        ValueError: a transform with a ``forward`` or hooks of its own, which a pipeline would pass over.
    """
    if isinstance(stage, BatchTransform):
        own = type(stage).forward is not BatchTransform.forward
        if own or stage._forward_hooks or stage._forward_pre_hooks:
            raise ValueError(
                f"a pipeline calls a stage's `decide` or `apply`, and not its `forward`: put what "
                f"{type(stage).__name__} adds to forward, or its hooks do, there or into a stage of its own"
            )
    return stage if isinstance(stage, nn.Module) else CallableStage(stage)
