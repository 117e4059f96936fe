"""Where a pipeline finds what it accounts for and reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensordict import NestedKey

from headrace.transforms.entry import label_key
from headrace.transforms.options import nested_key
from headrace.transforms.schema import REWARD
from headrace.transforms.table import TokenCount

# Where a report looks for what it shows; the first key that the batch has.
KEYS: dict[str, tuple[NestedKey, ...]] = {
    "reward": (("next", "reward"), "reward"),
    "status": (("next", "status"), "status"),
    "policy_version": (("next", "policy_version"), "policy_version"),
    "expected_rollouts": ("expected_rollouts",),
    "advantage": ("advantage",),
    "importance_weight": ("importance_weight",),
    "loss_weight": ("loss_weight",),
    "prompt": ("prompt_text", ("text", "prompt"), ("history", "prompt"), "query"),
    "response": ("response_text", ("text", "response"), ("history", "response")),
    "ground_truth": ("ground_truth",),
    "other_columns": ("other_columns",),
    "group_label": ("group_label",),
    "rollout_label": ("rollout_label",),
    "logged_advantage": ("logged_advantage",),
}
# The option under which stages know what a report shows.
OPTIONS = {
    "reward": "reward_key",
    "status": "status_key",
    "policy_version": "version_key",
    "expected_rollouts": "expected_key",
    "advantage": "advantage_key",
    "importance_weight": "importance_key",
    "loss_weight": "weight_key",
}
TEXTS = ("prompt", "response", "ground_truth", "other_columns", "group_label", "rollout_label")
NUMBERS = ("reward", "status", "policy_version", "expected_rollouts", "logged_advantage")  # as collected


@dataclass(frozen=True)
class Keys:
    """Where a pipeline finds what it accounts for.

    Attributes:
        loss_mask: tokens in the loss.
        log_prob: of which what is not finite is out of the loss; None: not looked at.
        weight: loss weights.
        units: the ids of ``rollouts`` and ``groups``, as far as they are counted.
        found: where a report finds what it shows, by name; the first key that the batch has.
        reward_weights: by which several rewards become one.
    """

    loss_mask: NestedKey
    log_prob: NestedKey | None
    weight: NestedKey
    units: Mapping[str, NestedKey]
    found: Mapping[str, tuple[NestedKey, ...]]
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
            log_prob: where their log-probabilities are; None: not looked at.
            ids: of ``rollouts`` and ``groups``; None where they are not counted.
            report: where a report finds what goes by other names than the stages'.
        """
        stages = list(stages)
        named = keys_of_stages(stages)
        units = {unit: key for unit, key in ids.items() if key is not None}
        named |= {f"{unit.removesuffix('s')}_label": label_key(key) for unit, key in units.items()}
        comparing = [stage.group_key for stage in stages if hasattr(stage, "advantage_by_row")]
        if comparing and comparing[0] != units.get("groups"):
            named["peers"] = comparing[0]
        named |= {name: nested_key(key) for name, key in report.items()}
        found = KEYS | {name: (key,) for name, key in named.items()}
        weight = keys_of_stages(stages).get("loss_weight", "loss_weight")
        return cls(loss_mask, log_prob, weight, units, found, weights_of_stages(stages))

    def weight_is_written(self, stages: Mapping[str, Any]) -> bool:
        """Whether a stage declares that it writes the loss weights."""
        return any(self.weight in getattr(stage, "out_keys", ()) for stage in stages.values())

    @property
    def read_first(self) -> list[NestedKey]:
        """The columns that are noted as they come in."""
        return [*self.units.values(), *(key for name in NUMBERS for key in self.found[name])]


class Asked(NamedTuple):
    """The columns that stages and the report ask for, which are read at once."""

    columns: list[NestedKey]
    """Of a few numbers a row."""
    counts: list[TokenCount]
    """Of tokens."""
    ids: dict[NestedKey, str]
    """Columns of ids, and what messages call them."""

    @classmethod
    def of(cls, stages: Iterable[Any], keys: Keys) -> Asked:
        """What they ask for.

        Args:
            stages: in order, and the pipeline itself.
            keys: of the report.
        """
        parts = list(stages)
        parts += [part.criterion for part in parts if hasattr(part, "criterion")]
        names = ("loss_mask_key", "log_prob_key", "tokens_key", "length_key")
        tokens = {nested_key(getattr(part, name, None)) for part in parts for name in names}
        read = [key for part in parts for key in getattr(part, "in_keys", ())]
        counts = [TokenCount(keys.loss_mask, keys.log_prob)]
        counts += [TokenCount(*pair) for part in parts for pair in getattr(part, "tokens_counted", ())]
        named = {"rollout_key": "rollout_id", "group_key": "group_id"}
        ids = {nested_key(getattr(part, key, None)): name for part in parts for key, name in named.items()}
        ids.pop(None, None)
        written = {nested_key(key) for part in parts for key in getattr(part, "out_keys", ())}
        came = [key for key in (keys.found["advantage"][0], keys.weight) if key not in written]
        columns = [*keys.read_first, *came, *(key for key in read if key not in tokens)]
        return cls(list(dict.fromkeys(columns)), list(dict.fromkeys(counts)), ids)


def keys_of_stages(stages: Iterable[Any]) -> dict[str, NestedKey]:
    """The keys of what a report shows: of the first stage that writes it, else of the first that reads it."""
    stages, keys = [each for stage in stages for each in (stage, getattr(stage, "criterion", None))], {}
    for name, option in OPTIONS.items():
        using = [stage for stage in stages if getattr(stage, option, None) is not None]
        writing = [stage for stage in using if getattr(stage, option) in getattr(stage, "out_keys", ())]
        if using:
            keys[name] = nested_key(getattr((writing or using)[0], option))
    return keys


def weights_of_stages(stages: Iterable[Any]) -> Sequence[float] | None:
    """The weights by which several rewards become one, of the stage that writes the rollout's reward."""
    writing = (stage for stage in stages if REWARD in getattr(stage, "out_keys", ()))
    return next((stage.weights for stage in writing if getattr(stage, "weights", None) is not None), None)
