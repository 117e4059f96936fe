"""A stage of a pipeline: a transform, or any callable from batch to batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from headrace.transforms.stages.shaping import TO_WRITE
from headrace.transforms.table import BatchTransform
from headrace.transforms.table.calls import accepts

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


class Stages(nn.ModuleDict):
    """The stages of a pipeline by name. They are fixed: a pipeline checks them at construction."""

    def __init__(self, stages: Mapping[str, Any]):
        super().__init__()
        for name, stage in stages.items():
            self.add_module(name, as_module(stage))

    def named(self) -> str:
        """The names of the stages, for a message."""
        return f"the stages are {', '.join(self)}"

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(f"no stage has the name {name!r}; {self.named()}")
        return super().__getitem__(name)

    def __setitem__(self, name: str, stage: nn.Module) -> None:
        raise ValueError(f"a pipeline's stages are fixed; cannot set {name!r}. {CONSTRUCT}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_modules", ()):
            self[name] = value
        super().__setattr__(name, value)

    def __delitem__(self, name: str) -> None:
        raise ValueError(f"a pipeline's stages are fixed; cannot remove {name!r}. {CONSTRUCT}")

    def clear(self) -> None:
        """Refuse to remove all stages."""
        raise ValueError(f"a pipeline's stages are fixed; cannot remove them. {CONSTRUCT}")


CONSTRUCT = (
    "Construct a new pipeline: load_pipeline(..., stages={...}, after={...}), where None removes a stage"
)


def check_callable(stage: Any) -> None:
    """Refuse a stage that cannot be called with a batch.

    Raises:
        ValueError: it is no callable, or a function that does not take one argument.
    """
    if not callable(stage):
        raise ValueError(f"a stage must be a transform or a callable; got {stage!r}")
    if not isinstance(stage, nn.Module) and not accepts(stage, "batch"):
        raise ValueError(
            "a function as a stage takes one argument, the batch, and returns it; this one takes "
            f"{inspect.signature(stage)}. If it changes rewards: {TO_WRITE}"
        )


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
