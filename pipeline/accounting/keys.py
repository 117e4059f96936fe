"""Where a pipeline finds what it accounts for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import NestedKey
from torch import nn

from headrace.transforms.door import label_key

from .row_table import keys_of_stages, weights_of_stages


@dataclass(frozen=True)
class Keys:
    """Where a pipeline finds what it accounts for."""

    loss_mask: NestedKey
    log_prob: NestedKey | None
    weight: NestedKey
    units: Mapping[str, NestedKey]
    report: Mapping[str, NestedKey]
    reward_weights: Sequence[float] | None

    @classmethod
    def of(
        cls,
        stages: Iterable[Any],
        loss_mask: NestedKey,
        log_prob: NestedKey | None,
        ids: Mapping[str, NestedKey | None],
        report: Mapping[str, NestedKey],
    ) -> Keys:
        """The keys of stages.

        Args:
            stages: in order.
            loss_mask: where tokens in the loss are.
            log_prob: where those are of which what is not finite is out of the loss; None: not looked at.
            ids: of ``rollouts`` and ``groups``; None where they are not counted.
            report: where a report finds what goes by other names than the stages'.
        """
        stages = list(stages)
        reported = keys_of_stages(stages)
        units = {unit: key for unit, key in ids.items() if key is not None}
        reported |= {f"{unit.removesuffix('s')}_label": label_key(key) for unit, key in units.items()}
        comparing = [stage.group_key for stage in stages if getattr(stage, "compares", False)]
        if comparing and comparing[0] != units.get("groups"):
            reported["peers"] = comparing[0]
        weight = reported.get("loss_weight", "loss_weight")
        return cls(loss_mask, log_prob, weight, units, reported | dict(report), weights_of_stages(stages))

    def weight_is_written(self, stages: Mapping[str, nn.Module]) -> bool:
        """Whether a stage declares that it writes the loss weights."""
        return any(self.weight in getattr(stage, "out_keys", ()) for stage in stages.values())
