"""What stays, goes or moves as one."""

from __future__ import annotations

from typing import Literal

from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from .base import BatchTransform, one_of
from .ids import as_ids

Unit = Literal["sample", "rollout", "group"]
UNITS = ("sample", "rollout", "group")


def unit_keys(unit: str, rollout_key: NestedKey, group_key: NestedKey) -> list[NestedKey]:
    """The columns that say which rows are one unit.

    Raises:
        ValueError: `unit` is none.
    """
    keys = {"sample": [], "rollout": [rollout_key], "group": [group_key]}
    return keys[one_of("unit", unit, UNITS)]


def unit_ids(stage: BatchTransform, unit: str, batch: TensorDictBase) -> Tensor | None:
    """(N,) int64, which rows are one unit, by the stage's `rollout_key` or `group_key`; None: each is one."""
    return None if unit == "sample" else as_ids(stage.column(batch, f"{unit}_key"), f"{unit}_id")
