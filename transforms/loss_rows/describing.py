"""Rows in the words of messages."""

from __future__ import annotations

from collections.abc import Callable

from tensordict import NestedKey, TensorDictBase

from headrace.transforms.schema import has_key, read_column


def describe_row(batch: TensorDictBase, rollout_key: NestedKey | None) -> Callable[[int], str]:
    """What describes a row by its number, and by its rollout where the batch says."""

    def describe(row: int) -> str:
        if rollout_key is None or not has_key(batch, rollout_key):
            return f"row {row}"
        rollouts = read_column(batch, rollout_key, reader="a message", option="rollout_key")
        return f"row {row} (rollout {int(rollouts[row])})"

    return describe
